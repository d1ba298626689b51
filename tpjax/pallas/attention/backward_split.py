# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The backward kernel of attention for key and value of wide heads, as `backward` says.

    dkey = scale dx^T query      dvalue = p^T dout

The sums for 64 keys of 256 features take 128 of a thread's registers each. So two workers share the
keys: the first forms p^T and gathers dvalue, the second forms (value dout^T) and gathers dkey. The
first hands the weights over in shared memory. Both take from the same rings of queries, and so stay
within a ring's length of each other; while one is busy with arithmetic, the other has the tensor
cores.

Numerics: the weights that are handed over are rounded to float16. They are at most one, and times
2^14, so that those of long sequences are not below its normal range: finer than in bfloat16.
"""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from tpjax.pallas._mgpu import accumulate, pl, plgpu, row_tile
from tpjax.pallas.attention.config import ROWS, compute_registers
from tpjax.pallas.attention.cotangents import Cotangents
from tpjax.pallas.attention.extras import Extras
from tpjax.pallas.attention.query_walk import (
    Blocks,
    QueryWalk,
    Sums,
    gather,
    load_queries,
    start_walk,
    store,
)
from tpjax.pallas.attention.ring import Ring, drain, ring_barriers, slot_of
from tpjax.pallas.attention.schedule import TileFacts
from tpjax.pallas.attention.scores import WGMMA, filled

VALUE_WORKER, KEY_WORKER, LOADER = range(3)
WORKERS = LOADER
SHIFT = 14
"""The first worker's weights are times two to this power."""


class _Exchange(NamedTuple):
    """How the first worker hands weights, times the derivative of the scores, to the second."""

    weights: Any
    bars: list[Any]
    done: Any
    """Completes when no worker reads keys and values any more."""


def exchange_scratch(block: int) -> _Exchange:
    """Returns the shared memory that the kernel has besides that of `backward_key_value`."""
    weights = row_tile((1, ROWS, block), jnp.float16)
    return _Exchange(weights, ring_barriers(1, 1, copies=1), plgpu.Barrier(num_arrivals=WORKERS))


def _value_step(
    step: Array, sums: Sums, walk: QueryWalk, member: Array, at_edge: bool, handed: Ring
) -> Sums:
    """Adds one block of queries to dvalue, and hands its weights over."""
    (key,), stop = walk.own, walk.stop(step, member)
    slot = slot_of(stop.count, handed.stages)
    buffer = handed.buffers[0].at[slot]

    def products(sums, fresh, nothing):
        plgpu.barrier_wait(walk.queries.ready.at[stop.slot])
        fresh[0].add(key, stop.query.transpose((1, 0)))
        lse = stop.by_column(stop.lse) - SHIFT
        weights, gain = stop.weights(fresh[0].value(), lse, walk.ids, at_edge)
        was_read = partial(plgpu.barrier_wait, handed.free.at[slot])
        pl.when(stop.count >= handed.stages)(was_read)
        buffer[...] = (weights if gain is None else weights * gain).astype(buffer.dtype)
        plgpu.barrier_arrive(handed.ready.at[slot])
        plgpu.barrier_wait(walk.douts.ready.at[stop.slot])
        sums[0].add(weights.astype(key.dtype), stop.dout)
        return nothing

    added, _ = accumulate(products, sums, (), fresh=[walk.tile], interpret=_interpret(walk))
    walk.leave(stop.slot)
    return tuple(added)


def _key_step(
    step: Array, sums: Sums, walk: QueryWalk, member: Array, at_edge: bool, handed: Ring
) -> Sums:
    """Adds one block of queries to dkey, of weights that the other worker hands over."""
    (value,), stop = walk.own, walk.stop(step, member)
    slot = slot_of(stop.count, handed.stages)

    def products(sums, fresh, nothing):
        plgpu.barrier_wait(walk.douts.ready.at[stop.slot])
        fresh[0].add(value, stop.dout.transpose((1, 0)))
        delta = stop.by_column(stop.delta)
        plgpu.barrier_wait(handed.ready.at[slot])
        weights = plgpu.load(handed.buffers[0].at[slot], layout=WGMMA).astype(jnp.float32)
        plgpu.barrier_arrive(handed.free.at[slot])
        dx = weights * ((fresh[0].value() - delta) * 2.0**-SHIFT)
        if at_edge or walk.scores.extras.mask is not None:
            dx = jnp.where(weights == 0, 0.0, dx)  # what is hidden may be infinite or NaN
        plgpu.barrier_wait(walk.queries.ready.at[stop.slot])
        sums[0].add(dx.astype(value.dtype), stop.query)
        return nothing

    added, _ = accumulate(products, sums, (), fresh=[walk.tile], interpret=_interpret(walk))
    walk.leave(stop.slot)
    return tuple(added)


def _interpret(walk: QueryWalk) -> Any:
    return walk.facts.plan.interpret


def split_kernel(
    q_ref, k_ref, v_ref, cotangents: Cotangents, extras: Extras, spans, dk_ref, dv_ref, k_smem,
    v_smem, blocks: Blocks, own_ready, exchange: _Exchange, *, facts: TileFacts,
):  # fmt: skip
    """dkey and dvalue of 64 rows, one for each worker; queries stream through rings."""
    worker = lax.axis_index("worker")
    handed = Ring((exchange.weights,), *exchange.bars)
    walk = start_walk(ROWS, *blocks.rings(), extras, spans, facts)
    rows = (walk.scores.batch, pl.ds(walk.start, ROWS), walk.scores.head)

    def gathered(step, source, own, staged):
        """Returns a worker's sum, of the shape of `staged`, into which it may be written."""
        plgpu.set_max_registers(compute_registers(WORKERS), action="increase")
        plgpu.copy_gmem_to_smem(source.at[rows], own, own_ready.at[worker])
        ids = walk.scores.ids(walk.start, ROWS, axis=0)
        plgpu.barrier_wait(own_ready.at[worker])
        step, zero = partial(step, handed=handed), filled(0, staged.shape)
        (total,) = gather(step, (zero,), walk._replace(own=(own,), ids=ids))
        # The other worker may still read what lies there.
        plgpu.barrier_arrive(exchange.done)
        plgpu.barrier_wait(exchange.done)
        return total

    @pl.when(worker == VALUE_WORKER)
    def _values():
        dv = gathered(_value_step, k_ref, k_smem, v_smem) * 2.0**-SHIFT
        store((dv, v_smem, dv_ref.at[rows]))
        drain(handed, walk.steps * facts.group)

    @pl.when(worker == KEY_WORKER)
    def _keys():
        dk = gathered(_key_step, v_ref, v_smem, k_smem) * facts.plan.scale
        store((dk, k_smem, dk_ref.at[rows]))

    pl.when(worker == LOADER)(partial(load_queries, q_ref, cotangents, walk))
