# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Which tiles a block of threads works on, one after another.

Tiles come in the order of `blocks.Order`. Blocks of threads that stay until the end (one for each
multiprocessor) load the next tile's operands under the last one's arithmetic; the tiles are dealt
to them to and fro, so that who got the longer one of a round gets the shorter one of the next.
Where blocks of threads do not stay, each has one tile and the hardware deals them.
"""

from collections.abc import Callable
from typing import NamedTuple

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

    def each(self, block: Array, body: Callable[[Array, Array], Array]) -> Array:
        """Runs `state = body(tile index, state)` for all tiles of a block; returns the last state.

        The state is an int32 that starts at zero. What the tiles give may not depend on the deal.
        """
        if self.blocks == self.tiles:
            return body(block, block - block)  # traced: a literal may not enter a `run_state`

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
