# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Attention as people write it: what must fire, what the operator is told, what must not fire."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import tpjax.stax_passes.attention as module
from tests.harness import inputs
from tests.stax_passes.spellings import assert_same, rewritten
from tpjax.stax_passes.attention import fuse_attention

B, T, H, D = 2, 16, 4, 8
softmax, einsum = jax.nn.softmax, jnp.einsum
TRI = np.tril(np.ones((T, T), bool))


def tri() -> Any:
    return jnp.tril(jnp.ones((T, T), bool))


def scores(q: Any, k: Any) -> Any:
    return einsum("bthd,bshd->bhts", q, k) * D**-0.5


def out(w: Any, v: Any) -> Any:
    return einsum("bhts,bshd->bthd", w, v)


def full(q, k, v):
    return out(softmax(scores(q, k), -1), v)


def causal_where(q, k, v):
    return out(softmax(jnp.where(tri(), scores(q, k), -1e30), -1), v)


def causal_inverted_where(q, k, v):
    return out(softmax(jnp.where(~tri(), -jnp.inf, scores(q, k)), -1), v)


def causal_added(q, k, v):
    return out(softmax(scores(q, k) + jnp.where(tri(), 0.0, -1e9), -1), v)


def causal_triu_of_minus(q, k, v):
    return out(softmax(scores(q, k) + jnp.triu(jnp.full((T, T), -1e9), 1), -1), v)


def causal_constant_mask(q, k, v):
    return out(softmax(jnp.where(TRI, scores(q, k), jnp.finfo(q.dtype).min), -1), v)


def causal_iota_compare(q, k, v):
    i = jnp.arange(T)
    s = jnp.where(i[:, None] >= i[None, :], einsum("bthd,bshd->bhts", q, k), -1e10) / np.sqrt(D)
    return out(softmax(s, axis=-1), v)


def hand_written_softmax_bhtd(q, k, v):
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    s = jnp.where(tri(), q @ k.swapaxes(-1, -2) * D**-0.5, -jnp.inf)
    w = jnp.exp(s - s.max(-1, keepdims=True))
    w = w / w.sum(-1, keepdims=True)
    return (w @ v).transpose(0, 2, 1, 3).reshape(B, T, H * D)


def exp_over_sum(q, k, v):
    e = jnp.exp(scores(q, k))
    return out(e / jnp.sum(e, axis=-1, keepdims=True), v)


def upcast_scores(q, k, v):
    w = softmax(scores(q, k).astype(jnp.float32), -1).astype(v.dtype)
    return out(w, v)


def scale_in_query(q, k, v):
    return out(softmax(einsum("bthd,bshd->bhts", q * D**-0.5, k), -1), v)


def gqa_repeat(q, k, v):
    k, v = jnp.repeat(k, 2, 2), jnp.repeat(v, 2, 2)
    return causal_where(q, k, v)


def gqa_grouped(q, k, v):
    q = q.reshape(B, T, 2, 2, D)
    s = einsum("btkgd,bskd->bkgts", q, k) * D**-0.5
    w = softmax(jnp.where(tri(), s, -1e30), -1)
    return einsum("bkgts,bskd->btkgd", w, v).reshape(B, T, H, D)


def mqa(q, k, v):
    w = softmax(einsum("bthd,bsd->bhts", q, k[:, :, 0]), -1)
    return einsum("bhts,bsd->bthd", w, v[:, :, 0])


def one_head(q, k, v):
    return softmax(jnp.where(tri(), q @ k.T * 0.3, -1e9), -1) @ v


def vmapped_heads(q, k, v):
    return jax.vmap(jax.vmap(one_head, 1, 1))(q, k, v)


def window(q, k, v):
    band = tri() & ~jnp.tril(jnp.ones((T, T), bool), -4)
    return out(softmax(jnp.where(band, scores(q, k), -1e30), -1), v)


