# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The softmax family: what it means, in plain `jax.numpy`, and its derivative in one pass.

    s              = softcap tanh(x / softcap), or x
    m, l           = max(s), sum(exp(s - m))          over what is visible
    softmax(x)     = exp(s - m) / l
    log_softmax(x) = s - m - log(l)

What the mask hides is 0 in softmax, minus infinity in log_softmax; so is a row that sees nothing.

Numerics: float32 (float64 for float64 x), rounded once. Rows that fit one block are one kernel of
XLA's each way: the derivative forms p = softmax(x) from x again. For longer rows, of which XLA
makes several kernels, it keeps m and l.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from tpjax.core.norms import statistics_dtype

LONG = 32_768
"""Elements of a row from which XLA makes more than one kernel of a softmax, on an H200."""
Statistics = tuple[Array, Array]
"""m and l, the axis of size 1."""


def softmax_reference(
    x: Array, mask: Array | None = None, *, axis: int = -1, softcap: float | None = None
) -> Array:
    """Returns exp(x) over its sum along the axis, of what is visible.

    Arguments as of `tpjax.pallas.softmax`.
    """
    return _weights(x, mask, None, axis, softcap).astype(x.dtype)


def log_softmax_reference(
    x: Array, mask: Array | None = None, *, axis: int = -1, softcap: float | None = None
) -> Array:
    """Returns the logarithm of `softmax_reference`."""
    s = _scores(x, mask, softcap)
    largest, total = _statistics(s, axis)
    return (s - largest - jnp.log(total)).astype(x.dtype)


def worth_keeping(
    x: Array, mask: Array | None, axis: int, softcap: float | None
) -> Statistics | None:
    """Returns what a derivative need not form again, or None where it takes it as it comes."""
    return None if x.shape[axis] < LONG else _statistics(_scores(x, mask, softcap), axis)


def _weights(
    x: Array, mask: Array | None, kept: Statistics | None, axis: int, softcap: float | None
) -> Array:
    """Returns `softmax_reference` before it is rounded."""
    s = _scores(x, mask, softcap)
    largest, total = kept or _statistics(s, axis)
    return jnp.exp(s - largest) / total


@dataclass(frozen=True)
class Derivative:
    """Of softmax or log_softmax, at x, a mask and what was `worth_keeping`."""

    axis: int
    softcap: float | None
    logarithm: bool

    def push(self, x: Array, mask: Array | None, kept: Statistics | None, t: Array) -> Array:
        """Returns what a tangent t of x makes of the result's."""
        p = _weights(x, mask, kept, self.axis, self.softcap)
        t = _shown(_slope(x, mask, self.softcap) * t.astype(p.dtype), mask)
        apart = t - (p * t).sum(self.axis, keepdims=True)
        return (_shown(apart, mask) if self.logarithm else p * apart).astype(x.dtype)

    def pull(self, x: Array, mask: Array | None, kept: Statistics | None, g: Array) -> Array:
        """Returns what a gradient g of the result makes of x's: the transpose of `push`."""
        x = jax.lax.optimization_barrier(x)  # or XLA shares float32 elements with the forward pass
        p = _weights(x, mask, kept, self.axis, self.softcap)
        g = _shown(g.astype(p.dtype), mask)
        if self.logarithm:
            d = g - p * g.sum(self.axis, keepdims=True)
        else:
            d = p * (g - (p * g).sum(self.axis, keepdims=True))
        return (_slope(x, mask, self.softcap) * d).astype(x.dtype)


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


def _statistics(s: Array, axis: int) -> Statistics:
    """Returns the largest s along the axis, and the sum of exp(s - largest).

    Of nothing they are the least number and 1/2: no difference from it, and no quotient, is NaN.
    (Such a maximum leaves XLA its one kernel; a choice does not.) Derivatives are those for a
    constant `largest`: what follows does not depend on it.
    """
    largest = jax.lax.stop_gradient(s).max(axis, keepdims=True)
    largest = jnp.maximum(largest, jnp.finfo(s.dtype).min)
    return largest, jnp.maximum(jnp.exp(s - largest).sum(axis, keepdims=True), 0.5)
