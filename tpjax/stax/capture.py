# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Captures a call as a jaxpr, with the way back from its results to what the call returns."""

import functools
import linecache
import os
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from tpjax.core import _jax

_LIBRARIES = tuple(str(Path(m).parent) + os.sep for m in (jax.__file__,))
_OURS = tuple(
    str(Path(__file__).parent.parent / room) + os.sep
    for room in ("stax", "stax_passes", "pallas", "core")
)
for _folder in _OURS:
    _jax.hide_frames(_folder)


class CaptureError(TypeError):
    """A function asked for the value of an array while it was being traced."""


@dataclass(frozen=True)
class Capture:
    """A call as a jaxpr, its inputs for this call, and the way back.

    `finish` turns the jaxpr's results into what the call returns, and carries out what the call did
    to the modules it was given.
    """

    jaxpr: _jax.Jaxpr
    leaves: list[Any]
    finish: Callable[[list[Any]], Any]


def capture_call(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Capture:
    """Traces `fn(*args, **kwargs)`, whose arguments are pytrees of arrays, numbers or shapes.

    Raises:
      CaptureError: the function asked for the value of a traced array.
    """
    out_trees: list[Any] = []

    @functools.wraps(fn, updated=())
    def flat(*args: Any, **kwargs: Any) -> list[Any]:
        leaves, tree = jax.tree.flatten(fn(*args, **kwargs))
        out_trees.append(tree)
        return leaves

    jaxpr = trace(flat, args, kwargs)
    finish = functools.partial(jax.tree.unflatten, out_trees[-1])
    return Capture(jaxpr, jax.tree.leaves((args, dict(kwargs))), finish)


def trace(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _jax.Jaxpr:
    """Returns the jaxpr of the call; a wish for an array's value becomes a `CaptureError`."""
    try:
        return jax.make_jaxpr(fn)(*args, **kwargs)
    except (
        jax.errors.ConcretizationTypeError,
        jax.errors.TracerArrayConversionError,
        jax.errors.TracerIntegerConversionError,
        jax.errors.NonConcreteBooleanIndexError,
    ) as error:
        raise CaptureError(_explain(fn, error)) from error


def donated_inputs(jaxpr: _jax.Jaxpr) -> list[bool]:
    """Returns which inputs are donated by a jit that is all there is in the jaxpr."""
    nothing = [False] * len(jaxpr.invars)
    if len(jaxpr.eqns) != 1 or "donated_invars" not in jaxpr.eqns[0].params:
        return nothing
    eqn = jaxpr.eqns[0]
    pairs = zip(eqn.invars, eqn.params["donated_invars"], strict=True)
    given = {var for var, donated in pairs if donated and isinstance(var, _jax.Var)}
    return [var in given for var in jaxpr.invars]


def evaluate(jaxpr: _jax.Jaxpr, leaves: list[Any]) -> list[Any]:
    """Runs the jaxpr's equations on the leaves, under whatever trace is on."""
    return list(jaxpr_as_fun(jaxpr)(*leaves))


_REASONS: tuple[tuple[type[Exception], str, str], ...] = (
    (
        jax.errors.TracerBoolConversionError,
        "a branch asks whether an array is true, and its value is not known while tracing",
        "Use jax.lax.cond or jnp.where for a choice that depends on data, jax.lax.while_loop for a "
        "loop; an argument that is a Python flag can be named in static_argnames.",
    ),
    (
        jax.errors.TracerIntegerConversionError,
        "a Python integer is made from an array, and its value is not known while tracing",
        "Use jax.lax.dynamic_slice or jnp.take for an index that depends on data; an argument that "
        "is a Python number can be named in static_argnames.",
    ),
    (
        jax.errors.TracerArrayConversionError,
        "a NumPy array is made from a traced array, whose value is not known while tracing",
        "Use jax.numpy in place of numpy there, or jax.pure_callback for code that needs values.",
    ),
    (
        jax.errors.NonConcreteBooleanIndexError,
        "an array is indexed by a mask, so the size of the result depends on data",
        "Use jnp.where with three arguments, which keeps the size.",
    ),
    (
        Exception,
        "the value of an array is needed, and it is not known while tracing",
        "Compute with jax.numpy and jax.lax all the way; an argument that is a Python value can be "
        "named in static_argnames.",
    ),
)


def _explain(fn: Callable[..., Any], error: Exception) -> str:
    what, remedy = next((w, r) for kind, w, r in _REASONS if isinstance(error, kind))
    name = getattr(fn, "__qualname__", type(fn).__name__)
    file, line, text = _user_line(error)
    return f'compile: {name} cannot be captured: {what} ({file}:{line}: "{text}"). {remedy}'


def _user_line(error: Exception) -> tuple[str, int, str]:
    """Returns file, line and text of the innermost frame that is the user's."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not f.filename.startswith(_LIBRARIES + _OURS)]
    own = [f for f in theirs if f"{os.sep}site-packages{os.sep}" not in f.filename]
    best = (own or theirs or list(frames))[-1]
    line = best.lineno or 0
    return best.filename, line, linecache.getline(best.filename, line).strip()
