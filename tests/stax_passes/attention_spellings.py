# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Attention as people write it: orders of axes, scales, softmaxes, dtypes and grouped heads.

A row names whose code looks like that, and carries today's verdict.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

B, T, H, K, D = 2, 16, 4, 2, 8
BTHD, BTKD = f"f32[{B},{T},{H},{D}]", f"f32[{B},{T},{K},{D}]"
BHTD = f"f32[{B},{H},{T},{D}]"
QKV = (BTHD,) * 3
GROUPED = (BTHD, BTKD, BTKD)
HEADS_FIRST = (BHTD,) * 3
HALF = (BTHD.replace("f32", "bf16"),) * 3
einsum, softmax = jnp.einsum, jax.nn.softmax


@dataclass(frozen=True)
class Spelling:
    """One way to write attention, or nearly, and what the compiler makes of it today."""

    fn: Callable[..., Any]
    source: str
    """Whose code looks like that."""
    args: tuple[str, ...] = QKV
    reason: str | None = None
    """None: found. Else left as written, with these words in a near miss; empty: silently."""
    wanted: bool = False
    """Whether it ought to be found although today it is not."""
    count: int = 1
    """How many operators are found."""


def scores(q: Any, k: Any) -> Any:
    """Returns the scaled scores of queries and keys [B, tokens, heads, width]."""
    return einsum("bthd,bshd->bhts", q, k) * D**-0.5


def out(w: Any, v: Any) -> Any:
    """Returns the weighted values."""
    return einsum("bhts,bshd->bthd", w, v)


def tri(t: int = T, s: int = T) -> Any:
    """Returns the lower triangle."""
    return jnp.tril(jnp.ones((t, s), bool))


def matmul_heads_first(q, k, v):
    return softmax(q @ k.transpose(0, 1, 3, 2) / np.sqrt(D), axis=-1) @ v


def matmul_of_moved_axes(q, k, v):
    q, k, v = (jnp.moveaxis(x, 2, 1) for x in (q, k, v))
    w = softmax(jnp.matmul(q, jnp.swapaxes(k, -2, -1)) / D**0.5)
    return jnp.swapaxes(jnp.matmul(w, v), 1, 2)


def keys_before_queries(q, k, v):
    w = softmax(einsum("bshd,bthd->bhts", k, q) / np.sqrt(D), -1)
    return einsum("bshd,bhts->bthd", v, w)


def heads_last_scores(q, k, v):
    w = softmax(einsum("bthd,bshd->btsh", q, k) * D**-0.5, axis=2)
    return einsum("btsh,bshd->bthd", w, v)


def keys_in_front(q, k, v):
    w = softmax(einsum("bthd,bshd->sbht", q, k) * D**-0.5, axis=0)
    return einsum("sbht,bshd->bthd", w, v)


def time_major(q, k, v):
    w = softmax(einsum("tbhd,sbhd->bhts", q, k) * D**-0.5, -1)
    return einsum("bhts,sbhd->tbhd", w, v)


def dot_general_of_merged_batch(q, k, v):
    q, k, v = (x.transpose(0, 2, 1, 3).reshape(B * H, T, D) for x in (q, k, v))
    s = jax.lax.dot_general(q, k, (((2,), (2,)), ((0,), (0,)))) * D**-0.5
    o = jax.lax.dot_general(softmax(s, -1), v, (((2,), (1,)), ((0,), (0,))))
    return o.reshape(B, H, T, D).transpose(0, 2, 1, 3)


def projections_inside(x, w_qkv, w_out):
    q, k, v = (t.reshape(B, T, H, D) for t in jnp.split(x @ w_qkv, 3, axis=-1))
    return out(softmax(scores(q, k), -1), v).reshape(B, T, H * D) @ w_out


def three_stacked_projections(x, w_qkv, w_out):
    q, k, v = einsum("btm,cmhd->cbthd", x, w_qkv)
    return einsum("bthd,hdm->btm", out(softmax(scores(q, k), -1), v), w_out)


