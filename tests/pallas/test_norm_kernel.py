# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The norms' kernels: layouts, rows that do not fill a tile, groups under vmap, lowering, faults.

On a GPU: `python -m pytest -m gpu tests/pallas/test_norm_kernel.py`.
"""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import pytest

import tpjax
from tests.harness import assert_close, inputs
from tpjax.core.norms import layer_norm_reference, rms_norm_reference
from tpjax.core.operator import parse_spec
from tpjax.pallas import _mgpu, layer_norm, rms_norm
from tpjax.pallas.norms import config as sizes
from tpjax.pallas.norms import layer, rms, tiles
from tpjax.pallas.norms.config import CONFIGS, Config, tile_for

TOL = {"float32": 1e-6, "bfloat16": 6e-3, "float16": 1e-3}
SMALL = Config(tile_elements=1024, num_slots=2, blocks_per_sm=1)
"""Few rows a tile, so that a few rows are several tiles a block: slots are used again."""
NORMS = {
    "rms": (rms.rms_norm_pallas, rms_norm_reference),
    "layer": (layer.layer_norm_pallas, layer_norm_reference),
}


def with_gradients(fn):
    """Returns (dy, *arrays) -> output and gradients."""

    def run(dy, *arrays):
        out, vjp = jax.vjp(fn, *arrays)
        return [out, *vjp(dy)]

    return run


def check(norm, specs, config=SMALL):
    """Compares the kernels' output and gradients with the float32 reference's."""
    kernel, reference = NORMS[norm]
    arrays = [None if s is None else inputs(s, i) for i, s in enumerate(specs)]
    dy = inputs(specs[0], 9)
    got = jax.jit(with_gradients(partial(kernel, eps=1e-5, config=config)))(dy, *arrays)
    want = with_gradients(partial(reference, eps=1e-5))(dy, *arrays)
    assert_close(f"{norm}_norm {specs}", got, want, TOL[str(dy.dtype)])


@pytest.fixture
def two_sms(monkeypatch):
    """A GPU of two streaming multiprocessors: blocks have several tiles."""
    jax.clear_caches()  # a launch is traced once for equal calls
    monkeypatch.setattr(_mgpu, "num_sms", lambda: 2)
    yield
    jax.clear_caches()


CASES = [  # with 1024 elements a tile: rows of a tile, tiles, warps a row, vector
    ("rms", ("bf16[13,512]", "f32[512]")),  # 2 rows, last tile half empty; 4 warps, 4 features
    ("rms", ("f16[37,192]", "f16[192]")),  # 4 rows, 2 warps side by side, 1 feature a lane
    ("rms", ("f32[3,1536]", None)),  # a row is larger than a tile should be
    ("layer", ("bf16[13,256]", "f32[256]", "bf16[256]")),  # 4 rows, 4 tiles on 2 blocks
    ("layer", ("f32[9,128]", None, "f32[128]")),  # 8 rows, 2 features a lane; bias alone
    ("layer", ("f32[1,64]", "f32[64]", None)),  # one row of 16
]


@pytest.mark.parametrize(("norm", "specs"), CASES, ids=str)
def test_interpreted(norm, specs, two_sms):
    """Every layout, tiles that the rows do not fill, slots used again; no data races."""
    with tpjax.use(interpret="races"):
        check(norm, specs)


@pytest.mark.parametrize("axes", [(None, None), (0, None), (None, 0), (0, 0)], ids=str)
def test_interpreted_groups(axes, two_sms):
    """Two vmaps, the scale in any of them: rows of one group do not touch another's."""
    shape = [n for n, axis in zip((2, 3), axes, strict=True) if axis is not None]
    scale = inputs(f"f32[{','.join(map(str, [*shape, 256]))}]", 1)
    x, dy = inputs("f32[2,3,5,256]", 0), inputs("f32[2,3,5,256]", 2)

    def mapped(norm):
        inner = jax.vmap(with_gradients(norm), in_axes=(0, 0, axes[1]))
        return jax.vmap(inner, in_axes=(0, 0, axes[0]))

    with tpjax.use(interpret="races"):
        got = jax.jit(mapped(rms_norm))(dy, x, scale)
    assert_close("rms_norm", got, mapped(rms_norm_reference)(dy, x, scale), TOL["float32"])


def test_interpreted_scan_and_outside_of_use():
    """Under scan; and the backward pass runs as the forward pass did, wherever it is called."""
    x, dy = inputs("f32[3,4,128]", 0), inputs("f32[3,4,128]", 1)

    def layers(norm, x):
        return jax.lax.scan(lambda c, x: (c, norm(x)), None, x)[1]

    with tpjax.use(interpret=True):
        _, vjp = jax.vjp(partial(layers, layer_norm), x)
    _, want = jax.vjp(partial(layers, layer_norm_reference), x)
    assert_close("dx", vjp(dy), want(dy), TOL["float32"])


LOWERED = [
    (norm, features, ("bf16", "f32", "f16")[i % 3], CONFIGS[i % len(CONFIGS)])
    for norm in NORMS
    for i, features in enumerate((64, 128, 768, 2880, 4096, 8192))
]


@pytest.mark.parametrize(("norm", "features", "dtype", "config"), LOWERED, ids=str)
def test_lowers_for_cuda(norm, features, dtype, config):
    """Every config passes the checks of layouts, shared memory and copies, at many sizes."""
    kernel, _ = NORMS[norm]
    dtype, shape = parse_spec(f"{dtype}[1001,{features}]")
    x, scale = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct((features,), jnp.float32)
    vectors = (scale,) * (1 if norm == "rms" else 2)
    run = with_gradients(partial(kernel, eps=1e-5, config=config))
    with tpjax.use(platform="cuda"):
        lowered = jax.jit(run).trace(x, x, *vectors).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count(f"{norm}_norm_backward") > 0


