# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Makes what is repeated one thing: equal bodies one jaxpr, equal runs of equations one jit.

A Transformer written as a Python loop is one long list in which a layer's equations stand again and
again. JAX differentiates, batches and lowers each copy on its own; a body that is one object it
does once. XLA inlines the calls, so that what runs is the same.
"""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from tpjax.core import _jax, parts
from tpjax.stax_passes.hashing import literal_key, signature
from tpjax.stax_passes.hoist import HEAVY, SLOW, names_in
from tpjax.stax_passes.report import Report
from tpjax.stax_passes.share import APART, LAYER, has_gradient
from tpjax.stax_passes.sweep import Edited, ExactRule, Level, Log, sweeping_pass

MIN_EQUATIONS = 8
"""Equations of the shortest run that becomes a call."""
MIN_SAVED = 64
"""Equations that the calls must save, all together."""
MAX_PERIODS = 8
"""Lengths of a run that are tried at a level."""
MAX_SUNK = 64
"""Equations that may be repeated in every layer for what all layers read."""
MAX_SLOW = 4096
"""Elements of such a value up to which it may be a slow function."""
MAX_STARTS = 64
"""Places at which a run may begin that are tried."""


# -- equal bodies ---------------------------------------------------------------------------------


class _Bodies:
    """The edit of all levels that puts, for a body, the first one equal to it."""

    def __init__(self) -> None:
        self.known: dict[Hashable, _jax.Jaxpr] = {}

    def __call__(self, level: Level, eqn: _jax.Equation) -> Edited:
        bodies = _jax.subjaxprs(eqn)
        first = [self._first(body) for body in bodies]
        if all(a is b for a, b in zip(first, bodies, strict=True)):
            return eqn
        level.log.hit("equal_body", eqn)
        return _jax.with_subjaxprs(eqn, first)

    def _first(self, body: _jax.Jaxpr) -> _jax.Jaxpr:
        key = _structure(body)
        return body if key is None else self.known.setdefault(key, body)


def _structure(body: _jax.Jaxpr) -> Hashable | None:
    """Returns what makes two bodies the same program at the same lines; None: it has effects."""
    if body.effects:
        return None
    number: dict[Any, int] = {}
    for var in (*body.constvars, *body.invars):
        number[var] = len(number)

    def key(atom: Any) -> Hashable | None:
        return literal_key(atom) if isinstance(atom, _jax.Literal) else number[atom]

    rows: list[Hashable] = []
    for eqn in body.eqns:
        row = signature(eqn), *map(key, eqn.invars)
        if None in row:
            return None
        rows.append((row, _jax.source_of(eqn)))
        for var in eqn.outvars:
            number[var] = len(number)
    outs = tuple(map(key, body.outvars))
    if None in outs:
        return None
    return tuple(v.aval for v in body.invars), tuple(map(id, body.consts)), tuple(rows), outs


def share_bodies(jaxpr: _jax.Jaxpr) -> tuple[_jax.Jaxpr, Report]:
    """Makes equal bodies of calls and loops one object, so that they are rewritten once."""
    edit = _Bodies()
    return sweeping_pass("share_bodies", "", lambda level: edit, BODIES)(jaxpr)


BODIES = (ExactRule("equal_body", None),)
share_bodies.exact_rules = BODIES  # pyright: ignore[reportFunctionMemberAccess]


# -- equal runs of equations ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Runs:
    """Equal runs of equations: `count` of them, `length` equations each, one after the other."""

    start: int
    length: int
    count: int

    @property
    def saved(self) -> int:
        return (self.count - 1) * self.length


def share_layers(jaxpr: _jax.Jaxpr) -> tuple[_jax.Jaxpr, Report]:
    """Makes equal runs of equations, such as the layers of a Python loop, calls of one jit."""
    log = Log(LAYERS)
    result = _walk(jaxpr, log, {})
    return result, log.report("share_layers", jaxpr, result)


LAYERS = (ExactRule("repeated_layer", None),)
share_layers.exact_rules = LAYERS  # pyright: ignore[reportFunctionMemberAccess]


def _walk(jaxpr: _jax.Jaxpr, log: Log, done: dict[int, Any]) -> _jax.Jaxpr:
    """Returns the level with its runs as calls; bodies first, each once."""
    if id(jaxpr) in done:
        return done[id(jaxpr)][1]
    eqns: list[_jax.Equation] = []
    for eqn in jaxpr.eqns:
        bodies = _jax.subjaxprs(eqn)
        with _jax.inside(eqn):
            new = [_walk(body, log, done) for body in bodies]
        same = all(a is b for a, b in zip(new, bodies, strict=True))
        eqns.append(eqn if same else _jax.with_subjaxprs(eqn, new))
    changed = any(a is not b for a, b in zip(eqns, jaxpr.eqns, strict=True))
    while len(eqns) >= MIN_SAVED and (called := _Level(jaxpr, eqns).called(log)) is not None:
        eqns, changed = called, True
    result = _jax.edited(jaxpr, eqns, jaxpr.outvars) if changed else jaxpr
    done[id(jaxpr)] = (jaxpr, result)  # the key is an id: the jaxpr must live as long
    return result


class _Level:
    """The equations of one level, and where runs of them stand again."""

    def __init__(self, jaxpr: _jax.Jaxpr, eqns: list[_jax.Equation]) -> None:
        self.eqns = eqns
        ids: dict[Hashable, int] = {}
        self.signs = [ids.setdefault(_sign(eqn, i), i) for i, eqn in enumerate(eqns)]
        self.maker = {var: i for i, eqn in enumerate(eqns) for var in eqn.outvars}
        self.varying = {v for v in jaxpr.invars if has_gradient(v.aval)}
        """Inputs that may have a gradient."""
        self.last: dict[Any, int] = {}
        """By variable, the last equation that reads it."""
        for i, eqn in enumerate(eqns):
            self.last.update((v, i) for v in eqn.invars if isinstance(v, _jax.Var))
        self.last.update((v, len(eqns)) for v in jaxpr.outvars if isinstance(v, _jax.Var))

    def called(self, log: Log) -> list[_jax.Equation] | None:
        """Returns the level with the run that saves most as calls, or None."""
        found = max(self._repeats(), key=lambda runs: runs.saved, default=None)
        if found is None or found.saved < MIN_SAVED:
            return None
        runs = self._alike(self._best_start(found))
        if runs.saved < MIN_SAVED:
            return None
        first = self.eqns[runs.start]
        log.hit("repeated_layer", first)
        calls = self._calls(runs)
        stop = runs.start + runs.count * runs.length
        return [*self.eqns[: runs.start], *calls, *self.eqns[stop:]]

    def _repeats(self) -> list[_Runs]:
        """Returns, for each length that may be one, the longest repetition of that length."""
        distances: Counter[int] = Counter()
        before: dict[int, int] = {}
        for i, sign in enumerate(self.signs):
            if sign in before:
                distances[i - before[sign]] += 1
            before[sign] = i
        likely = [d for d, _ in distances.most_common() if d >= MIN_EQUATIONS][:MAX_PERIODS]
        return [runs for d in likely if (runs := self._repetition(d)) is not None]

    def _repetition(self, length: int) -> _Runs | None:
        best, start = None, 0
        equal = [a == b for a, b in zip(self.signs, self.signs[length:], strict=False)]
        for i, same in enumerate([*equal, False]):
            if not same:
                count = (i - start) // length + 1
                if count > 1 and (best is None or count > best.count):
                    best = _Runs(start, length, count)
                start = i + 1
        return best

    def _best_start(self, runs: _Runs) -> _Runs:
        """Returns the runs moved to where the fewest values pass from one to the next."""
        stop = runs.start + runs.count * runs.length
        while stop < len(self.signs) and self.signs[stop] == self.signs[stop - runs.length]:
            stop += 1
        tried = []
        step = max(1, runs.length // MAX_STARTS)
        for start in range(runs.start, min(runs.start + runs.length, stop), step):
            count = (stop - start) // runs.length
            if count > 1:
                passing = self._passing(start + runs.length, start)
                tried.append((passing - count, start, count))
        _, start, count = min(tried)
        return _Runs(start, runs.length, count)

    def _passing(self, at: int, since: int) -> int:
        """Returns how many values made since then are read at `at` or later."""
        made = (var for eqn in self.eqns[since:at] for var in eqn.outvars)
        return sum(self.last.get(var, -1) >= at for var in made)

    def _alike(self, runs: _Runs) -> _Runs:
        """Returns the longest stretch of the runs whose equations read each other alike."""
        starts = [runs.start + i * runs.length for i in range(runs.count)]
        wires = [self._wiring(start, runs.length)[0] for start in starts]
        best, since = _Runs(runs.start, runs.length, 1), 0
        for i in range(1, runs.count + 1):
            if i == runs.count or wires[i] != wires[since]:
                if i - since > best.count:
                    best = _Runs(starts[since], runs.length, i - since)
                since = i
        return best

    def _wiring(self, start: int, length: int) -> tuple[list[Hashable], list[_jax.Var]]:
        """Returns where each operand of a run comes from, and the values from outside, in order."""
        outside: dict[_jax.Var, int] = {}
        wires: list[Hashable] = []
        for i in range(start, start + length):
            for atom in self.eqns[i].invars:
                if isinstance(atom, _jax.Literal):
                    continue
                made = self.maker.get(atom, -1)
                if start <= made < i:
                    place = next(j for j, v in enumerate(self.eqns[made].outvars) if v is atom)
                    wires.append((made - start, place))
                else:
                    wires.append(outside.setdefault(atom, len(outside)))
        return wires, list(outside)

    def _calls(self, runs: _Runs) -> list[_jax.Equation]:
        """Returns the runs as calls of one jit."""
        length = runs.length
        starts = [runs.start + i * length for i in range(runs.count)]
        results = sorted({
            (i - start, j)
            for start in starts
            for i in range(start, start + length)
            for j, var in enumerate(self.eqns[i].outvars)
            if self.last.get(var, -1) >= start + length
        })  # fmt: skip
        wired = [self._wiring(start, length)[1] for start in starts]
        shared = [same[0] for same in zip(*wired, strict=True) if len(set(same)) == 1]
        sunk = self._sunk(shared, runs.start)
        inside = {var for i in sunk for var in self.eqns[i].outvars}
        keep = [i for i, var in enumerate(wired[0]) if var not in inside]
        reads = (v for i in sunk for v in self.eqns[i].invars if isinstance(v, _jax.Var))
        first = [v for v in dict.fromkeys(reads) if v not in inside and v not in wired[0]]
        body = [self.eqns[i] for i in sunk] + self.eqns[starts[0] : starts[0] + length]
        operands = [*first, *(wired[0][i] for i in keep)]
        template = _jit_of(
            body, operands, [self.eqns[starts[0] + i].outvars[j] for i, j in results]
        )
        return [
            template.replace(
                invars=[*first, *(outside[i] for i in keep)],
                outvars=[self.eqns[start + i].outvars[j] for i, j in results],
            )
            for start, outside in zip(starts, wired, strict=True)
        ]

    def _sunk(self, shared: list[_jax.Var], before: int) -> list[int]:
        """Returns the equations, in order, to repeat inside: they make what all runs read alike.

        Such as a mask: a pattern that reads it must see how it is made. Only what is quick, and has
        no gradient.
        """
        sunk: set[int] = set()
        for var in shared:
            needed = self._makers(var)
            quick = all(i < before and _is_quick(self.eqns[i]) for i in needed)
            reads = {v for i in needed for v in self.eqns[i].invars if isinstance(v, _jax.Var)}
            if quick and len(sunk | needed) <= MAX_SUNK and not reads & self.varying:
                sunk |= needed
        return sorted(sunk)

    def _makers(self, var: _jax.Var) -> set[int]:
        """Returns the equations that the value needs."""
        needed, stack = set[int](), [var]
        while stack:
            i = self.maker.get(stack.pop(), -1)
            if i >= 0 and i not in needed:
                needed.add(i)
                stack.extend(v for v in self.eqns[i].invars if isinstance(v, _jax.Var))
        return needed


def _is_quick(eqn: _jax.Equation) -> bool:
    """Returns whether to compute the equation in every layer costs next to nothing."""
    if eqn.effects or _jax.must_stay(eqn) or eqn.primitive.name in APART:
        return False
    names = names_in(eqn)
    small = all(getattr(var.aval, "size", 0) <= MAX_SLOW for var in eqn.outvars)
    return not names & HEAVY and (small or not names & SLOW)


def _sign(eqn: _jax.Equation, i: int) -> Hashable:
    """Returns what equations at the same place of two layers share; of others, the position."""
    if eqn.effects or _jax.must_stay(eqn):
        return i
    literals = [literal_key(v) if isinstance(v, _jax.Literal) else v.aval for v in eqn.invars]
    sign = signature(eqn)
    return i if sign is None or None in literals else (sign, *literals)


def _jit_of(
    eqns: list[_jax.Equation], operands: list[_jax.Var], results: list[_jax.Var]
) -> _jax.Equation:
    """Returns a jit equation whose body is the equations."""
    avals = [v.aval for v in operands]
    like = _jax.traced_at(eqns[0], lambda *x: x, avals)
    names: dict[Any, Any] = dict(zip(operands, like.invars, strict=True))
    copies = parts.copied(eqns, names)
    body = _jax.edited(like, copies, [names[v] for v in results])

    def call(*args: Any) -> Any:
        return jaxpr_as_fun(body)(*args)

    call.__name__ = LAYER
    return _jax.traced_at(eqns[0], jax.jit(call), avals).eqns[0]
