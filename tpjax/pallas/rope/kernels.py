# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The kernels of `rms_norm_rope` on Hopper: one pass each way.

    y = R (x rstd scale)            g' = R^T dy,  g = g' scale
                                    dx = rstd (g - x rstd^2 mean(g x))
                                    dscale = sum over tokens and heads of g' x rstd

R turns the pairs of a head by its token's angles; rstd = 1 / sqrt(mean(x^2) + eps) over D.

Letters: B batch, T tokens, H heads, D features, F pairs, W features of a part (`tiles`). Numerics:
float32 but for x, y, dy and dx, each rounded once. XLA makes the cosines and sines [T, 2F], read
once for all heads of a tile. The backward pass keeps x, scale and the angles, and forms rstd again.
Limits: `unsupported`. Bytes: 2 B T H D forward, 3 B T H D backward.

Source: Su et al. 2021; Zhang and Sennrich 2019, equation 4; and their derivatives.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tpjax.core.operator import Interpret, Key
from tpjax.core.rotary import rotary_tables
from tpjax.pallas import dispatch
from tpjax.pallas.rope.launch import Sweep, sweep
from tpjax.pallas.rope.tiles import CONFIGS, Config, Head, Tile, tile_for
from tpjax.pallas.tuning import config_for

DTYPES = ("bfloat16", "float16", "float32")
MAX_FEATURES = 256
QUANTUM = 16
"""Features and pairs come in multiples: of a vector, and of what TMA aligns to."""
MAX_CUTS = 8
"""Copies that a tile of one array takes."""


class Plan(NamedTuple):
    """Everything static about a call; hashable."""

    eps: float
    num_pairs: int
    interleaved: bool
    config: Config
    interpret: Interpret


def unsupported(key: Key) -> str | None:
    """Returns why the kernels cannot run the call, or None."""
    x, num_pairs = key.aval("x"), key.aval("frequencies").shape[0]
    name, features = x.dtype.name, x.shape[-1]
    if name not in DTYPES:
        return f"x must be of dtype {', '.join(DTYPES)}; it is {name}"
    for operand, aval in key.operands:
        if aval is not None and aval.dtype == np.float64:
            return f"{operand} must not be float64, the angles and statistics are float32"
    if features % QUANTUM or features > MAX_FEATURES:
        return f"heads must have a multiple of {QUANTUM} features up to {MAX_FEATURES}; {features}"
    if num_pairs % QUANTUM:
        return f"pairs that turn must be a multiple of {QUANTUM}; there are {num_pairs}"
    head = Head(features, num_pairs, key.option("interleaved"))
    if head.num_cuts > MAX_CUTS:
        return f"the {features} features of a head would be {head.num_cuts} cuts of {head.width}"
    if key.option("interleaved") and x.dtype.itemsize != 2:
        return f"interleaved features must be of 16 bits, two of them one word; x is {name}"
    return None


def _turned(
    tile: Tile, parts: Sequence[Array], angles: Sequence[tuple[Array, Array]], back: bool
) -> list[Array]:
    """Returns the parts, pairs turned, or turned back."""
    turned = list(parts)
    for (i, j), (cos, sin) in zip(tile.head.pairs, angles, strict=True):
        first, second = parts[i], parts[j]
        if back:
            turned[i], turned[j] = first * cos + second * sin, second * cos - first * sin
        else:
            turned[i], turned[j] = first * cos - second * sin, second * cos + first * sin
    return turned


def _rstd(tile: Tile, x: Sequence[Array], eps: float) -> Array:
    return lax.rsqrt(tile.mean([part * part for part in x]) + eps)


def _norm_turn(eps: float, dtype: Any, tile: Tile, scales: Any, cuts: Any, angles: Any, sums: Any):
    """Turns the x in a tile into y."""
    x = tile.load(cuts[0], dtype)
    rstd = _rstd(tile, x, eps)
    normed = [part * rstd for part in x]
    if scales:
        normed = [part * scale for part, scale in zip(normed, scales, strict=True)]
    tile.store(cuts[0], _turned(tile, normed, tile.load_angles(angles), False), dtype)
    return sums


