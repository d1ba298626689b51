# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The ways to compute attention, in order of preference."""

from tpjax.core.operator import Implementation
from tpjax.pallas.attention.portable import attend_xla

IMPLEMENTATIONS = (Implementation("xla", attend_xla),)
