# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Holds an exact pass to the program it was given: what both programs name, both must compute.

Exact passes edit equations and leave variables alone. So each equation that changed is evaluated on
the original's values, and its results compared with the original's, bit for bit; bodies are entered
with the values of each step. A pass that keeps no variable is judged by the results.
"""

from collections.abc import Iterable
from typing import Any

from tpjax.core import _jax
from tpjax.stax.verification.compare import TOLERANCES, Gap, gap
from tpjax.stax.verification.evaluation import UNKNOWN, enter, environment, read, replayed
from tpjax.stax.verification.faults import FoundError, blame, differs, values_of, within

Pairs = Iterable[tuple[int, int]]
"""Which results of one program are which of the other."""


def check_sweep(run: Any, before: _jax.Jaxpr, after: _jax.Jaxpr, values: list[Any]) -> None:
    """Raises `FoundError` at the first value that the pass has changed.

    A pass may say by an attribute `tier = "close"` that it does not keep every bit.
    """
    is_close = getattr(run, "tier", "exact") == "close"
    sweep = _Sweep(run, _widest_tolerance(before) if is_close else None)
    if all(a is b for a, b in zip(after.invars, before.invars, strict=True)):
        results = [(i, i) for i in range(len(before.outvars))]
        sweep.level(before, after, values, values, "", results)
        return
    found = differs(after, before, values, sweep.tol)
    if found is not None:
        for target in before.outvars:
            if isinstance(target, _jax.Var):
                fault = blame(run, sweep.tol, "", before, after, values, target, found)
                raise FoundError(fault)


def _widest_tolerance(jaxpr: _jax.Jaxpr) -> float:
    """Returns what the narrowest float dtype among the program's values allows."""
    found, stack = [TOLERANCES["float32"]], [jaxpr]
    while stack:
        for eqn in stack.pop().eqns:
            stack.extend(_jax.subjaxprs(eqn))
            dtypes = (str(getattr(v.aval, "dtype", None)) for v in eqn.outvars)
            found += [TOLERANCES[d] for d in dtypes if d in TOLERANCES]
    return max(found)


class _Sweep:
    def __init__(self, run: Any, tol: float | None) -> None:
        self.run, self.tol = run, tol

    def level(
        self, before: _jax.Jaxpr, after: _jax.Jaxpr, old: list[Any], new: list[Any], where: str,
        results: Pairs,
    ) -> list[Any]:  # fmt: skip
        """Returns the results of `before` for the inputs `old`; raises at the first difference.

        Args:
          before: the original level.
          after: the same level, changed.
          old: values of the inputs of `before`.
          new: values of the inputs of `after`.
          where: in which body this is.
          results: which results must agree.
        """
        makers = {v: eqn for eqn in before.eqns for v in eqn.outvars}
        kept = {id(eqn) for eqn in before.eqns}
        changed = [eqn for eqn in after.eqns if id(eqn) not in kept]
        # A call that is gone may be open now: what it computed is then named one by one.
        stays = {id(eqn) for eqn in after.eqns}
        env = values_of(
            before,
            old,
            _needed(before, after, changed, makers),
            lambda eqn: id(eqn) not in stays and bool(_jax.subjaxprs(eqn)),
        )
        theirs = environment(after, new)

        def value(atom: Any) -> Any:
            ours = isinstance(atom, _jax.Var) and atom in env
            return env[atom] if ours else read(theirs, atom)

        def demand(actual: Any, expected: Any, target: Any) -> None:
            found = self.gap(actual, expected)
            if found is not None:
                raise FoundError(
                    blame(self.run, self.tol, where, before, after, old, target, found)
                )

        for eqn in changed:
            ins = [value(atom) for atom in eqn.invars]
            first = makers.get(eqn.outvars[0]) if eqn.outvars else None
            bodies = _jax.subjaxprs(eqn)
            if first is not None and bodies and self.bodies(first, eqn, env, ins, where):
                continue
            outs = replayed(eqn, ins)
            for var, out in zip(eqn.outvars, outs, strict=True):
                if var in makers:
                    demand(out, env[var], var)
                else:
                    theirs[var] = out
        for first, eqn in _lasting_pairs(before, after):
            for atom, now in zip(first.invars, eqn.invars, strict=True):
                if isinstance(atom, _jax.Var):  # what is printed counts as a result
                    demand(value(now), read(env, atom), atom)
        for i, j in results:
            target = before.outvars[i]
            demand(value(after.outvars[j]), read(env, target), target)
        return [read(env, atom) for atom in before.outvars]

    def gap(self, actual: Any, expected: Any) -> Gap | None:
        if actual is UNKNOWN or expected is UNKNOWN or actual is expected:
            return None
        return gap(actual, expected, self.tol)

    def bodies(
        self, old: _jax.Equation, new: _jax.Equation, env: dict[Any, Any], ins: list[Any],
        where: str,
    ) -> bool:  # fmt: skip
        """Compares the bodies of an equation at every step; False: they have nothing in common."""
        mine, theirs = _jax.subjaxprs(old), _jax.subjaxprs(new)
        alike = old.primitive is new.primitive and len(mine) == len(theirs)
        if not mine or not alike or new.primitive.name == "shard_map":
            return False
        places = [{v: i for i, v in enumerate(body.invars)} for body in mine]
        if any(v not in at for at, body in zip(places, theirs, strict=True) for v in body.invars):
            return False
        operands = [read(env, atom) for atom in old.invars]
        for at, body, was, now in zip(
            places, theirs, _body_operands(old), _body_operands(new), strict=True
        ):
            for j, var in enumerate(body.invars):
                if self.gap(ins[now[j]], operands[was[at[var]]]) is not None:
                    return False  # other operands: compared as a whole
        results = _paired_results(old, new)

        def step(k: int, values: list[Any], name: str) -> list[Any]:
            given = [values[places[k][v]] for v in theirs[k].invars]
            inner = within(where, old, name)
            return self.level(mine[k], theirs[k], values, given, inner, results[k])

        enter(old, operands, step)
        return True


