# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of a linear head in plain XLA operations, a block of logits at a time.

    one pass     a block of tokens: logits, softmax, gradient of the logits, both products with it,
                 all in the forward pass; backward multiplies by the cotangent of the sum.
                 Work 6RDV. Temporaries: a block's logits and, for several blocks, the float32
                 gradient of the head.
    two passes   forward keeps lse alone; backward forms the logits again, a block of the
                 vocabulary at a time. Work 8RDV. Temporaries: a block's logits and the float32
                 gradient of hidden. Runs for any cotangent of each token's loss and lse.

Sums over blocks are float32, in one order: equal calls give equal bits.

Letters: R tokens, D features, V vocabulary.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from tpjax.core.norms import statistics_dtype
from tpjax.pallas.differentiation import differentiable
from tpjax.pallas.losses import terms
from tpjax.pallas.losses.terms import Options, Statistics
from tpjax.pallas.partition import vary_alike

MIN_BLOCK_BYTES = 1 << 24
"""Logits of this many bytes are one block."""
NUM_BLOCKS = 16
"""Into so many blocks the logits are cut where they are large, whatever they are cut along."""
ROUND_TO = 128
"""Tokens of a block are a multiple of this; tensor cores work on so many."""


def block_size(size: int, other: int, itemsize: int = 4) -> int:
    """Returns how many of `size` tokens, or columns, make a block, `other` being the other axis."""
    if size * other * itemsize <= MIN_BLOCK_BYTES:
        return size
    least = MIN_BLOCK_BYTES // (other * itemsize)
    wanted = max(1, least, math.ceil(size / NUM_BLOCKS))
    return min(size, math.ceil(wanted / ROUND_TO) * ROUND_TO)


def in_blocks(
    step: Callable[[Any, Any], tuple[Any, Any]], xs: Any, size: int, start: Any = None
) -> tuple[Any, Any]:
    """Returns the last carry, and the results of all blocks of rows, joined.

    Args:
      step: takes a carry and a block, returns a carry and results. The carry of the first block is
        None without `start`: what is summed need not start at zero.
      xs: arrays of rows.
      size: rows of a block. The odd block is the last: all start where a kernel may read.
      start: the carry of the first of several whole blocks: all these are one loop then.
    """
    rows = jax.tree.leaves(xs)[0].shape[0]
    count, odd = divmod(rows, size)

    def rows_from(first: int, stop: int) -> Any:
        return jax.tree.map(lambda x: x[first:stop], xs)

    carry, done, found = start if count > 1 else None, 0, []
    if carry is None:
        done = min(size, rows)
        carry, results = step(None, rows_from(0, done))
        found.append(results)
    if done < count * size:
        whole = rows_from(done, count * size)
        whole = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), whole)
        carry, results = lax.scan(step, carry, whole)
        found.append(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), results))
    if odd and count:
        rest, carry = lax.optimization_barrier((rows_from(count * size, rows), carry))
        carry, results = step(carry, rest)  # the barrier: one block in memory at a time
        found.append(results)
    return carry, found[0] if len(found) == 1 else jax.tree.map(_joined, *found)


def _joined(*parts: Array) -> Array:
    return jnp.concatenate(parts)


def _evaluate(hidden: Array, head: Array, labels: Array, options: Options) -> Statistics:
    """Returns the statistics of all tokens: nothing else is kept of a block's logits."""
    vocab, first = terms.vocab_size(head, options), terms.first_column(head, options)

    def step(_: None, block: Any) -> tuple[None, Statistics]:
        h, y = block
        return None, terms.statistics(terms.logits(h, head, options), y, first, vocab, options)

    size = block_size(hidden.shape[0], head.shape[options.vocab_axis])
    return in_blocks(step, (hidden, labels), size)[1]


def plain(options: Options, hidden: Array, head: Array, labels: Array) -> Statistics:
    """Returns what `_evaluate` does, differentiable in any way; blocks are formed again."""
    vocab, first = terms.vocab_size(head, options), terms.first_column(head, options)

    @jax.checkpoint
    def one(h: Array, y: Array, head: Array) -> Statistics:
        return terms.statistics(
            terms.logits(h, head.astype(h.dtype), options), y, first, vocab, options
        )

    size = block_size(hidden.shape[0], head.shape[options.vocab_axis])
    # Float32 here makes the blocks' gradients of the head add up in float32.
    wide = head.astype(statistics_dtype(hidden.dtype))

    def step(_: None, block: Any) -> tuple[None, Statistics]:
        return None, one(*block, wide)

    return in_blocks(step, (hidden, labels), size)[1]


def _plain_total(
    options: Options, hidden: Array, head: Array, labels: Array, weights: Array
) -> tuple[Array, Array, Array]:
    lse, loss = plain(options, hidden, head, labels)
    return terms.weighted(loss, weights).sum(), lse, loss


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _one_pass(
    options: Options, hidden: Array, head: Array, labels: Array, weights: Array
) -> tuple[Array, Array, Array]:
    lse, loss = _evaluate(hidden, head.astype(hidden.dtype), labels, options)
    return terms.weighted(loss, weights).sum(), lse, loss


