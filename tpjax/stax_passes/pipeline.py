# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The passes in running order, and the function that runs them.

A failure of a pass never costs the user their program: the pass is left out and a warning names it.
Only `verify=True` turns that into an error.
"""

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from tpjax.core import _jax, soundness
from tpjax.core.errors import UnsupportedError, message
from tpjax.stax_passes.attention import fuse_attention
from tpjax.stax_passes.canonical import canonicalise
from tpjax.stax_passes.contraction import simplify_products
from tpjax.stax_passes.dead import drop_dead_code
from tpjax.stax_passes.fold import fold_constants
from tpjax.stax_passes.hashing import remembered
from tpjax.stax_passes.hoist import hoist_invariants
from tpjax.stax_passes.layers import share_bodies, share_layers
from tpjax.stax_passes.movement import simplify_moves
from tpjax.stax_passes.narrowing import narrow_moves
from tpjax.stax_passes.norms import fuse_norm
from tpjax.stax_passes.report import Report
from tpjax.stax_passes.share import share_subexpressions
from tpjax.stax_passes.spreading import sink_broadcasts
from tpjax.stax_passes.sweep import Pass

MAX_ROUNDS = 16
"""Rounds in which the passes of a group must stop finding anything."""

CLEAN_UP: tuple[Pass, ...] = (
    canonicalise,
    fold_constants,
    simplify_moves,
    share_subexpressions,
    drop_dead_code,
)
"""The exact passes, a group: repeated until none of them finds anything."""

FINISH: tuple[Pass, ...] = (*CLEAN_UP, sink_broadcasts, simplify_products)
"""The same with passes that may take a pattern apart, so that they run when all are found."""

ON_REQUEST: tuple[Pass, ...] = (narrow_moves,)
"""Passes that no program measured so far gains by (docs/log.md): only if asked for, by name."""

PASSES: tuple[Pass | tuple[Pass, ...], ...] = (
    share_bodies,
    share_layers,
    CLEAN_UP,
    fuse_attention,
    fuse_norm,
    hoist_invariants,
    FINISH,
    share_layers,
)
"""The passes in running order; a tuple among them is a group, repeated until it settles."""


def _keeps_bits(run: Pass) -> bool:
    return not hasattr(run, "rows") and getattr(run, "tier", "exact") == "exact"


EXACT_PASSES: tuple[Pass | tuple[Pass, ...], ...] = tuple(
    tuple(filter(_keeps_bits, entry)) if isinstance(entry, tuple) else entry
    for entry in PASSES
    if isinstance(entry, tuple) or _keeps_bits(entry)
)
"""Those of them that keep every bit."""


def optimize(
    jaxpr: _jax.Jaxpr,
    passes: Sequence[Pass | tuple[Pass, ...]] = PASSES,
    *,
    verify: bool = False,
) -> tuple[_jax.Jaxpr, tuple[Report, ...]]:
    """Rewrites a jaxpr by the passes, in order, and reports what each did.

    Args:
      jaxpr: what `jax.make_jaxpr` returns.
      passes: pure functions from a jaxpr to a jaxpr and a `Report`, in any order; leave one out to
        disable it. A tuple among them is a group, repeated until none of its passes reports a hit.
      verify: check types after each pass rather than once at the end, and raise where a pass fails
        rather than going on without it.

    Returns:
      The rewritten jaxpr, with the same inputs, results and effects; and one report for each pass,
      the rounds of a group added up.

    Raises:
      TypeError: `jaxpr` is not a jaxpr.
      ValueError: a group does not settle; the message names the pass.
      RuntimeError: under `verify`, a pass raised or made an ill-typed jaxpr; the message names it.

    Example:
      >>> import jax
      >>> jaxpr = jax.make_jaxpr(lambda x: (x * 1.0) * 3.0)(2.0)
      >>> optimized, reports = optimize(jaxpr)
      >>> len(jaxpr.eqns), len(optimized.eqns)
      (2, 1)
    """
    if not isinstance(jaxpr, _jax.Jaxpr):
        remedy = "Trace a function first: jax.make_jaxpr(function)(*arguments)."
        raise TypeError(message("optimize", "jaxpr", "a jaxpr", type(jaxpr).__name__, remedy))
    result, reports = run_passes(jaxpr, passes, partial(take_step, checked=verify, verify=verify))
    if not verify and result is not jaxpr and fault_of(jaxpr, result) is not None:
        # A pass broke the types. Looking after each finds it; that is rare, so paid only now.
        result, reports = run_passes(jaxpr, passes, partial(take_step, checked=True, verify=False))
    return result, reports


Step = Callable[[_jax.Jaxpr, Pass], tuple[_jax.Jaxpr, Report, str | None]]
"""Runs a pass on a jaxpr; returns the jaxpr as it was, and the reason, if the pass fails."""


def run_passes(
    jaxpr: _jax.Jaxpr, passes: Sequence[Pass | tuple[Pass, ...]], step: Step
) -> tuple[_jax.Jaxpr, tuple[Report, ...]]:
    """Runs the passes in order, groups until they settle, each time by `step`; checks nothing."""
    with remembered(), _no_collection():
        return _run(jaxpr, passes, step)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keeps Python's cyclic garbage collector from running in the block.

    A program is many small objects that all live on: to look at them again and again took a third
    of the passes' time.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _run(
    jaxpr: _jax.Jaxpr, passes: Sequence[Pass | tuple[Pass, ...]], step: Step
) -> tuple[_jax.Jaxpr, tuple[Report, ...]]:
    reports: list[Report] = []
    for entry in passes:
        group, rounds = (entry, MAX_ROUNDS) if isinstance(entry, tuple) else ((entry,), 1)
        seen: list[list[Report]] = [[] for _ in group]
        failed: set[int] = set()
        settled: dict[int, _jax.Jaxpr] = {}
        for _ in range(rounds):
            restless = None
            for i, run in enumerate(group):
                if i in failed or settled.get(i) is jaxpr:
                    continue
                result, report, fault = step(jaxpr, run)
                if fault is not None:
                    failed.add(i)
                    _warn(run, fault)
                jaxpr = result
                if not report.hits:
                    settled[i] = jaxpr
                seen[i].append(report)
                restless = name_of(run) if report.hits else restless
            if restless is None:
                break
        else:
            if rounds > 1:
                raise ValueError(_never_settles(restless))
        reports.extend(_added_up(*pair) for pair in zip(group, seen, strict=True))
    return jaxpr, tuple(reports)


def take_step(
    jaxpr: _jax.Jaxpr, run: Pass, *, checked: bool = False, verify: bool = False
) -> tuple[_jax.Jaxpr, Report, str | None]:
    """Runs one pass; a `Step`. `checked` checks types after it, `verify` raises where it fails."""
    try:
        result, report = run(jaxpr)
        if not (isinstance(result, _jax.Jaxpr) and isinstance(report, Report)):
            raise TypeError(
                f"a pass returns a jaxpr and a Report; got {result!r:.40}, {report!r:.40}"
            )
        fault = fault_of(jaxpr, result) if checked and result is not jaxpr else None
    except UnsupportedError:
        raise  # an implementation that the user asked for by name cannot run: no pass has failed
    except Exception as error:
        if verify:
            raise RuntimeError(f"optimize: the pass {name_of(run)} raised {error!r}.") from error
        fault = f"it raised {type(error).__name__}: {error}"
    else:
        if fault is None:
            return result, report, None
        if verify:
            raise RuntimeError(f"optimize: the pass {name_of(run)} broke the program: {fault}")
    count = _jax.count_equations(jaxpr)
    return jaxpr, Report(name_of(run), (), (), count, count), fault


def _warn(run: Pass, fault: str) -> None:
    warnings.warn(
        f"optimize: the pass {name_of(run)} is left out: {fault}. The program runs without it.",
        stacklevel=4,
    )


def _never_settles(name: str | None) -> str:
    must = f"without hits after {MAX_ROUNDS} rounds"
    remedy = (
        "A pass of a group reports hits only for what it changed; another belongs outside a group."
    )
    return message("optimize", f"the group with {name}", must, f"another hit of {name}", remedy)


def fault_of(before: _jax.Jaxpr, after: _jax.Jaxpr) -> str | None:
    """Returns in words what makes `after` no possible rewrite of `before`, or None."""
    for what in ("in_avals", "out_avals"):
        old, new = getattr(before, what), getattr(after, what)
        if old != new:
            return f"{what} changed from {old} to {new}"
    gone = _jax.lasting(before) - _jax.lasting(after)
    if gone:
        return f"it dropped what must stay: {', '.join(sorted(gone.elements()))}"
    try:
        soundness.check(after)
    except Exception as error:
        return str(error)
    return None


def _added_up(run: Pass, history: list[Report]) -> Report:
    """Returns one report for the rounds of a pass.

    Near misses are those of the last round; equations are counted as if the passes of the group had
    run one after the other, each once.
    """
    before = history[0].equations_before
    removed = sum(report.equations_before - report.equations_after for report in history)
    hits = tuple(hit for report in history for hit in report.hits)
    return Report(name_of(run), hits, history[-1].near_misses, before, before - removed)


def name_of(run: Pass) -> str:
    """Returns the name of a pass in reports."""
    return getattr(run, "__name__", type(run).__name__)
