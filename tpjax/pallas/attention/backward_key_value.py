# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The backward kernel of attention for key and value, as `backward` says.

    dkey = scale dx^T query      dvalue = p^T dout

A tile of keys gathers from the queries of all heads of its group, in order.
"""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from tpjax.pallas._mgpu import accumulate, out_like, pl, plgpu, row_tile
from tpjax.pallas.attention.blocks import Span, tile_order
from tpjax.pallas.attention.config import ROWS, compute_registers
from tpjax.pallas.attention.cotangents import Cotangents, launch
from tpjax.pallas.attention.extras import Extras, query_spans, tiled
from tpjax.pallas.attention.forward import TileFacts, filled
from tpjax.pallas.attention.ring import Ring, fill, ring_barriers, slot_of
from tpjax.pallas.attention.scores import WGMMA, Plan, Scores, Tile


class _KeyWalk(NamedTuple):
    """What one worker needs to gather dkey and dvalue of its rows over the query blocks."""

    key: Any
    value: Any
    start: Array
    ids: Array | None
    span: Span
    steps: Array
    queries: Ring
    douts: Ring
    scores: Scores
    facts: TileFacts


def _key_step(
    step: Array, sums: tuple[Array, Array], walk: _KeyWalk, member: Array, at_edge: bool
) -> tuple[Array, Array]:
    """Adds one block of queries of one query head, the `member`th of its group."""
    plan, dtype = walk.facts.plan, walk.key.dtype
    scores = walk.scores._replace(head=walk.scores.head * walk.facts.group + member)
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
        where = Tile(walk.start, (walk.span.start + step) * block, tile)
        scored, factor, gain = scores.values(fresh[0].value(pending=1), where)
        weights = jnp.exp2(scored * factor - lse_columns)
        seen = scores.seen(where, at_edge, walk.ids)
        if seen is not None:
            weights = jnp.where(seen, weights, 0.0)
        dv.add(weights.astype(dtype), dout)
        dweights = fresh[1].value(pending=1)
        ds = weights * (dweights - delta_columns)
        if seen is not None:
            ds = jnp.where(seen, ds, 0.0)  # what is hidden may be infinite or NaN
        dx = ds if gain is None else ds * gain
        dk.add(dx.astype(dtype), query)
        return nothing

    (dk, dv), _ = accumulate(products, list(sums), (), fresh=[tile] * 2, interpret=plan.interpret)
    plgpu.barrier_arrive(walk.queries.free.at[slot])
    plgpu.barrier_arrive(walk.douts.free.at[slot])
    return dk, dv


def _key_value_sums(
    member: Array, sums: tuple[Array, Array], walk: _KeyWalk
) -> tuple[Array, Array]:
    """Gathers dkey and dvalue over all blocks of one query head."""
    span, steps = walk.span, walk.steps
    at_edge = partial(_key_step, walk=walk, member=member, at_edge=True)
    step, whole = jnp.int32(0), steps
    ends_left, ends_right = walk.scores.query_edges()
    if ends_left:
        step = jnp.int32(span.full_start - span.start)
        sums = lax.fori_loop(0, step, at_edge, sums)
    if ends_right:
        whole = jnp.maximum(step, span.full_stop - span.start)
    inside = partial(_key_step, walk=walk, member=member, at_edge=False)
    sums = lax.fori_loop(step, whole, inside, sums)
    return lax.fori_loop(whole, steps, at_edge, sums) if ends_right else sums


def _key_value_kernel(
    q_ref, k_ref, v_ref, cotangents: Cotangents, extras: Extras, spans, dk_ref, dv_ref, k_smem,
    v_smem, q_smem, do_smem, lse_smem, delta_smem, own_ready, q_ready, q_free, do_ready, do_free,
    *, facts: TileFacts,
):  # fmt: skip
    """dkey and dvalue of 64 rows for each worker; queries stream through rings."""
    config = facts.plan.config
    workers, block = config.dkv_warpgroups, config.dkv_block
    batch, kv_head, tile = facts.locate(lax.axis_index("tile"))
    worker = lax.axis_index("worker")
    tile_start = tile * (workers * ROWS)
    scores = Scores(facts.plan, extras, spans, batch, kv_head, query_axis=1)
    span = scores.span(tile, workers * ROWS, block)
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
        ids = scores.ids(start, ROWS, axis=0)
        plgpu.barrier_wait(own_ready.at[worker])
        walk = _KeyWalk(
            key, value, start, ids, span, steps, queries, douts, scores, facts
        )  # fmt: skip
        widths = facts.features, facts.value_features
        zeros = tuple(filled(0, (ROWS, width)) for width in widths)
        gather = partial(_key_value_sums, walk=walk)
        dk, dv = lax.fori_loop(0, facts.group, gather, zeros)
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
            dout, lse, delta = cotangents
            return (q_ref.at[rows], lse.at[line]), (dout.at[rows], delta.at[line])

        fill(steps * facts.group, (queries, douts), sources)


def key_value_gradient(
    q: Array, k: Array, v: Array, cotangents: Cotangents, extras: Extras, plan: Plan
) -> list[Array]:
    """Runs the kernel for key and value; operands as of `query_gradient`."""
    config, dtype = plan.config, q.dtype
    batch, _, kv_heads, features = k.shape
    workers, stages, block = config.dkv_warpgroups, config.dkv_stages, config.dkv_block
    value_features, rows = v.shape[-1], workers * ROWS
    group, num_tiles = q.shape[2] // kv_heads, pl.cdiv(plan.region.num_keys, rows)
    head_bytes = group * q.shape[1] * (features + value_features) * dtype.itemsize
    order = tile_order(num_tiles, batch * kv_heads, 1, head_bytes, longest_last=False)
    facts = TileFacts(plan, order, kv_heads, group, features, value_features)
    scratch = [
        *(row_tile((workers, ROWS, width), dtype) for width in (features, value_features)),
        *(row_tile((stages, block, width), dtype) for width in (features, value_features)),
        *(plgpu.SMEM((stages, block), jnp.float32) for _ in ("lse", "delta")),
        plgpu.Barrier(num_arrivals=2, num_barriers=workers),
        *ring_barriers(workers, stages, copies=2),
        *ring_barriers(workers, stages, copies=2),
    ]
    name, grid = "flash_attention_backward_key_value", num_tiles * batch * kv_heads
    out_type = [out_like(q, x.shape, dtype) for x in (k, v)]
    kernel = launch(_key_value_kernel, name, facts, workers, grid, out_type, scratch)
    spans = query_spans(extras, plan.region, num_tiles, rows, block)
    return kernel(q, k, v, cotangents, tiled(extras, block, rows, transposed=True), spans)
