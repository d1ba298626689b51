# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Transformers as people write them: in Flax Linen, in Flax NNX and in plain jnp."""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def cross_entropy(logits: Any, targets: Any) -> Any:
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.sum(jax.nn.one_hot(targets, logits.shape[-1]) * log_probs, -1))


# -- Linen: an encoder of stacked, scanned, rematerialised layers ---------------------------------


class EncoderLayer(nn.Module):
    heads: int
    hidden: int

    @nn.compact
    def __call__(self, x, mask):
        y = nn.LayerNorm()(x)
        y = nn.MultiHeadDotProductAttention(num_heads=self.heads)(y, y, mask=mask)
        x = x + y
        y = nn.Dense(self.hidden)(nn.LayerNorm()(x))
        return x + nn.Dense(x.shape[-1])(nn.gelu(y)), None


class Encoder(nn.Module):
    layers: int = 3
    scan: bool = True
    vocab: int = 48
    width: int = 32

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(self.vocab, self.width)(tokens)
        table = self.param("positions", nn.initializers.normal(0.02), (64, self.width))
        x = x + table[None, : tokens.shape[1]]
        mask = nn.make_attention_mask(tokens > 0, tokens > 0)
        if self.scan:
            stacked = nn.scan(
                nn.remat(EncoderLayer, prevent_cse=False),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,  # pyright: ignore[reportArgumentType]
                length=self.layers,
            )
            x, _ = stacked(4, 64)(x, mask)
        else:
            for _ in range(self.layers):
                x, _ = EncoderLayer(4, 64)(x, mask)
        return nn.Dense(self.vocab)(nn.LayerNorm()(x))


def linen(layers: int = 3, scan: bool = True) -> tuple[Any, tuple[Any, ...]]:
    model, tokens = Encoder(layers, scan), jax.ShapeDtypeStruct((2, 16), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)

    def loss(params, tokens):
        return cross_entropy(model.apply(params, tokens), jnp.roll(tokens, -1, 1))

    return loss, (params, tokens)


# -- NNX: GPT ------------------------------------------------------------------------------------


class Block(nnx.Module):
    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        self.ln1, self.ln2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        mask = nnx.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + self.attention(self.ln1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.ln2(x))))


class GPT(nnx.Module):
    def __init__(
        self, vocab: int, width: int, heads: int, layers: int, rngs: nnx.Rngs, jitted: bool = False
    ):
        self.jitted = jitted
        self.tokens = nnx.Embed(vocab, width, rngs=rngs)
        self.positions = nnx.Embed(64, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, rngs) for _ in range(layers)])
        self.ln = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, tokens):
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = nnx.jit(block)(x) if self.jitted else block(x)
        return self.tokens.attend(self.ln(x))


def gpt(layers: int = 3, jitted: bool = False) -> tuple[Any, tuple[Any, ...]]:
    model = nnx.eval_shape(lambda: GPT(48, 32, 4, layers, nnx.Rngs(0), jitted))
    graph, state = nnx.split(model)

    def loss(state, tokens):
        return cross_entropy(nnx.merge(graph, state)(tokens[:, :-1]), tokens[:, 1:])

    return loss, (nnx.to_pure_dict(state), jax.ShapeDtypeStruct((2, 17), jnp.int32))


# -- plain jnp: Llama with repeated keys, and T5 --------------------------------------------------


def rms(x, scale):
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + 1e-5)
    return y.astype(x.dtype) * scale


def rotate(x):
    first, second = jnp.split(x, 2, -1)
    return jnp.concatenate([-second, first], -1)


def rope(x):
    length, dim = x.shape[1], x.shape[-1]
    inverse = 1.0 / (10_000 ** (jnp.arange(0, dim, 2) / dim))
    angles = jnp.einsum("i,j->ij", jnp.arange(length, dtype=jnp.float32), inverse)
    angles = jnp.concatenate([angles, angles], -1)[None, :, None, :]
    y = x.astype(jnp.float32)
    return (y * jnp.cos(angles) + rotate(y) * jnp.sin(angles)).astype(x.dtype)


