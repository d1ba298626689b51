# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The public functions `reduce` and `argmax`: checks, then dispatch."""

from typing import Any

import numpy as np
from jax import Array
from jaxtyping import Float, Int

from tpjax.core.errors import did_you_mean, message
from tpjax.core.operator import Implementation, Partitioning
from tpjax.core.reductions import KINDS, Kind, argmax_reference, reduce_reference
from tpjax.pallas import dispatch
from tpjax.pallas.plain import door

REDUCE = (Implementation("xla", reduce_reference),)
ARGMAX = (Implementation("xla", argmax_reference),)
PARTITIONING = Partitioning(inputs=("S",), outputs=("S",), sharded="")
"""XLA splits its own form; which axes stay is not known by their letters."""


def reduce(
    x: Float[Array, "*S"],
    *,
    kind: Kind,
    axis: int | tuple[int, ...] = -1,
    keepdims: bool = False,
    implementation: str | None = None,
) -> Float[Array, "*R"]:
    """Returns the sum, mean, maximum, variance or logsumexp of x along the axes.

    Everything is float32 (float64 for float64 x), rounded once. The variance is that of the
    elements given (divided by their number), of long rows in one pass by Welford's triples, never
    E[x^2] - E[x]^2. Runs agree to the last bit.

    Args:
      x: bfloat16, float16, float32 or float64, of rank 1 or more.
      kind: "sum", "mean", "max", "var" or "logsumexp".
      axis: one axis or several.
      keepdims: whether the axes stay, of size 1.
      implementation: "xla"; None chooses.

    Returns:
      An array of the dtype of `x`, without the axes.

    Raises:
      ValueError: a wrong axis or kind, or nothing to reduce where that has no value.
      TypeError: a wrong dtype or kind of argument.
      UnsupportedError: an implementation is asked for that there is not.

    Example:
      >>> import jax.numpy as jnp
      >>> reduce(jnp.array([[1.0, 3.0], [2.0, 2.0]]), kind="var").tolist()
      [1.0, 0.0]

    Source: Chan, Golub and LeVeque 1979 (Welford's triples).
    """
    op = "reduce"
    door.check_x(op, x)
    if kind not in KINDS:
        raise ValueError(f"reduce: unknown kind {kind!r}. {did_you_mean(str(kind), KINDS)}")
    if not isinstance(keepdims, bool | np.bool_):
        raise TypeError(message(op, "keepdims", "True or False", repr(keepdims)))
    given = axis if isinstance(axis, tuple) else (axis,)
    axes = tuple(door.axis_of(op, a, x.ndim) for a in given)
    if len(set(axes)) < len(axes) or not axes:
        raise ValueError(message(op, "axis", "one axis or several different ones", axis))
    if kind != "sum":
        door.check_not_empty(op, x, axes)
    options = {"kind": kind, "axis": axes, "keepdims": bool(keepdims)}
    return dispatch.call(op, REDUCE, {"x": x}, options, implementation, PARTITIONING)


def argmax(
    x: Float[Array, "*S"], *, axis: int = -1, implementation: str | None = None
) -> Int[Array, "*R"]:
    """Returns where along the axis x is largest: the first of equals; of NaN the first.

    Args:
      x: bfloat16, float16, float32 or float64, of rank 1 or more.
      axis: along which to look.
      implementation: "xla"; None chooses.

    Returns:
      int32, without the axis.

    Raises:
      ValueError: a wrong axis, or nothing along it.
      TypeError: a wrong dtype or kind of argument.
      UnsupportedError: an implementation is asked for that there is not.

    Example:
      >>> import jax.numpy as jnp
      >>> argmax(jnp.array([[1.0, 3.0, 3.0], [2.0, 0.0, 1.0]])).tolist()
      [1, 0]

    Source: `jax.lax.argmax`, which this is.
    """
    op = "argmax"
    door.check_x(op, x)
    at = door.axis_of(op, axis, x.ndim)
    door.check_not_empty(op, x, (at,))
    options: dict[str, Any] = {"axis": at}
    return dispatch.call(op, ARGMAX, {"x": x}, options, implementation, PARTITIONING)
