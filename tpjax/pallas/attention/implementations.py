# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The ways to compute attention, in order of preference."""

from tpjax.core.operator import Implementation
from tpjax.pallas.attention.hopper import attend_hopper, unsupported
from tpjax.pallas.attention.portable import attend_xla

IMPLEMENTATIONS = (
    Implementation(
        "pallas", attend_hopper, unsupported, platforms=("cuda",), capabilities=("9.0",)
    ),
    Implementation("xla", attend_xla),
)
