# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Which arguments of a function are static, by position and by name, as `jax.jit` takes them."""

import inspect
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpjax.core.errors import did_you_mean
from tpjax.stax.keys import exact


@dataclass(frozen=True)
class Static:
    """Positions and names of the static arguments; each of them holds what the other implies."""

    argnums: tuple[int, ...] = ()
    argnames: tuple[str, ...] = ()

    def close(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Returns `fn` with the static arguments filled in, and the others."""
        if not self.argnums and not self.argnames:
            return fn, args, dict(kwargs)
        fixed = {i: args[i] for i in self.argnums if i < len(args)}
        named = {name: kwargs[name] for name in self.argnames if name in kwargs}

        def closed(*rest: Any, **others: Any) -> Any:
            left = iter(rest)
            full = [fixed[i] if i in fixed else next(left) for i in range(len(args))]
            return fn(*full, **others, **named)

        closed.__qualname__ = getattr(fn, "__qualname__", type(fn).__name__)
        rest = tuple(x for i, x in enumerate(args) if i not in fixed)
        return closed, rest, {k: v for k, v in kwargs.items() if k not in named}

    def and_first(self) -> "Static":
        """Returns the same with the first argument static too."""
        return Static(tuple(sorted({0, *self.argnums})), self.argnames)

    def key(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
        """Returns the static values of a call, hashable as they must be."""
        positions = tuple((i, exact(args[i])) for i in self.argnums if i < len(args))
        named = ((name, exact(kwargs[name])) for name in self.argnames if name in kwargs)
        return positions, tuple(named)

    def boxed(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Returns the arguments for `jax.jit`, which would take a static 0.0 for -0.0."""
        if not self.argnums and not self.argnames:
            return args, kwargs
        boxed = tuple(_box(x) if i in self.argnums else x for i, x in enumerate(args))
        return boxed, {k: _box(x) if k in self.argnames else x for k, x in kwargs.items()}


class Exactly:
    """A static argument that equals another one only if both make the same program."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._key = exact(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Exactly) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def _box(x: Any) -> Any:
    return Exactly(x) if isinstance(x, float | complex | tuple | np.inexact) else x


def unboxed(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments with the static ones as they were."""
    inside = tuple(x.value if isinstance(x, Exactly) else x for x in args)
    return inside, {k: x.value if isinstance(x, Exactly) else x for k, x in kwargs.items()}


class SameObject:
    """An object as a static argument: equal to itself alone, and not kept alive by JAX's caches."""

    def __init__(self, x: Any) -> None:
        self._hash = id(x)
        try:
            self._ref: Callable[[], Any] = weakref.ref(x)
        except TypeError:  # a class with __slots__
            self._ref = lambda: x

    def get(self) -> Any:
        """Returns the object."""
        return self._ref()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SameObject):
            return False
        x = self.get()
        return x is not None and x is other.get()

    def __hash__(self) -> int:
        return self._hash


def static_of(
    fn: Callable[..., Any],
    argnums: int | Iterable[int],
    argnames: str | Iterable[str],
    bound: int = 0,
) -> Static:
    """Returns the static arguments of `fn`, positions and names made to agree.

    Args:
      fn: the function, its bound arguments in front.
      argnums: positions as the user counts them, after the bound ones; negative ones from the end.
      argnames: names.
      bound: how many leading arguments are bound.

    Raises:
      ValueError: a position or name that the function does not have.
    """
    nums = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    names = (argnames,) if isinstance(argnames, str) else tuple(argnames)
    if not nums and not names:
        return Static()
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # a builtin
        return Static(tuple(n + bound for n in nums), names)
    p = inspect.Parameter
    placed = [x.name for x in parameters if x.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    open_ended = any(x.kind is p.VAR_POSITIONAL for x in parameters)
    takes_any = any(x.kind is p.VAR_KEYWORD for x in parameters)
    by_name = [x.name for x in parameters if x.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    positions: set[int] = set()
    for n in nums:
        index = n + bound if n >= 0 else len(placed) + n
        if index < bound or (index >= len(placed) and not open_ended):
            raise ValueError(
                f"compile: static_argnums must be positions of the function's "
                f"{len(placed) - bound} positional arguments; got {n}."
            )
        positions.add(index)
    for name in names:
        if name not in by_name and not takes_any:
            near = did_you_mean(name, by_name)
            raise ValueError(f"compile: unknown name {name!r} in static_argnames. {near}")
    all_names = {*names, *(placed[i] for i in positions if i < len(placed))} & {*by_name, *names}
    positions.update(placed.index(name) for name in names if name in placed)
    return Static(tuple(sorted(positions)), tuple(sorted(all_names)))
