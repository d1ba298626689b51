# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The gradient of `embedding` on Hopper: a sum over rows sorted by their ids, no bit by chance.

    dtable[v] = sum over n with id[n] = v of dy[n]

XLA gathers forward, and sorts the ids; then two kernels:

    chunks    a block adds up the rows of C neighbouring places in the order of the ids, a slice of
              their features. An id whose rows all lie there is finished. The sum at the front of a
              chunk whose id began before it, and the one at its end whose id goes on, are parts.
    joints    for each id that goes over the end of a chunk: its parts, in order.

Both write into a table of zeros, each row once. Letters: N ids, V rows of the table, D features, in
pieces of 64.

Numerics: float32, in an order that follows from the ids alone, rounded once. Bytes: N D read, V D
written. Limits: `unsupported`.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tpjax.core.lookup import gathered
from tpjax.core.operator import Interpret, Key
from tpjax.pallas import _mgpu, dispatch

CHUNK = 64
"""C, places of one block."""
PIECE = 64
"""Neighbouring features that are one element of an axis: TMA moves at most 256 along an axis."""
QUANTUM = 128
"""Features come in multiples: each thread of a block has as many."""
MAX_SLICE = 24
"""Pieces of one block, at most."""
NUM_SLOTS = 8
"""Rows on their way to a block."""
DTYPES = ("bfloat16", "float16", "float32")
MOST_TO_COMPARE = 4096
"""Chunks up to which each is compared with all at once, not in a loop of small steps."""
NOTES = 8
"""Numbers that a chunk is told beside the places and ids of its rows."""


def unsupported(key: Key) -> str | None:
    """Returns why the kernels cannot run the call, or None."""
    table = key.aval("table")
    name, features = table.dtype.name, table.shape[1]
    if name not in DTYPES:
        return f"the table must be of dtype {', '.join(DTYPES)}; it is {name}"
    if features % QUANTUM:
        return f"the table must have a multiple of {QUANTUM} features; it has {features}"
    if table.shape[0] >= 2**31 - 1:
        return f"ids are 32-bit integers; the table has {table.shape[0]} rows"
    return None


class Order(NamedTuple):
    """Ids in ascending order, in chunks of C places; those that name no row come last."""

    chunks: Array
    """[chunks, 2 C + NOTES]: where each row is; its id; the ids before and after; real rows."""
    joints: Array
    """[chunks, NOTES]: for an id that begins in a chunk and goes on: it, and its last chunk."""


