# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Identities and canonical forms: what must fire, and the near misses that must not."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.harness import assert_close, inputs
from tests.stax_passes.programs import (
    as_function,
    assert_same_bits,
    evaluate,
    primitives,
    rules_fired,
)
from tpjax.stax_passes.canonical import canonicalise, keeps_values
from tpjax.stax_passes.pipeline import optimize

X = jnp.asarray([-0.0, 0.0, 1.5, -2.25, np.inf, np.nan], jnp.float32)
N = jnp.asarray([-7, 0, 3, 2**31 - 1, -(2**31), 12], jnp.int32)
H = inputs("bf16[2,3]", 0)
M = inputs("f32[2,3]", 1)
WHICH = jnp.asarray(True)


FIRES: list[tuple[str, Any, tuple[Any, ...], dict[str, int], list[str]]] = [
    # name, function, arguments, rules that fire, primitives that are left
    ("R01 constant first", lambda x: 2.0 * x, (X,), {"constant_last": 1}, ["mul"]),
    ("R01 comparison", lambda x: lax.lt(0.0, x), (X,), {"constant_last": 1}, ["gt"]),
    ("R02", lambda x: lax.neg(lax.neg(x)) * 3, (X,), {"negate_twice": 1, "dead_code": 1}, ["mul"]),
    ("R03 minus zero", lambda x: (x - 0.0) * 3, (X,), {"subtract_zero": 1}, ["mul"]),
    ("R03 times one", lambda x: (x * 1.0) * 3, (X,), {"multiply_one": 1}, ["mul"]),
    ("R03 one times", lambda x: 1.0 * x * 3, (X,),
     {"constant_last": 1, "multiply_one": 1}, ["mul"]),
    ("R03 over one", lambda x: (x / 1.0) * 3, (X,), {"divide_one": 1}, ["mul"]),
    ("R03 power one", lambda x: x**1 * 3, (X,), {"first_power": 1}, ["mul"]),
    ("times ones", lambda x: x * jnp.ones(6), (X,), {"multiply_one": 1, "dead_code": 1}, []),
    ("plus -0.0", lambda x: x + -0.0, (X,), {"add_zero": 1}, []),
    ("integer plus 0", lambda n: n + 0, (N,), {"add_zero": 1}, []),
    ("integer over 1", lambda n: lax.div(n, 1), (N,), {"divide_one": 1}, []),
    ("shift by 0", lambda n: (n << 0) >> 0, (N,), {"shift_zero": 2}, []),
    ("and, or, xor", lambda n: ((n & -1) | 0) ^ 0, (N,),
     {"and_ones": 1, "or_zero": 1, "xor_zero": 1}, []),
    ("not twice", lambda n: ~~n, (N,), {"not_twice": 1, "dead_code": 1}, []),
    ("abs twice", lambda x: abs(abs(x)), (X,), {"abs_twice": 1}, ["abs"]),
    ("floor twice", lambda x: jnp.floor(jnp.floor(x)), (X,), {"round_twice": 1}, ["floor"]),
    ("known choice", lambda x: lax.select_n(True, x, x * 2), (X,), {"known_choice": 1}, ["mul"]),
    ("R17", lambda h: h.astype("float32").astype("bfloat16"), (H,),
     {"convert_chain": 1, "dead_code": 1}, []),
    ("whole numbers", lambda n: n.astype(jnp.int8).astype(jnp.int16).astype(jnp.int32), (N,),
     {"convert_chain": 1, "dead_code": 1}, ["convert_element_type"] * 2),
    ("R18 there and back", lambda m: m.T.T, (M,), {"transpose_chain": 1, "dead_code": 1}, []),
    ("R18 composed", lambda m: m.reshape(1, 2, 3).transpose(2, 0, 1).transpose(2, 0, 1), (M,),
     {"transpose_chain": 1, "dead_code": 1}, ["reshape", "transpose"]),
    ("R18 reshapes", lambda m: m.reshape(6).reshape(3, 2), (M,),
     {"reshape_chain": 1, "dead_code": 1}, ["reshape"]),
    ("R18 reshape back", lambda m: m.reshape(6).reshape(2, 3), (M,),
     {"reshape_chain": 1, "dead_code": 1}, []),
    ("expand and squeeze", lambda m: jnp.squeeze(m[:, None], 1), (M,),
     {"reshape_chain": 1, "dead_code": 1}, []),
    ("padded by nothing", lambda m: lax.pad(m, 0.0, [(0, 0, 0)] * 2), (M,), {"pad_nothing": 1}, []),
    ("whole slice", lambda m: lax.slice(m, (0, 0), (2, 3)), (M,), {"whole_slice": 1}, []),
    ("reversed twice", lambda m: lax.rev(lax.rev(m, (0,)), (0,)), (M,), {"reverse_twice": 1}, []),
    ("one piece", lambda m: lax.concatenate_p.bind(m, dimension=0), (M,),
     {"concatenate_one": 1}, []),
    ("same order", lambda m: lax.transpose_p.bind(m, permutation=(0, 1)), (M,),
     {"transpose_chain": 1}, []),
    ("whole dynamic slice", lambda m, i: lax.dynamic_slice(m, (i, i), (2, 3)), (M, 1),
     {"whole_slice": 1}, []),
    ("result is operand", lambda x: jax.jit(lambda a, b: (b, a * 2))(x, x + 1)[0], (X,),
     {"forward_result": 1, "dead_code": 1}, ["add"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fn", "args", "rules", "left"), [row[1:] for row in FIRES], ids=[r[0] for r in FIRES]
)
def test_rules_that_fire(fn, args, rules, left) -> None:
    result, fired, _ = rules_fired(fn, *args)
    assert {rule: n for rule, n in fired.items() if rule in rules} == rules
    assert primitives(result) == left


STAYS: list[tuple[str, Any, tuple[Any, ...]]] = [
    ("R04 x + 0.0", lambda x: x + 0.0, (X,)),
    ("R04 x - -0.0", lambda x: x - -0.0, (X,)),
    ("R05 x * 0.0", lambda x: x * 0.0, (X,)),
    ("R05 x - x", lambda x: x - x, (X,)),
    ("R06 int + 0.0", lambda n: n + 0.0, (N,)),
    ("R06 broadcasting ones", lambda x: x * jnp.ones((2, 6)), (X,)),
    ("R03 weak type", lambda w: lax.mul(w, np.float32(1)), (2.0,)),
    ("a power of floats", lambda x: lax.pow(x, 1.0), (X,)),
    ("1 / x", lambda x: 1.0 / x, (X,)),
    ("0 - x", lambda x: 0.0 - x, (X,)),
    ("complex times one", lambda x: lax.complex(x, x) * 1.0, (X,)),
    ("R17 f32 -> bf16 -> f32", lambda m: m.astype("bfloat16").astype("float32"), (M,)),
    ("R17 bf16(f32(x) + 0)", lambda h: (h.astype("float32") + 0).astype("bfloat16"), (H,)),
    ("floats all the way", lambda h: h.astype("float32").astype("float16"), (H,)),
    ("int32 -> f32 -> int32", lambda n: n.astype("float32").astype("int32"), (N,)),
    ("broadcast, then reshape", lambda x: jnp.broadcast_to(x, (2, 6)).reshape(12), (X,)),
    ("reshape, then transpose", lambda m: m.reshape(3, 2).T, (M,)),
    ("choice at run time", lambda p, x: lax.select_n(p, x, x * 2), (WHICH, X)),
    ("part of a slice", lambda x: x[1:], (X,)),
    ("every other", lambda x: lax.slice(x, (0,), (6,), (2,)), (X,)),
    ("reversed once", lambda m: lax.rev(lax.rev(m, (0,)), (1,)), (M,)),
]  # fmt: skip


@pytest.mark.parametrize(("fn", "args"), [row[1:] for row in STAYS], ids=[r[0] for r in STAYS])
def test_near_misses_that_must_not_fire(fn, args) -> None:
    result, fired, _ = rules_fired(fn, *args)
    assert not fired.keys() - {"constant_last", "common_subexpression"}, fired
    assert primitives(result) == primitives(jax.make_jaxpr(fn)(*args))


def test_R01_one_form_for_both_orders() -> None:
    result, fired, _ = rules_fired(lambda x: (2.0 * x, x * 2.0), X)
    assert primitives(result) == ["mul"]
    assert fired == {"constant_last": 1, "common_subexpression": 1}
    again, reports = optimize(result)
    assert again is result
    assert not any(report.hits for report in reports)


def test_R02_two_negations_leave_one_product_of_the_input() -> None:
    result, _, _ = rules_fired(lambda x: -(-x) * 3, X)  # noqa: B002
    (eqn,) = result.eqns
    assert eqn.primitive.name == "mul"
    assert eqn.invars[0] is result.invars[0]


@pytest.mark.parametrize(
    "fn",
    [lambda x: (x - 0.0) * 3, lambda x: (x * 1.0) * 3, lambda x: (x / 1.0) * 3, lambda x: x**1 * 3],
    ids=["- 0.0", "* 1.0", "/ 1.0", "** 1"],
)
def test_R03_identities_leave_one_product_of_the_input(fn) -> None:
    for x in (X, N, H):
        result, _, _ = rules_fired(fn, x)
        if jax.eval_shape(fn, x).dtype == x.dtype:
            assert [e.invars[0] is result.invars[0] for e in result.eqns] == [True]
            assert primitives(result) == ["mul"]


def test_R06_identities_that_change_type_or_shape_stay() -> None:
    plus = jnp.asarray(0.0, jnp.float32)
    for fn, x in ((lambda n: n + plus, N), (lambda x: x * jnp.ones((2, 6)), X)):
        result, fired, _ = rules_fired(fn, x)
        assert result.out_avals == jax.make_jaxpr(fn)(x).out_avals
        assert not fired.keys() & {"add_zero", "multiply_one"}


def test_R18_transposes_compose_and_cancel_and_reshapes_merge() -> None:
    for fn, left in (
        (lambda m: m.T.T * 2, ["mul"]),
        (lambda m: m[None].transpose(2, 0, 1).transpose(1, 2, 0), ["broadcast_in_dim"]),
        (lambda m: m.reshape(1, 3, 2).transpose(2, 0, 1).transpose(2, 0, 1),
         ["reshape", "transpose"]),
        (lambda m: m.reshape(6).reshape(3, 2), ["reshape"]),
        (lambda m: m.reshape(6).reshape(2, 3) * 2, ["mul"]),
    ):  # fmt: skip
        assert primitives(rules_fired(fn, M)[0]) == left


def test_R04_R06_near_misses_are_reported() -> None:
    _, _, misses = rules_fired(lambda x: (x + 0.0, x * jnp.ones((2, 6))), X)
    assert any("-0.0" in miss for miss in misses)
    assert any(miss.startswith("multiply_one") and "[2,6]" in miss for miss in misses)


def test_R05_zero_over_zero_is_nan_at_run_time() -> None:
    result, _, _ = rules_fired(lambda x: x + jnp.float32(0) / jnp.float32(0), X)
    assert "div" in primitives(result)
    assert np.isnan(evaluate(result, X)[0]).all()


def test_R13_whole_functions_stay_whole() -> None:
    def fn(x: jax.Array) -> Any:
        return jax.nn.silu(x), jax.nn.softplus(x), jnp.tanh(x), jax.nn.relu(x)

    result, fired, _ = rules_fired(fn, M)
    assert primitives(result) == primitives(jax.make_jaxpr(fn)(M))
    assert "jit" in primitives(result)
    assert not fired


@pytest.mark.parametrize(
    "fn",
    [jax.nn.mish, jax.nn.softplus, jnp.log1p, jnp.expm1, jnp.arcsinh, jnp.sinh,
     jax.nn.selu, jax.nn.elu],
)  # fmt: skip
def test_R12_values_and_gradients_stay_stable(fn) -> None:
    points = jnp.asarray([100.0, -100.0, 1e-8, 0.0])
    points = jnp.abs(points) if fn is jnp.log1p else points
    optimized = as_function(optimize(jax.make_jaxpr(fn)(points[0]), verify=True)[0])
    for derivative in (lambda f: f, jax.grad):
        got = [derivative(lambda x: optimized(x)[0])(x) for x in points]
        assert_same_bits(fn.__name__, got, [derivative(fn)(x) for x in points])


def test_R20_bit_casts_use_the_value_of_each_call() -> None:
    def fn(x: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(x * 1.0, jnp.int32) + 0

    result, _, _ = rules_fired(fn, X)
    compiled = jax.jit(as_function(result))
    for x in (X, X + 1, -X):
        assert_close("bits", compiled(x)[0], fn(x), tol=0)


def test_R03_gradients_go_through_removed_identities() -> None:
    def fn(x: jax.Array) -> jax.Array:
        return jnp.sum(
            jnp.sin(lax.neg(lax.neg(x * 1.0)).T.T).reshape(6).reshape(2, 3).astype(jnp.float32)
        )

    result, _, _ = rules_fired(fn, M)
    optimized = as_function(result)
    assert_close("gradient", jax.grad(lambda m: optimized(m)[0])(M), jax.grad(fn)(M), tol=0)


@pytest.mark.parametrize(
    ("source", "target", "answer"),
    [
        ("bfloat16", "float32", True), ("float16", "float32", True), ("float16", "bfloat16", False),
        ("bfloat16", "float16", False), ("float32", "bfloat16", False), ("bool", "int8", True),
        ("int8", "bfloat16", True), ("uint8", "bfloat16", True), ("int16", "bfloat16", False),
        ("int16", "float16", False), ("int32", "float32", False), ("uint8", "int8", False),
        ("uint8", "int16", True), ("int8", "uint8", False), ("uint16", "float32", True),
        ("float32", "int32", False), ("float32", "complex64", False),
    ],
)  # fmt: skip
def test_keeps_values_by_trying_every_value(source, target, answer) -> None:
    source, target = jnp.dtype(source), jnp.dtype(target)
    assert keeps_values(source, target) is answer
    if source.itemsize > 2 or source == jnp.bool_ or "complex" in target.name:
        return
    every = np.arange(2 ** (8 * source.itemsize), dtype=f"u{source.itemsize}").view(source)
    with np.errstate(all="ignore"):
        back = every.astype(target).astype(source)
    same = (back == every) | ((every != every) & (back != back))
    if not (source == np.int8 and target == np.uint8) and not (
        source == np.uint8 and target == np.int8
    ):
        assert bool(same.all()) is answer  # two's complement comes back from a sign that was lost


def test_canonicalise_is_one_named_pass() -> None:
    assert canonicalise.__name__ == "canonicalise"
    assert canonicalise.__doc__
