# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Softmax and reductions: their meaning against NumPy in float64, edges, the door."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.harness import assert_close, inputs, run_python
from tpjax.core import reductions, softmaxes
from tpjax.pallas import argmax, log_softmax, reduce, softmax

TOL = {"float32": 2e-6, "bfloat16": 6e-3, "float16": 1e-3}
SIZES = (1, 3, 7, 63, 1000, 1031)


def float64_softmax(x, mask, softcap, dy, logarithm):
    """Returns output and gradient of x along the last axis, by the formulas, in float64."""
    x, dy = np.asarray(x, np.float64), np.asarray(dy, np.float64)
    mask = np.broadcast_to(True if mask is None else np.asarray(mask), x.shape)
    s = x if softcap is None else softcap * np.tanh(x / softcap)
    e = np.where(mask, np.exp(s - s.max(-1, keepdims=True)), 0)
    total = e.sum(-1, keepdims=True)
    p = np.divide(e, total, out=np.zeros_like(e), where=total > 0)
    if logarithm:
        out, ds = np.log(p), mask * (dy - p * (mask * dy).sum(-1, keepdims=True))
    else:
        out, ds = p, p * (dy - (dy * p).sum(-1, keepdims=True))
    slope = 1 if softcap is None else 1 - np.tanh(x / softcap) ** 2
    return out, ds * slope


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_softmax_against_numpy(long, dtype, monkeypatch):
    """Odd sizes, a mask with a row that sees nothing, softcap; as short and as long rows."""
    monkeypatch.setattr(softmaxes, "LONG", 1 if long else 1 << 40)
    jax.clear_caches()  # the other form was traced for these shapes
    for i, size in enumerate(SIZES[long:] if dtype == "f32" else (7,)):  # one is not long
        x, dy = (inputs(f"{dtype}[3,{size}]", seed) for seed in (i, i + 50))
        x = (2 * x.astype(jnp.float32)).astype(x.dtype)
        mask = inputs(f"bool[3,{size}]", i).at[1].set(False).at[:, 0].set(jnp.array([1, 0, 1]) > 0)
        for m, softcap in ((None, None), (mask, 5.0)):
            out, vjp = jax.vjp(lambda x, m=m, c=softcap: softmax(x, m, softcap=c), x)
            want = float64_softmax(x, m, softcap, dy, False)
            want = jax.tree.map(lambda w, x=x: w.astype(x.dtype), want)
            assert_close("softmax", (out, vjp(dy)[0]), want, TOL[str(x.dtype)])
            if m is not None:
                assert not np.any(np.asarray(out)[1])
        out, vjp = jax.vjp(lambda x: log_softmax(x, softcap=5.0), x)
        want = float64_softmax(x, None, 5.0, dy, True)
        want = jax.tree.map(lambda w, x=x: w.astype(x.dtype), want)
        assert_close("log_softmax", (out, vjp(dy)[0]), want, TOL[str(x.dtype)])


def test_softmax_of_what_is_hidden():
    """Large and infinite scores; what is hidden may be NaN; gradients where nothing is seen."""
    x = jnp.array([[1e4, 1e4, -jnp.inf], [jnp.nan, 0.0, 0.0], [1.0, 2.0, 3.0]])
    mask = jnp.array([[True] * 3, [False, True, True], [False] * 3])
    want = jnp.array([[0.5, 0.5, 0], [0, 0.5, 0.5], [0, 0, 0]])
    assert_close("masked", softmax(x, mask), want, 1e-7)
    logarithms = np.asarray(log_softmax(x, mask))
    assert_close("hidden", np.isneginf(logarithms), np.asarray(want == 0), 0)
    grad = jax.grad(lambda x: softmax(x, mask)[2].sum() + softmax(x, mask)[0, 0])(x)
    assert_close("nothing", grad[2], jnp.zeros(3), 0)
    assert softmax(x[:0]).shape == (0, 3)
    assert_close("broadcast", softmax(x[2:], jnp.array([True, True, False]))[0, 2], want[0, 2], 0)


@pytest.mark.parametrize("hidden", [200.0, jnp.inf, -jnp.inf, jnp.nan])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("fn", [softmax, log_softmax])
def test_what_is_hidden_has_no_gradient(hidden, softcap, fn):
    """Whatever it is; nor has it any share in the others' gradients."""
    mask, dy = jnp.array([False, True, True]), inputs("f32[3]", 0)

    def loss(x):
        return (jnp.where(mask, fn(x, mask, softcap=softcap), 0) * dy).sum()

    got = jax.grad(loss)(jnp.array([hidden, 1.0, 2.0]))
    assert_close("dx", got, jax.grad(loss)(jnp.array([0.0, 1.0, 2.0])), 1e-6)
    assert got[0] == 0


@pytest.mark.parametrize("size", [1 << 15, 70_001, 1 << 20])
def test_long_rows(size):
    """Read once and added up in blocks: as exact as short ones, on a CPU too."""
    x = 3 * inputs(f"f32[{size}]", 0)
    wide = np.asarray(x, np.float64)
    weights = np.exp(wide - wide.max())
    want = (weights / weights.sum()).astype(np.float32)
    assert_close("softmax", jax.jit(softmax)(x), want, 2e-6)
    logarithms = (wide - wide.max() - np.log(weights.sum())).astype(np.float32)
    assert_close("log_softmax", jax.jit(log_softmax)(x), logarithms, 2e-6)
    variance = jax.jit(partial(reduce, kind="var"))(x)
    assert_close("variance", variance, np.float32(wide.var()), 2e-6)


