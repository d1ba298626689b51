# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The forward kernel of attention for Hopper GPUs.

    out = softmax(scale query key^T) value        lse = log(sum(exp(scale query key^T)))

Letters: B batch, T query tokens, S key tokens, H query heads, K key/value heads, D features of a head.

One block of threads owns 64 queries for each of its computing warpgroups and walks over the keys from the
last visible block to the first; one more warpgroup brings keys and values into a ring in shared memory
by TMA, which reads zeros beyond the end and writes nothing there, so that any T and S fit. Each step starts the product of scores with the next keys and, behind it, the product of the last
weights with their values, so that the softmax of one step runs under the matrix work of another; the
warpgroups take turns at the tensor cores.

Numerics: scores, softmax and accumulation float32; weights rounded to the dtype of `value` for the second
product, not normalised before it. Limits: bfloat16 and float16, D of 64 or 128, scale above zero. A `value`
that is not finite also reaches the queries of the same tile of 64 that do not see it.

Source: Shah et al. 2024 (FlashAttention-3), section 3.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from tpjax.core.operator import Interpret
from tpjax.pallas._mgpu import accumulate, interpret_params, pl, plgpu, row_tile
from tpjax.pallas.attention.blocks import Order, Region, key_blocks, tile_order, visible
from tpjax.pallas.attention.config import ROWS, Config, compute_registers

LOG2E = math.log2(math.e)
WGMMA = plgpu.Layout.WGMMA
TMA_ROWS = 8
"""Rows of the tiles in which shared memory is laid out, and lengths are padded to."""


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


def pad_rows(x: Array, axis: int = 1) -> Array:
    """Pads an axis of tokens with zeros to a multiple of 8: TMA moves tiles of 8 rows."""
    pads = [(0, -size % TMA_ROWS if a == axis else 0) for a, size in enumerate(x.shape)]
    return jnp.pad(x, pads) if x.shape[axis] % TMA_ROWS else x


def rows_like(value: float, axis: int = 1) -> Array:
    """Returns one float32 for each row (axis 1) or column (axis 0) of a warpgroup's tile."""
    return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), WGMMA.reduce(axis))


def _forward_kernel(
    q_ref, k_ref, v_ref, out_ref, lse_ref, q_smem, k_smem, v_smem, lse_smem, q_ready, k_ready, v_ready,
    k_free, v_free, turn, *, facts: TileFacts,
):  # fmt: skip
    config, region = facts.plan.config, facts.region
    num_workers, block, stages = config.warpgroups, config.block, config.stages
    batch, head, tile = facts.locate(lax.axis_index("tile"))
    worker = lax.axis_index("worker")
    tile_start = tile * (num_workers * ROWS)
    span = key_blocks(tile_start, num_workers * ROWS, block, region)
    steps = jnp.int32(span.stop - span.start)

    @pl.when(worker < num_workers)
    def _compute():
        plgpu.set_max_registers(compute_registers(num_workers), action="increase")
        start = tile_start + worker * ROWS
        rows = (batch, pl.ds(start, ROWS), head)
        q_own = q_smem.at[worker]
        plgpu.copy_gmem_to_smem(q_ref.at[rows], q_own, q_ready.at[worker])
        plgpu.barrier_wait(q_ready.at[worker])
        out, top, total = _attend(
            start, span, steps, q_own, k_smem, v_smem, k_ready, v_ready, k_free, v_free, turn, worker, facts
        )  # fmt: skip
        inverse = jnp.where(total == 0, jnp.zeros_like(total), 1 / total)
        out = out * lax.broadcast_in_dim(inverse, out.shape, [0])
        q_own[...] = out.astype(q_own.dtype)
        lse_smem.at[worker][...] = (top + jnp.log2(total)) / LOG2E
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_own, out_ref.at[rows])
        plgpu.copy_smem_to_gmem(lse_smem.at[worker], lse_ref.at[batch, head, pl.ds(start, ROWS)])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(worker == num_workers)
    def _load():
        plgpu.set_max_registers(24, action="decrease")
        kv_head = lax.div(head, jnp.int32(facts.group))

        @pl.loop(0, steps)
        def _step(step):
            slot = lax.rem(step, jnp.int32(stages))
            keys = (batch, pl.ds((span.stop - 1 - step) * block, block), kv_head)
            for ref, smem, ready, free in (
                (k_ref, k_smem, k_ready, k_free),
                (v_ref, v_smem, v_ready, v_free),
            ):
                pl.when(step >= stages)(partial(plgpu.barrier_wait, free.at[slot]))
                plgpu.copy_gmem_to_smem(ref.at[keys], smem.at[slot], ready.at[slot])


