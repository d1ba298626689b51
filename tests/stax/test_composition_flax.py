# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Flax's own transformations, around a compiled function and inside one; state moves once."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

import tpjax
from tests.harness import assert_close, inputs
from tests.stax.functions import TOL, norm
from tests.stax.one_by_one import run_one_by_one
from tests.stax.styles import HEADS, LAYERS, WIDTH, NnxNetwork
from tpjax.pallas.dispatch import record_choices

Fn = Callable[..., Any]


def _as_written(fn: Fn) -> Fn:
    return fn


def _compare(what: str, make: dict[str, Fn], args: tuple[Any, ...], tol: float) -> dict[str, Any]:
    """Compares the functions with the one called "plain"; returns the operators each chose."""
    chosen: dict[str, set[str]] = {}

    def run(*args: Any) -> dict[str, Any]:
        results = {}
        for where, fn in make.items():
            with record_choices() as choices:
                results[where] = fn(*args)
            chosen[where] = {choice.op for choice in choices}
        return results

    results, _ = run_one_by_one(run, *args)
    for where in make:
        assert_close(f"{what}, {where}", results[where], results["plain"], tol)
    return chosen


# -- NNX ------------------------------------------------------------------------------------------


def _call(model: Any, x: jax.Array) -> jax.Array:
    return model(x)


def _total(fn: Fn) -> Fn:
    return lambda model, x: jnp.sum(jnp.sin(fn(model, x)))


def _nnx_while(fn: Fn) -> Fn:
    def loop(model: Any, x: jax.Array) -> jax.Array:
        body = lambda carry: (carry[0] + 1, carry[1], fn(carry[1], carry[2]))  # noqa: E731
        return nnx.while_loop(lambda carry: carry[0] < 2, body, (0, model, x))[2]

    return loop


def _nnx_for(fn: Fn) -> Fn:
    def loop(model: Any, x: jax.Array) -> jax.Array:
        body = lambda i, carry: (carry[0], fn(carry[0], carry[1] + i))  # noqa: E731
        return nnx.fori_loop(0, 2, body, (model, x))[1]

    return loop


def _nnx_cond(fn: Fn) -> Fn:
    return lambda model, x: nnx.cond(x[0, 0, 0] < 100, fn, lambda model, x: x, model, x)


def _nnx_switch(fn: Fn) -> Fn:
    return lambda model, x: nnx.switch(
        jnp.int32(x[0, 0, 0] < 100), (lambda model, x: x, fn), model, x
    )


def _nnx_layers(fn: Fn) -> Fn:
    """The model's copies in a row."""
    return nnx.scan(fn, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)


def _nnx_vjp(fn: Fn) -> Fn:
    def run(model: Any, x: jax.Array) -> Any:
        made: Any = nnx.vjp(fn, model, x, graph=False)
        y, pull = made
        return y, pull(jnp.cos(y))[1]

    return run


NNX: dict[str, tuple[Callable[[Fn], Fn], bool]] = {
    "nnx.jit": (nnx.jit, False),
    "nnx.grad": (lambda f: nnx.grad(_total(f), argnums=1), True),
    "nnx.value_and_grad": (lambda f: nnx.value_and_grad(_total(f), argnums=(0, 1)), True),
    "nnx.jit of value_and_grad": (lambda f: nnx.jit(nnx.value_and_grad(_total(f))), True),
    "nnx.remat": (lambda f: nnx.grad(_total(nnx.remat(f))), True),
    "nnx.vjp": (_nnx_vjp, True),
    "nnx.cond": (_nnx_cond, False),
    "nnx.switch": (_nnx_switch, False),
    "nnx.fori_loop": (_nnx_for, False),
    "nnx.while_loop": (_nnx_while, False),
    "nnx.vmap": (lambda f: nnx.vmap(f, in_axes=(0, None)), False),
    "nnx.scan": (_nnx_layers, False),
    "nnx.scan of nnx.remat": (lambda f: nnx.grad(_total(_nnx_layers(nnx.remat(f)))), True),
}
"""NNX's transformations of a function of (model, x), and whether the result is a gradient."""

NNX_LEFT_OUT = {
    "nnx.jvp": "Its tangents are modules whose integers have tangents of type float0; jax.jvp of a "
    "split module is in the table of JAX's transformations.",
    "nnx.custom_vjp": "As jax.custom_vjp, which is there too.",
    "nnx.pmap": "It is shard_map now.",
    "nnx.eval_shape": "test_shapes_of_a_module below.",
}
"""What is no row, and why."""

