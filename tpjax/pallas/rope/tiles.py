# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Heads in shared memory and registers: how a tile of tokens and heads is dealt to a warpgroup.

A tile [r, h, D] holds r tokens and h heads as they lie in device memory. Registers hold it in parts
[r, h, W] of float32: the first features of the pairs, the second ones, and those that do not turn.
A head lies in lanes of one warp, `vector` neighbouring features in each, and in every part in the
same ones: a sum over its features is shuffles, and the two features of a pair meet in one thread.

    half         parts are x[:F], x[F:2F], x[2F:]
    interleaved  a pair of 16-bit features is one 32-bit word; parts are low and high halves of
                 words [:F], and of words [F:]
"""

import math
from dataclasses import dataclass
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tpjax.pallas import _mgpu

WARPS = 4
LANES = 32
VECTOR = 4
"""Neighbouring features in one lane."""
MAX_BOX = 256
"""TMA moves boxes of at most this many elements along an axis."""


@dataclass(frozen=True)
class Config:
    """Sizes of one launch; they change speed, never meaning."""

    tile_elements: int = 4096
    """Elements of a tile, as far as whole heads allow."""
    num_slots: int = 3
    """Tiles in flight in one block; at least 2."""
    blocks_per_sm: int = 4
    """Blocks on one SM, as far as its shared memory allows."""


CONFIGS = (
    Config(),
    Config(tile_elements=2048, num_slots=4, blocks_per_sm=6),
    Config(tile_elements=8192, num_slots=3, blocks_per_sm=3),
)
"""Worth trying."""


@dataclass(frozen=True)
class Tile:
    """A tile of tokens and heads, and the smallest part of it that gives every thread work."""

    tokens: int
    """r."""
    heads: int
    """h."""
    features: int
    """D, of a head."""
    num_pairs: int
    """F, that turn."""
    interleaved: bool
    unit: tuple[int, int]
    """Tokens and heads of the part of the tile in which a thread holds one vector: powers of 2."""

    @property
    def columns(self) -> int:
        """Features of a head, or words of two of them."""
        return self.features // 2 if self.interleaved else self.features

    @property
    def widths(self) -> tuple[int, ...]:
        """W of each part."""
        return widths_of(self.features, self.num_pairs, self.interleaved)

    @property
    def lanes(self) -> int:
        """Lanes that hold one head."""
        return lanes_of(self.widths)

    @property
    def layout(self) -> Any:
        """Where the elements of a part live: warp, lane, place in a vector."""
        unit_tokens, unit_heads = self.unit
        warp_heads = min(WARPS, unit_heads)
        chunk = self.lanes * VECTOR
        inner = unit_tokens // (WARPS // warp_heads), unit_heads // warp_heads, chunk
        tiles = ((unit_tokens, unit_heads, chunk), inner, (1, 1, VECTOR))
        return _mgpu.tiled_layout(tiles, warp_dims=(-9, -8), lane_dims=(-6, -5, -4))

    def load(self, ref: Any, dtype: Any) -> list[Array]:
        """Returns the parts of a tile of the dtype, in shared memory [r, h, D], in float32."""
        if self.interleaved:
            words = (self._load(ref, cut) for cut in self._cuts(self.widths[::2]))
            return [half for word in words for half in _halves(word, dtype)]
        return [self._load(ref, cut).astype(jnp.float32) for cut in self._cuts(self.widths)]

    def store(self, ref: Any, parts: list[Array], dtype: Any) -> None:
        """Rounds parts to the dtype and puts them into a tile in shared memory; the first ones."""
        if self.interleaved:
            words = [_word(*parts[i : i + 2], dtype) for i in range(0, len(parts), 2)]
            widths = self.widths[::2]
        else:
            words, widths = [x.astype(dtype) for x in parts], self.widths
        for cut, word in zip(self._cuts(widths), words, strict=False):
            ref[:, :, pl.ds(*cut)] = word

    def load_angles(self, ref: Any) -> tuple[Array, Array]:
        """Returns cosines and sines [r, 2F] in shared memory, spread over the heads."""
        layout = self.layout.reduce(1)
        cuts = ((i * self.num_pairs, self.num_pairs) for i in range(2))
        cos, sin = (
            plgpu.load(ref.at[:, pl.ds(*cut)], layout=layout, optimized=False) for cut in cuts
        )
        return self.spread(cos, self.num_pairs, (0, 2)), self.spread(sin, self.num_pairs, (0, 2))

    def load_vector(self, ref: Any) -> Array:
        """Returns a vector [W] in device memory, spread over tokens and heads, in float32."""
        layout = self.layout.reduce((0, 1))
        vector = plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)
        return self.spread(vector, vector.shape[0], (2,))

    def zeros(self, width: int) -> Array:
        """Returns zeros of the shape of `folded` parts."""
        return plgpu.layout_cast(jnp.zeros((*self.unit, width), jnp.float32), self.layout)

    def mean(self, parts: list[Array]) -> Array:
        """Returns the mean over the features of each head [r, h]; the first two parts are alike."""
        first, second, *rest = parts
        layout = self.layout.reduce(2)
        total = plgpu.layout_cast((first + second).sum(2), layout)
        for x in rest:
            total = total + plgpu.layout_cast(x.sum(2), layout)
        return total / self.features

    def spread(self, x: Array, width: int, axes: tuple[int, ...]) -> Array:
        """Returns x broadcast to a part of the width."""
        shape = (self.tokens, self.heads, width)
        return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, axes), self.layout)

    def folded(self, x: Array) -> Array:
        """Returns the sum of a part's units: what a thread can add up by itself."""
        unit_tokens, unit_heads = self.unit
        width = x.shape[2]
        units = [
            plgpu.layout_cast(
                lax.slice(x, (t, h, 0), (t + unit_tokens, h + unit_heads, width)), self.layout
            )
            for t in range(0, self.tokens, unit_tokens)
            for h in range(0, self.heads, unit_heads)
        ]
        while len(units) > 1:
            pairs = zip(units[::2], units[1::2], strict=False)
            units = [a + b for a, b in pairs] + units[len(units) // 2 * 2 :]
        return units[0]

    def sum_of_unit(self, ref: Any) -> Array:
        """Returns the sum over tokens and heads of a unit in shared memory: [W]."""
        layout = self.layout.reduce((0, 1))
        total = plgpu.load(ref.at[0, 0], layout=layout, optimized=False)
        for token, head in list(np.ndindex(*self.unit))[1:]:
            total = total + plgpu.load(ref.at[token, head], layout=layout, optimized=False)
        return total

    def _cuts(self, widths: tuple[int, ...]) -> list[tuple[int, int]]:
        """Returns first column and width of neighbouring parts."""
        return [(sum(widths[:i]), width) for i, width in enumerate(widths)]

    def _load(self, ref: Any, cut: tuple[int, int]) -> Array:
        return plgpu.load(ref.at[:, :, pl.ds(*cut)], layout=self.layout, optimized=False)


def widths_of(features: int, num_pairs: int, interleaved: bool) -> tuple[int, ...]:
    """Returns the width of each part of a head."""
    rest = features - 2 * num_pairs
    if not rest:
        return (num_pairs, num_pairs)
    return (num_pairs, num_pairs, *((rest // 2,) * 2 if interleaved else (rest,)))


def lanes_of(widths: tuple[int, ...]) -> int:
    """Returns how many lanes hold a head: as many as deal out every part evenly."""
    return math.gcd(LANES, *(width // VECTOR for width in widths))


def tile_for(
    tokens: int, heads: int, features: int, num_pairs: int, interleaved: bool, config: Config
) -> Tile:
    """Returns the tile for arrays of so many tokens and heads."""
    at_once = WARPS * LANES // lanes_of(widths_of(features, num_pairs, interleaved))
    unit_heads = min(at_once, 1 << (heads - 1).bit_length())
    unit_tokens = at_once // unit_heads
    units = max(1, config.tile_elements // (at_once * features))
    across = -(-heads // unit_heads)  # units that cover all heads
    rounds = -(-across // min(units, across, MAX_BOX // unit_heads))
    wide = -(-across // rounds)
    deep = min(max(1, units // wide), -(-tokens // unit_tokens), MAX_BOX // unit_tokens)
    shape = (deep * unit_tokens, wide * unit_heads)
    return Tile(*shape, features, num_pairs, interleaved, (unit_tokens, unit_heads))


def _halves(word: Array, dtype: Any) -> tuple[Array, Array]:
    """Returns the two 16-bit numbers in each word, the low half first, in float32."""
    if dtype == jnp.bfloat16:  # the upper half of a float32
        low, high = word << jnp.uint32(16), word & jnp.uint32(0xFFFF0000)
        return (lax.bitcast_convert_type(low, jnp.float32),
                lax.bitcast_convert_type(high, jnp.float32))  # fmt: skip
    low, high = (x.astype(jnp.uint16) for x in (word, word >> jnp.uint32(16)))
    return (lax.bitcast_convert_type(low, dtype).astype(jnp.float32),
            lax.bitcast_convert_type(high, dtype).astype(jnp.float32))  # fmt: skip


def _word(low: Array, high: Array, dtype: Any) -> Array:
    """Returns words of two numbers rounded to a 16-bit dtype."""
    low, high = (
        lax.bitcast_convert_type(x.astype(dtype), jnp.uint16).astype(jnp.uint32)
        for x in (low, high)
    )
    return low | (high << jnp.uint32(16))
