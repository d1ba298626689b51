# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The pipeline: order, groups that settle, checks that name the pass, and planted faults."""

import time
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.harness import inputs
from tests.stax_passes.programs import as_function, assert_same_bits, evaluate, primitives
from tpjax.core import _jax
from tpjax.stax_passes.canonical import canonicalise
from tpjax.stax_passes.contraction import simplify_products
from tpjax.stax_passes.dead import drop_dead_code
from tpjax.stax_passes.fold import fold_constants
from tpjax.stax_passes.movement import simplify_moves
from tpjax.stax_passes.narrowing import narrow_moves
from tpjax.stax_passes.pipeline import (
    CLEAN_UP,
    EXACT_PASSES,
    FINISH,
    MAX_ROUNDS,
    ON_REQUEST,
    PASSES,
    optimize,
)
from tpjax.stax_passes.report import Hit, Report
from tpjax.stax_passes.share import share_subexpressions
from tpjax.stax_passes.spreading import sink_broadcasts

X = inputs("f32[3]", 0)


def _trace(fn: Any = lambda x: jnp.sin(x) * 1.0 + 0.0) -> _jax.Jaxpr:
    return jax.make_jaxpr(fn)(X)


def _report(name: str, jaxpr: _jax.Jaxpr, hits: int = 0) -> Report:
    return Report(name, (Hit(name, "here"),) * hits, (), len(jaxpr.eqns), len(jaxpr.eqns))


def _editing(name: str, edit: Any, hits: int = 1) -> Any:
    """Returns a pass that gives the list of equations to `edit`."""

    def run(jaxpr: _jax.Jaxpr) -> tuple[_jax.Jaxpr, Report]:
        result = jaxpr.replace(eqns=edit(list(jaxpr.eqns)), debug_info=jaxpr.debug_info)
        return result, _report(name, jaxpr, hits)

    run.__name__ = name
    return run


def test_passes_and_their_order() -> None:
    first = (canonicalise, fold_constants, simplify_moves, share_subexpressions, drop_dead_code)
    assert first == CLEAN_UP
    names = [getattr(entry, "__name__", "clean up") for entry in PASSES]
    exact = [getattr(entry, "__name__", "clean up") for entry in EXACT_PASSES]
    assert exact == [name for name in names if not name.startswith("fuse_")]
    assert (*CLEAN_UP, sink_broadcasts, simplify_products) == FINISH == PASSES[-2]
    assert (narrow_moves,) == ON_REQUEST
    assert EXACT_PASSES[-2] == FINISH[:-1]
    assert names == [
        *("share_bodies", "share_layers", "clean up", "fuse_attention", "fuse_norm"),
        *("hoist_invariants", "clean up", "share_layers"),
    ]
    _, reports = optimize(_trace(), ())
    assert reports == ()
    _, reports = optimize(_trace(), (drop_dead_code, canonicalise))
    assert [report.name for report in reports] == ["drop_dead_code", "canonicalise"]


def test_a_group_reports_each_pass_once_with_what_it_removed() -> None:
    def fn(x: jax.Array) -> Any:
        jnp.cos(x)
        return jnp.sin(x) * 1.0, jnp.sin(x) * 1.0

    result, reports = optimize(_trace(fn), (CLEAN_UP,))
    assert primitives(result) == ["sin"]
    removed = {r.name: r.equations_before - r.equations_after for r in reports}
    assert removed == {
        "canonicalise": 2, "fold_constants": 0, "simplify_moves": 0, "share_subexpressions": 1,
        "drop_dead_code": 1,
    }  # fmt: skip
    assert all("test_pipeline.py:" in hit.source for r in reports for hit in r.hits)


def test_R10_a_group_is_repeated_until_it_settles() -> None:
    calls = []

    def shrink(jaxpr: _jax.Jaxpr) -> tuple[_jax.Jaxpr, Report]:
        calls.append(len(jaxpr.eqns))
        eqns = [e for e in jaxpr.eqns if e.primitive.name == "neg"]
        if not eqns:
            return jaxpr, _report("shrink", jaxpr)
        new = jaxpr.replace(eqns=[*jaxpr.eqns[:-1]], outvars=jaxpr.eqns[-1].invars)
        return new, _report("shrink", jaxpr, hits=1)

    result, reports = optimize(_trace(lambda x: lax.neg(lax.neg(lax.neg(x)))), ((shrink,),))
    assert calls == [3, 2, 1, 0]
    assert not result.eqns
    assert len(reports[0].hits) == 3


def test_R10_a_pass_that_never_settles_is_named() -> None:
    def flip(jaxpr: _jax.Jaxpr) -> tuple[_jax.Jaxpr, Report]:
        return jaxpr, _report("flip", jaxpr, hits=1)

    with pytest.raises(ValueError, match=f"flip.*{MAX_ROUNDS} rounds"):
        optimize(_trace(), ((canonicalise, flip),))
    assert len(optimize(_trace(), (flip,))[1][0].hits) == 1  # outside a group a pass runs once


