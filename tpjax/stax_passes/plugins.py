# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Passes and rules by name: those of this project, and those that other distributions offer.

A distribution offers one in its metadata, and it is imported when it is first used:

    [project.entry-points."tpjax.rules"]
    fuse_my_gelu = "my_package.rewrites:FUSE_MY_GELU"

A pass stands in the group `tpjax.passes`: a function from a jaxpr to a jaxpr and a `Report`, or a
tuple of them. A rule stands in `tpjax.rules`: what `tpjax.rule` returns, or a `Recogniser`. Names
of this project cannot be taken.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from tpjax.core.errors import did_you_mean
from tpjax.stax_passes.engine import rows_of
from tpjax.stax_passes.pipeline import ON_REQUEST, PASSES
from tpjax.stax_passes.rules import Row


def _is_pass(value: Any) -> bool:
    if isinstance(value, tuple):
        return bool(value) and all(map(_is_pass, value))
    return callable(value) and not isinstance(value, type | Row)


def _built_in_passes() -> dict[str, Any]:
    entries = (*PASSES, *ON_REQUEST)
    flat = [p for entry in entries for p in (entry if isinstance(entry, tuple) else (entry,))]
    return {run.__name__: run for run in flat}


def _built_in_rules() -> dict[str, Any]:
    return {row.name: row for run in _built_in_passes().values() for row in rows_of(run)}


@dataclass(frozen=True)
class Group:
    """One kind of thing that distributions can offer."""

    what: str
    entry_points: str
    """The group's name in the metadata of distributions."""
    must: str
    valid: Callable[[Any], bool]
    built_in: Callable[[], Mapping[str, Any]]


PASS_GROUP = Group(
    "pass", "tpjax.passes", "a function from a jaxpr to a jaxpr and a Report, or a tuple of them",
    _is_pass, _built_in_passes,
)  # fmt: skip
RULE_GROUP = Group(
    "rule", "tpjax.rules", "a rule (tpjax.rule)", lambda v: isinstance(v, Row), _built_in_rules
)


def check_names(group: Group, given: Iterable[Any] | None) -> None:
    """Raises `ValueError` for a name that is unknown or offered twice; loads nothing."""
    for name in _names(given or ()):
        _find(group, name)


def named(group: Group, given: Iterable[Any]) -> tuple[Any, ...]:
    """Returns what was given, with names replaced by what they name, imported now if need be.

    Raises:
      ValueError: a name is unknown, or offered twice.
      RuntimeError: what a distribution offers cannot be imported.
      TypeError: it is no pass or no rule.
    """
    return tuple(_resolved(group, item) for item in given)


def _resolved(group: Group, item: Any) -> Any:
    if isinstance(item, tuple | list):
        return tuple(_resolved(group, one) for one in item)
    if not isinstance(item, str):
        return item
    found = _find(group, item)
    return _load(group, found) if isinstance(found, EntryPoint) else found


def _names(given: Iterable[Any]) -> Iterable[str]:
    for item in given:
        if isinstance(item, str):
            yield item
        elif isinstance(item, tuple | list):
            yield from _names(item)


def _find(group: Group, name: str) -> Any:
    """Returns what is built in under the name, or the entry point that offers it."""
    built_in = group.built_in()
    offered = [e for e in entry_points(group=group.entry_points) if e.name == name]
    if name in built_in:
        if offered:
            raise ValueError(
                f"compile: {origin(offered[0])} offers a {group.what} named {name!r}, which is "
                f"the name of a {group.what} of tpjax and cannot be taken. Rename it there."
            )
        return built_in[name]
    if len({e.value for e in offered}) > 1:
        both = " and ".join(map(origin, offered))
        raise ValueError(f"compile: {both} both offer a {group.what} named {name!r}. Remove one.")
    if not offered:
        names = {e.name for e in entry_points(group=group.entry_points)}
        near = did_you_mean(name, {*built_in, *names})
        raise ValueError(f"compile: unknown {group.what} {name!r}. {near}")
    return offered[0]


def _load(group: Group, entry: EntryPoint) -> Any:
    try:
        value = entry.load()
    except Exception as error:
        raise RuntimeError(
            f"compile: the {group.what} {entry.name!r} cannot be loaded from {origin(entry)}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not group.valid(value):
        raise TypeError(
            f"compile: the {group.what} {entry.name!r} from {origin(entry)} must be {group.must}; "
            f"got {value!r:.80}."
        )
    return value


def origin(entry: EntryPoint) -> str:
    """Returns "module:attr (distribution version)"."""
    dist = entry.dist
    return f"{entry.value} ({f'{dist.name} {dist.version}' if dist else 'unknown distribution'})"
