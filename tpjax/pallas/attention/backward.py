# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The backward kernels of attention for Hopper GPUs: one for query, one for key and value.

    p = exp(scale query key^T - lse)           delta = rowsum(out dout)
    ds = p (dout value^T - delta)
    dquery = scale ds key      dkey = scale ds^T query      dvalue = p^T dout

Each kernel forms the scores again. No two blocks of threads add to one result, so it has the same
bits on every run: a tile of keys gathers from the queries of all heads of its group, in order.

Letters and work split as in `forward`. Numerics: scores, p, ds and accumulation float32; p and ds
are rounded to the dtype of the operands for the products.

Source: Dao 2023 (FlashAttention-2), algorithm 2.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from tpjax.pallas._mgpu import (
    accumulate,
    gpu_kernel,
    interpret_params,
    out_like,
    pl,
    plgpu,
    row_tile,
)
from tpjax.pallas.attention.blocks import (
    Region,
    Span,
    key_blocks,
    query_blocks,
    tile_order,
    visible,
)
from tpjax.pallas.attention.config import ROWS, compute_registers
from tpjax.pallas.attention.forward import (
    LOG2E,
    WGMMA,
    Plan,
    TileFacts,
    by_row,
    filled,
    pad_tokens,
)
from tpjax.pallas.attention.ring import Ring, fill, ring_barriers, slot_of


class _QueryWalk(NamedTuple):
    """What one worker needs to gather dquery of its rows over the key blocks, last to first."""

    query: Any
    dout: Any
    lse: Array
    delta: Array
    start: Array
    span: Span
    keys: Ring
    values: Ring
    facts: TileFacts


def _query_step(step: Array, dq: Array, walk: _QueryWalk, masked: bool) -> Array:
    plan = walk.facts.plan
    block = plan.config.dq_block
    slot, tile = slot_of(step, plan.config.dq_stages), (ROWS, block)
    keys, values = walk.keys.buffers[0].at[slot], walk.values.buffers[0].at[slot]

    def products(sums, fresh, nothing):
        plgpu.barrier_wait(walk.keys.ready.at[slot])
        fresh[0].add(walk.query, keys.transpose((1, 0)))
        plgpu.barrier_wait(walk.values.ready.at[slot])
        fresh[1].add(walk.dout, values.transpose((1, 0)))
        scores = fresh[0].value(pending=1)
        weights = jnp.exp2(scores * (plan.scale * LOG2E) - by_row(walk.lse, tile))
        if masked:
            first_key = (walk.span.stop - 1 - step) * block
            seen = visible(walk.start, first_key, tile, walk.facts.region, query_axis=0)
            weights = jnp.where(seen, weights, 0.0)
        weights = lax.optimization_barrier(weights)
        dweights = fresh[1].value()
        plgpu.barrier_arrive(walk.values.free.at[slot])
        ds = weights * (dweights - by_row(walk.delta, tile))
        sums[0].add(ds.astype(walk.query.dtype), keys)
        return nothing

    (dq,), _ = accumulate(products, [dq], (), fresh=[tile] * 2, interpret=plan.interpret)
    plgpu.barrier_arrive(walk.keys.free.at[slot])
    return dq


