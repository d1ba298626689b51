# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The public functions `matmul`, `gated_linear_unit` and `gated_mlp`: checks, then dispatch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from tpjax.core.errors import did_you_mean, message
from tpjax.core.norms import statistics_dtype
from tpjax.core.products import ACTIVATIONS
from tpjax.pallas import dispatch
from tpjax.pallas.products.implementations import (
    GATED_LINEAR_UNIT,
    GATED_MLP,
    MATMUL,
    MATMUL_PARTITIONING,
    gated_partitioning,
)

DTYPES = ("bfloat16", "float16", "float32", "float64")


def matmul(
    a: Float[Array, "*B M K"],
    b: Float[Array, "*C K N"],
    bias: Float[Array, " N"] | None = None,
    residual: Float[Array, "*B M N"] | None = None,
    scale: Float[Array, "..."] | float | None = None,
    *,
    activation: str = "linear",
    out_dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> Float[Array, "*B M N"]:
    """Returns the matrix product of a and b, scaled, biased, activated, added to, rounded once.

        out = activation(scale (a b) + bias) + residual

    Sums and all that follows are float32 (float64 for float64 operands).

    Args:
      a: [*B, M, K], bfloat16, float16, float32 or float64.
      b: [K, N], shared by the batch, or [*B, K, N]; of the dtype of a.
      bias: [N], of any of those dtypes; None adds nothing.
      residual: [*B, M, N], likewise.
      scale: [N], or one number, [] or Python's; None multiplies by nothing.
      activation: "linear", "relu", "relu_squared", "sigmoid", "swish", "gelu" (by tanh) or
        "gelu_exact".
      out_dtype: of the result; None: that of a.
      implementation: "pallas" or "xla"; None chooses.

    Returns:
      [*B, M, N].

    Raises:
      ValueError: a wrong shape or value.
      TypeError: a wrong dtype or kind.
      UnsupportedError: the implementation asked for cannot run this call.

    Example:
      >>> import jax.numpy as jnp
      >>> matmul(jnp.ones((2, 3)), jnp.ones((3, 4)), jnp.ones(4), activation="relu")[0, 0]
      Array(4., dtype=float32)
    """
    op = "matmul"
    _check_matrix(op, "a", a)
    _check_factor(op, "b", b, a, "a")
    if b.ndim < 2 or b.shape[-2] != a.shape[-1]:
        must = f"of shape [K, N] or [*B, K, N], K = {a.shape[-1]} being the last axis of a"
        raise ValueError(message(op, "b", must, f"shape {b.shape}", "Transpose one of them."))
    if b.ndim > 2 and b.shape[:-2] != a.shape[:-2]:
        must = f"of rank 2, or of the batch {a.shape[:-2]} of a"
        remedy = "Broadcast the smaller one with jax.numpy.broadcast_to."
        raise ValueError(message(op, "b", must, f"shape {b.shape}", remedy))
    shape = (*a.shape[:-1], b.shape[-1])
    factor = _number_as_array(scale, a)
    for name, x, right in (
        ("bias", bias, (shape[-1:],)),
        ("residual", residual, (shape,)),
        ("scale", factor, (shape[-1:], ())),
    ):
        if x is None:
            continue
        _check_array(op, name, x)
        if x.shape not in right:
            must = "of shape " + " or ".join(map(str, right))
            raise ValueError(message(op, name, must, f"shape {x.shape}"))
    out = _out_dtype(op, out_dtype, a)
    _check_activation(op, activation)
    if 0 in shape:
        dispatch.check_name(op, MATMUL, implementation)
        return jnp.zeros(shape, out)
    factor = None if factor is None else jnp.reshape(factor, (-1,))
    operands = {"a": a, "b": b, "bias": bias, "residual": residual, "scale": factor}
    options = {"activation": activation, "out_dtype": out}
    return dispatch.call(op, MATMUL, operands, options, implementation, MATMUL_PARTITIONING)


def gated_linear_unit(
    x: Float[Array, "*R D"],
    w: Float[Array, "D 2 F"] | Float[Array, "D F"],
    w_up: Float[Array, "D F"] | None = None,
    *,
    activation: str = "swish",
    implementation: str | None = None,
) -> Float[Array, "*R F"]:
    """Returns the product of x with one matrix, activated, times that with another.

        out = activation(x gate) * (x up)

    With "swish" it is SwiGLU, with "gelu" GEGLU, with "relu" ReGLU, with "sigmoid" GLU, with
    "linear" the bilinear unit. Sums and what follows are float32 (float64 for float64 x). The
    gradient takes gate and up rounded to the dtype of x.

    Args:
      x: [*R, D], bfloat16, float16, float32 or float64.
      w: [D, 2, F], gate then up; or, where `w_up` is given, the gate [D, F]. Of the dtype of x.
      w_up: [D, F] or None.
      activation: a name that `matmul` takes.
      implementation: "pallas" or "xla"; None chooses.

    Returns:
      [*R, F] of the dtype of x.

    Raises:
      ValueError: a wrong shape or value.
      TypeError: a wrong dtype or kind.
      UnsupportedError: the implementation asked for cannot run this call.

    Example:
      >>> import jax.numpy as jnp
      >>> gated_linear_unit(jnp.ones((5, 8)), jnp.ones((8, 2, 4)), activation="relu").shape
      (5, 4)

    Source: Shazeer 2020 (GLU Variants Improve Transformer), equation 5.
    """
    op = "gated_linear_unit"
    width = _check_gated(op, x, w, w_up, activation)
    if not x.size or not width:
        dispatch.check_name(op, GATED_LINEAR_UNIT, implementation)
        return jnp.zeros((*x.shape[:-1], width), x.dtype)
    operands, split = {"x": x, "w": w, "w_up": w_up}, gated_partitioning
    partitioning = split(stacked=w_up is None, down=False)
    options = {"activation": activation}
    return dispatch.call(op, GATED_LINEAR_UNIT, operands, options, implementation, partitioning)


def gated_mlp(
    x: Float[Array, "*R D"],
    w: Float[Array, "D 2 F"] | Float[Array, "D F"],
    w_down: Float[Array, "F D"],
    w_up: Float[Array, "D F"] | None = None,
    *,
    activation: str = "swish",
    implementation: str | None = None,
) -> Float[Array, "*R D"]:
    """Returns the gated linear unit of x, times the matrix that leads back to the features of x.

        out = (activation(x gate) * (x up)) down

    Hidden rows are rounded to the dtype of x; they are not kept for the gradient, which forms them
    again from gate and up.

    Args:
      x, w, w_up, activation, implementation: as of `gated_linear_unit`.
      w_down: [F, D], of the dtype of x.

    Returns:
      [*R, D] of the dtype of x.

    Raises:
      ValueError: a wrong shape or value.
      TypeError: a wrong dtype or kind.
      UnsupportedError: the implementation asked for cannot run this call.

    Example:
      >>> import jax.numpy as jnp
      >>> gated_mlp(jnp.ones((5, 8)), jnp.ones((8, 2, 4)), jnp.ones((4, 8))).shape
      (5, 8)

    Source: Shazeer 2020 (GLU Variants Improve Transformer), equation 6.
    """
    op = "gated_mlp"
    width = _check_gated(op, x, w, w_up, activation)
    _check_factor(op, "w_down", w_down, x, "x")
    if w_down.shape != (width, x.shape[-1]):
        must = f"of shape {(width, x.shape[-1])}, [F, D]"
        raise ValueError(message(op, "w_down", must, f"shape {w_down.shape}", "Transpose it."))
    if not x.size or not width:
        dispatch.check_name(op, GATED_MLP, implementation)
        return jnp.zeros(x.shape, x.dtype)
    operands = {"x": x, "w": w, "w_down": w_down, "w_up": w_up}
    partitioning = gated_partitioning(stacked=w_up is None, down=True)
    options = {"activation": activation}
    return dispatch.call(op, GATED_MLP, operands, options, implementation, partitioning)


def _check_gated(op: str, x: Any, w: Any, w_up: Any, activation: Any) -> int:
    """Checks what both gated operators take; returns F."""
    _check_array(op, "x", x)
    if x.ndim < 1:
        raise ValueError(message(op, "x", "of rank 1 or more, [*R, D]", f"shape {x.shape}"))
    _check_activation(op, activation)
    _check_factor(op, "w", w, x, "x")
    features = x.shape[-1]
    if w_up is None:
        if w.ndim != 3 or w.shape[:2] != (features, 2):
            must = f"of shape [{features}, 2, F], gate and up, where w_up is not given"
            remedy = "Stack them with jax.numpy.stack(..., axis=1), or pass up as w_up."
            raise ValueError(message(op, "w", must, f"shape {w.shape}", remedy))
        return w.shape[2]
    _check_factor(op, "w_up", w_up, x, "x")
    if w.ndim != 2 or w.shape[0] != features:
        must = f"of shape [{features}, F] where w_up is given"
        raise ValueError(message(op, "w", must, f"shape {w.shape}", "Transpose it."))
    if w_up.shape != w.shape:
        raise ValueError(message(op, "w_up", f"of the shape {w.shape} of w", f"shape {w_up.shape}"))
    return w.shape[1]


def _check_array(op: str, name: str, x: Any) -> None:
    if not isinstance(x, jax.Array | np.ndarray):
        remedy = "Convert it with jax.numpy.asarray."
        raise TypeError(message(op, name, "an array", type(x).__name__, remedy))
    if str(x.dtype) not in DTYPES:
        raise TypeError(message(op, name, f"of dtype {', '.join(DTYPES)}", x.dtype, "Cast it."))


def _number_as_array(x: Any, like: Any) -> Any:
    is_number = isinstance(x, int | float) and not isinstance(x, bool)
    return jnp.asarray(x, statistics_dtype(like.dtype)) if is_number else x


def _check_matrix(op: str, name: str, x: Any) -> None:
    _check_array(op, name, x)
    if x.ndim < 2:
        raise ValueError(message(op, name, "of rank 2 or more, [*B, M, K]", f"shape {x.shape}"))


def _check_factor(op: str, name: str, x: Any, first: Any, first_name: str) -> None:
    _check_array(op, name, x)
    if x.dtype != first.dtype:
        must = f"of the dtype of {first_name}, {first.dtype}"
        raise TypeError(message(op, name, must, x.dtype, "Cast one of them."))


def _check_activation(op: str, activation: Any) -> None:
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        names = {"silu": "It is called 'swish' here."}
        remedy = names.get(str(activation)) or did_you_mean(str(activation), ACTIVATIONS)
        must = "the name of an activation"
        raise ValueError(message(op, "activation", must, repr(activation), remedy))


def _out_dtype(op: str, asked: Any, a: Any) -> np.dtype:
    must = f"of {', '.join(DTYPES)}, or None"
    try:
        dtype = np.dtype(a.dtype if asked is None else asked)
    except TypeError:
        raise TypeError(message(op, "out_dtype", must, repr(asked))) from None
    if dtype.name not in DTYPES:
        raise TypeError(message(op, "out_dtype", must, dtype.name))
    return dtype
