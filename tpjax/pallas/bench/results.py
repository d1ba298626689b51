# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""What a run of the benchmark found: times, rates beside the ceilings, and what a fusion gains."""

import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, NamedTuple

import jax

from tpjax.pallas.bench.ceilings import Ceilings
from tpjax.pallas.bench.clock import Timing
from tpjax.pallas.bench.hlo import Count

SCHEMA = 1
"""Version of the JSON: higher when a field changes its meaning or goes; new ones may come."""
WRONG = 0.05
"""Relative error beyond which a form does not compute the operator, in any of our dtypes."""


@dataclass(frozen=True)
class Measured:
    """One form of an operator, on one sample and in one direction."""

    op: str
    sample: str
    direction: str
    """"fwd", or "fwd+bwd": results and all gradients in one program."""
    form: str
    """An implementation's name, "reference", or what the caller called it."""
    ceilings: Ceilings
    flops: float
    """Operations of the task, by the row's cost; the same for every form."""
    bytes: float
    """Least bytes of the task, by the row's cost."""
    timing: Timing | None = None
    """None where it did not run."""
    count: Count = field(default_factory=Count)
    """What the compiled program does; the row's operations stand for those of kernels."""
    temporary_bytes: int = 0
    """Device memory beyond arguments and results, as XLA plans it."""
    error: float | None = None
    """Largest relative RMS difference of a result or gradient from the reference's."""
    note: str = ""
    """Why it did not run."""
    failed: bool = False
    """Whether that, or a wrong result, is a fault."""

    @property
    def bound(self) -> str:
        """Which ceiling the task meets first: "bytes" or "flops"."""
        by_flops = self.flops / self.ceilings.flops > self.bytes / self.ceilings.bytes
        return "flops" if by_flops else "bytes"

    @property
    def of_ceiling(self) -> float | None:
        """Least time of the task over the time taken; above 1 where a cache outruns the ceiling."""
        if self.timing is None:
            return None
        return self.ceilings.least_ms(self.flops, self.bytes) / self.timing.ms

    @property
    def rates(self) -> tuple[float, float] | None:
        """FLOP/s and bytes/s of the task."""
        if self.timing is None:
            return None
        return self.flops / self.timing.ms * 1e3, self.bytes / self.timing.ms * 1e3

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields as plain data."""
        rates = self.rates or (None, None)
        timing = dict.fromkeys(Timing._fields) if self.timing is None else self.timing._asdict()
        return {
            "op": self.op,
            "sample": self.sample,
            "direction": self.direction,
            "form": self.form,
            **timing,
            "flops": self.flops,
            "bytes": self.bytes,
            "flops_per_s": rates[0],
            "bytes_per_s": rates[1],
            "bound": self.bound,
            "of_ceiling": self.of_ceiling,
            "product_dtype": self.ceilings.dtype,
            "counted": self.count._asdict(),
            "temporary_bytes": self.temporary_bytes,
            "error": self.error,
            "note": self.note,
            "failed": self.failed,
        }


class Gain(NamedTuple):
    """Where the time went that the kernels' program saves: each part in milliseconds.

    A part is a difference of counts, XLA's form less the kernels', at the measured rate:

      traffic     bytes that launches read and write, at the speed of a copy
      launches    kernels started, at what one more small kernel costs
      arithmetic  operations, at the speed of a large product
      rest        what is left of the measured gain: how far each stays under those rates, less what
                  of its work overlaps

    so that total = traffic + launches + arithmetic + rest.
    """

    op: str
    sample: str
    direction: str
    total_ms: float
    traffic_ms: float
    launches_ms: float
    arithmetic_ms: float
    rest_ms: float


def gain_of(before: Measured, after: Measured) -> Gain | None:
    """Returns what `after` saves over `before`; None unless both ran."""
    if before.timing is None or after.timing is None:
        return None
    ceilings, saved = before.ceilings, before.timing.ms - after.timing.ms
    less = Count(*(a - b for a, b in zip(before.count, after.count, strict=True)))
    traffic = less.bytes / ceilings.bytes * 1e3
    launches = less.launches * ceilings.launch_ms
    arithmetic = less.flops / ceilings.flops * 1e3
    parts = traffic, launches, arithmetic
    return Gain(after.op, after.sample, after.direction, saved, *parts, saved - sum(parts))


@dataclass(frozen=True)
class Findings:
    """All that one run measured."""

    rows: tuple[Measured, ...]

    def groups(self) -> Iterator[Sequence[Measured]]:
        """Yields the rows that may be compared: of one operator, sample and direction."""
        found: dict[tuple[str, str, str], list[Measured]] = {}
        for row in self.rows:
            found.setdefault((row.op, row.sample, row.direction), []).append(row)
        yield from found.values()

    def gains(self) -> tuple[Gain, ...]:
        """Returns what the kernels gain over XLA's form, wherever both ran."""
        out = []
        for group in self.groups():
            forms = {row.form: row for row in group}
            if {"pallas", "xla"} <= set(forms):
                out.append(gain_of(forms["xla"], forms["pallas"]))
        return tuple(gain for gain in out if gain is not None)

    def ceilings(self) -> tuple[Ceilings, ...]:
        """Returns the ceilings that rows are held against, one for each dtype of products."""
        return tuple(dict.fromkeys(row.ceilings for row in self.rows))

    def as_dict(self) -> dict[str, Any]:
        """Returns everything as plain data, for JSON; `docs/bench.md` says what fields are."""
        return {
            "schema": SCHEMA,
            "machine": machine(),
            "ceilings": [c._asdict() for c in self.ceilings()],
            "results": [row.as_dict() for row in self.rows],
            "gains": [gain._asdict() for gain in self.gains()],
        }


def machine() -> dict[str, Any]:
    """Returns the hardware and the versions that a measurement depends on."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "devices": jax.device_count(),
        "processor": platform.machine(),
        "runtime": device.client.platform_version.split("\n")[0],
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "tpjax": str(getattr(sys.modules.get("tpjax"), "__version__", "")),
    }
