# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Sizes to tune the kernels of the norms by, how tiles follow, and which calls the kernels run."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from jax import Array

from tpjax.core.operator import Key
from tpjax.pallas import _mgpu
from tpjax.pallas.norms.tiles import LANES, REDUCTION_BYTES, Tile
from tpjax.pallas.tuning import config_for

DTYPES = ("bfloat16", "float16", "float32")
MAX_VECTOR = 4
"""Neighbouring features in one lane: sums over warps take float32 registers of at most 4."""
MAX_BOX = 256
"""TMA moves boxes of at most this many elements along an axis."""
TMA_BYTES = 16
"""What TMA moves begins and ends at multiples of this."""
LANES_PER_ROW = (8, 16, LANES)
FEATURES_STEP = 8
"""Rows are of a multiple of this many features: fewer are no whole TMA_BYTES in 16 bits."""
MAX_FEATURES = 65536
MAX_RAGGED_FEATURES = 256
"""Longer rows are of whole warps of features: XLA's code is twice as fast on 1000 (docs/log.md)."""
SEGMENT = 4096
"""Rows that do not fit a tile are worked on in equal segments of at most this many features."""
MIN_SEGMENT = 512
SHORT = 2048
"""Features up to which rows of an RMS norm are dealt out in small tiles."""
SMEM_BYTES = 228 * 1024
"""Shared memory of a Hopper SM."""
MAX_BLOCK_SMEM_BYTES = 227 * 1024
"""Of it, what one block may take."""
BLOCK_SMEM_BYTES = REDUCTION_BYTES + 2048
"""Of it, what a block takes beside its buffers: for sums over warps, barriers, and the system."""
MAX_SLOTS_BYTES = MAX_BLOCK_SMEM_BYTES - BLOCK_SMEM_BYTES
MAX_PER_LANE = 64
"""Features of a row that one lane may hold; sums over rows of 128 spill registers, and reading such
rows twice takes less time."""
EASY_PER_LANE = 48
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
    per_lane: int = 16
    """Features of a row that one lane takes before more lanes, then more warps, share the row."""
    backward_slots: int = 4
    backward_blocks_per_sm: int = 2
    """As many as registers allow, or the last blocks start when the first have ended."""

    def backward(self) -> "Config":
        """Returns the config whose slots and blocks are those of the backward pass."""
        return replace(
            self, num_slots=self.backward_slots, blocks_per_sm=self.backward_blocks_per_sm
        )


CONFIGS = (
    Config(),
    Config(tile_elements=2048, num_slots=4, blocks_per_sm=6),
    Config(tile_elements=8192, num_slots=2, blocks_per_sm=3, backward_slots=2),
    Config(backward_slots=3, backward_blocks_per_sm=3),
    Config(per_lane=8),
    Config(per_lane=32),
)
"""Worth trying."""


def heuristic(op: str, features: int) -> Config:
    """Returns the config of an operator for rows of `features` elements, as measured on an H200."""
    if op == "rms_norm":
        return CONFIGS[1 if features <= SHORT else 2]
    return CONFIGS[2 if op == "add_rms_norm" and features >= SHORT else 0]


def chosen(op: str, x: Array) -> Config:
    """Returns the config for rows x [*B, D]: the measured one, or the heuristic's."""
    shapes = math.prod(x.shape[:-1]), x.shape[-1], x.dtype.name
    return config_for(op, shapes, CONFIGS, heuristic(op, x.shape[-1]))


def _tiles(features: int, itemsizes: Sequence[int]) -> Iterator[Tile]:
    """Yields every way to lay out a row."""
    for vector, warps, lanes in product((MAX_VECTOR, 2, 1), (1, 2, 4), LANES_PER_ROW):
        tile = Tile(0, features, warps, vector, lanes)
        tile = replace(tile, rows=tile.rows_at_once)
        exact = features % (tile.chunk * warps) == 0
        whole = all(tile.chunk * size % TMA_BYTES == 0 for size in itemsizes)
        small = 2 * tile.rows * features * sum(itemsizes) <= MAX_SLOTS_BYTES
        boxed = 2 <= tile.num_chunks <= MAX_BOX
        if exact and whole and small and boxed and tile.per_lane <= MAX_PER_LANE:
            yield tile


