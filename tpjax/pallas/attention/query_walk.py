# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""How a tile of keys walks over the queries of all heads of its group, in order."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from tpjax.pallas._mgpu import pl, plgpu, row_tile
from tpjax.pallas.attention.blocks import Span
from tpjax.pallas.attention.config import ROWS
from tpjax.pallas.attention.cotangents import Cotangents
from tpjax.pallas.attention.extras import Extras
from tpjax.pallas.attention.ring import Ring, fill, ring_barriers, slot_of
from tpjax.pallas.attention.schedule import TileFacts
from tpjax.pallas.attention.scores import WGMMA, Scores, Tile, hidden


class Blocks(NamedTuple):
    """Shared memory of the two rings through which blocks of queries come."""

    query: Any
    lse: Any
    ids: Any
    """Segments of the queries, or None."""
    dout: Any
    delta: Any
    query_bars: Any
    dout_bars: Any

    def rings(self) -> tuple[Ring, Ring]:
        """Returns the ring of queries and that of their cotangents."""
        queries = tuple(x for x in (self.query, self.lse, self.ids) if x is not None)
        return Ring(queries, *self.query_bars), Ring((self.dout, self.delta), *self.dout_bars)


def blocks_scratch(
    extras: Extras, shape: tuple[int, int], widths: tuple[int, int], dtype: Any, workers: int
) -> Blocks:
    """Returns the types of `Blocks` for (stages, queries of a block), of features (D, V)."""
    query, dout = (row_tile((*shape, width), dtype) for width in widths)
    line, ids = (plgpu.SMEM(shape, x) for x in (jnp.float32, jnp.int32))
    has_ids = extras.query_ids is not None
    bars = [ring_barriers(workers, shape[0], copies) for copies in (2 + has_ids, 2)]
    return Blocks(query, line, ids if has_ids else None, dout, line, *bars)


class Stop(NamedTuple):
    """One block of queries of one head: its place in the rings, and what lies there."""

    count: Array
    """Of all steps of the walk."""
    slot: Array
    query: Any
    lse: Any
    ids: Any
    dout: Any
    delta: Any
    scores: Scores
    where: Tile

    def by_column(self, line: Any) -> Array:
        """Repeats one number for each query over the keys of the tile."""
        numbers = plgpu.load(line, layout=WGMMA.reduce(0))
        return lax.broadcast_in_dim(numbers, self.where.shape, [1])

    def weights(
        self, products: Array, lse: Array, ids: Array | None, at_edge: bool
    ) -> tuple[Array, Array | None]:
        """Returns the weights, and the derivative of the scores, or None where it is one."""
        scored, factor, gain = self.scores.values(products, self.where)
        weights = jnp.exp2(scored * factor - lse)
        return hidden(weights, 0.0, self.scores.seen(self.where, at_edge, ids, self.ids)), gain


class QueryWalk(NamedTuple):
    """One worker's way over the query blocks."""

    own: tuple[Any, ...]
    """Its operands in shared memory."""
    start: Any
    """Its first key."""
    ids: Array | None
    """Segments of its keys."""
    span: Span
    steps: Array
    """Blocks of each head."""
    queries: Ring
    """Queries, lse, and where there are segments theirs."""
    douts: Ring
    """Their cotangents, and delta."""
    scores: Scores
    """Of the head of keys."""
    facts: TileFacts

    @property
    def tile(self) -> tuple[int, int]:
        """Keys and queries of a step."""
        return ROWS, self.facts.plan.config.dkv_block

    def stop(self, step: Array, member: Array) -> Stop:
        """Returns a step's block of queries, of the `member`th query head of the group."""
        count = member * self.steps + step
        slot = slot_of(count, self.queries.stages)
        scores = self.scores._replace(head=self.scores.head * self.facts.group + member)
        query, lse, *ids = (x.at[slot] for x in self.queries.buffers)
        dout, delta = (x.at[slot] for x in self.douts.buffers)
        where = Tile(self.start, (self.span.start + step) * self.tile[1], self.tile)
        return Stop(count, slot, query, lse, ids[0] if ids else None, dout, delta, scores, where)

    def enter(self, count: Array) -> None:
        """Waits until both rings hold what a step needs, of all steps of the walk the `count`th."""
        for ring in (self.queries, self.douts):
            plgpu.barrier_wait(ring.ready.at[slot_of(count, ring.stages)])

    def leave(self, slot: Array) -> None:
        """Lets a slot of both rings be filled again."""
        plgpu.barrier_arrive(self.queries.free.at[slot])
        plgpu.barrier_arrive(self.douts.free.at[slot])


