# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Masks, biases and what else stands between scores and softmax, as people write it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.stax_passes.attention_spellings import (
    BTHD,
    HALF,
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

LENGTHS, TOKENS = "i32[2]", f"i32[{B},{T}]"
BOOL_TS, BOOL_BS = f"bool[{T},{T}]", f"bool[{B},{T}]"
ROW, COL = np.arange(T)[:, None], np.arange(T)[None, :]
SCORES = f"f32[{B},{H},{T},{T}]"
LOWEST = jnp.finfo(jnp.float32).min


def masked(mask: Any, q: Any, k: Any, v: Any, fill: Any = -1e30) -> Any:
    """Attends where the mask is True."""
    return out(softmax(jnp.where(mask, scores(q, k), fill), -1), v)


def added(bias: Any, q: Any, k: Any, v: Any) -> Any:
    """Attends with something added to the scores."""
    return out(softmax(scores(q, k) + bias, -1), v)


def causal_where(q, k, v):
    return masked(tri(), q, k, v, -jnp.inf)


def causal_lax_select(q, k, v):
    s = scores(q, k)
    mask = jnp.broadcast_to(tri(), s.shape)
    return out(softmax(jax.lax.select(mask, s, jnp.full_like(s, -1e10))), v)


def causal_iota(q, k, v):
    shape = (1, 1, T, T)
    i, j = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (2, 3))
    return masked(i >= j, q, k, v, LOWEST)


def causal_triu(q, k, v):
    return masked(jnp.triu(jnp.ones((T, T), bool), 1) == 0, q, k, v)


def causal_minus_infinity_added(q, k, v):
    return added(jnp.triu(jnp.full((T, T), -jnp.inf), k=1), q, k, v)


def causal_one_minus_tril(q, k, v):
    return added((1.0 - jnp.tril(jnp.ones((T, T)))) * -1e9, q, k, v)


def causal_multiplied_and_subtracted(q, k, v):
    b = jnp.tril(jnp.ones((T, T)))[None, None]
    return out(softmax(scores(q, k) * b - 1e10 * (1 - b), -1), v)


def causal_half_lowest(q, k, v):
    return masked(tri(), q, k, v, jnp.finfo(q.dtype).min)


def causal_half_lowest_over_two(q, k, v):
    return added(jnp.where(tri(), 0.0, 0.5 * jnp.finfo(q.dtype).min).astype(q.dtype), q, k, v)


def causal_numpy_constant(q, k, v):
    return masked(COL <= ROW, q, k, v)


def causal_slice_of_cached(q, k, v):
    whole = jnp.tril(jnp.ones((1, 1, 4 * T, 4 * T), bool))
    return masked(whole[:, :, :T, :T], q, k, v)


def causal_dynamic_slice_of_cached(q, k, v):
    whole = jnp.tril(jnp.ones((1, 1, 4 * T, 4 * T), bool))
    return masked(jax.lax.dynamic_slice(whole, (0, 0, 0, 0), (1, 1, T, T)), q, k, v)


def causal_logical_not_at(q, k, v):
    s = scores(q, k)
    return out(softmax(s.at[..., ROW < COL].set(-1e9), -1), v)


def causal_softmax_where(q, k, v):
    return out(softmax(scores(q, k), -1, where=tri()), v)


def causal_positions(q, k, v, positions):
    mask = positions[:, None, :, None] >= positions[:, None, None, :]
    return masked(mask, q, k, v)


def mask_passed_in(q, k, v, mask):
    return masked(mask, q, k, v, LOWEST)


def additive_mask_passed_in(q, k, v, mask):
    return added(mask, q, k, v)


def integer_mask_passed_in(q, k, v, mask):
    return masked(mask[:, None, None, :] == 1, q, k, v, -1e9)


def float_padding_as_bias(q, k, v, mask):
    return added((1.0 - mask[:, None, None, :]) * -1e9, q, k, v)


def float_padding_lowest(q, k, v, mask):
    return added((1.0 - mask[:, None, None, :]) * LOWEST, q, k, v)


def padding_multiplied_weights(q, k, v, mask):
    w = softmax(scores(q, k), -1) * mask[:, None, None, :]
    return out(w / w.sum(-1, keepdims=True), v)


def exp_times_mask(q, k, v):
    e = jnp.exp(scores(q, k)) * tri()
    return out(e / e.sum(-1, keepdims=True), v)


