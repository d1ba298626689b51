# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Attention in plain XLA operations: runs every call, on every machine.

The equation is that of `tpjax.core.attention`. Both products keep the dtype of their operands and
accumulate in float32; the softmax is float32. Grouped heads share keys and values without a copy.
Scores that would not fit comfortably are formed one block of queries at a time, and formed again in
the backward pass.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tpjax.core.attention import score_dtype, visibility

MAX_SCORE_BYTES = 1 << 28
"""Scores beyond this many bytes are formed in blocks of queries that stay below it."""


class _Hidden(NamedTuple):
    """What hides keys from queries, for all queries; options are static."""

    mask: Array | None
    query_seq_lengths: Array | None
    key_value_seq_lengths: Array | None


def attend_xla(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    mask: Array | None,
    query_seq_lengths: Array | None,
    key_value_seq_lengths: Array | None,
    prefix_lengths: Array | None = None,
    query_segment_ids: Array | None = None,
    key_value_segment_ids: Array | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    *,
    scale: float,
    is_causal: bool,
    local_window_size: tuple[int, int] | None,
    alignment: str = "top_left",
    softcap: float | None = None,
    return_lse: bool = False,
    return_max: bool = False,
    deterministic: bool = True,
) -> Array:
    """Returns attention [B, T, H, D]; bias and mask are [B or 1, H or 1, T or 1, S or 1]."""
    hidden = _Hidden(mask, query_seq_lengths, key_value_seq_lengths)
    options = {"scale": scale, "is_causal": is_causal, "local_window_size": local_window_size}
    batch, num_queries, heads, _ = query.shape
    row_bytes = 4 * batch * heads * key.shape[1]
    block = max(1, MAX_SCORE_BYTES // row_bytes)
    if num_queries <= block:
        return _attend(query, key, value, bias, hidden, 0, **options)
    block = 1 << (block.bit_length() - 1)
    num_blocks = math.ceil(num_queries / block)
    rest = num_blocks * block - num_queries

    def split(x: Array | None, axis: int) -> Array | None:
        """Puts blocks of queries in front; None where all queries share the same."""
        if x is None or x.shape[axis] == 1:
            return None
        pads = [(0, rest if a == axis else 0) for a in range(x.ndim)]
        shape = (*x.shape[:axis], num_blocks, block, *x.shape[axis + 1 :])
        return jnp.moveaxis(jnp.pad(x, pads).reshape(shape), axis, 0)

    # Float32 here makes the blocks' gradients of key and value add up in float32.
    wide = score_dtype(key.dtype)
    key_wide, value_wide = key.astype(wide), value.astype(wide)

    @jax.checkpoint
    def one(_: None, blocks: tuple) -> tuple[None, Array]:
        first, q, own_bias, own_mask = blocks
        own = hidden._replace(mask=mask if own_mask is None else own_mask)
        used_bias = bias if own_bias is None else own_bias
        k, v = key_wide.astype(key.dtype), value_wide.astype(value.dtype)
        return None, _attend(q, k, v, used_bias, own, first, **options)

    starts = jnp.arange(num_blocks, dtype=jnp.int32) * block
    blocks = (starts, split(query, 1), split(bias, 2), split(mask, 2))
    _, out = jax.lax.scan(one, None, blocks)
    out = jnp.moveaxis(out, 0, 1).reshape(batch, num_blocks * block, heads, -1)
    return out[:, :num_queries]


def _grouped(x: Array, groups: tuple[int, int]) -> Array:
    """Splits the head axis of [B, H or 1, T, S]: [B, K or 1, T, G or 1, S]."""
    batch, heads, *rest = x.shape
    return x.reshape(batch, *(groups if heads > 1 else (1, 1)), *rest).swapaxes(2, 3)


def _attend(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    hidden: _Hidden,
    first_query: int | Array,
    *,
    scale: float,
    is_causal: bool,
    local_window_size: tuple[int, int] | None,
) -> Array:
    """Attends from the queries that start at position `first_query`, all scores at once."""
    batch, num_queries, heads, features = query.shape
    num_keys, kv_heads = key.shape[1:3]
    groups = (kv_heads, heads // kv_heads)
    wide = score_dtype(query.dtype)
    visible = visibility(
        num_queries,
        num_keys,
        hidden.mask,
        is_causal=is_causal,
        query_seq_lengths=hidden.query_seq_lengths,
        key_value_seq_lengths=hidden.key_value_seq_lengths,
        local_window_size=local_window_size,
        first_query=first_query,
    )
    q = query.reshape(batch, num_queries, *groups, features)
    # Letters: [b, k, t, g, s], the order in which the product makes them: nothing is transposed.
    products = (((4,), (3,)), ((0, 2), (0, 2)))
    scores = jax.lax.dot_general(q, key, products, preferred_element_type=wide) * scale
    if bias is not None:
        scores += _grouped(bias, groups).astype(wide)
    if visible is not None:
        # 0 * NaN is NaN: a broken value leaves the product, and its scores tell of it instead.
        finite = jnp.isfinite(value)
        broken = ~finite.all(-1).swapaxes(1, 2)[:, :, None, None, :]
        value = jnp.where(finite, value, 0)
        scores = jnp.where(broken, jnp.asarray(jnp.nan, wide), scores)
        visible = _grouped(visible.reshape((1,) * (4 - visible.ndim) + visible.shape), groups)
        scores = jnp.where(visible, scores, jnp.asarray(-jnp.inf, wide))
    top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    may_see_none = any(x is not None for x in (bias, local_window_size, *hidden))
    if may_see_none:
        top = jnp.where(top == -jnp.inf, jnp.zeros_like(top), top)
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    if may_see_none:
        total = jnp.where(total == 0, jnp.ones_like(total), total)
    weights = (weights / total).astype(value.dtype)
    products = (((4,), (1,)), ((0, 1), (0, 2)))
    out = jax.lax.dot_general(weights, value, products, preferred_element_type=wide)
    return jnp.moveaxis(out, 1, 2).reshape(query.shape).astype(query.dtype)
