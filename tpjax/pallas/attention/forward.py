# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The forward kernel of attention for Hopper GPUs.

    out = softmax(scores) value     lse = log(sum(exp(scores)) + exp(sink))     max = max(scores)

Letters: B batch, T query tokens, S key tokens, H query heads, K key/value heads, D features of
queries and keys, V of values. What a score is, `scores` says; which blocks are visited, `blocks`.

One block of threads owns 64 queries for each of its computing warpgroups ("workers") and walks
over the keys from the last visible block to the first; one more warpgroup brings keys and values
into rings in shared memory by TMA, which reads zeros beyond the end and writes nothing there. Each
step starts the product of the queries with its keys and, behind it, the product of the last step's
weights with their values, so that the softmax runs under matrix work; the workers take turns at the
tensor cores.

Numerics: scores, softmax and accumulation float32; weights are rounded to the dtype of `value` for
the second product, and normalised after it. A value that is not finite also makes those queries NaN
that share a tile of 64 with one that sees it.

Source: Shah et al. 2024 (FlashAttention-3), section 3.
"""

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
from tpjax.pallas.attention.blocks import Order, Span, tile_order
from tpjax.pallas.attention.config import ROWS, compute_registers
from tpjax.pallas.attention.extras import Extras, key_spans, tiled
from tpjax.pallas.attention.ring import Ring, fill, ring_barriers, slot_of
from tpjax.pallas.attention.scores import LOG2E, WGMMA, Plan, Scores, Tile

TMA_ROWS = 8
"""Tokens come in multiples of this: the rows of the tiles in which shared memory is laid out."""


class TileFacts(NamedTuple):
    """Static facts that a kernel's body needs."""

    plan: Plan
    order: Order
    heads: int
    group: int
    features: int
    value_features: int

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


class _Scratch(NamedTuple):
    """Shared memory of a block of threads."""

    query: Any
    key: Any
    value: Any
    out: Any
    """None where the output has the shape of the queries, whose place it then takes."""
    lse: Any
    max: Any
    query_ready: Any
    key_bars: list[Any]
    value_bars: list[Any]
    turn: Any


class _Walk(NamedTuple):
    """What one worker needs on its way over the key blocks, last to first."""

    query: Any
    start: Array
    ids: Array | None
    span: Span
    steps: Array
    worker: Array
    keys: Ring
    values: Ring
    turn: Any
    scores: Scores
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


def _weights(
    walk: _Walk, step: Any, products: Array, top: Array, at_edge: bool
) -> tuple[Array, ...]:
    """Returns weights relative to the new top, that, and the factor from old to new."""
    tile = Tile(walk.start, (walk.span.stop - 1 - step) * walk.tile[1], walk.tile)
    scores, factor, _ = walk.scores.values(products, tile)
    seen = walk.scores.seen(tile, at_edge, walk.ids)
    if seen is not None:
        scores = jnp.where(seen, scores, -jnp.inf)
    new_top = jnp.maximum(top, scores.max(axis=1) * factor)
    base = new_top
    if at_edge or walk.scores.may_hide_all:
        base = jnp.where(new_top == -jnp.inf, jnp.zeros_like(top), new_top)
    return jnp.exp2(scores * factor - by_row(base, walk.tile)), new_top, jnp.exp2(top - base)


def _first(walk: _Walk, at_edge: bool) -> _State:
    """Forms the weights of the first block."""
    facts, tile = walk.facts, walk.tile

    def products_of(_, fresh, state):
        del state
        slot = walk.keys.buffers[0].at[0].transpose((1, 0))
        _take_turn(walk, (walk.keys.ready.at[0],), lambda: fresh[0].add(walk.query, slot))
        return fresh[0].value()

    _, products = accumulate(
        products_of, [], filled(0, tile), fresh=[tile], interpret=facts.plan.interpret
    )
    plgpu.barrier_arrive(walk.keys.free.at[0])
    no_top = filled(-jnp.inf, (ROWS,), WGMMA.reduce(1))
    weights, top, _ = _weights(walk, jnp.int32(0), products, no_top, at_edge)
    out = filled(0, (ROWS, facts.value_features))
    return _State(out, top, weights.sum(axis=1), weights.astype(walk.query.dtype))


