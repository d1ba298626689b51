# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""What a call of attention has besides query, key and value, made ready for the kernels."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from tpjax.pallas.attention.blocks import Bounds, Region, Span, within_segments

TMA_ROWS = 8
"""Tokens come in multiples of this: the rows of the tiles in which shared memory is laid out."""


class Extras(NamedTuple):
    """What a call has besides query, key and value: arrays, or in a kernel references to them."""

    bias: Any = None
    """[B or 1, H or 1, T or 1, S or 1]."""
    mask: Any = None
    """Like `bias`, int8; zero hides."""
    bounds: Any = None
    """int32 [B, 4]: the sequences' `Bounds`, where they are not the arrays'."""
    query_ids: Any = None
    """int32 [B, T], segments."""
    key_ids: Any = None
    """int32 [B, S]."""
    slopes: Any = None
    """float32 [B or 1, H]."""
    sinks: Any = None
    """float32 [H]."""


def pad_tokens(x: Array, multiple: int = TMA_ROWS, axis: int = 1) -> Array:
    """Pads an axis of tokens with zeros to a multiple."""
    pads = [(0, -size % multiple if a == axis else 0) for a, size in enumerate(x.shape)]
    return jnp.pad(x, pads) if x.shape[axis] % multiple else x


def pad_tiles(x: Array, axis: int, multiple: int) -> Array:
    """Repeats the last entry of an axis up to a multiple; an axis of size 1 stays."""
    short = -x.shape[axis] % multiple
    if x.shape[axis] == 1 or not short:
        return x
    return jnp.pad(x, [(0, short if a == axis else 0) for a in range(x.ndim)], mode="edge")


def tiled(extras: Extras, queries: int, keys: int, *, transposed: bool = False) -> Extras:
    """Returns the arrays with room for whole tiles of so many queries and keys.

    What is loaded without TMA may not lie beyond an array's end. `transposed` swaps the last two
    axes of `bias` and `mask`, for kernels whose tiles have keys along their rows.
    """

    def like_scores(x: Array | None) -> Array | None:
        if x is None:
            return None
        x = pad_tiles(pad_tiles(x, 2, queries), 3, keys)
        return x.swapaxes(2, 3) if transposed else x

    def ids(x: Array | None, multiple: int) -> Array | None:
        return None if x is None else jnp.pad(x, ((0, 0), (0, -x.shape[1] % multiple)), mode="edge")

    return extras._replace(
        bias=like_scores(extras.bias),
        mask=like_scores(extras.mask),
        query_ids=ids(extras.query_ids, queries),
        key_ids=ids(extras.key_ids, keys),
    )


def _bounds(extras: Extras, region: Region) -> Bounds:
    """Returns the bounds of all sequences, [B, 1] each."""
    if extras.bounds is None:
        return region.bounds()
    numbers = [extras.bounds[:, i : i + 1] for i in range(4)]
    return Bounds(*numbers) if region.is_causal else Bounds(*numbers[:3])


def key_spans(
    extras: Extras, region: Region, num_tiles: int, rows: int, block: int
) -> Array | None:
    """Returns the key blocks that each tile of `rows` queries visits, int32 [B, tiles, 4].

    None where that follows from the region alone: the kernel works it out.
    """
    first = jnp.arange(num_tiles, dtype=jnp.int32)[None] * rows
    span = region.key_blocks(first, rows, block, _bounds(extras, region))
    return _spans(extras, span, extras.query_ids, extras.key_ids, rows, block)


def query_spans(
    extras: Extras, region: Region, num_tiles: int, rows: int, block: int
) -> Array | None:
    """Returns the query blocks that each tile of `rows` keys is visited by, as `key_spans`."""
    first = jnp.arange(num_tiles, dtype=jnp.int32)[None] * rows
    span = region.query_blocks(first, rows, block, _bounds(extras, region))
    return _spans(extras, span, extras.key_ids, extras.query_ids, rows, block)


def _spans(
    extras: Extras, span: Span, own: Array | None, others: Array | None, rows: int, block: int
) -> Array | None:
    if own is not None and others is not None:
        span = within_segments(span, own, others, rows, block)
    elif extras.bounds is None:
        return None
    batch = (extras.bounds if own is None else own).shape[0]
    tiles = max(jnp.shape(x)[-1] for x in span if jnp.ndim(x))
    return jnp.stack([jnp.broadcast_to(jnp.int32(x), (batch, tiles)) for x in span], -1)
