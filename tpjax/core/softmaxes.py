# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The softmax family: what it means, in plain `jax.numpy`, and in one pass over long rows.

    s              = softcap tanh(x / softcap), or x
    m, l           = max(s), sum(exp(s - m))          over what is visible
    softmax(x)     = exp(s - m) / l
    log_softmax(x) = s - m - log(l)

What the mask hides is 0 in softmax, minus infinity in log_softmax; so is a row that sees nothing.

Numerics: float32 (float64 for float64 x), rounded once. Long rows are read once for both m and l:
a pair is reduced,

    (m, l) + (m', l') = (M, l exp(m - M) + l' exp(m' - M))                        M = max(m, m')

Source: Milakov and Gimelshein 2018 (online softmax).
"""

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
    s = _scores(x, softcap)
    largest, total = _statistics(s, mask, axis)
    probabilities = jnp.exp(s - largest) / total
    if mask is not None:
        probabilities = jnp.where(mask, probabilities, 0)
    return probabilities.astype(x.dtype)


def log_softmax_reference(
    x: Array, mask: Array | None = None, *, axis: int = -1, softcap: float | None = None
) -> Array:
    """Returns the logarithm of `softmax_reference`."""
    s = _scores(x, softcap)
    largest, total = _statistics(s, mask, axis)
    logarithms = s - largest - jnp.log(total)
    if mask is not None:
        logarithms = jnp.where(mask, logarithms, -jnp.inf)
    return logarithms.astype(x.dtype)


def _scores(x: Array, softcap: float | None) -> Array:
    s = x.astype(statistics_dtype(x.dtype))
    return s if softcap is None else softcap * jnp.tanh(s / softcap)


def _statistics(s: Array, mask: Array | None, axis: int) -> tuple[Array, Array]:
    """Returns the largest visible s along the axis, and the sum of exp(s - largest); 0, 1 of none.

    Derivatives are those for a constant `largest`: what follows does not depend on it.
    """
    if mask is not None:
        s = jnp.where(mask, s, -jnp.inf)
    if s.shape[axis] < ONLINE_FROM:
        largest = _finite(jax.lax.stop_gradient(s).max(axis, keepdims=True))
        total = jnp.exp(s - largest).sum(axis, keepdims=True)
    else:
        largest, total = _online(s, axis)
    return largest, jnp.where(total == 0, 1, total)


def _finite(largest: Array) -> Array:
    """Returns 0 for minus infinity, the largest of nothing: no difference from it is NaN."""
    return jnp.where(jnp.isneginf(largest), 0, largest)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _online(s: Array, axis: int) -> tuple[Array, Array]:
    operands = s, jnp.ones_like(s)
    start = jnp.asarray(-jnp.inf, s.dtype), jnp.asarray(0, s.dtype)
    largest, total = jax.lax.reduce(operands, start, _joined, (axis % s.ndim,))
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