def _query_kernel(
    q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dq_ref, q_smem, do_smem, lse_smem, delta_smem,
    k_smem, v_smem, own_ready, k_ready, k_free, v_ready, v_free, *, facts: TileFacts,
):  # fmt: skip
    """dquery of 64 rows for each worker; keys and values stream through rings."""
    config, region = facts.plan.config, facts.region
    workers, block = config.dq_warpgroups, config.dq_block
    batch, head, tile = facts.locate(lax.axis_index("tile"))
    worker = lax.axis_index("worker")
    tile_start = tile * (workers * ROWS)
    span = key_blocks(tile_start, workers * ROWS, block, region)
    steps = jnp.int32(span.stop - span.start)
    keys, values = Ring((k_smem,), k_ready, k_free), Ring((v_smem,), v_ready, v_free)

    @pl.when(worker < workers)
    def _compute():
        plgpu.set_max_registers(compute_registers(workers), action="increase")
        start = tile_start + worker * ROWS
        rows, line = (batch, pl.ds(start, ROWS), head), (batch, head, pl.ds(start, ROWS))
        own = tuple(smem.at[worker] for smem in (q_smem, do_smem, lse_smem, delta_smem))
        sources = (q_ref.at[rows], do_ref.at[rows], lse_ref.at[line], delta_ref.at[line])
        for source, smem in zip(sources, own, strict=True):
            plgpu.copy_gmem_to_smem(source, smem, own_ready.at[worker])
        plgpu.barrier_wait(own_ready.at[worker])
        query, dout, *lines = own
        lse, delta = (plgpu.load(x, layout=WGMMA.reduce(1)) for x in lines)
        walk = _QueryWalk(query, dout, lse, delta, start, span, keys, values, facts)
        dq, masked_steps = filled(0, (ROWS, facts.features)), jnp.int32(0)
        if region.is_causal or region.num_keys % block:
            masked_steps = jnp.int32(span.stop - span.full_stop)
            step = partial(_query_step, walk=walk, masked=True)
            dq = lax.fori_loop(0, masked_steps, step, dq)
        step = partial(_query_step, walk=walk, masked=False)
        dq = lax.fori_loop(masked_steps, steps, step, dq)
        query[...] = (dq * facts.plan.scale).astype(query.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(query, dq_ref.at[rows])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(worker == workers)
    def _load():
        plgpu.set_max_registers(24, action="decrease")
        kv_head = lax.div(head, jnp.int32(facts.group))

        def sources(step):
            rows = (batch, pl.ds((span.stop - 1 - step) * block, block), kv_head)
            return (k_ref.at[rows],), (v_ref.at[rows],)

        fill(steps, config.dq_stages, (keys, values), sources)


class _KeyWalk(NamedTuple):
    """What one worker needs to gather dkey and dvalue of its rows over the query blocks."""

    key: Any
    value: Any
    start: Array
    span: Span
    steps: Array
    queries: Ring
    douts: Ring
    facts: TileFacts


def _key_step(
    step: Array, sums: tuple[Array, Array], walk: _KeyWalk, member: Array, masked: bool
) -> tuple[Array, Array]:
    """Adds one block of queries of one query head, the `member`th of its group."""
    plan, dtype = walk.facts.plan, walk.key.dtype
    block, stages = plan.config.dkv_block, plan.config.dkv_stages
    slot, tile = slot_of(member * walk.steps + step, stages), (ROWS, block)
    query, lse = (x.at[slot] for x in walk.queries.buffers)
    dout, delta = (x.at[slot] for x in walk.douts.buffers)

    def by_column(line):
        return lax.broadcast_in_dim(plgpu.load(line, layout=WGMMA.reduce(0)), tile, [1])

    def products(sums, fresh, nothing):
        dk, dv = sums
        plgpu.barrier_wait(walk.queries.ready.at[slot])
        fresh[0].add(walk.key, query.transpose((1, 0)))
        plgpu.barrier_wait(walk.douts.ready.at[slot])
        fresh[1].add(walk.value, dout.transpose((1, 0)))
        lse_columns, delta_columns = by_column(lse), by_column(delta)
        scores = fresh[0].value(pending=1)
        weights = jnp.exp2(scores * (plan.scale * LOG2E) - lse_columns)
        if masked:
            first_query = (walk.span.start + step) * block
            seen = visible(first_query, walk.start, tile, walk.facts.region, query_axis=1)
            weights = jnp.where(seen, weights, 0.0)
        dv.add(weights.astype(dtype), dout)
        dweights = fresh[1].value(pending=1)
        ds = weights * (dweights - delta_columns)
        dk.add(ds.astype(dtype), query)
        return nothing

    (dk, dv), _ = accumulate(products, list(sums), (), fresh=[tile] * 2, interpret=plan.interpret)
    plgpu.barrier_arrive(walk.queries.free.at[slot])
    plgpu.barrier_arrive(walk.douts.free.at[slot])
    return dk, dv


def _key_value_kernel(
    q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_ref, dv_ref, k_smem, v_smem, q_smem,
    do_smem, lse_smem, delta_smem, own_ready, q_ready, q_free, do_ready, do_free, *,
    facts: TileFacts,
):  # fmt: skip
    """dkey and dvalue of 64 rows for each worker; queries stream through rings."""
    config, region = facts.plan.config, facts.region
    workers, block = config.dkv_warpgroups, config.dkv_block
    batch, kv_head, tile = facts.locate(lax.axis_index("tile"))
    worker = lax.axis_index("worker")
    tile_start = tile * (workers * ROWS)
    span = query_blocks(tile_start, workers * ROWS, block, region)
    steps = jnp.int32(span.stop - span.start)
    queries = Ring((q_smem, lse_smem), q_ready, q_free)
    douts = Ring((do_smem, delta_smem), do_ready, do_free)

    @pl.when(worker < workers)
    def _compute():
        plgpu.set_max_registers(compute_registers(workers), action="increase")
        start = tile_start + worker * ROWS
        rows = (batch, pl.ds(start, ROWS), kv_head)
        key, value = k_smem.at[worker], v_smem.at[worker]
        plgpu.copy_gmem_to_smem(k_ref.at[rows], key, own_ready.at[worker])
        plgpu.copy_gmem_to_smem(v_ref.at[rows], value, own_ready.at[worker])
        plgpu.barrier_wait(own_ready.at[worker])
        walk = _KeyWalk(key, value, start, span, steps, queries, douts, facts)

        def gather(member, sums):
            masked_steps = jnp.int32(0)
            if region.is_causal:
                masked_steps = jnp.int32(span.full_start - span.start)
                step = partial(_key_step, walk=walk, member=member, masked=True)
                sums = lax.fori_loop(0, masked_steps, step, sums)
            step = partial(_key_step, walk=walk, member=member, masked=False)
            return lax.fori_loop(masked_steps, steps, step, sums)

        zero = filled(0, (ROWS, facts.features))
        dk, dv = lax.fori_loop(0, facts.group, gather, (zero, zero))
        key[...] = (dk * facts.plan.scale).astype(key.dtype)
        value[...] = dv.astype(value.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(key, dk_ref.at[rows])
        plgpu.copy_smem_to_gmem(value, dv_ref.at[rows])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(worker == workers)
    def _load():
        plgpu.set_max_registers(24, action="decrease")

        def sources(count):
            head = kv_head * facts.group + lax.div(count, steps)
            first = (span.start + lax.rem(count, steps)) * block
            rows, line = (batch, pl.ds(first, block), head), (batch, head, pl.ds(first, block))
            return (q_ref.at[rows], lse_ref.at[line]), (do_ref.at[rows], delta_ref.at[line])

        fill(steps * facts.group, config.dkv_stages, (queries, douts), sources)


def _launch(
    body: Any, name: str, facts: TileFacts, workers: int, grid: int, out_type: Any, scratch: Any
) -> Any:
    return gpu_kernel(
        partial(body, facts=facts),
        out_type=out_type,
        scratch_types=scratch,
        grid=(grid,),
        grid_names=("tile",),
        num_threads=workers + 1,
        thread_name="worker",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret_params(facts.plan.interpret, workers + 1),
        kernel_name=name,
    )


def query_gradient(
    q: Array, k: Array, v: Array, do: Array, lse: Array, delta: Array, region: Region, plan: Plan
) -> Array:
    """Runs the kernel for query; lse is in units of log2, the lines have room for every tile."""
    (batch, length, heads, features), dtype = q.shape, q.dtype
    workers, stages, block = plan.config.dq_warpgroups, plan.config.dq_stages, plan.config.dq_block
    group, num_tiles = heads // k.shape[2], pl.cdiv(length, workers * ROWS)
    head_bytes = 2 * k.shape[1] * features * dtype.itemsize
    order = tile_order(num_tiles, batch * heads, group, head_bytes, longest_last=plan.is_causal)
    facts = TileFacts(region, order, heads, group, features, plan)
    scratch = [
        *(row_tile((workers, ROWS, features), dtype) for _ in ("q", "do")),
        *(plgpu.SMEM((workers, ROWS), jnp.float32) for _ in ("lse", "delta")),
        *(row_tile((stages, block, features), dtype) for _ in "kv"),
        plgpu.Barrier(num_arrivals=4, num_barriers=workers),
        *ring_barriers(workers, stages, copies=1),
        *ring_barriers(workers, stages, copies=1),
    ]
    name, grid = "flash_attention_backward_query", num_tiles * batch * heads
    out_type = out_like(q, q.shape, dtype)
    kernel = _launch(_query_kernel, name, facts, workers, grid, out_type, scratch)
    return kernel(q, k, v, do, lse, delta)


def key_value_gradient(
    q: Array, k: Array, v: Array, do: Array, lse: Array, delta: Array, region: Region, plan: Plan
) -> list[Array]:
    """Runs the kernel for key and value; operands as of `query_gradient`."""
    config, dtype = plan.config, q.dtype
    batch, length, kv_heads, features = k.shape
    workers, stages, block = config.dkv_warpgroups, config.dkv_stages, config.dkv_block
    group, num_tiles = q.shape[2] // kv_heads, pl.cdiv(length, workers * ROWS)
    head_bytes = 2 * group * q.shape[1] * features * dtype.itemsize
    order = tile_order(num_tiles, batch * kv_heads, 1, head_bytes, longest_last=False)
    facts = TileFacts(region, order, kv_heads, group, features, plan)
    scratch = [
        *(row_tile((workers, ROWS, features), dtype) for _ in "kv"),
        *(row_tile((stages, block, features), dtype) for _ in ("q", "do")),
        *(plgpu.SMEM((stages, block), jnp.float32) for _ in ("lse", "delta")),
        plgpu.Barrier(num_arrivals=2, num_barriers=workers),
        *ring_barriers(workers, stages, copies=2),
        *ring_barriers(workers, stages, copies=2),
    ]
    name, grid = "flash_attention_backward_key_value", num_tiles * batch * kv_heads
    out_type = [out_like(q, k.shape, dtype)] * 2
    kernel = _launch(_key_value_kernel, name, facts, workers, grid, out_type, scratch)
    return kernel(q, k, v, do, lse, delta)


@partial(jax.jit, static_argnames="plan")
def launch_backward(
    query: Array, key: Array, value: Array, out: Array, lse: Array, dout: Array, plan: Plan
) -> tuple[Array, Array, Array]:
    """Returns the gradients of query, key and value for the output's cotangent `dout`."""
    delta = jnp.einsum(
        "bthd,bthd->bht", out.astype(jnp.float32), dout.astype(jnp.float32), precision="highest"
    )
    # Copies along one axis are not cut off at its end: the lines have room for every tile.
    room = math.lcm(plan.config.dq_warpgroups * ROWS, plan.config.dkv_block)
    lse, delta = (pad_tokens(x, room, axis=2) for x in (lse * LOG2E, delta))
    region = Region(query.shape[1], key.shape[1], plan.is_causal)
    q, k, v, do = (pad_tokens(x) for x in (query, key, value, dout))
    dq = query_gradient(q, k, v, do, lse, delta, region, plan)
    dk, dv = key_value_gradient(q, k, v, do, lse, delta, region, plan)
    return dq[:, : query.shape[1]], dk[:, : key.shape[1]], dv[:, : key.shape[1]]
