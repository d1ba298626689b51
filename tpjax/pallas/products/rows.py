# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The rows of matrix products in the table of operators."""

import math
from typing import Any

import jax.numpy as jnp

from tpjax.core.operator import Cost, Op, Sample, nbytes
from tpjax.core.products import (
    gated_linear_unit_reference,
    gated_mlp_reference,
    matmul_reference,
)
from tpjax.pallas.products import implementations as ways
from tpjax.pallas.products.entry import gated_linear_unit, gated_mlp, matmul

TOL = {"float32": 1e-6, "bfloat16": 6e-3, "float16": 1e-3, "float64": 1e-12}


def matmul_cost(
    a: Any,
    b: Any,
    bias: Any = None,
    residual: Any = None,
    scale: Any = None,
    *,
    out_dtype: Any = None,
    **options: Any,
) -> Cost:
    """Returns the cost of one forward call: 2 operations for each of M N K terms."""
    del options
    elements = math.prod(a.shape[:-1]) * b.shape[-1]
    out_bytes = elements * jnp.dtype(out_dtype or a.dtype).itemsize
    return Cost(2.0 * elements * a.shape[-1], nbytes((a, b, bias, residual, scale)) + out_bytes)


def gated_linear_unit_cost(x: Any, w: Any, w_up: Any = None, **options: Any) -> Cost:
    """Returns the cost of one forward call: two products."""
    del options
    rows, hidden = math.prod(x.shape[:-1]), w.shape[-1]
    moved = nbytes((x, w, w_up)) + rows * hidden * x.dtype.itemsize
    return Cost(4.0 * rows * x.shape[-1] * hidden, moved)


def gated_mlp_cost(x: Any, w: Any, w_down: Any, w_up: Any = None, **options: Any) -> Cost:
    """Returns the cost of one forward call: three products."""
    del options
    rows, hidden = math.prod(x.shape[:-1]), w.shape[-1]
    return Cost(6.0 * rows * x.shape[-1] * hidden, nbytes((x, w, w_down, w_up, x)))


MATMUL = Op(
    fn=matmul,
    reference=matmul_reference,
    implementations=ways.MATMUL,
    samples=(
        Sample(("f32[5,7]", "f32[7,3]", "f32[3]"), {"activation": "gelu_exact"}),
        Sample(("bf16[129,40]", "bf16[40,56]")),
        Sample(
            ("bf16[131,37]", "bf16[37,40]", "f32[40]", "bf16[131,40]", "f32[]"),
            {"activation": "gelu"},
        ),
        Sample(("f16[2,133,24]", "f16[2,24,9]", None, "f32[2,133,9]")),
        Sample(("bf16[3,8]", "bf16[8,5]")),
        Sample(("bf16[8192,8192]", "bf16[8192,8192]"), slow=True),
    ),
    diff=(0, 1, 2, 3, 4),
    tol=TOL,
    cost=matmul_cost,
    partitioning=ways.MATMUL_PARTITIONING,
)
"""Matrix product, and what follows it."""

GATED_LINEAR_UNIT = Op(
    fn=gated_linear_unit,
    reference=gated_linear_unit_reference,
    implementations=ways.GATED_LINEAR_UNIT,
    samples=(
        Sample(("f32[5,7]", "f32[7,2,3]")),
        Sample(("bf16[3,45,40]", "bf16[40,2,24]")),
        Sample(("f16[131,24]", "f16[24,9]", "f16[24,9]"), {"activation": "gelu"}),
        Sample(("bf16[16384,4096]", "bf16[4096,2,11008]"), slow=True),
    ),
    diff=(0, 1, 2),
    tol=TOL,
    cost=gated_linear_unit_cost,
    partitioning=ways.gated_partitioning(stacked=True, down=False),
)
"""Gated linear unit: SwiGLU and its kin."""

GATED_MLP = Op(
    fn=gated_mlp,
    reference=gated_mlp_reference,
    implementations=ways.GATED_MLP,
    samples=(
        Sample(("f32[5,7]", "f32[7,2,3]", "f32[3,7]")),
        Sample(("bf16[3,45,40]", "bf16[40,2,24]", "bf16[24,40]")),
        Sample(("f32[9,4]", "f32[4,9]", "f32[9,4]", "f32[4,9]"), {"activation": "relu"}),
        Sample(("bf16[16384,4096]", "bf16[4096,2,11008]", "bf16[11008,4096]"), slow=True),
    ),
    diff=(0, 1, 2, 3),
    tol=TOL,
    cost=gated_mlp_cost,
    partitioning=ways.gated_partitioning(stacked=True, down=True),
)
"""The feed-forward layer of a Transformer, gated."""
