# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The row of `dropout` in the table of operators."""

import math
from typing import Any

from tpjax.core.dropouts import dropout_reference
from tpjax.core.operator import Cost, Op, Sample, nbytes
from tpjax.pallas.randomness import implementations as ways
from tpjax.pallas.randomness.entry import dropout


def dropout_cost(x: Any, seed: Any, **options: Any) -> Cost:
    """Returns the cost of one forward call: x read and written once.

    Threefry takes 110 operations for the bits of four elements; with the choice 30 each.
    """
    del options
    flops, moved = 30.0 * math.prod(x.shape), nbytes((x, seed, x))
    return Cost(flops, moved, flops, moved)  # the same mask again; x itself is not looked at


DROPOUT = Op(
    fn=dropout,
    reference=dropout_reference,
    implementations=ways.DROPOUT,
    samples=(
        Sample(("f32[3,63]", "u32[2]"), {"rate": 0.25}),
        Sample(("bf16[2,3,256]", "u32[2]"), {"rate": 0.5}),
        Sample(("f16[7]", "u32[2]"), {"rate": 0.0}),
        Sample(("bf16[16384,4096]", "u32[2]"), {"rate": 0.1}, slow=True),
    ),
    diff=(0,),
    tol={"float32": 1e-6, "bfloat16": 6e-3, "float16": 1e-3, "float64": 1e-12},
    cost=dropout_cost,
    partitioning=ways.DROPOUT_PARTITIONING,
)
"""Dropout by a counter."""
