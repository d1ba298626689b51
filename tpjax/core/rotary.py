# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: how fast each pair of features turns, and what turning means.

    angle[t, i]      = position[t] frequency[i]
    (x1, x2)         -> a (x1 cos - x2 sin, x2 cos + x1 sin)         for pair i of every head

Letters: B batch (any leading axes), T tokens, H heads, D features of a head, F pairs that turn.
Pair i is features (i, i + F), or neighbours (2i, 2i + 1) where interleaved; of D features the first
2F turn, the others stay (partial rotary). `a` is the amplitude, which only YaRN has other than 1.

Numerics: angles, sines, norms and products are float32 (float64 where x is float64), the result is
rounded once. A frequency has no gradient.

Source: Su et al. 2021 (RoPE); Peng et al. 2023 (YaRN; NTK-aware and by parts); Chen et al. 2023
(position interpolation); the Llama 3.1 release for `Llama3`.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from tpjax.core.norms import rms_norm_reference, statistics_dtype


@dataclass(frozen=True)
class Linear:
    """Position interpolation: every pair turns `factor` times slower."""

    factor: float

    def scaled(self, frequencies: np.ndarray, base: float) -> np.ndarray:
        """Returns the frequencies [F] for longer sequences."""
        del base
        return frequencies / self.factor


@dataclass(frozen=True)
class NTK:
    """NTK-aware: a larger base, so that the slowest pair turns `factor` times slower."""

    factor: float

    def scaled(self, frequencies: np.ndarray, base: float) -> np.ndarray:
        """Returns the frequencies [F] for longer sequences."""
        num_pairs = len(frequencies)
        if num_pairs == 1:
            return frequencies
        longer = base * self.factor ** (num_pairs / (num_pairs - 1))
        return _powers(longer, num_pairs)


def dynamic_ntk(factor: float, length: int, original_length: int) -> NTK:
    """Returns the NTK scaling for sequences of `length` tokens: none up to the original length."""
    longer = max(length, original_length) / original_length
    return NTK(factor * longer - (factor - 1))


@dataclass(frozen=True)
class Yarn:
    """NTK by parts: pairs that turn often keep their frequency, slow ones are interpolated.

    Pairs that turn more than `beta_fast` times in the original length are kept, those that turn
    less than `beta_slow` times are slowed by `factor`; between them, by a ramp over the pair's
    index. Its amplitude is `amplitude()`.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether the ends of the ramp are rounded outwards to whole pairs."""

    def scaled(self, frequencies: np.ndarray, base: float) -> np.ndarray:
        """Returns the frequencies [F] for longer sequences."""
        num_pairs = len(frequencies)

        def pair_of(turns: float) -> float:
            wavelength = self.original_length / (2 * math.pi * turns)
            return num_pairs * math.log(wavelength) / math.log(base)

        low, high = pair_of(self.beta_fast), pair_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * num_pairs - 1)
        width = max(high - low, 1e-3)
        slowed = np.clip((np.arange(num_pairs) - low) / width, 0, 1)
        return frequencies / self.factor * slowed + frequencies * (1 - slowed)

    def amplitude(self, mscale: float = 1.0) -> float:
        """Returns what both query and key are multiplied by: 0.1 mscale log(factor) + 1."""
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1


@dataclass(frozen=True)
class Llama3:
    """Llama 3.1's: by wavelength, kept when short, `factor` times slower when long, mixed between.

    Short is below `original_length / high_factor` tokens, long above `original_length /
    low_factor`.
    """

    factor: float = 8.0
    low_factor: float = 1.0
    high_factor: float = 4.0
    original_length: int = 8192

    def scaled(self, frequencies: np.ndarray, base: float) -> np.ndarray:
        """Returns the frequencies [F] for longer sequences."""
        del base
        turns = self.original_length * frequencies / (2 * math.pi)
        kept = np.clip((turns - self.low_factor) / (self.high_factor - self.low_factor), 0, 1)
        return frequencies * kept + frequencies / self.factor * (1 - kept)


Scaling = Linear | NTK | Yarn | Llama3


def _powers(base: float, num_pairs: int) -> np.ndarray:
    return base ** (-np.arange(num_pairs) / num_pairs)


