# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The backward kernel of attention for query: dquery = scale dx key, as `backward` says."""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from tpjax.pallas._mgpu import accumulate, out_like, pl, plgpu, row_tile
from tpjax.pallas.attention.blocks import Span, tile_order
from tpjax.pallas.attention.config import ROWS, compute_registers
from tpjax.pallas.attention.cotangents import Cotangents, launch
from tpjax.pallas.attention.extras import Extras, key_spans, tiled
from tpjax.pallas.attention.ring import Ring, fill, ring_barriers, slot_of
from tpjax.pallas.attention.schedule import TileFacts
from tpjax.pallas.attention.scores import WGMMA, Plan, Scores, Tile, by_row, filled

WIDE = 192
"""Features of a head beyond which registers are scarce."""


class _QueryWalk(NamedTuple):
    """What one worker needs to gather dquery of its rows over the key blocks, last to first."""

    query: Any
    """Of all workers, as `dout`."""
    dout: Any
    worker: Array
    lse: Array
    delta: Array
    start: Array
    ids: Array | None
    span: Span
    keys: Ring
    values: Ring
    scores: Scores
    facts: TileFacts

    @property
    def awaits_values(self) -> bool:
        """Whether values are waited for with the keys; with one stage they come later."""
        return self.values.stages > 1

    def await_blocks(self, step: Any) -> None:
        """Waits until a step's blocks have arrived."""
        for ring in (self.keys, self.values) if self.awaits_values else (self.keys,):
            plgpu.barrier_wait(ring.ready.at[slot_of(step, ring.stages)])


class _RowSums(NamedTuple):
    """Sums over the keys of each query, for the gradient of slopes; d is the distance.

    That is the sum of ds d. But ds holds delta, which comes from the rounded output: delta is off
    by e = delta + dlse - sum(p dout value^T), and the sum by e sum(p d), which is added back.
    """

    ds_far: Array
    ds: Array
    weights_far: Array
    weights: Array

    def add(self, ds: Array, weights: Array, far: Array) -> "_RowSums":
        """Adds a tile."""
        tiles = ds * far, ds, weights * far, weights
        return _RowSums(*(old + x.sum(axis=1) for old, x in zip(self, tiles, strict=True)))

    def lines(self, delta: Array) -> tuple[Array, Array]:
        """Returns the sum but for dlse sum(p d), as no dlse is known here, and sum(p d)."""
        error = delta * (1 - self.weights) - self.ds
        return self.ds_far + error * self.weights_far, self.weights_far


def _query_step(
    step: Array, sums: tuple[Array, _RowSums | None], walk: _QueryWalk, at_edge: bool
) -> tuple[Array, _RowSums | None]:
    """Adds one block of keys to dquery, and to the sums that slopes want."""
    plan, scores = walk.facts.plan, walk.scores
    dq, row_sums = sums
    block = plan.config.dq_block
    slot, value_slot = (slot_of(step, ring.stages) for ring in (walk.keys, walk.values))
    tile, zero = (ROWS, block), _zero(step, walk.facts)
    keys, values = walk.keys.buffers[0].at[slot], walk.values.buffers[0].at[value_slot + zero]
    query, dout = (x.at[walk.worker + zero] for x in (walk.query, walk.dout))
    key_ids = walk.keys.buffers[1].at[slot] if walk.ids is not None else None

    def products(sums, fresh, row_sums):
        (product,), (dq, dweights) = fresh, sums
        product.add(query, keys.transpose((1, 0)))
        if not walk.awaits_values:
            plgpu.barrier_wait(walk.values.ready.at[value_slot])
        dweights.add(dout, values.transpose((1, 0)))
        where = Tile(walk.start, (walk.span.stop - 1 - step) * block, tile)
        scored, factor, gain = scores.values(product.value(pending=1), where)
        weights = jnp.exp2(scored * factor - by_row(walk.lse, tile))
        seen = scores.seen(where, at_edge, walk.ids, key_ids)
        if seen is not None:
            weights = jnp.where(seen, weights, 0.0)
        weights = lax.optimization_barrier(weights)
        # Where a block of instructions ends is the one place that ptxas moves no arithmetic across:
        # waiting for the next blocks here keeps the weights before the wait for their derivatives.
        pl.when(step + 1 < walk.span.stop - walk.span.start)(lambda: walk.await_blocks(step + 1))
        ds = weights * dweights.value()
        plgpu.barrier_arrive(walk.values.free.at[value_slot])
        if seen is not None and scores.may_hide_garbage:
            ds = jnp.where(seen, ds, 0.0)
        if row_sums is not None:
            row_sums = row_sums.add(ds, weights, scores.distance(where))
        dx = ds if gain is None else ds * gain
        dq.add(dx.astype(query.dtype), keys)
        return row_sums

    # The derivatives of the weights are summed up from -delta: that saves its registers later.
    begun = by_row(-walk.delta, tile)
    (dq, _), row_sums = accumulate(
        products, [dq, begun], row_sums, fresh=[tile], interpret=plan.interpret
    )
    plgpu.barrier_arrive(walk.keys.free.at[slot])
    return dq, row_sums


