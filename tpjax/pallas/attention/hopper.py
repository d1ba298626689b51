# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Attention on Hopper GPUs: the kernels of `forward` and `backward` as one differentiable call."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from tpjax.core.operator import Key
from tpjax.pallas._mgpu import causal_is_miscompiled
from tpjax.pallas.attention.arguments import Operands, Options
from tpjax.pallas.attention.backward import launch_backward
from tpjax.pallas.attention.blocks import Region
from tpjax.pallas.attention.config import CONFIGS, heuristic, widths
from tpjax.pallas.attention.extras import Extras
from tpjax.pallas.attention.forward import launch_forward
from tpjax.pallas.attention.fused import fits, launch_fused
from tpjax.pallas.attention.scores import Plan
from tpjax.pallas.dispatch import current_target
from tpjax.pallas.tuning import config_for

DTYPES = ("bfloat16", "float16")
FEATURES = (32, 256)
"""The least and the most features of a head."""
MAX_SIZE = 2**31 - 1
"""Elements of an operand: kernels count in 32 bits."""
MAX_SOFTCAP = 2**12
"""A tanh good to 22 bits gives scores to 10 then, as good as the weights."""
OUT_NAME, LSE_NAME = "flash_attention_out", "flash_attention_lse"
"""Names under which a rematerialisation policy can keep what the backward pass needs."""


class Residuals(NamedTuple):
    """What the backward pass needs of the forward pass."""

    query: Array
    key: Array
    value: Array
    extras: Extras
    out: Array
    lse: Array


def unsupported(key: Key) -> str | None:
    """Returns why the kernels cannot run a call, or None."""
    query, value = key.aval("query"), key.aval("value")
    if str(query.dtype) not in DTYPES:
        return f"its dtype is {query.dtype}; the kernel, which rounds no input, takes " + (
            " and ".join(DTYPES)
        )
    least, most = FEATURES
    for name, x in (("queries", query), ("values", value)):
        if not least <= x.shape[-1] <= most:
            return f"its {name} have {x.shape[-1]} features; the kernel takes {least} to {most}"
    for name, size in _sizes(key).items():
        if size > MAX_SIZE:
            return f"its {name} has more than {MAX_SIZE} elements; the kernel counts in 32 bits"
    if (softcap := key.option("softcap")) is not None and softcap > MAX_SOFTCAP:
        return f"its softcap is above {MAX_SOFTCAP}, for which the kernel's tanh has too few digits"
    if key.aval("key").shape[1] == 1 and (key.given("bias") or key.given("mask")):
        return "it has a bias or mask for a single key, which the kernel does not take"
    if key.option("is_causal") and causal_is_miscompiled():
        return "it is causal, and CUDA before 12.9.1 miscompiles that; a newer CUDA mends it"
    return None


def _sizes(key: Key) -> dict[str, int]:
    """Returns how many elements the kernels count in each array, out and padding too."""
    query, value = key.aval("query"), key.aval("value")
    wide, value_wide = widths(query.shape[-1], value.shape[-1])
    features = {"query": wide, "key": wide, "value": value_wide}
    sizes = {n: math.prod(key.aval(n).shape[:-1]) * wide for n, wide in features.items()}
    given = (name for name in ("bias", "mask") if key.given(name))
    sizes |= {name: math.prod(key.aval(name).shape) for name in given}
    return sizes | {"output": math.prod(query.shape[:-1]) * value_wide}


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(
    query: Array, key: Array, value: Array, extras: Extras, plan: Plan
) -> tuple[Array, Array, Array | None]:
    return launch_forward(query, key, value, extras, plan)


def _attend_forward(
    query: Array, key: Array, value: Array, extras: Extras, plan: Plan
) -> tuple[tuple[Array, Array, Array | None], Residuals]:
    out, lse, top = launch_forward(query, key, value, extras, plan)
    out, lse = checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)
    return (out, lse, top), Residuals(query, key, value, extras, out, lse)


def _attend_backward(plan: Plan, residuals: Residuals, cotangents: Any) -> tuple[Any, ...]:
    dout, dlse, _ = cotangents
    dlse = jnp.where(residuals.lse == -jnp.inf, 0, dlse)  # that of infinity may be NaN
    wide, value_wide = residuals.query.shape[-1], residuals.value.shape[-1]
    fused = not plan.deterministic and fits(residuals.extras, wide, value_wide)
    return (launch_fused if fused else launch_backward)(*residuals, dout, dlse, plan)


_attend.defvjp(_attend_forward, _attend_backward)


def attend_hopper(*operands: Array | None, **options: Any) -> Array | tuple[Array, ...]:
    """Returns attention [B, T, H, V], then lse and max as asked for, of `Operands` and `Options`.

    The call is one that `unsupported` lets pass.
    """
    given, asked = Operands(*operands).cut(), Options(**options)  # pyright: ignore[reportArgumentType]
    region = Region(
        given.query.shape[1],
        given.key.shape[1],
        asked.is_causal,
        asked.local_window_size,
        asked.alignment == "bottom_right",
    )
    wide, value_wide = widths(given.query.shape[-1], given.value.shape[-1])
    query, key = (_widened(x, wide) for x in (given.query, given.key))
    value = _widened(given.value, value_wide)
    extras = _extras(given, region)
    # The backward pass is traced later, perhaps outside of `tpjax.use`: the plan keeps the choice.
    interpret = current_target().interpret
    dense = any(x is not None for x in (extras.bias, extras.mask))
    shapes = query.shape, key.shape, value.shape, query.dtype.name, region, dense
    guess = heuristic(wide, value_wide, max(query.shape[1], key.shape[1]), dense, interpret)
    config = config_for("flash_attention", shapes, CONFIGS[wide, value_wide], guess)
    plan = Plan(
        region, asked.scale, asked.softcap, asked.return_max, asked.deterministic, config, interpret
    )
    out, lse, top = _attend(query, key, value, extras, plan)
    results = [out[..., : given.value.shape[-1]]]
    if asked.return_lse:
        results.append(lse.swapaxes(1, 2))
    if top is not None:
        results.append(jax.lax.stop_gradient(top).swapaxes(1, 2))
    return tuple(results) if len(results) > 1 else results[0]


def _widened(x: Array, features: int) -> Array:
    """Returns the array with zeros up to so many features: they change no product."""
    short = features - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, short)]) if short else x


def _extras(given: Operands, region: Region) -> Extras:
    batch, scores = given.query.shape[0], (region.num_queries, region.num_keys)

    def like_scores(x: Array | None, dtype: Any) -> Array | None:
        if x is None:
            return None
        if x.shape[2:] == (1, 1) and scores != (1, 1):
            x = jnp.broadcast_to(x, (*x.shape[:3], region.num_keys))
        return x.astype(dtype)

    lengths = given.query_seq_lengths, given.key_value_seq_lengths, given.prefix_lengths
    bounds = None
    if any(x is not None for x in lengths):
        zero = jnp.zeros(batch, jnp.int32)
        numbers = region.bounds(*lengths)
        bounds = jnp.stack([zero if x is None else zero + x for x in numbers], 1)
    query_ids, key_ids = given.query_segment_ids, given.key_value_segment_ids
    bias, narrow = given.bias, jnp.float32
    if bias is not None and bias.dtype.itemsize <= 2:
        narrow = bias.dtype
    slopes, sinks = (
        None if x is None else x.astype(jnp.float32) for x in (given.alibi_slopes, given.sinks)
    )
    mask = like_scores(given.mask, jnp.int8)
    return Extras(like_scores(bias, narrow), mask, bounds, query_ids, key_ids, slopes, sinks)
