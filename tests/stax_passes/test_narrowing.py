# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Moves before conversions to wider dtypes: what must fire, and why the near misses must not."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tpjax
from tests.harness import inputs
from tests.stax_passes.moving import assert_same, optimized, values_and_gradients
from tests.stax_passes.programs import as_function, primitives
from tpjax.stax_passes.narrowing import narrow_moves
from tpjax.stax_passes.pipeline import CLEAN_UP, ON_REQUEST, optimize

GROUP = ((*CLEAN_UP, narrow_moves),)
H = inputs("bf16[4,6]", 0)
G = inputs("bf16[4,6]", 1)
N = jnp.arange(-12, 12, dtype=jnp.int8).reshape(4, 6)
P = inputs("f32[4,6]", 2) > 0
AT = jnp.asarray(1, jnp.int32)
C = "convert_element_type"
concat = jnp.concatenate


def w(x: Any) -> Any:
    return x.astype(jnp.float32)


def last(x: Any) -> Any:
    """Uses the result twice, in float32: its cotangents are summed there, before and after."""
    return jnp.sin(x) * x


FIRES: list[tuple[str, Any, tuple[Any, ...], list[str]]] = [
    # name, function, arguments, primitives that are left
    ("reshape", lambda h: last(w(h).reshape(24)), (H,), ["reshape", C]),
    ("transpose", lambda h: last(w(h).T), (H,), ["transpose", C]),
    ("slice", lambda h: last(w(h)[1:3]), (H,), ["slice", C]),
    ("slice and squeeze", lambda h: last(w(h)[1]), (H,), ["slice", "squeeze", C]),
    ("expand", lambda h: last(w(h)[:, None]), (H,), ["broadcast_in_dim", C]),
    ("reverse", lambda h: last(w(h)[::-1]), (H,), ["rev", C]),
    ("dynamic slice", lambda h, i: last(lax.dynamic_slice(w(h), (i, 0), (2, 6))), (H, AT),
     ["dynamic_slice", C]),
    ("split", lambda h: last(jnp.split(w(h), 2)[1]), (H,), ["split", C]),
    ("chain", lambda h: last(w(h).T[1:].reshape(5, 2, 2)[:, 0]), (H,),
     ["transpose", "slice", "reshape", "slice", "squeeze", C]),
    ("concatenate", lambda h, g: last(concat([w(h), w(g)])), (H, G), ["concatenate", C]),
    ("stack", lambda h, g: last(jnp.stack([w(h), w(g)])), (H, G), ["stack", C]),
    ("one array, two conversions", lambda h: last(concat([w(h.T), w(h[:, :4] * 2)])), (H,),
     ["transpose", "slice", "concatenate", C]),
    ("pad by zero", lambda h: last(lax.pad(w(h), 0.0, [(1, 0, 0), (0, 2, 1)])), (H,), ["pad", C]),
    ("pad by -0.5", lambda h: last(lax.pad(w(h), -0.5, [(1, -1, 0), (0, 0, 0)])), (H,),
     ["pad", C]),
    ("pad by -0.0", lambda h: 1 / lax.pad(w(h), -0.0, [(1, 0, 0), (0, 0, 0)]), (H,), ["pad", C]),
    ("pad by -inf", lambda h: lax.pad(w(h), -np.inf, [(1, 0, 0), (0, 0, 0)]).max(0), (H,),
     ["pad", C]),
    ("update", lambda h, g, i: last(lax.dynamic_update_slice(w(h), w(g), (i, 0))), (H, G[:2], AT),
     ["dynamic_update_slice", C]),
    ("gather of others", lambda h: last(w(h)[np.array([3, 0, 1])]), (H,), ["gather", C]),
    ("half precision", lambda h: last(w(h.astype(jnp.float16)).T), (H,), [C, "transpose", C]),
    ("whole numbers", lambda n: w(n).T * 2, (N,), ["transpose", C]),
    ("whole numbers, repeated", lambda n: w(n)[np.array([1, 1])] * 2, (N,), ["gather", C]),
    ("booleans", lambda p: w(p).T * 2, (P,), ["transpose", C]),
    ("R17 back again", lambda h: w(h).T.astype(jnp.bfloat16) * 2, (H,), ["transpose"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fn", "args", "left"), [row[1:] for row in FIRES], ids=[r[0] for r in FIRES]
)
def test_R16_moves_run_in_the_narrow_dtype(fn, args, left) -> None:
    result, fired, _ = optimized(fn, args, GROUP)
    assert fired["narrow_move"]
    assert [name for name in primitives(result) if name in left] == left
    assert_same("narrowed", fn, result, args)


MISSES: list[tuple[str, Any, tuple[Any, ...], str | None]] = [
    ("repeated indices", lambda h: last(w(h)[np.array([0, 0, 1])]), (H,), "an index is repeated"),
    ("indices at run time", lambda h: last(jnp.take(w(h), jnp.argsort(h[:, 0]), 0, mode="clip")),
     (H,), None),
    ("one array three times", lambda h: (lambda x: last(concat([x, x, x])))(w(h)), (H,),
     "read 3 times: gradients would be summed in bfloat16"),
    ("two moves of one", lambda h: (lambda x: (last(x.T), last(x.reshape(24))))(w(h)), (H,),
     "read 2 times"),
    ("a result too", lambda h: (lambda x: (last(x.T), x))(w(h)), (H,), "read 2 times"),
    ("repeated by a broadcast", lambda h: last(jnp.broadcast_to(w(h), (3, 4, 6))), (H,),
     "elements are repeated: gradients would be summed in bfloat16"),
    ("out of bounds", lambda h: last(jnp.take(w(h), np.array([0, 4]), 0)), (H,), "out of bounds"),
    ("padding that is no bfloat16", lambda h: last(lax.pad(w(h), 0.1, [(1, 0, 0), (0, 0, 0)])),
     (H,), "is no bfloat16"),
    ("many readers of the narrow", lambda h: (last(w(h).T), h * 2, jnp.cos(h)), (H,),
     "cotangents would be added in another order"),
    ("a computation between", lambda h: (w(h) + 1).T, (H,), None),
    ("to a narrower dtype", lambda h: (w(h) * 2).astype(jnp.float16).T, (H,), None),
    ("of two dtypes", lambda h, n: last(concat([w(h), w(n)])), (H, N), None),
    ("one is wide already", lambda h, g: last(concat([w(h), w(g) * 2])), (H, G), None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fn", "args", "reason"), [row[1:] for row in MISSES], ids=[r[0] for r in MISSES]
)
def test_R16_near_misses_that_must_not_fire(fn, args, reason) -> None:
    result, fired, misses = optimized(fn, args, GROUP)
    assert not fired["narrow_move"]
    if reason is not None:
        assert any(m.startswith("narrow_move: ") and reason in m for m in misses), misses
    assert_same("near miss", fn, result, args)


@pytest.mark.parametrize(
    "fn",
    [
        lambda h: last(concat([h, h, h]).astype(jnp.float32)),
        lambda h: last(w(h[np.array([0, 0, 0, 1])])),
        lambda h: last(w(jnp.broadcast_to(h, (7, 4, 6)))),
    ],
)
def test_R16_what_the_near_misses_would_have_cost(fn) -> None:
    """Written in the narrow dtype, these have other gradients: the tests above can fail."""
    wide = {0: lambda h: last(concat([w(h)] * 3)), 1: lambda h: last(w(h)[np.array([0, 0, 0, 1])])}
    others = [wide[0], wide[1], lambda h: last(jnp.broadcast_to(w(h), (7, 4, 6)))]
    narrow = values_and_gradients(fn, (H,))
    found = [values_and_gradients(other, (H,)) for other in others]
    same = [pair for pair in found if pair[0].shape == narrow[0].shape]
    assert same
    assert all(bool((pair[1] != narrow[1]).any()) for pair in same)


def test_R17_there_and_back_is_nothing() -> None:
    result, fired, _ = optimized(lambda h: w(h).astype(jnp.bfloat16), (H,), (CLEAN_UP,))
    assert not result.eqns
    assert fired["convert_chain"] == 1
    assert_same("R17", lambda h: w(h).astype(jnp.bfloat16), result, (H,))


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (lambda h: (w(h) + 0).astype(jnp.bfloat16), (H,)),
        (lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), (w(H),)),
        (lambda h: h.astype(jnp.float16).astype(jnp.bfloat16), (H,)),
    ],
    ids=["bf16(f32(x) + 0)", "f32 to bf16 to f32", "bf16 to f16 to bf16"],
)
def test_R17_what_stays(fn, args) -> None:
    result, _, _ = optimized(fn, args, GROUP)
    assert primitives(result) == primitives(jax.make_jaxpr(fn)(*args))


