# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The row of attention in the table of operators."""

from inspect import signature
from typing import Any

import jax
import numpy as np

from tpjax.core._jax import is_tracer
from tpjax.core.attention import attention_reference, score_dtype
from tpjax.core.operator import Cost, Op, Sample, nbytes
from tpjax.pallas.attention.entry import flash_attention
from tpjax.pallas.attention.implementations import IMPLEMENTATIONS, PARTITIONING


def attention_cost(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    alignment: str = "top_left",
    prefix_lengths: Any = None,
    return_lse: bool = False,
    return_max: bool = False,
    **others: Any,
) -> Cost:
    """Returns the cost of a call: two products over visible scores, one move of each array.

    The gradients take five such products: one of the two is taken again.

    What hides scores by values that are not known, as a mask does, is taken to hide none; a prefix
    that is not known is taken to be empty.
    """
    *batch, num_queries, heads, features = query.shape
    num_keys, width = key.shape[-3], value.shape[-1]
    queries = _known(query_seq_lengths, num_queries)
    keys = _known(key_value_seq_lengths, num_keys)
    query_at = np.arange(num_queries)
    position = query_at + (keys - queries if alignment == "bottom_right" else 0)
    first, last = np.zeros_like(position), keys - 1
    if is_causal:
        last = np.minimum(last, np.maximum(position, _known(prefix_lengths, 0) - 1))
    if local_window_size is not None:
        window = local_window_size
        left, right = (window, window) if isinstance(window, int) else window
        first, last = np.maximum(first, position - left), np.minimum(last, position + right)
    count = np.maximum(last - first + 1, 0) * (query_at < queries)
    visible = np.broadcast_to(count, (*batch, num_queries)).sum(dtype=np.float64)
    flops = 2.0 * float(visible) * heads * (features + width)
    row = jax.ShapeDtypeStruct((*batch, num_queries, heads), score_dtype(query.dtype))
    out = jax.ShapeDtypeStruct((*row.shape, width), query.dtype)
    arrays = (query, key, value, bias, mask, query_seq_lengths, key_value_seq_lengths)
    arrays += (prefix_lengths, *(x for x in others.values() if hasattr(x, "shape")))
    moved = nbytes((*arrays, out, *[row] * (return_lse + return_max)))
    return Cost(flops, moved, backward_flops=2.5 * flops)


def _known(lengths: Any, otherwise: int) -> Any:
    """Returns lengths [*B, 1], or a number where their values are not known."""
    if isinstance(lengths, np.ndarray | jax.Array) and not is_tracer(lengths):
        return np.asarray(lengths)[..., None]
    return otherwise


DIFFERENTIABLE = ("query", "key", "value", "bias", "alibi_slopes", "sinks")

FLASH_ATTENTION = Op(
    fn=flash_attention,
    reference=attention_reference,
    implementations=IMPLEMENTATIONS,
    samples=(
        Sample(("f32[2,24,4,16]", "f32[2,40,2,16]", "f32[2,40,2,16]"), {"is_causal": True}),
        Sample(("f32[2,9,4,8]", "f32[2,7,4,8]", "f32[2,7,4,8]", "f32[4,9,7]", "bool[2,1,9,7]")),
        Sample(("bf16[1,128,2,64]", "bf16[1,128,1,64]", "bf16[1,128,1,64]"), {"is_causal": True}),
        Sample(("bf16[1,77,1,128]", "bf16[1,150,1,128]", "bf16[1,150,1,128]")),
        Sample(("f32[1,33,2,64]",) * 3, {"local_window_size": (5, 0), "is_causal": True}),
        Sample(
            ("f32[2,24,4,16]", "f32[2,40,2,16]", "f32[2,40,2,8]"),
            {
                "is_causal": True,
                "alignment": "bottom_right",
                "local_window_size": (9, 2),
                "softcap": 5.0,
                "return_lse": True,
            },
            named={
                "key_value_seq_lengths": "i32[2]",
                "prefix_lengths": "i32[2]",
                "alibi_slopes": "f32[4]",
                "sinks": "f32[4]",
            },
        ),
        Sample(
            ("bf16[1,77,2,192]", "bf16[1,77,2,192]", "bf16[1,77,2,128]"),
            {"is_causal": True},
            named={"query_segment_ids": "i32[1,77]"},
        ),
        Sample(
            ("bf16[2,4096,32,128]", "bf16[2,4096,8,128]", "bf16[2,4096,8,128]"),
            {"is_causal": True},
            slow=True,
        ),
        *(
            Sample((spec,) * 3, {"is_causal": True}, slow=True)
            for spec in ("bf16[8,2048,16,128]", "bf16[2,8192,16,128]", "bf16[4,4096,32,64]")
        ),
        Sample(("bf16[4,4096,8,256]",) * 3, {"is_causal": True}, slow=True),
    ),
    diff=tuple(map(list(signature(flash_attention).parameters).index, DIFFERENTIABLE)),
    tol={"float32": 2e-6, "bfloat16": 6e-3, "float16": 1e-3, "float64": 1e-12},
    cost=attention_cost,
    partitioning=PARTITIONING,
)
"""Softmax attention: grouped heads, any lengths, and what hides or weighs scores."""
