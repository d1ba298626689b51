# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Instructions of random programs that move, sum, sort and contract elements, and draw numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.fuzz.elementwise import Instruction
from tests.fuzz.pool import (
    SHAPES,
    Pool,
    constant_like,
    is_bool,
    is_complex,
    is_float,
    is_key,
    is_number,
    is_real,
    is_whole,
    special,
)


def _has_axes(x: Any) -> bool:
    return np.ndim(x) > 0 and is_number(x)


def _not_empty(x: Any) -> bool:
    return np.size(x) > 0 and np.ndim(x) > 0


def _with_axis(pool: Pool, *accept: Any) -> tuple[Any, int]:
    x = pool.pick(_has_axes, *accept)
    return x, 0 if x is None else pool.numbers.below(np.ndim(x))


# -- movement -------------------------------------------------------------------------------------


def move(pool: Pool, x: Any) -> Any:
    """Returns `x` moved in one of many ways, without leaving the shapes of programs."""
    shape, numbers = np.shape(x), pool.numbers
    axis = numbers.below(len(shape))
    match numbers.below(9) if shape else 8:
        case 0:
            new = numbers.of(sorted({shape, *(s for s in SHAPES if np.prod(s) == np.prod(shape))}))
            return lax.reshape(x, new)
        case 1:
            order = np.roll(range(len(shape)), numbers.below(len(shape)) + 1)
            order = order[::-1] if numbers.below(2) else order
            return lax.transpose(x, [int(i) for i in order])
        case 2:
            return lax.rev(x, (axis,) if numbers.below(4) else (0, len(shape) - 1)[: len(shape)])
        case 3:
            return _cut(pool, x, axis)
        case 4:
            return lax.pad(x, np.asarray(0, x.dtype), _padding(pool, shape, axis))
        case 5:
            y = pool.pick(lambda v: v.dtype == x.dtype and _stacks(v, x, axis))
            return lax.concatenate([x, x if y is None else y][:: 1 - 2 * numbers.below(2)], axis)
        case 6:
            ones = [i for i, n in enumerate(shape) if n == 1]
            return lax.squeeze(x, ones[: numbers.below(3)])
        case 7:
            return jnp.swapaxes(x, axis, 0)
    size = numbers.of((1, 2, 3))
    if numbers.below(2) or not shape:
        return lax.broadcast(x, (size,))
    new = (*shape[:axis], size, *shape[axis:])
    return lax.broadcast_in_dim(x, new, [i for i in range(len(new)) if i != axis])


def _stacks(v: Any, x: Any, axis: int) -> bool:
    a, b = list(np.shape(v)), list(np.shape(x))
    return len(a) == len(b) and a[:axis] + a[axis + 1 :] == b[:axis] + b[axis + 1 :]


def _cut(pool: Pool, x: Any, axis: int) -> Any:
    size = np.shape(x)[axis]
    start, limit, stride = pool.numbers.of(
        ((0, size, 1), (1, size, 1), (0, size - 1, 1), (0, size, 2), (0, 0, 1))
    )
    return lax.slice_in_dim(x, min(start, size), max(limit, 0), stride, axis)


def _padding(pool: Pool, shape: Any, axis: int) -> list[tuple[int, int, int]]:
    config = [(0, 0, 0)] * len(shape)
    config[axis] = pool.numbers.of(((0, 0, 0), (1, 0, 0), (0, 1, 0), (-1, 1, 0), (0, 0, 1)))
    return config


def _move(pool: Pool) -> Any:
    x = pool.pick(is_number)
    return None if x is None else move(pool, x)


def _moves(pool: Pool) -> Any:
    """Two or three moves in a row, which rules compose."""
    x = pool.pick(is_number)
    for _ in range(0 if x is None else 2 + pool.numbers.below(2)):
        y = move(pool, x)
        x = y if np.shape(y) in SHAPES else x
    return x


def _wide_move(pool: Pool) -> Any:
    """A narrow array widened, moved and used: the move may run narrow."""
    x = pool.pick(lambda v: v.dtype in (jnp.bfloat16, jnp.float16, jnp.int8, jnp.uint8))
    if x is None:
        return None
    y = lax.convert_element_type(x, jnp.float32 if is_float(x) else jnp.int32)
    for _ in range(1 + pool.numbers.below(2)):
        z = move(pool, y)
        y = z if np.shape(z) in SHAPES else y
    return y * y, lax.convert_element_type(y, x.dtype)


