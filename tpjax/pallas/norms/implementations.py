# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The ways to compute the norms, in order of preference, and how they split over devices."""

from typing import Any

import jax
from jax import Array

from tpjax.core.norms import layer_norm_reference, rms_norm_reference
from tpjax.core.operator import Implementation, Partitioning
from tpjax.pallas.norms import layer, rms


def _rms_norm_xla(x: Array, scale: Array | None, *, eps: float) -> Array:
    """Runs the reference; the backward pass keeps x and scale alone and forms the rest again."""

    def run(x: Array, scale: Any) -> Array:
        return rms_norm_reference(x, scale, eps=eps)

    return jax.checkpoint(run, prevent_cse=False)(x, scale)


def _layer_norm_xla(x: Array, scale: Array | None, bias: Array | None, *, eps: float) -> Array:
    """Runs the reference; the backward pass keeps its arguments alone and forms the rest again."""

    def run(x: Array, scale: Any, bias: Any) -> Array:
        return layer_norm_reference(x, scale, bias, eps=eps)

    return jax.checkpoint(run, prevent_cse=False)(x, scale, bias)


HOPPER = {"platforms": ("cuda",), "capabilities": ("9.0",)}

RMS_NORM = (
    Implementation("pallas", rms.rms_norm_pallas, rms.unsupported, **HOPPER),
    Implementation("xla", _rms_norm_xla),
)
"""Of `rms_norm`."""

LAYER_NORM = (
    Implementation("pallas", layer.layer_norm_pallas, layer.unsupported, **HOPPER),
    Implementation("xla", _layer_norm_xla),
)
"""Of `layer_norm`."""

RMS_NORM_PARTITIONING = Partitioning(inputs=("RD", "D"), outputs=("RD",), sharded="R")
LAYER_NORM_PARTITIONING = Partitioning(inputs=("RD", "D", "D"), outputs=("RD",), sharded="R")
