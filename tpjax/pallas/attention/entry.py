# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The public function `flash_attention`: checks, one leading axis, dispatch, and back."""

import math
from typing import Any

from jax import Array
from jaxtyping import Bool, Float, Int

from tpjax.core.attention import attention_reference
from tpjax.pallas import dispatch
from tpjax.pallas.attention import checks
from tpjax.pallas.attention.arguments import Operands, Options
from tpjax.pallas.attention.implementations import IMPLEMENTATIONS, partitioning_of


def flash_attention(  # long: twenty arguments, each explained
    query: Float[Array, "*B T H D"],
    key: Float[Array, "*B S K D"],
    value: Float[Array, "*B S K V"],
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Array, "*B"] | None = None,
    key_value_seq_lengths: Int[Array, "*B"] | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    alignment: str = "top_left",
    prefix_lengths: Int[Array, "*B"] | None = None,
    query_segment_ids: Int[Array, "*B T"] | None = None,
    key_value_segment_ids: Int[Array, "*B S"] | None = None,
    softcap: float | None = None,
    alibi_slopes: Float[Array, "... H"] | None = None,
    sinks: Float[Array, " H"] | None = None,
    return_lse: bool = False,
    return_max: bool = False,
    deterministic: bool = True,
    implementation: str | None = None,
) -> Float[Array, "*B T H V"] | Any:
    """Returns the visible values averaged with the softmax of the scores as weights.

        score[t, s] = softcap(scale query[t] . key[s]) - slope |p(t) - s| + bias[t, s]

    Names and meaning are those of `jax.nn.dot_product_attention` where it has them, but for a query
    that sees no key: it gives 0 here, and gradient 0. Scores and softmax are float32 (float64 for
    float64 inputs). A key is visible where every argument that is given lets it be.

    Args:
      query: [*B, T, H, D], bfloat16, float16, float32 or float64.
      key: [*B, S, K, D] of the same dtype; H is a multiple of K, and query head h reads key head
        h // (H // K).
      value: [*B, S, K, V] of the same dtype; V may differ from D.
      bias: added to the scores; broadcastable to [*B, H, T, S]; None adds nothing.
      mask: true where a query may see a key; broadcastable to [*B, H, T, S]; None hides nothing.
      scale: factor of the products, a positive or negative number; None means 1 / sqrt(D).
      is_causal: hides the keys s > p(t).
      query_seq_lengths: [*B], up to T; queries from this position on give 0; None means T.
      key_value_seq_lengths: [*B], up to S; keys from this position on are hidden; None means S.
      local_window_size: (left, right), or one number for both: hides all keys but those in
        p(t) - left <= s <= p(t) + right; None hides nothing.
      alignment: where a query stands among the keys: "top_left", p(t) = t, or "bottom_right",
        p(t) = t + S - T with the lengths given for S and T: the last query stands at the last key.
      prefix_lengths: [*B]; of the first so many keys `is_causal`, which must be set, hides none; a
        window does. None means 0.
      query_segment_ids: [*B, T], integers of at most 32 bits in value; a query sees only keys of
        its own segment. None means one segment.
      key_value_segment_ids: [*B, S]; None means `query_segment_ids`, where T = S.
      softcap: bounds the products by cap * tanh(x / cap); above 0; None leaves them as they are.
      alibi_slopes: [H] or [*B, H], how much of a score a head takes off for each token of distance
        (Press et al. 2022); has a gradient. None means 0.
      sinks: [H], one more score of a head, of a key without a value; has a gradient. None has none.
      return_lse: returns too the log of the sum of the exponentials of a query's visible scores,
        and of the sink: natural, [*B, T, H] float32 (float64 for float64), with a gradient; -inf,
        or the sink, where nothing is visible.
      return_max: returns too the largest visible score, [*B, T, H] as lse, without a gradient; -inf
        where nothing is visible.
      deterministic: False lets a kernel's backward pass sum in an order that varies, for speed.
      implementation: "pallas" or "xla"; None chooses.

    Returns:
      [*B, T, H, V] of the dtype of `query`; or a tuple of it, then lse, then max, as asked for.

    Raises:
      ValueError: a wrong shape or value.
      TypeError: a wrong dtype or kind.
      UnsupportedError: the implementation asked for cannot run this call.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> x = jax.random.normal(jax.random.key(0), (2, 16, 4, 64), jnp.bfloat16)
      >>> flash_attention(x, x[:, :, :2], x[:, :, :2], is_causal=True).shape
      (2, 16, 4, 64)
      >>> out, lse = flash_attention(x, x, x, local_window_size=(3, 0), return_lse=True)
      >>> lse.shape, str(lse.dtype)
      ((2, 16, 4), 'float32')

    Source: Dao 2023 (FlashAttention-2), Shah et al. 2024 (FlashAttention-3).
    """
    checks.check_tensors(query, key, value)
    *lead, num_queries, heads, features = query.shape
    batch, num_keys = tuple(lead), key.shape[-3]
    for name, x in (("bias", bias), ("mask", mask)):
        checks.check_scores_like(name, x, (*batch, heads, num_queries, num_keys))
    options = Options(
        scale=checks.scale(scale, features),
        is_causal=checks.flag("is_causal", is_causal),
        local_window_size=checks.window(local_window_size, num_queries + num_keys),
        alignment=checks.alignment(alignment),
        softcap=checks.softcap(softcap),
        return_lse=checks.flag("return_lse", return_lse),
        return_max=checks.flag("return_max", return_max),
        deterministic=checks.flag("deterministic", deterministic),
    )
    segments = checks.segments(
        query_segment_ids, key_value_segment_ids, batch, num_queries, num_keys
    )
    operands = Operands(
        query=query.reshape(math.prod(batch), *query.shape[-3:]),
        key=key.reshape(math.prod(batch), *key.shape[-3:]),
        value=value.reshape(math.prod(batch), *value.shape[-3:]),
        bias=checks.one_batch_axis(bias, batch),
        mask=checks.one_batch_axis(mask, batch),
        query_seq_lengths=checks.lengths(
            "query_seq_lengths", query_seq_lengths, batch, num_queries
        ),
        key_value_seq_lengths=checks.lengths(
            "key_value_seq_lengths", key_value_seq_lengths, batch, num_keys
        ),
        prefix_lengths=checks.prefix_lengths(prefix_lengths, batch, num_keys, options.is_causal),
        query_segment_ids=segments[0],
        key_value_segment_ids=segments[1],
        alibi_slopes=checks.slopes(alibi_slopes, batch, heads, query.dtype),
        sinks=checks.sinks(sinks, heads, query.dtype),
    )
    if math.prod((*batch, num_queries, heads, num_keys)):
        split = partitioning_of(options.return_lse, options.return_max)
        named = operands._asdict(), options._asdict()
        results = dispatch.call(checks.OP, IMPLEMENTATIONS, *named, implementation, split)
    else:  # nothing to attend from or to
        dispatch.check_name(checks.OP, IMPLEMENTATIONS, implementation)
        results = attention_reference(**operands._asdict(), **options._asdict())
    if isinstance(results, tuple):
        return tuple(x.reshape(*query.shape[:-2], *x.shape[2:]) for x in results)
    return results.reshape(*query.shape[:-1], value.shape[-1])
