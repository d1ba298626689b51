# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""How fast pairs turn: each scaling against its paper's formula, written another way, in NumPy."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from tests.harness import assert_close, inputs
from tpjax.core.rotary import (
    NTK,
    Linear,
    Llama3,
    Yarn,
    dynamic_ntk,
    rotary_embedding_reference,
    rotary_frequencies,
)

TOL = 2e-7
"""Float64 in both, rounded to float32 once."""


def plain(features, base):
    """Returns the frequencies as the RoPE paper writes them."""
    return np.array([base ** (-2 * (i - 1) / features) for i in range(1, features // 2 + 1)])


def check(scaling, want, features, base):
    got = rotary_frequencies(features, base=base, scaling=scaling)
    assert_close(str(scaling), got, want.astype(np.float32), TOL)


def test_plain_and_linear():
    check(None, plain(128, 1e4), 128, 1e4)
    check(Linear(4.0), plain(64, 5e5) / 4, 64, 5e5)


def test_ntk():
    """The slowest pair turns `factor` times slower, the fastest as before."""
    check(NTK(8.0), plain(128, 1e4 * 8 ** (128 / 126)), 128, 1e4)
    slow = rotary_frequencies(128, scaling=NTK(8.0)) / rotary_frequencies(128)
    assert_close("slowest", slow[-1], jnp.float32(1 / 8), 1e-5)
    assert_close("fastest", slow[0], jnp.float32(1), 0)
    assert dynamic_ntk(2.0, 1000, 4096) == NTK(1.0)
    assert dynamic_ntk(2.0, 8192, 4096) == NTK(3.0)
    check(NTK(3.0), plain(2, 1e4), 2, 1e4)


def test_llama3():
    """The released function: three cases by wavelength. Its config: factor 8, base 500000."""
    want = []
    for f in plain(128, 5e5):
        wavelength = 2 * math.pi / f
        if wavelength < 8192 / 4:
            want.append(f)
        elif wavelength > 8192:
            want.append(f / 8)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            want.append((1 - smooth) * f / 8 + smooth * f)
    check(Llama3(), np.array(want), 128, 5e5)
    assert sum(w == f for w, f in zip(want, plain(128, 5e5), strict=True)) == 29
    assert 29 < sum(w > f / 8 for w, f in zip(want, plain(128, 5e5), strict=True)) < 64


def test_yarn():
    """By the number of turns r in the original length: kept above 32, slowed below 1."""
    base, length, factor, features = 1e6, 32768, 4.0, 128
    f = plain(features, base)

    def index(turns):
        return features * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = math.floor(index(32)), math.ceil(index(1))
    gamma = [1 - min(max((i - low) / (high - low), 0), 1) for i in range(features // 2)]
    want = np.array([(1 - g) * w / factor + g * w for g, w in zip(gamma, f, strict=True)])
    check(Yarn(factor, length), want, features, base)
    assert (low, high) == (23, 40)
    turns = length * f / (2 * math.pi)
    kept, slowed = want[turns > 40], want[turns < 0.9]
    assert_close("kept", kept, f[: len(kept)], 1e-12)
    assert_close("slowed", slowed, f[-len(slowed) :] / factor, 1e-12)
    assert Yarn(factor, length).amplitude() == pytest.approx(1.1386294361)
    assert Yarn(1.0, length).amplitude() == 1.0


@pytest.mark.parametrize("interleaved", [False, True])
def test_turning_against_complex_numbers(interleaved):
    """A pair is a complex number, and turning it a product with exp(i angle)."""
    x, positions = np.asarray(inputs("f32[2,5,3,16]", 0), np.float64), np.array([0, 3, 1, 7, 7])
    frequencies = plain(12, 100.0)
    pairs = x[..., :12].reshape(2, 5, 3, *((6, 2) if interleaved else (2, 6)))
    pairs = pairs if interleaved else pairs.swapaxes(-1, -2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(
        1j * positions[:, None, None] * frequencies
    )
    parts = [1.5 * turned.real, 1.5 * turned.imag]
    out = np.stack(parts, -1).reshape(2, 5, 3, 12) if interleaved else np.concatenate(parts, -1)
    want = np.concatenate([out, x[..., 12:]], -1).astype(np.float32)
    got = rotary_embedding_reference(
        jnp.asarray(x, jnp.float32), jnp.asarray(positions), jnp.asarray(frequencies, jnp.float32),
        interleaved=interleaved, amplitude=1.5,
    )  # fmt: skip
    assert_close("turned", got, want, 2e-6)


def test_bad_input():
    for features, base in ((0, 1e4), (5, 1e4), (4, 1.0)):
        with pytest.raises(ValueError, match="rotary_frequencies"):
            rotary_frequencies(features, base=base)
