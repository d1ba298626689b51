# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""`verify=True`: the passes' work held to the original program on the values of one call.

    difference = check(name, jaxpr, passes, leaves)
    if difference is not None:
        warnings.warn(difference.message(name))  # and run the original; or strict: raise

The passes run one after another, and each is judged by its own step. Of a rewriting pass, every
match is evaluated beside the equations that it replaces, on the values that this call has there; in
bodies of jit, scan, while, cond and checkpoint at each step of the loop (of long loops the first 64
and the last 2). Of any other pass, the variables that both programs have are compared, at every
level; of one that keeps no variable, the results. The first difference is then narrowed to the
least program on which the pass still goes wrong.

What counts as equal: in the exact tier every bit, both sides evaluated equation by equation, since
XLA rounds fused equations as it likes. In the close tier the row's own `tol`, else that of the
operator, else the `TOLERANCES` of `compare`; or four times what rounding each equation of the
original at random does to it, where that is more. NaN and infinities must stand in the same places;
attention that was given a mask may have 0 where no key is visible, as its contract says.

The original's effects do not run here (see `evaluation`): equations that depend on the
result of one are not checked. Not checked either: a compiled function inside a transformation, as
it has no values there; a derivative that JAX takes of the rewritten program; a match in a loop
inside a shard_map, and what an exact pass does there is compared as a whole.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from tpjax.core import _jax
from tpjax.stax.verification import reproducer
from tpjax.stax.verification.compare import distance, gap, host
from tpjax.stax.verification.evaluation import UNKNOWN, concrete, enter, read, run_equation
from tpjax.stax.verification.faults import (
    ROUNDINGS,
    SLACK,
    Fault,
    FoundError,
    differs,
    moved,
    printed,
    rounding_spread,
    tolerance,
    values_of,
    within,
)  # fmt: skip
from tpjax.stax.verification.slices import original, probes, replaced, slice_of
from tpjax.stax.verification.sweeps import check_sweep
from tpjax.stax_passes.engine import (
    Built,
    replacements,
    rows_of,
)
from tpjax.stax_passes.graph import Graph, Node, build
from tpjax.stax_passes.match import Match
from tpjax.stax_passes.pipeline import optimize

NEAR = 1e-4
"""Relative error of a whole program up to which nobody asks where it comes from."""


@dataclass(frozen=True)
class Difference:
    """The first equation at which an optimised program differs from the original."""

    rule: str
    """The rule, or the pass."""
    primitive: str
    equation: str
    """The original equation, as JAX prints it; of a match, the one that makes its result."""
    source: str
    """file:line of the user's code that made the equation."""
    where: str
    """The body and the step in which it stands, or the empty string."""
    detail: str
    """How the values differ, in words."""
    max_abs: float
    max_rel: float
    index: tuple[int, ...]
    reproducer: str | None
    """Path of a Python file that shows the difference by itself."""
    note: str = ""
    """Why there is no reproducer, or what it cannot show."""

    def message(self, name: str) -> str:
        """Returns the warning: what differs in the function `name`, where, and how to see it."""
        return f"compile: {name} runs as written: {self._finding()}"

    def strict_message(self, name: str) -> str:
        """Returns what to raise instead under `strict`."""
        return f"compile: strict=True, and in {name} {self._finding()}"

    def _finding(self) -> str:
        place = f"{self.source}{f', {self.where}' if self.where else ''}"
        shown = f"Reproducer: {self.reproducer}." if self.reproducer else "No reproducer:"
        note = f" {self.note}" if self.note else ""
        return (
            f"{self.rule} changes the value of `{self.equation}` ({place}): {self.detail}. "
            f"{shown}{note}"
        )


def check(
    name: str,
    jaxpr: _jax.Jaxpr,
    passes: Sequence[Any],
    leaves: Sequence[Any],
    *,
    folder: str | Path | None = None,
) -> Difference | None:
    """Returns where the passes change what the jaxpr computes on the leaves, or None.

    Call it outside every trace. It never raises: what it cannot judge it passes over, with a
    warning where that is the whole call.

    Args:
      name: the function's, for the warning and the reproducer.
      jaxpr: the original program.
      passes: as of `optimize`.
      leaves: concrete values of the jaxpr's inputs; not donated, not changed.
      folder: where to write the reproducer; None: a temporary folder.
    """
    values = [concrete(leaf) for leaf in leaves]
    try:
        for run, before, after in _steps(jaxpr, passes):
            fault = _fault(run, before, after, values)
            if fault is not None:
                return _difference(name, fault, folder)
    except Exception as error:
        warnings.warn(
            f"compile: {name} could not be verified: {type(error).__name__}: {error}", stacklevel=3
        )
    return None


