# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The ways to compute matrix products, in order of preference, and how they split over devices."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from tpjax.core.norms import statistics_dtype
from tpjax.core.operator import Implementation, Partitioning
from tpjax.core.products import ACTIVATIONS, halves, matmul_reference
from tpjax.pallas.products import config, gated, plain


def _flat(x: Array) -> Array:
    """Returns [*R, D] as [R, D], unless its type says that it is split over devices.

    Gradients of weights that are summed over several axes XLA rounds on the way.
    """
    split = any(jax.typeof(x).sharding.spec)
    return x if split or x.ndim == 2 else x.reshape(-1, x.shape[-1])


def _matmul_xla(
    a: Array,
    b: Array,
    bias: Array | None,
    residual: Array | None,
    scale: Array | None,
    *,
    activation: str,
    out_dtype: Any,
) -> Array:
    if bias is None and residual is None and scale is None and activation == "linear":
        rows = _flat(a) if b.ndim == 2 else a
        out = jnp.matmul(rows, b, preferred_element_type=out_dtype)  # XLA rounds once, too
        return out.reshape(*a.shape[:-1], -1) if rows is not a else out
    return matmul_reference(a, b, bias, residual, scale, activation=activation, out_dtype=out_dtype)


def _gated_linear_unit_xla(x: Array, w: Array, w_up: Array | None, *, activation: str) -> Array:
    """Rounds gate and up to the dtype of x, as kernels do for the backward pass."""
    wide, rows = statistics_dtype(x.dtype), _flat(x)
    gate, up = ((rows @ half).astype(wide) for half in halves(w, w_up))
    hidden = (ACTIVATIONS[activation].value(gate) * up).astype(x.dtype)
    return hidden if rows is x else hidden.reshape(*x.shape[:-1], -1)


def _gated_mlp_xla(
    x: Array, w: Array, w_down: Array, w_up: Array | None, *, activation: str
) -> Array:
    rows = _flat(x)
    out = _gated_linear_unit_xla(rows, w, w_up, activation=activation) @ w_down
    return out if rows is x else out.reshape(x.shape)


HOPPER = {"platforms": ("cuda",), "capabilities": ("9.0",)}

MATMUL = (
    Implementation("pallas", plain.matmul_pallas, config.unsupported, **HOPPER),
    Implementation("xla", _matmul_xla),
)
"""Of `matmul`."""

GATED_LINEAR_UNIT = (
    Implementation("pallas", gated.gated_linear_unit_pallas, config.unsupported, **HOPPER),
    Implementation("xla", _gated_linear_unit_xla),
)
"""Of `gated_linear_unit`."""

GATED_MLP = (
    Implementation("pallas", gated.gated_mlp_pallas, config.unsupported, **HOPPER),
    Implementation("xla", _gated_mlp_xla),
)
"""Of `gated_mlp`."""

MATMUL_PARTITIONING = Partitioning(
    inputs=("BMK", "BKN", "BN", "BMN", "BN"), outputs=("BMN",), sharded="BMN"
)
"""Rows of a whole batch, or columns: a matrix shared by the batch splits by its columns alone."""


def gated_partitioning(*, stacked: bool, down: bool) -> Partitioning:
    """Returns how a gated operator splits: by rows, and by hidden features.

    Args:
      stacked: whether the weights of gate and up are one array.
      down: whether the product that leads back is part of it.
    """
    w = "RDGF" if stacked else "RDF"
    if down:
        return Partitioning(("RD", w, "RFD", "RDF"), ("RD",), "RF")
    return Partitioning(("RD", w, "RDF"), ("RF",), "RF")
