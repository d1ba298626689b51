# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Attention: what it means, in plain `jax.numpy`.

    score[t, s] = softcap(scale * (query[t] . key[s])) - slope * |p(t) - s| + bias[t, s]
    total[t]    = sum over visible s of  exp(score[t, s])  +  exp(sink)
    out[t]      = sum over visible s of  exp(score[t, s]) value[s]  /  total[t]
    lse[t]      = log(total[t])
    max[t]      = the largest visible score[t, s]

Letters: B batch, T query tokens, S key tokens, H query heads, K key/value heads (H a multiple of K:
query head h reads key/value head h // (H // K)), D features of a query's and key's head, V of a
value's.

What is not given is left out: softcap(x) = cap tanh(x / cap), slope and sink belong to a head. p(t)
is the place of a query among the keys: t if both are counted from the front ("top_left"), or
t + S - T if the last query stands at the last key ("bottom_right"), with the lengths of the
sequence for S and T where it has any.

A key is visible to a query where every given condition holds: `mask` is true; both stand before the
end of their sequences; `is_causal` and s <= p(t), or s stands in the prefix; the window reaches it,
p(t) - left <= s <= p(t) + right; their segments are equal. A query that sees nothing gives 0, and
gradient 0; its lse is -inf, or the sink, and its max -inf. A value that is not finite makes the
queries that see it NaN, and no other.

Source: Vaswani et al. 2017, section 3.2.1; Ainslie et al. 2023 (grouped queries); Press et al. 2022
(slopes); Gemma Team 2024 (softcap); Xiao et al. 2024 (sinks).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

ALIGNMENTS = ("top_left", "bottom_right")


def score_dtype(dtype: DTypeLike) -> Any:
    """Returns the dtype of scores and softmax: float32, or float64 for float64 inputs."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def position_shift(
    num_queries: int,
    num_keys: int,
    alignment: str,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
) -> int | Array:
    """Returns p(t) - t: a number, or [*B, 1, 1, 1] where sequences have lengths."""
    if alignment == "top_left":
        return 0
    ends: list[int | Array] = [num_keys, num_queries]
    for i, lengths in enumerate((key_value_seq_lengths, query_seq_lengths)):
        if lengths is not None:
            ends[i] = jnp.clip(lengths, 0, ends[i])[..., None, None, None]
    return ends[0] - ends[1]


def positions(
    num_queries: int, num_keys: int, first_query: int | Array = 0, shift: int | Array = 0
) -> tuple[Array, Array]:
    """Returns p(t) [T, 1], or [*B, 1, T, 1] as `shift` is, and s [1, S]: both count the keys."""
    query = jnp.arange(num_queries, dtype=jnp.int32)[:, None]
    for offset in (first_query, shift):
        if not isinstance(offset, int) or offset:
            query = query + offset
    return query, jnp.arange(num_keys, dtype=jnp.int32)[None, :]


def visibility(
    num_queries: int,
    num_keys: int,
    mask: Array | None = None,
    *,
    is_causal: bool = False,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    local_window_size: tuple[int, int] | None = None,
    prefix_lengths: Array | None = None,
    query_segment_ids: Array | None = None,
    key_value_segment_ids: Array | None = None,
    first_query: int | Array = 0,
    shift: int | Array = 0,
) -> Array | None:
    """Returns which keys each query sees, broadcastable to [*B, H, T, S]; None if it sees all.

    Args:
      num_queries: T.
      num_keys: S.
      mask: booleans, broadcastable to [*B, H, T, S].
      is_causal: hides keys that stand after the query.
      query_seq_lengths: [*B]; queries from there on see nothing.
      key_value_seq_lengths: [*B]; keys from there on are hidden.
      local_window_size: how far to the left and to the right of itself a query sees.
      prefix_lengths: [*B]; `is_causal` hides none of so many first keys.
      query_segment_ids: [*B, T]; a query sees the keys of its own segment.
      key_value_segment_ids: [*B, S].
      first_query: which of all queries is the first of the T.
      shift: p(t) - t, of `position_shift`.
    """
    query, key = positions(num_queries, num_keys, first_query, shift)
    conditions = [] if mask is None else [mask]
    if is_causal:
        seen = key <= query
        if prefix_lengths is not None:
            seen = seen | (key < prefix_lengths[..., None, None, None])
        conditions.append(seen)
    if local_window_size is not None:
        left, right = local_window_size
        conditions += [query - key <= left, key - query <= right]
    if query_seq_lengths is not None:
        row, _ = positions(num_queries, num_keys, first_query)
        conditions.append(row < query_seq_lengths[..., None, None, None])
    if key_value_seq_lengths is not None:
        conditions.append(key < key_value_seq_lengths[..., None, None, None])
    if query_segment_ids is not None:
        assert key_value_segment_ids is not None
        own, other = query_segment_ids[..., :, None], key_value_segment_ids[..., None, :]
        conditions.append((own == other)[..., None, :, :])
    if not conditions:
        return None
    visible = conditions[0]
    for condition in conditions[1:]:
        visible = visible & condition
    return visible


def attention_reference(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    alignment: str = "top_left",
    prefix_lengths: Array | None = None,
    query_segment_ids: Array | None = None,
    key_value_segment_ids: Array | None = None,
    softcap: float | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    return_lse: bool = False,
    return_max: bool = False,
    deterministic: bool = True,
) -> Any:
    """Returns the visible values averaged with the softmax of the scores as weights.

    Computed in float32, or float64 for float64; arguments and results as of
    `tpjax.pallas.flash_attention`.

    >>> import jax.numpy as jnp
    >>> x = jnp.arange(6.0).reshape(3, 1, 2)
    >>> float(attention_reference(x, x, x, is_causal=True)[0, 0, 1])
    1.0
    """
    del deterministic  # there is one order of sums
    wide = score_dtype(query.dtype)
    group = query.shape[-2] // max(key.shape[-2], 1)
    q, k, v = (x.astype(wide) for x in (query, key, value))
    k, v = (jnp.repeat(x, group, axis=-2) for x in (k, v))
    sizes = query.shape[-3], key.shape[-3]
    shift = position_shift(*sizes, alignment, query_seq_lengths, key_value_seq_lengths)
    window = local_window_size
    visible = visibility(
        *sizes,
        mask,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=(window, window) if isinstance(window, int) else window,
        prefix_lengths=prefix_lengths,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=(
            query_segment_ids if key_value_segment_ids is None else key_value_segment_ids
        ),
        shift=shift,
    )

    scores = jnp.einsum("...thd,...shd->...hts", q, k, precision="highest")
    scores *= query.shape[-1] ** -0.5 if scale is None else scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    if alibi_slopes is not None:
        at, other = positions(*sizes, shift=shift)
        scores -= alibi_slopes.astype(wide)[..., None, None] * jnp.abs(at - other).astype(wide)
    if bias is not None:
        scores += bias.astype(wide)
    out, lse, top = _average(scores, visible, v, sinks)
    asked = [x for x, wanted in ((lse, return_lse), (top, return_max)) if wanted]
    return (out.astype(query.dtype), *asked) if asked else out.astype(query.dtype)


def _average(
    scores: Array, visible: Array | None, value: Array, sinks: Array | None
) -> tuple[Array, Array, Array]:
    """Returns out [*B, T, H, V], lse and max [*B, T, H] of scores [*B, H, T, S]."""
    finite = jnp.isfinite(value)
    broken = ~finite.all(-1).swapaxes(-1, -2)[..., None, :]  # [*B, H, 1, S]
    if visible is not None:
        value = jnp.where(finite, value, 0)
        broken = broken & visible
        scores = jnp.where(visible, scores, -jnp.inf)
    sink = jnp.full((1, 1, 1), -jnp.inf, scores.dtype)
    if sinks is not None:
        sink = sinks.astype(scores.dtype)[:, None, None]
    top = jax.lax.stop_gradient(scores.max(-1, keepdims=True, initial=-jnp.inf))
    base = jnp.maximum(top, jax.lax.stop_gradient(sink))
    base = jnp.where(base == -jnp.inf, 0, base)
    weights = jnp.exp(scores - base)
    total = weights.sum(-1, keepdims=True) + jnp.exp(sink - base)
    something = total != 0
    total = jnp.where(something, total, 1)
    lse = jnp.where(something, jnp.log(total) + base, -jnp.inf)
    weights /= jnp.where(broken.any(-1, keepdims=True), jnp.nan, total)
    out = jnp.einsum("...hts,...shd->...thd", weights, value, precision="highest")
    return out, lse[..., 0].swapaxes(-1, -2), top[..., 0].swapaxes(-1, -2)
