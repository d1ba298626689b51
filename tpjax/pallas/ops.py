# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The table of operators: one row each. Tests, benchmarks and documents derive from it.

A new operator is a file (its meaning, code, gradient, limits) and a row here.
"""

from tpjax.core.operator import Op
from tpjax.pallas.attention.row import FLASH_ATTENTION
from tpjax.pallas.lookup.row import EMBEDDING
from tpjax.pallas.losses.row import LINEAR_CROSS_ENTROPY
from tpjax.pallas.norms.rows import (
    ADD_LAYER_NORM,
    ADD_RMS_NORM,
    LAYER_NORM,
    LAYER_NORM_FP8,
    RMS_NORM,
    RMS_NORM_FP8,
)
from tpjax.pallas.plain.rows import ARGMAX, LOG_SOFTMAX, REDUCE, SOFTMAX
from tpjax.pallas.products.rows import GATED_LINEAR_UNIT, GATED_MLP, MATMUL
from tpjax.pallas.randomness.row import DROPOUT
from tpjax.pallas.rope.rows import RMS_NORM_ROPE, ROTARY_EMBEDDING

OPS: tuple[Op, ...] = (
    RMS_NORM,
    LAYER_NORM,
    ADD_RMS_NORM,
    ADD_LAYER_NORM,
    RMS_NORM_FP8,
    LAYER_NORM_FP8,
    FLASH_ATTENTION,
    LINEAR_CROSS_ENTROPY,
    MATMUL,
    GATED_LINEAR_UNIT,
    GATED_MLP,
    ROTARY_EMBEDDING,
    RMS_NORM_ROPE,
    EMBEDDING,
    SOFTMAX,
    LOG_SOFTMAX,
    REDUCE,
    ARGMAX,
    DROPOUT,
)
"""Every operator; names are unique."""
