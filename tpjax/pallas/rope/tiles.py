# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Heads in shared memory and registers: how a tile of tokens and heads is dealt to a warpgroup.

A tile is r tokens and h heads. Shared memory holds their features in cuts [r, h, 1, W] of
neighbouring columns, each contiguous; registers in parts [r, h, 1, W] of float32, which a head's
pairs divide evenly into. (The axis of 1 keeps Mosaic from swizzling a cut: copies cannot.)

    half         a column is a feature, a cut is a part; cut i turns with cut i + F / W
    interleaved  a column is a 32-bit word of two 16-bit features, a pair; a cut is two parts, the
                 low and the high halves, which turn with each other

A head lies in lanes of one warp, `VECTOR` neighbouring columns in each, and in every part in the
same ones: a sum over its features is shuffles, and the two features of a pair meet in one thread.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
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
"""Neighbouring columns in one lane."""
MAX_BOX = 256
"""TMA moves boxes of at most this many elements along an axis."""


@dataclass(frozen=True)
class Config:
    """Sizes of one launch; they change speed, never meaning."""

    tile_elements: int = 2048
    """Elements of a tile, as far as whole heads allow."""
    num_slots: int = 4
    """Tiles in flight in one block; at least 2."""
    blocks_per_sm: int = 6
    """Blocks on one SM, as far as its shared memory allows."""


CONFIGS = (
    Config(),
    Config(tile_elements=1024, num_slots=6, blocks_per_sm=8),
    Config(tile_elements=4096, num_slots=3, blocks_per_sm=4),
)
"""Worth trying."""


