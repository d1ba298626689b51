# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The forward kernel of attention for Hopper GPUs.

    out = softmax(scores) value     lse = log(sum(exp(scores)) + exp(sink))     max = max(scores)

Letters: B batch, T query tokens, S key tokens, H query heads, K key/value heads, D features of
queries and keys, V of values. What a score is, `scores` says; which blocks are visited, `blocks`;
which tiles a block of threads gets, `schedule`.

A block of threads owns 64 queries for each of its computing warpgroups ("workers"), which walk over
the keys from the last visible block to the first (`forward_worker`); one more warpgroup brings
queries once, and keys and values into rings in shared memory, by TMA, which reads zeros beyond the
end and writes nothing there. Each warpgroup goes over all tiles of its block of threads: the loader
is ahead of the workers by what the rings hold, at the end of a tile too.

Numerics: scores, softmax and accumulation float32; weights are rounded to the dtype of `value` for
the second product, and normalised after it. A value that is not finite makes all 64
queries of a worker NaN that visits its block, also those that do not see it.

Source: Shah et al. 2024 (FlashAttention-3), section 3.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from tpjax.pallas._mgpu import (
    Signals,
    gpu_kernel,
    interpret_params,
    num_sms,
    out_like,
    pl,
    plgpu,
    row_tile,
    signal_barriers,
)
from tpjax.pallas.attention.blocks import tile_order, visited
from tpjax.pallas.attention.config import ROWS, compute_registers
from tpjax.pallas.attention.extras import Extras, key_spans, pad_tokens, tiled
from tpjax.pallas.attention.forward_worker import Walk, attend
from tpjax.pallas.attention.ring import Ring, drain, feed
from tpjax.pallas.attention.schedule import Deal, TileFacts, deal, sorted_spans
from tpjax.pallas.attention.scores import LOG2E, Plan, Scores

TILE_BYTES = 224 << 10
"""Shared memory of a multiprocessor that tiles may take; the rest is for lines and barriers."""
TURNS, SLOTS = 5, 8
"""The first of the hardware barriers that pass turns, and of those that free slots."""


class _Global(NamedTuple):
    """References to the operands and the results."""

    query: Any
    key: Any
    value: Any
    extras: Extras
    spans: Any
    out: Any
    lse: Any
    max: Any


class _Shared(NamedTuple):
    """Shared memory and barriers of a block of threads."""

    query: Any
    key: Any
    key_ids: Any
    """Segments of the keys, or None."""
    value: Any
    out: Any
    """None where the output takes the place of the queries."""
    lse: Any
    max: Any
    query_ready: Any
    query_free: Any
    key_ready: Any
    key_free: Any
    value_ready: Any
    value_free: Any
    turns: Any

    def rings(self, workers: int) -> tuple[Ring, Ring]:
        """Returns the rings of keys and of values."""
        stages = self.key.shape[0]
        keys = (self.key,) if self.key_ids is None else (self.key, self.key_ids)
        free = Signals(self.key_free, SLOTS, workers)
        value_free = Signals(self.value_free, SLOTS + stages, workers)
        return (
            Ring(keys, self.key_ready, free),
            Ring((self.value,), self.value_ready, value_free),
        )


class _Item(NamedTuple):
    """One tile of queries of one head: what all workers and the loader agree on."""

    batch: Array
    head: Array
    tile: Array
    place: Array
    """Of the tile, in the order of the spans."""
    end: Any
    """Where its key blocks end."""
    steps: Array
    scores: Scores

    def rows(self, worker: Any, facts: TileFacts) -> Any:
        """Returns the first of a worker's queries."""
        return (self.tile * facts.plan.config.warpgroups + worker) * ROWS


def _item(index: Array, gmem: _Global, facts: TileFacts) -> _Item:
    workers, block = facts.plan.config.warpgroups, facts.plan.config.block
    batch, head, place = facts.locate(index)
    scores = Scores(facts.plan, gmem.extras, gmem.spans, batch, head, query_axis=0)
    # Tiles of what one worker owns: what a query visits does not depend on the other workers.
    spans = [scores.span(place * workers + w, ROWS, block) for w in range(workers)]
    start, end = visited(spans)
    steps = place - place + (end - start)  # traced: a literal may not enter a `run_state`
    return _Item(batch, head, scores.tile(place, workers), place, end, steps, scores)


