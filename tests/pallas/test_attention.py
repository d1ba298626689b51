# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Attention's meaning: the reference and the plain form against loops in float64."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from tests.harness import assert_close, inputs
from tests.pallas.attention_cases import DIFFERENTIABLE, Case, by_loops, cases, everything, sees
from tpjax.core.attention import attention_reference
from tpjax.pallas.attention import portable
from tpjax.pallas.attention.entry import flash_attention
from tpjax.pallas.attention.row import FLASH_ATTENTION, attention_cost

BOTH: dict[str, Any] = {"return_lse": True, "return_max": True}


def results(fn, case, dtype, change=lambda run: run):
    """Returns out, lse and max of a case, and gradients by argument; `change` transforms `fn`."""
    arrays, options = case.arrays(dtype), dict(case.options)
    names = [n for n in DIFFERENTIABLE if n in arrays]
    fixed = {n: jnp.asarray(x) for n, x in arrays.items() if n not in names}
    run = change(lambda some: fn(**some, **fixed, **options, **BOTH))
    outs, pull = jax.vjp(run, {n: jnp.asarray(arrays[n]) for n in names})
    (gradients,) = pull(tuple(jnp.asarray(c) for c in case.cotangents(dtype)))
    return list(outs), gradients


def compare(got, want, tol):
    """Compares `results` with those of the loops; zeros but for rounding are compared beside ones.

    Infinities, of which there are only those of lse and max, must stand in the same places.
    """
    dtype = got[0][0].dtype
    got, want = (jax.tree.map(lambda x: np.asarray(x, dtype), x) for x in (got, want))
    none = [jax.tree.map(lambda x: x == -np.inf, x) for x in (got, want)]
    assert_close("infinities", none[0], none[1], 0)
    finite = [jax.tree.map(lambda x: np.where(x == -np.inf, 0, x) + 1, x) for x in (got, want)]
    assert_close("attention", finite[0], finite[1], tol)


def check(fn, case, dtype: Any = np.float64, tol=1e-12, **how):
    """Asserts that `fn` gives values and gradients of the loops."""
    want = by_loops(case.arrays(dtype), dict(case.options), case.cotangents(dtype))
    compare(results(fn, case, dtype, **how), want, tol)


@settings(max_examples=12, deadline=None)
@given(case=cases())
def test_features_together(case):
    """Reference and plain form, whole and in blocks: all values and gradients, in float64."""
    with jax.enable_x64(True), jax.disable_jit():
        for fn in (attention_reference, flash_attention):
            check(fn, case)
        with blocks_of_queries(2, case.sizes):
            check(flash_attention, case)


@contextmanager
def blocks_of_queries(block, sizes):
    """Makes the plain form run in blocks of so many queries, and asserts that it did.

    Without jit, which would not see it; so a checkpoint, which compiles, is left out too.
    """
    T, S, H, *_ = sizes
    lengths = set()
    attend = portable._attend

    def spy(operands, *args):
        lengths.add(operands.query.shape[1])
        return attend(operands, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(portable, "MAX_SCORE_BYTES", 4 * 2 * H * S * block)
        patch.setattr(portable, "_attend", spy)
        patch.setattr(portable.jax, "checkpoint", lambda fn: fn)
        yield
    assert lengths == {min(block, T)}


PLAIN = (("is_causal", True), ("alignment", "bottom_right"))
FLOAT32 = [
    everything((5, 5, 2, 2, 4, 4)),
    everything((1, 7, 4, 1, 8, 3)),
    Case((7, 3, 2, 1, 3, 5), PLAIN, (), 0),  # the first queries stand before the first key
]


@pytest.mark.parametrize("case", FLOAT32, ids=lambda case: str(case.sizes))
@pytest.mark.parametrize("fn", [attention_reference, flash_attention])
def test_float32(fn, case):
    """Compiled, in float32: the errors are float32's."""
    check(fn, case, np.float32, 2e-6, change=jax.jit)


def test_blocks_under_jit(monkeypatch):
    """Blocks of queries in one compiled loop, at a size that no other test has traced."""
    case = everything((9, 6, 2, 1, 4, 4))
    monkeypatch.setattr(portable, "MAX_SCORE_BYTES", 4 * 2 * 2 * 6 * 4)
    check(flash_attention, case, np.float32, 2e-6, change=jax.jit)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype):
    """Half precision in and out; lse and max stay float32, and are as exact as float32."""
    arrays = {
        n: jnp.asarray(x, dtype if x.dtype.kind == "f" else x.dtype)
        for n, x in everything().arrays(np.float32).items()
    }
    options = dict(everything().options)
    got = flash_attention(**arrays, **options, **BOTH)
    assert [str(x.dtype) for x in got] == [dtype, "float32", "float32"]
    wide = {
        n: np.asarray(x, np.float64 if x.dtype == dtype else x.dtype) for n, x in arrays.items()
    }
    zeros = [np.zeros(x.shape) for x in got]
    (out, *rest), _ = by_loops(wide, options, zeros)
    compare(([got[0]], {}), ([out], {}), FLASH_ATTENTION.tol[dtype])
    compare((list(got[1:]), {}), (rest, {}), 2e-6)


