# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The forward kernel of attention for Hopper GPUs.

    out = softmax(scale query key^T) value        lse = log(sum(exp(scale query key^T)))

Letters: B batch, T query tokens, S key tokens, H query heads, K key/value heads, D features.

One block of threads owns 64 queries for each of its computing warpgroups ("workers") and walks
over the keys from the last visible block to the first; one more warpgroup brings keys and values
into rings in shared memory by TMA, which reads zeros beyond the end and writes nothing there. Each
step starts the product of the queries with its keys and, behind it, the product of the last step's
weights with their values, so that the softmax runs under matrix work; the workers take turns at the
tensor cores.

Numerics: scores, softmax and accumulation float32; weights are rounded to the dtype of `value` for
the second product, and normalised after it. Limits: bfloat16 and float16, D of 64 or 128, scale
above zero. A value that is not finite also makes those queries NaN that share a tile of 64 with one
that sees it.

Source: Shah et al. 2024 (FlashAttention-3), section 3.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from tpjax.core.operator import Interpret
from tpjax.pallas._mgpu import (
    accumulate,
    gpu_kernel,
    interpret_params,
    out_like,
    pl,
    plgpu,
    row_tile,
)
from tpjax.pallas.attention.blocks import Order, Region, Span, key_blocks, tile_order, visible
from tpjax.pallas.attention.config import ROWS, Config, compute_registers
from tpjax.pallas.attention.ring import Ring, fill, ring_barriers, slot_of

LOG2E = math.log2(math.e)
WGMMA = plgpu.Layout.WGMMA
TMA_ROWS = 8
"""Tokens come in multiples of this: the rows of the tiles in which shared memory is laid out."""


class Plan(NamedTuple):
    """Everything static about one call."""

    scale: float
    is_causal: bool
    config: Config
    interpret: Interpret


class TileFacts(NamedTuple):
    """Static facts that a kernel's body needs."""

    region: Region
    order: Order
    heads: int
    group: int
    features: int
    plan: Plan

    def locate(self, index: Array) -> tuple[Array, Array, Array]:
        """Returns (sequence, head, tile) of a grid index."""
        head, tile = self.order.locate(index)
        heads = jnp.int32(self.heads)
        return lax.div(head, heads), lax.rem(head, heads), tile


def pad_tokens(x: Array, multiple: int = TMA_ROWS, axis: int = 1) -> Array:
    """Pads an axis of tokens with zeros to a multiple."""
    pads = [(0, -size % multiple if a == axis else 0) for a, size in enumerate(x.shape)]
    return jnp.pad(x, pads) if x.shape[axis] % multiple else x


def filled(value: float, shape: tuple[int, ...], layout: Any = WGMMA) -> Array:
    """Returns float32 registers of one value."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def by_row(x: Array, shape: tuple[int, ...]) -> Array:
    """Repeats one number for each row over the columns of a tile."""
    return lax.broadcast_in_dim(x, shape, [0])


class _Walk(NamedTuple):
    """What one worker needs on its way over the key blocks, last to first."""

    query: Any
    start: Array
    span: Span
    steps: Array
    worker: Array
    keys: Ring
    values: Ring
    turn: Any
    facts: TileFacts

    @property
    def tile(self) -> tuple[int, int]:
        return ROWS, self.facts.plan.config.block


class _State(NamedTuple):
    """The online softmax: `out`, `total` and `weights` are relative to 2^top."""

    out: Array
    top: Array
    total: Array
    weights: Array


def _take_turn(walk: _Walk, wait_for: tuple[Any, ...], start: Any) -> None:
    """Starts matrix products when it is this worker's turn, and passes the turn on."""
    workers = walk.facts.plan.config.warpgroups
    for barrier in wait_for:
        plgpu.barrier_wait(barrier)
    plgpu.barrier_wait(walk.turn.at[walk.worker])
    start()
    plgpu.barrier_arrive(walk.turn.at[lax.rem(walk.worker + 1, jnp.int32(workers))])


