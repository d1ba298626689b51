# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The fused backward kernel of attention for Hopper GPUs: every gradient from one walk.

    p = exp(score - lse)                       delta = rowsum(out dout) - dlse
    ds = p (dout value^T - delta)              dx = ds dscore/dx, x = scale query key^T
    dquery = scale dx key      dkey = scale dx^T query      dvalue = p^T dout

Five matrix products for a block of scores where the two kernels of `backward` need seven. Two
workers walk over the queries, each with 64 keys whose dkey and dvalue stay in registers. They put
their dx^T side by side in shared memory; then each multiplies the dx of half the queries by the
keys of both, and adds that float32 product to dquery in global memory. Many blocks of threads add
to one query in no fixed order: the bits of dquery differ from run to run.

Only for heads of 64 features: at 128 shared memory is busier than the tensor cores, and the two
kernels were faster when measured on an H200.

Letters and numerics as in `backward`; dquery is summed in float32 and rounded once.

Source: Shah et al. 2024 (FlashAttention-3), appendix B.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from tpjax.pallas._mgpu import (
    accumulate,
    accumulate_also,
    add_to_gmem,
    out_like,
    pl,
    plgpu,
    row_tile,
    sum_in_gmem,
)
from tpjax.pallas.attention.blocks import Region, tile_order
from tpjax.pallas.attention.config import ROWS, compute_registers
from tpjax.pallas.attention.cotangents import Cotangents, cotangents_of, launch
from tpjax.pallas.attention.extras import Extras, pad_tokens, query_spans, tiled
from tpjax.pallas.attention.query_walk import (
    Blocks,
    QueryWalk,
    Sums,
    blocks_scratch,
    gather,
    load_queries,
    start_walk,
    store,
)
from tpjax.pallas.attention.ring import Ring, ring_barriers, slot_of
from tpjax.pallas.attention.schedule import TileFacts
from tpjax.pallas.attention.scores import WGMMA, Plan, filled, without_garbage

FEATURES = 64
"""Of keys, and of values."""
WORKERS = 2
STAGES = 2
"""Blocks of queries, of cotangents and of dx in shared memory."""
TILE = WORKERS * ROWS
"""Keys of a block of threads, and queries of a step: each worker has 64 of both."""


class _Shared(NamedTuple):
    """What one worker needs for its half of dquery.

    Each step adds to dquery what the step before has shown, for which no worker waits long. Step n
    shows in turn n + 1; what the first step adds, turn 0, are zeros that go nowhere.
    """

    worker: Any
    keys: Any
    """Of both workers."""
    dx: Ring
    """dx^T of both workers' keys: ready when both have written theirs."""
    staged: Any
    """This worker's product, on its way to global memory."""
    dq_ref: Any


def _show(shared: _Shared, turn: Array, dx: Array) -> None:
    """Shows this worker's dx^T to both."""
    slot = slot_of(turn, STAGES)
    shared.dx.await_free(slot)
    shared.dx.buffers[0].at[slot, pl.ds(shared.worker * ROWS, ROWS)][...] = dx
    plgpu.commit_smem()
    plgpu.barrier_arrive(shared.dx.ready.at[slot])


class _Place(NamedTuple):
    """Which rows of dquery the product of a turn belongs to."""

    turn: Any
    head: Any
    row: Any


def _place_before(walk: QueryWalk, member: Any, step: Any) -> _Place:
    """Returns the place of the step before; the last one is before step 0 of a member too many."""
    wraps = step == 0
    head = walk.scores.head * walk.facts.group + member - jnp.where(wraps, 1, 0)
    block = walk.span.start + jnp.where(wraps, walk.steps, step) - 1
    return _Place(member * walk.steps + step, head, block * TILE)


