# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""`tpjax.compile`: a function whose jaxpr is rewritten before JAX differentiates or compiles it.

Called outside every JAX transformation, a compiled function is one `jax.jit` whose trace captures
the function and rewrites it: the cache, and the speed of a call that hits it, are jit's own. Called
inside a transformation it is no jit: its rewritten equations go into the caller's trace, so the
kernels' own gradients apply and nothing stands between them and the caller's compiler.
"""

import functools
import inspect
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from types import MethodType
from typing import Any, Unpack, overload

import jax

from tpjax.core import _jax
from tpjax.pallas.dispatch import record_choices
from tpjax.stax import modules
from tpjax.stax.capture import Capture, capture, evaluate
from tpjax.stax.explanation import Explanation, StrictError, demand_kernels
from tpjax.stax.options import EXACT, CompileOptions, describe, resolve
from tpjax.stax.static import Static, static_of
from tpjax.stax_passes.pipeline import CLEAN_UP, PASSES, optimize
from tpjax.stax_passes.report import Report

MAX_ENTRIES = 256
"""Rewritten jaxprs that one compiled function keeps; the least recently traced goes first."""

_retrace = jax.make_user_context(0)
_retrace_count = itertools.count(1)
_nested: ContextVar[list[tuple[Report, ...]] | None] = ContextVar("tpjax_nested", default=None)


class _SawModuleError(Exception):
    """Tracing met a module: this call needs the road that writes state back."""


class _Program:
    """A function, its options and its cache: what the views bound to different objects share."""

    def __init__(self, fn: Callable[..., Any], options: Mapping[str, Any], bound: int) -> None:
        self.fn = fn
        self.given, self.bound = dict(options), bound
        self.options = options = resolve(options)
        nums, names = options["static_argnums"], options["static_argnames"]
        self.static: Static = static_of(fn, nums, names, bound)
        self.name = options["name"] or getattr(fn, "__name__", type(fn).__name__)
        self.takes_modules = False
        self.lock = threading.RLock()
        self.entries: OrderedDict[Any, tuple[_jax.Jaxpr, Callable[[list[Any]], Any]]] = (
            OrderedDict()
        )
        self._jits: dict[str, Any] = {}

    def passes(self) -> Any:
        """Returns the passes that the options ask for."""
        if self.options["passes"] is not None:
            return self.options["passes"]
        return (CLEAN_UP,) if self.options["mode"] == EXACT else PASSES

    def captured(self, args: tuple[Any, ...], kwargs: Any) -> AbstractContextManager[Capture]:
        """Returns the call as a jaxpr, in a block in which its `finish` may be called."""
        fn, args, kwargs = self.static.close(self.fn, args, kwargs)
        if modules.any_module((args, kwargs)):
            return modules.captured(fn, args, kwargs)
        return nullcontext(capture(fn, args, kwargs))

    def rewrite(self, jaxpr: _jax.Jaxpr) -> tuple[_jax.Jaxpr, tuple[Report, ...]]:
        """Returns the jaxpr rewritten, and the reports; `strict` raises what others warn of."""
        strict = self.options["strict"]
        try:
            result = optimize(jaxpr, self.passes(), verify=self.options["verify"] or strict)
        except RuntimeError as error:
            raise StrictError(f"compile: {self.name}: {error}") if strict else error from error
        if strict:
            demand_kernels(self.name, result[1])
        return result

    def inline(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs the rewritten equations under whatever trace is on."""
        with self.captured(args, kwargs) as call:
            jaxpr, reports = self.rewrite(call.jaxpr)
            nested = _nested.get()
            if nested is not None:
                nested.append(reports)
            return call.finish(evaluate(jaxpr, call.leaves))

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs the call outside every transformation."""
        if not self.takes_modules:
            try:
                return self.jit(False)(*args, **kwargs)
            except _SawModuleError:
                pass
            except (TypeError, ValueError):
                # A module need not be a pytree that jit can take.
                if not modules.any_module((args, kwargs)):
                    raise
            self.takes_modules = True
        return self.jit(True)(*args, **kwargs)

    def jit(self, with_modules: bool) -> Any:
        """Returns the jit of its own: JAX's, or the one of Flax that takes modules."""
        key = "nnx" if with_modules else "jax"
        with self.lock:
            if key not in self._jits:
                inner = self._trace_modules if with_modules else self._trace_arrays

                @functools.wraps(self.fn, updated=())
                def traced(*args: Any, **kwargs: Any) -> Any:
                    return inner(args, kwargs)

                traced.__name__ = self.name
                static = {
                    "static_argnums": self.static.argnums,
                    "static_argnames": self.static.argnames,
                }
                make = modules.jit if with_modules else jax.jit
                self._jits[key] = make(traced, **static)
        return self._jits[key]

    def _trace_modules(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with self.lock:
            return self.inline(args, kwargs)

    def _trace_arrays(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs while jit traces: captures and rewrites, once a signature for all threads."""
        if modules.any_module((args, kwargs)):
            raise _SawModuleError
        _, rest, named = self.static.close(self.fn, args, kwargs)
        leaves, tree = jax.tree.flatten((rest, named))
        avals = tuple(jax.typeof(x) for x in leaves)
        key = tree, avals, self.static.key(args, kwargs), _jax.trace_context()
        with self.lock:
            if key not in self.entries:
                with self.captured(args, kwargs) as call:
                    jaxpr, _ = self.rewrite(call.jaxpr)
                    self.entries[key] = jaxpr, call.finish
                if len(self.entries) > MAX_ENTRIES:
                    self.entries.popitem(last=False)
            self.entries.move_to_end(key)
            jaxpr, finish = self.entries[key]
        return finish(evaluate(jaxpr, leaves))

    def clear(self) -> None:
        """Forgets every entry."""
        with self.lock:
            self.entries.clear()
            self._jits.clear()


class Compiled:
    """What `tpjax.compile` returns: call it like the function it was made from."""

    def __init__(self, program: _Program, bound: tuple[Any, ...] = ()) -> None:
        functools.update_wrapper(self, program.fn, updated=())
        self.__name__ = program.name
        self._program = program
        self._bound = bound

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the compiled function."""
        if self._bound:
            args = (*self._bound, *args)
        if _jax.at_top_level():
            return self._program.call(args, kwargs)
        return self._program.inline(args, kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Binds the function, as a method of a class, to the object."""
        return self if instance is None else Compiled(self._program, (*self._bound, instance))

    def jaxpr(self, *args: Any, **kwargs: Any) -> _jax.Jaxpr:
        """Returns the rewritten jaxpr of the call; shapes (`jax.ShapeDtypeStruct`) will do."""
        with _fresh_traces(), self._program.captured((*self._bound, *args), kwargs) as call:
            return self._program.rewrite(call.jaxpr)[0]

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the call lowered for the compiler, as `jax.jit(fn).lower` does."""
        args = (*self._bound, *args)
        return self._program.jit(modules.any_module((args, kwargs))).lower(*args, **kwargs)

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """Returns what was rewritten in this call, which kernels run, and why others do not.

        The call is traced anew but not run; shapes (`jax.ShapeDtypeStruct`) will do as arguments.
        """
        reports: list[tuple[Report, ...]] = []
        token = _nested.set(reports)
        try:
            captured = self._program.captured
            with (
                _fresh_traces(),
                record_choices() as choices,
                captured((*self._bound, *args), kwargs) as call,
            ):
                direct = tuple(choices)
                result, own = optimize(call.jaxpr, self._program.passes())
        finally:
            _nested.reset(token)
        return Explanation.of(self._program.name, call.jaxpr, result, own, tuple(reports), direct)

    def clear(self) -> None:
        """Forgets every compiled entry; the next call traces and compiles anew."""
        self._program.clear()

    def __repr__(self) -> str:
        return f"<tpjax.compile({self.__name__})>"

    def __reduce__(self) -> Any:
        raise TypeError(
            f"compile: {self.__name__} is compiled for this process and cannot be pickled or "
            "copied. Pickle the function it was made from, and compile that where it is loaded."
        )


@contextmanager
def _fresh_traces() -> Iterator[None]:
    """Hides JAX's caches of traces, so that everything inside is traced and chosen again."""
    with _retrace(next(_retrace_count)):
        yield


@overload
def compile(fn: Callable[..., Any], **options: Unpack[CompileOptions]) -> Compiled: ...
@overload
def compile(
    fn: None = None, **options: Unpack[CompileOptions]
) -> Callable[[Callable[..., Any]], Compiled]: ...
def compile(fn: Any = None, **options: Any) -> Any:
    """Returns `fn` with its attention, norms and other known operators running in kernels.

    Works as a decorator too, with options or without. The rewrite is made before JAX differentiates
    or compiles, so the result composes with `jit`, `grad`, `vmap`, `scan`, `checkpoint` and
    `shard_map`, and calls other compiled functions; `fn.explain(*args)` says what was done. An
    eager `jax.grad(fn)` runs equation by equation, as JAX does; put it under `jax.jit`.

    Args:
      fn: a function over pytrees of arrays, with Flax NNX modules anywhere among its arguments; an
        NNX module or a method of one; or a function that calls Linen's `apply`. None: returns a
        decorator.

    Options:
    {options}

    Returns:
      A `Compiled`: a callable with `explain`, `jaxpr`, `lower` and `clear`.

    Raises:
      TypeError: `fn` cannot be called, or an option is unknown.
      ValueError: an option's value is not one it can take.

    Example:
          >>> import jax, jax.numpy as jnp, tpjax
          >>> @tpjax.compile
          ... def normalise(x, scale):
          ...     return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale
          >>> normalise(jnp.ones((2, 8)), jnp.ones(8)).shape
          (2, 8)
    """
    resolve(options)
    if fn is None:
        return functools.partial(compile, **options)
    if not callable(fn) or isinstance(fn, type):
        raise TypeError(
            f"compile: fn must be a function, a method or a module that can be called; got {fn!r}."
        )
    bound: tuple[Any, ...] = ()
    if isinstance(fn, Compiled):
        program = fn._program
        options = program.given | options
        return Compiled(_Program(program.fn, options, program.bound), fn._bound) if options else fn
    if isinstance(fn, MethodType) and modules.is_module(fn.__self__):
        fn, bound = fn.__func__, (fn.__self__,)
    elif modules.is_module(fn):
        fn, bound = type(fn).__call__, (fn,)
    return Compiled(_Program(fn, options, len(bound)), bound)


compile.__doc__ = inspect.cleandoc(compile.__doc__ or "").replace("{options}", describe())


def explain(
    fn: Callable[..., Any], **options: Unpack[CompileOptions]
) -> Callable[..., Explanation]:
    """Returns the function that explains a call of `fn`: `tpjax.explain(fn)(*args)`.

    Args:
      fn: what `tpjax.compile` takes, or what it returned.
      **options: of `tpjax.compile`; not for a compiled function, which has its own.

    Example:
      >>> import jax, jax.numpy as jnp, tpjax
      >>> report = tpjax.explain(jnp.sin)(jnp.ones((4, 16)))
      >>> [site["op"] for site in report.as_dict()["sites"]]
      []
    """
    if isinstance(fn, Compiled):
        if options:
            raise TypeError("explain: options belong to tpjax.compile; this function has its own.")
        return fn.explain
    return compile(fn, **options).explain