def test_tiles():
    """A tile deals its elements out exactly, and two of two arrays fit in shared memory."""
    limits = (rms.MAX_PER_THREAD, layer.MAX_PER_THREAD)
    for features, itemsize, limit, config in product(range(64, 16385, 64), (2, 4), limits, CONFIGS):
        tile = tile_for(features, itemsize, limit, config)
        if tile is None or features * itemsize > sizes.MAX_ROW_BYTES:
            continue
        assert tile.num_chunks * tile.chunk == features
        assert tile.num_chunks % tile.warps_per_row == 0
        assert tile.rows % (tiles.WARPS // tile.warps_per_row) == 0
        assert max(tile.shape) <= sizes.MAX_CHUNKS
        slot_bytes = 2 * tile.rows * features * itemsize
        slots, blocks = sizes.occupancy(tile, 1, 10**6, slot_bytes, config)
        assert slots >= 2
        assert blocks >= 1
        assert slots * slot_bytes + sizes.BLOCK_SMEM_BYTES <= sizes.MAX_BLOCK_SMEM_BYTES


def test_usual_sizes_have_a_tile():
    """Widths of common models and heads are supported in every dtype."""
    usual = (64, 128, 256, 512, 768, 1024, 2048, 2560, 2880, 3072, 4096, 5120, 6144, 7168, 8192)
    for features, itemsize in product(usual, (2, 4)):
        assert tile_for(features, itemsize, layer.MAX_PER_THREAD, CONFIGS[0])
    for features in (*usual, 11008, 12288, 14336, 16384):
        assert tile_for(features, 2, rms.MAX_PER_THREAD, CONFIGS[0])


def test_planted_fault_slot_reused_too_early(two_sms, monkeypatch, capsys):
    """A slot filled again while its result is still being sent off is found."""
    real = tiles.plgpu.wait_smem_to_gmem

    def careless(pending, **options):
        return None if pending else real(pending, **options)

    monkeypatch.setattr(tiles.plgpu, "wait_smem_to_gmem", careless)
    found = ""
    with tpjax.use(interpret="races"):
        try:
            check("rms", ("f32[40,512]", None))
        except Exception as error:
            found = str(error)
    assert "RACE DETECTED" in found + capsys.readouterr().out


def test_planted_fault_sum_of_rows(two_sms, monkeypatch):
    """A gradient of scale that is off by 0.1 % in the kernel is found."""
    real = tiles.Tile.store_sum
    monkeypatch.setattr(
        tiles.Tile, "store_sum", lambda tile, ref, block, x: real(tile, ref, block, x * 1.001)
    )
    with tpjax.use(interpret=True), pytest.raises(AssertionError, match=r"\[2\]"):
        check("rms", ("f32[8,256]", "f32[256]"))


@pytest.mark.gpu
@pytest.mark.parametrize(("norm", "specs"), CASES, ids=str)
def test_gpu(norm, specs):
    """The cases of the interpreter, on a GPU, with every config."""
    for config in (SMALL, *CONFIGS):
        check(norm, specs, config)


GPU_SIZES = [
    (norm, rows, features, dtype)
    for norm in NORMS
    for rows, features in (
        (1001, 64), (4099, 128), (1000, 768), (777, 2880), (333, 5120), (1031, 8192), (7, 4096),
    )
    for dtype in ("bf16", "f32")
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("norm", "rows", "features", "dtype"), GPU_SIZES, ids=str)
def test_gpu_sizes(norm, rows, features, dtype):
    """Odd numbers of rows, every kind of layout, on a GPU."""
    vectors = (f"f32[{features}]",) * (1 if norm == "rms" else 2)
    check(norm, (f"{dtype}[{rows},{features}]", *vectors), CONFIGS[0])


@pytest.mark.gpu
@pytest.mark.parametrize("axes", [(None, None), (0, None), (None, 0), (0, 0)], ids=str)
def test_gpu_groups(axes):
    """`test_interpreted_groups` on a GPU, where a copy may run past the end of its group."""
    shape = [n for n, axis in zip((2, 3), axes, strict=True) if axis is not None]
    scale = inputs(f"f32[{','.join(map(str, [*shape, 256]))}]", 1)
    x, dy = inputs("f32[2,3,37,256]", 0), inputs("f32[2,3,37,256]", 2)

    def mapped(norm):
        inner = jax.vmap(with_gradients(norm), in_axes=(0, 0, axes[1]))
        return jax.vmap(inner, in_axes=(0, 0, axes[0]))

    got = jax.jit(mapped(partial(rms_norm, implementation="pallas")))(dy, x, scale)
    assert_close("rms_norm", got, mapped(rms_norm_reference)(dy, x, scale), TOL["float32"])


@pytest.mark.gpu
def test_gpu_same_bits_every_time():
    """Gradients of scale and bias are sums in a fixed order."""
    x, dy = inputs("bf16[5000,1024]", 0), inputs("bf16[5000,1024]", 1)
    scale, bias = inputs("f32[1024]", 2), inputs("f32[1024]", 3)
    run = jax.jit(with_gradients(partial(layer_norm, implementation="pallas")))
    assert_close("again", run(dy, x, scale, bias), run(dy, x, scale, bias), 0)