def _there_and_back(pool: Pool) -> Any:
    x, axis = _with_axis(pool)
    if x is None:
        return None
    shape = np.shape(x)
    ways = (
        lambda: lax.reshape(lax.reshape(x, (np.size(x),)), shape),
        lambda: jnp.swapaxes(jnp.swapaxes(x, 0, axis), 0, axis),
        lambda: lax.squeeze(lax.expand_dims(x, (axis,)), (axis,)),
        lambda: lax.rev(lax.rev(x, (axis,)), (axis,)),
        lambda: lax.slice_in_dim(lax.concatenate([x, x], axis), 0, shape[axis], axis=axis),
        lambda: lax.broadcast_in_dim(x, shape, range(len(shape))),
    )
    return pool.numbers.of(ways)()


# -- indexing -------------------------------------------------------------------------------------


def _index(pool: Pool) -> Any:
    """Returns an index, of an array or known, also out of range."""
    known = np.int32(pool.numbers.of((0, 1, -1, 2, 100)))
    index = pool.pick(lambda v: v.dtype == jnp.int32 and np.ndim(v) == 0)
    return known if index is None or pool.numbers.below(2) else index


def _dynamic_slice(pool: Pool) -> Any:
    x, axis = _with_axis(pool, _not_empty)
    if x is None:
        return None
    size = np.shape(x)[axis] - pool.numbers.below(2)
    return lax.dynamic_slice_in_dim(x, _index(pool), max(size, 0), axis)


def _dynamic_update(pool: Pool) -> Any:
    x, axis = _with_axis(pool, _not_empty)
    if x is None:
        return None
    piece = lax.slice_in_dim(pool.like(x), 0, 1, axis=axis)
    return lax.dynamic_update_slice_in_dim(x, piece, _index(pool), axis)


def _gather(pool: Pool) -> Any:
    x, axis = _with_axis(pool, _not_empty)
    if x is None:
        return None
    rows = pool.pick(lambda v: v.dtype == jnp.int32 and np.shape(v) == (3,))
    known = np.asarray(pool.numbers.of(((0,), (0, 1, 0), (1, -1, 5))), np.int32)
    mode = pool.numbers.of(("clip", "fill", "wrap"))
    return jnp.take(
        x, known if rows is None or pool.numbers.below(2) else rows, axis=axis, mode=mode
    )


def _fancy(pool: Pool) -> Any:
    x = pool.pick(lambda v: np.ndim(v) >= 2, _not_empty, is_number)
    if x is None:
        return None
    i = _index(pool)
    fns = (lambda: x[0], lambda: x[i], lambda: x[:, 0], lambda: x[..., -1:], lambda: x[:, ::-1],
           lambda: x[:, jnp.array([1, 0])],
           lambda: x[jnp.arange(x.shape[0])], lambda: x[i, 0])  # fmt: skip
    return pool.numbers.of(fns)()


def _scatter(pool: Pool) -> Any:
    x = pool.pick(_not_empty, is_real)
    if x is None:
        return None
    rows = pool.numbers.of((np.asarray([0]), np.asarray([0, 0, 1]), _index(pool)))
    at, unit = x.at[rows], np.asarray(2, x.dtype)
    fns = (lambda: at.set(unit), lambda: at.add(unit), lambda: at.max(unit), lambda: at.min(unit),
           lambda: lax.stop_gradient(x).at[rows].multiply(unit), lambda: at.set(x[0]))  # fmt: skip
    return pool.numbers.of(fns)()


# -- reductions -----------------------------------------------------------------------------------


def _reduce(pool: Pool) -> Any:
    x, axis = _with_axis(pool, is_real)
    if x is None:
        return None
    fns = (jnp.sum, jnp.max, jnp.min, jnp.prod) if np.shape(x)[axis] else (jnp.sum, jnp.prod)
    axes = pool.numbers.of((axis, axis, None)) if np.size(x) else axis
    return pool.numbers.of(fns)(x, axis=axes, keepdims=bool(pool.numbers.below(2)))


