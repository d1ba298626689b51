# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Which tiles a block of threads works on, one after another.

Tiles come in the order of `blocks.Order`. Blocks of threads that stay until the end (one for each
multiprocessor) load the next tile's operands under the last one's arithmetic; the tiles are dealt
to them to and fro, so that who got the longer one of a round gets the shorter one of the next.
Where segments decide how long a tile is, tiles are sorted first (`sorted_spans`). Where blocks of
threads do not stay, each has one tile and the hardware deals.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from tpjax.pallas.attention.blocks import Order
from tpjax.pallas.attention.extras import Extras
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
        """Returns (sequence, head, place) of a grid index: `Scores.tile` tells which tile it is."""
        head, place = self.order.locate(index)
        heads = jnp.int32(self.heads)
        return lax.div(head, heads), lax.rem(head, heads), place


STRIDE = 0.382
"""By how many blocks of threads, as a part of all, who begins a round moves on from section to
section: nobody always has the same ranks, and whom the last round leaves without a tile changes."""


class Deal(NamedTuple):
    """How many tiles there are, and how many blocks of threads share them."""

    tiles: int
    blocks: int
    section: int
    """Tiles after which a new round begins: those before them need not be of its length."""

    def each(self, block: Array, body: Callable[[Array, Array], Array]) -> Array:
        """Runs `state = body(tile index, state)` for all tiles of a block; returns the last state.

        The state is an int32 that starts at zero. What the tiles give may not depend on the deal.
        """
        if self.blocks == self.tiles:
            return body(block, block - block)  # traced: a literal may not enter a `run_state`
        rounds, blocks = -(-self.section // self.blocks), jnp.int32(self.blocks)

        def play(turn: Array, state: Array) -> Array:
            section, round = lax.div(turn, jnp.int32(rounds)), lax.rem(turn, jnp.int32(rounds))
            place = lax.rem(block + section * int(STRIDE * self.blocks), blocks)
            place = jnp.where(lax.rem(round, 2) == 0, place, blocks - 1 - place)
            rest = round * blocks + place
            index = section * self.section + rest
            exists = (rest < self.section) & (index < self.tiles)
            return lax.cond(exists, lambda: body(index, state), lambda: state)

        return lax.fori_loop(0, self.tiles // self.section * rounds, play, jnp.int32(0))


def deal(order: Order, num_heads: int, blocks: int) -> Deal:
    """Returns how the tiles of all heads are dealt to at most so many blocks of threads."""
    tiles, section = order.num_tiles * num_heads, order.num_tiles * order.section
    blocks = min(blocks, tiles)
    # Sections end with their shortest tiles, of which a round may lack some; where all tiles are
    # equally long, or too few for a round, one section is as good as many.
    if not order.longest_last or section < blocks:
        section = tiles
    return Deal(tiles, blocks, section)


def sorted_spans(extras: Extras, spans: Array | None, workers: int = 1) -> Array | None:
    """Sorts tiles by the blocks that they visit, those of most last, where segments decide that.

    Args:
      extras: of the call.
      spans: None, or int32 [B, tiles * workers, 4], as `extras.key_spans` gives them.
      workers: that share a tile.

    Returns:
      The spans, or int32 [B, tiles * workers, 5]: sorted in each sequence, and each one's tile.
    """
    if spans is None or extras.key_ids is None:
        return spans
    batch, rows = spans.shape[:2]
    tiles, index = rows // workers, jnp.arange(rows // workers, dtype=jnp.int32)
    own = spans.reshape(batch, tiles, workers, 4)
    steps = own[..., 1].max(2) - own[..., 0].min(2)
    # By comparisons: a sort, or a scatter, takes XLA more kernels, and longer ones.
    mine, other = steps[:, :, None], steps[:, None, :]
    comes_first = (other < mine) | ((other == mine) & (index < index[:, None]))
    rank = comes_first.sum(2, dtype=jnp.int32)
    named = jnp.broadcast_to(index[:, None, None], (batch, tiles, workers, 1))
    found = jnp.concatenate([own, named], 3)[:, None]
    chosen = (rank[:, None, :] == index[:, None])[..., None, None]
    return jnp.where(chosen, found, 0).sum(2).reshape(batch, rows, 5)