def _weights(walk: _Walk, step: Any, scores: Array, top: Array, masked: bool) -> tuple[Array, ...]:
    """Returns weights relative to the new top, that, and the factor from old to new."""
    plan, tile = walk.facts.plan, walk.tile
    factor = plan.scale * LOG2E
    if masked:
        first_key = (walk.span.stop - 1 - step) * plan.config.block
        seen = visible(walk.start, first_key, tile, walk.facts.region, query_axis=0)
        scores = jnp.where(seen, scores, -jnp.inf)
    new_top = jnp.maximum(top, scores.max(axis=1) * factor)
    base = jnp.where(new_top == -jnp.inf, jnp.zeros_like(top), new_top) if masked else new_top
    return jnp.exp2(scores * factor - by_row(base, tile)), new_top, jnp.exp2(top - base)


def _first(walk: _Walk, masked: bool) -> _State:
    """Forms the weights of the first block."""
    facts, tile = walk.facts, walk.tile

    def scores_of(_, fresh, state):
        del state
        slot = walk.keys.buffers[0].at[0].transpose((1, 0))
        _take_turn(walk, (walk.keys.ready.at[0],), lambda: fresh[0].add(walk.query, slot))
        return fresh[0].value()

    _, scores = accumulate(
        scores_of, [], filled(0, tile), fresh=[tile], interpret=facts.plan.interpret
    )
    plgpu.barrier_arrive(walk.keys.free.at[0])
    no_top = filled(-jnp.inf, (ROWS,), WGMMA.reduce(1))
    weights, top, _ = _weights(walk, jnp.int32(0), scores, no_top, masked)
    out = filled(0, (ROWS, facts.features))
    return _State(out, top, weights.sum(axis=1), weights.astype(walk.query.dtype))


def _next(step: Array, state: _State, walk: _Walk, masked: bool) -> _State:
    """Adds the last block's values, and forms the weights of the next block meanwhile."""
    plan, tile = walk.facts.plan, walk.tile
    stages = plan.config.stages
    slot, last = slot_of(step, stages), slot_of(step - 1, stages)

    def products(sums, fresh, tops):
        old_top, _, _ = tops

        def start():
            fresh[0].add(walk.query, walk.keys.buffers[0].at[slot].transpose((1, 0)))
            plgpu.barrier_wait(walk.values.ready.at[last])
            sums[0].add(state.weights, walk.values.buffers[0].at[last])

        _take_turn(walk, (walk.keys.ready.at[slot],), start)
        scores = fresh[0].value(pending=1)
        plgpu.barrier_arrive(walk.keys.free.at[slot])
        weights, top, shrink = _weights(walk, step, scores, old_top, masked)
        # All of the softmax happens before this waits for the values' product.
        return lax.optimization_barrier((top, shrink, weights))

    (out,), (top, shrink, weights) = accumulate(
        products,
        [state.out],
        (state.top, filled(0, (ROWS,), WGMMA.reduce(1)), filled(0, tile)),
        fresh=[tile],
        interpret=plan.interpret,
    )
    plgpu.barrier_arrive(walk.values.free.at[last])
    out = out * by_row(shrink, out.shape)
    total = state.total * shrink + weights.sum(axis=1)
    return _State(out, top, total, weights.astype(walk.query.dtype))


def _attend(walk: _Walk) -> tuple[Array, Array]:
    """Returns one worker's output and the log2 of its sums of exponentials."""
    plan, region = walk.facts.plan, walk.facts.region
    last_worker = plan.config.warpgroups - 1
    has_edge = region.is_causal or region.num_keys % plan.config.block != 0
    # Worker 0 moves first: the last one hands it the turn, and takes it back at the end.
    pl.when(walk.worker == last_worker)(partial(plgpu.barrier_arrive, walk.turn.at[0]))
    state, masked_steps = _first(walk, has_edge), jnp.int32(1)
    if has_edge:
        masked_steps = jnp.maximum(masked_steps, walk.span.stop - walk.span.full_stop)
        state = lax.fori_loop(1, masked_steps, partial(_next, walk=walk, masked=True), state)
    step = partial(_next, walk=walk, masked=False)
    state = lax.fori_loop(masked_steps, walk.steps, step, state)
    pl.when(walk.worker == 0)(partial(plgpu.barrier_wait, walk.turn.at[0]))

    last = slot_of(walk.steps - 1, plan.config.stages)
    plgpu.barrier_wait(walk.values.ready.at[last])

    def finish(sums, _, nothing):
        sums[0].add(state.weights, walk.values.buffers[0].at[last])
        return nothing

    (out,), _ = accumulate(finish, [state.out], (), fresh=[], interpret=plan.interpret)
    plgpu.barrier_arrive(walk.values.free.at[last])
    inverse = jnp.where(state.total == 0, jnp.zeros_like(state.total), 1 / state.total)
    return out * by_row(inverse, out.shape), state.top + jnp.log2(state.total)


