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
    """Forward: blocks of keys, and of values, in shared memory; at most 4."""
    persistent: bool = True
    """Forward: one block of threads for each multiprocessor, which has one tile after another."""
    lazy: bool = True
    """Forward: results are rescaled only where scores grew much (see `forward_worker`)."""
    alternates: bool = False
    """Forward: a worker's softmax runs under the products of others, not under its own."""
    dq_warpgroups: int = 2
    dq_block: int = 128
    """Gradient of query: keys of a step."""
    dq_stages: int = 2
    dq_value_stages: int = 2
    dkv_warpgroups: int = 2
    dkv_block: int = 64
    """Gradients of key and value: queries of a step."""
    dkv_stages: int = 3
    dkv_split: bool = False
    """Whether two workers share 64 keys, as the sums of wide heads need: see `backward_split`."""


CONFIGS = {
    (64, 64): (
        Config(
            warpgroups=3,
            stages=3,
            alternates=True,
            dq_warpgroups=3,
            dq_block=64,
            dq_stages=4,
            dq_value_stages=4,
            dkv_block=128,
            dkv_stages=2,
        ),
        Config(stages=4, dq_stages=3, dq_value_stages=3, dkv_stages=4),
        Config(block=64, dq_block=64),
    ),
    (128, 128): (
        Config(dkv_stages=4),
        Config(block=64, dq_block=64),
    ),
    (192, 128): (
        Config(block=64, dq_block=64, dkv_stages=4, dkv_split=True),
        Config(block=64, stages=3, dq_block=64, dkv_stages=4, dkv_split=True),
    ),
    (256, 256): (Config(block=64, dq_block=64, dq_value_stages=1, dkv_stages=2, dkv_split=True),),
}
"""By features of keys and of values; the best for long sequences first.

The last one for 64 and 128 has the smallest tiles.
"""

SHORT = 2 * ROWS
"""Sequences up to this length fill too few of the large tiles."""


def widths(features: int, value_features: int) -> tuple[int, int]:
    """Returns the narrowest pair in `CONFIGS` that has room for both."""
    return min(w for w in CONFIGS if w[0] >= features and w[1] >= value_features)


def heuristic(
    features: int, value_features: int, tokens: int, dense: bool, interpret: Interpret
) -> Config:
    """Returns the config for a call where nothing was measured.

    Args:
      features, value_features: as `widths` gives them.
      tokens: of the longer sequence.
      dense: whether a bias or mask is loaded for each score, which takes registers.
      interpret: the interpreter needs a CPU thread for each warpgroup: it gets the fewest.
    """
    configs = CONFIGS[features, value_features]
    small = interpret or dense or tokens <= SHORT
    return configs[-1 if small and features == value_features else 0]
