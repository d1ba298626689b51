# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The norms' meaning: references against NumPy, the door, edges; kernels: `test_norm_kernel`."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpjax
from tests.harness import assert_close, inputs
from tpjax.core.norms import layer_norm_reference, rms_norm_reference
from tpjax.pallas import (
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    layer_norm_fp8,
    rms_norm,
    rms_norm_fp8,
)

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


@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
def test_groups_and_offset_against_numpy(norm):
    """Each group is a row of its own; the offset is part of the scale."""
    x, scale, dy = inputs("f32[2,5,36]", 0), inputs("f32[36]", 1), inputs("f32[2,5,36]", 3)
    wants = []
    for i in range(0, 36, 12):
        at = slice(i, i + 12)
        operands = (x[..., at], scale[at] + 1, jnp.zeros(12), dy[..., at])
        wants.append(float64_norm(*operands, centred=norm is layer_norm)[:3])
    want = [np.concatenate(w, -1).astype(np.float32) for w in zip(*wants, strict=True)]
    out, vjp = jax.vjp(lambda *a: norm(*a, eps=EPS, scale_offset=1.0, num_groups=3), x, scale)
    assert_close("groups", [out, *vjp(dy)], want, 1e-6)


@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
def test_added_against_apart(norm):
    """Both results and all gradients are those of the sum and of the norm of it."""
    fused = add_rms_norm if norm is rms_norm else add_layer_norm
    x, residual, scale = inputs("bf16[5,16]", 0), inputs("f32[5,16]", 1), inputs("f32[16]", 2)
    cotangents = inputs("bf16[5,16]", 3), inputs("f32[5,16]", 4)

    def apart(x, residual, scale):
        h = x + residual
        return norm(h, scale).astype(x.dtype), h

    got, back = jax.vjp(fused, x, residual, scale)
    with jax.numpy_dtype_promotion("standard"):
        want, plain_back = jax.vjp(apart, x, residual, scale)
    assert_close("results", got, want, 0)
    # A bfloat16 cotangent is rounded by neither.
    assert_close("gradients", back(cotangents), plain_back(cotangents), 1e-6)


@pytest.mark.parametrize("norm", [rms_norm_fp8, layer_norm_fp8])
def test_fp8(norm):
    """Dequantised it is the norm, to the 3 bits of a mantissa; each row's largest is 448."""
    x, scale = inputs("f32[9,64]", 0), inputs("f32[64]", 1)
    plain = (rms_norm if norm is rms_norm_fp8 else layer_norm)(x, scale)
    values, scales = norm(x, scale)
    assert values.dtype == jnp.float8_e4m3fn
    assert np.abs(values.astype(jnp.float32)).max(-1).tolist() == [448.0] * 9
    largest = jnp.abs(plain).max(-1)
    assert_close("scales", scales, largest / 448, 1e-6)
    values, given = norm(x, scale, quant_scale=jnp.float32(0.01))
    want = jnp.clip(plain * 100, -448, 448)
    # Half a unit in the last of 3 bits: at most 1 in 16, 1 in 28 over evenly spread values.
    assert_close("values", values.astype(jnp.float32), want, 0.036)
    assert_close("given", given, jnp.full(9, 0.01, jnp.float32), 0)


