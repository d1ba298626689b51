# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Attention: what it means, in plain `jax.numpy`.

    s[t, s] = scale * (query[t] . key[s]) + bias[t, s]
    out[t]  = sum over visible s of  exp(s[t, s]) value[s]  /  sum over visible s of  exp(s[t, s])

Letters: B batch, T query tokens, S key tokens, H query heads, K key/value heads (H a multiple of K:
query head h reads key/value head h // (H // K)), D features of a head.

A key is visible to a query where every given condition holds: `mask` is true; `is_causal` and the
key stands at or before the query, both counted from the front; the window reaches it; both stand
before the end of their sequences. A query that sees nothing gives 0, and gradient 0. A value that
is not finite makes the queries that see it NaN, and no other.

Source: Vaswani et al. 2017, section 3.2.1; Ainslie et al. 2023 (grouped queries).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike


def score_dtype(dtype: DTypeLike) -> Any:
    """Returns the dtype of scores and softmax: float32, or float64 for float64 inputs."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def visibility(
    num_queries: int,
    num_keys: int,
    mask: Array | None = None,
    *,
    is_causal: bool = False,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    local_window_size: tuple[int, int] | None = None,
    first_query: int | Array = 0,
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
      first_query: position of the first of the T queries.
    """
    query = jnp.arange(num_queries, dtype=jnp.int32)[:, None] + first_query
    key = jnp.arange(num_keys, dtype=jnp.int32)[None, :]
    conditions = [] if mask is None else [mask]
    if is_causal:
        conditions.append(key <= query)
    if local_window_size is not None:
        left, right = local_window_size
        conditions += [query - key <= left, key - query <= right]
    if query_seq_lengths is not None:
        conditions.append(query < query_seq_lengths[..., None, None, None])
    if key_value_seq_lengths is not None:
        conditions.append(key < key_value_seq_lengths[..., None, None, None])
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
) -> Array:
    """Returns the visible values averaged with the softmax of the scores as weights.

    Computed in float32, or float64 for float64; arguments as of `tpjax.pallas.flash_attention`.

    >>> import jax.numpy as jnp
    >>> x = jnp.arange(6.0).reshape(3, 1, 2)
    >>> float(attention_reference(x, x, x, is_causal=True)[0, 0, 1])
    1.0
    """
    wide = score_dtype(query.dtype)
    group = query.shape[-2] // key.shape[-2]
    q, k, v = (x.astype(wide) for x in (query, key, value))
    k, v = (jnp.repeat(x, group, axis=-2) for x in (k, v))
    window = local_window_size
    visible = visibility(
        query.shape[-3],
        key.shape[-3],
        mask,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=(window, window) if isinstance(window, int) else window,
    )

    scores = jnp.einsum("...thd,...shd->...hts", q, k, precision="highest")
    scores *= query.shape[-1] ** -0.5 if scale is None else scale
    if bias is not None:
        scores += bias.astype(wide)
    if visible is not None:
        finite = jnp.isfinite(v)
        broken = ~finite.all(-1)  # [*B, S, H]
        scores = jnp.where(jnp.swapaxes(broken, -1, -2)[..., None, :], jnp.nan, scores)
        v = jnp.where(finite, v, 0)
        scores = jnp.where(visible, scores, -jnp.inf)
    top = jax.lax.stop_gradient(scores.max(-1, keepdims=True, initial=-jnp.inf))
    weights = jnp.exp(scores - jnp.where(top == -jnp.inf, 0, top))
    total = weights.sum(-1, keepdims=True)
    weights /= jnp.where(total == 0, 1, total)
    return jnp.einsum("...hts,...shd->...thd", weights, v, precision="highest").astype(query.dtype)
