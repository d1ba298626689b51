# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Repeated layers become calls of one jit, equal bodies one object; what runs is the same."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.harness import assert_close, inputs, run_python
from tests.stax_passes.gradients import assert_gradients
from tests.stax_passes.programs import as_function, primitives, rules_fired
from tpjax.core import _jax
from tpjax.stax_passes.hoist import hoist_invariants
from tpjax.stax_passes.layers import share_bodies, share_layers
from tpjax.stax_passes.pipeline import optimize

X = inputs("f32[4,8]", 0)
WEIGHTS = [inputs("f32[8,8]", i) for i in range(1, 11)]


def _block(x: jax.Array, w: jax.Array, scale: float = 2.0) -> jax.Array:
    h = jnp.tanh(x @ w) * scale
    h = jnp.sin(h) + jnp.cos(x) - jnp.exp(-jnp.abs(h))
    h = h / (1.0 + jnp.abs(h))
    return x + h.astype("bfloat16").astype("float32")


def _loop(x: jax.Array, *weights: jax.Array) -> jax.Array:
    for w in weights:
        x = _block(x, w)
    return x.sum(0)


def _calls(jaxpr: _jax.Jaxpr) -> list[Any]:
    return [eqn for eqn in jaxpr.eqns if eqn.params.get("name") == "repeated_layer"]


def test_the_layers_of_a_loop_become_calls_of_one_body() -> None:
    result, fired, _ = rules_fired(_loop, X, *WEIGHTS, passes=(share_layers,))
    calls = _calls(result)
    assert fired == {"repeated_layer": 1}
    assert len(calls) == len(WEIGHTS)
    assert len({id(call.params["jaxpr"]) for call in calls}) == 1
    assert len(calls[0].invars) == 2  # x and w: the run starts where least passes
    assert len(calls[0].outvars) == 1
    assert_gradients("layers", _loop, result, X, *WEIGHTS)


def test_a_layer_that_differs_stays_as_written() -> None:
    def fn(x: jax.Array, *weights: jax.Array) -> jax.Array:
        for i, w in enumerate(weights):
            x = _block(x, w, 3.0 if i == 5 else 2.0)
        return x

    result, _, _ = rules_fired(fn, X, *WEIGHTS, passes=(share_layers,))
    assert len(_calls(result)) == 5
    assert primitives(result).count("dot_general") == 5


def test_layers_wired_in_another_way_do_not_merge() -> None:
    def fn(x: jax.Array, *weights: jax.Array) -> jax.Array:
        first = x
        for i, w in enumerate(weights):
            x = _block(x, w) + (first if i % 2 else x)  # the same types, other operands
        return x

    result, fired, _ = rules_fired(fn, X, *WEIGHTS, passes=(share_layers,))
    assert fired["repeated_layer"] <= 1
    assert len(_calls(result)) in (0, 5)  # pairs of layers, or none
    assert_gradients("wired", fn, result, X, *WEIGHTS)


def test_values_of_one_layer_that_are_returned_come_out_of_every_call() -> None:
    def fn(x: jax.Array, *weights: jax.Array) -> Any:
        kept = []
        for w in weights:
            h = jnp.tanh(x @ w)
            x = _block(h, w)
            kept.append(h)
        return x, kept[3]

    result, _, _ = rules_fired(fn, X, *WEIGHTS, passes=(share_layers,))
    assert len(_calls(result)) >= 9
    assert_gradients("kept", fn, result, X, *WEIGHTS)


def test_two_stacks_are_both_found() -> None:
    def fn(x: jax.Array, *weights: jax.Array) -> jax.Array:
        for w in weights:
            x = _block(x, w)
        for w in weights:
            x = jnp.sort(_block(jnp.cos(x), w)) - jnp.tanh(w.sum())
        return x

    result, fired, _ = rules_fired(fn, X, *WEIGHTS, passes=(share_layers,))
    assert fired["repeated_layer"] == 2
    assert len({id(call.params["jaxpr"]) for call in _calls(result)}) == 2
    assert len(_calls(result)) >= 18


