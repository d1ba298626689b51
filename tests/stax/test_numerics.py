# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Programs as people write them, compiled by XLA with and without us: values and gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tpjax
from tests.harness import assert_close, inputs

TOL = 1e-6
"""Under jit XLA fuses as it likes: its last bits move."""

Functions = dict[str, Callable[[Any], Any]]

ELEMENTWISE: Functions = {
    "abs": jnp.abs, "neg": jnp.negative, "exp": jnp.exp, "log": lambda x: jnp.log(x * x + 1),
    "sqrt": lambda x: jnp.sqrt(x * x + 1), "rsqrt": lambda x: lax.rsqrt(x * x + 1),
    "sin": jnp.sin, "cos": jnp.cos, "tan": jnp.tan, "sinh": jnp.sinh, "cosh": jnp.cosh,
    "tanh": jnp.tanh, "arctan": jnp.arctan, "arcsinh": jnp.arcsinh, "erf": lax.erf,
    "sigmoid": jax.nn.sigmoid, "relu": jax.nn.relu, "relu6": jax.nn.relu6, "elu": jax.nn.elu,
    "selu": jax.nn.selu, "silu": jax.nn.silu, "gelu": jax.nn.gelu, "softplus": jax.nn.softplus,
    "floor": jnp.floor, "round": jnp.round, "square": jnp.square, "sign": jnp.sign,
    "reciprocal": lambda x: 1 / (x * x + 1), "clip": lambda x: jnp.clip(x, -1, 1),
}  # fmt: skip
assert len(ELEMENTWISE) >= 27

WHOLE_ROWS: Functions = {
    "layer norm": lambda x: (x - x.mean(-1, keepdims=True)) * lax.rsqrt(
        x.var(-1, keepdims=True) + 1e-5
    ),
    "norm over two axes": lambda x: (x - x.mean((1, 2), keepdims=True)) / jnp.sqrt(
        x.var((1, 2), keepdims=True) + 1e-5
    ),
    "softmax inner": lambda x: jax.nn.softmax(x, axis=-1),
    "softmax outer": lambda x: jax.nn.softmax(x, axis=0),
    "cumsum": lambda x: jnp.cumsum(x, axis=1), "sort": lambda x: jnp.sort(x, axis=-1),
    "argmax": lambda x: jnp.argmax(x, axis=-1) * x.sum(-1), "topk": lambda x: lax.top_k(x, 2)[0],
    "gather": lambda x: jnp.take(x, jnp.asarray([2, 0, 2]), axis=2),
    "scatter": lambda x: x.at[:, jnp.asarray([1, 0, 1])].add(x[:, :3]),
    "conv": lambda x: lax.conv_general_dilated(x, x[:, :, :2], (1,), "SAME"),
    "fft": lambda x: jnp.abs(jnp.fft.fft(x)), "complex": lambda x: jnp.abs((x + 2j * x[::-1]) ** 2),
}  # fmt: skip


def _both(fns: Functions, x: Any) -> None:
    """Compares values and gradients of all the functions, compiled in one program."""

    def weighted(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def loss(x: Any) -> Any:
            value = fn(x)
            weight = jnp.cos(jnp.arange(value.size, dtype=value.dtype)).reshape(value.shape)
            return jnp.sum(value * weight)

        return loss

    def step(x: Any) -> Any:
        return {name: (fn(x), jax.grad(weighted(fn))(x)) for name, fn in fns.items()}

    def of_compiled(x: Any) -> Any:
        made = {name: tpjax.compile(fn) for name, fn in fns.items()}
        return {name: (fn(x), jax.grad(weighted(fn))(x)) for name, fn in made.items()}

    expected = jax.jit(step)(x)
    assert_close("compiled", tpjax.compile(step)(x), expected, TOL)
    assert_close("gradient of the compiled", jax.jit(of_compiled)(x), expected, TOL)


def test_F03_elementwise_functions() -> None:
    _both(ELEMENTWISE, inputs("f32[5,7]", 0))


def test_F03_functions_of_rows() -> None:
    _both(WHOLE_ROWS, inputs("f32[3,3,4]", 1))


def _several(x: Any) -> Any:
    """A bit of everything, for any size of the last axis."""
    y = jax.nn.silu(x * 2.0) + jnp.cumsum(x, axis=-1) * 1.0
    z = jnp.where(x > 0, y, jnp.negative(-x))
    total = jnp.sum(z * z, axis=-1, keepdims=True)
    flipped = jnp.flip(z.reshape(-1).reshape(x.shape), -1)
    return flipped / (1 + total), z.astype(jnp.bfloat16).astype(jnp.float32) + total


SIZES = ((1,), (3,), (7,), (63,), (1000,), (1031,), (0,), (2, 0), (0, 3), ())


@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_F04_odd_sizes(shape: tuple[int, ...]) -> None:
    x = inputs(f"f32[{','.join(map(str, shape))}]", 2)
    fn = _several if shape else lambda x: _several(x[None])
    assert_close("value", tpjax.compile(fn)(x), jax.jit(fn)(x), TOL)
    loss = lambda fn: lambda x: sum(jnp.sum(jnp.sin(r)) for r in fn(x))  # noqa: E731
    actual, expected = jax.grad(loss(tpjax.compile(fn)))(x), jax.grad(loss(fn))(x)
    assert np.shape(actual) == shape
    assert_close("gradient", actual, expected, TOL)
