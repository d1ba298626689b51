# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The softmax family: what it means, in plain `jax.numpy`, and in one pass over long rows.

    s              = softcap tanh(x / softcap), or x
    softmax(x)     = exp(s - lse)                     lse = log(sum of exp(s) over what is visible)
    log_softmax(x) = s - lse

What the mask hides is 0 in softmax, minus infinity in log_softmax; so is a row that sees nothing.

Numerics: float32 (float64 for float64 x), rounded once. The largest visible s is taken off before
exp. Long rows are read once for lse: a pair (largest so far, sum so far) is reduced,

    (m, l) + (m', l') = (M, l exp(m - M) + l' exp(m' - M))                        M = max(m, m')

Source: Milakov and Gimelshein 2018 (online softmax).
"""

from functools import partial

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
    lse = logsumexp(s, mask, axis)
    probabilities = jnp.exp(s - _finite(lse))
    if mask is not None:
        probabilities = jnp.where(mask, probabilities, 0)
    return probabilities.astype(x.dtype)


def log_softmax_reference(
    x: Array, mask: Array | None = None, *, axis: int = -1, softcap: float | None = None
) -> Array:
    """Returns the logarithm of `softmax_reference`."""
    s = _scores(x, softcap)
    lse = logsumexp(s, mask, axis)
    logarithms = s - _finite(lse)
    if mask is not None:
        logarithms = jnp.where(mask, logarithms, -jnp.inf)
    return logarithms.astype(x.dtype)


def _scores(x: Array, softcap: float | None) -> Array:
    s = x.astype(statistics_dtype(x.dtype))
    return s if softcap is None else softcap * jnp.tanh(s / softcap)


def _finite(lse: Array) -> Array:
    """Returns lse, 0 where a row sees nothing: its scores stay finite, and so do gradients."""
    return jnp.where(jnp.isneginf(lse), 0, lse)


def logsumexp(s: Array, mask: Array | None, axis: int) -> Array:
    """Returns log(sum(exp(s))) along the axis, kept as one of size 1, of what the mask shows."""
    if mask is not None:
        s = jnp.where(mask, s, -jnp.inf)
    return _logsumexp(s, axis)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _logsumexp(s: Array, axis: int) -> Array:
    if s.shape[axis] < ONLINE_FROM:
        largest = _finite(s.max(axis, keepdims=True))
        return jnp.log(jnp.exp(s - largest).sum(axis, keepdims=True)) + largest
    zero = jnp.asarray(0, s.dtype)
    operands = s, jnp.ones_like(s)
    start = jnp.asarray(-jnp.inf, s.dtype), zero
    largest, total = jax.lax.reduce(operands, start, _joined, (axis % s.ndim,))
    return jnp.expand_dims(jnp.log(total) + _finite(largest), axis)


def _joined(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    """Returns the larger maximum of two pairs, and the sum of their sums, both relative to it."""
    (m, total), (n, other) = a, b
    largest = jnp.maximum(m, n)
    shift = _finite(largest)
    return largest, total * jnp.exp(m - shift) + other * jnp.exp(n - shift)


@_logsumexp.defjvp
def _(axis: int, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (s,), (t,) = primals, tangents
    lse = _logsumexp(s, axis)
    weights = jnp.exp(s - _finite(lse))
    return lse, (weights * t).sum(axis, keepdims=True)
