# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Which tiles a block of threads works on, one after another.

Tiles come in the order of `blocks.Order`. Blocks of threads that stay until the end (one for each
multiprocessor) load the next tile's operands under the last one's arithmetic; the tiles are dealt
to them to and fro, so that who got the longer one of a round gets the shorter one of the next.
Where segments decide how long a tile is, each gets a run of tiles of its share of the steps
(`shares`). Where blocks of threads do not stay, each has one tile and the hardware deals.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from tpjax.pallas.attention.blocks import Order
from tpjax.pallas.attention.scores import Plan


class TileFacts(NamedTuple):
    """Static facts that a kernel's body needs."""

    plan: Plan
    order: Order
    heads: int
    group: int
    features: int
    value_features: int

    def locate(self, index: Array) -> tuple[Array, Array, Array]:
        """Returns (sequence, head, tile) of a grid index."""
        head, tile = self.order.locate(index)
        heads = jnp.int32(self.heads)
        return lax.div(head, heads), lax.rem(head, heads), tile


class Deal(NamedTuple):
    """How many tiles there are, and how many blocks of threads share them."""

    tiles: int
    blocks: int
    section: int
    """Tiles after which a new round begins: those before them need not be of its length."""

    @property
    def _padded(self) -> int:
        return -(-self.section // self.blocks) * self.blocks

    def each(
        self, block: Array, body: Callable[[Array, Array], Array], shares: Any = None
    ) -> Array:
        """Runs `state = body(tile index, state)` for all tiles of a block; returns the last state.

        The state is an int32 that starts at zero. What the tiles give may not depend on the deal.
        With `shares`, as the function of that name gives them, they decide.
        """
        if self.blocks == self.tiles:
            return body(block, block - block)  # traced: a literal may not enter a `run_state`
        if shares is not None:
            return lax.fori_loop(shares[block] + 0, shares[block + 1] + 0, body, jnp.int32(0))

        def play(turn: Array, state: Array) -> Array:
            place = jnp.where(lax.rem(turn, 2) == 0, block, self.blocks - 1 - block)
            slot, padded = turn * self.blocks + place, jnp.int32(self._padded)
            section, rest = lax.div(slot, padded), lax.rem(slot, padded)
            index = section * self.section + rest
            exists = (rest < self.section) & (index < self.tiles)
            return lax.cond(exists, lambda: body(index, state), lambda: state)

        turns = self.tiles // self.section * self._padded // self.blocks
        return lax.fori_loop(0, turns, play, jnp.int32(0))


def deal(order: Order, num_heads: int, blocks: int) -> Deal:
    """Returns how the tiles of all heads are dealt to at most so many blocks of threads."""
    tiles, section = order.num_tiles * num_heads, order.num_tiles * order.section
    blocks = min(blocks, tiles)
    # Sections end with their shortest tiles, of which a round may lack some; where all tiles are
    # equally long, or too few for a round, one section is as good as many.
    if not order.longest_last or section < blocks:
        section = tiles
    return Deal(tiles, blocks, section)


OVERHEAD = 1.0
"""What a tile costs besides its steps, in steps."""


def shares(spans: Array, workers: int, order: Order, heads: int, blocks: int) -> Array:
    """Returns where the tiles of each block of threads begin and end, int32 [blocks + 1].

    Consecutive tiles, of one head as far as may be, of about the same number of steps for each.

    Args:
      spans: int32 [B, tiles * workers, 4], as `extras.key_spans` gives them.
      workers: that share a tile.
      order: of the tiles, the first ones first, one section for each key/value head.
      heads: query heads.
      blocks: blocks of threads.
    """
    own = spans.reshape(spans.shape[0], order.num_tiles, workers, 4)
    steps = (own[..., 1].max(2) - own[..., 0].min(2)).astype(jnp.float32) + OVERHEAD
    group = order.section
    # A sum over all tiles before is one kernel for XLA, a running sum is several.
    index, batch = jnp.arange(order.num_tiles), jnp.arange(steps.shape[0])
    before, row = jnp.where(index < index[:, None], steps[:, None], 0).sum(2), steps.sum(1)
    rows_before = jnp.where(batch < batch[:, None], row, 0).sum(1)
    sections, members = (jnp.arange(n, dtype=jnp.float32) for n in (heads // group, group))
    # [B, sections, tiles, members]: where a tile's middle is among all steps
    middle = (
        heads * rows_before[:, None, None, None]
        + group * sections[:, None, None] * row[:, None, None, None]
        + group * before[:, None, :, None]
        + (members + 0.5) * steps[:, None, :, None]
    )
    ends = jnp.arange(1, blocks, dtype=jnp.float32) * (row.sum() * heads / blocks)
    inner = (middle.reshape(-1) < ends[:, None]).sum(1, dtype=jnp.int32)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), inner, jnp.array([middle.size], jnp.int32)])
