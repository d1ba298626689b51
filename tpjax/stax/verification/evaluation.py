# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Evaluates jaxprs on concrete values, equation by equation, without their effects.

Nothing that the program does besides computing happens here: equations that print, call back,
check, or touch references are passed over, and what depends on their results is `UNKNOWN`. Nothing
is donated. (`jax.pure_callback` has no effect by JAX's own account, and runs.)
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpjax.core import _jax

MAX_STEPS = 64
"""Steps of a loop that are evaluated one by one; those between them and the last run as one."""
LAST_STEPS = 2
"""Steps at the end of a longer scan that are evaluated one by one again."""


class _Unknown:
    def __repr__(self) -> str:
        return "unknown"


UNKNOWN: Any = _Unknown()
"""The value of what depends on an effect."""

RunBody = Callable[[int, list[Any], str], list[Any]]
"""Evaluates the body of that number on values; the text says which step of a loop this is."""


def concrete(leaf: Any) -> Any:
    """Returns the leaf as JAX sees it."""
    is_numpy = isinstance(leaf, np.ndarray | np.generic) and leaf.dtype != jax.dtypes.float0
    return jnp.asarray(leaf) if is_numpy else leaf


def replay(jaxpr: _jax.Jaxpr, values: list[Any]) -> list[Any]:
    """Returns the results; bodies of calls and loops are evaluated equation by equation too."""
    env = environment(jaxpr, values)
    for eqn in jaxpr.eqns:
        outs = replayed(eqn, [read(env, atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(env, atom) for atom in jaxpr.outvars]


def replayed(eqn: _jax.Equation, ins: list[Any]) -> list[Any]:
    """Returns the equation's results, its bodies evaluated equation by equation."""
    bodies = _jax.subjaxprs(eqn)
    return enter(eqn, ins, lambda k, values, step: replay(bodies[k], values))


def environment(jaxpr: _jax.Jaxpr, values: list[Any]) -> dict[Any, Any]:
    """Returns the values of a jaxpr's inputs and constants by variable."""
    env = dict(zip(jaxpr.constvars, jaxpr.consts, strict=True))
    env.update(zip(jaxpr.invars, values, strict=True))
    return env


def read(env: dict[Any, Any], atom: Any) -> Any:
    """Returns the value of an operand."""
    return atom.val if isinstance(atom, _jax.Literal) else env[atom]


def run_equation(eqn: _jax.Equation, ins: list[Any]) -> list[Any]:
    """Returns the equation's results, its bodies run as one; unknown where effects stand."""
    if _jax.must_stay(eqn):
        bodies = _jax.subjaxprs(eqn)
        if not bodies or eqn.primitive.name == "shard_map":
            return [UNKNOWN] * len(eqn.outvars)
        return enter(eqn, ins, lambda k, values, step: replay(bodies[k], values))
    if any(x is UNKNOWN for x in ins):
        return [UNKNOWN] * len(eqn.outvars)
    if any(eqn.params.get("donated_invars", ())):
        kept = (False,) * len(eqn.invars)
        eqn = eqn.replace(params=eqn.params | {"donated_invars": kept})
    return _jax.bind(eqn, *ins)


def enter(eqn: _jax.Equation, ins: list[Any], body: RunBody) -> list[Any]:
    """Returns the equation's results, its bodies evaluated by `body` as often as they run."""
    name = eqn.primitive.name if _jax.subjaxprs(eqn) else ""
    match name:
        case "jit" | "pjit" | "remat2" | "checkpoint":
            return body(0, ins, "")
        case "cond":
            return _cond(eqn, ins, body)
        case "while":
            return _while(eqn, ins, body)
        case "scan" if eqn.params["length"]:
            return _scan(eqn, ins, body)
    return run_equation(eqn, ins)


def _cond(eqn: _jax.Equation, ins: list[Any], body: RunBody) -> list[Any]:
    if ins[0] is UNKNOWN:
        return [UNKNOWN] * len(eqn.outvars)
    branch = min(max(int(ins[0]), 0), len(_jax.subjaxprs(eqn)) - 1)
    return body(branch, ins[1:], f"branch {branch}")


def _while(eqn: _jax.Equation, ins: list[Any], body: RunBody) -> list[Any]:
    cond, rest = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    consts, carry = ins[: cond + rest], ins[cond + rest :]
    capped = not _jax.must_stay(eqn)
    step = 0
    while not capped or step < MAX_STEPS:
        (more,) = body(0, [*consts[:cond], *carry], f"step {step}")
        if more is UNKNOWN:
            return [UNKNOWN] * len(eqn.outvars)
        if not more:
            return carry
        carry = body(1, [*consts[cond:], *carry], f"step {step}")
        step += 1
    return run_equation(eqn, [*consts, *carry])


def _scan(eqn: _jax.Equation, ins: list[Any], body: RunBody) -> list[Any]:
    num_consts, num_carry = _jax.loop_parts(eqn)
    consts, carry = ins[:num_consts], ins[num_consts : num_consts + num_carry]
    xs, length = ins[num_consts + num_carry :], eqn.params["length"]
    first, last = length, length
    if length > MAX_STEPS + LAST_STEPS and not _jax.must_stay(eqn):
        first, last = MAX_STEPS, length - LAST_STEPS
    reverse = bool(eqn.params["reverse"])
    pieces: list[list[Any]] = []
    step = 0
    while step < length:
        stop = last if step == first and last > first else step + 1
        low, high = (length - stop, length - step) if reverse else (step, stop)
        part = [x if x is UNKNOWN else x[low:high] for x in xs]
        if stop - step > 1:
            params = eqn.params | {"length": stop - step, "unroll": 1}
            outs = run_equation(eqn.replace(params=params), [*consts, *carry, *part])
            ys = outs[num_carry:]
        else:
            one = [x if x is UNKNOWN else x[0] for x in part]
            outs = body(0, [*consts, *carry, *one], f"step {low}")
            ys = [y if y is UNKNOWN else jnp.expand_dims(y, 0) for y in outs[num_carry:]]
        carry = outs[:num_carry]
        pieces.append(ys)
        step = stop
    if reverse:
        pieces.reverse()
    return [*carry, *map(_joined, zip(*pieces, strict=True))]


def _joined(pieces: tuple[Any, ...]) -> Any:
    if any(piece is UNKNOWN for piece in pieces):
        return UNKNOWN
    return jnp.concatenate(pieces)
