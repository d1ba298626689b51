# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""One worker's way over the keys in the forward kernel: the online softmax of 64 queries.

    top' = max(top, scores)   weights = 2^(scores - top')
    total' = 2^(top - top') total + sum(weights)    out' = 2^(top - top') out + weights value

The softmax runs under matrix work, in one of two ways, and workers take turns at the tensor cores.
Overlapped: each step starts the product of the queries with its keys and, behind it, the product of
the last step's weights with their values. Alternating: a worker's softmax runs under the products
of another, which needs fewer registers.

A lazy worker keeps `top` until it is exceeded by 8 (in units of log2) and so seldom has anything to
rescale: weights and totals up to 2^8 times as large lose nothing in floating point, and all results
are relative to the same `top`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from tpjax.pallas._mgpu import Signals, accumulate, pl, plgpu, scale_rows
from tpjax.pallas.attention.blocks import Span
from tpjax.pallas.attention.config import ROWS
from tpjax.pallas.attention.ring import Ring, slot_of
from tpjax.pallas.attention.schedule import TileFacts
from tpjax.pallas.attention.scores import LOG2E, WGMMA, Scores, Tile, by_row, filled, hidden

GROWTH = 8.0
"""How far, in units of log2, scores may exceed the `top` of a lazy worker."""


class Walk(NamedTuple):
    """What one worker needs on its way over a tile's key blocks, last to first.

    Steps are counted for the whole tile of all workers. Those before `first` and from `stop` on
    visit blocks that only others see: this worker just keeps rings and turns in step.
    """

    query: Any
    queries_free: Callable[[], None]
    """Called when the queries were read for the last time."""
    start: Array
    """The first of the worker's queries."""
    ids: Array | None
    span: Span
    """Of the worker's own blocks."""
    end: Any
    """Where the blocks of the tile end: step 0 visits the one before."""
    steps: Array
    """Number of steps of the tile."""
    passed: Array
    """Steps that went through the rings before."""
    worker: Array
    keys: Ring
    values: Ring
    turns: Signals
    scores: Scores
    facts: TileFacts

    @property
    def tile(self) -> tuple[int, int]:
        """The queries and keys of a step."""
        return ROWS, self.facts.plan.config.block

    @property
    def is_lazy(self) -> bool:
        """Whether `top` may stay behind; where the largest score is a result, it is followed."""
        return self.facts.plan.config.lazy and not self.facts.plan.returns_max

    @property
    def first(self) -> Array:
        """The first step that visits an own block."""
        # Traced even where spans are numbers: a literal may not enter a `run_state`.
        return self.steps - self.steps + (self.end - self.span.stop)

    @property
    def stop(self) -> Array:
        """The step after the last one that visits an own block."""
        return self.steps - self.steps + (self.end - self.span.start)

    def slot(self, ring: Ring, step: Any) -> Array:
        """Returns the slot of a ring that a step's block lies in."""
        return slot_of(self.passed + step, ring.stages)

    def wait(self, ring: Ring, step: Any) -> None:
        """Waits until a step's block has arrived."""
        plgpu.barrier_wait(ring.ready.at[self.slot(ring, step)])

    def release(self, ring: Ring, step: Any) -> None:
        """Says that this worker is done with a step's block."""
        ring.release(self.slot(ring, step))

    def block_of(self, ring: Ring, step: Any) -> Any:
        """Returns the reference to a step's block."""
        return ring.buffers[0].at[self.slot(ring, step)]

    def await_turn(self) -> None:
        """Waits until it is this worker's turn to start matrix products."""
        self.turns.wait(self.worker)

    def pass_turn(self) -> None:
        """Hands the turn to the next worker."""
        self.turns.arrive(lax.rem(self.worker + 1, jnp.int32(self.facts.plan.config.warpgroups)))


class _State(NamedTuple):
    """The online softmax: `out`, `total` and `weights` are relative to 2^top."""

    out: Array
    top: Array
    total: Array
    weights: Array | None
    """None where they were used already."""


