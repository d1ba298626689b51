# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Norms as people write them: what must fire, as what, with equal numbers, and what must not."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

from tests.harness import assert_close, inputs
from tests.stax_passes.spellings import assert_same, rewritten
from tpjax.stax_passes.norms import fuse_norm

rsqrt, mean = jax.lax.rsqrt, jnp.mean


def rms_plain(x: Any, s: Any) -> Any:
    return x * rsqrt(mean(x**2, -1, keepdims=True) + 1e-6) * s


def rms_divided(x: Any, s: Any) -> Any:
    return s * (x / jnp.sqrt(mean(x * x, axis=-1, keepdims=True) + 1e-5))


def rms_reciprocal(x: Any, s: Any) -> Any:
    return x * (1 / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)) * s


def rms_plus_one(x: Any, s: Any) -> Any:
    return x * rsqrt(mean(jnp.square(x), -1, keepdims=True) + 1e-6) * (1 + s)


def rms_sum_over_n(x: Any, s: Any) -> Any:
    return x * rsqrt(jnp.sum(x * x, -1, keepdims=True) * (1 / x.shape[-1]) + 1e-6) * s


def rms_no_keepdims(x: Any, s: Any) -> Any:
    return x * rsqrt(mean(x * x, -1) + 1e-6)[..., None] * s


def rms_cast_last(x: Any, s: Any) -> Any:
    x32 = x.astype(jnp.float32)
    return (x32 * rsqrt(mean(x32 * x32, -1, keepdims=True) + 1e-6) * s).astype(x.dtype)


def rms_cast_before_scale(x: Any, s: Any) -> Any:
    x32 = x.astype(jnp.float32)
    y = x32 * rsqrt(mean(x32 * x32, -1, keepdims=True) + 1e-6)
    return y.astype(x.dtype) * s.astype(x.dtype)


def rms_no_scale(x: Any, s: Any) -> Any:
    del s
    return x * rsqrt(mean(x**2, -1, keepdims=True) + 1e-6)


def layer_centred(x: Any, s: Any) -> Any:
    m = x.mean(-1, keepdims=True)
    v = ((x - m) ** 2).mean(-1, keepdims=True)
    return (x - m) / jnp.sqrt(v + 1e-5) * s + (s - 1)


def layer_var(x: Any, s: Any) -> Any:
    m = jnp.mean(x, -1, keepdims=True)
    return (x - m) * rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5) * s + s


def layer_two_moments(x: Any, s: Any) -> Any:
    m = jnp.mean(x, -1, keepdims=True)
    return (x - m) * rsqrt(mean(x**2, -1, keepdims=True) - m**2 + 1e-5) * s


def layer_no_affine(x: Any, s: Any) -> Any:
    del s
    return (x - x.mean(-1, keepdims=True)) * rsqrt(x.var(-1, keepdims=True) + 1e-5)


def two_norms_in_a_helper(x: Any, s: Any) -> Any:
    return rms_plain(jax.nn.silu(rms_plain(x, s)), s)


def inside_scan_and_checkpoint(x: Any, s: Any) -> Any:
    def layer(x: Any, _: Any) -> Any:
        return x + jax.checkpoint(rms_plain)(x, s), None

    return jax.lax.scan(layer, x, None, length=3)[0]


