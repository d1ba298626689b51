# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments that the operators of this room have in common."""

import math
from typing import Any

import jax
import numpy as np

from tpjax.core.errors import message

DTYPES = ("bfloat16", "float16", "float32", "float64")


def check_x(op: str, x: Any, rank: int = 1) -> None:
    """Raises unless x is a floating array of at least that rank."""
    if not isinstance(x, jax.Array | np.ndarray):
        remedy = "Convert it with jax.numpy.asarray."
        raise TypeError(message(op, "x", "an array", type(x).__name__, remedy))
    if str(x.dtype) not in DTYPES:
        raise TypeError(message(op, "x", f"of dtype {', '.join(DTYPES)}", x.dtype, "Cast it."))
    if x.ndim < rank:
        raise ValueError(message(op, "x", f"of rank {rank} or more", f"shape {x.shape}"))


def axis_of(op: str, axis: Any, rank: int) -> int:
    """Returns the axis counted from the front."""
    if isinstance(axis, bool) or not isinstance(axis, int | np.integer):
        raise TypeError(message(op, "axis", "an integer", repr(axis)))
    if not -rank <= axis < rank:
        raise ValueError(message(op, "axis", f"from {-rank} to {rank - 1}", axis))
    return int(axis) % rank


def check_not_empty(op: str, x: Any, axes: tuple[int, ...]) -> None:
    """Raises where there is nothing along the axes to take the largest of."""
    if not all(x.shape[a] for a in axes):
        remedy = "Of nothing there is no largest element."
        raise ValueError(message(op, "x", "not empty along the axis", f"shape {x.shape}", remedy))


def finite(op: str, name: str, value: Any) -> float:
    """Returns a number that is known when tracing."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        must = "a number known when tracing"
        raise TypeError(message(op, name, must, repr(value), "Pass a Python float."))
    if not math.isfinite(value):
        raise ValueError(message(op, name, "finite", value))
    return float(value)
