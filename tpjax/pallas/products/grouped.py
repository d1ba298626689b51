# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""One launch of the kernel of matrix products: arrays of any size, and groups of them under vmap.

TMA and the tiles of shared memory want the last axis of an array in multiples of 64 and the one of
rows in multiples of 8. An array that is not so is copied with zeros around it, and results are cut.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from tpjax.pallas._mgpu import pl
from tpjax.pallas.products.kernel import (
    Arrays,
    Job,
    Kernel,
    Shared,
    scratch,
    stages_for,
    staging_for,
)
from tpjax.pallas.products.mainloop import DEPTH, Tiles, launch

TMA_ROWS, TMA_COLUMNS = 8, 64
"""Arrays come in multiples of these: tiles in which shared memory is laid out."""


# One jit for equal calls: the layers of a model lower and assemble the kernel once.
@partial(jax.jit, static_argnames="job")
def _launch(arrays: Arrays, job: Job) -> tuple[Array, ...]:
    """Runs the kernel on padded arrays; results are as long as those."""
    dtype = jax.tree.leaves(arrays)[0].dtype
    out_dtype = jnp.dtype(job.out_dtype or dtype)
    rows, columns = _extent(arrays, job)
    rows, columns = _up(rows, TMA_ROWS), _up(columns, TMA_COLUMNS)
    sides = [arrays.sides[panel.array].dtype.itemsize for panel in job.finish.sides]
    staging = staging_for(job.config, job.finish, out_dtype.itemsize, sides)
    room = staging.bytes(len(job.finish.results), out_dtype.itemsize, sides)
    config = replace(job.config, stages=stages_for(job.config, dtype.itemsize, room))
    groups = max(x.shape[0] for x in jax.tree.leaves(arrays))
    terms = 0 if arrays.a is None else arrays.a.shape[1 if job.transpose_a else -1]
    sums = max(1, len(job.finish.factors))
    # Copies of fewer dimensions. Columns beyond the end of a half make columns that are cut off.
    factors = tuple(x.reshape(*x.shape[:2], -1) for x in arrays.factors)
    arrays = arrays._replace(factors=factors)
    tiles = Tiles(config, groups, rows, columns, pl.cdiv(terms, DEPTH), sums)
    kernel = Kernel(job, tiles, staging)
    end = _up(columns, tiles.width * config.cluster)
    # What is loaded without TMA may not lie beyond an array's end.
    vectors = tuple(jnp.pad(v, ((0, 0), (0, end - v.shape[1]))) for v in arrays.vectors)
    arrays = arrays._replace(vectors=vectors)
    halves = {panel.array: panel.half for panel in job.finish.results}
    shapes = [(groups, rows, *(() if h is None else (2,)), columns) for h in halves.values()]

    def split(refs: Sequence[Any]) -> tuple[Arrays, Sequence[Any], Shared]:
        return refs[0], refs[1:-1], refs[-1]

    run = launch(
        tiles,
        lambda *refs: kernel.work(*split(refs)),
        lambda *refs: kernel.load(*split(refs)),
        out_type=[jax.ShapeDtypeStruct(shape, out_dtype) for shape in shapes],
        scratch_types=[scratch(kernel, arrays, out_dtype)],
        interpret=job.interpret,
        name=job.name,
        # What is read is never written by the same warpgroup, and `commit_smem` stands between what
        # is read of a side's slot and the copy that fills it again.
        auto_barriers=False,
    )
    return tuple(run(arrays))


def _extent(arrays: Arrays, job: Job) -> tuple[int, int]:
    """Returns the rows and the columns of the results."""
    if arrays.a is None:
        return arrays.sides[0].shape[1], arrays.sides[0].shape[-1]
    rows = arrays.a.shape[-1 if job.transpose_a else 1]
    return rows, arrays.factors[0].shape[1 if job.transpose_b else -1]


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _padded(x: Array) -> Array:
    """Returns an array whose second and last axis end with whole tiles of shared memory."""
    pads = [(0, 0)] * x.ndim
    pads[1] = (0, _up(x.shape[1], TMA_ROWS) - x.shape[1])
    pads[-1] = (0, _up(x.shape[-1], TMA_COLUMNS) - x.shape[-1])
    return jnp.pad(x, pads) if any(after for _, after in pads) else x


def product(
    job: Job,
    a: Array | None,
    factors: Sequence[Array],
    sides: Sequence[Array] = (),
    vectors: Sequence[Array] = (),
) -> tuple[Array, ...]:
    """Returns the results of a job.

    Args:
      job: which one; its finish says what the arrays are.
      a: [G, M, K], or stored [G, K, M]; None where the finish has no factors.
      factors: [G, K, N] or [G, K, 2, N], or stored [G, N, K].
      sides: [G, M, N] or [G, M, 2, N].
      vectors: [G, N] float32.

    Any G may be 1 where others are more: that array is shared.

    Returns:
      Arrays [G, M, N] or [G, M, 2, N].
    """
    arrays = Arrays(a, tuple(factors), tuple(sides), tuple(vectors))
    leaves, tree = jax.tree.flatten(arrays)
    return _grouped(job, tree)(*leaves)


def _grouped(job: Job, tree: Any) -> Callable[..., tuple[Array, ...]]:
    """Returns the job on the leaves of its arrays; vmap makes more groups."""

    @jax.custom_batching.custom_vmap
    def run(*leaves: Array) -> tuple[Array, ...]:
        arrays: Arrays = jax.tree.unflatten(tree, leaves)
        rows, columns = _extent(arrays, job)
        padded = Arrays(
            None if arrays.a is None else _padded(arrays.a),
            tuple(_padded(x) for x in arrays.factors),
            tuple(_padded(x) for x in arrays.sides),
            arrays.vectors,
        )
        return tuple(x[:, :rows, ..., :columns] for x in _launch(padded, job))

    @run.def_vmap
    def _(size: int, batched: Sequence[bool], *leaves: Array) -> tuple[Any, Any]:
        pairs = list(zip(leaves, batched, strict=True))
        groups = max(x.shape[1 if b else 0] for x, b in pairs)

        def merged(x: Array, has_axis: bool) -> Array:
            own = x.shape[1 if has_axis else 0]
            if not has_axis and own == 1:
                return x
            if not has_axis:
                x = jnp.broadcast_to(x, (size, *x.shape))
            x = jnp.broadcast_to(x, (size, groups, *x.shape[2:]))
            return x.reshape(-1, *x.shape[2:])

        results = _grouped(job, tree)(*(merged(x, b) for x, b in pairs))
        split = tuple(r.reshape(size, -1, *r.shape[1:]) for r in results)
        return split, (True,) * len(split)

    return run
