# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Entries: what each was made for, why there are several, and how many are kept."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import tpjax
from tests.harness import assert_close, inputs
from tpjax.stax import program

X = inputs("f32[4]", 0)


def _last(compiled: Any) -> str:
    return str(compiled.explain_recompile()).rsplit("\n", 1)[-1]


def test_G10_the_argument_is_named_by_its_path() -> None:
    @tpjax.compile
    def step(params: Any, batch: Any, *rest: Any, scale: float = 1.0, **named: Any) -> Any:
        del rest, named
        return params["w"].sum() + batch["tokens"].sum() * scale

    params = {"w": X}
    step(params, {"tokens": jnp.ones((2, 8), int)})
    assert str(step.explain_recompile()).endswith("nothing was compiled again")
    step(params, {"tokens": jnp.ones((2, 16), int)})
    assert _last(step).endswith("batch['tokens']: was i32[2,8], is now i32[2,16]")
    step({"w": X.astype(jnp.bfloat16)}, {"tokens": jnp.ones((2, 16), int)})
    assert _last(step).endswith("entry 2): params['w']: was f32[4], is now bf16[4]")
    step(params, {"tokens": jnp.ones((2, 16), int), "mask": None})
    assert "batch['mask']: was nothing, is now None" in _last(step)
    step(params, {"tokens": jnp.ones((2, 16), int)}, X, extra=X)
    assert "rest[0]: was nothing, is now f32[4]" in _last(step)
    assert "named['extra']: was nothing, is now f32[4]" in _last(step)
    changes = step.explain_recompile().as_dict()["recompiles"][0]["changes"]
    assert changes == [{"path": "batch['tokens']", "was": "i32[2,8]", "now": "i32[2,16]"}]
    assert len(step.entries()) == 5
    assert "batch['tokens']: i32[2,8]" in str(step.entries()[0])


def test_G10_static_values_weak_types_and_flags_are_named() -> None:
    compiled = tpjax.compile(lambda x, n: x * n, static_argnames="n")
    for n in (2, 3):
        compiled(X, n)
    assert _last(compiled).endswith("n: was 2, is now 3")
    compiled = tpjax.compile(lambda x: x * 2)
    compiled(jnp.float32(1))
    compiled(1.0)
    assert _last(compiled).endswith("x: was f32[], is now f32[], weak type")
    with jax.default_matmul_precision("highest"):
        compiled(1.0)
    assert _last(compiled).endswith("jax_default_matmul_precision: was None, is now highest")
    with tpjax.use(implementation="xla"):
        compiled(1.0)
    assert "tpjax.use: was nothing asked, is now" in _last(compiled)
    mesh = jax.make_mesh((1,), ("data",))
    with jax.set_mesh(mesh):
        compiled(1.0)
    assert "mesh: was none, is now" in _last(compiled)


def test_G10_flags_of_modules_are_named() -> None:
    model = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(0)))
    compiled = tpjax.compile(lambda model, x: model(x))
    compiled(model, X)
    model.eval()
    compiled(model, X)
    assert "model.layers.1.deterministic: was False, is now True" in _last(compiled)
    model.train()
    compiled(model, X)
    assert len(compiled.entries()) == 2


def test_G10_one_warning_past_the_limit() -> None:
    compiled = tpjax.compile(lambda x, step: x * step.sum(), recompile_limit=3, name="growing")
    with warnings.catch_warnings(action="error"):
        for n in (1, 2, 3):
            compiled(X, jnp.ones(n))
    with pytest.warns(UserWarning, match=r"growing has 4 entries.*step \(3 times.*f32\[4\]") as w:
        compiled(X, jnp.ones(4))
    assert len(w) == 1
    with warnings.catch_warnings(action="error"):
        assert_close("never an error", compiled(X, jnp.ones(5)), X * 5, 1e-6)
    assert tpjax.compile(lambda x: x)._program.options["recompile_limit"] == 8


