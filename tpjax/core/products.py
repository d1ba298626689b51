# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Matrix products with what follows them: what they mean, in plain `jax.numpy`.

    matmul             activation(scale (a b) + bias) + residual
    gated_linear_unit  activation(x gate) * (x up)
    gated_mlp          gated_linear_unit(x, gate, up) down

Letters: B batch (any leading axes), M rows and N columns of a product, K what is summed over; R
rows, D features of a row, F hidden features.

Numerics, of these and of every implementation: products are summed in float32 (float64 where the
operands are float64); all that follows is computed so; the result is rounded once. Between its two
products `gated_mlp` rounds the hidden row to the dtype of x.

Source: Shazeer 2020 (GLU Variants Improve Transformer), equation 5, for the gated ones.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from tpjax.core.norms import statistics_dtype

Elementwise = Callable[[Array], Array]


class Activation(NamedTuple):
    """An elementwise function and its derivative, of arithmetic that kernels know."""

    value: Elementwise
    slope: Elementwise


def _sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + jnp.exp(-x))


def _swish_slope(x: Array) -> Array:
    s = _sigmoid(x)
    return s * (1.0 + x * (1.0 - s))


def _sigmoid_slope(x: Array) -> Array:
    s = _sigmoid(x)
    return s * (1.0 - s)


_GELU_SCALE = 1.5957691216057308  # 2 sqrt(2 / pi)
_GELU_CUBE = 0.044715


def _gelu(x: Array) -> Array:
    """Returns x (1 + tanh(u)) / 2, as x sigmoid(2 u)."""
    return x * _sigmoid(_GELU_SCALE * (x + _GELU_CUBE * x * x * x))


def _gelu_slope(x: Array) -> Array:
    s = _sigmoid(_GELU_SCALE * (x + _GELU_CUBE * x * x * x))
    return s + x * s * (1.0 - s) * (_GELU_SCALE * (1.0 + 3.0 * _GELU_CUBE * x * x))


_INV_SQRT2, _INV_SQRT_2PI = 0.7071067811865476, 0.3989422804014327


def _normal_cdf(x: Array) -> Array:
    return 0.5 + 0.5 * lax.erf(x * _INV_SQRT2)


def _gelu_exact_slope(x: Array) -> Array:
    return _normal_cdf(x) + x * (_INV_SQRT_2PI * jnp.exp(-0.5 * x * x))


def _one_where_positive(x: Array) -> Array:
    return jnp.where(x > 0.0, jnp.ones_like(x), jnp.zeros_like(x))


ACTIVATIONS: dict[str, Activation] = {
    "swish": Activation(lambda x: x * _sigmoid(x), _swish_slope),
    "gelu": Activation(_gelu, _gelu_slope),
    "gelu_exact": Activation(lambda x: x * _normal_cdf(x), _gelu_exact_slope),
    "relu": Activation(lambda x: jnp.maximum(x, 0.0), _one_where_positive),
    "relu_squared": Activation(
        lambda x: x * jnp.maximum(x, 0.0), lambda x: 2.0 * jnp.maximum(x, 0.0)
    ),
    "sigmoid": Activation(_sigmoid, _sigmoid_slope),
    "linear": Activation(lambda x: x, jnp.ones_like),
}
"""By name; "gelu" is the form with tanh, as `jax.nn.gelu` has it, "gelu_exact" that with erf."""


def _product(a: Array, b: Array) -> Array:
    wide = statistics_dtype(a.dtype)
    return jnp.matmul(a, b, preferred_element_type=wide)


def matmul_reference(
    a: Array,
    b: Array,
    bias: Array | None = None,
    residual: Array | None = None,
    scale: Array | None = None,
    *,
    activation: str = "linear",
    out_dtype: DTypeLike | None = None,
) -> Array:
    """Returns activation(scale (a b) + bias) + residual.

    Arguments as of `tpjax.pallas.matmul`.

    >>> import jax.numpy as jnp
    >>> matmul_reference(jnp.ones((1, 2)), jnp.ones((2, 1)), bias=jnp.array([3.0])).tolist()
    [[5.0]]
    """
    wide = statistics_dtype(a.dtype)
    y = _product(a, b)
    if scale is not None:
        y = y * scale.astype(wide)
    if bias is not None:
        y = y + bias.astype(wide)
    y = ACTIVATIONS[activation].value(y)
    if residual is not None:
        y = y + residual.astype(wide)
    return y.astype(a.dtype if out_dtype is None else out_dtype)


def halves(w: Array, w_up: Array | None) -> tuple[Array, Array]:
    """Returns the weights [D, F] of the gate and of what it gates."""
    return (w[:, 0], w[:, 1]) if w_up is None else (w, w_up)


def gated_linear_unit_reference(
    x: Array, w: Array, w_up: Array | None = None, *, activation: str = "swish"
) -> Array:
    """Returns activation(x gate) * (x up).

    Arguments as of `tpjax.pallas.gated_linear_unit`.

    >>> import jax.numpy as jnp
    >>> gated_linear_unit_reference(jnp.ones((1, 2)), jnp.ones((2, 2, 1)), activation="relu")
    Array([[4.]], dtype=float32)
    """
    gate, up = (_product(x, half) for half in halves(w, w_up))
    return (ACTIVATIONS[activation].value(gate) * up).astype(x.dtype)


def gated_mlp_reference(
    x: Array, w: Array, w_down: Array, w_up: Array | None = None, *, activation: str = "swish"
) -> Array:
    """Returns the gated linear unit of x, times the weights that lead back.

    Arguments as of `tpjax.pallas.gated_mlp`.

    >>> import jax.numpy as jnp
    >>> ones = jnp.ones((2, 2, 3))
    >>> gated_mlp_reference(jnp.ones((1, 2)), ones, jnp.ones((3, 2)), activation="linear").tolist()
    [[12.0, 12.0]]
    """
    hidden = gated_linear_unit_reference(x, w, w_up, activation=activation)
    return _product(hidden, w_down).astype(x.dtype)
