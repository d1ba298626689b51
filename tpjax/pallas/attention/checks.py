# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""What `flash_attention` asks of its arguments: each check names the argument and the remedy."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tpjax.core._jax import is_tracer
from tpjax.core.attention import ALIGNMENTS, score_dtype
from tpjax.core.errors import did_you_mean, message

OP = "flash_attention"
DTYPES = ("bfloat16", "float16", "float32", "float64")


def _array(name: str, x: Any, or_none: str = " or None") -> None:
    if not isinstance(x, jax.Array | np.ndarray):
        remedy = "Convert it with jax.numpy.asarray."
        raise TypeError(message(OP, name, f"an array{or_none}", type(x).__name__, remedy))


def _floats(name: str, x: Any, remedy: str = "Cast it.") -> None:
    if str(x.dtype) not in DTYPES:
        raise TypeError(message(OP, name, f"of dtype {', '.join(DTYPES)}", x.dtype, remedy))


def check_tensors(query: Any, key: Any, value: Any) -> None:
    """Checks shapes and dtypes of query [*B, T, H, D], key [*B, S, K, D], value [*B, S, K, V]."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        _array(name, x, "")
        _floats(name, x)
        if x.dtype != query.dtype:
            must = f"of query's dtype {query.dtype}"
            raise TypeError(message(OP, name, must, x.dtype, "Cast one of them."))
    if query.ndim < 3:
        raise ValueError(message(OP, "query", "of rank 3 or more, [*B, T, H, D]", query.shape))
    *batch, _, heads, features = query.shape
    for name, x, last in (("key", key, "D"), ("value", value, "V")):
        if x.ndim != query.ndim:
            must = f"of query's rank {query.ndim}, [*B, S, K, {last}]"
            raise ValueError(message(OP, name, must, f"shape {x.shape}"))
        if list(x.shape[:-3]) != batch:
            must = f"of query's leading axes {tuple(batch)}"
            raise ValueError(message(OP, name, must, f"shape {x.shape}", "Broadcast it first."))
    if key.shape[-1] != features:
        must = f"of query's {features} features in the last axis"
        raise ValueError(message(OP, "key", must, f"shape {key.shape}"))
    if value.shape[:-1] != key.shape[:-1]:
        must = f"of key's shape {key.shape} but for the last axis"
        raise ValueError(message(OP, "value", must, value.shape))
    kv_heads = key.shape[-2]
    if heads % kv_heads if kv_heads else heads:
        remedy = f"Query has {heads} heads; key and value may have any divisor of that."
        must = "of a number of heads that divides query's"
        raise ValueError(message(OP, "key", must, f"{kv_heads} heads", remedy))


def check_scores_like(name: str, x: Any, scores: tuple[int, ...]) -> None:
    """Checks a bias or mask, which is broadcast to the scores [*B, H, T, S]."""
    if x is None:
        return
    _array(name, x)
    if name == "mask" and x.dtype != np.bool_:
        remedy = "Pass numbers to be added to the scores as bias."
        raise TypeError(message(OP, name, "boolean", x.dtype, remedy))
    if name == "bias":
        _floats(name, x, "Pass booleans as mask.")
    ends = zip(reversed(x.shape), reversed(scores), strict=False)
    if x.ndim > len(scores) or any(a not in (1, b) for a, b in ends):
        must = f"broadcastable to the scores [*B, H, T, S] = {scores}"
        raise ValueError(message(OP, name, must, f"shape {x.shape}"))


def _integers(name: str, x: Any) -> None:
    if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.integer):
        got = getattr(x, "dtype", type(x).__name__)
        remedy = "Convert it with jax.numpy.asarray." if isinstance(x, list | tuple | int) else ""
        raise TypeError(message(OP, name, "an integer array or None", got, remedy))


def lengths(name: str, x: Any, batch: tuple[int, ...], most: int) -> Array | None:
    """Returns lengths [*B], or [1] without batch axes, with one axis, within [0, most]."""
    if x is None:
        return None
    _integers(name, x)
    if x.shape != batch and not (batch == () and x.shape == (1,)):
        must = f"of shape {batch}, one length for each sequence"
        raise ValueError(message(OP, name, must, f"shape {x.shape}"))
    x = jnp.asarray(x)
    x = x.astype(jnp.int32) if x.dtype.itemsize < 4 else x
    return jnp.clip(x, 0, most).astype(jnp.int32).reshape(-1)


def prefix_lengths(x: Any, batch: tuple[int, ...], num_keys: int, is_causal: bool) -> Array | None:
    """Returns prefix lengths as `lengths` does; they need a causal call."""
    name = "prefix_lengths"
    if x is not None and not is_causal:
        remedy = "Pass is_causal=True: a prefix is what the causal edge does not hide."
        raise ValueError(message(OP, name, "None where is_causal is False", "an array", remedy))
    return lengths(name, x, batch, num_keys)


def segments(
    query_ids: Any, key_ids: Any, batch: tuple[int, ...], num_queries: int, num_keys: int
) -> tuple[Array | None, Array | None]:
    """Returns segment ids of queries [B, T] and of keys [B, S]; those given may serve both."""
    of_query, of_key = "query_segment_ids", "key_value_segment_ids"
    if query_ids is None:
        if key_ids is not None:
            remedy = f"Pass {of_query} too."
            raise ValueError(message(OP, of_key, f"None without {of_query}", "an array", remedy))
        return None, None
    if key_ids is None:
        if num_queries != num_keys:
            must = f"given where {num_keys} keys are not as many as {num_queries} queries"
            remedy = f"{of_query} alone serve both only where T = S."
            raise ValueError(message(OP, of_key, must, None, remedy))
        key_ids = query_ids
    found = []
    for name, x, size in ((of_query, query_ids, num_queries), (of_key, key_ids, num_keys)):
        _integers(name, x)
        if x.shape != (*batch, size):
            must = f"of shape {(*batch, size)}, one id for each token"
            raise ValueError(message(OP, name, must, f"shape {x.shape}", "Broadcast it first."))
        found.append(jnp.asarray(x).astype(jnp.int32).reshape(math.prod(batch), size))
    return found[0], found[1]


def slopes(x: Any, batch: tuple[int, ...], heads: int, dtype: Any) -> Array | None:
    """Returns slopes [H] or [*B, H] as [1 or B, H] of the scores' dtype."""
    if x is None:
        return None
    _array("alibi_slopes", x)
    _floats("alibi_slopes", x)
    if x.shape not in ((heads,), (*batch, heads)):
        must = f"of shape {(heads,)} or {(*batch, heads)}, one slope for each query head"
        raise ValueError(message(OP, "alibi_slopes", must, f"shape {x.shape}"))
    rows = 1 if x.ndim == 1 else math.prod(batch)
    return jnp.asarray(x, score_dtype(dtype)).reshape(rows, heads)


