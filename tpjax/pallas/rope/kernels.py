# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The kernels of `rotary_embedding` and `rms_norm_rope` on Hopper: one pass each way.

    rotary_embedding   y = R x                         dx = R^T dy, the inverse rotation
    rms_norm_rope      y = R (x rstd scale)            g' = R^T dy,  g = g' scale
                                                       dx = rstd (g - x rstd^2 mean(g x))
                                                       dscale = sum over tokens, heads of g' x rstd

R turns the pairs of a head by its token's angles; rstd = 1 / sqrt(mean(x^2) + eps) over D.

Letters: B batch, T tokens, H heads, D features, F pairs, W features of a part (`tiles`). Numerics:
float32 but for x, y, dy and dx, each rounded once. XLA makes the cosines and sines [T, 2F], read
once for all heads of a tile. The backward pass keeps x, scale and the angles, and forms rstd again.
Limits: `unsupported`. Bytes: 2 B T H D forward and backward, 3 B T H D backward with the norm.

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
from tpjax.core.rotary import joined, pairs_of, rotary_tables
from tpjax.pallas import dispatch
from tpjax.pallas.rope.launch import Sweep, sweep
from tpjax.pallas.rope.tiles import CONFIGS, Config, Tile, tile_for
from tpjax.pallas.tuning import config_for

DTYPES = ("bfloat16", "float16", "float32")
MAX_FEATURES = 256
QUANTUM = 16
"""Features and pairs come in multiples: of a vector, and of what TMA aligns to."""


class Plan(NamedTuple):
    """Everything static about a call; hashable."""

    eps: float | None
    """None: no norm."""
    num_pairs: int
    interleaved: bool
    config: Config
    interpret: Interpret


def unsupported(key: Key) -> str | None:
    """Returns why the kernels cannot run the call, in words that follow "no kernel for this call:"."""
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
    if key.option("interleaved") and x.dtype.itemsize != 2:
        return f"interleaved features must be of 16 bits, two of them one word; x is {name}"
    return None


def _turned(parts: Sequence[Array], cos: Array, sin: Array) -> list[Array]:
    """Returns the parts, the first two turned."""
    first, second, *rest = parts
    return [first * cos - second * sin, second * cos + first * sin, *rest]


def _turn(dtype: Any, back: bool, tile: Tile, spread: Any, buffers: Any, angles: Any, sums: Any):
    """Turns the pairs of a tile where they are; what does not turn stays as it is."""
    del spread
    (slot,) = buffers
    first, second, *_ = tile.load(slot, dtype)
    cos, sin = tile.load_angles(angles)
    tile.store(slot, _turned((first, second), cos, -sin if back else sin), dtype)
    return sums


def _rstd(tile: Tile, x: Sequence[Array], eps: float) -> Array:
    return lax.rsqrt(tile.mean([jnp.square(part) for part in x]) + eps)


def _norm_turn(
    eps: float, dtype: Any, tile: Tile, scales: Any, buffers: Any, angles: Any, sums: Any
):
    """Turns the x in a tile into y."""
    (slot,) = buffers
    x = tile.load(slot, dtype)
    rstd = _rstd(tile, x, eps)
    normed = [part * tile.spread(rstd, part.shape[2], (0, 1)) for part in x]
    if scales:
        normed = [part * scale for part, scale in zip(normed, scales, strict=True)]
    tile.store(slot, _turned(normed, *tile.load_angles(angles)), dtype)
    return sums


def _norm_turn_back(
    eps: float, dtype: Any, tile: Tile, scales: Any, buffers: Any, angles: Any, sums: Any
):
    """Turns the dy in a tile into dx, and adds its share of dscale."""
    x, dy = (tile.load(slot, dtype) for slot in buffers)
    cos, sin = tile.load_angles(angles)
    g = _turned(dy, cos, -sin)
    rstd = _rstd(tile, x, eps)
    rstds = [tile.spread(rstd, part.shape[2], (0, 1)) for part in x]
    if sums:
        terms = (tile.folded(a * b * c) for a, b, c in zip(g, x, rstds, strict=True))
        sums = [total + term for total, term in zip(sums, terms, strict=True)]
    if scales:
        g = [part * scale for part, scale in zip(g, scales, strict=True)]
    pull = tile.mean([a * b for a, b in zip(g, x, strict=True)]) * rstd * rstd
    pulls = (tile.spread(pull, part.shape[2], (0, 1)) for part in x)
    dx = [r * (a - b * p) for r, a, b, p in zip(rstds, g, x, pulls, strict=True)]
    tile.store(buffers[-1], dx, dtype)
    return sums


