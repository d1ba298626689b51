# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The ways to compute the norms, in order of preference, and how they split over devices."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from tpjax.core import norms as core
from tpjax.core.operator import Implementation, Partitioning
from tpjax.pallas import dispatch
from tpjax.pallas.norms import config as sizes
from tpjax.pallas.norms import passes
from tpjax.pallas.norms.kernels import Norm


def _xla(reference: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the reference; the backward pass keeps its arguments and forms the rest anew."""

    def run(*operands: Any, **options: Any) -> Any:
        return jax.checkpoint(partial(reference, **options), prevent_cse=False)(*operands)

    return run


def _xla_added(norm: Callable[..., Any]) -> Callable[..., Any]:
    """Returns x + residual and its norm; the backward pass keeps the sum, scale and bias alone."""

    def run(x: Array, residual: Array, *vectors: Any, **options: Any) -> tuple[Array, Array]:
        h = core.added(x, residual)
        wide = core.statistics_dtype(x.dtype, h.dtype)

        def normed(h: Array, *vectors: Any) -> Array:
            return norm(h.astype(wide), *vectors, **options).astype(x.dtype)

        return jax.checkpoint(normed, prevent_cse=False)(h, *vectors), h

    return run


def _job(op: str, x: Array, centred: bool, options: dict[str, Any]) -> passes.Job:
    config = options.get("config") or sizes.chosen(op, x)
    norm = Norm(centred, options["eps"], options["scale_offset"])
    interpret = dispatch.current_target().interpret
    return passes.Job(norm, options.get("num_groups", 1), interpret, config, op)


def rms_norm_pallas(x: Array, scale: Array | None, **options: Any) -> Any:
    """Runs the kernels on a checked call that they support: x [*B, D], at least one row."""
    job = _job("rms_norm", x, False, options)
    return passes.normed(passes.Operands(x, None, scale, None), job)


def layer_norm_pallas(x: Array, scale: Array | None, bias: Array | None, **options: Any) -> Any:
    """Runs the kernels on a checked call that they support: x [*B, D], at least one row."""
    job = _job("layer_norm", x, True, options)
    return passes.normed(passes.Operands(x, None, scale, bias), job)


def add_rms_norm_pallas(x: Array, residual: Array, scale: Array | None, **options: Any) -> Any:
    """Runs the kernels on a checked call that they support: x [*B, D], at least one row."""
    job = _job("add_rms_norm", x, False, options)
    return passes.normed(passes.Operands(x, residual, scale, None), job)


def add_layer_norm_pallas(
    x: Array, residual: Array, scale: Array | None, bias: Array | None, **options: Any
) -> Any:
    """Runs the kernels on a checked call that they support: x [*B, D], at least one row."""
    job = _job("add_layer_norm", x, True, options)
    return passes.normed(passes.Operands(x, residual, scale, bias), job)


def rms_norm_fp8_pallas(
    x: Array, scale: Array | None, quant_scale: Array | None, **options: Any
) -> tuple[Array, Array]:
    """Runs the kernel on a checked call that it supports: x [*B, D], at least one row."""
    return _fp8(_job("rms_norm_fp8", x, False, options), x, scale, None, quant_scale)


def layer_norm_fp8_pallas(
    x: Array, scale: Array | None, bias: Array | None, quant_scale: Array | None, **options: Any
) -> tuple[Array, Array]:
    """Runs the kernel on a checked call that it supports: x [*B, D], at least one row."""
    return _fp8(_job("layer_norm_fp8", x, True, options), x, scale, bias, quant_scale)


def _fp8(
    job: passes.Job, x: Array, scale: Array | None, bias: Array | None, quant_scale: Array | None
) -> tuple[Array, Array]:
    if quant_scale is None:
        values, scales = passes.quantised(passes.Operands(x, None, scale, bias), job, dynamic=True)
        assert scales is not None
        return values, scales
    # The division by a given scale is part of what the kernel multiplies by and adds.
    wide = quant_scale.astype(jnp.float32)
    ones = jnp.ones(x.shape[-1:], jnp.float32)
    scale = ones if scale is None else scale.astype(jnp.float32) + job.norm.scale_offset
    job = job._replace(norm=job.norm._replace(scale_offset=0.0))
    bias = None if bias is None else bias.astype(jnp.float32) / wide
    operands = passes.Operands(x, None, scale / wide, bias)
    values, _ = passes.quantised(operands, job, dynamic=False)
    return values, jnp.broadcast_to(wide, x.shape[:-1])


def _ways(
    run: Any, xla: Callable[..., Any], *, centred: bool, quantises: bool = False
) -> tuple[Implementation, ...]:
    unsupported = partial(sizes.unsupported, centred=centred, quantises=quantises)
    hopper: Any = {"platforms": ("cuda",), "capabilities": ("9.0",)}
    return (Implementation("pallas", run, unsupported, **hopper), Implementation("xla", xla))


RMS_NORM = _ways(rms_norm_pallas, _xla(core.rms_norm_reference), centred=False)
LAYER_NORM = _ways(layer_norm_pallas, _xla(core.layer_norm_reference), centred=True)
ADD_RMS_NORM = _ways(add_rms_norm_pallas, _xla_added(core.rms_norm_reference), centred=False)
ADD_LAYER_NORM = _ways(add_layer_norm_pallas, _xla_added(core.layer_norm_reference), centred=True)
RMS_NORM_FP8 = _ways(
    rms_norm_fp8_pallas, core.rms_norm_fp8_reference, centred=False, quantises=True
)
LAYER_NORM_FP8 = _ways(
    layer_norm_fp8_pallas, core.layer_norm_fp8_reference, centred=True, quantises=True
)


def _split(vectors: int, *, rows: int = 1, outputs: tuple[str, ...] = ("RD",)) -> Partitioning:
    return Partitioning(("RD",) * rows + ("D",) * vectors, outputs, sharded="R")


RMS_NORM_PARTITIONING = _split(1)
LAYER_NORM_PARTITIONING = _split(2)
ADD_RMS_NORM_PARTITIONING = _split(1, rows=2, outputs=("RD", "RD"))
ADD_LAYER_NORM_PARTITIONING = _split(2, rows=2, outputs=("RD", "RD"))
RMS_NORM_FP8_PARTITIONING = Partitioning(("RD", "D", "Q"), ("RD", "R"), sharded="R")
LAYER_NORM_FP8_PARTITIONING = Partitioning(("RD", "D", "D", "Q"), ("RD", "R"), sharded="R")
