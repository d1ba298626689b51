# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The row of the cross-entropy of a linear head in the table of operators."""

import math
from typing import Any

import jax

from tpjax.core.losses import linear_cross_entropy_reference
from tpjax.core.norms import statistics_dtype
from tpjax.core.operator import Cost, Op, Sample, nbytes
from tpjax.pallas.losses.devices import PARTITIONING
from tpjax.pallas.losses.entry import linear_cross_entropy
from tpjax.pallas.losses.implementations import IMPLEMENTATIONS


def linear_cross_entropy_cost(
    hidden: Any,
    head: Any,
    labels: Any,
    weights: Any = None,
    *,
    vocab_axis: int = 0,
    reduction: str = "mean",
    return_token_losses: bool = False,
    return_lse: bool = False,
    **options: Any,
) -> Cost:
    """Returns the cost of one forward call: one product, one move of each array."""
    del options
    tokens, features = math.prod(labels.shape), hidden.shape[-1]
    rows = jax.ShapeDtypeStruct(labels.shape, statistics_dtype(hidden.dtype))
    loss = rows if reduction == "none" else jax.ShapeDtypeStruct((), rows.dtype)
    results = (loss, *[rows] * (return_token_losses + return_lse))
    flops = 2.0 * tokens * features * head.shape[vocab_axis]
    return Cost(flops, nbytes((hidden, head, labels, weights, *results)))


EVERYTHING = {"return_token_losses": True, "return_lse": True}

LINEAR_CROSS_ENTROPY = Op(
    fn=linear_cross_entropy,
    reference=linear_cross_entropy_reference,
    implementations=IMPLEMENTATIONS,
    samples=(
        Sample(("f32[2,9,37]", "f32[131,37]", "i32[2,9]")),
        Sample(
            ("f32[7,24]", "f32[1031,24]", "i32[7]", "f32[7]"),
            {"label_smoothing": 0.1, "z_loss": 1e-2, "reduction": "none", "return_lse": True},
        ),
        Sample(
            ("bf16[150,128]", "bf16[320,128]", "i32[150]"),
            {"ignore_index": 3, "softcap": 20.0, "reduction": "sum", **EVERYTHING},
        ),
        Sample(("f16[40,64]", "f32[192,64]", "i32[40]"), {"z_loss": 1e-3, "reduction": "none"}),
        Sample(("bf16[63,40]", "bf16[257,40]", "i32[63]", "f32[63]"), {"reduction": "sum"}),
        Sample(("bf16[8192,4096]", "bf16[128256,4096]", "i32[8192]"), slow=True),
        Sample(("bf16[16384,2048]", "bf16[32000,2048]", "i32[16384]"), slow=True),
    ),
    diff=(0, 1, 3),
    tol={"float32": 2e-6, "bfloat16": 6e-3, "float16": 1e-3, "float64": 1e-12},
    cost=linear_cross_entropy_cost,
    partitioning=PARTITIONING,
)
"""Cross-entropy of a linear head, whose logits are never formed in full."""