def _steps(jaxpr: _jax.Jaxpr, passes: Sequence[Any]) -> list[tuple[Any, _jax.Jaxpr, _jax.Jaxpr]]:
    """Returns each pass with the programs before and after it, where it changed anything."""
    history: list[tuple[Any, _jax.Jaxpr, _jax.Jaxpr]] = []

    def watched(run: Any) -> Any:
        def step(before: _jax.Jaxpr) -> Any:
            if before is jaxpr:
                history.clear()  # nothing was changed so far, or all is run again
            result, report = run(before)
            history.append((run, before, result))
            return result, report

        step.__name__ = getattr(run, "__name__", type(run).__name__)
        return step

    nested = [tuple(map(watched, p)) if isinstance(p, tuple | list) else watched(p) for p in passes]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whoever asks has been warned of what fails
        final, _ = optimize(jaxpr, nested)
    if not history:
        return []  # no pass ran to its end
    inputs = [before for _, before, _ in history[1:]] + [final]
    steps = zip(history, inputs, strict=True)
    return [step for step, next_input in steps if step[2] is next_input and step[1] is not step[2]]


def _fault(run: Any, before: _jax.Jaxpr, after: _jax.Jaxpr, values: list[Any]) -> Fault | None:
    try:
        if rows_of(run):
            rewrite = _Rewrite(run)
            results = rewrite.level(before, values, "")
            _whole(run, rewrite, before, after, values, results)
            return None
        check_sweep(run, before, after, values)
        return None
    except FoundError as found:
        return found.fault


Matches = dict[int, tuple[Any, Built]]
"""By the value that is replaced: the row, and its match with what stands there."""


class _Rewrite:
    """Evaluates a program and, at each match of a pass, what the pass puts there."""

    def __init__(self, run: Any) -> None:
        self.run, self.rows = run, rows_of(run)
        self.found: dict[int, tuple[_jax.Jaxpr, Graph, Matches]] = {}
        self.excused = False
        """Whether a row's contract has let values pass that are far apart."""
        self.spread: dict[tuple[int, int], float] = {}
        """By graph and root, how far rounding alone moves a value, where that was asked."""
        self.noise: np.random.Generator | None = None

    def read(self, jaxpr: _jax.Jaxpr) -> tuple[Graph, Matches]:
        """Returns the level's graph and matches, read once."""
        if id(jaxpr) not in self.found:
            graph = build(jaxpr)
            self.found[id(jaxpr)] = jaxpr, graph, replacements(graph, self.rows)
        return self.found[id(jaxpr)][1:]

    def touches(self, eqn: _jax.Equation) -> bool:
        """Returns whether there is a match in a body of the equation."""
        with _jax.inside(eqn):
            for body in _jax.subjaxprs(eqn):
                graph, matches = self.read(body)
                if matches or any(self.touches(node.eqn) for node in graph.nodes):
                    return True
        return False

    def shaken(self, jaxpr: _jax.Jaxpr, values: list[Any], seed: int) -> list[Any]:
        """Returns the results where each match's value is moved by as much as its row allows."""
        self.noise = np.random.default_rng(seed)
        try:
            return self.level(jaxpr, values, "")
        finally:
            self.noise = None

    def level(self, jaxpr: _jax.Jaxpr, values: list[Any], where: str) -> list[Any]:
        """Returns the results of the level; raises `FoundError` at the first difference."""
        graph, matches = self.read(jaxpr)
        env = dict(graph.known)
        env.update(zip(graph.inputs, values, strict=True))
        gone = _last_uses(graph, matches)
        for index, node in enumerate(graph.nodes):
            outs = self.equation(node, [env[i] for i in node.ins], where)
            env.update(zip(node.outs, outs, strict=True))
            for root in node.outs:
                if root in matches:
                    self.match(graph, *matches[root], env, where)
            for value in gone.get(index, ()):
                env.pop(value, None)
        return [env[value] for value in graph.outputs]

    def equation(self, node: Node, ins: list[Any], where: str) -> list[Any]:
        """Returns the equation's results, and looks into its bodies where a match is in them."""
        eqn = node.eqn
        bodies = _jax.subjaxprs(eqn)
        if not bodies or not self.touches(eqn):
            return run_equation(eqn, ins)
        if eqn.primitive.name == "shard_map":
            return self.sharded(eqn, ins, where)

        def body(k: int, values: list[Any], step: str) -> list[Any]:
            return self.level(bodies[k], values, within(where, eqn, step))

        return enter(eqn, ins, body)

    def sharded(self, eqn: _jax.Equation, ins: list[Any], where: str) -> list[Any]:
        """Compares what each device has at each match of a shard_map's body.

        A match in a loop inside it is not looked at.
        """
        outs = run_equation(eqn, ins)
        if self.noise is not None or any(x is UNKNOWN for x in outs):
            self.excused = True  # nobody asks how this moves the results
            return outs
        with _jax.inside(eqn):
            graph, matches = self.read(_jax.subjaxprs(eqn)[0])
        roots = sorted(matches, key=lambda root: graph.producer[root])
        found = [matches[root] for root in roots]
        measured = probes(eqn, graph, [built for _, built in found], ins, ROUNDINGS)
        self.excused |= bool(found)
        for root, (row, built), devices in zip(roots, found, measured, strict=True):
            tol = tolerance(row, built.match.op, built.choices, graph.dtype(root))
            for at in devices:
                spread = SLACK * max(distance(x, at.expected) for x in at.rounded)
                spread = 0.0 if tol is None else spread
                blind = _blind_queries(built.match, at.value)
                gone = gap(at.value, at.expected, tol, spread=spread, excused=blind)
                if gone is not None:
                    place = within(where, eqn, f"device {at.device}")
                    kept = slice_of(graph, built.match)
                    with _jax.inside(eqn):
                        old = original(graph, built.match, kept)
                        new = replaced(graph, built, kept)
                    made = kept.nodes[-1].eqn
                    raise FoundError(
                        Fault(row.name, made, place, gone, tol, old, new, at.inputs, self.run)
                    )
        return outs

    def match(self, graph: Graph, row: Any, built: Built, env: dict[int, Any], where: str) -> None:
        """Raises `FoundError` where the replacement differs from the value of the match's root."""
        match = built.match
        operands, expected = [env[i] for i in match.operands], env[match.root]
        if any(x is UNKNOWN for x in (expected, *operands)):
            return
        tol = tolerance(row, match.op, built.choices, graph.dtype(match.root))
        if self.noise is not None:
            spread = self.spread.get((id(graph), match.root), 0.0)
            env[match.root] = moved(expected, tol or 0.0, spread, self.noise)
            return
        (value,) = jaxpr_as_fun(built.jaxpr)(*operands)
        if tol is not None and gap(value, expected, tol) is None:
            return
        kept = slice_of(graph, match)
        before, after = original(graph, match, kept), replaced(graph, built, kept)
        values = [env[i] for i in kept.inputs]
        if tol is None:  # a compiled call may round as it likes: equation by equation, then
            found = differs(after, before, values, None)
        else:
            spread = rounding_spread(before, values, expected)
            place = id(graph), match.root
            self.spread[place] = max(spread, self.spread.get(place, 0.0))
            blind = _blind_queries(match, value)
            found = gap(value, expected, tol, spread=spread, excused=blind)
            self.excused |= found is None and blind is not None
        if found is not None:
            eqn = kept.nodes[-1].eqn
            raise FoundError(
                Fault(row.name, eqn, where, found, tol, before, after, values, self.run)
            )


