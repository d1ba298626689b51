# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The public functions `rms_norm` and `layer_norm`: checks at the door, then dispatch."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from tpjax.pallas import dispatch
from tpjax.pallas.norms import door
from tpjax.pallas.norms import implementations as ways


def rms_norm(
    x: Float[Array, "*B D"],
    scale: Float[Array, " D"] | None = None,
    *,
    eps: float = 1e-6,
    scale_offset: float = 0.0,
    num_groups: int = 1,
    implementation: str | None = None,
) -> Float[Array, "*B D"]:
    """Returns each row of x divided by its root mean square, times scale.

        y = x / sqrt(mean(x^2) + eps) * (scale + scale_offset)

    Everything is computed in float32 (float64 for float64 x) and rounded once, to x's dtype. To
    normalise queries or keys [*B, T, H, D] pass them as they are: a row is a head of a token.
    Elements beyond 1e16 in size may have squares beyond float32: then the row is zeros.

    Args:
      x: [*B, D], bfloat16, float16, float32 or float64.
      scale: [D], of any of those dtypes; None multiplies by nothing.
      eps: a positive number, added to the mean square.
      scale_offset: a number added to scale: 1.0 for a scale that is stored as its distance from 1.
      num_groups: equal groups of neighbouring features, each divided by its own root mean square.
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
    door.check_x(op, x)
    door.check_vector(op, "scale", scale, x)
    options = door.options_of(op, eps, scale_offset, scale)
    options["num_groups"] = door.groups_of(op, num_groups, x)
    if not x.size:
        dispatch.check_name(op, ways.RMS_NORM, implementation)
        return jnp.zeros_like(x)
    operands, split = {"x": x, "scale": scale}, ways.RMS_NORM_PARTITIONING
    return dispatch.call(op, ways.RMS_NORM, operands, options, implementation, split)


def layer_norm(
    x: Float[Array, "*B D"],
    scale: Float[Array, " D"] | None = None,
    bias: Float[Array, " D"] | None = None,
    *,
    eps: float = 1e-6,
    scale_offset: float = 0.0,
    num_groups: int = 1,
    implementation: str | None = None,
) -> Float[Array, "*B D"]:
    """Returns each row of x less its mean, over its standard deviation, times scale, plus bias.

        y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * (scale + scale_offset) + bias

    Everything is computed in float32 (float64 for float64 x) and rounded once, to x's dtype.
    Elements beyond 1e16 in size may have squares beyond float32: then the row is zeros.

    Args:
      x: [*B, D], bfloat16, float16, float32 or float64.
      scale: [D], of any of those dtypes; None multiplies by nothing.
      bias: like `scale`; None adds nothing.
      eps: a positive number, added to the variance.
      scale_offset: a number added to scale: 1.0 for a scale that is stored as its distance from 1.
      num_groups: equal groups of neighbouring features, each with its own mean and variance.
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

    Source: Ba, Kiros and Hinton 2016 (LayerNorm); Wu and He 2018 (groups).
    """
    op = "layer_norm"
    door.check_x(op, x)
    door.check_vector(op, "scale", scale, x)
    door.check_vector(op, "bias", bias, x)
    options = door.options_of(op, eps, scale_offset, scale)
    options["num_groups"] = door.groups_of(op, num_groups, x)
    if not x.size:
        dispatch.check_name(op, ways.LAYER_NORM, implementation)
        return jnp.zeros_like(x)
    operands, split = {"x": x, "scale": scale, "bias": bias}, ways.LAYER_NORM_PARTITIONING
    return dispatch.call(op, ways.LAYER_NORM, operands, options, implementation, split)