def _add_dquery(shared: _Shared, to: _Place, walk: QueryWalk, meanwhile: Any = None) -> None:
    """Starts adding this worker's half of one turn's product to dquery.

    `meanwhile` starts another product, which runs while this one is stored.
    """
    slot, own, interpret = slot_of(to.turn, STAGES), shared.worker * ROWS, walk.facts.plan.interpret

    def product(dq):
        plgpu.barrier_wait(shared.dx.ready.at[slot])
        dx = shared.dx.buffers[0].at[slot, :, pl.ds(own, ROWS)]
        dq.add(dx.transpose((1, 0)), shared.keys)
        if meanwhile is not None:
            meanwhile()
        return dq.value(pending=meanwhile is not None)

    part = accumulate_also(product, (ROWS, FEATURES), interpret=interpret)
    shared.dx.release(slot)

    @pl.when(to.turn > 0)
    def _start():
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        shared.staged[...] = part
        plgpu.commit_smem()
        target = shared.dq_ref.at[walk.scores.batch, pl.ds(to.row + own, ROWS), to.head]
        add_to_gmem(shared.staged, target, interpret=interpret)


def _step(
    step: Array, sums: Sums, walk: QueryWalk, member: Array, at_edge: bool, shared: _Shared
) -> Sums:
    """Adds one block of queries to dkey and dvalue, and to dquery the block before."""
    (key, value), stop = walk.own, walk.stop(step, member)
    before = _place_before(walk, member, step)
    plgpu.barrier_wait(walk.douts.ready.at[stop.slot])
    # What the product adds to: then delta takes no other registers, nor a subtraction.
    minus_delta = -stop.by_column(stop.delta)

    def products(sums, fresh, nothing):
        dk, dv, dweights = sums
        plgpu.barrier_wait(walk.queries.ready.at[stop.slot])
        fresh[0].add(key, stop.query.transpose((1, 0)))
        dweights.add(value, stop.dout.transpose((1, 0)))
        lse = stop.by_column(stop.lse)
        weights, gain = stop.weights(fresh[0].value(pending=1), lse, walk.ids, at_edge)
        dv.add(weights.astype(value.dtype), stop.dout)
        ds = weights * dweights.value(pending=1)
        if stop.scores.may_hide_garbage(at_edge):
            ds = without_garbage(ds, weights)
        dx = (ds if gain is None else ds * gain).astype(key.dtype)
        _show(shared, stop.count + 1, dx)
        _add_dquery(shared, before, walk, meanwhile=partial(dk.add, dx, stop.query))
        return nothing

    (dk, dv, _), _ = accumulate(
        products, [*sums, minus_delta], (), fresh=[walk.tile], interpret=walk.facts.plan.interpret
    )
    walk.leave(stop.slot)
    return dk, dv


def _gather(walk: QueryWalk, shared: _Shared) -> Sums:
    """Returns dkey / scale and dvalue of one worker's keys, and adds their part of dquery."""
    for slot in range(STAGES):  # nothing was shown yet
        plgpu.barrier_arrive(shared.dx.free.at[slot])
    _show(shared, jnp.int32(0), plgpu.layout_cast(jnp.zeros(walk.tile, shared.keys.dtype), WGMMA))
    zeros = (filled(0, (ROWS, FEATURES)),) * 2
    sums = gather(partial(_step, shared=shared), zeros, walk)
    last = _place_before(walk, jnp.int32(walk.facts.group), jnp.int32(0))
    _add_dquery(shared, last, walk)
    for slot in range(STAGES):  # the other worker no longer reads this one's keys
        plgpu.barrier_wait(shared.dx.free.at[slot])
    return sums


def _fused_kernel(
    q_ref, k_ref, v_ref, cotangents: Cotangents, extras: Extras, spans, dq_ref, dk_ref, dv_ref,
    k_smem, v_smem, blocks: Blocks, dx_smem, dq_smem, own_ready, dx_bars, *, facts: TileFacts,
):  # fmt: skip
    """dkey and dvalue of 64 rows for each worker, and their part of dquery."""
    worker = lax.axis_index("worker")
    walk = start_walk(TILE, *blocks.rings(), extras, spans, facts)

    @pl.when(worker < WORKERS)
    def _compute():
        plgpu.set_max_registers(compute_registers(WORKERS), action="increase")
        start = walk.start + worker * ROWS
        rows = (walk.scores.batch, pl.ds(start, ROWS), walk.scores.head)
        key, value = own = tuple(x.at[pl.ds(worker * ROWS, ROWS)] for x in (k_smem, v_smem))
        for source, smem in zip((k_ref, v_ref), own, strict=True):
            plgpu.copy_gmem_to_smem(source.at[rows], smem, own_ready.at[worker])
        ids = walk.scores.ids(start, ROWS, axis=0)
        plgpu.barrier_wait(own_ready.at[worker])
        shared = _Shared(worker, k_smem, Ring((dx_smem,), *dx_bars), dq_smem.at[worker], dq_ref)
        dk, dv = _gather(walk._replace(own=own, start=start, ids=ids), shared)
        store((dk * facts.plan.scale, key, dk_ref.at[rows]), (dv, value, dv_ref.at[rows]))

    pl.when(worker == WORKERS)(partial(load_queries, q_ref, cotangents, walk))


