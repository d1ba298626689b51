# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""What the backward kernels of attention share: what they are given, and how they are started."""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from tpjax.pallas._mgpu import gpu_kernel, interpret_params, plgpu
from tpjax.pallas.attention.extras import Extras, pad_tokens
from tpjax.pallas.attention.scores import LOG2E


class Cotangents(NamedTuple):
    """What the backward kernels are given besides the operands of the forward one.

    The lines are float32 [B, H, T] in units of log2 for `lse`, infinity where nothing is seen and
    beyond the last query, so that all weights there are zero.
    """

    dout: Any
    lse: Any
    delta: Any


def cotangents_of(
    extras: Extras, out: Array, lse: Array, dout: Array, dlse: Array, room: int
) -> tuple[Cotangents, Array]:
    """Returns what the kernels are given, its lines with room for tiles of that many; and delta."""
    # The kernels multiply the rounded dout: XLA may not add up what it was rounded from.
    dout = lax.optimization_barrier(dout)
    delta = jnp.einsum(
        "bthd,bthd->bht", out.astype(jnp.float32), dout.astype(jnp.float32), precision="highest"
    )
    delta, nothing = delta - dlse, lse == -jnp.inf
    if extras.bounds is not None:  # with a sink, lse is finite where no key is seen
        ends = extras.bounds[:, 1, None, None]
        nothing = nothing | (jnp.arange(lse.shape[2], dtype=jnp.int32) >= ends)
    lse = jnp.where(nothing, jnp.inf, lse * LOG2E)
    beyond = ((0, 0), (0, 0), (0, -lse.shape[2] % room))
    lse = jnp.pad(lse, beyond, constant_values=jnp.inf)
    lines = jnp.pad(jnp.where(nothing, 0, delta), beyond)
    return Cotangents(pad_tokens(dout), lse, lines), delta


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
