# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""A fault that `verify` found: two small programs that differ on given values; finding the least.

A pass is blamed by running it again on programs of one equation, or of the few that lead to it: the
first on which its result differs from the equations themselves holds the fault.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpjax.core import _jax
from tpjax.core.operator import Choice
from tpjax.stax.verification.compare import TOLERANCES, Gap, distance, gap
from tpjax.stax.verification.evaluation import (
    UNKNOWN,
    environment,
    read,
    replay,
    replayed,
    run_equation,
)

MAX_SUSPECTS = 48
"""Equations tried one after the other; among more, the first at fault is found by bisection."""
MAX_PRINTED = 200
"""Characters of an equation in a message."""
ROUNDINGS = 3
"""Trials in which the original's equations are each rounded at random."""
SLACK = 4.0
"""How far a rewrite may stand off the original, in units of what rounding does to the original."""

Pass = Callable[[_jax.Jaxpr], Any]


@dataclass
class Fault:
    """Where an optimised program differs: both programs of the place, and the values there."""

    rule: str
    eqn: _jax.Equation | None
    where: str
    gap: Gap
    tol: float | None
    before: _jax.Jaxpr
    after: _jax.Jaxpr
    values: list[Any]
    run: Pass
    """The pass, which is run again on smaller programs."""


class FoundError(Exception):
    """Carries the first fault out of the loops in which it was found."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault


def within(where: str, eqn: _jax.Equation, step: str) -> str:
    """Returns `where`, and that it is in a body of the equation."""
    body = f"in the {eqn.primitive.name} of {_jax.source_of(eqn)}" + (f", {step}" if step else "")
    return f"{where}, {body}" if where else body


def printed(eqn: _jax.Equation) -> str:
    """Returns the equation in a line, its bodies left out."""
    lines = str(eqn).splitlines()
    head = lines[0].rstrip() + (" ..." if len(lines) > 1 else "")
    return head if len(head) <= MAX_PRINTED else head[:MAX_PRINTED] + " ..."


def program(
    like: _jax.Jaxpr, eqns: Sequence[_jax.Equation], outvars: Sequence[Any]
) -> tuple[_jax.Jaxpr, list[_jax.Var]]:
    """Returns the equations as a program of what they read, and the variables it takes."""
    made = {v for eqn in eqns for v in eqn.outvars}
    operands = [a for eqn in eqns for a in eqn.invars] + list(outvars)
    read_first = dict.fromkeys(a for a in operands if isinstance(a, _jax.Var) and a not in made)
    known = dict(zip(like.constvars, like.consts, strict=True))
    constants = [v for v in read_first if v in known]
    invars = [v for v in read_first if v not in known]
    made_here = like.replace(
        constvars=constants,
        consts=[known[v] for v in constants],
        invars=invars,
        outvars=list(outvars),
        eqns=list(eqns),
    )
    return made_here, invars


def single(eqn: _jax.Equation, ins: list[Any]) -> tuple[_jax.Jaxpr, list[Any]]:
    """Returns the equation alone as a program of its operands, and their values."""
    at = {a: x for a, x in zip(eqn.invars, ins, strict=True) if not isinstance(a, _jax.Literal)}
    fresh: dict[Any, Any] = {a: _jax.Var(a.aval) for a in at}
    alone = eqn.replace(invars=[a if isinstance(a, _jax.Literal) else fresh[a] for a in eqn.invars])
    like = jax.make_jaxpr(lambda: ())()
    outvars = [v for v in eqn.outvars if type(v) is _jax.Var]
    return program(like, [alone], outvars)[0], list(at.values())


def leading_to(
    eqns: Iterable[_jax.Equation], targets: Iterable[Any], stops: set[Any]
) -> list[_jax.Equation]:
    """Returns the equations, in order, that make the targets from the variables `stops`."""
    needed = {v for v in targets if isinstance(v, _jax.Var)}
    found = []
    for eqn in reversed(list(eqns)):
        if any(v in needed for v in eqn.outvars):
            found.append(eqn)
            needed.update(v for v in eqn.invars if isinstance(v, _jax.Var) and v not in stops)
    return found[::-1]


def values_of(
    jaxpr: _jax.Jaxpr,
    values: list[Any],
    keep: set[Any] | None = None,
    apart: Callable[[_jax.Equation], bool] = lambda eqn: False,
) -> dict[Any, Any]:
    """Returns the value of every variable of the level, or of those in `keep`.

    Each equation runs on its own; the bodies of calls and loops run as one, but for those equations
    that are to be taken `apart`.
    """
    env = environment(jaxpr, values)
    last: dict[Any, int] = {}
    for i, eqn in enumerate(jaxpr.eqns):
        last.update((a, i) for a in (*eqn.invars, *eqn.outvars) if isinstance(a, _jax.Var))
    for i, eqn in enumerate(jaxpr.eqns):
        run = replayed if apart(eqn) else run_equation
        outs = run(eqn, [read(env, atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, outs, strict=True))
        for atom in () if keep is None else (*eqn.invars, *eqn.outvars):
            if isinstance(atom, _jax.Var) and last[atom] == i and atom not in (keep or ()):
                env.pop(atom, None)
    return env


def differs(
    after: _jax.Jaxpr, before: _jax.Jaxpr, values: list[Any], tol: float | None
) -> Gap | None:
    """Returns how the programs' results differ on the values, both run equation by equation."""
    if any(x is UNKNOWN for x in values):
        return None
    pairs = zip(replay(after, values), replay(before, values), strict=True)
    gaps = (gap(a, e, tol) for a, e in pairs if a is not UNKNOWN and e is not UNKNOWN)
    return next((found for found in gaps if found is not None), None)


