# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""What the kernels of the norms do to one tile of rows.

    forward    h = x, or x + residual in the residual's dtype
               z = (h - mean) rstd                 rstd = 1 / sqrt(mean((h - mean)^2) + eps)
               y = z scale + bias
    backward   g = dy scale
               dh' = rstd (g - mean(g) - z mean(g z)) + dh
               dscale = sum over rows of dy z      dbias = sum over rows of dy

An RMS norm has no mean: `mean` and `mean(g)` are left out. `scale` stands for scale + scale_offset.

Rows that fit a tile are read once. Longer ones are cut into segments and read twice: once for the
statistics of each segment, of which `joined_forward` and `joined_backward` make those of the row
(Chan's rule for the variance), and once for the result.

A value is loaded from shared memory wherever it is used, and a tile is worked on in pieces: that is
cheaper than the registers to keep a row.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from tpjax.core.norms import FP8_MAX
from tpjax.pallas.norms.launch import Sums, Vector
from tpjax.pallas.norms.tiles import Tile

Numbers = Sequence[Array]
"""Numbers for each row of a tile [r]."""


class Norm(NamedTuple):
    """Which norm."""

    centred: bool
    """Layer norm; else RMS norm."""
    eps: float
    scale_offset: float


class Vectors(NamedTuple):
    """Which vectors a kernel is given, in this order."""

    scale: bool
    bias: bool


def _moments(norm: Norm, tile: Tile, ref: Any) -> list[Array]:
    """Returns the mean of rows, if it is to be subtracted, and the mean square of what is left."""
    if not norm.centred:
        return tile.means(lambda p: [jnp.square(tile.load(ref, p))])
    (mean,) = tile.means(lambda p: [tile.load(ref, p)])
    return [mean, *tile.means(lambda p: [jnp.square(tile.load(ref, p) - tile.spread(mean))])]


def _pulled_moments(norm: Norm, tile: Tile, ref: Any, g: Vector) -> list[Array]:
    """Returns `_moments`, then mean(g (h - mean)) and, of a layer norm, mean(g)."""
    if not norm.centred:
        return tile.means(lambda p: _with_product(tile.load(ref, p), g(p)))
    mean, mean_g = tile.means(lambda p: [tile.load(ref, p), g(p)])
    centred = tile.means(lambda p: _with_product(tile.load(ref, p) - tile.spread(mean), g(p)))
    return [mean, *centred, mean_g]


def _finished(norm: Norm, moments: Numbers) -> list[Array]:
    """Returns the mean, if any, rstd, mean(g z), and a layer norm's mean(g), of such moments."""
    count = 1 + norm.centred
    *mean, square = moments[:count]
    rstd = lax.rsqrt(square + norm.eps)
    return [*mean, rstd, moments[count] * rstd, *moments[count + 1 :]]


def _with_product(x: Array, g: Array) -> list[Array]:
    return [jnp.square(x), g * x]


def _statistics(norm: Norm, tile: Tile, ref: Any) -> list[Array]:
    """Returns the mean, if it is to be subtracted, and rstd."""
    *mean, square = _moments(norm, tile, ref)
    return [*mean, lax.rsqrt(square + norm.eps)]


def _standardised(tile: Tile, ref: Any, statistics: Numbers, piece: int) -> Array:
    """Returns a piece of z from the statistics, which are the mean, if any, and rstd."""
    *mean, rstd = statistics
    x = tile.load(ref, piece)
    for m in mean:
        x = x - tile.spread(m)
    return x * tile.spread(rstd)


def _scaled(norm: Norm, x: Array, scales: Sequence[Vector], piece: int) -> Array:
    for scale in scales:
        x = x * (scale(piece) + norm.scale_offset if norm.scale_offset else scale(piece))
    return x


def _add(tile: Tile, buffers: Sequence[Any]) -> Any:
    """Puts x + residual in the residual's buffer, if there is one; returns the buffer of h."""
    if len(buffers) > 1:
        x, residual = buffers
        for piece in range(tile.num_pieces):
            tile.store(residual, piece, tile.load(x, piece) + tile.load(residual, piece))
    return buffers[-1]


class Forward(NamedTuple):
    """Turns x [, and residual] into y [, and h, in the buffer of residual].

    Given the mean, if any, and rstd of each row, x is h already.
    """

    norm: Norm
    tile: Tile
    vectors: Vectors
    num_sources: int = 1
    """2 with a residual."""
    out: int = 0
    """The buffer that y goes into."""
    dynamic: bool = False
    """y is divided by a scale for each row that makes its largest the largest float8_e4m3fn."""

    def __call__(
        self, vectors: Sequence[Vector], given: Numbers, buffers: Sequence[Any], sums: Sums
    ) -> tuple[list[Array], Sums]:
        """Is a `Step`; its numbers are the scales."""
        tile, out = self.tile, buffers[self.out]
        numbers: list[Array] = []
        factors: list[Array] = []
        h = _add(tile, buffers[: self.num_sources])
        statistics = given or _statistics(self.norm, tile, h)

        def y(piece: int) -> Array:
            y = _standardised(tile, h, statistics, piece)
            y = _scaled(self.norm, y, vectors[: self.vectors.scale], piece)
            for bias in vectors[self.vectors.scale :]:
                y = y + bias(piece)
            return y

        if self.dynamic:
            largest = tile.largest(lambda p: jnp.abs(y(p)))
            largest = jnp.where(largest == 0, FP8_MAX, largest)
            numbers, factors = [largest / FP8_MAX], [FP8_MAX / largest]
        for piece in range(tile.num_pieces):
            value = y(piece)
            for factor in factors:
                value = value * tile.spread(factor)
            if out.dtype == jnp.float8_e4m3fn:
                value = jnp.minimum(jnp.maximum(value, -FP8_MAX), FP8_MAX)
            tile.store(out, piece, value)
        return numbers, sums


class Backward(NamedTuple):
    """Turns dy [and dh] into the gradient of h, in the buffer of dy [or of dh], and sums.

    Buffers: h, dy [, dh]. Given the numbers of `joined_backward`, or none.
    """

    norm: Norm
    tile: Tile
    vectors: Vectors
    """The first says whether there is a scale, the second whether dbias is asked for."""
    both: bool = False
    """The gradient goes into the buffer of dy too, whose dtype is another."""

    def __call__(
        self, vectors: Sequence[Vector], given: Numbers, buffers: Sequence[Any], sums: Sums
    ) -> tuple[list[Array], Sums]:
        """Is a `Step`."""
        norm, tile = self.norm, self.tile
        h, dy, *more = buffers
        count = 1 + norm.centred

        def g(piece: int) -> Array:
            return _scaled(norm, tile.load(dy, piece), vectors, piece)

        given = given or _finished(norm, _pulled_moments(norm, tile, h, g))
        statistics, pulls = given[:count], given[count:]

        def z(piece: int) -> Array:
            return _standardised(tile, h, statistics, piece)

        sums = [list(total) for total in sums]
        for piece in range(tile.num_pieces):
            dx = g(piece) - z(piece) * tile.spread(pulls[0])
            for mean in pulls[1:]:
                dx = dx - tile.spread(mean)
            dx = dx * tile.spread(statistics[-1])
            if self.vectors.scale:
                sums[0][piece] = sums[0][piece] + tile.load(dy, piece) * z(piece)
            if self.vectors.bias:
                sums[-1][piece] = sums[-1][piece] + tile.load(dy, piece)
            for dh in more:
                dx = dx + tile.load(dh, piece)
                tile.store(dh, piece, dx)
            if not more or self.both:
                tile.store(dy, piece, dx)
        return [], sums


class ForwardStatistics(NamedTuple):
    """Returns the moments of each row of a segment; with a residual, puts h in its buffer."""

    norm: Norm
    tile: Tile

    def __call__(
        self, vectors: Sequence[Vector], given: Numbers, buffers: Sequence[Any], sums: Sums
    ) -> tuple[list[Array], Sums]:
        """Is a `Step`."""
        del vectors, given
        return _moments(self.norm, self.tile, _add(self.tile, buffers)), sums


class BackwardStatistics(NamedTuple):
    """Returns the moments of each row of a segment, mean(g (h - mean)) [and mean(g)]; of h, dy."""

    norm: Norm
    tile: Tile

    def __call__(
        self, vectors: Sequence[Vector], given: Numbers, buffers: Sequence[Any], sums: Sums
    ) -> tuple[list[Array], Sums]:
        """Is a `Step`."""
        del given
        norm, tile, (h, dy) = self.norm, self.tile, buffers

        def g(piece: int) -> Array:
            return _scaled(norm, tile.load(dy, piece), vectors, piece)

        return _pulled_moments(norm, tile, h, g), sums


def joined_forward(norm: Norm, parts: Numbers) -> list[Array]:
    """Returns the mean, if any, and rstd [1, R, 1] of rows from the moments [1, R, S] of segments.

    All segments of a row are of one size.
    """
    *means, square = parts
    found = []
    for mean in means:
        found = [mean.mean(-1, keepdims=True)]
        square = square + jnp.square(mean - found[0])
    return [*found, lax.rsqrt(square.mean(-1, keepdims=True) + norm.eps)]


def joined_backward(norm: Norm, parts: Numbers) -> list[Array]:
    """Returns the mean, if any, rstd, mean(g z) [and mean(g)] of rows from those of segments."""
    statistics = joined_forward(norm, parts[: 1 + norm.centred])
    products, *gs = parts[1 + norm.centred :]
    for g in gs:
        products = products + (parts[0] - statistics[0]) * g
    pulls = [products.mean(-1, keepdims=True) * statistics[-1]]
    return [*statistics, *pulls, *(g.mean(-1, keepdims=True) for g in gs)]
