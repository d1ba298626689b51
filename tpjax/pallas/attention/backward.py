# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The backward kernels of attention for Hopper GPUs: one for query, one for key and value.

    p = exp(score - lse)                       delta = rowsum(out dout) - dlse
    ds = p (dout value^T - delta)              dx = ds dscore/dx, x = scale query key^T
    dquery = scale dx key      dkey = scale dx^T query      dvalue = p^T dout

Each kernel forms the scores again. No two blocks of threads add to one result, so it has the same
bits on every run: a tile of keys gathers from the queries of all heads of its group, in order.

Letters and work split as in `forward`. Numerics: scores, p, ds and accumulation float32; p and dx
are rounded to the dtype of the operands for the products.

Source: Dao 2023 (FlashAttention-2), algorithm 2.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from tpjax.pallas.attention.backward_bias import BIAS_ROWS, bias_gradient
from tpjax.pallas.attention.backward_key_value import key_value_gradient
from tpjax.pallas.attention.backward_query import query_gradient
from tpjax.pallas.attention.config import ROWS
from tpjax.pallas.attention.cotangents import better_delta, cotangents_of
from tpjax.pallas.attention.extras import Extras, pad_tokens
from tpjax.pallas.attention.scores import Plan


@partial(jax.jit, static_argnames="plan")
def launch_backward(
    query: Array, key: Array, value: Array, extras: Extras, out: Array, lse: Array, dout: Array,
    dlse: Array, plan: Plan,
) -> tuple[Array, Array, Array, Extras]:  # fmt: skip
    """Returns the gradients of query, key, value and of what is floating in `extras`.

    Args:
      query, key, value, extras, plan: as in the forward pass.
      out, lse: what it returned.
      dout, dlse: cotangents of these.
    """
    # Copies along one axis are not cut off at its end: the lines have room for every tile.
    room = math.lcm(plan.config.dq_warpgroups * ROWS, plan.config.dkv_block, BIAS_ROWS)
    cotangents, delta = cotangents_of(extras, out, lse, dout, dlse, room, plan)
    q, k, v = (pad_tokens(x) for x in (query, key, value))
    dq, lines = query_gradient(q, k, v, cotangents, extras, plan)
    if lines is not None:  # a delta that is not of the rounded output
        cotangents, delta = better_delta(cotangents, lines.products, dlse)
    dk, dv = key_value_gradient(q, k, v, cotangents, extras, plan)
    gradients = Extras(sinks=_sinks_gradient(extras, lse, delta))
    if extras.slopes is not None and lines is not None:
        slopes = _slopes_gradient(extras, dlse, lines.ds_far, lines.weights_far)
        gradients = gradients._replace(slopes=slopes)
    if extras.bias is not None:
        gradients = gradients._replace(bias=bias_gradient(q, k, v, cotangents, extras, plan))
    return dq[:, : query.shape[1]], dk[:, : key.shape[1]], dv[:, : key.shape[1]], gradients


def _sinks_gradient(extras: Extras, lse: Array, delta: Array) -> Array | None:
    """Returns the gradient of sinks, or None."""
    if extras.sinks is None:
        return None
    # The sink's weight, of a value of zero.
    weights = jnp.exp(extras.sinks[None, :, None] - jnp.where(lse == -jnp.inf, jnp.inf, lse))
    return -(weights * delta).sum((0, 2))


def _slopes_gradient(extras: Extras, dlse: Array, ds_far: Array, weights_far: Array) -> Array:
    """Returns the gradient of slopes from the lines of `backward_query`."""
    tokens = dlse.shape[2]
    lines = ds_far[..., :tokens] + dlse * weights_far[..., :tokens]
    own = extras.slopes.shape[0] != 1
    return -lines.sum(2) if own else -lines.sum((0, 2))[None]
