# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The rows of the norms in the table of operators."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from tpjax.core import norms as core
from tpjax.core.operator import Cost, Op, Sample, nbytes
from tpjax.pallas.norms import implementations as ways
from tpjax.pallas.norms.added import add_layer_norm, add_rms_norm
from tpjax.pallas.norms.entry import layer_norm, rms_norm
from tpjax.pallas.norms.fp8 import layer_norm_fp8, rms_norm_fp8

TOL = {"float32": 1e-6, "bfloat16": 6e-3, "float16": 1e-3, "float64": 1e-12}
FP8_TOL = dict.fromkeys(TOL, 6e-3)
"""A last bit before the rounding may lead to the neighbour, up to 1 in 8 away, in a few of many."""


def rms_norm_cost(x: Any, scale: Any = None, **options: Any) -> Cost:
    """Returns the cost of one forward call: 4 operations an element, x read and written once."""
    del options
    return Cost(4.0 * math.prod(x.shape), nbytes((x, scale, x)))


def layer_norm_cost(x: Any, scale: Any = None, bias: Any = None, **options: Any) -> Cost:
    """Returns the cost of one forward call: 7 operations an element, x read and written once."""
    del options
    return Cost(7.0 * math.prod(x.shape), nbytes((x, scale, bias, x)))


def add_rms_norm_cost(x: Any, residual: Any, scale: Any = None, **options: Any) -> Cost:
    """Returns the cost of one forward call: 5 operations an element, two arrays in and two out."""
    del options
    return Cost(5.0 * math.prod(x.shape), nbytes((x, residual, scale, x, residual)))


def add_layer_norm_cost(
    x: Any, residual: Any, scale: Any = None, bias: Any = None, **options: Any
) -> Cost:
    """Returns the cost of one forward call: 8 operations an element, two arrays in and two out."""
    del options
    return Cost(8.0 * math.prod(x.shape), nbytes((x, residual, scale, bias, x, residual)))


def _fp8(x: Any) -> tuple[Any, Any]:
    """Returns the results of a norm that quantises."""
    values = jax.ShapeDtypeStruct(x.shape, jnp.float8_e4m3fn)
    return values, jax.ShapeDtypeStruct(x.shape[:-1], jnp.float32)


def rms_norm_fp8_cost(x: Any, scale: Any = None, quant_scale: Any = None, **options: Any) -> Cost:
    """Returns the cost of one call: 6 operations an element, x read and a byte for each written."""
    del options
    return Cost(6.0 * math.prod(x.shape), nbytes((x, scale, quant_scale, *_fp8(x))))


def layer_norm_fp8_cost(
    x: Any, scale: Any = None, bias: Any = None, quant_scale: Any = None, **options: Any
) -> Cost:
    """Returns the cost of one call: 9 operations an element, x read and a byte for each written."""
    del options
    return Cost(9.0 * math.prod(x.shape), nbytes((x, scale, bias, quant_scale, *_fp8(x))))


RMS_NORM = Op(
    fn=rms_norm,
    reference=core.rms_norm_reference,
    implementations=ways.RMS_NORM,
    samples=(
        Sample(("f32[6,256]", "f32[256]")),
        Sample(("bf16[2,3,128]", "f32[128]"), {"eps": 1e-5, "scale_offset": 1.0}),
        Sample(("f16[5,512]", None), {"num_groups": 4}),
        Sample(("f32[37]", "bf16[37]"), {"eps": 1e-3}),
        Sample(("bf16[16384,4096]", "bf16[4096]"), slow=True),
        Sample(("bf16[65536,2048]", "bf16[2048]"), slow=True),
        Sample(("bf16[4,4096,32,128]", "bf16[128]"), slow=True),
    ),
    diff=(0, 1),
    tol=TOL,
    cost=rms_norm_cost,
    partitioning=ways.RMS_NORM_PARTITIONING,
)
"""Root mean square norm over the last axis, or groups of it."""

