# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Embedding: rows of a table by their ids, and the sum of rows that its gradient is.

    y[n]       = table[id[n]]              zeros where id[n] is not in [0, V)
    dtable[v]  = sum over n with id[n] = v of dy[n]

Letters: B batch (any leading axes), N ids in all, V rows of the table, D features.

Numerics: dtable is summed in float32 (float64 for a float64 table), rounded once to its dtype.
"""

from jax import Array

from tpjax.core.norms import statistics_dtype


def embedding_reference(table: Array, ids: Array) -> Array:
    """Returns the rows of the table that the ids name; zeros for an id that names none.

    Arguments as of `tpjax.pallas.embedding`.
    """
    wide = table.astype(statistics_dtype(table.dtype))
    rows = wide.at[ids].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    return rows.astype(table.dtype)


def gathered(table: Array, ids: Array) -> Array:
    """Returns `embedding_reference`, the table never widened."""
    return table.at[ids].get(mode="fill", fill_value=0, wrap_negative_indices=False)
