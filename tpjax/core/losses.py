# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of a linear head: what it means, in plain `jax.numpy`.

    x[v]   = softcap(hidden . head[v])        softcap(x) = cap * tanh(x / cap), if asked for
    lse    = log sum_v exp(x[v])
    loss   = lse - (1 - s) x[label] - s mean_v x[v] + z lse^2

Letters: B batch (any leading axes of tokens), R tokens, D features, V vocabulary; s is the label
smoothing: the target is 1 - s at the label plus s / V everywhere; z is the factor of the z-loss.

Numerics, of this and of every implementation: the head is cast to the dtype of hidden; products
are summed, and logits and everything after them computed, in float32 (float64 for float64 hidden).
An implementation may round the gradient of the logits to the dtype of hidden before it multiplies.

Source: Szegedy et al. 2016, section 7 (label smoothing); Chowdhery et al. 2022, section 5 (z-loss);
Gemma Team 2024, section 2 (softcap of logits).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from tpjax.core.norms import statistics_dtype

REDUCTIONS = ("mean", "sum", "none")


def linear_cross_entropy_reference(
    hidden: Array,
    head: Array,
    labels: Array,
    weights: Array | None = None,
    *,
    vocab_axis: int = 0,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    return_token_losses: bool = False,
    return_lse: bool = False,
) -> Any:
    """Returns the cross-entropy of `hidden @ head` against the labels; all logits are formed.

    Arguments as of `tpjax.pallas.linear_cross_entropy`.

    >>> import jax.numpy as jnp
    >>> hidden, head = jnp.array([[2.0, 0.0]]), jnp.eye(2)
    >>> round(float(linear_cross_entropy_reference(hidden, head, jnp.array([0]))), 4)
    0.1269
    """
    wide = statistics_dtype(hidden.dtype)
    vocab = head.shape[vocab_axis]
    head = jnp.moveaxis(head.astype(hidden.dtype), vocab_axis, 0)
    x = jnp.einsum("...d,vd->...v", hidden.astype(wide), head.astype(wide))
    if softcap is not None:
        x = softcap * jnp.tanh(x / softcap)
    lse = jax.nn.logsumexp(x, axis=-1)
    valid = labels != ignore_index
    at = jnp.where(valid, labels, 0)[..., None].astype(jnp.int32)
    label_logit = jnp.take_along_axis(x, at, axis=-1, mode="fill")[..., 0]  # NaN out of range
    label_logit = jnp.where((at[..., 0] < 0) | (at[..., 0] >= vocab), jnp.nan, label_logit)
    losses = lse - (1 - label_smoothing) * label_logit - label_smoothing * x.mean(-1)
    losses += z_loss * jnp.square(lse)
    factors = jnp.ones_like(lse) if weights is None else weights.astype(wide)
    factors = jnp.where(valid, factors, 0)
    # A weight of zero hides what is not finite, but has a derivative all the same: the loss.
    losses = factors * jnp.where((factors == 0) & ~jnp.isfinite(losses), 0, losses)
    extra = (losses,) * return_token_losses + (lse,) * return_lse
    if reduction == "none":
        return (losses, *extra) if extra else losses
    total = losses.sum()
    if reduction == "mean":
        total /= mean_divisor(factors)
    return (total, *jax.lax.stop_gradient(extra)) if extra else total


def mean_divisor(factors: Array) -> Array:
    """Returns the sum of the tokens' weights, or 1 where all are zero: their mean loss is zero."""
    return jnp.where(jnp.all(factors == 0), 1, factors.sum())
