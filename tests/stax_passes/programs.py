# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Evaluates jaxprs one equation at a time, compares bits, and makes random programs."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import jaxpr_as_fun

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
    assert_close(what, [_bits(x) for x in actual], [_bits(y) for y in expected], tol=0)


def _bits(x: Any) -> np.ndarray:
    if _jax.is_key(x):
        x = jax.random.key_data(x)
    x = np.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = np.stack([x.real, x.imag])
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    x = np.where(np.isnan(x), np.asarray(np.nan, x.dtype), x)
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


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


# -- random programs ------------------------------------------------------------------------------

SHAPE = (2, 3)
KINDS = ("f32", "bf16", "i32", "bool")
FLOATS = (0.0, -0.0, 1.0, -1.0, 2.0, 0.5, 3.0)
INTEGERS = (0, 1, -1, 2, 7)

F, B, I, P = KINDS  # noqa: E741
OPS: tuple[tuple[str, tuple[str, ...], Callable[..., Any]], ...] = (
    # result, operands, function of the operands and a small whole number c
    (F, (F, F), lambda x, y, c: x + y), (F, (F, F), lambda x, y, c: y * x),
    (F, (F, F), lambda x, y, c: x - y), (F, (F,), lambda x, c: -x),
    (F, (F,), lambda x, c: x * FLOATS[c % 7]), (F, (F,), lambda x, c: FLOATS[c % 7] * x),
    (F, (F,), lambda x, c: x + FLOATS[c % 7]), (F, (F,), lambda x, c: x - FLOATS[c % 7]),
    (F, (F,), lambda x, c: x / (1.0 + c % 2)), (F, (F,), lambda x, c: x ** (1 + c % 2)),
    (F, (F,), lambda x, c: jnp.sin(x)), (F, (F,), lambda x, c: jnp.abs(x)),
    (F, (F, F), lambda x, y, c: jnp.maximum(x, y)), (F, (F,), lambda x, c: jnp.floor(x)),
    (F, (F,), lambda x, c: x.reshape(6).reshape(SHAPE)), (F, (F,), lambda x, c: x.T.reshape(SHAPE)),
    (F, (F,), lambda x, c: x.T.T), (F, (F,), lambda x, c: lax.rev(x, (c % 2,))),
    (F, (F,), lambda x, c: jnp.expand_dims(x, c % 3).squeeze(c % 3)),
    (F, (P, F, F), lambda p, x, y, c: jnp.where(p, x, y)),
    (F, (F,), lambda x, c: x + jnp.zeros(SHAPE)),
    (F, (F,), lambda x, c: x * (jnp.ones(SHAPE) + c % 2)),
    (F, (F,), lambda x, c: x[:, c % 3 :].sum(axis=1, keepdims=True) + x),
    (F, (F,), lambda x, c: jax.nn.relu(x)), (F, (F,), lambda x, c: jax.nn.silu(x)),
    (F, (F,), lambda x, c: x + jnp.arange(6.0).reshape(SHAPE) * c),
    (F, (F,), lambda x, c: x + jax.random.normal(jax.random.key(c % 2), SHAPE)),
    (B, (F,), lambda x, c: x.astype(jnp.bfloat16)), (F, (B,), lambda x, c: x.astype(jnp.float32)),
    (B, (B,), lambda x, c: x.astype(jnp.float32).astype(jnp.bfloat16)),
    (F, (F,), lambda x, c: x.astype(jnp.bfloat16).astype(jnp.float32)),
    (B, (B, B), lambda x, y, c: x * y), (B, (B,), lambda x, c: x + c),
    (I, (I, I), lambda x, y, c: x + y), (I, (I, I), lambda x, y, c: x * y),
    (I, (I,), lambda x, c: INTEGERS[c % 5] * x), (I, (I,), lambda x, c: x + INTEGERS[c % 5]),
    (I, (I,), lambda x, c: x // (c % 3 - 4)), (I, (I,), lambda x, c: x % (c % 3 + 2)),
    (I, (I,), lambda x, c: (x >> c % 3) ^ (x << c % 2)), (I, (I,), lambda x, c: ~~x),
    (I, (I,), lambda x, c: jnp.clip(x, -3, c)), (F, (I,), lambda x, c: x.astype(jnp.float32)),
    (I, (I,), lambda x, c: (x & 127).astype(jnp.int8).astype(jnp.int32)),
    (P, (F, F), lambda x, y, c: x < y), (P, (I,), lambda x, c: c < x), (P, (P,), lambda p, c: ~p),
    (P, (P, P), lambda p, q, c: p & q), (I, (P,), lambda p, c: p.sum(1, keepdims=True) + p),
    (I, (I,), lambda x, c: x + jnp.tril(jnp.ones(SHAPE, jnp.int32), c % 2)),
)  # fmt: skip
LOOPS = ("jit", "checkpoint", "cond", "scan", "while")

Program = list[tuple[int, int, int, "Program"]]
"""Instructions: which operation, two numbers that choose operands and constants, a body if any."""

_number = st.integers(0, 10**4)
_straight = st.lists(st.tuples(_number, _number, _number, st.just([])), min_size=1, max_size=6)
_body = st.lists(
    st.tuples(_number, _number, _number, st.just([]) | st.just([]) | _straight), max_size=4
)
programs = st.lists(
    st.tuples(_number, _number, _number, st.just([]) | st.just([]) | _body),
    min_size=8,
    max_size=16,
)
"""Random programs, with control flow up to two deep."""


def run(program: Program, x: Any, y: Any, n: Any) -> tuple[Any, ...]:
    """Runs the program on f32, bf16 and i32 arrays of `SHAPE`; returns its last values."""
    pool: dict[str, list[Any]] = {F: [x], B: [y], I: [n], P: [n > 2]}

    def pick(kind: str, number: int) -> Any:
        return pool[kind][-1 - number % min(len(pool[kind]), 5)]

    for op, a, b, body in program:
        if body:
            results = _nest(LOOPS[op % len(LOOPS)], body, pick(F, a), pick(B, b), pick(I, a), b)
            for kind, value in zip((F, B, I), results, strict=True):
                pool[kind].append(value)
            continue
        kind, operands, function = OPS[op % len(OPS)]
        values = [pick(k, a >> (2 * i)) for i, k in enumerate(operands)]
        pool[kind].append(function(*values, b))
    return tuple(v for kind in KINDS for v in pool[kind][-2:])


def _nest(loop: str, body: Program, x: Any, y: Any, n: Any, number: int) -> tuple[Any, Any, Any]:
    def step(x: Any, y: Any, n: Any) -> tuple[Any, Any, Any]:
        results = run(body, x, y, n)
        last = [[v for v in results if v.dtype == w.dtype][-1] for w in (x, y, n)]
        return last[0], last[1], last[2]

    match loop:
        case "jit":
            return jax.jit(step)(x, y, n)
        case "checkpoint":
            return jax.checkpoint(step)(x, y, n)
        case "cond":
            other = lambda x, y, n: (x * 1.0, y, n + 0)  # noqa: E731
            return lax.cond(n.sum() > number % 9, step, other, x, y, n)
        case "scan":
            scanned = lambda c, t: (step(c[0] + t, *c[1:]), c[0])  # noqa: E731
            carry, _ = lax.scan(scanned, (x, y, n), jnp.ones((2, *SHAPE)), reverse=number % 2 == 0)
            return carry
        case _:
            turn = lambda c: (c[0] + 1, step(*c[1]))  # noqa: E731
            return lax.while_loop(lambda c: c[0] < number % 3, turn, (0, (x, y, n)))[1]