def _next(step: Array, state: _State, walk: _Walk, at_edge: bool) -> _State:
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
        found = fresh[0].value(pending=1)
        plgpu.barrier_arrive(walk.keys.free.at[slot])
        weights, top, shrink = _weights(walk, step, found, old_top, at_edge)
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


def _steps(walk: _Walk) -> _State:
    """Walks over all blocks; those that may cross an edge are the first and the last ones."""
    ends_left, ends = walk.scores.edges(walk.tile[1])
    edged = partial(_next, walk=walk, at_edge=True)
    state, step = _first(walk, ends), jnp.int32(1)
    if ends and (walk.facts.plan.region.is_limited or walk.scores.spans is not None):
        whole = jnp.maximum(step, walk.span.stop - walk.span.full_stop)
        state, step = lax.fori_loop(step, whole, edged, state), whole
    whole = walk.steps
    if ends_left:
        whole = jnp.maximum(step, walk.span.stop - walk.span.full_start)
    state = lax.fori_loop(step, whole, partial(_next, walk=walk, at_edge=False), state)
    return lax.fori_loop(whole, walk.steps, edged, state) if ends_left else state


def _attend(walk: _Walk) -> tuple[Array, Array, Array]:
    """Returns one worker's output, and lse and max in units of log2."""
    plan = walk.facts.plan
    last_worker = plan.config.warpgroups - 1
    # Worker 0 moves first: the last one hands it the turn, and takes it back at the end.
    pl.when(walk.worker == last_worker)(partial(plgpu.barrier_arrive, walk.turn.at[0]))
    state = _steps(walk)
    pl.when(walk.worker == 0)(partial(plgpu.barrier_wait, walk.turn.at[0]))

    last = slot_of(walk.steps - 1, plan.config.stages)
    plgpu.barrier_wait(walk.values.ready.at[last])

    def finish(sums, _, nothing):
        sums[0].add(state.weights, walk.values.buffers[0].at[last])
        return nothing

    (out,), _ = accumulate(finish, [state.out], (), fresh=[], interpret=plan.interpret)
    plgpu.barrier_arrive(walk.values.free.at[last])
    top, total, shrink = state.top, state.total, jnp.ones_like(state.total)
    if walk.scores.extras.sinks is not None:
        sink = (walk.scores.extras.sinks[walk.scores.head] + 0.0) * LOG2E
        top = jnp.maximum(top, sink)
        shrink = jnp.exp2(state.top - top)
        total = total * shrink + jnp.exp2(sink - top)
    inverse = jnp.where(total == 0, jnp.zeros_like(total), shrink / total)
    return out * by_row(inverse, out.shape), top + jnp.log2(total), state.top


