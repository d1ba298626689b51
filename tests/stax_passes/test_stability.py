# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Functions and integers at the edges of their range, compiled and plain; what stays whole."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tpjax
from tests.harness import assert_close, inputs
from tests.stax_passes.programs import assert_same_bits, evaluate
from tests.stax_passes.spellings import rewritten
from tpjax.stax_passes.engine import rewriting_pass
from tpjax.stax_passes.pipeline import CLEAN_UP, optimize

POINTS = (100.0, -100.0, 1e-8, 0.0)
STABLE: dict[str, Any] = {
    "mish": (jax.nn.mish, lambda x: x * np.tanh(np.logaddexp(x, 0))),
    "softplus": (jax.nn.softplus, lambda x: np.logaddexp(x, 0)),
    "log1p": (lambda x: jnp.log1p(jnp.abs(x)), lambda x: np.log1p(np.abs(x))),
    "expm1": (lambda x: jnp.expm1(x / 2), lambda x: np.expm1(x / 2)),
    "asinh": (jnp.arcsinh, np.arcsinh),
    "sinh": (lambda x: jnp.sinh(x / 2), lambda x: np.sinh(x / 2)),
    "selu": (jax.nn.selu, lambda x: 1.0507009873554805 * _elu(x, 1.6732632423543772)),
    "elu": (jax.nn.elu, lambda x: _elu(x, 1.0)),
    "silu": (jax.nn.silu, lambda x: x / (1 + np.exp(-x))),
    "gelu": (jax.nn.gelu, None),
    "log_sigmoid": (jax.nn.log_sigmoid, lambda x: -np.logaddexp(-x, 0)),
    "logsumexp": (lambda x: jax.nn.logsumexp(jnp.stack([x, 2 * x])), None),
}
"""By name, the function, and what it means in float64."""


def _elu(x: np.ndarray, alpha: float) -> np.ndarray:
    return np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))


@pytest.mark.parametrize("name", list(STABLE))
def test_R12_compiled_functions_are_as_stable_as_jax_is(name: str) -> None:
    """Value and gradient at 100, -100, 1e-8 and 0: those of jax.nn and jnp, and the true ones."""
    fn, meaning = STABLE[name]
    compiled = tpjax.compile(fn)
    points = [jnp.float32(x) for x in POINTS]
    for derivative in (lambda f: f, jax.grad, lambda f: jax.grad(jax.grad(f))):
        got = [jax.jit(derivative(compiled))(x) for x in points]
        assert_same_bits(name, got, [jax.jit(derivative(fn))(x) for x in points])
        assert np.isfinite(got).all()
    if meaning is not None:
        with np.errstate(over="ignore"):
            exact = meaning(np.asarray(points, np.float64))
        errors = np.abs(np.asarray([compiled(x) for x in points]) - exact)
        # relative: 1e-8 stays 1e-8; jnp.sinh itself is off by 1.4e-6; subnormals may be flushed
        assert (errors <= 2e-6 * np.abs(exact) + float(jnp.finfo("float32").tiny)).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("approximate", [True, False], ids=["tanh", "erf"])
def test_R13_gelu_is_recognised_in_its_two_forms(approximate: bool, dtype: str) -> None:
    """JAX inlines it; each form is met by its own pattern and by no other."""

    def form(approximate: bool) -> Any:
        return lambda x: jax.nn.gelu(x, approximate=approximate)

    x = inputs(f"{'f32' if dtype == 'float32' else 'bf16'}[4,8]", 0)
    w = inputs("f32[8,8]", 1).astype(dtype)
    for asked in (True, False):
        pattern = form(asked)
        rule = tpjax.rule(pattern, lambda x, pattern=pattern: pattern(x) * 2, name="gelu")
        fn = lambda x, w: form(approximate)(x @ w) + 1  # noqa: E731
        jaxpr, _ = optimize(jax.make_jaxpr(fn)(x, w), (CLEAN_UP,))
        _, report = rewriting_pass("user", (rule,))(jaxpr)
        assert len(report.hits) == (asked == approximate)