def _norm_turn_back(
    eps: float, dtype: Any, tile: Tile, scales: Any, cuts: Any, angles: Any, sums: Any
):
    """Turns the dy in a tile into dx, and adds its share of dscale."""
    x, dy = (tile.load(each, dtype) for each in cuts)
    g = _turned(tile, dy, tile.load_angles(angles), True)
    rstd = _rstd(tile, x, eps)
    if sums:
        terms = (tile.folded(a * b * rstd) for a, b in zip(g, x, strict=True))
        sums = [total + term for total, term in zip(sums, terms, strict=True)]
    if scales:
        g = [part * scale for part, scale in zip(g, scales, strict=True)]
    pull = tile.mean([a * b for a, b in zip(g, x, strict=True)]) * rstd * rstd
    tile.store(cuts[1], [rstd * (a - b * pull) for a, b in zip(g, x, strict=True)], dtype)
    return sums


def _run(
    plan: Plan, back: bool, arrays: Sequence[Array], angles: Array, scale_D: Array | None
) -> tuple[Array, Array | None]:
    """Launches one pass on arrays [B, T, H, D]; returns the result and dscale of a backward one."""
    _, tokens, heads, features = arrays[0].shape
    dtype = arrays[0].dtype
    head = Head(features, plan.num_pairs, plan.interleaved)
    tile = tile_for(head, tokens, heads, plan.config)
    step = partial(_norm_turn_back if back else _norm_turn, plan.eps, dtype, tile)
    name = "rms_norm_rope_backward" if back else "rms_norm_rope"
    with_sums = back and scale_D is not None
    job = Sweep(step, tile, plan.config, len(arrays), with_sums, plan.interpret, name)
    words = [_words(x) if plan.interleaved else x for x in arrays]
    scales = None if scale_D is None else head.to_parts(scale_D)
    result, sums = sweep(job, words, angles, scales)
    if plan.interleaved:
        result = lax.bitcast_convert_type(result, dtype).reshape(arrays[0].shape)
    return result, None if sums is None else head.from_parts(sums)


def _words(x: Array) -> Array:
    """Returns pairs of neighbouring 16-bit features as words."""
    pairs = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    return lax.bitcast_convert_type(pairs, jnp.uint32)


# One jit for equal calls: the layers of a model lower and assemble the kernel once.
_launched = jax.jit(_run, static_argnums=(0, 1))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rope(plan: Plan, x: Array, scale_D: Array | None, angles: Array) -> Array:
    return _launched(plan, False, (x,), angles, scale_D)[0]


def _forward(plan: Plan, x: Array, scale_D: Array | None, angles: Array) -> tuple[Array, Any]:
    return _rope(plan, x, scale_D, angles), (x, scale_D, angles)


def _backward(plan: Plan, kept: Any, dy: Array) -> tuple[Array, Array | None, Array]:
    x, scale_D, angles = kept
    dx, dscale = _launched(plan, True, (x, dy), angles, scale_D)
    return dx, dscale, jnp.zeros_like(angles)  # nobody asks: frequencies have no gradient


_rope.defvjp(_forward, _backward)


def _prepared(x: Array, positions: Array, frequencies: Array, amplitude: float) -> Any:
    """Returns x as [B, T, H, D] and its angles [T, 2F]: examples of own positions are one."""
    shape = x.shape[-3:]
    if math.prod(positions.shape) > shape[0]:
        positions = jnp.broadcast_to(positions, x.shape[:-2])
        shape = (positions.size, *shape[1:])
    cos, sin = rotary_tables(positions.reshape(-1), frequencies, amplitude, jnp.float32)
    return x.reshape(-1, *shape), jnp.concatenate([cos, sin], -1)


def rms_norm_rope_pallas(
    x: Array,
    scale: Array | None,
    positions: Array,
    frequencies: Array,
    *,
    eps: float,
    scale_offset: float,
    interleaved: bool,
    amplitude: float,
    config: Config | None = None,
) -> Array:
    """Runs the kernels on a checked call that they support: x [*B, T, H, D], not empty."""
    num_pairs = frequencies.shape[0]
    x_BTHD, angles = _prepared(x, positions, frequencies, amplitude)
    shapes = (*x_BTHD.shape, num_pairs, interleaved, x.dtype.name)
    sizes = config or config_for("rms_norm_rope", shapes, CONFIGS, CONFIGS[0])
    plan = Plan(eps, num_pairs, interleaved, sizes, dispatch.current_target().interpret)
    if scale is not None:
        scale = scale.astype(jnp.float32) + scale_offset
    return _rope(plan, x_BTHD, scale, angles).reshape(x.shape)
