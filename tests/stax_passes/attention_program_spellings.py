# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Attention in modules and programs: libraries, caches, loops, vmap, dropout, returned weights."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from tests.stax_passes.attention_spellings import (
    BTHD,
    GROUPED,
    QKV,
    B,
    D,
    H,
    Spelling,
    T,
    einsum,
    out,
    scores,
    softmax,
    tri,
)

X = f"f32[{B},{T},{H * D}]"
STEP = f"f32[{B},1,{H},{D}]"
dot_product_attention = jax.nn.dot_product_attention


def causal(q, k, v):
    return out(softmax(jnp.where(tri(), scores(q, k), -1e30), -1), v)


def jax_nn(q, k, v):
    return dot_product_attention(q, k, v)


def jax_nn_causal(q, k, v):
    return dot_product_attention(q, k, v, is_causal=True)


def jax_nn_mask(q, k, v, mask):
    return dot_product_attention(q, k, v, mask=mask[:, None, None, :])


def jax_nn_bias(q, k, v, bias):
    return dot_product_attention(q, k, v, bias)


def jax_nn_lengths(q, k, v, lengths):
    return dot_product_attention(q, k, v, key_value_seq_lengths=lengths)


def jax_nn_both_lengths(q, k, v, lengths):
    return dot_product_attention(q, k, v, query_seq_lengths=lengths, key_value_seq_lengths=lengths)


def jax_nn_window(q, k, v):
    return dot_product_attention(q, k, v, is_causal=True, local_window_size=(3, 0))


def flax_functional(q, k, v):
    return nnx.dot_product_attention(q, k, v)


def flax_functional_bias(q, k, v, bias):
    return linen.dot_product_attention(q, k, v, bias=bias)


def waves(shapes):
    """Returns the pytree of shapes filled with numbers that are not all equal."""
    return jax.tree.map(
        lambda s: jnp.sin(jnp.arange(s.size, dtype=s.dtype)).reshape(s.shape), shapes
    )


def nnx_module(**options: Any) -> nnx.MultiHeadAttention:
    """Returns nnx.MultiHeadAttention with parameters made in the trace."""
    make = partial(nnx.MultiHeadAttention, H, H * D, decode=False, keep_rngs=False)
    shapes = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0), **options))
    graph, state = nnx.split(shapes)
    return nnx.merge(graph, waves(state))


def nnx_plain(x):
    return nnx_module()(x)


def nnx_causal(x):
    return nnx_module()(x, mask=nnx.make_causal_mask(x[..., 0]))


def nnx_normalised(x):
    return nnx_module(normalize_qk=True)(x)


def nnx_half(x):
    return nnx_module(dtype=jnp.bfloat16)(x, mask=nnx.make_causal_mask(x[..., 0]))


def nnx_grouped(x):
    return nnx_module(num_kv_heads=2)(x)


def nnx_dropout(x):
    return nnx_module(dropout_rate=0.1, deterministic=False)(x, rngs=nnx.Rngs(1))


def nnx_weights(x):
    y, sown = nnx.capture(nnx_module(), nnx.Intermediate)(x, sow_weights=True)
    return y, jax.tree.leaves(sown)


def linen_apply(x: Any, mask: Any = None, rngs: Any = None, **options: Any) -> Any:
    """Returns linen.MultiHeadDotProductAttention applied to parameters made in the trace."""
    module = linen.MultiHeadDotProductAttention(H, **options)
    shapes = jax.eval_shape(lambda key: module.init(key, x), jax.random.key(0))
    return module.apply(waves(shapes), x, mask=mask, rngs=rngs)


def linen_plain(x):
    return linen_apply(x)


def linen_causal(x):
    return linen_apply(x, linen.make_causal_mask(x[..., 0]))


def linen_combined_masks(x, tokens):
    padding = linen.make_attention_mask(tokens > 0, tokens > 0)
    return linen_apply(x, linen.combine_masks(padding, linen.make_causal_mask(tokens)))


def linen_float32_softmax(x):
    return linen_apply(x, dtype=jnp.bfloat16, force_fp32_for_softmax=True)


def linen_normalised(x):
    return linen_apply(x, normalize_qk=True)


def linen_dropout(x):
    options = {"dropout_rate": 0.1, "deterministic": False}
    return linen_apply(x, rngs={"dropout": jax.random.key(1)}, **options)


def dropout_by_hand(q, k, v):
    w = softmax(scores(q, k), -1)
    keep = jax.random.bernoulli(jax.random.key(0), 0.9, w.shape)
    return out(jnp.where(keep, w / 0.9, 0.0), v)


def dropout_off(q, k, v):
    return out(linen.Dropout(0.1, deterministic=True).apply({}, softmax(scores(q, k), -1)), v)


def weights_returned(q, k, v):
    w = softmax(scores(q, k), -1)
    return out(w, v), w


def mean_weights_returned(q, k, v):
    w = softmax(scores(q, k), -1)
    return out(w, v), w.mean(1)


