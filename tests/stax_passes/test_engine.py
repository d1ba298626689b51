# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The engine: rules by pattern, failures that leave the original, levels entered, calls kept."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.harness import assert_close, inputs
from tests.stax_passes.spellings import assert_same, rewritten
from tpjax.stax_passes.engine import Match, Recogniser, rewriting_pass
from tpjax.stax_passes.pipeline import CLEAN_UP, optimize
from tpjax.stax_passes.unify import Rule

PLUS_TO_MINUS = Rule("plus_to_minus", lambda x: x + 1, lambda x: x - 1)
RELU = Rule("relu", lambda x: jnp.maximum(x, 0), jax.nn.relu)
AXPY = Rule("axpy", lambda a, x, y: jnp.sin(a) * x + y, lambda a, x, y: y + x * jnp.sin(a))


def test_R14_rule_of_one_line() -> None:
    """The replacement runs, and the report has the hit with its line."""
    new, report = rewritten(
        lambda x: x + 1, rewriting_pass("user", (PLUS_TO_MINUS,)), jnp.float32(3)
    )
    assert float(new(jnp.float32(3))) == 2
    assert [h.rule for h in report.hits] == ["plus_to_minus"]
    assert "test_engine.py" in report.hits[0].source


@pytest.mark.parametrize(
    ("fn", "rule", "hits"),
    [
        (lambda x: jnp.maximum(x, 0.0) * 2, RELU, 1),
        (lambda x: jnp.maximum(0.0, x), RELU, 1),
        (lambda x: jnp.maximum(x, 0.5), RELU, 0),
        (lambda x: jnp.minimum(x, 0.0), RELU, 0),
        (lambda x: x[0] + x * jnp.sin(x[1]), AXPY, 1),  # arguments of other shapes
        (lambda x: x * jnp.sin(x) + x, AXPY, 1),
        (lambda x: jnp.maximum(jnp.maximum(x, 0.0) + 1, 0.0), RELU, 2),
    ],
)
def test_pattern_matches_what_it_says(fn: Any, rule: Rule, hits: int) -> None:
    """Commutative operands match either way; another constant or primitive does not."""
    x = inputs("f32[4,4]", 1)
    new, report = rewritten(fn, rewriting_pass("user", (rule,)), x)
    assert len(report.hits) == hits
    assert_same("rule", fn, new, (x,), 1e-6)


def sin_to(replacement: Any) -> Any:
    """Returns a pass that replaces every sine."""

    def extract(graph, node):
        return Match(node.outs[0], node.ins, replacement, frozenset())

    return rewriting_pass("sines", (Recogniser("sine", frozenset({"sin"}), extract, "close", ""),))


def nested(x: Any) -> Any:
    x = jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=3)[0]
    x = jax.checkpoint(lambda y: jnp.sin(y) * 2)(x)
    x = jax.lax.cond(x.sum() > 0, jnp.sin, lambda y: jnp.sin(y) + 1, x)
    x = jax.lax.while_loop(lambda c: jnp.sin(c).sum() > 9, lambda c: jnp.sin(c) - 1, x)
    return jax.jit(lambda y: jnp.where(y > 1, jnp.sin(y), y))(x)


def test_R15_enters_bodies_and_nothing_opaque() -> None:
    """jit, scan, while, cond and checkpoint are entered; custom_jvp is not; scans differentiate."""
    x = inputs("f32[3]", 1)
    new, report = rewritten(nested, sin_to(lambda x: jnp.sin(x)), x)
    assert len(report.hits) == 7
    assert_close("nested", jax.jit(new)(x), jax.jit(nested)(x), 1e-6)
    scanned = lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c), c), x, None, length=3)  # noqa: E731
    assert_same("scan", scanned, rewritten(scanned, sin_to(jnp.sin), x)[0], (x,), 1e-6)

    @jax.custom_jvp
    def opaque(x):
        return jnp.sin(x)

    opaque.defjvp(lambda p, t: (jnp.sin(p[0]), t[0] * 5))
    new, report = rewritten(lambda x: opaque(x), sin_to(jnp.cos), x)
    assert not report.hits
    assert_close("rule kept", jax.grad(lambda x: new(x).sum())(x), jnp.full(3, 5.0), 1e-6)


