# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The rewriting engine: rows of what to recognise and what to put there become a `Pass`.

A row is a `Recogniser` (an anchor primitive and a function that reads the graph around it) or a
`Rule` (an ordinary JAX function as the pattern; `tpjax.stax_passes.unify`). The engine finds
matches, refuses those whose interior values are used elsewhere, and re-traces the level with the
replacements in place, each as if written where the user wrote what it replaces. It builds no
equation by hand.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import lax

from tpjax.core import _jax
from tpjax.core.errors import UnsupportedError
from tpjax.core.operator import Choice
from tpjax.pallas.dispatch import record_choices
from tpjax.stax_passes.graph import Graph, Node, build, live, units
from tpjax.stax_passes.report import Hit, NearMiss, Report, Tier


@dataclass(frozen=True)
class Match:
    """A found pattern: the value to replace, what it is made from, and the values that vanish."""

    root: int
    operands: tuple[int, ...]
    build: Callable[..., Any]
    """Takes the operands' arrays, returns the root's value."""
    interior: frozenset[int]
    """Values that only the pattern needs; used elsewhere, they make the match a near miss."""
    op: str | None = None


@dataclass(frozen=True)
class Recogniser:
    """A row for patterns with a variable middle: anchored at a primitive, read by a function.

    `extract(graph, node)` returns a `Match`, or in plain words why the pattern almost fits (a near
    miss), or None where nothing alike stands.
    """

    name: str
    anchor: frozenset[str]
    extract: Callable[[Graph, Node], "Match | str | None"]
    tier: Tier
    contract: str
    """What may differ from the original numbers, in words; a test holds it."""


class _RowFailed(Exception):
    """A row's replacement raised: the original equations stay in its place."""

    def __init__(self, root: int) -> None:
        super().__init__(root)
        self.root = root


@dataclass
class _Log:
    hits: list[Hit] = field(default_factory=list)
    near_misses: list[NearMiss] = field(default_factory=list)


def rewriting_pass(
    name: str, rows: tuple[Any, ...]
) -> Callable[[_jax.Jaxpr], tuple[_jax.Jaxpr, Report]]:
    """Returns the pass that applies the rows, in order, at every level it may enter.

    Args:
      name: the pass's name in reports.
      rows: `Recogniser`s and `Rule`s; where two match the same value the earlier wins.
    """

    def rewrite(jaxpr: _jax.Jaxpr) -> tuple[_jax.Jaxpr, Report]:
        log = _Log()
        before = _jax.count_equations(jaxpr)
        result = _rewrite(jaxpr, rows, log, {})
        after = _jax.count_equations(result) if log.hits else before
        return result, Report(name, tuple(log.hits), tuple(log.near_misses), before, after)

    rewrite.__name__ = name
    rewrite.__doc__ = f"Applies {', '.join(row.name for row in rows)}."
    rewrite.rows = rows  # pyright: ignore[reportFunctionMemberAccess]
    return rewrite


def rows_of(run: Callable[..., Any]) -> tuple[Any, ...]:
    """Returns the rows of a pass that `rewriting_pass` made; of any other pass, none."""
    return getattr(run, "rows", ())


def find_matches(graph: Graph, rows: tuple[Any, ...]) -> dict[int, tuple[Any, Match]]:
    """Returns what the rows match in the graph, by root value: the row and its match."""
    return _find(graph, rows, _Log())


def replacement_of(graph: Graph, match: Match, operands: list[Any]) -> tuple[Any, list[Choice]]:
    """Returns the value that stands for the match's root, and dispatch's choices in it."""
    node = graph.node_of(match.root)
    assert node is not None, "a root is made by a node"
    return _replace(graph, node, match, operands)


def _rewrite(
    jaxpr: _jax.Jaxpr, rows: tuple[Any, ...], log: _Log, done: dict[int, Any]
) -> _jax.Jaxpr:
    """Returns the level rewritten; `done` keeps each body, so a repeated layer is read once."""
    if id(jaxpr) in done:
        return done[id(jaxpr)][1]
    graph = build(jaxpr)
    matches = _find(graph, rows, log)
    bodies: dict[int, _jax.Equation] = {}
    for index, node in enumerate(graph.nodes):
        inner = _jax.subjaxprs(node.eqn)
        with _jax.inside(node.eqn):
            new = [_rewrite(body, rows, log, done) for body in inner]
        if any(a is not b for a, b in zip(inner, new, strict=True)):
            bodies[index] = _jax.with_subjaxprs(node.eqn, new)
    result = jaxpr
    while matches or bodies:
        try:
            result = _emit(jaxpr, graph, matches, bodies, log)
            break
        except _RowFailed as failure:
            row, match = matches.pop(failure.root)
            log.near_misses.append(_failed(graph, row, match, failure))
    done[id(jaxpr)] = (jaxpr, result)
    return result


