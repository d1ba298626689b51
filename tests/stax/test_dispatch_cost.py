# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""What a call that hits the cache costs beside `jax.jit` and `nnx.jit`."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import tpjax


def _fastest_us(calls: list[Callable[[], Any]], repeats: int, count: int) -> list[float]:
    """Returns the fastest mean time of each call in microseconds, the calls taking turns."""
    best = [float("inf")] * len(calls)
    for call in calls:
        jax.block_until_ready(call())
    for _ in range(repeats):
        for i, call in enumerate(calls):
            start = time.perf_counter()
            for _ in range(count):
                out = call()
            jax.block_until_ready(out)
            best[i] = min(best[i], (time.perf_counter() - start) / count * 1e6)
    return best


def _within(calls: list[Callable[[], Any]], count: int, limit: Callable[[float], float]) -> Any:
    """Returns both times of the first of three measurements in which the first call is in time.

    Other work on the machine can only make a call look slower than it is.
    """
    for _ in range(3):
        mine, beside = _fastest_us(calls, 20, count)
        if mine <= limit(beside):
            break
    print(f"compile {mine:.0f} us, beside it {beside:.0f} us")
    assert mine <= limit(beside)
    return {"compile": mine, "beside": beside}


def test_dispatch_of_a_pytree_of_200_leaves(record_property: Any) -> None:
    tree = {f"leaf{i}": jnp.ones(2) for i in range(200)}
    x = jnp.ones(2)
    fn = lambda tree, x: x + tree["leaf7"]  # noqa: E731
    ours, theirs = tpjax.compile(fn), jax.jit(fn)
    calls = [lambda: ours(tree, x), lambda: theirs(tree, x)]
    record_property("us", _within(calls, 50, lambda jits: 1.3 * jits + 20))


class Layers(nnx.Module):
    """Ten layers, read only."""

    def __init__(self) -> None:
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(10)])

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the last layer's output."""
        for layer in self.layers:
            x = layer(x)
        return x


def _changing() -> nnx.Module:
    rngs = nnx.Rngs(0)
    inner = nnx.BatchNorm(4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
    return nnx.Sequential(nnx.Linear(4, 4, rngs=rngs), *inner)


@pytest.mark.parametrize("make", [Layers, _changing])
def test_dispatch_of_a_module(make: Callable[[], Any], record_property: Any) -> None:
    model, x = make(), jnp.ones((2, 4))
    fn = lambda model, x: model(x)  # noqa: E731
    ours, theirs = tpjax.compile(fn), nnx.jit(fn)
    calls = [lambda: ours(model, x), lambda: theirs(model, x)]
    record_property("us", _within(calls, 10, lambda jits: 1.1 * jits))


def test_dispatch_with_free_arrays(record_property: Any) -> None:
    tree = {f"leaf{i}": jnp.ones(2) for i in range(200)}
    x = jnp.ones(2)
    ours, theirs = tpjax.compile(lambda x: x + tree["leaf7"]), jax.jit(lambda tree, x: x)
    calls = [lambda: ours(x), lambda: theirs(tree, x)]  # reading them again is another walk
    record_property("us", _within(calls, 50, lambda jits: 2 * jits + 20))
