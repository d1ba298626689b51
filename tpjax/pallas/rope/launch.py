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
from tpjax.pallas.rope.tiles import Config, Tile, put

SMEM_BYTES = 227 * 1024
"""Shared memory of a Hopper SM."""
SYSTEM_BYTES = 2048
"""Of it, what a block takes for barriers, and the system."""

Step = Callable[[Sequence[Array], Sequence[Any], Any, list[Array]], list[Array]]
"""Takes vectors spread over a tile, the cuts of each array's tile, its angles, and sums; leaves the
result in the last array's cuts; returns the new sums."""


class Sweep(NamedTuple):
    """What one launch does to the heads."""

    step: Step
    """The work on one tile."""
    tile: Tile
    config: Config
    num_arrays: int
    """Arrays that `step` reads."""
    with_sums: bool
    """Whether `step` carries a sum over tokens and heads for each part."""
    interpret: Interpret
    name: str
    """Of the kernel, in profiles."""


def sweep(
    job: Sweep, arrays: Sequence[Array], angles: Array, vectors: Array | None
) -> tuple[Array, Array | None]:
    """Runs the job on every tile.

    Args:
      job: what to do.
      arrays: [B, T, H, D], of one dtype; D is in words where the tile's are.
      angles: cosine and sine, [T, 2F].
      vectors: one for each part, [parts, W], or None.

    Returns:
      The result [B, T, H, D] in the dtype of the arrays, and the sums [parts, W] in float32.
    """
    given = [angles] if vectors is None else [angles, vectors]
    result, *sums = _grouped(job)(*(x[None] for x in (*arrays, *given)))
    return result[0], sums[0][0] if sums else None


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