@pytest.mark.parametrize("wrap", [jax.checkpoint, jax.jit, lambda fn: lambda x: _looped(fn, x)])
def test_R15_bodies_with_array_constants_still_differentiate(wrap: Any) -> None:
    """A folded array, and one of a replacement: a checkpoint may have no constants."""
    table = jnp.arange(4.0)
    plus = Rule("plus", lambda x: jnp.sin(x) + x, lambda x: jnp.sin(x) + x + 0 * table)

    def fn(x):
        return wrap(lambda x: (jnp.sin(x) + x) * (jnp.arange(4) % 3))(x)

    passes = lambda jaxpr: (  # noqa: E731
        rewriting_pass("user", (plus,))(optimize(jaxpr, (CLEAN_UP,))[0])
    )
    x = inputs("f32[2,4]", 1)
    new, report = rewritten(fn, passes, x)
    assert len(report.hits) == 1
    assert_same("constants", fn, new, (x,), 1e-6)
    assert_close("vmap", jax.vmap(new)(x[None]), fn(x)[None], 1e-6)


def _looped(fn: Any, x: Any) -> Any:
    return jax.lax.scan(lambda c, _: (fn(c), None), x, None, length=2)[0]


def test_F02_rule_that_raises_leaves_the_original() -> None:
    """One warning names rule, reason and line; the program runs as written, other rules apply."""

    def broken(x):
        raise ZeroDivisionError("no such luck")

    x = inputs("f32[3]", 1)
    with pytest.warns(
        UserWarning, match=r"sine: the rule raised ZeroDivisionError.*test_engine.py"
    ):
        new, report = rewritten(lambda x: jnp.sin(x), sin_to(broken), x)
    assert not report.hits
    assert "no such luck" in report.near_misses[0].reason
    assert_close("original", new(x), jnp.sin(x), 0)


def test_F02_rule_with_wrong_shape_leaves_the_original() -> None:
    """A replacement of another shape is refused before it can do harm."""
    x = inputs("f32[3]", 1)
    with pytest.warns(UserWarning, match="shape"):
        new, report = rewritten(lambda x: jnp.sin(x), sin_to(lambda x: x[:2]), x)
    assert not report.hits
    assert_close("original", new(x), jnp.sin(x), 0)


def test_keeps_dtype_and_weak_type() -> None:
    """A replacement in another dtype is cast to what stood there, weak types included."""
    for x in (inputs("bf16[3]", 1), 2.0):
        fn = lambda x: jnp.sin(x)  # noqa: E731
        new, report = rewritten(fn, sin_to(lambda x: jnp.cos(jnp.asarray(x, jnp.float32))), x)
        assert len(report.hits) == 1
        assert jax.typeof(jax.jit(new)(x)) == jax.typeof(jax.jit(fn)(x))


def test_effects_stay_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    """debug.print before and after a rewritten value, with an unused result, still prints."""

    def fn(x):
        jax.debug.print("first {}", x, ordered=True)
        y = jnp.sin(x)
        jax.debug.print("second {}", y, ordered=True)
        return x

    new, report = rewritten(fn, sin_to(jnp.sin), jnp.float32(0))
    jax.block_until_ready(jax.jit(new)(jnp.float32(0)))
    jax.effects_barrier()
    assert len(report.hits) == 1
    assert capfd.readouterr().out.split("\n")[:2] == ["first 0.0", "second 0.0"]


def test_untouched_helpers_stay_calls() -> None:
    """A jitted helper that no rewrite touched is emitted as the call it was."""

    def fn(x):
        return jnp.sin(jnp.where(x > 0, x, 0.0))

    jaxpr = jax.make_jaxpr(fn)(jnp.ones(3))
    new, _ = sin_to(jnp.cos)(jaxpr)
    assert [e.primitive.name for e in new.eqns] == ["gt", "jit", "cos"]


def test_G15_repeated_body_is_read_once() -> None:
    """Twelve calls of one jitted layer are searched and rewritten once."""
    reads = []

    def extract(graph, node):
        reads.append(node)
        return Match(node.outs[0], node.ins, jnp.cos, frozenset())

    @jax.jit
    def layer(x):
        for _ in range(70):  # too long for a helper: a level of its own
            x = x * 1.5 + 1
        return jnp.sin(x)

    def fn(x):
        for _ in range(12):
            x = layer(x)
        return x

    rows = (Recogniser("sine", frozenset({"sin"}), extract, "close", ""),)
    new, _ = rewriting_pass("sines", rows)(jax.make_jaxpr(fn)(jnp.ones(3)))
    assert len(reads) == 1
    assert "cos" in str(new)
    assert "sin " not in str(new)


def test_no_hit_returns_the_jaxpr_itself() -> None:
    """Nothing recognised, nothing re-traced."""
    jaxpr = jax.make_jaxpr(lambda x: x * 2)(jnp.ones(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sin_to(jnp.cos)(jaxpr)[0] is jaxpr
