# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Wrong rules planted in the exact passes: the random programs of `tests.fuzz` find each."""

from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, Phase, find, settings
from hypothesis.errors import NoSuchExample

from tests.fuzz import oracle
from tests.fuzz.generator import programs
from tests.fuzz.oracle import Difference, check
from tests.stax_passes.programs import assert_same_bits, evaluate
from tpjax.stax_passes import canonical as rules
from tpjax.stax_passes import dead, share
from tpjax.stax_passes.sweep import ExactRule

SEED = 1
"""Of the random programs: finds the rarest fault, one in 230 programs, within 140."""
TRIES = settings(
    max_examples=4000,  # should another release of Hypothesis draw others, luck of 1 in 10^7
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=[*HealthCheck],  # pyright: ignore
)


def _operand(level: Any, eqn: Any) -> Any:
    return eqn.invars[0]


def _before(level: Any, eqn: Any) -> Any:
    maker = level.maker(eqn.invars[0])
    return maker.invars[0] if maker is not None else None


FAULTS = {
    "x + 0.0 is x": ("add", ExactRule("add_zero", _operand)),
    "~x is x": ("not", ExactRule("not_twice", _operand)),
    "f32 -> bf16 -> f32 is x": ("convert_element_type", ExactRule("convert_chain", _before)),
    "x of x[::-1] is x": ("rev", ExactRule("reverse_twice", _operand)),
    "a held value is its operand": ("stop_gradient", ExactRule("held", _operand)),
}


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets the oracle run one pass alone, so that a test of it is quick."""

    def choose(one: Any) -> None:
        monkeypatch.setattr(oracle, "ALONE", (one,))
        monkeypatch.setattr(oracle, "PIPELINES", {})

    return choose


def _find() -> None:
    """Raises unless a random program has another value after the pass than before it."""
    find(programs, _differs, settings=TRIES, random=Random(SEED))


def _differs(program: Any) -> bool:
    try:
        check(program, gradients=False)
    except Difference:
        return True
    return False


@pytest.mark.parametrize("fault", list(FAULTS))
def test_planted_wrong_rules_are_found(fault: str, only: Any, monkeypatch: Any) -> None:
    name, rule = FAULTS[fault]
    monkeypatch.setitem(rules.RULES, name, (rule,))
    only(rules.canonicalise)
    _find()


def test_planted_loss_of_effects_is_found(only: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(dead._jax, "must_stay", lambda eqn: False)
    only(dead.drop_dead_code)
    _find()


def test_planted_loss_of_a_carry_is_found(only: Any, monkeypatch: Any) -> None:
    """A loop needs what its later steps read, not only what its results are made of."""
    once = lambda self, eqn, body, outs: (outs, self.needs(body, outs))  # noqa: E731
    monkeypatch.setattr(dead._Dropper, "_scan_needs", once)
    only(dead.drop_dead_code)
    _find()


def test_planted_merging_of_swapped_operands_is_found(only: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(share, "_is_commutative", lambda eqn: len(eqn.invars) == 2)
    x, y = jnp.arange(3), jnp.asarray([5, 7, -1])
    jaxpr = jax.make_jaxpr(lambda x, y: (x - y, y - x))(x, y)
    merged, _ = share.share_subexpressions(jaxpr)
    with pytest.raises(AssertionError, match="values differ"):
        assert_same_bits("merged", evaluate(merged, x, y), evaluate(jaxpr, x, y))
    only(share.share_subexpressions)
    _find()


def test_nothing_is_found_in_the_right_rules(only: Any) -> None:
    """The search itself says nothing of passes that are right."""
    only(rules.canonicalise)
    with pytest.raises(NoSuchExample):
        find(programs, _differs, settings=settings(TRIES, max_examples=40), random=Random(SEED))
