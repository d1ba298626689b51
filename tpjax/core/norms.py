# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Normalisation over the features of a row: what it means, in plain `jax.numpy`.

    rms_norm(x)   = x / sqrt(mean(x^2) + eps) * scale
    layer_norm(x) = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * scale + bias

Letters: B batch (any leading axes), D features of a row; the means are over D.

Numerics, of these and of every implementation: x, scale and bias are widened to float32 (float64
where x is float64); everything, the product with scale and the sum with bias included, is computed
so; the result is rounded once, to x's dtype. The variance is centred, never E[x^2] - E[x]^2.

Source: Zhang and Sennrich 2019, equation 4 (RMSNorm); Ba, Kiros and Hinton 2016, equation 3.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike


def statistics_dtype(dtype: DTypeLike) -> Any:
    """Returns the dtype of statistics and products: float32, or float64 for float64 inputs."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def rms_norm_reference(x: Array, scale: Array | None = None, *, eps: float = 1e-6) -> Array:
    """Returns each row of x divided by its root mean square, times scale.

    Arguments as of `tpjax.pallas.rms_norm`.

    >>> import jax.numpy as jnp
    >>> [round(float(v), 4) for v in rms_norm_reference(jnp.array([3.0, 4.0]))]
    [0.8485, 1.1314]
    """
    wide = statistics_dtype(x.dtype)
    xf = x.astype(wide)
    y = xf * jax.lax.rsqrt(jnp.mean(jnp.square(xf), axis=-1, keepdims=True) + eps)
    if scale is not None:
        y = y * scale.astype(wide)
    return y.astype(x.dtype)


def layer_norm_reference(
    x: Array, scale: Array | None = None, bias: Array | None = None, *, eps: float = 1e-6
) -> Array:
    """Returns each row of x less its mean, over its standard deviation, times scale, plus bias.

    Arguments as of `tpjax.pallas.layer_norm`.

    >>> import jax.numpy as jnp
    >>> [round(float(v), 4) for v in layer_norm_reference(jnp.array([3.0, 4.0, 8.0]))]
    [-0.9258, -0.4629, 1.3887]
    """
    wide = statistics_dtype(x.dtype)
    xf = x.astype(wide)
    centred = xf - jnp.mean(xf, axis=-1, keepdims=True)
    y = centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + eps)
    if scale is not None:
        y = y * scale.astype(wide)
    if bias is not None:
        y = y + bias.astype(wide)
    return y.astype(x.dtype)