def _find(graph: Graph, rows: tuple[Any, ...], log: _Log) -> dict[int, tuple[Any, Match]]:
    """Returns the matches by root value; what almost matched goes to the log."""
    found: dict[int, tuple[Any, Match]] = {}
    taken: set[int] = set()
    for row in rows:
        for node in graph.nodes:
            if node.name not in row.anchor:
                continue
            match = row.extract(graph, node)
            if match is None:
                continue
            if isinstance(match, Match):
                if match.root in taken or taken & match.interior:
                    continue
                leak = _used_elsewhere(graph, match)
                if leak is None:
                    found[match.root] = (row, match)
                    taken |= match.interior | {match.root}
                    continue
                match = leak
            log.near_misses.append(NearMiss(row.name, _jax.source_of(node.eqn), match))
    return found


def _used_elsewhere(graph: Graph, match: Match) -> str | None:
    """Returns why the interior cannot vanish, or None."""
    inside = match.interior | {match.root}
    for value in sorted(match.interior):
        if graph.is_output(value):
            return f"a value inside the pattern (made at {graph.source(value)}) is also returned"
        for user in graph.users_of(value):
            if not any(out in inside for out in user.outs):
                return also_used(graph, value, user)
    return None


def also_used(graph: Graph, value: int, user: Node) -> str:
    """Returns the reason that names a second use of a value inside a pattern."""
    made, used = graph.source(value), _jax.source_of(user.eqn)
    return (
        f"a value inside the pattern (made at {made}) is also used at {used}. If that is a "
        "backward pass: compile the loss, not its gradient"
    )


def _failed(graph: Graph, row: Any, match: Match, failure: _RowFailed) -> NearMiss:
    """Returns the near miss of a row that raised, and warns once of it."""
    cause = failure.__cause__
    reason = f"the rule raised {type(cause).__name__}: {cause}"
    source = graph.source(match.root)
    warnings.warn(f"{row.name}: {reason} ({source}). The original code runs.", stacklevel=2)
    return NearMiss(row.name, source, reason, failed=True)


def _emit(
    jaxpr: _jax.Jaxpr,
    graph: Graph,
    matches: dict[int, tuple[Any, Match]],
    bodies: dict[int, _jax.Equation],
    log: _Log,
) -> _jax.Jaxpr:
    """Returns the level re-traced with the matches replaced and the new bodies in place."""
    operands = {root: match.operands for root, (_, match) in matches.items()}
    read = {value for match in operands.values() for value in match}
    interior = {value for _, match in matches.values() for value in match.interior}
    touched = {graph.producer[v] for v in (*interior, *operands) if v in graph.producer}
    order = live(graph, list(units(graph, touched | set(bodies), read)), operands)
    swapped = {id(graph.nodes[index]): eqn for index, eqn in bodies.items()}
    hits: list[Hit] = []

    def run(*args: Any) -> list[Any]:
        hits.clear()
        env = dict(graph.known)
        env.update(zip(graph.inputs, args, strict=True))
        for node in order:
            root = node.outs[0] if node.outs else None
            if root in matches:
                row, match = matches[root]
                values = [env[i] for i in match.operands]
                try:
                    value, choices = _replace(graph, node, match, values)
                except UnsupportedError:
                    raise  # an implementation that was asked for by name: the caller must know
                except Exception as cause:
                    raise _RowFailed(root) from cause
                env[root] = value
                hits.append(Hit(row.name, _jax.source_of(node.eqn), match.op, tuple(choices)))
            else:
                eqn = swapped.get(id(node), node.eqn)
                env.update(zip(node.outs, _jax.bind(eqn, *(env[i] for i in node.ins)), strict=True))
        return [env[value] for value in graph.outputs]

    result = _jax.retrace(run, jaxpr)
    log.hits.extend(hits)
    return result


def _replace(
    graph: Graph, node: Node, match: Match, operands: list[Any]
) -> tuple[Any, list[Choice]]:
    """Returns the replacement's value, cast to the aval it must have, and dispatch's choices."""
    aval = graph.avals[match.root]
    with _jax.as_written_at(node.eqn), record_choices() as choices:
        value = match.build(*operands)
        if value.shape != aval.shape:
            raise ValueError(f"the replacement has shape {value.shape}; the original {aval.shape}")
        if value.dtype != aval.dtype or jax.typeof(value).weak_type != aval.weak_type:
            value = lax.convert_element_type_p.bind(
                value, new_dtype=aval.dtype, weak_type=bool(aval.weak_type), sharding=None
            )
    return value, choices
