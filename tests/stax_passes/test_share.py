# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Shared subexpressions: what merges, and what must stay apart."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.harness import inputs
from tests.stax_passes.gradients import assert_gradients
from tests.stax_passes.programs import primitives, rules_fired
from tpjax.stax_passes.share import share_subexpressions

X, Y = inputs("f32[2,3]", 0), inputs("f32[2,3]", 1)
N = inputs("i32[2,3]", 2)
KEY, OTHER = jax.random.key(0), jax.random.key(1)
TABLE = np.arange(6, dtype=np.float32).reshape(2, 3)


def _twice(function: Any) -> Any:
    return lambda *args: (function(*args), function(*args))


MERGES: list[tuple[str, Any, tuple[Any, ...], int]] = [
    ("R08 x * 2", _twice(lambda x: x * 2), (X,), 1),
    ("a chain", _twice(lambda x: jnp.sin(x * 2) + 1), (X,), 3),
    ("either order", lambda x, y: (x * y, y * x, x + y, y + x), (X, Y), 2),
    ("integers, either order", lambda n: (lax.max(n, n * 3), lax.max(n * 3, n)), (N,), 2),
    ("R08 one key", _twice(lambda k: jax.random.bits(k, (2,))), (KEY,), 1),
    ("one key, split", _twice(lambda k: jax.random.split(k)), (KEY,), 1),
    ("a whole scan", _twice(lambda x: lax.cumsum(x, 0)), (X,), 1),
    ("a call", _twice(jax.nn.silu), (X,), 1),
    ("casts up", _twice(lambda x: x.astype("float32")), (X.astype("bfloat16"),), 1),
    (
        "casts of what has no gradient",
        _twice(lambda n: jnp.cos(n * 1.5).astype("bfloat16")),
        (N,),
        4,
    ),
    ("through a merge", lambda x, y: (jnp.sin(x * y) - 1, jnp.sin(y * x) - 1), (X, Y), 3),
]