STACKED = ("nnx.vmap", "nnx.scan", "nnx.scan of nnx.remat")
"""Rows that take several models as one with stacked variables."""


@functools.cache
def _model(scanned: bool, stacked: bool) -> tuple[Any, Any]:
    make = functools.partial(NnxNetwork, scanned)
    if not stacked:
        return nnx.split(make(nnx.Rngs(0)))
    many = nnx.vmap(lambda rngs: make(rngs), in_axes=0, out_axes=0)
    return nnx.split(nnx.split_rngs(splits=2)(many)(nnx.Rngs(0)))


SCANNED = (*STACKED, "nnx.jit of value_and_grad", "nnx.remat", "nnx.cond", "nnx.fori_loop")
"""Rows that are tested with scanned layers too; the others differ from them in NNX's part alone."""
CELLS = [(name, scanned) for name in NNX for scanned in (False, True)[: 1 + (name in SCANNED)]]


@pytest.mark.parametrize(("name", "scanned"), CELLS)
def test_nnx_transformations(name: str, scanned: bool) -> None:
    transform, differentiates = NNX[name]
    graphdef, state = _model(scanned, name in STACKED)

    def stateful(fn: Fn) -> Fn:
        def run(state: Any, x: jax.Array) -> Any:
            model = nnx.merge(graphdef, state, copy=True)
            result = fn(model, x)
            return result, nnx.state(model)

        return run

    make = {
        "plain": stateful(transform(_call)),
        "inside": stateful(transform(tpjax.compile(_call))),
        "around": stateful(tpjax.compile(transform(_call))),
    }
    tol = 10 * TOL if differentiates else TOL
    chosen = _compare(name, make, (state, inputs("f32[2,4,8]", 7)), tol)
    assert chosen["inside"] == {"rms_norm", "flash_attention"}
    if not differentiates:
        # The norm of models side by side has a scale for each, which no single norm has.
        found = {"flash_attention"} if name == "nnx.vmap" else {"rms_norm", "flash_attention"}
        assert chosen["around"] == found


def test_shapes_of_a_module() -> None:
    model = nnx.eval_shape(lambda: NnxNetwork(False, nnx.Rngs(0)))
    shape = jax.ShapeDtypeStruct((2, 4, WIDTH), jnp.float32)
    assert nnx.eval_shape(tpjax.compile(_call), model, shape) == shape


def test_variables_given_as_state_are_left_alone() -> None:
    """A call that merges its own copy of the state changes nothing of what it was given."""
    graphdef, params, rest = nnx.split(NnxNetwork(False, nnx.Rngs(0)), nnx.Param, ...)

    def loss(params: Any, rest: Any, x: jax.Array) -> Any:
        model = nnx.merge(graphdef, params, rest, copy=True)
        return jnp.sum(jnp.sin(model(x))), nnx.state(model, nnx.BatchStat)

    x, before = inputs("f32[2,4,8]", 7), jax.tree.leaves(rest)
    grad = functools.partial(jax.value_and_grad, has_aux=True)
    _compare("state", {"plain": grad(loss), "inside": grad(tpjax.compile(loss))},
             (params, rest, x), 10 * TOL)  # fmt: skip
    assert jax.tree.structure(tpjax.compile(loss)(params, rest, x)[1]) == jax.tree.structure(
        nnx.state(NnxNetwork(False, nnx.Rngs(0)), nnx.BatchStat)
    )
    assert all(a is b for a, b in zip(before, jax.tree.leaves(rest), strict=True))


# -- Linen ----------------------------------------------------------------------------------------


class Block(linen.Module):
    """A layer whose attention and norm are functions that may be compiled; a scan's body too."""

    wrap: Fn = _as_written

    @linen.compact
    def __call__(self, x: jax.Array, _: Any = None) -> tuple[jax.Array, None]:
        scale = self.param("scale", linen.initializers.ones, (WIDTH,))
        attend = linen.MultiHeadDotProductAttention(
            HEADS, use_bias=False, attention_fn=self.wrap(linen.dot_product_attention)
        )
        x = x + attend(self.wrap(norm)(x, scale))
        return linen.BatchNorm(use_running_average=False, momentum=0.5)(x), None


_SPLIT: Any = {"params": True}
_AXES: Any = {"params": 0, "batch_stats": 0}


def _linen_scan(block: Any) -> Any:
    return linen.scan(block, _AXES, split_rngs=_SPLIT, length=LAYERS)


def _linen_mapped(parent: linen.Module, wrap: Fn, x: jax.Array) -> jax.Array:
    new = parent.is_initializing()
    half = functools.partial(jax.tree.map, lambda p: 0.5 * p)
    return linen.map_variables(Block, "params", half, init=new, mutable=new)(wrap)(x)[0]


