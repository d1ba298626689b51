# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The backward kernels of attention for Hopper GPUs: one for query, one for key and value.

    p = exp(scale query key^T - lse)           delta = rowsum(out dout)
    ds = p (dout value^T - delta)
    dquery = scale ds key      dkey = scale ds^T query      dvalue = p^T dout

Each kernel forms the scores again. Nothing is added by several blocks of threads, so the result is the
same bits on every run: a tile of keys gathers from all queries of all query heads of its group.

Letters as in `forward`. Numerics: scores, p, ds and accumulation float32; p and ds rounded to the dtype of
the operands for the products. Source: Dao 2023 (FlashAttention-2), algorithm 2.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from tpjax.pallas._mgpu import accumulate, interpret_params, pl, plgpu, row_tile
from tpjax.pallas.attention.blocks import Region, key_blocks, query_blocks, tile_order, visible
from tpjax.pallas.attention.config import ROWS, compute_registers
from tpjax.pallas.attention.forward import LOG2E, WGMMA, Plan, TileFacts, pad_rows


def _query_kernel(
    q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dq_ref, q_smem, do_smem, lse_smem, delta_smem,
    k_smem, v_smem, own_ready, k_ready, v_ready, k_free, v_free, *, facts: TileFacts,
):  # fmt: skip
    """dquery of 64 rows for each computing warpgroup; keys and values stream through a ring."""
    plan, region = facts.plan, facts.region
    num_workers, block, stages = (
        plan.config.dq_warpgroups,
        plan.config.dq_block,
        plan.config.dq_stages,
    )
    batch, head, tile = facts.locate(lax.axis_index("tile"))
    worker = lax.axis_index("worker")
    tile_start = tile * (num_workers * ROWS)
    span = key_blocks(tile_start, num_workers * ROWS, block, region)
    shape = (ROWS, block)

    @pl.when(worker < num_workers)
    def _compute():
        plgpu.set_max_registers(compute_registers(num_workers), action="increase")
        start = tile_start + worker * ROWS
        rows, line = (batch, pl.ds(start, ROWS), head), (batch, head, pl.ds(start, ROWS))
        q_own, do_own = q_smem.at[worker], do_smem.at[worker]
        lse_own, delta_own = lse_smem.at[worker], delta_smem.at[worker]
        ready = own_ready.at[worker]
        plgpu.copy_gmem_to_smem(q_ref.at[rows], q_own, ready)
        plgpu.copy_gmem_to_smem(do_ref.at[rows], do_own, ready)
        plgpu.copy_gmem_to_smem(lse_ref.at[line], lse_own, ready)
        plgpu.copy_gmem_to_smem(delta_ref.at[line], delta_own, ready)
        plgpu.barrier_wait(ready)
        lse = plgpu.load(lse_own, layout=WGMMA.reduce(1))
        delta = plgpu.load(delta_own, layout=WGMMA.reduce(1))

        def step_on(step, dq, masked: bool):
            slot = lax.rem(step, jnp.int32(stages))

            def products(sums, fresh, state):
                plgpu.barrier_wait(k_ready.at[slot])
                fresh[0].add(q_own, k_smem.at[slot].transpose((1, 0)))
                plgpu.barrier_wait(v_ready.at[slot])
                fresh[1].add(do_own, v_smem.at[slot].transpose((1, 0)))
                scores = fresh[0].value(pending=1)
                weights = jnp.exp2(
                    scores * (plan.scale * LOG2E) - lax.broadcast_in_dim(lse, shape, [0])
                )
                if masked:
                    first_key = (span.stop - 1 - step) * block
                    seen = visible(start, first_key, shape, region, query_axis=0)
                    weights = jnp.where(seen, weights, 0.0)
                weights = lax.optimization_barrier(weights)
                dweights = fresh[1].value(pending=0)
                plgpu.barrier_arrive(v_free.at[slot])
                ds = weights * (dweights - lax.broadcast_in_dim(delta, shape, [0]))
                sums[0].add(ds.astype(q_own.dtype), k_smem.at[slot])
                return state

            (dq,), _ = accumulate(products, [dq], (), fresh=[shape] * 2, interpret=plan.interpret)
            plgpu.barrier_arrive(k_free.at[slot])
            return dq

        dq = plgpu.layout_cast(jnp.zeros((ROWS, facts.features), jnp.float32), WGMMA)
        steps, masked_steps = jnp.int32(span.stop - span.start), jnp.int32(0)
        if region.is_causal or region.num_keys % block:
            masked_steps = jnp.int32(span.stop - span.full_stop)
            dq = lax.fori_loop(0, masked_steps, partial(step_on, masked=True), dq)
        dq = lax.fori_loop(masked_steps, steps, partial(step_on, masked=False), dq)
        q_own[...] = (dq * plan.scale).astype(q_own.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_own, dq_ref.at[rows])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(worker == num_workers)
    def _load():
        plgpu.set_max_registers(24, action="decrease")
        kv_head = lax.div(head, jnp.int32(facts.group))

        @pl.loop(0, jnp.int32(span.stop - span.start))
        def _step(step):
            slot = lax.rem(step, jnp.int32(stages))
            keys = (batch, pl.ds((span.stop - 1 - step) * block, block), kv_head)
            for ref, smem, ready, free in (
                (k_ref, k_smem, k_ready, k_free),
                (v_ref, v_smem, v_ready, v_free),
            ):
                pl.when(step >= stages)(partial(plgpu.barrier_wait, free.at[slot]))
                plgpu.copy_gmem_to_smem(ref.at[keys], smem.at[slot], ready.at[slot])


