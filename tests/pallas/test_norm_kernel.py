# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The norms' kernels: layouts, rows that do not fill a tile, groups under vmap, lowering, faults.

On a GPU: `python -m pytest -m gpu tests/pallas/test_norm_kernel.py`.
"""

from functools import partial
from itertools import product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpjax
from tests.harness import assert_close, inputs
from tpjax.core import norms as core
from tpjax.core.norms import layer_norm_reference, rms_norm_reference
from tpjax.core.operator import parse_spec
from tpjax.pallas import _mgpu, layer_norm, rms_norm
from tpjax.pallas.norms import config as sizes
from tpjax.pallas.norms import implementations as ways
from tpjax.pallas.norms import tiles
from tpjax.pallas.norms.config import CONFIGS, Config, tile_for

TOL = {"float32": 1e-6, "bfloat16": 6e-3, "float16": 1e-3}
SMALL = Config(tile_elements=1024, num_slots=2, blocks_per_sm=1)
"""Few rows a tile, so that a few rows are several tiles a block: slots are used again."""
NORMS = {
    "rms": (ways.rms_norm_pallas, rms_norm_reference),
    "layer": (ways.layer_norm_pallas, layer_norm_reference),
    "add_rms": (ways.add_rms_norm_pallas, core.add_rms_norm_reference),
    "add_layer": (ways.add_layer_norm_pallas, core.add_layer_norm_reference),
    "rms_fp8": (ways.rms_norm_fp8_pallas, core.rms_norm_fp8_reference),
    "layer_fp8": (ways.layer_norm_fp8_pallas, core.layer_norm_fp8_reference),
}


class Case(NamedTuple):
    """A call of a kernel."""

    norm: str
    specs: tuple[str | None, ...]
    num_groups: int = 1
    scale_offset: float = 0.0


def with_gradients(fn):
    """Returns (cotangents, *arrays) -> outputs and gradients."""

    def run(dy, *arrays):
        out, vjp = jax.vjp(fn, *arrays)
        return [out, *vjp(dy)]

    return run


def options_of(case):
    """Returns the keywords of a case."""
    groups = {} if case.num_groups == 1 else {"num_groups": case.num_groups}
    return {"eps": 1e-5, "scale_offset": case.scale_offset, **groups}


def check(case, config=SMALL):
    """Compares the kernels' outputs and gradients with the float32 reference's."""
    kernel, reference = (partial(fn, **options_of(case)) for fn in NORMS[case.norm])
    kernel = partial(kernel, config=config)
    arrays = [None if s is None else inputs(s, i) for i, s in enumerate(case.specs)]
    if case.norm.endswith("fp8"):
        got, want = jax.jit(kernel)(*arrays), reference(*arrays)
    else:
        out = jax.eval_shape(reference, *arrays)
        dy = jax.tree.map(lambda x: jnp.asarray(inputs(spec_of(x), 9)), out)
        got = jax.jit(with_gradients(kernel))(dy, *arrays)
        want = with_gradients(reference)(dy, *arrays)
    tol = max(TOL[parse_spec(s)[0].name] for s in case.specs if s is not None and s != "f32[]")
    if case.norm.endswith("fp8"):  # a last bit before may round to the neighbour, 1 in 8 away
        tol = max(tol, TOL["bfloat16"])
    assert_close(str(case), got, want, tol)


def spec_of(x):
    """Returns the spec of an array's type."""
    letters = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[x.dtype.name]
    return f"{letters}[{','.join(map(str, x.shape))}]"


@pytest.fixture
def two_sms(monkeypatch):
    """A GPU of two streaming multiprocessors: blocks have several tiles."""
    jax.clear_caches()  # a launch is traced once for equal calls
    monkeypatch.setattr(_mgpu, "num_sms", lambda: 2)
    yield
    jax.clear_caches()