def _launch(job: Sweep, *operands: Array) -> tuple[Array, ...]:  # long: a body and its launch
    """Launches the kernel on arrays [G, B, T, H, D] and what goes with them."""
    tile, num_arrays, head = job.tile, job.num_arrays, job.tile.head
    groups, batch, tokens, heads, _ = operands[0].shape
    dtype, width, num_cuts = operands[0].dtype, head.width, head.num_cuts
    num_parts, num_angles = head.features // width, 2 * len(head.pairs)
    counts = batch, pl.cdiv(tokens, tile.tokens), pl.cdiv(heads, tile.heads)
    num_tiles = math.prod(counts)
    num_slots, resident = _occupancy(job, dtype)
    blocks = min(num_tiles, max(1, resident * _mgpu.num_sms() // groups))

    def body(*refs: Any) -> None:
        taken, index = iter(refs), lax.axis_index("block")
        group, block = lax.div(index, blocks), lax.rem(index, blocks)

        def take(count: int) -> list[Any]:
            return [next(taken) for _ in range(count)]

        def own(ref: Any) -> Any:
            return group if ref.shape[0] > 1 else 0

        sources, (angles,), vectors = (
            take(num_arrays),
            take(1),
            take(len(operands) - num_arrays - 1),
        )
        spread = [v for ref in vectors for v in tile.load_vectors(ref.at[own(ref)])]
        (result,), total = take(1), take(job.with_sums)
        slots = [take(num_cuts) for _ in range(num_arrays)]
        (angle_slots, barrier), meetings = take(2), take(job.with_sums)

        def window(number: Any, cut: int) -> tuple[Any, ...]:
            number, of_heads = lax.div(number, counts[2]), lax.rem(number, counts[2])
            example, of_tokens = lax.div(number, counts[1]), lax.rem(number, counts[1])
            return (
                pl.ds(group * batch + example, 1),
                pl.ds(of_tokens * tile.tokens, tile.tokens),
                pl.ds(of_heads * tile.heads, tile.heads),
                pl.ds(cut, 1),
            )

        def load(at: Any, slot: Any) -> None:
            for source, buffers in zip(sources, slots, strict=True):
                for cut, buffer in enumerate(buffers):
                    part = source.at[window(at, cut)]
                    plgpu.copy_gmem_to_smem(part, buffer.at[slot], barrier.at[slot])
            rows = angles.at[pl.ds(own(angles), 1), window(at, 0)[1]]
            plgpu.copy_gmem_to_smem(rows, angle_slots.at[slot], barrier.at[slot])

        def step(at: Any, slot: Any, sums: list[Array]) -> list[Array]:
            del at
            cuts = [[b.at[slot, 0] for b in buffers] for buffers in slots]
            return job.step(spread, cuts, angle_slots.at[slot, 0], sums)

        def store(at: Any, slot: Any) -> None:
            for cut, buffer in enumerate(slots[-1]):
                plgpu.copy_smem_to_gmem(buffer.at[slot], result.at[window(at, cut)])

        sums = [tile.zeros() for _ in range(num_parts * job.with_sums)]
        share = Share(block, blocks, num_tiles, num_cuts)
        for part, x in enumerate(stream(share, num_slots, barrier, load, step, store, sums)):
            put(meetings[0].at[part], x)
            plgpu.commit_smem()
            put(total[0].at[group, block, part], tile.sum_of_unit(meetings[0].at[part]))

    views = [x.reshape(-1, tokens, heads, num_cuts, width) for x in operands[:num_arrays]]
    angles, *vectors = operands[num_arrays:]
    buffer = plgpu.SMEM((num_slots, 1, tile.tokens, tile.heads, 1, width), dtype)
    sums = jax.ShapeDtypeStruct((groups, blocks, num_parts, width), jnp.float32)
    kernel = _mgpu.gpu_kernel(
        body,
        out_type=(jax.ShapeDtypeStruct(views[0].shape, dtype), *[sums] * job.with_sums),
        grid=(groups * blocks,),
        grid_names=("block",),
        scratch_types=[
            *[buffer] * (num_arrays * num_cuts),
            plgpu.SMEM((num_slots, 1, tile.tokens, num_angles, width), jnp.float32),
            plgpu.Barrier(num_arrivals=num_arrays * num_cuts + 1, num_barriers=num_slots),
            *[plgpu.SMEM((num_parts, *tile.unit, 1, width), jnp.float32)] * job.with_sums,
        ],
        interpret=_mgpu.interpret_params(job.interpret),
        kernel_name=job.name,
    )
    angles = angles.reshape(-1, tokens, num_angles, width)
    result, *sums = kernel(*views, angles, *vectors)
    return (result.reshape(operands[0].shape), *(x.sum(1) for x in sums))


def _occupancy(job: Sweep, dtype: Any) -> tuple[int, int]:
    """Returns slots of a block and blocks on an SM, no more than shared memory has room for."""
    tile, head = job.tile, job.tile.head
    slot = job.num_arrays * tile.tokens * tile.heads * head.columns * dtype.itemsize
    slot += tile.tokens * 2 * head.num_pairs * 4
    beside = SYSTEM_BYTES + 4 * math.prod(tile.unit) * head.features * job.with_sums
    num_slots = max(2, min(job.config.num_slots, (SMEM_BYTES - beside) // slot))
    resident = SMEM_BYTES // (num_slots * slot + beside)
    return num_slots, max(1, min(job.config.blocks_per_sm, resident))


class Share(NamedTuple):
    """Which tiles a block takes: `block`, `block + blocks`, and so on."""

    block: Any
    blocks: int
    num_tiles: int
    """Of all blocks."""
    num_stores: int
    """Copies that take the result of one tile to device memory."""


def stream(
    share: Share,
    num_slots: int,
    barrier: Any,
    load: Callable[[Any, Any], None],
    step: Callable[[Any, Any, Any], Any],
    store: Callable[[Any, Any], None],
    carry: Any,
) -> Any:
    """Runs `step` on a share of the tiles; returns the last carry.

    Loads run up to `num_slots - 1` tiles ahead: a slot is filled again one step after its result
    was sent off, by when it has most likely been read.
    """
    block, blocks, num_tiles, num_stores = share
    own = lax.div(num_tiles - block + blocks - 1, blocks)

    for ahead in range(num_slots):
        pl.when(ahead < own)(lambda ahead=ahead: load(block + ahead * blocks, ahead))

    def body(i: Any, carry: Any) -> Any:
        slot = lax.rem(i, num_slots)
        plgpu.barrier_wait(barrier.at[slot])
        carry = step(block + i * blocks, slot, carry)
        plgpu.commit_smem()
        store(block + i * blocks, slot)
        following = i - 1 + num_slots

        @pl.when((i >= 1) & (following < own))
        def _() -> None:
            plgpu.wait_smem_to_gmem(num_stores, wait_read_only=True)
            load(block + following * blocks, lax.rem(following, num_slots))

        return carry

    carry = lax.fori_loop(0, own, body, carry)
    plgpu.wait_smem_to_gmem(0)
    return carry
