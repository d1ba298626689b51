# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The ways to drop elements, in order of preference, and how they split over devices."""

import jax
from jax import Array

from tpjax.core.dropouts import dropped
from tpjax.core.operator import Implementation, Partitioning
from tpjax.pallas.randomness import kernels


def _dropout_xla(x: Array, seed: Array, rows: Array, *, rate: float) -> Array:
    """Runs the reference; the backward pass makes the mask again instead of keeping it."""
    return jax.checkpoint(lambda x, seed, rows: dropped(x, seed, rows, rate))(x, seed, rows)


HOPPER = {"platforms": ("cuda",), "capabilities": ("9.0",)}

DROPOUT = (
    Implementation("pallas", kernels.dropout_pallas, kernels.unsupported, **HOPPER),
    Implementation("xla", _dropout_xla),
)
"""Of `dropout`."""

DROPOUT_PARTITIONING = Partitioning(inputs=("BD", "W", "B"), outputs=("BD",), sharded="B")
