# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""What the passes decided for a program, kept between processes so that the next one does less.

Kept is, for each run of a pass, whether it found anything, what nearly fitted, and how many
equations it left; and the fingerprint of the result. The next process runs the passes that found
something and leaves the others out. If what comes out has the fingerprint that was kept, it is the
same program, and its types were checked then. If not, the decisions go and everything runs. So an
entry, whatever is in it, saves work or costs work, and changes nothing else.

Where nodes matched is not kept: reading the graph is a tenth of the time of a pass that rewrites.
"""

import functools
import json
import logging
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import jax
from jaxlib.version import __version__ as jaxlib_version

from tpjax.core import _jax
from tpjax.core import store as stores
from tpjax.core.fingerprints import fingerprint
from tpjax.pallas.dispatch import current_target, preference
from tpjax.stax_passes.engine import rows_of
from tpjax.stax_passes.foreign import described
from tpjax.stax_passes.pipeline import (
    EXACT_PASSES,
    PASSES,
    fault_of,
    name_of,
    optimize,
    run_passes,
    take_step,
)
from tpjax.stax_passes.report import NearMiss, Report
from tpjax.stax_passes.sweep import Pass

KIND = "decisions"
FLAGS = (
    "jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion", "jax_default_prng_impl", "jax_threefry_partitionable",
    "jax_softmax_custom_jvp", "jax_debug_nans", "jax_debug_infs", "jax_use_shardy_partitioner",
)  # fmt: skip
"""Flags of JAX under which a program is traced, and rewritten, in another way."""
ROOMS = ("core", "pallas", "stax_passes")
"""Rooms whose code decides."""

_log = logging.getLogger("tpjax.cache")
Passes = Sequence[Pass | tuple[Pass, ...]]
Result = tuple[_jax.Jaxpr, tuple[Report, ...]]


class MisfitError(Exception):
    """Decisions that are not those of this program; the message says in what."""


class Decision(NamedTuple):
    """What one run of a pass came to."""

    name: str
    hits: int
    before: int
    after: int
    near_misses: tuple[NearMiss, ...]
    """Of a run without hits; one with hits is run again, and finds them again."""


def optimize_warm(
    jaxpr: _jax.Jaxpr, passes: Passes, *, verify: bool = False, options: str = ""
) -> Result:
    """Returns what `optimize` does, by the decisions in the active store if it has them.

    Without a store, and under `verify`, which is there to look at everything, it is `optimize`.
    """
    store = stores.active()
    if store is None or verify:
        return optimize(jaxpr, passes, verify=verify)
    try:
        start = fingerprint(jaxpr)
        key = stores.key_of((start, *ingredients(passes, options).values()))
    except Exception as reason:  # `UnstableError`, or a kind of program that nobody has met yet
        _log.debug("the store is not used: %r", reason)
        return optimize(jaxpr, passes)
    kept = store.get(KIND, key)
    if kept is not None:
        try:
            return _replayed(jaxpr, passes, start, *_loads(kept))
        except MisfitError as reason:
            store.discard(KIND, key, f"does not fit its program: {reason}")
    return _recorded(jaxpr, passes, start, store, key)


def ingredients(passes: Passes, options: str = "") -> dict[str, str]:
    """Returns everything that decisions depend on besides the program, by name.

    Raises:
      UnstableError: a pass or rule that is not tpjax's own cannot be told by its code.
    """
    device = jax.devices()[0]
    flags = {name: str(getattr(jax.config, name, None)) for name in FLAGS}
    return {
        "passes": repr([_spelt(entry) for entry in passes]),
        "options": options,
        "source": stores.code_of(*ROOMS),
        "tpjax": str(getattr(sys.modules.get("tpjax"), "__version__", "")),
        "jax": jax.__version__,
        "jaxlib": jaxlib_version,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "device": f"{device.platform} {device.device_kind}",
        "target": str(current_target()),
        "use": str(preference()),
        "flags": repr(flags),
        "mesh": str(jax.sharding.get_abstract_mesh()),
    }


def _spelt(entry: Pass | tuple[Pass, ...]) -> Any:
    if isinstance(entry, tuple):
        return [_spelt(one) for one in entry]
    rows = tuple(row.name for row in rows_of(entry))
    return (name_of(entry), rows) if _is_ours(entry) else (name_of(entry), described(entry))


def _is_ours(run: Pass) -> bool:
    return any(run is one for one in _own_passes())


@functools.cache
def _own_passes() -> tuple[Pass, ...]:
    entries = (*PASSES, *EXACT_PASSES)
    return tuple(
        run for entry in entries for run in (entry if isinstance(entry, tuple) else (entry,))
    )


def _recorded(
    jaxpr: _jax.Jaxpr, passes: Passes, start: str, store: stores.Store, key: str
) -> Result:
    """Runs everything and keeps what was decided, unless something failed."""
    steps: list[Decision] = []
    failed = False

    def step(before: _jax.Jaxpr, run: Pass) -> tuple[_jax.Jaxpr, Report, str | None]:
        nonlocal failed
        result, report, fault = take_step(before, run)
        failed = failed or fault is not None or any(m.failed for m in report.near_misses)
        steps.append(_decision(report))
        return result, report, fault

    result, reports = run_passes(jaxpr, passes, step)
    if result is not jaxpr and fault_of(jaxpr, result) is not None:
        return optimize(jaxpr, passes)  # it looks after each pass which one broke the types
    if not failed:
        try:
            end = start if result is jaxpr else fingerprint(result)
        except Exception as reason:
            _log.debug("the decisions are not kept: %r", reason)
        else:
            store.put(KIND, key, _dumps(steps, end))
    return result, reports


def _decision(report: Report) -> Decision:
    near = () if report.hits else report.near_misses
    before, after = report.equations_before, report.equations_after
    return Decision(report.name, len(report.hits), before, after, near)


def _replayed(
    jaxpr: _jax.Jaxpr, passes: Passes, start: str, steps: Iterator[Decision], end: str
) -> Result:
    """Runs only the passes that found something.

    Raises:
      MisfitError: another pass comes next, or finds another number of places, or another program
        comes out.
    """

    def step(before: _jax.Jaxpr, run: Pass) -> tuple[_jax.Jaxpr, Report, str | None]:
        known = next(steps, None)
        if known is None or known.name != name_of(run):
            raise MisfitError(f"{name_of(run)} comes where {known and known.name} came")
        if not known.hits and _is_ours(run):
            report = Report(known.name, (), known.near_misses, known.before, known.after)
            return before, report, None
        result, report, fault = take_step(before, run)
        if fault is not None or _decision(report)[:4] != known[:4]:
            raise MisfitError(f"{known.name} finds something else")
        return result, report, None

    result, reports = run_passes(jaxpr, passes, step)
    try:
        same = end == (start if result is jaxpr else fingerprint(result))
    except Exception as reason:
        raise MisfitError(f"the result has no fingerprint: {reason!r}") from reason
    if not same or next(steps, None) is not None:
        raise MisfitError("another program comes out")
    return result, reports


def _dumps(steps: list[Decision], end: str) -> bytes:
    plain = [(*step[:4], [asdict(miss) for miss in step.near_misses]) for step in steps]
    return json.dumps({"steps": plain, "result": end}).encode()


def _loads(kept: bytes) -> tuple[Iterator[Decision], str]:
    try:
        found = json.loads(kept)
        steps = [
            Decision(name, hits, before, after, tuple(NearMiss(**miss) for miss in near))
            for name, hits, before, after, near in found["steps"]
        ]
        return iter(steps), found["result"]
    except (ValueError, TypeError, KeyError) as error:
        raise MisfitError(f"it cannot be read ({type(error).__name__}: {error})") from error
