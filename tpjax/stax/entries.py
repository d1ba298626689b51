# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The entries of a compiled function: what each was made for, and why no earlier one would do."""

import inspect
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from tpjax.core import _jax
from tpjax.pallas.dispatch import preference
from tpjax.stax import modules
from tpjax.stax.questions import Question
from tpjax.stax.static import SameObject
from tpjax.stax_passes.report import Report

GONE = "nothing"
"""What a path is said to be in an entry that does not have it."""


class Key:
    """What an entry is found by; the hash of a large graph of modules is computed once."""

    __slots__ = ("_hash", "value")

    def __init__(self, *value: Any) -> None:
        self.value = value
        self._hash = hash(value)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Key) and self._hash == other._hash and self.value == other.value

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True)
class Entry:
    """One specialisation: the call it was made for, and the program that runs such calls."""

    number: int
    signature: Mapping[str, str]
    """What the call was: paths like "batch['tokens']", and what stood there, like "i32[4,128]"."""
    reports: tuple[Report, ...]
    """What the passes did."""
    as_written: str | None = None
    """Why the original program runs in place of the rewritten one, or None."""
    kept: bool = True
    """False: free values changed whenever it was captured, so that it serves one call."""
    name: str = ""
    key: Any = field(default=None, repr=False)
    jaxpr: Any = field(default=None, repr=False)
    original: Any = field(default=None, repr=False)
    """The jaxpr as captured, with the same inputs."""
    after: Any = field(default=None, repr=False)
    lifted: tuple[int, ...] = field(default=(), repr=False)
    """Which free arrays the jaxpr takes as its first inputs."""
    donated: tuple[int, ...] = field(default=(), repr=False)
    """Inputs that the function, a jit itself, donates."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Of the compiler."""
    run: Any = field(default=None, repr=False)
    """The jitted program, where the entry has its own."""

    def __str__(self) -> str:
        """Returns the signature on one line."""
        parts = ", ".join(f"{path}: {what}" for path, what in self.signature.items())
        tail = f" (as written: {self.as_written})" if self.as_written else ""
        return f"entry {self.number}: {parts or 'no arguments'}{tail}"


@dataclass(frozen=True)
class Change:
    """One thing in which a call differed from the calls that came before it."""

    path: str
    was: str
    now: str

    def __str__(self) -> str:
        """Returns the change in words."""
        return f"{self.path}: was {self.was}, is now {self.now}"


@dataclass(frozen=True)
class Recompile:
    """Why an entry was made: its differences from the earlier entry that is most like it."""

    number: int
    like: int
    changes: tuple[Change, ...]

    def __str__(self) -> str:
        """Returns the reasons in words."""
        return f"entry {self.number} (beside entry {self.like}): " + "; ".join(
            map(str, self.changes)
        )


@dataclass(frozen=True)
class Recompiles:
    """Every recompilation of a function, in order; printed a line each."""

    name: str
    recompiles: tuple[Recompile, ...]

    def __str__(self) -> str:
        """Returns a line for each recompilation."""
        if not self.recompiles:
            return f"{self.name}: one entry at most, nothing was compiled again"
        lines = (f"  {recompile}" for recompile in self.recompiles)
        return "\n".join((f"{self.name}: {len(self.recompiles)} recompilations", *lines))

    def as_dict(self) -> dict[str, Any]:
        """Returns the same as plain data."""
        return {
            "name": self.name,
            "recompiles": [
                {
                    "entry": r.number,
                    "like": r.like,
                    "changes": [{"path": c.path, "was": c.was, "now": c.now} for c in r.changes],
                }
                for r in self.recompiles
            ],
        }

    def busiest(self) -> tuple[str, int, Change] | None:
        """Returns the path that changed most often, how often, and its last change."""
        counts: dict[str, int] = {}
        last: dict[str, Change] = {}
        for change in (c for r in self.recompiles for c in r.changes):
            counts[change.path] = counts.get(change.path, 0) + 1
            last[change.path] = change
        if not counts:
            return None
        path = max(counts, key=lambda p: counts[p])
        return path, counts[path], last[path]


class Recent(OrderedDict[Any, Any]):
    """Values by key, of which only those used last are kept."""

    def use(self, key: Any) -> Any:
        """Returns the value, which counts as used now, or None."""
        value = self.get(key)
        if value is not None:
            self.move_to_end(key)
        return value

    def put(self, key: Any, value: Any, most: int) -> int:
        """Keeps the value; returns how many went because there were more than `most`."""
        self[key] = value
        self.move_to_end(key)
        gone = max(len(self) - most, 0)
        for _ in range(gone):
            self.popitem(last=False)
        return gone


