# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The public functions `add_rms_norm` and `add_layer_norm`: a norm of a residual stream."""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from tpjax.pallas import dispatch
from tpjax.pallas.norms import door
from tpjax.pallas.norms import implementations as ways


def add_rms_norm(
    x: Float[Array, "*B D"],
    residual: Float[Array, "*B D"],
    scale: Float[Array, " D"] | None = None,
    *,
    eps: float = 1e-6,
    scale_offset: float = 0.0,
    implementation: str | None = None,
) -> tuple[Float[Array, "*B D"], Float[Array, "*B D"]]:
    """Returns the RMS norm of x + residual, and x + residual.

        h = x + residual            y = h / sqrt(mean(h^2) + eps) * (scale + scale_offset)

    The same as `rms_norm` of the sum, to the bit where both have one dtype: the sum is formed in
    float32 (float64 if one is), rounded to the residual's dtype, and then normalised. Both results
    have gradients. Sums beyond 1e16 in size may have squares beyond float32: then y is zeros.

    Args:
      x: [*B, D], bfloat16, float16, float32 or float64: what a layer adds to the stream.
      residual: [*B, D], of any of those dtypes: the stream.
      scale: [D], of any of those dtypes; None multiplies by nothing.
      eps: a positive number, added to the mean square.
      scale_offset: a number added to scale: 1.0 for a scale that is stored as its distance from 1.
      implementation: "pallas" or "xla"; None chooses.

    Returns:
      [*B, D] of the dtype of `x`, for the next layer; and [*B, D] of the dtype of `residual`, the
      new residual.

    Raises:
      ValueError: a wrong shape or value.
      TypeError: a wrong dtype or kind.
      UnsupportedError: the implementation asked for cannot run this call.

    Example:
      >>> import jax.numpy as jnp
      >>> normed, new_residual = add_rms_norm(jnp.ones((2, 8)), jnp.ones((2, 8)))
      >>> round(float(normed[0, 0]), 5), float(new_residual[0, 0])
      (1.0, 2.0)

    Source: Zhang and Sennrich 2019 (RMSNorm).
    """
    op, operands = "add_rms_norm", {"x": x, "residual": residual, "scale": scale}
    options = _checked(op, operands, eps, scale_offset)
    if not x.size:
        dispatch.check_name(op, ways.ADD_RMS_NORM, implementation)
        return jnp.zeros_like(x), jnp.zeros_like(residual)
    split = ways.ADD_RMS_NORM_PARTITIONING
    return dispatch.call(op, ways.ADD_RMS_NORM, operands, options, implementation, split)


def add_layer_norm(
    x: Float[Array, "*B D"],
    residual: Float[Array, "*B D"],
    scale: Float[Array, " D"] | None = None,
    bias: Float[Array, " D"] | None = None,
    *,
    eps: float = 1e-6,
    scale_offset: float = 0.0,
    implementation: str | None = None,
) -> tuple[Float[Array, "*B D"], Float[Array, "*B D"]]:
    """Returns the layer norm of x + residual, and x + residual.

        h = x + residual
        y = (h - mean(h)) / sqrt(mean((h - mean(h))^2) + eps) * (scale + scale_offset) + bias

    Dtypes, rounding and range as of `add_rms_norm`; both results have gradients.

    Args:
      x: [*B, D], bfloat16, float16, float32 or float64: what a layer adds to the stream.
      residual: [*B, D], of any of those dtypes: the stream.
      scale: [D], of any of those dtypes; None multiplies by nothing.
      bias: like `scale`; None adds nothing.
      eps: a positive number, added to the variance.
      scale_offset: a number added to scale: 1.0 for a scale that is stored as its distance from 1.
      implementation: "pallas" or "xla"; None chooses.

    Returns:
      [*B, D] of the dtype of `x`, for the next layer; and [*B, D] of the dtype of `residual`, the
      new residual.

    Raises:
      ValueError: a wrong shape or value.
      TypeError: a wrong dtype or kind.
      UnsupportedError: the implementation asked for cannot run this call.

    Example:
      >>> import jax.numpy as jnp
      >>> normed, new_residual = add_layer_norm(jnp.array([1.0, 2.0]), jnp.array([0.0, 1.0]))
      >>> [round(float(v), 4) for v in normed], new_residual.tolist()
      ([-1.0, 1.0], [1.0, 3.0])

    Source: Ba, Kiros and Hinton 2016 (LayerNorm).
    """
    op = "add_layer_norm"
    operands = {"x": x, "residual": residual, "scale": scale, "bias": bias}
    options = _checked(op, operands, eps, scale_offset)
    if not x.size:
        dispatch.check_name(op, ways.ADD_LAYER_NORM, implementation)
        return jnp.zeros_like(x), jnp.zeros_like(residual)
    split = ways.ADD_LAYER_NORM_PARTITIONING
    return dispatch.call(op, ways.ADD_LAYER_NORM, operands, options, implementation, split)


def _checked(op: str, operands: dict[str, Any], eps: Any, scale_offset: Any) -> dict[str, Any]:
    """Returns the options of a call, all of whose arguments are checked."""
    x = operands["x"]
    door.check_x(op, x)
    door.check_residual(op, operands["residual"], x)
    for name in ("scale", "bias"):
        door.check_vector(op, name, operands.get(name), x)
    return door.options_of(op, eps, scale_offset, operands["scale"])
