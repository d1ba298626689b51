# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""One walk over a jaxpr and the bodies in it, in which an exact pass edits equations one at a time.

A pass gives `edit(level, eqn)`: it returns the equation to put there, or several, or None once
every result has been replaced by a value that exists already. Bodies (jit, scan, while, cond,
checkpoint, shard_map) are walked before the equation that holds them; a body that stands in several
places is walked once.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tpjax.core import _jax, parts
from tpjax.stax_passes.report import Hit, NearMiss, Report, Tier

SAME = "the same bits; gradients up to the order of their sums"

Pass = Callable[[_jax.Jaxpr], tuple[_jax.Jaxpr, Report]]
"""A pure function from a jaxpr to one that computes the same, and the report of what it did."""

Atom = Any
"""An operand: a variable or a literal."""


@dataclass(frozen=True)
class ExactRule:
    """A row of an exact pass: its name in reports, what it looks for, and what it promises.

    `rewrite(level, eqn)` returns the value that the equation's result is, or the equation or
    equations to put there, or in words why it almost fired, or None. A pass that is no table of
    rows has none.
    """

    name: str
    rewrite: Callable[["Level", _jax.Equation], Any] | None
    contract: str = SAME
    """What may differ from evaluating the original equations one by one, and when."""
    tier: Tier = "exact"
    """A pass with a row that is "close" does not run where every bit is asked for."""
    ulps: tuple[Any, ...] = ()
    """For a close row, the bounds of its error, as `tpjax.stax_passes.engine.Bound`."""


@dataclass
class Log:
    """What a pass did so far, over all levels."""

    rules: tuple[ExactRule, ...]
    """Those of the pass: nothing else may be logged, as it would have no contract."""
    hits: list[Hit] = field(default_factory=list)
    near_misses: list[NearMiss] = field(default_factory=list)

    def hit(self, rule: str, eqn: _jax.Equation) -> None:
        """Notes that the rule fired at the equation."""
        assert any(one.name == rule for one in self.rules), f"{rule} is not declared by its pass"
        self.hits.append(Hit(rule, _jax.source_of(eqn)))

    def near_miss(self, rule: str, eqn: _jax.Equation, reason: str) -> None:
        """Notes that the rule almost fired at the equation, and why it did not."""
        assert any(one.name == rule for one in self.rules), f"{rule} is not declared by its pass"
        self.near_misses.append(NearMiss(rule, _jax.source_of(eqn), reason, tier="exact"))

    def report(self, name: str, before: _jax.Jaxpr, after: _jax.Jaxpr) -> Report:
        """Returns the report of the pass `name`."""
        count = _jax.count_equations(before)
        remaining = count if after is before else _jax.count_equations(after)
        return Report(name, tuple(self.hits), tuple(self.near_misses), count, remaining)


