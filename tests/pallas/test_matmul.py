# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Matrix products: the door, the schedule of tiles, tiles that do not fill, every config.

On a GPU: `python -m pytest -m gpu tests/pallas/test_matmul.py`.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpjax
from tests.harness import assert_close, inputs
from tests.pallas import op_checks as checks
from tpjax.core.errors import UnsupportedError
from tpjax.core.operator import Sample, parse_spec
from tpjax.pallas import matmul
from tpjax.pallas.products.config import CONFIGS, worth_trying
from tpjax.pallas.products.finishes import Affine, Gated, Plain, ProductPull
from tpjax.pallas.products.grouped import product
from tpjax.pallas.products.kernel import Job, staging_for
from tpjax.pallas.products.mainloop import Config, Tiles
from tpjax.pallas.products.rows import MATMUL

A, B = jnp.ones((4, 6)), jnp.ones((6, 8))


@pytest.mark.parametrize(
    ("error", "says", "call"),
    [
        (TypeError, "a must be an array", lambda: matmul([[1.0]], B)),  # pyright: ignore[reportArgumentType]
        (TypeError, "a must be of dtype", lambda: matmul(A.astype(int), B)),
        (ValueError, "'silu'. It is called 'swish'", lambda: matmul(A, B, activation="silu")),
        (TypeError, "out_dtype must be of .* got 'bf16'", lambda: matmul(A, B, out_dtype="bf16")),
        (ValueError, "a must be of rank 2 or more", lambda: matmul(A[0], B)),
        (TypeError, "b must be of the dtype of a", lambda: matmul(A, B.astype(jnp.bfloat16))),
        (ValueError, "K = 6", lambda: matmul(A, B.T)),
        (ValueError, "b must be of rank 2, or of", lambda: matmul(A[None], jnp.ones((2, 6, 8)))),
        (ValueError, r"bias must be of shape \(8,\)", lambda: matmul(A, B, jnp.ones(4))),
        (ValueError, "residual must be of shape", lambda: matmul(A, B, residual=B)),
        (ValueError, r"scale must be .* or \(\)", lambda: matmul(A, B, scale=jnp.ones(1))),
        (ValueError, "Did you mean 'gelu'", lambda: matmul(A, B, activation="gelo")),
        (TypeError, "out_dtype must be of", lambda: matmul(A, B, out_dtype="int8")),
    ],
)
def test_door(error, says, call):
    """Wrong operands are refused with what must hold."""
    with pytest.raises(error, match=says):
        call()


def test_nothing_to_multiply():
    """Empty results are empty; sums of no terms are zero, and what follows them is done."""
    assert matmul(A[:0], B).shape == (0, 8)
    got = matmul(A[:, :0], B[:0], jnp.full(8, 2.0), activation="relu_squared")
    assert_close("no terms", got, np.full((4, 8), 4.0, np.float32), 1e-6)


def test_scale_of_python():
    """A number of Python scales as an array of no axes does."""
    for scale in (3, 0.25):
        got = matmul(A, B, scale=scale)
        assert_close("scaled", got, matmul(A, B, scale=jnp.float32(scale)), 0)


def test_wider_result():
    """A result may be wider than its operands: it is the sum, not rounded."""
    a, b = inputs("bf16[129,40]", 0), inputs("bf16[40,16]", 1)
    want = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    for use in (tpjax.use(interpret=True), tpjax.use(implementation="xla")):
        with use:
            got = matmul(a, b, out_dtype="float32")
        assert_close("wide", got, want.astype(np.float32), 1e-6)


@pytest.mark.parametrize("use", [{"interpret": True}, {"implementation": "xla"}], ids=str)
def test_relu_has_no_gradient_at_zero(use: Any):
    """Neither in the kernel nor in the plain form."""
    zeros, ones = jnp.zeros((128, 64), jnp.bfloat16), jnp.ones((64, 64), jnp.bfloat16)
    with tpjax.use(**use):
        got = jax.grad(lambda a: matmul(a, ones, activation="relu").astype(jnp.float32).sum())
        assert_close("da", got(zeros), zeros, 0)