def values_projected_with_output(q, k, v, w_out):
    return einsum("bhts,bshd,hdm->btm", softmax(scores(q, k), -1), v, w_out)


def one_sequence(q, k, v):
    w = softmax(einsum("thd,shd->hts", q, k) / np.sqrt(D), axis=-1)
    return einsum("hts,shd->thd", w, v)


def one_head(q, k, v):
    return softmax(q @ k.T / jnp.sqrt(k.shape[-1]), axis=-1) @ v


def single_head_block(q, k, v):
    return softmax(q @ k.transpose(0, 2, 1) * D**-0.5, -1) @ v


def tensordot_one_head(q, k, v):
    s = jnp.tensordot(q, k, axes=((1,), (1,))) / np.sqrt(D)
    return jnp.tensordot(softmax(s), v, axes=1)


def scale_by_traced_root(q, k, v):
    s = einsum("bthd,bshd->bhts", q, k) / jnp.sqrt(jnp.array(q.shape[-1], q.dtype))
    return out(softmax(s, -1), v)


def scale_by_rsqrt(q, k, v):
    return out(softmax(einsum("bthd,bshd->bhts", q, k) * jax.lax.rsqrt(float(D)), -1), v)


def query_divided(q, k, v):
    q = q / jnp.sqrt(D).astype(q.dtype)
    return out(softmax(einsum("...qhd,...khd->...hqk", q, k), -1), v)


def root_on_both(q, k, v):
    root = D**-0.25
    return out(softmax(einsum("bthd,bshd->bhts", q * root, k * root), -1), v)


def scale_in_weights_of_query(q, k, v):
    return out(softmax(einsum("bthd,bshd->bhts", q, k), -1), v)


def learned_temperature(q, k, v, temperature):
    return out(softmax(scores(q, k) * temperature, -1), v)


def learned_head_temperature(q, k, v, temperature):
    return out(softmax(scores(q, k) * temperature[:, None, None], -1), v)


def normalised_query_and_key(q, k, v, g, b):
    def norm(x, scale):
        return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale

    return out(softmax(scores(norm(q, g), norm(k, b)), -1), v)


def stable_by_hand(q, k, v):
    s = scores(q, k)
    e = jnp.exp(s - jax.lax.stop_gradient(s.max(-1, keepdims=True)))
    return out(e / e.sum(-1, keepdims=True), v)


def exp_over_sum(q, k, v):
    e = jnp.exp(scores(q, k))
    return out(e / jnp.sum(e, -1)[..., None], v)


def divided_after_the_values(q, k, v):
    s = scores(q, k)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return out(e, v) / e.sum(-1).transpose(0, 2, 1)[..., None]


def multiplied_by_reciprocal(q, k, v):
    e = jnp.exp(scores(q, k))
    return out(e * (1.0 / e.sum(-1, keepdims=True)), v)


def exp_of_log_softmax(q, k, v):
    return out(jnp.exp(jax.nn.log_softmax(scores(q, k), -1)), v)


def exp_minus_logsumexp(q, k, v):
    s = scores(q, k)
    return out(jnp.exp(s - jax.nn.logsumexp(s, -1, keepdims=True)), v)


def sum_with_epsilon(q, k, v):
    s = scores(q, k)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return out(e / (e.sum(-1, keepdims=True) + 1e-9), v)


def upcast_scores(q, k, v):
    s = einsum("bthd,bshd->bhts", q, k).astype(jnp.float32) * D**-0.5
    return out(softmax(s, -1).astype(v.dtype), v)


def upcast_operands(q, k, v):
    wide = (x.astype(jnp.float32) for x in (q, k))
    return out(softmax(scores(*wide), -1), v.astype(jnp.float32)).astype(q.dtype)