def _key_value_kernel(
    q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_ref, dv_ref, k_smem, v_smem, q_smem, do_smem,
    lse_smem, delta_smem, own_ready, q_ready, do_ready, q_free, do_free, *, facts: TileFacts,
):  # fmt: skip
    """dkey and dvalue of 64 rows for each computing warpgroup; queries stream through a ring."""
    plan, region = facts.plan, facts.region
    config = plan.config
    num_workers, block, stages = config.dkv_warpgroups, config.dkv_block, config.dkv_stages
    batch, kv_head, tile = facts.locate(lax.axis_index("tile"))
    worker = lax.axis_index("worker")
    tile_start = tile * (num_workers * ROWS)
    span = query_blocks(tile_start, num_workers * ROWS, block, region)
    steps = jnp.int32(span.stop - span.start)
    shape = (ROWS, block)

    @pl.when(worker < num_workers)
    def _compute():
        plgpu.set_max_registers(compute_registers(num_workers), action="increase")
        start = tile_start + worker * ROWS
        rows = (batch, pl.ds(start, ROWS), kv_head)
        k_own, v_own, ready = k_smem.at[worker], v_smem.at[worker], own_ready.at[worker]
        plgpu.copy_gmem_to_smem(k_ref.at[rows], k_own, ready)
        plgpu.copy_gmem_to_smem(v_ref.at[rows], v_own, ready)
        plgpu.barrier_wait(ready)

        def step_on(step, carry, member, masked: bool):
            slot = lax.rem(member * steps + step, jnp.int32(stages))

            def products(sums, fresh, state):
                dk, dv = sums
                plgpu.barrier_wait(q_ready.at[slot])
                fresh[0].add(k_own, q_smem.at[slot].transpose((1, 0)))
                plgpu.barrier_wait(do_ready.at[slot])
                fresh[1].add(v_own, do_smem.at[slot].transpose((1, 0)))
                lse = plgpu.load(lse_smem.at[slot], layout=WGMMA.reduce(0))
                delta = plgpu.load(delta_smem.at[slot], layout=WGMMA.reduce(0))
                scores = fresh[0].value(pending=1)
                weights = jnp.exp2(
                    scores * (plan.scale * LOG2E) - lax.broadcast_in_dim(lse, shape, [1])
                )
                if masked:
                    first_query = (span.start + step) * block
                    seen = visible(first_query, start, shape, region, query_axis=1)
                    weights = jnp.where(seen, weights, 0.0)
                dv.add(weights.astype(k_own.dtype), do_smem.at[slot])
                dweights = fresh[1].value(pending=1)
                ds = weights * (dweights - lax.broadcast_in_dim(delta, shape, [1]))
                dk.add(ds.astype(k_own.dtype), q_smem.at[slot])
                return state

            sums, _ = accumulate(
                products, list(carry), (), fresh=[shape] * 2, interpret=plan.interpret
            )
            plgpu.barrier_arrive(q_free.at[slot])
            plgpu.barrier_arrive(do_free.at[slot])
            return tuple(sums)

        def head_on(member, carry):
            masked_steps = jnp.int32(0)
            if region.is_causal:
                masked_steps = jnp.int32(span.full_start - span.start)
                carry = lax.fori_loop(
                    0, masked_steps, partial(step_on, member=member, masked=True), carry
                )
            return lax.fori_loop(
                masked_steps, steps, partial(step_on, member=member, masked=False), carry
            )

        zero = plgpu.layout_cast(jnp.zeros((ROWS, facts.features), jnp.float32), WGMMA)
        dk, dv = lax.fori_loop(0, facts.group, head_on, (zero, zero))
        k_own[...] = (dk * plan.scale).astype(k_own.dtype)
        v_own[...] = dv.astype(v_own.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(k_own, dk_ref.at[rows])
        plgpu.copy_smem_to_gmem(v_own, dv_ref.at[rows])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(worker == num_workers)
    def _load():
        plgpu.set_max_registers(24, action="decrease")

        @pl.loop(0, steps * facts.group)
        def _step(count):
            slot = lax.rem(count, jnp.int32(stages))
            head = kv_head * facts.group + lax.div(count, steps)
            first = (span.start + lax.rem(count, steps)) * block
            rows, line = (batch, pl.ds(first, block), head), (batch, head, pl.ds(first, block))
            for ref, smem, line_ref, line_smem, ready, free in (
                (q_ref, q_smem, lse_ref, lse_smem, q_ready, q_free),
                (do_ref, do_smem, delta_ref, delta_smem, do_ready, do_free),
            ):
                pl.when(count >= stages)(partial(plgpu.barrier_wait, free.at[slot]))
                plgpu.copy_gmem_to_smem(ref.at[rows], smem.at[slot], ready.at[slot])
                plgpu.copy_gmem_to_smem(line_ref.at[line], line_smem.at[slot], ready.at[slot])


def _barriers(workers: int, stages: int, arrivals: int) -> list[Any]:
    """Returns the barriers of a ring of two operands: two that say ready, two that say free."""
    ready = [plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages) for _ in range(2)]
    free = [plgpu.Barrier(num_arrivals=workers, num_barriers=stages) for _ in range(2)]
    return ready + free


