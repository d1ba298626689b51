# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Runs a traced function one equation at a time.

XLA then compiles each kind of equation once for all the functions of a table, instead of each
function as a whole: that takes most of the time of a test with small arrays.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

BODIES = {
    "jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "remat2": "jaxpr",
    "checkpoint": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
}  # fmt: skip
"""Primitives that are their body, and the parameter that holds it."""


def run_one_by_one(fn: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """Returns `fn(*args)`, traced as a whole as under a jit, run by the equation; and its jaxpr."""
    trees: list[Any] = []

    def flat(*args: Any) -> list[Any]:
        leaves, tree = jax.tree.flatten(fn(*args))
        trees.append(tree)
        return leaves

    jaxpr = jax.make_jaxpr(flat)(*args)
    return jax.tree.unflatten(trees[0], _run(jaxpr, jax.tree.leaves(args))), jaxpr


def _run(jaxpr: Any, args: list[Any]) -> list[Any]:
    jaxpr, consts = getattr(jaxpr, "jaxpr", jaxpr), jaxpr.consts
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    read = lambda atom: atom.val if hasattr(atom, "val") else known[atom]  # noqa: E731
    for eqn in jaxpr.eqns:
        values = [read(atom) for atom in eqn.invars]
        results = _RULES.get(eqn.primitive.name, _bind)(eqn, values)
        known.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _bind(eqn: Any, values: list[Any]) -> list[Any]:
    out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def _body(eqn: Any, values: list[Any]) -> list[Any]:
    return _run(eqn.params[BODIES[eqn.primitive.name]], values)


def _scan(eqn: Any, values: list[Any]) -> list[Any]:
    consts, carry, _ = (len(part) for part in eqn.params["ft_in"].unpack())
    fixed, state = values[:consts], values[consts : consts + carry]
    rows = [list(column) for column in values[consts + carry :]]
    steps, results = range(eqn.params["length"]), []
    for i in reversed(steps) if eqn.params["reverse"] else steps:
        out = _run(eqn.params["jaxpr"], [*fixed, *state, *(row[i] for row in rows)])
        state = out[:carry]
        results.append(out[carry:])
    if eqn.params["reverse"]:
        results.reverse()
    return [*state, *(jnp.stack(column) for column in zip(*results, strict=True))]


def _while(eqn: Any, values: list[Any]) -> list[Any]:
    first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond, body = values[:first], values[first : first + second]
    state = values[first + second :]
    while _run(eqn.params["cond_jaxpr"], [*cond, *state])[0]:
        state = _run(eqn.params["body_jaxpr"], [*body, *state])
    return state


def _cond(eqn: Any, values: list[Any]) -> list[Any]:
    return _run(eqn.params["branches"][int(values[0])], values[1:])


_RULES = dict.fromkeys(BODIES, _body) | {"scan": _scan, "while": _while, "cond": _cond}
