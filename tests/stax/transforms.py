# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""JAX's transformations as a table: each takes `f(params, state, x) -> (y, new state)` to another.

What comes back takes the same arguments and returns arrays, the new state among them where the
transformation carries it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import tpjax
from tests.stax.styles import STYLES

Fn = Callable[..., Any]


class Transform(NamedTuple):
    """A row: how to transform f, and what is known of the result.

    `order` is how often it is differentiated, `times` how often f stands in it, and `plain` says
    the same without `tpjax`, where `of` itself compiles. `styles` are the styles of writing that
    the row is tested with, for rows that differ from others in JAX's part of the work alone.
    """

    of: Callable[[Fn], Fn]
    order: int = 0
    times: int = 1
    plain: Callable[[Fn], Fn] | None = None
    styles: tuple[str, ...] = tuple(STYLES)


def total(f: Fn) -> Fn:
    """Returns the function whose first result is a scalar with another weight for each element."""

    def scalar(params: Any, state: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        y, state = f(params, state, x)
        return jnp.sum(jnp.sin(y)), state

    return scalar


def _value(f: Fn) -> Fn:
    return lambda *args: total(f)(*args)[0]


def _grad(f: Fn, wrt: int = 0) -> Fn:
    return jax.grad(total(f), wrt, has_aux=True)


def _twice(f: Fn) -> Fn:
    """The function applied to its own results."""

    def twice(params: Any, state: Any, x: jax.Array) -> Any:
        x, state = f(params, state, x)
        return f(params, state, x)

    return twice


def _scan(f: Fn) -> Fn:
    def loop(params: Any, state: Any, x: jax.Array) -> Any:
        def body(carry: Any, shift: jax.Array) -> Any:
            x, state = carry
            return f(params, state, x + shift), None

        return jax.lax.scan(body, (x, state), jnp.arange(2.0))[0]

    return loop


def _while(f: Fn) -> Fn:
    def loop(params: Any, state: Any, x: jax.Array) -> Any:
        def body(carry: Any) -> Any:
            i, x, state = carry
            return i + 1, *f(params, state, x)

        return jax.lax.while_loop(lambda carry: carry[0] < 2, body, (0, x, state))[1:]

    return loop


def _cond(f: Fn) -> Fn:
    def choose(params: Any, state: Any, x: jax.Array) -> Any:
        return jax.lax.cond(x[0, 0, 0] < 100, f, lambda p, s, x: (x, s), params, state, x)

    return choose


def _per_example(f: Fn, params: Any, state: Any, x: jax.Array) -> Any:
    return jax.vmap(f, (None, None, 0))(params, state, jnp.stack([x, 2 * x]))


def _ensemble(f: Fn) -> Fn:
    def models(params: Any, state: Any, x: jax.Array) -> Any:
        both = jax.tree.map(lambda p: jnp.stack([p, 0.5 * p]), params)
        return jax.vmap(f, (0, None, None))(both, state, x)

    return models


def _jacfwd(f: Fn) -> Fn:
    """The derivative by two numbers that move x."""

    def run(params: Any, state: Any, x: jax.Array) -> Any:
        moved = lambda t: x + t[0] * jnp.cos(x) + t[1] * x * x  # noqa: E731
        return jax.jacfwd(lambda t: f(params, state, moved(t)), has_aux=True)(jnp.array([0.1, 0.2]))

    return run


def _jvp(f: Fn) -> Fn:
    def run(params: Any, state: Any, x: jax.Array) -> Any:
        call = lambda p, x: f(p, state, x)  # noqa: E731
        return jax.jvp(call, (params, x), (params, jnp.cos(x)), has_aux=True)

    return run


def _linearize(f: Fn) -> Fn:
    def run(params: Any, state: Any, x: jax.Array) -> Any:
        y, tangent, state = jax.linearize(lambda x: f(params, state, x), x, has_aux=True)
        return y, tangent(jnp.cos(x)), jax.linear_transpose(tangent, x)(jnp.sin(x)), state

    return run


def _vjp(f: Fn) -> Fn:
    def run(params: Any, state: Any, x: jax.Array) -> Any:
        y, pull, state = jax.vjp(lambda p, x: f(p, state, x), params, x, has_aux=True)
        return y, pull(jnp.cos(y)), state

    return run


def _penalty(f: Fn) -> Fn:
    """The gradient of a gradient's size."""

    def size(params: Any, state: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(jax.grad(_value(f), 2)(params, state, x)))

    return jax.grad(size)


def _product(f: Fn) -> Fn:
    """The Hessian times a vector: forward over reverse."""

    def run(params: Any, state: Any, x: jax.Array) -> Any:
        return jax.jvp(lambda p: jax.grad(_value(f))(p, state, x), (params,), (params,))

    return run


def _own_rule(f: Fn) -> Fn:
    """The function inside somebody's custom_vjp."""

    @jax.custom_vjp
    def ruled(params: Any, state: Any, x: jax.Array) -> Any:
        return f(params, state, x)[0]

    def forward(*args: Any) -> Any:
        y, pull = jax.vjp(lambda p: f(p, *args[1:])[0], args[0])
        return y, (pull, args[2])

    def backward(kept: Any, g: jax.Array) -> Any:
        pull, x = kept
        return jax.tree.map(lambda p: 2 * p, pull(g)[0]), None, jnp.zeros_like(x)

    ruled.defvjp(forward, backward)
    return jax.grad(lambda *args: jnp.sum(jnp.sin(ruled(*args))))


_SAVED = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

_FEW = ("plain, scanned", "nnx, unrolled")

TRANSFORMS: dict[str, Transform] = {
    "jit": Transform(jax.jit),
    "vmap": Transform(lambda f: lambda *args: _per_example(f, *args)),
    "vmap over models": Transform(_ensemble, styles=_FEW),
    "scan": Transform(_scan),
    "while": Transform(_while, styles=_FEW),
    "cond": Transform(_cond, styles=_FEW),
    "another compiled function": Transform(lambda f: tpjax.compile(_twice(f)), 0, 2, _twice),
    "a jit in another": Transform(
        lambda f: tpjax.compile(_twice(jax.jit(f))), 0, 2, _twice, styles=_FEW
    ),
    "grad": Transform(lambda f: _grad(f, 2), 1),
    "value_and_grad": Transform(lambda f: jax.value_and_grad(total(f), has_aux=True), 1),
    "vmap of grad": Transform(
        lambda f: lambda *args: _per_example(_grad(f), *args), 1, styles=_FEW
    ),
    "jacrev": Transform(lambda f: lambda *a: jax.jacrev(lambda x: f(*a[:2], x)[0][0, 1])(a[2]), 1),
    "vjp": Transform(_vjp, 1, styles=_FEW),
    "checkpoint": Transform(lambda f: _grad(jax.checkpoint(f)), 1),
    "checkpoint policy": Transform(
        lambda f: _grad(jax.checkpoint(f, policy=_SAVED)), 1, styles=_FEW
    ),
    "grad of scan": Transform(lambda f: _grad(_scan(f)), 1),
    "grad of scan of checkpoint": Transform(lambda f: _grad(_scan(jax.checkpoint(f))), 1),
    "grad of another": Transform(
        lambda f: _grad(tpjax.compile(_twice(f))), 1, 2, lambda f: _grad(_twice(f))
    ),
    "custom_vjp": Transform(_own_rule, 1, styles=_FEW),
    "jvp": Transform(_jvp, 1),
    "linearize": Transform(_linearize, 1, styles=_FEW),
    "jacfwd": Transform(_jacfwd, 1),
    "grad of grad": Transform(_penalty, 2),
    "hessian-vector product": Transform(_product, 2),
}
"""The transformations by name."""

LEFT_OUT: dict[str, str] = {
    "grad of while": "JAX has no reverse derivative of a loop whose length is not known.",
    "grad of vmap over models, jvp of scan, ...": "Pairs of rows: each is a row by itself, and "
    "the compiler sees equations, not how they came to be.",
    "pmap": "It is shard_map now; tests/stax/test_composition_devices.py has that.",
    "custom_jvp": "A compiled function inside somebody's rule is the row custom_vjp.",
}
"""What is no row, and why."""
