# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""What `tpjax.rule` takes and refuses, and how rules join the passes of `tpjax.compile`."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tpjax
from tests.harness import assert_close, inputs
from tpjax.stax_passes.pipeline import CLEAN_UP, PASSES
from tpjax.stax_passes.rules import with_rules

MINUS = tpjax.rule(lambda x: x + 1, lambda x: x - 1, name="plus_to_minus")
X, HALF = inputs("f32[4,6]", 1), inputs("bf16[4,6]", 1)


def applied(compiled: Any, *args: Any) -> list[str]:
    """Returns the rules that `apply_rules` applied in the call."""
    reports = [r for r in compiled.explain(*args).passes if r.name == "apply_rules"]
    return [hit.rule for report in reports for hit in report.hits]


def norm(x, scale):
    return x * scale


def _two(x, y):
    return x + y


@pytest.mark.parametrize(
    ("pattern", "replacement", "options", "says"),
    [
        (3, jnp.sin, {}, "pattern must be a function; got 3"),
        (jnp.sin, None, {}, "replacement must be a function; got None"),
        (int, jnp.sin, {}, "pattern must be a function"),
        (lambda *xs: xs[0], jnp.sin, {}, r"takes \*args.*lambda x, y: pattern\(x, y\)"),
        (jnp.add, _two, {}, r"takes \*args"),
        (lambda: 1.0, lambda: 2.0, {}, "takes no argument"),
        (jnp.sin, _two, {}, "replacement must be a function of 1 argument.*got x, y"),
        (_two, lambda y, x: x + y, {}, r"\(x, y\) in the pattern's order; got \(y, x\)"),
        (lambda x, *, k: x + k, jnp.sin, {}, "needs k= by name"),
        (jnp.sin, jnp.cos, {"tier": "exat"}, "unknown tier 'exat'. Did you mean 'exact'"),
        (jnp.sin, jnp.cos, {"name": ""}, "name must be a string"),
    ],
)  # fmt: skip
def test_a_rule_is_checked_at_the_door(
    pattern: Any, replacement: Any, options: Any, says: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        tpjax.rule(pattern, replacement, **options)


def test_defaults_stay_and_names_are_free() -> None:
    """A parameter with a default is no argument of the pattern; other names need not agree."""
    rule = tpjax.rule(lambda x, by=3.0: x / by, lambda y: y * 2, name="thirds")
    assert applied(tpjax.compile(lambda x: x / 3.0, rules=(rule,)), X) == ["thirds"]
    assert applied(tpjax.compile(lambda x: x / 2.0, rules=(rule,)), X) == []


def test_the_name_is_found() -> None:
    assert tpjax.rule(norm, lambda x, scale: x).name == "norm"
    assert tpjax.rule(lambda x, scale: x, norm).name == "norm"
    assert tpjax.rule(lambda x: x, lambda x: x).name.startswith("rule at test_rule_options.py:")


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        (lambda x: x, "its own argument"),
        (lambda x: jnp.ones(3), "is a constant"),
        (lambda x: 2.0, "is a constant"),
        (lambda x, y: x + 1, "argument 2 of its pattern"),
        (lambda x: (x, x + 1), "returns a tuple; it must return one array"),
        (lambda x: {"a": x + 1}, "returns a dict"),
        (lambda x: None, "returns a NoneType"),
        (lambda x: (jax.debug.print("{}", x), x + 1)[1], "side effects"),
    ],
)
def test_a_pattern_that_is_none_is_an_error(pattern: Any, says: str) -> None:
    """At the first call, for that is when a pattern is traced; the error is no warning."""
    count = pattern.__code__.co_argcount
    rule = tpjax.rule(pattern, (lambda x: x) if count == 1 else (lambda x, y: x), name="odd")
    compiled = tpjax.compile(lambda x: x + 1, rules=(rule,))
    with pytest.raises(ValueError, match=rf"odd .*{says}"):
        compiled(X)


def test_an_identity_at_some_types_is_a_pattern() -> None:
    """A cast that does nothing to float32 is a pattern at other types."""
    rule = tpjax.rule(lambda x: x.astype(jnp.float32), lambda x: x * jnp.float32(1))
    compiled = tpjax.compile(lambda x: jnp.sin(x.astype(jnp.float32)), rules=(rule,))
    assert len(applied(compiled, HALF)) == 1


def test_exact_mode_takes_exact_rules_only() -> None:
    close = tpjax.rule(lambda x: x + x, lambda x: x * 2, name="doubling")
    exact = tpjax.rule(lambda x: x + x, lambda x: x * 2, tier="exact", contract="bits")
    with pytest.raises(ValueError, match=r"mode='exact'.*doubling.*tier 'close'"):
        tpjax.compile(lambda x: x + x, mode="exact", rules=(close,))
    compiled = tpjax.compile(lambda x: x + x, mode="exact", rules=(exact,))
    assert len(applied(compiled, X)) == 1
    assert_close("bits", compiled(X), X + X, 0)


def test_rules_stand_after_the_first_clean_up() -> None:
    """Before the built-in fusions; first where there is no clean-up; none adds no pass."""
    names = lambda passes: [getattr(p, "__name__", "group") for p in passes]  # noqa: E731
    assert with_rules(PASSES, ()) == PASSES
    full = names(with_rules(PASSES, (MINUS,)))
    start = ["share_bodies", "share_layers", "group", "apply_rules"]
    assert full[:6] == [*start, "fuse_attention", "fuse_norm"]
    assert names(with_rules((CLEAN_UP,), (MINUS,))) == ["group", "apply_rules", "group"]
    assert names(with_rules(PASSES[3:5], (MINUS,))) == ["apply_rules", *full[4:6]]
