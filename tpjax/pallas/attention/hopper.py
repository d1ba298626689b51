# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Attention on Hopper GPUs: the kernels of `forward` and `backward` as one differentiable call."""

from functools import partial
from typing import NamedTuple

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from tpjax.core.operator import Key
from tpjax.pallas._mgpu import causal_is_miscompiled
from tpjax.pallas.attention.backward import launch_backward
from tpjax.pallas.attention.config import CONFIGS, heuristic
from tpjax.pallas.attention.forward import Plan, launch_forward
from tpjax.pallas.dispatch import current_target
from tpjax.pallas.tuning import config_for

DTYPES = ("bfloat16", "float16")
ABSENT = (
    "bias",
    "mask",
    "query_seq_lengths",
    "key_value_seq_lengths",
    "prefix_lengths",
    "query_segment_ids",
    "key_value_segment_ids",
    "alibi_slopes",
    "sinks",
)
ABSENT_OPTIONS = {
    "local_window_size": None,
    "alignment": "top_left",
    "softcap": None,
    "return_lse": False,
    "return_max": False,
}
OUT_NAME, LSE_NAME = "flash_attention_out", "flash_attention_lse"
"""Names under which a rematerialisation policy can keep what the backward pass needs."""


class Residuals(NamedTuple):
    """What the backward pass needs of the forward pass."""

    query: Array
    key: Array
    value: Array
    out: Array
    lse: Array


def unsupported(key: Key) -> str | None:
    """Returns why the kernels cannot run a call, or None."""
    for name in ABSENT:
        if key.given(name):
            return f"it has {name}, which the kernel does not take"
    for name, without in ABSENT_OPTIONS.items():
        if key.option(name) != without:
            return f"it has {name}, which the kernel does not take"
    if key.aval("query").shape[-1] != key.aval("value").shape[-1]:
        return "its values are of another width than its keys, which the kernel does not take"
    query = key.aval("query")
    if str(query.dtype) not in DTYPES:
        return f"its dtype is {query.dtype}; the kernel takes {' and '.join(DTYPES)}"
    features = query.shape[-1]
    if features not in CONFIGS:
        sizes = " or ".join(map(str, CONFIGS))
        return f"its heads have {features} features; the kernel takes {sizes}"
    if key.option("scale") <= 0:
        return f"its scale is {key.option('scale'):g}; the kernel takes scales above zero"
    if key.option("is_causal") and causal_is_miscompiled():
        return "it is causal, and CUDA before 12.9.1 miscompiles that; a newer CUDA mends it"
    return None


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _attend(query: Array, key: Array, value: Array, plan: Plan) -> Array:
    return launch_forward(query, key, value, plan)[0]


def _attend_forward(query: Array, key: Array, value: Array, plan: Plan) -> tuple[Array, Residuals]:
    out, lse = launch_forward(query, key, value, plan)
    out, lse = checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)
    return out, Residuals(query, key, value, out, lse)


def _attend_backward(plan: Plan, residuals: Residuals, dout: Array) -> tuple[Array, Array, Array]:
    return launch_backward(*residuals, dout, plan)


_attend.defvjp(_attend_forward, _attend_backward)


def attend_hopper(
    query: Array,
    key: Array,
    value: Array,
    bias: None,
    mask: None,
    query_seq_lengths: None,
    key_value_seq_lengths: None,
    prefix_lengths: None,
    query_segment_ids: None,
    key_value_segment_ids: None,
    alibi_slopes: None,
    sinks: None,
    *,
    scale: float,
    is_causal: bool,
    local_window_size: None,
    alignment: str,
    softcap: None,
    return_lse: bool,
    return_max: bool,
    deterministic: bool,
) -> Array:
    """Returns attention [B, T, H, D] of operands that `unsupported` lets pass."""
    # The backward pass is traced later, perhaps outside of `tpjax.use`: the plan keeps the choice.
    interpret = current_target().interpret
    features = query.shape[-1]
    shapes = query.shape, key.shape, query.dtype.name, is_causal
    guess = heuristic(features, query.shape[1], key.shape[1], interpret)
    config = config_for("flash_attention", shapes, CONFIGS[features], guess)
    return _attend(query, key, value, Plan(scale, is_causal, config, interpret))
