# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""What cannot be compiled raises one clear error; what can, works as plain JAX does."""

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tpjax
from tests.harness import assert_close, inputs
from tpjax.stax.capture import CaptureError

X = inputs("f32[4]", 0)


def test_arguments_that_are_no_arrays() -> None:
    compiled = tpjax.compile(lambda x, mode: x * 2 if mode == "double" else x)
    with pytest.raises(TypeError, match=r"mode.*'double'.*static_argnames"):
        compiled(X, "double")
    with pytest.raises(TypeError, match=r"mode\['a'\].*object.*static_argnames"):
        compiled(X, {"a": object()})
    static = tpjax.compile(lambda x, mode: x * 2 if mode == "double" else x, static_argnames="mode")
    assert_close("static", static(X, "double"), 2 * X, 0)
    with pytest.raises(ValueError, match="hash"):
        static(X, ["unhashable"])


def test_python_flags_work() -> None:
    def attend(x: Any, *, causal: bool = False, steps: int = 1) -> Any:
        for _ in range(steps):
            x = x * 2 if causal else x + 1
        return x

    compiled = tpjax.compile(attend)
    for causal in (True, False):
        for steps in (1, 2):
            actual = compiled(X, causal=causal, steps=steps)
            assert_close("flags", actual, attend(X, causal=causal, steps=steps), 0)
    assert len(compiled.entries()) == 4
    under_jit = jax.jit(lambda x: compiled(x, causal=True, steps=2))
    assert_close("known under a trace too", under_jit(X), 4 * X, 0)
    modes = tpjax.compile(lambda x, mode: x * 2 if mode == "double" else x)
    grad = jax.grad(lambda x: modes(x, "double").sum() + modes(x, "single").sum())(X)
    assert_close("strings under a trace", grad, 3 * jnp.ones(4), 0)


def test_results_that_are_no_arrays() -> None:
    with pytest.raises(TypeError, match=r"must return arrays.*'abc' \(str\) at result\['name'\]"):
        tpjax.compile(lambda x: {"x": x, "name": "abc"})(X)
    with pytest.raises(TypeError, match="must return arrays"):
        jax.jit(tpjax.compile(lambda x: object()))(X)
    result = tpjax.compile(lambda x: {"a": 2, "b": None, "x": x})(X)
    assert (int(result["a"]), result["b"]) == (2, None)


def test_not_traceable() -> None:
    with pytest.raises(CaptureError, match=r"NumPy array.*test_bad_input.py:\d+"):
        tpjax.compile(lambda x: np.sin(x))(X)


def test_cyclic_pytrees() -> None:
    cyclic: list[Any] = [X]
    cyclic.append(cyclic)
    compiled = tpjax.compile(lambda xs: xs[0])
    with pytest.raises((RecursionError, SystemError, ValueError, TypeError)):
        compiled(cyclic)
    assert_close("the next call", compiled([X]), X, 0)


def test_deleted_and_donated_arrays() -> None:
    compiled = tpjax.compile(lambda x: x + 1)
    x = jnp.ones(3)
    x.delete()
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        compiled(x)
    weight = jnp.ones(3)
    free = tpjax.compile(lambda x: x * weight)
    free(jnp.ones(3))
    weight.delete()
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        free(jnp.ones(3))
    weight = 2 * jnp.ones(3)
    assert_close("the next call", free(jnp.ones(3)), 2 * jnp.ones(3), 0)


def test_leaked_tracers() -> None:
    leaked: list[Any] = []

    @tpjax.compile
    def leaks(x: Any) -> Any:
        leaked.append(x)
        return x

    leaks(X)
    for fn in (lambda x: x + leaked[0], lambda x: leaked[0]):
        with pytest.raises(jax.errors.UnexpectedTracerError):
            tpjax.compile(fn)(X)
    with pytest.raises(jax.errors.UnexpectedTracerError):
        tpjax.compile(lambda x: x + 1)(leaked[0])


def test_prints_and_mutation_happen_when_traced(capsys: pytest.CaptureFixture[str]) -> None:
    seen: dict[str, int] = {}

    @tpjax.compile
    def noisy(x: Any) -> Any:
        print("tracing")
        seen["calls"] = seen.get("calls", 0) + 1
        return x + seen["calls"]

    for _ in range(3):
        assert_close("as traced", noisy(X), X + 1, 0)
    assert capsys.readouterr().out == "tracing\n"