def tile_for(features: int, itemsizes: Sequence[int], config: Config) -> Tile | None:
    """Returns the tile for rows of `features` elements, or None where there is none.

    Rows that take few registers are laid out for the widest accesses, then for few threads a row.

    Args:
      features: of a row, or of a group of it.
      itemsizes: bytes of an element of each array of rows that has buffers.
      config: sizes.
    """

    def rank(tile: Tile) -> tuple[int, ...]:
        hardship = max(tile.per_lane, EASY_PER_LANE)
        shared = max(tile.per_lane, config.per_lane)
        threads = tile.warps_per_row * tile.lanes_per_row
        return hardship, -tile.vector, shared, threads, tile.warps_per_row

    found = sorted(_tiles(features, itemsizes), key=rank)
    if not found:
        return None
    tile = found[0]
    elements = min(config.tile_elements, MAX_SLOTS_BYTES // (2 * sum(itemsizes)))
    rows = min(elements // features, MAX_BOX) // tile.rows * tile.rows
    return replace(tile, rows=max(rows, tile.rows))


def occupancy(
    tile: Tile, groups: int, rows: int, slot_bytes: int, config: Config
) -> tuple[int, int]:
    """Returns slots of a block, each of `slot_bytes`, and blocks that share a group's tiles.

    There are no more of either than shared memory has room for.
    """
    half = SMEM_BYTES // 2 - BLOCK_SMEM_BYTES  # one block alone waits too much
    slots = min(config.num_slots, max(2, half // slot_bytes), MAX_SLOTS_BYTES // slot_bytes)
    resident = min(config.blocks_per_sm, SMEM_BYTES // (slots * slot_bytes + BLOCK_SMEM_BYTES))
    blocks = max(1, resident * _mgpu.num_sms() // groups)
    return slots, min(-(-rows // tile.rows), blocks)


def segments(features: int, itemsizes: Sequence[int]) -> int | None:
    """Returns into how many equal segments rows that fit no tile are cut, or None."""
    for count in range(-(-features // SEGMENT), features // MIN_SEGMENT + 1):
        if features % count == 0:
            size = features // count
            if tile_for(size, itemsizes, CONFIGS[0]):
                return count
    return None


def unsupported(key: Key, *, centred: bool, quantises: bool = False) -> str | None:
    """Returns why the kernels cannot run the call, in words that follow "no kernel for this call:".

    Args:
      key: the call.
      centred: whether the mean is subtracted.
      quantises: whether the result is float8_e4m3fn.
    """
    operands = dict(key.operands)
    for name in ("x", "residual"):
        aval = operands.get(name)
        if aval is not None and aval.dtype.name not in DTYPES:
            return f"{name} must be of dtype {', '.join(DTYPES)}; it is {aval.dtype.name}"
    for name, aval in key.operands:
        if aval is not None and aval.dtype == np.float64:
            return f"{name} must not be float64, the statistics are float32"
    x, residual = key.aval("x"), operands.get("residual")
    groups: Any = dict(key.options).get("num_groups", 1)
    features = x.shape[-1] // groups
    what = "the last axis of x" if groups == 1 else "a group of the last axis of x"
    if features % FEATURES_STEP:
        return f"{what} must be a multiple of {FEATURES_STEP} features; it has {features}"
    if features > MAX_RAGGED_FEATURES and features % LANES:
        most = MAX_RAGGED_FEATURES
        return (
            f"{what} must be a multiple of {LANES} features beyond {most}, or XLA's code is "
            f"faster; it has {features}"
        )
    if features > MAX_FEATURES:
        return f"{what} must have at most {MAX_FEATURES} features; it has {features}"
    size = x.dtype.itemsize
    buffers = [size, *([size] if residual is None else [residual.dtype.itemsize] * 2)]
    if quantises:
        buffers = [size, 1]
    if tile_for(features, buffers, CONFIGS[0]) is not None:
        return None
    if quantises:
        return f"rows of {features} {x.dtype.name}, quantised, do not fit a warpgroup"
    if groups > 1:
        return f"groups of {features} {x.dtype.name} do not fit a warpgroup"
    if not centred:  # forward and backward in 0.7 to 0.96 of the time, see docs/log.md
        what = f"rows of {features} {x.dtype.name} do not fit a warpgroup"
        return f"{what}, and XLA's code is faster than the kernels that read them twice"
    if segments(features, buffers) is None:
        return (
            f"rows of {features} {x.dtype.name} fit no warpgroup, and have no equal segments of "
            f"{MIN_SEGMENT} to {SEGMENT} features that do"
        )
    return None
