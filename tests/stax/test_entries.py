# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Entries: what each was made for, why there are several, and how many are kept."""

import gc
import warnings
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tpjax
from tests.harness import assert_close, inputs
from tpjax.stax import program

X = inputs("f32[4]", 0)
DROPOUT: Any = None


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


def test_questions_and_history_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "MAX_ENTRIES", 4)
    compiled = tpjax.compile(lambda x: x * int(x) if x > 0 else x, recompile_limit=100)
    for n in range(1, 60):
        assert_close(str(n), compiled(jnp.float32(n)), jnp.float32(n * n), 0)
    kept = compiled._program
    assert len(kept.entries) == 4
    assert len(kept.questions) <= 4 * program.QUESTIONS
    assert [entry.number for entry in compiled.entries()] == [56, 57, 58, 59]
    assert [r.number for r in compiled.explain_recompile().recompiles] == [57, 58, 59]
    assert_close("an old one", compiled(jnp.float32(1)), jnp.float32(1), 0)
    assert compiled.entries()[-1].number == 60
    shapes = tpjax.compile(lambda x: x + (1 if x.sum() > 0 else 0), recompile_limit=100)
    for n in range(1, 60):
        shapes(jnp.ones(n))
    assert len(shapes._program.questions) <= 4 * program.QUESTIONS


def _executables() -> int:
    gc.collect()
    return len(jax.devices()[0].client.live_executables())


@pytest.mark.parametrize("asks", [False, True])
def test_what_entries_long_gone_compiled_is_freed(
    asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "MAX_ENTRIES", 4)
    compiled = tpjax.compile(
        lambda x: x * 2 if asks and x.sum() > 0 else x * 3, recompile_limit=100
    )
    xs = [np.ones(n, np.float32) for n in range(1, 40)]
    before = _executables()
    for x in xs:
        compiled(x)
    most = (1 + asks * program.QUESTIONS) * 4
    assert _executables() - before <= most + 8
    assert_close("goes on", compiled(xs[0]), jnp.asarray(xs[0]) * (2 if asks else 3), 0)


def test_the_entry_most_like_a_new_one_is_named() -> None:
    compiled = tpjax.compile(lambda x, y, z: x.sum() + y.sum() + z.sum())
    for shape in ((1, 1, 1), (2, 2, 2), (1, 2, 1), (2, 2, 3)):
        compiled(*(jnp.ones(n) for n in shape))
    assert [r.like for r in compiled.explain_recompile().recompiles] == [1, 1, 2]
    with jax.default_matmul_precision("highest"):
        compiled(*(jnp.ones(n) for n in (2, 2, 2)))
    assert _last(compiled) == (
        "  entry 5 (beside entry 2): jax_default_matmul_precision: was None, is now highest"
    )


@pytest.mark.parametrize("how", ["static", "static by name", "under a trace", "in a tuple"])
def test_values_that_python_calls_equal_have_entries_of_their_own(how: str) -> None:
    def fn(x: Any, value: Any) -> Any:
        value = value[0] if isinstance(value, tuple) else value
        return x + np.float32(len(repr(value)) + (10 if np.signbit(value) else 0))

    static: Any = {} if how == "under a trace" else {"static_argnames": "value"}
    compiled = tpjax.compile(fn, recompile_limit=100, **static)
    call = {
        "static": compiled,
        "static by name": lambda x, value: compiled(x, value=value),
        "under a trace": lambda x, value: jax.jit(lambda x: compiled(x, value))(x),
        "in a tuple": lambda x, value: compiled(x, (value,)),
    }[how]
    values = (0.0, -0.0, 1, True, 1.0, 0, False, float("nan"))
    for _ in range(2):
        for value in values:
            assert_close(repr(value), call(X, value), fn(X, value), 0)
    for value in (float("nan"), -0.0):
        call(X, value)
    made = compiled.entries() if static else compiled._program._inlined
    assert len(made) == len(values)


def test_answers_that_python_calls_equal_have_entries_of_their_own() -> None:
    def fn(x: Any) -> Any:
        return x * 0 + np.float32(np.copysign(1, float(x)) if float(x) == 0 else 5)

    compiled = tpjax.compile(fn)
    for _ in range(3):
        for value in (0.0, -0.0, float("nan")):
            x = jnp.float32(value)
            actual, expected = compiled(x), fn(x)
            assert_close(str(value), jnp.nan_to_num(actual), jnp.nan_to_num(expected), 0)
    assert len(compiled.entries()) == 3


def test_clear_forgets_everything() -> None:
    compiled = tpjax.compile(lambda x: x + (1 if x.sum() > 0 else 0))
    for x in (jnp.ones(4), -jnp.ones(4)):
        compiled(x)
    assert len(compiled.entries()) == 2
    compiled.clear()
    assert not compiled.entries()
    assert not compiled.explain_recompile().recompiles
    assert not compiled._program.questions
    assert_close("again", compiled(X), X + (X.sum() > 0), 0)


def test_a_call_keeps_no_free_array_that_was_replaced() -> None:
    weights = {"w": jnp.ones((256, 256))}
    compiled = tpjax.compile(lambda x: x * weights["w"].sum())
    compiled(X)
    old = weakref.ref(weights["w"])
    weights["w"] = 2 * weights["w"]
    compiled.clear()
    gc.collect()
    assert old() is None
    assert_close("the new one", compiled(X), X * 2 * 256**2, 1e-6)


def test_clear_of_a_method_forgets_what_its_objects_made() -> None:
    class Scaled:
        def __init__(self) -> None:
            self.scale = 2.0

        @tpjax.compile
        def run(self, x: Any) -> Any:
            return x * self.scale

    scaled = Scaled()
    assert_close("scaled", scaled.run(X), 2 * X, 0)
    assert len(scaled.run.entries()) == 1
    Scaled.run.clear()
    assert not scaled.run.entries()


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

    def plain(x: Any) -> Any:
        for w in ws:
            x = jnp.sin(x * w)
        return x.sum()

    gradient = jax.grad(lambda x: network(x, ws).sum())(X)
    assert_close("gradient", gradient, jax.grad(plain)(X), 1e-6)
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
    compiled = tpjax.compile(lambda x: DROPOUT(x) + DROPOUT(x))
    for _ in range(3):
        assert_close("mask", compiled(X), same(X) + same(X), 1e-6)
    assert_close("streams", nnx.state(dropout), nnx.state(same), 0)
    assert len(compiled.entries()) == 1
