# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Dropout by a counter: its bits, share and edges; the kernel draws the same; several devices.

On a GPU: `python -m pytest -m gpu tests/pallas/test_dropout.py`.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpjax
from tests.harness import assert_close, inputs, run_python
from tests.pallas.test_dispatch import chosen
from tpjax.core import dropouts
from tpjax.pallas import _mgpu, dropout
from tpjax.pallas.randomness import kernels
from tpjax.pallas.randomness.kernels import CONFIGS, Config


def test_threefry_is_that_of_jax():
    """The same words as JAX's own generator makes of the same key and counters."""
    from jax.extend.random import threefry_2x32

    key, counters = jnp.array([7, 2**31], jnp.uint32), jnp.arange(64, dtype=jnp.uint32)
    words = dropouts.threefry((key[0], key[1]), (counters[:32], counters[32:]))
    assert_close("words", jnp.concatenate(words), threefry_2x32(key, counters), 0)


SEED = jnp.array([3, 4], jnp.uint32)


def test_dropout_keeps_its_share_and_its_mean():
    """What stays is larger by as much as goes; rates 0 and 1; rounding to 65536ths."""
    x = jnp.ones((257, 1031))
    for rate in (0.1, 0.5, 0.9):
        y = np.asarray(dropout(x, SEED, rate=rate))
        levels = dropouts.levels_of(rate)
        assert set(np.unique(y)) == {0.0, np.float32(65536 / levels)}
        # Of 265,000 coins the share is within five standard deviations.
        assert abs((y > 0).mean() - levels / 65536) < 5 * np.sqrt(rate * (1 - rate) / y.size)
        for axis in (0, 1):  # and in no row or column far off
            share = (y > 0).mean(axis)
            spread = np.sqrt(rate * (1 - rate) / y.shape[axis])
            assert abs(share - (1 - rate)).max() < 6 * spread
    assert_close("rate 0", dropout(x, SEED, rate=0.0), x, 0)
    assert not np.any(dropout(x, SEED, rate=1.0))
    assert not np.any(jax.grad(lambda x: dropout(x, SEED, rate=1.0).sum())(x))


def test_dropout_bits_follow_from_seed_and_place():
    """A part of the rows has the mask of its rows; another seed another mask; jit the same."""
    x = jnp.ones((2, 31, 63))
    y = dropout(x, SEED, rate=0.3)
    assert_close("rows", dropout(x.reshape(62, 63), SEED, rate=0.3), y.reshape(62, 63), 0)
    assert_close("first rows", dropout(x[:1], SEED, rate=0.3), y[:1], 0)
    assert_close("jit", jax.jit(partial(dropout, rate=0.3))(x, SEED), y, 0)
    assert (np.asarray(dropout(x, SEED + jnp.uint32(1), rate=0.3)) != np.asarray(y)).any()
    dx = jax.grad(lambda x: dropout(x, SEED, rate=0.3).sum())(x)
    assert_close("backward", dx, y, 0)
    by_key = dropout(x, jax.random.wrap_key_data(SEED), rate=0.3)
    assert_close("key", by_key, y, 0)


def test_dropout_stores_no_mask():
    x = inputs("bf16[64,128]", 0)
    _, vjp = jax.vjp(partial(dropout, seed=SEED, rate=0.3), x)
    kept = [a for a in jax.tree.leaves(vjp) if hasattr(a, "nbytes") and a.nbytes > 8]
    assert sum(a.nbytes for a in kept) <= x.nbytes


def both(fn):
    """Returns (dy, x, seed) -> output and gradient of x."""

    def run(dy, x, seed):
        out, vjp = jax.vjp(lambda x: fn(x, seed), x)
        return out, vjp(dy)[0]

    return run


def check(spec, rate, config):
    """Compares the kernel with the reference: the same mask, and products rounded alike."""
    x, dy = inputs(spec, 0), inputs(spec, 1)

    def kernel(x, seed):
        rows = dropouts.row_numbers(x.shape)
        return kernels.dropout_pallas(x, seed, rows, rate=rate, config=config)

    got = jax.jit(both(kernel))(dy, x, SEED)
    want = jax.jit(both(partial(dropouts.dropout_reference, rate=rate)))(dy, x, SEED)
    assert_close(spec, got, want, 0)


