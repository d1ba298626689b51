# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Free values: arrays are read at each call, everything else is a guard."""

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpjax
from tests.harness import assert_close, inputs, run_python

X = inputs("f32[4]", 0)
ARRAY = X
SCALAR = 2.0
TREE: Any = None
CONFIG: Any = None
activation: Callable[[Any], Any] = jnp.sin


def _helper(x: Any) -> Any:
    return x * ARRAY


def _entries(compiled: Any) -> int:
    return len(compiled.entries())


def _set(monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    monkeypatch.setitem(globals(), name, value)


def test_G08_a_global_array_is_read_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = tpjax.compile(lambda x: x + ARRAY)
    for factor in (1, 2, 3):
        _set(monkeypatch, "ARRAY", factor * X)
        assert_close("sum", compiled(X), X + factor * X, 1e-6)
    assert _entries(compiled) == 1
    _set(monkeypatch, "ARRAY", jnp.ones((2, 1)))
    assert compiled(X).shape == (2, 4)
    assert _entries(compiled) == 2
    assert "global ARRAY: was float32[4], is now float32[2,1]" in str(compiled.explain_recompile())


def test_G08_a_closure_cell_is_read_at_each_call() -> None:
    weight, factor = X, 2

    @tpjax.compile
    def scaled(x: Any) -> Any:
        return x * weight * factor

    assert_close("first", scaled(X), X * X * 2, 1e-6)
    weight = weight + 1
    assert_close("another array", scaled(X), X * (X + 1) * 2, 1e-6)
    assert _entries(scaled) == 1
    factor = 3
    assert_close("another number", scaled(X), X * (X + 1) * 3, 1e-6)
    assert "closure factor: was 2, is now 3" in str(scaled.explain_recompile())
    factor = 2
    scaled(X)
    assert _entries(scaled) == 2


def test_G08_functions_of_the_same_package_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    for fn in (
        lambda x: _helper(x),
        functools.partial(lambda y, x: _helper(x) + y, 0.0),
        jax.checkpoint(lambda x: _helper(x)),
        jax.vmap(lambda x: _helper(x)[None], in_axes=None, axis_size=1, out_axes=1),
        tpjax.compile(lambda x: _helper(x)),
    ):
        compiled = tpjax.compile(lambda x, fn=fn: fn(x))
        direct = tpjax.compile(fn, name="direct")
        for factor in (1.0, 2.0):
            _set(monkeypatch, "ARRAY", factor * X)
            assert_close("called", compiled(X).ravel(), X * factor * X, 1e-6)
            assert_close("itself", direct(X).ravel(), X * factor * X, 1e-6)
        assert _entries(compiled) == _entries(direct) == 1


def test_G08_a_function_under_a_name_is_a_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = tpjax.compile(lambda x: activation(x))
    assert_close("sin", compiled(X), jnp.sin(X), 1e-6)
    _set(monkeypatch, "activation", jnp.cos)
    assert_close("cos", compiled(X), jnp.cos(X), 1e-6)
    assert "global activation: was sin, is now cos" in str(compiled.explain_recompile())


def test_G08_pytrees_mix_arrays_and_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = tpjax.compile(lambda x: x * TREE["w"] + TREE["n"] + len(TREE["list"]))
    tree = {"w": X, "n": 2, "list": [X + 5, None]}
    _set(monkeypatch, "TREE", tree)
    assert_close("first", compiled(X), X * X + 4, 1e-6)
    tree["w"] = 2 * X
    assert_close("an array in place", compiled(X), 2 * X * X + 4, 1e-6)
    assert _entries(compiled) == 1
    tree["n"] = 5
    assert_close("a number in place", compiled(X), 2 * X * X + 7, 1e-6)
    assert "global TREE['n']: was 2, is now 5" in str(compiled.explain_recompile())
    tree["list"].append(1.0)
    assert_close("the structure", compiled(X), 2 * X * X + 8, 1e-6)
    assert _entries(compiled) == 3


def test_G08_attributes_that_the_code_names(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Inner:
        weight: Any
        unread: int = 0

    config = types.SimpleNamespace(inner=Inner(X), scale=2.0)
    _set(monkeypatch, "CONFIG", config)
    compiled = tpjax.compile(lambda x: x * CONFIG.inner.weight * CONFIG.scale)
    assert_close("first", compiled(X), 2 * X * X, 1e-6)
    config.inner.weight = X + 1
    config.inner.unread = 1
    assert_close("an attribute", compiled(X), 2 * X * (X + 1), 1e-6)
    assert _entries(compiled) == 1
    config.scale = 3.0
    assert_close("a number", compiled(X), 3 * X * (X + 1), 1e-6)
    assert "global CONFIG.scale: was 2.0, is now 3.0" in str(compiled.explain_recompile())
    _set(monkeypatch, "CONFIG", types.SimpleNamespace(inner=Inner(X), scale=3.0))
    assert_close("another object", compiled(X), 3 * X * X, 1e-6)
    assert _entries(compiled) == 3  # a class of another's, whose methods are not followed


class _Plain:
    def __init__(self) -> None:
        self.weight, self.factor, self.calls = X, 2, 0

    @tpjax.compile
    def run(self, x: Any) -> Any:
        self.calls += 1
        return self._inner(x)

    def _inner(self, x: Any) -> Any:
        return x * self.weight * self.factor

    def __call__(self, x: Any) -> Any:
        return self._inner(x)


def test_G08_the_object_of_a_method() -> None:
    plain = _Plain()
    for compiled in (plain.run, tpjax.compile(plain._inner), tpjax.compile(plain)):
        plain.weight, plain.factor = X, 2
        assert_close("first", compiled(X), 2 * X * X, 1e-6)
        plain.weight = X + 1
        assert_close("an array", compiled(X), 2 * X * (X + 1), 1e-6)
        assert _entries(compiled) == 1
        plain.factor = 3
        assert_close("a number", compiled(X), 3 * X * (X + 1), 1e-6)
        assert _entries(compiled) == 2
    other = _Plain()
    assert_close("another object", other.run(X), 2 * X * X, 1e-6)


class _Settings:
    scale = 2.0


class _Slotted:
    __slots__ = ("weight",)
    bias = 1.0

    def __init__(self) -> None:
        self.weight = X

    @property
    def doubled(self) -> Any:
        return 2 * self.weight * _Settings.scale


def test_G08_attributes_of_classes_slots_and_properties() -> None:
    slotted = _Slotted()
    compiled = tpjax.compile(lambda x: x * slotted.doubled + slotted.bias)
    assert_close("first", compiled(X), 4 * X * X + 1, 1e-6)
    slotted.weight = X + 1
    assert_close("a slot", compiled(X), 4 * X * (X + 1) + 1, 1e-6)
    assert _entries(compiled) == 1
    try:
        _Settings.scale = 3.0
        assert_close("of a class", compiled(X), 6 * X * (X + 1) + 1, 1e-6)
        _Slotted.bias = 2.0
        assert_close("of the object's class", compiled(X), 6 * X * (X + 1) + 2, 1e-6)
    finally:
        _Settings.scale, _Slotted.bias = 2.0, 1.0
    assert "_Settings.scale: was 2.0, is now 3.0" in str(compiled.explain_recompile())


def test_what_the_function_itself_changes_is_no_guard() -> None:
    traces, count = [], 0

    @tpjax.compile
    def counted(x: Any) -> Any:
        nonlocal count
        traces.append(1)
        count += 1
        return 2 * x

    for _ in range(4):
        counted(X)
    assert (len(traces), count, _entries(counted)) == (1, 1, 1)
    counted(X[:2])
    assert (len(traces), count, _entries(counted)) == (2, 2, 2)


def test_an_array_read_by_python_is_a_guard() -> None:
    count, weight = jnp.int32(2), X

    @tpjax.compile
    def power(x: Any) -> Any:
        for _ in range(int(count)):
            x = x * weight
        return x

    assert_close("twice", power(X), X**3, 1e-6)
    weight = X + 1
    assert_close("another weight", power(X), X * (X + 1) ** 2, 1e-6)
    assert _entries(power) == 1
    count = jnp.int32(3)
    assert_close("three times", power(X), X * (X + 1) ** 3, 1e-6)
    assert _entries(power) == 2
    count = jnp.int32(2)
    power(X)
    assert _entries(power) == 2


def test_numpy_arrays_are_guards() -> None:
    small, large = np.ones(4, np.float32), np.ones((4096, 4), np.float32)
    compiled = tpjax.compile(lambda x: x * small + large)
    assert_close("first", compiled(X), X + large, 1e-6)
    small[0] = 2
    assert_close("a small one in place", compiled(X), X * small + large, 1e-6)
    large = large + 1
    assert_close("another large one", compiled(X), X * small + large, 1e-6)
    assert _entries(compiled) == 3


def test_arrays_in_bodies_and_defaults() -> None:
    weight = X

    @tpjax.compile
    def layers(x: Any, bias: Any = X) -> Any:
        def layer(h: Any, _: Any) -> Any:
            return jnp.sin(h * weight) + bias, None

        h = jax.lax.scan(layer, x, None, length=3)[0]
        return jax.lax.cond(h[0] > 0, lambda: h * weight, lambda: h - weight)

    def plain(x: Any, w: Any) -> Any:
        for _ in range(3):
            x = jnp.sin(x * w) + X
        return jnp.where(x[0] > 0, x * w, x - w)

    for factor in (1.0, -2.0):
        weight = factor * X
        assert_close("scan and cond", layers(X), plain(X, weight), 1e-6)
    assert _entries(layers) == 1


def test_gradients_reach_lifted_arrays_of_a_caller() -> None:
    compiled = tpjax.compile(lambda x: (x * weight).sum())
    weight = X
    compiled(X)

    def loss(w: Any) -> Any:
        nonlocal weight
        kept, weight = weight, w
        try:
            return compiled(X)
        finally:
            weight = kept

    assert_close("gradient", jax.grad(loss)(X), X, 1e-6)
    assert_close("under jit", jax.jit(jax.grad(loss))(X), X, 1e-6)
    assert_close("afterwards", compiled(X), (X * X).sum(), 1e-6)


def test_odd_values_do_not_break_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    cyclic: list[Any] = [1.0]
    cyclic.append(cyclic)
    nan, unhashable = float("nan"), {1: X, "a": X}
    deep: Any = X
    for _ in range(30):
        deep = types.SimpleNamespace(inner=deep)

    @tpjax.compile
    def odd(x: Any) -> Any:
        assert deep.inner is not None
        return x + cyclic[0] + (0 if nan != nan else 1) + unhashable[1]

    for _ in range(2):
        assert_close("odd", odd(X), X + 1.0 + X, 1e-6)
    assert _entries(odd) == 1


def test_names_that_appear_later() -> None:
    run_python(
        """
import jax.numpy as jnp, tpjax
f = tpjax.compile(lambda x: x * LATER + helper(x))
try:
    f(jnp.ones(2)); raise SystemExit("no error")
except NameError:
    pass
LATER = jnp.ones(2)
def helper(x): return x * W
W = jnp.ones(2)
assert f(jnp.ones(2)).tolist() == [2, 2]
W = 3 * W
assert f(jnp.ones(2)).tolist() == [4, 4]
assert len(f.entries()) == 1
"""
    )


def test_G08_a_jit_that_is_the_whole_function(monkeypatch: pytest.MonkeyPatch) -> None:
    for inner in (
        jax.jit(lambda x: x * ARRAY * SCALAR),
        jax.jit(lambda x: x * ARRAY * SCALAR, compiler_options={"xla_cpu_enable_fast_math": True}),
    ):
        _set(monkeypatch, "SCALAR", 2.0)
        compiled = tpjax.compile(inner)
        for factor in (1, 2):
            _set(monkeypatch, "ARRAY", factor * X)
            assert_close("array", compiled(X), 2 * factor * X * X, 1e-6)
        assert _entries(compiled) == 1
        _set(monkeypatch, "SCALAR", 3.0)
        assert_close("number", compiled(X), 6 * X * X, 1e-6)
        assert _entries(compiled) == 2


def test_masks_stay_constants_until_they_vary() -> None:
    visible = jnp.tril(jnp.ones((8, 8), bool))
    bias = jnp.where(visible, 0.0, -jnp.inf)

    def attend(q: Any, k: Any, v: Any, *, added: bool = False) -> Any:
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / 4.0
        scores = scores + bias if added else jnp.where(visible, scores, -jnp.inf)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1), v)

    compiled = tpjax.compile(attend, static_argnames="added")
    qkv = [inputs("f32[2,8,2,16]", i) for i in range(3)]
    for added in (False, True):
        assert_close("attention", compiled(*qkv, added=added), attend(*qkv, added=added), 3e-6)
        hits = [hit for report in compiled.entries()[-1].reports for hit in report.hits if hit.op]
        (key,) = (hit.choices[0].key for hit in hits)
        assert key is not None
        assert key.option("is_causal")
        assert not key.given("mask")
    before = len(compiled.entries())
    for shift in range(1, 6):
        visible = jnp.tril(jnp.ones((8, 8), bool), shift)
        assert_close("another mask", compiled(*qkv), attend(*qkv), 3e-6)
    assert len(compiled.entries()) - before <= 3