def _launch(
    body: Any,
    name: str,
    plan: Plan,
    workers: int,
    num_tiles: int,
    out_type: Any,
    scratch: list[Any],
) -> Any:
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        grid=(num_tiles,),
        grid_names=("tile",),
        num_threads=workers + 1,
        thread_name="worker",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret_params(plan.interpret),
        kernel_name=name,
    )


def _query_gradient(q, k, v, do, lse, delta, region: Region, plan: Plan) -> Array:
    """Runs the kernelfor query."""
    batch, length, heads, features = q.shape
    group, dtype = heads // k.shape[2], q.dtype
    workers, stages, block = plan.config.dq_warpgroups, plan.config.dq_stages, plan.config.dq_block
    head_bytes = 2 * k.shape[1] * features * dtype.itemsize
    num_tiles = pl.cdiv(length, workers * ROWS)
    order = tile_order(num_tiles, batch * heads, group, head_bytes, longest_last=plan.is_causal)
    facts = TileFacts(region, order, heads, group, features, plan)
    scratch = [
        *(row_tile((workers, ROWS, features), dtype) for _ in ("q", "do")),
        *(plgpu.SMEM((workers, ROWS), jnp.float32) for _ in ("lse", "delta")),
        *(row_tile((stages, block, features), dtype) for _ in "kv"),
        plgpu.Barrier(num_arrivals=4, num_barriers=workers),
        *_barriers(workers, stages, arrivals=1),
    ]
    kernel = _launch(
        partial(_query_kernel, facts=facts),
        "flash_attention_backward_query",
        plan,
        workers,
        num_tiles * batch * heads,
        jax.ShapeDtypeStruct(q.shape, dtype),
        scratch,
    )
    return kernel(q, k, v, do, lse, delta)


def _key_value_gradient(q, k, v, do, lse, delta, region: Region, plan: Plan) -> list[Array]:
    """Runs the kernel for key and value."""
    heads, features, dtype = q.shape[2], q.shape[3], q.dtype
    batch, length, kv_heads = k.shape[:3]
    config = plan.config
    workers, stages, block = config.dkv_warpgroups, config.dkv_stages, config.dkv_block
    group = heads // kv_heads
    head_bytes = 2 * group * q.shape[1] * features * dtype.itemsize
    num_tiles = pl.cdiv(length, workers * ROWS)
    order = tile_order(num_tiles, batch * kv_heads, 1, head_bytes, longest_last=False)
    facts = TileFacts(region, order, kv_heads, group, features, plan)
    scratch = [
        *(row_tile((workers, ROWS, features), dtype) for _ in "kv"),
        *(row_tile((stages, block, features), dtype) for _ in ("q", "do")),
        *(plgpu.SMEM((stages, block), jnp.float32) for _ in ("lse", "delta")),
        plgpu.Barrier(num_arrivals=2, num_barriers=workers),
        *_barriers(workers, stages, arrivals=2),
    ]
    kernel = _launch(
        partial(_key_value_kernel, facts=facts),
        "flash_attention_backward_key_value",
        plan,
        workers,
        num_tiles * batch * kv_heads,
        [jax.ShapeDtypeStruct(k.shape, dtype)] * 2,
        scratch,
    )
    return kernel(q, k, v, do, lse, delta)


def backward(
    query: Array, key: Array, value: Array, out: Array, lse: Array, dout: Array, plan: Plan
) -> tuple[Array, Array, Array]:
    """Returns the gradients of query, key and value for the output's cotangent `dout`."""
    delta = jnp.einsum(
        "bthd,bthd->bht", out.astype(jnp.float32), dout.astype(jnp.float32), precision="highest"
    )
    lines = (pad_rows(x, axis=2) for x in (lse * LOG2E, delta))
    region = Region(query.shape[1], key.shape[1], plan.is_causal)
    operands = (*(pad_rows(x) for x in (query, key, value, dout)), *lines, region, plan)
    dq, (dk, dv) = _query_gradient(*operands), _key_value_gradient(*operands)
    return dq[:, : query.shape[1]], dk[:, : key.shape[1]], dv[:, : key.shape[1]]
