# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""How long the passes may take: 1,000 equations in a second of one core, and no more than linear.

CPU time of this process is measured, so that what else the machine does counts little; the best of
several turns is taken. `python -m tests.public.speed` prints the curve up to 50,000 equations.
"""

import pytest

from tests.public.speed import KINDS, seconds
from tpjax.core import _jax

TURNS = 3
GROWTH = 2.0
"""How much longer an equation may take in a program eight times as large."""


def _best(kind: str, size: int) -> tuple[float, int]:
    """Returns the fewest seconds, and how many equations they were for."""
    jaxpr = KINDS[kind](size)
    return min(seconds(jaxpr)["total"] for _ in range(TURNS)), _jax.count_equations(jaxpr)


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_thousand_equations_take_a_second_and_time_grows_linearly(kind: str) -> None:
    small, few = _best(kind, 1_000)
    assert 1e3 * small / few <= 1.0
    large, many = _best(kind, 8_000)
    assert large / many <= GROWTH * small / few


def test_long_chains_and_deep_nesting_need_no_recursion() -> None:
    """50,000 equations, one after the other."""
    assert seconds(KINDS["elementwise"](50_000))["total"] < 50.0
