# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The one module, outside the kernels, that touches JAX internals; tested on JAX 0.11.2 and 0.12.

Everything here is small and named for what it means to the compiler, so that a change in JAX is mended
in one place. `tpjax.pallas._mgpu` is its counterpart for kernels.
"""

import os
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax
from jax._src import core as _core
from jax._src import source_info_util as _source
from jax.extend import core as jex

Jaxpr = jex.Jaxpr
Literal = jex.Literal
Var = jex.Var
Equation = jex.JaxprEqn


def hide_frames(folder: str) -> None:
    """Makes `source_of` and JAX's own error messages skip frames of files under `folder`."""
    _source.register_exclusion(folder)


def _summary(info: Any) -> str:
    frame = _source.user_frame(info.traceback)
    if frame is None:
        return "unknown"
    path = os.path.relpath(frame.file_name)
    return f"{frame.file_name if path.startswith('..') else path}:{frame.start_line}"


def source_of(eqn: Equation) -> str:
    """Returns "file:line" of the user's code that made the equation, or "unknown"."""
    return _summary(eqn.source_info)


def current_source() -> str:
    """Returns "file:line" of the user's code being traced now, or "unknown"."""
    return _summary(_source.current())


@contextmanager
def as_written_at(eqn: Equation):
    """Traces what stands in the block as if it were written where `eqn` was, in its contexts."""
    stack = _source.current_name_stack() + eqn.source_info.name_stack
    with _source.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
        yield


def bind(eqn: Equation, *invals: Any) -> list[Any]:
    """Evaluates the equation on values, keeping its source, name stack and contexts."""
    params = eqn.primitive.get_bind_params(eqn.params)
    with as_written_at(eqn):
        out = eqn.primitive.bind(*invals, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def check(jaxpr: Jaxpr) -> None:
    """Raises `jax.extend.core.JaxprTypeError` when the jaxpr is not well typed."""
    _core.check_jaxpr(jaxpr)


def is_tracer(x: Any) -> bool:
    """Returns whether `x` is a value of an enclosing trace."""
    return isinstance(x, _core.Tracer)


def is_key(aval: Any) -> bool:
    """Returns whether the aval is of PRNG keys (or another dtype that NumPy does not have)."""
    return jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended)  # pyright: ignore


SUBJAXPRS: dict[str, tuple[str, ...]] = {
    "jit": ("jaxpr",),
    "pjit": ("jaxpr",),
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
    "remat2": ("jaxpr",),
    "checkpoint": ("jaxpr",),
    "shard_map": ("jaxpr",),
}
"""Primitives whose bodies a rewrite may enter, and the parameters that hold them; others are opaque."""


def subjaxprs(eqn: Equation) -> list[Jaxpr]:
    """Returns the bodies of an equation that a rewrite may enter, in a fixed order."""
    found: list[Jaxpr] = []
    for name in SUBJAXPRS.get(eqn.primitive.name, ()):
        value = eqn.params[name]
        found.extend(value if isinstance(value, tuple | list) else (value,))
    return found


def with_subjaxprs(eqn: Equation, bodies: list[Jaxpr]) -> Equation:
    """Returns the equation with other bodies, given in the order of `subjaxprs`."""
    rest, params = list(bodies), dict(eqn.params)
    for name in SUBJAXPRS[eqn.primitive.name]:
        value = params[name]
        if isinstance(value, tuple | list):
            params[name] = type(value)(rest[: len(value)])
            rest = rest[len(value) :]
        else:
            params[name] = rest.pop(0)
    return eqn.replace(params=params)


def is_plain_jit(eqn: Equation) -> bool:
    """Returns whether the equation is a jit that carries no donation, sharding or compiler option."""
    if eqn.primitive.name not in ("jit", "pjit"):
        return False
    params = eqn.params
    placed = (*params["in_shardings"], *params["out_shardings"])
    laid_out = (*params["in_layouts"], *params["out_layouts"])
    return (
        all(type(s).__name__ == "UnspecifiedValue" for s in placed)
        and all(x is None for x in laid_out)
        and not any(params["donated_invars"])
        and not params["compiler_options_kvs"]
    )


def is_small_helper(eqn: Equation, max_equations: int) -> bool:
    """Returns whether the equation is a plain jit of few equations and no control flow."""
    if not is_plain_jit(eqn):
        return False
    stack, count = [eqn], 0
    while stack:
        for body in subjaxprs(stack.pop()):
            count += len(body.eqns)
            if count > max_equations or body.effects:
                return False
            inner = [e for e in body.eqns if e.primitive.name in SUBJAXPRS]
            if not all(is_plain_jit(e) for e in inner):
                return False
            stack.extend(inner)
    return True


def retrace(fn: Any, like: Jaxpr) -> Jaxpr:
    """Traces `fn` to a jaxpr with the inputs of `like`: shapes, dtypes, weak types and shardings."""
    return jax.make_jaxpr(fn)(*like.in_avals)


def count_equations(jaxpr: Jaxpr) -> int:
    """Returns the number of equations, those of bodies that a rewrite may enter included."""
    count, stack = 0, [jaxpr]
    while stack:
        body = stack.pop()
        count += len(body.eqns)
        for eqn in body.eqns:
            stack.extend(subjaxprs(eqn))
    return count
