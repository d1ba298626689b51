# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""How a product of a query and a key becomes a score, and which scores are seen: tile by tile.

    score = softcap(scale x) - slope |p(t) - s| + bias[t, s]      softcap(x) = cap tanh(x / cap)

All kernels of attention form their scores here. Tiles lie with queries along their rows or along
their columns; positions, ids and numbers for each query or key are vectors, spread over the tile
when they are needed, which takes far fewer registers than tiles of them.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from tpjax.core.operator import Interpret
from tpjax.pallas._mgpu import pl, plgpu
from tpjax.pallas.attention.blocks import Bounds, Region, Span
from tpjax.pallas.attention.config import Config
from tpjax.pallas.attention.extras import Extras

LOG2E = math.log2(math.e)
WGMMA = plgpu.Layout.WGMMA


def filled(value: float, shape: tuple[int, ...], layout: Any = WGMMA) -> Array:
    """Returns float32 registers of one value."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def by_row(x: Array, shape: tuple[int, ...]) -> Array:
    """Repeats one number for each row over the columns of a tile."""
    return lax.broadcast_in_dim(x, shape, [0])


def hidden(x: Array, value: float, seen: list[Array]) -> Array:
    """Returns a tile with `value` where not all conditions are met (see `Scores.seen`).

    One by one: the compiler has instructions to choose by a comparison, not by two of them.
    """
    for condition in seen:
        x = jnp.where(condition, x, value)
    return x


def without_garbage(ds: Array, weights: Array) -> Array:
    """Returns derivatives that are zero where the weights are, whatever they were multiplied by."""
    return jnp.where(weights == 0, 0.0, ds)


class Plan(NamedTuple):
    """Everything static about one call."""

    region: Region
    scale: float
    softcap: float | None
    returns_max: bool
    deterministic: bool
    config: Config
    interpret: Interpret


class Tile(NamedTuple):
    """A tile of scores: which row and column it starts at."""

    first_row: Any
    first_column: Any
    shape: tuple[int, int]


class Scores(NamedTuple):
    """The scores of one head of one sequence."""

    plan: Plan
    extras: Extras
    spans: Any
    """int32 [B, tiles, 4], or 5 as `schedule.sorted_spans` gives them, or None where spans follow
    from the region alone."""
    batch: Any
    head: Any
    query_axis: int
    """0: queries are rows of the tiles, `bias` and `mask` as in `Extras`. 1: all is transposed."""

    @property
    def is_plain(self) -> bool:
        """Whether scores are multiples of the products, by a factor above zero."""
        changed = (self.plan.softcap, self.extras.slopes, self.extras.bias)
        return all(x is None for x in changed) and self.plan.scale > 0

    @property
    def may_hide_all(self) -> bool:
        """Whether a query may have no finite score in a tile without edges."""
        return self.extras.mask is not None or self.extras.bias is not None

    def may_hide_garbage(self, at_edge: bool) -> bool:
        """Whether a tile may hide what may be anything: even a weight of zero must not meet it."""
        extras = self.extras
        hiding = (extras.bounds, extras.mask, extras.key_ids, extras.bias)
        return extras.mask is not None or (at_edge and any(x is not None for x in hiding))

    def bounds(self) -> Bounds:
        """Returns where the sequence ends."""
        if self.extras.bounds is None:
            return self.plan.region.bounds()
        numbers = [self.extras.bounds[self.batch, i] + 0 for i in range(4)]
        return Bounds(*numbers) if self.plan.region.is_causal else Bounds(*numbers[:3])

    def tile(self, place: Any, workers: int = 1) -> Any:
        """Returns the tile, shared by so many workers, at a place in the order of `spans`."""
        if self.spans is None or self.spans.shape[-1] == 4:
            return place
        return self.spans[self.batch, place * workers, 4] + 0

    def span(self, place: Any, rows: int, block: int) -> Span:
        """Returns which blocks the tile of `rows` queries (or keys) at a place visits."""
        if self.spans is not None:
            return Span(*(self.spans[self.batch, place, i] + 0 for i in range(4)))
        region = self.plan.region
        blocks = region.query_blocks if self.query_axis else region.key_blocks
        return blocks(place * rows, rows, block, region.bounds())

    def edges(self, block: int) -> tuple[bool, bool]:
        """Returns whether keys may end inside a block on the left, and whether at all."""
        region = self.plan.region
        left = region.window is not None or self.extras.query_ids is not None
        ragged = region.num_keys % block != 0 or self.extras.bounds is not None
        return left, left or ragged or region.is_causal

    def edge_is_one_block(self, rows: int, block: int) -> bool:
        """Whether every tile of `rows` queries has one block, the last, that needs a mask."""
        region = self.plan.region
        if self.spans is not None or not region.is_causal:
            return self.spans is None and region.window is None
        return block % rows == 0 and region.bounds().shift % rows == 0

    def query_edges(self) -> tuple[bool, bool]:
        """Returns whether queries may end inside a block on the left, and on the right."""
        region = self.plan.region
        right = region.window is not None or self.spans is not None
        return right or region.is_causal, right

    def values(self, products: Array, tile: Tile) -> tuple[Array, float, Array | None]:
        """Returns scores, the factor that they lack, in units of log2, and d score / d (scale x).

        The derivative is None where it is one.
        """
        plan, gain = self.plan, None
        if self.is_plain:
            return products, plan.scale * LOG2E, None
        x = products * plan.scale
        if plan.softcap is not None:
            # The hardware's tanh is good to 11 bits, this to 22: as good as the softmax.
            tanh = 1 - 2 / (1 + jnp.exp2(x * (2 * LOG2E / plan.softcap)))
            x, gain = tanh * plan.softcap, 1 - tanh * tanh
        if self.extras.slopes is not None:
            x = x - self.distance(tile) * self.slope()
        if self.extras.bias is not None:
            x = x + self._load(self.extras.bias, tile).astype(jnp.float32)
        return x, LOG2E, gain

    def slope(self) -> Array:
        """Returns the head's slope."""
        own = 0 if self.extras.slopes.shape[0] == 1 else self.batch
        return self.extras.slopes[own, self.head] + 0.0

    def distance(self, tile: Tile) -> Array:
        """Returns |p(t) - s| over the tile."""
        query, key = self._positions(tile)
        shifted = self._over(query + self.bounds().shift, tile, self.query_axis)
        return jnp.abs(shifted - self._over(key, tile, 1 - self.query_axis)).astype(jnp.float32)

    def seen(
        self, tile: Tile, crosses_edge: bool, row_ids: Array | None, column_ids: Any = None
    ) -> list[Array]:
        """Returns conditions, of the tile's shape, that a score that is seen meets, all of them.

        Args:
          tile: which.
          crosses_edge: whether the region or a segment may end inside.
          row_ids: segment ids of the rows, or None.
          column_ids: those of the columns, in shared memory; None: they are loaded from afar.
        """
        conditions = []
        if crosses_edge:
            region, bounds = self.plan.region, self.bounds()
            query, key = self._positions(tile)
            reach = region.reach(query, bounds)
            if self.extras.bounds is not None or not jnp.ndim(reach.last):
                # Also a vector where a number would do: with that, JAX's search for layouts of
                # tiles with keys as rows takes minutes.
                last = jnp.where(query < bounds.num_queries, reach.last, -1)
                reach = reach._replace(last=last)
            keys = self._over(key, tile, 1 - self.query_axis)
            conditions.append(keys <= self._over(reach.last, tile, self.query_axis))
            if reach.first is not None:
                conditions.append(keys >= self._over(reach.first, tile, self.query_axis))
            if row_ids is not None:
                if column_ids is None:
                    other_ids = self.ids(tile.first_column, tile.shape[1], axis=1)
                else:
                    other_ids = plgpu.load(column_ids, layout=WGMMA.reduce(0))
                    plgpu.commit_smem()  # The read ends before a copy may overwrite what it reads.
                conditions.append(self._over(row_ids, tile, 0) == self._over(other_ids, tile, 1))
        if self.extras.mask is not None:
            conditions.append(self._load(self.extras.mask, tile) != 0)
        return conditions

    def ids(self, first: Any, count: int, axis: int) -> Array | None:
        """Returns segment ids of rows (axis 0) or columns (1) of tiles, or None."""
        ref = self.extras.query_ids if axis == self.query_axis else self.extras.key_ids
        if ref is None:
            return None
        layout = WGMMA.reduce(1 - axis)
        return plgpu.load(ref.at[self.batch, pl.ds(first, count)], layout=layout, optimized=False)

    def _positions(self, tile: Tile) -> tuple[Array, Array]:
        """Returns the indices of the tile's queries and of its keys, as vectors."""

        def along(axis: int) -> Array:
            layout = WGMMA.reduce(1 - axis)
            index = plgpu.broadcasted_iota(jnp.int32, (tile.shape[axis],), 0, layout=layout)
            return index + (tile.first_column if axis else tile.first_row)

        return along(self.query_axis), along(1 - self.query_axis)

    def _over(self, x: Any, tile: Tile, axis: int) -> Any:
        """Spreads a vector along an axis over the tile; a number is left as it is."""
        # Named, as layouts are not always inferred from the operations that follow.
        spread = lambda: lax.broadcast_in_dim(x, tile.shape, [axis])  # noqa: E731
        return plgpu.layout_cast(spread(), WGMMA) if jnp.ndim(x) else x

    def _load(self, ref: Any, tile: Tile) -> Array:
        """Returns the tile of an array [B or 1, H or 1, rows or 1, columns or 1]."""
        lead = tuple(
            0 if size == 1 else at
            for size, at in zip(ref.shape, (self.batch, self.head), strict=False)
        )
        rows, columns = (
            pl.ds(first, size)
            for first, size in zip((tile.first_row, tile.first_column), tile.shape, strict=True)
        )
        if ref.shape[2] == 1 or ref.shape[3] == 1:
            axis = 1 if ref.shape[2] == 1 else 0
            line = ref.at[(*lead, 0, columns)] if axis else ref.at[(*lead, rows, 0)]
            vector = plgpu.load(line, layout=WGMMA.reduce(1 - axis), optimized=False)
            return lax.broadcast_in_dim(vector, tile.shape, [axis])
        return plgpu.load(ref.at[(*lead, rows, columns)], layout=WGMMA, optimized=False)