CASES = [  # rows that fill no tile; one, two and several tiles across
    ("bf16[13,512]", Config(rows=4, num_slots=2, blocks_per_sm=1)),
    ("f16[2,3,1024]", Config(rows=4, num_slots=2, blocks_per_sm=1)),
    ("f32[128]", CONFIGS[0]),
]


@pytest.mark.parametrize(("spec", "config"), CASES, ids=str)
def test_interpreted(spec, config, monkeypatch):
    """The kernel in the interpreter on a GPU of two SMs; data races are errors."""
    jax.clear_caches()  # a launch is traced once for equal calls
    monkeypatch.setattr(_mgpu, "num_sms", lambda: 2)
    with tpjax.use(interpret="races"):
        check(spec, 0.3, config)
    jax.clear_caches()


def test_interpreted_under_vmap():
    """The same mask for each example, or one for each seed."""
    x, seeds = inputs("f32[2,3,128]", 0), jnp.array([[1, 2], [3, 4]], jnp.uint32)
    for axes in ((0, None), (None, 0), (0, 0)):
        args = [a if axis == 0 else a[0] for a, axis in zip((x, seeds), axes, strict=True)]
        run = jax.vmap(partial(dropout, rate=0.3), in_axes=axes)
        with tpjax.use(interpret=True):
            got = jax.jit(run)(*args)
        assert_close(str(axes), got, run(*args), 0)


SHARDED = """
import jax, jax.numpy as jnp
from functools import partial
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from tests.harness import assert_close, inputs
from tpjax.pallas import OPS, dropout
from tpjax.pallas.partition import split_over_devices
from tpjax.core.dropouts import row_numbers

row = next(op for op in OPS if op.name == "dropout")
x, seed = inputs("f32[8,6,64]", 0), jnp.array([3, 4], jnp.uint32)

def split(x):  # as a kernel is split
    run = partial(row.implementations[-1].run, rate=0.3)
    return split_over_devices(run, row.partitioning, (x, seed, row_numbers(x.shape)))

want = dropout(x, seed, rate=0.3)
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind, kind))
    for spec in (P("a", "b"), P(("a", "b")), P(None, "a"), P(None, None, "a")):
        for fn in (partial(dropout, seed=seed, rate=0.3), split):
            with jax.set_mesh(mesh):
                run = jax.jit(fn)
                placed = jax.device_put(x, NamedSharding(mesh, spec))
                got = run(placed)
                text = run.lower(placed).compile().as_text()
            assert_close("sharded", jax.device_get(got), jax.device_get(want), 0)
            if fn is split and kind == AxisType.Explicit and spec[-1] == "b":
                assert "all-gather" not in text, spec
print("agree")
"""


def test_the_same_on_four_devices():
    """Sharded over any axes, under Auto and Explicit meshes: every row keeps its mask."""
    assert run_python(SHARDED, devices=4).split() == ["agree"]


X = jnp.zeros((2, 8))
DOOR = [
    (lambda: dropout(X, SEED, rate=1.5), ValueError, "rate must be from 0 to 1; got 1.5"),
    (lambda: dropout(X, jnp.zeros(2), rate=0.5), TypeError, "seed must be a key .*; got float32"),
    (lambda: dropout(X, SEED[:1], rate=0.5), ValueError, r"seed must be .*; got shape \(1,\)"),
]


@pytest.mark.parametrize(("wrong", "error", "text"), DOOR, ids=[d[2] for d in DOOR])
def test_door(wrong, error, text):
    """Wrong kinds, dtypes, shapes and numbers, in the house style."""
    with pytest.raises(error, match=text):
        wrong()


@pytest.mark.parametrize(
    ("shape", "rate", "reason"),
    [((3, 100), 0.5, "a multiple of 128; it has 100"), ((3, 128), 1.0, "nothing to draw")],
)
def test_kernel_refuses_with_the_reason(shape, rate, reason):
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    with tpjax.use(platform="cuda"), pytest.warns(UserWarning, match=reason):
        (choice,) = chosen(lambda x: dropout(x, SEED, rate=rate), x)
    assert choice.implementation == "xla"


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_gpu_sizes(config):
    """Odd numbers of rows, widths of every kind, with every config, on a GPU."""
    for i, rows in enumerate((1, 3, 7, 63, 1000, 1031)):
        for features in (128, 384, 768, 4096):
            check(f"{('bf16', 'f32', 'f16')[i % 3]}[{rows},{features}]", 0.1 + i / 8, config)