def test_layers_that_print_stay_in_order() -> None:
    seen: list[int] = []

    def fn(x: jax.Array, *weights: jax.Array) -> jax.Array:
        for i, w in enumerate(weights):
            jax.debug.callback(lambda v, i=i: seen.append(i), x[0, 0], ordered=True)
            x = _block(x, w)
        return x

    jaxpr = jax.make_jaxpr(fn)(X, *WEIGHTS)
    result, _ = optimize(jaxpr, verify=True)
    jax.block_until_ready(as_function(result)(X, *WEIGHTS))
    jax.effects_barrier()
    assert seen == list(range(len(WEIGHTS)))


@pytest.mark.parametrize("count", [2, 3])
def test_a_few_short_layers_are_not_worth_a_call(count) -> None:
    result, fired, _ = rules_fired(_loop, X, *WEIGHTS[:count], passes=(share_layers,))
    assert not fired
    assert not _calls(result)


def test_the_calls_compose_with_transformations() -> None:
    result = as_function(optimize(jax.make_jaxpr(_loop)(X, *WEIGHTS))[0])
    batch = jnp.stack([X, X + 1])

    def losses(fn: Any) -> Any:
        loss = lambda x: jnp.sum(jax.tree.leaves(fn(x, *WEIGHTS))[0] ** 2)  # noqa: E731
        mapped = jax.vmap(jax.value_and_grad(jax.checkpoint(loss)))(batch)
        return *mapped, jax.jvp(loss, (X,), (X,))

    assert_close("composed", jax.jit(lambda: losses(result))(), jax.jit(lambda: losses(_loop))(),
                 1e-6)  # fmt: skip


def test_equal_bodies_become_one_object() -> None:
    def fn(x: jax.Array, *weights: jax.Array) -> jax.Array:
        for w in weights:
            x = jax.checkpoint(lambda x, w: _block(x, w))(x, w)  # each traced on its own
        return jax.checkpoint(lambda x, w: _block(x, w, 3.0))(x, weights[0])

    result, fired, _ = rules_fired(fn, X, *WEIGHTS, passes=(share_bodies,))
    assert fired == {"equal_body": len(WEIGHTS) - 1}
    bodies = [eqn.params["jaxpr"] for eqn in result.eqns]
    assert len({id(body) for body in bodies}) == 2
    assert_gradients("bodies", fn, result, X, *WEIGHTS)


def test_bodies_of_other_lines_or_with_effects_stay_apart() -> None:
    def fn(x: jax.Array) -> list[jax.Array]:
        one = jax.checkpoint(lambda x: jnp.sin(x) * 2)(x)
        other = jax.checkpoint(lambda x: jnp.sin(x) * 2)(x)  # a report must name its own line
        return [one, other]

    def prints(x: jax.Array) -> None:
        jax.debug.callback(lambda v: None, x)

    for function in (fn, lambda x: [jax.checkpoint(lambda x: prints(x))(x) for _ in range(2)]):
        _, fired, _ = rules_fired(function, X, passes=(share_bodies,))
        assert not fired


SHARDED = """
import warnings
import jax, jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec as P
from tpjax.stax_passes.pipeline import optimize
from jax.extend.core import jaxpr_as_fun

warnings.simplefilter("error")
mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.{kind},))


def layers(x, w):
    for _ in range(10):
        h = jnp.tanh(x @ w) * 2.0
        h = jnp.sin(h) + jnp.cos(x) - jnp.exp(-jnp.abs(h))
        x = x + h / (1.0 + jnp.abs(h))
    return x


def rows(x, w):
    x = layers(x, w)
    return x + jax.lax.psum(x.sum(), "data") if {manual} else x


with jax.set_mesh(mesh):
    x = jax.device_put(jnp.ones((4, 8)), jax.NamedSharding(mesh, P("data")))
    w = jax.device_put(jnp.eye(8), jax.NamedSharding(mesh, P()))
    fn = jax.shard_map(rows, in_specs=(P("data"), P()), out_specs=P("data")) if {manual} else rows
    jaxpr = jax.make_jaxpr(fn)(x, w)
    result, reports = optimize(jaxpr, verify=True)
    assert [len(r.hits) for r in reports if r.name == "share_layers"] == [1, 0]
    got, expected = jax.jit(jaxpr_as_fun(result))(x, w)[0], jax.jit(fn)(x, w)
    assert jnp.allclose(got, expected, rtol=1e-6), (got, expected)
    assert got.sharding == expected.sharding
"""


