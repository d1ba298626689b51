# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Two passes on Hopper for the sum of losses: three products, and a part of the fourth.

    forward    makes the weights of a block of tokens, as one pass does, and of them their dhidden
    backward   makes the gradient of the logits, of a block of columns, and of it their dhead

Weights of as many tokens as there are features need not be made again: they fit where the gradient
of the head will be, and wait there for the backward pass, which puts a block of dhead in the place
of the weights that it is made of:

    head [D, V]    token t has its weights where feature t will be
    head [V, D]    a block of columns has its weights, [D, columns], where its rows will be
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from tpjax.pallas.losses import terms
from tpjax.pallas.losses.at_once import guess, is_far_off, sum_of_columns, tokens_of
from tpjax.pallas.losses.logit_kernel import LOG2E
from tpjax.pallas.losses.setup import Setup
from tpjax.pallas.partition import vary_alike

TOKENS_BYTES, COLUMNS_BYTES = 0.3, 0.2
"""For each logit, that a block of tokens, or of columns, may take."""
MIN_BLOCK_BYTES = 1 << 24
"""What a block may take in any case."""
LEAST_KEPT = 0.25
"""Of all tokens, whose weights are worth keeping."""


class Cut(NamedTuple):
    """How tokens and vocabulary are cut."""

    kept: int
    """Tokens whose weights wait for the backward pass, a multiple of `tokens`."""
    tokens: int
    """Of a block in the forward pass."""
    columns: int
    """Of a block in the backward pass; the odd block is the first."""

    def columns_of(self, vocab: int) -> list[tuple[int, int]]:
        """Returns first column and number of columns of each block."""
        odd = vocab % self.columns
        starts = range(odd, vocab, self.columns)
        return [(0, odd)] * (odd > 0) + [(start, self.columns) for start in starts]


def cut_of(setup: Setup, hidden: Array, head: Array) -> Cut:
    """Returns how a call's tokens and vocabulary are cut."""
    (tokens, features), vocab = hidden.shape, head.shape[setup.options.vocab_axis]
    block = block_tokens(tokens, features, vocab)
    kept = min(tokens, features) // block * block
    same = head.dtype == hidden.dtype and not setup.options.label_smoothing
    # Places in a head [V, D] are counted in int32.
    fits = bool(setup.options.vocab_axis) or head.size < 1 << 31
    if not (same and fits) or kept < LEAST_KEPT * tokens:
        kept = 0
    return Cut(kept, block, block_columns(tokens, features, vocab))


