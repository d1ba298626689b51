# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The public function `flash_attention`: checks, one leading axis, dispatch, and back."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from tpjax.core._jax import is_tracer
from tpjax.core.errors import message
from tpjax.pallas import dispatch
from tpjax.pallas.attention.implementations import IMPLEMENTATIONS, partitioning_of

OP = "flash_attention"
DTYPES = ("bfloat16", "float16", "float32", "float64")


def flash_attention(
    query: Float[Array, "*B T H D"],
    key: Float[Array, "*B S K D"],
    value: Float[Array, "*B S K D"],
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Array, "*B"] | None = None,
    key_value_seq_lengths: Int[Array, "*B"] | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
) -> Float[Array, "*B T H D"]:
    """Returns the visible values averaged with the softmax of scaled query-key products as weights.

    Names and meaning are those of `jax.nn.dot_product_attention`, but for a query that sees no key:
    it gives 0 here, and gradient 0. Scores and softmax are float32 (float64 for float64 inputs).

    Args:
      query: [*B, T, H, D], bfloat16, float16, float32 or float64.
      key: [*B, S, K, D] of the same dtype; H is a multiple of K, and query head h reads key head
        h // (H // K).
      value: like `key`.
      bias: added to the scaled scores; broadcastable to [*B, H, T, S]; None adds nothing.
      mask: true where a query may see a key; broadcastable to [*B, H, T, S]; None hides nothing.
      scale: factor of the scores, a positive or negative number; None means 1 / sqrt(D).
      is_causal: hides keys after the query; both are counted from the front, whatever T and S are.
      query_seq_lengths: queries from this position on give 0; None means T.
      key_value_seq_lengths: keys from this position on are hidden; None means S.
      local_window_size: how many keys to the left and to the right of its own position a query
        sees; one number means both; None means all.
      implementation: "pallas" or "xla"; None chooses.

    Returns:
      [*B, T, H, D] of the dtype of `query`.

    Raises:
      ValueError: a wrong shape or value.
      TypeError: a wrong dtype or kind.
      UnsupportedError: the implementation asked for cannot run this call.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> x = jax.random.normal(jax.random.key(0), (2, 16, 4, 64), jnp.bfloat16)
      >>> flash_attention(x, x[:, :, :2], x[:, :, :2], is_causal=True).shape
      (2, 16, 4, 64)

    Source: Dao 2023 (FlashAttention-2), Shah et al. 2024 (FlashAttention-3).
    """
    _check_tensors(query, key, value)
    *batch, num_queries, heads, features = query.shape
    num_keys = key.shape[-3]
    scores = (*batch, heads, num_queries, num_keys)
    _check_scores_like("bias", bias, scores)
    _check_scores_like("mask", mask, scores)
    lengths = {
        "query_seq_lengths": _lengths("query_seq_lengths", query_seq_lengths, tuple(batch)),
        "key_value_seq_lengths": _lengths(
            "key_value_seq_lengths", key_value_seq_lengths, tuple(batch)
        ),
    }
    options = {
        "scale": _scale(scale, features),
        "is_causal": _flag("is_causal", is_causal),
        "local_window_size": _window(local_window_size),
        "alignment": "top_left",
        "softcap": None,
        "return_lse": False,
        "return_max": False,
        "deterministic": True,
    }
    if not math.prod(query.shape) or not num_keys:
        return jnp.zeros_like(query)
    operands = {
        "query": query.reshape(-1, *query.shape[-3:]),
        "key": key.reshape(-1, *key.shape[-3:]),
        "value": value.reshape(-1, *value.shape[-3:]),
        "bias": _one_batch_axis(bias, tuple(batch)),
        "mask": _one_batch_axis(mask, tuple(batch)),
        **lengths,
        "prefix_lengths": None,
        "query_segment_ids": None,
        "key_value_segment_ids": None,
        "alibi_slopes": None,
        "sinks": None,
    }
    split = partitioning_of(return_lse=False, return_max=False)
    out = dispatch.call(OP, IMPLEMENTATIONS, operands, options, implementation, split)
    return out.reshape(query.shape)


