# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Attention's meaning: reference and XLA form against float64, the door, and who refuses what."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpjax
from tests.harness import assert_close, inputs
from tpjax.core.attention import attention_reference
from tpjax.core.errors import UnsupportedError
from tpjax.pallas.attention import portable
from tpjax.pallas.attention.entry import flash_attention
from tpjax.pallas.attention.row import FLASH_ATTENTION, attention_cost
from tpjax.pallas.dispatch import record_choices


def float64_attention(q, k, v, dout, visible, bias, scale):
    """Returns output and gradients of query, key, value and bias by the formulas, in float64."""
    q, k, v, dout = (np.asarray(x, np.float64) for x in (q, k, v, dout))
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))
    scores = np.einsum("bthd,bshd->bhts", q, k) * scale + bias
    scores = np.where(visible, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    p = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = p.sum(-1, keepdims=True)
    p = p / np.where(total == 0, 1, total)
    out = np.einsum("bhts,bshd->bthd", p, v)
    dp = np.einsum("bthd,bshd->bhts", dout, v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True))
    dq = np.einsum("bhts,bshd->bthd", ds, k) * scale
    dk, dv = np.einsum("bhts,bthd->bshd", ds, q) * scale, np.einsum("bhts,bthd->bshd", p, dout)
    dk, dv = (x.reshape(*x.shape[:2], -1, group, x.shape[-1]).sum(3) for x in (dk, dv))
    return out, dq, dk, dv, ds


def seen(T, S, batch=2, *, causal=False, window=None, queries=None, keys=None):
    """Returns the mask [B, 1, T, S] of the options, by a loop that cannot share a mistake."""
    mask = np.zeros((batch, 1, T, S), bool)
    for b, _, t, s in np.ndindex(mask.shape):
        mask[b, 0, t, s] = (
            (not causal or s <= t)
            and (window is None or -window[1] <= t - s <= window[0])
            and (queries is None or t < queries[b])
            and (keys is None or s < keys[b])
        )
    return mask


LENGTHS = jnp.array([3, 9], jnp.int32)
CASES = [  # T, S, query heads, key heads, options, visible
    (9, 7, 2, 2, {}, {}),
    (9, 7, 4, 2, {"is_causal": True}, {"causal": True}),
    (7, 12, 4, 1, {"is_causal": True, "scale": -0.3}, {"causal": True}),
    (9, 9, 2, 1, {"local_window_size": 2}, {"window": (2, 2)}),
    (9, 9, 2, 1, {"local_window_size": (3, 0), "is_causal": True}, {"window": (3, 0)}),
    (9, 9, 2, 1, {"query_seq_lengths": LENGTHS}, {"queries": (3, 9)}),
    (9, 9, 2, 1, {"key_value_seq_lengths": LENGTHS * 0 + 4}, {"keys": (4, 4)}),
    (1, 1, 1, 1, {"is_causal": True}, {"causal": True}),
]


