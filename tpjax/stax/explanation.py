# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""What the compiler did to one call: sites, near misses, passes, cost; printed or as plain data."""

import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from tpjax.core import _jax, parts
from tpjax.core.operator import Choice
from tpjax.stax.cost import ProgramCost, cost_of
from tpjax.stax_passes.report import Hit, NearMiss, Report

SCHEMA_VERSION = 1
PALLAS, XLA, AS_WRITTEN = "pallas", "xla", "as written"
WIDTH = 100
"""Columns of the printed form where no terminal says how many it has."""


class StrictError(RuntimeError):
    """Under `strict=True`, a rewrite failed or an operator did not get its kernel."""


@dataclass(frozen=True)
class Site:
    """One place of the user's code where an operator was recognised or called."""

    op: str
    label: str
    """ "pallas": a kernel runs; "xla": our plain form does; "as written": the user's own code."""
    source: str
    implementation: str | None
    refused: tuple[tuple[str, str], ...]
    """Implementations that were not chosen, each with the reason."""

    def as_dict(self) -> dict[str, Any]:
        """Returns the site as plain data."""
        refused = [{"implementation": name, "reason": reason} for name, reason in self.refused]
        return {
            "op": self.op,
            "label": self.label,
            "source": self.source,
            "implementation": self.implementation,
            "refused": refused,
        }


def _site(choice: Choice, source: str | None = None) -> Site:
    label = XLA if choice.implementation == XLA else PALLAS
    refused = tuple((r.implementation, r.reason) for r in choice.refused)
    return Site(choice.op, label, source or choice.source, choice.implementation, refused)


def sites_of(hits: Iterable[Hit]) -> Iterator[Site]:
    """Yields the sites of the hits that put an operator in place."""
    for hit in hits:
        if hit.op is not None and not hit.choices:
            yield Site(hit.op, AS_WRITTEN, hit.source, None, ())
        for choice in hit.choices:
            yield _site(choice, hit.source)


def _failed_sites(misses: Iterable[NearMiss]) -> Iterator[Site]:
    """Yields the sites that a rule matched and then failed to rewrite."""
    for miss in misses:
        if miss.failed:
            yield Site(miss.rule, AS_WRITTEN, miss.source, None, ((miss.rule, miss.reason),))


def demand_kernels(name: str, reports: Sequence[Report]) -> None:
    """Raises `StrictError` if a rule failed or a recognised operator runs without its kernel."""
    for report in reports:
        for site in sites_of(report.hits):
            if site.label != PALLAS:
                reason = "; ".join(f"{how}: {why}" for how, why in site.refused) or "none exists"
                raise StrictError(
                    f"compile: strict=True, and {site.op} ({site.source}) in {name} does not get "
                    f"its kernel: {reason}. Leave strict out to run it as {site.label}."
                )
        for miss in report.near_misses:
            if miss.failed:
                raise StrictError(
                    f"compile: strict=True, and {miss.rule} failed in {name} ({miss.source}): "
                    f"{miss.reason}. Leave strict out to run the original code there."
                )


