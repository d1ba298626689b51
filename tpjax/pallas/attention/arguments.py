# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""What every implementation of attention is given, after the checks of `entry`.

Letters: B batch (one axis), T query tokens, S key tokens, H query heads, K key/value heads, D and V
features. "1 or" means that the axis may be 1 and then serves all.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class Operands(NamedTuple):
    """The arrays, in the order that dispatch and partitioning know them; None where absent."""

    query: Array
    """[B, T, H, D]"""
    key: Array
    """[B, S, K, D]"""
    value: Array
    """[B, S, K, V]"""
    bias: Array | None = None
    """[1 or B, 1 or H, 1 or T, 1 or S]"""
    mask: Array | None = None
    """[1 or B, 1 or H, 1 or T, 1 or S], booleans"""
    query_seq_lengths: Array | None = None
    """[B] int32 in [0, T]"""
    key_value_seq_lengths: Array | None = None
    """[B] int32 in [0, S]"""
    prefix_lengths: Array | None = None
    """[B] int32 in [0, S], only if causal"""
    query_segment_ids: Array | None = None
    """[B, T] int32, given together with the next"""
    key_value_segment_ids: Array | None = None
    """[B, S] int32"""
    alibi_slopes: Array | None = None
    """[1 or B, H] of the scores' dtype, float32 or float64"""
    sinks: Array | None = None
    """[H] of the scores' dtype"""

    def cut(self) -> "Operands":
        """Returns the same with zeros beyond the lengths: there may be anything, NaN too."""

        def inside(x: Array, lengths: Array | None) -> Array:
            if lengths is None:
                return x
            index = jnp.arange(x.shape[1], dtype=jnp.int32)
            return jnp.where((index < lengths[:, None])[..., None, None], x, 0)

        lengths = self.key_value_seq_lengths
        return self._replace(
            query=inside(self.query, self.query_seq_lengths),
            key=inside(self.key, lengths),
            value=inside(self.value, lengths),
        )


class Options(NamedTuple):
    """The static options: a kernel is compiled for each."""

    scale: float
    is_causal: bool = False
    local_window_size: tuple[int, int] | None = None
    """Left and right."""
    alignment: str = "top_left"
    softcap: float | None = None
    return_lse: bool = False
    return_max: bool = False
    deterministic: bool = True
