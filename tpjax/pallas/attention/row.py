# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The row of attention in the table of operators."""

import math
from typing import Any

import numpy as np

from tpjax.core.attention import attention_reference
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
    local_window_size: int | tuple[int, int] | None = None,
    **options: Any,
) -> Cost:
    """Returns the cost of a call: two products over visible scores, one move of each array."""
    del options
    *batch, num_queries, heads, features = query.shape
    num_keys = key.shape[-3]
    left = right = max(num_queries, num_keys)
    if isinstance(local_window_size, int):
        left = right = local_window_size
    elif local_window_size is not None:
        left, right = local_window_size
    if is_causal:
        right = 0
    query_at = np.arange(num_queries)
    last, first = np.minimum(query_at + right, num_keys - 1), np.maximum(query_at - left, 0)
    visible = float(np.maximum(last - first + 1, 0).sum())
    flops = 4.0 * math.prod(batch) * heads * visible * features
    return Cost(flops, nbytes((query, key, value, bias, mask, query)))


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
            ("bf16[2,4096,32,128]", "bf16[2,4096,8,128]", "bf16[2,4096,8,128]"),
            {"is_causal": True},
            slow=True,
        ),
    ),
    diff=(0, 1, 2, 3),
    tol={"float32": 2e-6, "bfloat16": 6e-3, "float16": 1e-3, "float64": 1e-12},
    cost=attention_cost,
    partitioning=PARTITIONING,
)
"""Softmax attention: causal or full, grouped heads, any length."""
