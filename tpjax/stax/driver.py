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
from collections.abc import Callable
from types import MethodType
from typing import Any, Unpack, overload

import jax
import numpy as np

from tpjax.core import _jax
from tpjax.stax import modules
from tpjax.stax.ahead import compiled_ahead
from tpjax.stax.entries import Entry, Recompiles
from tpjax.stax.explanation import Explanation
from tpjax.stax.options import CompileOptions, describe, resolve
from tpjax.stax.program import Program
from tpjax.stax.roads import roads_of
from tpjax.stax.static import SameObject
from tpjax.stax.views import explanation_of, rewritten_jaxpr


class Compiled:
    """What `tpjax.compile` returns: call it like the function it was made from."""

    def __init__(self, program: Program, bound: tuple[Any, ...] = (), keeps: Any = None) -> None:
        functools.update_wrapper(self, program.fn, updated=())
        self.__name__ = program.name
        self._program = program
        self._bound = bound
        self._keeps = keeps
        if bound:
            self.__signature__ = _without_first(program.fn, len(bound))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the compiled function."""
        if self._bound:
            args = (*self._bound, *args)
        if _jax.at_top_level():
            return roads_of(self._program).call(args, kwargs)
        return self._program.inline(args, kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Binds the function, as a method of a class, to the object."""
        if instance is None:
            return self
        if _is_data(instance):
            return Compiled(self._program, (*self._bound, instance))
        bound = (*self._bound, SameObject(instance))
        return Compiled(self._program.of_objects(), bound, instance)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Compiled) or self._program is not other._program:
            return False
        pairs = itertools.zip_longest(self._bound, other._bound)
        return all(x is y or (isinstance(x, SameObject) and x == y) for x, y in pairs)

    def __hash__(self) -> int:
        return hash((id(self._program), len(self._bound)))

    def jaxpr(self, *args: Any, **kwargs: Any) -> _jax.Jaxpr:
        """Returns the rewritten jaxpr of the call; shapes (`jax.ShapeDtypeStruct`) will do."""
        return rewritten_jaxpr(self._program, (*self._bound, *args), kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the call lowered for the compiler, as `jax.jit(fn).lower` does."""
        return roads_of(self._program).lower((*self._bound, *args), kwargs).lowered

    def precompile(
        self, *calls: tuple[Any, ...] | dict[str, Any], workers: int | None = None
    ) -> tuple[Any, ...]:
        """Compiles the function for several calls at once, in threads, and runs none of them.

        Later calls with the same shapes, dtypes and shardings find their program compiled. Each is
        traced and rewritten in turn; XLA compiles them in parallel.

        Args:
          *calls: each the arguments of a call: a tuple by position, or a dict by name. Shapes
            (`jax.ShapeDtypeStruct`) will do in place of arrays, unless the function asks for the
            value of one.
          workers: threads; None means one for each processor, and one in all for a GPU, where XLA
            times kernels while it compiles and threads were slower.

        Returns:
          What JAX compiled, a `jax.stages.Compiled` for each call.

        Raises:
          TypeError: a call is neither a tuple nor a dict.

        Example:
          >>> import jax, jax.numpy as jnp, tpjax
          >>> double = tpjax.compile(lambda x: 2 * x)
          >>> shapes = [jax.ShapeDtypeStruct((n,), jnp.float32) for n in (8, 16)]
          >>> len(double.precompile(*((shape,) for shape in shapes)))
          2
        """
        return compiled_ahead(self._program, self._bound, calls, workers)

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """Returns what was rewritten in this call, which kernels run, and why others do not.

        The call is traced anew but not run; shapes (`jax.ShapeDtypeStruct`) will do as arguments.
        """
        return explanation_of(self._program, (*self._bound, *args), kwargs)

    def entries(self) -> tuple[Entry, ...]:
        """Returns the specialisations that are held now, the least recently used first."""
        return tuple(self._program.entries.values())

    def explain_recompile(self) -> Recompiles:
        """Returns why each entry but the first was made: what changed, from what to what."""
        return self._program.recompiles()

    def free_functions(self) -> tuple[Callable[..., Any], ...]:
        """Returns the function that was compiled: what it reads, a function that calls it reads."""
        return (self._program.fn,)

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


def _is_data(x: Any) -> bool:
    """Returns whether a method's object can be an argument: a module, or a pytree of arrays."""
    if modules.is_module(x):
        return True
    leaves = jax.tree.leaves(x)
    is_leaf = len(leaves) == 1 and leaves[0] is x
    return not is_leaf and all(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves)


def _without_first(fn: Callable[..., Any], count: int) -> inspect.Signature | None:
    """Returns the signature of `fn` once its first arguments are bound."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a builtin
        return None
    return signature.replace(parameters=list(signature.parameters.values())[count:])


@overload
def compile(fn: Callable[..., Any], **options: Unpack[CompileOptions]) -> Compiled: ...
@overload
def compile(**options: Unpack[CompileOptions]) -> Callable[[Callable[..., Any]], Compiled]: ...
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
        if not options:
            return fn
        return Compiled(fn._program.with_options(options), fn._bound, fn._keeps)
    if isinstance(fn, MethodType) and _is_data(fn.__self__):
        fn, bound = fn.__func__, (fn.__self__,)
    elif modules.is_module(fn):
        fn, bound = type(fn).__call__, (fn,)
    return Compiled(Program(fn, options, len(bound)), bound)


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
