# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments that the norms have in common."""

import math
from typing import Any

import jax
import numpy as np

from tpjax.core._jax import is_tracer
from tpjax.core.errors import message

DTYPES = ("bfloat16", "float16", "float32", "float64")


def check_x(op: str, x: Any) -> None:
    """Raises unless x is an array of rows."""
    check_array(op, "x", x)
    if x.ndim < 1:
        raise ValueError(message(op, "x", "of rank 1 or more, [*B, D]", f"shape {x.shape}"))


def check_array(op: str, name: str, x: Any) -> None:
    """Raises unless x is an array of a dtype that the norms take."""
    if not isinstance(x, jax.Array | np.ndarray):
        remedy = "Convert it with jax.numpy.asarray."
        raise TypeError(message(op, name, "an array", type(x).__name__, remedy))
    if str(x.dtype) not in DTYPES:
        raise TypeError(message(op, name, f"of dtype {', '.join(DTYPES)}", x.dtype, "Cast it."))


def check_residual(op: str, residual: Any, x: Any) -> None:
    """Raises unless the residual is an array of the shape of x."""
    check_array(op, "residual", residual)
    if residual.shape != x.shape:
        remedy = "Broadcast it: the new residual has its shape."
        got = f"shape {residual.shape}"
        raise ValueError(message(op, "residual", f"of x's shape {x.shape}", got, remedy))


def check_vector(op: str, name: str, vector: Any, x: Any) -> None:
    """Raises unless the vector is None or has one number for each feature."""
    if vector is None:
        return
    check_array(op, name, vector)
    if vector.shape != x.shape[-1:]:
        must = f"of shape {x.shape[-1:]}, one number for each feature of x"
        remedy = "Statistics are over the last axis; move yours there."
        raise ValueError(message(op, name, must, f"shape {vector.shape}", remedy))


def check_quant_scale(op: str, quant_scale: Any) -> None:
    """Raises unless the scale is None or one number, positive as far as it is known."""
    if quant_scale is None:
        return
    check_array(op, "quant_scale", quant_scale)
    if quant_scale.shape:
        remedy = "Leave it out to have one for each row."
        must, got = "one number, of shape ()", f"shape {quant_scale.shape}"
        raise ValueError(message(op, "quant_scale", must, got, remedy))
    if not is_tracer(quant_scale) and not quant_scale > 0:
        remedy = "Values are divided by it."
        raise ValueError(message(op, "quant_scale", "positive", quant_scale, remedy))


def options_of(op: str, eps: Any, scale_offset: Any, scale: Any) -> dict[str, Any]:
    """Returns the checked options that all norms have."""
    eps, offset = _number(op, "eps", eps), _number(op, "scale_offset", scale_offset)
    if not (eps > 0 and math.isfinite(eps)):
        remedy = "It keeps a row of zeros from a division by zero; 1e-6 is usual."
        raise ValueError(message(op, "eps", "positive and finite", eps, remedy))
    if not math.isfinite(offset):
        remedy = "It is 1.0 where a scale is stored as what is to be added to 1."
        raise ValueError(message(op, "scale_offset", "finite", offset, remedy))
    if offset and scale is None:
        remedy = "Pass scale, or leave scale_offset out."
        raise ValueError(message(op, "scale_offset", "0.0 without a scale", offset, remedy))
    return {"eps": eps, "scale_offset": offset}


def groups_of(op: str, num_groups: Any, x: Any) -> int:
    """Returns the checked number of groups."""
    if isinstance(num_groups, bool) or not isinstance(num_groups, int | np.integer):
        must, got = "an integer known when tracing", repr(num_groups)
        raise TypeError(message(op, "num_groups", must, got, "Pass a Python int."))
    if num_groups < 1 or x.shape[-1] % num_groups:
        must = f"a positive divisor of x's {x.shape[-1]} features"
        remedy = "Groups are of equal size."
        raise ValueError(message(op, "num_groups", must, num_groups, remedy))
    return int(num_groups)


def _number(op: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        must = "a number known when tracing"
        raise TypeError(message(op, name, must, repr(value), "Pass a Python float."))
    return float(value)
