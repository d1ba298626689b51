# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Products of transposes and of repeats: what must fire, near misses, and how far bits move."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tpjax
from tests.harness import assert_close, inputs
from tests.stax_passes.moving import optimized, values_and_gradients
from tests.stax_passes.programs import as_function, primitives
from tpjax.core import _jax
from tpjax.stax_passes.pipeline import EXACT_PASSES, FINISH, PASSES, optimize

GROUP = (FINISH,)
B, T, S, K, G, D = 2, 3, 5, 2, 3, 4  # T < D: the weights are smaller than the repeated values
X = inputs("f32[3,4,5]", 0)
W = inputs("f32[5,6]", 1)
Q = inputs(f"f32[{B},{T},{K * G},{D}]", 2)
KEY = inputs(f"f32[{B},{S},{K},{D}]", 3)
VALUE = inputs(f"f32[{B},{S},{K},{D}]", 4)
dot, einsum = lax.dot_general, jnp.einsum


def assert_near(fn: Any, result: _jax.Jaxpr, args: Any, tol: float = 1e-6) -> None:
    """Asserts that values and gradients keep the contract: the same products in another order."""
    new = lambda *xs: as_function(result)(*xs)  # noqa: E731
    assert_close("products", values_and_gradients(new, args), values_and_gradients(fn, args), tol)


