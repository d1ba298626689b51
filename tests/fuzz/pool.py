# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The values that a random program has so far, and the numbers that choose among them."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SHAPES = frozenset({
    (), (1,), (3,), (6,), (7,), (0,), (2, 3), (3, 2), (1, 3), (3, 1), (0, 3), (2, 0),
    (2, 3, 1), (1, 2, 3), (2, 2, 3), (2, 3, 2), (3, 2, 2), (12,), (2, 3, 2, 1), (2, 2, 3, 2),
})  # fmt: skip
"""The shapes of values that later instructions may use: few, so that XLA compiles little."""

RECENT = 9
"""How far back instructions look for operands: programs are to be deep rather than wide."""

FLOATS = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    2.0,
    0.5,
    3.0,
    np.inf,
    -np.inf,
    np.nan,
    1.2e-38,
    65504.0,
    1e-8,
    -2.0,
)
COMPLEX = (0.0, 1.0, -1.0, 1j, complex(-0.0, np.inf))

Accept = Callable[[Any], bool]


def is_float(x: Any) -> bool:
    """Returns whether the value is of real floating-point numbers."""
    return jnp.issubdtype(x.dtype, jnp.floating)


def is_whole(x: Any) -> bool:
    """Returns whether the value is of integers."""
    return jnp.issubdtype(x.dtype, jnp.integer)


def is_complex(x: Any) -> bool:
    """Returns whether the value is of complex numbers."""
    return jnp.issubdtype(x.dtype, jnp.complexfloating)


def is_bool(x: Any) -> bool:
    """Returns whether the value is of booleans."""
    return x.dtype == jnp.bool_


