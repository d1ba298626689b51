# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The fused backward kernel of attention for Hopper GPUs: every gradient from one walk.

    p = exp(score - lse)                       delta = rowsum(out dout) - dlse
    ds = p (dout value^T - delta)              dx = ds dscore/dx, x = scale query key^T
    dquery = scale dx key      dkey = scale dx^T query      dvalue = p^T dout

Five matrix products for a block of scores where the two kernels of `backward` need seven. A block
of threads owns 64 keys for each worker and walks over the queries: dkey and dvalue stay in
registers, dx is staged in shared memory, where every worker multiplies a part of it by the keys of
all, and that float32 product is added to dquery in global memory. Many blocks of threads add to one
query in no fixed order: the bits of dquery differ from run to run.

Letters and numerics as in `backward`; dquery is summed in float32 and rounded once.

Source: Shah et al. 2024 (FlashAttention-3), appendix B.
"""

from dataclasses import dataclass
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
from tpjax.pallas.attention.backward import extras_gradient
from tpjax.pallas.attention.blocks import Span, tile_order
from tpjax.pallas.attention.config import ROWS, compute_registers
from tpjax.pallas.attention.cotangents import Cotangents, cotangents_of, launch
from tpjax.pallas.attention.extras import Extras, pad_tokens, query_spans, tiled
from tpjax.pallas.attention.ring import Ring, fill, ring_barriers, slot_of
from tpjax.pallas.attention.schedule import TileFacts
from tpjax.pallas.attention.scores import WGMMA, Plan, Scores, Tile, filled


@dataclass(frozen=True)
class FusedConfig:
    """Tile sizes and order of the fused backward kernel."""

    workers: int = 2
    """Computing warpgroups, each of 64 keys."""
    block: int = 64
    """Queries of a step."""
    stages: int = 2
    """Blocks of queries, and of cotangents, in shared memory."""
    late: bool = True
    """Whether the product for dquery is that of the step before: then no worker waits for one that
    is less than a step behind."""
    own_in_registers: bool = False
    """Whether a worker keeps its keys and values in registers."""
    dkey_first: bool = False
    """Whether the product for dkey starts before that for dquery."""
    delta_first: bool = False
    """Whether delta is in the sum that the product for dweights adds to."""


FUSED_CONFIGS_64 = (
    FusedConfig(block=128, delta_first=True),
    FusedConfig(stages=4, delta_first=True),
    FusedConfig(workers=3, delta_first=True),
)
FUSED_CONFIGS_128 = (FusedConfig(delta_first=True),)
FUSED_CONFIGS = {(64, 64): FUSED_CONFIGS_64, (128, 128): FUSED_CONFIGS_128}
"""By features of keys and of values; the best for long sequences first. Wider heads do not fit."""


class Share(NamedTuple):
    """The part of a block's product for dquery that one worker forms."""

    rows: int
    columns: int
    in_turn: bool
    """Whether workers take the whole of it in turns."""
    buffers: int
    """Blocks of dx in shared memory."""


def share_of(config: FusedConfig, features: int) -> Share:
    """Returns each worker's share: its queries, its features, or all of it in its turn."""
    workers, block = config.workers, config.block
    if block == workers * ROWS:
        return Share(ROWS, features, False, 2)
    if block == ROWS and features == workers * ROWS:
        return Share(ROWS, ROWS, False, 2)
    assert block == ROWS, f"{workers} workers cannot share {block} queries x {features} features"
    return Share(ROWS, features, True, workers)


class _Exchange(NamedTuple):
    """dx^T of all workers' keys, step by step, and a barrier pair for each buffer."""

    buffers: Any
    full: Any
    """Completes when every worker has written its rows."""
    free: Any
    """Completes when every product with them is done."""

    def slot(self, count: Array) -> Array:
        """Returns the slot of a step, the first of which may be -1."""
        num_slots = self.buffers.shape[0]
        return slot_of(count + num_slots, num_slots)


class _Walk(NamedTuple):
    """What one worker needs on its way over the query blocks of all heads of its group."""

    key: Any
    value: Any
    keys: Any
    """Of all workers."""
    place: tuple[Array, Array, Array]
    """Sequence, key head, first key."""
    ids: Array | None
    """Segments of the keys."""
    span: Span
    steps: Any
    worker: Array
    queries: Ring
    douts: Ring
    exchange: _Exchange
    dq_smem: Any
    dq_ref: Any
    share: Share
    scores: Scores
    facts: TileFacts
    config: FusedConfig


class _At(NamedTuple):
    """One step of the walk."""

    count: Any
    """Of all steps; -1 is before the first."""
    member: Any
    step: Any

    def before(self, steps: Any) -> "_At":
        """Returns the step before, of so many for each member."""
        wraps = self.step == 0
        member = self.member - jnp.where(wraps, 1, 0)
        return _At(self.count - 1, member, jnp.where(wraps, steps, self.step) - 1)


