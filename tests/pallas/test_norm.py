# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The norms' meaning: references against NumPy, the door, edges; kernels: `test_norm_kernel`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpjax
from tests.harness import assert_close, inputs
from tpjax.core.norms import layer_norm_reference, rms_norm_reference
from tpjax.pallas import layer_norm, rms_norm

EPS = 1e-3


def float64_norm(x, scale, bias, dy, *, centred):
    """Returns output and gradients of x, scale and bias by the formulas, in float64."""
    x, scale, bias, dy = (np.asarray(a, np.float64) for a in (x, scale, bias, dy))
    mean = x.mean(-1, keepdims=True) * centred
    rstd = ((x - mean) ** 2).mean(-1, keepdims=True) + EPS
    rstd = rstd**-0.5
    z, g = (x - mean) * rstd, dy * scale
    pull = (g * z).mean(-1, keepdims=True)
    dx = rstd * (g - centred * g.mean(-1, keepdims=True) - z * pull)
    return z * scale + bias, dx, (dy * z).sum((0, 1)), dy.sum((0, 1))


@pytest.mark.parametrize("centred", [False, True])
def test_reference_against_numpy(centred):
    """Output and all gradients of the references."""
    x, scale, bias = inputs("f32[2,5,37]", 0) + 3, inputs("f32[37]", 1), inputs("f32[37]", 2)
    dy = inputs("f32[2,5,37]", 3)
    want = [a.astype(np.float32) for a in float64_norm(x, scale, bias, dy, centred=centred)]
    if not centred:
        want[0] = (want[0] - np.asarray(bias)).astype(np.float32)
        del want[3]
        fn, arrays = rms_norm_reference, (x, scale)
    else:
        fn, arrays = layer_norm_reference, (x, scale, bias)
    out, vjp = jax.vjp(lambda *a: fn(*a, eps=EPS), *arrays)
    # x + 3: the mean, taken off again, is 3 times the spread.
    assert_close("norm", [out, *vjp(dy)], want, 3e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
def test_rounded_once(norm, dtype):
    """Narrow x and a wide scale: everything in float32, rounded to x's dtype at the end."""
    x, scale = inputs("f32[9,64]", 0).astype(dtype), inputs("f32[64]", 1)
    want = norm(x.astype(jnp.float32), scale).astype(dtype)
    assert_close("out", norm(x, scale), want, 0)


@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
def test_edges(norm):
    """Rows of zeros, of one feature, empty arrays, NaN that stays in its row."""
    assert not np.any(np.asarray(norm(jnp.zeros((2, 8)))))
    assert norm(jnp.ones((3, 1))).shape == (3, 1)
    for shape in ((0, 8), (2, 0), (0,)):
        out, vjp = jax.vjp(norm, jnp.zeros(shape), jnp.ones(shape[-1]))
        assert out.shape == shape
        assert vjp(out)[1].shape == shape[-1:]
    x = inputs("f32[3,8]", 0).at[1, 2].set(jnp.nan)
    out = norm(x)
    assert np.isnan(out[1]).all()
    assert_close("rows", out[::2], norm(x[::2]), 1e-6)
    large = jnp.full((1, 64), 3e38, jnp.float32) * jnp.sign(inputs("f32[1,64]", 0))
    assert np.isfinite(np.asarray(layer_norm(large[:, :1]))).all()


@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
def test_second_derivatives(norm):
    """jvp, hessian and linearize run where the plain form does."""
    x = inputs("f32[5]", 0)
    plain = rms if norm is rms_norm else layer
    want = jax.hessian(lambda x: (plain(x) ** 3).sum())(x)
    # Sums of terms ten times as large as they are.
    assert_close("hessian", jax.hessian(lambda x: (norm(x) ** 3).sum())(x), want, 1e-5)
    out, tangent = jax.jvp(norm, (x,), (x,))
    assert_close("linearize", jax.linearize(norm, x)[1](x), tangent, 1e-6)
    assert out.shape == x.shape


def rms(x):
    """The formula, as anyone would write it."""
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def layer(x):
    """The formula, as anyone would write it."""
    return rms(x - x.mean(-1, keepdims=True))


def test_float64():
    """Statistics of float64 are float64."""
    with jax.enable_x64(True):
        x = np.random.default_rng(0).standard_normal((3, 16))
        want = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
        assert_close("out", rms_norm(jnp.asarray(x)), want, 1e-14)


def test_what_is_kept_for_the_backward_pass():
    """The plain form keeps its arguments alone: no float32 copy of a bfloat16 x."""
    x, scale = inputs("bf16[64,128]", 0), inputs("f32[128]", 1)
    _, vjp = jax.vjp(rms_norm, x, scale)
    kept = [a for a in jax.tree.leaves(vjp) if hasattr(a, "nbytes")]
    assert sum(a.nbytes for a in kept) <= x.nbytes + scale.nbytes


def any_kind(x: Any) -> Any:
    """Hides the kind of a wrong argument from the type checker."""
    return x


X = jnp.zeros((2, 8))
DOOR = [
    (lambda: rms_norm(any_kind([1.0])), TypeError, "rms_norm: x must be an array; got list"),
    (lambda: rms_norm(jnp.zeros((2, 8), jnp.int32)), TypeError, "x must be of dtype .*; got int32"),
    (lambda: rms_norm(jnp.float32(1)), ValueError, r"rank 1 or more, \[\*B, D\]; got shape \(\)"),
    (lambda: rms_norm(X, jnp.ones(2)), ValueError, r"scale must be of shape \(8,\).*\(2,\)"),
    (lambda: rms_norm(X, jnp.ones((2, 8))), ValueError, "scale must be of shape"),
    (lambda: rms_norm(X, any_kind(2.0)), TypeError, "scale must be an array; got float"),
    (lambda: rms_norm(X, jnp.ones(8, bool)), TypeError, "scale must be of dtype"),
    (lambda: rms_norm(X, eps=0.0), ValueError, "eps must be positive and finite; got 0.0"),
    (lambda: rms_norm(X, eps=-1e-6), ValueError, "positive"),
    (lambda: rms_norm(X, eps=float("nan")), ValueError, "positive"),
    (
        lambda: rms_norm(X, eps=any_kind("1e-6")),
        TypeError,
        "eps must be a number known when tracing",
    ),
    (lambda: rms_norm(X, eps=True), TypeError, "eps must be a number"),
    (lambda: jax.jit(lambda e: rms_norm(X, eps=e))(1e-6), TypeError, "known when tracing"),
    (lambda: layer_norm(X, None, jnp.ones(9)), ValueError, r"layer_norm: bias must .*\(9,\)"),
    (lambda: layer_norm(X, jnp.ones(8, jnp.int8)), TypeError, "layer_norm: scale must be of dtype"),
]


@pytest.mark.parametrize(("wrong", "error", "text"), DOOR, ids=[d[2] for d in DOOR])
def test_door(wrong, error, text):
    """Wrong kinds, dtypes, ranks, shapes and numbers, in the house style."""
    with pytest.raises(error, match=text):
        wrong()


def test_kernel_refuses_with_the_reason():
    """Every limit of the kernels is told in words."""
    from tests.pallas.test_dispatch import chosen

    cases = [
        (96, jnp.float32, "multiple of 64; it has 96"),
        (16384, jnp.float32, "at most 8192 features; it has 16384"),
        (16320, jnp.bfloat16, "rows of 16320 bfloat16 do not fit the registers"),
    ]
    for features, dtype, reason in cases:
        x = jax.ShapeDtypeStruct((2, features), dtype)
        with tpjax.use(platform="cuda"), pytest.warns(UserWarning, match=reason):
            (choice,) = chosen(rms_norm, x)
        assert reason in choice.refused[0].reason
        assert choice.implementation == "xla"