def _attend(
    start, span, steps, q_own, k_smem, v_smem, k_ready, v_ready, k_free, v_free, turn, worker,
    facts: TileFacts,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Walks over the key blocks, last to first; returns weighted sum, row maximum and row sum."""
    plan, region = facts.plan, facts.region
    config, scale = plan.config, plan.scale * LOG2E
    num_workers, block, stages = config.warpgroups, config.block, config.stages
    tile = (ROWS, block)
    dtype = v_smem.dtype
    next_worker = lax.rem(worker + 1, jnp.int32(num_workers))

    def slot_of(step):
        return lax.rem(step, jnp.int32(stages))

    def softmax(step, scores, top, masked: bool):
        """Returns unnormalised weights, the new row maximum (in units of log2) and what to subtract."""
        if masked:
            first_key = (span.stop - 1 - step) * block
            seen = visible(start, first_key, tile, region, query_axis=0)
            scores = jnp.where(seen, scores, -jnp.inf)
        top = jnp.maximum(top, scores.max(axis=1) * scale)
        base = jnp.where(top == -jnp.inf, jnp.zeros_like(top), top) if masked else top
        return jnp.exp2(scores * scale - lax.broadcast_in_dim(base, tile, [0])), top, base

    def begin(masked: bool):
        def scores_only(_, fresh, state):
            plgpu.barrier_wait(k_ready.at[0])
            plgpu.barrier_wait(turn.at[worker])
            fresh[0].add(q_own, k_smem.at[0].transpose((1, 0)))
            plgpu.barrier_arrive(turn.at[next_worker])
            scores = fresh[0].value()
            plgpu.barrier_arrive(k_free.at[0])
            del state
            return scores

        scores = fresh_scores(scores_only)
        weights, top, _ = softmax(jnp.int32(0), scores, rows_like(-jnp.inf), masked)
        return top, weights.sum(axis=1), weights.astype(dtype)

    def fresh_scores(body):
        zeros = plgpu.layout_cast(jnp.zeros(tile, jnp.float32), WGMMA)
        return accumulate(body, [], zeros, fresh=[tile], interpret=plan.interpret)[1]

    def step_on(step, carry, masked: bool):
        out, top, total, weights = carry
        slot, last = slot_of(step), slot_of(step - 1)

        def products(sums, fresh, state):
            old_top, _ = state
            plgpu.barrier_wait(k_ready.at[slot])
            plgpu.barrier_wait(turn.at[worker])
            fresh[0].add(q_own, k_smem.at[slot].transpose((1, 0)))
            plgpu.barrier_wait(v_ready.at[last])
            sums[0].add(weights, v_smem.at[last])
            plgpu.barrier_arrive(turn.at[next_worker])
            scores = fresh[0].value(pending=1)
            plgpu.barrier_arrive(k_free.at[slot])
            new_weights, new_top, _ = softmax(step, scores, old_top, masked)
            return lax.optimization_barrier((new_top, new_weights))

        no_weights = plgpu.layout_cast(jnp.zeros(tile, jnp.float32), WGMMA)
        (out,), (new_top, new_weights) = accumulate(
            products, [out], (top, no_weights), fresh=[tile], interpret=plan.interpret
        )
        plgpu.barrier_arrive(v_free.at[last])
        base = jnp.where(new_top == -jnp.inf, jnp.zeros_like(top), new_top) if masked else new_top
        shrink = jnp.exp2(top - base)
        out = out * lax.broadcast_in_dim(shrink, out.shape, [0])
        total = total * shrink + new_weights.sum(axis=1)
        return out, new_top, total, new_weights.astype(dtype)

    out = plgpu.layout_cast(jnp.zeros((ROWS, facts.features), jnp.float32), WGMMA)
    has_edge = region.is_causal or region.num_keys % block != 0
    # Worker 0 moves first: the last one hands it the turn.
    pl.when(worker == num_workers - 1)(partial(plgpu.barrier_arrive, turn.at[0]))
    carry = (out, *begin(has_edge))
    masked_steps = jnp.int32(1)
    if has_edge:
        masked_steps = jnp.maximum(masked_steps, span.stop - span.full_stop)
        carry = lax.fori_loop(1, masked_steps, partial(step_on, masked=True), carry)
    carry = lax.fori_loop(masked_steps, steps, partial(step_on, masked=False), carry)
    pl.when(worker == 0)(partial(plgpu.barrier_wait, turn.at[0]))
    out, top, total, weights = carry
    last = slot_of(steps - 1)
    plgpu.barrier_wait(v_ready.at[last])

    def finish(sums, _, state):
        sums[0].add(weights, v_smem.at[last])
        return state

    (out,), _ = accumulate(finish, [out], (), fresh=[], interpret=plan.interpret)
    plgpu.barrier_arrive(v_free.at[last])
    return out, top, total


def forward(query: Array, key: Array, value: Array, plan: Plan) -> tuple[Array, Array]:
    """Returns the output [B, T, H, D] and the log of the sum of exponentials [B, H, T], float32."""
    config = plan.config
    batch, num_queries, heads, features = query.shape
    num_keys, kv_heads = key.shape[1:3]
    q, k, v = (pad_rows(x) for x in (query, key, value))
    group, num_tiles = heads // kv_heads, pl.cdiv(num_queries, config.warpgroups * ROWS)
    region = Region(num_queries, num_keys, plan.is_causal)
    head_bytes = 2 * num_keys * features * query.dtype.itemsize
    order = tile_order(num_tiles, batch * heads, group, head_bytes, plan.is_causal)
    facts = TileFacts(region, order, heads, group, features, plan)
    dtype, stages, workers = query.dtype, config.stages, config.warpgroups
    kernel = plgpu.kernel(
        partial(_forward_kernel, facts=facts),
        out_type=[
            jax.ShapeDtypeStruct(q.shape, dtype),
            jax.ShapeDtypeStruct((batch, heads, q.shape[1]), jnp.float32),
        ],
        scratch_types=[
            row_tile((workers, ROWS, features), dtype),
            row_tile((stages, config.block, features), dtype),
            row_tile((stages, config.block, features), dtype),
            plgpu.SMEM((workers, ROWS), jnp.float32),
            plgpu.Barrier(num_barriers=workers),
            *(plgpu.Barrier(num_barriers=stages) for _ in "kv"),
            *(plgpu.Barrier(num_arrivals=workers, num_barriers=stages) for _ in "kv"),
            plgpu.Barrier(num_barriers=workers),
        ],
        grid=(num_tiles * batch * heads,),
        grid_names=("tile",),
        num_threads=workers + 1,
        thread_name="worker",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret_params(plan.interpret),
        kernel_name="flash_attention_forward",
    )
    out, lse = kernel(q, k, v)
    return out[:, :num_queries], lse[:, :, :num_queries]