def _check_tensors(query: Any, key: Any, value: Any) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, jax.Array | np.ndarray):
            remedy = "Convert it with jax.numpy.asarray."
            raise TypeError(message(OP, name, "an array", type(x).__name__, remedy))
        if str(x.dtype) not in DTYPES:
            raise TypeError(message(OP, name, f"of dtype {', '.join(DTYPES)}", x.dtype, "Cast it."))
        if x.dtype != query.dtype:
            must = f"of query's dtype {query.dtype}"
            raise TypeError(message(OP, name, must, x.dtype, "Cast one of them."))
    if query.ndim < 3:
        raise ValueError(message(OP, "query", "of rank 3 or more, [*B, T, H, D]", query.shape))
    *batch, _, heads, features = query.shape
    for name, x in (("key", key), ("value", value)):
        if x.ndim != query.ndim:
            must = f"of query's rank {query.ndim}, [*B, S, K, D]"
            raise ValueError(message(OP, name, must, f"shape {x.shape}"))
        if list(x.shape[:-3]) != batch:
            must = f"of query's leading axes {tuple(batch)}"
            raise ValueError(message(OP, name, must, f"shape {x.shape}", "Broadcast it first."))
        if x.shape[-1] != features:
            must = f"of query's {features} features in the last axis"
            raise ValueError(message(OP, name, must, f"shape {x.shape}"))
    if value.shape != key.shape:
        raise ValueError(message(OP, "value", f"of key's shape {key.shape}", value.shape))
    if not key.shape[-2] or heads % key.shape[-2]:
        remedy = f"Query has {heads} heads; key and value may have any divisor of that."
        must = "of a number of heads that divides query's"
        raise ValueError(message(OP, "key", must, f"{key.shape[-2]} heads", remedy))


def _check_scores_like(name: str, x: Any, scores: tuple[int, ...]) -> None:
    """Checks an operand that is broadcast to the scores [*B, H, T, S]."""
    if x is None:
        return
    if not isinstance(x, jax.Array | np.ndarray):
        remedy = "Convert it with jax.numpy.asarray."
        raise TypeError(message(OP, name, "an array or None", type(x).__name__, remedy))
    if name == "mask" and x.dtype != np.bool_:
        remedy = "Pass numbers to be added to the scores as bias."
        raise TypeError(message(OP, name, "boolean", x.dtype, remedy))
    if name == "bias" and str(x.dtype) not in DTYPES:
        remedy = "Pass booleans as mask."
        raise TypeError(message(OP, name, f"of dtype {', '.join(DTYPES)}", x.dtype, remedy))
    ends = zip(reversed(x.shape), reversed(scores), strict=False)
    if x.ndim > len(scores) or any(a not in (1, b) for a, b in ends):
        must = f"broadcastable to the scores [*B, H, T, S] = {scores}"
        raise ValueError(message(OP, name, must, f"shape {x.shape}"))


def _lengths(name: str, x: Any, batch: tuple[int, ...]) -> Array | None:
    """Checks lengths [*B], or [1] without batch axes, and returns them with one axis."""
    if x is None:
        return None
    if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.integer):
        got = getattr(x, "dtype", type(x).__name__)
        raise TypeError(message(OP, name, "an integer array or None", got))
    if x.shape != batch and not (batch == () and x.shape == (1,)):
        must = f"of shape {batch}, one length for each sequence"
        raise ValueError(message(OP, name, must, f"shape {x.shape}"))
    return jnp.asarray(x, jnp.int32).reshape(-1)


def _scale(scale: Any, features: int) -> float:
    if scale is None:
        return max(features, 1) ** -0.5
    if is_tracer(scale) or np.ndim(scale) or isinstance(scale, bool):
        remedy = "Multiply query by it where it is computed."
        raise TypeError(message(OP, "scale", "a number known when tracing", scale, remedy))
    try:
        number = float(scale)
    except (TypeError, ValueError):
        raise TypeError(message(OP, "scale", "a number or None", repr(scale))) from None
    if not math.isfinite(number):
        raise ValueError(message(OP, "scale", "finite", scale))
    return number


def _flag(name: str, x: Any) -> bool:
    if not isinstance(x, bool | np.bool_):
        raise TypeError(message(OP, name, "True or False", repr(x)))
    return bool(x)


def _window(window: Any) -> tuple[int, int] | None:
    if window is None:
        return None
    pair = window if isinstance(window, tuple | list) else (window, window)
    must = "a number of keys, a pair (left, right) of them, or None"
    if len(pair) != 2 or not all(isinstance(n, int | np.integer) for n in pair):
        raise TypeError(message(OP, "local_window_size", must, repr(window)))
    left, right = (int(n) for n in pair)
    if left < 0 or right < 0:
        raise ValueError(message(OP, "local_window_size", "zero or more on both sides", window))
    return left, right


def _one_batch_axis(x: Any, batch: tuple[int, ...]) -> Array | None:
    """Returns a bias or mask as [B or 1, H or 1, T or 1, S or 1]."""
    if x is None:
        return None
    x = jnp.asarray(x)
    x = x.reshape((1,) * (len(batch) + 3 - x.ndim) + x.shape)
    lead, rest = x.shape[: len(batch)], x.shape[len(batch) :]
    if math.prod(lead) == 1:
        return x.reshape(1, *rest)
    return jnp.broadcast_to(x, (*batch, *rest)).reshape(-1, *rest)
