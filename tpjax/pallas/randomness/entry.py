# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The public function `dropout`: checks, then dispatch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Shaped

from tpjax.core.dropouts import row_numbers
from tpjax.core.errors import message
from tpjax.pallas import dispatch
from tpjax.pallas.plain import door
from tpjax.pallas.randomness import implementations as ways


def dropout(
    x: Float[Array, "*B D"],
    seed: Shaped[Array, " *W"],
    *,
    rate: float,
    implementation: str | None = None,
) -> Float[Array, "*B D"]:
    """Returns x with a random share of its elements set to 0, the others divided by what is kept.

    Whether an element stays follows from the seed and its place (row of all leading axes, feature)
    alone: the same on any number of devices, under jit or not, forward and backward. The backward
    pass makes the mask again; none is stored. Examples of a vmap over x alone have the same mask.

    Args:
      x: [*B, D], bfloat16, float16, float32 or float64; fewer than 2^32 rows.
      seed: a key of `jax.random.key`, or two unsigned 32-bit numbers, [2]. Never use one twice.
      rate: the share that is set to 0, from 0 (x itself) to 1 (all zeros); rounded to 1/65536.
      implementation: "pallas" or "xla"; None chooses. Both draw the same mask.

    Returns:
      [*B, D] of the dtype of `x`.

    Raises:
      ValueError: a wrong shape or value.
      TypeError: a wrong dtype or kind.
      UnsupportedError: the implementation asked for cannot run this call.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> y = dropout(jnp.ones((4, 8)), jax.random.key(0), rate=0.5)
      >>> sorted(set(y.ravel().tolist()))
      [0.0, 2.0]

    Source: Srivastava et al. 2014; Salmon et al. 2011 (Random123).
    """
    op = "dropout"
    door.check_x(op, x)
    share = door.finite(op, "rate", rate)
    if not 0 <= share <= 1:
        raise ValueError(message(op, "rate", "from 0 to 1", rate, "It is the share dropped."))
    words = _words(op, seed)
    if not x.size:
        dispatch.check_name(op, ways.DROPOUT, implementation)
        return jnp.asarray(x)
    operands = {"x": x, "seed": words, "rows": row_numbers(x.shape)}
    split = ways.DROPOUT_PARTITIONING
    return dispatch.call(op, ways.DROPOUT, operands, {"rate": share}, implementation, split)


def _words(op: str, seed: Any) -> Array:
    """Returns the two words of a seed."""
    must = "a key of jax.random.key, or two unsigned 32-bit numbers"
    if not isinstance(seed, jax.Array | np.ndarray):
        raise TypeError(message(op, "seed", must, type(seed).__name__))
    if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    if seed.dtype != np.uint32:
        raise TypeError(message(op, "seed", must, seed.dtype))
    if seed.shape != (2,):
        remedy = "Give one key; of keys of four words, two."
        raise ValueError(message(op, "seed", must, f"shape {seed.shape}", remedy))
    return jnp.asarray(seed)
