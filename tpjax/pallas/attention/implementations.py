# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The ways to compute attention, in order of preference."""

from dataclasses import replace

from tpjax.core.operator import Implementation, Partitioning
from tpjax.pallas.attention.hopper import attend_hopper, unsupported
from tpjax.pallas.attention.portable import attend_xla

IMPLEMENTATIONS = (
    Implementation(
        "pallas", attend_hopper, unsupported, platforms=("cuda",), capabilities=("9.0",)
    ),
    Implementation("xla", attend_xla),
)

PARTITIONING = Partitioning(
    inputs=(
        *("BTHD", "BSKD", "BSKV", "BHTS", "BHTS"),
        *("B", "B", "B", "BT", "BS", "BH", "BH"),  # from query_seq_lengths to sinks
    ),
    outputs=("BTHV", "BTH", "BTH"),
    sharded="BHK",
    alike=("HK",),
)
"""Sequences and heads split freely; query heads together with the key heads that they read.

The results are the output, then lse and max: those that are asked for.
"""


def partitioning_of(return_lse: bool, return_max: bool) -> Partitioning:
    """Returns the partitioning of a call that returns these statistics."""
    return replace(PARTITIONING, outputs=PARTITIONING.outputs[: 1 + return_lse + return_max])