FIRES: list[tuple[str, Any, tuple[Any, ...], dict[str, int], list[str]]] = [
    # name, function, arguments, rules that fire, primitives that are left
    ("right", lambda x, w: x @ w.T, (X, W.T), {"absorb_transpose": 1}, ["dot_general"]),
    ("of a matrix", lambda w, v: w @ v.T, (W, W), {"absorb_transpose": 1}, ["dot_general"]),
    ("both", lambda x, w: x[0].T @ w.T[:4], (X, W.T), {"absorb_transpose": 1},
     ["slice", "squeeze", "transpose", "slice", "dot_general"]),
    ("left and right", lambda w, v: w.T @ v.T, (W, inputs("f32[7,5]", 9)),
     {"absorb_transpose": 1}, ["dot_general"]),
    ("heads first", lambda q, k: dot(q.transpose(0, 2, 1, 3), k.transpose(0, 2, 1, 3),
                                     (((3,), (3,)), ((0, 1), (0, 1)))), (Q, Q),
     {"absorb_transpose": 1}, ["dot_general"]),
    ("two contracted axes", lambda x, y: dot(x.transpose(2, 0, 1), y.transpose(0, 2, 1),
                                             (((0, 1), (1, 0)), ((), ()))), (X, X),
     {"absorb_transpose": 1}, ["dot_general"]),
    ("undone behind", lambda x, w: (x.transpose(1, 0, 2) @ w).transpose(1, 0, 2), (X, W),
     {"undo_transpose": 1}, ["dot_general"]),
    ("repeated weights", lambda x, w: x @ jnp.broadcast_to(w, (3, 5, 6)), (X, W),
     {"group_product": 1}, ["dot_general"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fn", "args", "rules", "left"), [row[1:] for row in FIRES], ids=[r[0] for r in FIRES]
)
def test_R18_transposes_are_absorbed(fn, args, rules, left) -> None:
    result, fired, _ = optimized(fn, args, GROUP)
    assert {rule: n for rule, n in fired.items() if rule in rules} == rules
    assert primitives(result) == left
    assert_near(fn, result, args)


STAYS: list[tuple[str, Any, tuple[Any, ...], str | None]] = [
    ("other order of own axes", lambda x, w: x.transpose(1, 0, 2) @ w, (X, W), "order of the"),
    ("transposed behind", lambda x, w: (x @ w).transpose(1, 0, 2), (X, W), None),
    ("other transpose behind", lambda x, w: (x.transpose(1, 0, 2) @ w).transpose(2, 0, 1), (X, W),
     "order of the"),
    ("nothing contracted", lambda x, w: dot(w, w, (((), ()), ((), ()))), (X, W), None),
    ("repeated own axis", lambda x, w: jnp.broadcast_to(w[:, 0], (4, 5)) @ w, (X, W),
     None),
    ("repeated contracted axis", lambda x, w: w @ jnp.broadcast_to(w[0], (6, 6)), (X, W), None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fn", "args", "reason"), [row[1:] for row in STAYS], ids=[r[0] for r in STAYS]
)
def test_R18_near_misses_that_must_not_fire(fn, args, reason) -> None:
    result, fired, misses = optimized(fn, args, GROUP)
    assert not fired.keys() & {"absorb_transpose", "undo_transpose", "group_product"}, fired
    assert reason is None or any(m.startswith("absorb_transpose: ") and reason in m for m in misses)
    assert_near(fn, result, args, tol=0)


# -- repeated keys and values ---------------------------------------------------------------------


def repeat(x: Any) -> Any:
    return jnp.repeat(x, G, 2)


def broadcast(x: Any) -> Any:
    return jnp.broadcast_to(x[:, :, :, None], (B, S, K, G, D)).reshape(B, S, K * G, D)


def tile(x: Any) -> Any:
    return jnp.tile(x[:, :, :, None], (1, 1, 1, G, 1)).reshape(B, S, K * G, D)


def gather_axis(x: Any) -> Any:
    return jnp.broadcast_to(jnp.expand_dims(x, 3), (B, S, K, G, D)).reshape(B, S, -1, D)


def attend(q: Any, k: Any, v: Any) -> Any:
    s = jnp.tanh(einsum("bthd,bshd->bhts", q, k))
    return einsum("bhts,bshd->bthd", s, v)


def with_(how: Any) -> Any:
    return lambda q, k, v: attend(q, how(k), how(v))


def heads_first(q: Any, k: Any, v: Any) -> Any:
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, repeat(k), repeat(v)))
    return (jnp.tanh(q @ k.swapaxes(-1, -2)) @ v).transpose(0, 2, 1, 3)


def repeated_after_the_transpose(q: Any, k: Any, v: Any) -> Any:
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    k, v = jnp.repeat(k, G, 1), jnp.repeat(v, G, 1)
    return jnp.tanh(q @ k.swapaxes(-1, -2)) @ v


def scaled_after_the_repeat(q: Any, k: Any, v: Any) -> Any:
    return attend(q, repeat(k) * 0.5, jnp.abs(repeat(v)))


def own_axis(q: Any, k: Any, v: Any) -> Any:
    k, v = (jnp.broadcast_to(x[:, :, :, None], (B, S, K, G, D)) for x in (k, v))
    s = jnp.tanh(einsum("btkgd,bskgd->bkgts", q.reshape(B, T, K, G, D), k))
    return einsum("bkgts,bskgd->btkgd", s, v)


def one_head_for_all(q: Any, k: Any, v: Any) -> Any:
    return attend(q, *(jnp.broadcast_to(x[:, :, :1], (B, S, K * G, D)) for x in (k, v)))


def one_head_repeated(q: Any, k: Any, v: Any) -> Any:
    return attend(q, *(jnp.repeat(x[:, :, :1], K * G, 2) for x in (k, v)))


def heads_in_front(q: Any, k: Any, v: Any) -> Any:
    s = jnp.tanh(einsum("bthd,bshd->hbts", q, repeat(k)))
    return einsum("hbts,bshd->htbd", s, repeat(v))


def mapped(q: Any, k: Any, v: Any) -> Any:
    head = lambda q, k, v: jnp.tanh(q @ k.T) @ v  # noqa: E731
    return jax.vmap(jax.vmap(head, 1, 1))(q, repeat(k), repeat(v))


SPELLINGS = [
    *map(with_, (repeat, broadcast, tile, gather_axis)), heads_first, repeated_after_the_transpose,
    scaled_after_the_repeat, own_axis, one_head_for_all, one_head_repeated, heads_in_front, mapped,
]  # fmt: skip
NAMES = ["repeat", "broadcast", "tile", "expand_dims", *(fn.__name__ for fn in SPELLINGS[4:])]


def largest_repeat(jaxpr: _jax.Jaxpr) -> int:
    """Returns the size of the largest result of a broadcast."""
    names = "broadcast_in_dim", "tile"
    found = [_jax.array_type(e.outvars[0]).size for e in jaxpr.eqns if e.primitive.name in names]
    return max(found, default=0)


@pytest.mark.parametrize("fn", SPELLINGS, ids=NAMES)
def test_repeated_keys_and_values_are_never_made(fn) -> None:
    args = Q, KEY, VALUE
    result, fired, _ = optimized(fn, args, GROUP)
    assert fired["group_product"] == 2
    assert largest_repeat(jax.make_jaxpr(fn)(*args)) == B * S * K * G * D
    assert largest_repeat(result) == 0
    assert_near(fn, result, args)


@pytest.mark.parametrize("fn", SPELLINGS, ids=NAMES)
def test_residuals_of_grouped_attention_hold_no_repeat(fn) -> None:
    args = Q, KEY, VALUE
    result, _, _ = optimized(fn, args, GROUP)
    repeated = B * S * K * G * D

    def saved(f: Any) -> list[int]:
        return [x.size for x in jax.tree.leaves(jax.vjp(f, *args)[1]) if hasattr(x, "size")]

    assert saved(fn).count(repeated) > saved(lambda *xs: as_function(result)(*xs)).count(repeated)


def test_groups_that_alternate_stay() -> None:
    """Head h of the queries with key h % K: the groups are not in a row."""
    k = lambda x: jnp.tile(x, (1, 1, G, 1))  # noqa: E731
    result, fired, _ = optimized(with_(k), (Q, KEY, VALUE), GROUP)
    assert not fired["group_product"]
    assert_near(with_(k), result, (Q, KEY, VALUE), tol=0)


def test_precision_and_preferred_type_stay() -> None:
    def fn(q: Any, k: Any) -> Any:
        return dot(q.transpose(0, 2, 1, 3), repeat(k).transpose(0, 2, 1, 3),
                   (((3,), (3,)), ((0, 1), (0, 1))), precision=lax.Precision.HIGHEST,
                   preferred_element_type=jnp.float32)  # fmt: skip

    args = Q.astype(jnp.bfloat16), KEY.astype(jnp.bfloat16)
    result, fired, _ = optimized(fn, args, GROUP)
    assert fired["absorb_transpose"] == fired["group_product"] == 1
    params = [e.params for e in result.eqns if e.primitive is lax.dot_general_p]
    assert [p["preferred_element_type"] for p in params] == [jnp.float32]
    assert [p["precision"] for p in params] == [(lax.Precision.HIGHEST,) * 2]
    assert_close("bfloat16", as_function(result)(*args), [fn(*args)], 1e-6)


def test_bits_stay_where_products_are_whole_numbers() -> None:
    q, k, v = (jnp.round(4 * x).astype(jnp.int32) for x in (Q, KEY, VALUE))
    fn = lambda q, k, v: einsum("bhts,bshd->bthd", einsum("bthd,bshd->bhts", q, repeat(k)), v)  # noqa: E731
    result, fired, _ = optimized(fn, (q, k, repeat(v)), GROUP)
    assert fired["group_product"] == 1
    assert_close("integers", as_function(result)(q, k, repeat(v)), [fn(q, k, repeat(v))], tol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (1, 257, 257), (7, 33, 100), (64, 100, 3), (257, 127, 31)]
)
def test_the_contract_holds_at_odd_sizes(sizes, dtype) -> None:
    """The same products: in float32 within 1e-6, in narrower dtypes within the last bit."""
    m, k, n = sizes
    x, y = inputs(f"f32[{k},{m}]", 1).astype(dtype), inputs(f"f32[{n},{k}]", 2).astype(dtype)
    fn = lambda x, y: x.T @ y.T  # noqa: E731
    result, fired, _ = optimized(fn, (x, y), GROUP)
    assert fired["absorb_transpose"] == 1
    (got,), expected = as_function(result)(x, y), fn(x, y)
    a, b = (np.asarray(v, np.float64) for v in (got, expected))
    ulp = float(jnp.finfo(dtype).eps) if dtype != "float32" else 1e-6
    assert got.dtype == expected.dtype
    assert (np.abs(a - b) <= ulp * np.abs(b).max()).all()