@pytest.mark.parametrize("asks", [False, True])
def test_G10_entries_are_bounded(asks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "MAX_ENTRIES", 3)
    compiled = tpjax.compile(
        lambda x: x + (1 if asks and x.sum() > 0 else 0) + 1, recompile_limit=100
    )
    for n in (1, 2, 3, 1, 4):
        x = jnp.ones(n)
        assert_close(str(n), compiled(x), x + 1 + asks, 0)
    kept = [entry.signature["x"] for entry in compiled.entries()]
    assert (
        sorted(kept) == ["f32[1]", "f32[3]", "f32[4]"] if asks else ["f32[2]", "f32[3]", "f32[4]"]
    )
    assert_close("an old one", compiled(jnp.ones(2)), jnp.ones(2) + 1 + asks, 0)


def test_clear_forgets_everything() -> None:
    compiled = tpjax.compile(lambda x: x + (1 if x.sum() > 0 else 0))
    for x in (jnp.ones(4), -jnp.ones(4)):
        compiled(x)
    assert len(compiled.entries()) == 2
    compiled.clear()
    assert not compiled.entries()
    assert not compiled.explain_recompile().recompiles
    assert_close("again", compiled(X), X + (X.sum() > 0), 0)


def test_G15_a_nested_function_is_captured_once() -> None:
    traces = []

    @tpjax.compile
    def layer(h: Any, w: Any) -> Any:
        traces.append(1)
        return jnp.sin(h * w)

    def network(x: Any, ws: Any) -> Any:
        for w in ws:
            x = layer(x, w)
        return x

    ws = [inputs("f32[4]", i) for i in range(12)]
    compiled = tpjax.compile(network)
    expected = X
    for w in ws:
        expected = jnp.sin(expected * w)
    assert_close("network", compiled(X, ws), expected, 1e-6)
    assert len(traces) == 1
    assert_close("gradient", jax.grad(lambda x: network(x, ws).sum())(X) * 0 + 1, X * 0 + 1, 0)
    assert len(traces) == 1


def test_G09_modules_are_live() -> None:
    model = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.BatchNorm(4, rngs=nnx.Rngs(0)))
    twin = nnx.clone(model)
    x = inputs("f32[3,4]", 1)
    by_argument = tpjax.compile(lambda model, x: model(x))
    by_closure = tpjax.compile(lambda x: model(x))
    by_object = tpjax.compile(model)
    calls = (lambda: by_argument(model, x), lambda: by_closure(x), lambda: by_object(x))
    for call in (*calls, *calls):
        assert_close("output", call(), twin(x), 1e-5)
        assert_close("statistics", nnx.state(model), nnx.state(twin), 1e-5)
    for m in (model, twin):
        m.layers[0].kernel[...] = m.layers[0].kernel[...] * 2
    for call in calls:
        assert_close("loaded", call(), twin(x), 1e-5)
    nnx.update(model, jax.tree.map(lambda a: a + 1, nnx.state(model, nnx.Param)))
    nnx.update(twin, jax.tree.map(lambda a: a + 1, nnx.state(twin, nnx.Param)))
    for call in calls:
        assert_close("updated", call(), twin(x), 1e-5)
    model.layers[0] = nnx.Linear(4, 4, rngs=nnx.Rngs(5))
    twin.layers[0] = nnx.clone(model.layers[0])
    for call in calls:
        assert_close("replaced", call(), twin(x), 1e-5)
    assert all(len(c.entries()) == 1 for c in (by_argument, by_closure, by_object))


def test_G09_a_global_module_advances_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rngs, twin = nnx.Rngs(3), nnx.Rngs(3)
    dropout, same = nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=twin)
    monkeypatch.setitem(globals(), "DROPOUT", dropout)
    compiled = tpjax.compile(lambda x: DROPOUT(x) + DROPOUT(x))  # noqa: F821
    for _ in range(3):
        assert_close("mask", compiled(X), same(X) + same(X), 1e-6)
    assert_close("streams", nnx.state(dropout), nnx.state(same), 0)
    assert len(compiled.entries()) == 1