def _reduce_bits(pool: Pool) -> Any:
    x, axis = _with_axis(pool, lambda v: is_bool(v) or is_whole(v))
    if x is None:
        return None
    fns = (lax.reduce_and_p, lax.reduce_or_p, lax.reduce_xor_p)
    params = {"axes": (axis,)}
    if not is_bool(x) or pool.numbers.below(2):
        x = x > np.asarray(0, x.dtype) if not is_bool(x) else x
    return pool.numbers.of(fns).bind(x, **params)


def _count(pool: Pool) -> Any:
    x, axis = _with_axis(pool, is_real)
    return None if x is None else (x > np.asarray(0, x.dtype)).sum(axis, keepdims=True) + x


def _normalise(pool: Pool) -> Any:
    x, axis = _with_axis(pool, is_float, _not_empty)
    if x is None:
        return None
    fns = (jax.nn.softmax, jax.nn.log_softmax, jnp.mean, jnp.var,
           lambda x, axis: x - x.max(axis, keepdims=True), jax.nn.logsumexp)  # fmt: skip
    return pool.numbers.of(fns)(x, axis=axis)


def _arg(pool: Pool) -> Any:
    x, axis = _with_axis(pool, is_real, _not_empty)
    if x is None:
        return None
    return pool.numbers.of((lax.argmax, lax.argmin))(x, axis, jnp.int32)


def _cumulate(pool: Pool) -> Any:
    x, axis = _with_axis(pool, is_float)
    if x is None:
        return None
    fns = (lax.cumsum, lax.cummax, lax.cummin, lax.cumprod, lax.cumlogsumexp)
    return pool.numbers.of(fns)(x, axis, reverse=bool(pool.numbers.below(2)))


def _sort(pool: Pool) -> Any:
    x, axis = _with_axis(pool, is_real, _not_empty)
    if x is None:
        return None
    if pool.numbers.below(3) == 2:
        return tuple(lax.sort((x, pool.other(x)), dimension=axis, num_keys=1))
    if pool.numbers.below(2):
        return tuple(lax.top_k(x, 1))
    return lax.sort(x, dimension=axis)


def _window(pool: Pool) -> Any:
    x, axis = _with_axis(pool, is_float, _not_empty)
    if x is None or np.shape(x)[axis] < 2:
        return None
    window = tuple(2 if i == axis else 1 for i in range(np.ndim(x)))
    how = pool.numbers.of(((0.0, lax.add), (-np.inf, lax.max)))
    start = np.asarray(how[0], x.dtype)[()]
    return lax.reduce_window(x, start, how[1], window, (1,) * np.ndim(x), "SAME")


# -- contractions ---------------------------------------------------------------------------------


def _dot(pool: Pool) -> Any:
    x = pool.pick(lambda v: is_float(v) or v.dtype == jnp.int32, lambda v: np.ndim(v) == 2)
    if x is None:
        return None
    y, wide = pool.other(x), None
    y = pool.numbers.of((y, lax.transpose(y, (1, 0))))
    left, right = pool.numbers.below(2), pool.numbers.below(2)
    if np.shape(x)[left] != np.shape(y)[right]:
        right = 1 - right
    if np.shape(x)[left] != np.shape(y)[right]:
        return None
    if x.dtype == jnp.bfloat16 and pool.numbers.below(2):
        wide = jnp.float32
    out = lax.dot_general(x, y, (([left], [right]), ([], [])), preferred_element_type=wide)
    return lax.transpose(out, (1, 0)) if pool.numbers.below(2) else out


def _batched_dot(pool: Pool) -> Any:
    x = pool.pick(is_float, lambda v: np.ndim(v) == 3)
    if x is None:
        return None
    order = pool.numbers.of(((0, 1, 2), (0, 2, 1)))
    y = lax.transpose(pool.other(x), order)
    equations = ("bij,bjk->bik", "bij,bjk->kib", "bij,bjk->bki")
    wanted = pool.numbers.of(equations if order == (0, 2, 1) else ("bij,bik->bjk", "bij,bij->bj"))
    return jnp.einsum(wanted, x, y)


