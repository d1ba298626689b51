# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Which blocks of keys a tile of queries visits, and which blocks of queries a tile of keys.

The one place that knows where the visible region ends. A query at t stands at p(t) = t + shift and
sees an unbroken reach of keys (`Region.reach`): from p(t) - left to the least of p(t) + right, p(t)
if causal (or the end of the prefix, if that is later) and the last key. Segments cut further
(`within_segments`). Positions may be traced integers, or arrays of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax


class Bounds(NamedTuple):
    """Where one sequence ends; numbers, traced or not, or arrays of them."""

    shift: Any
    """How far a query stands to the right of its index."""
    num_queries: Any
    num_keys: Any
    prefix: Any = None
    """Keys before it are visible in spite of the causal edge; None: there is no prefix."""


class Span(NamedTuple):
    """Blocks [start, stop) to visit; of these, [full_start, full_stop) need no mask.

    At least one block is visited, so that every result is written.
    """

    start: Any
    stop: Any
    full_start: Any
    full_stop: Any


class Reach(NamedTuple):
    """The first and last key that queries see; None: nothing but the array ends there."""

    first: Any
    last: Any


@dataclass(frozen=True)
class Region:
    """The visible part of the scores, as far as it is known when tracing."""

    num_queries: int
    num_keys: int
    is_causal: bool = False
    window: tuple[int, int] | None = None
    """Keys to the left and to the right of its own position that a query sees."""
    bottom_right: bool = False
    """The last query stands at the last key, rather than the first at the first."""

    def bounds(self, queries: Any = None, keys: Any = None, prefix: Any = None) -> Bounds:
        """Returns the bounds of sequences of these lengths; None: as long as the arrays."""
        num_queries = self.num_queries if queries is None else queries
        num_keys = self.num_keys if keys is None else keys
        shift = num_keys - num_queries if self.bottom_right else 0
        return Bounds(shift, num_queries, num_keys, prefix)

    def reach(self, query: Any, bounds: Bounds) -> Reach:
        """Returns which keys queries at these indices see; the last one is -1 if they see none."""
        position, first, last = query + bounds.shift, None, bounds.num_keys - 1
        if self.is_causal:
            ahead = position
            if bounds.prefix is not None:
                ahead = jnp.maximum(ahead, bounds.prefix - 1)
            last = jnp.minimum(ahead, last)
        if self.window is not None:
            left, right = self.window
            last = jnp.minimum(last, position + right)
            first = jnp.maximum(position - left, 0)
        return Reach(first, last)

    def key_blocks(self, first_query: Any, rows: int, block: int, bounds: Bounds) -> Span:
        """Returns the key blocks that queries [first_query, first_query + rows) visit."""
        last_query = _least(first_query + rows, bounds.num_queries) - 1
        near, far = self.reach(first_query, bounds), self.reach(last_query, bounds)
        start = 0 if near.first is None else _floor_div(near.first, block)
        full_start = 0 if far.first is None else _ceil_div(far.first, block)
        stop, full_stop = _ceil_div(far.last + 1, block), _floor_div(near.last + 1, block)
        if not isinstance(bounds.num_queries, int):
            # Queries beyond the end of their sequence see nothing; beyond the array they are free.
            inside = first_query + rows <= bounds.num_queries
            full_stop = jnp.where(inside, full_stop, 0)
            stop = jnp.where(first_query < bounds.num_queries, stop, 0)
        return _span(start, stop, full_start, full_stop, -(-self.num_keys // block))

    def query_blocks(self, first_key: Any, rows: int, block: int, bounds: Bounds) -> Span:
        """Returns the query blocks that keys [first_key, first_key + rows) are visited by.

        Queries beyond the last need no mask: their weights or their cotangents are zero. Keys
        beyond the array need none either: what they receive is written nowhere.
        """
        blocks, count = -(-self.num_queries // block), bounds.num_queries
        last_key = _least(first_key + rows, bounds.num_keys) - 1
        start, full_start, stop, full_stop = 0, 0, count, blocks * block
        if self.is_causal:
            start, full_start = first_key - bounds.shift, last_key - bounds.shift
            if bounds.prefix is not None:
                start = jnp.where(first_key < bounds.prefix, 0, start)
                full_start = jnp.where(last_key < bounds.prefix, 0, full_start)
        if self.window is not None:
            left, right = self.window
            start = jnp.maximum(start, first_key - right - bounds.shift)
            full_start = jnp.maximum(full_start, last_key - right - bounds.shift)
            stop = jnp.minimum(stop, last_key + left - bounds.shift + 1)
            seen_by_all = first_key + left - bounds.shift + 1
            full_stop = jnp.where(seen_by_all < count, seen_by_all, full_stop)
        if not isinstance(bounds.num_keys, int):
            full_stop = jnp.where(first_key + rows <= bounds.num_keys, full_stop, 0)
            stop = jnp.where(first_key < bounds.num_keys, stop, 0)
        whole = _ceil_div(full_start, block), _floor_div(full_stop, block)
        return _span(_floor_div(start, block), _ceil_div(stop, block), *whole, blocks)


def visited(spans: Sequence[Span]) -> tuple[Any, Any]:
    """Returns the first block that any of the spans visits, and the end of those."""
    start, stop = spans[0].start, spans[0].stop
    for span in spans[1:]:
        start, stop = _least(start, span.start), -_least(-stop, -span.stop)
    return start, stop


def _least(a: Any, b: Any) -> Any:
    both = isinstance(a, int) and isinstance(b, int)
    return min(a, b) if both else jnp.minimum(a, b)


def _ceil_div(a: Any, b: int) -> Any:
    return -(-a // b) if isinstance(a, int) else _floor_div(a + (b - 1), b)


def _floor_div(a: Any, b: int) -> Any:
    """Divides; what is below zero, before the first block, becomes zero."""
    return (
        max(a, 0) // b
        if isinstance(a, int)
        else lax.div(jnp.int32(jnp.maximum(a, 0)), jnp.int32(b))
    )


def _span(start: Any, stop: Any, full_start: Any, full_stop: Any, blocks: int) -> Span:
    """Returns the span with every part inside the next larger one, and at least one block."""
    if all(isinstance(x, int) for x in (start, stop, full_start, full_stop)):
        lesser, greater = min, max
    else:
        lesser, greater = jnp.minimum, jnp.maximum
    start = lesser(start, blocks - 1)
    stop = greater(lesser(stop, blocks), start + 1)
    full_start = lesser(greater(full_start, start), stop)
    return Span(start, stop, full_start, greater(lesser(full_stop, stop), full_start))


def within_segments(span: Span, own: Array, others: Array, rows: int, block: int) -> Span:
    """Narrows spans [B, tiles] of tiles of `rows` tokens, to the blocks of `others` they may see.

    Those are the blocks whose least to greatest id meets the tile's: exactly the right ones where
    ids rise or fall along the sequence, as those of packed documents do, and never too few.

    Args:
      span: the spans without segments.
      own: ids [B, N] of the tokens of the tiles.
      others: ids [B, M] of the tokens of the blocks.
      rows: tokens of a tile.
      block: tokens of a block.
    """

    def ends(ids: Array, size: int) -> tuple[Array, Array]:
        """Returns the least and the greatest id of each tile, [B, tiles]."""
        short = -ids.shape[1] % size
        tiles = jnp.pad(ids, ((0, 0), (0, short)), mode="edge").reshape(ids.shape[0], -1, size)
        return tiles.min(-1), tiles.max(-1)

    own_least, own_most = (x[:, :, None] for x in ends(own, rows))
    least, most = (x[:, None, :] for x in ends(others, block))
    index = jnp.arange(least.shape[-1], dtype=jnp.int32)
    meets = (own_least <= most) & (least <= own_most)
    same = (own_least == own_most) & (least == own_least) & (most == own_least)
    start = jnp.where(meets, index, index.size).min(-1)
    stop = jnp.where(meets, index + 1, 0).max(-1)
    full_start = jnp.where(same, index, index.size).min(-1)
    full_stop = full_start + same.sum(-1, dtype=jnp.int32)
    # Full blocks in between that are of other segments would be taken for full ones.
    unbroken = jnp.where(same, index + 1, 0).max(-1) == full_stop
    return _span(
        jnp.maximum(span.start, start),
        jnp.minimum(span.stop, stop),
        jnp.maximum(span.full_start, full_start),
        jnp.where(unbroken, jnp.minimum(span.full_stop, full_stop), 0),
        index.size,
    )


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
    num_tiles: int,
    num_heads: int,
    group: int,
    head_bytes: int,
    longest_last: bool,
) -> Order:
    """Returns the order for heads that, `group` by `group`, share `head_bytes` of operands."""
    most = min(num_heads, max(1, L2_BYTES // head_bytes) * group)
    section = next(n for n in range(most, 0, -1) if num_heads % n == 0)
    return Order(num_tiles, section, longest_last)
