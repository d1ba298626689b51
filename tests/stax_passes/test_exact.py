# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Every exact pass keeps the bits of random programs, and has nothing to do the second time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, find, given, settings

from tests.stax_passes.programs import SHAPE, assert_same_bits, evaluate, programs, run
from tpjax.core import _jax
from tpjax.stax_passes import canonical as rules
from tpjax.stax_passes import share
from tpjax.stax_passes.pipeline import CLEAN_UP, optimize
from tpjax.stax_passes.sweep import ExactRule

quick = settings(max_examples=40, deadline=None, suppress_health_check=[*HealthCheck])  # pyright: ignore
X = jnp.asarray([[-0.0, 0.0, 1.5], [-2.25, np.inf, np.nan]], jnp.float32)
Y = jnp.asarray([[-0.0, 3.0, 0.0], [-1.0, 0.3, 100.0]], jnp.bfloat16)
N = jnp.asarray([[-7, 0, 3], [2**31 - 1, -(2**31), 12]], jnp.int32)
assert X.shape == Y.shape == N.shape == SHAPE


def _trace(program) -> _jax.Jaxpr:
    return jax.make_jaxpr(lambda *args: run(program, *args))(X, Y, N)


@quick
@given(program=programs)
def test_every_exact_pass_keeps_the_bits(program) -> None:
    jaxpr = _trace(program)
    expected = evaluate(jaxpr, X, Y, N)
    for passes in (*((p,) for p in CLEAN_UP), (CLEAN_UP,), CLEAN_UP[::-1]):
        result, _ = optimize(jaxpr, passes, verify=True)
        names = ", ".join(getattr(p, "__name__", "all") for p in passes)
        assert result.out_avals == jaxpr.out_avals  # weak types too
        assert_same_bits(names, evaluate(result, X, Y, N), expected)


@quick
@given(program=programs)
def test_R01_running_the_passes_again_changes_nothing(program) -> None:
    once, _ = optimize(_trace(program), (CLEAN_UP,))
    again, reports = optimize(once, (CLEAN_UP,))
    assert again is once
    assert not any(report.hits for report in reports)
    for run_pass in CLEAN_UP:
        assert run_pass(once)[0] is once


FAULTS = {
    "x + 0.0 is x": (
        rules.RULES,
        "add",
        (ExactRule("add_zero", lambda level, eqn: eqn.invars[0]),),
    ),
    "~x is x": (rules.RULES, "not", (ExactRule("not_twice", lambda level, eqn: eqn.invars[0]),)),
    "f32 -> bf16 -> f32 is x": (
        rules.RULES,
        "convert_element_type",
        (ExactRule("convert_chain", lambda level, eqn: _before(level, eqn)),),
    ),
}


def _before(level, eqn):
    maker = level.maker(eqn.invars[0])
    return maker.invars[0] if maker is not None else None


@pytest.mark.parametrize("fault", list(FAULTS))
def test_planted_wrong_rules_are_found(fault, monkeypatch) -> None:
    """The random programs find each of these faults in a few tries."""
    table, key, value = FAULTS[fault]
    monkeypatch.setitem(table, key, value)

    def differs(program) -> bool:
        jaxpr = _trace(program)
        result, _ = rules.canonicalise(jaxpr)
        try:
            assert_same_bits(fault, evaluate(result, X, Y, N), evaluate(jaxpr, X, Y, N))
        except AssertionError:
            return True
        return False

    quick_find = settings(max_examples=200, deadline=None, database=None, phases=[Phase.generate])
    find(programs, differs, settings=quick_find)


def test_planted_merging_of_swapped_operands_is_caught(monkeypatch) -> None:
    monkeypatch.setattr(share, "_is_commutative", lambda eqn: len(eqn.invars) == 2)
    jaxpr = jax.make_jaxpr(lambda x, y: (x - y, y - x))(N, N[::-1])
    merged, _ = share.share_subexpressions(jaxpr)
    with pytest.raises(AssertionError, match="values differ"):
        assert_same_bits("merged", evaluate(merged, N, N[::-1]), evaluate(jaxpr, N, N[::-1]))
