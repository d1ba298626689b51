# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Compiled functions over Flax modules: state changes once a call, as without `tpjax.compile`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

import tpjax
from tests.harness import assert_close, inputs
from tests.stax.functions import TOL, choices_of


class Stateful(nnx.Module):
    """A layer whose call changes batch statistics, random streams and a counter."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(8, 8, use_bias=False, rngs=rngs)
        self.norm = nnx.RMSNorm(8, rngs=rngs)
        self.batch = nnx.BatchNorm(8, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.Variable(jnp.array(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        return self.dropout(self.norm(self.batch(self.linear(x))))

    @tpjax.compile
    def compiled_call(self, x: jax.Array) -> jax.Array:
        """Is the call, compiled in the class."""
        return self(x)

    def loss(self, x: jax.Array) -> jax.Array:
        """Returns a scalar in which every element has another weight."""
        return jnp.sum(jnp.sin(self(x)))


def _model() -> Stateful:
    return Stateful(nnx.Rngs(0))


def _state(model: nnx.Module) -> Any:
    leaves = nnx.to_pure_dict(nnx.state(model))
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, leaves)


def _loss(model: Stateful, x: jax.Array) -> jax.Array:
    return model.loss(x)


compiled_loss = tpjax.compile(_loss)

CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "argument": (tpjax.compile(lambda m, x: m(x)), lambda m, x: m(x)),
    "deep in a pytree": (
        tpjax.compile(lambda tree, x: tree["models"][0](x)),
        lambda tree, x: tree["models"][0](x),
    ),
    "the module itself": (lambda m, x: tpjax.compile(m)(x), lambda m, x: m(x)),
    "a bound method": (lambda m, x: tpjax.compile(m.loss)(x), lambda m, x: m.loss(x)),
    "a method compiled in the class": (lambda m, x: m.compiled_call(x), lambda m, x: m(x)),
    "compiled gradient": (tpjax.compile(nnx.value_and_grad(_loss)), nnx.value_and_grad(_loss)),
    "nnx.jit": (nnx.jit(lambda m, x: compiled_loss(m, x)), nnx.jit(_loss)),
    "nnx.value_and_grad": (
        nnx.jit(nnx.value_and_grad(lambda m, x: compiled_loss(m, x))),
        nnx.jit(nnx.value_and_grad(_loss)),
    ),
    "nnx.grad, eager": (nnx.grad(lambda m, x: compiled_loss(m, x)), nnx.grad(_loss)),
    "nnx.remat": (
        nnx.jit(nnx.grad(nnx.remat(lambda m, x: compiled_loss(m, x)))),
        nnx.jit(nnx.grad(_loss)),
    ),
    "another compiled function": (
        tpjax.compile(lambda m, x: compiled_loss(m, x) + compiled_loss(m, x + 1)),
        lambda m, x: _loss(m, x) + _loss(m, x + 1),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_state_advances_once_a_call(name: str) -> None:
    compiled, plain = CALLS[name]
    ours, theirs = _model(), _model()
    wrap = (lambda m: {"models": [m]}) if "pytree" in name else (lambda m: m)
    for step in range(3):
        x = inputs("f32[6,8]", step)
        actual, expected = compiled(wrap(ours), x), plain(wrap(theirs), x)
        if name == "compiled gradient" or "grad" in name or name == "nnx.remat":
            actual, expected = map(_pure, (actual, expected))
        assert_close(f"{name}, call {step}", actual, expected, 10 * TOL)
        assert_close(f"{name}, state after {step}", _state(ours), _state(theirs), TOL)
    assert int(ours.calls[...]) == (6 if name == "another compiled function" else 3)


def _pure(tree: Any) -> Any:
    is_state = lambda x: isinstance(x, nnx.State)  # noqa: E731
    pure = lambda x: nnx.to_pure_dict(x) if is_state(x) else x  # noqa: E731
    return jax.tree.map(pure, tree, is_leaf=is_state)


def test_value_and_grad_over_split_state() -> None:
    x = inputs("f32[6,8]", 0)

    def grads(loss: Callable[..., Any]) -> Any:
        graphdef, params, rest = nnx.split(_model(), nnx.Param, ...)

        def of(params: Any, rest: Any) -> Any:
            model = nnx.merge(graphdef, params, rest, copy=True)
            value = loss(model, x)
            return value, nnx.state(model, nnx.BatchStat)

        (value, stats), g = jax.jit(jax.value_and_grad(of, has_aux=True))(params, rest)
        return value, *map(nnx.to_pure_dict, (stats, g))

    assert_close("over state", grads(compiled_loss), grads(_loss), 10 * TOL)


def test_the_rewrite_is_made() -> None:
    _, choices = choices_of(tpjax.compile(lambda m, x: m(x)), _model(), inputs("f32[6,8]", 0))
    assert [choice.op for choice in choices] == ["rms_norm"]


def test_shared_variables_stay_shared() -> None:
    class Tied(nnx.Module):
        def __init__(self) -> None:
            self.a = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
            self.b = nnx.Linear(4, 4, rngs=nnx.Rngs(1))
            self.b.kernel = self.a.kernel

    @tpjax.compile
    def halve(left: Tied, right: Tied) -> Any:
        left.a.kernel[...] *= 0.5
        return left.b.kernel[...].sum(), right

    model = Tied()
    expected = model.a.kernel[...] * 0.5
    total, same = halve(model, model)
    assert model.a.kernel is model.b.kernel
    assert same is model
    assert_close("halved once", model.b.kernel[...], expected, 0)
    assert_close("seen through the other name", total, expected.sum(), TOL)


def test_new_modules_and_variables_come_out() -> None:
    @tpjax.compile
    def grow(model: Any) -> Any:
        model.seen = nnx.Variable(jnp.ones(2))
        return nnx.Linear(2, 2, rngs=nnx.Rngs(3)), 1.0

    model: Any = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    made, one = grow(model)
    assert_close("variable", model.seen[...], jnp.ones(2), 0)
    assert_close("module", _state(made), _state(nnx.Linear(2, 2, rngs=nnx.Rngs(3))), 0)
    assert float(one) == 1


def test_replaced_parameters_are_seen() -> None:
    model = nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(0))
    x, compiled = inputs("f32[3,4]", 0), tpjax.compile(model)
    compiled(x)
    model.kernel[...] = jnp.eye(4)
    assert_close("identity", compiled(x), x, 0)
    model.kernel = nnx.Param(2 * jnp.eye(4))
    assert_close("another object", compiled(x), 2 * x, 0)


def test_a_module_closed_over_may_be_read_under_a_trace() -> None:
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    forward = tpjax.compile(lambda m, x: m(x))
    x = inputs("f32[3,4]", 0)
    assert_close("read", jax.jit(lambda x: forward(model, x))(x), model(x), TOL)
    assert_close("gradient", jax.grad(lambda x: forward(model, x).sum())(x).shape, (3, 4), 0)


def test_optimizer_step() -> None:
    import optax

    def step(model: Stateful, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
        value, grads = nnx.value_and_grad(_loss)(model, x)
        optimizer.update(model, grads)
        return value

    def run(step: Callable[..., Any]) -> Any:
        model = _model()
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        losses = [step(model, optimizer, inputs("f32[6,8]", i)) for i in range(3)]
        return losses, _state(model)

    # Adam divides gradients by their own size, so the last bits of the small ones are amplified.
    assert_close("three steps", run(tpjax.compile(step)), run(nnx.jit(step)), 1e-4)


class Network(linen.Module):
    """A Linen network with batch statistics and dropout."""

    @linen.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        x = linen.Dense(8, use_bias=False)(x)
        x = linen.BatchNorm(use_running_average=not train, momentum=0.5)(x)
        x = linen.RMSNorm()(x)
        return linen.Dropout(0.5, deterministic=not train)(x)


def test_linen_apply_with_mutable_collections() -> None:
    network, x = Network(), inputs("f32[6,8]", 0)
    variables = network.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)

    def loss(params: Any, stats: Any, x: jax.Array, key: jax.Array) -> Any:
        out, changed = network.apply(
            {"params": params, "batch_stats": stats},
            x,
            rngs={"dropout": key},
            mutable=["batch_stats"],
        )
        return jnp.sum(jnp.sin(out)), changed["batch_stats"]

    args = variables["params"], variables["batch_stats"], x, jax.random.key(2)
    value, choices = choices_of(tpjax.compile(loss), *args)
    assert_close("value and statistics", value, jax.jit(loss)(*args), TOL)
    assert [choice.op for choice in choices] == ["rms_norm"]
    of = lambda f: jax.jit(jax.value_and_grad(f, has_aux=True))  # noqa: E731
    assert_close("gradients", of(tpjax.compile(loss))(*args), of(loss)(*args), 10 * TOL)
    apply = tpjax.compile(network.apply, static_argnames="train")
    assert_close("apply", apply(variables, x, train=False), network.apply(variables, x, False), TOL)
