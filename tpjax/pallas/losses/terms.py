# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of the loss on a block of logits, and of its gradient: every form shares it.

With p the softmax of a token's capped logits x, a cotangent g of its loss and one of its lse:

    dx[v] = a p[v] - b [v == label] - e
    a = g (1 + 2 z lse) + dlse,  b = g (1 - s),  e = g s / V

and, before the cap, `dx (1 - (x / cap)^2)`. The vocabulary may be split over a mesh axis: a block
holds the device's part, and the four sums over it are finished by `psum` and `pmax`.

Letters: R tokens, V vocabulary (of this device), D features.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tpjax.core.norms import statistics_dtype


class Options(NamedTuple):
    """The static options: code is compiled for each."""

    vocab_axis: int = 0
    """Which axis of the head counts the vocabulary: 0 for [V, D], 1 for [D, V]."""
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    axis_name: str | tuple[str, ...] | None = None
    """Mesh axis that splits the vocabulary; None: it is whole."""


class Statistics(NamedTuple):
    """What is known of a token once all its logits were seen."""

    lse: Array
    """[R]"""
    loss: Array
    """[R], without the token's weight."""


class Factors(NamedTuple):
    """What multiplies the parts of the gradient of a token's logits, as the module says."""

    softmax: Array
    """a [R]"""
    label: Array
    """b [R]"""
    every: Array
    """e [R]"""


def vocab_size(head: Array, options: Options) -> int:
    """Returns the size of the vocabulary, of all devices together."""
    local = head.shape[options.vocab_axis]
    return local if options.axis_name is None else local * lax.axis_size(options.axis_name)


def first_column(head: Array, options: Options) -> Any:
    """Returns the number of this device's first column in the whole vocabulary."""
    if options.axis_name is None:
        return 0
    return lax.axis_index(options.axis_name) * head.shape[options.vocab_axis]


def logits(hidden: Array, head: Array, options: Options) -> Array:
    """Returns the capped logits [R, V], float32 or float64, of hidden [R, D] and a head like it."""
    wide = statistics_dtype(hidden.dtype)
    dims = (((1,), (1 - options.vocab_axis,)), ((), ()))
    x = lax.dot_general(hidden, head, dims, preferred_element_type=wide)
    return x if options.softcap is None else options.softcap * jnp.tanh(x / options.softcap)


def dhidden(dx: Array, head: Array, options: Options) -> Array:
    """Returns the gradient [R, D] of hidden, wide, for that of the logits [R, V]."""
    dims = (((1,), (options.vocab_axis,)), ((), ()))
    return lax.dot_general(dx, head, dims, preferred_element_type=statistics_dtype(dx.dtype))


def dhead(dx: Array, hidden: Array, options: Options, dtype: Any = None) -> Array:
    """Returns the gradient of the head, in its layout, for that of the logits [R, V].

    It is wide, or is rounded to `dtype`.
    """
    sides = (hidden, dx) if options.vocab_axis else (dx, hidden)
    dims = (((0,), (0,)), ((), ()))
    dtype = dtype or statistics_dtype(dx.dtype)
    return lax.dot_general(*sides, dims, preferred_element_type=dtype)


def is_label(labels: Array, columns: int, first: Any) -> Array:
    """Returns which of the columns, counted from `first`, is the label: [R, V]."""
    return (
        lax.broadcasted_iota(jnp.int32, (labels.shape[0], columns), 1) == (labels - first)[:, None]
    )


def statistics(x: Array, labels: Array, first: Any, vocab: int, options: Options) -> Statistics:
    """Returns the statistics of tokens whose capped logits [R, V] are given."""
    top = lax.stop_gradient(x.max(-1))
    if options.axis_name is not None:
        top = lax.pmax(top, options.axis_name)
    label_logit = jnp.where(is_label(labels, x.shape[1], first), x, 0).sum(-1)
    sums = [jnp.exp(x - top[:, None]).sum(-1), label_logit]
    if options.label_smoothing:
        sums.append(x.sum(-1))
    if options.axis_name is not None:
        sums = lax.psum(sums, options.axis_name)
    return finished(top, sums[0], sums[1], sums[-1], vocab, options)


def finished(
    top: Array, total: Array, label_logit: Array, sum_logits: Array, vocab: int, options: Options
) -> Statistics:
    """Returns the statistics for sums over the whole vocabulary.

    Args:
      top: [R], any number near the largest logit.
      total: [R], the sum of exp(x - top).
      label_logit: [R], the logit of the label.
      sum_logits: [R], the sum of all logits; read only where labels are smoothed.
      vocab: V of all devices together.
      options: of the loss.
    """
    smoothing = options.label_smoothing
    lse = top + jnp.log(total)
    loss = lse - (1 - smoothing) * label_logit
    if smoothing:
        loss -= smoothing / vocab * sum_logits
    if options.z_loss:
        loss += options.z_loss * jnp.square(lse)
    return Statistics(lse, loss)


def factors(dloss: Array, lse: Array, dlse: Array | None, vocab: int, options: Options) -> Factors:
    """Returns the factors for cotangents [R] of losses and, unless None, of lse."""
    smoothing = options.label_smoothing
    softmax = dloss
    if options.z_loss:
        # Where a token does not count, its lse may be anything.
        softmax = jnp.where(dloss == 0, 0, dloss * (1 + 2 * options.z_loss * lse))
    if dlse is not None:
        softmax += dlse
    return Factors(softmax, dloss * (1 - smoothing), dloss * (smoothing / vocab))


def dlogits(
    x: Array, labels: Array, first: Any, lse: Array, by: Factors, options: Options
) -> Array:
    """Returns the gradient [R, V], wide, of the logits before the cap, for capped ones."""
    softmax, label, every = (f[:, None] for f in by)
    dx = softmax * jnp.exp(x - lse[:, None])
    dx -= jnp.where(is_label(labels, x.shape[1], first), label, 0)
    if options.label_smoothing:
        dx -= every
    if options.softcap is not None:
        dx *= 1 - jnp.square(x / options.softcap)
    # A token that does not count has no gradient, whatever its logits.
    return jnp.where((softmax == 0) & (label == 0), 0, dx)


def weighted(losses: Array, weights: Array) -> Array:
    """Returns losses times weights; zero where the weight is, whatever the loss.

    The weight has a derivative there too: the loss, where that is finite.
    """
    return weights * jnp.where((weights == 0) & ~jnp.isfinite(losses), 0, losses)


def whole(cotangent: Array, options: Options) -> Array:
    """Returns the cotangent of a result that all devices of the vocabulary's axis share.

    A shard_map that does not check what varies gives each device its share of it.
    """
    if options.axis_name is None:
        return cotangent
    index = lax.axis_index(options.axis_name)
    checked = bool(jax.typeof(index).manual_axis_type.varying)
    return cotangent if checked else lax.psum(cotangent, options.axis_name)


def no_gradient(x: Array) -> Any:
    """Returns the cotangent of an integer array."""
    return np.zeros(x.shape, jax.dtypes.float0)