def where_after_softmax(q, k, v):
    w = softmax(jnp.where(tri(), scores(q, k), -1e30), -1)
    return out(jnp.where(tri(), w, 0.0), v)


def lengths_and_causal(q, k, v, lengths):
    seen = (jnp.arange(T) < lengths[:, None])[:, None, None, :]
    return masked(jnp.logical_and(tri(), seen), q, k, v)


def lengths_and_causal_two_wheres(q, k, v, lengths):
    seen = (jnp.arange(T) < lengths[:, None])[:, None, None, :]
    s = jnp.where(seen, jnp.where(tri(), scores(q, k), -1e9), -1e9)
    return out(softmax(s, -1), v)


def tokens_not_padding(q, k, v, tokens):
    return masked((tokens != 0)[:, None, None, :], q, k, v)


def outer_padding(q, k, v, mask):
    return masked(mask[:, None, :, None] * mask[:, None, None, :], q, k, v, -1e9)


def segments(q, k, v, ids):
    return masked((ids[:, :, None] == ids[:, None, :])[:, None] & tri(), q, k, v)


def segments_additive(q, k, v, ids):
    same = ids[:, None, :, None] == ids[:, None, None, :]
    return added(jnp.where(same, 0.0, -1e10), q, k, v)


def window(q, k, v):
    distance = jnp.arange(T)[:, None] - jnp.arange(T)[None, :]
    return masked((distance >= 0) & (distance < 4), q, k, v)


def window_by_triu(q, k, v):
    ones = jnp.ones((1, 1, T, T), bool)
    return masked(jnp.triu(ones, -3) * jnp.tril(ones, 3), q, k, v)


def prefix_language_model(q, k, v):
    return masked(tri() | (jnp.arange(T)[None, :] < 5), q, k, v)


def prefix_lengths(q, k, v, lengths):
    prefix = jnp.arange(T)[None, None, None, :] < lengths[:, None, None, None]
    return masked(tri() | prefix, q, k, v)


