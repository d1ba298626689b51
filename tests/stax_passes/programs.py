# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Evaluates jaxprs one equation at a time and compares bits."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from tests.fuzz.evaluation import bits
from tests.harness import assert_close
from tpjax.core import _jax
from tpjax.stax_passes.pipeline import CLEAN_UP, optimize


def evaluate(jaxpr: _jax.Jaxpr, *args: Any) -> list[Any]:
    """Returns the results of evaluating every equation on its own, loops and calls included.

    This is what "the bits of the original" means: a compiled call may round as its fusion likes.
    """
    env = dict(zip(jaxpr.constvars, jaxpr.consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, _jax.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        results = _one(eqn, [read(atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _one(eqn: _jax.Equation, values: list[Any]) -> list[Any]:
    bodies = _jax.subjaxprs(eqn)
    match eqn.primitive.name if bodies else "":
        case "jit" | "pjit" | "remat2" | "checkpoint":
            return evaluate(bodies[0], *values)
        case "cond":
            branch = min(max(int(values[0]), 0), len(bodies) - 1)
            return evaluate(bodies[branch], *values[1:])
        case "while":
            return _while(eqn, bodies, values)
        case "scan":
            return _scan(eqn, bodies[0], values)
    return _jax.bind(eqn, *values)


def _while(eqn: _jax.Equation, bodies: list[_jax.Jaxpr], values: list[Any]) -> list[Any]:
    cond, body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    carry = values[cond + body :]
    while np.any(evaluate(bodies[0], *values[:cond], *carry)[0]):  # any, where it is batched
        carry = evaluate(bodies[1], *values[cond : cond + body], *carry)
    return carry


def _scan(eqn: _jax.Equation, body: _jax.Jaxpr, values: list[Any]) -> list[Any]:
    num_consts, num_carry = _jax.loop_parts(eqn)
    consts, carry = values[:num_consts], values[num_consts : num_consts + num_carry]
    xs, stacked = values[num_consts + num_carry :], []
    steps = range(eqn.params["length"])
    for i in reversed(steps) if eqn.params["reverse"] else steps:
        results = evaluate(body, *consts, *carry, *(jnp.asarray(x)[i] for x in xs))
        carry = results[:num_carry]
        stacked.append(results[num_carry:])
    if eqn.params["reverse"]:
        stacked.reverse()
    return [*carry, *(jnp.stack(ys) for ys in zip(*stacked, strict=True))]


def assert_same_bits(what: str, actual: list[Any], expected: list[Any]) -> None:
    """Asserts equal bits, dtypes and weak types; NaNs are one value, whatever their payload."""
    for x, y in zip(actual, expected, strict=True):
        a, b = jax.typeof(x), jax.typeof(y)
        assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type), (what, a, b)
    assert_close(what, [bits(x) for x in actual], [bits(y) for y in expected], tol=0)


def rules_fired(
    fn: Callable[..., Any], *args: Any, passes: Any = (CLEAN_UP,)
) -> tuple[_jax.Jaxpr, Counter[str], list[str]]:
    """Returns the optimized jaxpr, the rules that fired and the near misses; checks the bits."""
    jaxpr = jax.make_jaxpr(fn)(*args)
    result, reports = optimize(jaxpr, passes, verify=True)
    leaves = jax.tree.leaves(args)
    assert_same_bits("optimized", evaluate(result, *leaves), evaluate(jaxpr, *leaves))
    fired = Counter(hit.rule for report in reports for hit in report.hits)
    return result, fired, [f"{m.rule}: {m.reason}" for r in reports for m in r.near_misses]


def as_function(jaxpr: _jax.Jaxpr) -> Callable[..., Any]:
    """Returns the jaxpr as a function of its inputs that returns a list."""
    return jaxpr_as_fun(jaxpr)


def primitives(jaxpr: _jax.Jaxpr) -> list[str]:
    """Returns the primitives of the top level in order."""
    return [eqn.primitive.name for eqn in jaxpr.eqns]
