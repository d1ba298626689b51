# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The rewriting engine: rows of what to recognise and what to put there become a `Pass`.

A row is a `Recogniser` (an anchor primitive and a function that reads the graph around it) or a
`Rule` (an ordinary JAX function as the pattern; `tpjax.stax_passes.unify`). The engine finds
matches, refuses those whose interior values are used elsewhere, and re-traces the level with the
replacements in place, each as if written where the user wrote what it replaces. It builds no
equation by hand.
"""

import inspect
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
from jax import lax

from tpjax.core import _jax, parts
from tpjax.core.errors import UnsupportedError
from tpjax.core.operator import Choice
from tpjax.pallas.dispatch import record_choices
from tpjax.pallas.failures import current_rule
from tpjax.stax_passes.graph import Graph, Node, build, live, units
from tpjax.stax_passes.match import Match
from tpjax.stax_passes.report import Hit, NearMiss, Report, Tier
from tpjax.stax_passes.transfer import MAX_ATTEMPTS, Attempt, NotAlike, questions, transferred


class Bound(NamedTuple):
    """Largest errors against float64, in ulps of the dtype at the result's scale."""

    dtype: str
    value: float
    gradient: float
    times_original: float = 0.0
    """Where the original's own error times this is larger, that is the bound."""


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
    ulps: tuple["Bound", ...] = ()
    """How far from float64 the result may be; `tpjax.stax_passes.accuracy` measures it."""


SIDE_EFFECTS = frozenset(
    {"debug_print", "debug_callback", "io_callback", "swap", "masked_swap", "addupdate"}
)
"""Primitives that no replacement may have; kernels in the interpreter have effects of their own."""


@dataclass
class _Log:
    hits: list[Hit] = field(default_factory=list)
    near_misses: list[NearMiss] = field(default_factory=list)


@dataclass(frozen=True)
class Built:
    """A replacement, traced at the types of its operands, and dispatch's choices on the way."""

    match: Match
    jaxpr: _jax.Jaxpr
    choices: tuple[Choice, ...]


@dataclass
class _Run:
    """One run of a pass: what it logs, and what it need not do twice."""

    rows: tuple[Any, ...]
    log: _Log = field(default_factory=_Log)
    bodies: dict[int, tuple[_jax.Jaxpr, _jax.Jaxpr, list[Hit]]] = field(default_factory=dict)
    """By id, the levels that were rewritten and their hits: a repeated layer is read once."""
    built: dict[Any, tuple[Any, "Built | Exception"]] = field(default_factory=dict)


def rewriting_pass(
    name: str, rows: tuple[Any, ...]
) -> Callable[[_jax.Jaxpr], tuple[_jax.Jaxpr, Report]]:
    """Returns the pass that applies the rows, in order, at every level it may enter.

    Args:
      name: the pass's name in reports.
      rows: `Recogniser`s and `Rule`s; where two match the same value the earlier wins.
    """

    def rewrite(jaxpr: _jax.Jaxpr) -> tuple[_jax.Jaxpr, Report]:
        run = _Run(rows)
        before = _jax.count_equations(jaxpr)
        result = _rewrite(jaxpr, run)
        log = run.log
        log.near_misses.extend(filter(None, map(_untraceable, rows)))
        after = _jax.count_equations(result) if log.hits else before
        return result, Report(name, tuple(log.hits), tuple(log.near_misses), before, after)

    rewrite.__name__ = name
    rewrite.__doc__ = f"Applies {', '.join(row.name for row in rows)}."
    rewrite.rows = rows  # pyright: ignore[reportFunctionMemberAccess]
    return rewrite


def rows_of(run: Callable[..., Any]) -> tuple[Any, ...]:
    """Returns the rows of a pass that `rewriting_pass` made; of any other pass, none."""
    return getattr(run, "rows", ())


def replacements(graph: Graph, rows: tuple[Any, ...]) -> dict[int, tuple[Any, "Built"]]:
    """Returns what the rows put in the graph, by the value that it stands for."""
    run = _Run(rows)
    return _build_all(graph, _find(graph, run), run)