# -- who is to blame ------------------------------------------------------------------------------


def blame(
    run: Pass, tol: float | None, where: str, before: _jax.Jaxpr, after: _jax.Jaxpr,
    values: list[Any], target: Any, found: Gap,
) -> Fault:  # fmt: skip
    """Returns the fault behind a difference in the value of `target`, a variable of `before`."""
    stands = set(after.invars) | {v for eqn in after.eqns for v in eqn.outvars}
    stops = (stands & {v for eqn in before.eqns for v in eqn.outvars}) - {target}
    chain = leading_to(before.eqns, [target], stops)
    env = values_of(before, values)

    def tried(index: int) -> Fault | None:
        eqn = chain[index]
        outvars = [v for v in eqn.outvars if type(v) is _jax.Var]
        for eqns in ([eqn], leading_to(chain[: index + 1], outvars, set())):
            less, invars = program(before, eqns, outvars)
            operands = [env[v] for v in invars]
            try:
                new = run(less)[0]
                gap = None if new is less else differs(new, less, operands, tol)
            except Exception:  # a pass that fails on a part of a program is judged on the whole
                continue
            if gap is not None:
                return Fault(_name(run), eqn, where, gap, tol, less, new, operands, run)
        return None

    first = _first(len(chain), tried)
    if first is not None:
        return first
    eqn = chain[-1] if chain else None
    old, invars = program(before, chain, [target])
    new = after
    operands = [env[v] for v in invars]
    maker = next((v for e in after.eqns for v in e.outvars if v is target), None)
    if maker is not None:
        new, theirs = program(after, leading_to(after.eqns, [target], stops), [target])
        both = list(dict.fromkeys([*invars, *theirs]))
        if all(v in env for v in both):
            operands = [env[v] for v in both]
            old, new = old.replace(invars=both), new.replace(invars=both)
    else:
        old, operands = before, values
    return Fault(_name(run), eqn, where, found, tol, old, new, operands, run)


def _first(count: int, tried: Callable[[int], Fault | None]) -> Fault | None:
    """Returns the fault of the first index that has one."""
    if count <= MAX_SUSPECTS:
        return next((fault for i in range(count) if (fault := tried(i)) is not None), None)
    low, high, best = 0, count - 1, tried(count - 1)
    while best is not None and low < high:
        middle = (low + high) // 2
        fault = tried(middle)
        if fault is None:
            low = middle + 1
        else:
            high, best = middle, fault
    return best