def rotary_frequencies(
    features: int, *, base: float = 10_000.0, scaling: Scaling | None = None
) -> Array:
    """Returns radians a token for each pair of features, base^(-2i / features), scaled.

    Args:
      features: how many turn, 2F; even.
      base: the slowest pair turns about 1 / base radians a token; above 1.
      scaling: how the frequencies are changed for sequences longer than the model was trained on.

    Returns:
      [F], float32; computed in float64.

    Raises:
      ValueError: `features` is odd or below 2, or `base` is not above 1.

    >>> [round(float(f), 4) for f in rotary_frequencies(4)]
    [1.0, 0.01]
    """
    if features < 2 or features % 2:
        raise ValueError(f"rotary_frequencies: features must be even and positive; got {features}.")
    if not base > 1:
        raise ValueError(f"rotary_frequencies: base must be above 1; got {base}.")
    frequencies = _powers(base, features // 2)
    if scaling is not None:
        frequencies = scaling.scaled(frequencies, base)
    return jnp.asarray(frequencies.astype(np.float32))


def rotary_tables(
    positions: Array, frequencies: Array, amplitude: float, dtype: DTypeLike
) -> tuple[Array, Array]:
    """Returns cosine and sine of every angle, times the amplitude: [*B, T, F] of the dtype."""
    turning = jax.lax.stop_gradient(frequencies).astype(dtype)
    angles = positions[..., None].astype(dtype) * turning
    return jnp.cos(angles) * amplitude, jnp.sin(angles) * amplitude


def pairs_of(x: Array, num_pairs: int, interleaved: bool) -> tuple[Array, Array, Array]:
    """Returns first and second features of the pairs [..., F], and those that do not turn."""
    turning, rest = x[..., : 2 * num_pairs], x[..., 2 * num_pairs :]
    if interleaved:
        return turning[..., 0::2], turning[..., 1::2], rest
    return turning[..., :num_pairs], turning[..., num_pairs:], rest


def joined(first: Array, second: Array, rest: Array, interleaved: bool) -> Array:
    """Returns the features that `pairs_of` took apart."""
    if interleaved:  # a sum of two arrays with gaps is one fast loop of XLA's, a stack is not
        first_second = [_with_gaps(first, 0) + _with_gaps(second, 1)]
    else:
        first_second = [first, second]
    return jnp.concatenate([*first_second, rest] if rest.shape[-1] else first_second, axis=-1)


def _with_gaps(x: Array, start: int) -> Array:
    """Returns x [..., F] as every other of 2F features, from `start` on, the others 0."""
    gaps = [*[(0, 0, 0)] * (x.ndim - 1), (start, 1 - start, 1)]
    return jax.lax.pad(x, jnp.zeros((), x.dtype), gaps)


def turned(xf: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    """Returns x [*B, T, H, D] turned by angles of cosines and sines [*B, T, F] of its dtype."""
    cos, sin = cos[..., None, :], sin[..., None, :]  # the same for all heads
    first, second, rest = pairs_of(xf, cos.shape[-1], interleaved)
    return joined(first * cos - second * sin, second * cos + first * sin, rest, interleaved)


def rotary_embedding_reference(
    x: Array,
    positions: Array | None = None,
    frequencies: Array | None = None,
    *,
    interleaved: bool = False,
    amplitude: float = 1.0,
) -> Array:
    """Returns x with each pair of features turned by its position.

    Arguments as of `tpjax.pallas.rotary_embedding`.
    """
    positions, frequencies = defaults(x, positions, frequencies)
    xf = x.astype(statistics_dtype(x.dtype))
    angles = rotary_tables(positions, frequencies, amplitude, xf.dtype)
    return turned(xf, *angles, interleaved).astype(x.dtype)


def rms_norm_rope_reference(
    x: Array,
    scale: Array | None = None,
    positions: Array | None = None,
    frequencies: Array | None = None,
    *,
    eps: float = 1e-6,
    scale_offset: float = 0.0,
    interleaved: bool = False,
    amplitude: float = 1.0,
) -> Array:
    """Returns each head of x over its root mean square, times scale, turned by its position.

    Arguments as of `tpjax.pallas.rms_norm_rope`.
    """
    positions, frequencies = defaults(x, positions, frequencies)
    xf = x.astype(statistics_dtype(x.dtype))
    normed = rms_norm_reference(xf, scale, eps=eps, scale_offset=scale_offset)
    angles = rotary_tables(positions, frequencies, amplitude, normed.dtype)
    return turned(normed, *angles, interleaved).astype(x.dtype)


def defaults(x: Array, positions: Array | None, frequencies: Array | None) -> tuple[Array, Array]:
    """Returns positions, 0 to T - 1 where None, and frequencies, of all D features with base 1e4.

    `x` is [*B, T, H, D].
    """
    if positions is None:
        positions = jnp.arange(x.shape[-3], dtype=jnp.int32)
    if frequencies is None:
        frequencies = rotary_frequencies(x.shape[-1])
    return positions, frequencies
