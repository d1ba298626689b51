# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""What counting reaches: an n-gram model of bytes, the line a trained model has to get under.

Witten-Bell interpolation. With `c(h b)` the times that byte b followed context h in the training
part and `t(h)` how many different bytes did,

    p(b | h) = (c(h b) + t(h) p(b | h')) / (c(h) + t(h)),      h' = h without its oldest byte,

down to the empty context, below which all 256 bytes are equally likely.
Source: Witten and Bell, "The Zero-Frequency Problem", IEEE Trans. Information Theory 37(4), 1991.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import UInt8, UInt64

from tpjax.core.errors import message

MAX_ORDER = 8
"""A gram is a 64-bit integer."""


@dataclass(frozen=True)
class Baseline:
    """Loss of an n-gram count model on held-out text."""

    order: int
    """Length of the longest gram in bytes: `order - 1` bytes predict the next."""
    nats_per_byte: float
    smoothing: str = "interpolated Witten-Bell"

    def __str__(self) -> str:
        return (
            f"{self.order}-gram counts ({self.smoothing}): {self.nats_per_byte:.3f} nats per byte"
        )


def ngram_baseline(
    train: UInt8[np.ndarray, " N"], validation: UInt8[np.ndarray, " M"], order: int = 4
) -> Baseline:
    """Returns the loss on `validation`, the text's end, of counts made on `train` before it.

    The first bytes of `validation` are predicted from the last of `train`.

    Raises:
      ValueError: a part is too short, or `order` is not in 1 to 8.
    """
    if not 1 <= order <= MAX_ORDER:
        raise ValueError(message("ngram_baseline", "order", f"1 to {MAX_ORDER}", order))
    if train.size < order:
        must, got = f"at least {order} bytes", f"{train.size} bytes"
        raise ValueError(message("ngram_baseline", "train", must, got))
    if validation.size == 0:
        raise ValueError(message("ngram_baseline", "validation", "non-empty", "0 bytes"))
    text = np.concatenate([train[train.size - (order - 1) :], validation])
    probability = np.full(validation.size, 1 / 256)
    for length in range(1, order + 1):
        seen, asked = _grams(train, length), _grams(text[order - length :], length)
        grams, counts = np.unique(seen, return_counts=True)
        contexts, first = np.unique(grams >> np.uint64(8), return_index=True)
        totals = np.add.reduceat(counts, first)
        kinds = np.diff(first, append=grams.size)

        count = _look_up(grams, counts, asked)
        context = asked >> np.uint64(8)
        total, kind = _look_up(contexts, totals, context), _look_up(contexts, kinds, context)
        weight = total + kind  # 0 where the context is new: then the shorter one stands
        mixed = (count + kind * probability) / np.maximum(weight, 1)
        probability = np.where(weight > 0, mixed, probability)
    return Baseline(order, float(-np.mean(np.log(probability))))


def _grams(text: UInt8[np.ndarray, " N"], length: int) -> UInt64[np.ndarray, " N-length+1"]:
    """Returns each run of `length` bytes as an integer, the newest byte lowest."""
    count = text.size - length + 1
    grams = np.zeros(count, np.uint64)
    for place in range(length):
        grams = (grams << np.uint64(8)) | text[place : place + count]
    return grams


def _look_up(keys: np.ndarray, values: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """Returns the value of each key asked for in the sorted `keys`, 0 for a key not there."""
    place = np.minimum(np.searchsorted(keys, asked), keys.size - 1)
    return np.where(keys[place] == asked, values[place], 0)