@pytest.mark.parametrize("form", ["reference", "xla", "xla in blocks"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: str(c[:4]) + ",".join(c[4]))
def test_options_against_float64(case, form, monkeypatch):
    """Every option, with bias and mask: output and all gradients."""
    T, S, H, K, options, names = case
    if form == "xla in blocks":
        monkeypatch.setattr(portable, "MAX_SCORE_BYTES", 4 * 2 * H * S * 4)
    fn = attention_reference if form == "reference" else flash_attention
    q, k, v = (
        inputs(f"f32[2,{T},{H},8]", 0),
        inputs(f"f32[2,{S},{K},8]", 1),
        inputs(f"f32[2,{S},{K},8]", 2),
    )
    bias, mask = inputs(f"f32[{H},{T},{S}]", 3), inputs(f"bool[2,1,{T},{S}]", 4)
    dout = inputs(f"f32[2,{T},{H},8]", 5)
    out, vjp = jax.vjp(lambda *a: fn(*a, mask=mask, **options), q, k, v, bias)
    visible = seen(T, S, **names) & np.asarray(mask)
    want = float64_attention(
        q, k, v, dout, visible, np.asarray(bias), options.get("scale", 8**-0.5)
    )
    want = [x.astype(np.float32) for x in (*want[:4], want[4].sum(0))]
    for name, got, expected in zip(
        ("out", "dq", "dk", "dv", "dbias"), (out, *vjp(dout)), want, strict=True
    ):
        assert_close(name, got, expected, 4e-6)


def test_queries_that_see_nothing_give_zero():
    """Zero, and no gradient: not the mean of the values, not NaN."""
    x, mask = inputs("f32[1,4,1,8]", 0), jnp.ones((4, 4), bool).at[2].set(False)
    out, vjp = jax.vjp(lambda q: flash_attention(q, x, x, mask=mask), x)
    assert not np.asarray(out[0, 2]).any()
    assert not np.asarray(vjp(jnp.ones_like(out))[0][0, 2]).any()
    assert np.asarray(out[0, 1]).any()


@pytest.mark.parametrize("operand", [0, 1, 2])
def test_nan_stays_with_those_who_see_it(operand):
    """Token 5 of one head is NaN: queries from there on see it as key or value, itself as query."""
    arrays = [inputs("f32[1,8,2,8]", i) for i in range(3)]
    arrays[operand] = arrays[operand].at[0, 5, 1, 3].set(jnp.nan)
    nan = np.isnan(np.asarray(flash_attention(*arrays, is_causal=True)))[0].all(-1)
    want = np.zeros((8, 2), bool)
    want[5 : 6 if operand == 0 else 8, 1] = True
    assert_close("where NaN is", nan, want, 0)


@pytest.mark.parametrize(
    ("batch", "T", "S"), [((0,), 3, 3), ((2,), 0, 3), ((2,), 3, 0), ((), 3, 3), ((2, 3), 1, 1)]
)
def test_empty_and_leading_axes(batch, T, S):
    """Any number of leading axes, also none; nothing to attend from or to gives zeros."""
    shape = ",".join(map(str, (*batch, T))), ",".join(map(str, (*batch, S)))
    q, k = inputs(f"bf16[{shape[0]},2,16]", 0), inputs(f"bf16[{shape[1]},1,16]", 1)
    out = flash_attention(q, k, k, is_causal=True)
    assert_close("out", out, attention_reference(q, k, k, is_causal=True), 6e-3)


Q, KEY = inputs("bf16[2,8,4,16]", 0), inputs("bf16[2,8,2,16]", 1)
WIDE, THREE, ONE = inputs("f32[2,8,2,16]", 1), inputs("bf16[2,8,3,16]", 2), jnp.array([3])


def with_option(**option):
    """Returns the arguments and options of a call that is sound but for one option."""
    return (Q, KEY, KEY), option


DOOR = [
    (ValueError, "query must be of rank 3", (Q[0, 0], KEY, KEY), {}),
    (TypeError, "query must be an array; got list", ([1.0], KEY, KEY), {}),
    (TypeError, "query must be of dtype", (jnp.ones((2, 8, 4, 16), jnp.int32), KEY, KEY), {}),
    (TypeError, "key must be of query's dtype bfloat16; got float32", (Q, WIDE, KEY), {}),
    (ValueError, "value must be of query's rank 4", (Q, KEY, KEY[0]), {}),
    (ValueError, "key must be of query's leading axes", (Q, KEY[:1], KEY[:1]), {}),
    (ValueError, "key must be of query's 16 features", (Q, KEY[..., :8], KEY), {}),
    (ValueError, "value must be of key's shape", (Q, KEY, KEY[:, :4]), {}),
    (ValueError, "number of heads that divides query's; got 3 heads", (Q, THREE, THREE), {}),
    (ValueError, "bias must be broadcastable", (Q, KEY, KEY, jnp.ones((8, 7))), {}),
    (TypeError, "bias must be of dtype", (Q, KEY, KEY, jnp.ones((8, 8), bool)), {}),
    (ValueError, "mask must be broadcastable", (Q, KEY, KEY, None, jnp.ones((3, 4, 8, 8)) > 0), {}),
    (TypeError, "mask must be boolean", (Q, KEY, KEY, None, jnp.ones((8, 8))), {}),
    (TypeError, "scale must be a number", (Q, KEY, KEY), {"scale": "big"}),
    (ValueError, "scale must be finite", (Q, KEY, KEY), {"scale": float("nan")}),
    (TypeError, "is_causal must be True or False", (Q, KEY, KEY), {"is_causal": 1}),
    (ValueError, "query_seq_lengths must be of shape", *with_option(query_seq_lengths=ONE)),
    (TypeError, "lengths must be an integer", *with_option(key_value_seq_lengths=ONE * 1.0)),
    (TypeError, "local_window_size must be a number", *with_option(local_window_size=1.5)),
    (ValueError, "local_window_size must be zero", *with_option(local_window_size=(-1, 0))),
]  # fmt: skip


@pytest.mark.parametrize(("error", "says", "args", "options"), DOOR, ids=[d[1] for d in DOOR])
def test_door(error, says, args, options):
    """Wrong arguments are named at the door, with what was got."""
    with pytest.raises(error, match=f"flash_attention: .*{says}"):
        flash_attention(*args, **options)


def test_scale_must_be_static():
    """A traced scale is refused with a remedy."""
    with pytest.raises(TypeError, match="scale must be a number known when tracing"):
        jax.jit(lambda s: flash_attention(Q, KEY, KEY, scale=s))(0.5)


K64 = inputs("bf16[1,8,2,64]", 0)
REFUSALS = [
    ("it has bias", (K64, K64, K64, jnp.ones((8, 8), jnp.bfloat16)), {}),
    ("it has mask", (K64, K64, K64, None, jnp.ones((8, 8), bool)), {}),
    ("it has query_seq_lengths", (K64,) * 3, {"query_seq_lengths": jnp.array([3])}),
    ("it has key_value_seq_lengths", (K64,) * 3, {"key_value_seq_lengths": jnp.array([3])}),
    ("it has local_window_size", (K64,) * 3, {"local_window_size": 3}),
    ("its dtype is float32", (K64.astype(jnp.float32),) * 3, {}),
    ("its heads have 16 features; the kernel takes 64 or 128", (K64[..., :16],) * 3, {}),
    ("its scale is -1", (K64,) * 3, {"scale": -1.0}),
]


@pytest.mark.parametrize(("reason", "args", "options"), REFUSALS, ids=[r[0] for r in REFUSALS])
def test_refusals(reason, args, options):
    """The kernel says why it cannot run a call; the XLA form does it, with a warning."""
    with tpjax.use(platform="cuda"):
        with record_choices() as choices, pytest.warns(UserWarning, match=reason):
            jax.make_jaxpr(lambda *a: flash_attention(*a, **options))(*args)
        assert choices[0].implementation == "xla"
        assert reason in choices[0].refused[0].reason
        with pytest.raises(UnsupportedError, match=reason):
            flash_attention(*args, implementation="pallas", **options)


def test_cpu_runs_xla_and_says_why():
    """On a CPU the kernel's machine is missing: no warning, the reason is kept."""
    with record_choices() as choices:
        flash_attention(K64, K64, K64)
    assert choices[0].implementation == "xla"
    assert "needs cuda; this is cpu" in choices[0].refused[0].reason


def test_cost_counts_the_visible_scores():
    """Two products of 2 FLOPs each over the visible pairs, heads and features."""
    q, k = (
        jax.ShapeDtypeStruct((2, 9, 4, 16), jnp.float32),
        jax.ShapeDtypeStruct((2, 7, 2, 16), jnp.float32),
    )
    full, causal = seen(9, 7, 1).sum(), seen(9, 7, 1, causal=True).sum()
    window = seen(9, 7, 1, window=(2, 1)).sum()
    each = 4 * 2 * 4 * 16
    assert attention_cost(q, k, k).flops == each * full
    assert attention_cost(q, k, k, is_causal=True).flops == each * causal
    assert attention_cost(q, k, k, local_window_size=(2, 1)).flops == each * window
    assert FLASH_ATTENTION.cost(q, k, k).bytes == 4 * 16 * (2 * 2 * 9 * 4 + 2 * 2 * 7 * 2)
