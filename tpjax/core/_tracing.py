# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The third module that touches JAX internals: tracers, and what Python code asks of them.

`tpjax.core._jax` has the jaxprs, `tpjax.pallas._mgpu` the kernels.
"""

import functools
from collections.abc import Callable
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from jax._src import array as _array
from jax._src import core as _core
from jax._src import pjit as _pjit


def current_trace() -> Any:
    """Returns the trace that records equations now."""
    return _core.trace_ctx.trace


def traced_by(x: Any, trace: Any) -> Any:
    """Returns the tracer of `trace` that has the value of `x`, or None.

    Under differentiation `x` may be a pair of a primal value and a tangent.
    """
    while isinstance(x, _core.Tracer):
        if getattr(x, "_trace", None) is trace:
            return x
        x = getattr(x, "primal", None)
    return None


_Ask = Callable[[Any, str], "tuple[Any] | None"]
_ask: ContextVar[_Ask | None] = ContextVar("tpjax_ask", default=None)
_tell: ContextVar[Callable[[Any], None] | None] = ContextVar("tpjax_tell", default=None)
_CONVERSIONS = ("__bool__", "__int__", "__index__", "__float__", "__complex__", "tolist")


@functools.cache
def _listen() -> None:
    """Puts the two callbacks in JAX's way, once: JAX has no other place to hear of these events.

    Where no callback is set, and where it has no answer, JAX's own methods run as before.
    """

    def conversion(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(self: Any, *args: Any) -> Any:
            ask = _ask.get()
            answer = None if ask is None or args else ask(self, name)
            return original(self, *args) if answer is None else answer[0]

        return method

    for name in _CONVERSIONS:
        setattr(_core.Tracer, name, conversion(name, getattr(_core.Tracer, name)))
    item = _core.ShapedArray.item.fun  # pyright: ignore[reportAttributeAccessIssue]
    _core.ShapedArray.item = _core.aval_method(  # pyright: ignore[reportAttributeAccessIssue]
        conversion("item", item)
    )
    value = _array.ArrayImpl._value

    @property
    @functools.wraps(value.fget)
    def told(self: Any) -> Any:
        tell = _tell.get()
        if tell is not None:
            tell(self)
        return value.fget(self)

    _array.ArrayImpl._value = told  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def values_asked_of(ask: _Ask):
    """Calls `ask(tracer, method)` inside the block where Python wants the value of a tracer.

    It returns the value in a tuple, or None where JAX's own error must come. This thread only.
    """
    _listen()
    token = _ask.set(ask)
    try:
        yield
    finally:
        _ask.reset(token)


@contextmanager
def reads_told_to(tell: Callable[[Any], None]):
    """Calls `tell(array)` inside the block where Python reads the numbers of an array."""
    _listen()
    token = _tell.set(tell)
    try:
        yield
    finally:
        _tell.reset(token)


class JitOptions(NamedTuple):
    """What a jitted function was made with that an outer jit must be made with too."""

    static_argnums: tuple[int, ...]
    static_argnames: tuple[str, ...]
    compiler_options: dict[str, Any]


def unjitted(fn: Any) -> Any:
    """Returns the function inside what `jax.jit` returned; any other as it is."""
    return fn.__wrapped__ if hasattr(fn, "_jit_info") else fn


def under_another_jit(fn: Any) -> tuple[Any, JitOptions | None]:
    """Returns what to trace of a jitted function, and its options; None for any other function.

    It is traced anew at each call, since JAX's cache does not know the function's free values. JAX
    takes compiler options at the outermost jit alone, so they are left out.
    """
    if not hasattr(fn, "_jit_info"):
        return fn, None
    info = fn._jit_info

    @functools.wraps(fn)
    def anew(*args: Any, **kwargs: Any) -> Any:
        inner = functools.wraps(fn.__wrapped__)(lambda *a, **k: fn.__wrapped__(*a, **k))
        return _pjit._cpp_pjit(inner, info._replace(compiler_options_kvs=()))(*args, **kwargs)

    options = dict(info.compiler_options_kvs)
    return anew, JitOptions(info.static_argnums, info.static_argnames, options)
