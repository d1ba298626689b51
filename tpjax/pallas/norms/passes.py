# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The forward and backward passes of the norms on Hopper.

Letters: R rows, G groups, D features of a group (`tiles`). Numerics: float32 but for the arrays of
rows, each rounded once. The backward pass keeps h (which is x, or the new residual), scale and bias
(for its dtype) and forms the statistics again, with the same bits. Each block adds up dscale and
dbias over its rows in a fixed order, XLA adds the blocks: runs agree to the last bit.
Bytes, of one array of rows: 2 forward, 3 backward; with a residual 4 and 4; rows that fit no tile
are read once more, in both passes. Limits: `config.unsupported`. With a residual of x's dtype dx
and dresidual are one array: a model adds it onward; a program that returns both copies it.

Source: the equations of `kernels`, derived from those of `core.norms`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tpjax.core.operator import Interpret
from tpjax.pallas.norms import config as sizes
from tpjax.pallas.norms import kernels
from tpjax.pallas.norms.launch import Sweep, Swept, sweep
from tpjax.pallas.norms.tiles import Tile


class Operands(NamedTuple):
    """Arrays of a call, or what the backward pass keeps: then x is h and there is no residual."""

    x: Array
    residual: Array | None
    scale: Array | None
    bias: Array | None


class Job(NamedTuple):
    """A call but for its arrays."""

    norm: kernels.Norm
    num_groups: int
    interpret: Interpret
    config: sizes.Config
    name: str
    """Of the operator."""


class Launcher(NamedTuple):
    """Runs kernels on rows of one shape."""

    job: Job
    arrays: Sequence[Array]
    """What is read, [1, R, G, D]."""
    name: str

    def tile(self, extra: Sequence[int] = ()) -> Tile | None:
        """Returns the tile of these rows, or None where there is none."""
        itemsizes = [*(x.dtype.itemsize for x in self.arrays), *extra]
        return sizes.tile_for(self.arrays[0].shape[-1], itemsizes, self.job.config)

    def run(self, step: Any, vectors: Any, numbers: Sequence[Array] = (), **counts: Any) -> Swept:
        """Runs a step of `kernels` on all rows."""
        given = [v for v in vectors if v is not None]
        nothing = {"results": (), "more_buffers": (), "num_numbers": 0, "num_sums": 0}
        sweeping = Sweep(
            step=step,
            tile=step.tile,
            config=self.job.config,
            num_arrays=len(self.arrays),
            num_vectors=len(given),
            interpret=self.job.interpret,
            name=self.name,
            **(nothing | counts),
        )
        return sweep(sweeping, self.arrays, given, numbers)