@pytest.mark.parametrize(("kind", "manual"), [("Explicit", False), ("Auto", True)])
def test_layers_on_a_mesh(kind, manual) -> None:
    run_python(SHARDED.replace("{kind}", kind).replace("{manual}", str(manual)), devices=2)


def _attend(x: jax.Array, w: jax.Array, mask: jax.Array, scale: jax.Array) -> jax.Array:
    heads = lambda y: y.reshape(2, 16, 2, 4)  # noqa: E731
    w = w * 0.1  # so that ten layers do not amplify what the rounding of one is
    q, k, v = heads(x @ w), heads(jnp.tanh(x) @ w.T), heads(jnp.cos(x) @ w)
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * scale
    scores = jnp.where(mask, scores, -1e30)
    out = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, -1), v)
    return x + out.reshape(x.shape)


def test_what_all_layers_read_is_seen_in_each_and_taken_out_again() -> None:
    """A mask and a scale made before the loop are part of each layer's pattern."""

    def fn(x: jax.Array, *weights: jax.Array) -> jax.Array:
        mask = jnp.tril(jnp.ones((16, 16), bool))
        scale = 1 / jnp.sqrt(jnp.float32(4))
        for w in weights:
            x = _attend(x, w, mask, scale)
        return x

    x = inputs("f32[2,16,8]", 0)
    jaxpr = jax.make_jaxpr(fn)(x, *WEIGHTS)
    result, reports = optimize(jaxpr, verify=True)
    hits = [hit for report in reports for hit in report.hits if hit.op == "flash_attention"]
    assert len(hits) == len(WEIGHTS)  # one for each call
    assert len(_calls(result)) == len(WEIGHTS)
    assert len(_calls(result)[0].invars) == 2  # x and w: the mask is the kernel's own
    assert_close("attention", as_function(result)(x, *WEIGHTS)[0], fn(x, *WEIGHTS), 1e-5)


def test_what_has_a_gradient_is_not_computed_again_in_each_layer() -> None:
    def fn(x: jax.Array, shared: jax.Array, *weights: jax.Array) -> jax.Array:
        table = shared.astype("bfloat16").astype("float32") * 3
        for w in weights:
            x = _block(x, w) * table
        return x

    args = (X, inputs("f32[4,8]", 20), *WEIGHTS)
    result, _, _ = rules_fired(fn, *args, passes=(share_layers,))
    assert "convert_element_type" in primitives(result)
    assert len(_calls(result)[0].invars) == 3
    assert_gradients("shared", fn, result, *args)


def test_what_the_same_arguments_give_is_computed_before_the_calls() -> None:
    def fn(x: jax.Array, shared: jax.Array, *weights: jax.Array) -> jax.Array:
        for w in weights:
            x = _block(x, w) * jnp.cos(shared)
        return x

    args = (X, inputs("f32[4,8]", 20), *WEIGHTS)
    passes = (share_layers, hoist_invariants)
    result, fired, _ = rules_fired(fn, *args, passes=passes)
    assert fired["call_invariant"] == 1
    assert primitives(result).count("cos") == 1
    assert len({id(call.params["jaxpr"]) for call in _calls(result)}) == 1
    assert_gradients("taken out", fn, result, *args, tol=1e-6)