def _stage(walk: _Walk, count: Array, dx: Array) -> None:
    """Shows this worker's dx^T of one step to all workers."""
    buffers, full, free = walk.exchange
    slot = walk.exchange.slot(count)
    plgpu.barrier_wait(free.at[slot])
    buffers.at[slot, pl.ds(walk.worker * ROWS, ROWS)][...] = dx
    plgpu.commit_smem()
    plgpu.barrier_arrive(full.at[slot])


def _dquery(walk: _Walk, at: _At, behind: Any = None) -> None:
    """Forms this worker's share of dquery of one step, and starts adding it in global memory.

    `behind` starts another product that runs while this one is stored.
    """
    (buffers, full, free), share, plan = walk.exchange, walk.share, walk.facts.plan
    slot = walk.exchange.slot(at.count)
    dx, keys = buffers.at[slot], walk.keys
    if share.rows < walk.config.block:
        dx = dx.at[:, pl.ds(walk.worker * share.rows, share.rows)]
    if share.columns < walk.facts.features:
        keys = keys.at[:, pl.ds(walk.worker * share.columns, share.columns)]

    def form(dq):
        plgpu.barrier_wait(full.at[slot])
        dq.add(dx.transpose((1, 0)), keys)
        if behind is not None:
            behind()
        return dq.value(pending=behind is not None)

    part = accumulate_also(form, (share.rows, share.columns), interpret=plan.interpret)
    plgpu.barrier_arrive(free.at[slot])
    pl.when(at.count >= 0)(partial(_add_dquery, walk, at, part))


def _add_dquery(walk: _Walk, at: _At, part: Array) -> None:
    share, (batch, kv_head, _) = walk.share, walk.place
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    walk.dq_smem[...] = part
    plgpu.commit_smem()
    head = kv_head * walk.facts.group + at.member
    row, column = (walk.span.start + at.step) * walk.config.block, 0
    if share.rows < walk.config.block:
        row = row + walk.worker * share.rows
    if share.columns < walk.facts.features:
        column = walk.worker * share.columns
    target = (batch, pl.ds(row, share.rows), head, pl.ds(column, share.columns))
    add_to_gmem(walk.dq_smem, walk.dq_ref.at[target], interpret=walk.facts.plan.interpret)


def _in_turn(walk: _Walk, at: _At) -> None:
    """Forms all of dquery of one step if it is this worker's turn."""
    mine = (at.count >= 0) & (walk.exchange.slot(at.count) == walk.worker)
    pl.when(mine)(partial(_dquery, walk, at))


def _step(
    step: Array, sums: tuple[Array, Array], walk: _Walk, member: Array, at_edge: bool
) -> tuple[Array, Array]:
    """Visits one block of queries of one query head, the `member`th of its group."""
    plan, config, dtype = walk.facts.plan, walk.config, walk.key.dtype
    count, tile = member * walk.steps + step, (ROWS, config.block)
    slot = slot_of(count, config.stages)
    scores = walk.scores._replace(head=walk.scores.head * walk.facts.group + member)
    query, lse = (x.at[slot] for x in walk.queries.buffers)
    dout, delta = (x.at[slot] for x in walk.douts.buffers)
    at = _At(count, member, step)
    target = at.before(walk.steps) if config.late else at

    def by_column(line):
        return lax.broadcast_in_dim(plgpu.load(line, layout=WGMMA.reduce(0)), tile, [1])

    def products(sums, fresh, nothing):
        dk, dv, *begun = sums
        plgpu.barrier_wait(walk.queries.ready.at[slot])
        fresh[0].add(walk.key, query.transpose((1, 0)))
        if not begun:
            plgpu.barrier_wait(walk.douts.ready.at[slot])
        dweights = begun[0] if begun else fresh[1]
        dweights.add(walk.value, dout.transpose((1, 0)))
        lse_columns = by_column(lse)
        where = Tile(walk.place[2], (walk.span.start + step) * config.block, tile)
        scored, factor, gain = scores.values(fresh[0].value(pending=1), where)
        weights = jnp.exp2(scored * factor - lse_columns)
        seen = scores.seen(where, at_edge, walk.ids)
        if seen is not None:
            weights = jnp.where(seen, weights, 0.0)
        dv.add(weights.astype(dtype), dout)
        ds = weights * (dweights.value(pending=1) - (0 if begun else by_column(delta)))
        if seen is not None and scores.may_hide_garbage:
            ds = jnp.where(seen, ds, 0.0)
        dx = (ds if gain is None else ds * gain).astype(dtype)
        start_dkey = partial(dk.add, dx, query)
        if walk.share.in_turn or config.dkey_first:
            start_dkey()
        _stage(walk, count, dx)
        if not walk.share.in_turn:
            _dquery(walk, target, None if config.dkey_first else start_dkey)
        return nothing

    begun, fresh = [], [tile] * 2
    if config.delta_first:
        plgpu.barrier_wait(walk.douts.ready.at[slot])
        begun, fresh = [-by_column(delta)], [tile]
    (dk, dv, *_), _ = accumulate(
        products, [*sums, *begun], (), fresh=fresh, interpret=plan.interpret
    )
    plgpu.barrier_arrive(walk.queries.free.at[slot])
    plgpu.barrier_arrive(walk.douts.free.at[slot])
    if walk.share.in_turn:
        _in_turn(walk, target)
    return dk, dv


