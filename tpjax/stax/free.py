# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""What a function reads besides its arguments: closure cells, globals, attributes of its object.

`jax.jit` reads such values once, when it traces. Here they are read at each call. JAX arrays become
inputs of the compiled program, so that a new array needs no new program. Everything else that can
be compared is a guard: numbers, strings, flags and small NumPy arrays by value, functions, classes
and large NumPy arrays by identity; a change of one makes a new entry. What `tpjax.stax.finding`
does not find is a constant, as it is for `jax.jit`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from tpjax.core import _jax, parts
from tpjax.stax.finding import MISSING, Finder, Same, Watch


@dataclass(frozen=True)
class Reading:
    """The free values of one call."""

    arrays: tuple[Any, ...] = ()
    """JAX arrays: inputs of the compiled program."""
    paths: tuple[str, ...] = ()
    """Where each array was found, in the user's words: "global params['w']"."""
    key: tuple[Any, ...] = ()
    """The guards, hashable."""
    guards: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    """The guards for people: where, and what was found."""
    modules: tuple[Any, ...] = ()
    """NNX modules that the function names: arguments of the program, so that it may change them."""
    module_names: tuple[tuple[str, str], ...] = ()
    """For each module "closure" or "global", and its name."""
    places: Mapping[str, str] = field(default_factory=dict, compare=False)
    """For each path the name or attribute that it starts from."""

    def by_path(self) -> Iterator[tuple[Any, str]]:
        """Yields each array and where it was found."""
        return zip(self.arrays, self.paths, strict=True)


NOTHING = Reading()


class FreeValues:
    """The free values of one function, read at each call."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.by_value: frozenset[str] = frozenset()
        """Arrays whose numbers the function turned into Python values: guarded by them."""
        self.by_identity: frozenset[str] = frozenset()
        """Arrays that the program could not take as inputs: guarded by which object they are."""
        self.written: frozenset[str] = frozenset()
        """Places that the function itself changes while it is traced."""
        self._last: tuple[Watch, Reading] | None = None
        first = Finder(fn, (), self.written)
        self.empty = not first.watch.places and not first.watch.trees

    def read(self, *objects: Any) -> Reading:
        """Returns the values now; `objects` are those the function is a method of."""
        if self.empty and not objects:
            return NOTHING
        last = self._last
        if last is not None and not objects and last[0].unchanged():
            return last[1]
        found = Finder(self.fn, objects, self.written)
        key = tuple(found.guards.items())
        reading = self._guarded(
            Reading(
                tuple(found.arrays.values()),
                tuple(found.arrays),
                key,
                tuple((path, _spell(guard)) for path, guard in key),
                tuple(found.modules.values()),
                tuple(found.modules),
                found.places,
            )
        )
        if not objects:
            self._last = found.watch, reading
        return reading

    def guard(self, reading: Reading, read: Iterable[Any], jaxpr: _jax.Jaxpr) -> None:
        """Makes guards of the arrays whose numbers, or which themselves, a program depends on."""
        if not reading.arrays:
            return
        read, inner = ({id(x) for x in xs} for xs in (read, parts.inner_constants(jaxpr)))
        by_value = {path for x, path in reading.by_path() if id(x) in read}
        by_identity = {path for x, path in reading.by_path() if id(x) in inner} - by_value
        if not (by_value <= self.by_value and by_identity <= self.by_identity):
            self.by_value |= by_value
            self.by_identity |= by_identity
            self._last = None

    def again(self, reading: Reading, now: Reading | None = None) -> Reading:
        """Returns the same reading with the guards that are needed by now.

        Args:
          reading: the values before a capture.
          now: the values after it. What changed in between the function itself has changed, as a
            counter of its traces; that is no guard.
        """
        reading = self._guarded(reading)
        if now is not None and now.key != reading.key:
            then, later = dict(reading.key), dict(now.key)
            changed = [p for p in (*then, *later) if then.get(p, MISSING) != later.get(p, MISSING)]
            places = {**reading.places, **now.places}
            self.written |= {str(places.get(path, path)) for path in changed}
            self._last = None
            return self._guarded(reading)
        return reading

    def _guarded(self, reading: Reading) -> Reading:
        guards = {p: g for p, g in reading.key if reading.places.get(p, p) not in self.written}
        for array, path in reading.by_path():
            if path in self.by_value:
                guards[path] = np.asarray(array).tobytes(), str(jax.typeof(array))
            elif path in self.by_identity:
                guards[path] = Same(array)
        key = tuple(guards.items())
        if key == reading.key:
            return reading
        return replace(reading, key=key, guards=tuple((p, _spell(g)) for p, g in key))


def _spell(guard: Any) -> str:
    if isinstance(guard, tuple) and len(guard) == 2 and isinstance(guard[0], type):
        return repr(guard[1])
    if isinstance(guard, tuple):
        return "an array" if len(guard) == 3 else "an array's value"
    return repr(guard)