def sinks(x: Any, heads: int, dtype: Any) -> Array | None:
    """Returns sinks [H] in the scores' dtype."""
    if x is None:
        return None
    _array("sinks", x)
    _floats("sinks", x)
    if x.shape != (heads,):
        must = f"of shape {(heads,)}, one score for each query head"
        raise ValueError(message(OP, "sinks", must, f"shape {x.shape}"))
    return jnp.asarray(x, score_dtype(dtype))


def _number(name: str, x: Any, remedy: str) -> float:
    """Returns a finite number that is known when tracing."""
    if is_tracer(x) or np.ndim(x) or isinstance(x, bool | np.bool_):
        raise TypeError(message(OP, name, "a number known when tracing", x, remedy))
    try:
        number = float(x)
    except (TypeError, ValueError):
        raise TypeError(message(OP, name, "a number or None", repr(x))) from None
    if not math.isfinite(number):
        raise ValueError(message(OP, name, "finite", x))
    return number


def scale(x: Any, features: int) -> float:
    """Returns the factor of the scores."""
    if x is None:
        return max(features, 1) ** -0.5
    return _number("scale", x, "Multiply query by it where it is computed.")


def softcap(x: Any) -> float | None:
    """Returns the bound of the scores, or None for none."""
    if x is None:
        return None
    number = _number("softcap", x, "It is compiled into the kernel.")
    if number <= 0:
        raise ValueError(message(OP, "softcap", "above zero", x, "None leaves scores as they are."))
    return number


def flag(name: str, x: Any) -> bool:
    """Returns a flag as a bool."""
    if not isinstance(x, bool | np.bool_):
        remedy = "It chooses the program: make it a static argument." if is_tracer(x) else ""
        raise TypeError(message(OP, name, "True or False", repr(x), remedy))
    return bool(x)


def alignment(x: Any) -> str:
    """Returns the alignment's name."""
    if x not in ALIGNMENTS:
        remedy = did_you_mean(str(x), ALIGNMENTS)
        raise ValueError(
            message(OP, "alignment", " or ".join(map(repr, ALIGNMENTS)), repr(x), remedy)
        )
    return x


def window(x: Any, num_tokens: int) -> tuple[int, int] | None:
    """Returns how many keys are seen to the left and to the right, at most `num_tokens`."""
    if x is None:
        return None
    pair = x if isinstance(x, tuple | list) else (x, x)
    must = "a number of keys, a pair (left, right) of them, or None"
    whole = all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in pair)
    if len(pair) != 2 or not whole:
        raise TypeError(message(OP, "local_window_size", must, repr(x)))
    left, right = (int(n) for n in pair)
    if left < 0 or right < 0:
        raise ValueError(message(OP, "local_window_size", "zero or more on both sides", x))
    return min(left, num_tokens), min(right, num_tokens)


def one_batch_axis(x: Any, batch: tuple[int, ...]) -> Array | None:
    """Returns a bias or mask as [B or 1, H or 1, T or 1, S or 1]."""
    if x is None:
        return None
    x = jnp.asarray(x)
    x = x.reshape((1,) * (len(batch) + 3 - x.ndim) + x.shape)
    lead, rest = x.shape[: len(batch)], x.shape[len(batch) :]
    if math.prod(lead) == 1:
        return x.reshape(1, *rest)
    return jnp.broadcast_to(x, (*batch, *rest)).reshape(math.prod(batch), *rest)
