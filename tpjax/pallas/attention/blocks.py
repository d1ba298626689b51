# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Which blocks of keys a tile of queries visits, and which blocks of queries a tile of keys.

The one place that knows where the visible region ends: windows and segment runs will change these
functions and nothing else in the kernels' loops. Positions may be traced integers.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from tpjax.pallas._mgpu import plgpu


@dataclass(frozen=True)
class Region:
    """The visible part of the scores: T x S, causal or full."""

    num_queries: int
    num_keys: int
    is_causal: bool


class Span(NamedTuple):
    """Blocks [start, stop) to visit; of these, [full_start, full_stop) need no mask."""

    start: Any
    stop: Any
    full_start: Any
    full_stop: Any


def _ceil_div(a: Any, b: int) -> Any:
    return (a + (b - 1)) // b if isinstance(a, int) else lax.div(a + (b - 1), jnp.int32(b))


def _floor_div(a: Any, b: int) -> Any:
    return a // b if isinstance(a, int) else lax.div(a, jnp.int32(b))


def key_blocks(first_query: Any, rows: int, block: int, region: Region) -> Span:
    """Returns the key blocks that queries [first_query, first_query + rows) visit."""
    stop, full = _ceil_div(region.num_keys, block), region.num_keys // block
    if not region.is_causal:
        return Span(0, stop, 0, full)
    last = _ceil_div(first_query + rows, block)
    all_seen = _floor_div(first_query + 1, block)
    return Span(0, jnp.minimum(last, stop), 0, jnp.minimum(all_seen, full))


def query_blocks(first_key: Any, rows: int, block: int, region: Region) -> Span:
    """Returns the query blocks that keys [first_key, first_key + rows) are visited by.

    Queries beyond the last need no mask: all of theirs is read as zero, so they add nothing. Keys
    beyond the last need none either: what they receive is written nowhere.
    """
    stop = _ceil_div(region.num_queries, block)
    if not region.is_causal:
        return Span(0, stop, 0, stop)
    start = jnp.minimum(_floor_div(first_key, block), stop)
    seen_by_all = jnp.minimum(_ceil_div(first_key + rows - 1, block), stop)
    return Span(start, stop, seen_by_all, stop)


def visible(
    first_query: Any, first_key: Any, shape: tuple[int, int], region: Region, *, query_axis: int
) -> Array:
    """Returns the mask of one tile of scores that crosses an edge of the visible region."""

    def position(axis: int) -> Array:
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)

    key = position(1 - query_axis) + first_key
    inside = key < region.num_keys
    if region.is_causal:
        inside = inside & (key <= position(query_axis) + first_query)
    return inside


class Order(NamedTuple):
    """How a grid index becomes a tile: heads in sections, in one the longest tiles first."""

    num_tiles: int
    section: int
    """Heads (of all sequences) whose tiles run together, so that what they share stays in L2."""
    longest_last: bool

    def locate(self, index: Array) -> tuple[Array, Array]:
        """Returns (head counted over all sequences, tile) of a grid index."""
        section, rest = lax.div(index, self._each), lax.rem(index, self._each)
        rank, head = lax.div(rest, jnp.int32(self.section)), lax.rem(rest, jnp.int32(self.section))
        tile = self.num_tiles - 1 - rank if self.longest_last else rank
        return section * self.section + head, tile

    @property
    def _each(self) -> Array:
        return jnp.int32(self.num_tiles * self.section)


L2_BYTES = 32 << 20
"""Keys and values that the tiles in flight may share without being read again from memory."""


def tile_order(
    num_tiles: int, num_heads: int, group: int, head_bytes: int, longest_last: bool
) -> Order:
    """Returns the order for heads that, `group` by `group`, share `head_bytes` of operands."""
    most = min(num_heads, max(1, L2_BYTES // head_bytes) * group)
    section = next(n for n in range(most, 0, -1) if num_heads % n == 0)
    return Order(num_tiles, section, longest_last)