def _member_sums(member: Array, sums: tuple[Array, Array], walk: _Walk) -> tuple[Array, Array]:
    """Visits all blocks of one query head; those that may cross an edge are the first and last."""
    span, steps = walk.span, walk.steps
    edged = partial(_step, walk=walk, member=member, at_edge=True)
    step, whole = jnp.int32(0), steps
    ends_left, ends_right = walk.scores.query_edges()
    if ends_left or _is_ragged(walk.facts, walk.config):
        step = jnp.int32(span.full_start - span.start)
        sums = lax.fori_loop(0, step, edged, sums)
    if ends_right:
        whole = jnp.maximum(step, span.full_stop - span.start)
    inside = partial(_step, walk=walk, member=member, at_edge=False)
    sums = lax.fori_loop(step, whole, inside, sums)
    return lax.fori_loop(whole, steps, edged, sums) if ends_right else sums


def _is_ragged(facts: TileFacts, config: FusedConfig) -> bool:
    """Whether the last tile has keys beyond the last, which must not reach dquery."""
    return facts.plan.region.num_keys % (config.workers * ROWS) != 0


def _gather(walk: _Walk) -> tuple[Array, Array]:
    """Returns dkey / scale and dvalue of one worker's keys, and adds their part of dquery."""
    exchange, config, facts = walk.exchange, walk.config, walk.facts
    num_slots = exchange.buffers.shape[0]
    if walk.share.in_turn:
        plgpu.barrier_arrive(exchange.free.at[walk.worker])
    else:
        for slot in range(num_slots):
            plgpu.barrier_arrive(exchange.free.at[slot])
    if config.late and not walk.share.in_turn:  # the first step finds a step before it
        zero = plgpu.layout_cast(jnp.zeros((ROWS, config.block), walk.key.dtype), WGMMA)
        _stage(walk, jnp.int32(-1), zero)
    zeros = tuple(filled(0, (ROWS, width)) for width in (facts.features, facts.value_features))
    sums = lax.fori_loop(0, facts.group, partial(_member_sums, walk=walk), zeros)
    if config.late:
        last = _At(walk.steps * facts.group, facts.group, 0).before(walk.steps)
        (_in_turn if walk.share.in_turn else _dquery)(walk, last)
    for slot in range(num_slots):  # no one reads this worker's keys any more
        plgpu.barrier_wait(exchange.free.at[slot])
    return sums


def _fused_kernel(
    q_ref, k_ref, v_ref, cotangents: Cotangents, extras: Extras, spans, dq_ref, dk_ref, dv_ref,
    k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, dx_smem, dq_smem, own_ready, q_ready,
    q_free, do_ready, do_free, dx_full, dx_free, *, facts: TileFacts, config: FusedConfig,
):  # fmt: skip
    """dkey and dvalue of 64 rows for each worker, and their part of dquery."""
    workers, block = config.workers, config.block
    batch, kv_head, tile = facts.locate(lax.axis_index("tile"))
    worker = lax.axis_index("worker")
    tile_start = tile * (workers * ROWS)
    scores = Scores(facts.plan, extras, spans, batch, kv_head, query_axis=1)
    span = scores.span(tile, workers * ROWS, block)
    if _is_ragged(facts, config):
        inside = tile_start + workers * ROWS <= facts.plan.region.num_keys
        span = span._replace(full_start=jnp.where(inside, span.full_start, span.stop))
    steps = span.stop - span.start
    queries = Ring((q_smem, lse_smem), q_ready, q_free)
    douts = Ring((do_smem, delta_smem), do_ready, do_free)

    @pl.when(worker < workers)
    def _compute():
        plgpu.set_max_registers(compute_registers(workers), action="increase")
        start = tile_start + worker * ROWS
        rows, own = (batch, pl.ds(start, ROWS), kv_head), pl.ds(worker * ROWS, ROWS)
        key, value = k_smem.at[own], v_smem.at[own]
        plgpu.copy_gmem_to_smem(k_ref.at[rows], key, own_ready.at[worker])
        plgpu.copy_gmem_to_smem(v_ref.at[rows], value, own_ready.at[worker])
        ids = scores.ids(start, ROWS, axis=0)
        plgpu.barrier_wait(own_ready.at[worker])
        operands = (key, value)
        if config.own_in_registers:
            operands = tuple(plgpu.load(x, layout=WGMMA) for x in operands)
        walk = _Walk(
            *operands, k_smem, (batch, kv_head, start), ids, span, steps, worker, queries, douts,
            _Exchange(dx_smem, dx_full, dx_free), dq_smem.at[worker], dq_ref,
            share_of(config, facts.features), scores, facts, config,
        )  # fmt: skip
        dk, dv = _gather(walk)
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
            head = kv_head * facts.group + lax.div(count, jnp.int32(steps))
            first = (span.start + lax.rem(count, jnp.int32(steps))) * block
            rows, line = (batch, pl.ds(first, block), head), (batch, head, pl.ds(first, block))
            dout, lse, delta = cotangents
            return (q_ref.at[rows], lse.at[line]), (dout.at[rows], delta.at[line])

        fill(steps * facts.group, (queries, douts), sources)


