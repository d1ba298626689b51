# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Sizes to tune the kernels of the norms by, how tiles follow, and which calls the kernels run."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jax import Array

from tpjax.core.operator import Key
from tpjax.pallas import _mgpu
from tpjax.pallas.norms.tiles import LANES, REDUCTION_BYTES, WARPS, Tile
from tpjax.pallas.tuning import config_for

DTYPES = ("bfloat16", "float16", "float32")
MAX_VECTOR = 4
"""Neighbouring features in one lane: sums over warps take float32 registers of at most 4."""
MAX_CHUNKS = 256
"""TMA moves boxes of at most this many elements along an axis."""
MAX_ROW_BYTES = 32 * 1024
"""Longest row; every dtype has the same."""
SMEM_BYTES = 228 * 1024
"""Shared memory of a Hopper SM."""
MAX_BLOCK_SMEM_BYTES = 227 * 1024
"""Of it, what one block may take."""
BLOCK_SMEM_BYTES = REDUCTION_BYTES + 2048
"""Of it, what a block takes beside its buffers: for sums over warps, barriers, and the system."""
MAX_TILE_BYTES = (MAX_BLOCK_SMEM_BYTES - BLOCK_SMEM_BYTES) // 4
"""Backward, two tiles of two arrays are in shared memory, at the least."""
EASY_PER_THREAD = 48
"""A row may take this many registers of a thread before narrower accesses are the smaller evil."""


@dataclass(frozen=True)
class Config:
    """Sizes of one kernel launch; they change speed, never meaning."""

    tile_elements: int = 4096
    """Elements of a tile, as far as whole rows allow."""
    num_slots: int = 3
    """Tiles in flight in one block; at least 2."""
    blocks_per_sm: int = 4
    """Blocks on one SM, as far as its shared memory allows."""


CONFIGS = (
    Config(),
    Config(tile_elements=2048, num_slots=4, blocks_per_sm=6),
    Config(tile_elements=8192, num_slots=2, blocks_per_sm=3),
)
"""Worth trying."""


def heuristic(features: int, itemsize: int) -> Config:
    """Returns the config for rows of `features` elements."""
    del features, itemsize
    return CONFIGS[0]


def chosen(op: str, x: Array) -> Config:
    """Returns the config for rows x [*B, D]: the measured one, or the heuristic's."""
    shapes = math.prod(x.shape[:-1]), x.shape[-1], x.dtype.name
    return config_for(op, shapes, CONFIGS, heuristic(x.shape[-1], x.dtype.itemsize))


def _tiles(features: int, itemsize: int, max_per_thread: int) -> Iterator[tuple[int, Tile]]:
    """Yields every way to lay out a row, with the number of its elements that one thread holds."""
    vector = MAX_VECTOR
    while vector:
        for warps_per_row in (2, 4):
            rows = WARPS // warps_per_row
            tile = Tile(rows, features, warps_per_row, vector)
            per_thread = rows * features // (WARPS * LANES)
            exact = features % (tile.chunk * warps_per_row) == 0
            small = rows * features * itemsize <= MAX_TILE_BYTES and tile.num_chunks <= MAX_CHUNKS
            if exact and small and per_thread <= max_per_thread:
                yield per_thread, tile
        vector //= 2


def tile_for(features: int, itemsize: int, max_per_thread: int, config: Config) -> Tile | None:
    """Returns the tile for rows of `features` elements, or None where there is none.

    Rows that take few registers are laid out for the widest accesses, then for most warps a row.
    """

    def rank(found: tuple[int, Tile]) -> tuple[int, ...]:
        per_thread, tile = found
        hardship = max(per_thread, EASY_PER_THREAD)
        return hardship, -tile.vector, -tile.warps_per_row

    found = sorted(_tiles(features, itemsize, max_per_thread), key=rank)
    if not found:
        return None
    tile = found[0][1]
    elements = min(config.tile_elements, MAX_TILE_BYTES // itemsize)
    rows = tile.rows * max(1, elements // (tile.rows * features))
    return Tile(rows, features, tile.warps_per_row, tile.vector)


def occupancy(
    tile: Tile, groups: int, rows: int, slot_bytes: int, config: Config
) -> tuple[int, int]:
    """Returns slots of a block, each of `slot_bytes`, and blocks that share a group's tiles.

    There are no more of either than shared memory has room for.
    """
    slots = min(config.num_slots, (MAX_BLOCK_SMEM_BYTES - BLOCK_SMEM_BYTES) // slot_bytes)
    resident = min(config.blocks_per_sm, SMEM_BYTES // (slots * slot_bytes + BLOCK_SMEM_BYTES))
    blocks = max(1, resident * _mgpu.num_sms() // groups)
    return slots, min(-(-rows // tile.rows), blocks)


def unsupported(key: Key, max_per_thread: int) -> str | None:
    """Returns why the kernels cannot run the call, in words that follow "no kernel for this call:".

    Args:
      key: the call.
      max_per_thread: elements of a row that one thread may hold without spilling registers.
    """
    x = key.aval("x")
    if x.dtype.name not in DTYPES:
        return f"x must be of dtype {', '.join(DTYPES)}; it is {x.dtype.name}"
    for name, aval in key.operands:
        if aval is not None and aval.dtype == np.float64:
            return f"{name} must not be float64, the statistics are float32"
    features, itemsize = x.shape[-1], x.dtype.itemsize
    if features % (2 * LANES):
        return f"the last axis of x must be a multiple of {2 * LANES}; it has {features} features"
    if features * itemsize > MAX_ROW_BYTES:
        most = MAX_ROW_BYTES // itemsize
        return f"the last axis of x must have at most {most} features; it has {features}"
    if tile_for(features, itemsize, max_per_thread, CONFIGS[0]) is None:
        return f"rows of {features} {x.dtype.name} do not fit the registers of a warpgroup"
    return None