def _work(gmem: _Global, smem: _Shared, facts: TileFacts, deal: Deal) -> None:
    """Attends with 64 queries of every tile: what each of the workers does."""
    workers, worker = facts.plan.config.warpgroups, lax.axis_index("worker")
    keys, values = smem.rings(workers)
    turns = Signals(smem.turns, TURNS, 1)
    own, own_out = smem.query.at[worker], (smem.query if smem.out is None else smem.out).at[worker]
    free = partial(plgpu.barrier_arrive, smem.query_free.at[worker])

    def work(index: Array, passed: Array) -> Array:
        item = _item(index, gmem, facts)
        start = item.rows(worker, facts)
        ids = item.scores.ids(start, ROWS, axis=0)
        span = item.scores.span(item.place * workers + worker, ROWS, facts.plan.config.block)
        plgpu.barrier_wait(smem.query_ready.at[worker])
        out, lse, top = attend(
            Walk(
                own, (lambda: None) if smem.out is None else free, start, ids, span, item.end,
                item.steps, passed, worker, keys, values, turns, item.scores, facts,
            )
        )  # fmt: skip
        rows = (item.batch, pl.ds(start, ROWS), item.head)
        line = (item.batch, item.head, pl.ds(start, ROWS))
        stores = [(own_out, gmem.out.at[rows], out.astype(own.dtype))]
        stores += [(smem.lse.at[worker], gmem.lse.at[line], lse / LOG2E)]
        if gmem.max is not None:
            stores += [(smem.max.at[worker], gmem.max.at[line], top / LOG2E)]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile's
        for buffer, _, result in stores:
            buffer[...] = result
        plgpu.commit_smem()
        for buffer, target, _ in stores:
            plgpu.copy_smem_to_gmem(buffer, target)
        if smem.out is None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            free()
        return passed + item.steps

    # Worker 0 moves first: the last one hands it the turn, and it takes it back at the end.
    pl.when(worker == workers - 1)(lambda: turns.arrive(0))
    deal.each(lax.axis_index("block"), work)
    pl.when(worker == 0)(lambda: turns.wait(0))
    plgpu.wait_smem_to_gmem(0)


def _load(gmem: _Global, smem: _Shared, facts: TileFacts, deal: Deal) -> None:
    """Brings queries, keys and values of every tile: what the last warpgroup does."""
    workers, block = facts.plan.config.warpgroups, facts.plan.config.block
    rings = smem.rings(workers)

    def each_worker(do: Callable[[int], None]) -> None:
        for worker in range(workers):
            do(worker)

    def wait_for_queries(worker: int) -> None:
        plgpu.barrier_wait(smem.query_free.at[worker])

    def load(index: Array, passed: Array) -> Array:
        item = _item(index, gmem, facts)
        kv_head = lax.div(item.head, jnp.int32(facts.group))

        def queries(worker: int) -> None:
            rows = item.batch, pl.ds(item.rows(worker, facts), ROWS), item.head
            pl.when(passed > 0)(partial(wait_for_queries, worker))
            to, ready = smem.query.at[worker], smem.query_ready.at[worker]
            plgpu.copy_gmem_to_smem(gmem.query.at[rows], to, ready)

        def sources(step):
            tokens = pl.ds((item.end - 1 - step) * block, block)
            rows, ids = (item.batch, tokens, kv_head), ()
            if smem.key_ids is not None:
                ids = (gmem.extras.key_ids.at[item.batch, tokens],)
            return (gmem.key.at[rows], *ids), (gmem.value.at[rows],)

        # The first keys before the queries: those have to wait for the end of the last tile.
        feed(item.steps, rings, sources, passed, partial(each_worker, queries))
        return passed + item.steps

    passed = deal.each(lax.axis_index("block"), load)
    for ring in rings:
        drain(ring, passed)
    each_worker(wait_for_queries)


def _forward_kernel(
    query, key, value, extras, spans, out, lse, top, smem: _Shared, *, facts: TileFacts,
    deal: Deal,
):  # fmt: skip
    gmem = _Global(query, key, value, extras, spans, out, lse, top)
    worker, workers = lax.axis_index("worker"), facts.plan.config.warpgroups

    @pl.when(worker < workers)
    def _compute():
        plgpu.set_max_registers(compute_registers(workers), action="increase")
        _work(gmem, smem, facts, deal)

    @pl.when(worker == workers)
    def _bring():
        plgpu.set_max_registers(24, action="decrease")
        _load(gmem, smem, facts, deal)