def block_sparse(q, k, v):
    return masked((ROW // 4 == COL // 4) | (COL % 4 == 3), q, k, v)


def alibi(q, k, v):
    slopes = 2.0 ** -jnp.arange(1, H + 1)
    bias = slopes[:, None, None] * (jnp.arange(T)[None, :] - jnp.arange(T)[:, None])
    return out(softmax(jnp.where(tri(), scores(q, k) + bias, -1e9), -1), v)


def alibi_key_positions(q, k, v):
    slopes = (2.0 ** -np.arange(1, H + 1)).astype(np.float32)
    return added(slopes[:, None, None] * np.arange(T, dtype=np.float32) + (~tri() * -1e9), q, k, v)


def t5_bias(q, k, v, table):
    bucket = jnp.clip(COL - ROW, -8, 7) + 8
    bias = jnp.take(table, bucket, axis=0).transpose(2, 0, 1)[None]
    return out(softmax(einsum("bthd,bshd->bhts", q, k) + bias, -1), v)


def swin_bias(q, k, v, table):
    bias = table[(COL - ROW + T - 1).reshape(-1)].reshape(T, T, H)
    return added(einsum("tsh->hts", bias), q, k, v)


def shaw_relative(q, k, v, embedding):
    relative = einsum("bthd,tsd->bhts", q, embedding[COL - ROW + T - 1])
    return out(softmax((scores(q, k) + relative) / 2, -1), v)


def pair_bias(q, k, v, pair, weights):
    return added(einsum("bijc,ch->bhij", pair, weights), q, k, v)


def gated(q, k, v, gate):
    return out(softmax(scores(q, k), -1), v) * jax.nn.sigmoid(gate)


def softcap(q, k, v):
    s = 50.0 * jnp.tanh(scores(q, k) / 50.0)
    return out(softmax(jnp.where(tri(), s, -2.3819763e38), -1), v)


def sink(q, k, v, sinks):
    s = scores(q, k)
    sinks = jnp.broadcast_to(sinks[None, :, None, None], (B, H, T, 1))
    w = softmax(jnp.concatenate([s, sinks], -1), -1)[..., :-1]
    return out(w, v)


def softmax_plus_one(q, k, v):
    e = jnp.exp(scores(q, k))
    return out(e / (1.0 + e.sum(-1, keepdims=True)), v)


FLOATS_BS = f"f32[{B},{T}]"
PRODUCT_MASK = "multiplied by an array, which is not masking"

MASKS = (
    Spelling(causal_where, "Equinox"),
    Spelling(causal_lax_select, "flax.linen, older releases"),
    Spelling(causal_iota, "MaxText"),
    Spelling(causal_triu, "Annotated Transformer"),
    Spelling(causal_minus_infinity_added, "torch.nn.Transformer ports"),
    Spelling(causal_one_minus_tril, "TensorFlow tutorials, ported"),
    Spelling(
        causal_multiplied_and_subtracted,
        "OpenAI GPT-2",
        reason="multiplied by an array, which is not masking",
        wanted=True,
    ),
    Spelling(causal_half_lowest, "Hugging Face, bfloat16", HALF),
    Spelling(causal_half_lowest_over_two, "T5X, Big Vision", HALF),
    Spelling(causal_numpy_constant, "Haiku examples"),
    Spelling(causal_slice_of_cached, "nanoGPT's buffer"),
    Spelling(causal_dynamic_slice_of_cached, "Hugging Face FlaxGPT2"),
    Spelling(
        causal_logical_not_at,
        "torch masked_fill_, ported",
        reason="not made from a product of queries and keys",
        wanted=True,
    ),
    Spelling(causal_softmax_where, "jax.nn.softmax(where=)", reason="", wanted=True),
    Spelling(causal_positions, "Gemma, positions given", (*QKV, TOKENS)),
    Spelling(mask_passed_in, "mask built outside", (*QKV, BOOL_TS)),
    Spelling(additive_mask_passed_in, "Hugging Face attention_bias", (*QKV, f"f32[{T},{T}]")),
    Spelling(integer_mask_passed_in, "Hugging Face attention_mask", (*QKV, TOKENS)),
    Spelling(float_padding_as_bias, "BERT", (*QKV, FLOATS_BS)),
    Spelling(float_padding_lowest, "Hugging Face, float mask", (*QKV, FLOATS_BS)),
    Spelling(
        padding_multiplied_weights,
        "renormalised by hand",
        (*QKV, FLOATS_BS),
        reason="",
        wanted=True,
    ),
    Spelling(exp_times_mask, "linear-attention references", reason="", wanted=True),
    Spelling(where_after_softmax, "AlphaFold, xFormers references", reason="", wanted=True),
    Spelling(lengths_and_causal, "seq2seq", (*QKV, LENGTHS)),
    Spelling(lengths_and_causal_two_wheres, "seq2seq, masked twice", (*QKV, LENGTHS)),
    Spelling(tokens_not_padding, "BERT tutorials", (*QKV, TOKENS)),
    Spelling(outer_padding, "flax make_attention_mask", (*QKV, BOOL_BS)),
    Spelling(segments, "T5X packing", (*QKV, TOKENS)),
    Spelling(segments_additive, "MaxText packing", (*QKV, TOKENS)),
    Spelling(window, "Mistral"),
    Spelling(window_by_triu, "Gemma local layers"),
    Spelling(prefix_language_model, "PaliGemma, fixed prefix"),
    Spelling(prefix_lengths, "PaliGemma", (*QKV, LENGTHS)),
    Spelling(block_sparse, "Sparse Transformer"),
    Spelling(alibi, "BLOOM, MPT"),
    Spelling(alibi_key_positions, "ALiBi, keys' positions"),
    Spelling(t5_bias, "T5", (*QKV, f"f32[16,{H}]")),
    Spelling(swin_bias, "Swin", (*QKV, f"f32[{2 * T},{H}]")),
    Spelling(
        shaw_relative,
        "Shaw et al., Transformer-XL",
        (*QKV, f"f32[{2 * T},{D}]"),
        reason="both operands of add come from matrix products",
        wanted=True,
    ),
    Spelling(
        pair_bias,
        "Evoformer",
        (*QKV, f"f32[{B},{T},{T},3]", f"f32[3,{H}]"),
        reason="both operands of add come from matrix products",
        wanted=True,
    ),
    Spelling(gated, "gated attention output", (*QKV, BTHD)),
    Spelling(softcap, "Gemma 2", reason="go through tanh", wanted=True),
    Spelling(sink, "gpt-oss", (*QKV, f"f32[{H}]"), reason="", wanted=True),
    Spelling(softmax_plus_one, "softmax-one", reason="", wanted=True),
)
