# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Rows streamed through shared memory by one warpgroup: what the kernels of the norms share.

An array of rows [R, D] is seen as [R, N, C], N chunks of C features, and moved in tiles of whole
rows [r, N, C] by TMA, which fills rows beyond the end with zeros and drops them on the way back.
Registers hold a tile as float32:

    W warps work on one row, each on every W-th chunk; 4 / W rows go side by side;
    the lanes of a warp hold `vector` neighbouring features each.

So a sum over features is shuffles inside a warp, and W values through shared memory; a thread meets
the same features in every tile, which lets sums over rows stay in registers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from tpjax.pallas import _mgpu

WARPS = 4
LANES = 32
REDUCTION_BYTES = 2 * WARPS * LANES * 4 * 4
"""Shared memory for sums over warps: two registers of 4 float32 from each thread."""


@dataclass(frozen=True)
class Tile:
    """How a tile of rows lies in shared memory and registers."""

    rows: int
    """r, rows of one tile."""
    features: int
    """D."""
    warps_per_row: int
    """W: 2 or 4."""
    vector: int
    """Neighbouring features in one lane."""

    @property
    def chunk(self) -> int:
        """C, features of one chunk."""
        return LANES * self.vector

    @property
    def num_chunks(self) -> int:
        """N, a multiple of W."""
        return self.features // self.chunk

    @property
    def shape(self) -> tuple[int, int, int]:
        """[r, N, C]."""
        return (self.rows, self.num_chunks, self.chunk)

    @property
    def layout(self) -> Any:
        """Where the elements live: warp, lane, place in a vector."""
        tiles = (
            (WARPS // self.warps_per_row, self.warps_per_row, self.chunk),
            (1, 1, self.vector),
        )
        return _mgpu.tiled_layout(tiles, warp_dims=(-6, -5), lane_dims=(-4,))

    def view(self, x: Array) -> Array:
        """Returns rows [R, D] as [R, N, C], or a vector [D] as [N, C]."""
        return x.reshape(*x.shape[:-1], self.num_chunks, self.chunk)

    def load(self, ref: Any) -> Array:
        """Returns a tile in shared memory [r, N, C], in float32."""
        return plgpu.load(ref, layout=self.layout, optimized=False).astype(jnp.float32)

    def store(self, ref: Any, value: Array) -> None:
        """Rounds a tile to the dtype of the buffer in shared memory and puts it there."""
        ref[...] = value.astype(ref.dtype)

    def load_vector(self, ref: Any) -> Array:
        """Returns a vector [N, C] in device memory, spread over the rows, in float32."""
        layout = self.layout.reduce(0)
        vector = plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)
        return self._spread(vector, (1, 2))

    def zeros(self) -> Array:
        """Returns a tile of zeros."""
        return plgpu.layout_cast(jnp.zeros(self.shape, jnp.float32), self.layout)

    def mean(self, x: Array) -> Array:
        """Returns the mean over the features of each row of a tile, spread over them."""
        rows, chunks, features = self.shape
        while chunks % (2 * self.warps_per_row) == 0:  # by halves: fewer shuffles than one a chunk
            half = chunks // 2
            lower = lax.slice(x, (0, 0, 0), (rows, half, features))
            x, chunks = lower + lax.slice(x, (0, half, 0), (rows, chunks, features)), half
        sums = plgpu.layout_cast(x.sum(2), self.layout.reduce(2))
        row = plgpu.layout_cast(sums.sum(1), self.layout.reduce((1, 2)))
        return self._spread(row / self.features, (0,))

    def store_sum(self, ref: Any, block: Array, x: Array) -> None:
        """Puts the sum of a tile over its rows into row `block` of [blocks, N, C]."""
        if self.rows == 1:
            ref[pl.ds(block, 1)] = x
        else:
            ref[block] = plgpu.layout_cast(x.sum(0), self.layout.reduce(0))

    def _spread(self, x: Array, axes: tuple[int, ...]) -> Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(x, self.shape, axes), self.layout)


class Share(NamedTuple):
    """Which tiles a block takes: `block`, `block + blocks`, and so on."""

    block: Any
    blocks: int


def stream(
    tile: Tile,
    share: Share,
    sources: Sequence[Any],
    result: Any,
    slots: Sequence[Any],
    barrier: Any,
    step: Callable[[Sequence[Any], Any], Any],
    carry: Any,
) -> Any:
    """Runs `step` on a share of the tiles, loads and stores going on meanwhile.

    Loads run up to `slots - 1` tiles ahead: a slot is filled again one step after its result was
    sent off, by when it has most likely been read. There are 2 slots or more.

    Args:
      tile: of the rows.
      share: which tiles.
      sources: arrays [R, N, C] in device memory.
      result: the array of the results, like `sources`.
      slots: buffers [slots, r, N, C] in shared memory, one for each source. `step` leaves the
        results in the last one.
      barrier: one for each slot, with an arrival for each source.
      step: takes the buffers of one tile [r, N, C], and the carry; returns the new carry.
      carry: what the first step gets.

    Returns:
      The last carry.
    """
    num_slots, rows = slots[0].shape[0], result.shape[0]
    block, blocks = share
    num_tiles = (pl.cdiv(rows, tile.rows) - block + blocks - 1) // blocks

    def window(step_index: Any) -> Any:
        return pl.ds((block + step_index * blocks) * tile.rows, tile.rows)

    def load(step_index: Any) -> None:
        slot = lax.rem(step_index, num_slots)
        for source, buffer in zip(sources, slots, strict=True):
            plgpu.copy_gmem_to_smem(
                source.at[window(step_index)], buffer.at[slot], barrier.at[slot]
            )

    for ahead in range(num_slots):
        pl.when(ahead < num_tiles)(lambda ahead=ahead: load(jnp.int32(ahead)))

    def body(step_index: Any, carry: Any) -> Any:
        slot = lax.rem(step_index, num_slots)
        plgpu.barrier_wait(barrier.at[slot])
        carry = step([buffer.at[slot] for buffer in slots], carry)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(slots[-1].at[slot], result.at[window(step_index)])
        following = step_index - 1 + num_slots

        @pl.when((step_index >= 1) & (following < num_tiles))
        def _() -> None:
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            load(following)

        return carry

    carry = lax.fori_loop(0, num_tiles, body, carry)
    plgpu.wait_smem_to_gmem(0)
    return carry
