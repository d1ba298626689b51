# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The main loop of a matrix product on Hopper, for any kernel that has one.

A block of threads is two computing warpgroups ("workers") and one that loads. A tile of the product
is `Config.rows` rows for each worker, one below the other, times `Config.columns` columns; it is
summed over K in steps of `DEPTH`, each of which takes a slot of a ring in shared memory:

    loader   feed(...)                       brings the operands by TMA, ahead by the whole ring,
                                             past the end of a tile too
    worker   each(tile):  accumulate(...)    the sums, in registers
                          what follows       runs under the loads for the next tile, and under the
                                             other worker's arithmetic: the two drift apart

Blocks stay until the end and take tiles in turns. Tiles that are worked on at one time form a
compact patch of the product (`Config.group`), so that what they read is in L2. Blocks may form
clusters: those whose tiles lie side by side read the operand they share once for all, by multicast.

Source: Thakkar et al. 2023 (CUTLASS 3, warp-specialised persistent kernels), for the design.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from tpjax.core.operator import Interpret
from tpjax.pallas._mgpu import (
    gpu_kernel,
    interpret_params,
    num_sms,
    pl,
    plgpu,
)
from tpjax.pallas.attention.ring import Ring, drain, slot_of

WORKERS = 2
"""Computing warpgroups of a block."""
DEPTH = 64
"""Terms of each sum that one step adds: 128 bytes, the width of the swizzle."""
ROWS = 64
"""Rows of one tensor core instruction."""
COMPUTE_REGISTERS, LOAD_REGISTERS = 240, 24
"""Of a thread of a worker, and of the loader."""


@dataclass(frozen=True)
class Config:
    """Sizes of one kernel launch; they change speed, never meaning."""

    rows: int = 64
    """Of one worker's tile: 64 or 128."""
    columns: int = 256
    """Of a tile; rows times columns is at most 128 registers of a thread: 64 x 256."""
    stages: int = 4
    """Steps in flight."""
    cluster: int = 2
    """Blocks of a cluster."""
    share_columns: bool = True
    """Whether a cluster's tiles lie one below the other and share columns; else rows."""
    group: int = 8
    """Rows of clusters' tiles that are worked on together."""
    pending: bool = True
    """Whether one step's products run while the next one's are started."""
    late: bool = False
    """Whether a tile is finished during the next one's main loop, where that is long enough."""

    @property
    def block_rows(self) -> int:
        """Rows of a block's tile."""
        return WORKERS * self.rows


class Tile(NamedTuple):
    """Where a block's tile lies: the product's number, first row and first column."""

    batch: Array
    row: Array
    column: Array