def test_these_rules_are_close_and_leave_exact_mode_alone() -> None:
    assert not {"simplify_products", "fuse_norm"} & {
        p.__name__ for e in EXACT_PASSES for p in (e if isinstance(e, tuple) else (e,))
    }
    exact = tpjax.compile(with_(repeat), mode="exact")
    names = [report.name for report in exact.explain(Q, KEY, VALUE).passes]
    assert "simplify_products" not in names
    assert "sink_broadcasts" in names


def test_attention_with_repeated_keys_is_still_recognised() -> None:
    def fn(q: Any, k: Any, v: Any) -> Any:
        s = einsum("bthd,bshd->bhts", q, repeat(k)) * D**-0.5
        return einsum("bhts,bshd->bthd", jax.nn.softmax(s, -1), repeat(v))

    result, reports = optimize(jax.make_jaxpr(fn)(Q, KEY, VALUE), PASSES, verify=True)
    fired = [hit.op for report in reports for hit in report.hits]
    assert fired.count("flash_attention") == 1
    _, reports = optimize(result, PASSES)
    assert not any(r.hits for r in reports if r.name != "share_layers")


def test_verify_allows_the_contract_and_no_more() -> None:
    fn = lambda x, y: jnp.sin(x.T @ y.T)  # noqa: E731
    x, y = inputs("bf16[257,64]", 1), inputs("bf16[31,257]", 2)
    compiled = tpjax.compile(fn, verify=True, strict=True)
    assert_close("verified", compiled(x, y), fn(x, y), 1e-2)


def test_weights_larger_than_the_repeated_values_are_not_kept_twice() -> None:
    """In groups, the weights would be saved for the gradient as they are and reshaped."""
    long = inputs(f"f32[{B},{S},{K * G},{D}]", 7)  # S > D
    result, fired, near = optimized(with_(repeat), (long, KEY, VALUE), GROUP)
    assert fired["group_product"] == 1  # the scores, and not the sum of values
    assert largest_repeat(result) == B * S * K * G * D
    assert any("the other operand is larger" in reason for reason in near)
