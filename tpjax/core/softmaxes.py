# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The softmax family: what it means, in plain `jax.numpy`, and in one pass over long rows.

    s              = softcap tanh(x / softcap), or x
    m, l           = max(s), sum(exp(s - m))          over what is visible
    softmax(x)     = exp(s - m) / l
    log_softmax(x) = s - m - log(l)

What the mask hides is 0 in softmax, minus infinity in log_softmax; so is a row that sees nothing.

Numerics: float32 (float64 for float64 x), rounded once. Long rows are read once for both m and l:
a pair is reduced, in blocks, as errors of a sum grow with its length,

    (m, l) + (m', l') = (M, l exp(m - M) + l' exp(m' - M))                        M = max(m, m')

Source: Milakov and Gimelshein 2018 (online softmax).
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from tpjax.core.norms import statistics_dtype

ONLINE_FROM = 32_768
"""Elements of a row from which it is read once for both its maximum and its sum."""


def softmax_reference(
    x: Array, mask: Array | None = None, *, axis: int = -1, softcap: float | None = None
) -> Array:
    """Returns exp(x) over its sum along the axis, of what is visible.

    Arguments as of `tpjax.pallas.softmax`.
    """
    return weights(x, mask, axis, softcap).astype(x.dtype)


def log_softmax_reference(
    x: Array, mask: Array | None = None, *, axis: int = -1, softcap: float | None = None
) -> Array:
    """Returns the logarithm of `softmax_reference`."""
    s = _scores(x, mask, softcap)
    largest, total = _statistics(s, axis)
    return (s - largest - jnp.log(total)).astype(x.dtype)


def weights(x: Array, mask: Array | None, axis: int, softcap: float | None) -> Array:
    """Returns `softmax_reference` before it is rounded."""
    s = _scores(x, mask, softcap)
    largest, total = _statistics(s, axis)
    return jnp.exp(s - largest) / total


def push(
    x: Array, mask: Array | None, t: Array, *, axis: int, softcap: float | None, logarithm: bool
) -> Array:
    """Returns what a tangent t of x makes of the result's, p formed from x again."""
    p = weights(x, mask, axis, softcap)
    t = _shown(_slope(x, mask, softcap) * t.astype(p.dtype), mask)
    apart = t - (p * t).sum(axis, keepdims=True)
    return (_shown(apart, mask) if logarithm else p * apart).astype(x.dtype)


def pull(
    x: Array, mask: Array | None, g: Array, *, axis: int, softcap: float | None, logarithm: bool
) -> Array:
    """Returns what a gradient g of the result makes of x's: the transpose of `push`."""
    if softcap is not None or not is_long(x, (axis,)):
        x = jax.lax.optimization_barrier(x)  # or XLA shares float32 elements with the forward pass
    p = weights(x, mask, axis, softcap)
    g = _shown(g.astype(p.dtype), mask)
    if logarithm:
        d = g - p * g.sum(axis, keepdims=True)
    else:
        d = p * (g - (p * g).sum(axis, keepdims=True))
    return (_slope(x, mask, softcap) * d).astype(x.dtype)


def _slope(x: Array, mask: Array | None, softcap: float | None) -> Array | float:
    """Returns the derivative of s; anything finite where it is hidden."""
    if softcap is None:
        return 1.0
    xf = _shown(x.astype(statistics_dtype(x.dtype)), mask)
    return 1 - jnp.square(jnp.tanh(xf / softcap))


def _shown(x: Array, mask: Array | None) -> Array:
    """Returns x, 0 where it is hidden."""
    return x if mask is None else jnp.where(mask, x, 0)


def _scores(x: Array, mask: Array | None, softcap: float | None) -> Array:
    """Returns s, minus infinity where it is hidden: whatever is there has no gradient either."""
    s = x.astype(statistics_dtype(x.dtype))
    if softcap is not None:
        s = softcap * jnp.tanh(_shown(s, mask) / softcap)
    return s if mask is None else jnp.where(mask, s, -jnp.inf)


def _statistics(s: Array, axis: int) -> tuple[Array, Array]:
    """Returns the largest s along the axis, and the sum of exp(s - largest).

    Of none they are the least number and 1/2: no difference from it, and no quotient, is NaN. (A
    maximum with a number leaves XLA its one kernel; a choice does not.) Derivatives are those for a
    constant `largest`: what follows does not depend on it.
    """
    if not is_long(s, (axis,)):
        largest = _finite(jax.lax.stop_gradient(s).max(axis, keepdims=True))
        total = jnp.exp(s - largest).sum(axis, keepdims=True)
    else:
        largest, total = _online(s, axis)
    return largest, jnp.maximum(total, 0.5)


def is_long(x: Array, axes: tuple[int, ...]) -> bool:
    """Returns whether rows along the axes are read once; not where x is split explicitly."""
    whole = all(name is None for name in jax.typeof(x).sharding.spec)
    return whole and math.prod(x.shape[a] for a in axes) >= ONLINE_FROM


def reduced_in_blocks(
    operands: tuple[Array, ...], start: tuple[Array, ...], join: Any, axis: int
) -> tuple[Array, ...]:
    """Reduces an axis block by block, then the blocks, about as many as a block has elements.

    Args:
      operands: of one shape.
      start: numbers that change nothing they are joined with.
      join: takes two tuples like `start`, returns one.
      axis: of the operands, not negative.
    """
    shape = operands[0].shape
    block = 1 << (shape[axis].bit_length() // 2)

    def split(x: Array, fill: Array) -> Array:
        pads = [(0, -n % block if a == axis else 0, 0) for a, n in enumerate(shape)]
        return jax.lax.pad(x, fill, pads).reshape(*shape[:axis], -1, block, *shape[axis + 1 :])

    parts = tuple(split(x, fill) for x, fill in zip(operands, start, strict=True))
    return jax.lax.reduce(jax.lax.reduce(parts, start, join, (axis + 1,)), start, join, (axis,))


def _finite(largest: Array) -> Array:
    """Returns the least number for minus infinity, the largest of nothing."""
    return jnp.maximum(largest, jnp.finfo(largest.dtype).min)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _online(s: Array, axis: int) -> tuple[Array, Array]:
    operands = s, jnp.ones_like(s)
    start = jnp.asarray(-jnp.inf, s.dtype), jnp.asarray(0, s.dtype)
    largest, total = reduced_in_blocks(operands, start, _joined, axis % s.ndim)
    return jnp.expand_dims(_finite(largest), axis), jnp.expand_dims(total, axis)


@_online.defjvp
def _(axis: int, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Any, Any]:
    (s,), (t,) = primals, tangents
    largest, total = _online(s, axis)
    moved = (jnp.exp(s - largest) * t).sum(axis, keepdims=True)
    return (largest, total), (jnp.zeros_like(largest), moved)


def _joined(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    """Returns the larger maximum of two pairs, and the sum of their sums, both relative to it."""
    (m, total), (n, other) = a, b
    largest = jnp.maximum(m, n)
    shift = _finite(largest)
    return largest, total * jnp.exp(m - shift) + other * jnp.exp(n - shift)
