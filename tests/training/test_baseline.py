# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The n-gram counts against a direct, slow spelling of the formula, byte by byte."""

import math
import re
from collections import Counter

import numpy as np
import pytest

from tpjax.training.baseline import ngram_baseline
from tpjax.training.data import load_text


def slow(train: bytes, validation: bytes, order: int) -> float:
    """The formula of the module's docstring with dictionaries and recursion."""

    def followers(context: bytes) -> Counter:
        places = range(len(train) - len(context))
        starts = (p for p in places if train[p : p + len(context)] == context)
        return Counter(train[p + len(context)] for p in starts)

    def probability(byte: int, context: bytes | None) -> float:
        if context is None:
            return 1 / 256
        shorter = probability(byte, context[1:] if context else None)
        seen = followers(context)
        if not seen:
            return shorter
        return (seen[byte] + len(seen) * shorter) / (sum(seen.values()) + len(seen))

    text = train + validation
    total = 0.0
    for place in range(len(train), len(text)):
        total -= math.log(probability(text[place], text[place - order + 1 : place]))
    return total / len(validation)


def array(text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8)


@pytest.mark.parametrize("order", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("train", "validation"),
    [
        (b"the cat sat on the mat, the rat sat", b" on the cat that \xff\x00 ate"),
        (b"abracadabra" * 3, b"abracadabra"),
        (b"\xff\xff\xff\xff\xff\xff\xff\xff", b"\xff\xff\x00"),
    ],
)
def test_counts_are_those_of_the_formula(train, validation, order):
    got = ngram_baseline(array(train), array(validation), order).nats_per_byte
    assert math.isclose(got, slow(train, validation, order), rel_tol=1e-12)


def test_probabilities_add_up_to_one():
    train = array(b"in the beginning was the word and the word was")
    context = train[-3:]
    total = sum(
        math.exp(-ngram_baseline(train, np.array([byte], np.uint8), 4).nats_per_byte)
        for byte in range(256)
    )
    assert bytes(context) == b"was"
    assert math.isclose(total, 1.0, rel_tol=1e-12)


def test_four_grams_reach_the_known_loss_on_the_king_james_text():
    train, validation = load_text("kjv").split(128)
    baseline = ngram_baseline(train, validation)
    assert 1.46 < baseline.nats_per_byte < 1.48
    assert str(baseline) == "4-gram counts (interpolated Witten-Bell): 1.475 nats per byte"


@pytest.mark.parametrize(
    ("train", "validation", "order", "words"),
    [
        (b"abc", b"a", 4, "train must be at least 4 bytes; got 3 bytes"),
        (b"abcd", b"", 4, "validation must be non-empty; got 0 bytes"),
        (b"abcd", b"a", 0, "order must be 1 to 8; got 0"),
        (b"abcd", b"a", 9, "order must be 1 to 8; got 9"),
    ],
)
def test_baseline_refuses(train, validation, order, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        ngram_baseline(array(train), array(validation), order)
