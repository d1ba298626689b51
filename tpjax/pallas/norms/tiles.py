# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Rows streamed through shared memory by one warpgroup: what the kernels of the norms share.

An array of rows [V, R, G, D] is seen as [V, R, G, N, C], N chunks of C features, and moved in tiles
of whole rows of one group [r, N, C] by TMA, which fills rows beyond the end with zeros and drops
them on the way back. Registers hold a tile as float32:

    W warps work on one row, each on every W-th chunk; 4 / W warps go side by side;
    L lanes of a warp work on one row, 32 / L rows go side by side;
    a lane holds `vector` neighbouring features of a chunk.

So a sum over features is shuffles inside a warp, and W values through shared memory; a thread meets
the same features in every tile, which lets sums over rows stay in registers. Long rows take all
threads; short ones few lanes each, for fewer shuffles.
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
PIECE_PER_THREAD = 16
"""Elements that a thread works on at once, at the least."""
REDUCTION_BYTES = 2 * WARPS * LANES * 4 * 4
"""Shared memory for sums over warps: two registers of 4 float32 from each thread."""


@dataclass(frozen=True)
class Tile:
    """How a tile of rows lies in shared memory and registers."""

    rows: int
    """r, rows of one tile."""
    features: int
    """D, of one group."""
    warps_per_row: int
    """W: 1, 2 or 4."""
    vector: int
    """Neighbouring features in one lane."""
    lanes_per_row: int = LANES
    """L: 8, 16 or 32."""

    @property
    def rows_at_once(self) -> int:
        """Rows that the threads of a warpgroup work on side by side; `rows` is a multiple."""
        return WARPS // self.warps_per_row * (LANES // self.lanes_per_row)

    @property
    def per_lane(self) -> int:
        """Features of one row in one lane."""
        return self.features // (self.warps_per_row * self.lanes_per_row)

    @property
    def chunk(self) -> int:
        """C, features of one chunk."""
        return self.lanes_per_row * self.vector

    @property
    def num_chunks(self) -> int:
        """N, a multiple of W."""
        return self.features // self.chunk

    @property
    def box(self) -> tuple[int, int, int]:
        """[r, N, C]."""
        return (self.rows, self.num_chunks, self.chunk)

    @property
    def num_pieces(self) -> int:
        """Pieces of a tile, along N, that are worked on one after another: in few registers."""
        count, most = 1, self.rows // self.rows_at_once * self.per_lane // PIECE_PER_THREAD
        while 2 * count <= most and self.num_chunks % (2 * count * self.warps_per_row) == 0:
            count *= 2
        return count if self.num_chunks > count else count // 2  # see `_over_features`

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of a piece [r, n, C], n * num_pieces = N."""
        return (self.rows, self.num_chunks // self.num_pieces, self.chunk)

    @property
    def layout(self) -> Any:
        """Where the elements live: warp, lane, place in a vector."""
        rows_per_warp = LANES // self.lanes_per_row
        tiles = (
            (self.rows_at_once, self.warps_per_row, self.chunk),
            (rows_per_warp, 1, self.chunk),
            (1, 1, self.vector),
        )
        return _mgpu.tiled_layout(tiles, warp_dims=(-9, -8), lane_dims=(-6, -4))

    def view(self, x: Array) -> Array:
        """Returns x [..., D] as [..., N, C]."""
        return x.reshape(*x.shape[:-1], self.num_chunks, self.chunk)

    def _window(self, piece: int) -> Any:
        return pl.ds(piece * self.shape[1], self.shape[1])

    def load(self, ref: Any, piece: int) -> Array:
        """Returns a piece of a tile in shared memory [r, N, C], in float32."""
        ref = ref.at[:, self._window(piece)]
        return plgpu.load(ref, layout=self.layout, optimized=False).astype(jnp.float32)

    def store(self, ref: Any, piece: int, value: Array) -> None:
        """Rounds a piece to the dtype of the buffer in shared memory and puts it there."""
        _store(ref.at[:, self._window(piece)], value.astype(ref.dtype))

    def load_vector(self, ref: Any, piece: int) -> Array:
        """Returns a piece of a vector [N, C] in device memory, spread over rows, in float32."""
        ref, layout = ref.at[self._window(piece)], self.layout.reduce(0)
        vector = plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)
        return self._spread(vector, (1, 2))

    def load_rows(self, ref: Any) -> Array:
        """Returns a number for each row [r] in device memory."""
        return plgpu.load(ref, layout=self.layout.reduce((1, 2)), optimized=False)

    def store_rows(self, ref: Any, numbers: Array) -> None:
        """Puts a number for each row [r] into device memory."""
        _store(ref, numbers)

    def zeros(self) -> list[Array]:
        """Returns pieces of zeros."""
        zeros = plgpu.layout_cast(jnp.zeros(self.shape, jnp.float32), self.layout)
        return [zeros] * self.num_pieces

    def means(self, pieces_of: Callable[[int], Sequence[Array]]) -> list[Array]:
        """Returns means over the features of each row [r] of tiles, given piece by piece."""
        totals = list(pieces_of(0))
        for piece in range(1, self.num_pieces):
            totals = [x + y for x, y in zip(totals, pieces_of(piece), strict=True)]
        return [self._mean(x) for x in totals]

    def _mean(self, x: Array) -> Array:
        rows, chunks, features = self.shape
        while chunks % (2 * self.warps_per_row) == 0 and chunks > 2:  # by halves: fewer shuffles
            half = chunks // 2
            lower = lax.slice(x, (0, 0, 0), (rows, half, features))
            x, chunks = lower + lax.slice(x, (0, half, 0), (rows, chunks, features)), half
        return self._over_features(jnp.sum, x) / self.features

    def largest(self, piece_of: Callable[[int], Array]) -> Array:
        """Returns the largest feature of each row [r] of a tile, given piece by piece."""
        x = piece_of(0)
        for piece in range(1, self.num_pieces):
            x = jnp.maximum(x, piece_of(piece))
        return self._over_features(jnp.max, x)

    def _over_features(self, reduce: Callable[..., Array], x: Array) -> Array:
        # First what stays in a thread; and never along an axis of size 1, which JAX has no layout
        # for: there are 2 chunks or more.
        axis = 1 if self.warps_per_row == 1 else 2
        x = plgpu.layout_cast(reduce(x, axis), self.layout.reduce(axis))
        return plgpu.layout_cast(reduce(x, 1), self.layout.reduce((1, 2)))

    def spread(self, numbers: Array) -> Array:
        """Returns a number for each row [r], spread over the features of a piece."""
        return self._spread(numbers, (0,))

    def store_sum(self, ref: Any, block: Array, pieces: Sequence[Array]) -> None:
        """Puts the sum of a tile over its rows into row `block` of [blocks, N, C]."""
        for piece, x in enumerate(pieces):
            if self.rows == 1:
                _store(ref.at[pl.ds(block, 1), self._window(piece)], x)
            else:
                x = plgpu.layout_cast(x.sum(0), self.layout.reduce(0))
                _store(ref.at[block, self._window(piece)], x)

    def _spread(self, x: Array, axes: tuple[int, ...]) -> Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(x, self.shape, axes), self.layout)


def _store(ref: Any, x: Array) -> None:
    """Stores in whatever pieces the layout gives."""
    if hasattr(plgpu, "store"):  # JAX 0.12, where another store must fill whole cache lines
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x


class Share(NamedTuple):
    """Which tiles a block takes: `block`, `block + blocks`, and so on."""

    block: Any
    blocks: int


class Rows(NamedTuple):
    """Rows of one group in device memory: an array [V, R, G, N, C], and which V and G."""

    array: Any
    copy: Any
    group: Any
    chunk: Any
    """The first chunk, 0. Where that is not to be seen in the code, buffers are not swizzled: they
    would be tiled for it, and with V or G have more dimensions than the 5 that TMA knows."""

    def window(self, first: Any, rows: int) -> Any:
        """Returns `rows` rows [rows, N, C]."""
        chunks = pl.ds(self.chunk, self.array.shape[-2])
        return self.array.at[self.copy, pl.ds(first, rows), self.group, chunks]


def stream(
    tile: Tile,
    share: Share,
    sources: Sequence[Rows],
    results: Sequence[tuple[Rows, int]],
    slots: Sequence[Any],
    barrier: Any,
    step: Callable[[Any, Sequence[Any], Any], Any],
    carry: Any,
) -> Any:
    """Runs `step` on a share of the tiles, loads and stores going on meanwhile.

    Loads run up to `slots - 1` tiles ahead: a slot is filled again one step after its results were
    sent off, by when they have most likely been read. There are 2 slots or more.

    Args:
      tile: of the rows.
      share: which tiles.
      sources: what is read.
      results: what is written, each with the index of the buffers that `step` leaves it in.
      slots: buffers [slots, r, N, C] in shared memory, one for each source; then more for results.
      barrier: one for each slot, with an arrival for each source.
      step: takes the first row of a tile, its buffers [r, N, C], and the carry; returns the new
        carry.
      carry: what the first step gets.

    Returns:
      The last carry.
    """
    num_slots, num_rows = slots[0].shape[0], sources[0].array.shape[1]
    block, blocks = share
    num_tiles = (pl.cdiv(num_rows, tile.rows) - block + blocks - 1) // blocks

    def first_row(step_index: Any) -> Any:
        return (block + step_index * blocks) * tile.rows

    def load(step_index: Any) -> None:
        slot = lax.rem(step_index, num_slots)
        for source, buffer in zip(sources, slots, strict=False):
            window = source.window(first_row(step_index), tile.rows)
            plgpu.copy_gmem_to_smem(window, buffer.at[slot], barrier.at[slot])

    for ahead in range(num_slots):
        pl.when(ahead < num_tiles)(lambda ahead=ahead: load(jnp.int32(ahead)))

    def body(step_index: Any, carry: Any) -> Any:
        slot, first = lax.rem(step_index, num_slots), first_row(step_index)
        plgpu.barrier_wait(barrier.at[slot])
        carry = step(first, [buffer.at[slot] for buffer in slots], carry)
        plgpu.commit_smem()
        for result, index in results:
            plgpu.copy_smem_to_gmem(slots[index].at[slot], result.window(first, tile.rows))
        following = step_index - 1 + num_slots

        @pl.when((step_index >= 1) & (following < num_tiles))
        def _() -> None:
            plgpu.wait_smem_to_gmem(len(results), wait_read_only=True)
            load(following)

        return carry

    carry = lax.fori_loop(0, num_tiles, body, carry)
    plgpu.wait_smem_to_gmem(0)
    return carry