def is_key(x: Any) -> bool:
    """Returns whether the value is of random keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def is_number(x: Any) -> bool:
    """Returns whether the value is an ordinary array, not of keys."""
    return not is_key(x)


def is_real(x: Any) -> bool:
    """Returns whether the value is of real numbers, whole or not."""
    return is_float(x) or is_whole(x)


def same_type(x: Any, y: Any) -> bool:
    """Returns whether two values have the same shape, dtype and weak type."""
    return jax.typeof(x) == jax.typeof(y)


class Numbers:
    """A whole number that is spent digit by digit; zeros when it is spent."""

    def __init__(self, number: int) -> None:
        """Starts with all digits."""
        self.rest = number

    def below(self, limit: int) -> int:
        """Returns the next digit to the base `limit`."""
        self.rest, digit = divmod(self.rest, max(limit, 1))
        return digit

    def of(self, choices: Iterable[Any]) -> Any:
        """Returns one of the choices."""
        choices = tuple(choices)
        return choices[self.below(len(choices))]


class Pool:
    """The values so far, oldest first; a body also sees some of the values around it."""

    def __init__(
        self, values: Iterable[Any], around: Iterable[Any] = (), *, forward: bool = False
    ) -> None:
        """Starts from the inputs of a program or of a body; `forward` if that is under a jvp."""
        self.values, self.forward = [*around, *values], forward
        self.numbers = Numbers(0)

    def add(self, *results: Any) -> None:
        """Keeps those of the results that later instructions can use."""
        for x in results:
            if np.shape(x) in SHAPES:
                self.values.append(x)

    def pick(self, *accept: Accept) -> Any:
        """Returns a recent value that is accepted, or None."""
        fit = [v for v in reversed(self.values) if all(f(v) for f in accept)]
        return fit[self.numbers.below(min(len(fit), RECENT))] if fit else None

    def like(self, x: Any) -> Any:
        """Returns another operand for the type of `x`: a value, itself, or a constant."""
        if self.numbers.below(3) == 2:
            return self.constant(x)
        return self.other(x)

    def other(self, x: Any) -> Any:
        """Returns a value of the type of `x`, perhaps itself."""
        y = self.pick(lambda v: same_type(v, x))
        return x if y is None else y

    def constant(self, x: Any) -> Any:
        """Returns a special number of the type of `x`, or an array of them."""
        return constant_like(x, self.numbers)


def constant_like(x: Any, numbers: Numbers) -> Any:
    """Returns a constant for the shape and dtype of `x`: mostly one special number everywhere."""
    shape, dtype = np.shape(x), x.dtype
    how = numbers.below(6)
    value = np.asarray(special(dtype, numbers), dtype)
    if how == 0:
        return jnp.full(shape, value, dtype)
    if how == 1:
        return lax.broadcast_in_dim(value, shape, ())
    if how == 2 and is_number(x) and not is_bool(x) and not is_complex(x):
        return lax.broadcasted_iota(dtype, shape, numbers.below(len(shape))) if shape else value
    if how == 3:
        few = [np.asarray(special(dtype, numbers), dtype) for _ in range(3)]
        return np.resize(np.stack([value, *few]), shape).astype(dtype)
    if how == 4 and shape:
        return lax.expand_dims(lax.broadcast(value, shape[1:]), (0,)).repeat(shape[0], 0)
    return lax.full_like(x, value, dtype) if shape else value


def special(dtype: Any, numbers: Numbers) -> Any:
    """Returns a number of the dtype at which rules may go wrong."""
    if dtype == jnp.bool_:
        return bool(numbers.below(2))
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return numbers.of((0, 1, 2, info.max, info.min, 7, 3, -1 if info.min else info.max - 1))
    return numbers.of(COMPLEX if jnp.issubdtype(dtype, jnp.complexfloating) else FLOATS)


# -- inputs of programs ---------------------------------------------------------------------------

INPUTS: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("key", ()), ("complex64", (3,)), ("int8", (3,)), ("uint8", (2, 3)), ("uint32", (3,)),
    ("float16", (2, 3)), ("bool", ()), ("bool", (2, 3)), ("float32", (0, 3)), ("float32", (7,)),
    ("float32", (2, 2, 3)), ("weak int", ()), ("weak float", ()), ("int32", ()), ("int32", (2, 3)),
    ("bfloat16", (2, 3)), ("bfloat16", (2, 2, 3)), ("float32", ()), ("float32", (3, 2)),
    ("float32", (2, 3)), ("float32", (2, 3)), ("int32", (3,)), ("float32", (3,)),
    ("float32", (2, 3)),
)  # fmt: skip
"""Dtype and shape of each input, the ones that most instructions can use last."""

WIDE = (("float64", (2, 3)), ("int64", (2, 3)), ("float64", ()))
"""More inputs, of programs with 64-bit types."""


def inputs(*, tame: bool, seed: int = 0) -> list[Any]:
    """Returns values for the inputs: small and exact ones, or special numbers among them."""
    kinds = (*INPUTS, *WIDE) if jax.config.jax_enable_x64 else INPUTS  # pyright: ignore
    rng = np.random.default_rng([seed, tame])
    return [_input(kind, shape, rng, tame) for kind, shape in kinds]


def _input(kind: str, shape: tuple[int, ...], rng: np.random.Generator, tame: bool) -> Any:
    if kind == "key":
        return jax.random.key(int(rng.integers(100)))
    if kind.startswith("weak"):
        return jnp.asarray(2 if "int" in kind else 1.5)
    dtype = jnp.dtype(kind)
    size = int(np.prod(shape))
    if tame or dtype == jnp.bool_:
        low = 0 if jnp.issubdtype(dtype, jnp.unsignedinteger) else -8
        values = rng.integers(0 if dtype == jnp.bool_ else low, 9, shape)
        values = values % 2 if dtype == jnp.bool_ else values
        scale = 4 if jnp.issubdtype(dtype, jnp.inexact) else 1
        return np.asarray(values / scale).astype(dtype)
    numbers = [Numbers(int(n)) for n in rng.integers(0, 1000, size)]
    return np.asarray([special(dtype, n) for n in numbers], dtype).reshape(shape)
