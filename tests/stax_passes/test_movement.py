# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Moves of moves, and moves at known indices: what must fire, and the near misses that must not."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.harness import inputs
from tests.stax_passes.moving import assert_same, optimized
from tests.stax_passes.programs import primitives
from tpjax.stax_passes.movement import simplify_moves
from tpjax.stax_passes.pipeline import CLEAN_UP, optimize

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
