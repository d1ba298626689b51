# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""How attention's tiles are dealt to blocks of threads; several tiles for one in the kernel."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpjax
from tests.harness import assert_close, inputs
from tpjax.core.attention import attention_reference
from tpjax.pallas._mgpu import signal_barriers
from tpjax.pallas.attention import blocks, forward, hopper
from tpjax.pallas.attention.config import CONFIGS
from tpjax.pallas.attention.entry import flash_attention
from tpjax.pallas.attention.extras import Extras, key_spans
from tpjax.pallas.attention.schedule import deal, sorted_spans

DEALS = [  # tiles of a head, heads, heads of a section, longest last, blocks of threads
    (3, 8, 4, True, 5),
    (3, 8, 4, False, 5),
    (7, 6, 2, True, 4),
    (1, 6, 1, True, 4),
    (4, 4, 4, True, 4),
    (2, 2, 1, True, 99),
]


def dealt_to(dealt, block):
    """Returns the tiles that a block of threads gets, in order."""
    taken = []
    with jax.disable_jit():
        dealt.each(jnp.int32(block), lambda index, state: taken.append(int(index)) or state)
    return taken


@pytest.mark.parametrize(("tiles", "heads", "section", "longest_last", "num_blocks"), DEALS)
def test_every_tile_is_dealt_once(tiles, heads, section, longest_last, num_blocks):
    """Whatever the number of blocks of threads; of equal tiles nobody gets two more than others."""
    dealt = deal(blocks.Order(tiles, section, longest_last), heads, num_blocks)
    found = [dealt_to(dealt, block) for block in range(dealt.blocks)]
    assert sorted(index for taken in found for index in taken) == list(range(tiles * heads))
    if not longest_last:
        counts = [len(x) for x in found]
        assert max(counts) - min(counts) <= 1


def test_causal_tiles_are_dealt_fairly():
    """The blocks of threads visit about as many blocks of keys each."""
    order = blocks.tile_order(64, 32, 1, 4 << 20, longest_last=True)
    dealt = deal(order, 32, 132)

    def work(block):
        return sum(int(order.locate(jnp.int32(i))[1]) + 1 for i in dealt_to(dealt, block))

    loads = [work(block) for block in range(0, dealt.blocks, 12)]
    assert max(loads) < 1.05 * np.mean(loads)


DOCUMENTS = {  # mean tokens of a document, or all of them; heads of a section
    "equal": ([1024] * 16, 4),
    "short": (300, 4),
    "mixed": (1000, 4),
    "long, few heads": (4000, 2),
}


def document_ids(lengths, tokens):
    """Returns the segments [1, tokens] of documents: the given ones, or random ones of a mean."""
    if isinstance(lengths, int):
        lengths = 1 + np.random.default_rng(lengths).exponential(lengths, tokens).astype(int)
    return jnp.asarray(np.repeat(np.arange(len(lengths)), lengths)[None, :tokens], jnp.int32)


