# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Rules of the user's own: what a pattern matches, at which types, where, and what is refused."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import tpjax
from tests.harness import assert_close, inputs
from tests.stax_passes.spellings import assert_same, rewritten
from tpjax.core import _jax
from tpjax.pallas import rms_norm
from tpjax.stax_passes.engine import rewriting_pass
from tpjax.stax_passes.pipeline import CLEAN_UP, PASSES, optimize
from tpjax.stax_passes.rules import with_rules

MINUS = tpjax.rule(lambda x: x + 1, lambda x: x - 1, name="plus_to_minus")


def hits(rule: Any, fn: Any, *args: Any, clean: bool = True) -> tuple[int, list[str]]:
    """Returns how often the rule fires in `fn`, and why it did not where it nearly did."""
    passes = (CLEAN_UP, rewriting_pass("mine", (rule,))) if clean else ()
    jaxpr = jax.make_jaxpr(fn)(*args)
    _, reports = optimize(jaxpr, passes or (rewriting_pass("mine", (rule,)),), verify=True)
    misses = [miss.reason for miss in reports[-1].near_misses]
    return len(reports[-1].hits), misses


# -- types ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("x", [3, 3.0, True, 2 + 1j], ids=str)
def test_R14_python_numbers(x: Any) -> None:
    """f(3) is 2: the pattern is traced at weak types too, and the result keeps its own."""
    compiled = tpjax.compile(lambda x: x + 1, rules=(MINUS,))
    assert complex(compiled(x)) == x - 1
    assert jax.typeof(compiled(x)) == jax.typeof(jax.jit(lambda x: x + 1)(x))
    (report,) = [r for r in compiled.explain(x).passes if r.name == "apply_rules"]
    assert [hit.rule for hit in report.hits] == ["plus_to_minus"]
    assert "test_rules.py" in report.hits[0].source


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "int8", "uint32", "int32", "bool", "complex64"]
)
def test_R14_arrays_of_any_dtype(dtype: str) -> None:
    """Whatever JAX does with the number 1 at the dtype, it does in the pattern."""
    fn = lambda x: (x + 1) * 2  # noqa: E731
    for shape in ((), (3,), (2, 3)):
        x = jnp.ones(shape, dtype)
        new, report = rewritten(fn, rewriting_pass("mine", (MINUS,)), x)
        assert len(report.hits) == 1, (dtype, shape)
        assert_close(dtype, new(x), (x - 1) * 2, 0)


# -- what matches ---------------------------------------------------------------------------------


def positive(x):
    return jnp.where(x > 0, x, 0)


def linear(x, w, b):
    return x @ w + b


def loss(logits, labels):
    log_probs = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_probs, labels[..., None], -1)[..., 0]


def mlp(x, w1, b1, w2, b2):
    return jax.nn.gelu(x @ w1 + b1) @ w2 + b2


def cast_mlp(*args):
    return mlp(*(x.astype(jnp.bfloat16) for x in args)) * 2


def linear_norm(x, scale):
    y = x - x.mean(-1, keepdims=True)
    return y / jnp.sqrt((y**2).mean(-1, keepdims=True) + 1e-5) * scale


def norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def half_norm(x, scale):
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def attend(q, k, v):
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(q.shape[-1])
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, -1), v)


def attend_where(q, k, v, mask):
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(q.shape[-1])
    scores = jnp.where(mask, scores, -1e9)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, -1), v)


def tripled(x):
    return jax.lax.scan(lambda c, _: (c * 2, None), x, None, length=3)[0]


def grouped(x):
    return x.reshape(2, 2, 6).sum(1)


TABLE = np.arange(6, dtype=np.float32)
X, HALF, WIDE = inputs("f32[4,6]", 1), inputs("bf16[4,6]", 1), inputs("f32[2,4,6]", 1)
SCALE, WEIGHTS, Q = inputs("f32[6]", 2), inputs("f32[6,5]", 3), inputs("f32[2,8,4,16]", 4)
KEY, IDS, LABELS = jax.random.key(0), jnp.array([2, 0]), jnp.array([2, 0, 0, 5])
MASK = np.tri(8, dtype=bool)