def ordered(ids_N: Array, num_rows: int) -> Order:
    """Returns the ids in the order in which their rows are added up."""
    named = (ids_N >= 0) & (ids_N < num_rows)
    keys = jnp.where(named, ids_N, num_rows).astype(jnp.int32)
    count = -(-keys.shape[0] // CHUNK)
    keys = jnp.pad(keys, (0, count * CHUNK - keys.shape[0]), constant_values=num_rows)
    places = jnp.arange(keys.shape[0], dtype=jnp.int32)
    # Stable, by one unsigned key: what XLA knows a radix sort for.
    keys, places = lax.sort((keys.astype(jnp.uint32), places), num_keys=1, is_stable=True)
    keys = keys.astype(jnp.int32)
    keys, places = keys.reshape(count, CHUNK), places.reshape(count, CHUNK)
    first, last = keys[:, 0], keys[:, -1]
    before = jnp.concatenate([jnp.full(1, -1, jnp.int32), last[:-1]])
    after = jnp.concatenate([first[1:], jnp.full(1, num_rows, jnp.int32)])
    real = (keys < num_rows).sum(1, dtype=jnp.int32)
    notes = jnp.zeros((count, NOTES - 3), jnp.int32)
    chunks = jnp.concatenate([places, keys, jnp.stack([before, after, real], 1), notes], 1)
    begins = (last == after) & (last < num_rows) & ((last != first) | (first != before))
    # The last chunk whose first id is this one.
    method = "compare_all" if count <= MOST_TO_COMPARE else "scan"
    end = jnp.searchsorted(first, last, side="right", method=method).astype(jnp.int32) - 1
    joint = jnp.stack([jnp.where(begins, last, num_rows), end], 1)
    return Order(chunks, jnp.pad(joint, ((0, 0), (0, NOTES - 2))))


def slice_of(pieces: int) -> int:
    """Returns how many of an even number of pieces a block takes: an even divisor.

    A slice that goes over the end of a row would be written into the next one.
    """
    return max(size for size in range(2, MAX_SLICE + 1, 2) if pieces % size == 0)


class _Rows(NamedTuple):
    """Rows on their way through a ring of slots in shared memory."""

    source: Any
    """[rows, pieces, 64] in device memory."""
    pieces: Any
    """Which of them."""
    slots: Any
    barriers: Any

    def add_up(self, first: Any, stop: Any, row_of: Any, start: Any, step: Any) -> Any:
        """Runs `step(i, row, carry)` for i from first to stop; returns the last carry."""
        num_slots, *row_shape = self.slots.shape

        def load(i: Any) -> None:
            slot = lax.rem(i - first, num_slots)
            row = self.source.at[row_of(i), self.pieces]
            plgpu.copy_gmem_to_smem(row, self.slots.at[slot], self.barriers.at[slot])

        for ahead in range(num_slots - 1):
            pl.when(first + ahead < stop)(partial(load, first + ahead))

        def body(i: Any, carry: Any) -> Any:
            slot = lax.rem(i - first, num_slots)
            plgpu.barrier_wait(self.barriers.at[slot])
            row = plgpu.load(self.slots.at[slot], layout=_layout(row_shape), optimized=False)
            carry = step(i, row.astype(jnp.float32), carry)
            plgpu.commit_smem()  # every thread has read the slot that is filled again next
            pl.when(i + num_slots - 1 < stop)(partial(load, i + num_slots - 1))
            return carry

        return lax.fori_loop(first, stop, body, start)


def _layout(shape: Sequence[int]) -> Any:
    """Returns where the numbers of a slice live: the same for every dtype."""
    vector = 4 if math.prod(shape) % (4 * _mgpu.WARPGROUP) == 0 else 1
    return plgpu.Layout.WG_STRIDED(tuple(shape), vec_size=vector)


def _send(x: Array, buffer: Any, target: Any) -> None:
    """Sends a row off to device memory once the one before it is read."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    buffer[...] = x.astype(buffer.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer, target)


def _chunk_kernel(num_rows: int, size: int, *refs: Any) -> None:
    """Adds up one chunk's rows; see the module."""
    chunks, dy, total, heads, tails, notes, slots, narrow, wide, told, barriers = refs
    chunk, pieces = lax.axis_index("chunk"), pl.ds(lax.axis_index("slice") * size, size)
    plgpu.copy_gmem_to_smem(chunks.at[chunk], notes, told)
    plgpu.barrier_wait(told)
    first, before, after = notes[CHUNK], notes[2 * CHUNK], notes[2 * CHUNK + 1]
    stop = notes[2 * CHUNK + 2]
    zeros = plgpu.layout_cast(jnp.zeros((size, PIECE), jnp.float32), _layout((size, PIECE)))

    def step(i: Any, row: Array, total_so_far: Array) -> Array:
        key = notes[CHUNK + i]
        following = notes[CHUNK + lax.min(i + 1, CHUNK - 1)]
        is_last = i == stop - 1
        sum_here = total_so_far + row
        is_front = (key == first) & (first == before)
        goes_on = is_last & (key == after)
        ends = is_last | (following != key)
        pl.when(ends & is_front)(lambda: _send(sum_here, wide, heads.at[chunk, pieces]))
        back = ends & ~is_front & goes_on
        pl.when(back)(lambda: _send(sum_here, wide, tails.at[chunk, pieces]))
        whole = ends & ~is_front & ~goes_on
        pl.when(whole)(lambda: _send(sum_here, narrow, total.at[key, pieces]))
        return lax.cond(ends, lambda: zeros, lambda: sum_here)

    _Rows(dy, pieces, slots, barriers).add_up(0, stop, lambda i: notes[i], zeros, step)
    plgpu.wait_smem_to_gmem(0)


def _joint_kernel(num_rows: int, size: int, *refs: Any) -> None:
    """Adds up the parts of one id that goes over the end of a chunk."""
    joints, heads, tails, total, notes, slots, narrow, told, barriers = refs
    chunk, pieces = lax.axis_index("chunk"), pl.ds(lax.axis_index("slice") * size, size)
    plgpu.copy_gmem_to_smem(joints.at[chunk], notes, told)
    plgpu.barrier_wait(told)
    key, last = notes[0], notes[1]

    @pl.when(key < num_rows)
    def _() -> None:
        plgpu.copy_gmem_to_smem(tails.at[chunk, pieces], slots.at[0], told)
        plgpu.barrier_wait(told)
        start = plgpu.load(slots.at[0], layout=_layout((size, PIECE)), optimized=False)
        plgpu.commit_smem()
        rows = _Rows(heads, pieces, slots, barriers)
        whole = rows.add_up(chunk + 1, last + 1, lambda i: i, start, lambda i, row, x: x + row)
        _send(whole, narrow, total.at[key, pieces])
        plgpu.wait_smem_to_gmem(0)


def _launch(
    kernel: Any, name: str, interpret: Interpret, grid: tuple[int, int], out: Any, scratch: Any
) -> Any:
    return _mgpu.gpu_kernel(
        kernel,
        out_type=out,
        grid=grid,
        grid_names=("chunk", "slice"),
        scratch_types=scratch,
        interpret=_mgpu.interpret_params(interpret),
        kernel_name=name,
    )


@partial(jax.jit, static_argnums=(2, 3))
def _summed(dy_ND: Array, ids_N: Array, num_rows: int, interpret: Interpret) -> Array:
    """Returns the sum of the rows of equal id, [V, D], for every id below `num_rows`."""
    pieces, dtype = dy_ND.shape[1] // PIECE, dy_ND.dtype
    order, size = ordered(ids_N, num_rows), slice_of(pieces)
    count = order.chunks.shape[0]
    grid = (count, -(-pieces // size))
    part = jax.ShapeDtypeStruct((count, pieces, PIECE), jnp.float32)

    def ring(dtype: Any) -> Any:
        return plgpu.SMEM((NUM_SLOTS, size, PIECE), dtype)

    narrow, wide = (plgpu.SMEM((size, PIECE), t) for t in (dtype, jnp.float32))
    barriers = plgpu.Barrier(), plgpu.Barrier(num_barriers=NUM_SLOTS)
    notes = plgpu.SMEM((order.chunks.shape[1],), jnp.int32)
    chunks = _launch(
        partial(_chunk_kernel, num_rows, size), "embedding_backward_chunks", interpret, grid,
        (part, part), [notes, ring(dtype), narrow, wide, *barriers],
    )  # fmt: skip
    notes = plgpu.SMEM((NOTES,), jnp.int32)
    joints = _launch(
        partial(_joint_kernel, num_rows, size), "embedding_backward_joints", interpret, grid,
        (), [notes, ring(jnp.float32), narrow, *barriers],
    )  # fmt: skip

    def run(order: Order, dy_ND: Array, total: Any) -> list[Array]:
        heads, tails = chunks(order.chunks, dy_ND, total)
        joints(order.joints, heads, tails, total)
        return []

    operands = order, dy_ND.reshape(-1, pieces, PIECE)
    total = _mgpu.sum_in_gmem(run, operands, (num_rows, pieces, PIECE), dtype)[1]
    return total.reshape(num_rows, -1)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _embedding(table: Array, ids: Array, interpret: Interpret) -> Array:
    return gathered(table, ids)


def _forward(table: Array, ids: Array, interpret: Interpret) -> tuple[Array, tuple[Array, Array]]:
    # Of the table only its shape is wanted, and it is there anyway.
    return _embedding(table, ids, interpret), (table, ids)


def _backward(interpret: Interpret, kept: tuple[Array, Array], dy: Array) -> tuple[Array, Any]:
    table, ids = kept
    dy_ND, ids_N = dy.reshape(-1, dy.shape[-1]), ids.reshape(-1)
    one = jax.custom_batching.sequential_vmap(
        lambda dy_ND, ids_N: _summed(dy_ND, ids_N, table.shape[0], interpret)
    )
    return one(dy_ND, ids_N), np.zeros(ids.shape, jax.dtypes.float0)


_embedding.defvjp(_forward, _backward)


def embedding_pallas(ids: Array, table: Array) -> Array:
    """Runs a checked call whose gradient the kernels support; there is at least one id."""
    return _embedding(table, ids, dispatch.current_target().interpret)