@pytest.mark.parametrize("name", list(DOCUMENTS))
def test_tiles_of_documents_are_dealt_fairly(name):
    """Each tile once, and nobody much more work than the mean: a step, and what a tile costs."""
    lengths, section = DOCUMENTS[name]
    tokens, workers, heads, block = 16384, 2, 16, 128
    ids = document_ids(lengths, tokens)
    extras, region = Extras(query_ids=ids, key_ids=ids), blocks.Region(tokens, tokens, True)
    spans = key_spans(extras, region, tokens // 64, 64, block)
    found = np.asarray(sorted_spans(extras, spans, workers)).reshape(-1, workers, 5)
    tiles = found[:, 0, 4]
    assert sorted(tiles) == list(range(tokens // 128))
    natural = np.asarray(spans).reshape(-1, workers, 4)
    assert (found[..., :4] == natural[tiles]).all()
    steps = found[..., 1].max(1) - found[..., 0].min(1)
    assert (np.diff(steps) >= 0).all()
    order = blocks.Order(len(tiles), section, longest_last=True)
    dealt = deal(order, heads, 132)
    _, places = jax.vmap(order.locate)(jnp.arange(dealt.tiles, dtype=jnp.int32))
    loads = [sum(steps[places[i]] + 1 for i in dealt_to(dealt, b)) for b in range(0, 132, 6)]
    assert max(loads) < 1.1 * heads * (steps + 1).sum() / 132


def test_sequences_are_sorted_each_for_itself():
    """Without ids spans stay as they were; with ids each sequence of a batch has its order."""
    rng = np.random.default_rng(3)
    start = rng.integers(0, 20, (3, 11))
    stop = start + rng.integers(1, 30, start.shape)
    spans = jnp.asarray(np.stack([start, stop, start, stop], -1), jnp.int32)
    assert sorted_spans(Extras(), spans) is spans
    ids = jnp.zeros((3, 11), jnp.int32)
    for got, a, b in zip(
        np.asarray(sorted_spans(Extras(key_ids=ids), spans)), start, stop, strict=True
    ):
        order = np.argsort(b - a, kind="stable")
        assert (got == np.stack([a, b, a, b, np.arange(11)], -1)[order]).all()


SEVERAL = {
    "causal": (200, 200, {"is_causal": True}),
    "window, two widths": (130, 200, {"local_window_size": (40, 70)}),
    "documents": (200, 200, {"query_segment_ids": np.repeat([3, 1, 2], [64, 90, 46])[None]}),
}


@pytest.mark.parametrize(
    ("name", "alternates", "mode", "own_out"),
    [
        ("causal", False, True, True),
        ("causal", True, True, False),
        ("window, two widths", False, True, True),
        ("documents", False, "races", False),
        ("documents", True, "races", True),
    ],
)
def test_several_tiles_for_a_block_of_threads(name, alternates, mode, own_out, monkeypatch):
    """A block of threads that has several tiles, of several lengths, and workers that skip."""
    T, S, options = SEVERAL[name]
    if not own_out:
        monkeypatch.setattr(forward, "TILE_BYTES", 0)
    H, V = (3, 96) if "widths" in name else (3, 64)
    q, k = inputs(f"bf16[1,{T},{H},64]", 0), inputs(f"bf16[1,{S},1,64]", 1)
    v = inputs(f"bf16[1,{S},1,{V}]", 2)
    monkeypatch.setattr(forward, "num_sms", lambda: 2)
    widths = (128, 128) if V > 64 else (64, 64)
    config = replace(CONFIGS[widths][-1], block=64, alternates=alternates)
    monkeypatch.setattr(hopper, "heuristic", lambda *_: config)
    options: dict[str, Any] = {
        n: jnp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in options.items()
    }
    with tpjax.use(interpret=mode):
        out, lse = flash_attention(q, k, v, **options, return_lse=True)
    want = attention_reference(q, k, v, **options, return_lse=True)
    assert_close("out", out, want[0], 6e-3)
    assert_close("lse", lse, want[1], 1e-5)


@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_lazy_rescaling(scale, monkeypatch):
    """Largest scores that grow by little, by much and not at all, from block to block."""
    q, k, v = (inputs(f"bf16[1,{n},1,64]", i) for i, n in enumerate((64, 320, 320)))
    grown = k * jnp.repeat(jnp.array([5.0, 1.0, 1.1, 0.2, 1.0], k.dtype), 64)[None, :, None, None]
    options = {"scale": scale / 8, "return_lse": True, "alibi_slopes": jnp.array([0.01])}
    with tpjax.use(interpret=True):
        lazy = flash_attention(q, grown, v, **options)
        config = replace(CONFIGS[64, 64][-1], lazy=False)
        monkeypatch.setattr(hopper, "heuristic", lambda *_: config)
        eager = flash_attention(q, grown, v, **options)
    want = attention_reference(q, grown, v, **options)
    for name, tol, a, b, expected in zip(
        ("out", "lse"), (6e-3, 1e-5), lazy, eager, want, strict=True
    ):
        assert_close(name, a, expected, tol)
        assert_close(name, a, b, tol)
    # With large scores one key outweighs all others.
    assert (lazy[0] == eager[0]).all() == (scale > 1)


def test_names_of_barriers_are_ours():
    """A config with too many stages would take a barrier that something else waits at."""
    with pytest.raises(ValueError, match="barriers"):
        signal_barriers(2, range(13, 18), False)