def _scratch(extras: Extras, dtype: Any) -> list[Any]:
    return [
        *(row_tile((TILE, FEATURES), dtype) for _ in ("key", "value")),
        blocks_scratch(extras, (STAGES, TILE), (FEATURES, FEATURES), dtype, WORKERS),
        row_tile((STAGES, TILE, TILE), dtype),
        row_tile((WORKERS, ROWS, FEATURES), jnp.float32),
        plgpu.Barrier(num_arrivals=2, num_barriers=WORKERS),
        ring_barriers(WORKERS, STAGES, copies=WORKERS),
    ]


def _bounded(extras: Extras, region: Region, batch: int) -> Extras:
    """Returns extras with bounds if a tile goes beyond the last key: all its blocks need a mask.

    Keys there are zeros, but their weights may be infinite, and dquery is a sum over them.
    """
    if region.num_keys % TILE == 0 or extras.bounds is not None:
        return extras
    shift, queries, keys, _ = region.bounds()
    bounds = jnp.asarray([shift, queries, keys, 0], jnp.int32)
    return extras._replace(bounds=jnp.broadcast_to(bounds, (batch, 4)))


def fits(extras: Extras, features: int, value_features: int) -> bool:
    """Returns whether the kernel takes such a call: it has no `backward_query.Lines`."""
    wanting = extras.bias, extras.slopes, extras.sinks
    return features == value_features == FEATURES and all(x is None for x in wanting)


@partial(jax.jit, static_argnames="plan")
def launch_fused(
    query: Array, key: Array, value: Array, extras: Extras, out: Array, lse: Array, dout: Array,
    dlse: Array, plan: Plan,
) -> tuple[Array, Array, Array, Extras]:  # fmt: skip
    """Returns what `backward.launch_backward` does, for a call that `fits`."""
    (batch, num_queries, heads, _), kv_heads, dtype = query.shape, key.shape[2], query.dtype
    # The walk takes its step from the plan; what was chosen there is for the other kernels.
    plan = plan._replace(config=replace(plan.config, dkv_block=TILE))
    # Copies along one axis are not cut off at its end: the lines have room for every block.
    cotangents, _ = cotangents_of(extras, out, lse, dout, dlse, TILE, plan)
    q, k, v = (pad_tokens(x) for x in (query, key, value))
    num_tiles, group = pl.cdiv(plan.region.num_keys, TILE), heads // kv_heads
    head_bytes = group * q.shape[1] * FEATURES * (2 * dtype.itemsize + 4)
    order = tile_order(num_tiles, batch * kv_heads, 1, head_bytes, longest_last=False)
    facts = TileFacts(plan, order, kv_heads, group, FEATURES, FEATURES)
    name, grid = "flash_attention_backward_fused", num_tiles * batch * kv_heads
    out_type = [out_like(q, x.shape, dtype) for x in (k, v)]
    kernel = launch(_fused_kernel, name, facts, WORKERS, grid, out_type, _scratch(extras, dtype))
    # Only the spans are of the bounds: the kernel masks faster where the region says all.
    spans = query_spans(_bounded(extras, plan.region, batch), plan.region, num_tiles, TILE, TILE)
    others = cotangents, tiled(extras, TILE, TILE, transposed=True), spans
    room = (batch, pl.cdiv(num_queries, TILE) * TILE, heads, FEATURES)
    (dk, dv), dq = sum_in_gmem(kernel, (q, k, v, *others), room)
    dq = (dq[:, :num_queries] * plan.scale).astype(dtype)
    return dq, dk[:, : key.shape[1]], dv[:, : key.shape[1]], Extras()
