# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The backward kernel of attention for query: dquery = scale dx key, as `backward` says."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from tpjax.pallas._mgpu import accumulate, out_like, pl, plgpu, row_tile
from tpjax.pallas.attention.blocks import Span, tile_order
from tpjax.pallas.attention.config import ROWS, compute_registers
from tpjax.pallas.attention.cotangents import Cotangents, launch
from tpjax.pallas.attention.extras import Extras, key_spans, tiled
from tpjax.pallas.attention.ring import Ring, fill, ring_barriers, slot_of
from tpjax.pallas.attention.schedule import TileFacts
from tpjax.pallas.attention.scores import (
    WGMMA,
    Plan,
    Scores,
    Tile,
    by_row,
    filled,
    hidden,
    without_garbage,
)

WIDE = 192
"""Features of a head beyond which registers are scarce, and shared memory is full."""


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


class Lines(NamedTuple):
    """Sums over the keys of each query, [B, H, T or more]; d is the distance.

    In the kernel ds holds delta, which comes from the rounded output and is off a little. That adds
    up where gradients are sums of many ds, or shows where ds is the difference of two large
    products: those are told what delta is, and what ds d would sum up to.
    """

    products: Any
    """Sum of p dout value^T, which is delta + dlse."""
    ds_far: Any = None
    """Sum of ds d for the slopes' gradient, but for dlse `weights_far`: no dlse is known here."""
    weights_far: Any = None
    """Sum of p d."""


class _RowSums(NamedTuple):
    """What `Lines` are made of; the last two are None without slopes."""

    ds: Array
    weights: Array
    ds_far: Array | None
    weights_far: Array | None

    def add(self, ds: Array, weights: Array, far: Array | None) -> "_RowSums":
        """Adds a tile."""
        others = (None, None) if far is None else (ds * far, weights * far)
        tiles = _RowSums(ds, weights, *others)
        return jax.tree.map(lambda old, x: old + x.sum(axis=1), self, tiles)

    def lines(self, delta: Array) -> Lines:
        """Returns the lines, given the delta that ds holds."""
        products = self.ds + delta * self.weights
        if self.ds_far is None or self.weights_far is None:
            return Lines(products)
        return Lines(
            products, self.ds_far + (delta - products) * self.weights_far, self.weights_far
        )


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
    key_ids = walk.keys.buffers[1].at[slot] if len(walk.keys.buffers) > 1 else None

    def products(sums, fresh, row_sums):
        (product,), (dq, dweights) = fresh, sums
        product.add(query, keys.transpose((1, 0)))
        if not walk.awaits_values:
            plgpu.barrier_wait(walk.values.ready.at[value_slot])
        dweights.add(dout, values.transpose((1, 0)))
        where = Tile(walk.start, (walk.span.stop - 1 - step) * block, tile)
        scored, factor, gain = scores.values(product.value(pending=1), where)
        weights = jnp.exp2(scored * factor - by_row(walk.lse, tile))
        weights = hidden(weights, 0.0, scores.seen(where, at_edge, walk.ids, key_ids))
        weights = lax.optimization_barrier(weights)
        # Where a block of instructions ends is the one place that ptxas moves no arithmetic across:
        # waiting for the next blocks here keeps the weights before the wait for their derivatives.
        pl.when(step + 1 < walk.span.stop - walk.span.start)(lambda: walk.await_blocks(step + 1))
        ds = weights * dweights.value()
        plgpu.barrier_arrive(walk.values.free.at[value_slot])
        if scores.may_hide_garbage(at_edge):
            ds = without_garbage(ds, weights)
        if row_sums is not None:
            far = None if scores.extras.slopes is None else scores.distance(where)
            row_sums = row_sums.add(ds, weights, far)
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