class Level:
    """One jaxpr that is being edited: what stands for what, and which equation makes what."""

    def __init__(self, jaxpr: _jax.Jaxpr, log: Log) -> None:
        """Starts with nothing replaced."""
        self.jaxpr, self.log = jaxpr, log
        self.made: dict[_jax.Var, _jax.Equation] = {}
        """The equation, as edited, that makes a variable."""
        self._instead: dict[_jax.Var, Atom] = {}
        self._stands_for: dict[_jax.Var, list[_jax.Var]] = {}
        self._uses: dict[_jax.Var, int] | None = None
        self._new_uses: dict[_jax.Var, int] = {}

    def replace(self, var: _jax.Var, atom: Atom) -> None:
        """Makes every later reader of `var` read `atom`, which must have the same type."""
        assert var.aval is atom.aval or var.aval == atom.aval, (var.aval, atom.aval)
        self._instead[var] = atom
        if isinstance(atom, _jax.Var):
            self._stands_for.setdefault(atom, []).append(var)

    def current(self, atom: Atom) -> Atom:
        """Returns what stands for the operand now."""
        return self._instead.get(atom, atom) if isinstance(atom, _jax.Var) else atom

    def read(self, eqn: _jax.Equation) -> _jax.Equation:
        """Returns the equation with what stands for its operands now."""
        for atom in eqn.invars:
            if isinstance(atom, _jax.Var) and atom in self._instead:
                return eqn.replace(invars=[self.current(atom) for atom in eqn.invars])
        return eqn

    def maker(self, atom: Atom) -> _jax.Equation | None:
        """Returns the equation of this level that makes the operand, or None."""
        return self.made.get(atom) if isinstance(atom, _jax.Var) else None

    def put(self, eqn: _jax.Equation) -> None:
        """Notes an equation that stands in the edited level and not in the original one."""
        for atom in eqn.invars:
            if isinstance(atom, _jax.Var):
                self._new_uses[atom] = self._new_uses.get(atom, 0) + 1

    def uses(self, var: _jax.Var) -> int:
        """Returns how often the level reads the variable, or more.

        Readers that an edit took away count until the next run of the pass.
        """
        if self._uses is None:
            self._uses = {}
            for atom in self.jaxpr.outvars:
                self._count(atom)
            for eqn in self.jaxpr.eqns:
                for atom in eqn.invars:
                    self._count(atom)
        total, stack = 0, [var]
        while stack:
            one = stack.pop()
            total += self._uses.get(one, 0) + self._new_uses.get(one, 0)
            stack.extend(self._stands_for.get(one, ()))
        return total

    def write(
        self, eqn: _jax.Equation, fn: Callable[..., Any], *atoms: Atom, **static: Any
    ) -> list[_jax.Equation]:
        """Returns the equations of `fn(*atoms, **static)`, to be put in place of `eqn`.

        `fn` is an ordinary JAX function, traced once for the types of the operands and `static`
        (hashable); its value must have the type of the equation's result.
        """
        return parts.written_as(eqn, fn, atoms, static)

    def _count(self, atom: Atom) -> None:
        assert self._uses is not None
        if isinstance(atom, _jax.Var):
            self._uses[atom] = self._uses.get(atom, 0) + 1


Edited = _jax.Equation | list[_jax.Equation] | None
Edit = Callable[[Level, _jax.Equation], Edited]


def sweeping_pass(
    name: str, summary: str, start: Callable[[Level], Edit], rules: tuple[ExactRule, ...]
) -> Pass:
    """Returns the pass that walks every level once.

    Args:
      name: the pass's name in reports.
      summary: the first line of its docstring.
      start: returns the edit of one level, with whatever it remembers of that level.
      rules: what its hits may be named, each with its contract.
    """

    def run(jaxpr: _jax.Jaxpr) -> tuple[_jax.Jaxpr, Report]:
        log = Log(rules)
        result = _walk(jaxpr, start, log, {})
        return result, log.report(name, jaxpr, result)

    run.__name__ = run.__qualname__ = name
    run.__doc__, run.__module__ = summary, start.__module__
    run.exact_rules = rules  # pyright: ignore[reportFunctionMemberAccess]
    exact = all(rule.tier == "exact" for rule in rules)
    run.tier = "exact" if exact else "close"  # pyright: ignore[reportFunctionMemberAccess]
    return run


def _walk(
    jaxpr: _jax.Jaxpr, start: Callable[[Level], Edit], log: Log, done: dict[int, Any]
) -> _jax.Jaxpr:
    if id(jaxpr) in done:
        return done[id(jaxpr)][1]
    level = Level(jaxpr, log)
    edit = start(level)
    eqns: list[_jax.Equation] = []
    same = True
    for old in jaxpr.eqns:
        eqn = _with_bodies(level.read(old), start, log, done)
        new = edit(level, eqn)
        same = same and new is old
        if new is old:
            added = (old,)
        else:
            added = tuple(new) if isinstance(new, list) else () if new is None else (new,)
            for one in added:
                level.put(one)
        for one in added:
            eqns.append(one)
            for var in one.outvars:
                level.made[var] = one
    outvars = [level.current(atom) for atom in jaxpr.outvars]
    same = same and all(a is b for a, b in zip(outvars, jaxpr.outvars, strict=True))
    result = jaxpr if same else _jax.edited(jaxpr, eqns, outvars)
    done[id(jaxpr)] = (jaxpr, result)  # the key is an id: the jaxpr must live as long
    return result


def _with_bodies(
    eqn: _jax.Equation, start: Callable[[Level], Edit], log: Log, done: dict[int, Any]
) -> _jax.Equation:
    bodies = _jax.subjaxprs(eqn)
    if not bodies:
        return eqn
    walked = [_walk(body, start, log, done) for body in bodies]
    changed = any(a is not b for a, b in zip(walked, bodies, strict=True))
    return _jax.with_subjaxprs(eqn, walked) if changed else eqn
