# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The public functions `rotary_embedding` and `rms_norm_rope`: checks, then dispatch."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from tpjax.core.errors import message
from tpjax.core.rotary import defaults
from tpjax.pallas import dispatch
from tpjax.pallas.rope import implementations as ways

DTYPES = ("bfloat16", "float16", "float32", "float64")


def rotary_embedding(
    x: Float[Array, "*B T H D"],
    positions: Int[Array, "*P T"] | None = None,
    frequencies: Float[Array, " F"] | None = None,
    *,
    interleaved: bool = False,
    amplitude: float = 1.0,
    implementation: str | None = None,
) -> Float[Array, "*B T H D"]:
    """Returns x with each pair of features turned by its token's position times its frequency.

        (x1, x2) -> amplitude (x1 cos - x2 sin, x2 cos + x1 sin)      angle = position frequency

    Angles and products are float32 (float64 for float64 x), the result is rounded once. The
    gradient of x turns back; positions and frequencies have none. Of D features the first 2F turn,
    the others stay as they are.

    Args:
      x: [*B, T, H, D], bfloat16, float16, float32 or float64: queries or keys.
      positions: [T], the same for all examples, or [*B, T] with any of B 1; integers. None:
        0 to T - 1.
      frequencies: [F], radians a token, 2F at most D; `tpjax.core.rotary.rotary_frequencies` makes
        them, scaled for long sequences or not. None: base 10000 over all D features.
      interleaved: whether pair i is features (2i, 2i + 1) instead of (i, i + F).
      amplitude: what turns is multiplied by; `Yarn.amplitude()`.
      implementation: "xla"; None chooses.

    Returns:
      [*B, T, H, D] of the dtype of `x`.

    Raises:
      ValueError: a wrong shape or value.
      TypeError: a wrong dtype or kind.
      UnsupportedError: the implementation asked for cannot run this call.

    Example:
      >>> import jax.numpy as jnp
      >>> from tpjax.core.rotary import Llama3, rotary_frequencies
      >>> frequencies = rotary_frequencies(128, base=500_000, scaling=Llama3())
      >>> rotary_embedding(jnp.ones((2, 16, 8, 128)), frequencies=frequencies).shape
      (2, 16, 8, 128)

    Source: Su et al. 2021 (RoFormer).
    """
    op = "rotary_embedding"
    operands = _operands(op, x, positions, frequencies)
    options = _options(op, interleaved, amplitude)
    if not x.size:
        dispatch.check_name(op, ways.ROTARY_EMBEDDING, implementation)
        return jnp.asarray(x)
    split = ways.ROTARY_EMBEDDING_PARTITIONING
    return dispatch.call(op, ways.ROTARY_EMBEDDING, operands, options, implementation, split)


def rms_norm_rope(
    x: Float[Array, "*B T H D"],
    scale: Float[Array, " D"] | None = None,
    positions: Int[Array, "*P T"] | None = None,
    frequencies: Float[Array, " F"] | None = None,
    *,
    eps: float = 1e-6,
    scale_offset: float = 0.0,
    interleaved: bool = False,
    amplitude: float = 1.0,
    implementation: str | None = None,
) -> Float[Array, "*B T H D"]:
    """Returns each head of x divided by its root mean square, times scale, turned by its position.

        rotary_embedding(rms_norm(x, scale, eps=eps, scale_offset=scale_offset), positions, ...)

    in one pass, and its gradient in one pass; nothing between is rounded. For the queries and keys
    of a model with QK-norm.

    Args:
      x: [*B, T, H, D], bfloat16, float16, float32 or float64.
      scale: [D], of any of those dtypes, the same for all heads; None multiplies by nothing.
      positions: as of `rotary_embedding`.
      frequencies: as of `rotary_embedding`.
      eps: a positive number, added to the mean square.
      scale_offset: a number added to scale: 1.0 for a scale that is stored as its distance from 1.
      interleaved: as of `rotary_embedding`.
      amplitude: as of `rotary_embedding`.
      implementation: "pallas" or "xla"; None chooses.

    Returns:
      [*B, T, H, D] of the dtype of `x`.

    Raises:
      ValueError: a wrong shape or value.
      TypeError: a wrong dtype or kind.
      UnsupportedError: the implementation asked for cannot run this call.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> query = jax.random.normal(jax.random.key(0), (2, 16, 8, 64), jnp.bfloat16)
      >>> rms_norm_rope(query, jnp.ones(64)).dtype
      dtype(bfloat16)

    Source: Dehghani et al. 2023 (QK-norm); Su et al. 2021 (RoFormer).
    """
    op = "rms_norm_rope"
    turning = _operands(op, x, positions, frequencies)
    if scale is not None:
        _check_floating(op, "scale", scale)
        if scale.shape != x.shape[-1:]:
            must = f"of shape {x.shape[-1:]}, one number for each feature of a head"
            raise ValueError(message(op, "scale", must, f"shape {scale.shape}"))
    options = {"eps": _positive(op, "eps", eps), **_options(op, interleaved, amplitude)}
    options["scale_offset"] = _finite(op, "scale_offset", scale_offset)
    if scale is None and options["scale_offset"]:
        must = "0 where there is no scale"
        raise ValueError(message(op, "scale_offset", must, scale_offset, "Pass a scale of zeros."))
    if not x.size:
        dispatch.check_name(op, ways.RMS_NORM_ROPE, implementation)
        return jnp.asarray(x)
    operands = {"x": turning.pop("x"), "scale": scale, **turning}
    split = ways.RMS_NORM_ROPE_PARTITIONING
    return dispatch.call(op, ways.RMS_NORM_ROPE, operands, options, implementation, split)


