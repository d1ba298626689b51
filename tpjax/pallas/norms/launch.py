# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""One launch over all rows: the shape that every kernel of the norms has.

Arrays of rows go in, one array of rows comes out, and with it sums over the rows: each block writes
its part of a sum, in an order fixed by the number of blocks, and XLA adds the parts.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from tpjax.core.operator import Interpret
from tpjax.pallas import _mgpu
from tpjax.pallas.norms.config import Config, occupancy
from tpjax.pallas.norms.tiles import REDUCTION_BYTES, Tile, stream

Step = Callable[[Sequence[Array], Sequence[Any], list[Array]], list[Array]]
"""Takes vectors spread over a tile, the buffers of one tile, and sums; leaves the result in the
last buffer; returns the new sums."""


def sweep(
    step: Step,
    tile: Tile,
    config: Config,
    arrays: Sequence[Array],
    vectors: Sequence[Array | None],
    num_sums: int,
    interpret: Interpret,
    name: str,
) -> tuple[Array, list[Array]]:
    """Runs `step` on every tile of the rows.

    Args:
      step: the work on one tile.
      tile: of the rows.
      config: of the launch.
      arrays: [R, D], of one dtype.
      vectors: [D]; None is skipped.
      num_sums: how many sums over rows `step` carries.
      interpret: as in `Target`.
      name: of the kernel, in profiles.

    Returns:
      The results [R, D] in the dtype of the arrays, and the sums [D] in float32.
    """
    given = [v for v in vectors if v is not None]
    rows, features = arrays[0].shape
    dtype = arrays[0].dtype
    slot_bytes = len(arrays) * tile.rows * features * dtype.itemsize
    num_slots, blocks = occupancy(tile, rows, slot_bytes, config)

    def body(*refs: Any) -> None:
        taken = iter(refs)

        def take(count: int) -> list[Any]:
            return [next(taken) for _ in range(count)]

        sources, vector_refs = take(len(arrays)), take(len(given))
        (result,), parts = take(1), take(num_sums)
        slots, (barrier,) = take(len(arrays)), take(1)
        spread = [tile.load_vector(ref) for ref in vector_refs]
        start = [tile.zeros() for _ in parts]

        def one(buffers: Sequence[Any], sums: list[Array]) -> list[Array]:
            return step(spread, buffers, sums)

        sums = stream(tile, sources, result, slots, barrier, one, start)
        for part, total in zip(parts, sums, strict=True):
            tile.store_sum(part, lax.axis_index("block"), total)

    operands = [tile.view(a) for a in (*arrays, *given)]
    part = jax.ShapeDtypeStruct((blocks, *tile.shape[1:]), jnp.float32)
    buffer = plgpu.SMEM((num_slots, *tile.shape), dtype)
    kernel = _mgpu.gpu_kernel(
        body,
        out_type=(jax.ShapeDtypeStruct(operands[0].shape, dtype), *[part] * num_sums),
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=[
            *[buffer] * len(arrays),
            plgpu.Barrier(num_arrivals=len(arrays), num_barriers=num_slots),
        ],
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=REDUCTION_BYTES),
        interpret=_mgpu.interpret_params(interpret),
        kernel_name=name,
    )
    result, *parts = kernel(*operands)
    return result.reshape(rows, features), [p.sum(0).reshape(features) for p in parts]
