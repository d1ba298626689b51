# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""What is taken out of a scan, and what must stay in it."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.harness import inputs
from tests.stax_passes.gradients import assert_gradients
from tests.stax_passes.programs import as_function, primitives, rules_fired
from tpjax.core import _jax
from tpjax.stax_passes.hoist import hoist_invariants
from tpjax.stax_passes.pipeline import CLEAN_UP, optimize

X, ROWS, W = inputs("f32[6]", 0), inputs("f32[3,6]", 1), inputs("f32[6,6]", 2)
HALF = inputs("bf16[6]", 3)
KEY = jax.random.key(3)
PASSES = (CLEAN_UP, hoist_invariants, CLEAN_UP)


def _scan(step: Any, **kwargs: Any) -> Any:
    """Returns a function that scans `step(carry, row, w)` over the rows."""
    return lambda x, rows, w: lax.scan(lambda c, row: step(c, row, w), x, rows, **kwargs)


def _bodies(jaxpr: _jax.Jaxpr) -> list[str]:
    loops = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    return [name for eqn in loops for name in primitives(eqn.params["jaxpr"])]


OUT: list[tuple[str, Any, list[str]]] = [
    # what is computed once, and so is no more in the body
    ("a product", _scan(lambda c, r, w: (c * (w @ w)[0] + r, None)), ["dot_general"]),
    ("a slow function", _scan(lambda c, r, w: (c * jnp.cos(w[0]) + r, c)), ["cos"]),
    ("larger, but slow", _scan(lambda c, r, w: (c + jnp.exp(w[0][:, None] * w[1]) @ r, None)),
     ["exp", "mul"]),
    ("in reverse", _scan(lambda c, r, w: (c * jnp.tanh(w[0]) + r, r), reverse=True), ["tanh"]),
    ("unrolled", _scan(lambda c, r, w: (c * jnp.tanh(w[0]) + r, r), unroll=3), ["tanh"]),
    ("random numbers", _scan(lambda c, r, w: (c + jax.random.normal(KEY, (6,)) * w[0] + r, None)),
     ["jit"]),
    ("a helper", _scan(lambda c, r, w: (c * jax.nn.silu(w[0]) + r, None)), ["jit"]),
    ("a whole loop", _scan(lambda c, r, w: (c * lax.scan(
        lambda d, q: (jnp.sin(d) + q, None), w[0], w)[0] + r, None)), ["scan"]),
]  # fmt: skip

STAYS: list[tuple[str, Any, list[str]]] = [
    ("what the carry is in", _scan(lambda c, r, w: (jnp.cos(c), r)), ["cos"]),
    ("what the rows are in", _scan(lambda c, r, w: (c + jnp.cos(r), None)), ["cos"]),
    ("a broadcast", _scan(lambda c, r, w: (
        c + (jnp.broadcast_to(w, (2, 6, 6)) * r).sum((0, 1)), None)), ["broadcast_in_dim"]),
    ("a mask of places", _scan(lambda c, r, w: (jnp.where(
        lax.broadcasted_iota(int, (6, 6), 0) > 2, w, c).sum(0) + r, None)), ["iota", "gt"]),
    ("larger and quick", _scan(lambda c, r, w: (
        c + ((w[None] - w[:, None]) * r).sum((0, 1)), None)), ["sub"]),
    ("fewer bits", _scan(lambda c, r, w: (c + r @ w.astype("bfloat16"), None)),
     ["convert_element_type"]),
    ("a barrier", _scan(lambda c, r, w: (c * lax.optimization_barrier(w)[0], None)),
     ["optimization_barrier"]),
    ("no step at all", lambda x, rows, w: lax.scan(
        lambda c, r: (c * jnp.cos(w[0]), None), x, rows[:0]), ["cos"]),
]  # fmt: skip


@pytest.mark.parametrize(("fn", "gone"), [r[1:] for r in OUT], ids=[r[0] for r in OUT])
def test_what_is_the_same_at_every_step_is_computed_once(fn, gone) -> None:
    cleaned, _, _ = rules_fired(fn, X, ROWS, W)
    result, fired, _ = rules_fired(fn, X, ROWS, W, passes=PASSES)
    assert fired["loop_invariant"] >= 1
    assert set(gone) <= set(_bodies(cleaned))
    assert not set(gone) & set(_bodies(result))
    assert_gradients("hoisted", fn, result, X, ROWS, W, tol=1e-6)  # sums in another order


@pytest.mark.parametrize(("fn", "kept"), [r[1:] for r in STAYS], ids=[r[0] for r in STAYS])
def test_what_stays_in_the_loop(fn, kept) -> None:
    result, fired, _ = rules_fired(fn, X, ROWS, W, passes=(hoist_invariants,))
    assert not fired["loop_invariant"]
    assert set(kept) <= set(_bodies(result)) | set(primitives(result))