def _shared(
    plan: Plan, dtype: Any, features: int, value_features: int, stays: bool, has_ids: bool
) -> _Shared:
    """Returns the types of a block's shared memory; `stays`: it may have several tiles."""
    config = plan.config
    workers, stages = config.warpgroups, config.stages
    shapes = [
        (workers, ROWS, features),
        (stages, config.block, features),
        (stages, config.block, value_features),
        (workers, ROWS, value_features),
    ]
    total = sum(a * b * c for a, b, c in shapes) * jnp.dtype(dtype).itemsize
    # A place of its own lets the next queries arrive before the output has left.
    own_out = features != value_features or (stays and total <= TILE_BYTES)
    query, key, value, out = (row_tile(shape, dtype) for shape in shapes)
    line = plgpu.SMEM((workers, ROWS), jnp.float32)
    ids = plgpu.SMEM((stages, config.block), jnp.int32) if has_ids else None
    key_names = range(SLOTS, SLOTS + stages)
    value_names = range(key_names.stop, key_names.stop + stages)
    return _Shared(
        query, key, ids, value, out if own_out else None, line, line if plan.returns_max else None,
        query_ready=plgpu.Barrier(num_barriers=workers),
        query_free=plgpu.Barrier(num_barriers=workers),
        key_ready=plgpu.Barrier(num_arrivals=1 + has_ids, num_barriers=stages),
        key_free=signal_barriers(workers, key_names, plan.interpret),
        value_ready=plgpu.Barrier(num_barriers=stages),
        value_free=signal_barriers(workers, value_names, plan.interpret),
        turns=signal_barriers(1, range(TURNS, TURNS + workers), plan.interpret),
    )  # fmt: skip


# One jit for equal calls: the layers of a model lower and assemble the kernel once.
@partial(jax.jit, static_argnames="plan")
def launch_forward(
    query: Array, key: Array, value: Array, extras: Extras, plan: Plan
) -> tuple[Array, Array, Array | None]:
    """Returns the output [B, T, H, V], and lse and, if the plan asks for it, max [B, H, T]."""
    config = plan.config
    workers, dtype = config.warpgroups, query.dtype
    batch, num_queries, heads, features = query.shape
    num_keys, kv_heads, value_features = *key.shape[1:3], value.shape[-1]
    rows = workers * ROWS
    q, k, v = (pad_tokens(x) for x in (query, key, value))
    group, num_tiles = heads // kv_heads, pl.cdiv(num_queries, rows)
    head_bytes = num_keys * (features + value_features) * dtype.itemsize
    extras = tiled(extras, rows, config.block)
    spans = key_spans(extras, plan.region, num_tiles * workers, ROWS, config.block)
    spans = sorted_spans(extras, spans, workers)
    has_ids = extras.key_ids is not None
    longest_last = plan.region.is_causal or has_ids
    order = tile_order(num_tiles, batch * heads, group, head_bytes, longest_last)
    facts = TileFacts(plan, order, heads, group, features, value_features)
    tiles = num_tiles * batch * heads
    dealt = deal(order, batch * heads, num_sms() if config.persistent else tiles)
    # Copies along one axis are not cut off at its end: it has room for every tile.
    line = out_like(query, (batch, heads, num_tiles * rows), jnp.float32)
    stays = dealt.blocks < tiles
    scratch = _shared(plan, dtype, features, value_features, stays, has_ids)
    kernel = gpu_kernel(
        partial(_forward_kernel, facts=facts, deal=dealt),
        out_type=[
            out_like(query, (*q.shape[:3], value_features), dtype),
            line,
            line if plan.returns_max else None,
        ],
        scratch_types=[scratch],
        grid=(dealt.blocks,),
        grid_names=("block",),
        num_threads=workers + 1,
        thread_name="worker",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret_params(plan.interpret, workers + 1),
        kernel_name="flash_attention_forward",
    )
    out, lse, top = kernel(q, k, v, extras, spans)
    top = None if top is None else top[:, :, :num_queries]
    return out[:, :num_queries], lse[:, :, :num_queries], top