def _forward_kernel(
    q_ref, k_ref, v_ref, extras: Extras, spans, out_ref, lse_ref, max_ref, smem: _Scratch, *,
    facts: TileFacts,
):  # fmt: skip
    config = facts.plan.config
    workers, block = config.warpgroups, config.block
    batch, head, tile = facts.locate(lax.axis_index("tile"))
    worker = lax.axis_index("worker")
    tile_start = tile * (workers * ROWS)
    scores = Scores(facts.plan, extras, spans, batch, head, query_axis=0)
    span = scores.span(tile, workers * ROWS, block)
    steps = jnp.int32(span.stop - span.start)
    keys, values = Ring((smem.key,), *smem.key_bars), Ring((smem.value,), *smem.value_bars)

    @pl.when(worker < workers)
    def _compute():
        plgpu.set_max_registers(compute_registers(workers), action="increase")
        start = tile_start + worker * ROWS
        rows, line = (batch, pl.ds(start, ROWS), head), (batch, head, pl.ds(start, ROWS))
        own, ready = smem.query.at[worker], smem.query_ready.at[worker]
        plgpu.copy_gmem_to_smem(q_ref.at[rows], own, ready)
        ids = scores.ids(start, ROWS, axis=0)
        plgpu.barrier_wait(ready)
        walk = _Walk(own, start, ids, span, steps, worker, keys, values, smem.turn, scores, facts)
        out, lse, top = _attend(walk)
        own_out = own if smem.out is None else smem.out.at[worker]
        stores = [(own_out, out_ref.at[rows], out.astype(own.dtype))]
        stores += [(smem.lse.at[worker], lse_ref.at[line], lse / LOG2E)]
        if max_ref is not None:
            stores += [(smem.max.at[worker], max_ref.at[line], top / LOG2E)]
        for buffer, _, result in stores:
            buffer[...] = result
        plgpu.commit_smem()
        for buffer, target, _ in stores:
            plgpu.copy_smem_to_gmem(buffer, target)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(worker == workers)
    def _load():
        plgpu.set_max_registers(24, action="decrease")
        kv_head = lax.div(head, jnp.int32(facts.group))

        def sources(step):
            rows = (batch, pl.ds((span.stop - 1 - step) * block, block), kv_head)
            return (k_ref.at[rows],), (v_ref.at[rows],)

        fill(steps, (keys, values), sources)


# One jit for equal calls: the layers of a model lower and assemble the kernel once.
@partial(jax.jit, static_argnames="plan")
def launch_forward(
    query: Array, key: Array, value: Array, extras: Extras, plan: Plan
) -> tuple[Array, Array, Array | None]:
    """Returns the output [B, T, H, V], and lse and, if the plan asks for it, max [B, H, T]."""
    config = plan.config
    workers, stages, dtype = config.warpgroups, config.stages, query.dtype
    batch, num_queries, heads, features = query.shape
    num_keys, kv_heads, value_features = *key.shape[1:3], value.shape[-1]
    rows = workers * ROWS
    q, k, v = (pad_tokens(x) for x in (query, key, value))
    group, num_tiles = heads // kv_heads, pl.cdiv(num_queries, rows)
    head_bytes = num_keys * (features + value_features) * dtype.itemsize
    longest_last = plan.region.is_causal
    order = tile_order(num_tiles, batch * heads, group, head_bytes, longest_last)
    facts = TileFacts(plan, order, heads, group, features, value_features)
    same = value_features == features
    # Copies along one axis are not cut off at its end: it has room for every tile.
    line = out_like(query, (batch, heads, num_tiles * rows), jnp.float32)
    scratch = _Scratch(
        row_tile((workers, ROWS, features), dtype),
        row_tile((stages, config.block, features), dtype),
        row_tile((stages, config.block, value_features), dtype),
        None if same else row_tile((workers, ROWS, value_features), dtype),
        plgpu.SMEM((workers, ROWS), jnp.float32),
        plgpu.SMEM((workers, ROWS), jnp.float32) if plan.returns_max else None,
        plgpu.Barrier(num_barriers=workers),
        ring_barriers(workers, stages, copies=1),
        ring_barriers(workers, stages, copies=1),
        plgpu.Barrier(num_barriers=workers),
    )
    kernel = gpu_kernel(
        partial(_forward_kernel, facts=facts),
        out_type=[
            out_like(query, (*q.shape[:3], value_features), dtype),
            line,
            line if plan.returns_max else None,
        ],
        scratch_types=[scratch],
        grid=(num_tiles * batch * heads,),
        grid_names=("tile",),
        num_threads=workers + 1,
        thread_name="worker",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret_params(plan.interpret, workers + 1),
        kernel_name="flash_attention_forward",
    )
    spans = key_spans(extras, plan.region, num_tiles, rows, config.block)
    out, lse, top = kernel(q, k, v, tiled(extras, rows, config.block), spans)
    top = None if top is None else top[:, :, :num_queries]
    return out[:, :num_queries], lse[:, :, :num_queries], top