def accumulated_in_float32(q, k, v):
    s = einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32) * D**-0.5
    w = softmax(s, -1).astype(q.dtype)
    return einsum("bhts,bshd->bthd", w, v, preferred_element_type=jnp.float32).astype(q.dtype)


def half_probabilities(q, k, v):
    w = softmax(scores(q, k).astype(jnp.float32), -1).astype(jnp.bfloat16)
    return out(w, v.astype(jnp.bfloat16)).astype(q.dtype)


def highest_precision(q, k, v):
    s = einsum("bthd,bshd->bhts", q, k, precision="highest") * D**-0.5
    return out(softmax(s, -1), v)


def grouped_by_repeat(q, k, v):
    k, v = jnp.repeat(k, H // K, axis=2), jnp.repeat(v, H // K, axis=2)
    return out(softmax(scores(q, k), -1), v)


def grouped_by_broadcast(q, k, v):
    def widen(x):
        x = jnp.broadcast_to(x[:, :, :, None, :], (B, T, K, H // K, D))
        return x.reshape(B, T, H, D)

    return out(softmax(scores(q, widen(k)), -1), widen(v))


def grouped_heads_first(q, k, v):
    k, v = (
        jnp.tile(x.transpose(0, 2, 1, 3)[:, :, None], (1, 1, H // K, 1, 1)).reshape(B, H, T, D)
        for x in (k, v)
    )
    w = softmax(q.transpose(0, 2, 1, 3) @ k.swapaxes(2, 3) * D**-0.5, -1)
    return (w @ v).transpose(0, 2, 1, 3)


def grouped_by_einsum(q, k, v):
    q = q.reshape(B, T, K, H // K, D)
    w = softmax(einsum("btkgd,bskd->bkgts", q, k) * D**-0.5, -1)
    return einsum("bkgts,bskd->btkgd", w, v).reshape(B, T, H, D)


def grouped_group_first(q, k, v):
    q = q.reshape(B, T, H // K, K, D)
    w = softmax(einsum("btgkd,bskd->bgkts", q, k) * D**-0.5, -1)
    return einsum("bgkts,bskd->btgkd", w, v).reshape(B, T, H, D)


def grouped_by_tile(q, k, v):
    k, v = jnp.tile(k, (1, 1, H // K, 1)), jnp.tile(v, (1, 1, H // K, 1))
    return out(softmax(scores(q, k), -1), v)


def grouped_by_take(q, k, v):
    which = np.arange(H) // (H // K)
    return out(softmax(scores(q, k[:, :, which]), -1), v[:, :, which])


def multi_query(q, k, v):
    w = softmax(einsum("bthd,bsd->bhts", q, k[:, :, 0]) * D**-0.5, -1)
    return einsum("bhts,bsd->bthd", w, v[:, :, 0])


def cross(q, k, v):
    return out(softmax(scores(q, k), -1), v)


def latent_two_products(q, k, v, q_rope, k_rope):
    s = einsum("bthd,bshd->bhts", q, k) + einsum("bthr,bsr->bhts", q_rope, k_rope)
    return out(softmax(s * (D + 4) ** -0.5, -1), v)


def latent_concatenated(q, k, v, q_rope, k_rope):
    k_rope = jnp.broadcast_to(k_rope[:, :, None], (B, T, H, 4))
    q, k = jnp.concatenate([q, q_rope], -1), jnp.concatenate([k, k_rope], -1)
    return out(softmax(scores(q, k), -1), v)


SHORT = f"f32[{B},5,{H},{D}]"
ROW, MODEL = f"f32[{B},{T},{H * D}]", H * D
ROPE = (f"f32[{B},{T},{H},4]", f"f32[{B},{T},4]")
NO_PRODUCT = "not made from a product"

PLAIN = (
    Spelling(matmul_heads_first, "The Annotated Transformer, ported", HEADS_FIRST),
    Spelling(matmul_of_moved_axes, "Hugging Face torch code, ported"),
    Spelling(keys_before_queries, "T5X, operands swapped"),
    Spelling(heads_last_scores, "Tensor2Tensor variants"),
    Spelling(keys_in_front, "Mesh TensorFlow, ported"),
    Spelling(time_major, "fairseq, ported", (f"f32[{T},{B},{H},{D}]",) * 3),
    Spelling(dot_general_of_merged_batch, "torch.bmm code, ported"),
    Spelling(projections_inside, "nanoGPT", (ROW, f"f32[{MODEL},{3 * MODEL}]", "f32[32,32]")),
    Spelling(three_stacked_projections, "Gemma", (ROW, "f32[3,32,4,8]", "f32[4,8,32]")),
    Spelling(values_projected_with_output, "einsum tutorials", (*QKV, "f32[4,8,32]")),
    Spelling(one_sequence, "Haiku, before vmap", (f"f32[{T},{H},{D}]",) * 3),
    Spelling(one_head, "lecture notes", (f"f32[{T},{D}]",) * 3),
    Spelling(single_head_block, "diffusion U-Nets", (f"f32[{B},{T},{D}]",) * 3),
    Spelling(tensordot_one_head, "NumPy code, ported", (f"f32[{T},{D}]",) * 3),
    Spelling(scale_by_traced_root, "Flax BERT"),
    Spelling(scale_by_rsqrt, "GPT-J"),
    Spelling(query_divided, "flax.linen.dot_product_attention_weights"),
    Spelling(root_on_both, "OpenAI Whisper and guided diffusion"),
    Spelling(scale_in_weights_of_query, "T5"),
    Spelling(
        learned_temperature,
        "CLIP-like heads",
        (*QKV, "f32[]"),
        reason="multiplied by a traced value",
        wanted=True,
    ),
    Spelling(
        learned_head_temperature,
        "Swin V2",
        (*QKV, "f32[4]"),
        reason="multiplied by an array, which is not masking",
        wanted=True,
    ),
    Spelling(normalised_query_and_key, "Qwen3, OLMo 2", (*QKV, "f32[8]", "f32[8]")),
    Spelling(stable_by_hand, "minGPT-like JAX ports"),
    Spelling(exp_over_sum, "lecture notes"),
    Spelling(divided_after_the_values, "FlashAttention references", reason="", wanted=True),
    Spelling(multiplied_by_reciprocal, "hand-tuned kernels' references", reason="", wanted=True),
    Spelling(exp_of_log_softmax, "Trax", reason="", wanted=True),
    Spelling(exp_minus_logsumexp, "Reformer", reason="", wanted=True),
    Spelling(sum_with_epsilon, "NumPy transformers", reason="", wanted=True),
    Spelling(upcast_scores, "Llama", HALF),
    Spelling(upcast_operands, "GPT-J", HALF),
    Spelling(accumulated_in_float32, "MaxText", HALF),
    Spelling(half_probabilities, "mixed precision by hand"),
    Spelling(highest_precision, "AlphaFold 3", reason="asks for precision"),
    Spelling(grouped_by_repeat, "Llama in JAX", GROUPED),
    Spelling(grouped_by_broadcast, "Hugging Face repeat_kv", GROUPED),
    Spelling(grouped_heads_first, "Mistral ports", GROUPED),
    Spelling(grouped_by_einsum, "Gemma", GROUPED),
    Spelling(grouped_group_first, "grouped queries, group outside", GROUPED),
    Spelling(grouped_by_tile, "grouped queries, group outside", GROUPED),
    Spelling(grouped_by_take, "heads gathered by index", GROUPED),
    Spelling(multi_query, "PaLM", GROUPED),
    Spelling(cross, "encoder-decoder", (SHORT, BTHD, BTHD)),
    Spelling(
        latent_two_products,
        "DeepSeek V2, two products",
        (*QKV, *ROPE),
        reason="both operands of add come from matrix products",
        wanted=True,
    ),
    Spelling(latent_concatenated, "DeepSeek V2, concatenated", (*QKV, *ROPE)),
)