CASES = [  # with 1024 elements a tile: rows of a tile, tiles, warps and lanes a row, vector
    Case("rms", ("bf16[13,512]", "f32[512]")),  # 4 rows, last tile a quarter full; 32 lanes
    Case("rms", ("f16[37,192]", "f16[192]"), scale_offset=1.0),  # 12 rows of 16 lanes
    Case("rms", ("f32[3,1536]", None)),  # a row is larger than a tile should be; 4 warps
    Case("layer", ("bf16[19,64]", "f32[64]", "bf16[64]")),  # 16 rows of 8 lanes, 2 tiles
    Case("layer", ("f32[9,640]", None, "f32[640]"), num_groups=5),  # groups of 128, bias alone
    Case("layer", ("f32[2,12288]", "f32[12288]", None)),  # segments, read twice
    Case("add_rms", ("bf16[7,512]", "f32[7,512]", "f32[512]")),  # a wider residual
    Case("add_layer", ("f32[3,80]", "f32[3,80]", "f32[80]", "f32[80]")),  # of 8 lanes, 2 features
    Case("rms_fp8", ("bf16[5,256]", "f32[256]", None), scale_offset=1.0),
    Case("layer_fp8", ("f32[3,128]", "f32[128]", "f32[128]", "f32[]")),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_interpreted(case, two_sms):
    """Every layout, tiles that the rows do not fill, slots used again; no data races."""
    with tpjax.use(interpret="races"):
        check(case)


def test_added_and_apart_are_the_same():
    """The norm of a sum is that of the rounded sum, to the bit."""
    x, residual, scale = (inputs(s, i) for i, s in enumerate(("bf16[9,64]",) * 2 + ("f32[64]",)))
    options = {"eps": 1e-5, "scale_offset": 0.0}
    with tpjax.use(interpret=True):
        normed, h = ways.add_rms_norm_pallas(x, residual, scale, **options)
        assert_close("h", h, x + residual, 0)
        assert_close("normed", normed, ways.rms_norm_pallas(h, scale, **options), 0)


def test_fp8_edges():
    """A row of zeros has scale 1; what is too large for a given scale is the largest; NaN stays."""
    x = jnp.zeros((3, 32)).at[1].set(1.0).at[2, 3].set(jnp.nan)
    for kernel in (True, False):
        fn = ways.rms_norm_fp8_pallas if kernel else core.rms_norm_fp8_reference
        options = {"eps": 1e-6, "scale_offset": 0.0}
        with tpjax.use(interpret=kernel):
            values, scales = fn(x, None, None, **options)
            small, given = fn(x, None, jnp.float32(1e-4), **options)
        assert scales[0] == 1
        assert not np.any(np.asarray(values[0], np.float32))
        assert np.asarray(values[1], np.float32).tolist() == [448.0] * 32
        assert np.isnan(np.asarray(values[2], np.float32)).all()
        assert np.asarray(small[1], np.float32).tolist() == [448.0] * 32
        assert_close("scale", given, jnp.full(3, 1e-4, jnp.float32), 0)


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
    for j, norm in enumerate(NORMS)
    for i, features in enumerate((64, 128, 768, 2880, 4096, 8192, 1056, 65536))
    if i < 2 * (j < 2) or i % len(NORMS) == j  # each width once, the narrow ones for each norm
]


@pytest.mark.parametrize(("norm", "features", "dtype", "config"), LOWERED, ids=str)
def test_lowers_for_cuda(norm, features, dtype, config):
    """Every config passes the checks of layouts, shared memory and copies, at many sizes."""
    kernel = partial(NORMS[norm][0], eps=1e-5, scale_offset=0.0, config=config)
    dtype, shape = parse_spec(f"{dtype}[1001,{features}]")
    x, scale = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct((features,), jnp.float32)
    operands = (x,) * (1 + norm.startswith("add")) + (scale,) * (1 + ("layer" in norm))
    if norm.endswith("fp8"):
        kernel, name = lambda *arrays, kernel=kernel: kernel(*arrays, None), f"{norm[:-4]}_norm_fp8"
    else:
        cotangents = jax.eval_shape(NORMS[norm][1], *operands)
        operands, name = (cotangents, *operands), f"{norm}_norm_backward"
        kernel = with_gradients(kernel)
    with tpjax.use(platform="cuda"):
        lowered = jax.jit(kernel).trace(*operands).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count(name) > 0


