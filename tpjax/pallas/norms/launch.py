# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""One launch over all rows: the shape that every kernel of the norms has.

Arrays of rows go in, one array of rows comes out, and with it sums over the rows: each block writes
its part of a sum, in an order fixed by the number of blocks, and XLA adds the parts.

`jax.vmap` makes groups of rows: [G, R, D] in one launch, with sums for each group.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from tpjax.core.operator import Interpret
from tpjax.pallas import _mgpu
from tpjax.pallas.norms.config import Config, occupancy
from tpjax.pallas.norms.tiles import REDUCTION_BYTES, Share, Tile, stream

Step = Callable[[Sequence[Array], Sequence[Any], list[Array]], list[Array]]
"""Takes vectors spread over a tile, the buffers of one tile, and sums; leaves the result in the
last buffer; returns the new sums."""


class Sweep(NamedTuple):
    """What one launch does to the rows."""

    step: Step
    """The work on one tile."""
    tile: Tile
    config: Config
    num_arrays: int
    """Arrays of rows that `step` reads."""
    num_sums: int
    """Sums over rows that `step` carries."""
    interpret: Interpret
    name: str
    """Of the kernel, in profiles."""


def sweep(
    job: Sweep, arrays: Sequence[Array], vectors: Sequence[Array | None]
) -> tuple[Array, list[Array]]:
    """Runs the job on every tile of the rows.

    Args:
      job: what to do.
      arrays: [R, D], of one dtype.
      vectors: [D]; None is skipped.

    Returns:
      The results [R, D] in the dtype of the arrays, and the sums [D] in float32.
    """
    given = [v for v in vectors if v is not None]
    result, *sums = _grouped(job)(*(x[None] for x in (*arrays, *given)))
    return result[0], [x[0] for x in sums]


def _grouped(job: Sweep) -> Callable[..., tuple[Array, ...]]:
    """Returns the job on arrays [G, R, D] and vectors [G or 1, D]; vmap makes more groups."""

    @jax.custom_batching.custom_vmap
    def run(*operands: Array) -> tuple[Array, ...]:
        arrays, vectors = operands[: job.num_arrays], operands[job.num_arrays :]
        groups, rows, features = arrays[0].shape
        if groups > 1 and not job.num_sums and all(v.shape[0] == 1 for v in vectors):
            folded = (a.reshape(1, groups * rows, features) for a in arrays)
            return (_launch(job, *folded, *vectors)[0].reshape(groups, rows, features),)
        if groups == 1 or rows % job.tile.rows == 0:
            return _launch(job, *operands)
        # A copy to device memory is cut off at the end of the array, not of its group.
        rest = -rows % job.tile.rows
        padded = (jnp.pad(a, ((0, 0), (0, rest), (0, 0))) for a in arrays)
        result, *sums = _launch(job, *padded, *vectors)
        return (result[:, :rows], *sums)

    @run.def_vmap
    def _(size: int, batched: Sequence[bool], *operands: Array) -> tuple[Any, Any]:
        more = []
        for i, (x, has_axis) in enumerate(zip(operands, batched, strict=True)):
            if not has_axis and (i < job.num_arrays or x.shape[0] > 1):
                x, has_axis = jnp.broadcast_to(x, (size, *x.shape)), True
            elif has_axis and i >= job.num_arrays:  # one vector for each of the groups inside
                groups = operands[0].shape[1 if batched[0] else 0]
                x = jnp.broadcast_to(x, (size, groups, x.shape[-1]))
            more.append(x.reshape(-1, *x.shape[2:]) if has_axis else x)
        results = _grouped(job)(*more)
        return tuple(r.reshape(size, -1, *r.shape[1:]) for r in results), (True,) * len(results)

    return run


def _launch(job: Sweep, *operands: Array) -> tuple[Array, ...]:
    """Launches the kernel on arrays [G, R, D] and vectors [G or 1, D]."""
    tile, num_arrays = job.tile, job.num_arrays
    groups, rows, features = operands[0].shape
    dtype = operands[0].dtype
    slot_bytes = num_arrays * tile.rows * features * dtype.itemsize
    num_slots, blocks = occupancy(tile, groups, rows, slot_bytes, job.config)
    num_vectors = len(operands) - num_arrays

    def body(*refs: Any) -> None:
        taken, index = iter(refs), lax.axis_index("block")
        group, block = lax.div(index, blocks), lax.rem(index, blocks)

        def take(count: int) -> list[Any]:
            return [next(taken) for _ in range(count)]

        sources = [ref.at[group] for ref in take(num_arrays)]
        spread = [
            tile.load_vector(ref.at[group if ref.shape[0] > 1 else 0]) for ref in take(num_vectors)
        ]
        (result,), parts = take(1), take(job.num_sums)
        slots, (barrier,) = take(num_arrays), take(1)

        def one(buffers: Sequence[Any], sums: list[Array]) -> list[Array]:
            return job.step(spread, buffers, sums)

        start = [tile.zeros() for _ in parts]
        share = Share(block, blocks)
        sums = stream(tile, share, sources, result.at[group], slots, barrier, one, start)
        for part, total in zip(parts, sums, strict=True):
            tile.store_sum(part.at[group], block, total)

    views = [tile.view(x) for x in operands]
    part = jax.ShapeDtypeStruct((groups, blocks, *tile.shape[1:]), jnp.float32)
    buffer = plgpu.SMEM((num_slots, *tile.shape), dtype)
    kernel = _mgpu.gpu_kernel(
        body,
        out_type=(jax.ShapeDtypeStruct(views[0].shape, dtype), *[part] * job.num_sums),
        grid=(groups * blocks,),
        grid_names=("block",),
        scratch_types=[
            *[buffer] * num_arrays,
            plgpu.Barrier(num_arrivals=num_arrays, num_barriers=num_slots),
        ],
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=REDUCTION_BYTES),
        interpret=_mgpu.interpret_params(job.interpret),
        kernel_name=job.name,
    )
    result, *parts = kernel(*views)
    sums = (p.sum(1).reshape(groups, features) for p in parts)
    return (result.reshape(groups, rows, features), *sums)