def test_statistics_come_in_order():
    """Out alone, or a tuple with lse, max, or both; asking for them does not change out."""
    q, k = inputs("f32[2,5,4,8]", 0), inputs("f32[2,5,2,8]", 1)
    for fn in (flash_attention, attention_reference):
        out, lse, top = fn(q, k, k, **BOTH)
        assert_close("out", fn(q, k, k), out, 0)
        assert_close("lse", fn(q, k, k, return_lse=True), (out, lse), 0)
        assert_close("max", fn(q, k, k, return_max=True), (out, top), 0)


def test_queries_that_see_nothing():
    """Zero, -inf and no gradient: not the mean of the values, not NaN; a sink is then the lse."""
    x, mask = inputs("f32[1,4,1,8]", 0), jnp.ones((4, 4), bool).at[2].set(False)
    run = partial(flash_attention, key=x, value=x, mask=mask, **BOTH)
    (out, lse, top), vjp = jax.vjp(lambda q: run(q), x)
    assert not np.asarray(out[0, 2]).any()
    assert np.asarray(out[0, 1]).any()
    assert_close(
        "where -inf is",
        np.asarray(jnp.stack([lse, top]) == -np.inf)[0, 0, :, 0],
        np.arange(4) == 2,
        0,
    )
    assert not np.asarray(vjp((out, lse * 0 + 1, top))[0][0, 2]).any()
    _, lse, top = run(x, sinks=jnp.array([0.25]))
    assert float(lse[0, 2, 0]) == 0.25
    assert float(top[0, 2, 0]) == -np.inf


@pytest.mark.parametrize("operand", [0, 1, 2])
def test_nan_stays_with_those_who_see_it(operand):
    """Token 5 of one head is NaN: queries from there on see it as key or value, itself as query.

    Statistics do not read values.
    """
    arrays = [inputs("f32[1,8,2,8]", i) for i in range(3)]
    arrays[operand] = arrays[operand].at[0, 5, 1, 3].set(jnp.nan)
    want = np.zeros((8, 2), bool)
    want[5 : 6 if operand == 0 else 8, 1] = True
    for fn in (flash_attention, attention_reference):
        out, lse, top = fn(*arrays, is_causal=True, **BOTH)
        for x in (fn(*arrays, is_causal=True), out):
            assert_close("where NaN is", np.isnan(np.asarray(x))[0].all(-1), want, 0)
        for x in (lse, top):
            assert_close("where lse is NaN", np.isnan(np.asarray(x))[0], want & (operand < 2), 0)


