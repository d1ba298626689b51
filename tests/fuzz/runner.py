# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Checks a chunk of random programs of one seed, in a process of its own."""

import gc
import time
from collections import Counter
from typing import Any

import hypothesis
import jax

from tests.fuzz.generator import depth, source
from tests.fuzz.generator import programs as random_programs
from tests.fuzz.oracle import Difference, check

CHUNK = 50
"""Programs of one seed: a difference ends its chunk, and the next goes on."""


def run_chunk(
    seed: int, programs: int, *, jit_every: int, shrink: bool = True, x64: bool = False
) -> tuple[Counter[str], str | None]:
    """Checks that many programs of the seed; returns what was compared, and a difference, shrunk.

    Args:
      seed: of hypothesis and of the inputs.
      programs: how many.
      jit_every: every how many programs are compared compiled as a whole too; 0: none is.
      shrink: look for the smallest program with the difference.
      x64: also with 64-bit numbers.
    """
    if x64:
        jax.config.update("jax_enable_x64", True)
    gc.freeze()
    counts, start = Counter[str](), time.process_time()
    smallest: list[str] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=programs,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate, *[hypothesis.Phase.shrink] * shrink],
        suppress_health_check=[*hypothesis.HealthCheck],  # pyright: ignore
        report_multiple_bugs=False,
        verbosity=hypothesis.Verbosity.quiet,
    )
    @hypothesis.given(random_programs)
    def fuzz(program: Any) -> None:
        jit = bool(jit_every) and counts["programs"] % jit_every == 0
        try:
            found = check(program, jit=jit or bool(smallest), seed=seed)
        except Exception as error:
            kind = (
                "" if isinstance(error, Difference) else f"{type(error).__name__} outside passes: "
            )
            smallest[:] = [f"{kind}{error}\n{source(program)}"]
            raise
        if not smallest:
            counts.update(found)
            counts[f"nested {depth(program)} deep"] += 1

    difference = None
    try:
        fuzz()
    except Exception as error:
        difference = smallest[-1] if smallest else f"{type(error).__name__}: {error}"
    counts["CPU ms"] += round(1000 * (time.process_time() - start))
    return counts, difference
