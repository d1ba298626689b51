# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The public functions `rms_norm` and `layer_norm`: checks at the door, then dispatch."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from tpjax.core.errors import message
from tpjax.pallas import dispatch
from tpjax.pallas.norms.implementations import (
    LAYER_NORM,
    LAYER_NORM_PARTITIONING,
    RMS_NORM,
    RMS_NORM_PARTITIONING,
)

DTYPES = ("bfloat16", "float16", "float32", "float64")


def rms_norm(
    x: Float[Array, "*B D"],
    scale: Float[Array, " D"] | None = None,
    *,
    eps: float = 1e-6,
    implementation: str | None = None,
) -> Float[Array, "*B D"]:
    """Returns each row of x divided by its root mean square, times scale.

        y = x / sqrt(mean(x^2) + eps) * scale

    Everything is computed in float32 (float64 for float64 x) and rounded once, to x's dtype.

    Args:
      x: [*B, D], bfloat16, float16, float32 or float64.
      scale: [D], of any of those dtypes; None multiplies by nothing.
      eps: a positive number, added to the mean square.
      implementation: "pallas" or "xla"; None chooses.

    Returns:
      [*B, D] of the dtype of `x`.

    Raises:
      ValueError: a wrong shape or value.
      TypeError: a wrong dtype or kind.
      UnsupportedError: the implementation asked for cannot run this call.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> x = jax.random.normal(jax.random.key(0), (2, 16, 64), jnp.bfloat16)
      >>> rms_norm(x, jnp.ones(64), eps=1e-5).dtype
      dtype(bfloat16)

    Source: Zhang and Sennrich 2019 (RMSNorm).
    """
    op = "rms_norm"
    _check_x(op, x)
    _check_vector(op, "scale", scale, x)
    options = {"eps": _eps(op, eps)}
    if not x.size:
        return jnp.zeros_like(x)
    operands = {"x": x, "scale": scale}
    return dispatch.call(op, RMS_NORM, operands, options, implementation, RMS_NORM_PARTITIONING)


def layer_norm(
    x: Float[Array, "*B D"],
    scale: Float[Array, " D"] | None = None,
    bias: Float[Array, " D"] | None = None,
    *,
    eps: float = 1e-6,
    implementation: str | None = None,
) -> Float[Array, "*B D"]:
    """Returns each row of x less its mean, over its standard deviation, times scale, plus bias.

        y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * scale + bias

    Everything is computed in float32 (float64 for float64 x) and rounded once, to x's dtype.

    Args:
      x: [*B, D], bfloat16, float16, float32 or float64.
      scale: [D], of any of those dtypes; None multiplies by nothing.
      bias: like `scale`; None adds nothing.
      eps: a positive number, added to the variance.
      implementation: "pallas" or "xla"; None chooses.

    Returns:
      [*B, D] of the dtype of `x`.

    Raises:
      ValueError: a wrong shape or value.
      TypeError: a wrong dtype or kind.
      UnsupportedError: the implementation asked for cannot run this call.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> x = jax.random.normal(jax.random.key(0), (2, 16, 64), jnp.bfloat16)
      >>> layer_norm(x, jnp.ones(64), jnp.zeros(64)).shape
      (2, 16, 64)

    Source: Ba, Kiros and Hinton 2016 (LayerNorm).
    """
    op = "layer_norm"
    _check_x(op, x)
    _check_vector(op, "scale", scale, x)
    _check_vector(op, "bias", bias, x)
    options = {"eps": _eps(op, eps)}
    if not x.size:
        return jnp.zeros_like(x)
    operands = {"x": x, "scale": scale, "bias": bias}
    split = LAYER_NORM_PARTITIONING
    return dispatch.call(op, LAYER_NORM, operands, options, implementation, split)


def _check_x(op: str, x: Any) -> None:
    _check_array(op, "x", x)
    if x.ndim < 1:
        raise ValueError(message(op, "x", "of rank 1 or more, [*B, D]", f"shape {x.shape}"))


def _check_array(op: str, name: str, x: Any) -> None:
    if not isinstance(x, jax.Array | np.ndarray):
        remedy = "Convert it with jax.numpy.asarray."
        raise TypeError(message(op, name, "an array", type(x).__name__, remedy))
    if str(x.dtype) not in DTYPES:
        raise TypeError(message(op, name, f"of dtype {', '.join(DTYPES)}", x.dtype, "Cast it."))


def _check_vector(op: str, name: str, vector: Any, x: Any) -> None:
    if vector is None:
        return
    _check_array(op, name, vector)
    if vector.shape != x.shape[-1:]:
        must = f"of shape {x.shape[-1:]}, one number for each feature of x"
        remedy = "Statistics are over the last axis; move yours there."
        raise ValueError(message(op, name, must, f"shape {vector.shape}", remedy))


def _eps(op: str, eps: Any) -> float:
    if isinstance(eps, bool) or not isinstance(eps, int | float | np.integer | np.floating):
        must = "a number known when tracing"
        raise TypeError(message(op, "eps", must, repr(eps), "Pass a Python float."))
    number = float(eps)
    if not (number > 0 and math.isfinite(number)):
        remedy = "It keeps a row of zeros from a division by zero; 1e-6 is usual."
        raise ValueError(message(op, "eps", "positive and finite", eps, remedy))
    return number
