# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The ways to compute the losses, in order of preference."""

from tpjax.core.operator import Implementation
from tpjax.pallas.losses.chunked import cross_entropy_xla
from tpjax.pallas.losses.hopper import cross_entropy_hopper, unsupported

IMPLEMENTATIONS = (
    Implementation(
        "pallas", cross_entropy_hopper, unsupported, platforms=("cuda",), capabilities=("9.0",)
    ),
    Implementation("xla", cross_entropy_xla),
)
"""Of `linear_cross_entropy`."""
