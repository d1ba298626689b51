# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Constant folding: which constants fold, into what, and the bits of every primitive that folds."""

import itertools
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.stax_passes.programs import (
    as_function,
    assert_same_bits,
    primitives,
    rules_fired,
)
from tpjax.core import _jax
from tpjax.stax_passes.fold import ELEMENTWISE, MOVES, fold_constants
from tpjax.stax_passes.pipeline import optimize

CONVERT = partial(lax.convert_element_type_p.bind, weak_type=False, sharding=None)
INTEGER = partial(CONVERT, new_dtype=np.dtype("int32"))
HALF = partial(CONVERT, new_dtype=jnp.dtype("bfloat16"))
NP = np.asarray([[1, 2, 3], [4, 5, 6]], np.float32)


FOLDS: list[tuple[str, Any, list[str]]] = [
    ("2 + 3", lambda: jnp.int32(2) + jnp.int32(3), []),
    ("floats", lambda: (jnp.float32(2) + 3) * 0.5 - 1, []),
    ("Python floats", lambda: jnp.full((), 2.0) * 3.0 + 1.0, []),
    ("iota", lambda: jnp.arange(6) * 2 + 1, []),
    ("a mask", lambda: jnp.arange(4)[:, None] >= jnp.arange(4)[None, :], []),
    ("equal numbers", lambda: jnp.zeros((2, 3)) + 1, ["broadcast_in_dim"]),
    ("a host array", lambda: (NP * 2).T.reshape(6)[1:4], []),
    ("choice", lambda: jnp.where(jnp.arange(3) > 1, 5, 7), []),
    ("conversion", lambda: jnp.float32(2.5).astype(jnp.int32), []),
    ("rounding once", lambda: jnp.float32(1 / 3).astype(jnp.bfloat16), []),
    ("an iota by itself is short", lambda: jnp.arange(6), ["iota"]),
    ("a broadcast by itself is short", lambda: jnp.full((2, 3), 2.0), ["broadcast_in_dim"]),
]


@pytest.mark.parametrize(("fn", "left"), [row[1:] for row in FOLDS], ids=[r[0] for r in FOLDS])
def test_R07_constants_fold(fn, left) -> None:
    result, _, _ = rules_fired(fn)
    assert [name for name in primitives(result) if name != "jit"] == left, result


STAYS: list[tuple[str, Any]] = [
    ("transcendental", lambda: jnp.sin(jnp.float32(1))),
    ("root", lambda: lax.sqrt(np.float32(2))),
    ("quotient", lambda: lax.div(np.float32(1), np.float32(3))),
    ("R05 0 / 0", lambda: lax.div(np.float32(0), np.float32(0))),
    ("NaN", lambda: lax.sub(np.float32(np.inf), np.float32(np.inf))),
    ("subnormal", lambda: lax.mul(np.float32(1e-30), np.float32(1e-10))),
    ("integer over 0", lambda: lax.div(np.int32(1), np.int32(0))),
    ("overflowing quotient", lambda: lax.div(np.int32(-(2**31)), np.int32(-1))),
    ("out of the integer's range", lambda: INTEGER(np.asarray([1e20], np.float32))),
    ("NaN to integer", lambda: INTEGER(np.asarray([np.nan], np.float32))),
    ("rounded in two steps", lambda: HALF(np.asarray([2**24 + 2**16 + 1], np.int32))),
    ("shifted too far", lambda: lax.shift_left(np.int32(1), np.int32(40))),
    ("which zero", lambda: lax.max(np.float32(-0.0), np.float32(0.0))),
    ("complex", lambda: lax.add(np.complex64(1), np.complex64(2))),
    ("random", lambda: jax.random.bits(jax.random.key(0))),
]  # fmt: skip


@pytest.mark.parametrize("fn", [row[1] for row in STAYS], ids=[row[0] for row in STAYS])
def test_R07_what_may_differ_by_machine_stays(fn) -> None:
    jaxpr = jax.make_jaxpr(fn)()
    result, report = fold_constants(jaxpr)
    assert primitives(result) == primitives(jaxpr)
    assert not report.hits


def test_R07_a_fold_over_the_limit_is_refused_and_reported() -> None:
    result, fired, misses = rules_fired(lambda: jnp.arange(2**18 + 1) * 2)
    assert primitives(result) == ["iota", "mul"]
    assert not fired
    assert misses == ["fold: not folded: 1 MiB of constants, the limit is 1 MiB"]
    assert not rules_fired(lambda: jnp.arange(2**18) * 2)[0].eqns


def test_R07_each_reader_of_a_constant_array_counts() -> None:
    def fn(x: jax.Array) -> list[jax.Array]:
        table = jnp.arange(2**17) * 2
        return [x + table, x * table, x - table]

    result, _, misses = rules_fired(fn, jnp.ones(2**17, jnp.int32))
    assert primitives(result).count("iota") == 1
    assert "1.5 MiB" in misses[0]


def test_R07_device_arrays_and_tracers_are_left_alone() -> None:
    table = jnp.arange(3.0) + 0.5
    assert primitives(optimize(jax.make_jaxpr(lambda: table * 2)())[0]) == ["mul"]

    @jax.jit
    def outer(x: jax.Array) -> jax.Array:
        inner, _ = optimize(jax.make_jaxpr(lambda y: y + x * 2)(x))
        assert "mul" in primitives(inner)
        return as_function(inner)(x)[0]

    assert_same_bits("nested", [outer(jnp.float32(2))], [jnp.float32(6)])


