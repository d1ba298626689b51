# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The optimiser of a run and its learning rate, a function of the step alone.

The optimiser is built for a learning rate of 1 and the step multiplies: so a step that was rejected
still moves the schedule on, and the state holds no second count of steps that could disagree with
the first.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from tpjax.training.config import Config

Params = Any
Schedule = Callable[[Int[Array, ""]], Float[Array, ""]]


def rate_of(config: Config) -> Schedule:
    """Returns the function from step to learning rate, counted from 0."""
    c = config
    warmup = min(c.warmup_steps, c.steps)
    span = max(1, c.steps - warmup)

    def rate(step: Int[Array, ""]) -> Float[Array, ""]:
        done = jnp.clip((step - warmup) / span, 0.0, 1.0)
        falls = {
            "constant": jnp.ones(()),
            "linear": 1.0 - done,
            "cosine": 0.5 * (1.0 + jnp.cos(jnp.pi * done)),
        }[c.schedule]
        rises = jnp.minimum(1.0, (step + 1) / max(1, warmup))
        return c.learning_rate * rises * (c.final_rate + (1.0 - c.final_rate) * falls)

    return rate


def _is_matrix(path: tuple[Any, ...]) -> bool:
    """Whether a parameter multiplies features: layers' kernels, not embedding, head or norms."""
    return getattr(path[-1], "key", None) == "kernel"


def _matrix_axes(params: Params) -> Params:
    """Returns the axes Muon orthogonalises, None elsewhere; leading axes are scanned layers."""
    axes = optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
    return jax.tree_util.tree_map_with_path(
        lambda path, _: axes if _is_matrix(path) else None, params
    )


def _decayed(params: Params) -> Params:
    return jax.tree.map(lambda x: x.ndim > 1, params)


def optimizer_of(config: Config) -> optax.GradientTransformation:
    """Returns clipping and the optimiser of the config, for a learning rate of 1.

    Sources: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019; Jordan et al.,
    "Muon: An optimizer for hidden layers in neural networks", 2024.
    """
    c = config
    if c.optimizer == "adamw":
        inner = optax.adamw(1.0, b1=0.9, b2=0.95, weight_decay=c.weight_decay, mask=_decayed)
    else:
        inner = optax.contrib.muon(
            1.0,
            weight_decay=c.weight_decay,
            adam_b2=0.95,
            adam_learning_rate=c.adam_learning_rate / c.learning_rate,
            muon_weight_dimension_numbers=_matrix_axes,
        )
    return optax.chain(optax.clip_by_global_norm(c.clip_norm), inner)
