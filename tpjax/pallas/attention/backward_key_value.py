# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The backward kernels of attention for key and value, as `backward` says.

    dkey = scale dx^T query      dvalue = p^T dout

A tile of keys gathers from the queries of all heads of its group, in order. Here each worker
gathers both for keys of its own; `backward_split` does so where the sums are too wide for that.
"""

import math
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from tpjax.pallas._mgpu import accumulate, out_like, pl, plgpu, row_tile
from tpjax.pallas.attention.backward_split import exchange_scratch, split_kernel
from tpjax.pallas.attention.blocks import tile_order
from tpjax.pallas.attention.config import ROWS, compute_registers
from tpjax.pallas.attention.cotangents import Cotangents, launch
from tpjax.pallas.attention.extras import Extras, query_spans, tiled
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
from tpjax.pallas.attention.schedule import TileFacts
from tpjax.pallas.attention.scores import Plan, filled, without_garbage


def _key_value_step(step: Array, sums: Sums, walk: QueryWalk, member: Array, at_edge: bool) -> Sums:
    """Adds one block of queries to dkey and dvalue."""
    (key, value), stop = walk.own, walk.stop(step, member)

    def products(sums, fresh, nothing):
        (product,), (dk, dv, dweights) = fresh, sums
        product.add(key, stop.query.transpose((1, 0)))
        dweights.add(value, stop.dout.transpose((1, 0)))
        lse = stop.by_column(stop.lse)
        weights, gain = stop.weights(product.value(pending=1), lse, walk.ids, at_edge)
        dv.add(weights.astype(value.dtype), stop.dout)
        ds = weights * dweights.value(pending=1)
        if stop.scores.may_hide_garbage(at_edge):
            ds = without_garbage(ds, weights)
        dx = ds if gain is None else ds * gain
        dk.add(dx.astype(key.dtype), stop.query)
        # Under the product: without barriers before them the next step's products start sooner.
        count, steps = stop.count + 1, (walk.span.stop - walk.span.start) * walk.facts.group
        pl.when(count < steps)(lambda: walk.enter(count))
        return nothing

    # The derivatives of the weights are summed up from -delta: that saves its registers later.
    sums, interpret = (*sums, -stop.by_column(stop.delta)), walk.facts.plan.interpret
    added, _ = accumulate(products, sums, (), fresh=[walk.tile], interpret=interpret)
    walk.leave(stop.slot)
    return tuple(added[:2])


def _key_value_kernel(
    q_ref, k_ref, v_ref, cotangents: Cotangents, extras: Extras, spans, dk_ref, dv_ref, k_smem,
    v_smem, blocks: Blocks, own_ready, exchange, *, facts: TileFacts,
):  # fmt: skip
    """dkey and dvalue of 64 rows for each worker; queries stream through rings."""
    del exchange
    workers, worker = facts.plan.config.dkv_warpgroups, lax.axis_index("worker")
    walk = start_walk(workers * ROWS, *blocks.rings(), extras, spans, facts)

    @pl.when(worker < workers)
    def _compute():
        plgpu.set_max_registers(compute_registers(workers), action="increase")
        start = walk.start + worker * ROWS
        rows = (walk.scores.batch, pl.ds(start, ROWS), walk.scores.head)
        key, value = own = k_smem.at[worker], v_smem.at[worker]
        for source, smem in zip((k_ref, v_ref), own, strict=True):
            plgpu.copy_gmem_to_smem(source.at[rows], smem, own_ready.at[worker])
        ids = walk.scores.ids(start, ROWS, axis=0)
        plgpu.barrier_wait(own_ready.at[worker])
        zeros = tuple(filled(0, x.shape) for x in own)
        walk.enter(jnp.int32(0))
        dk, dv = gather(_key_value_step, zeros, walk._replace(own=own, start=start, ids=ids))
        store((dk * facts.plan.scale, key, dk_ref.at[rows]), (dv, value, dv_ref.at[rows]))

    pl.when(worker == workers)(partial(load_queries, q_ref, cotangents, walk))


def key_value_gradient(
    q: Array, k: Array, v: Array, cotangents: Cotangents, extras: Extras, plan: Plan
) -> list[Array]:
    """Runs the kernel for key and value; operands as of `query_gradient`."""
    config, dtype = plan.config, q.dtype
    batch, _, kv_heads, features = k.shape
    workers, stages, block = config.dkv_warpgroups, config.dkv_stages, config.dkv_block
    own = (ROWS,) if config.dkv_split else (workers, ROWS)
    value_features, rows = v.shape[-1], math.prod(own)
    group, num_tiles = q.shape[2] // kv_heads, pl.cdiv(plan.region.num_keys, rows)
    head_bytes = group * q.shape[1] * (features + value_features) * dtype.itemsize
    order = tile_order(num_tiles, batch * kv_heads, 1, head_bytes, longest_last=False)
    facts = TileFacts(plan, order, kv_heads, group, features, value_features)
    scratch = [
        *(row_tile((*own, width), dtype) for width in (features, value_features)),
        blocks_scratch(extras, (stages, block), (features, value_features), dtype, workers),
        plgpu.Barrier(num_arrivals=1 if config.dkv_split else 2, num_barriers=workers),
        exchange_scratch(block) if config.dkv_split else None,
    ]
    body: Any = split_kernel if config.dkv_split else _key_value_kernel
    name, grid = "flash_attention_backward_key_value", num_tiles * batch * kv_heads
    out_type = [out_like(q, x.shape, dtype) for x in (k, v)]
    kernel = launch(body, name, facts, workers, grid, out_type, scratch)
    spans = query_spans(extras, plan.region, num_tiles, rows, block)
    return kernel(q, k, v, cotangents, tiled(extras, block, rows, transposed=True), spans)
