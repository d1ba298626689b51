# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The rows of softmax and reductions in the table of operators."""

import math
from typing import Any

import jax

from tpjax.core.operator import Cost, Op, Sample, nbytes
from tpjax.core.reductions import argmax_reference, reduce_reference
from tpjax.core.softmaxes import log_softmax_reference, softmax_reference
from tpjax.pallas.plain import reductions, softmaxes

SOFTMAX_BY_XLA = (
    "XLA's code is one pass each way where a row fits one block: [16384, 4096] bfloat16 takes "
    "81 us forward, 195 with the gradient, 3.3 and 3.4 TB/s"
)
REDUCE_BY_XLA = (
    "XLA's code reads [16384, 4096] bfloat16 at 3.12 TB/s for a mean, 3.37 for a maximum"
)
ARGMAX_BY_XLA = "XLA's code reads [16384, 4096] bfloat16 in 46 us, 2.90 TB/s"
TOL = {"float32": 1e-6, "bfloat16": 6e-3, "float16": 1e-3, "float64": 1e-12}


def softmax_cost(x: Any, mask: Any = None, **options: Any) -> Cost:
    """Returns the cost of one call: 5 operations an element each way."""
    del options
    flops = 5.0 * math.prod(x.shape)
    return Cost(flops, nbytes((x, mask, x)), flops)


OPERATIONS = {"sum": 1, "mean": 1, "max": 1, "var": 4, "logsumexp": 4}
"""Of each kind, on an element."""


def reduce_cost(x: Any, **options: Any) -> Cost:
    """Returns the cost of one call, the same operations each way, x read once each way."""
    result = jax.eval_shape(lambda x: reduce_reference(x, **options), x)
    flops = float(OPERATIONS[options["kind"]] * math.prod(x.shape))
    return Cost(flops, nbytes((x, result)), flops)


def argmax_cost(x: Any, **options: Any) -> Cost:
    """Returns the cost of one call: a comparison an element, x read once."""
    result = jax.eval_shape(lambda x: argmax_reference(x, **options), x)
    return Cost(float(math.prod(x.shape)), nbytes((x, result)))


SOFTMAX = Op(
    fn=softmaxes.softmax,
    reference=softmax_reference,
    implementations=softmaxes.SOFTMAX,
    samples=(
        Sample(("f32[3,63]",)),
        Sample(("bf16[2,3,64]", "bool[3,1]")),
        Sample(("f32[2,7,5]", "bool[2,7,5]"), {"axis": 1, "softcap": 2.0}),
        Sample(("f16[1,1]",)),
        Sample(("bf16[16384,4096]",), slow=True),
        Sample(("bf16[512,131072]",), slow=True),
    ),
    diff=(0,),
    tol=TOL,
    cost=softmax_cost,
    partitioning=softmaxes.PARTITIONING,
    no_kernel=SOFTMAX_BY_XLA,
)
"""Softmax along an axis."""

LOG_SOFTMAX = Op(
    fn=softmaxes.log_softmax,
    reference=log_softmax_reference,
    implementations=softmaxes.LOG_SOFTMAX,
    samples=(
        Sample(("f32[3,63]",)),
        Sample(("bf16[2,7,64]",), {"axis": 0}),
        Sample(("f16[5,1]",), {"softcap": 2.0}),
        Sample(("bf16[16384,4096]",), slow=True),
    ),
    diff=(0,),
    tol=TOL,
    cost=softmax_cost,
    partitioning=softmaxes.PARTITIONING,
    no_kernel=SOFTMAX_BY_XLA,
)
"""The logarithm of softmax along an axis."""

REDUCE = Op(
    fn=reductions.reduce,
    reference=reduce_reference,
    implementations=reductions.REDUCE,
    samples=(
        Sample(("f32[3,63]",), {"kind": "sum"}),
        Sample(("bf16[2,7,5]",), {"kind": "mean", "axis": (0, 2)}),
        Sample(("f16[9,7]",), {"kind": "max", "axis": 0}),
        Sample(("f32[3,1031]",), {"kind": "var"}),
        Sample(("bf16[64,7]",), {"kind": "var", "axis": 0, "keepdims": True}),
        Sample(("f32[1,7]",), {"kind": "logsumexp"}),
        Sample(("bf16[16384,4096]",), {"kind": "sum"}, slow=True),
        Sample(("bf16[16384,4096]",), {"kind": "var", "axis": 0}, slow=True),
    ),
    diff=(0,),
    tol=TOL,
    cost=reduce_cost,
    partitioning=reductions.PARTITIONING,
    no_kernel=REDUCE_BY_XLA,
)
"""Sum, mean, maximum, variance or logsumexp along axes."""

ARGMAX = Op(
    fn=reductions.argmax,
    reference=argmax_reference,
    implementations=reductions.ARGMAX,
    samples=(
        Sample(("f32[3,63]",)),
        Sample(("bf16[5,7]",), {"axis": 0}),
        Sample(("bf16[16384,4096]",), slow=True),
    ),
    diff=(),
    tol=TOL,
    cost=argmax_cost,
    partitioning=reductions.PARTITIONING,
    no_kernel=ARGMAX_BY_XLA,
)
"""Where along an axis the largest element is."""
