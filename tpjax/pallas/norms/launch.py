# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""One launch over all rows: the shape that every kernel of the norms has.

Arrays of rows and numbers for each row go in; arrays of rows and numbers for each row come out, and
with them sums over the rows: each block writes its part of a sum, in an order fixed by the number
of blocks, and XLA adds the parts.

Arrays are [V, R, G, D]: V copies, made by `jax.vmap`, and G groups of features in a row; each pair
of them has sums of its own, all in one launch.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tpjax.core.operator import Interpret
from tpjax.pallas import _mgpu
from tpjax.pallas.norms.config import EASY_PER_LANE, Config, occupancy
from tpjax.pallas.norms.tiles import REDUCTION_BYTES, Rows, Share, Tile, stream

Vector = Callable[[int], Array]
"""Gives pieces of a vector, spread over the rows of a tile."""
Sums = list[list[Array]]
"""Pieces of each sum over rows."""
Step = Callable[..., tuple[Sequence[Array], Sums]]
"""Takes vectors, numbers for each row, the buffers of one tile, and sums; leaves results in
buffers; returns new numbers for each row, and the new sums."""


class Sweep(NamedTuple):
    """What one launch does to the rows."""

    step: Step
    """The work on one tile."""
    tile: Tile
    config: Config
    num_arrays: int
    """Arrays of rows that `step` reads."""
    num_vectors: int
    results: tuple[int, ...]
    """In which buffers `step` leaves results."""
    more_buffers: tuple[Any, ...]
    """Dtypes of buffers after those of the arrays."""
    num_numbers: int
    """Numbers for each row that `step` returns."""
    num_sums: int
    """Sums over rows that `step` carries."""
    interpret: Interpret
    name: str
    """Of the kernel, in profiles."""


class Swept(NamedTuple):
    """What a launch made."""

    arrays: list[Array]
    """[1, R, G, D] of the dtypes of their buffers."""
    numbers: list[Array]
    """[1, R, G], float32."""
    sums: list[Array]
    """[1, G, D], float32."""


def sweep(
    job: Sweep,
    arrays: Sequence[Array],
    vectors: Sequence[Array | None],
    numbers: Sequence[Array] = (),
) -> Swept:
    """Runs the job on every tile of the rows.

    Args:
      job: what to do.
      arrays: [1, R, G, D].
      vectors: [G, D]; None is skipped.
      numbers: [1, R, G] or [1, R, 1], float32.
    """
    given = [v[None] for v in vectors if v is not None]
    out = _copies(job)(*arrays, *given, *numbers)
    first, second = len(job.results), len(job.results) + job.num_numbers
    return Swept(list(out[:first]), list(out[first:second]), list(out[second:]))


def _copies(job: Sweep) -> Callable[..., tuple[Array, ...]]:
    """Returns the job on [V, R, G, D], [V or 1, G, D] and [V, R, G]; vmap makes more copies."""
    vectors_at = range(job.num_arrays, job.num_arrays + job.num_vectors)

    @jax.custom_batching.custom_vmap
    def run(*operands: Array) -> tuple[Array, ...]:
        copies, rows = operands[0].shape[:2]
        common = all(operands[i].shape[0] == 1 for i in vectors_at)
        if copies > 1 and not job.num_sums and common:
            folded = [
                x if i in vectors_at else x.reshape(1, copies * rows, *x.shape[2:])
                for i, x in enumerate(operands)
            ]
            return tuple(x.reshape(copies, rows, *x.shape[2:]) for x in _launch(job, *folded))
        if copies == 1 or rows % job.tile.rows == 0:
            return _launch(job, *operands)
        # A copy to device memory is cut off at the end of the array, not of its group.
        rest = -rows % job.tile.rows
        padded = [
            x if i in vectors_at else jnp.pad(x, ((0, 0), (0, rest)) + ((0, 0),) * (x.ndim - 2))
            for i, x in enumerate(operands)
        ]
        out, by_row = _launch(job, *padded), len(job.results) + job.num_numbers
        return (*(x[:, :rows] for x in out[:by_row]), *out[by_row:])

    @run.def_vmap
    def _(size: int, batched: Sequence[bool], *operands: Array) -> tuple[Any, Any]:
        copies = operands[0].shape[1 if batched[0] else 0]
        more = []
        for i, (x, has_axis) in enumerate(zip(operands, batched, strict=True)):
            if not has_axis and (i not in vectors_at or x.shape[0] > 1):
                x, has_axis = jnp.broadcast_to(x, (size, *x.shape)), True
            elif has_axis and i in vectors_at:  # one vector for each of the copies inside
                x = jnp.broadcast_to(x, (size, copies, *x.shape[2:]))
            more.append(x.reshape(-1, *x.shape[2:]) if has_axis else x)
        results = _copies(job)(*more)
        return tuple(r.reshape(size, -1, *r.shape[1:]) for r in results), (True,) * len(results)

    return run


