# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Fresh random programs at each run, what the generator reaches, and faults planted in passes."""

import secrets
from collections import Counter
from typing import Any

import jax
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.generator import depth, primitives, programs, trace
from tests.fuzz.oracle import Difference, check
from tests.fuzz.runner import run_chunk

PROGRAMS = 200
"""Fresh ones of each run; `python -m tests.fuzz` runs thousands."""


def test_fresh_programs() -> None:
    start = secrets.randbelow(10**9)
    counts: Counter[str] = Counter()
    for chunk in range(4):
        found, difference = run_chunk(start + chunk, PROGRAMS // 4, jit_every=0)
        counts += found
        assert difference is None, (
            f"python -m tests.fuzz --programs 50 --seed {start + chunk}\n{difference}"
        )
    assert counts["programs"] >= PROGRAMS * 0.9
    assert counts["gradients"] > 0.95 * counts["programs"]  # JAX cannot differentiate some
    assert counts["gradients equal in bits"] > 10 * counts["gradients summed in another order"]


def test_the_generator_reaches_sixty_primitives_and_two_levels() -> None:
    found, depths = Counter[str](), Counter[int]()

    @seed(0)
    @settings(
        max_examples=300,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[*HealthCheck],  # pyright: ignore
    )
    @given(programs)
    def collect(program: Any) -> None:
        found.update(primitives(trace(program)))
        depths[depth(program)] += 1

    collect()
    nested = {"jit", "scan", "while", "cond", "remat2", "custom_jvp_call", "custom_vjp_call"}
    assert nested <= set(found) | ({"remat2"} if "checkpoint" in found else set())
    assert len(found) >= 60, sorted(found)
    assert min(depths[0], depths[1], depths[2]) > 20, depths


def test_a_program_that_jax_compiles_too() -> None:
    counts = check([("layers", 5, [("smooth", 3, [])]), ("grouped", 1, [])], jit=True)
    assert counts["programs"] == 1


@pytest.mark.slow
def test_programs_with_64_bits() -> None:
    with jax.enable_x64(True):
        for start in range(4):
            _, difference = run_chunk(start, 50, jit_every=0, x64=True)
            assert difference is None, difference


def test_a_difference_shows_the_program_and_how_to_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.fuzz import oracle

    def broken(jaxpr: Any) -> Any:
        return jaxpr.replace(outvars=jaxpr.outvars[::-1]), oracle.ALONE[0](jaxpr)[1]

    monkeypatch.setattr(oracle, "ALONE", (broken,))
    with pytest.raises(Difference, match="broken"):
        check([("arithmetic", 0, [])])
    _, difference = run_chunk(0, 20, jit_every=0)
    assert difference is not None
    assert "from tests.fuzz.oracle import check" in difference
    assert "in_avals" not in difference
