# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Normalisation over the features of a row: what it means, in plain `jax.numpy`.

    rms_norm(x)      = x / sqrt(mean(x^2) + eps) * (scale + scale_offset)
    layer_norm(x)    = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * (scale + scale_offset)
                       + bias
    add_norm(x, res) = norm(h), h                                with h = x + res
    norm_fp8(x)      = round(norm(x) / q), q                     with q = max |norm(x)| / 448

Letters: B batch (any leading axes), D features of a row, G groups of D / G features; the means are
over the features of a group, the maximum over those of a row.

Numerics, of these and of every implementation: arrays are widened to float32 (float64 where one of
x and residual is float64); everything, the product with scale and the sum with bias included, is
computed so; a result is rounded once. h is rounded to the residual's dtype, and it is the rounded h
that is normalised: fused and apart give the same. The variance is centred, never E[x^2] - E[x]^2.

Source: Zhang and Sennrich 2019, equation 4 (RMSNorm); Ba, Kiros and Hinton 2016, equation 3; Wu and
He 2018 (groups); Micikevicius et al. 2022 (float8_e4m3fn).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

FP8_MAX = 448.0
"""The largest float8_e4m3fn."""


def statistics_dtype(*dtypes: DTypeLike) -> Any:
    """Returns the dtype of statistics and products: float32, or float64 if an input is float64."""
    return jnp.float64 if jnp.float64 in dtypes else jnp.float32


def rms_norm_reference(
    x: Array,
    scale: Array | None = None,
    *,
    eps: float = 1e-6,
    scale_offset: float = 0.0,
    num_groups: int = 1,
) -> Array:
    """Returns each row of x divided by its root mean square, times scale.

    Arguments as of `tpjax.pallas.rms_norm`.

    >>> import jax.numpy as jnp
    >>> [round(float(v), 4) for v in rms_norm_reference(jnp.array([3.0, 4.0]))]
    [0.8485, 1.1314]
    """
    xf = x.astype(statistics_dtype(x.dtype))
    return _affine(_over_rms(xf, eps, num_groups), scale, None, scale_offset).astype(x.dtype)


def layer_norm_reference(
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float = 1e-6,
    scale_offset: float = 0.0,
    num_groups: int = 1,
) -> Array:
    """Returns each row of x less its mean, over its standard deviation, times scale, plus bias.

    Arguments as of `tpjax.pallas.layer_norm`.

    >>> import jax.numpy as jnp
    >>> [round(float(v), 4) for v in layer_norm_reference(jnp.array([3.0, 4.0, 8.0]))]
    [-0.9258, -0.4629, 1.3887]
    """
    xf = x.astype(statistics_dtype(x.dtype))
    z = _over_rms(_centred(xf, num_groups), eps, num_groups)
    return _affine(z, scale, bias, scale_offset).astype(x.dtype)


def add_rms_norm_reference(
    x: Array,
    residual: Array,
    scale: Array | None = None,
    *,
    eps: float = 1e-6,
    scale_offset: float = 0.0,
) -> tuple[Array, Array]:
    """Returns the RMS norm of x + residual, and x + residual.

    Arguments as of `tpjax.pallas.add_rms_norm`.

    >>> import jax.numpy as jnp
    >>> normed, new_residual = add_rms_norm_reference(jnp.array([1.0, 3.0]), jnp.array([2.0, 1.0]))
    >>> [round(float(v), 4) for v in normed], new_residual.tolist()
    ([0.8485, 1.1314], [3.0, 4.0])
    """
    h = added(x, residual)
    z = _over_rms(h.astype(statistics_dtype(x.dtype, h.dtype)), eps, 1)
    return _affine(z, scale, None, scale_offset).astype(x.dtype), h


def add_layer_norm_reference(
    x: Array,
    residual: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    *,
    eps: float = 1e-6,
    scale_offset: float = 0.0,
) -> tuple[Array, Array]:
    """Returns the layer norm of x + residual, and x + residual.

    Arguments as of `tpjax.pallas.add_layer_norm`.
    """
    h = added(x, residual)
    z = _over_rms(_centred(h.astype(statistics_dtype(x.dtype, h.dtype)), 1), eps, 1)
    return _affine(z, scale, bias, scale_offset).astype(x.dtype), h


def rms_norm_fp8_reference(
    x: Array,
    scale: Array | None = None,
    quant_scale: Array | None = None,
    *,
    eps: float = 1e-6,
    scale_offset: float = 0.0,
) -> tuple[Array, Array]:
    """Returns the RMS norm of x in float8_e4m3fn, and the scale of each row.

    Arguments as of `tpjax.pallas.rms_norm_fp8`.
    """
    xf = x.astype(statistics_dtype(x.dtype))
    return _quantised(_affine(_over_rms(xf, eps, 1), scale, None, scale_offset), quant_scale)


def layer_norm_fp8_reference(
    x: Array,
    scale: Array | None = None,
    bias: Array | None = None,
    quant_scale: Array | None = None,
    *,
    eps: float = 1e-6,
    scale_offset: float = 0.0,
) -> tuple[Array, Array]:
    """Returns the layer norm of x in float8_e4m3fn, and the scale of each row.

    Arguments as of `tpjax.pallas.layer_norm_fp8`.
    """
    xf = x.astype(statistics_dtype(x.dtype))
    z = _over_rms(_centred(xf, 1), eps, 1)
    return _quantised(_affine(z, scale, bias, scale_offset), quant_scale)


def added(x: Array, residual: Array) -> Array:
    """Returns x + residual, added in float32 (float64), in the dtype of the residual."""
    wide = statistics_dtype(x.dtype, residual.dtype)
    return (x.astype(wide) + residual.astype(wide)).astype(residual.dtype)


def _over_rms(xf: Array, eps: float, num_groups: int) -> Array:
    return xf * jax.lax.rsqrt(_mean(jnp.square(xf), num_groups) + eps)


def _centred(xf: Array, num_groups: int) -> Array:
    return xf - _mean(xf, num_groups)


def _mean(xf: Array, num_groups: int) -> Array:
    """Returns the mean over each group, of a shape that broadcasts against xf [*B, D]."""
    if num_groups == 1:
        return jnp.mean(xf, axis=-1, keepdims=True)
    grouped = xf.reshape(*xf.shape[:-1], num_groups, xf.shape[-1] // num_groups)
    means = jnp.mean(grouped, axis=-1, keepdims=True)
    return jnp.broadcast_to(means, grouped.shape).reshape(xf.shape)


def _affine(z: Array, scale: Array | None, bias: Array | None, scale_offset: float) -> Array:
    if scale is not None:
        z = z * (scale.astype(z.dtype) + scale_offset)
    return z if bias is None else z + bias.astype(z.dtype)


def _quantised(y: Array, quant_scale: Array | None) -> tuple[Array, Array]:
    if quant_scale is None:
        largest = jnp.max(jnp.abs(y), axis=-1, keepdims=True)
        largest = jnp.where(largest == 0, FP8_MAX, largest)  # a row of zeros: by 1
        y, scales = y * (FP8_MAX / largest), largest / FP8_MAX
    else:
        wide = quant_scale.astype(y.dtype)
        y, scales = y / wide, jnp.broadcast_to(wide, (*y.shape[:-1], 1))
    values = jnp.clip(y, -FP8_MAX, FP8_MAX).astype(jnp.float8_e4m3fn)
    return values, scales[..., 0].astype(jnp.float32)
