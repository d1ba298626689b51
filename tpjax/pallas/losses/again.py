# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Two passes on Hopper for the loss of each token: the gradient of the logits is made anew.

Forward keeps lse alone, as cotangents are not known; backward multiplies the gradient of the
logits, of a block of columns, twice. Dhidden adds up in float32; where the vocabulary is small,
that takes the most memory, so tokens are cut in parts, and dhead is rounded after each.

Products are XLA's, on what kernels write in the operands' dtype.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from tpjax.pallas.losses import terms
from tpjax.pallas.losses.chunked import weight_scale
from tpjax.pallas.losses.logit_kernel import LOG2E
from tpjax.pallas.losses.setup import Setup
from tpjax.pallas.partition import vary_alike

MAX_COLUMNS = 4096
"""Of a block: the more, the less often hidden's gradient is read and written."""
SUM_BYTES = 0.15
"""For each logit, that the sum of hidden's gradient may take."""
BYTES = 0.29
"""For each logit, that a block may take with that sum and what is done of hidden's gradient."""
MIN_BLOCK_BYTES = 1 << 24
"""What a block may take in any case: its gradient, and its columns of the head and of its."""


def num_parts(features: int, columns: int) -> int:
    """Returns into how many parts the tokens are cut."""
    return max(1, -(-4 * features // max(1, int(SUM_BYTES * columns))))


def block_columns(tokens: int, part: int, features: int, columns: int) -> int:
    """Returns how many columns make a block of `part` of the tokens."""
    taken = 4 * features * part + 2 * features * (tokens - part)
    room = max(MIN_BLOCK_BYTES, int(BYTES * tokens * columns) - taken)
    fits = room // (2 * part + 4 * features)
    return min(columns, MAX_COLUMNS, max(256, fits // 256 * 256))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def two_pass(setup: Setup, hidden: Array, head: Array, labels: Array) -> tuple[Array, Array]:
    """Returns lse and losses [R]."""
    lse, loss = setup.evaluate(hidden, head.astype(hidden.dtype), labels)
    return lse, loss


def _forward(setup: Setup, hidden: Array, head: Array, labels: Array) -> tuple[Any, Any]:
    lse, loss = two_pass(setup, hidden, head, labels)
    return (lse, loss), (hidden, head, labels, lse)


def _backward(setup: Setup, kept: Any, cotangents: Any) -> Any:
    dlse, dloss = (terms.whole(x, setup.options) for x in cotangents)
    run = jax.custom_batching.sequential_vmap(partial(_gradients, setup))
    dhidden, dhead = run(*kept, dlse, dloss)
    return dhidden, dhead, terms.no_gradient(kept[2])


two_pass.defvjp(_forward, _backward)


def _gradients(
    setup: Setup,
    hidden: Array,
    head: Array,
    labels: Array,
    lse: Array,
    dlse: Array,
    dloss: Array,
) -> tuple[Array, Array]:
    """Returns the gradients of hidden and head for cotangents [R] of lse and of losses."""
    options = setup.options
    largest = jnp.maximum(*(weight_scale(x, hidden.dtype) for x in (dloss, dlse)))
    vocab = terms.vocab_size(head, options)
    by = terms.factors(dloss / largest, lse, dlse / largest, vocab, options)
    labels = labels - terms.first_column(head, options)
    vectors = (lse * LOG2E, *by)
    tokens, features = hidden.shape
    columns = head.shape[options.vocab_axis]
    part = -(-tokens // (num_parts(features, columns) * 128)) * 128
    width = block_columns(tokens, min(part, tokens), features, columns)
    dhead: Any = None
    found = []
    for first in range(0, tokens, part):
        some = [x[first : first + part] for x in (hidden, labels, *vectors)]
        dh, dhead = _part(setup, width, head, largest, dhead, *some)
        # Rounded here: the next part's sum takes the place of this one's.
        rounded, dhead = lax.optimization_barrier(((dh * largest).astype(hidden.dtype), dhead))
        found.append(rounded)
    return jnp.concatenate(found), dhead


def _part(
    setup: Setup,
    width: int,
    head: Array,
    scale: Array,
    dhead: Any,
    hidden: Array,
    labels: Array,
    *vectors: Array,
) -> tuple[Any, Any]:
    """Returns the gradient of some tokens, float32, and dhead with their share."""
    options, dtype = setup.options, hidden.dtype
    axis, columns = options.vocab_axis, head.shape[options.vocab_axis]
    is_first = dhead is None
    # A product that is rounded as it is written needs no float32 of its own.
    rounded = head.dtype if is_first and dtype == head.dtype == jnp.bfloat16 else None
    narrow = head.astype(dtype)
    zeros = jnp.zeros(hidden.shape, jnp.float32), jnp.zeros_like(head) if is_first else dhead
    state: Any = tuple(vary_alike([*zeros, hidden])[:2])

    def one(state: Any, start: Any, size: int) -> tuple[Array, Array]:
        dh, dhead = state
        dx = setup.gradient(hidden, narrow, labels, vectors, start, size)
        ours = terms.dhead(dx, hidden, options, rounded)
        if rounded is None:
            ours *= scale
            if not is_first:
                ours += lax.dynamic_slice_in_dim(dhead, start, size, axis).astype(ours.dtype)
            ours = ours.astype(head.dtype)
        dhead = lax.dynamic_update_slice_in_dim(dhead, ours, start, axis)
        some = lax.dynamic_slice_in_dim(narrow, start, size, axis)
        return dh + terms.dhidden(dx, some, options), dhead

    odd = columns % width
    state = one(state, 0, odd) if odd else state
    starts = jnp.arange(odd, columns, width, dtype=jnp.int32)

    def step(state: Any, start: Array) -> tuple[Any, None]:
        return one(state, start, width), None

    return lax.scan(step, state, starts)[0]