def test_effects_stay_in_the_loop() -> None:
    seen: list[float] = []

    def step(c: jax.Array, row: jax.Array) -> Any:
        jax.debug.callback(lambda v: seen.append(float(v)), W[0, 0], ordered=True)
        return c + row, None

    result, fired, _ = rules_fired(lambda x, rows: lax.scan(step, x, rows), X, ROWS, passes=PASSES)
    seen.clear()
    jax.block_until_ready(as_function(result)(X, ROWS))
    jax.effects_barrier()
    assert len(seen) == 3
    assert not fired["loop_invariant"]


def test_references_stay_in_the_loop() -> None:
    def fn(x: jax.Array, rows: jax.Array) -> Any:
        ref = jax.new_ref(x)

        def step(c: jax.Array, row: jax.Array) -> Any:
            ref[...] = jnp.cos(ref[...]) + row
            return c + ref[...], None

        return lax.scan(step, x, rows)[0], ref[...]

    rules = optimize(jax.make_jaxpr(fn)(X, ROWS), PASSES, verify=True)[1]
    assert "loop_invariant" not in Counter(hit.rule for report in rules for hit in report.hits)


def test_a_carry_handed_on_becomes_a_constant() -> None:
    def fn(x: jax.Array, rows: jax.Array, w: jax.Array) -> Any:
        def step(carry: Any, row: jax.Array) -> Any:
            c, kept = carry
            return (c * jnp.tanh(kept)[0] + row, kept * 1.0), kept[0]

        return lax.scan(step, (x, w), rows)

    result, fired, _ = rules_fired(fn, X, ROWS, W, passes=PASSES)
    assert fired["carry_handed_on"] == 1
    (loop,) = (eqn for eqn in result.eqns if eqn.primitive.name == "scan")
    assert _jax.loop_parts(loop)[1] == 1
    assert "tanh" not in _bodies(result)  # it depends on the carry that is none
    assert_gradients("handed on", fn, result, X, ROWS, W, tol=1e-6)


def test_rows_handed_on_are_the_operand() -> None:
    def fn(x: jax.Array, rows: jax.Array) -> Any:
        return lax.scan(lambda c, row: (c + row, row * 1.0), x, rows, reverse=True)

    result, fired, _ = rules_fired(fn, X, ROWS, passes=PASSES)
    assert fired["rows_handed_on"] == 1
    assert result.outvars[1] is result.invars[1]
    assert_gradients("rows", fn, result, X, ROWS)


def test_a_loop_inside_a_loop_hands_its_constants_outwards() -> None:
    def inner(c: jax.Array, row: jax.Array) -> Any:
        return lax.scan(lambda d, q: (d @ (W @ W) + q * jnp.outer(row, row)[0], None), c, ROWS)

    def fn(x: jax.Array, rows: jax.Array) -> Any:
        return lax.scan(inner, x, rows)[0]

    result, _, _ = rules_fired(fn, X, ROWS, passes=PASSES)
    assert primitives(result).count("dot_general") == 1  # W @ W, before both


def test_what_nothing_reads_does_not_stay_behind_without_its_operands() -> None:
    def step(c: jax.Array, row: jax.Array) -> Any:
        jnp.sin(jnp.tanh(W[0]))  # dead, and what it reads is taken out
        return c * jnp.tanh(W[0]) + row, None

    result, fired, _ = rules_fired(
        lambda x, rows: lax.scan(step, x, rows), X, ROWS, passes=(hoist_invariants,)
    )
    assert fired["loop_invariant"] == 1
    assert _bodies(result) == ["mul", "add"]


def test_the_passes_have_nothing_to_do_the_second_time() -> None:
    for _, fn, _ in (*OUT, *STAYS):
        once, _ = optimize(jax.make_jaxpr(fn)(X, ROWS, W))
        again, reports = optimize(once)
        assert again is once, [hit for report in reports for hit in report.hits]


def test_an_unread_invariant_goes_with_what_it_reads() -> None:
    """Found by random programs: it stayed, and what it reads was taken out."""

    def fn(x: Any, w: Any) -> Any:
        def turn(c: Any, _: Any) -> Any:
            wide = w.astype(jnp.float32)
            unread = wide * wide
            del unread
            return c + 1, jnp.sin(wide).astype(jnp.bfloat16)

        return lax.scan(turn, x, None, 3)

    jaxpr = jax.make_jaxpr(fn)(jnp.float32(1), jnp.ones(3, jnp.bfloat16))
    result, report = hoist_invariants(jaxpr)
    assert report.hits
    _jax.check(result)
