# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The ways to compute rotary embedding, in order of preference, and how they split over devices."""

from typing import Any

import jax
from jax import Array

from tpjax.core.operator import Implementation, Partitioning
from tpjax.core.rotary import rms_norm_rope_reference, rotary_embedding_reference
from tpjax.pallas.rope import kernels


def _rms_norm_rope_xla(
    x: Array, scale: Array | None, positions: Array, frequencies: Array, **options: Any
) -> Array:
    """Runs the reference; the backward pass keeps its arguments alone and forms the rest again."""

    def run(x: Array, scale: Any, positions: Array, frequencies: Array) -> Array:
        return rms_norm_rope_reference(x, scale, positions, frequencies, **options)

    return jax.checkpoint(run, prevent_cse=False)(x, scale, positions, frequencies)


HOPPER = {"platforms": ("cuda",), "capabilities": ("9.0",)}

ROTARY_EMBEDDING = (
    Implementation("pallas", kernels.rotary_embedding_pallas, kernels.unsupported, **HOPPER),
    Implementation("xla", rotary_embedding_reference),
)
"""Of `rotary_embedding`."""

RMS_NORM_ROPE = (
    Implementation("pallas", kernels.rms_norm_rope_pallas, kernels.unsupported, **HOPPER),
    Implementation("xla", _rms_norm_rope_xla),
)
"""Of `rms_norm_rope`."""

ROTARY_EMBEDDING_PARTITIONING = Partitioning(
    inputs=("BTHD", "BT", "F"), outputs=("BTHD",), sharded="BTH"
)
RMS_NORM_ROPE_PARTITIONING = Partitioning(
    inputs=("BTHD", "D", "BT", "F"), outputs=("BTHD",), sharded="BTH"
)
