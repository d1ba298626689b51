# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Attention in plain XLA operations: runs every call, on every machine.

The equation is that of `tpjax.core.attention`. Both products keep the dtype of their operands and
accumulate in float32; the softmax is float32. Grouped heads share keys and values without a copy.
Scores that would not fit comfortably are formed one block of queries at a time, and formed again in
the backward pass.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from tpjax.core.attention import position_shift, positions, score_dtype, visibility
from tpjax.pallas.attention.arguments import Operands, Options

MAX_SCORE_BYTES = 1 << 28
"""Scores beyond this many bytes are formed in blocks of queries that stay below it."""

QUERY_AXIS = {"query": 1, "bias": 2, "mask": 2, "query_segment_ids": 1}
"""Which axis of an operand counts the queries."""


def attend_xla(*operands: Array | None, **options: Any) -> Any:
    """Returns attention [B, T, H, V], then lse and max [B, T, H] if asked for.

    Args:
      operands: those of `Operands`, in order; those left out are None.
      options: those of `Options`.
    """
    given, static = Operands(*operands).cut(), Options(**options)  # pyright: ignore[reportArgumentType]
    batch, num_queries, heads, _ = given.query.shape
    shift = position_shift(
        num_queries,
        given.key.shape[1],
        static.alignment,
        given.query_seq_lengths,
        given.key_value_seq_lengths,
    )
    row_bytes = 4 * batch * heads * given.key.shape[1]
    block = max(1, MAX_SCORE_BYTES // row_bytes)
    if num_queries <= block:
        return _results(_attend(given, static, 0, shift))
    block = 1 << (block.bit_length() - 1)
    num_blocks = math.ceil(num_queries / block)
    rest = num_blocks * block - num_queries

    def split(x: Array, axis: int) -> Array:
        """Puts blocks of queries in front."""
        pads = [(0, rest if a == axis else 0) for a in range(x.ndim)]
        shape = (*x.shape[:axis], num_blocks, block, *x.shape[axis + 1 :])
        return jnp.moveaxis(jnp.pad(x, pads).reshape(shape), axis, 0)

    parts = {
        name: split(x, axis)
        for name, axis in QUERY_AXIS.items()
        if (x := getattr(given, name)) is not None and x.shape[axis] == num_queries
    }
    # Float32 here makes the blocks' gradients of what they share add up in float32.
    wide = score_dtype(given.key.dtype)
    shared = {
        n: x.astype(wide)
        for n in ("key", "value", "bias")
        if (x := getattr(given, n)) is not None and n not in parts
    }

    @jax.checkpoint
    def one(_: None, xs: tuple[Array, dict[str, Array]]) -> tuple[None, list[Array]]:
        first, own = xs
        narrow = {n: x.astype(getattr(given, n).dtype) for n, x in shared.items()}
        return None, _attend(given._replace(**own, **narrow), static, first, shift)

    starts = jnp.arange(num_blocks, dtype=jnp.int32) * block
    _, outs = jax.lax.scan(one, None, (starts, parts))
    outs = [jnp.moveaxis(x, 0, 1) for x in outs]
    whole = [x.reshape(batch, num_blocks * block, *x.shape[3:])[:, :num_queries] for x in outs]
    return _results(whole)


def _results(outs: list[Array]) -> Any:
    out, *statistics = outs
    return (out, *(x[..., 0] for x in statistics)) if statistics else out


def _grouped(x: Array, groups: tuple[int, int]) -> Array:
    """Splits the head axis of [B, H or 1, T, S]: [B, K or 1, T, G or 1, S]."""
    batch, heads, *rest = x.shape
    return x.reshape(batch, *(groups if heads > 1 else (1, 1)), *rest).swapaxes(2, 3)


def _visible(given: Operands, static: Options, first: int | Array, shift: int | Array) -> Any:
    """Returns which keys the queries see, [B or 1, H or 1, T or 1, S or 1], or None for all."""
    visible = visibility(
        given.query.shape[1],
        given.key.shape[1],
        given.mask,
        is_causal=static.is_causal,
        query_seq_lengths=given.query_seq_lengths,
        key_value_seq_lengths=given.key_value_seq_lengths,
        local_window_size=static.local_window_size,
        prefix_lengths=given.prefix_lengths,
        query_segment_ids=given.query_segment_ids,
        key_value_segment_ids=given.key_value_segment_ids,
        first_query=first,
        shift=shift,
    )
    return None if visible is None else visible.reshape((1,) * (4 - visible.ndim) + visible.shape)


def _scores(given: Operands, static: Options, first: int | Array, shift: int | Array) -> Array:
    """Returns the scores [b, k, t, g, s], of what is visible and of what is not.

    That is the order in which the product makes them: nothing is transposed.
    """
    query, key = given.query, given.key
    batch, num_queries, heads, features = query.shape
    num_keys, kv_heads = key.shape[1:3]
    groups = (kv_heads, heads // kv_heads)
    wide = score_dtype(query.dtype)
    q = query.reshape(batch, num_queries, *groups, features)
    products = (((4,), (3,)), ((0, 2), (0, 2)))
    scores = jax.lax.dot_general(q, key, products, preferred_element_type=wide) * static.scale
    if static.softcap is not None:
        scores = static.softcap * jnp.tanh(scores / static.softcap)
    if given.alibi_slopes is not None:
        at, other = positions(num_queries, num_keys, first, shift)
        distance = jnp.abs(at - other).astype(wide).reshape(-1, 1, num_queries, num_keys)
        slopes = given.alibi_slopes[:, :, None, None]
        scores -= _grouped(slopes, groups) * _grouped(distance, groups)
    if given.bias is not None:
        scores += _grouped(given.bias, groups).astype(wide)
    return scores


def _attend(
    given: Operands, static: Options, first: int | Array, shift: int | Array
) -> list[Array]:
    """Returns out [B, T, H, V] and asked statistics [B, T, H, 1] of queries from number `first` on.

    All scores are formed at once.
    """
    value, kv_heads = given.value, given.key.shape[2]
    *rows, heads, _ = given.query.shape
    scores = _scores(given, static, first, shift)
    wide = scores.dtype
    nan, infinity = (jnp.asarray(x, wide) for x in (jnp.nan, jnp.inf))
    with_statistics = static.return_lse or static.return_max
    visible, sees_broken = _visible(given, static, first, shift), None
    if visible is not None:
        visible = _grouped(visible, (kv_heads, heads // kv_heads))
        # 0 * NaN is NaN: a broken value leaves the product, and its scores tell of it instead,
        # unless they are asked for themselves.
        finite = jnp.isfinite(value)
        broken = ~finite.all(-1).swapaxes(1, 2)[:, :, None, None, :]
        value = jnp.where(finite, value, 0)
        if with_statistics:
            sees_broken = (visible & broken).any(-1, keepdims=True)
        else:
            scores = jnp.where(broken, nan, scores)
        scores = jnp.where(visible, scores, -infinity)
    top = base = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    sink = None
    if given.sinks is not None:
        sink = given.sinks.reshape(1, kv_heads, 1, -1, 1)
        base = jnp.maximum(top, jax.lax.stop_gradient(sink))
    may_see_none = _may_see_none(given, static, shift)
    if may_see_none:
        base = jnp.where(base == -jnp.inf, jnp.zeros_like(base), base)
    weights = jnp.exp(scores - base)
    total = weights.sum(-1, keepdims=True)
    if sink is not None:
        total += jnp.exp(sink - base)
    nothing = total == 0
    if may_see_none:
        total = jnp.where(nothing, jnp.ones_like(total), total)
    statistics = []
    if static.return_lse:
        lse = jnp.log(total) + base
        statistics.append(jnp.where(nothing, -infinity, lse) if may_see_none else lse)
    if static.return_max:
        statistics.append(top)
    if sees_broken is not None:
        total = jnp.where(sees_broken, nan, total)
    weights = (weights / total).astype(value.dtype)
    products = (((4,), (1,)), ((0, 1), (0, 2)))
    out = jax.lax.dot_general(weights, value, products, preferred_element_type=wide)
    outs = (out.astype(value.dtype), *statistics)
    return [jnp.moveaxis(x, 1, 2).reshape(*rows, heads, x.shape[-1]) for x in outs]


def _may_see_none(given: Operands, static: Options, shift: int | Array) -> bool:
    """Returns whether a query may have scores of -inf alone; a plain call is spared the care."""
    late = not isinstance(shift, int) or shift < 0
    hiding = (given.bias, static.local_window_size, given.mask, given.query_seq_lengths)
    hiding += (given.key_value_seq_lengths, given.query_segment_ids, given.sinks)
    return (static.is_causal and late) or any(x is not None for x in hiding)
