# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The ways to compute attention, in order of preference."""

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
    inputs=("BTHD", "BSKD", "BSKD", "BHTS", "BHTS", "B", "B"),
    outputs=("BTHD",),
    sharded="BHK",
    alike=("HK",),
)
"""Sequences and heads split freely; query heads together with the key heads that they read."""
