# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Free values in odd places: aliases, special methods, containers, arguments, threads, imports."""

import collections
import itertools
import threading
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tpjax
from tests.harness import assert_close, inputs, run_python

X = inputs("f32[4]", 0)
SCALAR = 2.0


def _entries(compiled: Any) -> int:
    return len(compiled.entries())


def test_G08_two_names_of_one_array() -> None:
    zeros = jnp.zeros(4)
    state = {"m": zeros, "v": zeros}
    step = tpjax.compile(lambda g: {"m": 0.9 * state["m"] + g, "v": 0.9 * state["v"] + g * g})
    expected = dict(state)
    for _ in range(3):
        expected = {"m": 0.9 * expected["m"] + X, "v": 0.9 * expected["v"] + X * X}
        state = step(X)
        assert_close("state", state, expected, 1e-6)
    assert _entries(step) == 2
    pair = {"a": zeros, "b": zeros}
    inline = tpjax.compile(lambda x: (x * pair["a"] + 10 * pair["b"] * x).sum())
    for a, b in ((zeros, zeros), (zeros + 1, zeros), (zeros, zeros + 2)):
        pair["a"], pair["b"] = a, b
        assert_close("gradient", jax.grad(inline)(X), a + 10 * b, 1e-6)


class _Net:
    scale = 2.0

    def __init__(self, weight: Any) -> None:
        self.weight = weight

    def __call__(self, x: Any) -> Any:
        return x * self.weight * self.act()

    def __getitem__(self, i: int) -> Any:
        return self.weight[i]

    def act(self) -> float:
        return self.scale


def test_G08_special_methods_and_patched_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    net = _Net(X)
    compiled = tpjax.compile(lambda x: net(x) + net[0])
    assert_close("called", compiled(X), 2 * X * X + X[0], 1e-6)
    net.weight = X + 1
    assert_close("an attribute", compiled(X), 2 * X * (X + 1) + X[0] + 1, 1e-6)
    assert _entries(compiled) == 1
    monkeypatch.setattr(_Net, "act", lambda self: 5.0)
    assert_close("a method", compiled(X), 5 * X * (X + 1) + X[0] + 1, 1e-6)
    net = _Net(X)
    assert_close("another object", compiled(X), 5 * X * X + X[0], 1e-6)


def test_G08_containers_that_are_no_pytrees() -> None:
    class Config(dict):
        pass

    config, chosen, queue = Config(w=X), {1, 2}, collections.deque([2.0])
    compiled = tpjax.compile(lambda x: x * config["w"] * len(chosen) * queue[0])
    assert_close("first", compiled(X), 4 * X * X, 1e-6)
    config["w"] = X + 1
    assert_close("an array", compiled(X), 4 * X * (X + 1), 1e-6)
    assert _entries(compiled) == 1
    chosen.add(3)
    queue[0] = 1.0
    assert_close("both", compiled(X), 3 * X * (X + 1), 1e-6)


def test_G08_methods_of_arguments_read_globals(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scaled(nnx.Module):
        def __call__(self, x: Any) -> Any:
            return x * SCALAR

    model = Scaled()
    compiled = tpjax.compile(lambda model, x: model(x))
    closed, under = tpjax.compile(lambda x: model(x)), tpjax.compile(lambda model, x: model(x))
    for scalar in (2.0, 3.0):
        monkeypatch.setitem(globals(), "SCALAR", scalar)
        assert_close("argument", compiled(model, X), scalar * X, 1e-6)
        assert_close("closure", closed(X), scalar * X, 1e-6)
        assert_close("gradient", jax.grad(lambda x: under(model, x).sum())(X), 0 * X + scalar, 1e-6)
    assert _entries(compiled) == _entries(closed) == 2


def test_an_array_that_numpy_reads_is_a_guard() -> None:
    weight = X
    compiled = tpjax.compile(lambda x: x * np.asarray(weight).sum())
    for shift in (0.0, 1.0):
        weight = X + shift
        assert_close("sum", compiled(X), X * (X + shift).sum(), 1e-6)
    assert _entries(compiled) == 2


def test_a_name_that_goes_and_one_key_that_the_function_writes() -> None:
    settings: dict[str, Any] = {"scale": 2.0, "calls": 0}

    @tpjax.compile
    def scaled(x: Any) -> Any:
        settings["calls"] += 1
        return x * settings["scale"] * settings.get("w", 1.0)

    assert_close("first", scaled(X), 2 * X, 1e-6)
    settings["scale"] = 5.0
    assert_close("beside what it writes", scaled(X), 5 * X, 1e-6)
    settings["w"] = X
    assert_close("another key", scaled(X), 5 * X * X, 1e-6)
    del settings["w"]
    assert_close("gone", scaled(X), 5 * X, 1e-6)


def test_values_that_other_threads_change() -> None:
    space, stop = types.SimpleNamespace(w=jnp.float32(1.0), k=1.0), threading.Event()
    compiled = tpjax.compile(lambda x: jnp.sin(x) * 0 + space.w * space.k, recompile_limit=10**6)

    def change() -> None:
        for i in itertools.count():
            space.w, space.k = jnp.float32(i), float(i % 3 + 1)
            if stop.wait(0.002):
                return

    changing = threading.Thread(target=change)
    changing.start()
    for n in range(1, 9):
        compiled(jnp.ones(n))
    stop.set()
    changing.join()
    for k in (1.0, 2.0, 3.0, 7.0):
        space.w, space.k = jnp.float32(100.0), k
        for n in range(1, 9):
            assert_close("afterwards", compiled(jnp.ones(n)), jnp.full(n, 100.0 * k), 1e-6)


def test_imports_inside_the_function_and_cyclic_globals() -> None:
    run_python(
        """
import sys, types, jax.numpy as jnp, tpjax
config = types.ModuleType("config"); config.SCALE = 2.0; config.__file__ = "config.py"
sys.modules["config"] = config
loop = {"s": 2.0}; loop["self"] = loop
@tpjax.compile
def f(x):
    from config import SCALE
    import config
    return x * SCALE * config.SCALE * loop["s"]
assert f(jnp.float32(1)) == 8
config.SCALE = 3.0
assert f(jnp.float32(1)) == 18
deep = []
for _ in range(5000): deep = [deep]
assert tpjax.compile(lambda x: x * len(deep))(2.0) == 2
"""
    )
