# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding, with a norm of each head and without: kernels, tiles, edges, the door.

On a GPU: `python -m pytest -m gpu tests/pallas/test_rope.py`.
"""

from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tpjax
from tests.harness import assert_close, inputs
from tests.pallas.test_dispatch import chosen
from tpjax.core.operator import parse_spec
from tpjax.core.rotary import (
    rms_norm_rope_reference,
    rotary_frequencies,
)
from tpjax.pallas import _mgpu, rms_norm_rope, rotary_embedding
from tpjax.pallas.rope import kernels
from tpjax.pallas.rope.tiles import CONFIGS, Config, Head, tile_for

TOL = {"float32": 2e-6, "bfloat16": 6e-3, "float16": 1e-3}
SMALL = Config(tile_elements=1024, num_slots=2, blocks_per_sm=1)
"""Small tiles, so that a few tokens are several tiles a block: slots are used again."""


def forms(interleaved, config):
    """Returns the kernels and the reference as functions of x, scale, positions, frequencies."""
    options = {"interleaved": interleaved, "amplitude": 1.25, "eps": 1e-5, "scale_offset": 1.0}
    kernel = partial(kernels.rms_norm_rope_pallas, config=config, **options)
    return kernel, partial(rms_norm_rope_reference, **options)


def check(spec, num_pairs, interleaved=False, shared=True, config=SMALL):
    """Compares the kernels' output and gradients with the float32 reference's."""
    x, dy = inputs(spec, 0), inputs(spec, 1)
    scale = inputs(f"f32[{x.shape[-1]}]", 2)
    positions = inputs(f"i32[{','.join(map(str, x.shape[-3:-2] if shared else x.shape[:-2]))}]", 3)
    frequencies = rotary_frequencies(2 * num_pairs, base=100.0)

    def with_gradients(fn):
        out, vjp = jax.vjp(lambda x, scale: fn(x, scale, positions, frequencies), x, scale)
        return [out, *vjp(dy)]

    kernel, reference = forms(interleaved, config)
    got = jax.jit(partial(with_gradients, kernel))()
    assert_close(spec, got, with_gradients(reference), TOL[str(x.dtype)])


@pytest.fixture
def two_sms(monkeypatch):
    """A GPU of two streaming multiprocessors: blocks have several tiles."""
    jax.clear_caches()  # a launch is traced once for equal calls
    monkeypatch.setattr(_mgpu, "num_sms", lambda: 2)
    yield
    jax.clear_caches()


CASES = [  # x, pairs that turn, interleaved, the same positions for all
    ("bf16[2,5,3,64]", 32, False, True),  # 4 heads a unit, of which 1 is not there
    ("f32[2,7,9,32]", 16, False, False),  # own positions: examples are one
    ("f16[1,5,16,64]", 16, True, True),  # half of the words turn
    ("bf16[3,9,1,96]", 16, False, True),  # one head; 6 cuts, 2 turn
]


@pytest.mark.parametrize(("spec", "num_pairs", "interleaved", "shared"), CASES, ids=str)
def test_interpreted(spec, num_pairs, interleaved, shared, two_sms):
    """Every kind of tile, tiles that tokens and heads do not fill, slots used again; no races."""
    with tpjax.use(interpret="races"):
        check(spec, num_pairs, interleaved, shared)


@pytest.mark.parametrize("axes", [(0, None, None), (0, 0, 0)], ids=str)
def test_interpreted_groups(axes):
    """Under vmap, scale and positions its own or not: a gradient of scale for each."""
    x, dy = inputs("f32[2,5,3,32]", 0), inputs("f32[2,5,3,32]", 1)
    own = [axis == 0 for axis in axes]
    scale = inputs("f32[2,32]" if own[1] else "f32[32]", 2)
    positions = inputs("i32[2,5]" if own[2] else "i32[5]", 3)

    def with_gradients(fn):
        def run(x, scale, positions, dy):
            out, vjp = jax.vjp(lambda x, scale: fn(x, scale, positions), x, scale)
            return [out, *vjp(dy)]

        return jax.jit(jax.vmap(run, in_axes=(*axes, 0)))

    with tpjax.use(interpret=True):
        got = with_gradients(rms_norm_rope)(x, scale, positions, dy)
    want = with_gradients(rms_norm_rope_reference)(x, scale, positions, dy)
    assert_close("vmap", got, want, 2e-5)  # frequencies up to 1, positions up to 128


LOWERED = [
    ("bf16[2,1031,32,128]", 64, False, CONFIGS[0]),
    ("bf16[2,100,7,192]", 32, False, CONFIGS[1]),
    ("bf16[1,100,1,64]", 32, True, CONFIGS[2]),
    ("f32[2,1000,5,256]", 128, False, CONFIGS[0]),
    ("bf16[1,1,12,160]", 80, False, CONFIGS[1]),
    ("f16[2,63,3,32]", 16, True, CONFIGS[0]),
    ("bf16[2,8192,8,128]", 64, False, CONFIGS[0]),  # two tokens of as many heads as make a unit
    ("f32[2,63,3,256]", 128, False, CONFIGS[2]),
]


@pytest.mark.parametrize(("spec", "num_pairs", "interleaved", "config"), LOWERED, ids=str)
def test_lowers_for_cuda(spec, num_pairs, interleaved, config):
    """Sizes of usual heads pass the checks of layouts, shared memory and copies."""
    lower(spec, num_pairs, interleaved, config)


SIZES = [(1, 1), (3, 7), (7, 63), (63, 3), (1000, 5), (1031, 8)]
CUTS = [(64, 32), (128, 64), (96, 48), (192, 32), (256, 128), (160, 80)]


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_kind_of_tile_lowers_for_cuda(config):
    """Every config with every cut; of sizes, one for each tile that comes of them."""
    for i, (features, pairs) in enumerate(CUTS):
        tiles = {}
        for tokens, heads in (*SIZES, (8192, 8), (8192, 32)):
            tile = tile_for(Head(features, pairs, False), tokens, heads, config)
            tiles.setdefault((tile.tokens > tile.unit[0], tile.heads, tile.unit), (tokens, heads))
        for tokens, heads in tiles.values():
            dtype = ("bf16", "f32", "f16")[i % 3]
            lower(f"{dtype}[2,{tokens},{heads},{features}]", pairs, False, config)


def lower(spec, num_pairs, interleaved, config):
    """Lowers both passes of a call for a GPU."""
    dtype, shape = parse_spec(spec)
    x, scale = (jax.ShapeDtypeStruct(s, d) for s, d in ((shape, dtype), (shape[-1:], jnp.float32)))
    positions, frequencies = jnp.arange(shape[1]), rotary_frequencies(2 * num_pairs)
    kernel, _ = forms(interleaved, config)

    def run(x, scale, dy):
        out, vjp = jax.vjp(lambda x, scale: kernel(x, scale, positions, frequencies), x, scale)
        return out, vjp(dy)

    with tpjax.use(platform="cuda"):
        lowered = jax.jit(run).trace(x, scale, x).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("_backward") > 0


def test_tiles():
    """A tile is whole units, each an element of every part for each lane, in what TMA can move."""
    heads = (1, 2, 3, 7, 8, 12, 32, 63, 128, 1000)
    cuts = ((64, 32), (64, 16), (128, 64), (128, 32), (96, 48), (160, 80), (192, 32), (256, 128))
    for tokens, h, (features, pairs), config in product((1, 3, 1031), heads, cuts, CONFIGS):
        for interleaved in (False, True):
            head = Head(features, pairs, interleaved)
            tile = tile_for(head, tokens, h, config)
            unit_tokens, unit_heads = tile.unit
            assert unit_tokens * unit_heads * head.lanes == 128
            assert tile.tokens % unit_tokens == tile.heads % unit_heads == 0
            assert unit_tokens > 1 or tile.tokens == 1  # or `folded` cannot slice it
            assert max(tile.tokens, tile.heads, head.width) <= 256
            assert head.num_cuts * head.width == head.columns
            assert head.num_cuts > 1  # a tile is not contiguous in device memory
            vector = jnp.arange(features)
            assert_close("parts", head.from_parts(head.to_parts(vector)), vector, 0)


def test_backward_turns_back():
    """The gradient is the turn by the negative positions; a turn changes no length."""
    x, positions = inputs("f32[2,5,3,16]", 0), inputs("i32[5]", 1)
    out, vjp = jax.vjp(lambda x: rotary_embedding(x, positions), x)
    assert_close("back", vjp(x)[0], rotary_embedding(x, -positions), 1e-6)
    assert_close("length", jnp.sum(out**2, -1), jnp.sum(x**2, -1), 1e-6)


def test_scores_depend_on_distances():
    """What RoPE is for: query times key is the same wherever both stand."""
    query, key = inputs("f32[4,1,32]", 0), inputs("f32[4,1,32]", 1)
    where = jnp.array([0, 3, 5, 9])
    for interleaved in (False, True):

        def scores(shift, interleaved=interleaved):
            turn = partial(rotary_embedding, positions=where + shift, interleaved=interleaved)
            return jnp.einsum("thd,shd->ts", turn(query), turn(key))

        assert_close("scores", scores(11), scores(0), 1e-5)


@pytest.mark.parametrize("features", [16, 10])
def test_neighbours_turn_as_halves_do(features):
    """Features sorted into halves, turned, and sorted back; some do not turn."""
    x, frequencies = inputs("f32[5,3,16]", 0), rotary_frequencies(features)
    halves = [*range(0, features, 2), *range(1, features, 2), *range(features, 16)]
    got = rotary_embedding(x, None, frequencies, interleaved=True)[..., jnp.array(halves)]
    assert_close("out", got, rotary_embedding(x[..., jnp.array(halves)], None, frequencies), 1e-6)


def test_defaults_and_shapes():
    """Positions count from 0; they broadcast over leading axes; empty arrays stay empty."""
    x = inputs("f32[2,3,5,1,8]", 0)
    want = rotary_embedding(x, jnp.arange(5), rotary_frequencies(8))
    assert_close("defaults", rotary_embedding(x), want, 0)
    per_row = jnp.broadcast_to(jnp.arange(5), (3, 5))
    assert_close("middle axis", rotary_embedding(x, per_row), want, 0)
    assert_close("one example", rotary_embedding(x, per_row[None, :1]), want, 0)
    assert rotary_embedding(x[:, :, :0]).shape == (2, 3, 0, 1, 8)
    assert rms_norm_rope(x[:0]).shape == (0, 3, 5, 1, 8)


def test_frequencies_have_no_gradient():
    x, frequencies = inputs("f32[3,1,8]", 0), rotary_frequencies(8)
    grad = jax.grad(lambda f: rotary_embedding(x, None, f).sum())(frequencies)
    assert_close("gradient", grad, jnp.zeros(4), 0)


def any_kind(x: Any) -> Any:
    """Hides the kind of a wrong argument from the type checker."""
    return x


X = jnp.zeros((2, 5, 3, 8))
DOOR = [
    (lambda: rotary_embedding(X[0, 0]), ValueError, r"x must be of rank 3 or more.*\(3, 8\)"),
    (lambda: rotary_embedding(X.astype(jnp.int8)), TypeError, "x must be of dtype .*; got int8"),
    (lambda: rotary_embedding(X[..., :7]), ValueError, "frequencies must be given where"),
    (lambda: rotary_embedding(X, None, jnp.ones(5)), ValueError, "2F from 2 to the 8 features"),
    (lambda: rotary_embedding(X, jnp.arange(4)), ValueError, r"positions must be of shape \(5,\)"),
    (lambda: rotary_embedding(X, jnp.zeros((3, 5), int)), ValueError, r"got shape \(3, 5\)"),
    (lambda: rotary_embedding(X, jnp.ones(5)), TypeError, "positions must be integers; got float"),
    (lambda: rotary_embedding(X, interleaved=any_kind(1)), TypeError, "interleaved must be True"),
    (lambda: rotary_embedding(X, amplitude=0.0), ValueError, "amplitude must be positive"),
    (lambda: rms_norm_rope(X, jnp.ones(5)), ValueError, r"scale must be of shape \(8,\)"),
    (lambda: rms_norm_rope(X, eps=-1.0), ValueError, "eps must be positive; got -1.0"),
    (lambda: rms_norm_rope(X, scale_offset=1.0), ValueError, "0 where there is no scale"),
]


@pytest.mark.parametrize(("wrong", "error", "text"), DOOR, ids=[d[2] for d in DOOR])
def test_door(wrong, error, text):
    """Wrong kinds, dtypes, ranks, shapes and numbers, in the house style."""
    with pytest.raises(error, match=text):
        wrong()


REFUSED = [
    ("f32[5,3,64]", 32, True, "interleaved features must be of 16 bits"),
    ("f32[5,3,40]", 16, False, "a multiple of 16 features up to 256; 40"),
    ("f32[5,3,512]", 256, False, "up to 256; 512"),
    ("f32[5,3,64]", 8, False, "pairs that turn must be a multiple of 16; there are 8"),
    ("f32[5,3,240]", 16, False, "would be 15 cuts of 16"),
]


@pytest.mark.parametrize(("spec", "num_pairs", "interleaved", "reason"), REFUSED, ids=str)
def test_kernel_refuses_with_the_reason(spec, num_pairs, interleaved, reason):
    """Every limit of the kernels is told in words."""
    dtype, shape = parse_spec(spec)
    x = jax.ShapeDtypeStruct(shape, dtype)
    run = partial(rms_norm_rope, interleaved=interleaved)
    frequencies = jax.ShapeDtypeStruct((num_pairs,), jnp.float32)
    with tpjax.use(platform="cuda"), pytest.warns(UserWarning, match=reason):
        (choice,) = chosen(lambda x, f: run(x, None, None, f), x, frequencies)
    assert choice.implementation == "xla"


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_gpu_sizes(config):
    """Odd numbers of tokens and heads, every kind of cut, with every config, on a GPU."""
    for i, ((tokens, heads), (features, pairs)) in enumerate(product(SIZES, CUTS)):
        dtype = ("bf16", "f32", "f16")[i % 3]
        interleaved = dtype != "f32" and i % 2 == 0 and features != 160
        spec = f"{dtype}[2,{tokens},{heads},{features}]"
        check(spec, pairs, interleaved, shared=i % 5 < 3, config=config)


@pytest.mark.gpu
def test_gpu_same_bits_every_time():
    """The gradient of scale is a sum in a fixed order."""
    x, dy, scale = (inputs(s, i) for i, s in enumerate(("bf16[3,999,9,128]",) * 2 + ("f32[128]",)))
    norm = partial(rms_norm_rope, implementation="pallas")
    run = jax.jit(lambda x, scale, dy: jax.vjp(norm, x, scale)[1](dy))
    assert_close("again", run(x, scale, dy), run(x, scale, dy), 0)
