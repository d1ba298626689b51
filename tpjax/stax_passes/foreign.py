# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Passes and rules of other people, told by name and code, as another process would tell them."""

import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from tpjax.core.fingerprints import UnstableError
from tpjax.core.store import key_of
from tpjax.stax_passes.engine import rows_of
from tpjax.stax_passes.rules import Row
from tpjax.stax_passes.unify import Rule

MAX_DEPTH = 20
"""Functions in closures of functions in closures."""


def described(run: Callable[..., Any]) -> str:
    """Returns a digest of a pass: its name, its rows or its code, and what that closes over.

    Raises:
      UnstableError: it has no code that can be read, or closes over what has no stable value.
    """
    rows = rows_of(run)
    parts = [_spelt(row, 0) for row in rows] if rows else [_spelt(run, 0)]
    return key_of(parts)


def _spelt(x: Any, depth: int) -> str:
    """Returns a value in words that are the same in every process."""
    if depth > MAX_DEPTH:
        raise UnstableError(f"functions nest more than {MAX_DEPTH} deep")
    if x is None or isinstance(x, bool | int | float | complex | str | bytes):
        return repr(x)
    if isinstance(x, types.ModuleType):
        return x.__name__
    if isinstance(x, type | np.dtype):
        return str(x)
    if isinstance(x, np.ndarray | np.generic | jax.Array):
        return f"{x.dtype}{x.shape}{np.asarray(x).tobytes().hex()}"
    if isinstance(x, tuple | list):
        return f"{type(x).__name__}({','.join(_spelt(one, depth + 1) for one in x)})"
    if isinstance(x, set | frozenset):
        return f"set({sorted(_spelt(one, depth + 1) for one in x)})"
    if isinstance(x, dict):
        return f"dict({[(_spelt(k, depth + 1), _spelt(v, depth + 1)) for k, v in x.items()]})"
    if isinstance(x, types.CodeType):
        held = _spelt(x.co_consts, depth + 1)
        return f"code({x.co_code.hex()},{x.co_names},{x.co_varnames},{x.co_freevars},{held})"
    return _spelt_function(x, depth)


def _spelt_function(x: Any, depth: int) -> str:
    """Returns a function by its code and all that it holds; a row by its functions."""
    if isinstance(x, Row):
        functions = [x.pattern, x.replacement] if isinstance(x, Rule) else [x.extract]
        return f"row({x.name!r},{x.tier!r},{_spelt(functions, depth + 1)})"
    inner = getattr(x, "__wrapped__", None)
    code = getattr(x, "__code__", None)
    if code is None and inner is not None:
        return f"{type(x).__qualname__}({_spelt(inner, depth + 1)})"
    if code is None and hasattr(x, "func") and hasattr(x, "keywords"):
        return f"partial({_spelt([x.func, x.args, x.keywords], depth + 1)})"
    if code is None:
        name = getattr(x, "__qualname__", None)
        if callable(x) and name and getattr(x, "__module__", None):
            return f"{x.__module__}.{name}"  # a builtin
        raise UnstableError(f"{x!r:.60} ({type(x).__name__}) has no code that tells what it does")
    cells = [_cell(cell) for cell in x.__closure__ or ()]
    held = [code, x.__defaults__, x.__kwdefaults__, cells, _global_values(x)]
    return f"{x.__module__}.{x.__qualname__}({_spelt(held, depth + 1)})"


def _global_values(x: Any) -> dict[str, Any]:
    """Returns the numbers, words and arrays that the function reads by global names."""
    kinds = bool | int | float | complex | str | bytes | tuple | np.ndarray | jax.Array
    named = {name: x.__globals__.get(name) for name in x.__code__.co_names}
    return {name: value for name, value in named.items() if isinstance(value, kinds)}


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
