# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""A decoder language model of the Llama family: RoPE, grouped-query attention, RMSNorm, SwiGLU.

    x = embedding[tokens]
    x = x + attention(norm(x));  x = x + mlp(norm(x))     for each layer
    logits = norm(x) @ head

Plain JAX and Flax NNX, written as one would without tpjax: `tpjax.compile` finds the attention and
the norms by itself, whether the layers are a Python loop or a scan.

Dimensions: B batch, T query tokens, S key tokens, K key/value heads, G query heads per key/value
head, H = K G query heads, D features of the model or of a head, F hidden features, V vocabulary.
Numerics: norm statistics, rotary angles, softmax and logits are float32; all else is `dtype`.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from tpjax.core.errors import did_you_mean, message

DTYPES = ("float32", "bfloat16", "float16")
"""Names of the dtypes a model may store its parameters in or compute with."""


@dataclass(frozen=True)
class DecoderConfig:
    """Shape and numerics of a `Decoder`."""

    vocab_size: int = 256
    """Number of token values; 256 for bytes."""
    num_layers: int = 4
    embed_dim: int = 128
    """Features of the residual stream."""
    num_heads: int = 4
    """Query heads."""
    num_kv_heads: int = 2
    """Key/value heads; each serves `num_heads / num_kv_heads` query heads."""
    head_dim: int = 32
    """Features of a head; even, because RoPE turns pairs."""
    hidden_dim: int = 384
    """Features inside the MLP."""
    max_length: int = 256
    """Longest sequence in tokens."""
    rope_base: float = 10_000.0
    """The slowest pair turns about `1 / rope_base` radians a token."""
    norm_eps: float = 1e-5
    tied: bool = False
    """Whether the head is the transposed embedding."""
    scan_layers: bool = False
    """One scanned layer (compile time does not grow with depth) instead of a Python loop."""
    dtype: str = "float32"
    """What the layers compute with."""
    param_dtype: str = "float32"
    """What the parameters are stored in."""
    init_std: float = 0.02
    """Standard deviation of the initial matrices; those that write to the residual stream have it
    divided by `sqrt(2 num_layers)`."""

    def __post_init__(self):
        sizes = ("vocab_size", "num_layers", "embed_dim", "num_heads", "num_kv_heads", "head_dim",
                 "hidden_dim", "max_length")  # fmt: skip
        for name in sizes:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(message("DecoderConfig", name, "an int", repr(value)))
            if value < 1:
                raise ValueError(message("DecoderConfig", name, "at least 1", value))
        for name in ("rope_base", "norm_eps", "init_std"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(message("DecoderConfig", name, "a number", repr(value)))
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(message("DecoderConfig", name, "positive and finite", value))
        for name in ("tied", "scan_layers"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(message("DecoderConfig", name, "True or False", repr(value)))
        if self.num_heads % self.num_kv_heads:
            must, remedy = (
                "a divisor of num_heads",
                "Every key/value head serves equally many heads.",
            )
            got = f"{self.num_kv_heads} for {self.num_heads} heads"
            raise ValueError(message("DecoderConfig", "num_kv_heads", must, got, remedy))
        if self.head_dim % 2:
            remedy = "RoPE turns pairs of features."
            raise ValueError(message("DecoderConfig", "head_dim", "even", self.head_dim, remedy))
        for name in ("dtype", "param_dtype"):
            value = getattr(self, name)
            if value not in DTYPES:
                remedy = did_you_mean(str(value), DTYPES)
                raise ValueError(
                    message("DecoderConfig", name, "a dtype name", repr(value), remedy)
                )


PRESETS: dict[str, DecoderConfig] = {
    "tiny": DecoderConfig(),
    "small": DecoderConfig(
        num_layers=8, embed_dim=512, num_heads=8, num_kv_heads=4, head_dim=64, hidden_dim=1536,
        max_length=1024,
    ),
    "125m": DecoderConfig(
        vocab_size=32_768, num_layers=12, embed_dim=768, num_heads=12, num_kv_heads=4, head_dim=64,
        hidden_dim=2048, max_length=4096, dtype="bfloat16",
    ),
    "1b": DecoderConfig(
        vocab_size=32_768, num_layers=16, embed_dim=2048, num_heads=16, num_kv_heads=8,
        head_dim=128, hidden_dim=8192, max_length=4096, rope_base=500_000.0, tied=True,
        scan_layers=True, dtype="bfloat16",
    ),
}  # fmt: skip
"""Model shapes by name; `tiny` trains in minutes on two CPU cores, `1b` wants a large GPU.

On the King James text, `tiny` reaches 1.45 nats per byte in 300 steps of 16 sequences of 128 bytes
with `optax.contrib.muon` (rate 0.02, 50 steps of warm-up, cosine decay, weight decay 0.1, gradients
clipped at norm 1), where AdamW (rate 3e-3) reaches 1.74. A step takes about 0.2 s on two cores.
"""


def rope(x: Float[Array, "B T N D"], base: float) -> Float[Array, "B T N D"]:
    """Returns `x` with feature pairs `(i, i + D/2)` turned by `position * base^(-2i/D)` radians.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
    """
    _, length, _, dim = x.shape
    frequency = base ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    angle = jnp.arange(length, dtype=jnp.float32)[:, None] * frequency
    cos, sin = jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


class RMSNorm(nnx.Module):
    """`x / sqrt(mean(x^2) + eps) * scale` over the last axis.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """

    def __init__(self, dim: int, *, eps: float, param_dtype: str):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones((dim,), param_dtype))

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        x32 = x.astype(jnp.float32)
        rstd = jax.lax.rsqrt(jnp.mean(x32**2, axis=-1, keepdims=True) + self.eps)
        return (x32 * rstd * self.scale[...]).astype(x.dtype)


def _linear(c: DecoderConfig, din: int, dout: int, rngs: nnx.Rngs, residual: bool = False):
    std = c.init_std / math.sqrt(2 * c.num_layers) if residual else c.init_std
    return nnx.Linear(
        din, dout, use_bias=False, dtype=jnp.dtype(c.dtype), param_dtype=jnp.dtype(c.param_dtype),
        kernel_init=nnx.initializers.normal(std), rngs=rngs,
    )  # fmt: skip


class Attention(nnx.Module):
    """Causal self-attention with rotary positions and shared key/value heads.

    Source: Ainslie et al., "GQA: Training Generalized Multi-Query Transformer Models", 2023.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        c = self.config = config
        self.query = _linear(c, c.embed_dim, c.num_heads * c.head_dim, rngs)
        self.key = _linear(c, c.embed_dim, c.num_kv_heads * c.head_dim, rngs)
        self.value = _linear(c, c.embed_dim, c.num_kv_heads * c.head_dim, rngs)
        self.out = _linear(c, c.num_heads * c.head_dim, c.embed_dim, rngs, residual=True)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        c = self.config
        batch, length, _ = x.shape
        query = rope(self.query(x).reshape(batch, length, c.num_heads, c.head_dim), c.rope_base)
        key = rope(self.key(x).reshape(batch, length, c.num_kv_heads, c.head_dim), c.rope_base)
        value = self.value(x).reshape(batch, length, c.num_kv_heads, c.head_dim)

        group = c.num_heads // c.num_kv_heads
        query = query.reshape(batch, length, c.num_kv_heads, group, c.head_dim)
        scores = jnp.einsum("BTKGD,BSKD->BKGTS", query, key).astype(jnp.float32)
        scores = scores / math.sqrt(c.head_dim)
        causal = jnp.tril(jnp.ones((length, length), dtype=bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1).astype(x.dtype)
        mixed = jnp.einsum("BKGTS,BSKD->BTKGD", weights, value)
        return self.out(mixed.reshape(batch, length, c.num_heads * c.head_dim))


class MLP(nnx.Module):
    """`down(silu(gate(x)) * up(x))`. Source: Shazeer, "GLU Variants Improve Transformer", 2020."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        c = config
        self.gate = _linear(c, c.embed_dim, c.hidden_dim, rngs)
        self.up = _linear(c, c.embed_dim, c.hidden_dim, rngs)
        self.down = _linear(c, c.hidden_dim, c.embed_dim, rngs, residual=True)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Layer(nnx.Module):
    """One layer: attention, then the MLP, each on the normed stream and added to it."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        c = config
        self.attention_norm = RMSNorm(c.embed_dim, eps=c.norm_eps, param_dtype=c.param_dtype)
        self.attention = Attention(c, rngs=rngs)
        self.mlp_norm = RMSNorm(c.embed_dim, eps=c.norm_eps, param_dtype=c.param_dtype)
        self.mlp = MLP(c, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nnx.Module):
    """Decoder language model: next-token logits of every position, from the tokens up to it."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        c = self.config = config
        normal, param_dtype = nnx.initializers.normal(c.init_std), jnp.dtype(c.param_dtype)
        shape = (c.vocab_size, c.embed_dim)
        self.embedding = nnx.Param(normal(rngs.params(), shape, param_dtype))
        keys = jax.random.split(rngs.params(), c.num_layers)  # the same parameters in either form
        if c.scan_layers:
            self.layers = nnx.vmap(lambda key: Layer(c, rngs=nnx.Rngs(key)))(keys)
        else:
            self.layers = nnx.List([Layer(c, rngs=nnx.Rngs(key)) for key in keys])
        self.norm = RMSNorm(c.embed_dim, eps=c.norm_eps, param_dtype=c.param_dtype)
        if not c.tied:
            self.head = nnx.Param(normal(rngs.params(), shape, param_dtype))

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Returns the float32 logits of the token after each position."""
        c = self.config
        _check_tokens("Decoder", tokens, c.max_length)
        x = self.embedding[...].astype(c.dtype)[tokens]
        if isinstance(self.layers, Layer):  # all layers stacked in one
            x, _ = jax.lax.scan(lambda x, layer: (layer(x), None), x, self.layers)
        else:
            for layer in self.layers:
                x = layer(x)
        head = (self.embedding if c.tied else self.head)[...].astype(c.dtype)
        x = self.norm(x)
        return jnp.einsum("BTD,VD->BTV", x, head, preferred_element_type=jnp.float32)


def _check_tokens(op: str, tokens: Array, max_length: int) -> None:
    if tokens.ndim != 2:
        remedy = "Add a batch axis: tokens[None]." if tokens.ndim == 1 else ""
        raise ValueError(message(op, "tokens", "[B, T]", f"shape {tokens.shape}", remedy))
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise TypeError(message(op, "tokens", "integers", tokens.dtype))
    if not 1 <= tokens.shape[1] <= max_length:
        got = f"{tokens.shape[1]} tokens"
        remedy = "Cut the sequence, or raise max_length in the config."
        raise ValueError(message(op, "tokens", f"1 to {max_length} long", got, remedy))


def next_token_loss(model: Decoder, tokens: Int[Array, "B L"]) -> Float[Array, ""]:
    """Returns the mean negative log-likelihood, in nats, of tokens 1..T given those before each."""
    if tokens.ndim != 2 or tokens.shape[0] < 1 or tokens.shape[1] < 2:
        must, got = "[B, T+1] with B and T at least 1", f"shape {tokens.shape}"
        remedy = "The last token of a row is only a target."
        raise ValueError(message("next_token_loss", "tokens", must, got, remedy))
    logits = model(tokens[:, :-1])
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    picked = jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)
    return -jnp.mean(picked)


def num_params(model: nnx.Module) -> int:
    """Returns the number of trainable numbers in the model."""
    return sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


def flops_per_token(config: DecoderConfig, length: int) -> float:
    """Returns the floating-point operations of a training step per token; a multiply-add is two.

    Six per parameter that takes part in a matrix product (two forward, four backward), and as many
    for causal attention, where a query meets `(length + 1) / 2` keys on average. Counted so for
    MFU: recomputation and elementwise work are not useful work.
    """
    c = config
    attention = c.embed_dim * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    layer = attention + 3 * c.embed_dim * c.hidden_dim
    scores_and_mix = 2 * c.num_heads * c.head_dim * (length + 1) / 2
    return 6.0 * (c.num_layers * (layer + scores_and_mix) + c.vocab_size * c.embed_dim)
