# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""One small network in each style of writing: attention, a norm, batch statistics and dropout.

Each is a function `f(params, state, x) -> (y, new state)` of two equal layers, written as a Python
loop or as a scan, with plain functions, Flax NNX or Flax Linen. `wrap` goes around what a user of
the style would compile: `tpjax.compile`, or nothing.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen, nnx

from tests.harness import inputs

Fn = Callable[..., Any]
Wrap = Callable[[Fn], Fn]

WIDTH, HEADS, LAYERS, DROPOUT = 8, 2, 2, 0.25


class Style(NamedTuple):
    """A way to write the network.

    `make(wrap)` returns f; `start()` its first params and state; `ops` are what a rewrite must
    find in each layer; `layers` how many layers stand in the jaxpr.
    """

    make: Callable[[Wrap], Fn]
    start: Callable[[], tuple[Any, Any]]
    ops: frozenset[str]
    layers: int


# -- plain functions ------------------------------------------------------------------------------


def plain_block(params: Any, state: Any, x: jax.Array) -> tuple[jax.Array, Any]:
    """Returns a layer's output for tokens [..., T, WIDTH], and its state one call later."""
    scaled = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * params["scale"]
    heads = (*x.shape[:-1], HEADS, WIDTH // HEADS)
    q, k, v = (jnp.reshape(scaled @ params[name], heads) for name in "qkv")
    h = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
    axes = tuple(range(h.ndim - 1))
    mean, var = jnp.mean(h, axes), jnp.var(h, axes)
    key, now = jax.random.split(state["key"])
    keep = jax.random.bernoulli(now, 0.75, h.shape)
    stats = {"mean": 0.5 * (state["mean"] + mean), "calls": state["calls"] + 1, "key": key}
    return jnp.where(keep, (h - mean) / jnp.sqrt(var + 1e-5), 0.0), stats


def _plain_start(seed: int) -> tuple[Any, Any]:
    shape = f"f32[{WIDTH},{WIDTH}]"
    params = {name: inputs(shape, seed + i) / 2 for i, name in enumerate("qkv")}
    params["scale"] = 1 + inputs(f"f32[{WIDTH}]", seed) / 4
    return params, {"mean": jnp.zeros(WIDTH), "calls": jnp.int32(0), "key": jax.random.key(seed)}


def _plain_unrolled(params: Any, state: Any, x: jax.Array) -> tuple[jax.Array, Any]:
    after = []
    for weights, before in zip(params, state, strict=True):
        x, new = plain_block(weights, before, x)
        after.append(new)
    return x, after


def _plain_scanned(params: Any, state: Any, x: jax.Array) -> tuple[jax.Array, Any]:
    return jax.lax.scan(lambda h, layer: plain_block(*layer, h), x, (params, state))


def _stack(*trees: Any) -> Any:
    return jax.tree.map(lambda *xs: jnp.stack(xs), *trees)


def _plain(scanned: bool) -> Style:
    @functools.cache
    def start() -> tuple[Any, Any]:
        layers = [_plain_start(10 * i) for i in range(LAYERS)]
        if scanned:
            return _stack(*layers)
        params, state = zip(*layers, strict=True)
        return list(params), list(state)

    fn = _plain_scanned if scanned else _plain_unrolled
    return Style(
        lambda wrap: wrap(fn),
        start,
        frozenset({"rms_norm", "flash_attention"}),
        1 if scanned else LAYERS,
    )


# -- Flax NNX -------------------------------------------------------------------------------------


class NnxBlock(nnx.Module):
    """A layer whose call changes batch statistics, a random stream and a counter."""

    def __init__(self, dropout: float, rngs: nnx.Rngs) -> None:
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, use_bias=False, decode=False, rngs=rngs
        )
        self.batch = nnx.BatchNorm(WIDTH, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.calls = nnx.Variable(jnp.int32(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        h = self.attention(self.norm(x), mask=nnx.make_causal_mask(x[..., 0]))
        return self.dropout(self.batch(x + h))


class NnxNetwork(nnx.Module):
    """Two layers, in a list or in a scan."""

    def __init__(self, scanned: bool, rngs: nnx.Rngs, dropout: float = DROPOUT) -> None:
        self.scanned = scanned
        self.blocks: Any
        if scanned:
            make = nnx.vmap(functools.partial(NnxBlock, dropout), in_axes=0, out_axes=0)
            self.blocks = nnx.split_rngs(splits=LAYERS)(make)(rngs)
        else:
            self.blocks = nnx.List([NnxBlock(dropout, rngs) for _ in range(LAYERS)])

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.scanned:
            layer = nnx.scan(lambda block, h: block(h), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            return layer(self.blocks, x)
        for block in self.blocks:
            x = block(x)
        return x


def _nnx(scanned: bool, dropout: float) -> Style:
    @functools.cache
    def split() -> Any:
        return nnx.split(NnxNetwork(scanned, nnx.Rngs(0), dropout), nnx.Param, ...)

    def make(wrap: Wrap) -> Fn:
        call = wrap(lambda model, x: model(x))

        def fn(params: Any, state: Any, x: jax.Array) -> tuple[jax.Array, Any]:
            model = nnx.merge(split()[0], params, state, copy=True)
            y = call(model, x)
            return y, nnx.split(model, nnx.Param, ...)[2]

        return fn

    ops = frozenset({"rms_norm", "flash_attention"})
    return Style(make, lambda: split()[1:], ops, 1 if scanned else LAYERS)


# -- Flax Linen -----------------------------------------------------------------------------------


class LinenBlock(linen.Module):
    """A layer with batch statistics and dropout; a scan's body: (carry, _) to (carry, _)."""

    dropout: float

    @linen.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        mask = linen.make_causal_mask(x[..., 0])
        h = linen.MultiHeadDotProductAttention(HEADS, use_bias=False)(
            linen.LayerNorm()(x), mask=mask
        )
        x = linen.BatchNorm(use_running_average=False, momentum=0.5)(x + h)
        return linen.Dropout(self.dropout, deterministic=False)(x), None


class LinenNetwork(linen.Module):
    """Two layers, in a loop or in a scan."""

    scanned: bool
    dropout: float

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if self.scanned:
            axes: Any = {"params": 0, "batch_stats": 0}
            split: Any = {"params": True, "dropout": True}
            layers = linen.scan(LinenBlock, axes, split_rngs=split, length=LAYERS)
            return layers(self.dropout)(x, None)[0]
        for _ in range(LAYERS):
            x, _ = LinenBlock(self.dropout)(x)
        return x


def _linen(scanned: bool, dropout: float) -> Style:
    network = LinenNetwork(scanned, dropout)

    @functools.cache
    def start() -> tuple[Any, Any]:
        keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
        variables = jax.jit(network.init)(keys, inputs(f"f32[3,{WIDTH}]", 0))
        return variables["params"], {"stats": variables["batch_stats"], "key": jax.random.key(2)}

    def make(wrap: Wrap) -> Fn:
        def call(params: Any, state: Any, x: jax.Array) -> tuple[jax.Array, Any]:
            key, now = jax.random.split(state["key"])
            variables = {"params": params, "batch_stats": state["stats"]}
            y, new = network.apply(variables, x, rngs={"dropout": now}, mutable=["batch_stats"])
            return y, {"stats": new["batch_stats"], "key": key}

        return wrap(call)

    return Style(
        make, start, frozenset({"layer_norm", "flash_attention"}), 1 if scanned else LAYERS
    )


def styles(dropout: float) -> dict[str, Style]:
    """Returns the network by how it is written; plain functions have a dropout of their own."""
    return {
        "plain, unrolled": _plain(False),
        "plain, scanned": _plain(True),
        "nnx, unrolled": _nnx(False, dropout),
        "nnx, scanned": _nnx(True, dropout),
        "linen, unrolled": _linen(False, dropout),
        "linen, scanned": _linen(True, dropout),
    }


STYLES = styles(DROPOUT)
