# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Other networks as people write them: of images, recurrent, mixtures of experts."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from tests.public.transformers import Block, cross_entropy

Spec = jax.ShapeDtypeStruct


class ViT(nnx.Module):
    def __init__(self, width: int, layers: int, rngs: nnx.Rngs):
        self.patch = nnx.Conv(3, width, (4, 4), strides=(4, 4), padding="VALID", rngs=rngs)
        self.cls = nnx.Param(jnp.zeros((1, 1, width)))
        self.positions = nnx.Param(jnp.zeros((1, 17, width)))
        self.blocks = nnx.List([Block(width, 4, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, images):
        x = self.patch(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        cls = jnp.broadcast_to(self.cls[...], (x.shape[0], 1, x.shape[-1]))
        x = jnp.concatenate([cls, x], axis=1) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def vit(layers: int = 2) -> tuple[Any, tuple[Any, ...]]:
    graph, state = nnx.split(nnx.eval_shape(lambda: ViT(32, layers, nnx.Rngs(0))))

    def loss(state, images, labels):
        return cross_entropy(nnx.merge(graph, state)(images), labels)

    return loss, (
        nnx.to_pure_dict(state), Spec((2, 16, 16, 3), jnp.float32), Spec((2,), jnp.int32),
    )  # fmt: skip


class Residual(nn.Module):
    features: int
    stride: int = 1

    @nn.compact
    def __call__(self, x):
        norm = lambda: nn.BatchNorm(use_running_average=False)  # noqa: E731
        strides = (self.stride, self.stride)
        y = nn.relu(norm()(nn.Conv(self.features, (3, 3), strides, use_bias=False)(x)))
        y = norm()(nn.Conv(self.features, (3, 3), use_bias=False)(y))
        if x.shape != y.shape:
            x = norm()(nn.Conv(self.features, (1, 1), strides, use_bias=False)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i, features in enumerate((8, 8, 16, 16)):
            x = Residual(features, 2 if i == 2 else 1)(x)
        return nn.Dense(10)(x.mean((1, 2)))


def resnet() -> tuple[Any, tuple[Any, ...]]:
    model, images = ResNet(), Spec((4, 16, 16, 3), jnp.float32)
    variables = jax.eval_shape(model.init, jax.random.key(0), images)

    def loss(params, images, labels):
        stats = jax.tree.map(lambda x: jnp.zeros(x.shape), variables["batch_stats"])
        state = {"params": params, "batch_stats": stats}
        logits, _ = model.apply(state, images, mutable=["batch_stats"])
        return cross_entropy(logits, labels)

    return loss, (variables["params"], images, Spec((4,), jnp.int32))


def unet_attention() -> tuple[Any, tuple[Any, ...]]:
    """A block of a diffusion model: time embedding, group norm, convolution, attention."""
    width = 16
    params = {
        "conv": Spec((3, 3, width, width), jnp.float32), "time": Spec((32, width), jnp.float32),
        "scale": Spec((width,), jnp.float32), "bias": Spec((width,), jnp.float32),
        **{name: Spec((width, width), jnp.float32) for name in ("q", "k", "v", "o")},
    }  # fmt: skip

    def group_norm(x, scale, bias, groups=4):
        shape = x.shape
        x = x.reshape(*shape[:-1], groups, -1)
        mean = x.mean((1, 2, 4), keepdims=True)
        var = x.var((1, 2, 4), keepdims=True)
        return ((x - mean) / jnp.sqrt(var + 1e-5)).reshape(shape) * scale + bias

    def loss(params, x, t):
        half = 16
        freqs = jnp.exp(-jnp.log(10_000.0) * jnp.arange(half) / half)
        angles = t[:, None].astype(jnp.float32) * freqs[None]
        time = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1) @ params["time"]
        h = jax.nn.silu(group_norm(x, params["scale"], params["bias"]))
        h = jax.lax.conv_general_dilated(
            h, params["conv"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        h = x + h + time[:, None, None, :]
        b, height, w, c = h.shape
        y = group_norm(h, params["scale"], params["bias"]).reshape(b, height * w, c)
        q, k, v = (y @ params[name] for name in "qkv")
        weights = jax.nn.softmax(q @ jnp.swapaxes(k, 1, 2) * c**-0.5, axis=-1)
        y = (weights @ v) @ params["o"]
        return jnp.mean((h + y.reshape(h.shape)) ** 2)

    return loss, (params, Spec((2, 8, 8, width), jnp.float32), Spec((2,), jnp.int32))


def mixture() -> tuple[Any, tuple[Any, ...]]:
    """A mixture of experts with one-hot dispatch and a capacity, as in GShard."""
    tokens, width, experts, capacity, hidden = 32, 16, 4, 12, 32
    params = {
        "gate": Spec((width, experts), jnp.float32),
        "up": Spec((experts, width, hidden), jnp.float32),
        "down": Spec((experts, hidden, width), jnp.float32),
    }

    def loss(params, x):
        probs = jax.nn.softmax(x @ params["gate"], axis=-1)
        weights, chosen = jax.lax.top_k(probs, 2)
        weights = weights / weights.sum(-1, keepdims=True)
        mask = jax.nn.one_hot(chosen, experts, dtype=jnp.int32)
        place = (jnp.cumsum(mask.reshape(-1, experts), 0) - 1).reshape(mask.shape)
        place = (place * mask).sum(-1)
        kept = (place < capacity).astype(x.dtype)
        slots = jax.nn.one_hot(place, capacity) * kept[..., None]
        dispatch = jnp.einsum("tke,tkc->tec", mask.astype(x.dtype), slots)
        combine = jnp.einsum("tk,tke,tkc->tec", weights, mask.astype(x.dtype), slots)
        inputs = jnp.einsum("td,tec->ecd", x, dispatch)
        hidden = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", inputs, params["up"]))
        outputs = jnp.einsum("ecf,efd->ecd", hidden, params["down"])
        y = x + jnp.einsum("ecd,tec->td", outputs, combine)
        balance = (mask[:, 0].astype(jnp.float32).mean(0) * probs.mean(0)).sum() * experts
        return jnp.mean(y**2) + 0.01 * balance

    return loss, (params, Spec((tokens, width), jnp.float32))


def state_space() -> tuple[Any, tuple[Any, ...]]:
    """A selective state-space layer as a scan over time, its decay made anew at each step."""
    length, width, states = 24, 16, 8
    params = {
        "a_log": Spec((width, states), jnp.float32), "b": Spec((width, states), jnp.float32),
        "c": Spec((width, states), jnp.float32), "dt": Spec((width, width), jnp.float32),
        "dt_bias": Spec((width,), jnp.float32), "d": Spec((width,), jnp.float32),
    }  # fmt: skip

    def loss(params, x):
        def step(state, x_t):
            decay = -jnp.exp(params["a_log"].astype(jnp.float32))
            dt = jax.nn.softplus(x_t @ params["dt"] + params["dt_bias"])
            b, c = x_t @ params["b"], x_t @ params["c"]
            state = jnp.exp(dt[..., None] * decay) * state
            state = state + dt[..., None] * b[:, None, :] * x_t[..., None]
            y = jnp.einsum("bdn,bn->bd", state, c) + x_t * params["d"]
            return state, y

        start = jnp.zeros((x.shape[0], width, states))
        _, ys = jax.lax.scan(step, start, x.transpose(1, 0, 2))
        return jnp.mean(ys.transpose(1, 0, 2) ** 2)

    return loss, (params, Spec((2, length, width), jnp.float32))


def linear_attention() -> tuple[Any, tuple[Any, ...]]:
    """A gated linear attention by chunks, with the mask and the decay made inside of the scan."""
    chunks, size, width = 4, 8, 16
    params = {name: Spec((width, width), jnp.float32) for name in ("q", "k", "v")}
    params["decay"] = Spec((width,), jnp.float32)

    def loss(params, x):
        q, k, v = (jnp.reshape(x @ params[n], (-1, chunks, size, width)) for n in "qkv")

        def step(state, qkv):
            q, k, v = qkv
            mask = jnp.tril(jnp.ones((size, size)))
            gate = jax.nn.sigmoid(params["decay"])
            powers = gate[None, :] ** jnp.arange(size)[:, None]
            inner = jnp.einsum("btd,bsd->bts", q * powers, k / powers) * mask
            y = inner @ v + (q * powers) @ state
            return state * gate[:, None] ** size + jnp.einsum("bsd,bse->bde", k, v), y

        parts = tuple(z.transpose(1, 0, 2, 3) for z in (q, k, v))
        _, y = jax.lax.scan(step, jnp.zeros((x.shape[0], width, width)), parts)
        return jnp.mean(y**2)

    return loss, (params, Spec((2, chunks * size, width), jnp.float32))


def lstm() -> tuple[Any, tuple[Any, ...]]:
    width, hidden, length = 12, 16, 20
    params = {
        "wx": Spec((4 * hidden, width), jnp.float32), "wh": Spec((4 * hidden, hidden), jnp.float32),
        "b": Spec((4 * hidden,), jnp.float32), "out": Spec((hidden, 5), jnp.float32),
    }  # fmt: skip

    def loss(params, x, labels):
        def cell(carry, x_t):
            h, c = carry
            gates = x_t @ params["wx"].T + h @ params["wh"].T + params["b"]
            i, f, g, o = jnp.split(gates, 4, axis=-1)
            c = jax.nn.sigmoid(f + 1.0) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        start = jnp.zeros((x.shape[0], hidden)), jnp.zeros((x.shape[0], hidden))
        (h, _), _ = jax.lax.scan(cell, start, jnp.swapaxes(x, 0, 1))
        return cross_entropy(h @ params["out"], labels)

    return loss, (params, Spec((2, length, width), jnp.float32), Spec((2,), jnp.int32))