FIRE = [
    (rms_plain, "rms_norm"),
    (rms_divided, "rms_norm"),
    (rms_reciprocal, "rms_norm"),
    (rms_plus_one, "rms_norm"),
    (rms_sum_over_n, "rms_norm"),
    (rms_no_keepdims, "rms_norm"),
    (rms_cast_last, "rms_norm"),
    (rms_cast_before_scale, "rms_norm"),
    (rms_no_scale, "rms_norm"),
    (layer_centred, "layer_norm"),
    (layer_var, "layer_norm"),
    (layer_two_moments, "layer_norm"),
    (layer_no_affine, "layer_norm"),
    (two_norms_in_a_helper, "rms_norm"),
    (inside_scan_and_checkpoint, "rms_norm"),
]


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(("fn", "op"), FIRE, ids=lambda x: getattr(x, "__name__", x))
def test_spelling_fires_with_equal_numbers(fn: Any, op: str, dtype: str) -> None:
    """Every spelling becomes its operator, and values and gradients stay."""
    args = inputs(f"{dtype}[3,5,32]", 1), inputs(f"{dtype}[32]", 2)
    new, report = rewritten(fn, fuse_norm, *args)
    expected = 2 if fn is two_norms_in_a_helper else 1
    assert [h.op for h in report.hits] == [op] * expected
    assert all("test_norm_rewrites.py" in h.source for h in report.hits)
    if dtype == "f32":
        # two sums in another order, once in the gradient over 15 rows: a few ulp
        assert_same(fn.__name__, fn, new, args, 2e-6)
    else:
        wide = [x.astype(jnp.float32) for x in args]
        assert new(*args).dtype == fn(*args).dtype
        # bfloat16 spellings round at every step; the rewrite must be no further from float32
        error = [
            float(jnp.sqrt(jnp.mean((f(*args).astype(jnp.float32) - fn(*wide)) ** 2)))
            for f in (new, fn)
        ]
        assert error[0] <= 1.1 * error[1] + 1e-6


@pytest.mark.parametrize("module", [nnx.RMSNorm, nnx.LayerNorm])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_nnx_modules_fire(module: Any, dtype: Any) -> None:
    """Flax's own NNX norms are found, parameters closed over."""
    norm = module(32, dtype=dtype, rngs=nnx.Rngs(0))
    x = inputs("f32[4,32]", 3).astype(dtype)
    new, report = rewritten(norm, fuse_norm, x)
    assert [h.op for h in report.hits] == ["rms_norm" if module is nnx.RMSNorm else "layer_norm"]
    assert_same(module.__name__, norm, new, (x,), 2e-6 if dtype == jnp.float32 else 6e-3)


@pytest.mark.parametrize("module", [linen.RMSNorm(), linen.LayerNorm()])
def test_linen_modules_fire(module: Any) -> None:
    """Flax's Linen norms are found."""
    x = inputs("f32[4,32]", 3)
    params = module.init(jax.random.key(0), x)
    new, report = rewritten(module.apply, fuse_norm, params, x)
    assert len(report.hits) == 1
    assert_close("linen", new(params, x), module.apply(params, x), 2e-6)


MISS = [
    (lambda x: x * rsqrt(mean(x**2, 1, keepdims=True) + 1e-6), "over axis 1"),
    (
        lambda x: (lambda r: (x * r, r))(rsqrt(mean(x**2, -1, keepdims=True) + 1e-6)),
        "also returned",
    ),
    (lambda x: 2 * x[..., ::-1] * rsqrt(mean(x**2, -1, keepdims=True) + 1e-6), "not multiplied"),
    (jax.grad(lambda x: rms_plain(x, x[0, 0]).sum()), "compile the loss, not its gradient"),
]


@pytest.mark.parametrize(("fn", "reason"), MISS, ids=[reason for _, reason in MISS])
def test_near_miss_names_its_reason(fn: Any, reason: str) -> None:
    """What almost is a norm stays as written, and the report says why."""
    _, report = rewritten(fn, fuse_norm, inputs("f32[3,5,32]", 1))
    assert not report.hits
    assert any(reason in miss.reason for miss in report.near_misses), report.near_misses


SILENT = [
    lambda x: x / jnp.sqrt(jnp.sum(x**2, -1, keepdims=True)),  # a unit vector, not a norm layer
    lambda x: x * rsqrt(jnp.var(x, -1, keepdims=True)),
    lambda x: rsqrt(x + 1e-6) * x,
    lambda x: jnp.sqrt(jnp.mean(x**2)),
]


@pytest.mark.parametrize("fn", SILENT)
def test_other_roots_stay(fn: Any) -> None:
    """A root that belongs to no norm is left alone."""
    _, report = rewritten(fn, fuse_norm, inputs("f32[3,5,32]", 1) ** 2)
    assert not report.hits


def test_wrong_count_is_not_a_mean() -> None:
    """A sum divided by another number than the axis length is no RMS norm."""
    _, report = rewritten(
        lambda x: x * rsqrt(jnp.sum(x**2, -1, keepdims=True) / 31 + 1e-6),
        fuse_norm,
        inputs("f32[4,32]", 1),
    )
    assert not report.hits
