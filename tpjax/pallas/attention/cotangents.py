# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""What the backward kernels of attention share: what they are given, and how they are started."""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from tpjax.core.operator import Interpret
from tpjax.pallas._mgpu import gpu_kernel, interpret_params, out_like, pl, plgpu, row_tile
from tpjax.pallas.attention.config import ROWS
from tpjax.pallas.attention.extras import Extras, pad_tokens
from tpjax.pallas.attention.scores import LOG2E, WGMMA, Plan


class Cotangents(NamedTuple):
    """What the backward kernels are given besides the operands of the forward one.

    The lines are float32 [B, H, T] in units of log2 for `lse`, infinity where nothing is seen and
    beyond the last query, so that all weights there are zero.
    """

    dout: Any
    lse: Any
    delta: Any


def cotangents_of(
    extras: Extras, out: Array, lse: Array, dout: Array, dlse: Array, room: int, plan: Plan
) -> tuple[Cotangents, Array]:
    """Returns what the kernels are given, its lines with room for tiles of that many; and delta."""
    dout, tokens = pad_tokens(dout), lse.shape[2]
    delta = _rowsums(pad_tokens(out), dout, plan.interpret)[..., :tokens] - dlse
    nothing = lse == -jnp.inf
    if extras.bounds is not None:  # with a sink, lse is finite where no key is seen
        ends = extras.bounds[:, 1, None, None]
        nothing = nothing | (jnp.arange(tokens, dtype=jnp.int32) >= ends)
    lse = jnp.where(nothing, jnp.inf, lse * LOG2E)
    beyond = ((0, 0), (0, 0), (0, -tokens % room))
    lse = jnp.pad(lse, beyond, constant_values=jnp.inf)
    lines = jnp.pad(jnp.where(nothing, 0, delta), beyond)
    return Cotangents(dout, lse, lines), delta


def better_delta(cotangents: Cotangents, products: Array, dlse: Array) -> tuple[Cotangents, Array]:
    """Returns cotangents with delta from the sums of `backward_query`; and delta."""
    tokens, room = dlse.shape[2], cotangents.delta.shape[2]
    delta = products[..., :tokens] - dlse
    line = jnp.where(cotangents.lse[..., :tokens] == jnp.inf, 0, delta)
    line = jnp.pad(line, ((0, 0), (0, 0), (0, room - tokens)))
    return cotangents._replace(delta=line), delta


def _rowsums(out: Array, dout: Array, interpret: Interpret) -> Array:
    """Returns the sums of out dout over the features, float32 [B, H, T or more].

    Not by XLA, which adds in an order that the number of rows decides: a sequence's gradient would
    change with its neighbours.
    """
    batch, tokens, heads, features = out.shape
    tiles = pl.cdiv(tokens, ROWS)

    def body(out_ref, dout_ref, line_ref, out_smem, dout_smem, line, ready):
        start, head, row = (lax.axis_index(name) for name in ("tile", "head", "batch"))
        start = start * ROWS
        for ref, smem in ((out_ref, out_smem), (dout_ref, dout_smem)):
            plgpu.copy_gmem_to_smem(ref.at[row, pl.ds(start, ROWS), head], smem, ready)
        plgpu.barrier_wait(ready)
        x, dx = (plgpu.load(smem, layout=WGMMA) for smem in (out_smem, dout_smem))
        line[...] = (x.astype(jnp.float32) * dx.astype(jnp.float32)).sum(axis=1)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(line, line_ref.at[row, head, pl.ds(start, ROWS)])
        plgpu.wait_smem_to_gmem(0)

    kernel = gpu_kernel(
        body,
        out_type=out_like(out, (batch, heads, tiles * ROWS), jnp.float32),
        grid=(heads, tiles, batch),
        grid_names=("head", "tile", "batch"),
        scratch_types=[
            *(row_tile((ROWS, features), x.dtype) for x in (out, dout)),
            plgpu.SMEM((ROWS,), jnp.float32),
            plgpu.Barrier(num_arrivals=2),
        ],
        interpret=interpret_params(interpret),
        kernel_name="flash_attention_backward_rowsums",
    )
    return kernel(out, dout)


def launch(
    body: Any, name: str, facts: Any, workers: int, grid: int, out_type: Any, scratch: Any
) -> Any:
    """Returns the kernel of one computing warpgroup more than `workers`, over `grid` tiles."""
    return gpu_kernel(
        partial(body, facts=facts),
        out_type=out_type,
        scratch_types=scratch,
        grid=(grid,),
        grid_names=("tile",),
        num_threads=workers + 1,
        thread_name="worker",
        # Sums are along rows, inside a warp: they take no shared memory, of which little is left.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret_params(facts.plan.interpret, workers + 1),
        kernel_name=name,
    )