APART: list[tuple[str, Any, tuple[Any, ...]]] = [
    ("R08 other keys", lambda k, q: (jax.random.bits(k), jax.random.bits(q)), (KEY, OTHER)),
    ("R08 effects", _twice(lambda x: jax.debug.callback(lambda v: None, x)), (X,)),
    ("other parameters", lambda x: (x.sum(0), x.sum(1)), (X,)),
    ("other literals", lambda x: (x * 2.0, x * 3.0), (X,)),
    ("zeros of either sign", lambda x: (x * 0.0, x * -0.0), (X,)),
    ("not commutative", lambda x, y: (x - y, y - x), (X, Y)),
    ("which zero", lambda x, y: (lax.max(x, y), lax.max(y, x)), (X, Y)),
    ("complex products round", lambda x, y: (lax.complex(x, y) * lax.complex(y, x),
                                             lax.complex(y, x) * lax.complex(x, y)), (X, Y)),
    ("barriers", _twice(lambda x: lax.optimization_barrier(x)), (X,)),
    ("weak and strong", lambda x: (x * 2.0, x * np.float32(2)), (2.0,)),
    ("gradients that would be summed in bf16", _twice(lambda x: x.astype("bfloat16")), (X,)),
    ("other dtypes", lambda x: (x.astype("bfloat16"), x.astype("float16")), (X,)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fn", "args", "merged"), [r[1:] for r in MERGES], ids=[r[0] for r in MERGES]
)
def test_R08_equal_equations_merge(fn, args, merged) -> None:
    _, fired, _ = rules_fired(fn, *args, passes=(share_subexpressions,))
    assert fired == {"common_subexpression": merged}


@pytest.mark.parametrize(("fn", "args"), [row[1:] for row in APART], ids=[row[0] for row in APART])
def test_R08_what_must_stay_apart(fn, args) -> None:
    result, fired, _ = rules_fired(fn, *args, passes=(share_subexpressions,))
    traced = primitives(jax.make_jaxpr(fn)(*args))
    assert primitives(result).count(traced[-1]) == traced.count(traced[-1])
    assert not fired.keys() - {"common_subexpression"}


def test_R08_array_literals_merge_by_their_bits() -> None:
    def fn(x: jax.Array) -> Any:
        one, other, third = (jnp.arange(6.0) * 2 + c for c in (1, 1, 2))
        return x + one, x + other, x + third

    result, _, _ = rules_fired(fn, jnp.ones(6))
    assert primitives(result) == ["add", "add"]


def test_R08_reads_of_a_reference_never_merge() -> None:
    def fn(x: jax.Array) -> Any:
        ref = jax.new_ref(x)
        first = ref[0]
        ref[0] = first + 1
        return first, ref[0]

    result, fired, _ = rules_fired(fn, jnp.ones(3))
    assert primitives(result).count("get") == 2
    assert not fired["common_subexpression"]


def test_R08_merging_stays_within_its_body() -> None:
    def fn(x: jax.Array) -> Any:
        return lax.cond(x[0, 0] > 0, lambda y: jnp.sin(y), lambda y: jnp.sin(y) + 1, jnp.sin(x))

    _, fired, _ = rules_fired(fn, X, passes=(share_subexpressions,))
    assert not fired


@jax.jit
def _helper(x: jax.Array) -> jax.Array:
    return jnp.sin(x) * 2


@jax.jit
def _deeper(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.exp(_helper(x)), jnp.cos(x)


THROUGH_CALLS: list[tuple[str, Any, dict[str, int]]] = [
    ("beside it, later", lambda x: (_helper(x), jnp.sin(x)), {"sin": 1, "mul": 1, "jit": 0}),
    ("beside it, before", lambda x: (jnp.sin(x), _helper(x)), {"sin": 1, "mul": 1, "jit": 0}),
    ("a call in a call", lambda x: (_helper(x), _deeper(x)), {"sin": 0, "exp": 1, "jit": 1}),
    ("two calls deep", lambda x: (_deeper(x), jnp.sin(x)), {"sin": 1, "exp": 1, "jit": 0}),
    ("sigmoid in silu", lambda x: (jax.nn.silu(x), jax.nn.sigmoid(x)), {"logistic": 1, "jit": 0}),
    ("the whole call", lambda x: (_deeper(x), _deeper(x)), {"sin": 0, "jit": 1}),
    ("nothing shared", lambda x: (jax.nn.silu(x), jax.nn.silu(x + 1)), {"logistic": 0, "jit": 2}),
    ("only what is free", lambda x: (_deeper(x), jnp.zeros(3)), {"jit": 1}),
]


@pytest.mark.parametrize(
    ("fn", "counts"), [r[1:] for r in THROUGH_CALLS], ids=[r[0] for r in THROUGH_CALLS]
)
def test_equal_equations_merge_across_the_border_of_a_call(fn, counts) -> None:
    result, _, _ = rules_fired(fn, X)
    found = primitives(result)
    assert {name: found.count(name) for name in counts} == counts
    assert_gradients("across a call", fn, result, X, tol=1e-6)  # sums merge before, not after


def test_an_opened_helper_keeps_lines_and_profile_names() -> None:
    jaxpr = jax.make_jaxpr(lambda x: (jnp.sin(x), _helper(x)))(X)
    result, _ = share_subexpressions(jaxpr)
    (product,) = (eqn for eqn in result.eqns if eqn.primitive.name == "mul")
    assert str(product.source_info.name_stack) == "jit(_helper)"
    (call,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "jit")
    (inner,) = (e for e in call.params["jaxpr"].eqns if e.primitive.name == "mul")
    assert product.source_info.traceback is inner.source_info.traceback


def test_helpers_that_print_or_donate_stay_calls() -> None:
    @jax.jit
    def prints(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda v: None, x)
        return jnp.sin(x)

    donates = jax.jit(lambda x: jnp.sin(x), donate_argnums=0)
    for helper in (prints, donates):
        result, fired, _ = rules_fired(lambda x, f=helper: (jnp.sin(x), f(x)), X)
        assert primitives(result).count("jit") == 1, fired


def test_a_helper_without_results_is_no_obstacle() -> None:
    nothing = jax.jit(lambda x: ())
    _, fired, _ = rules_fired(lambda x: (nothing(x), jnp.sin(x), jnp.sin(x)), X)
    assert fired["common_subexpression"] == 1