class _Block(NamedTuple):
    """What a block works on."""

    copy: Any
    group: Any
    share: Share
    zero: Any
    """0; where there are several copies or groups, or buffers of several dtypes, for which there is
    no swizzle but a long search, one that the compiler does not see."""

    def rows(self, ref: Any) -> Rows:
        """Returns the rows of an array [V, R, G, N, C] that are for this copy and group."""
        return Rows(ref, self.copy, self.group, self.zero)

    def of(self, ref: Any) -> Any:
        """Returns the part of an array [V or 1, G or 1, ...] that is for this copy and group."""
        copies, groups = ref.shape[:2]
        return ref.at[self.copy if copies > 1 else 0, self.group if groups > 1 else 0]


def _block(job: Sweep, copies: int, groups: int, blocks: int) -> _Block:
    """Returns the work of this block: neighbours take the groups of the same rows."""
    block = lax.axis_index("block")
    group, index = lax.rem(block, groups), lax.div(block, groups)
    swizzled = copies == groups == 1 and not job.more_buffers
    zero = 0 if swizzled else lax.div(block, copies * groups * blocks)
    return _Block(lax.div(index, blocks), group, Share(lax.rem(index, blocks), blocks), zero)


def _vector(tile: Tile, ref: Any) -> Vector:
    """Returns a vector, held in registers if there is room; else it is read for each tile."""
    if tile.per_lane > EASY_PER_LANE:
        return partial(tile.load_vector, ref)
    return [tile.load_vector(ref, piece) for piece in range(tile.num_pieces)].__getitem__


def _body(job: Sweep, block: _Block, num_numbers: int, refs: Sequence[Any]) -> None:
    """Runs the kernel of one block."""
    tile, taken = job.tile, iter(refs)

    def take(count: int) -> list[Any]:
        return [next(taken) for _ in range(count)]

    sources = [block.rows(ref) for ref in take(job.num_arrays)]
    vectors = [_vector(tile, block.of(ref)) for ref in take(job.num_vectors)]
    numbers = [block.of(ref) for ref in take(num_numbers)]
    results = [block.rows(ref) for ref in take(len(job.results))]
    new_numbers = [block.of(ref) for ref in take(job.num_numbers)]
    parts = [block.of(ref) for ref in take(job.num_sums)]
    slots = take(job.num_arrays + len(job.more_buffers))
    (barrier,) = take(1)

    def step(first: Any, buffers: Sequence[Any], sums: Sums) -> Sums:
        window = pl.ds(first, tile.rows)
        given = [tile.load_rows(ref.at[window]) for ref in numbers]
        made, sums = job.step(vectors, given, buffers, sums)
        for ref, x in zip(new_numbers, made, strict=True):
            tile.store_rows(ref.at[window], x)
        return sums

    start = [tile.zeros() for _ in parts]
    to = list(zip(results, job.results, strict=True))
    sums = stream(tile, block.share, sources, to, slots, barrier, step, start)
    for part, total in zip(parts, sums, strict=True):
        tile.store_sum(part, block.share.block, total)


def _launch(job: Sweep, *operands: Array) -> tuple[Array, ...]:
    """Launches the kernel on arrays [V, R, G, D], vectors [V or 1, G, D], numbers [V, R, G]."""
    tile, first = job.tile, job.num_arrays + job.num_vectors
    arrays, vectors, numbers = operands[: job.num_arrays], operands[job.num_arrays : first], []
    copies, rows, groups, features = arrays[0].shape
    all_rows = -(-rows // tile.rows) * tile.rows
    for x in operands[first:]:  # read without TMA: nothing beyond the end
        numbers.append(jnp.pad(x, ((0, 0), (0, all_rows - rows), (0, 0))).transpose(0, 2, 1))
    dtypes = [*(x.dtype for x in arrays), *(np.dtype(d) for d in job.more_buffers)]
    slot_bytes = tile.rows * features * sum(d.itemsize for d in dtypes)
    num_slots, blocks = occupancy(tile, copies * groups, rows, slot_bytes, job.config)

    def body(*refs: Any) -> None:
        _body(job, _block(job, copies, groups, blocks), len(numbers), refs)

    views = [tile.view(x) for x in (*arrays, *vectors)]
    out = [jax.ShapeDtypeStruct(views[0].shape, dtypes[slot]) for slot in job.results]
    number = jax.ShapeDtypeStruct((copies, groups, all_rows), jnp.float32)
    part = jax.ShapeDtypeStruct((copies, groups, blocks, *tile.box[1:]), jnp.float32)
    kernel = _mgpu.gpu_kernel(
        body,
        out_type=(*out, *[number] * job.num_numbers, *[part] * job.num_sums),
        grid=(copies * groups * blocks,),
        grid_names=("block",),
        scratch_types=[
            *(plgpu.SMEM((num_slots, *tile.box), d) for d in dtypes),
            plgpu.Barrier(num_arrivals=job.num_arrays, num_barriers=num_slots),
        ],
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=REDUCTION_BYTES),
        interpret=_mgpu.interpret_params(job.interpret),
        kernel_name=job.name,
    )
    made = list(kernel(*views, *numbers))
    second = len(out) + job.num_numbers
    return (
        *(x.reshape(arrays[0].shape) for x in made[: len(out)]),
        *(x[..., :rows].transpose(0, 2, 1) for x in made[len(out) : second]),
        *(x.sum(2).reshape(copies, groups, features) for x in made[second:]),
    )