def _unordered(eqns: list[Any]) -> list[Any]:
    return eqns[::-1]


def _unbound(eqns: list[Any]) -> list[Any]:
    return eqns[1:]


def _wrong_type(eqns: list[Any]) -> list[Any]:
    return [e.replace(primitive=lax.lt_p) if e.primitive is lax.add_p else e for e in eqns]


@pytest.mark.parametrize("fault", [_unordered, _unbound, _wrong_type])
def test_R11_an_ill_typed_result_names_the_pass(fault) -> None:
    bad = _editing("break_it", fault)
    jaxpr = _trace()
    with pytest.raises(RuntimeError, match="the pass break_it"):
        optimize(jaxpr, (canonicalise, bad, drop_dead_code), verify=True)
    with pytest.warns(UserWarning, match="break_it is left out") as caught:
        result, reports = optimize(jaxpr, (canonicalise, bad, drop_dead_code))
    assert len(caught) == 1
    assert [r.name for r in reports] == ["canonicalise", "break_it", "drop_dead_code"]
    assert not reports[1].hits
    assert primitives(result) == ["sin", "add"]


def test_R11_changed_inputs_results_and_lost_effects_name_the_pass() -> None:
    def printing(x: jax.Array) -> jax.Array:
        jax.debug.print("{}", x)
        jax.debug.print("{}", x)
        return x * 2.0

    silent = _editing("silence", lambda eqns: eqns[1:])
    with pytest.raises(RuntimeError, match=r"silence.*debug_(print|callback)"):
        optimize(_trace(printing), (silent,), verify=True)

    def narrow(jaxpr: _jax.Jaxpr) -> tuple[_jax.Jaxpr, Report]:
        other = jax.make_jaxpr(lambda x: jnp.float16(1) * x.astype("float16"))(X)
        return other, _report("narrow", jaxpr, hits=1)

    def weaken(jaxpr: _jax.Jaxpr) -> tuple[_jax.Jaxpr, Report]:
        return jax.make_jaxpr(lambda x: x * 2.0)(2.0), _report("weaken", jaxpr, hits=1)

    with pytest.raises(RuntimeError, match=r"narrow.*out_avals"):
        optimize(_trace(), (narrow,), verify=True)
    with pytest.raises(RuntimeError, match=r"weaken.*in_avals"):
        optimize(jax.make_jaxpr(lambda x: x * 2.0)(jnp.float32(2)), (weaken,), verify=True)


def test_a_pass_that_raises_is_left_out_with_one_warning() -> None:
    def broken(jaxpr: _jax.Jaxpr) -> tuple[_jax.Jaxpr, Report]:
        raise KeyError("no such thing")

    with pytest.warns(UserWarning, match=r"broken is left out.*no such thing") as caught:
        result, reports = optimize(_trace(), ((broken, canonicalise),))
    assert len(caught) == 1
    assert primitives(result) == ["sin", "add"]
    assert reports[0].name == "broken"
    with pytest.raises(RuntimeError, match=r"broken raised KeyError"):
        optimize(_trace(), (broken,), verify=True)


def test_bad_input_has_a_remedy() -> None:
    with pytest.raises(TypeError, match=r"jaxpr must be a jaxpr; got function.*make_jaxpr"):
        optimize(lambda x: x)  # pyright: ignore
    with pytest.warns(UserWarning, match="a pass returns a jaxpr and a Report"):
        optimize(_trace(), (lambda jaxpr: (jaxpr, None),))  # pyright: ignore


# -- planted faults: what the checks of this suite must catch -------------------------------------


def _sums_lose_zero(eqns: list[Any]) -> list[Any]:
    """x + 0.0 is x: wrong for -0.0."""
    return [
        e.replace(primitive=lax.sub_p)
        if e.primitive is lax.add_p and isinstance(e.invars[1], _jax.Literal)
        else e
        for e in eqns
    ]


def _products_vanish(eqns: list[Any]) -> list[Any]:
    """x * 0.0 is 0.0: wrong for NaN; here x * 1.0 becomes x * 0.0."""
    return [
        e.replace(invars=[e.invars[0], _jax.literal(np.zeros((), np.float32), e.invars[1].aval)])
        if e.primitive is lax.mul_p
        else e
        for e in eqns
    ]


@pytest.mark.parametrize("fault", [_sums_lose_zero, _products_vanish])
def test_planted_wrong_bits_are_caught(fault) -> None:
    x = jnp.asarray([-0.0, 1.0, 2.0])
    jaxpr = jax.make_jaxpr(lambda x: (x * 1.0) + 0.0)(x)
    wrong, _ = optimize(jaxpr, (_editing("wrong", fault),), verify=True)
    with pytest.raises(AssertionError, match="values differ"):
        assert_same_bits("planted", evaluate(wrong, x), evaluate(jaxpr, x))