def _rewrite(jaxpr: _jax.Jaxpr, run: _Run) -> _jax.Jaxpr:
    """Returns the level rewritten, bodies first."""
    if id(jaxpr) in run.bodies:
        _, result, hits = run.bodies[id(jaxpr)]
        run.log.hits.extend(hits)  # every call of a body is a place of its own
        return result
    first = len(run.log.hits)
    graph = build(jaxpr)
    matches = _find(graph, run)
    bodies: dict[int, _jax.Equation] = {}
    for index, node in enumerate(graph.nodes):
        inner = _jax.subjaxprs(node.eqn)
        if not inner:
            continue
        with _jax.inside(node.eqn):
            new = [_rewrite(body, run) for body in inner]
        if any(a is not b for a, b in zip(inner, new, strict=True)):
            bodies[index] = _jax.with_subjaxprs(node.eqn, new)
    built = _build_all(graph, matches, run)
    result = _emit(jaxpr, graph, built, bodies, run.log) if built or bodies else jaxpr
    run.bodies[id(jaxpr)] = (jaxpr, result, run.log.hits[first:])
    return result


def _find(graph: Graph, run: _Run) -> dict[int, tuple[Any, Match]]:
    """Returns the matches by root value; what almost matched goes to the log."""
    found: dict[int, tuple[Any, Match]] = {}
    taken: set[int] = set()
    for row in run.rows:
        if hasattr(row, "prepare"):
            row.prepare(graph)
        attempts: dict[Any, list[Attempt]] = {}
        for node in graph.nodes:
            if node.name not in row.anchor:
                continue
            try:
                match = _look(row, graph, node, attempts)
            except Exception as cause:
                run.log.near_misses.append(_failed(row, node, cause))
                continue
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
            run.log.near_misses.append(NearMiss(row.name, _jax.source_of(node.eqn), match))
    return found


def _look(
    row: Any, graph: Graph, node: Node, attempts: dict[Any, list[Attempt]]
) -> "Match | str | None":
    """Returns what the row finds at the node, carried over from a place alike if there is one."""
    types = tuple(graph.avals[v] for v in (*node.ins, *node.outs))
    alike = attempts.setdefault((node.eqn.primitive, types), [])
    for attempt in alike[: -MAX_ATTEMPTS - 1 : -1]:
        try:
            return transferred(graph, attempt, node)
        except NotAlike:
            continue
    with graph.watched() as reads:
        finding = row.extract(graph, node)
    alike.append(Attempt(node, questions(reads), finding))
    return finding


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


def _build_all(
    graph: Graph, matches: dict[int, tuple[Any, Match]], run: _Run
) -> dict[int, tuple[Any, Built]]:
    """Returns the replacements of the matches; where one fails the original equations stay."""
    result: dict[int, tuple[Any, Built]] = {}
    for root, (row, match) in matches.items():
        token = current_rule.set(row.name)
        try:
            result[root] = row, _build(graph, match, run)
        except UnsupportedError:
            raise  # an implementation that was asked for by name: the caller must know
        except Exception as cause:
            node = graph.node_of(root)
            assert node is not None, "a root is made by a node"
            run.log.near_misses.append(_failed(row, node, cause))
        finally:
            current_rule.reset(token)
    return result


def _build(graph: Graph, match: Match, run: _Run) -> Built:
    """Returns the replacement as a jaxpr of the root's type, made once for equal matches."""
    node = graph.node_of(match.root)
    assert node is not None, "a root is made by a node"
    avals = tuple(graph.avals[v] for v in match.operands)
    aval = graph.avals[match.root]
    place = _jax.source_of(node.eqn), node.eqn.ctx
    key = id(match.build), match.casts, avals, aval, place
    if key not in run.built:
        # beside the function, so that no other gets its id meanwhile
        run.built[key] = match.build, _build_anew(node.eqn, match, avals, aval)
    _, built = run.built[key]
    if isinstance(built, Exception):
        raise built
    return Built(match, built.jaxpr, built.choices)


def _build_anew(eqn: _jax.Equation, match: Match, avals: Any, aval: Any) -> "Built | Exception":
    try:
        with record_choices() as choices:
            jaxpr = _jax.traced_at(eqn, lambda *x: _of_type(aval, match, x), avals)
        effects = SIDE_EFFECTS.intersection(_jax.lasting(jaxpr))
        if effects:
            raise ValueError(f"the replacement has side effects: {', '.join(sorted(effects))}")
    except UnsupportedError:
        raise
    except Exception as error:
        return error
    return Built(match, jaxpr, tuple(choices))


