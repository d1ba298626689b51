# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The backward kernel of attention for the bias: dbias = ds, as `backward` says.

A bias may serve many sequences and heads. One block of threads owns a tile of it and sums ds over
all of these, its "members", in order: nothing of the size of all scores is ever stored.
"""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from tpjax.pallas._mgpu import accumulate, out_like, pl, plgpu, row_tile
from tpjax.pallas.attention.blocks import Order
from tpjax.pallas.attention.config import ROWS, compute_registers
from tpjax.pallas.attention.cotangents import Cotangents, launch
from tpjax.pallas.attention.extras import Extras, key_spans, tiled
from tpjax.pallas.attention.ring import Ring, fill, ring_barriers, slot_of
from tpjax.pallas.attention.schedule import TileFacts
from tpjax.pallas.attention.scores import WGMMA, Plan, Scores, Tile, by_row, filled, hidden

WORKERS, BLOCK = 2, 64
BIAS_ROWS = WORKERS * ROWS


class _BiasFacts(NamedTuple):
    """Static facts of the kernel."""

    whole: TileFacts
    shape: tuple[int, int]
    """Sequences and heads of the bias: 1 or all."""
    batch: int
    tiles: tuple[int, int]
    """Tiles of queries, blocks of keys."""

    @property
    def stages(self) -> int:
        """Members in shared memory at a time: as many as there is room for."""
        return 2 if self.whole.features + self.whole.value_features <= 256 else 1

    @property
    def plan(self) -> Plan:
        return self.whole.plan

    @property
    def members(self) -> tuple[int, int]:
        """Sequences and heads that share one tile of the bias."""
        return self.batch // self.shape[0], self.whole.heads // self.shape[1]

    def locate(self, index: Array) -> tuple[Array, Array, Array, Array]:
        """Returns (sequence, head, tile of queries, block of keys) of a grid index."""
        places = []
        for size in (*reversed(self.tiles), self.shape[1]):
            places.append(lax.rem(index, jnp.int32(size)))
            index = lax.div(index, jnp.int32(size))
        block, tile, head = places
        return index, head, tile, block

    def member(self, batch: Array, head: Array, step: Array) -> tuple[Array, Array]:
        """Returns the sequence and head of a step."""
        heads = jnp.int32(self.members[1])
        return batch + lax.div(step, heads), head + lax.rem(step, heads)


def _step(
    step: Array, ds: Array, scores: Scores, where: Tile, worker: Array, rings: tuple[Ring, Ring],
    facts: _BiasFacts,
) -> Array:  # fmt: skip
    """Adds one member's ds."""
    slot, own = slot_of(step, facts.stages), pl.ds(worker * ROWS, ROWS)
    (query, lse, key), (dout, delta, value) = (
        tuple(x.at[slot] for x in ring.buffers) for ring in rings
    )
    edge = scores.edges(BLOCK)[1]

    def products(sums, fresh, ds):
        del sums
        plgpu.barrier_wait(rings[0].ready.at[slot])
        fresh[0].add(query.at[own], key.transpose((1, 0)))
        plgpu.barrier_wait(rings[1].ready.at[slot])
        fresh[1].add(dout.at[own], value.transpose((1, 0)))
        lines = (plgpu.load(x.at[own], layout=WGMMA.reduce(1)) for x in (lse, delta))
        lse_rows, delta_rows = (by_row(x, where.shape) for x in lines)
        scored, factor, _ = scores.values(fresh[0].value(pending=1), where)
        weights = jnp.exp2(scored * factor - lse_rows)
        added = weights * (fresh[1].value() - delta_rows)
        seen = scores.seen(where, edge, scores.ids(where.first_row, ROWS, axis=0))
        return ds + hidden(added, 0.0, seen)

    _, ds = accumulate(products, [], ds, fresh=[where.shape] * 2, interpret=facts.plan.interpret)
    for ring in rings:
        plgpu.barrier_arrive(ring.free.at[slot])
    return ds


