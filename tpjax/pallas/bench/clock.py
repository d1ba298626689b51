# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Times compiled programs side by side: groups of calls in turn, median, confidence interval.

Whoever runs first on a GPU meets higher clocks, and machines drift: programs that are compared run
group by group in one loop, each round beginning with another one.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

GROUPS = 15
FEWEST_GROUPS = 6
"""With fewer, no two of them hold the median with a confidence of 95 %."""
GROUP_MS = 10.0
"""Length of a group of calls: long beside a clock's resolution and a call's way through Python."""
LONGEST_MS = 1500.0
"""What a program may take in all before it gets fewer groups."""
CONFIDENCE = 0.95


class Timing(NamedTuple):
    """Milliseconds a call: the median over groups, and an interval that holds the true one."""

    ms: float
    low_ms: float
    high_ms: float
    confidence: float
    """That the interval holds the true median, were groups independent."""
    groups: int
    calls: int
    """In a group."""


def median_of(times: Sequence[float], calls: int = 1) -> Timing:
    """Returns the median of group times and its interval between two of them, by order statistics.

    The k-th smallest and k-th largest of n hold the median unless fewer than k lie on one side,
    which has the binomial probability 2 P(X < k), X ~ B(n, 1/2); k is the largest that leaves
    `CONFIDENCE`. No shape of the distribution is assumed.

    Args:
      times: milliseconds a call of each group.
      calls: calls in a group.
    """
    ordered, n = sorted(times), len(times)
    middle = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    k, outside = 1, 2 * 0.5**n
    while True:
        more = outside + 2 * math.comb(n, k) * 0.5**n
        if more > 1 - CONFIDENCE or k + 1 > n // 2:
            break
        k, outside = k + 1, more
    return Timing(middle, ordered[k - 1], ordered[n - k], max(0.0, 1 - outside), n, calls)


def time_together(
    programs: Sequence[Callable[[], Any]], groups: int = GROUPS, group_ms: float = GROUP_MS
) -> list[Timing | Exception]:
    """Times programs in turn, group by group; returns a timing for each, or what it raised.

    Args:
      programs: each runs one call and returns its arrays; compiled already.
      groups: how many groups of calls each gets; a slow one fewer, at least `FEWEST_GROUPS`.
      group_ms: about how long a group lasts; at least one call.
    """
    found: list[Timing | Exception] = []
    calls = []
    for program in programs:
        try:
            once = _group(program, 1)  # what runs first makes room and loads code
            calls.append(max(1, round(group_ms / max(min(once, _group(program, 1)), 1e-3))))
        except jax.errors.JaxRuntimeError as error:
            calls.append(0)
            found.append(error)
        else:
            found.append(Timing(once, once, once, 0.0, 0, calls[-1]))
    times: list[list[float]] = [[] for _ in programs]
    running = [i for i, count in enumerate(calls) if count]
    for turn in range(groups):
        first = turn % max(len(running), 1)
        for i in (*running[first:], *running[:first]):
            enough = len(times[i]) >= FEWEST_GROUPS and sum(times[i]) * calls[i] > LONGEST_MS
            if not enough:
                times[i].append(_group(programs[i], calls[i]))
    return [median_of(t, c) if c else f for t, c, f in zip(times, calls, found, strict=True)]


def _group(program: Callable[[], Any], calls: int) -> float:
    """Returns the milliseconds a call of one group."""
    start = time.perf_counter()
    for _ in range(calls):
        out = program()
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / calls * 1e3