def test_refusals():
    """What the kernel would round, or would not fill, is refused with the reason."""
    x, y = jnp.ones((4, 4), jnp.bfloat16), jnp.ones((128, 4), jnp.bfloat16)
    for says, call in (
        ("takes bfloat16 and float16", lambda: matmul(A, B, implementation="pallas")),
        ("fewer than 128 rows", lambda: matmul(x, x, implementation="pallas")),
        ("nothing to multiply", lambda: matmul(x[:, :0], x[:0], implementation="pallas")),
    ):
        with tpjax.use(platform="cuda"), pytest.raises(UnsupportedError) as e:
            call()
        assert says in str(e.value)
    with jax.enable_x64(True), tpjax.use(platform="cuda"):
        with pytest.raises(UnsupportedError, match="out_dtype is float64"):
            matmul(y, x, out_dtype="float64", implementation="pallas")
        with pytest.raises(UnsupportedError, match="bias is float64"):
            matmul(y, x, jnp.ones(4, "float64"), implementation="pallas")


@pytest.mark.parametrize("config", [*CONFIGS, Config(cluster=4, group=3)], ids=str)
def test_every_tile_once(config):
    """The schedule gives every tile to one block, rounded up to whole clusters."""
    tiles = Tiles(config, batch=2, rows=1000, columns=700, steps=1, sums=1)
    index, part = jnp.arange(tiles.count), jnp.arange(config.cluster)
    parts = jax.vmap(lambda _, i: tiles.locate(i), (0, None), axis_name="part")
    found = jax.jit(jax.vmap(parts, (None, 0)))(part, index)
    places = set(zip(*(x.ravel().tolist() for x in found), strict=True))
    assert len(places) == tiles.count * config.cluster
    whole = {
        (g, r, c)
        for g in range(2)
        for r in range(0, 1000, config.block_rows)
        for c in range(0, 700, config.columns)
    }
    assert whole <= places


FINISHES = (
    Plain(),
    Affine("gelu", True, True, True, True),
    Gated("swish", True),
    ProductPull("swish"),
)


@pytest.mark.parametrize("finish", FINISHES, ids=lambda f: type(f).__name__)
def test_slots_come_round(finish):
    """A tile begins with the slot sent off longest ago: results are a multiple of the slots."""
    for config in worth_trying(len(finish.factors)):
        for sizes in ([2, 2], [2, 4], [4, 4]):
            out, *sides = sizes[: 1 + len(finish.sides)] if len(finish.sides) < 2 else [2, 2, 2]
            staging = staging_for(config, finish, out, sides)
            pieces = config.rows // 64 * (config.columns // len(finish.factors) // staging.piece)
            assert pieces % staging.slots == 0
            assert staging.side_slots <= pieces


def _exact(a, b, transpose_a, transpose_b):
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    return (a.swapaxes(1, 2) if transpose_a else a) @ (b.swapaxes(1, 2) if transpose_b else b)


@pytest.mark.parametrize(
    ("config", "shapes", "stored"),
    [
        (Config(columns=64, group=1), ("bf16[2,150,70]", "bf16[1,70,130]"), {}),
        (
            Config(columns=128, share_columns=False, pending=False, stages=2),
            ("bf16[1,200,140]", "bf16[1,140,200]"),
            {"transpose_a": True, "transpose_b": True},
        ),
        (Config(rows=128, columns=64), ("f16[1,300,72]", "f16[2,72,40]"), {}),
    ],
    ids=str,
)
def test_clusters(config, shapes, stored):
    """Several tiles, of which the last are not full, in clusters of two; races are errors."""
    a, b = (inputs(s, i) for i, s in enumerate(shapes))
    want = _exact(a, b, False, False)
    a = a.swapaxes(1, 2) if stored.get("transpose_a") else a
    b = b.swapaxes(1, 2) if stored.get("transpose_b") else b
    with tpjax.use(interpret="races"):
        (got,) = product(Job(Plain(), config, "races", "product", **stored), a, [b])
    assert_close("product", got, want.astype(got.dtype), 6e-3)


def test_tiles_that_wait(monkeypatch):
    """A tile is finished under the next ones' main loops, the last one behind them."""
    from tpjax.pallas.products import mainloop

    monkeypatch.setattr(mainloop, "num_sms", lambda: 2)
    a, b = inputs("bf16[1,280,136]", 0), inputs("bf16[1,136,264]", 1)
    config = Config(columns=128, late=True, stages=2)
    jax.clear_caches()
    with tpjax.use(interpret="races"):
        (got,) = product(Job(Plain(), config, "races", "product"), a, [b])
    jax.clear_caches()
    assert_close("product", got, _exact(a, b, False, False).astype(got.dtype), 6e-3)