def _run(
    plan: Plan, back: bool, arrays: Sequence[Array], angles: Array, scale_D: Array | None
) -> tuple[Array, Array | None]:
    """Launches one pass on arrays [B, T, H, D]; returns the result and dscale of a backward one."""
    _, tokens, heads, features = arrays[0].shape
    dtype = arrays[0].dtype
    size = tokens, heads, features, plan.num_pairs, plan.interleaved
    tile = tile_for(*size, plan.config)
    step, name = partial(_turn, dtype, back, tile), "rotary_embedding"
    if plan.eps is not None:
        kernel = _norm_turn_back if back else _norm_turn
        step, name = partial(kernel, plan.eps, dtype, tile), "rms_norm_rope"
    vectors: list[Array] = []
    if scale_D is not None:
        first, second, rest = pairs_of(scale_D, plan.num_pairs, plan.interleaved)
        rests = [rest[0::2], rest[1::2]] if plan.interleaved else [rest]
        vectors = [v for v in (first, second, *rests) if v.shape[0]]
    name += "_backward" if back else ""
    with_sums = back and bool(vectors)
    job = Sweep(step, tile, plan.config, len(arrays), with_sums, plan.interpret, name)
    words = [_words(x) if plan.interleaved else x for x in arrays]
    result, sums = sweep(job, words, angles, vectors)
    if plan.interleaved:
        result = lax.bitcast_convert_type(result, dtype).reshape(arrays[0].shape)
    if not with_sums:
        return result, None
    rest = jnp.stack(sums[2:], -1).reshape(-1) if plan.interleaved and sums[2:] else None
    rest = rest if rest is not None else jnp.concatenate([*sums[2:], jnp.zeros(0, jnp.float32)])
    return result, joined(sums[0], sums[1], rest, plan.interleaved).astype(scale_D.dtype)


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
    kept = (x if plan.eps is not None else None, scale_D, angles)
    return _rope(plan, x, scale_D, angles), kept


def _backward(plan: Plan, kept: Any, dy: Array) -> tuple[Array, Array | None, Array]:
    x, scale_D, angles = kept
    arrays = (dy,) if x is None else (x, dy)
    dx, dscale = _launched(plan, True, arrays, angles, scale_D)
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


def _called(
    op: str,
    eps: float | None,
    operands: tuple[Array, Array | None, Array, Array],
    interleaved: bool,
    amplitude: float,
    config: Config | None,
) -> Array:
    x, scale, positions, frequencies = operands
    num_pairs = frequencies.shape[0]
    x_BTHD, angles = _prepared(x, positions, frequencies, amplitude)
    shapes = (*x_BTHD.shape, num_pairs, interleaved, x.dtype.name)
    config = config or config_for(op, shapes, CONFIGS, CONFIGS[0])
    plan = Plan(eps, num_pairs, interleaved, config, dispatch.current_target().interpret)
    return _rope(plan, x_BTHD, scale, angles).reshape(x.shape)


def rotary_embedding_pallas(
    x: Array,
    positions: Array,
    frequencies: Array,
    *,
    interleaved: bool,
    amplitude: float,
    config: Config | None = None,
) -> Array:
    """Runs the kernel on a checked call that it supports: x [*B, T, H, D], not empty."""
    operands = (x, None, positions, frequencies)
    return _called("rotary_embedding", None, operands, interleaved, amplitude, config)


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
    if scale is not None:
        scale = scale.astype(jnp.float32) + scale_offset
    operands = (x, scale, positions, frequencies)
    return _called("rms_norm_rope", eps, operands, interleaved, amplitude, config)
