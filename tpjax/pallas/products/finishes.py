# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""What the kernels of `matmul` and of the gated ones do with a tile's sums."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax

from tpjax.core.products import activations
from tpjax.pallas.products.kernel import Finish, Panel

_DECAY = 0.3275911
_TERMS = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


def _erf(x: Array) -> Array:
    """Returns the error function, off by at most 1.5e-7, of arithmetic that Mosaic GPU knows.

    Source: Abramowitz and Stegun 1964, 7.1.26.
    """
    size = jnp.abs(x)
    t, rest = 1.0 / (1.0 + _DECAY * size), jnp.zeros_like(x)
    for term in _TERMS:
        rest = (rest + term) * t
    magnitude = 1.0 - rest * jnp.exp(-x * x)
    return jnp.where(x < 0.0, -magnitude, magnitude)


def _sigmoid(x: Array) -> Array:
    """Returns 1 / (1 + exp(-x)), by a root: a division would be guarded against large divisors."""
    return jnp.square(lax.rsqrt(1.0 + jnp.exp(-x)))


_ACTIVATIONS = activations(_sigmoid, _erf)


@dataclass(frozen=True)
class Plain(Finish):
    """The sums as they are."""

    @property
    def waits(self) -> bool:
        """Whether it may: rounded, sums are what they become."""
        return True

    def __call__(
        self, sums: Sequence[Array], sides: Sequence[Array], vectors: Sequence[Array]
    ) -> Sequence[Array]:
        return sums


@dataclass(frozen=True)
class Affine(Finish):
    """activation(scale sum + bias) + residual, of those vectors and that side that are given."""

    activation: str
    scaled: bool
    biased: bool
    added: bool
    keeps: bool
    """Whether what the activation is taken of is a result too."""

    @property
    def sides(self) -> tuple[Panel, ...]:
        """The residual."""
        return (Panel(0),) if self.added else ()

    @property
    def results(self) -> tuple[Panel, ...]:
        """The result, then what is kept."""
        return (Panel(0), Panel(1)) if self.keeps else (Panel(0),)

    def __call__(
        self, sums: Sequence[Array], sides: Sequence[Array], vectors: Sequence[Array]
    ) -> Sequence[Array]:
        (z,), given = sums, iter(vectors)
        if self.scaled:
            z = z * next(given)
        if self.biased:
            z = z + next(given)
        y = _ACTIVATIONS[self.activation].value(z)
        y = y + sides[0] if self.added else y
        return [y, z] if self.keeps else [y]


STACKED = (Panel(0, 0), Panel(0, 1))
SEPARATE = (Panel(0), Panel(1))


@dataclass(frozen=True)
class Gated(Finish):
    """activation(gate) * up, the products of one left operand with two right ones."""

    activation: str
    stacked: bool
    """Whether the right operands are halves of one array."""

    @property
    def factors(self) -> tuple[Panel, ...]:
        """Gate, then up."""
        return STACKED if self.stacked else SEPARATE

    def __call__(
        self, sums: Sequence[Array], sides: Sequence[Array], vectors: Sequence[Array]
    ) -> Sequence[Array]:
        gate, up = sums
        return [_ACTIVATIONS[self.activation].value(gate) * up]


@dataclass(frozen=True)
class GatedPull(Finish):
    """The gradients of gate and up, given gate, up and the gradient of the hidden rows."""

    activation: str

    @property
    def factors(self) -> tuple[Panel, ...]:
        """None."""
        return ()

    @property
    def sides(self) -> tuple[Panel, ...]:
        """Gate, up, and the gradient of the hidden rows."""
        return (*STACKED, Panel(1))

    @property
    def results(self) -> tuple[Panel, ...]:
        """The gradients, as two halves."""
        return STACKED

    def __call__(
        self, sums: Sequence[Array], sides: Sequence[Array], vectors: Sequence[Array]
    ) -> Sequence[Array]:
        gate, up, dhidden = sides
        act = _ACTIVATIONS[self.activation]
        return [dhidden * up * act.slope(gate), dhidden * act.value(gate)]


@dataclass(frozen=True)
class ProductPull(Finish):
    """`GatedPull` where the gradient of the hidden rows is a sum; and the hidden rows, anew."""

    activation: str

    @property
    def sides(self) -> tuple[Panel, ...]:
        """Gate, then up."""
        return STACKED

    @property
    def results(self) -> tuple[Panel, ...]:
        """The hidden rows, then the gradients."""
        return (Panel(0), *(panel._replace(array=1) for panel in STACKED))

    def __call__(
        self, sums: Sequence[Array], sides: Sequence[Array], vectors: Sequence[Array]
    ) -> Sequence[Array]:
        (dhidden,), (gate, up) = sums, sides
        act = _ACTIVATIONS[self.activation]
        value = act.value(gate)
        return [value * up, dhidden * up * act.slope(gate), dhidden * value]