def _needed(
    before: _jax.Jaxpr, after: _jax.Jaxpr, changed: list[_jax.Equation], makers: dict[Any, Any]
) -> set[Any]:
    """Returns the variables of `before` whose values are asked for."""
    atoms = [*before.outvars, *after.outvars]
    for eqn, _ in _lasting_pairs(before, after):
        atoms += eqn.invars
    for eqn in changed:
        atoms += [*eqn.invars, *eqn.outvars]
        for var in eqn.outvars:
            atoms += makers[var].invars if var in makers else []
    return {atom for atom in atoms if isinstance(atom, _jax.Var)}


def _lasting_pairs(
    before: _jax.Jaxpr, after: _jax.Jaxpr
) -> list[tuple[_jax.Equation, _jax.Equation]]:
    """Returns the equations that print, call back or check, as they were and as they are."""
    old, new = (
        [e for e in jaxpr.eqns if _jax.must_stay(e) and not _jax.subjaxprs(e)]
        for jaxpr in (before, after)
    )
    if [e.primitive for e in old] != [e.primitive for e in new]:
        return []
    pairs = zip(old, new, strict=True)
    return [(a, b) for a, b in pairs if a is not b and len(a.invars) == len(b.invars)]


def _body_operands(eqn: _jax.Equation) -> list[list[int]]:
    """Returns, for each body, which operand of the equation each of its inputs starts as."""
    every = list(range(len(eqn.invars)))
    match eqn.primitive.name:
        case "cond":
            return [every[1:]] * len(_jax.subjaxprs(eqn))
        case "while":
            cond, body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
            return [every[:cond] + every[cond + body :], every[cond:]]
    return [every]


def _paired_results(old: _jax.Equation, new: _jax.Equation) -> list[list[tuple[int, int]]]:
    """Returns, for each body, which of its results are the same in both equations."""
    mine, theirs = _jax.subjaxprs(old), _jax.subjaxprs(new)
    at = {v: i for i, v in enumerate(old.outvars)}
    pairs = {(at[v], j) for j, v in enumerate(new.outvars) if v in at}
    name = new.primitive.name
    if name in ("scan", "while"):
        first, second = (_carried(eqn) for eqn in (old, new))
        at = {v: i for i, v in enumerate(mine[-1].invars[first[0] : first[1]])}
        carried = theirs[-1].invars[second[0] : second[1]]
        pairs |= {(at[v], j) for j, v in enumerate(carried) if v in at}
    every = [sorted(pairs)] * len(mine)
    return [[(0, 0)], every[0]] if name == "while" else every


def _carried(eqn: _jax.Equation) -> tuple[int, int]:
    """Returns where the carried values stand among the inputs of a loop's body."""
    if eqn.primitive.name == "while":
        return eqn.params["body_nconsts"], len(_jax.subjaxprs(eqn)[-1].invars)
    consts, carry = _jax.loop_parts(eqn)
    return consts, consts + carry