def logsumexp_returned(q, k, v):
    s = scores(q, k)
    return out(softmax(s, -1), v), jax.nn.logsumexp(s, -1)


def decode_step(q, k, v, keys, values, at):
    keys = jax.lax.dynamic_update_slice(keys, k, (0, at, 0, 0))
    values = jax.lax.dynamic_update_slice(values, v, (0, at, 0, 0))
    mask = (jnp.arange(T) <= at)[None, None, None, :]
    return out(softmax(jnp.where(mask, scores(q, keys), -1e30), -1), values), keys, values


def decode_step_no_query_axis(q, keys, values, at):
    s = einsum("bhd,bshd->bhs", q, keys) * D**-0.5
    w = softmax(jnp.where(jnp.arange(T) <= at, s, -1e30), -1)
    return einsum("bhs,bshd->bhd", w, values)


def decode_with_lengths(q, keys, values, lengths):
    mask = jnp.arange(T)[None, :] < lengths[:, None]
    s = jnp.where(mask[:, None, None, :], scores(q, keys), -jnp.inf)
    return out(softmax(s, -1), values)


def prefill_into_cache(q, k, v, keys, values):
    keys = jax.lax.dynamic_update_slice(keys, k, (0, 0, 0, 0))
    values = jax.lax.dynamic_update_slice(values, v, (0, 0, 0, 0))
    return out(softmax(jnp.where(tri(T, 2 * T), scores(q, keys), -1e30), -1), values)


def cache_by_at_set(q, k, v, keys, values, at):
    keys, values = keys.at[:, at].set(k[:, 0]), values.at[:, at].set(v[:, 0])
    mask = jnp.arange(T) <= at
    return out(softmax(jnp.where(mask, scores(q, keys), -1e30), -1), values)