def test_fp8_has_no_gradient():
    """It is refused, not zero, in either mode; of constants no one asks."""
    x, scale = inputs("f32[3,8]", 0), inputs("f32[8]", 1)
    for derivative in (jax.grad, jax.jacfwd):
        with pytest.raises(TypeError, match="rms_norm_fp8: x must not be differentiated"):
            derivative(lambda x: rms_norm_fp8(x, scale)[0].astype(jnp.float32).sum())(x)

    def loss(x):
        values, scales = rms_norm_fp8(jax.lax.stop_gradient(x), scale)
        return (x * values.astype(jnp.float32) * scales[:, None]).sum()

    assert_close("dx", jax.jit(jax.grad(loss))(x), jax.grad(loss)(x), 1e-6)


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
    fused = add_rms_norm if norm is rms_norm else add_layer_norm
    for shape in ((0, 8), (2, 0), (0,)):
        assert [r.shape for r in fused(jnp.zeros(shape), jnp.zeros(shape))] == [shape] * 2
        assert [r.shape for r in rms_norm_fp8(jnp.zeros(shape))] == [shape, shape[:-1]]
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
    (lambda: rms_norm(X, jnp.ones(8), scale_offset=np.inf), ValueError, "scale_offset must be fin"),
    (lambda: rms_norm(X, scale_offset=1.0), ValueError, r"scale_offset must be 0.0 without a sc"),
    (lambda: rms_norm(X, num_groups=3), ValueError, "num_groups must be a positive divisor .*8"),
    (lambda: layer_norm(X, num_groups=0), ValueError, "num_groups must be a positive divisor"),
    (lambda: layer_norm(X, num_groups=any_kind(2.0)), TypeError, "num_groups must be an integer"),
    (lambda: add_rms_norm(X, X[:1]), ValueError, r"residual must be of x's shape \(2, 8\)"),
    (lambda: add_layer_norm(X, any_kind(1.0)), TypeError, "residual must be an array; got float"),
    (lambda: add_layer_norm(X, X, None, jnp.ones(2)), ValueError, "add_layer_norm: bias must be"),
    (lambda: rms_norm_fp8(X, quant_scale=jnp.ones(2)), ValueError, "quant_scale must be one numb"),
    (lambda: rms_norm_fp8(X, quant_scale=jnp.float32(0)), ValueError, "quant_scale must be posit"),
    (lambda: layer_norm(X, None, jnp.ones(9)), ValueError, r"layer_norm: bias must .*\(9,\)"),
    (lambda: layer_norm(X, jnp.ones(8, jnp.int8)), TypeError, "layer_norm: scale must be of dtype"),
]


@pytest.mark.parametrize(("wrong", "error", "text"), DOOR, ids=[d[2] for d in DOOR])
def test_door(wrong, error, text):
    """Wrong kinds, dtypes, ranks, shapes and numbers, in the house style."""
    with pytest.raises(error, match=text):
        wrong()


def _added(x):
    return add_rms_norm(x, x)


def test_kernel_refuses_with_the_reason():
    """Every limit of the kernels is told in words."""
    from tests.pallas.test_dispatch import chosen

    cases = [
        (rms_norm, 37, jnp.float32, {}, "x must be a multiple of 8 features; it has 37"),
        (rms_norm, 65568, jnp.bfloat16, {}, "at most 65536 features; it has 65568"),
        (rms_norm, 1000, jnp.bfloat16, {}, "multiple of 32 features beyond 256, or XLA's code is"),
        (rms_norm, 16384, jnp.bfloat16, {}, "XLA's code is faster than the kernels that"),
        (_added, 16384, jnp.bfloat16, {}, "XLA's code is faster than the kernels that"),
        (layer_norm, 32 * 1031, jnp.bfloat16, {}, "fit no warpgroup, and have no equal segments"),
        (layer_norm, 96, jnp.float32, {"num_groups": 8}, "a group of the last axis of x must be"),
        (rms_norm, 65536, jnp.float32, {"num_groups": 2}, "groups of 32768 float32 do not fit"),
        (rms_norm_fp8, 65536, jnp.bfloat16, {}, "rows of 65536 bfloat16, quantised, do not fit"),
    ]
    for norm, features, dtype, options, reason in cases:
        x = jax.ShapeDtypeStruct((2, features), dtype)
        with tpjax.use(platform="cuda"), pytest.warns(UserWarning, match=reason):
            (choice,) = chosen(partial(norm, **options), x)
        assert reason in choice.refused[0].reason
        assert choice.implementation == "xla"
