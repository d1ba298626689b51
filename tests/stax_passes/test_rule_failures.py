# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Rules that fail: the original equations run, one warning names rule, equation and line."""

import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tpjax
from tests.harness import assert_close, inputs
from tests.stax_passes.spellings import rewritten
from tpjax.core.errors import UnsupportedError
from tpjax.pallas import rms_norm
from tpjax.stax.explanation import StrictError
from tpjax.stax_passes.engine import Recogniser, rewriting_pass

X = inputs("f32[3]", 1)


def sine(x: Any) -> Any:
    return jnp.sin(x) * 2


def raises(x: Any) -> Any:
    raise ZeroDivisionError("no such luck")


def prints(x: Any) -> Any:
    jax.debug.print("{}", x)
    return jnp.cos(x)


class Leaky:
    """Keeps the array of its first trace and returns it in the next."""

    def __init__(self) -> None:
        self.kept: Any = None

    def __call__(self, x: Any) -> Any:
        if self.kept is None:
            self.kept = x
            return jnp.sin(x)
        return self.kept


# what the replacement does, and what the warning says
FAULTS: dict[str, tuple[Any, str]] = {
    "raises": (raises, "ZeroDivisionError: no such luck"),
    "shape": (lambda x: jnp.sin(x)[:2], r"has shape \(2,\); the original \(3,\)"),
    "rank": (lambda x: jnp.sin(x)[None], r"has shape \(1, 3\)"),
    "dtype": (
        lambda x: jnp.sin(x).astype(jnp.bfloat16),
        "has dtype bfloat16; the original float32",
    ),
    "integer": (lambda x: jnp.sin(x).astype(int), "has dtype int32"),
    "tuple": (lambda x: (jnp.sin(x),), "returns a tuple; the original an array"),
    "dict": (lambda x: {"y": jnp.sin(x)}, "returns a dict"),
    "None": (lambda x: None, "returns a NoneType"),
    "string": (lambda x: "sine", "TypeError"),
    "effects": (prints, "side effects"),
    "name": (lambda x: undefined(x), "NameError"),  # noqa: F821 # pyright: ignore
    "data": (lambda x: x if x.sum() > 0 else -x, "TracerBoolConversionError"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_F02_the_original_runs_and_one_warning_says_why(fault: str) -> None:
    """Over two shapes and an explanation, each traced anew: one warning; strict raises."""
    replacement, says = FAULTS[fault]
    rule = tpjax.rule(jnp.sin, replacement, name="sine_rule")
    compiled = tpjax.compile(sine, rules=(rule,))
    where = rf"sine_rule: .*{says}.*\(in place of sin, .*test_rule_failures.py:\d+\)"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_close("original", compiled(X), sine(X), 1e-6)
        assert_close("again", compiled(jnp.stack([X, X])), sine(jnp.stack([X, X])), 1e-6)
        misses = compiled.explain(X).near_misses
    (warning,) = [w for w in caught if "sine_rule" in str(w.message)]
    assert re.search(where, str(warning.message), re.DOTALL)
    assert [m.rule for m in misses if m.failed] == ["sine_rule"]
    strict = tpjax.compile(sine, rules=(rule,), strict=True)
    with pytest.raises(StrictError, match="sine_rule failed in sine"):
        strict(X)


def test_F02_another_place_is_another_warning() -> None:
    """The line is named, so each place has its own; rules that work go on working."""
    rule = tpjax.rule(jnp.sin, raises, name="sine_rule")
    works = tpjax.rule(jnp.cos, lambda x: jnp.sin(x + jnp.pi / 2), name="cosine_rule")

    def fn(x: Any) -> Any:
        y = jnp.sin(x)
        return jnp.sin(y) + jnp.cos(y)

    compiled = tpjax.compile(fn, rules=(rule, works))
    with pytest.warns(UserWarning, match="sine_rule") as caught:
        assert_close("original", compiled(X), fn(X), 1e-6)
    line = fn.__code__.co_firstlineno
    assert [f":{line + k})" in str(w.message) for w, k in zip(caught, (1, 2), strict=True)]
    assert [h.rule for r in compiled.explain(X).passes for h in r.hits] == ["cosine_rule"]


def test_F02_a_tracer_that_leaks_out_does_no_harm() -> None:
    """Kept, it is nothing to us; returned in a later trace, JAX's error leaves the original."""
    rule = tpjax.rule(jnp.sin, Leaky(), name="leaky")
    compiled = tpjax.compile(sine, rules=(rule,))
    assert_close("first", compiled(X), sine(X), 1e-6)
    with pytest.warns(UserWarning, match="leaky: the rule raised"):
        assert_close("second", compiled(X[:2]), sine(X[:2]), 1e-6)


def test_F02_python_side_effects_happen_while_tracing() -> None:
    """As under jit: once for each type, not once for each place or call."""
    calls: list[Any] = []

    def counts(x: Any) -> Any:
        calls.append(x.shape)
        return jnp.sin(x)

    rule = tpjax.rule(jnp.sin, counts)
    compiled = tpjax.compile(lambda x: jnp.sin(jnp.sin(jnp.sin(x))), rules=(rule,))
    for _ in range(3):
        compiled(X)
    assert calls == [(3,)]


def test_F02_state_inside_a_replacement() -> None:
    """A reference made and read inside has no effect outside: no reason to refuse."""
    rule = tpjax.rule(jnp.sin, lambda x: jax.new_ref(jnp.sin(x))[...])
    compiled = tpjax.compile(sine, rules=(rule,))
    assert_close("reference", compiled(X), sine(X), 1e-6)


def test_F02_a_pattern_that_raises_everywhere_is_reported() -> None:
    """Not silently never matching: one warning with the rule, the error and the pattern's line."""

    def pattern(x: Any) -> Any:
        raise KeyError("forgot something")

    rule = tpjax.rule(pattern, jnp.sin, name="forgetful")
    compiled = tpjax.compile(sine, rules=(rule,))
    line = pattern.__code__.co_firstlineno
    says = rf"forgetful: its pattern raised KeyError.*forgot.*test_rule_failures.py:{line}"
    with pytest.warns(UserWarning, match=says):
        assert_close("original", compiled(X), sine(X), 1e-6)
    assert_close("no second warning", compiled(X[:2]), sine(X[:2]), 1e-6)
    with pytest.raises(StrictError, match="forgetful"):
        tpjax.compile(sine, rules=(rule,), strict=True)(X)


def test_F02_a_pattern_for_types_that_never_come_is_no_fault() -> None:
    """It could be traced somewhere; that the program has no such place is as it should be."""
    rule = tpjax.rule(lambda x: jnp.einsum("abcd->dcba", x), jnp.transpose)
    assert_close("original", tpjax.compile(sine, rules=(rule,))(X), sine(X), 1e-6)


def test_F02_a_recogniser_that_raises_is_reported() -> None:
    """Its reading of the graph is guarded like a replacement."""

    def extract(graph: Any, node: Any) -> Any:
        raise IndexError("off the graph")

    row = Recogniser("lost", frozenset({"sin"}), extract, "close", "")
    with pytest.warns(UserWarning, match=r"lost: the rule raised IndexError.*in place of sin"):
        new, report = rewritten(sine, rewriting_pass("mine", (row,)), X)
    assert report.near_misses[0].failed
    assert_close("original", new(X), sine(X), 1e-6)


def test_F02_an_implementation_asked_for_by_name_still_raises() -> None:
    """That a kernel cannot run where the user demands it is no failure of the rule."""
    rule = tpjax.rule(jnp.sin, lambda x: rms_norm(x, implementation="pallas"))
    with pytest.raises(UnsupportedError):
        tpjax.compile(sine, rules=(rule,))(X)


def test_F02_a_replacement_that_is_sharded_otherwise_is_refused() -> None:
    """On an Explicit mesh a sharding is part of the type, like a dtype."""
    mesh = jax.make_mesh((1, 1), ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, jax.P("a"))
        moved = tpjax.rule(jnp.sin, lambda x: jax.sharding.reshard(jnp.sin(x), jax.P("b")))
        compiled = tpjax.compile(sine, rules=(moved,))
        with pytest.warns(UserWarning, match="@b.*; the original .*@a"):
            assert jax.typeof(compiled(x)) == jax.typeof(x)
        kept = tpjax.compile(sine, rules=(tpjax.rule(jnp.sin, lambda x: jnp.sin(x)),))
        assert [h.rule for r in kept.explain(x).passes for h in r.hits] == ["sin"]