def jax_nn(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def jax_nn_full(q, k, v):
    return jax.nn.dot_product_attention(q, k, v)


def in_scan(q, k, v):
    step = jax.checkpoint(lambda q, _: (causal_where(q, k, v), None))
    return jax.lax.scan(step, q, None, length=2)[0]


CAUSAL, FULL = {"is_causal": True}, {"is_causal": False}
FIRE = [
    (full, H, FULL),
    (causal_where, H, CAUSAL),
    (causal_inverted_where, H, CAUSAL),
    (causal_added, H, CAUSAL),
    (causal_triu_of_minus, H, CAUSAL),
    (causal_constant_mask, H, CAUSAL),
    (causal_iota_compare, H, CAUSAL),
    (hand_written_softmax_bhtd, H, CAUSAL),
    (exp_over_sum, H, FULL),
    (upcast_scores, H, FULL),
    (scale_in_query, H, FULL | {"scale": 1.0}),
    (gqa_repeat, 2, CAUSAL),
    (gqa_grouped, 2, CAUSAL),
    (mqa, 1, FULL),
    (vmapped_heads, H, CAUSAL),
    (window, H, {"is_causal": True, "local_window_size": (3, 0)}),
    (jax_nn, 2, CAUSAL),
    (jax_nn_full, 2, FULL),
    (jax_nn_full, H, FULL),
    (in_scan, H, CAUSAL),
]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Records what the rewrite tells the operator, which still runs."""
    seen: list[dict[str, Any]] = []
    run = module.flash_attention

    def spy(query, key, value, bias=None, mask=None, **options):
        shapes = {"key": key.shape, "mask": mask is not None, "bias": bias is not None}
        seen.append(options | shapes)
        return run(query, key, value, bias, mask, **options)

    monkeypatch.setattr(module, "flash_attention", spy)
    return seen


@pytest.mark.parametrize(("fn", "heads", "told"), FIRE, ids=lambda x: getattr(x, "__name__", ""))
def test_spelling_fires_with_equal_numbers(fn, heads, told, calls) -> None:
    """Every spelling becomes the operator with the right facts; values and gradients stay."""
    kv = f"f32[{B},{T},{heads},{D}]"
    args = inputs(f"f32[{B},{T},{H},{D}]", 1), inputs(kv, 2), inputs(kv, 3)
    new, report = rewritten(fn, fuse_attention, *args)
    assert [h.op for h in report.hits] == ["flash_attention"], report.near_misses
    assert "test_attention_rewrites.py" in report.hits[0].source
    assert report.hits[0].choices[0].implementation == "xla"
    assert calls[0]["key"] == (B, T, heads, D)
    assert not calls[0]["mask"]
    assert not calls[0]["bias"]
    for name, value in told.items():
        assert calls[0][name] == value, (name, calls[0])
    # float32 throughout; sums over 16 keys in another order
    assert_same(fn.__name__, fn, new, args, 3e-6)


@pytest.mark.parametrize("fn", [causal_where, upcast_scores, gqa_grouped, jax_nn])
def test_half_precision_stays_half(fn, calls) -> None:
    """bfloat16 queries, keys and values reach the operator as bfloat16, upcasts or not."""
    args = [inputs(f"bf16[{B},{T},{h},{D}]", h) for h in (H, 2, 2)]
    if fn in (causal_where, upcast_scores):
        args = [inputs(f"bf16[{B},{T},{H},{D}]", i) for i in range(3)]
    new, report = rewritten(fn, fuse_attention, *args)
    assert len(report.hits) == 1
    assert new(*args).dtype == jnp.bfloat16
    wide = [x.astype(jnp.float32) for x in args]
    exact = fn(*wide)
    error = [float(jnp.sqrt(jnp.mean((f(*args) - exact) ** 2))) for f in (new, fn)]
    assert error[0] <= 1.1 * error[1]


def test_mask_and_bias_stay_arrays(calls) -> None:
    """What depends on an input is passed on: padding as a mask, a bias with its gradient."""

    def padded(q, k, v, lengths):
        seen = jnp.arange(T)[None, :] < lengths[:, None]
        mask = tri()[None, None] & seen[:, None, None, :]
        return out(softmax(jnp.where(mask, scores(q, k), -1e30), -1), v)

    def biased(q, k, v, bias):
        return out(softmax(scores(q, k) * 2 + bias, -1), v)

    def bias_before_scale(q, k, v, bias):
        return out(softmax((einsum("bthd,bshd->bhts", q, k) - bias) / 3, -1), v)

    qkv = [inputs(f"f32[{B},{T},{H},{D}]", i) for i in range(3)]
    for fn, extra in (
        (padded, jnp.array([16, 9])),
        (biased, inputs(f"f32[{H},{T},{T}]", 4)),
        (bias_before_scale, inputs(f"f32[{B},1,{T},{T}]", 5)),
    ):
        new, report = rewritten(fn, fuse_attention, *qkv, extra)
        assert len(report.hits) == 1, report.near_misses
        assert_same(fn.__name__, fn, new, (*qkv, extra), 3e-6)
    assert [(c["mask"], c["bias"], c["is_causal"]) for c in calls] == [
        (True, False, True),
        (False, True, False),
        (False, True, False),
    ]


def test_flax_attention_modules_fire(calls) -> None:
    """nnx.MultiHeadAttention and linen.MultiHeadDotProductAttention with Flax's causal mask."""
    x = inputs("f32[2,16,32]", 7)
    attend = nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(0))
    dot = linen.MultiHeadDotProductAttention(4)
    params = dot.init(jax.random.key(0), x)
    for fn in (
        lambda x: attend(x, mask=nnx.make_causal_mask(x[..., 0])),
        lambda x: dot.apply(params, x, mask=linen.make_causal_mask(x[..., 0])),
    ):
        new, report = rewritten(fn, fuse_attention, x)
        assert len(report.hits) == 1, report.near_misses
        assert_same("flax", fn, new, (x,), 3e-6)
    assert all(c["is_causal"] and not c["mask"] for c in calls)