def _name(run: Any) -> str:
    return getattr(run, "__name__", type(run).__name__)


# -- what is allowed ------------------------------------------------------------------------------


def tolerance(row: Any, op: str | None, choices: Sequence[Choice], dtype: Any) -> float | None:
    """Returns the relative RMS error that a row allows in a result; None: every bit counts.

    A row's own `tol` (a number, or a mapping by dtype) comes first, then that of the operators put
    in place, for the widest error among the dtypes they meet, then a default.
    """
    from tpjax.pallas import OPS

    if row.tier == "exact":
        return None
    stated = getattr(row, "tol", None)
    if isinstance(stated, int | float):
        return float(stated)
    default = TOLERANCES.get(str(dtype), TOLERANCES["float32"])
    if stated is not None:
        return float(stated.get(str(dtype), default))
    table = {row.name: row.tol for row in OPS}
    dtypes = {str(dtype)}
    for choice in choices:
        avals = () if choice.key is None else (aval for _, aval in choice.key.operands)
        dtypes.update(str(aval.dtype) for aval in avals if aval is not None)
    names = {choice.op for choice in choices} | ({op} if op is not None else set())
    allowed = [table[n][d] for n in names if n in table for d in dtypes if d in table[n]]
    return max(allowed, default=default)


def rounding_spread(jaxpr: _jax.Jaxpr, values: list[Any], expected: Any) -> float:
    """Returns the RMS by which the result moves when each equation is rounded at random.

    Monte Carlo arithmetic: each float result is multiplied by 1 + eps u, u uniform in [-1, 1]. What
    this moves, the original program does not determine: a cancellation of all digits, the sum of
    many bfloat16 numbers, a comparison of equals.
    """
    worst = 0.0
    for trial in range(ROUNDINGS):
        rng = np.random.default_rng(trial)
        env = environment(jaxpr, values)
        for eqn in jaxpr.eqns:
            outs = run_equation(eqn, [read(env, atom) for atom in eqn.invars])
            noisy = [x if x is UNKNOWN else rounded(x, rng) for x in outs]
            env.update(zip(eqn.outvars, noisy, strict=True))
        result = read(env, jaxpr.outvars[0])
        if not jnp.issubdtype(jax.typeof(result).dtype, jnp.floating):
            return 0.0
        worst = max(worst, distance(result, expected))
    return SLACK * worst


def moved(x: Any, tol: float, spread: float, rng: np.random.Generator) -> Any:
    """Returns the float array with a random error: relative RMS `tol`, or `spread` if larger."""
    dtype = jax.typeof(x).dtype
    if not jnp.issubdtype(dtype, jnp.floating) or not np.size(x):
        return x
    wide = jnp.asarray(x, jnp.promote_types(dtype, jnp.float32))
    scale = jnp.sqrt(jnp.mean(jnp.where(jnp.isfinite(wide), wide, 0.0) ** 2))
    noise = jnp.asarray(rng.uniform(-1, 1, np.shape(x)), wide.dtype) * 3**0.5
    size = jnp.maximum(scale * tol, spread)
    return jnp.where(jnp.isfinite(x), wide + size * noise, wide).astype(dtype)


def rounded(x: Any, rng: np.random.Generator) -> Any:
    """Returns the float array with each element moved by up to a unit in its last place."""
    dtype = jax.typeof(x).dtype
    if _jax.is_key(jax.typeof(x)) or not jnp.issubdtype(dtype, jnp.floating):
        return x
    wide = jnp.promote_types(dtype, jnp.float32)
    noise = jnp.asarray(rng.uniform(-1, 1, np.shape(x)), wide) * float(jnp.finfo(dtype).eps)
    moved = jnp.asarray(x, wide) * (1 + noise)
    return jnp.where(jnp.isfinite(x), moved, x).astype(dtype)
