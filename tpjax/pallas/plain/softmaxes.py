# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The public functions `softmax` and `log_softmax`: checks, then dispatch."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float

from tpjax.core import softmaxes
from tpjax.core.autodiff import linear_map
from tpjax.core.errors import message
from tpjax.core.operator import Implementation, Partitioning
from tpjax.core.softmaxes import log_softmax_reference, softmax_reference
from tpjax.pallas import dispatch
from tpjax.pallas.plain import door


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _keeping_x(x: Array, mask: Array | None, rule: softmaxes.Derivative) -> Array:
    """Returns the reference's result; the backward pass keeps no elements but its arguments'.

    One pass each way: XLA's own derivative of it is two, and keeps the result in float32.
    """
    reference = log_softmax_reference if rule.logarithm else softmax_reference
    return reference(x, mask, axis=rule.axis, softcap=rule.softcap)


@_keeping_x.defjvp
def _(rule: softmaxes.Derivative, primals: Any, tangents: Any) -> tuple[Array, Array]:
    x, mask = primals
    y = _keeping_x(x, mask, rule)
    kept = softmaxes.worth_keeping(x, mask, rule.axis, rule.softcap)
    fixed, tree = jax.tree.flatten((x, mask, kept))

    def along(way: Any) -> Any:
        return lambda fixed, ts: [way(*tree.unflatten(fixed), *ts)]

    (moved,) = linear_map(along(rule.push), along(rule.pull), fixed, [tangents[0]], [y])
    return y, moved


def _xla(logarithm: bool) -> tuple[Implementation, ...]:
    def run(x: Array, mask: Array | None, *, axis: int, softcap: float | None) -> Array:
        return _keeping_x(x, mask, softmaxes.Derivative(axis, softcap, logarithm))

    return (Implementation("xla", run),)


SOFTMAX, LOG_SOFTMAX = _xla(False), _xla(True)
PARTITIONING = Partitioning(inputs=("RD", "RD"), outputs=("RD",), sharded="R")


def softmax(
    x: Float[Array, "*S"],
    mask: Bool[Array, "*M"] | None = None,
    *,
    axis: int = -1,
    softcap: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "*S"]:
    """Returns exp(x) over its sum along the axis, of what the mask shows.

    What the mask hides is 0, also all of a row that sees nothing; it has no gradient. Everything is
    float32 (float64 for float64 x), rounded once.

    Args:
      x: bfloat16, float16, float32 or float64, of any shape.
      mask: booleans, True where visible, of a shape that broadcasts to that of `x`.
      axis: along which it sums to 1.
      softcap: a positive bound; x is replaced by softcap tanh(x / softcap) before.
      implementation: "xla"; None chooses.

    Returns:
      An array of the shape and dtype of `x`.

    Raises:
      ValueError: a wrong shape or value.
      TypeError: a wrong dtype or kind.
      UnsupportedError: an implementation is asked for that there is not.

    Example:
      >>> import jax.numpy as jnp
      >>> softmax(jnp.array([1.0, 1.0, 9.0]), jnp.array([True, True, False])).tolist()
      [0.5, 0.5, 0.0]

    Source: Bridle 1990.
    """
    return _call("softmax", SOFTMAX, x, mask, axis, softcap, implementation)


def log_softmax(
    x: Float[Array, "*S"],
    mask: Bool[Array, "*M"] | None = None,
    *,
    axis: int = -1,
    softcap: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "*S"]:
    """Returns x less the logarithm of the sum of exp(x) along the axis, of what the mask shows.

    What the mask hides is minus infinity; it has no gradient. Otherwise as `softmax`.

    Args:
      x: bfloat16, float16, float32 or float64, of any shape.
      mask: booleans, True where visible, of a shape that broadcasts to that of `x`.
      axis: along which its exponential sums to 1.
      softcap: a positive bound; x is replaced by softcap tanh(x / softcap) before.
      implementation: "xla"; None chooses.

    Returns:
      An array of the shape and dtype of `x`.

    Raises:
      ValueError: a wrong shape or value.
      TypeError: a wrong dtype or kind.
      UnsupportedError: an implementation is asked for that there is not.

    Example:
      >>> import jax.numpy as jnp
      >>> [round(float(p), 4) for p in log_softmax(jnp.array([1.0, 1.0]))]
      [-0.6931, -0.6931]

    Source: as `softmax`.
    """
    return _call("log_softmax", LOG_SOFTMAX, x, mask, axis, softcap, implementation)


def _call(
    op: str, ways: Any, x: Any, mask: Any, axis: Any, softcap: Any, implementation: str | None
) -> Array:
    door.check_x(op, x)
    if mask is not None:
        if not isinstance(mask, jax.Array | np.ndarray) or mask.dtype != np.bool_:
            got = getattr(mask, "dtype", type(mask).__name__)
            raise TypeError(message(op, "mask", "an array of booleans", got, "True is visible."))
        fits = mask.ndim <= x.ndim and all(
            have in (1, want) for have, want in zip(mask.shape[::-1], x.shape[::-1], strict=False)
        )
        if not fits:
            must = f"of a shape that broadcasts to {x.shape}"
            raise ValueError(message(op, "mask", must, f"shape {mask.shape}"))
        mask = mask.reshape((1,) * (x.ndim - mask.ndim) + mask.shape)
    options = {"axis": door.axis_of(op, axis, x.ndim), "softcap": None}
    if softcap is not None:
        options["softcap"] = door.finite(op, "softcap", softcap)
        if options["softcap"] <= 0:
            raise ValueError(message(op, "softcap", "positive", softcap, "Leave it out for none."))
    if not x.size:
        dispatch.check_name(op, ways, implementation)
        return jnp.asarray(x)
    return dispatch.call(op, ways, {"x": x, "mask": mask}, options, implementation, PARTITIONING)