@pytest.mark.parametrize(
    ("batch", "T", "S", "H"),
    [((0,), 3, 3, 2), ((2,), 0, 3, 2), ((2,), 3, 0, 2), ((), 3, 3, 2), ((2, 1), 1, 1, 2),
     ((2,), 3, 3, 0)],
)  # fmt: skip
def test_empty_and_leading_axes(batch, T, S, H):
    """Any number of leading axes, also none; nothing to attend from or to gives zeros and -inf."""
    q, k, v = (
        jnp.ones((*batch, T, H, 8)),
        jnp.ones((*batch, S, H // 2, 8)),
        jnp.ones((*batch, S, H // 2, 6)),
    )
    out, lse, top = jax.jit(partial(flash_attention, is_causal=True, **BOTH))(q, k, v)
    seen = np.arange(T) + 1 if S else np.zeros(T)
    with np.errstate(divide="ignore"):
        want = np.log(np.broadcast_to(seen[:, None], (*batch, T, H))) + (8**0.5 if S else 0)
    full = np.ones((*batch, T, H, 6)) * (S > 0)
    compare(([out, lse], {}), ([full, want], {}), 2e-7)
    assert top.shape == lse.shape
    sinks = jnp.arange(1.0, H + 1)
    out, lse = flash_attention(q, k * 0 - 99, v, sinks=sinks, return_lse=True)
    compare(([out, lse], {}), ([full * 0, np.broadcast_to(sinks, lse.shape)], {}), 2e-7)


def test_query_segments_serve_both():
    """Segment ids of queries alone are those of the keys too."""
    q, ids = inputs("f32[2,6,2,4]", 0), jnp.array([[0, 0, 1, 1, 2, 0], [3, 3, 3, 1, 1, 1]])
    for fn in map(jax.jit, (flash_attention, attention_reference)):
        both = fn(q, q, q, query_segment_ids=ids, key_value_segment_ids=ids)
        assert_close("out", fn(q, q, q, query_segment_ids=ids), both, 0)
        mask = (ids[:, :, None] == ids[:, None, :])[:, None]
        assert_close("out", both, fn(q, q, q, mask=mask), 0)


CASE = everything()
"""What the transformations are tried on: all features at once."""


def call(arrays):
    """Returns out, lse and max of the case; the reference's -inf are the call's, too."""
    results = flash_attention(**arrays, **dict(CASE.options), **BOTH)
    return [jnp.maximum(x, -1e3) for x in results]


@pytest.mark.parametrize("name", CASE.arrays())
def test_vmap(name):
    """vmap over any one operand is a loop over it."""
    arrays, other = CASE.arrays(), replace(CASE, seed=4).arrays()
    with jax.enable_x64(True), jax.disable_jit():  # compiles nothing that others do not
        got = jax.vmap(lambda x: call({**arrays, name: x}))(np.stack([arrays[name], other[name]]))
        want = [call({**arrays, name: x}) for x in (arrays[name], other[name])]
    assert_close(name, got, [np.stack(xs) for xs in zip(*want, strict=True)], 1e-12)


def test_transformations():
    """Gradients under scan, checkpoint, and vmap over everything are those of a plain call."""
    problems = [replace(CASE, seed=seed).arrays(np.float32) for seed in (3, 4)]
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *problems)

    def loss(moving, fixed):
        out, lse, _ = call({**moving, **fixed})
        return (out**2).sum() + jnp.where(lse > -1e3, lse, 0).sum()

    def grad(loss, arrays):
        moving = {n: x for n, x in arrays.items() if n in DIFFERENTIABLE}
        return jax.grad(loss)(moving, {n: x for n, x in arrays.items() if n not in moving})

    plain, remat = jax.jit(partial(grad, loss)), partial(grad, jax.checkpoint(loss))
    want = jax.tree.map(lambda *xs: np.stack(xs), *map(plain, problems))
    for name, transformed in {
        "scan": lambda xs: jax.lax.scan(lambda c, x: (c, remat(x)), None, xs)[1],
        "vmap": jax.vmap(remat),
    }.items():
        assert_close(name, jax.jit(transformed)(stacked), want, 2e-6)


def test_any_integers_are_lengths():
    """Narrow and unsigned ones; lengths beyond the end or below zero mean what they say."""
    x = inputs("f32[3,300,1,4]", 0)
    for dtype, few, end in ((jnp.int8, -3, 127), (jnp.uint8, 0, 255), (jnp.uint32, 0, 2**32 - 1)):
        lengths = jnp.array([few, 5, end], dtype)
        run = partial(flash_attention, x, x, x, is_causal=True, alignment="bottom_right")
        clipped = jnp.array([0, 5, min(end, 300)])
        got, want = (run(key_value_seq_lengths=n) for n in (lengths, clipped))
        assert_close(str(dtype), got, want, 0)


def test_cost_counts_the_visible_scores():
    """Products of 2 FLOPs each over the visible pairs and heads, of both widths."""
    arrays = {n: x for n, x in CASE.arrays(np.float32).items() if x.dtype == np.float32}
    plain = [arrays.pop(n) for n in ("query", "key", "value")]
    for options in (
        {}, {"is_causal": True}, {"local_window_size": (2, 1)}, {"local_window_size": 1},
        {"is_causal": True, "alignment": "bottom_right"},
        {"is_causal": True, "prefix_lengths": np.array([5, 0])},
        {"query_seq_lengths": np.array([3, 1]), "key_value_seq_lengths": np.array([6, 2])},
        {"query_seq_lengths": np.array([3, 1]), "alignment": "bottom_right", "is_causal": True},
        {"prefix_lengths": np.array([5, 0]), "local_window_size": (1, 0), "is_causal": True},
    ):  # fmt: skip
        given = {"query": plain[0], "key": plain[1], **options}
        places = np.ndindex(2, 4, 4, 6)
        visible = sum(sees(given, options, *place) for place in places)
        assert attention_cost(*plain, **options).flops == 2 * visible * (4 + 3), options
    out, statistics = 2 * 4 * 4 * 3, 2 * 4 * 4
    moved = sum(x.size for x in (*plain, *arrays.values())) + out + 2 * statistics
    assert FLASH_ATTENTION.cost(*plain, **arrays, **BOTH, scale=1.0).bytes == 4 * moved
    abstract = jax.ShapeDtypeStruct((2,), jnp.int32)
    cost = attention_cost(*plain, is_causal=True, prefix_lengths=abstract)
    assert cost.flops == attention_cost(*plain, is_causal=True).flops  # not known: empty
