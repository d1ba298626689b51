# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Sampling against the plain loop it stands for."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.harness import assert_close, inputs
from tpjax.models import Decoder, DecoderConfig, sample

CONFIG = DecoderConfig(
    vocab_size=11, num_layers=2, embed_dim=16, num_heads=2, num_kv_heads=1, head_dim=8,
    hidden_dim=24, max_length=8, init_std=0.5,
)  # fmt: skip


logits_of = jax.jit(Decoder.__call__)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return Decoder(CONFIG, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("length", [1, 5, 8, 12])
def test_likeliest_tokens_are_those_of_a_growing_text(model, length):
    """Prompts shorter than the window, as long, and longer; the window fills while writing."""
    prompt = inputs(f"i32[2,{length}]", 0) % CONFIG.vocab_size
    text = prompt
    for _ in range(10):
        last = logits_of(model, text[:, -CONFIG.max_length :])[:, -1]
        text = jnp.concatenate([text, jnp.argmax(last, -1)[:, None].astype(jnp.int32)], axis=1)
    written = sample(model, prompt, 10, temperature=0.0, key=jax.random.key(0))
    assert_close("tokens", written, text[:, length:], 0)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_tokens_are_drawn_from_the_softmax(model, temperature):
    prompt = jnp.full((4000, 3), 7, jnp.int32)
    drawn = sample(model, prompt, 1, temperature=temperature, key=jax.random.key(0))[:, 0]
    expected = jax.nn.softmax(logits_of(model, prompt[:1])[0, -1] / temperature)
    seen = np.bincount(drawn, minlength=CONFIG.vocab_size) / 4000
    # Five standard errors of a share counted 4,000 times.
    assert np.all(np.abs(seen - expected) <= 5 * np.sqrt(expected * (1 - expected) / 4000) + 1e-6)


def test_a_key_decides(model):
    prompt = jnp.array([[1, 2]])
    first, again, other = (sample(model, prompt, 20, key=jax.random.key(k)) for k in (0, 0, 1))
    assert_close("same key", again, first, 0)
    assert (first != other).any()


def test_nothing_asked_nothing_written(model):
    assert sample(model, jnp.array([[1]]), 0, key=jax.random.key(0)).shape == (1, 0)


@pytest.mark.parametrize(
    ("prompt", "options", "error", "words"),
    [
        (np.zeros((1, 0), np.int32), {}, ValueError, "Begin with one token at least"),
        (np.zeros(3, np.int32), {}, ValueError, "got shape (3,)"),
        (np.zeros((1, 3), np.float32), {}, TypeError, "prompt must be integers; got float32"),
        (np.zeros((1, 3), np.int32), {"num_tokens": -1}, ValueError, "num_tokens must be 0 or"),
        (np.zeros((1, 3), np.int32), {"temperature": -1.0}, ValueError, "temperature must be 0"),
        (np.zeros((1, 3), np.int32), {"temperature": np.nan}, ValueError, "got nan"),
    ],
)
def test_sample_refuses(model, prompt, options, error, words):
    arguments = {"num_tokens": 3, "key": jax.random.key(0), **options}
    with pytest.raises(error, match=re.escape(words)):
        sample(model, prompt, **arguments)