def block_tokens(tokens: int, features: int, vocab: int) -> int:
    """Returns how many tokens make a block."""
    room = max(MIN_BLOCK_BYTES, int(TOKENS_BYTES * tokens * vocab))
    fits = room // (2 * vocab + 4 * features)
    multiple = 1024 if fits >= 1024 else 256
    return min(tokens, max(256, fits // multiple * multiple))


def block_columns(tokens: int, features: int, vocab: int) -> int:
    """Returns how many columns make a block."""
    room = max(MIN_BLOCK_BYTES, int(COLUMNS_BYTES * tokens * vocab))
    fits = room // (2 * tokens + 2 * features)
    # The tiles of these fill all 132 multiprocessors once or more, with few left over.
    multiple = max([m for m in (256, 2048, 8448) if m <= fits], default=256)
    return min(vocab, max(256, fits // multiple * multiple))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def two_pass_sum(
    setup: Setup, hidden: Array, head: Array, labels: Array, weights: Array
) -> tuple[Array, Array, Array]:
    """Returns the weighted sum of losses, which alone has gradients, then lse and losses [R]."""
    lse, loss = setup.evaluate(hidden, head.astype(hidden.dtype), labels)
    return terms.weighted(loss, weights).sum(), lse, loss


def _forward(
    setup: Setup, hidden: Array, head: Array, labels: Array, weights: Array
) -> tuple[Any, Any]:
    run = jax.custom_batching.sequential_vmap(partial(_first, setup))
    store, dh, lse, loss, factor = run(hidden, head, labels, weights)
    kept = store, factor, dh, hidden, head, labels, weights, lse, loss
    return (terms.weighted(loss, weights).sum(), lse, loss), kept


def _backward(setup: Setup, kept: Any, cotangents: Any) -> Any:
    store, factor, dh, hidden, head, labels, weights, lse, loss = kept
    dtotal = cotangents[0]  # what else was returned has no gradient
    by = terms.whole(dtotal, setup.options)
    run = jax.custom_batching.sequential_vmap(partial(_second, setup))
    dhead = run(store, by * factor, hidden, head, labels, lse, by * weights)
    dhidden = (dh.astype(by.dtype) * by).astype(dh.dtype)
    return dhidden, dhead, terms.no_gradient(labels), dtotal * loss


two_pass_sum.defvjp(_forward, _backward)


def _first(setup: Setup, hidden: Array, head: Array, labels: Array, weights: Array) -> Any:
    """Returns weights that are kept, or None, dhidden, lse, losses, and f of `at_once`."""
    narrow, options, cut = head.astype(hidden.dtype), setup.options, cut_of(setup, hidden, head)
    local, columns_sum = labels - terms.first_column(head, options), sum_of_columns(setup, narrow)
    tokens = hidden.shape[0]

    def attempt(shift: Array, state: Any) -> Any:
        def step(size: int, state: Any, start: Array) -> Any:
            store, dhidden = state
            rows = (hidden, local, weights, shift)
            h, y, w, guessed = (lax.dynamic_slice_in_dim(x, start, size) for x in rows)
            made = setup.run("weights", h, narrow, y, guessed)
            known = tokens_of(setup, narrow, y, w, guessed, made)
            dh = known.dhidden(narrow, columns_sum, options).astype(h.dtype)
            dhidden = lax.dynamic_update_slice_in_dim(dhidden, dh, start, 0)
            far = jnp.broadcast_to(is_far_off(made[0]), y.shape)
            return (store, dhidden), (known.lse, known.loss, known.factor, far), known.written

        def keep(state: Any, start: Array) -> Any:
            (store, dhidden), found, written = step(cut.tokens, state, start)
            return (put(store, written, start, cut, head.shape, options.vocab_axis), dhidden), found

        def go_on(size: int, state: Any, start: Array) -> Any:
            return step(size, state, start)[:2]

        odd = (tokens - cut.kept) % cut.tokens
        groups = (
            (keep, 0, cut.kept, cut.tokens),
            (partial(go_on, cut.tokens), cut.kept, tokens - odd, cut.tokens),
            (partial(go_on, odd), tokens - odd, tokens, odd),
        )
        found = []
        for body, start, stop, size in groups:
            if start < stop:
                starts = jnp.arange(start, stop, size, dtype=jnp.int32)
                state, rows = lax.scan(body, state, starts)
                found.append([x.reshape(-1) for x in rows])
        return state, [jnp.concatenate(x) for x in zip(*found, strict=True)]

    def is_far(state: Any) -> Array:
        tried, (_, (*_, far)) = state
        return far.any() & (tried < 1)  # once: NaN stays NaN

    def again(state: Any) -> Any:
        tried, (state, _) = state
        return tried + 1, attempt(setup.exact_shift(hidden, narrow, local), state)

    empty = lax.empty(hidden.shape, hidden.dtype)
    store = lax.empty(store_shape(head, options) if cut.kept else (), head.dtype)
    start: Any = tuple(vary_alike([store, empty, hidden])[:2])
    found = attempt(guess(setup, hidden, narrow), start)
    (store, dh), (lse, loss, factor, _) = lax.while_loop(is_far, again, (jnp.int32(0), found))[1]
    return store, dh, lse, loss, factor


def _second(
    setup: Setup,
    store: Array,
    factor: Array,
    hidden: Array,
    head: Array,
    labels: Array,
    lse: Array,
    dloss: Array,
) -> Array:
    """Returns the gradient of the head, for weights as they are kept and what multiplies them."""
    options, cut, narrow = setup.options, cut_of(setup, hidden, head), head.astype(hidden.dtype)
    axis, kept, tokens = options.vocab_axis, cut.kept, hidden.shape[0]
    # A product that is rounded as it is written needs no float32 of its own.
    rounded = head.dtype if head.dtype == hidden.dtype else None
    by = terms.factors(dloss, lse, None, terms.vocab_size(head, options), options)
    local = labels - terms.first_column(head, options)
    scaled = (factor[:kept, None] * hidden[:kept].astype(jnp.float32)).astype(hidden.dtype)
    rest, local, *vectors = (x[kept:] for x in (hidden, local, lse * LOG2E, *by))
    if not kept:
        store = vary_alike([lax.empty(head.shape, head.dtype), hidden])[0]

    def one(size: int, dhead: Array, start: Any) -> tuple[Array, None]:
        ours: Any = 0
        if kept:
            some = taken(dhead, kept, start, size, head.shape, axis)
            ours = terms.dhead(some, scaled, options, rounded)
        if kept < tokens:
            dx = setup.gradient(rest, narrow, local, vectors, start, size)
            ours += terms.dhead(dx, rest, options, rounded)
        ours = ours.astype(head.dtype)
        if dhead.ndim == 1:
            ours, at, along = ours.reshape(-1), start * hidden.shape[1], 0
        else:
            at, along = start, axis
        return lax.dynamic_update_slice_in_dim(dhead, ours, at, along), None

    blocks = cut.columns_of(head.shape[axis])
    for size in dict.fromkeys(size for _, size in blocks):
        starts = jnp.array([start for start, width in blocks if width == size], jnp.int32)
        store = lax.scan(partial(one, size), store, starts)[0]
    return store.reshape(head.shape)


def store_shape(head: Array, options: terms.Options) -> tuple[int, ...]:
    """Returns the shape of what holds weights, then the gradient of the head.

    Of one axis, where weights have other rows than the gradient: XLA copies what changes its shape.
    """
    return head.shape if options.vocab_axis else (head.size,)


def put(
    store: Array, written: Array, at: Array, cut: Cut, shape: tuple[int, ...], axis: int
) -> Array:
    """Returns the store with the weights [n, V] of tokens from `at` on, for a head of `shape`.

    For a head [V, D] the store has one axis.
    """
    if axis:
        return lax.dynamic_update_slice_in_dim(store, written, at, 0)
    vocab, features = shape
    for start, size in cut.columns_of(vocab):
        some = written[:, start : start + size].reshape(-1)
        store = lax.dynamic_update_slice_in_dim(store, some, start * features + at * size, 0)
    return store


def taken(
    store: Array, tokens: int, start: Array, size: int, shape: tuple[int, ...], axis: int
) -> Array:
    """Returns the weights [tokens, size] of a block of columns, for a head of `shape`."""
    if axis:
        return lax.dynamic_slice(store, (0, start), (tokens, size))
    block = lax.dynamic_slice_in_dim(store, start * shape[1], tokens * size)
    return block.reshape(tokens, size)
