# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The ways to look rows up, in order of preference, and how they split over devices."""

from jax import Array

from tpjax.core.lookup import embedding_reference
from tpjax.core.operator import Implementation, Partitioning
from tpjax.pallas.lookup import kernels


def _embedding_xla(ids: Array, table: Array) -> Array:
    return embedding_reference(table, ids)


HOPPER = {"platforms": ("cuda",), "capabilities": ("9.0",)}

EMBEDDING = (
    Implementation("pallas", kernels.embedding_pallas, kernels.unsupported, **HOPPER),
    Implementation("xla", _embedding_xla),
)
"""Of `embedding`."""

EMBEDDING_PARTITIONING = Partitioning(inputs=("B", "VD"), outputs=("BD",), sharded="BD")
"""A table split by rows would need a sum over devices."""