def _blind_queries(match: Match, value: Any) -> np.ndarray | None:
    """Returns where attention gives 0 because, as its contract says, a query sees no key."""
    if match.op != "flash_attention" or len(match.operands) <= 3:
        return None
    return host(value) == 0


def _last_uses(graph: Graph, matches: Matches) -> dict[int, list[int]]:
    """Returns the values that nothing reads after the node of each index."""
    last = {value: max(users) for value, users in graph.users.items()}
    for root, (_, built) in matches.items():
        match = built.match
        at = graph.producer[root]
        for value in (root, *match.operands, *slice_of(graph, match).inputs):
            last[value] = max(at, last.get(value, 0))
    gone: dict[int, list[int]] = {}
    for value, index in last.items():
        if value not in graph.outputs and value not in graph.known:
            gone.setdefault(index, []).append(value)
    return gone


# -- the engine's own part ------------------------------------------------------------------------


def _whole(
    run: Any, rewrite: _Rewrite, before: _jax.Jaxpr, after: _jax.Jaxpr, values: list[Any],
    results: list[Any],
) -> None:  # fmt: skip
    """Raises `FoundError` where the engine, not a row, has changed the program.

    Every match agrees within its contract, so the results may be as far apart as they move when the
    original's values are shaken there by as much as the contracts allow; no further.
    """
    env = values_of(after, values, {v for v in after.outvars if isinstance(v, _jax.Var)})
    pairs = [(read(env, atom), x) for atom, x in zip(after.outvars, results, strict=True)]
    if rewrite.excused:
        return
    known = [a is not UNKNOWN and e is not UNKNOWN for a, e in pairs]
    if not any(k and gap(a, e, NEAR) for (a, e), k in zip(pairs, known, strict=True)):
        return
    shaken = [rewrite.shaken(before, values, seed) for seed in range(ROUNDINGS)]
    for i, (actual, expected) in enumerate(pairs):
        moved = [other[i] for other in shaken]
        if not known[i] or any(x is UNKNOWN for x in moved):
            continue
        spread = SLACK * max(distance(x, expected) for x in moved)
        found = gap(actual, expected, NEAR, spread=spread)
        if found is None or (spread and not jnp.issubdtype(actual.dtype, jnp.inexact)):
            continue
        target = before.outvars[i]
        eqn = next((e for e in before.eqns if target in e.outvars), None)
        raise FoundError(Fault(run.__name__, eqn, "", found, NEAR, before, after, values, run))


# -- what is told ---------------------------------------------------------------------------------


def _difference(name: str, fault: Fault, folder: str | Path | None) -> Difference:
    eqn = fault.eqn
    path, note = reproducer.write(name, fault, folder)
    return Difference(
        rule=fault.rule,
        primitive="" if eqn is None else eqn.primitive.name,
        equation="a result" if eqn is None else printed(eqn),
        source="unknown" if eqn is None else _jax.source_of(eqn),
        where=fault.where,
        detail=fault.gap.text,
        max_abs=fault.gap.max_abs,
        max_rel=fault.gap.max_rel,
        index=fault.gap.index,
        reproducer=path,
        note=note,
    )
