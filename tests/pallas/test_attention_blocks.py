# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Which blocks attention's kernels visit, against the visible pairs written down one by one."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpjax.pallas.attention.blocks import Region, within_segments

LENGTH = st.integers(1, 40)


@st.composite
def problems(draw):
    """Returns a region, one sequence's lengths and prefix (None: not given), tile and block."""
    T, S = draw(LENGTH), draw(LENGTH)
    causal = draw(st.booleans())
    window = draw(st.none() | st.tuples(st.integers(0, 20), st.integers(0, 20)))
    region = Region(T, S, causal, window, draw(st.booleans()))
    queries = draw(st.none() | st.integers(0, T))
    keys = draw(st.none() | st.integers(0, S))
    prefix = draw(st.none() | st.integers(0, S)) if causal else None
    return (
        region,
        (queries, keys, prefix),
        draw(st.sampled_from([4, 8])),
        draw(st.sampled_from([2, 8])),
    )


def visible_pairs(region, queries, keys, prefix):
    """Returns [T, S] booleans from the definition, one pair at a time."""
    T, S = region.num_queries, region.num_keys
    ends = (T if queries is None else queries, S if keys is None else keys)
    shift = ends[1] - ends[0] if region.bottom_right else 0
    seen = np.zeros((T, S), bool)
    for t in range(T):
        for s in range(S):
            p = t + shift
            inside = t < ends[0] and s < ends[1]
            if region.is_causal:
                inside &= s <= p or (prefix is not None and s < prefix)
            if region.window is not None:
                inside &= p - region.window[0] <= s <= p + region.window[1]
            seen[t, s] = inside
    return seen


def check_spans(seen, spans, rows, block, needless=None):
    """Checks spans of tiles of the first axis: nothing visible is missed, full blocks are full.

    What lies outside of the array along the second axis, or in `needless`, counts as visible in a
    full block. Beyond one block, the first and the last one visited have something visible.
    """
    blocks = -(-seen.shape[1] // block)
    free = np.zeros_like(seen) if needless is None else needless
    for tile, span in enumerate(spans):
        start, stop, full_start, full_stop = (int(x) for x in span)
        assert 0 <= start <= full_start <= full_stop <= stop <= blocks
        assert start < stop
        own = slice(tile * rows, (tile + 1) * rows)
        for i in range(blocks):
            part = seen[own, i * block : (i + 1) * block]
            if part.any():
                assert start <= i < stop
            if full_start <= i < full_stop:
                assert (part | free[own, i * block : (i + 1) * block]).all()
            if i in (start, stop - 1) and stop - start > 1:
                assert part.any(), (tile, i, span)


@given(problems())
@settings(max_examples=60, deadline=None)
def test_spans(problem):
    """Static and traced lengths; as many blocks as are needed, none masked without need."""
    region, lengths, rows, block = problem
    arrays = [None if x is None else jnp.int32(x) for x in lengths]
    seen = visible_pairs(region, *lengths)
    bounds = region.bounds(*arrays)
    tiles = range(0, region.num_queries, rows)
    check_spans(seen, [region.key_blocks(t, rows, block, bounds) for t in tiles], rows, block)
    tiles = range(0, region.num_keys, rows)
    spans = [region.query_blocks(t, rows, block, bounds) for t in tiles]
    end = region.num_queries if lengths[0] is None else lengths[0]
    beyond = np.arange(region.num_queries)[None, :] >= end
    check_spans(seen.T, spans, rows, block, np.broadcast_to(beyond, seen.T.shape))


def test_causal_masks_only_the_edge():
    """A tile of 128 causal queries masks one block of 128 keys, and one with a window two."""
    region = Region(1024, 1024, True)
    assert region.key_blocks(512, 128, 128, region.bounds()) == (0, 5, 0, 4)
    region = Region(1024, 1024, True, (255, 0))
    assert region.key_blocks(512, 128, 128, region.bounds()) == (2, 5, 3, 4)
    assert region.query_blocks(256, 128, 128, region.bounds()) == (2, 5, 3, 4)


@given(
    st.sampled_from([1, 17, 40]),
    st.sampled_from([1, 33]),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_segments(T, S, seed, packed):
    """Packed documents, and ids in any order: nothing visible is missed, full blocks are full."""
    rng = np.random.default_rng(seed)
    ids = [rng.integers(-3, 3, (2, n)) for n in (T, S)]
    own, others = (jnp.asarray(np.sort(x) if packed else x) for x in ids)
    region = Region(T, S)
    seen = np.asarray(own)[:, :, None] == np.asarray(others)[:, None, :]
    for flip in (False, True):
        n, m = (S, T) if flip else (T, S)
        whole = region.query_blocks if flip else region.key_blocks
        span = whole(jnp.arange(0, n, 4), 4, 8, region.bounds())
        pair = (others, own) if flip else (own, others)
        spans = within_segments(span, *pair, 4, 8)
        for b in range(2):
            tiles = np.stack([np.broadcast_to(x, (2, -(-n // 4)))[b] for x in spans], -1)
            start, stop, full_start, full_stop = tiles.T
            pairs = seen[b].T if flip else seen[b]
            for tile in range(-(-n // 4)):
                part = pairs[tile * 4 : tile * 4 + 4]
                visited = np.zeros(m, bool)
                visited[start[tile] * 8 : stop[tile] * 8] = True
                assert not part[:, ~visited].any()
                assert part[:, full_start[tile] * 8 : full_stop[tile] * 8].all()


@pytest.mark.parametrize("sign", [1, -1])
def test_packed_documents_are_skipped(sign):
    """16 documents of 64 in one row: a tile visits the blocks of its own document alone."""
    ids = jnp.repeat(jnp.arange(16)[None] * sign, 64, axis=1)
    region = Region(1024, 1024, True)
    span = region.key_blocks(jnp.arange(0, 1024, 32), 32, 16, region.bounds())
    span = within_segments(span, ids, ids, 32, 16)
    visited = np.asarray(span.stop - span.start)[0]
    assert visited.tolist() == [2, 4] * 16
