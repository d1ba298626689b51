# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Dead code: what goes, at every level; what must stay, and in which order."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify, io_callback

from tests.harness import assert_close, inputs, run_python
from tests.stax_passes.programs import (
    as_function,
    assert_same_bits,
    evaluate,
    primitives,
    rules_fired,
)
from tpjax.core import _jax
from tpjax.stax_passes.dead import drop_dead_code

X, Y = inputs("f32[3]", 0), inputs("f32[3]", 1)


def _equation(jaxpr: _jax.Jaxpr, name: str) -> _jax.Equation:
    return next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == name)


def _drop(fn: Any, *args: Any) -> _jax.Jaxpr:
    result, _, _ = rules_fired(fn, *args, passes=(drop_dead_code,))
    return result


def test_R09_dead_equations_go_with_what_they_alone_read() -> None:
    def fn(x: jax.Array) -> jax.Array:
        jnp.cos(jnp.sin(x) + 1)
        return x * 2

    jaxpr = jax.make_jaxpr(fn)(X)
    result, report = drop_dead_code(jaxpr)
    assert primitives(result) == ["mul"]
    assert [hit.rule for hit in report.hits] == ["dead_code"] * 3
    assert all("test_dead.py" in hit.source for hit in report.hits)
    assert (report.equations_before, report.equations_after) == (4, 1)


