# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""What a function reads besides its arguments: closure cells, globals, attributes of its object.

`jax.jit` reads such values once, when it traces. Here they are read at each call. JAX arrays become
inputs of the compiled program, so that a new array needs no new program. Everything else that can
be compared is a guard: numbers, strings, flags and small NumPy arrays by value, functions, classes
and large NumPy arrays by identity; a change of one makes a new entry. What `tpjax.stax.finding`
does not find is a constant, as it is for `jax.jit`.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from tpjax.core import _jax, parts
from tpjax.stax.finding import MISSING, Finder, Watch
from tpjax.stax.keys import Same
from tpjax.stax.names import CHANGED

MAX_KEPT_BYTES = 1 << 26
"""Free arrays up to this size, together, are kept from one call to the next to see a change."""


class ChangedError(Exception):
    """Free values changed while the function was traced, and not by the function: try again."""


MAX_CONSTANTS = 3
"""Masks under one name that are constants of programs, before the mask becomes an input."""
CORNER, MASKED = 8, -1e4
"""A float array is a mask if its first rows and columns hold 0 and numbers up to `MASKED` alone."""
ATTEMPTS = 4
"""Times that a call is begun while other threads change what it reads."""


def settled(attempt: Callable[[bool], Any]) -> Any:
    """Returns `attempt(last)` of the first attempt that no change of free values ends."""
    for _ in range(ATTEMPTS - 1):
        try:
            return attempt(False)
        except ChangedError:
            continue
    return attempt(True)


@dataclass(frozen=True)
class Reading:
    """The free values of one call."""

    arrays: tuple[Any, ...] = ()
    """JAX arrays, each once: inputs of the compiled program."""
    paths: tuple[str, ...] = ()
    """Where each array was found first, in the user's words: "global params['w']"."""
    found: Mapping[str, Any] = field(default_factory=dict)
    """The guards by path; of an array found again, where it was found first."""
    modules: tuple[Any, ...] = ()
    """NNX modules that the function names: arguments of the program, so that it may change them."""
    module_names: tuple[tuple[str, str], ...] = ()
    """For each module "closure" or "global", and its name."""
    stores: frozenset[str] = frozenset()
    """What the code assigns to; see `tpjax.stax.names`."""
    numpy: bool = False
    """Whether the code names NumPy, which reads the memory of an array unseen."""

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Everything but the arrays; hashable."""
        return tuple(self.found.items()), self.paths, self.module_names

    @property
    def guards(self) -> dict[str, str]:
        """The guards for people: where, and what was found."""
        return {path: _spell(guard) for path, guard in self.found.items()}

    def by_path(self) -> Iterator[tuple[Any, str]]:
        """Yields each array and where it was found."""
        return zip(self.arrays, self.paths, strict=True)

    def changes(self, later: "Reading") -> list[str]:
        """Returns the paths at which something else stands later."""
        then, now = dict(self.found), dict(later.found)
        then |= {path: Same(x) for x, path in self.by_path()}
        now |= {path: Same(x) for x, path in later.by_path()}
        return [p for p in {**then, **now} if then.get(p, MISSING) != now.get(p, MISSING)]


NOTHING = Reading()


class FreeValues:
    """The free values of one function, read at each call."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.classes: frozenset[type] = frozenset()
        """Classes of arguments, whose methods the function may call."""
        self.by_value: frozenset[str] = frozenset()
        """Arrays whose numbers the function turned into Python values: guarded by them."""
        self.by_identity: frozenset[str] = frozenset()
        """Arrays that the program could not take as inputs: guarded by which object they are."""
        self._choosing: dict[str, list[Any]] = {}
        self._varying: frozenset[str] = frozenset()
        self.written: frozenset[str] = frozenset()
        """Paths of values that the function itself changes while it is traced."""
        self._last: tuple[Watch, Reading] | None = None
        first = Finder(fn)
        self._empty = not (first.watch.places or first.watch.trees)

    def read(self, *objects: Any) -> Reading:
        """Returns the values now; `objects` are those the function is a method of."""
        if self._empty and not objects and not self.classes:
            return NOTHING
        last = self._last
        if last is not None and not objects and last[0].unchanged():
            return last[1]
        found = Finder(self.fn, objects, self.classes, self.written)
        reading = self.again(_reading_of(found))
        small = sum(x.nbytes for x in reading.arrays) <= MAX_KEPT_BYTES
        self._last = (found.watch, reading) if small and not objects else None
        return reading

    def forget(self) -> None:
        """Lets go of the values of the last call."""
        self._last = None

    def follow(self, classes: Iterable[type]) -> None:
        """Adds classes of arguments whose methods are followed.

        Raises:
          ChangedError: one is new.
        """
        new = self.classes.union(classes)
        if new != self.classes:
            self.classes, self._last = new, None
            raise ChangedError

    def inputs(self, reading: Reading, jaxpr: _jax.Jaxpr) -> list[Any]:
        """Returns the arrays that may become inputs of a program, placeholders for the others.

        Masks, and integers as positions are, stay constants, because kernels are chosen by what
        they say; those that a function rebinds more than once become inputs all the same.
        """
        used = {id(x) for x in jaxpr.consts}
        found: list[Any] = []
        for array, path in reading.by_path():
            stays = id(array) in used and path not in self._varying and _chooses(array)
            if stays:
                known = self._choosing.setdefault(path, [])
                known.extend(() if any(x is array for x in known) else (array,))
                stays = len(known) <= MAX_CONSTANTS
                if not stays:
                    self._varying |= {path}
                    del self._choosing[path]
            found.append(object() if stays else array)
        return found

    def guard(
        self, reading: Reading, read: Iterable[Any], jaxpr: _jax.Jaxpr, lifted: Sequence[int]
    ) -> None:
        """Makes guards of the arrays whose numbers, or which themselves, a program depends on.

        Args:
          reading: the arrays.
          read: those whose numbers Python was seen to read.
          jaxpr: the program.
          lifted: which of the arrays are its inputs.
        """
        seen = {id(x) for x in read}
        inner = {id(x) for x in (*jaxpr.consts, *parts.inner_constants(jaxpr))}
        by_value = {path for x, path in reading.by_path() if id(x) in seen}
        by_identity = {path for x, path in reading.by_path() if id(x) in inner}
        if reading.numpy:
            by_identity |= {p for i, p in enumerate(reading.paths) if i not in lifted}
        by_identity -= by_value
        if not (by_value <= self.by_value and by_identity <= self.by_identity):
            self.by_value |= by_value
            self.by_identity |= by_identity
            self._last = None

    def settle(self, before: Reading, after: Reading, last: bool) -> bool:
        """Judges what changed while a program was captured; returns whether it is to be kept.

        What the code may have changed itself, as a counter of its traces, is no guard from now on:
        as under `jax.jit` that happens once an entry.

        Raises:
          ChangedError: something else changed, so another thread did that; in the last attempt
            the program serves this call alone.
        """
        changed = before.changes(after)
        own = {path for path in changed if _may_store(path, before.stores)}
        if own:
            self.written |= own
            self._last = None
        if len(own) < len(changed) and not last:
            raise ChangedError
        return len(own) == len(changed)

    def again(self, reading: Reading) -> Reading:
        """Returns the same reading with the guards that are needed by now, and without others."""
        skipped = self.written.union(reading.paths)
        found = {p: g for p, g in reading.found.items() if p not in skipped}
        for array, path in reading.by_path():
            if path in self.by_value:
                found[path] = np.asarray(array).tobytes(), str(jax.typeof(array))
            elif path in self.by_identity and path not in self._varying:
                found[path] = Same(array)
        return reading if found == reading.found else replace(reading, found=found)


