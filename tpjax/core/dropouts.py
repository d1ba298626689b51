# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Dropout by a counter: which elements stay follows from the seed and an element's place alone.

    y = x / keep where 16 random bits < 65536 keep, else 0           keep = 1 - rate, in 65536ths

A row, of all leading axes, is four quarters of Q = ceil(D / 4) features. The 64 bits that threefry
makes of the counter (row, i) are those of feature i of each quarter. So a row's mask is the same
however the array is split, tiled or sharded; the backward pass makes it again and keeps nothing.

Source: Salmon et al. 2011 (Random123: threefry, 20 rounds); Srivastava et al. 2014 (dropout).
"""

import math

import jax.numpy as jnp
from jax import Array

from tpjax.core.norms import statistics_dtype

LEVELS = 1 << 16
"""Rates are multiples of 1 / LEVELS, so that 16 bits decide."""
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA


def threefry(key: tuple[Array, Array], counter: tuple[Array, Array]) -> tuple[Array, Array]:
    """Returns two words of 32 random bits for each counter: Threefry-2x32 of 20 rounds."""
    keys = (*key, key[0] ^ key[1] ^ jnp.uint32(PARITY))
    a, b = counter[0] + keys[0], counter[1] + keys[1]
    for group in range(5):
        for bits in ROTATIONS[group % 2]:
            a = a + b
            b = (b << jnp.uint32(bits)) | (b >> jnp.uint32(32 - bits))
            b = a ^ b
        a = a + keys[(group + 1) % 3]
        b = b + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return a, b


def row_numbers(shape: tuple[int, ...]) -> Array:
    """Returns the number of each row of an array of that shape, features last: uint32, [*B]."""
    lead = shape[:-1]
    return jnp.arange(math.prod(lead), dtype=jnp.uint32).reshape(lead)


def kept(rows: Array, features: int, seed: Array, levels: int) -> Array:
    """Returns where elements of rows of those numbers stay, [*B, D]; `levels` of `LEVELS` do."""
    columns = jnp.arange(-(-features // 4), dtype=jnp.uint32)
    pair = threefry((seed[0], seed[1]), (rows[..., None], columns))
    low, sixteen = jnp.uint32(0xFFFF), jnp.uint32(16)
    words = [half for word in pair for half in (word & low, word >> sixteen)]
    return jnp.concatenate(words, axis=-1)[..., :features] < jnp.uint32(levels)


def levels_of(rate: float) -> int:
    """Returns how many of `LEVELS` stay at a rate of dropping."""
    return round(LEVELS * (1 - rate))


def dropout_reference(x: Array, seed: Array, *, rate: float) -> Array:
    """Returns x with a share of its elements set to 0, and the others made larger by as much.

    Arguments as of `tpjax.pallas.dropout`.
    """
    return dropped(x, seed, row_numbers(x.shape), rate)


def dropped(x: Array, seed: Array, rows: Array, rate: float) -> Array:
    """Returns `dropout_reference` of rows of those numbers."""
    levels = levels_of(rate)
    if levels == LEVELS:
        return x
    if levels == 0:
        return jnp.zeros_like(x)
    xf = x.astype(statistics_dtype(x.dtype))
    mask = kept(rows, x.shape[-1], seed.astype(jnp.uint32), levels)
    return jnp.where(mask, xf * (LEVELS / levels), 0).astype(x.dtype)
