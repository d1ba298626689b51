# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""`tpjax.compile` under every JAX transformation gives plain JAX's values and gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tpjax
from tests.harness import assert_close, inputs
from tests.stax.functions import TOL, block, choices_of, loss, params

Fn = Callable[..., Any]


def _scan(fn: Fn) -> Fn:
    def layers(p: Any, x: jax.Array) -> Any:
        stacked = jax.tree.map(lambda a: jnp.stack([a, 0.5 * a, a + 0.1]), p)
        return jax.lax.scan(lambda h, layer: (fn(layer, h), None), x, stacked)[0]

    return layers


def _total(fn: Fn) -> Fn:
    return lambda p, x: jnp.sum(jnp.sin(fn(p, x)))


def _inside_another(fn: Fn) -> Fn:
    return tpjax.compile(lambda p, x: fn(p, fn(p, x)))


TRANSFORMS: dict[str, Fn] = {
    "itself": lambda f: f,
    "jit": lambda f: jax.jit(lambda p, x: f(p, x)),
    "grad": lambda f: jax.grad(_total(f), argnums=(0, 1)),
    "jit of value_and_grad": lambda f: jax.jit(jax.value_and_grad(_total(f))),
    "vmap": lambda f: lambda p, x: jax.vmap(f, (None, 0))(p, jnp.stack([x, 2 * x])),
    "scan": lambda f: jax.jit(_scan(f)),
    "grad of scan of checkpoint": lambda f: jax.jit(jax.grad(_total(_scan(jax.checkpoint(f))))),
    "another compiled function": _inside_another,
    "cond": lambda f: lambda p, x: jax.lax.cond(x.sum() > 0, f, lambda p, x: -f(p, x), p, x),
}
"""A few of `tests.stax.transforms`, as a user calls them: compiled as a whole, or run eagerly."""


@pytest.mark.parametrize("name", TRANSFORMS)
def test_composes(name: str) -> None:
    transform, args = TRANSFORMS[name], (params(), inputs("f32[12,16]", 9))
    actual, choices = choices_of(transform(tpjax.compile(block)), *args)
    assert_close(name, actual, transform(block)(*args), TOL)
    assert {choice.op for choice in choices} == {"rms_norm", "flash_attention"}


@pytest.mark.parametrize("name", ["jit", "grad", "vmap", "scan", "another compiled function"])
def test_no_jit_of_its_own_under_a_tracer(name: str) -> None:
    compiled = tpjax.compile(block, name="of_its_own")
    jaxpr = jax.make_jaxpr(TRANSFORMS[name](compiled))(params(), inputs("f32[12,16]", 9))
    assert "of_its_own" not in str(jaxpr)
    assert "rms_norm" in str(jaxpr)


def test_tracers_in_the_closure_alone() -> None:
    x = inputs("f32[12,16]", 9)

    def total(fn: Fn) -> Fn:
        def of(p: Any) -> Any:
            return fn(lambda y: loss(p, y))(x)

        return of

    expected = jax.jit(jax.grad(total(lambda f: f)))(params())
    actual, choices = choices_of(jax.jit(jax.grad(total(tpjax.compile))), params())
    assert choices
    assert_close("gradient through the closure", actual, expected, TOL)
    # An object that is compiled once and whose weights are arrays now and tracers then.
    weights = params()
    compiled = tpjax.compile(lambda y: loss(weights, y))
    compiled(x)

    def through(p: Any) -> Any:
        nonlocal weights
        kept, weights = weights, p
        try:
            return compiled(x)
        finally:
            weights = kept

    actual = jax.jit(jax.grad(through))(params())
    assert_close("gradient after a cached call", actual, expected, TOL)


def test_integer_and_unused_inputs_under_grad() -> None:
    @tpjax.compile
    def pick(p: Any, index: jax.Array, unused: Any) -> jax.Array:
        return loss(p, inputs("f32[12,16]", 9))[None][index] * 2.0

    (grads,) = jax.jit(jax.grad(pick, argnums=(0,)))(params(), jnp.int32(0), None)
    expected = jax.jit(jax.grad(lambda p: 2 * loss(p, inputs("f32[12,16]", 9))))(params())
    assert_close("gradient", grads, expected, TOL)
