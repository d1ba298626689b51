# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Instructions of random programs that hold a body: calls, loops, branches, derivatives."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.fuzz.pool import Pool, is_bool, is_float, is_number, is_real, same_type

Body = Callable[[Pool], Any]
"""Runs the instructions of a body on a pool."""

Step = Callable[..., tuple[Any, ...]]


def _is_strong(x: Any) -> bool:
    return not jax.typeof(x).weak_type


def _operands(pool: Pool, count: int, *accept: Any) -> list[Any]:
    found = [pool.pick(is_number, _is_strong, *accept) for _ in range(count)]
    return [x for x in found if x is not None]


def _step(
    pool: Pool, body: Body, *, closed: bool = False, skip: bool = False, forward: bool = False
) -> Step:
    """Returns the body as a function that gives back the types that it is given.

    It sees values around it, unless `closed`; a value of which it makes no other passes through.
    """
    around, numbers = ([] if closed else pool.values[-6:]), pool.numbers.rest

    def step(*values: Any) -> tuple[Any, ...]:
        inner = Pool(values, around, forward=pool.forward or forward)
        inner.numbers.rest = numbers
        before = len(inner.values)
        if not skip:
            body(inner)
        made = inner.values[before:]
        return tuple(next((m for m in reversed(made) if same_type(m, v)), v) for v in values)

    return step


def _jit(pool: Pool, body: Body) -> Any:
    values = _operands(pool, 1 + pool.numbers.below(3))
    return jax.jit(_step(pool, body))(*values) if values else None


def _jit_twice(pool: Pool, body: Body) -> Any:
    """One function called twice: its body is shared."""
    (x,) = _operands(pool, 1) or (None,)
    if x is None:
        return None
    fn = jax.jit(_step(pool, body, closed=True))
    return *fn(x), *fn(pool.other(x))


def _layers(pool: Pool, body: Body) -> Any:
    """The same block three times over, unrolled, each time with another weight."""
    (x,) = _operands(pool, 1, is_real) or (None,)
    if x is None:
        return None
    wraps = (lambda f: f, lambda f: f, jax.jit, jax.checkpoint)
    fn = pool.numbers.of(wraps)(_step(pool, body, closed=True))
    for _ in range(3):
        x, *_ = fn(x, pool.other(x))
    return x


def _checkpoint(pool: Pool, body: Body) -> Any:
    values = _operands(pool, 1 + pool.numbers.below(2))
    policies = (None, jax.checkpoint_policies.dots_saveable)
    policy, barrier = pool.numbers.of(policies), bool(pool.numbers.below(2))
    fn = jax.checkpoint(_step(pool, body), policy=policy, prevent_cse=barrier)
    return fn(*values) if values else None


def _cond(pool: Pool, body: Body) -> Any:
    values = _operands(pool, 1 + pool.numbers.below(3))
    if not values:
        return None
    step, other = _step(pool, body), _step(pool, body, skip=True)
    index = pool.pick(lambda v: v.dtype == jnp.int32 and np.shape(v) == ())
    if pool.numbers.below(2) and index is not None:
        third = lambda *xs: tuple(x if is_bool(x) else x * 1 for x in step(*xs))  # noqa: E731
        return lax.switch(index, (other, step, third), *values)
    x = pool.pick(lambda v: is_bool(v) or is_real(v), lambda v: np.size(v) > 0)
    if x is None:
        return None
    which = (x.reshape(-1)[0] > np.asarray(0, x.dtype)) if not is_bool(x) else x.any()
    pair = (step, other) if pool.numbers.below(2) else (other, step)
    return lax.cond(which, *pair, *values)


def _scan(pool: Pool, body: Body) -> Any:
    """Carries that change, pass through, or are never read; arrays from around are invariant."""
    carry = _operands(pool, 1 + pool.numbers.below(3))
    rows = pool.pick(is_number, _is_strong, lambda v: np.shape(v)[:1] in ((2,), (3,)))
    if not carry:
        return None
    step, kind = _step(pool, body), pool.numbers.below(4)
    dead = jnp.zeros((), jnp.float32)

    def turn(state: Any, row: Any) -> Any:
        values, count = state
        extra = [] if row is None else [row]
        results = step(*values, *extra)
        stacked = results[0] if kind % 2 else (results[-1], values[0])
        return (results[: len(values)], count + 1), stacked

    length = int(np.shape(rows)[0]) if rows is not None else 2
    reverse, unroll = bool(kind & 2), 1 + pool.numbers.below(2)
    rows = None if pool.numbers.below(4) == 3 else rows
    (values, _), stacked = lax.scan(
        turn, (tuple(carry), dead), rows, length, reverse=reverse, unroll=unroll
    )
    return *values, *jax.tree.leaves(stacked)


def _while(pool: Pool, body: Body) -> Any:
    values = _operands(pool, 1 + pool.numbers.below(2))
    if not values:
        return None
    step, turns = _step(pool, body), pool.numbers.below(4)
    limit = pool.pick(lambda v: v.dtype == jnp.int32 and np.shape(v) == ())
    known = limit is None or pool.numbers.below(2)
    ends = turns if known else jnp.clip(limit, 0, turns)
    held = tuple(map(lax.stop_gradient, values))

    def turn(state: Any) -> Any:
        results = step(*state[1])
        return state[0] + 1, tuple(map(lax.stop_gradient, results))

    return lax.while_loop(lambda s: s[0] < ends, turn, (0, held))[1]


def _custom_jvp(pool: Pool, body: Body) -> Any:
    (x,) = _operands(pool, 1, is_float) or (None,)
    if x is None:
        return None
    step = _step(pool, body, closed=True)
    fn = jax.custom_jvp(lambda x: step(x)[0])
    fn.defjvp(lambda primals, tangents: (fn(*primals), tangents[0] * 2))
    return fn(x)


def _custom_vjp(pool: Pool, body: Body) -> Any:
    (x,) = _operands(pool, 1, is_float) or (None,)
    if x is None or pool.forward:
        return None  # JAX has no forward mode of it
    step = _step(pool, body, closed=True)
    fn = jax.custom_vjp(lambda x: step(x)[0])
    fn.defvjp(lambda x: (step(x)[0], x), lambda x, ct: (ct * 0.5 + x * 0,))
    return fn(x)


def _gradient(pool: Pool, body: Body) -> Any:
    """The gradient of the body as part of the program, as in a train step."""
    (x,) = _operands(pool, 1, is_float) or (None,)
    if x is None:
        return None
    forward = bool(pool.numbers.below(2))
    step = _step(pool, body, closed=True, forward=forward)
    if forward:
        return jax.jvp(lambda x: step(x)[0], (x,), (pool.other(x),))
    out, back = jax.vjp(lambda x: step(x)[0], x)
    return out, *back(pool.other(out))


def _vmap(pool: Pool, body: Body) -> Any:
    (x,) = _operands(pool, 1, lambda v: np.ndim(v) > 1, lambda v: np.size(v) > 0) or (None,)
    return None if x is None else jax.vmap(lambda x: _step(pool, body)(x)[0])(x)


ROWS: dict[str, tuple[int, Callable[[Pool, Body], Any]]] = {
    "jit": (3, _jit), "jit_twice": (2, _jit_twice), "layers": (3, _layers),
    "checkpoint": (2, _checkpoint), "cond": (3, _cond), "scan": (4, _scan), "while": (2, _while),
    "custom_jvp": (1, _custom_jvp), "custom_vjp": (1, _custom_vjp), "gradient": (2, _gradient),
    "vmap": (1, _vmap),
}  # fmt: skip
"""By name, how often an instruction with a body is drawn and what it does."""
