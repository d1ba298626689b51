# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Text from a language model, one token at a time: simple, compiled once, without a cache.

Every new token costs a pass over the whole window: it is for a look at a model, not for serving.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from tpjax.core.errors import message
from tpjax.models.decoder import Decoder


def sample(
    model: Decoder,
    prompt: Int[Array, "B T"],
    num_tokens: int,
    *,
    temperature: float = 1.0,
    key: Key[Array, ""],
) -> Int[Array, "B N"]:
    """Returns `num_tokens` tokens that the model writes after the prompt, without the prompt.

    Of a text longer than the model's `max_length`, the model sees the last `max_length` tokens.

    Args:
      model: the decoder.
      prompt: at least one token, integers.
      num_tokens: how many to write.
      temperature: divides the logits; 0 takes the likeliest token.
      key: chooses the sample, from `jax.random.key`.

    Raises:
      ValueError: an empty prompt, a negative number of tokens or temperature.
    """
    if prompt.ndim != 2 or prompt.shape[1] < 1:
        remedy = "Begin with one token at least, such as a newline: jnp.array([[10]])."
        must, got = "[B, T] with T at least 1", f"shape {prompt.shape}"
        raise ValueError(message("sample", "prompt", must, got, remedy))
    if not jnp.issubdtype(prompt.dtype, jnp.integer):
        raise TypeError(message("sample", "prompt", "integers", prompt.dtype))
    if num_tokens < 0:
        raise ValueError(message("sample", "num_tokens", "0 or more", num_tokens))
    if not (temperature >= 0 and math.isfinite(temperature)):
        raise ValueError(message("sample", "temperature", "0 or more, and finite", temperature))
    length = model.config.max_length
    seen = prompt[:, -length:]
    window = jnp.pad(seen, ((0, 0), (0, length - seen.shape[1])))
    filled = jnp.int32(seen.shape[1])
    return _write(model, window, filled, num_tokens, jnp.float32(temperature), key)


@functools.partial(jax.jit, static_argnames="num_tokens")
def _write(
    model: Decoder, window: Array, filled: Array, num_tokens: int, temperature: Array, key: Array
) -> Array:
    """Returns the next tokens of a window whose first `filled` places hold text."""
    length = window.shape[1]

    def step(carry: tuple[Array, Array], key: Array) -> tuple[tuple[Array, Array], Array]:
        window, filled = carry
        logits = model(window)[:, filled - 1]  # causal: what stands behind does not matter
        drawn = jax.random.categorical(key, logits / jnp.maximum(temperature, 1e-6))
        token = jnp.where(temperature > 0, drawn, jnp.argmax(logits, axis=-1)).astype(window.dtype)
        full = filled == length
        window = jnp.where(full, jnp.roll(window, -1, axis=1), window)
        place = jnp.where(full, length - 1, filled)
        return (window.at[:, place].set(token), place + 1), token

    _, tokens = jax.lax.scan(step, (window, filled), jax.random.split(key, num_tokens))
    return tokens.T