def _linen_cond(parent: linen.Module, wrap: Fn, x: jax.Array) -> jax.Array:
    block = Block(wrap)
    if parent.is_initializing():
        return block(x)[0]
    return linen.cond(x[0, 0, 0] < 100, lambda m, x: m(x)[0], lambda m, x: m(2 * x)[0], block, x)


def _linen_while(parent: linen.Module, wrap: Fn, x: jax.Array) -> jax.Array:
    block = Block(wrap)
    if parent.is_initializing():
        return block(x)[0]
    return linen.while_loop(
        lambda m, carry: carry[0] < 2, lambda m, carry: (carry[0] + 1, m(carry[1])[0]),
        block, (0, x), carry_variables="batch_stats",
    )[1]  # fmt: skip


def _linen_vjp(parent: linen.Module, wrap: Fn, x: jax.Array) -> jax.Array:
    made: Any = linen.vjp(lambda m, x: m(x)[0], Block(wrap), x)
    y, pull = made
    return y + pull(jnp.cos(y))[1]


def _linen_jvp(parent: linen.Module, wrap: Fn, x: jax.Array) -> jax.Array:
    block = Block(wrap)
    y, _ = block(x)
    tangents = {"params": block.variables["params"]}
    made: Any = linen.jvp(lambda m, x: m(x)[0], block, (x,), (x,), tangents)
    return y + made[1]


def _linen_grad(parent: linen.Module, wrap: Fn, x: jax.Array) -> jax.Array:
    made: Any = linen.value_and_grad(lambda m, x: jnp.sum(jnp.sin(m(x)[0])), Block(wrap), x)
    value, grads = made
    return value + sum(jnp.sum(g) for g in jax.tree.leaves(grads))


LINEN: dict[str, Callable[[linen.Module, Fn, jax.Array], jax.Array]] = {
    "a block": lambda m, wrap, x: Block(wrap)(x)[0],
    "nn.jit": lambda m, wrap, x: linen.jit(Block)(wrap)(x)[0],
    "nn.remat": lambda m, wrap, x: linen.remat(Block)(wrap)(x)[0],
    "nn.scan": lambda m, wrap, x: _linen_scan(Block)(wrap)(x, None)[0],
    "nn.scan of nn.remat": lambda m, wrap, x: _linen_scan(linen.remat(Block, prevent_cse=False))(
        wrap
    )(x, None)[0],
    "nn.vmap": lambda m, wrap, x: linen.vmap(Block, _AXES, _SPLIT, in_axes=0)(wrap)(
        jnp.stack([x, 2 * x])
    )[0],
    "nn.map_variables": _linen_mapped,
    "nn.cond": _linen_cond,
    "nn.while_loop": _linen_while,
    "nn.vjp": _linen_vjp,
    "nn.jvp": _linen_jvp,
    "nn.value_and_grad": _linen_grad,
}
"""Linen's lifted transformations of a block, inside a network: (network, wrap, x) to y."""


NO_GRAD = {"nn.while_loop": "JAX has no reverse derivative of a loop whose length is not known."}
"""Rows that are not differentiated, and why."""


class Lifted(linen.Module):
    """The network with one row of `LINEN` in it."""

    row: str
    wrap: Fn = _as_written

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return LINEN[self.row](self, self.wrap, x)


@pytest.mark.parametrize("name", LINEN)
def test_linen_transformations(name: str) -> None:
    x = inputs("f32[2,4,8]", 7)
    variables = jax.jit(Lifted(name).init)(jax.random.key(0), x)

    def loss(wrap: Fn) -> Fn:
        def of(params: Any, stats: Any, x: jax.Array) -> Any:
            apply = functools.partial(Lifted(name, wrap).apply, mutable=["batch_stats"])
            y, new = apply({"params": params, "batch_stats": stats}, x)
            return jnp.sum(jnp.sin(y)), new

        return of

    grad = _as_written if name in NO_GRAD else functools.partial(jax.value_and_grad, has_aux=True)
    make = {
        "plain": grad(loss(_as_written)),
        "inside": grad(loss(tpjax.compile)),
        "around": grad(tpjax.compile(loss(_as_written))),
        "around and inside": grad(tpjax.compile(loss(tpjax.compile))),
    }
    chosen = _compare(name, make, (variables["params"], variables["batch_stats"], x), 10 * TOL)
    for where in ("inside", "around and inside"):
        assert chosen[where] == {"rms_norm", "flash_attention"}, where