def _forward_kernel(
    q_ref, k_ref, v_ref, out_ref, lse_ref, q_smem, k_smem, v_smem, lse_smem, q_ready, k_ready,
    k_free, v_ready, v_free, turn, *, facts: TileFacts,
):  # fmt: skip
    config = facts.plan.config
    workers, block = config.warpgroups, config.block
    batch, head, tile = facts.locate(lax.axis_index("tile"))
    worker = lax.axis_index("worker")
    tile_start = tile * (workers * ROWS)
    span = key_blocks(tile_start, workers * ROWS, block, facts.region)
    steps = jnp.int32(span.stop - span.start)
    keys, values = Ring((k_smem,), k_ready, k_free), Ring((v_smem,), v_ready, v_free)

    @pl.when(worker < workers)
    def _compute():
        plgpu.set_max_registers(compute_registers(workers), action="increase")
        start = tile_start + worker * ROWS
        rows, line = (batch, pl.ds(start, ROWS), head), (batch, head, pl.ds(start, ROWS))
        own, own_lse = q_smem.at[worker], lse_smem.at[worker]
        plgpu.copy_gmem_to_smem(q_ref.at[rows], own, q_ready.at[worker])
        plgpu.barrier_wait(q_ready.at[worker])
        out, lse = _attend(_Walk(own, start, span, steps, worker, keys, values, turn, facts))
        own[...] = out.astype(own.dtype)
        own_lse[...] = lse / LOG2E
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(own, out_ref.at[rows])
        plgpu.copy_smem_to_gmem(own_lse, lse_ref.at[line])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(worker == workers)
    def _load():
        plgpu.set_max_registers(24, action="decrease")
        kv_head = lax.div(head, jnp.int32(facts.group))

        def sources(step):
            rows = (batch, pl.ds((span.stop - 1 - step) * block, block), kv_head)
            return (k_ref.at[rows],), (v_ref.at[rows],)

        fill(steps, config.stages, (keys, values), sources)


# One jit for equal calls: the layers of a model lower and assemble the kernel once.
@partial(jax.jit, static_argnames="plan")
def launch_forward(query: Array, key: Array, value: Array, plan: Plan) -> tuple[Array, Array]:
    """Returns the output [B, T, H, D] and the float32 log of sums of exponentials [B, H, T]."""
    config = plan.config
    workers, stages, dtype = config.warpgroups, config.stages, query.dtype
    batch, num_queries, heads, features = query.shape
    num_keys, kv_heads = key.shape[1:3]
    q, k, v = (pad_tokens(x) for x in (query, key, value))
    group, num_tiles = heads // kv_heads, pl.cdiv(num_queries, workers * ROWS)
    head_bytes = 2 * num_keys * features * dtype.itemsize
    order = tile_order(num_tiles, batch * heads, group, head_bytes, longest_last=plan.is_causal)
    region = Region(num_queries, num_keys, plan.is_causal)
    facts = TileFacts(region, order, heads, group, features, plan)
    kernel = gpu_kernel(
        partial(_forward_kernel, facts=facts),
        out_type=[
            out_like(query, q.shape, dtype),
            # Copies along one axis are not cut off at its end: it has room for every tile.
            out_like(query, (batch, heads, num_tiles * workers * ROWS), jnp.float32),
        ],
        scratch_types=[
            row_tile((workers, ROWS, features), dtype),
            *(row_tile((stages, config.block, features), dtype) for _ in "kv"),
            plgpu.SMEM((workers, ROWS), jnp.float32),
            plgpu.Barrier(num_barriers=workers),
            *ring_barriers(workers, stages, copies=1),
            *ring_barriers(workers, stages, copies=1),
            plgpu.Barrier(num_barriers=workers),
        ],
        grid=(num_tiles * batch * heads,),
        grid_names=("tile",),
        num_threads=workers + 1,
        thread_name="worker",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret_params(plan.interpret, workers + 1),
        kernel_name="flash_attention_forward",
    )
    out, lse = kernel(q, k, v)
    return out[:, :num_queries], lse[:, :, :num_queries]