@dataclass(frozen=True)
class Explanation:
    """What was rewritten in one call of a function, which kernels run, and why others do not."""

    name: str
    sites: tuple[Site, ...]
    near_misses: tuple[NearMiss, ...]
    passes: tuple[Report, ...]
    before: ProgramCost
    after: ProgramCost
    constants: tuple[str, ...] = ()
    """Arrays that are baked in when the function is traced, as shapes."""
    lifted: tuple[str, ...] = ()
    """Free arrays that are read at each call: where they are found, and their shapes."""

    @classmethod
    def of(
        cls,
        name: str,
        original: _jax.Jaxpr,
        rewritten: _jax.Jaxpr,
        reports: tuple[Report, ...],
        nested: tuple[tuple[Report, ...], ...],
        direct: tuple[Choice, ...],
        inputs: tuple[str, ...],
        paths: Mapping[int, str],
    ) -> "Explanation":
        """Returns the explanation of a capture.

        Args:
          name: the function's.
          original: its jaxpr as captured.
          rewritten: its jaxpr after the passes.
          reports: what the passes did.
          nested: what they did in each compiled function that this one called.
          direct: choices of dispatch made while capturing, those of `nested` among them.
          inputs: free arrays that are inputs of the program: where they were found, and types.
          paths: where free arrays were found, by identity; of those that are constants, guards.
        """
        everything = [report for group in (*nested, reports) for report in group]
        hits = [hit for report in everything for hit in report.hits]
        replaced = {id(choice) for hit in hits for choice in hit.choices}
        called = [choice for choice in direct if id(choice) not in replaced]
        choices = [*called, *(choice for hit in hits for choice in hit.choices)]
        constants = (*original.consts, *parts.inner_constants(original))
        misses = dict.fromkeys(miss for report in everything for miss in report.near_misses)
        return cls(
            name,
            (*map(_site, called), *sites_of(hits), *_failed_sites(misses)),
            tuple(misses),
            reports,
            cost_of(original, choices),
            cost_of(rewritten, choices),
            tuple(str(jax.typeof(x)) for x in constants if id(x) not in paths),
            (
                *inputs,
                *(f"{paths[id(x)]}: {jax.typeof(x)}" for x in original.consts if id(x) in paths),
            ),
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns everything as plain data, stable under `schema_version`, which JSON can hold."""
        return {
            "schema_version": SCHEMA_VERSION,
            "name": self.name,
            "sites": [site.as_dict() for site in self.sites],
            "near_misses": [
                {"rule": miss.rule, "source": miss.source, "reason": miss.reason}
                for miss in self.near_misses
            ],
            "passes": [
                {
                    "name": report.name,
                    "hits": len(report.hits),
                    "rules": dict(Counter(hit.rule for hit in report.hits)),
                    "equations_before": report.equations_before,
                    "equations_after": report.equations_after,
                }
                for report in self.passes
            ],
            "cost": {"before": self.before.as_dict(), "after": self.after.as_dict()},
            "constants": list(self.constants),
            "lifted": list(self.lifted),
            "notes": list(self.notes),
        }

    @property
    def regions(self) -> tuple[Site, ...]:
        """Every place that a rule knows: the sites, and what nearly fitted and stays as written."""
        failed = {(site.op, site.source) for site in self.sites}
        near = (
            Site(miss.rule, AS_WRITTEN, miss.source, None, ((miss.rule, miss.reason),))
            for miss in self._telling_misses()
            if (miss.rule, miss.source) not in failed
        )
        return (*self.sites, *dict.fromkeys(near))

    @property
    def labels(self) -> Mapping[str, tuple[str, ...]]:
        """How each operator runs, by its name; of what stays as written, by the rule's.

        A benchmark asserts it: `explain(fn)(*args).labels["rms_norm"] == ("pallas",)`.
        """
        found: dict[str, list[str]] = {}
        for region in self.regions:
            found.setdefault(region.op, []).append(region.label)
        return {op: tuple(labels) for op, labels in found.items()}

    @property
    def notes(self) -> tuple[str, ...]:
        """What the cost leaves out, in words."""
        return tuple(dict.fromkeys((*self.before.notes, *self.after.notes)))

    def to_json(self) -> str:
        """Returns `as_dict()` as JSON."""
        return json.dumps(self.as_dict(), indent=2)

    def __str__(self) -> str:
        """Returns the tables as plain text."""
        from rich.console import Console

        out = io.StringIO()
        Console(file=out, width=WIDTH, color_system=None, highlight=False).print(self.__rich__())
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def __rich__(self) -> Any:
        """Returns the tables for rich."""
        from rich.console import Group
        from rich.text import Text

        parts: list[Any] = [Text(f"{self.name}: {self._summary()}", style="bold")]
        parts += [_sites_table(self.sites)] if self.sites else []
        misses = self._telling_misses()
        parts += [_misses_table(misses)] if misses else []
        parts.append(_passes_table(self.passes, self.before, self.after))
        if self.lifted:
            parts.append(Text(f"reads at each call: {', '.join(self.lifted)}"))
        if self.constants:
            held = ", ".join(f"{n} x {c}" for c, n in Counter(self.constants).items())
            parts.append(Text(f"closes over (read once, when traced): {held}"))
        parts += [Text(f"note: {note}") for note in self.notes]
        return Group(*parts)

    def _telling_misses(self) -> tuple[NearMiss, ...]:
        """Returns the near misses to print: those of exact passes cost nothing worth a line."""
        return tuple(miss for miss in self.near_misses if miss.tier != "exact")

    def _summary(self) -> str:
        if not self.sites:
            near = "; the near misses say what came close" if self._telling_misses() else ""
            return f"nothing recognised{near}"
        counts = Counter((site.op, site.label) for site in self.sites)
        return ", ".join(f"{n} x {op} ({label})" for (op, label), n in counts.items())


def _table(title: str, *columns: str, right: int = 0) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        numeric = i >= len(columns) - right
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    return table


def _sites_table(sites: Sequence[Site]) -> Any:
    from rich.markup import escape

    table = _table("Operators", "operator", "runs as", "where", "times", "refused, and why")
    rows = Counter(sites)
    for site, times in rows.items():
        refused = "\n".join(f"{name}: {reason}" for name, reason in site.refused)
        style = {PALLAS: "green", XLA: "yellow"}.get(site.label, "red")
        label = f"[{style}]{site.label}[/{style}]"
        table.add_row(site.op, label, escape(site.source), str(times), escape(refused))
    return table


def _misses_table(misses: Sequence[NearMiss]) -> Any:
    from rich.markup import escape

    table = _table("Near misses", "rule", "where", "what did not fit")
    for miss in misses:
        table.add_row(miss.rule, escape(miss.source), escape(miss.reason))
    return table


def _passes_table(passes: Sequence[Report], before: ProgramCost, after: ProgramCost) -> Any:
    from rich.markup import escape

    table = _table("Passes", "pass", "hits", "before", "after", right=3)
    for report in passes:
        counts = len(report.hits), report.equations_before, report.equations_after
        names = ", ".join(dict.fromkeys(hit.rule for hit in report.hits))
        own = f": {escape(names)}" if report.name == "apply_rules" and names else ""
        table.add_row(report.name + own, *map(str, counts))
    table.add_section()
    table.add_row("equations", "", str(before.equations), str(after.equations))
    table.add_row("FLOPs", "", spell(before.flops), spell(after.flops))
    table.add_row("bytes, unfused", "", spell(before.bytes), spell(after.bytes))
    return table


def spell(number: float) -> str:
    """Returns the number to three digits with a unit prefix: 1.23 M.

    >>> spell(1234567.0)
    '1.23 M'
    """
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= factor:
            return f"{number / factor:.3g} {prefix}"
    return f"{number:.3g}"
