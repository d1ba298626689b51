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
    return isinstance(x, jax.core.Tracer)