def llama_layer(x, p, heads, kv_heads):
    batch, length, width = x.shape
    y = rms(x, p["norm1"])
    q = rope((y @ p["q"]).reshape(batch, length, heads, -1))
    k = rope((y @ p["k"]).reshape(batch, length, kv_heads, -1))
    v = (y @ p["v"]).reshape(batch, length, kv_heads, -1)
    k, v = (jnp.repeat(z, heads // kv_heads, axis=2) for z in (k, v))
    q, k, v = (z.transpose(0, 2, 1, 3) for z in (q, k, v))
    scores = jnp.matmul(q, k.transpose(0, 1, 3, 2)) / math.sqrt(q.shape[-1])
    mask = jnp.triu(jnp.full((length, length), -jnp.inf), k=1)
    weights = jax.nn.softmax(scores.astype(jnp.float32) + mask, -1).astype(x.dtype)
    y = jnp.matmul(weights, v).transpose(0, 2, 1, 3).reshape(batch, length, width)
    x = x + y @ p["o"]
    y = rms(x, p["norm2"])
    return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]


def llama(
    layers: int = 3, width: int = 32, heads: int = 4, hidden: int = 96, vocab: int = 48,
    length: int = 17, scan: bool = False, remat: bool = False, dtype: str = "bfloat16",
) -> tuple[Any, tuple[Any, ...]]:  # fmt: skip
    half = width // 2
    shapes: dict[str, tuple[int, ...]] = {
        "norm1": (width,), "norm2": (width,), "q": (width, width), "k": (width, half),
        "v": (width, half), "o": (width, width), "gate": (width, hidden), "up": (width, hidden),
        "down": (hidden, width),
    }  # fmt: skip
    sizes = (layers,) if scan else ()
    layer = {name: jax.ShapeDtypeStruct((*sizes, *s), dtype) for name, s in shapes.items()}
    params = {
        "embed": jax.ShapeDtypeStruct((vocab, width), dtype),
        "norm": jax.ShapeDtypeStruct((width,), dtype),
        "layers": layer if scan else [layer] * layers,
    }

    def loss(params, tokens):
        x = params["embed"][tokens[:, :-1]]
        step = lambda x, p: llama_layer(x, p, heads, heads // 2)  # noqa: E731
        step = jax.checkpoint(step) if remat else step
        if scan:
            x, _ = jax.lax.scan(lambda x, p: (step(x, p), None), x, params["layers"])
        else:
            for p in params["layers"]:
                x = step(x, p)
        logits = rms(x, params["norm"]) @ params["embed"].T
        log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(log_probs, tokens[:, 1:, None], -1))

    return loss, (params, jax.ShapeDtypeStruct((2, length), jnp.int32))


def bucket(distance, buckets=8, farthest=32):
    sign = (distance > 0).astype(jnp.int32) * (buckets // 2)
    n, exact = jnp.abs(distance), buckets // 4
    far = jnp.log(n.astype(jnp.float32) / exact + np.finfo(np.float32).eps)
    far = exact + (far / math.log(farthest / exact) * (buckets // 2 - exact)).astype(jnp.int32)
    return sign + jnp.where(n < exact, n, jnp.minimum(far, buckets // 2 - 1))


def t5(layers: int = 2) -> tuple[Any, tuple[Any, ...]]:
    width, heads, length = 32, 4, 16
    names = ("q", "k", "v", "o", "wi", "wo")
    layer = {name: jax.ShapeDtypeStruct((width, width), jnp.float32) for name in names}
    layer |= {name: jax.ShapeDtypeStruct((width,), jnp.float32) for name in ("n1", "n2")}
    params = {
        "bias": jax.ShapeDtypeStruct((8, heads), jnp.float32),
        "layers": [layer] * layers,
    }

    def norm(x, scale):
        return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale

    def loss(params, x):
        for p in params["layers"]:
            y = norm(x, p["n1"])
            q, k, v = (jnp.reshape(y @ p[n], (*y.shape[:2], heads, -1)) for n in "qkv")
            position = jnp.arange(length)[None, :] - jnp.arange(length)[:, None]
            bias = params["bias"][bucket(position)].transpose(2, 0, 1)[None]
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias
            weights = jax.nn.softmax(scores, -1)
            y = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
            x = x + y @ p["o"]
            x = x + jax.nn.relu(norm(x, p["n2"]) @ p["wi"]) @ p["wo"]
        return jnp.mean(x**2)

    return loss, (params, jax.ShapeDtypeStruct((2, length, width), jnp.float32))


def kept_weights(width: int = 64, heads: int = 8, kv_heads: int = 2, length: int = 128) -> Any:
    """Grouped-query attention in float32 whose weights a regulariser reads too."""
    features = 16
    bf16 = jnp.bfloat16
    params = {
        "query": jax.ShapeDtypeStruct((width, heads * features), bf16),
        "key": jax.ShapeDtypeStruct((width, kv_heads * features), bf16),
        "value": jax.ShapeDtypeStruct((width, kv_heads * features), bf16),
    }

    def loss(params: Any, x: Any) -> Any:
        def split(name: str, count: int) -> Any:
            return (x @ params[name]).reshape(*x.shape[:2], count, features)

        k, v = (
            jnp.repeat(split(name, kv_heads), heads // kv_heads, 2).astype("float32")
            for name in ("key", "value")
        )
        scores = jnp.einsum("bthd,bshd->bhts", split("query", heads).astype("float32"), k)
        weights = jax.nn.softmax(scores / features**0.5, -1)
        return (jnp.einsum("bhts,bshd->bthd", weights, v) ** 2).sum() + (weights**2).sum()

    return loss, (params, jax.ShapeDtypeStruct((2, length, width), bf16))
