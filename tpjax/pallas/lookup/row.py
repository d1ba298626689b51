# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The row of `embedding` in the table of operators."""

import math
from typing import Any

from tpjax.core.lookup import embedding_reference
from tpjax.core.operator import Cost, Op, Sample
from tpjax.pallas.lookup import implementations as ways
from tpjax.pallas.lookup.entry import embedding


def embedding_cost(table: Any, ids: Any, **options: Any) -> Cost:
    """Returns the cost of a call: a move for each element, of the rows that are named.

    The gradient adds what comes back for each, and writes the whole table.
    """
    del options
    count, features = math.prod(ids.shape), table.shape[1]
    read = min(count, table.shape[0]) * features * table.dtype.itemsize
    written = count * features * table.dtype.itemsize
    places, whole = count * ids.dtype.itemsize, table.shape[0] * features * table.dtype.itemsize
    adds = float(count * features)
    return Cost(adds, read + written + places, adds, written + places + whole)


EMBEDDING = Op(
    fn=embedding,
    reference=embedding_reference,
    implementations=ways.EMBEDDING,
    samples=(
        Sample(("f32[7,128]", "i32[150]"), below={"ids": 9}),
        Sample(("bf16[301,256]", "i32[2,31]"), below={"ids": 303}),
        Sample(("f16[1,128]", "i32[3]"), below={"ids": 2}),
        Sample(("f32[5,3]", "i32[2,2]"), below={"ids": 6}),
        Sample(("bf16[128256,4096]", "i32[2,8192]"), slow=True, below={"ids": 128256}),
    ),
    diff=(0,),
    tol={"float32": 1e-6, "bfloat16": 6e-3, "float16": 1e-3, "float64": 1e-12},
    cost=embedding_cost,
    partitioning=ways.EMBEDDING_PARTITIONING,
)
"""Rows of a table by their ids."""