def _weights(
    walk: Walk, step: Any, products: Array, top: Array, at_edge: bool
) -> tuple[Array, ...]:
    """Returns weights relative to the new top, their sum, that top, and 2^(top - new top).

    The products are finished: the keys' slot is released as soon as nothing more is read there.
    """
    tile = Tile(walk.start, (walk.end - 1 - step) * walk.tile[1], walk.tile)
    scores, factor, _ = walk.scores.values(products, tile)
    key_ids = walk.keys.buffers[1].at[walk.slot(walk.keys, step)] if walk.ids is not None else None
    seen = walk.scores.seen(tile, at_edge, walk.ids, key_ids)
    walk.release(walk.keys, step)
    scores = hidden(scores, -jnp.inf, seen)
    new_top = jnp.maximum(top, scores.max(axis=1) * factor)
    if walk.is_lazy:
        new_top = jnp.where(new_top - top > GROWTH, new_top, top)
    base = new_top
    if at_edge or walk.scores.may_hide_all:
        base = jnp.where(new_top == -jnp.inf, jnp.zeros_like(top), new_top)
    weights = jnp.exp2(scores * factor - by_row(base, walk.tile))
    return weights, weights.sum(axis=1), new_top, jnp.exp2(top - base)


def _await_next(walk: Walk, step: Any) -> None:
    # Where a block of instructions ends is the one place that ptxas moves no arithmetic across:
    # waiting for the next keys here keeps the softmax before whatever is waited for afterwards.
    pl.when(step + 1 < walk.stop)(lambda: walk.wait(walk.keys, step + 1))


def _first(walk: Walk, at_edge: bool) -> _State:
    """Forms the weights of the first block."""
    step, tile = walk.first, walk.tile
    walk.wait(walk.keys, step)

    def products_of(_, fresh, state):
        del state
        walk.await_turn()
        fresh[0].add(walk.query, walk.block_of(walk.keys, step).transpose((1, 0)))
        walk.pass_turn()
        return fresh[0].value()

    _, products = accumulate(
        products_of, [], filled(0, tile), fresh=[tile], interpret=walk.facts.plan.interpret
    )
    no_top = filled(-jnp.inf, (ROWS,), WGMMA.reduce(1))
    weights, total, top, _ = _weights(walk, step, products, no_top, at_edge)
    _await_next(walk, step)
    out = filled(0, (ROWS, walk.facts.value_features))
    return _State(out, top, total, weights.astype(walk.query.dtype))


def _next(step: Array, state: _State, walk: Walk, at_edge: bool) -> _State:
    """Adds the last block's values, and forms the weights of the next block meanwhile."""
    tile, interpret = walk.tile, walk.facts.plan.interpret

    def products(sums, fresh, old):
        top, total, *_ = old
        walk.await_turn()
        fresh[0].add(walk.query, walk.block_of(walk.keys, step).transpose((1, 0)))
        walk.wait(walk.values, step - 1)
        sums[0].add(state.weights, walk.block_of(walk.values, step - 1))
        walk.pass_turn()
        found = fresh[0].value(pending=1)
        weights, added, top, shrink = _weights(walk, step, found, top, at_edge)
        softmax = lax.optimization_barrier((top, total * shrink + added, shrink, weights))
        _await_next(walk, step)
        return softmax

    line = filled(0, (ROWS,), WGMMA.reduce(1))
    (out,), (top, total, shrink, weights) = accumulate(
        products,
        [state.out],
        (state.top, state.total, line, filled(0, tile)),
        fresh=[tile],
        interpret=interpret,
    )
    walk.release(walk.values, step - 1)
    out = scale_rows(out, shrink, mostly_ones=walk.is_lazy, interpret=interpret)
    # Rounded after the wait: ptxas makes all products wait for one another where it finds the
    # registers of one written while another runs.
    return _State(out, top, total, weights.astype(walk.query.dtype))


def _own_steps(
    walk: Walk, state: _State, step_of: Callable[[Array, _State, Walk, bool], _State]
) -> _State:
    """Walks over the own blocks but the first; those that may cross an edge come first and last."""
    ends_left, ends = walk.scores.edges(walk.tile[1])
    edged, inside = (lambda i, s, edge=edge: step_of(i, s, walk, edge) for edge in (True, False))
    step, whole = walk.first + 1, walk.stop
    if ends and not walk.scores.edge_is_one_block(*walk.tile):
        after = jnp.maximum(step, walk.end - walk.span.full_stop)
        state, step = lax.fori_loop(step, after, edged, state), after
    if ends_left:
        whole = jnp.maximum(step, walk.end - walk.span.full_start)
    state = lax.fori_loop(step, whole, inside, state)
    return lax.fori_loop(whole, walk.stop, edged, state) if ends_left else state


