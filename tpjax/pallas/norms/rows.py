# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The rows of the norms in the table of operators."""

import math
from typing import Any

from tpjax.core.norms import layer_norm_reference, rms_norm_reference
from tpjax.core.operator import Cost, Op, Sample, nbytes
from tpjax.pallas.norms import implementations as ways
from tpjax.pallas.norms.entry import layer_norm, rms_norm

TOL = {"float32": 1e-6, "bfloat16": 6e-3, "float16": 1e-3, "float64": 1e-12}


def rms_norm_cost(x: Any, scale: Any = None, **options: Any) -> Cost:
    """Returns the cost of one forward call: 4 operations an element, x read and written once."""
    del options
    return Cost(4.0 * math.prod(x.shape), nbytes((x, scale, x)))


def layer_norm_cost(x: Any, scale: Any = None, bias: Any = None, **options: Any) -> Cost:
    """Returns the cost of one forward call: 7 operations an element, x read and written once."""
    del options
    return Cost(7.0 * math.prod(x.shape), nbytes((x, scale, bias, x)))


RMS_NORM = Op(
    fn=rms_norm,
    reference=rms_norm_reference,
    implementations=ways.RMS_NORM,
    samples=(
        Sample(("f32[6,256]", "f32[256]")),
        Sample(("bf16[2,3,128]", "f32[128]"), {"eps": 1e-5}),
        Sample(("f16[5,512]", None)),
        Sample(("f32[37]", "bf16[37]"), {"eps": 1e-3}),
        Sample(("bf16[16384,4096]", "bf16[4096]"), slow=True),
    ),
    diff=(0, 1),
    tol=TOL,
    cost=rms_norm_cost,
    partitioning=ways.RMS_NORM_PARTITIONING,
)
"""Root mean square norm over the last axis."""

LAYER_NORM = Op(
    fn=layer_norm,
    reference=layer_norm_reference,
    implementations=ways.LAYER_NORM,
    samples=(
        Sample(("f32[6,256]", "f32[256]", "f32[256]")),
        Sample(("bf16[2,3,128]", "f32[128]", "bf16[128]"), {"eps": 1e-5}),
        Sample(("f16[5,512]", None, None)),
        Sample(("f32[37]", "f32[37]", None), {"eps": 1e-3}),
        Sample(("bf16[16384,4096]", "bf16[4096]", "bf16[4096]"), slow=True),
    ),
    diff=(0, 1, 2),
    tol=TOL,
    cost=layer_norm_cost,
    partitioning=ways.LAYER_NORM_PARTITIONING,
)
"""Layer norm over the last axis."""
