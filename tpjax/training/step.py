# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The training step: one compiled function from state to state, which can refuse to change it.

    loss, grads = value_and_grad(loss)(params, tokens)
    params, optimiser state = update(grads)             kept only if loss and |grads| are finite

A step whose loss or gradient is not finite leaves parameters and optimiser as they were, decided on
the
device: by the time the host could look, the next step has been sent.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tpjax.models import Decoder, next_token_loss
from tpjax.training.config import Config
from tpjax.training.optimizer import optimizer_of, rate_of

Params = Any
"""Arrays in nested dicts, as `nnx.to_pure_dict` gives them."""

Loss = Callable[[Params, Int[Array, "B T+1"]], Float[Array, ""]]


class State(NamedTuple):
    """All that a run has learned, and all that the next step needs."""

    params: Params
    optimizer: Any
    step: Int[Array, ""]
    """Steps done, rejected ones included."""
    rng: Array
    """Key of the text samples; the loss draws no random numbers."""


class Metrics(NamedTuple):
    """What one step measured."""

    loss: Float[Array, ""]
    grad_norm: Float[Array, ""]
    """Before clipping."""
    learning_rate: Float[Array, ""]
    finite: Bool[Array, ""]
    """Whether the step was taken; if not, parameters and optimiser are as before."""


Step = Callable[[State, Int[Array, "B T+1"]], tuple[State, Metrics]]


def new_model(config: Config) -> tuple[nnx.GraphDef[Decoder], Callable[[], State]]:
    """Returns the structure of the model, and the function that makes the state of step 0."""
    c = config
    graph, _ = nnx.split(nnx.eval_shape(lambda: Decoder(c.model, rngs=nnx.Rngs(c.seed))))

    def init() -> State:
        params = nnx.to_pure_dict(nnx.state(Decoder(c.model, rngs=nnx.Rngs(c.seed))))
        rng = jax.random.fold_in(jax.random.key(c.seed), 1)
        return State(params, optimizer_of(c).init(params), jnp.zeros((), jnp.int32), rng)

    return graph, init


def loss_of(graph: nnx.GraphDef[Decoder]) -> Loss:
    """Returns the loss as a function of parameters and tokens."""

    def loss(params: Params, tokens: Int[Array, "B T+1"]) -> Float[Array, ""]:
        return next_token_loss(nnx.merge(graph, params), tokens)

    return loss


def step_of(config: Config, loss: Loss) -> Step:
    """Returns the training step, to be put under `jax.jit` with the state donated."""
    optimizer, rate = optimizer_of(config), rate_of(config)

    def step(state: State, tokens: Int[Array, "B T+1"]) -> tuple[State, Metrics]:
        value, grads = jax.value_and_grad(loss)(state.params, tokens)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(value) & jnp.isfinite(norm)

        updates, after = optimizer.update(grads, state.optimizer, state.params)
        scale = rate(state.step)
        params = jax.tree.map(lambda p, u: p + (scale * u).astype(p.dtype), state.params, updates)
        params, after = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old),
            (params, after),
            (state.params, state.optimizer),
        )
        return State(params, after, state.step + 1, state.rng), Metrics(value, norm, scale, finite)

    return step
