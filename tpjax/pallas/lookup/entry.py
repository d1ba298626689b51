# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The public function `embedding`: checks at the door, then dispatch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from tpjax.core.errors import message
from tpjax.pallas import dispatch
from tpjax.pallas.lookup import implementations as ways

DTYPES = ("bfloat16", "float16", "float32", "float64")


def embedding(
    table: Float[Array, "V D"],
    ids: Int[Array, "*B"],
    *,
    implementation: str | None = None,
) -> Float[Array, "*B D"]:
    """Returns the rows of the table that the ids name.

    An id that is not in [0, V), a negative one too, names none: its row is zeros and has no
    gradient. So -1 can stand for padding.

    The gradient of the table is the sum of the rows' gradients in float32 (float64 for a float64
    table), rounded once. The kernel sums them in an order that follows from the ids alone: runs
    agree to the last bit, where XLA on a GPU adds with atomics.

    Args:
      table: [V, D], bfloat16, float16, float32 or float64.
      ids: [*B], integers.
      implementation: "pallas" or "xla"; None chooses.

    Returns:
      [*B, D] of the dtype of `table`.

    Raises:
      ValueError: a wrong shape.
      TypeError: a wrong dtype or kind.
      UnsupportedError: the implementation asked for cannot run this call.

    Example:
      >>> import jax.numpy as jnp
      >>> embedding(jnp.eye(3), jnp.array([2, -1])).tolist()
      [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]

    Source: Bengio et al. 2003 (a table of embeddings).
    """
    op = "embedding"
    for name, x in (("table", table), ("ids", ids)):
        if not isinstance(x, jax.Array | np.ndarray):
            remedy = "Convert it with jax.numpy.asarray."
            raise TypeError(message(op, name, "an array", type(x).__name__, remedy))
    if str(table.dtype) not in DTYPES:
        must = f"of dtype {', '.join(DTYPES)}"
        raise TypeError(message(op, "table", must, table.dtype, "Cast it."))
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(message(op, "ids", "integers", ids.dtype, "Cast them."))
    if table.ndim != 2:
        raise ValueError(message(op, "table", "of rank 2, [V, D]", f"shape {table.shape}"))
    if not table.size or not ids.size:
        dispatch.check_name(op, ways.EMBEDDING, implementation)
        return _nothing(table, ids)
    operands = {"ids": _narrowed(ids, table.shape[0]), "table": table}
    split = ways.EMBEDDING_PARTITIONING
    return dispatch.call(op, ways.EMBEDDING, operands, {}, implementation, split)


def _narrowed(ids: Any, num_rows: int) -> Any:
    """Returns ids as int32: -1 for one that does not fit there, as it names no row."""
    if ids.dtype.itemsize < 4:
        return jnp.asarray(ids).astype(jnp.int32)
    if ids.dtype == np.int32:
        return ids
    if isinstance(ids, np.ndarray):  # without x64 JAX would cut off what it has beyond 32 bits
        return jnp.asarray(np.where((ids >= 0) & (ids < num_rows), ids, -1).astype(np.int32))
    return jnp.where((ids >= 0) & (ids < num_rows), ids.astype(jnp.int32), -1)


def _nothing(table: Any, ids: Any) -> Array:
    """Returns the zeros that there are where no id is given, or no row."""
    return jnp.zeros((*ids.shape, table.shape[1]), table.dtype)