@pytest.mark.parametrize("config", {replace(c, group=8, cluster=2) for c in CONFIGS}, ids=str)
def test_configs_lower(config):
    """Every shape of tile lowers for a GPU: layouts are legal and shared memory is enough."""
    x = jax.ShapeDtypeStruct((1, 512, 512), jnp.bfloat16)
    pair = jax.ShapeDtypeStruct((1, 512, 2, 512), jnp.bfloat16)
    v = jax.ShapeDtypeStruct((1, 512), jnp.float32)

    def run(x, pair, v):
        plain = product(Job(FINISHES[1], config, False, "full"), x, [x], [x], [v, v])
        if config not in worth_trying(2):
            return plain
        gated = product(Job(FINISHES[2], config, False, "gated"), x, [pair])
        pull = Job(FINISHES[3], config, False, "pull", transpose_b=True, transpose_a=True)
        return plain, gated, product(pull, x, [x], [pair])

    with tpjax.use(platform="cuda"):
        jax.jit(run).trace(x, pair, v).lower(lowering_platforms=("cuda",))


def test_planted_fault_slot_freed_too_early(monkeypatch):
    """A worker that gives a slot back before its products have read it is a race."""
    from tpjax.pallas.attention.ring import Ring

    monkeypatch.setattr(Ring, "await_free", lambda self, slot: None)
    a, b = inputs("bf16[1,64,256]", 0), inputs("bf16[1,256,64]", 1)
    config = Config(columns=64, cluster=1, stages=2)
    jax.clear_caches()

    def compare():
        (got,) = product(Job(Plain(), config, "races", "product"), a, [b])
        assert_close("product", got, _exact(a, b, False, False).astype(got.dtype), 6e-3)

    with tpjax.use(interpret="races"), pytest.raises(Exception, match=r"[Rr]ace|tolerance|finite"):
        compare()
    jax.clear_caches()


ODD = (1, 3, 7, 63, 1000, 1031)


@pytest.mark.gpu
@pytest.mark.parametrize("size", ODD)
def test_odd_sizes_on_gpu(size):
    """Sizes that fill no tile, each along one axis and along all, with all that may follow."""
    rows = size + 128  # fewer are refused
    for sizes in ((rows, 128, 256), (200, size, 256), (200, 128, size), (rows, size, size)):
        rows, terms, columns = sizes
        result, vector = f"bf16[{rows},{columns}]", f"f32[{columns}]"
        specs = (f"bf16[{rows},{terms}]", f"bf16[{terms},{columns}]", vector, result, vector)
        sample = Sample(specs, {"activation": "gelu"})
        checks.check(MATMUL, sample, partial(matmul, implementation="pallas"))


@pytest.mark.gpu
def test_bits_repeat_on_gpu():
    """The same call gives the same bits, gradients too, whatever the batch beside it."""
    a, b, dout = inputs("bf16[4,500,700]", 0), inputs("bf16[4,700,300]", 1), inputs("f32[300]", 2)

    @jax.jit
    def run(a, b):
        out, vjp = jax.vjp(lambda a, b: matmul(a, b, activation="swish"), a, b)
        return [out, *vjp(jnp.broadcast_to(dout, out.shape).astype(out.dtype))]

    first = run(a, b)
    for _ in range(5):
        assert all((x == y).all() for x, y in zip(first, run(a, b), strict=True))
    alone = run(a[2:3], b[2:3])
    assert all((x[2] == y[0]).all() for x, y in zip(first, alone, strict=True))


@pytest.mark.gpu
def test_results_beyond_31_bits_on_gpu():
    """A result of more than 2^31 elements is right at its end."""
    rows, columns = 65544, 32776
    a, b = inputs(f"bf16[{rows},64]", 0), inputs(f"bf16[64,{columns}]", 1)
    out = jax.jit(partial(matmul, implementation="pallas"))(a, b)
    want = _exact(a[None, -9:], b[None, :, -300:], False, False)[0]
    assert_close("last corner", out[-9:, -300:], want.astype(out.dtype), 6e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_configs_on_gpu(config):
    """Every config gives the same sums, whichever way the operands are stored."""
    shapes = [parse_spec(s)[1] for s in ("bf16[1,1500,900]", "bf16[1,900,1100]")]
    a, b = (inputs(f"bf16[{','.join(map(str, s))}]", i) for i, s in enumerate(shapes))
    want = _exact(a, b, False, False)
    for ta, tb in ((False, False), (True, False), (False, True), (True, True)):
        job = Job(Plain(), replace(config), False, "product", transpose_a=ta, transpose_b=tb)
        left, right = (x.swapaxes(1, 2) if t else x for x, t in ((a, ta), (b, tb)))
        (got,) = jax.jit(partial(product, job))(left, [right])
        assert_close(str((ta, tb)), got, want.astype(got.dtype), 6e-3)