def map_over_query_chunks(q, k, v):
    chunks = q.reshape(B, 4, T // 4, H, D).swapaxes(0, 1)
    o = jax.lax.map(lambda c: out(softmax(scores(c, k), -1), v), chunks)
    return o.swapaxes(0, 1).reshape(B, T, H, D)


def scan_over_causal_query_chunks(q, k, v):
    def chunk(_, start):
        part = jax.lax.dynamic_slice_in_dim(q, start, 4, axis=1)
        mask = (start + jnp.arange(4))[:, None] >= jnp.arange(T)[None, :]
        return None, out(softmax(jnp.where(mask, scores(part, k), -1e30), -1), v)

    o = jax.lax.scan(chunk, None, jnp.arange(0, T, 4))[1]
    return o.swapaxes(0, 1).reshape(B, T, H, D)


def online_softmax_over_key_chunks(q, k, v):
    def chunk(carry, kv):
        top, total, acc = carry
        s = scores(q, kv[0])
        high = jnp.maximum(top, s.max(-1))
        e, old = jnp.exp(s - high[..., None]), jnp.exp(top - high)
        return (high, total * old + e.sum(-1), acc * old[..., None] + einsum(
            "bhts,bshd->bhtd", e, kv[1])), None  # fmt: skip

    chunks = tuple(x.reshape(B, 4, T // 4, H, D).swapaxes(0, 1) for x in (k, v))
    start = (jnp.full((B, H, T), -jnp.inf), jnp.zeros((B, H, T)), jnp.zeros((B, H, T, D)))
    _, total, acc = jax.lax.scan(chunk, start, chunks)[0]
    return (acc / total[..., None]).transpose(0, 2, 1, 3)


def python_loop_over_heads(q, k, v):
    heads = [
        softmax(q[:, :, h] @ k[:, :, h].swapaxes(1, 2) * D**-0.5, -1) @ v[:, :, h] for h in range(H)
    ]
    return jnp.stack(heads, axis=2)


def one_head(q, k, v):
    return softmax(jnp.where(tri(), q @ k.T * D**-0.5, -1e9), -1) @ v


def vmapped_heads_and_batch(q, k, v):
    return jax.vmap(jax.vmap(one_head, in_axes=1, out_axes=1))(q, k, v)


def vmapped_batch_outside(q, k, v):
    return jax.vmap(jax.vmap(one_head), in_axes=2, out_axes=2)(q, k, v)


def vmapped_groups_share_keys(q, k, v):
    grouped = q.reshape(B, T, 2, H // 2, D)
    heads = jax.vmap(one_head, in_axes=(1, None, None), out_axes=1)
    o = jax.vmap(jax.vmap(heads, in_axes=1, out_axes=1))(grouped, k, v)
    return o.reshape(B, T, H, D)


def scan_over_heads(q, k, v):
    heads = tuple(x.transpose(2, 0, 1, 3) for x in (q, k, v))
    o = jax.lax.scan(lambda _, qkv: (None, jax.vmap(one_head)(*qkv)), None, heads)[1]
    return o.transpose(1, 2, 0, 3)


def fori_loop_over_layers(q, k, v):
    return jax.lax.fori_loop(0, 3, lambda _, x: causal(x, k, v), q)


def scan_over_rematerialised_layers(q, k, v):
    step = jax.checkpoint(lambda x, _: (x + causal(x, k, v), None))
    return jax.lax.scan(step, q, None, length=2)[0]


def jitted_helper(q, k, v):
    return jax.jit(causal)(q, k, v)


def branches_of_cond(q, k, v, flag):
    return jax.lax.cond(flag > 0, causal, jax_nn, q, k, v)


def two_layers(q, k, v):
    return causal(causal(q, k, v), k, v)


def gradient(q, k, v):
    return jax.grad(lambda q: causal(q, k, v).sum())(q)


CACHE, AT, LENGTHS = (BTHD, BTHD), "i32[]", "i32[2]"
LONG = (f"f32[{B},{2 * T},{H},{D}]",) * 2

PROGRAMS = (
    Spelling(jax_nn, "jax.nn.dot_product_attention"),
    Spelling(jax_nn_causal, "jax.nn, is_causal", GROUPED),
    Spelling(jax_nn_mask, "jax.nn, mask", (*QKV, f"bool[{B},{T}]")),
    Spelling(jax_nn_bias, "jax.nn, bias", (*QKV, f"f32[{B},{H},{T},{T}]")),
    Spelling(jax_nn_lengths, "jax.nn, key_value_seq_lengths", (*QKV, LENGTHS)),
    Spelling(jax_nn_both_lengths, "jax.nn, both lengths", (*QKV, LENGTHS)),
    Spelling(jax_nn_window, "jax.nn, local_window_size"),
    Spelling(flax_functional, "flax.nnx.dot_product_attention"),
    Spelling(flax_functional_bias, "flax.linen, bias", (*QKV, f"f32[1,{H},{T},{T}]")),
    Spelling(nnx_plain, "flax.nnx.MultiHeadAttention", (X,)),
    Spelling(nnx_causal, "flax.nnx, make_causal_mask", (X,)),
    Spelling(nnx_normalised, "flax.nnx, normalize_qk", (X,)),
    Spelling(nnx_half, "flax.nnx, dtype=bfloat16", (X,)),
    Spelling(nnx_grouped, "flax.nnx, num_kv_heads", (X,)),
    Spelling(nnx_dropout, "flax.nnx, dropout", (X,), reason=""),
    Spelling(nnx_weights, "flax.nnx, sow_weights", (X,), reason="is also returned"),
    Spelling(linen_plain, "flax.linen.MultiHeadDotProductAttention", (X,)),
    Spelling(linen_causal, "flax.linen, make_causal_mask", (X,)),
    Spelling(linen_combined_masks, "flax.linen, combine_masks", (X, f"i32[{B},{T}]")),
    Spelling(linen_float32_softmax, "flax.linen, force_fp32_for_softmax", (X,)),
    Spelling(linen_normalised, "flax.linen, normalize_qk", (X,)),
    Spelling(linen_dropout, "flax.linen, dropout", (X,), reason=""),
    Spelling(dropout_by_hand, "dropout by bernoulli", reason=""),
    Spelling(dropout_off, "flax.linen.Dropout, deterministic"),
    Spelling(weights_returned, "weights returned for a plot", reason="is also returned"),
    Spelling(mean_weights_returned, "torch need_weights, ported", reason="is also used at"),
    Spelling(logsumexp_returned, "ring attention's parts", reason="is also used at"),
    Spelling(decode_step, "KV cache, dynamic_update_slice", (STEP, STEP, STEP, *CACHE, AT)),
    Spelling(decode_step_no_query_axis, "KV cache, one token", (f"f32[{B},{H},{D}]", *CACHE, AT)),
    Spelling(decode_with_lengths, "KV cache, lengths", (STEP, *CACHE, LENGTHS)),
    Spelling(prefill_into_cache, "KV cache, prefill", (*QKV, *LONG)),
    Spelling(cache_by_at_set, "KV cache, x.at[].set", (STEP, STEP, STEP, *CACHE, AT)),
    Spelling(map_over_query_chunks, "memory-efficient by lax.map"),
    Spelling(scan_over_causal_query_chunks, "memory-efficient by scan"),
    Spelling(online_softmax_over_key_chunks, "Rabe and Staats", reason=""),
    Spelling(python_loop_over_heads, "lecture notes", count=H),
    Spelling(vmapped_heads_and_batch, "Equinox"),
    Spelling(vmapped_batch_outside, "Equinox, other order"),
    Spelling(vmapped_groups_share_keys, "vmap, keys shared in a group", GROUPED),
    Spelling(scan_over_heads, "memory-saving scan over heads"),
    Spelling(fori_loop_over_layers, "looped transformers"),
    Spelling(scan_over_rematerialised_layers, "MaxText"),
    Spelling(jitted_helper, "helper under jax.jit"),
    Spelling(branches_of_cond, "local or global by lax.cond", (*QKV, "i32[]"), count=2),
    Spelling(two_layers, "two layers", count=2),
    Spelling(gradient, "train step, jax.grad inside", reason="", wanted=True),
)
