# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Functions to compile, written as anyone writes them, and what a call of them did."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tests.harness import inputs
from tpjax.core import _jax
from tpjax.core.operator import Choice
from tpjax.pallas.dispatch import record_choices

TOL = 3e-6
"""Float32: attention, norms and their gradients are summed in another order by our own forms."""


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns the root mean square norm of the last axis."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def block(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Returns a transformer block of one sequence [T, E] with 2 heads of 8, norm in front."""
    h = norm(x, params["scale"])
    q, k, v = (jnp.reshape(h @ params[name], (-1, 2, 8)) for name in ("q", "k", "v"))
    scores = jnp.einsum("thd,shd->hts", q, k) / 8**0.5
    visible = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    return x + jnp.einsum("hts,shd->thd", weights, v).reshape(x.shape)


def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Returns a scalar of the block's output in which every element has another weight."""
    return jnp.sum(jnp.sin(block(params, x)))


def params(seed: int = 0) -> dict[str, jax.Array]:
    """Returns parameters of `block`."""
    made = {name: inputs("f32[16,16]", seed + i) / 4 for i, name in enumerate("qkv")}
    return made | {"scale": 1 + inputs("f32[16]", seed + 3) / 4}


def choices_of(fn: Callable[..., Any], *args: Any) -> tuple[Any, list[Choice]]:
    """Returns what the call returns and the operators that it chose, in order."""
    with record_choices() as choices:
        return fn(*args), choices


def operators_of(jaxpr: _jax.Jaxpr) -> Counter[str]:
    """Returns the operators that stand in the jaxpr, each as often as it stands there."""
    found, stack = Counter[str](), [jaxpr]
    while stack:
        for eqn in stack.pop().eqns:
            operator = _jax.operator_of(eqn)
            found.update([] if operator is None else [operator])
            stack.extend(_jax.subjaxprs(eqn))
    return found