def test_R07_folding_inside_bodies_still_differentiates() -> None:
    def fn(x: jax.Array) -> jax.Array:
        def step(carry: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
            scale = jnp.arange(3.0) * 0.5 + 1
            return carry * scale + t, jax.checkpoint(jnp.sin)(carry * 1.0)

        carry, ys = lax.scan(step, x, jnp.ones((4, 3)))
        return carry.sum() + ys.sum()

    x = jnp.asarray([0.3, -0.2, 0.1])
    result, fired, _ = rules_fired(fn, x)
    assert fired["fold"] >= 1
    optimized = as_function(result)
    assert_same_bits("gradient", [jax.grad(lambda v: optimized(v)[0])(x)], [jax.grad(fn)(x)])


VALUES = {
    "float32": (0.0, 1.5, -2.25, 3e5, 7.0), "bfloat16": (0.0, 1.5, -2.25, 3e5, 7.0),
    "float16": (0.0, 1.5, -2.25, 300.0, 7.0), "int32": (0, 1, -3, 2**31 - 1, 7),
    "int8": (0, 1, -3, 127, -128), "uint8": (0, 1, 3, 255, 7), "uint32": (0, 1, 3, 2**32 - 1, 7),
    "bool": (False, True),
}  # fmt: skip
BINARY = (
    "add", "sub", "mul", "div", "rem", "max", "min", "eq", "ne", "lt", "le", "gt", "ge", "and",
    "or", "xor", "shift_left", "shift_right_logical", "shift_right_arithmetic",
)  # fmt: skip
UNARY = ("neg", "abs", "not", "floor", "ceil", "square", "is_finite")


def _folded(jaxpr: _jax.Jaxpr, rows: list[tuple[Any, ...]]) -> tuple[list[int], list[np.ndarray]]:
    """Returns which rows of operands the one-equation jaxpr folds on, and the results."""
    which: list[int] = []
    results: list[np.ndarray] = []
    for i, row in enumerate(rows):
        literals: dict[Any, Any] = {
            var: _jax.literal(np.asarray(v), var.aval)
            for v, var in zip(row, jaxpr.invars, strict=True)
        }
        eqns = [e.replace(invars=[literals[v] for v in e.invars]) for e in jaxpr.eqns]
        debug_info = jaxpr.debug_info._replace(arg_names=())
        folded, _ = fold_constants(jaxpr.replace(invars=[], eqns=eqns, debug_info=debug_info))
        if not folded.eqns:
            which.append(i)
            results.append(np.asarray(cast(_jax.Literal, folded.outvars[0]).val))
    return which, results


@pytest.mark.parametrize("dtype", list(VALUES))
def test_R19_folded_bits_are_those_of_evaluation(dtype) -> None:
    """Every primitive on every pair of values, against one evaluation of all pairs by JAX."""
    pairs = np.asarray(list(itertools.product(VALUES[dtype], repeat=2)), jnp.dtype(dtype))
    columns = pairs[:, 0], pairs[:, 1]
    calls: dict[str, Any] = {}
    for name in (*BINARY, *UNARY):
        operands = columns[: 1 + (name in BINARY)]
        call = partial(getattr(lax, f"{name}_p").bind)
        try:
            jax.eval_shape(call, *operands)
        except TypeError:
            continue  # the primitive does not take this dtype
        calls[name] = call, operands
    _compare(calls)


@pytest.mark.parametrize("source", list(VALUES))
def test_R19_folded_conversions_are_those_of_evaluation(source) -> None:
    column = np.asarray(VALUES[source], jnp.dtype(source))
    calls = {
        target: (partial(CONVERT, new_dtype=jnp.dtype(target)), (column,))
        for target in VALUES
        if target not in (source, "bool")
    }
    _compare(calls)


def _compare(calls: dict[str, Any]) -> None:
    """Asserts that each call, on each row of its operands, folds to what JAX computes, or stays."""
    expected = jax.jit(lambda: [call(*operands) for call, operands in calls.values()])()
    folds = 0
    for (name, (call, operands)), values in zip(calls.items(), expected, strict=True):
        rows = list(zip(*operands, strict=True))
        which, results = _folded(jax.make_jaxpr(call)(*rows[0]), rows)
        folds += len(which)
        if which:
            assert_same_bits(name, [jnp.stack(results)], [values[np.asarray(which)]])
    assert folds > len(calls)


def test_R19_integer_semantics_are_kept_at_run_time() -> None:
    def fn(n: jax.Array, u: jax.Array) -> Any:
        counted = (n > 0).sum(1)
        shifted = [n >> 1, n << 3, u >> 1, u + jnp.uint32(2**32 - 1)]
        return counted, n // -3, n % 5, n % -5, jnp.clip(n, -2, 3), *shifted

    n = jnp.asarray([[-7, 0, 3], [2**31 - 1, -(2**31), 12]], jnp.int32)
    rules_fired(fn, n, n.astype(jnp.uint32))


def test_the_tables_name_primitives_of_jax() -> None:
    for name in (*ELEMENTWISE, *MOVES):
        assert getattr(lax, f"{name}_p").name == name