def test_softmax_keeps_its_arguments_alone():
    """No float32 probabilities wait for the backward pass of a bfloat16 x."""
    x = inputs("bf16[64,128]", 0)
    _, vjp = jax.vjp(softmax, x)
    kept = [a for a in jax.tree.leaves(vjp) if hasattr(a, "nbytes")]
    assert sum(a.nbytes for a in kept) <= x.nbytes
    second = jax.hessian(lambda x: (softmax(x) ** 2).sum())(inputs("f32[5]", 0))
    assert_close("hessian", second, second.T, 1e-5)


NUMPY = {
    "sum": np.sum,
    "mean": np.mean,
    "max": np.max,
    "var": np.var,
    "logsumexp": lambda x, axis: np.log(np.exp(x).sum(axis)),
}


@pytest.mark.parametrize("kind", NUMPY)
def test_reduce_against_numpy(kind):
    """Odd sizes, rows, columns and both, in every dtype; a mean far from 0 for the variance."""
    for i, size in enumerate(SIZES):
        for dtype in ("f32", "bf16", "f16")[: 1 if i else 3]:
            x = inputs(f"{dtype}[{size},5]", i)
            x = x + jnp.asarray(100 if kind == "var" and dtype == "f32" else 0, x.dtype)
            for axis in (0, 1, (0, 1)) if size in (1, 7) else (0,):
                want = NUMPY[kind](np.asarray(x, np.float64), axis=axis).astype(x.dtype)
                got = jax.jit(partial(reduce, kind=kind, axis=axis))(x)
                # 100 rounded to float32 moves a mean by 4e-6 of the spread.
                tol = 2e-5 if kind == "var" else TOL[str(x.dtype)]
                assert_close(f"{kind} {x.shape} {axis}", got, want, max(tol, TOL[str(x.dtype)]))
        where = argmax(x, axis=0)
        assert_close("argmax", where, np.argmax(np.asarray(x), 0).astype(np.int32), 0)


@pytest.mark.parametrize("online", [False, True])
def test_variance(online, monkeypatch):
    """By two passes or by triples: that of NumPy, and the gradient of its formula."""
    monkeypatch.setattr(reductions, "ONLINE_FROM", 1 if online else 1 << 40)
    jax.clear_caches()  # the other form was traced for these shapes
    for size in SIZES:
        x = inputs(f"f32[3,{size}]", 0) + 100
        want = np.var(np.asarray(x, np.float64), axis=1).astype(np.float32)
        assert_close("variance", reduce(x, kind="var"), want, 2e-5)  # the mean is rounded at 100
    x, t = inputs("f32[7,9]", 0), inputs("f32[7]", 1)
    _, vjp = jax.vjp(partial(reduce, kind="var"), x)
    want = 2 * (x - x.mean(1, keepdims=True)) / 9 * t[:, None]
    assert_close("dx", vjp(t)[0], want, 1e-6)
    kept = reduce(x, kind="sum", axis=(0, 1), keepdims=any_kind(np.True_))
    assert kept.shape == (1, 1)
    assert reduce(x[:0], kind="sum", axis=0).shape == (9,)


SHARDED = """
import jax, jax.numpy as jnp
from functools import partial
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from tests.harness import assert_close, inputs
from tpjax.pallas import reduce, softmax

x = inputs("f32[8,64]", 0)
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind, kind))
    for spec in (P("a", "b"), P(("a", "b")), P(None, "a")):
        for fn in (softmax, partial(reduce, kind="var")):
            want = fn(x)
            with jax.set_mesh(mesh):
                got = jax.jit(fn)(jax.device_put(x, NamedSharding(mesh, spec)))
            assert_close("sharded", jax.device_get(got), jax.device_get(want), 1e-6)
print("agree")
"""


def test_the_same_on_four_devices():
    """Sharded over rows, features or both, under Auto and Explicit meshes."""
    assert run_python(SHARDED, devices=4).split() == ["agree"]


def any_kind(x: Any) -> Any:
    """Hides the kind of a wrong argument from the type checker."""
    return x


X = jnp.zeros((2, 8))
DOOR = [
    (lambda: softmax(X.astype(jnp.int32)), TypeError, "x must be of dtype .*; got int32"),
    (lambda: softmax(X, X), TypeError, "mask must be an array of booleans; got float32"),
    (lambda: softmax(X, jnp.ones((3, 8), bool)), ValueError, r"broadcasts to \(2, 8\)"),
    (lambda: softmax(X, axis=2), ValueError, "axis must be from -2 to 1; got 2"),
    (lambda: log_softmax(X, softcap=-1.0), ValueError, "log_softmax: softcap must be positive"),
    (lambda: reduce(X, kind=any_kind("median")), ValueError, "unknown kind 'median'"),
    (lambda: reduce(X, kind="sum", axis=(0, -2)), ValueError, "several different ones"),
    (lambda: reduce(X[:, :0], kind="max"), ValueError, "not empty along the axis"),
    (lambda: argmax(X[:0], axis=0), ValueError, "not empty along the axis"),
    (lambda: argmax(X, axis=any_kind(0.5)), TypeError, "axis must be an integer; got 0.5"),
]


@pytest.mark.parametrize(("wrong", "error", "text"), DOOR, ids=[d[2] for d in DOOR])
def test_door(wrong, error, text):
    """Wrong kinds, dtypes, shapes and numbers, in the house style."""
    with pytest.raises(error, match=text):
        wrong()


@pytest.mark.gpu
def test_gpu_same_bits_every_time():
    """Reductions of rows and columns have one order of additions."""
    x = inputs("f32[5000,1031]", 0)
    for kind in ("sum", "mean", "var", "logsumexp"):
        for axis in (0, 1, (0, 1)):
            run = jax.jit(partial(reduce, kind=kind, axis=axis))
            first = run(x)
            for _ in range(3):
                assert_close(f"{kind} {axis}", run(x), first, 0)