def _grouped(pool: Pool) -> Any:
    """Keys repeated for the query heads that share them, in one of the ways people write it."""
    q = pool.pick(lambda v: is_float(v) and np.shape(v) == (2, 2, 3))
    k = None if q is None else pool.pick(lambda v: v.dtype == q.dtype and np.shape(v) == (2, 3))
    if k is None:
        return None
    k = lax.reshape(k, (2, 1, 3))
    if pool.numbers.below(2):
        many = lax.reshape(lax.broadcast_in_dim(k, (2, 1, 2, 3), (0, 1, 3)), (2, 2, 3))
    else:
        many = jnp.repeat(k, 2, axis=1)
    return jnp.einsum(pool.numbers.of(("bhd,bhd->bh", "bhd,bgd->bhg", "bhd,bhe->bde")), q, many)


def _convolve(pool: Pool) -> Any:
    x = pool.pick(lambda v: v.dtype == jnp.float32 and np.shape(v) == (2, 2, 3))
    if x is None:
        return None
    kernel = lax.slice_in_dim(pool.other(x), 0, 2, axis=2)
    return lax.conv_general_dilated(x, kernel, (1,), "SAME")


# -- made of nothing, and drawn -------------------------------------------------------------------


def _make(pool: Pool) -> Any:
    dtype = jnp.dtype(pool.numbers.of(("float32", "int32", "bfloat16", "uint8")))
    shape = pool.numbers.of(sorted(SHAPES))
    fns = (lambda: jnp.zeros(shape, dtype), lambda: jnp.ones(shape, dtype),
           lambda: lax.broadcasted_iota(dtype, shape or (3,), 0),
           lambda: jnp.full(shape, special(dtype, pool.numbers), dtype),
           lambda: jnp.tril(jnp.ones((2, 3), dtype)), lambda: jnp.arange(3) * 2 + 1)  # fmt: skip
    made = pool.numbers.of(fns)()
    return made, constant_like(made, pool.numbers) * made


def _weak(pool: Pool) -> Any:
    x = pool.pick(lambda v: v.weak_type if hasattr(v, "weak_type") else False)
    if x is None:
        return None
    return jnp.broadcast_to(x, (3,)) if pool.numbers.below(2) else x * 2


def _random(pool: Pool) -> Any:
    key = pool.pick(is_key, lambda k: np.ndim(k) == 0)
    if key is None:
        return None
    fns = (lambda: jax.random.bits(key, (3,)), lambda: jax.random.uniform(key, (2, 3)),
           lambda: jax.random.normal(key, (2, 3)), lambda: jax.random.split(key)[0],
           lambda: jax.random.fold_in(key, _index(pool)), lambda: jax.random.key(0),
           lambda: jax.random.wrap_key_data(jax.random.key_data(key)),
           lambda: lax.select(np.bool_(pool.numbers.below(2)), key, jax.random.key(3)))  # fmt: skip
    return pool.numbers.of(fns)()


def _fourier(pool: Pool) -> Any:
    x = pool.pick(lambda v: is_complex(v) and np.shape(v) == (3,))
    return None if x is None else pool.numbers.of((jnp.fft.fft, jnp.fft.ifft))(x)


ROWS: dict[str, tuple[int, Instruction]] = {
    "move": (4, _move), "moves": (3, _moves), "wide_move": (3, _wide_move),
    "there_and_back": (2, _there_and_back), "dynamic_slice": (1, _dynamic_slice),
    "dynamic_update": (1, _dynamic_update), "gather": (1, _gather), "fancy": (1, _fancy),
    "scatter": (1, _scatter), "reduce": (2, _reduce), "reduce_bits": (1, _reduce_bits),
    "count": (1, _count), "normalise": (1, _normalise), "arg": (1, _arg),
    "cumulate": (1, _cumulate), "sort": (1, _sort), "window": (1, _window), "dot": (2, _dot),
    "batched_dot": (1, _batched_dot), "grouped": (2, _grouped), "convolve": (1, _convolve),
    "make": (2, _make), "weak": (1, _weak), "random": (1, _random), "fourier": (1, _fourier),
}  # fmt: skip
"""By name, how often an instruction is drawn and what it does."""