@dataclass(frozen=True)
class Head:
    """How the features of one head are cut."""

    features: int
    """D."""
    num_pairs: int
    """F, that turn."""
    interleaved: bool

    @property
    def columns(self) -> int:
        """Of a head: features, or words of two of them."""
        return self.features // 2 if self.interleaved else self.features

    @property
    def width(self) -> int:
        """W, of a cut: what divides both the columns and the pairs.

        There are at least two cuts. A whole head would be contiguous in device memory, and so a
        tile of them, which is then not cut off at the end of an axis but at that of the array.
        """
        whole = self.num_pairs == self.columns
        return self.columns // 2 if whole else math.gcd(self.columns, self.num_pairs)

    @property
    def num_cuts(self) -> int:
        """Cuts of a head."""
        return self.columns // self.width

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The parts that turn with each other."""
        count = self.num_pairs // self.width
        step, apart = (2, 1) if self.interleaved else (1, count)
        return [(step * i, step * i + apart) for i in range(count)]

    @property
    def lanes(self) -> int:
        """Lanes that hold one head: as many as deal out a cut evenly."""
        return math.gcd(LANES, self.width // VECTOR)

    def to_parts(self, vector_D: Array) -> Array:
        """Returns a vector [D] as the parts see it: [parts, W]."""
        if not self.interleaved:
            return vector_D.reshape(-1, self.width)
        return vector_D.reshape(-1, self.width, 2).swapaxes(1, 2).reshape(-1, self.width)

    def from_parts(self, parts: Array) -> Array:
        """Returns the vector [D] that `to_parts` took apart."""
        if not self.interleaved:
            return parts.reshape(-1)
        return parts.reshape(-1, 2, self.width).swapaxes(1, 2).reshape(-1)


@dataclass(frozen=True)
class Tile:
    """A tile of tokens and heads, and the smallest part of it that gives every thread work."""

    head: Head
    tokens: int
    """r."""
    heads: int
    """h."""
    unit: tuple[int, int]
    """Tokens and heads in which a thread holds one vector of each part: powers of 2."""

    @property
    def layout(self) -> Any:
        """Where the elements of a part live: warp, lane, place in a vector."""
        unit_tokens, unit_heads = self.unit
        rows = LANES // self.head.lanes  # of one warp: heads of one token first
        lane_heads = min(unit_heads, rows)
        chunk = self.head.lanes * VECTOR
        inner = rows // lane_heads, lane_heads, 1, chunk
        tiles = ((unit_tokens, unit_heads, 1, chunk), inner, (1, 1, 1, VECTOR))
        return _mgpu.tiled_layout(tiles, warp_dims=(-12, -11), lane_dims=(-8, -7, -5))

    def load(self, cuts: Sequence[Any], dtype: Any) -> list[Array]:
        """Returns the parts of a tile of the dtype, in float32."""
        values = [plgpu.load(ref, layout=self.layout, optimized=False) for ref in cuts]
        if self.head.interleaved:
            return [half for word in values for half in _halves(word, dtype)]
        return [x.astype(jnp.float32) for x in values]

    def store(self, cuts: Sequence[Any], parts: list[Array], dtype: Any) -> None:
        """Rounds parts to the dtype and puts them into their cuts."""
        if self.head.interleaved:
            pairs = zip(parts[::2], parts[1::2], strict=True)
            values = [_word(low, high, dtype) for low, high in pairs]
        else:
            values = [x.astype(dtype) for x in parts]
        for ref, x in zip(cuts, values, strict=True):
            put(ref, x)

    def load_angles(self, ref: Any) -> list[tuple[Array, Array]]:
        """Returns cosine and sine for each pair of parts, from [r, 2F / W, W] in shared memory."""
        layout, count = self.layout.reduce(1), len(self.head.pairs)
        rows = (ref.at[:, pl.ds(i, 1)] for i in range(2 * count))
        tables = [
            self.spread(plgpu.load(row, layout=layout, optimized=False), (0, 2, 3)) for row in rows
        ]
        return list(zip(tables[:count], tables[count:], strict=True))

    def load_vectors(self, ref: Any) -> list[Array]:
        """Returns vectors [parts, W] in device memory, each spread over tokens and heads."""
        layout = self.layout.reduce((0, 1, 2))
        vectors = (
            plgpu.load(ref.at[i], layout=layout, optimized=False) for i in range(ref.shape[0])
        )
        return [self.spread(v, (3,)) for v in vectors]

    def zeros(self) -> Array:
        """Returns zeros of the shape of a `folded` part."""
        shape = (*self.unit, 1, self.head.width)
        return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), self.layout)

    def mean(self, parts: Sequence[Array]) -> Array:
        """Returns the mean over the features of each head, spread over a part."""
        total = sum(parts[1:], start=parts[0])
        sums = plgpu.layout_cast(total.sum(3), self.layout.reduce(3))
        return self.spread(sums / self.head.features, (0, 1, 2))

    def spread(self, x: Array, axes: tuple[int, ...]) -> Array:
        """Returns x broadcast to a part."""
        shape = (self.tokens, self.heads, 1, self.head.width)
        return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, axes), self.layout)

    def folded(self, x: Array) -> Array:
        """Returns the sum of a part's units: what a thread can add up by itself."""
        unit_tokens, unit_heads = self.unit
        starts = product(range(0, self.tokens, unit_tokens), range(0, self.heads, unit_heads))
        width = self.head.width
        units = [
            lax.slice(x, (t, h, 0, 0), (t + unit_tokens, h + unit_heads, 1, width))
            for t, h in starts
        ]
        units = [plgpu.layout_cast(unit, self.layout) for unit in units]
        while len(units) > 1:
            pairs = zip(units[::2], units[1::2], strict=False)
            units = [a + b for a, b in pairs] + units[len(units) // 2 * 2 :]
        return units[0]

    def sum_of_unit(self, ref: Any) -> Array:
        """Returns the sum over tokens and heads of a unit in shared memory: [W]."""
        layout = self.layout.reduce((0, 1, 2))
        total = plgpu.load(ref.at[0, 0, 0], layout=layout, optimized=False)
        for token, head in list(np.ndindex(*self.unit))[1:]:
            total = total + plgpu.load(ref.at[token, head, 0], layout=layout, optimized=False)
        return total


def put(ref: Any, x: Array) -> None:
    """Stores a tile into shared memory as it is laid out, even where lanes want the same bank."""
    if hasattr(plgpu, "store"):  # JAX 0.12; before, a plain store falls back to this by itself
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x


def tile_for(head: Head, tokens: int, heads: int, config: Config) -> Tile:
    """Returns the tile for arrays of so many tokens and heads."""
    at_once = WARPS * LANES // head.lanes
    unit_heads = min(at_once, 1 << (heads - 1).bit_length())
    unit_tokens = at_once // unit_heads
    units = max(1, config.tile_elements // (at_once * head.features))
    across = -(-heads // unit_heads)  # units that cover all heads
    rounds = -(-across // min(units, across, MAX_BOX // unit_heads))
    wide = -(-across // rounds)
    deep = min(max(1, units // wide), -(-tokens // unit_tokens), MAX_BOX // unit_tokens)
    tile = Tile(head, deep * unit_tokens, wide * unit_heads, (unit_tokens, unit_heads))
    if unit_tokens == 1 < deep:  # MLIR makes of a slice of one token what Mosaic has no layout for
        return replace(tile, tokens=deep // 2 * 2, unit=(2, unit_heads // 2))
    return tile


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