def test_R09_a_call_loses_unused_results_and_operands() -> None:
    def fn(x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.jit(lambda a, b: (a * 2, jnp.sin(b)))(x, jnp.cos(y))[0]

    result = _drop(fn, X, Y)
    call = _equation(result, "jit")
    assert primitives(result) == ["jit"]
    assert (len(call.invars), len(call.outvars)) == (1, 1)
    assert primitives(call.params["jaxpr"]) == ["mul"]


def test_R09_a_scan_loses_results_carries_and_inputs() -> None:
    def fn(x: jax.Array, y: jax.Array) -> Any:
        def step(carry: Any, t: Any) -> Any:
            kept, lost, feeds = carry
            return (kept * t[0] + feeds, lost + jnp.sin(lost) * t[1], feeds + 1), (kept, lost)

        (kept, _, _), (ys, _) = lax.scan(step, (x, y, x), (jnp.ones((4, 3)), jnp.ones((4, 3))))
        return kept, ys

    result = _drop(fn, X, Y)
    loop = _equation(result, "scan")
    assert _jax.loop_parts(loop) == (0, 2)
    assert (len(loop.invars), len(loop.outvars)) == (3, 3)
    assert "sin" not in primitives(loop.params["jaxpr"])
    optimized = as_function(result)
    gradient = jax.grad(lambda x: sum(v.sum() for v in optimized(x, Y)))(X)
    assert_close(
        "gradient", gradient, jax.grad(lambda x: sum(v.sum() for v in fn(x, Y)))(X), tol=1e-6
    )


def test_R09_a_while_keeps_what_its_condition_needs() -> None:
    def fn(x: jax.Array) -> jax.Array:
        def step(carry: Any) -> Any:
            i, kept, lost = carry
            return i + 1, kept * 2, lost + jnp.sin(kept)

        return lax.while_loop(lambda c: c[0] < 3, step, (0, x, x))[1]

    loop = _equation(_drop(fn, X), "while")
    assert len(loop.outvars) == 2
    assert "sin" not in primitives(loop.params["body_jaxpr"])


def test_R09_a_cond_and_a_checkpoint_lose_results() -> None:
    def fn(x: jax.Array, y: jax.Array) -> Any:
        branch = lax.cond(x[0] > 0, lambda a, b: (a, jnp.sin(b)), lambda a, b: (a * 2, b), x, y)
        saved = jax.checkpoint(lambda a, b: (jnp.sin(a), jnp.cos(b)))(x, y)
        return branch[0], saved[1]

    result = _drop(fn, X, Y)
    cond, checkpoint = _equation(result, "cond"), result.eqns[-1]
    assert [primitives(body) for body in cond.params["branches"]] == [["mul"], []]
    assert (len(cond.invars), len(cond.outvars)) == (2, 1)
    assert primitives(checkpoint.params["jaxpr"]) == ["cos"]


def test_R09_unused_constants_go() -> None:
    table = jnp.arange(1000.0)
    jaxpr = jax.make_jaxpr(lambda x: ((x + table[:3]).sum(), x * 2)[1])(X)
    assert jaxpr.consts
    assert not drop_dead_code(jaxpr)[0].consts


def test_R09_custom_derivatives_and_kernels_are_opaque() -> None:
    @jax.custom_vjp
    def custom(x: jax.Array) -> Any:
        return x * 2, jnp.sin(x)

    custom.defvjp(lambda x: (custom(x), x), lambda x, cts: (cts[0] * 2 + cts[1] * jnp.cos(x),))
    jaxpr = jax.make_jaxpr(lambda x: (custom(x)[0], jax.nn.relu(x)))(X)
    result, report = drop_dead_code(jaxpr)
    assert result is jaxpr
    assert not report.hits


def test_R09_a_shared_body_stays_shared() -> None:
    @jax.jit
    def layer(x: jax.Array) -> jax.Array:
        jnp.sin(x)
        return jnp.tanh(x)

    result, report = drop_dead_code(jax.make_jaxpr(lambda x: layer(layer(layer(x))))(X))
    assert len({id(eqn.params["jaxpr"]) for eqn in result.eqns}) == 1
    assert len(report.hits) == 1
    assert (report.equations_before, report.equations_after) == (9, 6)


def test_R09_effects_stay_in_order(capsys) -> None:
    def fn(x: jax.Array) -> jax.Array:
        jax.debug.print("first {}", x[0], ordered=True)
        jax.jit(lambda y: (jax.debug.print("second {}", y[0], ordered=True), y * 2))(x + 1)

        def step(carry: Any, t: jax.Array) -> Any:
            jax.debug.print("loop {}", t, ordered=True)
            return carry, jnp.sin(t)

        lax.scan(step, 0.0, jnp.arange(2.0))
        lax.cond(x[0] > -9, lambda: jax.debug.print("branch", ordered=True), lambda: None)
        io_callback(lambda v: print("io", v), None, x[0], ordered=True)
        jnp.sin(x)
        return x

    jaxpr = jax.make_jaxpr(fn)(jnp.zeros(3))
    result, report = drop_dead_code(jaxpr)
    assert report.hits
    printed = []
    for program in (jaxpr, result):
        evaluate(program, jnp.zeros(3))
        jax.effects_barrier()
        printed.append(capsys.readouterr().out.split("\n"))
    assert printed[0] == printed[1]
    assert [line.split(" ")[0] for line in printed[0]] == [
        "first", "second", "loop", "loop", "branch", "io", ""
    ]  # fmt: skip
    jax.jit(as_function(result))(jnp.zeros(3))
    jax.effects_barrier()
    lines = capsys.readouterr().out.split("\n")  # JAX orders prints and io apart from each other
    assert [v for v in lines if "io" not in v] == [v for v in printed[0] if "io" not in v]
    assert sorted(lines) == sorted(printed[0])


def test_R09_a_callback_with_an_unused_result_stays() -> None:
    def fn(x: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct((3,), jnp.float32)
        io_callback(lambda v: np.asarray(v), shape, x)
        jax.pure_callback(lambda v: np.asarray(v), shape, x)
        return x * 2

    assert primitives(_drop(fn, X)) == ["io_callback", "mul"]


def test_R09_checks_stay() -> None:
    def fn(x: jax.Array) -> jax.Array:
        checkify.check(x[0] > 100, "too small")
        jnp.sin(x)
        return x * 2

    jaxpr = jax.make_jaxpr(fn)(X)
    result, report = drop_dead_code(jaxpr)
    assert "check" in primitives(result)
    assert report.hits
    error, _ = checkify.checkify(as_function(result))(X)
    with pytest.raises(checkify.JaxRuntimeError, match="too small"):
        error.throw()


def test_R09_writes_to_references_stay_and_unread_reads_go() -> None:
    def fn(x: jax.Array) -> jax.Array:
        ref = jax.new_ref(x)
        ref[0] = 5.0
        jnp.sin(ref[1])

        def step(carry: Any, t: jax.Array) -> Any:
            ref[1] += t
            return carry, t * 2

        lax.scan(step, 0.0, x)
        return ref[...]

    jaxpr = jax.make_jaxpr(fn)(X)
    result, _ = drop_dead_code(jaxpr)
    assert primitives(result) == ["new_ref", "swap", "scan", "get"]
    assert len(_equation(result, "scan").outvars) == 0
    got = [jax.jit(as_function(p))(X)[0] for p in (jaxpr, result)]
    assert_same_bits("reference", got[:1], got[1:])


def test_R09_donated_and_kept_operands_of_a_call_stay() -> None:
    call = jax.jit(lambda a, b: a * 2, donate_argnums=1, keep_unused=True)
    result = _drop(lambda x, y: call(x, jnp.sin(y)), X, Y)
    assert primitives(result) == ["sin", "jit"]
    assert len(result.eqns[-1].invars) == 2


def test_R15_shard_map_bodies_are_entered() -> None:
    out = run_python(
        """
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from tests.harness import assert_close, inputs
from tpjax.stax_passes.pipeline import CLEAN_UP, optimize

mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))

def fn(x, y):
    def body(a, b):
        return -(-a) + jax.lax.psum(a, "i") + jax.lax.psum(a, "i"), jnp.sin(b)
    return jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"))(x, y)[0]

x = inputs("f32[8]", 0)
jaxpr = jax.make_jaxpr(fn)(x, x)
result, reports = optimize(jaxpr, (CLEAN_UP,), verify=True)
(eqn,) = result.eqns
names = [e.primitive.name for e in eqn.params["jaxpr"].eqns]
assert len(eqn.invars) == len(eqn.outvars) == 1
assert sum(name.startswith("psum") for name in names) == 2, names
assert "neg" not in names and "sin" not in names
assert_close("values", jax.jit(jax.extend.core.jaxpr_as_fun(result))(x, x)[0], fn(x, x), tol=0)
again, _ = optimize(result, (CLEAN_UP,))
assert again is result
print("entered", sorted({hit.rule for report in reports for hit in report.hits}))
""",
        devices=2,
    )
    assert "entered ['dead_code', 'negate_twice', 'unused_operand_or_result']" in out