def _bias_kernel(
    q_ref, k_ref, v_ref, cotangents: Cotangents, extras: Extras, spans, dbias_ref, q_smem, k_smem,
    v_smem, do_smem, lse_smem, delta_smem, out_smem, first_bars, second_bars, *, facts: _BiasFacts,
):  # fmt: skip
    batch, head, tile, block = facts.locate(lax.axis_index("tile"))
    worker = lax.axis_index("worker")
    first_row, first_key = tile * (WORKERS * ROWS), block * BLOCK
    # A tile of several sequences is skipped only where none of them can see it.
    shared = facts.members[0] > 1
    common = Scores(facts.plan, extras, None if shared else spans, batch, head, query_axis=0)
    span = common.span(tile, WORKERS * ROWS, BLOCK)
    visited = (block >= span.start) & (block < span.stop)
    if shared and extras.bounds is not None:  # some may see more than the arrays' bounds tell
        visited = block >= 0
    steps = jnp.where(visited, jnp.int32(facts.members[0] * facts.members[1]), 0)
    rings = (
        Ring((q_smem, lse_smem, k_smem), *first_bars),
        Ring((do_smem, delta_smem, v_smem), *second_bars),
    )

    @pl.when(worker < WORKERS)
    def _compute():
        plgpu.set_max_registers(compute_registers(WORKERS), action="increase")
        where = Tile(first_row + worker * ROWS, first_key, (ROWS, BLOCK))

        def add(step, ds):
            own_batch, own_head = facts.member(batch, head, step)
            scores = common._replace(batch=own_batch, head=own_head)
            return _step(step, ds, scores, where, worker, rings, facts)

        ds = lax.fori_loop(0, steps, add, filled(0, where.shape))
        own = out_smem.at[worker]
        own[...] = ds
        plgpu.commit_smem()
        rows, keys = pl.ds(where.first_row, ROWS), pl.ds(first_key, BLOCK)
        plgpu.copy_smem_to_gmem(own, dbias_ref.at[batch, head, rows, keys])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(worker == WORKERS)
    def _load():
        plgpu.set_max_registers(24, action="decrease")
        tokens, keys = pl.ds(first_row, WORKERS * ROWS), pl.ds(first_key, BLOCK)

        def sources(step):
            own, at = facts.member(batch, head, step)
            kv_head, line = lax.div(at, jnp.int32(facts.whole.group)), (own, at, tokens)
            dout, lse, delta = cotangents
            return (
                (q_ref.at[own, tokens, at], lse.at[line], k_ref.at[own, keys, kv_head]),
                (dout.at[own, tokens, at], delta.at[line], v_ref.at[own, keys, kv_head]),
            )

        fill(steps, rings, sources)


def bias_gradient(
    q: Array, k: Array, v: Array, cotangents: Cotangents, extras: Extras, plan: Plan
) -> Array:
    """Returns the gradient of `extras.bias`; operands as of `backward_query.query_gradient`.

    The lines of `cotangents` have room for whole tiles of `BIAS_ROWS` queries.
    """
    (batch, _, heads, features), dtype = q.shape, q.dtype
    rows, value_features, region = WORKERS * ROWS, v.shape[-1], plan.region
    lead, length = extras.bias.shape[:2], (region.num_queries, region.num_keys)
    tiles = pl.cdiv(length[0], rows), pl.cdiv(length[1], BLOCK)
    whole = TileFacts(
        plan, Order(1, 1, False), heads, heads // k.shape[2], features, value_features
    )
    facts = _BiasFacts(whole, lead, batch, tiles)
    stages = facts.stages
    bars = partial(ring_barriers, WORKERS, stages, copies=3)
    line = plgpu.SMEM((stages, rows), jnp.float32)
    scratch = [
        row_tile((stages, rows, features), dtype),
        row_tile((stages, BLOCK, features), dtype),
        row_tile((stages, BLOCK, value_features), dtype),
        row_tile((stages, rows, value_features), dtype),
        *(line, line),
        row_tile((WORKERS, ROWS, BLOCK), jnp.float32),
        *(bars(), bars()),
    ]
    grid = lead[0] * lead[1] * tiles[0] * tiles[1]
    shape = (*lead, tiles[0] * rows, tiles[1] * BLOCK)
    out_type = [out_like(q, shape, jnp.float32)]
    kernel: Any = launch(
        _bias_kernel, "flash_attention_backward_bias", facts, WORKERS, grid, out_type, scratch
    )
    spans = key_spans(extras, region, tiles[0], rows, BLOCK)
    (ds,) = kernel(q, k, v, cotangents, tiled(extras, rows, BLOCK), spans)
    ds = ds[:, :, : length[0], : length[1]]
    summed = tuple(a for a in (2, 3) if extras.bias.shape[a] == 1 and ds.shape[a] > 1)
    return ds.sum(summed, keepdims=True).astype(extras.bias.dtype)