class Tiles(NamedTuple):
    """All tiles of `batch` products, and how they are dealt to blocks."""

    config: Config
    batch: int
    rows: int
    """Of a product."""
    columns: int
    steps: int
    """Of each tile."""
    sums: int = 1
    """Sums of a tile, side by side in its registers: each of a part of the columns."""

    @property
    def width(self) -> int:
        """Columns of each sum of a tile."""
        return self.config.columns // self.sums

    @property
    def _across(self) -> tuple[int, int]:
        """Clusters' tiles along the rows and along the columns of a product."""
        config = self.config
        tall, wide = (config.cluster, 1) if config.share_columns else (1, config.cluster)
        rows = pl.cdiv(self.rows, config.block_rows * tall)
        return rows, pl.cdiv(self.columns, self.width * wide)

    @property
    def count(self) -> int:
        """Number of clusters' tiles."""
        rows, columns = self._across
        return self.batch * rows * columns

    @property
    def clusters(self) -> int:
        """Number of clusters that share the work."""
        return max(1, min(self.count, num_sms() // self.config.cluster))

    def locate(self, index: Array) -> Tile:
        """Returns the tile of this block in a cluster's tile.

        Within a group of rows, columns are walked from left to right, each from top to bottom.
        """
        config, (rows, columns) = self.config, self._across
        batch, place = lax.div(index, jnp.int32(rows * columns)), lax.rem(index, rows * columns)
        group = lax.div(place, jnp.int32(config.group * columns))
        first = group * config.group
        height = jnp.minimum(config.group, rows - first)
        inside = lax.rem(place, jnp.int32(config.group * columns))
        row, column = first + lax.rem(inside, height), lax.div(inside, height)
        if config.cluster > 1:
            part = lax.axis_index("part")
            if config.share_columns:
                row = row * config.cluster + part
            else:
                column = column * config.cluster + part
        return Tile(batch, row * config.block_rows, column * self.width)

    def each(self, body: Callable[[Tile, Array], None]) -> Array:
        """Runs `body(tile, passed)` for all tiles of this block; returns the steps of all.

        `passed` is the number of steps that the tiles before had.
        """

        def turn(tile: Tile, passed: Array, _: tuple[()]) -> tuple[()]:
            body(tile, passed)
            return ()

        return self.fold(turn, ())[0]

    def fold(self, body: Callable[[Tile, Array, Any], Any], carried: Any) -> tuple[Array, Any]:
        """Does as `each` with `carried = body(tile, passed, carried)`; also returns the last."""
        cluster = lax.axis_index("block")
        turns = lax.div(self.count - cluster + self.clusters - 1, jnp.int32(self.clusters))

        def turn(number: Array, carried: Any) -> Any:
            tile = self.locate(cluster + number * self.clusters)
            return body(tile, number * self.steps, carried)

        return turns * self.steps, lax.fori_loop(0, turns, turn, carried)


def ring_types(config: Config, buffers: Sequence[Any], copies: int) -> Ring:
    """Returns the types of a ring whose slots take `copies` copies, for a kernel's scratch.

    Args:
      config: of the launch.
      buffers: of all slots, [stages, ...] each.
      copies: to one slot, of this block; a multicast is one.
    """
    free = plgpu.Barrier(num_arrivals=WORKERS, num_barriers=config.stages)
    if config.cluster > 1:  # a slot is free when the workers of all blocks are done with it
        free = plgpu.ClusterBarrier(
            collective_axes=("part",), num_arrivals=WORKERS, num_barriers=config.stages
        )
    ready = plgpu.Barrier(num_arrivals=copies, num_barriers=config.stages)
    return Ring(tuple(buffers), ready, free)


class Copy(NamedTuple):
    """One copy of a step: from device memory to a buffer of the slot."""

    source: Any
    target: Any
    shared: bool
    """Whether all blocks of the cluster read the same: each brings a part for all."""


def feed(tiles: Tiles, ring: Ring, copies: Callable[[Tile, Array, Array], Sequence[Copy]]) -> None:
    """Brings the operands of all tiles: what the loader does.

    Args:
      tiles: the schedule.
      ring: where to.
      copies: for a tile, the first term of the step's sums, and a slot.
    """

    def load(tile: Tile, passed: Array) -> None:
        @pl.loop(0, tiles.steps)
        def _step(step):
            slot = slot_of(passed + step, ring.stages)
            pl.when(passed + step >= ring.stages)(lambda: ring.await_free(slot))
            for copy in copies(tile, step * DEPTH, slot):
                axes = "part" if copy.shared and tiles.config.cluster > 1 else None
                ready = ring.ready.at[slot]
                plgpu.copy_gmem_to_smem(copy.source, copy.target, ready, collective_axes=axes)

    drain(ring, tiles.each(load))


def accumulate(
    tiles: Tiles,
    ring: Ring,
    passed: Array,
    operands: Callable[[Array], Sequence[tuple[Any, Any]]],
    meanwhile: Sequence[Callable[[], None]] = (),
) -> tuple[Array, ...]:
    """Returns the sums of one tile, float32 [Config.rows, Tiles.width] each: what a worker does.

    Args:
      tiles: the schedule.
      ring: what the loader fills.
      passed: steps before this tile.
      operands: for a slot, the factors of what is added to each sum: references to [rows, DEPTH]
        and [DEPTH, width] in shared memory, transposed ones too.
      meanwhile: what else is done, spread over the steps: no more of it than there are steps.
    """
    pending = tiles.config.pending
    every = tiles.steps // max(1, len(meanwhile))

    def scope(*sums: Any) -> tuple[Array, ...]:
        def one(step: Any, also: Callable[[], None] = lambda: None) -> None:
            slot = slot_of(passed + step, ring.stages)
            plgpu.barrier_wait(ring.ready.at[slot])
            for total, (a, b) in zip(sums, operands(slot), strict=True):
                plgpu.wgmma(total, a, b)
            if pending:
                plgpu.wgmma_wait(tiles.sums)
                before = slot_of(passed + step - 1, ring.stages)
                pl.when(step > 0)(lambda: ring.release(before))
                also()
            else:
                also()
                plgpu.wgmma_wait(0)
                ring.release(slot)

        for number, also in enumerate(meanwhile):
            one(jnp.int32(number * every), also)
            pl.loop(number * every + 1, (number + 1) * every)(one)
        pl.loop(len(meanwhile) * every, tiles.steps)(one)
        plgpu.wgmma_wait(0)
        if pending:
            ring.release(slot_of(passed + tiles.steps - 1, ring.stages))
        return tuple(total[...] for total in sums)

    shape = plgpu.WGMMAAccumulatorRef((tiles.config.rows, tiles.width), jnp.float32)
    return pl.run_scoped(scope, *[shape] * tiles.sums)


def launch(
    tiles: Tiles,
    work: Callable[..., None],
    load: Callable[..., None],
    *,
    out_type: Any,
    scratch_types: Sequence[Any],
    interpret: Interpret,
    name: str,
    auto_barriers: bool = True,
) -> Callable[..., Any]:
    """Returns the kernel in which workers do `work(*refs)` and the loader `load(*refs)`.

    Both get references to the operands, the results and the scratch, and call `tiles.each`. Without
    `auto_barriers` it is for them to order what threads of a warpgroup read and write: see
    `unsafe_no_auto_barriers` of Mosaic GPU.
    """

    def body(*refs: Any) -> None:
        worker = lax.axis_index("worker")

        @pl.when(worker < WORKERS)
        def _compute():
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            work(*refs)

        @pl.when(worker == WORKERS)
        def _bring():
            plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")
            load(*refs)

    cluster = tiles.config.cluster
    clusters = {"cluster": (cluster,), "cluster_names": ("part",)} if cluster > 1 else {}
    return gpu_kernel(
        body,
        out_type=out_type,
        scratch_types=scratch_types,
        grid=(tiles.clusters,),
        grid_names=("block",),
        num_threads=WORKERS + 1,
        thread_name="worker",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=not auto_barriers
        ),
        interpret=interpret_params(interpret, cluster * (WORKERS + 1)),
        kernel_name=name,
        **clusters,
    )
