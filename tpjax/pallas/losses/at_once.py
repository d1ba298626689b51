# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""One pass on Hopper: loss and gradient of a block of tokens, three products and nothing between.

The kernel writes weights w = exp(x - shift) in 16 bits, shift a guess of lse, and sums them. With
a and b of `terms`, and f = a exp(shift - lse), the gradient of the logits is

    dx = diag(f) (w - (b / f) at the label)

so what is a token's own goes to the other operand or to the result, and the weights are multiplied
as they are, but for one of each token:

    dhidden = diag(f) (w' head)          dhead = w'^T (diag(f) hidden)

The guess is the largest of a few logits. While it is within 2^80 of the sum, weights are finite and
none that matters is zero; else the block is done again with lse itself. With smoothed labels, -e
everywhere is a product of vectors.

Numerics: w' and f h are rounded to 16 bits, sums are float32.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from tpjax.pallas.losses import terms
from tpjax.pallas.losses.chunked import in_blocks
from tpjax.pallas.losses.logit_kernel import LOG2E, Sums
from tpjax.pallas.losses.setup import Setup
from tpjax.pallas.partition import vary_alike

SAMPLE = 256
"""Columns whose logits guess lse."""
MOST_LOG2 = 80.0
"""How far the guess may be off, in units of log2."""
MIN_BLOCK_BYTES, MAX_BLOCK_BYTES = 1 << 28, 1 << 31
"""Of a block's weights: fewer are not cut, more are not held."""
BLOCK_TOKENS = 8192
"""Of a block, at most, or two for each feature: then its weights are as large as a float32 gradient
of the head, without which one block does."""


def block_size(tokens: int, features: int, columns: int) -> int:
    """Returns how many tokens make a block."""
    most = min(max(BLOCK_TOKENS, 2 * features), MAX_BLOCK_BYTES // (2 * columns))
    most = max(most, MIN_BLOCK_BYTES // (2 * columns), 128)
    count = -(-tokens // most)
    return min(tokens, -(-tokens // (count * 128)) * 128)


def guess(setup: Setup, hidden: Array, head: Array) -> Array:
    """Returns a number near each token's lse, in units of log2."""
    axis = setup.options.vocab_axis
    stride = -(-head.shape[axis] // SAMPLE)
    some = lax.slice_in_dim(head, 0, head.shape[axis], stride, axis)
    return terms.logits(hidden, some, setup.options).max(1) * LOG2E


def _weights(setup: Setup, hidden: Array, head: Array, labels: Array) -> tuple[Any, ...]:
    """Returns sums over tiles, weights [R, V], and their shift, in units of log2."""

    def attempt(shift: Array) -> Any:
        sums, weights = setup.run("weights", hidden, head, labels, shift)
        return sums, weights, shift

    def is_far(state: Any) -> Array:
        tried, (sums, _, _) = state
        return is_far_off(sums) & (tried < 1)  # once: NaN stays NaN

    def again(state: Any) -> Any:
        return state[0] + 1, attempt(setup.exact_shift(hidden, head, labels))

    first = attempt(guess(setup, hidden, head))
    return lax.while_loop(is_far, again, (jnp.int32(0), first))[1]


def is_far_off(sums: Sums) -> Array:
    """Returns whether the guess was too far off for one of the tokens, or something is NaN."""
    return ~jnp.all(jnp.abs(jnp.log2(sums.total.sum(0))) < MOST_LOG2)


class Tokens(NamedTuple):
    """What is known of tokens after their weights were made."""

    written: Array
    """w' [R, V], in 16 bits."""
    factor: Array
    """f [R]"""
    every: Array
    """e [R]"""
    lse: Array
    loss: Array

    def dhidden(self, head: Array, columns_sum: Array | None, options: terms.Options) -> Array:
        """Returns the gradient of hidden, float32; `columns_sum` is given for smoothed labels."""
        dh = self.factor[:, None] * terms.dhidden(self.written, head, options)
        return dh if columns_sum is None else dh - self.every[:, None] * columns_sum


def tokens_of(
    setup: Setup, head: Array, labels: Array, weights: Array, shift: Array, made: tuple[Sums, Array]
) -> Tokens:
    """Returns what follows from sums and weights [R, V]; labels count this device's columns."""
    options, (sums, written) = setup.options, made
    lse, loss = setup.joined((shift + jnp.log2(sums.total.sum(0))) / LOG2E, sums, head)
    softmax, label, every = terms.factors(
        weights, lse, None, terms.vocab_size(head, options), options
    )
    # Where z-loss makes a zero by chance, a tiny number divides as well.
    softmax = jnp.where((softmax == 0) & (label != 0), 1e-6 * label, softmax)
    factor = softmax * jnp.exp2(shift - lse * LOG2E)
    at_label = _at_label(setup, sums.label.sum(0), shift, label, factor)
    rows = jnp.arange(written.shape[0], dtype=jnp.int32)
    written = written.at[rows, jnp.where(labels < 0, written.shape[1], labels)].set(
        at_label.astype(written.dtype),
        mode="drop",
        unique_indices=True,
        indices_are_sorted=True,
    )
    return Tokens(written, factor, every, lse, loss)


def _at_label(setup: Setup, logit: Array, shift: Array, label: Array, factor: Array) -> Array:
    """Returns what the weight at each token's label becomes."""
    ratio = jnp.where(label == 0, 0, label / factor)
    value = jnp.exp2(logit * LOG2E - shift) - ratio
    if setup.options.softcap is not None:
        value *= 1 - jnp.square(logit / setup.options.softcap)
    return value


def sum_of_columns(setup: Setup, head: Array) -> Array | None:
    """Returns the sum of the head over the vocabulary [D], float32, where labels are smoothed."""
    if not setup.options.label_smoothing:
        return None
    return head.astype(jnp.float32).sum(setup.options.vocab_axis)


def _block(
    setup: Setup, head: Array, columns_sum: Array | None, dtype: Any, dhead: Any, block: Any
) -> tuple[Any, Any]:
    """Returns the head's gradient with a block's share, and dhidden, lse and loss of its tokens.

    A gradient that nothing is added to is rounded to `dtype` as it is made; None: it stays float32.
    """
    hidden, labels, weights = block
    options = setup.options
    labels = labels - terms.first_column(head, options)
    sums, written, shift = _weights(setup, hidden, head, labels)
    known = tokens_of(setup, head, labels, weights, shift, (sums, written))
    wide = hidden.astype(jnp.float32)
    dh = known.dhidden(head, columns_sum, options)
    scaled = (known.factor[:, None] * wide).astype(hidden.dtype)
    ours = terms.dhead(known.written, scaled, options, dtype)
    if columns_sum is not None:
        rank_one = (known.every[:, None] * wide).sum(0)
        ours -= rank_one[:, None] if options.vocab_axis else rank_one
    dhead = ours if dhead is None else dhead + ours
    return dhead, (dh.astype(hidden.dtype), known.lse, known.loss)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def one_pass(
    setup: Setup, hidden: Array, head: Array, labels: Array, weights: Array
) -> tuple[Array, Array, Array]:
    """Returns the weighted sum of losses, which alone has gradients, then lse and losses [R]."""
    lse, loss = setup.evaluate(hidden, head.astype(hidden.dtype), labels)
    return terms.weighted(loss, weights).sum(), lse, loss


def _forward(
    setup: Setup, hidden: Array, head: Array, labels: Array, weights: Array
) -> tuple[Any, Any]:
    tokens, features = hidden.shape
    size = block_size(tokens, features, head.shape[setup.options.vocab_axis])
    whole = size >= tokens
    at_once = whole and not setup.options.label_smoothing and head.dtype == hidden.dtype

    @jax.custom_batching.sequential_vmap
    def run(hidden: Array, head: Array, labels: Array, weights: Array) -> Any:
        narrow, dtype = head.astype(hidden.dtype), head.dtype if at_once else None
        step = partial(_block, setup, narrow, sum_of_columns(setup, narrow), dtype)
        # A sum that starts at zero is one loop, in which XLA adds to it in place.
        zeros = None if whole else vary_alike([jnp.zeros(head.shape, jnp.float32), hidden])[0]
        dhead, rows = in_blocks(step, (hidden, labels, weights), size, zeros)
        # Where nothing was added up, float32 would keep no more.
        return dhead.astype(head.dtype) if whole else dhead, rows

    dhead, (dh, lse, loss) = run(hidden, head, labels, weights)
    like = jnp.zeros((), head.dtype)  # of size 0 it crashes XLA under a mesh (JAX 0.11)
    return (terms.weighted(loss, weights).sum(), lse, loss), (dh, dhead, loss, labels, like)


def _backward(setup: Setup, kept: Any, cotangents: Any) -> Any:
    dh, dhead, loss, labels, like = kept
    dtotal = cotangents[0]  # what else was returned has no gradient
    by = terms.whole(dtotal, setup.options)

    def scaled(x: Array, dtype: Any) -> Array:
        return (x.astype(by.dtype) * by).astype(dtype)

    dweights = dtotal * loss
    return scaled(dh, dh.dtype), scaled(dhead, like.dtype), terms.no_gradient(labels), dweights


one_pass.defvjp(_forward, _backward)