def test_R13_pieces_of_whole_functions_are_found_if_a_rule_asks() -> None:
    """silu is a call of its own until somebody looks for the sigmoid in it."""
    x = inputs("f32[4]", 0)
    fn = lambda x: jax.nn.silu(x) + jax.nn.softplus(x) + jnp.tanh(x)  # noqa: E731
    whole, _ = optimize(jax.make_jaxpr(fn)(x))
    names = [e.params.get("name", e.primitive.name) for e in whole.eqns]
    assert [name for name in names if name != "add"] == ["silu", "softplus", "tanh"]
    for piece, hits in ((jax.nn.sigmoid, 1), (lambda x: x * jax.nn.sigmoid(x), 1), (jnp.tanh, 1)):
        rule = tpjax.rule(piece, lambda x, piece=piece: piece(x) + 0.0, name="piece")
        new, report = rewritten(fn, rewriting_pass("user", (rule,)), x)
        assert len(report.hits) == hits
        assert_close("pieces", new(x), fn(x), 1e-6)


def test_R04_a_close_rule_may_drop_a_zero_that_turns_the_sign_of_zero() -> None:
    """Its contract says so; the built-in rules never do, and the exact mode refuses it."""
    drop = tpjax.rule(lambda x: x + 0.0, lambda x: x, name="drop_zero", contract="-0.0 stays -0.0")
    zero = jnp.float32(-0.0)
    fn = lambda x: x + 0.0  # noqa: E731
    for mode in ("default", "exact"):  # the program keeps it; XLA may still drop it, as under jit
        assert_same_bits("kept", [tpjax.compile(fn, mode=mode)(zero)], [jax.jit(fn)(zero)])
        kept = evaluate(tpjax.compile(fn, mode=mode).jaxpr(zero), zero)
        assert_same_bits("kept", kept, [jnp.float32(0.0)])
    assert_same_bits("dropped", [tpjax.compile(fn, rules=(drop,))(zero)], [zero])
    assert drop.tier == "close"
    with pytest.raises(ValueError, match="drop_zero"):
        tpjax.compile(fn, rules=(drop,), mode="exact")


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "uint32"])
def test_R19_integers_mean_what_they_mean_unrewritten(dtype: str) -> None:
    """Counts, floor division and remainder of negatives, clamps, shifts, overflow."""
    info = jnp.iinfo(dtype)
    edges = [int(info.min), -7, -1, 0, 1, 3, 12, int(info.max)]
    n = jnp.asarray([max(int(info.min), e) for e in edges], dtype).reshape(2, 4)
    divisor = jnp.asarray([3, -2 if info.min < 0 else 2, 5, 1], dtype)

    def fn(n: jax.Array, divisor: jax.Array) -> list[jax.Array]:
        one, top = jnp.asarray(1, n.dtype), jnp.asarray(info.max, n.dtype)
        by = jnp.stack([divisor, divisor])
        return [
            (n > 0).sum(1), (n > 0).sum(1, dtype=n.dtype), n // divisor, n % divisor,
            lax.div(n, by), lax.rem(n, by), jnp.clip(n, 0, 3), lax.clamp(one, n, one),
            n >> 1, n << 3, lax.shift_right_logical(n, one), n + top, n * n, -n, abs(n),
            n.sum(), n.prod(), n * 1 + 0, ~~n, jnp.sign(n), n.astype("int8").astype("int32"),
            n.astype("float32").astype(n.dtype), lax.population_count(n), jnp.divmod(n, divisor)[0],
        ]  # fmt: skip

    with jax.disable_jit():
        expected = fn(n, divisor)
    assert_same_bits(dtype, tpjax.compile(fn)(n, divisor), expected)
    assert_same_bits(f"{dtype} constants", tpjax.compile(lambda: fn(n, divisor))(), expected)
    constants = np.asarray(n), np.asarray(divisor)
    assert_same_bits(
        f"{dtype} host constants", tpjax.compile(lambda: fn(*map(jnp.asarray, constants)))(),
        expected,
    )  # fmt: skip


@pytest.mark.parametrize("target", ["int32", "uint8", "int16"])
def test_R20_a_compiled_bit_cast_reads_the_value_of_the_call(target: str) -> None:
    compiled = tpjax.compile(lambda x: lax.bitcast_convert_type(x * 1.0, target))
    for x in (jnp.float32([1.5, -0.0]), jnp.float32([-2.0, jnp.inf]), jnp.float32([0.1, 3e-39])):
        assert_close("bits", compiled(x), lax.bitcast_convert_type(x, target), tol=0)
    assert len(compiled.entries()) == 1
