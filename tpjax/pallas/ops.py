# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The table of operators: one row each. Tests, benchmarks and documents derive from it.

A new operator is a file (its meaning, code, gradient, limits) and a row here.
"""

from tpjax.core.operator import Op
from tpjax.pallas.attention.row import FLASH_ATTENTION
from tpjax.pallas.norms.rows import LAYER_NORM, RMS_NORM

OPS: tuple[Op, ...] = (
    RMS_NORM,
    LAYER_NORM,
    FLASH_ATTENTION,
)
"""Every operator; names are unique."""