def test_huge_constants_are_not_copied() -> None:
    table = jnp.zeros((1024, 1024))
    numpy_table = np.zeros((1024, 1024), np.float32)
    compiled = tpjax.compile(lambda i: table[i] + jnp.take(numpy_table, i, axis=0))
    assert compiled(3).shape == (1024,)
    assert "closure table: float32[1024,1024]" in str(compiled.explain(3))


def test_entries_do_not_keep_arguments_alive() -> None:
    class Holder:
        def __init__(self) -> None:
            self.weight = jnp.ones(3)

        @tpjax.compile
        def run(self, x: Any) -> Any:
            return x * self.weight

    import weakref

    holder = Holder()
    holder.run(jnp.ones(3))
    alive = weakref.ref(holder)
    del holder
    gc.collect()
    assert alive() is None


def test_errors_inside_jax_come_through() -> None:
    compiled = tpjax.compile(lambda x, y: x @ y)
    with pytest.raises(TypeError, match="dot_general"):
        compiled(jnp.ones((2, 3)), jnp.ones((2, 3)))
    assert compiled(jnp.ones((2, 3)), jnp.ones((3, 2))).shape == (2, 2)


def test_recursion_of_a_compiled_function() -> None:
    @tpjax.compile
    def power(x: Any, n: Any) -> Any:
        return x if n == 0 else power(x * x, n - 1)

    static = tpjax.compile(lambda x, n: x if n == 0 else static(x * x, n - 1), static_argnums=1)
    assert_close("static", static(X, 3), X**8, 1e-6)
    assert_close("asked", power(X, 3), X**8, 1e-6)


class Counter(nnx.Module):
    """A module that counts."""

    def __init__(self) -> None:
        self.n = nnx.Variable(jnp.int32(0))

    def bump(self) -> Any:
        self.n[...] += 1
        return self.n[...]


HELD = {"counter": Counter()}


def _bumps_held() -> Any:
    return HELD["counter"].bump()


def test_a_module_changed_through_something_else_is_an_error() -> None:
    counter = HELD["counter"]

    def assigns(x: Any) -> Any:
        HELD["counter"].extra = x  # pyright: ignore
        return x

    for fn in (
        lambda x: x + _bumps_held(),
        lambda x: x + HELD["counter"].bump(),
        lambda x, c=counter: x + c.bump(),
        assigns,
    ):
        for call in (tpjax.compile(fn), jax.jit(tpjax.compile(fn))):
            with pytest.raises(
                CaptureError, match=r"changes an NNX module.*test_bad_input.py:\d+.*as an argument"
            ):
                call(X)
    assert int(counter.n[...]) == 0
    named = tpjax.compile(lambda x: x + counter.bump())
    assert_close("named", named(X), X + 1, 0)
    assert int(counter.n[...]) == 1


class Configured(nnx.Module):
    """A module with settings in a plain attribute."""

    def __init__(self, settings: Any) -> None:
        self.inner = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.settings = settings

    def __call__(self, x: Any) -> Any:
        return self.inner(x) * self.settings["gain"][0]


def test_settings_of_a_module_in_a_dict_are_guards() -> None:
    model = Configured({"gain": [2.0], "name": "a"})
    by_argument = tpjax.compile(lambda model, x: model(x))
    by_closure, by_object = tpjax.compile(lambda x: model(x)), tpjax.compile(model)
    calls = (lambda x: by_argument(model, x), by_closure, by_object, jax.jit(by_object))
    for gain in (2.0, 3.0, 2.0):
        model.settings["gain"][0] = gain
        for call in calls[:3]:
            assert_close(str(gain), call(X), model.inner(X) * gain, 1e-6)
    assert_close("under a trace", calls[3](X), model.inner(X) * 2, 1e-6)
    assert [len(c.entries()) for c in (by_argument, by_closure, by_object)] == [2, 2, 2]
    assert "settings: was {'gain': [2.0]" in str(by_argument.explain_recompile())


def test_an_attribute_of_a_module_without_a_hash_is_an_error() -> None:
    class Odd:
        __hash__ = None  # pyright: ignore[reportAssignmentType]

    model = nnx.Sequential(Configured({"gain": [2.0]}))
    model.layers[0].settings = {"gain": [2.0], "odd": Odd()}
    for call in (tpjax.compile(lambda model, x: model(x)), tpjax.compile(type(model).__call__)):
        with pytest.raises(
            TypeError, match=r"layers\.0\.settings cannot be hashed \(dict\).*frozen"
        ):
            call(model, X)