def test_cross_attention_with_other_length() -> None:
    """Fewer queries than keys."""
    args = [inputs(f"f32[{B},{n},{H},{D}]", i) for i, n in enumerate((5, T, T))]
    new, report = rewritten(full, fuse_attention, *args)
    assert len(report.hits) == 1
    assert_same("cross", full, new, tuple(args), 3e-6)


def test_values_of_another_width() -> None:
    """Values need not have the features of queries and keys, as in latent attention."""
    shapes = [(5, H, 12), (T, 2, 12), (T, 2, D)]
    args = [inputs(f"f32[{B},{n},{h},{d}]", i) for i, (n, h, d) in enumerate(shapes)]

    def fn(q, k, v):
        return full(q, jnp.repeat(k, 2, 2), jnp.repeat(v, 2, 2))

    new, report = rewritten(fn, fuse_attention, *args)
    assert len(report.hits) == 1, report.near_misses
    assert_same("wide", fn, new, tuple(args), 3e-6)


def softcap(q, k, v):
    return out(softmax(5 * jnp.tanh(scores(q, k) / 5), -1), v)


def returns_weights(q, k, v):
    w = softmax(scores(q, k), -1)
    return out(w, v), w


def other_axis(q, k, v):
    return out(softmax(scores(q, k), -2), v)


def zero_one_mask(q, k, v):
    return out(softmax(scores(q, k) * tri(), -1), v)


def faint_fill(q, k, v):
    return out(softmax(jnp.where(tri(), scores(q, k), -3.0), -1), v)


def gradient(q, k, v):
    return jax.grad(lambda q: causal_where(q, k, v).sum())(q)


def two_products(q, k, v):
    return out(softmax(scores(q, k) + scores(k, q), -1), v)


def learned_scale(q, k, v):
    return out(softmax(scores(q, k) * v[0, 0, 0, 0], -1), v)


MISS = [
    (softcap, "go through tanh"),
    (returns_weights, "also returned"),
    (other_axis, "not taken over the axis that is contracted"),
    (zero_one_mask, "which is not masking"),
    (faint_fill, "not far below"),
    (gradient, "compile the loss, not its gradient"),
    (two_products, "both operands of add"),
    (learned_scale, "a traced value"),
]


@pytest.mark.parametrize(("fn", "reason"), MISS, ids=lambda x: getattr(x, "__name__", ""))
def test_near_miss_names_its_reason(fn, reason) -> None:
    """What almost is attention stays as written, and the report says why."""
    args = [inputs(f"f32[{B},{T},{H},{D}]", i) for i in range(3)]
    _, report = rewritten(fn, fuse_attention, *args)
    assert not report.hits
    assert any(reason in miss.reason for miss in report.near_misses), report.near_misses


def test_softmax_elsewhere_is_no_near_miss() -> None:
    """A classifier's softmax or a router is not attention and makes no noise."""
    x, w = inputs("f32[8,32]", 1), inputs("f32[32,8]", 2)
    _, report = rewritten(lambda x, w: softmax(x @ w), fuse_attention, x, w)
    assert not report.hits
    assert not report.near_misses


@pytest.mark.parametrize("shift", [-1, 1])
def test_shifted_mask_is_not_causal(shift, calls) -> None:
    """A diagonal off by one is another mask: never is_causal, and the numbers stay."""
    args = [inputs(f"f32[{B},{T},{H},{D}]", i) for i in range(3)]

    def fn(q, k, v):
        mask = jnp.tril(jnp.ones((T, T), bool), shift)
        return out(softmax(jnp.where(mask, scores(q, k), -1e30), -1), v)

    new, report = rewritten(fn, fuse_attention, *args)
    assert len(report.hits) == (shift == 1)  # under -1 the first query sees no key: left as written
    assert not any(call["is_causal"] for call in calls)
    assert_same("shifted", fn, new, tuple(args), 3e-6)