def _pass_by(walk: Walk, step: Array) -> None:
    for ring in (walk.keys, walk.values):
        # Free slots are signalled by barriers with one phase: not before the slot was filled.
        walk.wait(ring, step)
        walk.release(ring, step)


def _overlapped(walk: Walk) -> _State:
    """Goes all the way with the softmax under the own products."""
    ends_left, ends = walk.scores.edges(walk.tile[1])

    def others_steps(start: Any, stop: Any) -> None:
        @pl.loop(start, stop)
        def _step(step):
            walk.await_turn()
            walk.pass_turn()
            _pass_by(walk, step)

    if ends:
        others_steps(0, walk.first)
    state, last = _own_steps(walk, _first(walk, ends), _next), walk.stop - 1
    walk.queries_free()
    walk.wait(walk.values, last)

    def finish(sums, _, nothing):
        sums[0].add(state.weights, walk.block_of(walk.values, last))
        return nothing

    interpret = walk.facts.plan.interpret
    (out,), _ = accumulate(finish, [state.out], (), fresh=[], interpret=interpret)
    walk.release(walk.values, last)
    if ends_left:
        others_steps(walk.stop, walk.steps)
    return state._replace(out=out)


def _alternate(step: Array, state: _State, walk: Walk, at_edge: bool) -> _State:
    """Forms a block's weights while others multiply, and adds its values; the turn is held."""
    tile, interpret = walk.tile, walk.facts.plan.interpret

    def scores(_, fresh, state):
        fresh[0].add(walk.query, walk.block_of(walk.keys, step).transpose((1, 0)))
        walk.pass_turn()
        return fresh[0].value()

    _, found = accumulate(scores, [], filled(0, tile), fresh=[tile], interpret=interpret)
    weights, added, top, shrink = _weights(walk, step, found, state.top, at_edge)
    out = scale_rows(state.out, shrink, mostly_ones=walk.is_lazy, interpret=interpret)
    softmax = out, state.total * shrink + added, top, weights.astype(walk.query.dtype)
    out, total, top, weights = lax.optimization_barrier(softmax)
    walk.wait(walk.values, step)
    walk.await_turn()

    def add_values(sums, _, nothing):
        sums[0].add(weights, walk.block_of(walk.values, step))
        _await_next(walk, step)
        return nothing

    (out,), _ = accumulate(add_values, [out], (), fresh=[], interpret=interpret)
    walk.release(walk.values, step)
    return state._replace(out=out, top=top, total=total)


def _alternating(walk: Walk) -> _State:
    """Goes all the way with the softmax under the products of other workers."""
    ends_left, ends = walk.scores.edges(walk.tile[1])

    def others_steps(start: Any, stop: Any) -> None:
        @pl.loop(start, stop)
        def _step(step):
            walk.pass_turn()
            _pass_by(walk, step)
            walk.await_turn()

    walk.await_turn()
    if ends:
        others_steps(0, walk.first)
    walk.wait(walk.keys, walk.first)
    zero, line = filled(0, (ROWS,), WGMMA.reduce(1)), (ROWS, walk.facts.value_features)
    no_top = filled(-jnp.inf, (ROWS,), WGMMA.reduce(1))
    state = _alternate(walk.first, _State(filled(0, line), no_top, zero, None), walk, ends)
    state = _own_steps(walk, state, _alternate)
    if ends_left:
        others_steps(walk.stop, walk.steps)
    walk.pass_turn()
    walk.queries_free()
    return state


def attend(walk: Walk) -> tuple[Array, Array, Array]:
    """Returns one worker's output, and lse and max in units of log2."""
    state = (_alternating if walk.facts.plan.config.alternates else _overlapped)(walk)
    top, total, shrink = state.top, state.total, jnp.ones_like(state.total)
    if walk.scores.extras.sinks is not None:
        sink = (walk.scores.extras.sinks[walk.scores.head] + 0.0) * LOG2E
        top = jnp.maximum(top, sink)
        top = jnp.where(top == -jnp.inf, jnp.zeros_like(top), top)
        shrink = jnp.exp2(state.top - top)
        total = total * shrink + jnp.exp2(sink - top)
    inverse = jnp.where(total == 0, jnp.zeros_like(total), shrink / total)
    return state.out * by_row(inverse, state.out.shape), top + jnp.log2(total), state.top