def test_planted_wrong_types_are_caught() -> None:
    strong, weak = jnp.float32(2) * np.float32(1), jnp.sin(2.0)
    for other in (weak, strong.astype(jnp.bfloat16), strong[None]):
        with pytest.raises(AssertionError, match="planted"):
            assert_same_bits("planted", [other], [strong])


# -- size and depth -------------------------------------------------------------------------------


def _chain(length: int) -> _jax.Jaxpr:
    def fn(x: jax.Array) -> jax.Array:
        for _ in range(length // 4):
            x = jnp.sin(x) * 1.0
            jnp.cos(x)
            x = 2.0 * x
        return x

    return jax.make_jaxpr(fn)(1.0)


def test_a_thousand_equations_are_quick() -> None:
    jaxpr = _chain(1000)
    assert len(jaxpr.eqns) == 1000
    optimize(jaxpr, CLEAN_UP)
    best = 1e9
    for _ in range(5):
        start = time.process_time()
        for run in CLEAN_UP:
            jaxpr_now, _ = run(jaxpr)
        best = min(best, time.process_time() - start)
        assert jaxpr_now
    assert best < 0.3, f"{best:.2f} s"


def test_long_chains_need_no_recursion() -> None:
    eqn = jax.make_jaxpr(lambda x: -(x * 1.0))(1.0)
    variables, eqns = [eqn.invars[0]], []
    for _ in range(25_000):
        for template in eqn.eqns:
            new = _jax.Var(template.outvars[0].aval)
            operands = [variables[-1], *template.invars[1:]]
            eqns.append(template.replace(invars=operands, outvars=[new]))
            variables.append(new)
    jaxpr = eqn.replace(eqns=eqns, outvars=[variables[-1]], debug_info=eqn.debug_info)
    for run in CLEAN_UP:
        jaxpr, _ = run(jaxpr)
    assert not jaxpr.eqns  # 25,000 negations, an even number
    assert jaxpr.outvars == jaxpr.invars


# -- composition ----------------------------------------------------------------------------------


def test_R15_bodies_are_entered_and_still_differentiate() -> None:
    def fn(x: jax.Array) -> jax.Array:
        def step(carry: jax.Array, t: jax.Array) -> Any:
            inner = jax.checkpoint(lambda c: jnp.sin(lax.neg(lax.neg(c))) * 1.0)(carry)
            inner = lax.cond(
                t[0] > 0, lambda c: c * 1.0, lambda c: lax.neg(lax.neg(c)) / 1.0, inner
            )
            return jax.jit(lambda c: (c - 0.0) * t)(inner), inner

        carry, ys = lax.scan(step, x, jnp.ones((4, 3)))
        return carry.sum() + ys.sum()

    jaxpr = _trace(fn)
    result, reports = optimize(jaxpr, (CLEAN_UP,), verify=True)
    fired = {hit.rule for report in reports for hit in report.hits}
    assert {"negate_twice", "multiply_one", "divide_one", "subtract_zero"} <= fired
    optimized = as_function(result)
    how = jax.value_and_grad
    under = (X, how), (X, lambda f: jax.jit(how(f))), (X[None], lambda f: jax.vmap(how(f)))
    for argument, wrap in under:
        got, want = wrap(lambda x: optimized(x)[0])(argument), wrap(fn)(argument)
        assert_same_bits("value and gradient", [*got], [*want])
    twice = jax.jacfwd(jax.grad(lambda x: optimized(x)[0]))(X)
    assert_same_bits("second derivative", [twice], [jax.jacfwd(jax.grad(fn))(X)])


def test_source_names_and_argument_names_are_kept() -> None:
    def loss(weights: jax.Array) -> jax.Array:
        with jax.named_scope("layer"):
            return jnp.sin(weights * 1.0) * 2.0

    jaxpr = jax.make_jaxpr(loss)(X)
    result, _ = optimize(jaxpr, (CLEAN_UP,), verify=True)
    assert result.debug_info.arg_names == jaxpr.debug_info.arg_names == ("weights",)
    kept = {e.primitive.name: e for e in jaxpr.eqns}
    for eqn in result.eqns:
        assert _jax.source_of(eqn) == _jax.source_of(kept[eqn.primitive.name])
        assert str(eqn.source_info.name_stack) == "layer"
        assert eqn.ctx is kept[eqn.primitive.name].ctx


def test_no_warnings_on_an_ordinary_program() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimize(_trace(lambda x: jax.nn.softmax(x) @ jnp.ones((3, 2))))