def _rows(x: Array, groups: int) -> Array:
    """Returns x [*B, D] as [1, R, G, D]."""
    return x.reshape(1, -1, groups, x.shape[-1] // groups)


def _vector(x: Array | None, groups: int) -> Array | None:
    """Returns a vector [D] as [G, D]."""
    return None if x is None else x.reshape(groups, -1)


def _launcher(job: Job, arrays: Sequence[Array], what: str) -> tuple[Launcher, Tile, bool]:
    """Returns a launcher, its tile, and whether its groups are segments of longer rows."""
    name = job.name + what
    launcher = Launcher(job, [_rows(x, job.num_groups) for x in arrays], name)
    tile = launcher.tile()
    if tile is not None:
        return launcher, tile, False
    itemsizes = [x.dtype.itemsize for x in arrays]
    count = sizes.segments(arrays[0].shape[-1], itemsizes)
    assert count is not None, "unsupported() lets no such call through"
    launcher = Launcher(job, [_rows(x, count) for x in arrays], name)
    tile = launcher.tile()
    assert tile is not None
    return launcher, tile, True


# One jit for equal calls: the layers of a model lower and assemble the kernel once.
@partial(jax.jit, static_argnames=("job",))
def _fwd(operands: Operands, job: Job) -> tuple[Array, Array | None]:
    """Returns y, and h if there is a residual."""
    x, residual, scale, bias = operands
    arrays = [x] if residual is None else [x, residual]
    launcher, tile, long = _launcher(job, arrays, "")
    vectors = [_vector(v, launcher.arrays[0].shape[2]) for v in (scale, bias)]
    given = kernels.Vectors(scale is not None, bias is not None)
    step = kernels.Forward(job.norm, tile, given, num_sources=len(arrays))
    if not long:
        out = launcher.run(step, vectors, results=tuple(range(len(arrays)))).arrays
        return out[0].reshape(x.shape), None if residual is None else out[1].reshape(x.shape)
    looking = kernels.ForwardStatistics(job.norm, tile)
    results = () if residual is None else (1,)
    moments = launcher._replace(name=f"{launcher.name}_statistics").run(
        looking, (), results=results, num_numbers=1 + job.norm.centred
    )
    numbers = kernels.joined_forward(job.norm, moments.numbers)
    h = moments.arrays or launcher.arrays
    other = (x.dtype,) if h[0].dtype != x.dtype else ()
    step = step._replace(num_sources=1, out=len(other))
    launcher = launcher._replace(arrays=h)
    y = launcher.run(step, vectors, numbers, results=(step.out,), more_buffers=other).arrays[0]
    return y.reshape(x.shape), None if residual is None else h[0].reshape(x.shape)


@partial(jax.jit, static_argnames=("job",))
def _bwd(kept: Operands, dy: Array, dh: Array | None, job: Job) -> Operands:
    """Returns the gradients: of h as those of x and, where dh is given, of the residual."""
    h, _, scale, bias = kept
    job = job._replace(config=job.config.backward())
    arrays = [h, dy] if dh is None else [h, dy, dh]
    launcher, tile, long = _launcher(job, arrays, "_backward")
    scales = [_vector(scale, launcher.arrays[0].shape[2])]
    grads = kernels.Vectors(scale is not None, bias is not None)
    both = dh is not None and dh.dtype != dy.dtype
    step = kernels.Backward(job.norm, tile, grads, both)
    numbers = []
    if long:
        looking = kernels.BackwardStatistics(job.norm, tile)
        first = Launcher(job, launcher.arrays[:2], f"{launcher.name}_statistics")
        moments = first.run(looking, scales, num_numbers=2 + 2 * job.norm.centred)
        numbers = kernels.joined_backward(job.norm, moments.numbers)
    results = (1,) if dh is None else (1, 2) if both else (2,)
    out = launcher.run(step, scales, numbers, results=results, num_sums=sum(grads))
    dx, dresidual = (out.arrays[i].reshape(h.shape) for i in (0, -1))
    totals = iter(out.sums)
    vectors = [None if v is None else next(totals).reshape(-1).astype(v.dtype) for v in kept[2:]]
    return Operands(dx, None if dh is None else dresidual, *vectors)


@partial(jax.jit, static_argnames=("job", "dynamic"))
def quantised(operands: Operands, job: Job, dynamic: bool) -> tuple[Array, Array | None]:
    """Returns y in float8_e4m3fn and, if `dynamic`, the scale of each row [*B]."""
    x, _, scale, bias = operands
    launcher = Launcher(job, [_rows(x, 1)], job.name)
    tile = launcher.tile(extra=(1,))
    assert tile is not None, "unsupported() lets no such call through"
    given = kernels.Vectors(scale is not None, bias is not None)
    step = kernels.Forward(job.norm, tile, given, out=1, dynamic=dynamic)
    vectors = [_vector(v, 1) for v in (scale, bias)]
    out = launcher.run(
        step, vectors, results=(1,), more_buffers=(jnp.float8_e4m3fn,), num_numbers=int(dynamic)
    )
    rows = [x.reshape(operands.x.shape[:-1]) for x in out.numbers]
    return out.arrays[0].reshape(x.shape), rows[0] if rows else None


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def normed(operands: Operands, job: Job) -> Array | tuple[Array, Array]:
    """Returns y; where there is a residual, y and h."""
    y, h = _fwd(operands, job)
    return y if h is None else (y, h)


def _forward(operands: Operands, job: Job) -> tuple[Any, Operands]:
    y, h = _fwd(operands, job)
    # Kept as it came: reshaped it would be another array, kept beside it.
    if h is None:
        return y, operands
    return (y, h), Operands(h, None, operands.scale, operands.bias)


def _backward(job: Job, kept: Operands, cotangent: Any) -> tuple[Operands]:
    dy, dh = cotangent if isinstance(cotangent, tuple | list) else (cotangent, None)
    return (_bwd(kept, dy, dh, job),)


normed.defvjp(_forward, _backward)