def _one_pass_forward(
    options: Options, hidden: Array, head: Array, labels: Array, weights: Array
) -> tuple[Any, Any]:
    narrow = head.astype(hidden.dtype)
    vocab, first = terms.vocab_size(head, options), terms.first_column(head, options)
    scale = weight_scale(weights, hidden.dtype)

    def step(dhead: Array | None, block: Any) -> tuple[Array, Any]:
        h, y, w = block
        x = terms.logits(h, narrow, options)
        lse, loss = terms.statistics(x, y, first, vocab, options)
        by = terms.factors(w / scale, lse, None, vocab, options)
        dx = terms.dlogits(x, y, first, lse, by, options).astype(h.dtype)
        ours = terms.dhead(dx, h, options)
        dh = terms.dhidden(dx, narrow, options).astype(h.dtype)
        return (ours if dhead is None else dhead + ours), (dh, lse, loss)

    size = block_size(hidden.shape[0], head.shape[options.vocab_axis])
    dhead, (dh, lse, loss) = in_blocks(step, (hidden, labels, weights), size)
    if size >= hidden.shape[0]:
        dhead = dhead.astype(head.dtype)  # nothing was added up: float32 would keep no more
    like = jnp.zeros((), head.dtype)  # of size 0 it crashes XLA under a mesh (JAX 0.11)
    return (terms.weighted(loss, weights).sum(), lse, loss), (dh, dhead, loss, scale, labels, like)


def weight_scale(weights: Array, dtype: Any) -> Array:
    """Returns what weights are divided by before they meet arrays of `dtype`: 1, but for float16.

    Float16 has no numbers as small as a token's share of a mean.
    """
    if dtype != jnp.float16:
        return jnp.ones((), weights.dtype)
    largest = jnp.abs(weights).max()
    return jnp.where(largest == 0, jnp.ones_like(largest), largest)


def _one_pass_backward(options: Options, kept: Any, cotangents: Any) -> Any:
    dh, dhead, loss, scale, labels, like = kept
    dtotal = cotangents[0]  # what else was returned has no gradient
    by = terms.whole(dtotal, options) * scale

    def scaled(x: Array, dtype: Any) -> Array:
        return (x.astype(by.dtype) * by).astype(dtype)

    dweights = dtotal * loss
    return scaled(dh, dh.dtype), scaled(dhead, like.dtype), terms.no_gradient(labels), dweights


_one_pass.defvjp(_one_pass_forward, _one_pass_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _two_pass(options: Options, hidden: Array, head: Array, labels: Array) -> tuple[Array, Array]:
    lse, loss = _evaluate(hidden, head.astype(hidden.dtype), labels, options)
    return lse, loss


def _two_pass_forward(
    options: Options, hidden: Array, head: Array, labels: Array
) -> tuple[Any, Any]:
    lse, loss = _two_pass(options, hidden, head, labels)
    return (lse, loss), (hidden, head, labels, lse)


def _two_pass_backward(options: Options, kept: Any, cotangents: Any) -> Any:
    hidden, head, labels, lse = kept
    dlse, dloss = (terms.whole(x, options) for x in cotangents)
    axis, dtype = options.vocab_axis, hidden.dtype
    columns = head.shape[axis]
    offset, vocab = terms.first_column(head, options), terms.vocab_size(head, options)
    largest = jnp.maximum(weight_scale(dloss, dtype), weight_scale(dlse, dtype))
    by = terms.factors(dloss / largest, lse, dlse / largest, vocab, options)
    size = block_size(columns, hidden.shape[0])

    def block_of(dh: Array, dhead: Array, start: Any, width: int) -> tuple[Array, Array]:
        part = lax.dynamic_slice_in_dim(head, start, width, axis).astype(dtype)
        x = terms.logits(hidden, part, options)
        dx = terms.dlogits(x, labels, offset + start, lse, by, options).astype(dtype)
        ours = (terms.dhead(dx, hidden, options) * largest).astype(head.dtype)
        dhead = lax.dynamic_update_slice_in_dim(dhead, ours, start, axis)
        return dh + terms.dhidden(dx, part, options), dhead

    zeros = jnp.zeros(hidden.shape, statistics_dtype(dtype)), jnp.zeros_like(head)
    state: Any = tuple(vary_alike([*zeros, hidden])[:2])
    rest = columns % size
    if rest:
        state = block_of(state[0], state[1], 0, rest)
    starts = jnp.arange(rest, columns, size, dtype=jnp.int32)

    def step(state: Any, start: Array) -> tuple[Any, None]:
        return block_of(state[0], state[1], start, size), None

    (dh, dhead), _ = lax.scan(step, state, starts)
    return (dh * largest).astype(dtype), dhead, terms.no_gradient(labels)


_two_pass.defvjp(_two_pass_forward, _two_pass_backward)


def cross_entropy_xla(
    hidden: Array,
    head: Array,
    labels: Array,
    weights: Array,
    *,
    form: str,
    reduced: bool,
    **options: Any,
) -> tuple[Array, Array, Array]:
    """Returns the weighted sum of the losses, then lse and losses [R], by the form asked for.

    Args:
      hidden: [R, D], at least one token.
      head: [V, D] or [D, V].
      labels: [R] int32; none of them in the vocabulary: its logit counts as 0.
      weights: [R], float32 or float64.
      form: "one_pass": only the sum has gradients; "two_pass".
      reduced: whether the sum alone is asked for its gradients.
      options: those of `Options`.
    """
    del reduced  # a form does as well for both
    static = Options(**options)
    if form == "one_pass":
        run = _differentiable(_one_pass, _plain_total, static)
        return run(hidden, head, labels, weights)
    lse, loss = _differentiable(_two_pass, _plain_pair, static)(hidden, head, labels)
    return terms.weighted(loss, weights).sum(), lse, loss


def _differentiable(run: Any, plain_form: Any, options: Options) -> Any:
    """Returns `run` with derivatives of every kind: beyond the first those of the plain form."""
    return differentiable(
        lambda *xs: run(options, *xs), lambda *xs: plain_form(options, *xs), lambda: None
    )


def _plain_pair(options: Options, hidden: Array, head: Array, labels: Array) -> tuple[Array, Array]:
    lse, loss = plain(options, hidden, head, labels)
    return lse, loss
