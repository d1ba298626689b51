# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""One launch over all tokens and heads: the shape that every kernel of rotary embedding has.

Arrays [G, B, T, H, D] go in, one like them comes out, and with it sums over B, T and H: each block
writes its part of a sum, in an order fixed by the number of blocks, and XLA adds the parts.
`jax.vmap` makes the groups G. Angles [G or 1, T, 2F] are the same for all B and heads.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from tpjax.core.operator import Interpret
from tpjax.pallas import _mgpu
from tpjax.pallas.rope.tiles import Config, Tile

SMEM_BYTES = 227 * 1024
"""Shared memory of a Hopper SM."""
SYSTEM_BYTES = 2048
"""Of it, what a block takes for barriers, and the system."""

Step = Callable[[Sequence[Array], Sequence[Any], Any, list[Array]], list[Array]]
"""Takes vectors spread over a tile, the arrays' buffers of one tile [r, h, D], its angles [r, 2F],
and sums; leaves the result in the last buffer; returns the new sums."""


class Sweep(NamedTuple):
    """What one launch does to the heads."""

    step: Step
    """The work on one tile."""
    tile: Tile
    config: Config
    num_arrays: int
    """Arrays that `step` reads."""
    with_sums: bool
    """Whether `step` carries a sum for each vector."""
    interpret: Interpret
    name: str
    """Of the kernel, in profiles."""


def sweep(job: Sweep, arrays: Sequence[Array], angles: Array, vectors: Sequence[Array]) -> Any:
    """Runs the job on every tile.

    Args:
      job: what to do.
      arrays: [B, T, H, D], of one dtype; D is in words where the tile's are.
      angles: cosine and sine, [T, 2F].
      vectors: [W], one for each part, or none.

    Returns:
      The result [B, T, H, D] in the dtype of the arrays, and the sums [W] in float32.
    """
    result, *sums = _grouped(job)(*(x[None] for x in (*arrays, angles, *vectors)))
    return result[0], [x[0] for x in sums]


def _grouped(job: Sweep) -> Callable[..., tuple[Array, ...]]:
    """Returns the job on operands with a leading axis of groups; vmap makes more of them."""

    @jax.custom_batching.custom_vmap
    def run(*operands: Array) -> tuple[Array, ...]:
        arrays, shared = operands[: job.num_arrays], operands[job.num_arrays :]
        groups, batch, *rest = arrays[0].shape
        if groups > 1 and not job.with_sums and all(v.shape[0] == 1 for v in shared):
            folded = (a.reshape(1, groups * batch, *rest) for a in arrays)
            return (_launch(job, *folded, *shared)[0].reshape(arrays[0].shape),)
        return _launch(job, *operands)

    @run.def_vmap
    def _(size: int, batched: Sequence[bool], *operands: Array) -> tuple[Any, Any]:
        groups, more = operands[0].shape[1 if batched[0] else 0], []
        for i, (x, has_axis) in enumerate(zip(operands, batched, strict=True)):
            if not has_axis and (i < job.num_arrays or x.shape[0] > 1):
                x, has_axis = jnp.broadcast_to(x, (size, *x.shape)), True
            elif has_axis and i >= job.num_arrays:  # one for each of the groups inside
                x = jnp.broadcast_to(x, (size, groups, *x.shape[2:]))
            more.append(x.reshape(-1, *x.shape[2:]) if has_axis else x)
        results = _grouped(job)(*more)
        return tuple(r.reshape(size, -1, *r.shape[1:]) for r in results), (True,) * len(results)

    return run