class History:
    """The signatures of the entries made last, those that are gone included."""

    def __init__(self) -> None:
        self.made = 0
        """Entries made in all: the number of the last one."""
        self._last: deque[tuple[int, Mapping[str, str]]] = deque()

    def add(self, signature: Mapping[str, str], most: int) -> None:
        """Keeps the signature of a new entry."""
        self.made += 1
        self._last.append((self.made, signature))
        while len(self._last) > most:
            self._last.popleft()

    def recompiles(self, name: str) -> Recompiles:
        """Returns why each entry but the first was made."""
        found: list[Recompile] = []
        earlier: list[tuple[int, Mapping[str, str], frozenset[Any]]] = []
        for number, signature in self._last:
            items = frozenset((_DEFAULTS | dict(signature)).items())
            if earlier:
                distances = ((len({path for path, _ in items ^ x[2]}), -x[0], x) for x in earlier)
                _, _, (like, old, _) = min(distances, key=lambda found: found[:2])
                found.append(Recompile(number, like, tuple(_changes(old, signature))))
            earlier.append((number, signature, items))
        return Recompiles(name, tuple(found))


def _changes(old: Mapping[str, str], new: Mapping[str, str]) -> list[Change]:
    paths = dict.fromkeys((*old, *new))
    old, new = ({p: x.get(p, _DEFAULTS.get(p, GONE)) for p in paths} for x in (old, new))
    pairs = ((path, old[path], new[path]) for path in paths)
    return [Change(path, was, now) for path, was, now in pairs if was != now]


def signature_of(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    static: tuple[str, ...] = (),
) -> dict[str, str]:
    """Returns the arguments of a call as paths and what stands there, and the context it is in."""
    found: dict[str, str] = {}
    for name, value in _named(fn, args, kwargs).items():
        found |= {name: repr(value)} if name in static else signature_of_value(name, value)
    return found | _context()


def check_arguments(
    name: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    static: tuple[str, ...],
) -> None:
    """Raises if an argument of the function called `name` that is not static is no array."""
    for path, leaf in _leaves_by_path(fn, args, kwargs, static):
        if not _jax.has_type(leaf) and not isinstance(leaf, SameObject):
            raise TypeError(
                f"compile: argument {path} of {name} must be an array or a number; got "
                f"{leaf!r:.60} ({type(leaf).__name__}). Name it in static_argnames if the "
                "function needs it as a Python value."
            )


def _leaves_by_path(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    static: tuple[str, ...],
) -> Iterator[tuple[str, Any]]:
    for name, value in _named(fn, args, kwargs).items():
        if name not in static:
            for keys, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
                yield name + jax.tree_util.keystr(keys), leaf


def signature_of_value(name: str, value: Any) -> dict[str, str]:
    """Returns one argument as paths and what stands there."""
    found = {name + path: repr(flag) for path, flag in modules.flags_in(value)}
    try:
        pairs = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda x: x is None)[0]
    except (TypeError, ValueError):
        pairs = [((), value)]
    return found | {name + jax.tree_util.keystr(keys): _spell(leaf) for keys, leaf in pairs}


_DEFAULTS = {
    "jax_enable_x64": "False",
    "jax_default_matmul_precision": "None",
    "jax_numpy_dtype_promotion": "standard",
    "mesh": "none",
    "tpjax.use": "nothing asked",
}
"""What an entry depends on besides its arguments, where nobody set it."""


def _context() -> dict[str, str]:
    """Returns what an entry depends on besides its arguments, where somebody set it."""
    mesh, asked = jax.sharding.get_abstract_mesh(), preference()
    now = {name: str(getattr(jax.config, name)) for name in _DEFAULTS if name.startswith("jax_")}
    now["mesh"] = "none" if mesh.empty else str(mesh)
    now["tpjax.use"] = "nothing asked" if asked == type(asked)() else str(asked)
    return {name: value for name, value in now.items() if value != _DEFAULTS[name]}


def answers_in(questions: list[tuple[Question, Any]]) -> dict[str, str]:
    """Returns the answers to a program's questions, by the line that asked."""
    found: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for question, value in questions:
        name = f"{question.kind.__name__} asked at {question.source}"
        counts[name] += 1
        found[name + (f" ({counts[name]})" if counts[name] > 1 else "")] = repr(value)
    return found


def _named(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    try:
        return dict(inspect.signature(fn).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return {**{f"argument {i}": x for i, x in enumerate(args)}, **kwargs}


def _spell(leaf: Any) -> str:
    try:
        aval = jax.typeof(leaf)
    except TypeError:
        return repr(leaf) if isinstance(leaf, str | bytes | type(None)) else f"{leaf!r:.60}"
    weak = ", weak type" if getattr(aval, "weak_type", False) else ""
    return f"{aval.str_short(short_dtypes=True)}{weak}"