def _scratch(config: FusedConfig, facts: TileFacts, dtype: Any) -> list[Any]:
    workers, stages, block = config.workers, config.stages, config.block
    share, widths = share_of(config, facts.features), (facts.features, facts.value_features)
    return [
        *(row_tile((workers * ROWS, width), dtype) for width in widths),
        *(row_tile((stages, block, width), dtype) for width in widths),
        *(plgpu.SMEM((stages, block), jnp.float32) for _ in ("lse", "delta")),
        row_tile((share.buffers, workers * ROWS, block), dtype),
        row_tile((workers, share.rows, share.columns), jnp.float32),
        plgpu.Barrier(num_arrivals=2, num_barriers=workers),
        *ring_barriers(workers, stages, copies=2),
        *ring_barriers(workers, stages, copies=2),
        plgpu.Barrier(num_arrivals=workers, num_barriers=share.buffers),
        plgpu.Barrier(num_arrivals=1 if share.in_turn else workers, num_barriers=share.buffers),
    ]


def fits(extras: Extras, features: int, value_features: int) -> bool:
    """Returns whether the kernel takes such a call: it has no sums for biases and slopes."""
    has_sums = extras.bias is not None or extras.slopes is not None
    return (features, value_features) in FUSED_CONFIGS and not has_sums


@partial(jax.jit, static_argnames=("plan", "config"))
def launch_fused(
    query: Array, key: Array, value: Array, extras: Extras, out: Array, lse: Array, dout: Array,
    dlse: Array, plan: Plan, config: FusedConfig | None = None,
) -> tuple[Array, Array, Array, Extras]:  # fmt: skip
    """Returns what `backward.launch_backward` does, for a call that `fits`."""
    (batch, _, heads, features), value_features = query.shape, value.shape[-1]
    region, kv_heads, dtype = plan.region, key.shape[2], query.dtype
    config = config or FUSED_CONFIGS[features, value_features][0]
    block, rows, group = config.block, config.workers * ROWS, heads // kv_heads
    # Copies along one axis are not cut off at its end: the lines have room for every block.
    cotangents, delta = cotangents_of(out, lse, dout, dlse, block)
    q, k, v = (pad_tokens(x) for x in (query, key, value))
    num_tiles = pl.cdiv(region.num_keys, rows)
    head_bytes = group * q.shape[1] * ((features + value_features) * dtype.itemsize + 4 * features)
    order = tile_order(num_tiles, batch * kv_heads, 1, head_bytes, longest_last=False)
    facts = TileFacts(plan, order, kv_heads, group, features, value_features)
    kernel = launch(
        partial(_fused_kernel, config=config),
        "flash_attention_backward_fused",
        facts,
        config.workers,
        num_tiles * batch * kv_heads,
        [out_like(q, x.shape, dtype) for x in (k, v)],
        _scratch(config, facts, dtype),
    )
    spans = query_spans(extras, region, num_tiles, rows, block)
    others = cotangents, tiled(extras, block, rows, transposed=True), spans
    room = (batch, pl.cdiv(region.num_queries, block) * block, heads, features)
    (dk, dv), dq = sum_in_gmem(kernel, (q, k, v, *others), room)
    dq = (dq[:, : query.shape[1]] * plan.scale).astype(dtype)
    gradients = extras_gradient(extras, lse, delta, None)
    return dq, dk[:, : key.shape[1]], dv[:, : key.shape[1]], gradients