def test_R16_in_loops_and_under_transformations() -> None:
    def fn(h: jax.Array) -> Any:
        def step(c: jax.Array, _: Any) -> Any:
            return last(w(c).T).T.astype(c.dtype), w(c * 2)[1:]

        return lax.scan(jax.checkpoint(step), h, None, length=2)

    result, fired, _ = optimized(fn, (H,), GROUP)
    assert fired["narrow_move"] == 2
    assert_same("scan", fn, result, (H,))
    tangents = [jax.jvp(f, (H,), (G,)) for f in (fn, lambda h: tuple(as_function(result)(h)))]
    assert jax.tree.structure(tangents[0]) == jax.tree.structure(tangents[1])


def test_narrowing_runs_only_if_asked_for() -> None:
    """No program measured gains by it (docs/log.md), so it is no default; by name it is there."""
    assert (narrow_moves,) == ON_REQUEST
    fn = lambda h: w(h).T + 1  # noqa: E731
    _, reports = optimize(jax.make_jaxpr(fn)(H))
    assert not any(hit.rule == "narrow_move" for report in reports for hit in report.hits)
    explained = tpjax.compile(fn, passes=("canonicalise", "narrow_moves")).explain(H)
    (row,) = (one for one in explained.as_dict()["passes"] if one["name"] == "narrow_moves")
    assert row["hits"] == 1


@pytest.mark.parametrize("dtype", ["float64"])
def test_R16_float32_before_float64(dtype) -> None:
    with jax.enable_x64(True):
        x = inputs("f32[4,6]", 5)
        fn = lambda x: last(x.astype(dtype).T)  # noqa: E731
        result, fired, _ = optimized(fn, (x,), GROUP)
        assert fired["narrow_move"] == 1
        assert_same("float64", fn, result, (x,))
