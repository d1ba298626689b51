# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The kernel of `dropout` on Hopper: one pass, 64 random bits for four elements.

    y = x scale where 16 bits of threefry(seed, (row, i)) are below `levels`, else 0

The four elements are feature i of each quarter of a row, so a tile holds the same columns of all
four; their words are made once, where XLA makes them anew for each. The backward pass is the same
on dy.

Letters: R rows, D features, Q = D / 4, r rows and W columns of a tile. Numerics: the product is
float32, rounded once; the mask is that of the reference, bit for bit. Bytes: 2 R D. Limits:
`unsupported`. Source: `tpjax.core.dropouts`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tpjax.core.dropouts import LEVELS, levels_of, threefry
from tpjax.core.operator import Interpret, Key
from tpjax.pallas import _mgpu, dispatch
from tpjax.pallas.rope.launch import SMEM_BYTES, SYSTEM_BYTES, Share, stream
from tpjax.pallas.rope.tiles import LANES, VECTOR, WARPS, put
from tpjax.pallas.tuning import config_for

QUARTERS = 4
DTYPES = ("bfloat16", "float16", "float32")
QUANTUM = 128
"""Features come in multiples."""
ROWS_ALIGNED = 32
"""Numbers of rows in 128 bytes: TMA writes to multiples of them."""
MAX_WIDTH = 128
"""W at most: a warp's lanes, each with a vector."""


@dataclass(frozen=True)
class Config:
    """Sizes of one launch; they change speed, never meaning."""

    rows: int = 8
    """r, a multiple of what a warpgroup takes at once where columns are few."""
    num_slots: int = 3
    """Tiles in flight in one block; at least 2."""
    blocks_per_sm: int = 4
    """Blocks on one SM, as far as its shared memory allows."""


CONFIGS = (Config(), Config(rows=4, num_slots=4, blocks_per_sm=6), Config(rows=16, blocks_per_sm=3))
"""Worth trying."""


class Plan(NamedTuple):
    """Everything static about a call; hashable."""

    levels: int
    config: Config
    interpret: Interpret


def unsupported(key: Key) -> str | None:
    """Returns why the kernel cannot run the call, or None."""
    x = key.aval("x")
    if x.dtype.name not in DTYPES:
        return f"x must be of dtype {', '.join(DTYPES)}; it is {x.dtype.name}"
    if x.shape[-1] % QUANTUM:
        return f"the last axis of x must be a multiple of {QUANTUM}; it has {x.shape[-1]} features"
    if levels_of(key.option("rate")) in (0, LEVELS):
        return "there is nothing to draw at a rate of 0 or 1"
    return None


