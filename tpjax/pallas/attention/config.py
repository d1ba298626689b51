# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Tile sizes of the attention kernels: they change speed, never meaning."""

from dataclasses import dataclass

from tpjax.core.operator import Interpret

ROWS = 64
"""Rows of one warpgroup's tile: the height of the tensor cores' instruction."""


def compute_registers(warpgroups: int) -> int:
    """Returns the registers of a computing thread, 24 being left for each one that loads."""
    return {1: 240, 2: 240, 3: 160}[warpgroups]


@dataclass(frozen=True)
class Config:
    """Tile sizes of the forward kernel and of the two backward ones."""

    warpgroups: int = 2
    """Forward: computing warpgroups, each of 64 queries."""
    block: int = 128
    """Forward: keys of a step."""
    stages: int = 2
    """Forward: blocks of keys, and of values, in shared memory."""
    dq_warpgroups: int = 2
    dq_block: int = 128
    """Gradient of query: keys of a step."""
    dq_stages: int = 2
    dkv_warpgroups: int = 2
    dkv_block: int = 64
    """Gradients of key and value: queries of a step."""
    dkv_stages: int = 3


CONFIGS_64 = (
    Config(warpgroups=3, stages=3, dq_warpgroups=3, dq_block=64, dq_stages=4, dkv_stages=4),
    Config(stages=4, dq_stages=3, dkv_stages=4),
    Config(block=64, dq_block=64),
)
CONFIGS_128 = (
    Config(dkv_stages=4),
    Config(block=64, dq_block=64),
)
CONFIGS = {64: CONFIGS_64, 128: CONFIGS_128}
"""By D; the best for long sequences first, the one with the smallest tiles last."""

SHORT = 2 * ROWS
"""Sequences up to this length fill too few of the large tiles."""


def heuristic(features: int, num_queries: int, num_keys: int, interpret: Interpret) -> Config:
    """Returns the config for heads of that many features, where nothing was measured.

    The interpreter needs a CPU thread for each warpgroup: it gets the config with the fewest.
    """
    small = interpret or max(num_queries, num_keys) <= SHORT
    return CONFIGS[features][-1 if small else 0]
