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

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from tpjax.core.norms import statistics_dtype

Elementwise = Callable[[Array], Array]


class Activation(NamedTuple):
    """An elementwise function and its derivative, of arithmetic that kernels know."""

    value: Elementwise
    slope: Elementwise


_GELU_SCALE, _GELU_CUBE = 1.5957691216057308, 0.044715  # 2 sqrt(2 / pi)
_INV_SQRT2, _INV_SQRT_2PI = 0.7071067811865476, 0.3989422804014327


def activations(sigmoid: Elementwise, erf: Elementwise) -> dict[str, Activation]:
    """Returns all activations by name, of arithmetic, exponentials and these two functions.

    "gelu" is the form with tanh, as `jax.nn.gelu` has it, "gelu_exact" that with erf.
    """

    def swish_slope(x: Array) -> Array:
        s = sigmoid(x)
        return s * (1.0 + x * (1.0 - s))

    def sigmoid_slope(x: Array) -> Array:
        s = sigmoid(x)
        return s * (1.0 - s)

    def smooth_step(x: Array) -> Array:
        """Returns (1 + tanh(u)) / 2, which is sigmoid(2 u)."""
        return sigmoid(_GELU_SCALE * (x + _GELU_CUBE * x * x * x))

    def gelu_slope(x: Array) -> Array:
        s = smooth_step(x)
        return s + x * s * (1.0 - s) * (_GELU_SCALE * (1.0 + 3.0 * _GELU_CUBE * x * x))

    def below(x: Array) -> Array:
        """Returns the probability that a normal variable is less."""
        return 0.5 + 0.5 * erf(x * _INV_SQRT2)

    def gelu_exact_slope(x: Array) -> Array:
        return below(x) + x * (_INV_SQRT_2PI * jnp.exp(-0.5 * x * x))

    def positive(x: Array) -> Array:
        # No gradient at 0, as `is_positive` says; NaN stays.
        return jnp.where(x <= 0.0, jnp.zeros_like(x), x)

    def is_positive(x: Array) -> Array:
        return jnp.where(x > 0.0, jnp.ones_like(x), jnp.zeros_like(x))

    return {
        "linear": Activation(lambda x: x, jnp.ones_like),
        "relu": Activation(positive, is_positive),
        "relu_squared": Activation(lambda x: x * positive(x), lambda x: 2.0 * positive(x)),
        "sigmoid": Activation(sigmoid, sigmoid_slope),
        "swish": Activation(lambda x: x * sigmoid(x), swish_slope),
        "gelu": Activation(lambda x: x * smooth_step(x), gelu_slope),
        "gelu_exact": Activation(lambda x: x * below(x), gelu_exact_slope),
    }


ACTIVATIONS = activations(jax.nn.sigmoid, lax.erf)
"""By name."""


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