def _of_type(aval: Any, match: Match, operands: tuple[Any, ...]) -> Any:
    """Returns the replacement's value, brought to the type that stood there."""
    value = match.build(*operands)
    if not jax.tree_util.all_leaves([value]) or value is None:
        raise TypeError(f"the replacement returns a {type(value).__name__}; the original an array")
    got = jax.typeof(value)
    if got.shape != aval.shape:
        raise ValueError(f"the replacement has shape {got.shape}; the original {aval.shape}")
    if got.dtype != aval.dtype and not match.casts:
        raise ValueError(f"the replacement has dtype {got.dtype}; the original {aval.dtype}")
    if got.dtype != aval.dtype or got.weak_type != aval.weak_type:
        value = lax.convert_element_type_p.bind(
            value, new_dtype=aval.dtype, weak_type=bool(aval.weak_type), sharding=None
        )
    made = jax.typeof(value)
    if made != aval and not match.casts:  # another sharding, or varying over other mesh axes
        raise ValueError(f"the replacement is {made}; the original {aval}")
    return value


def _failed(row: Any, node: Node, cause: Exception) -> NearMiss:
    """Returns the near miss of a row that raised at the node, and warns once of it."""
    reason = f"the rule raised {type(cause).__name__}: {cause}"
    source = _jax.source_of(node.eqn)
    _warn_once(
        row, (node.name, source), f"{row.name}: {reason} (in place of {node.name}, {source})"
    )
    return NearMiss(row.name, source, reason, failed=True)


def _untraceable(row: Any) -> NearMiss | None:
    """Returns the near miss of a rule whose pattern raises everywhere, and warns once of it."""
    malformed, error = getattr(row, "malformed", None), getattr(row, "error", None)
    if malformed is None and (error is None or row.was_traced):
        return None
    reason = malformed or (
        f"its pattern raised {type(error).__name__} at all types it was tried with: {error}"
    )
    source = _line_of(row.pattern)
    _warn_once(row, (source,), f"{row.name}: {reason} ({source})")
    return NearMiss(row.name, source, reason, failed=True)


def _line_of(fn: Any) -> str:
    """Returns "file:line" of where a function is written, or its name."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    if code is None:
        return getattr(fn, "__name__", type(fn).__name__)
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"


_warned: "WeakKeyDictionary[Any, set[Any]]" = WeakKeyDictionary()


def _warn_once(row: Any, place: tuple[str, ...], text: str) -> None:
    """Warns that a row failed at a place: once, however often the place is traced."""
    places = _warned.setdefault(row, set())
    if place not in places:
        places.add(place)
        warnings.warn(f"{text}. The original code runs.", stacklevel=2)


def _emit(
    jaxpr: _jax.Jaxpr,
    graph: Graph,
    matches: dict[int, tuple[Any, Built]],
    bodies: dict[int, _jax.Equation],
    log: _Log,
) -> _jax.Jaxpr:
    """Returns the level re-traced with the matches replaced and the new bodies in place."""
    operands = {root: built.match.operands for root, (_, built) in matches.items()}
    read = {value for match in operands.values() for value in match}
    interior = {value for _, built in matches.values() for value in built.match.interior}
    touched = {graph.producer[v] for v in (*interior, *operands) if v in graph.producer}
    order = live(graph, list(units(graph, touched | set(bodies), read)), operands)
    swapped = {id(graph.nodes[index]): eqn for index, eqn in bodies.items()}
    hits: list[Hit] = []

    def run(*args: Any) -> list[Any]:
        hits.clear()
        env = dict(graph.known)
        env.update(zip(graph.inputs, args, strict=True))
        for node in order:
            root = next((value for value in node.outs if value in matches), None)
            if root is not None:
                row, built = matches[root]
                values = [env[i] for i in built.match.operands]
                (env[root],) = _jax.run_at(node.eqn, built.jaxpr, *values)
                hits.append(Hit(row.name, _jax.source_of(node.eqn), built.match.op, built.choices))
            else:
                eqn = swapped.get(id(node), node.eqn)
                env.update(zip(node.outs, _jax.bind(eqn, *(env[i] for i in node.ins)), strict=True))
        return [env[value] for value in graph.outputs]

    result = parts.retraced(run, jaxpr)
    log.hits.extend(hits)
    return result