def test_tiles():
    """A tile deals its elements out exactly, and two of its buffers fit in shared memory."""
    buffers = ((2, 2), (4, 2, 4), (2, 1))
    widths = (*range(16, 400, 8), *range(448, 16385, 64))
    for features, itemsizes, config in product(widths, buffers, CONFIGS):
        tile = tile_for(features, itemsizes, config)
        if tile is None:
            continue
        assert tile.num_chunks * tile.chunk == features
        assert tile.num_chunks % tile.warps_per_row == 0
        assert tile.rows % tile.rows_at_once == 0
        assert max(tile.shape) <= sizes.MAX_BOX
        slot_bytes = sum(itemsizes) * tile.rows * features
        slots, blocks = sizes.occupancy(tile, 1, 10**6, slot_bytes, config)
        assert slots >= 2
        assert blocks >= 1
        assert slots * slot_bytes + sizes.BLOCK_SMEM_BYTES <= sizes.MAX_BLOCK_SMEM_BYTES


def test_usual_sizes_have_a_tile():
    """Widths of common models and heads are supported in every dtype, whole or in segments."""
    heads = (64, 72, 80, 96, 112, 128, 192, 256)
    usual = (*heads, 512, 768, 1024, 1600, 2048, 2560, 2880, 3072, 4096)
    wide = (5120, 6144, 7168, 8192, 11008, 12288, 14336, 16384, 18432, 28672, 32768, 65536)
    for features, size in product((*usual, *wide), (2, 4)):
        for buffers in ((size,) * 2, (size,) * 3):
            tile = tile_for(features, buffers, CONFIGS[0])
            assert tile or (features in wide and sizes.segments(features, buffers))


def test_short_rows_take_few_lanes():
    """A head is summed up in 3 shuffles, 4 rows at once in a warp."""
    for features in (64, 96, 128):
        tile = tile_for(features, (2, 2), CONFIGS[0])
        assert tile
        assert (tile.warps_per_row, tile.lanes_per_row, tile.vector) == (1, 8, 4)


def test_planted_fault_slot_reused_too_early(two_sms, monkeypatch, capsys):
    """A slot filled again while its result is still being sent off is found."""
    real = tiles.plgpu.wait_smem_to_gmem

    def careless(pending, **options):
        return None if pending else real(pending, **options)

    monkeypatch.setattr(tiles.plgpu, "wait_smem_to_gmem", careless)
    found = ""
    with tpjax.use(interpret="races"):
        try:
            check(Case("rms", ("f32[40,512]", None)))
        except Exception as error:
            found = str(error)
    assert "RACE DETECTED" in found + capsys.readouterr().out


def test_planted_fault_sum_of_rows(two_sms, monkeypatch):
    """A gradient of scale that is off by 0.1 % in the kernel is found."""
    real = tiles.Tile.store_sum

    def faulty(tile, ref, block, pieces):
        real(tile, ref, block, [x * 1.001 for x in pieces])

    monkeypatch.setattr(tiles.Tile, "store_sum", faulty)
    with tpjax.use(interpret=True), pytest.raises(AssertionError, match=r"\[2\]"):
        check(Case("rms", ("f32[8,256]", "f32[256]")))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gpu(case):
    """The cases of the interpreter, on a GPU, with every config."""
    for config in (SMALL, *CONFIGS):
        check(case, config)


GPU_SIZES = [
    (norm, rows, features, dtype)
    for norm in NORMS
    for rows, features in (
        (1001, 64), (4099, 128), (1000, 768), (777, 2880), (333, 5120), (1031, 8192), (7, 4096),
        (1, 16), (63, 72), (3, 1056), (63, 2112), (131, 65536),
    )
    for dtype in ("bf16", "f32")
    if not (norm.endswith("fp8") and features in (16, 72, 2112, 8192, 65536))
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("norm", "rows", "features", "dtype"), GPU_SIZES, ids=str)
def test_gpu_sizes(norm, rows, features, dtype):
    """Odd numbers of rows, every kind of layout, on a GPU."""
    x = (f"{dtype}[{rows},{features}]",) * (1 + norm.startswith("add"))
    vectors = (f"f32[{features}]",) * (1 + ("layer" in norm))
    check(Case(norm, (*x, *vectors, *[None] * norm.endswith("fp8"))), CONFIGS[0])


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
