# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The table of real programs: losses over parameters and data, small enough to run anywhere."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.public import networks, transformers
from tpjax.models import PRESETS, Decoder, DecoderConfig, next_token_loss


def decoder(config: DecoderConfig, length: int, remat: bool = False) -> tuple[Any, tuple[Any, ...]]:
    """tpjax's own decoder; `remat` checkpoints the whole loss, as `jax.checkpoint` users do."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))

    def loss(state: Any, tokens: Any) -> Any:
        return next_token_loss(nnx.merge(graph, state), tokens)

    tokens = jax.ShapeDtypeStruct((2, length + 1), jnp.int32)
    return jax.checkpoint(loss) if remat else loss, (nnx.to_pure_dict(state), tokens)


TINY = DecoderConfig(
    vocab_size=48, num_layers=3, embed_dim=32, num_heads=4, head_dim=8, hidden_dim=96,
    dtype="bfloat16",
)  # fmt: skip
SCANNED = dataclasses.replace(TINY, scan_layers=True)

PROGRAMS: dict[str, Callable[[], tuple[Any, tuple[Any, ...]]]] = {
    "decoder, loop": partial(decoder, TINY, 32),
    "decoder, scan": partial(decoder, SCANNED, 32),
    "decoder, loop, remat": partial(decoder, TINY, 32, True),
    "Linen encoder, nn.scan, remat": transformers.linen,
    "Linen encoder, loop": partial(transformers.linen, scan=False),
    "NNX GPT": transformers.gpt,
    "Llama, repeated keys": transformers.llama,
    "Llama, scan, remat": partial(transformers.llama, scan=True, remat=True),
    "Llama, loop, remat of layers": partial(transformers.llama, remat=True),
    "GPT, layers under jit": partial(transformers.gpt, jitted=True),
    "GQA, weights kept": transformers.kept_weights,
    "T5 encoder": transformers.t5,
    "ViT": networks.vit,
    "ResNet": networks.resnet,
    "diffusion attention": networks.unet_attention,
    "mixture of experts": networks.mixture,
    "state space": networks.state_space,
    "linear attention": networks.linear_attention,
    "LSTM": networks.lstm,
}
"""By name, what makes a loss and the types of its arguments, parameters first."""

LARGE: dict[str, Callable[[], tuple[Any, tuple[Any, ...]]]] = {
    "decoder 125m, loop": partial(decoder, PRESETS["125m"], 4096),
    "decoder 1b, scan": partial(decoder, PRESETS["1b"], 4096),
    "Llama of 32 layers": partial(transformers.llama, 32, 4096, 32, 11008, 32_000, 2049),
}
"""Programs of production shapes: to be traced, not run."""


def values(args: Any, seed: int = 0) -> Any:
    """Returns random arrays of the types: normal, a tenth in size for matrices; small integers."""
    rng = np.random.default_rng(seed)

    def draw(spec: Any) -> jax.Array:
        if jnp.issubdtype(spec.dtype, jnp.integer):
            return jnp.asarray(rng.integers(1, 8, spec.shape), spec.dtype)
        scale = 0.1 if len(spec.shape) > 1 else 0.5
        return jnp.asarray(rng.standard_normal(spec.shape) * scale, spec.dtype)

    return jax.tree.map(draw, args)