# (what it shows, pattern, program, arguments, hits); the program is not the pattern alone
MATCHES: tuple[tuple[str, Any, Any, tuple[Any, ...], int], ...] = (
    ("a jitted function", jax.nn.silu, lambda x: jax.nn.silu(x * 2) + 1, (X,), 1),
    ("half precision", jax.nn.silu, lambda x: jax.nn.silu(x * 2) + 1, (HALF,), 1),
    ("custom_jvp", lambda x: jax.nn.relu(x) ** 2, lambda x: jax.nn.relu(x - 1) ** 2 * 3, (X,), 1),
    ("jnp.where", positive, lambda x: jnp.where(x > 0, x, 0.0) * 3, (X,), 1),
    ("mirrored", lambda x: jnp.where(jnp.less(0, x), x, 0),
     lambda x: jnp.where(x > 0, x, 0) * 3, (X,), 1),
    ("another number", lambda x: x + 1, lambda x: x + 2, (X,), 0),
    ("another sign of zero", lambda x: x + 0.0, lambda x: x + -0.0, (X,), 0),
    ("NaN", lambda x: jnp.where(x > 0, x, np.nan),
     lambda x: jnp.where(x > 0, x, np.nan) > 1, (X,), 1),
    ("an argument twice", lambda x: jnp.sin(x) * x, lambda x, y: jnp.sin(x) * y, (X, X), 0),
    ("twice, swapped", lambda x: jnp.sin(x) * x, lambda x: x * jnp.sin(x) + 1, (X,), 1),
    ("two values for two", lambda x, y: jnp.sin(x) * y, lambda x: x * jnp.sin(x) + 1, (X,), 1),
    ("not commutative", lambda x, y: jnp.sin(x) - y, lambda x, y: y - jnp.sin(x), (X, X), 0),
    ("a reduction, other sizes", norm, lambda x, s: norm(x, s) + 1, (X, SCALE), 1),
    ("three axes", norm, lambda x, s: norm(x, s) + 1, (WIDE, SCALE), 1),
    ("mixed dtypes", norm, lambda x, s: norm(x, s) + 1, (HALF, SCALE), 1),
    ("casts inside", half_norm, lambda x, s: half_norm(x, s) + 1, (HALF, SCALE), 1),
    ("casts that vanish", half_norm, lambda x, s: half_norm(x, s) + 1, (X, SCALE), 1),
    ("a scale of ones is none", norm, lambda x: norm(x, 1.0) + 1, (X,), 0),
    ("a product", linear, lambda x, w: jnp.sin(x @ w + 1), (X, WEIGHTS), 1),
    ("of a vector", linear, lambda x, w, b: linear(x, w, b) * 2, (SCALE, WEIGHTS, SCALE[:5]), 1),
    ("another precision", lambda x, w: jnp.matmul(x, w, precision="highest"), jnp.matmul,
     (X, WEIGHTS), 0),
    ("a gather", lambda t, i: jnp.take(t, i, axis=0),
     lambda t, i: jnp.take(t * 2, i, axis=0) + 1, (X, IDS), 1),
    ("a scalar index", lambda x, n: x[:, n], lambda x: jnp.sin(x)[:, x[0].argmax()] * 2, (X,), 1),
    ("a loss, of two ranks", loss, lambda x, i: loss(x * 2, i).mean(), (X, LABELS), 1),
    ("five arguments, cast", mlp, cast_mlp, (WIDE, WEIGHTS, SCALE[:5], WEIGHTS.T, SCALE), 1),
    ("two layers that share a vector", linear_norm,
     lambda x, s: linear_norm(linear_norm(x, s) * 2, s), (X, SCALE), 2),
    ("a mask", lambda m, a, b: jnp.where(m, a, b),
     lambda x: jnp.where(x > 2, x * 2, x * 3), (X,), 1),
    ("attention", attend, lambda q, k, v: attend(q * 2, k, v) + 1, (Q, Q, Q), 1),
    ("masked", attend_where, lambda q, k, v, m: attend_where(q, k, v, m), (Q, Q, Q, MASK), 1),
    ("a loop", tripled, lambda x: tripled(x + 1) * 2, (X,), 1),
    ("a loop with another body", tripled, lambda x: tripled(x + 1) + x, (IDS,), 1),
    ("a random draw", lambda k, x: jax.random.bernoulli(k, 0.5, x.shape) * x,
     lambda k, x: jax.random.bernoulli(k, 0.5, (4, 6)) * (x + 1), (KEY, X), 1),
    ("fixed sizes", grouped, lambda x: grouped(x * 2) + 1, (X,), 1),
    ("an array of numbers", lambda x: x * TABLE, lambda x: jnp.sin(x) * TABLE, (X,), 1),
    ("other numbers", lambda x: x * TABLE, lambda x: jnp.sin(x) * TABLE[::-1], (X,), 0),
    ("casts alone", lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
     lambda x: jnp.sin(x).astype(jnp.bfloat16).astype(jnp.float32) * 2, (X,), 1),
    ("a transpose alone", lambda x: x.T, lambda x: jnp.sin(x).T * 2, (X,), 1),
    ("one of two results", lambda x: jax.lax.top_k(x, 2)[1],
     lambda x: jax.lax.top_k(x * 2, 2)[1] * 2, (X,), 1),
    ("the other result is used", lambda x: jax.lax.top_k(x, 2)[1],
     lambda x: jax.lax.top_k(x * 2, 2), (X,), 0),
    ("an argument is a number", lambda x, y: x // y, lambda x: (x * 2) // 3, (IDS,), 1),
    ("floats", lambda x, y: x // y, lambda x, y: (x * 2) // y, (X, X + 9), 1),
    ("integers", lambda x, y: x // y, lambda x, y: (x * 2) // y, (IDS, IDS + 1), 1),
    ("integers over a number", lambda x: x / 2, lambda x: x / 2, (IDS,), 1),
    ("gelu, inlined", jax.nn.gelu, lambda x: jax.nn.gelu(x * 2) * 2, (X,), 1),
    ("chains overlap", lambda x: jnp.sin(jnp.sin(x)),
     lambda x: jnp.sin(jnp.sin(jnp.sin(x))), (X,), 1),
    ("side by side", lambda x: x + 1, lambda x: ((x + 1) * 2 + 1) * (1 + x.sum()), (X,), 3),
)  # fmt: skip


@pytest.mark.parametrize(("pattern", "fn", "args", "count"), [m[1:] for m in MATCHES],
                         ids=[m[0] for m in MATCHES])  # fmt: skip
def test_what_a_pattern_matches(pattern: Any, fn: Any, args: Any, count: int) -> None:
    """A rule that replaces its pattern by itself fires where expected and changes no value."""
    rule = tpjax.rule(pattern, pattern, name="itself")
    passes = (CLEAN_UP, rewriting_pass("mine", (rule,)))
    jaxpr = jax.make_jaxpr(fn)(*args)
    result, reports = optimize(jaxpr, passes, verify=True)
    assert len(reports[-1].hits) == count, reports[-1].near_misses
    after, before = (jax.jit(jaxpr_as_fun(j))(*args) for j in (result, jaxpr))
    assert_close("values", after, before, 1e-6)


def test_a_program_as_written_matches_too() -> None:
    """Without the exact passes before it, a pattern still matches its own spelling."""
    rule = tpjax.rule(lambda x: (2 * x) * 1.0, lambda x: x + x)
    assert hits(rule, lambda x: (2 * x) * 1.0, X, clean=False)[0] == 1
    assert hits(rule, lambda x: (2 * x) * 1.0, X)[0] == 1
    assert hits(rule, lambda x: x * 2, X)[0] == 1
    assert hits(rule, lambda x: x * 2, X, clean=False)[0] == 1


def test_the_replacement_runs_an_operator() -> None:
    """A replacement may call `tpjax.pallas`: values and gradients stay, its choice is reported."""
    rule = tpjax.rule(norm, lambda x, scale: rms_norm(x, scale, eps=1e-6))
    passes = with_rules(PASSES, (rule,))
    fn = lambda x, scale: norm(jnp.sin(x), scale) * 2  # noqa: E731
    _, reports = optimize(jax.make_jaxpr(fn)(X, SCALE), passes, verify=True)
    by_name = {report.name: report for report in reports}
    assert [c.op for h in by_name["apply_rules"].hits for c in h.choices] == ["rms_norm"]
    assert not by_name["fuse_norm"].hits
    new = tpjax.compile(fn, rules=(rule,))
    assert_same("norm", fn, new, (X, SCALE), 1e-6)


def test_a_rule_runs_once_where_it_makes_its_own_pattern() -> None:
    """What a replacement computes is not looked at again."""
    rule = tpjax.rule(lambda x: x * 2, lambda x: (x * 2 + x * 2) / 2)
    assert hits(rule, lambda x: x * 2, X)[0] == 1
    compiled = tpjax.compile(lambda x: x * 2, rules=(rule,))
    assert_close("once", compiled(X), X * 2, 1e-6)


def test_the_first_of_two_rules_wins() -> None:
    """In the order given; both apply where they match different places."""
    first = tpjax.rule(jnp.sin, jnp.cos, name="first")
    second = tpjax.rule(lambda x: jnp.sin(x) + 1, jnp.tan, name="second")
    fn = lambda x: jnp.sin(x) + 1  # noqa: E731
    assert_close("sin", tpjax.compile(fn, rules=(first, second))(X), jnp.cos(X) + 1, 1e-6)
    assert_close("sum", tpjax.compile(fn, rules=(second, first))(X), jnp.tan(X), 1e-6)


# -- near misses and effects ----------------------------------------------------------------------


def test_a_value_inside_used_elsewhere_is_a_near_miss() -> None:
    rule = tpjax.rule(lambda x: jnp.exp(jnp.sin(x)), jnp.cos)
    count, misses = hits(rule, lambda x: jnp.exp(jnp.sin(x)) + jnp.sin(x), X)
    assert count == 0
    assert "also used at" in misses[0]
    assert "test_rules.py" in misses[0]
    count, misses = hits(rule, lambda x: (jnp.exp(jnp.sin(x)), jnp.sin(x)), X)
    assert count == 0
    assert "also returned" in misses[0]


def test_constants_inside_may_be_used_elsewhere() -> None:
    """What depends on no argument may serve others too: it is no reason to refuse."""
    rule = tpjax.rule(lambda x: jnp.where(x > 0, x, 0), lambda x: jnp.maximum(x, 0))
    twice = lambda x: jnp.where(x > 0, x, 0.0) + jnp.where(x * 2 > 0, x * 2, 0.0)  # noqa: E731
    assert hits(rule, twice, X)[0] == 2
    assert_close("twice", tpjax.compile(twice, rules=(rule,))(X), twice(X), 1e-6)


def test_effects_stay_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    def fn(x):
        jax.debug.print("first {}", x, ordered=True)
        y = x + 1
        jax.debug.print("second {}", y, ordered=True)
        return x

    compiled = tpjax.compile(fn, rules=(MINUS,))
    jax.block_until_ready(compiled(jnp.float32(0)))
    jax.effects_barrier()
    assert capfd.readouterr().out.split("\n")[:2] == ["first 0.0", "second -1.0"]


# -- bodies ---------------------------------------------------------------------------------------


def everywhere(x: Any) -> Any:
    x = jax.lax.scan(lambda c, _: (c + 1, None), x, None, length=3)[0]
    x = jax.checkpoint(lambda y: jnp.sin(y + 1))(x)
    x = jax.lax.cond(x.sum() > 0, lambda y: y + 1, lambda y: y * 2 + 1, x)
    x = jax.lax.while_loop(lambda c: (c + 1).sum() > 9, lambda c: (c + 1) - 2, x)
    return jax.jit(lambda y: jnp.tile(y + 1, 100))(x)


def test_R15_rules_enter_bodies() -> None:
    """jit, scan, while (both bodies), cond (both branches), checkpoint."""
    rule = tpjax.rule(lambda x: x + 1, lambda x: 1 + x)
    new, report = rewritten(everywhere, rewriting_pass("mine", (rule,)), SCALE)
    assert len(report.hits) == 7
    assert_close("everywhere", jax.jit(new)(SCALE), jax.jit(everywhere)(SCALE), 1e-6)


def test_R15_a_scan_still_differentiates() -> None:
    rule = tpjax.rule(lambda x: jnp.sin(x) * 2, lambda x: 2 * jnp.cos(x - np.pi / 2))

    def fn(x):
        return jax.lax.scan(lambda c, _: (jnp.sin(c) * 2, c), x, None, length=3)

    new, report = rewritten(fn, rewriting_pass("mine", (rule,)), X)
    assert len(report.hits) == 1
    assert_same("scan", fn, new, (X,), 1e-5)  # cos(x - pi/2) is sin(x) to a few last bits


@pytest.mark.parametrize("check_vma", [True, False])
def test_R15_rules_enter_shard_map(check_vma: bool) -> None:
    """Inside, a pattern is traced on the mesh's axes, so that its types vary as the program's."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.P("data")
    rule = tpjax.rule(
        lambda x, s: jax.nn.silu(x) * s + 1, lambda x, s: 1 + x * jax.nn.sigmoid(x) * s
    )

    def body(x, s):
        return jax.nn.silu(x * 2) * s + 1

    fn = jax.shard_map(
        body, mesh=mesh, in_specs=(split, jax.P()), out_specs=split, check_vma=check_vma
    )
    new, report = rewritten(fn, rewriting_pass("mine", (rule,)), X, SCALE)
    assert len(report.hits) == 1
    assert_close("shard_map", jax.jit(new)(X, SCALE), jax.jit(fn)(X, SCALE), 1e-6)


def test_a_long_chain_needs_no_recursion() -> None:
    def fn(x):
        for _ in range(1500):
            x = jnp.sin(x) + 1
        return x

    rule = tpjax.rule(lambda x: jnp.sin(x) + 1, lambda x: 1 + jnp.sin(x))
    assert hits(rule, fn, 0.5, clean=False)[0] == 1500


def test_three_rules_over_a_thousand_equations_are_quick() -> None:
    """Half a second of one core, the tracing of the patterns included; the best of three runs."""

    def fn(x, w, s):
        for i in range(50):
            y = norm(x, s[i])
            x = x + (jax.nn.silu(y @ w[i]) * (y @ w[i] + 1)) @ w[i].T
        return x

    jaxpr = jax.make_jaxpr(fn)(X, jnp.ones((50, 6, 6)), jnp.ones((50, 6)))
    jaxpr, _ = optimize(jaxpr, (CLEAN_UP,))
    assert _jax.count_equations(jaxpr) >= 1000
    times = []
    for _ in range(3):
        rules = (
            tpjax.rule(norm, norm, name="norm"),
            tpjax.rule(lambda a, b: jax.nn.silu(a) * b, lambda a, b: b * jax.nn.silu(a)),
            tpjax.rule(lambda x: x + 7, lambda x: x - 7),
        )
        start = time.process_time()
        _, report = rewriting_pass("mine", rules)(jaxpr)
        times.append(time.process_time() - start)
        assert len(report.hits) == 100
    assert min(times) < 0.5, times
