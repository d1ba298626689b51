# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Code that only looks like a norm or attention: it must keep its numbers and gradients.

Arrays are square on purpose: equal lengths let a wrong axis pass every check of shapes.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.harness import inputs
from tests.stax_passes.spellings import assert_same, rewritten
from tpjax.stax_passes.attention import fuse_attention
from tpjax.stax_passes.norms import fuse_norm

rsqrt, mean, var = jax.lax.rsqrt, jnp.mean, jnp.var
N = 8
ROW, COL = jnp.arange(N)[:, None], jnp.arange(N)[None, :]


def to_int(x: Any) -> Any:
    return x.astype(jnp.int32).astype(jnp.float32)


def rms(x: Any) -> Any:
    return rsqrt(mean(x * x, -1, keepdims=True) + 1e-6)


def clamped_mean(x: Any) -> Any:
    centred = x - jnp.maximum(x.mean(-1, keepdims=True), 0.0)
    return centred * rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) + x.mean()


NOT_NORMS = {
    "statistic on the other axis": lambda x: x * rsqrt(mean(x * x, -1) + 1e-6),
    "reshaped to the other axis": lambda x: x * rms(x).reshape(1, N),
    "mean on the other axis": lambda x: (x - x.mean(-1)) * rsqrt(var(x, -1, keepdims=True) + 1e-5),
    "variance on the other axis": lambda x: (
        (x - x.mean(-1, keepdims=True)) * rsqrt(var(x, -1) + 1e-5)
    ),
    "statistic of integers": lambda x: x * rms(to_int(3 * x)),
    "root cast to integers": lambda x: x * (8 * rms(x)).astype(jnp.int32),
    "mean square cast to integers": lambda x: (
        x * rsqrt(to_int(mean(x * x, -1, keepdims=True)) + 1.0)
    ),
    "eps below zero": lambda x: x * rsqrt(mean(x * x, -1, keepdims=True) - 1e-3),
}


@pytest.mark.parametrize("name", NOT_NORMS)
def test_no_norm(name: str) -> None:
    """It is left as written."""
    x = inputs(f"f32[{N},{N}]", 1)
    new, report = rewritten(NOT_NORMS[name], fuse_norm, x)
    assert not report.hits
    assert_same(name, NOT_NORMS[name], new, (x,), 1e-6)


PARTLY_NORMS = {
    "clamped mean": clamped_mean,
    "norm cast to integers": lambda x: to_int(3 * x * rms(x)) * x[0],
    "norm of integers": lambda x: to_int(5 * x) * rms(to_int(5 * x)) + x,
    "norm of 8-bit floats": lambda x: (
        lambda y: y * rms(y)
    )(x.astype(jnp.float8_e4m3fn).astype(jnp.float32)),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTLY_NORMS)
def test_norm_around_which_something_stands(name: str) -> None:
    """What is a norm in it may be replaced; what stands around it stays."""
    x = inputs(f"f32[{N},{N}]", 1)
    new, _ = rewritten(PARTLY_NORMS[name], fuse_norm, x)
    assert_same(name, PARTLY_NORMS[name], new, (x,), 2e-6)


def scores(q: Any, k: Any) -> Any:
    return jnp.einsum("bthd,bshd->bhts", q, k) * 0.35


def out(w: Any, v: Any) -> Any:
    return jnp.einsum("bhts,bshd->bthd", w, v)


def attend(change: Any = lambda s: s, weights: Any = lambda w: w) -> Any:
    return lambda q, k, v: out(weights(jax.nn.softmax(change(scores(q, k)), -1)), v)


def divided_by(denominator: Any) -> Any:
    def fn(q, k, v):
        e = jnp.exp(scores(q, k))
        return out(e / denominator(e.sum(-1)), v)

    return fn


def shifted_by_another_max(q, k, v):
    s = scores(q, k)
    e = jnp.exp(s - s.max(-1)[:, :, None, :])
    return out(e / e.sum(-1, keepdims=True), v)


NOT_ATTENTION = {
    "sum on the query axis": divided_by(lambda total: total[:, :, None, :]),
    "sum on the head axis": divided_by(lambda total: total[:, None]),
    "sum without gradient": divided_by(lambda total: jax.lax.stop_gradient(total)[..., None]),
    "maximum on the other axis": shifted_by_another_max,
    "scores cast to integers": attend(lambda s: to_int(3 * s)),
    "weights in 8 bits": attend(weights=lambda w: w.astype(jnp.float8_e4m3fn).astype(w.dtype)),
    "a query that sees no key": attend(lambda s: jnp.where(COL < ROW, s, -1e9)),
}


@pytest.mark.parametrize("name", NOT_ATTENTION)
def test_no_attention(name: str) -> None:
    """It is left as written."""
    args = tuple(inputs(f"f32[{N},{N},{N},{N}]", i) for i in range(3))
    new, report = rewritten(NOT_ATTENTION[name], fuse_attention, *args)
    assert not report.hits
    assert_same(name, NOT_ATTENTION[name], new, args, 1e-6)


UNUSUAL = {
    "bias cast to integers": attend(lambda s: s - (jnp.abs(ROW - COL) * 0.5).astype(jnp.int32)),
    "keys cast to integers": lambda q, k, v: attend()(q, to_int(3 * k), v),
    "diagonal left out": attend(lambda s: jnp.where((COL > ROW) | (ROW == N - 1), s, -1e9)),
    "-1e4 beside scores as large": attend(lambda s: 3000 * s + jnp.where(COL <= ROW, 0.0, -1e4)),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_attention(name: str) -> None:
    """It is attention, with a mask or an operand that must reach the operator as it is."""
    args = tuple(inputs(f"f32[{N},{N},{N},{N}]", i) for i in range(3))
    new, report = rewritten(UNUSUAL[name], fuse_attention, *args)
    assert len(report.hits) == 1
    # scores of thousands lose three digits before the softmax, in either program
    assert_same(name, UNUSUAL[name], new, args, 2e-3 if name.startswith("-1e4") else 3e-6)


def test_empty_batch_is_left_alone() -> None:
    """No warning, and the right shape."""
    args = tuple(jnp.zeros((0, N, N, N)) for _ in range(3))
    new, report = rewritten(attend(), fuse_attention, *args)
    assert not report.hits
    assert new(*args).shape == (0, N, N, N)
