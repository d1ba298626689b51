# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The rows of rotary embedding in the table of operators."""

import math
from typing import Any

from tpjax.core.operator import Cost, Op, Sample, nbytes
from tpjax.core.rotary import rms_norm_rope_reference, rotary_embedding_reference
from tpjax.pallas.rope import implementations as ways
from tpjax.pallas.rope.entry import rms_norm_rope, rotary_embedding

TOL = {"float32": 2e-5, "bfloat16": 6e-3, "float16": 1e-3, "float64": 1e-12}
"""An angle of 100 radians, rounded to float32, is off by up to 4e-6; random frequencies reach 3."""


def rotary_embedding_cost(
    x: Any, positions: Any = None, frequencies: Any = None, **options: Any
) -> Cost:
    """Returns the cost of one forward call: 3 operations an element, x read and written once."""
    del options
    flops, moved = 3.0 * math.prod(x.shape), nbytes((x, positions, frequencies, x))
    return Cost(flops, moved, flops, moved)  # turned back; x itself is not looked at


def rms_norm_rope_cost(
    x: Any, scale: Any = None, positions: Any = None, frequencies: Any = None, **options: Any
) -> Cost:
    """Returns the cost of one call: 7 operations an element forward, 14 backward."""
    del options
    count, moved = math.prod(x.shape), nbytes((x, scale, positions, frequencies, x))
    return Cost(7.0 * count, moved, 14.0 * count)


ROTARY_EMBEDDING = Op(
    fn=rotary_embedding,
    reference=rotary_embedding_reference,
    implementations=ways.ROTARY_EMBEDDING,
    samples=(
        Sample(("f32[2,5,3,64]", "i32[2,5]", "f32[16]")),
        Sample(("bf16[2,5,3,64]",), {"interleaved": True, "amplitude": 1.25}),
        Sample(("f16[7,1,32]", "i32[7]")),
        Sample(("f32[3,1,6]", None, "f32[2]"), {"interleaved": True}),
        Sample(
            ("bf16[2,8192,32,128]", "i32[2,8192]", "f32[64]"), slow=True, below={"positions": 8192}
        ),
    ),
    diff=(0,),
    tol=TOL,
    cost=rotary_embedding_cost,
    partitioning=ways.ROTARY_EMBEDDING_PARTITIONING,
    no_kernel="XLA's code turns [2, 8192, 32, 128] bfloat16 in 77 us, 3.47 TB/s; a kernel took 91",
)
"""Rotary position embedding."""

RMS_NORM_ROPE = Op(
    fn=rms_norm_rope,
    reference=rms_norm_rope_reference,
    implementations=ways.RMS_NORM_ROPE,
    samples=(
        Sample(("f32[5,3,64]", "f32[64]", "i32[5]", "f32[16]")),
        Sample(("bf16[2,5,3,128]", "bf16[128]", "i32[2,5]", "f32[32]")),
        Sample(("bf16[2,5,8,64]", "bf16[64]"), {"interleaved": True, "scale_offset": 1.0}),
        Sample(("f16[7,1,32]", None), {"amplitude": 1.25}),
        Sample(("f32[3,1,6]", "f32[6]", None, "f32[2]")),
        Sample(
            ("bf16[2,8192,32,128]", "bf16[128]", "i32[2,8192]", "f32[64]"),
            slow=True,
            below={"positions": 8192},
        ),
    ),
    diff=(0, 1),
    tol=TOL,
    cost=rms_norm_rope_cost,
    partitioning=ways.RMS_NORM_ROPE_PARTITIONING,
)
"""Root mean square norm of each head, then rotary position embedding."""
