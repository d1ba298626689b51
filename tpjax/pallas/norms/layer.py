# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The kernels of `layer_norm` on Hopper: one pass over x forward, one over x and dy backward.

    forward    z = (x - mean(x)) rstd                rstd = 1 / sqrt(mean((x - mean(x))^2) + eps)
               y = z scale + bias
    backward   g = dy scale
               dx = rstd (g - mean(g) - z mean(g z))
               dscale = sum over rows of dy z        dbias = sum over rows of dy

Letters and numerics as in `rms`: float32 but for x, y, dy and dx, each rounded once; the backward
pass keeps x, scale and bias alone and forms the statistics again; sums over rows keep their order.
Limits: `unsupported`. Bytes: 2 R D forward, 3 R D backward, each once.

Source: Ba, Kiros and Hinton 2016, equation 3, and its derivative.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from tpjax.core.operator import Interpret, Key
from tpjax.pallas import dispatch
from tpjax.pallas.norms import config as sizes
from tpjax.pallas.norms.launch import Sweep, sweep
from tpjax.pallas.norms.tiles import Tile

MAX_PER_THREAD = 64
"""The backward pass keeps the gradients of scale and bias in registers, and little else."""


class _Kept(NamedTuple):
    """What the backward pass needs, as it came: reshaped it would be kept twice; bias for dtype."""

    x: Array
    scale_D: Array | None
    bias_D: Array | None


def unsupported(key: Key) -> str | None:
    """Returns why the kernels cannot run the call, or None."""
    return sizes.unsupported(key, MAX_PER_THREAD)


def _normalised(tile: Tile, x: Array, eps: float) -> tuple[Array, Array]:
    """Returns z, and rstd spread over the tile."""
    centred = x - tile.mean(x)
    rstd = lax.rsqrt(tile.mean(jnp.square(centred)) + eps)
    return centred * rstd, rstd


def _fwd_kernel(
    eps: float,
    has_scale: bool,
    tile: Tile,
    vectors: Sequence[Array],
    buffers: Sequence[Any],
    sums: list[Array],
) -> list[Array]:
    """Turns the x in a tile into y."""
    (slot,) = buffers
    y, _ = _normalised(tile, tile.load(slot), eps)
    for scale in vectors[:has_scale]:
        y = y * scale
    for bias in vectors[has_scale:]:
        y = y + bias
    tile.store(slot, y)
    return sums


# One jit for equal calls: the layers of a model lower and assemble the kernel once.
@partial(jax.jit, static_argnames=("eps", "interpret", "config"))
def _fwd(kept: _Kept, eps: float, interpret: Interpret, config: sizes.Config) -> Array:
    """Launches the forward kernel."""
    x, *vectors = kept
    x_RD = _rows(x)
    tile = _tile(x_RD, config)
    kernel = partial(_fwd_kernel, eps, kept.scale_D is not None, tile)
    job = Sweep(kernel, tile, config, 1, 0, interpret, "layer_norm")
    return sweep(job, (x_RD,), vectors)[0].reshape(x.shape)


def _bwd_kernel(
    eps: float,
    grads: tuple[bool, bool],
    tile: Tile,
    vectors: Sequence[Array],
    buffers: Sequence[Any],
    sums: list[Array],
) -> list[Array]:
    """Turns the dy in a tile into dx, and adds its share of the `grads` of scale and bias."""
    x, dy = (tile.load(slot) for slot in buffers)
    z, rstd = _normalised(tile, x, eps)
    g = dy
    for scale in vectors:
        g = g * scale
    tile.store(buffers[-1], rstd * (g - tile.mean(g) - z * tile.mean(g * z)))
    shares = [share for share, asked in zip((dy * z, dy), grads, strict=True) if asked]
    return [total + share for total, share in zip(sums, shares, strict=True)]


@partial(jax.jit, static_argnames=("eps", "interpret", "config"))
def _bwd(kept: _Kept, dy: Array, eps: float, interpret: Interpret, config: sizes.Config) -> _Kept:
    """Launches the backward kernel."""
    x, *vectors = kept
    x_RD, dy_RD = _rows(x), _rows(dy)
    tile = _tile(x_RD, config)
    grads = (kept.scale_D is not None, kept.bias_D is not None)
    kernel = partial(_bwd_kernel, eps, grads, tile)
    job = Sweep(kernel, tile, config, 2, sum(grads), interpret, "layer_norm_backward")
    dx_RD, sums = sweep(job, (x_RD, dy_RD), (kept.scale_D,))
    totals = iter(sums)
    gradients = [None if v is None else next(totals).astype(v.dtype) for v in vectors]
    return _Kept(dx_RD.reshape(x.shape), *gradients)


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _tile(x_RD: Array, config: sizes.Config) -> Tile:
    tile = sizes.tile_for(x_RD.shape[-1], x_RD.dtype.itemsize, MAX_PER_THREAD, config)
    assert tile is not None, "unsupported() lets no such call through"
    return tile


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _layer_norm(kept: _Kept, eps: float, interpret: Interpret, config: sizes.Config) -> Array:
    return _fwd(kept, eps, interpret, config)


def _forward(
    kept: _Kept, eps: float, interpret: Interpret, config: sizes.Config
) -> tuple[Array, _Kept]:
    return _fwd(kept, eps, interpret, config), kept


def _backward(
    eps: float, interpret: Interpret, config: sizes.Config, kept: _Kept, dy: Array
) -> tuple[_Kept]:
    return (_bwd(kept, dy, eps, interpret, config),)


_layer_norm.defvjp(_forward, _backward)


def layer_norm_pallas(
    x: Array,
    scale: Array | None,
    bias: Array | None,
    *,
    eps: float,
    config: sizes.Config | None = None,
) -> Array:
    """Runs the kernels on a checked call that they support: x [*B, D], at least one row."""
    config = config or sizes.chosen("layer_norm", x)
    interpret = dispatch.current_target().interpret
    return _layer_norm(_Kept(x, scale, bias), eps, interpret, config)