def _launch(job: Sweep, *operands: Array) -> tuple[Array, ...]:
    """Launches the kernel on arrays [G, B, T, H, D] and what goes with them."""
    tile, num_arrays = job.tile, job.num_arrays
    groups, batch, tokens, heads, columns = operands[0].shape
    dtype, vectors = operands[0].dtype, operands[num_arrays + 1 :]
    counts = batch, pl.cdiv(tokens, tile.tokens), pl.cdiv(heads, tile.heads)
    num_tiles = counts[0] * counts[1] * counts[2]
    slot_bytes = num_arrays * tile.tokens * tile.heads * columns * dtype.itemsize
    slot_bytes += tile.tokens * 2 * tile.num_pairs * 4
    meeting_bytes = SYSTEM_BYTES + 4 * math.prod(tile.unit) * tile.features * job.with_sums
    num_slots = max(2, min(job.config.num_slots, (SMEM_BYTES - meeting_bytes) // slot_bytes))
    resident = SMEM_BYTES // (num_slots * slot_bytes + meeting_bytes)
    resident = max(1, min(job.config.blocks_per_sm, resident))
    blocks = min(num_tiles, max(1, resident * _mgpu.num_sms() // groups))

    def body(*refs: Any) -> None:
        taken, index = iter(refs), lax.axis_index("block")
        group, block = lax.div(index, blocks), lax.rem(index, blocks)

        def take(count: int) -> list[Any]:
            return [next(taken) for _ in range(count)]

        def own(ref: Any) -> Any:
            return group if ref.shape[0] > 1 else 0

        sources, (angles,) = take(num_arrays), take(1)
        spread = [tile.load_vector(ref.at[own(ref)]) for ref in take(len(vectors))]
        (result,), parts = take(1), take(len(vectors) if job.with_sums else 0)
        slots, (angle_slots, barrier), meetings = take(num_arrays), take(2), take(len(parts))

        def window(number: Any) -> tuple[Any, ...]:
            number, head = lax.div(number, counts[2]), lax.rem(number, counts[2])
            example, token = lax.div(number, counts[1]), lax.rem(number, counts[1])
            return (
                pl.ds(group, 1), pl.ds(example, 1),
                pl.ds(token * tile.tokens, tile.tokens), pl.ds(head * tile.heads, tile.heads),
            )  # fmt: skip

        def load(at: Any, slot: Any) -> None:
            place, arrived = window(at), barrier.at[slot]
            for source, buffer in zip(sources, slots, strict=True):
                plgpu.copy_gmem_to_smem(source.at[place], buffer.at[slot], arrived)
            rows = angles.at[pl.ds(own(angles), 1), place[2]]
            plgpu.copy_gmem_to_smem(rows, angle_slots.at[slot], arrived)

        def step(slot: Any, sums: list[Array]) -> list[Array]:
            return job.step(
                spread, [b.at[slot, 0, 0] for b in slots], angle_slots.at[slot, 0], sums
            )

        def store(at: Any, slot: Any) -> None:
            plgpu.copy_smem_to_gmem(slots[-1].at[slot], result.at[window(at)])

        sums = [tile.zeros(part.shape[-1]) for part in parts]
        sums = _stream((block, blocks, num_tiles), num_slots, barrier, load, step, store, sums)
        for part, total, meeting in zip(parts, sums, meetings, strict=True):
            meeting[...] = total
            plgpu.commit_smem()
            part[group, block] = tile.sum_of_unit(meeting)

    def buffer(*shape: int, dtype: Any = dtype) -> Any:
        return plgpu.SMEM((num_slots, *shape), dtype)

    kernel = _mgpu.gpu_kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(operands[0].shape, dtype),
            *(
                jax.ShapeDtypeStruct((groups, blocks, v.shape[-1]), jnp.float32)
                for v in vectors * job.with_sums
            ),
        ),
        grid=(groups * blocks,),
        grid_names=("block",),
        scratch_types=[
            *[buffer(1, 1, tile.tokens, tile.heads, columns)] * num_arrays,
            buffer(1, tile.tokens, 2 * tile.num_pairs, dtype=jnp.float32),
            plgpu.Barrier(num_arrivals=num_arrays + 1, num_barriers=num_slots),
            *(plgpu.SMEM((*tile.unit, v.shape[-1]), jnp.float32) for v in vectors * job.with_sums),
        ],
        interpret=_mgpu.interpret_params(job.interpret),
        kernel_name=job.name,
    )
    result, *sums = kernel(*operands)
    return (result, *(x.sum(1) for x in sums))


def _stream(
    share: tuple[Any, int, int],
    num_slots: int,
    barrier: Any,
    load: Callable[[Any, Any], None],
    step: Callable[[Any, Any], Any],
    store: Callable[[Any, Any], None],
    carry: Any,
) -> Any:
    """Runs `step` on tiles `block`, `block + blocks`, ... of `num_tiles`; returns the last carry.

    Loads run up to `num_slots - 1` tiles ahead: a slot is filled again one step after its result
    was sent off, by when it has most likely been read.
    """
    block, blocks, num_tiles = share
    own = lax.div(num_tiles - block + blocks - 1, blocks)

    for ahead in range(num_slots):
        pl.when(ahead < own)(lambda ahead=ahead: load(block + ahead * blocks, ahead))

    def body(i: Any, carry: Any) -> Any:
        slot = lax.rem(i, num_slots)
        plgpu.barrier_wait(barrier.at[slot])
        carry = step(slot, carry)
        plgpu.commit_smem()
        store(block + i * blocks, slot)
        following = i - 1 + num_slots

        @pl.when((i >= 1) & (following < own))
        def _() -> None:
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            load(block + following * blocks, lax.rem(following, num_slots))

        return carry

    carry = lax.fori_loop(0, own, body, carry)
    plgpu.wait_smem_to_gmem(0)
    return carry