class _Tile(NamedTuple):
    """Rows and columns of a tile, in each of four quarters: [r, 1, W]."""

    rows: int
    width: int

    @property
    def layout(self) -> Any:
        """Where the elements live: rows over warps and lanes, columns over the lanes left."""
        lanes = self.width // VECTOR
        tiles = ((WARPS * LANES // lanes, 1, self.width), (LANES // lanes, 1, self.width))
        tiles = (*tiles, (1, 1, VECTOR))
        return _mgpu.tiled_layout(tiles, warp_dims=(-9,), lane_dims=(-6, -4))

    def words(self, seed: Any, rows_ref: Any, first_column: Any) -> list[Array]:
        """Returns 16 random bits for each element of each quarter."""
        shape = (self.rows, 1, self.width)
        layout = self.layout
        rows = plgpu.load(rows_ref, layout=layout.reduce((1, 2)), optimized=False)
        rows = plgpu.layout_cast(lax.broadcast_in_dim(rows, shape, (0,)), layout)
        columns = plgpu.broadcasted_iota(jnp.int32, shape, 2, layout=layout) + first_column
        pair = threefry((seed[0], seed[1]), (rows, columns.astype(jnp.uint32)))
        sixteen, mask = jnp.uint32(16), jnp.uint32(0xFFFF)
        return [half for word in pair for half in (word & mask, word >> sixteen)]


def tile_for(features: int, config: Config) -> _Tile:
    """Returns the tile for rows of so many features."""
    width = math.gcd(features // QUARTERS, MAX_WIDTH)
    at_once = WARPS * LANES * VECTOR // width
    return _Tile(at_once * -(-config.rows // at_once), width)


def _launch(plan: Plan, x_RD: Array, rows_R: Array, seed: Array) -> Array:
    """Launches the kernel."""
    num_rows, features = x_RD.shape
    dtype, tile = x_RD.dtype, tile_for(features, plan.config)
    quarter = features // QUARTERS
    across = quarter // tile.width
    num_tiles = pl.cdiv(num_rows, tile.rows) * across
    slot_bytes = QUARTERS * tile.rows * tile.width * dtype.itemsize + 128
    num_slots = plan.config.num_slots
    resident = SMEM_BYTES // (num_slots * slot_bytes + SYSTEM_BYTES)
    blocks = min(num_tiles, min(resident, plan.config.blocks_per_sm) * _mgpu.num_sms())

    def body(x: Any, rows: Any, seed: Any, y: Any, *scratch: Any) -> None:
        *slots, row_slots, barrier = scratch
        words = seed[0], seed[1]

        def window(at: Any, place: int) -> tuple[Any, Any, Any]:
            row, column = lax.div(at, across) * tile.rows, lax.rem(at, across) * tile.width
            return pl.ds(row, tile.rows), pl.ds(place, 1), pl.ds(column, tile.width)

        def load(at: Any, slot: Any) -> None:
            for place, buffer in enumerate(slots):
                source = x.at[window(at, place)]
                plgpu.copy_gmem_to_smem(source, buffer.at[slot], barrier.at[slot])
            of_tile = row_slots.at[slot, pl.ds(0, tile.rows)]
            plgpu.copy_gmem_to_smem(rows.at[window(at, 0)[0]], of_tile, barrier.at[slot])

        def step(at: Any, slot: Any, carry: Any) -> Any:
            first = lax.rem(at, across) * tile.width
            drawn = tile.words(words, row_slots.at[slot, pl.ds(0, tile.rows)], first)
            for buffer, bits in zip(slots, drawn, strict=True):
                ref = buffer.at[slot]
                value = plgpu.load(ref, layout=tile.layout, optimized=False).astype(jnp.float32)
                kept = jnp.where(bits < jnp.uint32(plan.levels), value, 0.0)
                put(ref, (kept * (LEVELS / plan.levels)).astype(dtype))
            return carry

        def store(at: Any, slot: Any) -> None:
            for place, buffer in enumerate(slots):
                plgpu.copy_smem_to_gmem(buffer.at[slot], y.at[window(at, place)])

        share = Share(lax.axis_index("block"), blocks, num_tiles, QUARTERS)
        stream(share, num_slots, barrier, load, step, store, jnp.int32(0))

    view = x_RD.reshape(num_rows, QUARTERS, quarter)
    kernel = _mgpu.gpu_kernel(
        body,
        out_type=jax.ShapeDtypeStruct(view.shape, dtype),
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=[
            *[plgpu.SMEM((num_slots, tile.rows, 1, tile.width), dtype)] * QUARTERS,
            plgpu.SMEM((num_slots, -(-tile.rows // ROWS_ALIGNED) * ROWS_ALIGNED), jnp.uint32),
            plgpu.Barrier(num_arrivals=QUARTERS + 1, num_barriers=num_slots),
        ],
        interpret=_mgpu.interpret_params(plan.interpret),
        kernel_name="dropout",
    )
    return kernel(view, rows_R, seed).reshape(x_RD.shape)


def _dropped(plan: Plan) -> Any:
    """Returns the kernel as a function of x [R, D], its rows' numbers [R], and the seed [2]."""

    @jax.custom_batching.custom_vmap
    def run(x_RD: Array, rows_R: Array, seed: Array) -> Array:
        return _launch(plan, x_RD, rows_R, seed)

    @run.def_vmap
    def _(size: int, batched: Sequence[bool], *operands: Array) -> tuple[Array, bool]:
        x, rows, seed = (
            a if has else jnp.broadcast_to(a, (size, *a.shape))
            for a, has in zip(operands, batched, strict=True)
        )
        if batched[2]:
            return lax.map(lambda one: _dropped(plan)(*one), (x, rows, seed)), True
        folded = _dropped(plan)(x.reshape(-1, x.shape[-1]), rows.reshape(-1), operands[2])
        return folded.reshape(x.shape), True

    return run


# One jit for equal calls: the layers of a model lower and assemble the kernel once.
@partial(jax.jit, static_argnums=(0,))
def _run(plan: Plan, x: Array, rows: Array, seed: Array) -> Array:
    return _dropped(plan)(x.reshape(-1, x.shape[-1]), rows.reshape(-1), seed).reshape(x.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dropout(plan: Plan, x: Array, rows: Array, seed: Array) -> Array:
    return _run(plan, x, rows, seed)


def _forward(plan: Plan, x: Array, rows: Array, seed: Array) -> tuple[Array, tuple[Array, Array]]:
    return _run(plan, x, rows, seed), (rows, seed)


def _backward(plan: Plan, kept: tuple[Array, Array], dy: Array) -> tuple[Array, Any, Any]:
    rows, seed = (np.zeros(a.shape, jax.dtypes.float0) for a in kept)
    return _run(plan, dy, *kept), rows, seed


_dropout.defvjp(_forward, _backward)


def dropout_pallas(
    x: Array, seed: Array, rows: Array, *, rate: float, config: Config | None = None
) -> Array:
    """Runs the kernel on a checked call that it supports: x [*B, D], not empty."""
    shapes = math.prod(x.shape[:-1]), x.shape[-1], x.dtype.name
    sizes = config or config_for("dropout", shapes, CONFIGS, CONFIGS[0])
    plan = Plan(levels_of(rate), sizes, dispatch.current_target().interpret)
    return _dropout(plan, x, rows, seed)
