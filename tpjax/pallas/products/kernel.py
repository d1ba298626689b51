# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The kernel of all matrix products here: one main loop, and a `Finish` of each tile's sums.

    results = finish(a b0, a b1, ..., sides, vectors)

Arrays are [G, M, K] and the like: G products, or 1 where all share it. An array [G, rows, 2,
columns] has two halves, each of which is used as one [G, rows, columns] (`Panel`): no copies.

A worker finishes its sums piece by piece: 64 rows by `Staging.piece` columns. Sides, arrays of the
results' shape that the finish reads, arrive by TMA in slots of their own, the first ones during the
main loop; results leave through slots by TMA, which drops what lies beyond the end.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from tpjax.core.operator import Interpret
from tpjax.pallas._mgpu import pl, plgpu, row_tile
from tpjax.pallas.products.mainloop import (
    DEPTH,
    ROWS,
    WORKERS,
    Config,
    Copy,
    Tile,
    Tiles,
    accumulate,
    feed,
    ring_types,
)

SMEM_BYTES = (227 << 10) - 2048
"""Shared memory of a block, less barriers and what the system takes."""


class Panel(NamedTuple):
    """An array [G, rows, columns], or half of one [G, rows, 2, columns]."""

    array: int
    """Its place in the list."""
    half: int | None = None

    def at(self, refs: Sequence[Any], batch: Array, rows: Any, columns: Any) -> Any:
        """Returns the reference to a part of it.

        Halves may lie side by side in [G, rows, 2 columns]: what is read beyond the end of the
        first is then of the second.
        """
        ref = refs[self.array]
        group = batch if ref.shape[0] > 1 else 0
        if self.half is None:
            return ref.at[group, rows, columns]
        if len(ref.shape) == 4:
            return ref.at[group, rows, self.half, columns]
        start = columns.start + self.half * (ref.shape[-1] // 2)
        return ref.at[group, rows, pl.ds(start, columns.size)]


class Finish:
    """What becomes of a tile's sums; subclasses are frozen dataclasses."""

    @property
    def factors(self) -> tuple[Panel, ...]:
        """The right operands: one sum each. None: nothing is multiplied, sides alone are read."""
        return (Panel(0),)

    @property
    def sides(self) -> tuple[Panel, ...]:
        """What else is read, as large as the results."""
        return ()

    @property
    def results(self) -> tuple[Panel, ...]:
        """What is written."""
        return (Panel(0),)

    @property
    def waits(self) -> bool:
        """Whether it may be given sums rounded to the results' dtype, a tile later."""
        return False

    def __call__(
        self, sums: Sequence[Array], sides: Sequence[Array], vectors: Sequence[Array]
    ) -> Sequence[Array]:
        """Returns a piece of each result, all float32, as is what it gets."""
        raise NotImplementedError


@dataclass(frozen=True)
class Job:
    """One kind of launch."""

    finish: Finish
    config: Config
    interpret: Interpret
    name: str
    """Of the kernel, in profiles."""
    out_dtype: Any = None
    """Of the results; None: of the operands."""
    transpose_a: bool = False
    """Whether the left operand is stored [K, M]."""
    transpose_b: bool = False
    """Whether right operands are stored [N, K]."""


class Staging(NamedTuple):
    """How pieces of results and sides go through shared memory."""

    piece: int
    """Columns of a piece."""
    slots: int
    """For a piece of every result, of each worker; divides the pieces of a tile, so that each tile
    begins with the slot that was sent off longest ago."""
    side_slots: int
    """For a piece of every side, of each worker."""

    def bytes(self, results: int, out_size: int, side_sizes: Sequence[int]) -> int:
        """Returns the shared memory that the slots take, given bytes of an element."""
        one = WORKERS * ROWS * self.piece
        return one * (self.slots * results * out_size + self.side_slots * sum(side_sizes))


def staging_for(
    config: Config, finish: Finish, out_size: int, side_sizes: Sequence[int]
) -> Staging:
    """Returns the staging for results and sides of so many bytes an element."""
    width = config.columns // max(1, len(finish.factors))
    # Of many arrays pieces are narrower: most of shared memory is for the operands.
    row_bytes = 64 if finish.factors and len(finish.results) > 1 else 128
    piece = min(width, row_bytes // max(out_size, *side_sizes, 0))
    pieces = config.rows // ROWS * (width // piece)
    side_slots = (2 if finish.factors else 3) if side_sizes else 0
    return Staging(piece, math.gcd(2, pieces), min(pieces, side_slots))


def stages_for(config: Config, itemsize: int, staging_bytes: int) -> int:
    """Returns how many of the config's stages there is room for."""
    step = (config.block_rows + config.columns) * DEPTH * itemsize
    return min(config.stages, (SMEM_BYTES - staging_bytes) // step)


class Arrays(NamedTuple):
    """The operands, or references to them."""

    a: Any
    factors: tuple[Any, ...]
    sides: tuple[Any, ...]
    vectors: tuple[Any, ...]


class Shared(NamedTuple):
    """Shared memory and barriers of a block."""

    ring: Any
    """Of the left operand's rows of both workers, then the columns of each factor; or None."""
    out: Any
    sides: tuple[Any, ...]
    side_ready: Any


class Kernel(NamedTuple):
    """Static facts of a launch, and what its warpgroups do."""

    job: Job
    tiles: Tiles
    staging: Staging

    def load(self, arrays: Arrays, results: Sequence[Any], smem: Shared) -> None:
        """Brings the operands of every tile."""
        del results
        job, tiles = self.job, self.tiles
        if not job.finish.factors:
            return
        shares_columns = tiles.config.share_columns

        def copies(tile: Tile, term: Array, slot: Array) -> list[Copy]:
            terms = pl.ds(term, DEPTH)
            rows = pl.ds(tile.row, tiles.config.block_rows)
            columns = pl.ds(tile.column, tiles.width)
            left, *right = smem.ring.buffers
            place = (terms, rows) if job.transpose_a else (rows, terms)
            source = Panel(0).at([arrays.a], tile.batch, *place)
            found = [Copy(source, left.at[slot], not shares_columns)]
            for factor, buffer in zip(job.finish.factors, right, strict=True):
                place = (columns, terms) if job.transpose_b else (terms, columns)
                source = factor.at(arrays.factors, tile.batch, *place)
                found.append(Copy(source, buffer.at[slot], shares_columns))
            return found

        feed(tiles, smem.ring, copies)

    def work(self, arrays: Arrays, results: Sequence[Any], smem: Shared) -> None:
        """Multiplies and finishes one worker's rows of every tile."""
        job, tiles = self.job, self.tiles
        worker, rows = lax.axis_index("worker"), tiles.config.rows
        own = pl.ds(worker * rows, rows)

        def operands(slot: Array) -> list[tuple[Any, Any]]:
            left, *right = smem.ring.buffers
            a = left.at[slot, :, own].transpose((1, 0)) if job.transpose_a else left.at[slot, own]
            bs = (buffer.at[slot] for buffer in right)
            return [(a, b.transpose((1, 0)) if job.transpose_b else b) for b in bs]

        def sums_of(passed: Array, meanwhile: Sequence[Callable[[], None]] = ()) -> Any:
            if not job.finish.factors:
                return ()
            return accumulate(tiles, smem.ring, passed, operands, meanwhile)

        def end_of(tile: Tile) -> _Finishing:
            row = pl.multiple_of(tile.row, tiles.config.block_rows)
            tile = Tile(tile.batch, row, pl.multiple_of(tile.column, tiles.width))
            return _Finishing(self, arrays, results, smem, tile, worker)

        def now(tile: Tile, passed: Array) -> None:
            end = end_of(tile)
            vectors = end.start()
            end.run(sums_of(passed), vectors)

        def later(tile: Tile, passed: Array, waiting: Any) -> Any:
            before, sums = waiting
            fresh = sums_of(passed, end_of(before).pieces(sums))
            end_of(tile).bring()
            return tile, tuple(x.astype(smem.out.dtype) for x in fresh)

        if self._finishes_late(smem):
            # Before the first tile one is finished that lies beyond the end: TMA moves nothing.
            height = tiles.config.block_rows * tiles.config.cluster
            nowhere = tiles.locate(lax.axis_index("block"))
            nowhere = nowhere._replace(row=nowhere.row + pl.cdiv(tiles.rows, height) * height)
            zeros = jnp.zeros((rows, tiles.width), smem.out.dtype)
            zeros = (plgpu.layout_cast(zeros, plgpu.Layout.WGMMA),) * tiles.sums
            end_of(nowhere).bring()
            _, (last, sums) = tiles.fold(later, (nowhere, zeros))
            for piece in end_of(last).pieces(sums):
                piece()
        else:
            tiles.each(now)
        plgpu.wait_smem_to_gmem(0)

    def _finishes_late(self, smem: Shared) -> bool:
        """Returns whether a tile is finished during the main loop of the next one.

        Its sums wait in registers, rounded, and need half as many as they did.
        """
        finish, tiles = self.job.finish, self.tiles
        pieces = tiles.config.rows // ROWS * (tiles.width // self.staging.piece)
        may = tiles.config.late and finish.waits
        return may and smem.out.dtype.itemsize == 2 and pieces <= tiles.steps


class _Finishing(NamedTuple):
    """The end of one worker's part of a tile."""

    kernel: Kernel
    arrays: Arrays
    results: Sequence[Any]
    smem: Shared
    tile: Tile
    worker: Any

    @property
    def _pieces(self) -> list[tuple[int, int]]:
        """First row and column of each piece, within the worker's part."""
        tiles, piece = self.kernel.tiles, self.kernel.staging.piece
        starts = range(0, tiles.config.rows, ROWS)
        return [(r, c) for r in starts for c in range(0, tiles.width, piece)]

    def _place(self, number: int) -> tuple[Any, Any]:
        """Returns the rows and columns of a piece in an array."""
        row, column = self._pieces[number]
        first = self.tile.row + self.worker * self.kernel.tiles.config.rows + row
        return pl.ds(first, ROWS), pl.ds(self.tile.column + column, self.kernel.staging.piece)

    def _bring(self, number: int) -> None:
        """Starts copying a piece of every side."""
        slots = self.kernel.staging.side_slots
        slot, rows_columns = number % slots, self._place(number)
        ready = self.smem.side_ready.at[self.worker * slots + slot]
        panels = self.kernel.job.finish.sides
        for panel, buffer in zip(panels, self.smem.sides, strict=True):
            source = panel.at(self.arrays.sides, self.tile.batch, *rows_columns)
            plgpu.copy_gmem_to_smem(source, buffer.at[self.worker, slot], ready)

    def bring(self) -> None:
        """Starts copying the first pieces of the sides."""
        if self.smem.sides:
            for number in range(self.kernel.staging.side_slots):
                self._bring(number)

    def start(self) -> list[Array]:
        """Starts copying the first pieces of the sides; returns those of the vectors.

        During the main loop what follows of the sides comes as near as L2.
        """
        finish, tiles = self.kernel.job.finish, self.kernel.tiles
        self.bring()
        if finish.factors:
            rows, columns = tiles.config.rows, pl.ds(self.tile.column, tiles.width)
            own = pl.ds(self.tile.row + self.worker * rows, rows)
            for panel in finish.sides:
                plgpu.async_prefetch(panel.at(self.arrays.sides, self.tile.batch, own, columns))
        return self._vectors(0)

    def _sides(self, number: int) -> list[Array]:
        """Waits for a piece of every side; returns them."""
        if not self.smem.sides:
            return []
        slots = self.kernel.staging.side_slots
        slot = number % slots
        plgpu.barrier_wait(self.smem.side_ready.at[self.worker * slots + slot])
        refs = (buffer.at[self.worker, slot] for buffer in self.smem.sides)
        loads = (plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False) for ref in refs)
        return [x.astype(jnp.float32) for x in loads]

    def _vectors(self, number: int) -> list[Array]:
        """Returns a piece of every vector, spread over its rows; nothing behind the last one."""
        if number == len(self._pieces):
            return []
        columns, found = self._place(number)[1], []
        layout = plgpu.Layout.WGMMA.reduce(0)
        for ref in self.arrays.vectors:
            at = ref.at[self.tile.batch if ref.shape[0] > 1 else 0, columns]
            x = plgpu.load(at, layout=layout, optimized=False)
            found.append(lax.broadcast_in_dim(x, (ROWS, x.shape[0]), [1]))
        return found

    def run(self, sums: Sequence[Array], vectors: list[Array]) -> None:
        """Finishes the sums, given the first pieces of the vectors, and sends the results off."""
        for number in range(len(self._pieces)):
            present, vectors = vectors, self._vectors(number + 1)  # they come meanwhile
            self._piece(number, sums, present)

    def pieces(self, sums: Sequence[Array]) -> list[Callable[[], None]]:
        """Returns what finishes the sums piece by piece, given that `bring` was called."""
        return [partial(self._piece, n, sums, []) for n in range(len(self._pieces))]

    def _piece(self, number: int, sums: Sequence[Array], vectors: list[Array]) -> None:
        """Finishes a piece and sends it off."""
        staging, finish = self.kernel.staging, self.kernel.job.finish
        count, (row, column) = len(finish.results), self._pieces[number]
        parts = [x[row : row + ROWS, column : column + staging.piece] for x in sums]
        sides = self._sides(number)
        outs = finish([x.astype(jnp.float32) for x in parts], sides, vectors)
        first = number % staging.slots * count
        slots = [self.smem.out.at[self.worker, first + i] for i in range(count)]
        plgpu.wait_smem_to_gmem((staging.slots - 1) * count, wait_read_only=True)
        for slot, out in zip(slots, outs, strict=True):
            slot[...] = out.astype(slot.dtype)
        plgpu.commit_smem()  # also: all have read the sides
        for slot, panel in zip(slots, finish.results, strict=True):
            target = panel.at(self.results, self.tile.batch, *self._place(number))
            plgpu.copy_smem_to_gmem(slot, target)
        if self.smem.sides and number + staging.side_slots < len(self._pieces):
            self._bring(number + staging.side_slots)


def _slots(shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns the type of buffers whose pieces are as wide as their swizzle."""
    transforms = (
        plgpu.TilingTransform((8, shape[-1])),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(shape[-1] * jnp.dtype(dtype).itemsize),  # pyright: ignore[reportAbstractUsage]
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def scratch(kernel: Kernel, arrays: Arrays, out_dtype: Any) -> Shared:
    """Returns the types of a block's shared memory, for operands such as these."""
    job, tiles, staging = kernel.job, kernel.tiles, kernel.staging
    height, ring = tiles.config.block_rows, None
    if job.finish.factors:
        left = (DEPTH, height) if job.transpose_a else (height, DEPTH)
        right = (tiles.width, DEPTH) if job.transpose_b else (DEPTH, tiles.width)
        shapes = [(tiles.config.stages, *x) for x in (left, *[right] * tiles.sums)]
        buffers = [row_tile(shape, arrays.a.dtype) for shape in shapes]
        ring = ring_types(tiles.config, buffers, len(buffers))
    piece = (ROWS, staging.piece)
    sides = job.finish.sides
    dtypes = [arrays.sides[panel.array].dtype for panel in sides]
    return Shared(
        ring,
        _slots((WORKERS, staging.slots * len(job.finish.results), *piece), out_dtype),
        tuple(_slots((WORKERS, staging.side_slots, *piece), d) for d in dtypes),
        plgpu.Barrier(num_arrivals=len(sides), num_barriers=WORKERS * staging.side_slots)
        if sides
        else None,
    )