Sums = tuple[Array, ...]


def start_walk(
    rows: int, queries: Ring, douts: Ring, extras: Extras, spans: Any, facts: TileFacts
) -> QueryWalk:
    """Returns the walk of the `rows` keys that this block of threads owns, with nothing loaded."""
    batch, kv_head, tile = facts.locate(lax.axis_index("tile"))
    scores = Scores(facts.plan, extras, spans, batch, kv_head, query_axis=1)
    span = scores.span(tile, rows, facts.plan.config.dkv_block)
    steps = jnp.int32(span.stop - span.start)
    return QueryWalk((), tile * rows, None, span, steps, queries, douts, scores, facts)


def gather(step: Callable[..., Sums], sums: Sums, walk: QueryWalk) -> Sums:
    """Runs `step(index, sums, walk, member, at_edge)` for all blocks of all heads of the group."""
    return lax.fori_loop(0, walk.facts.group, partial(_gather_head, step=step, walk=walk), sums)


def _gather_head(member: Array, sums: Sums, step: Callable[..., Sums], walk: QueryWalk) -> Sums:
    """Visits all blocks of one query head; those that may cross an edge are the first and last."""
    span, steps = walk.span, walk.steps
    at_edge = partial(step, walk=walk, member=member, at_edge=True)
    first, whole = jnp.int32(0), steps
    ends_left, ends_right = walk.scores.query_edges()
    if ends_left:
        first = jnp.int32(span.full_start - span.start)
        sums = lax.fori_loop(0, first, at_edge, sums)
    if ends_right:
        whole = jnp.maximum(first, span.full_stop - span.start)
    inside = partial(step, walk=walk, member=member, at_edge=False)
    sums = lax.fori_loop(first, whole, inside, sums)
    return lax.fori_loop(whole, steps, at_edge, sums) if ends_right else sums


def load_queries(q_ref: Any, cotangents: Cotangents, walk: QueryWalk) -> None:
    """Fills the rings: all that the loading warpgroup does."""
    plgpu.set_max_registers(24, action="decrease")
    batch, kv_head = walk.scores.batch, walk.scores.head
    block, steps = walk.tile[1], walk.steps
    dout, lse, delta = cotangents
    ids = walk.scores.extras.query_ids

    def sources(count):
        head = kv_head * walk.facts.group + lax.div(count, steps)
        first = (walk.span.start + lax.rem(count, steps)) * block
        rows, line = (batch, pl.ds(first, block), head), (batch, head, pl.ds(first, block))
        own = () if ids is None else (ids.at[batch, pl.ds(first, block)],)
        return (q_ref.at[rows], lse.at[line], *own), (dout.at[rows], delta.at[line])

    fill(steps * walk.facts.group, (walk.queries, walk.douts), sources)


def store(*results: tuple[Array, Any, Any]) -> None:
    """Copies registers, each through shared memory, to global memory; returns when done."""
    for registers, staged, _ in results:
        staged[...] = registers.astype(staged.dtype)
    plgpu.commit_smem()
    for _, staged, target in results:
        plgpu.copy_smem_to_gmem(staged, target)
    plgpu.wait_smem_to_gmem(0)
