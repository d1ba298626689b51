# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Masks are known by what they evaluate to: every spelling of a band, and what is no band."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.harness import assert_close
from tpjax.stax_passes import masks
from tpjax.stax_passes.graph import build
from tpjax.stax_passes.masks import Band, Evaluation, band_of

T, S = 300, 280  # more rows than one block, and not square


def known_band(fn: Any, *args: Any, axes: tuple[int, int] = (0, 1)) -> Band | None:
    graph = build(jax.make_jaxpr(fn)(*args))
    return band_of(graph, graph.outputs[0], *axes, lambda x: x.astype(bool))


i, j = np.arange(T)[:, None], np.arange(S)[None, :]


BANDS = {
    "tril": (lambda: jnp.tril(jnp.ones((T, S), bool)), Band(None, 0)),
    "iota": (lambda: jnp.arange(T)[:, None] >= jnp.arange(S), Band(None, 0)),
    "not triu": (lambda: ~jnp.triu(jnp.ones((T, S), bool), 1), Band(None, 0)),
    "constant": (lambda: jnp.asarray(i >= j), Band(None, 0)),
    "difference": (lambda: (jnp.arange(T)[:, None] - jnp.arange(S)) >= 0, Band(None, 0)),
    "lookahead": (lambda: jnp.tril(jnp.ones((T, S), bool), 5), Band(None, 5)),
    "window": (lambda: jnp.asarray((i >= j) & (i - j < 64)), Band(63, 0)),
    "both sides": (lambda: jnp.asarray(np.abs(i - j) <= 40), Band(40, 40)),
    "everything": (lambda: jnp.ones((T, S), bool), Band(None, None)),
    "as numbers": (lambda: jnp.tril(jnp.ones((T, S))), Band(None, 0)),
}


@pytest.mark.parametrize("name", BANDS)
def test_band(name: str) -> None:
    """The band that the visible entries span is found exactly."""
    fn, band = BANDS[name]
    if name == "window":  # rows past the keys see fewer: rectangular on purpose
        fn, band = (lambda: jnp.asarray(((i >= j) & (i - j < 64))[:S])), Band(63, 0)
    if name == "both sides":
        fn = lambda: jnp.asarray((np.abs(i - j) <= 40)[:S])  # noqa: E731
    assert known_band(fn) == band


def test_axes_of_a_wider_mask() -> None:
    """A mask of shape [B, 1, T, S] that is the same for every row of the batch is one band."""
    fn = lambda: jnp.broadcast_to(jnp.tril(jnp.ones((T, S), bool))[None, None], (3, 1, T, S))  # noqa: E731
    assert known_band(fn, axes=(2, 3)) == Band(None, 0)
    varied = lambda: jnp.arange(3)[:, None, None] + jnp.zeros((3, T, S)) > 0  # noqa: E731
    assert known_band(varied, axes=(1, 2)) is None


NO_BANDS = {
    "a hole": (lambda: jnp.asarray((i >= j) & (j != 7))),
    "one entry more": (lambda: jnp.asarray((i >= j) | ((i == 3) & (j == 9)))),
    "prefix": (lambda: jnp.asarray((i >= j) | (j < 20))),
    "documents": (lambda: jnp.asarray((i >= j) & (i // 100 == j // 100))),
}


@pytest.mark.parametrize("name", NO_BANDS)
def test_no_band(name: str) -> None:
    """One wrong entry anywhere is enough not to be a band."""
    assert known_band(NO_BANDS[name]) is None


def test_empty_row_is_an_error() -> None:
    """A query that sees no key is no band and no mask for an operator that gives 0 there."""
    with pytest.raises(masks.BlindQueryError):
        known_band(lambda: jnp.tril(jnp.ones((T, S), bool), -1))


def test_input_dependent_mask_is_unknown() -> None:
    """What an argument decides is never taken for a constant."""
    assert known_band(lambda n: jnp.tril(jnp.ones((T, S), bool)) & (jnp.arange(S) < n), 9) is None


def test_too_large_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask over the limit stays an array rather than being judged by a sample."""
    monkeypatch.setattr(masks, "MAX_ELEMENTS", 100)
    assert known_band(BANDS["tril"][0]) is None


def test_large_mask_needs_no_memory_for_it() -> None:
    """Rows are evaluated in blocks: 2**28 entries in a few seconds, none of them kept twice."""
    n = 2**13
    assert known_band(lambda: jnp.arange(n)[:, None] >= jnp.arange(n)) == Band(None, 0)


def test_window_of_every_node_equals_the_whole() -> None:
    """Evaluating a window gives what slicing the full value gives."""

    def fn():
        a = jnp.arange(12).reshape(12, 1) * 3
        b = jnp.transpose(jnp.broadcast_to(jnp.arange(5)[:, None], (5, 12)))
        return jnp.where(a > b, a - b, jnp.maximum(a, 7).astype(jnp.int32))

    graph = build(jax.make_jaxpr(fn)())
    block = Evaluation(graph, graph.outputs[0]).at({0: (3, 8), 1: (1, 4)})
    assert block is not None
    assert_close("window", block, np.asarray(fn())[3:8, 1:4], 0)