def _operands(op: str, x: Any, positions: Any, frequencies: Any) -> dict[str, Array]:
    """Returns the checked arrays, none of them left out."""
    _check_floating(op, "x", x)
    if x.ndim < 3:
        must = "of rank 3 or more, [*B, T, H, D]"
        raise ValueError(message(op, "x", must, f"shape {x.shape}", "Give it an axis of heads."))
    if frequencies is None and (x.shape[-1] % 2 or not x.shape[-1]):
        must = "given where a head's features cannot all be paired"
        raise ValueError(message(op, "frequencies", must, f"None for {x.shape[-1]} features"))
    if frequencies is not None:
        _check_floating(op, "frequencies", frequencies)
        if frequencies.ndim != 1 or not 0 < 2 * frequencies.shape[0] <= x.shape[-1]:
            must = f"of shape (F,), with 2F from 2 to the {x.shape[-1]} features of a head"
            raise ValueError(message(op, "frequencies", must, f"shape {frequencies.shape}"))
    if positions is not None:
        positions = _positions(op, x, positions)
    positions, frequencies = defaults(x, positions, frequencies)
    return {"x": x, "positions": positions, "frequencies": frequencies}


def _positions(op: str, x: Any, positions: Any) -> Array:
    """Returns the checked positions, of rank 1 or of the rank of x less two."""
    _check_kind(op, "positions", positions)
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise TypeError(message(op, "positions", "integers", positions.dtype, "Cast them."))
    shape, lead = positions.shape, x.shape[:-2]
    fits = 0 < len(shape) <= len(lead) and shape[-1] == lead[-1]
    last = zip(shape[::-1], lead[::-1], strict=False)
    if not fits or any(have not in (1, want) for have, want in last):
        must = f"of shape {lead[-1:]} or {lead}, where leading axes may be 1"
        raise ValueError(message(op, "positions", must, f"shape {shape}"))
    if 1 < len(shape) < len(lead):
        return positions.reshape((1,) * (len(lead) - len(shape)) + shape)
    return positions


def _check_kind(op: str, name: str, x: Any) -> None:
    if not isinstance(x, jax.Array | np.ndarray):
        remedy = "Convert it with jax.numpy.asarray."
        raise TypeError(message(op, name, "an array", type(x).__name__, remedy))


def _check_floating(op: str, name: str, x: Any) -> None:
    _check_kind(op, name, x)
    if str(x.dtype) not in DTYPES:
        raise TypeError(message(op, name, f"of dtype {', '.join(DTYPES)}", x.dtype, "Cast it."))


def _options(op: str, interleaved: Any, amplitude: Any) -> dict[str, Any]:
    if not isinstance(interleaved, bool | np.bool_):
        raise TypeError(message(op, "interleaved", "True or False", repr(interleaved)))
    return {
        "interleaved": bool(interleaved),
        "amplitude": _positive(op, "amplitude", amplitude),
    }


def _finite(op: str, name: str, value: Any) -> float:
    """Returns a number that is known when tracing."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        must = "a number known when tracing"
        raise TypeError(message(op, name, must, repr(value), "Pass a Python float."))
    if not math.isfinite(value):
        raise ValueError(message(op, name, "finite", value))
    return float(value)


def _positive(op: str, name: str, value: Any) -> float:
    number = _finite(op, name, value)
    if number <= 0:
        raise ValueError(message(op, name, "positive", value))
    return number
