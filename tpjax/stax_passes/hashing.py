# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""What equal equations have in common, as a key to look them up by."""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from tpjax.core import _jax

_known: ContextVar[dict[int, tuple[_jax.Equation, Hashable | None]] | None] = ContextVar(
    "tpjax_signatures", default=None
)
"""By id, the equations and their signatures: most stay from one pass to the next."""


@contextmanager
def remembered() -> Iterator[None]:
    """Makes signatures once for all passes that run in the block."""
    token = _known.set({})
    try:
        yield
    finally:
        _known.reset(token)


def signature(eqn: _jax.Equation) -> Hashable | None:
    """Returns what an equation is, besides which values it reads and makes.

    Its primitive, contexts, parameters and the types of its results. None: a parameter cannot be
    hashed.
    """
    known = _known.get()
    if known is None:
        return _signature(eqn)
    if id(eqn) not in known:
        known[id(eqn)] = eqn, _signature(eqn)
    return known[id(eqn)][1]


def _signature(eqn: _jax.Equation) -> Hashable | None:
    try:
        params = tuple((name, _exact(eqn.params[name])) for name in sorted(eqn.params))
        key = eqn.primitive, eqn.ctx, params, tuple(var.aval for var in eqn.outvars)
        hash(key)
    except TypeError:
        return None
    return key


def literal_key(atom: Any) -> Hashable | None:
    """Returns the type and bits of a literal; None if it has none that are known."""
    if _jax.is_tracer(atom.val) or not _jax.is_array(atom.aval):
        return None
    return atom.aval, np.asarray(atom.val, _jax.array_type(atom).dtype).tobytes()


def _exact(value: Any) -> Hashable:
    """Returns the parameter with its type, so that True is not 1 and -0.0 is not 0.0."""
    kind = type(value)
    if kind is tuple:  # a shape, most often
        plain = all(type(one) is int for one in value)
        return value if plain else tuple(map(_exact, value))
    if isinstance(value, float):
        return float, repr(value)
    if isinstance(value, tuple):
        return tuple(map(_exact, value))
    return kind, value
