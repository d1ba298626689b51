# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Moves of moves, and moves at known indices: what must fire, and the near misses that must not."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax

from tests.harness import assert_close, inputs
from tests.stax_passes.moving import assert_same, optimized, values_and_gradients
from tests.stax_passes.programs import as_function, assert_same_bits, primitives
from tpjax.stax_passes.movement import simplify_moves
from tpjax.stax_passes.pipeline import CLEAN_UP, FINISH, optimize

X = inputs("f32[5,6]", 0)
Y = inputs("f32[3,6]", 1)
V = inputs("f32[6]", 2)
H = inputs("bf16[5,6]", 3)
N = jnp.arange(30).reshape(5, 6)
AT = jnp.asarray(2)
S, B = "slice", "broadcast_in_dim"
concat = jnp.concatenate

FIRES: list[tuple[str, Any, tuple[Any, ...], dict[str, int], list[str]]] = [
    # name, function, arguments, rules that fire, primitives that are left
    ("slice of slice", lambda x: x[1:4][:, 2:][1:], (X,), {"slice_of_slice": 2}, [S]),
    ("strides multiply", lambda x: x[::2][::2], (X,), {"slice_of_slice": 1}, [S]),
    ("offset and strides", lambda x: x[1::2, 1:][:1, ::3], (X,), {"slice_of_slice": 1}, [S]),
    ("nothing is left", lambda x: x[2:4][2:], (X,), {"slice_of_slice": 1}, [S]),
    ("whole numbers", lambda n: n[1:][1:], (N,), {"slice_of_slice": 1}, [S]),
    ("whole piece", lambda x, y: concat([x, y])[5:] * 2, (X, Y), {"slice_of_pieces": 1}, ["mul"]),
    ("part of a piece", lambda x, y: concat([x, y])[6:8, 1:], (X, Y), {"slice_of_pieces": 1}, [S]),
    ("strided in a piece", lambda x, y: concat([y, x])[3:8:2], (X, Y), {"slice_of_pieces": 1}, [S]),
    ("every piece", lambda x, y: [concat([x, y])[:5], concat([x, y])[5:]], (X, Y),
     {"slice_of_pieces": 2}, []),
    ("of a stack", lambda x, y: jnp.stack([x[:3], y])[1], (X, Y), {"slice_of_pieces": 1}, []),
    ("part of a stack", lambda x, y: jnp.stack([x[:3], y], 1)[1:, 0], (X, Y),
     {"slice_of_pieces": 1}, [S]),
    ("of a broadcast", lambda v: jnp.broadcast_to(v, (5, 6))[1:3], (V,),
     {"slice_of_broadcast": 1}, [B]),
    ("of a broadcast, cut", lambda v: jnp.broadcast_to(v, (5, 6))[1:3, 2:], (V,),
     {"slice_of_broadcast": 1}, [S, B]),
    ("of a spread axis", lambda x: jnp.broadcast_to(x[:, :1], (5, 7))[:, 2:4], (X,),
     {"slice_of_broadcast": 1}, [S, B]),
    ("of a padding", lambda x: jnp.pad(x, 2)[2:-2, 3:-2], (X,), {"slice_of_pad": 1}, [S]),
    ("all but the padding", lambda x: lax.pad(x, 0.0, [(1, 2, 0), (0, 0, 0)])[1:-2] * 2, (X,),
     {"slice_of_pad": 1}, ["mul"]),
    ("of a cropping", lambda x: lax.pad(x, 0.0, [(-1, 0, 0), (0, 0, 0)])[1:], (X,),
     {"slice_of_pad": 1}, [S]),
    ("empty piece", lambda x: concat([x[:0], x, x[5:]]) * 2, (X,), {"empty_piece": 1}, ["mul"]),
    ("nested pieces", lambda x, y: concat([concat([x, y]), y]), (X, Y), {"nested_pieces": 1},
     ["concatenate"]),
    ("neighbours", lambda x: concat([x[:2], x[2:4]]), (X,), {"neighbours": 1}, [S]),
    ("all neighbours", lambda x: concat([x[:2], x[2:4], x[4:]]) * 2, (X,), {"neighbours": 1},
     ["mul"]),
    ("some neighbours", lambda x, y: concat([x[:2], x[2:4], y]), (X, Y), {"neighbours": 1},
     [S, "concatenate"]),
    ("neighbouring columns", lambda x: concat([x[1:3, :2], x[1:3, 2:4]], 1), (X,),
     {"neighbours": 1}, [S]),
    ("split and put together", lambda x: concat(jnp.split(x, 3, 1), 1) * 2, (X,),
     {"neighbours": 1}, ["mul"]),
    ("put together and split", lambda x, y: jnp.split(concat([x, y]), [5]), (X, Y),
     {"split_of_pieces": 1}, []),
    ("broadcast of broadcast", lambda v: jnp.broadcast_to(v[:, None], (6, 4)), (V,),
     {"broadcast_of_broadcast": 1}, [B]),
    ("transposed broadcast", lambda v: jnp.broadcast_to(v, (5, 6)).T, (V,),
     {"transpose_of_broadcast": 1}, [B]),
    ("tile", lambda v: jnp.tile(v[:, None], (1, 4)), (V,), {"tile_of_ones": 1}, [B]),
    ("squeeze of reshape", lambda v: v.reshape(2, 1, 3)[:, 0], (V,), {"reshape_chain": 1},
     ["reshape"]),
    ("expand, then reshape", lambda x: x[:, None].reshape(30), (X,), {"reshape_chain": 1},
     ["reshape"]),
    ("squeeze twice", lambda x: x.reshape(1, 5, 1, 6).squeeze(2).squeeze(0) * 2, (X,),
     {"reshape_chain": 2}, ["mul"]),
    # moves at known indices
    ("arange", lambda x: x[jnp.arange(3)], (X,), {"known_indices": 1}, [S]),
    ("columns", lambda x: x[:, jnp.arange(1, 4)], (X,), {"known_indices": 1}, [S]),
    ("steps", lambda x: x[np.array([0, 2, 4])], (X,), {"known_indices": 1}, [S]),
    ("backwards", lambda x: x[np.array([4, 3, 2])], (X,), {"known_indices": 1}, [S, "rev"]),
    ("negative", lambda x: x[np.array([-2, -1])], (X,), {"known_indices": 1}, [S]),
    ("backwards in steps", lambda x: x[:, np.array([5, 3, 1])], (X,), {"known_indices": 1},
     [S, "rev"]),
    ("a matrix of indices", lambda x: x[np.arange(4).reshape(2, 2)], (X,), {"known_indices": 1},
     [S, "reshape"]),
    ("take", lambda x: jnp.take(x, jnp.arange(2, 4), axis=1), (X,),
     {"open_helper": 2, "known_indices": 1}, [S]),
    ("take one", lambda x: jnp.take(x, 2, axis=0), (X,), {"known_indices": 1}, [S, "reshape"]),
    ("whole numbers, taken", lambda n: jnp.take(n, jnp.arange(4)), (N,), {"known_indices": 1},
     ["reshape", S]),
    ("dynamic index", lambda x: lax.dynamic_index_in_dim(x, 2, 0), (X,),
     {"open_helper": 1, "known_start": 1}, [S]),
    ("index of an array", lambda x: x[jnp.asarray(-1)], (X,), {"known_start": 1}, [S, "squeeze"]),
    ("clamped start", lambda x: lax.dynamic_slice(x, (7, -1), (2, 3)), (X,), {"known_start": 1},
     [S]),
    ("whole update", lambda x, i: lax.dynamic_update_slice(x, x + 1, (i, 0)), (X, AT),
     {"whole_update": 1}, ["add"]),
    ("half precision", lambda h: h[1:][:, jnp.arange(2)], (H,), {"known_indices": 1}, [S]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fn", "args", "rules", "left"), [row[1:] for row in FIRES], ids=[r[0] for r in FIRES]
)
def test_moves_that_fire(fn, args, rules, left) -> None:
    result, fired, _ = optimized(fn, args, (CLEAN_UP,))
    assert {rule: n for rule, n in fired.items() if rule in rules} == rules
    assert primitives(result) == left
    assert_same("moves", fn, result, args)


STAYS: list[tuple[str, Any, tuple[Any, ...]]] = [
    ("a slice that others read", lambda x: (lambda y: (y[1:], y * 2))(x[1:]), (X,)),
    ("across pieces", lambda x, y: concat([x, y])[4:6], (X, Y)),
    ("in the padding", lambda x: jnp.pad(x, 2)[1:], (X,)),
    ("between the elements", lambda x: lax.pad(x, 0.0, [(0, 0, 1), (0, 0, 0)])[1:], (X,)),
    ("padded by a value", lambda x: lax.pad(x[1:], x[0, 0], [(1, 0, 0), (0, 0, 0)])[1:], (X,)),
    ("other order", lambda x: concat([x[2:4], x[:2]]), (X,)),
    ("overlapping", lambda x: concat([x[:3], x[2:4]]), (X,)),
    ("of other rows", lambda x: concat([x[1:3, :2], x[2:4, 2:4]], 1), (X,)),
    ("of other arrays", lambda x, y: concat([x[:2], y[2:]]), (X, Y)),
    ("strided neighbours", lambda x: concat([x[:2], x[2::2]]), (X,)),
    ("some of a split", lambda x: concat(jnp.split(x, 3, 1)[:2], 1), (X,)),
    ("along another axis", lambda x, y: concat([concat([x, x], 1), concat([y, y], 1)]), (X, Y)),
    ("split elsewhere", lambda x, y: jnp.split(concat([x, y]), [4]), (X, Y)),
    ("broadcast that others read", lambda v: (
        lambda y: (jnp.broadcast_to(y, (6, 4)), jnp.sin(y)))(v[:, None]), (V,)),
    ("turned broadcast", lambda x: jnp.broadcast_to(x, (2, 5, 6)).transpose(0, 2, 1), (X,)),
    ("tile of more", lambda v: jnp.tile(v, 2), (V,)),
    ("reshape of a broadcast", lambda v: jnp.broadcast_to(v, (5, 6)).reshape(30), (V,)),
    ("an index at run time", lambda x, i: lax.dynamic_slice(x, (i, i), (2, 2)), (X, AT)),
    ("update of a part", lambda x, i: lax.dynamic_update_slice(x, x[1:], (i, 0)), (X, AT)),
]  # fmt: skip


@pytest.mark.parametrize(("fn", "args"), [row[1:] for row in STAYS], ids=[r[0] for r in STAYS])
def test_near_misses_that_must_not_fire(fn, args) -> None:
    result, fired, _ = optimized(fn, args, (CLEAN_UP,))
    known = {"common_subexpression", "multiply_one", "open_helper", "fold", "dead_code"}
    assert not fired.keys() - known, fired
    assert_same("moves", fn, result, args)


GATHERS: list[tuple[str, Any, str | None]] = [
    ("repeated", lambda x: x[np.array([1, 1])], "at equal steps"),
    ("in no order", lambda x: x[np.array([0, 1, 3])], "at equal steps"),
    ("out of bounds, filled", lambda x: jnp.take(x, np.array([4, 5]), axis=0), "out of bounds"),
    ("out of bounds, clamped", lambda x: jnp.take(x, np.array([4, 5]), axis=0, mode="clip"),
     "at equal steps"),
    ("at run time", lambda x, i=AT: x[i + jnp.arange(2) * 0], None),
    ("diagonal", lambda x: x[jnp.arange(5), jnp.arange(5)], None),
    ("for each row", lambda x: jnp.take_along_axis(x, jnp.zeros((5, 1), int), 1), None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fn", "reason"), [row[1:] for row in GATHERS], ids=[r[0] for r in GATHERS]
)
def test_gathers_that_stay(fn, reason) -> None:
    result, fired, misses = optimized(fn, (X,), (CLEAN_UP,))
    assert "known_indices" not in fired
    assert "gather" in str(result)
    assert reason is None or any(m.startswith("known_indices") and reason in m for m in misses)
    assert_same("gather", fn, result, (X,))


def test_clamped_indices_that_are_then_a_window() -> None:
    fn = lambda x: jnp.take(x, np.array([3, 4, 9]), axis=0, mode="clip")[:2]  # noqa: E731
    result, _, _ = optimized(fn, (X,), (CLEAN_UP,))
    assert_same("gather", fn, result, (X,))


def test_moves_in_loops_and_helpers() -> None:
    def fn(x: jax.Array) -> Any:
        def step(c: jax.Array, _: Any) -> Any:
            return jax.checkpoint(lambda c: jnp.sin(concat([c[:2], c[2:]])))(c), c[1:][1:]

        return lax.scan(step, x, None, length=2)

    result, fired, _ = optimized(fn, (X,), (CLEAN_UP,))
    assert fired["neighbours"] == fired["slice_of_slice"] == 1
    assert_same("loop", fn, result, (X,))


def test_R13_helpers_that_compute_stay_whole() -> None:
    def fn(x: jax.Array) -> Any:
        return jax.nn.silu(x), jnp.where(x > 0, x, 0.0), jnp.clip(x, 0.0, 1.0), jnp.tril(x)

    _, reports = optimize(jax.make_jaxpr(fn)(X), (simplify_moves,), verify=True)
    assert not reports[0].hits


def test_a_helper_that_reads_an_array_twice_stays() -> None:
    """Opened, the cotangents of its two readers would be added one by one to others."""

    @jax.jit
    def twice(x: jax.Array, i: Any) -> Any:
        return concat([lax.dynamic_slice(x, (i, 0), (1, 6)), lax.dynamic_slice(x, (0, i), (1, 6))])

    result, fired, _ = optimized(lambda x: twice(x, 2), (X,), (CLEAN_UP,))
    assert "open_helper" not in fired
    assert primitives(result) == ["jit"]


# -- random moves ---------------------------------------------------------------------------------

SHAPE = (4, 6)


def _rows(k: int) -> np.ndarray:
    lines = [0, 1, 2, 3], [3, 2, 1, 0], [2, 2, 0, 1], [1, 3, 0, 2], [-1, -2, -3, -4], [0, 2, 0, 2]
    return np.array(lines[k % 6])


def _cut(x: jax.Array, k: int) -> jax.Array:
    """Takes the array apart and puts it together."""
    a, b = 1 + k % 3, 1 + k // 3 % 5
    choices = [
        lambda: concat([x[:a], x[a:]]), lambda: concat([x[a:], x[:a]]),
        lambda: concat([x[:, :b], x[:, b:]], 1), lambda: concat([x[:a, :], x[:0], x[a:]]),
        lambda: concat([concat([x[:a], x]), x])[a : a + 4],
        lambda: jnp.stack([x, x[::-1]])[k % 2], lambda: concat(jnp.split(x, 2, 1), 1),
        lambda: lax.pad(x, np.asarray(k % 3, x.dtype), [(a, 1, 0), (b, 0, 0)])[a:-1, b:],
        lambda: lax.pad(x, np.asarray(0.1, x.dtype), [(a, 1, 0), (0, 0, 0)])[1:5],
        lambda: concat([x, x, x])[2 : 2 + 4 * (1 + k % 2) : 1 + k % 2],
    ]  # fmt: skip
    return choices[k % len(choices)]()


def _turn(x: jax.Array, k: int) -> jax.Array:
    """Turns the array, or takes its elements in another order."""
    choices = [
        lambda: x.T.reshape(SHAPE), lambda: x[::-1], lambda: x[None].squeeze(0).reshape(24)
        .reshape(SHAPE), lambda: x[:, None].reshape(2, 2, 6).reshape(SHAPE),
        lambda: jnp.broadcast_to(x[k % 4], SHAPE), lambda: jnp.broadcast_to(x[:, :1], SHAPE),
        lambda: jnp.broadcast_to(x[k % 4 :, None], (4 - k % 4, 4, 6))[-1],
        lambda: x[_rows(k // 7)], lambda: jnp.take(x, _rows(k // 7), 0, mode="clip"),
        lambda: jnp.take(x, _rows(k // 7), 1).repeat(2, 1)[:, 1:7],
        lambda: lax.dynamic_slice(concat([x, x]), (k % 7, 0), SHAPE),
        lambda: lax.dynamic_update_slice(x, x[:2], (k % 5, 0)),
        lambda: lax.dynamic_update_slice(x * 2, x, (k % 5, 0)), lambda: jnp.roll(x, k, k % 2),
        lambda: jnp.tile(x[:1], (4, 1)), lambda: x[1:][:, 2:][::2],
    ]  # fmt: skip
    y = choices[k % len(choices)]()
    return y if y.shape == SHAPE else jnp.pad(y, [(0, 4 - y.shape[0]), (0, 6 - y.shape[1])])


def _random(program: list[tuple[int, int]], x: jax.Array, h: jax.Array) -> Any:
    for how, k in program:
        match how % 8:
            case 0 | 1 | 2:
                x = _cut(x, k)
            case 3 | 4 | 5:
                x = _turn(x, k)
            case 6:
                h = _turn(h, k) if k % 2 else _cut(h, k)
            case _:
                x, h = h.astype(x.dtype), x.astype(h.dtype)
    return jnp.sin(x) * x, h


PROGRAM = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 500)), min_size=1, max_size=7)


@settings(max_examples=15, deadline=None, suppress_health_check=[*HealthCheck])  # pyright: ignore
@given(program=PROGRAM)
def test_random_moves_keep_the_bits(program) -> None:
    """Values bit for bit; gradients as the contracts say: up to the order of sums."""
    args = inputs("f32[4,6]", 7), inputs("bf16[4,6]", 8)
    fn = lambda *xs: _random(program, *xs)  # noqa: E731
    jaxpr = jax.make_jaxpr(fn)(*args)
    expected = values_and_gradients(fn, args)
    for passes in ((CLEAN_UP,), (FINISH[:-1],), (FINISH,)):
        result, reports = optimize(jaxpr, passes, verify=True)
        again, _ = optimize(result, passes)
        assert again is result
        got = values_and_gradients(lambda *xs: as_function(result)(*xs), args)  # noqa: B023
        assert_same_bits("values", got[:2], expected[:2])
        through_bfloat16 = any(how % 8 == 7 for how, _ in program)
        assert_close("gradient", got[2], expected[2], 1e-2 if through_bfloat16 else 1e-6)
        assert_close("narrow gradient", got[3], expected[3], 1e-2)
        assert len(reports) == len(passes[0])