LAYER_NORM = Op(
    fn=layer_norm,
    reference=core.layer_norm_reference,
    implementations=ways.LAYER_NORM,
    samples=(
        Sample(("f32[6,256]", "f32[256]", "f32[256]")),
        Sample(("bf16[2,3,128]", "f32[128]", "bf16[128]"), {"eps": 1e-5, "num_groups": 2}),
        Sample(("f16[5,512]", None, None)),
        Sample(("f32[37]", "f32[37]", None), {"eps": 1e-3, "scale_offset": 1.0}),
        Sample(("bf16[16384,4096]", "bf16[4096]", "bf16[4096]"), slow=True),
    ),
    diff=(0, 1, 2),
    tol=TOL,
    cost=layer_norm_cost,
    partitioning=ways.LAYER_NORM_PARTITIONING,
)
"""Layer norm over the last axis, or groups of it."""

ADD_RMS_NORM = Op(
    fn=add_rms_norm,
    reference=core.add_rms_norm_reference,
    implementations=ways.ADD_RMS_NORM,
    samples=(
        Sample(("f32[6,256]", "f32[6,256]", "f32[256]")),
        Sample(("bf16[3,128]", "f32[3,128]", "bf16[128]"), {"eps": 1e-5, "scale_offset": 1.0}),
        Sample(("f32[2,37]", "f32[2,37]", None)),
        Sample(("bf16[16384,4096]", "bf16[16384,4096]", "bf16[4096]"), slow=True),
    ),
    diff=(0, 1, 2),
    tol=TOL,
    cost=add_rms_norm_cost,
    partitioning=ways.ADD_RMS_NORM_PARTITIONING,
)
"""A residual stream: its sum with x, and the root mean square norm of that."""

ADD_LAYER_NORM = Op(
    fn=add_layer_norm,
    reference=core.add_layer_norm_reference,
    implementations=ways.ADD_LAYER_NORM,
    samples=(
        Sample(("f32[6,256]", "f32[6,256]", "f32[256]", "f32[256]")),
        Sample(("bf16[3,37]", "bf16[3,37]", None, "f32[37]"), {"eps": 1e-5}),
        Sample(("bf16[16384,4096]", "bf16[16384,4096]", "bf16[4096]", "bf16[4096]"), slow=True),
    ),
    diff=(0, 1, 2, 3),
    tol=TOL,
    cost=add_layer_norm_cost,
    partitioning=ways.ADD_LAYER_NORM_PARTITIONING,
)
"""A residual stream: its sum with x, and the layer norm of that."""

RMS_NORM_FP8 = Op(
    fn=rms_norm_fp8,
    reference=core.rms_norm_fp8_reference,
    implementations=ways.RMS_NORM_FP8,
    samples=(
        Sample(("f32[6,256]", "f32[256]")),
        Sample(("bf16[3,37]", None, "f32[]")),
        Sample(("bf16[16384,4096]", "bf16[4096]"), slow=True),
    ),
    diff=(),
    tol=FP8_TOL,
    cost=rms_norm_fp8_cost,
    partitioning=ways.RMS_NORM_FP8_PARTITIONING,
)
"""Root mean square norm over the last axis, quantised to 8 bits."""

LAYER_NORM_FP8 = Op(
    fn=layer_norm_fp8,
    reference=core.layer_norm_fp8_reference,
    implementations=ways.LAYER_NORM_FP8,
    samples=(
        Sample(("f32[2,37]", "f32[37]", "f32[37]")),
        Sample(("bf16[3,128]", "f32[128]", None, "f32[]")),
        Sample(("bf16[16384,4096]", "bf16[4096]", "bf16[4096]"), slow=True),
    ),
    diff=(),
    tol=FP8_TOL,
    cost=layer_norm_fp8_cost,
    partitioning=ways.LAYER_NORM_FP8_PARTITIONING,
)
"""Layer norm over the last axis, quantised to 8 bits."""
