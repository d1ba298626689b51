# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The public functions `rms_norm_fp8` and `layer_norm_fp8`: a norm whose result is quantised."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from tpjax.pallas import dispatch
from tpjax.pallas.norms import door
from tpjax.pallas.norms import implementations as ways


def rms_norm_fp8(
    x: Float[Array, "*B D"],
    scale: Float[Array, " D"] | None = None,
    quant_scale: Float[Array, ""] | None = None,
    *,
    eps: float = 1e-6,
    scale_offset: float = 0.0,
    implementation: str | None = None,
) -> tuple[Float[Array, "*B D"], Float[Array, "*B"]]:
    """Returns the RMS norm of x in float8_e4m3fn, and by what each row was divided for that.

        y = x / sqrt(mean(x^2) + eps) * (scale + scale_offset)
        values = round(y / q)       q = quant_scale, or max(abs(y)) / 448 of each row

    y is never written, nor rounded before. What is larger than 448 becomes 448; q of a row of zeros
    is 1. There is no gradient: rounding has none, and a straight-through one would be handed over
    in float8_e4m3fn. Use `rms_norm` where there is to be one.

    Args:
      x: [*B, D], bfloat16, float16, float32 or float64.
      scale: [D], of any of those dtypes; None multiplies by nothing.
      quant_scale: one number (), for all rows, of any of those dtypes, positive (which is checked
        where it is known when tracing); None: one for each row, which makes its largest value 448.
      eps: a positive number, added to the mean square.
      scale_offset: a number added to scale: 1.0 for a scale that is stored as its distance from 1.
      implementation: "pallas" or "xla"; None chooses.

    Returns:
      Values [*B, D], float8_e4m3fn, and q [*B], float32: values * q is about the norm.

    Raises:
      ValueError: a wrong shape or value.
      TypeError: a wrong dtype or kind; a derivative is asked for.
      UnsupportedError: the implementation asked for cannot run this call.

    Example:
      >>> import jax.numpy as jnp
      >>> values, q = rms_norm_fp8(jnp.array([[3.0, -4.0]]))
      >>> wide = values.astype(jnp.float32)
      >>> wide.tolist(), [round(float(x), 2) for x in (wide * q)[0]]
      ([[320.0, -448.0]], [0.81, -1.13])

    Source: Zhang and Sennrich 2019 (RMSNorm); Micikevicius et al. 2022 (float8_e4m3fn).
    """
    op, operands = "rms_norm_fp8", {"x": x, "scale": scale, "quant_scale": quant_scale}
    options, operands = _checked(op, operands, eps, scale_offset)
    if not x.size:
        dispatch.check_name(op, ways.RMS_NORM_FP8, implementation)
        return _empty(x)
    split = ways.RMS_NORM_FP8_PARTITIONING
    return dispatch.call(op, ways.RMS_NORM_FP8, operands, options, implementation, split)


def layer_norm_fp8(
    x: Float[Array, "*B D"],
    scale: Float[Array, " D"] | None = None,
    bias: Float[Array, " D"] | None = None,
    quant_scale: Float[Array, ""] | None = None,
    *,
    eps: float = 1e-6,
    scale_offset: float = 0.0,
    implementation: str | None = None,
) -> tuple[Float[Array, "*B D"], Float[Array, "*B"]]:
    """Returns the layer norm of x in float8_e4m3fn, and by what each row was divided for that.

        y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * (scale + scale_offset) + bias
        values = round(y / q)       q = quant_scale, or max(abs(y)) / 448 of each row

    Rounding and the lack of a gradient as of `rms_norm_fp8`.

    Args:
      x: [*B, D], bfloat16, float16, float32 or float64.
      scale: [D], of any of those dtypes; None multiplies by nothing.
      bias: like `scale`; None adds nothing.
      quant_scale: one number (), for all rows, of any of those dtypes, positive (which is checked
        where it is known when tracing); None: one for each row, which makes its largest value 448.
      eps: a positive number, added to the variance.
      scale_offset: a number added to scale: 1.0 for a scale that is stored as its distance from 1.
      implementation: "pallas" or "xla"; None chooses.

    Returns:
      Values [*B, D], float8_e4m3fn, and q [*B], float32: values * q is about the norm.

    Raises:
      ValueError: a wrong shape or value.
      TypeError: a wrong dtype or kind; a derivative is asked for.
      UnsupportedError: the implementation asked for cannot run this call.

    Example:
      >>> import jax.numpy as jnp
      >>> values, q = layer_norm_fp8(jnp.array([[1.0, 3.0]]))
      >>> values.astype(jnp.float32).tolist(), round(float(q[0]) * 448, 4)
      ([[-448.0, 448.0]], 1.0)

    Source: Ba, Kiros and Hinton 2016 (LayerNorm); Micikevicius et al. 2022 (float8_e4m3fn).
    """
    op = "layer_norm_fp8"
    operands = {"x": x, "scale": scale, "bias": bias, "quant_scale": quant_scale}
    options, operands = _checked(op, operands, eps, scale_offset)
    if not x.size:
        dispatch.check_name(op, ways.LAYER_NORM_FP8, implementation)
        return _empty(x)
    split = ways.LAYER_NORM_FP8_PARTITIONING
    return dispatch.call(op, ways.LAYER_NORM_FP8, operands, options, implementation, split)


def _checked(
    op: str, operands: dict[str, Any], eps: Any, scale_offset: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the options and operands of a call, all of whose arguments are checked."""
    x = operands["x"]
    door.check_x(op, x)
    for name in ("scale", "bias"):
        door.check_vector(op, name, operands.get(name), x)
    door.check_quant_scale(op, operands["quant_scale"])
    options = door.options_of(op, eps, scale_offset, operands["scale"])
    return options, _without_gradient(op, operands)


def _without_gradient(op: str, operands: dict[str, Any]) -> dict[str, Any]:
    """Returns the operands, of which no derivative can be taken."""

    @jax.custom_jvp
    def same(*arrays: Any) -> tuple[Any, ...]:
        return arrays

    @same.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        raise TypeError(
            f"{op}: x must not be differentiated; its result is rounded to float8_e4m3fn. Pass "
            "jax.lax.stop_gradient of every argument, or use the norm without _fp8."
        )

    return dict(zip(operands, same(*operands.values()), strict=True))


def _empty(x: Array) -> tuple[Array, Array]:
    return jnp.zeros(x.shape, jnp.float8_e4m3fn), jnp.ones(x.shape[:-1], jnp.float32)