def _query_sums(walk: _QueryWalk, steps: Array, lines: Lines | None) -> tuple[Array, Any]:
    """Gathers dquery over all blocks; those that may cross an edge are the first and the last."""
    ends_left, ends = walk.scores.edges(walk.facts.plan.config.dq_block)
    row_sums, line = None, filled(0, (ROWS,), WGMMA.reduce(1))
    if lines is not None:
        far = None if lines.ds_far is None else line
        row_sums = _RowSums(line, line, far, far)
    sums = filled(0, (ROWS, walk.facts.features)), row_sums
    at_edge = partial(_query_step, walk=walk, at_edge=True)
    step, whole = jnp.int32(0), steps
    if ends:
        step = jnp.int32(walk.span.stop - walk.span.full_stop)
        sums = lax.fori_loop(0, step, at_edge, sums)
    if ends_left:
        whole = jnp.maximum(step, walk.span.stop - walk.span.full_start)
    sums = lax.fori_loop(step, whole, partial(_query_step, walk=walk, at_edge=False), sums)
    return lax.fori_loop(whole, steps, at_edge, sums) if ends_left else sums


def _store_lines(lines: Lines, refs: Any, buffers: list[Any], place: Any) -> None:
    """Copies lines to global memory through buffers, of which there are fewer."""
    pairs = list(zip(jax.tree.leaves(lines), jax.tree.leaves(refs), strict=True))
    for first in range(0, len(pairs), len(buffers)):
        taken = list(zip(pairs[first : first + len(buffers)], buffers, strict=False))
        for (x, _), buffer in taken:
            buffer[...] = x
        plgpu.commit_smem()
        for (_, ref), buffer in taken:
            plgpu.copy_smem_to_gmem(buffer, ref.at[place])
        plgpu.wait_smem_to_gmem(0)


def _query_kernel(
    q_ref, k_ref, v_ref, cotangents: Cotangents, extras: Extras, spans, dq_ref,
    line_refs: Lines | None, q_smem, do_smem, lse_smem, delta_smem, k_smem, ids_smem, v_smem,
    own_ready, k_ready, k_free,
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
        dout_ref, *given = cotangents
        sources = (q_ref.at[rows], dout_ref.at[rows], *(ref.at[line] for ref in given))
        for source, smem in zip(sources, own, strict=True):
            plgpu.copy_gmem_to_smem(source, smem, own_ready.at[worker])
        ids = scores.ids(start, ROWS, axis=0)
        plgpu.barrier_wait(own_ready.at[worker])
        query, _, *own_lines = own
        lse, delta = (plgpu.load(x, layout=WGMMA.reduce(1)) for x in own_lines)
        walk = _QueryWalk(
            q_smem, do_smem, worker, lse, delta, start, ids, span, keys, values, scores, facts
        )
        walk.await_blocks(jnp.int32(0))
        dq, row_sums = _query_sums(walk, steps, line_refs)
        query[...] = (dq * facts.plan.scale).astype(query.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(query, dq_ref.at[rows])
        if row_sums is not None:
            _store_lines(row_sums.lines(delta), line_refs, own_lines, line)
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
) -> tuple[Array, Lines | None]:
    """Runs the kernel for query.

    Args:
      q, k, v: operands whose tokens come in multiples of `TMA_ROWS`.
      cotangents: the same; its lines have room for every tile.
      extras: as in the forward pass.
      plan: the same.

    Returns:
      dquery, and for calls with a bias, slopes or sinks the float32 lines, else None.
    """
    (batch, _, heads, features), dtype = q.shape, q.dtype
    workers, block = plan.config.dq_warpgroups, plan.config.dq_block
    stages, value_stages = plan.config.dq_stages, plan.config.dq_value_stages
    value_features, rows = v.shape[-1], workers * ROWS
    group, num_tiles = heads // k.shape[2], pl.cdiv(plan.region.num_queries, rows)
    head_bytes = k.shape[1] * (features + value_features) * dtype.itemsize
    spans = key_spans(extras, plan.region, num_tiles, rows, block)
    order = tile_order(num_tiles, batch * heads, group, head_bytes, plan.region.is_causal)
    facts = TileFacts(plan, order, heads, group, features, value_features)
    has_ids = extras.key_ids is not None and features <= WIDE
    wanting = extras.bias, extras.slopes, extras.sinks

    def lines_of(x: Any) -> Lines | None:
        if all(given is None for given in wanting):
            return None
        return Lines(x) if extras.slopes is None else Lines(x, x, x)

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
    out_type = [out_like(q, q.shape, dtype), lines_of(line)]
    kernel = launch(_query_kernel, name, facts, workers, grid, out_type, scratch)
    return kernel(q, k, v, cotangents, tiled(extras, rows, block), spans)