def _zero(step: Array, facts: TileFacts) -> Any:
    """Returns zero, for sums as wide as the registers in a way that the compiler cannot know.

    Addresses that stay the same over all steps it would keep in registers, and has none to spare.
    """
    if facts.features <= WIDE:
        return 0
    return lax.shift_right_logical(lax.optimization_barrier(step), jnp.int32(30))


def _query_sums(walk: _QueryWalk, steps: Array, for_slopes: bool) -> tuple[Array, Any]:
    """Gathers dquery over all blocks; those that may cross an edge are the first and the last."""
    ends_left, ends = walk.scores.edges(walk.facts.plan.config.dq_block)
    sums = (
        filled(0, (ROWS, walk.facts.features)),
        _RowSums(*[filled(0, (ROWS,), WGMMA.reduce(1))] * 4) if for_slopes else None,
    )
    at_edge = partial(_query_step, walk=walk, at_edge=True)
    step, whole = jnp.int32(0), steps
    if ends:
        step = jnp.int32(walk.span.stop - walk.span.full_stop)
        sums = lax.fori_loop(0, step, at_edge, sums)
    if ends_left:
        whole = jnp.maximum(step, walk.span.stop - walk.span.full_start)
    sums = lax.fori_loop(step, whole, partial(_query_step, walk=walk, at_edge=False), sums)
    return lax.fori_loop(whole, steps, at_edge, sums) if ends_left else sums