def _reading_of(found: Finder) -> Reading:
    """Returns what was found, every array once."""
    first: dict[int, str] = {}
    guards = dict(found.guards)
    for path, array in found.arrays.items():
        if first.setdefault(id(array), path) != path:
            guards[path] = "the array of", first[id(array)]
    arrays = {path: x for path, x in found.arrays.items() if first[id(x)] == path}
    return Reading(
        tuple(arrays.values()),
        tuple(arrays),
        guards,
        tuple(found.modules.values()),
        tuple(found.modules),
        frozenset(found.stores),
        found.numpy,
    )


def _chooses(array: jax.Array) -> bool:
    """Returns whether the array looks like a mask or like positions."""
    if not array.ndim or _jax.is_tracer(array) or _jax.is_key(jax.typeof(array)):
        return False
    if not np.issubdtype(array.dtype, np.floating):
        return array.dtype == bool or np.issubdtype(array.dtype, np.integer)
    if array.ndim < 2 or not array.size:
        return False
    with jax.ensure_compile_time_eval():
        corner = np.asarray(array[(0,) * (array.ndim - 2)][:CORNER, :CORNER], np.float32)
    return bool(((corner == 0) | (corner <= MASKED)).all() and (corner <= MASKED).any())


def _may_store(path: str, stores: frozenset[str]) -> bool:
    """Returns whether code that assigns to `stores` may have changed what stands at the path."""
    end = re.search(r"(?:\.(\w+)|\])'*$", path)
    name = path.split()[1] if end is None and " " in path else end and end[1]
    return CHANGED in stores or name in stores


def _spell(guard: Any) -> str:
    if isinstance(guard, tuple) and len(guard) == 2 and isinstance(guard[0], type):
        return guard[1] if guard[0] in (float, complex) else repr(guard[1])
    if isinstance(guard, tuple) and len(guard) == 2 and guard[0] == "the array of":
        return " ".join(guard)
    if isinstance(guard, tuple):
        return "an array" if len(guard) == 3 else "a value"
    return repr(guard)
