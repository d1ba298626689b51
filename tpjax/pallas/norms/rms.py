# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The kernels of `rms_norm` on Hopper: one pass over x forward, one over x and dy backward.

    forward    y = x rstd scale                      rstd = 1 / sqrt(mean(x^2) + eps)
    backward   g = dy scale
               dx = rstd (g - x rstd^2 mean(g x))
               dscale = sum over rows of dy x rstd

Letters: R rows, D features of a row, N chunks of C features (`tiles`). Numerics: float32 but for x,
y, dy and dx, each rounded once. The backward pass keeps x and scale and forms rstd again, with the
same bits. Each block adds up dscale over its rows in a fixed order, XLA adds the blocks: runs agree
to the last bit. Limits: `unsupported`. Bytes: 2 R D forward, 3 R D backward, each once.

Source: Zhang and Sennrich 2019, equation 4, and its derivative.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from tpjax.core.operator import Interpret, Key
from tpjax.pallas import dispatch
from tpjax.pallas.norms import config as sizes
from tpjax.pallas.norms.launch import Sweep, sweep
from tpjax.pallas.norms.tiles import Tile

MAX_PER_THREAD = 128
"""The backward pass keeps the gradient of scale in registers, and little else."""


def unsupported(key: Key) -> str | None:
    """Returns why the kernels cannot run the call, or None."""
    return sizes.unsupported(key, MAX_PER_THREAD)


def _rstd(tile: Tile, x: Array, eps: float) -> Array:
    return lax.rsqrt(tile.mean(jnp.square(x)) + eps)


def _fwd_kernel(
    eps: float, tile: Tile, vectors: Sequence[Array], buffers: Sequence[Any], sums: list[Array]
) -> list[Array]:
    """Turns the x in a tile into y."""
    (slot,) = buffers
    rstd = _rstd(tile, tile.load(slot), eps)
    y = tile.load(slot) * rstd
    for scale in vectors:
        y = y * scale
    tile.store(slot, y)
    return sums


# One jit for equal calls: the layers of a model lower and assemble the kernel once.
@partial(jax.jit, static_argnames=("eps", "interpret", "config"))
def _fwd(
    x: Array, scale_D: Array | None, eps: float, interpret: Interpret, config: sizes.Config
) -> Array:
    """Launches the forward kernel."""
    x_RD = _rows(x)
    tile = _tile(x_RD, config)
    job = Sweep(partial(_fwd_kernel, eps, tile), tile, config, 1, 0, interpret, "rms_norm")
    return sweep(job, (x_RD,), (scale_D,))[0].reshape(x.shape)


def _bwd_kernel(
    eps: float, tile: Tile, vectors: Sequence[Array], buffers: Sequence[Any], sums: list[Array]
) -> list[Array]:
    """Turns the dy in a tile into dx, and adds its share of dscale."""

    def load() -> tuple[Array, Array, Array]:
        x, dy = (tile.load(slot) for slot in buffers)
        g = dy
        for scale in vectors:
            g = g * scale
        return x, dy, g

    x, _, g = load()
    rstd = _rstd(tile, x, eps)
    pull = tile.mean(g * x) * rstd * rstd
    x, dy, g = load()  # again: cheaper than the registers to keep them
    tile.store(buffers[-1], rstd * (g - x * pull))
    return [dscale + dy * x * rstd for dscale in sums]


@partial(jax.jit, static_argnames=("eps", "interpret", "config"))
def _bwd(
    x: Array,
    dy: Array,
    scale_D: Array | None,
    eps: float,
    interpret: Interpret,
    config: sizes.Config,
) -> tuple[Array, Array | None]:
    """Launches the backward kernel."""
    x_RD, dy_RD = _rows(x), _rows(dy)
    tile = _tile(x_RD, config)
    kernel = partial(_bwd_kernel, eps, tile)
    num_sums = 0 if scale_D is None else 1
    job = Sweep(kernel, tile, config, 2, num_sums, interpret, "rms_norm_backward")
    dx_RD, sums = sweep(job, (x_RD, dy_RD), (scale_D,))
    return dx_RD.reshape(x.shape), None if scale_D is None else sums[0].astype(scale_D.dtype)


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _tile(x_RD: Array, config: sizes.Config) -> Tile:
    tile = sizes.tile_for(x_RD.shape[-1], x_RD.dtype.itemsize, MAX_PER_THREAD, config)
    assert tile is not None, "unsupported() lets no such call through"
    return tile


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _rms_norm(
    x: Array, scale_D: Array | None, eps: float, interpret: Interpret, config: sizes.Config
) -> Array:
    return _fwd(x, scale_D, eps, interpret, config)


def _forward(
    x: Array, scale_D: Array | None, eps: float, interpret: Interpret, config: sizes.Config
) -> tuple[Array, tuple[Array, Array | None]]:
    # Kept as it came: reshaped it would be another array, kept beside it.
    return _fwd(x, scale_D, eps, interpret, config), (x, scale_D)


def _backward(
    eps: float,
    interpret: Interpret,
    config: sizes.Config,
    kept: tuple[Array, Array | None],
    dy: Array,
) -> tuple[Array, Array | None]:
    x, scale_D = kept
    return _bwd(x, dy, scale_D, eps, interpret, config)


_rms_norm.defvjp(_forward, _backward)


def rms_norm_pallas(
    x: Array, scale: Array | None, *, eps: float, config: sizes.Config | None = None
) -> Array:
    """Runs the kernels on a checked call that they support: x [*B, D], at least one row."""
    config = config or sizes.chosen("rms_norm", x)
    interpret = dispatch.current_target().interpret
    return _rms_norm(x, scale, eps, interpret, config)