def _query_kernel(
    q_ref, k_ref, v_ref, cotangents: Cotangents, extras: Extras, spans, dq_ref, slope_refs,
    q_smem, do_smem, lse_smem, delta_smem, k_smem, ids_smem, v_smem, own_ready, k_ready, k_free,
    v_ready, v_free, *, facts: TileFacts,
):  # fmt: skip
    """dquery of 64 rows for each worker; keys and values stream through rings."""
    config = facts.plan.config
    workers, block = config.dq_warpgroups, config.dq_block
    batch, head, tile = facts.locate(lax.axis_index("tile"))
    worker = lax.axis_index("worker")
    tile_start = tile * (workers * ROWS)
    scores = Scores(facts.plan, extras, spans, batch, head, query_axis=0)
    span = scores.span(tile, workers * ROWS, block)
    steps = jnp.int32(span.stop - span.start)
    key_buffers = (k_smem,) if ids_smem is None else (k_smem, ids_smem)
    keys, values = Ring(key_buffers, k_ready, k_free), Ring((v_smem,), v_ready, v_free)

    @pl.when(worker < workers)
    def _compute():
        plgpu.set_max_registers(compute_registers(workers), action="increase")
        start = tile_start + worker * ROWS
        rows, line = (batch, pl.ds(start, ROWS), head), (batch, head, pl.ds(start, ROWS))
        own = tuple(smem.at[worker] for smem in (q_smem, do_smem, lse_smem, delta_smem))
        dout_ref, *line_refs = cotangents
        sources = (q_ref.at[rows], dout_ref.at[rows], *(ref.at[line] for ref in line_refs))
        for source, smem in zip(sources, own, strict=True):
            plgpu.copy_gmem_to_smem(source, smem, own_ready.at[worker])
        ids = scores.ids(start, ROWS, axis=0)
        plgpu.barrier_wait(own_ready.at[worker])
        query, _, *lines = own
        lse, delta = (plgpu.load(x, layout=WGMMA.reduce(1)) for x in lines)
        walk = _QueryWalk(
            q_smem, do_smem, worker, lse, delta, start, ids, span, keys, values, scores, facts
        )
        walk.await_blocks(jnp.int32(0))
        dq, row_sums = _query_sums(walk, steps, for_slopes=slope_refs is not None)
        query[...] = (dq * facts.plan.scale).astype(query.dtype)
        stores = [(query, dq_ref.at[rows])]
        if row_sums is not None:
            for smem, x, ref in zip(lines, row_sums.lines(delta), slope_refs, strict=True):
                smem[...] = x
                stores.append((smem, ref.at[line]))
        plgpu.commit_smem()
        for smem, target in stores:
            plgpu.copy_smem_to_gmem(smem, target)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(worker == workers)
    def _load():
        plgpu.set_max_registers(24, action="decrease")
        kv_head = lax.div(head, jnp.int32(facts.group))

        def sources(step):
            tokens = pl.ds((span.stop - 1 - step) * block, block)
            rows = (batch, tokens, kv_head)
            ids = () if ids_smem is None else (extras.key_ids.at[batch, tokens],)
            return (k_ref.at[rows], *ids), (v_ref.at[rows],)

        fill(steps, (keys, values), sources)


def query_gradient(
    q: Array, k: Array, v: Array, cotangents: Cotangents, extras: Extras, plan: Plan
) -> tuple[Array, tuple[Array, Array] | None]:
    """Runs the kernel for query.

    Args:
      q, k, v: operands whose tokens come in multiples of `TMA_ROWS`.
      cotangents: the same; its lines have room for every tile.
      extras: as in the forward pass.
      plan: the same.

    Returns:
      dquery, and with slopes the two lines [B, H, T or more] of `_RowSums`, else None.
    """
    (batch, _, heads, features), dtype = q.shape, q.dtype
    workers, block = plan.config.dq_warpgroups, plan.config.dq_block
    stages, value_stages = plan.config.dq_stages, plan.config.dq_value_stages
    value_features, rows = v.shape[-1], workers * ROWS
    group, num_tiles = heads // k.shape[2], pl.cdiv(plan.region.num_queries, rows)
    head_bytes = k.shape[1] * (features + value_features) * dtype.itemsize
    order = tile_order(num_tiles, batch * heads, group, head_bytes, plan.region.is_causal)
    facts = TileFacts(plan, order, heads, group, features, value_features)
    has_ids = extras.key_ids is not None
    scratch = [
        row_tile((workers, ROWS, features), dtype),
        row_tile((workers, ROWS, value_features), dtype),
        *(plgpu.SMEM((workers, ROWS), jnp.float32) for _ in ("lse", "delta")),
        row_tile((stages, block, features), dtype),
        plgpu.SMEM((stages, block), jnp.int32) if has_ids else None,
        row_tile((value_stages, block, value_features), dtype),
        plgpu.Barrier(num_arrivals=4, num_barriers=workers),
        *ring_barriers(workers, stages, copies=1 + has_ids),
        *ring_barriers(workers, value_stages, copies=1),
    ]
    name, grid = "flash_attention_backward_query", num_tiles * batch * heads
    line = out_like(q, (batch, heads, num_tiles * rows), jnp.float32)
    out_type = [out_like(q, q.shape, dtype), None if extras.slopes is None else (line, line)]
    kernel = launch(_query_kernel, name, facts, workers, grid, out_type, scratch)
    spans = key_spans(extras, plan.region, num_tiles, rows, block)
    return kernel(q, k, v, cotangents, tiled(extras, rows, block), spans)
