# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Shows measurements for reading: a table for each operator, sample and direction."""

import sys
from collections.abc import Sequence
from typing import Any

from tpjax.pallas.bench.ceilings import Ceilings
from tpjax.pallas.bench.results import Measured, gain_of, machine

_COLUMNS = (
    "form", "ms", "interval", "xla / it", "FLOP/s", "byte/s", "of ceiling",
    "launches", "moved", "temporary", "error",
)  # fmt: skip
_UNITS = ("", "k", "M", "G", "T", "P")


def console() -> Any:
    """Returns where tables are printed: as wide as the terminal, 120 columns into a file."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def heading() -> str:
    """Returns the line that says what was measured with."""
    return "{device}, jax {jax}, tpjax {tpjax}".format(**machine())


def ceilings_in_words(ceilings: Ceilings) -> str:
    """Returns the line that says what the device reaches."""
    return (
        f"ceilings: {in_units(ceilings.flops)}FLOP/s in {ceilings.dtype}, "
        f"{in_units(ceilings.bytes)}B/s, {ceilings.launch_ms * 1e3:.2g} us a launch"
    )


def table_of(rows: Sequence[Measured]) -> Any:
    """Returns the table of the forms of one operator, sample and direction, for rich."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    first = rows[0]
    title = f"{first.op} {first.direction}  {first.sample}"
    table = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(_COLUMNS):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    xla = next((r.timing for r in rows if r.form == "xla"), None)
    for row in rows:
        table.add_row(*map(escape, _cells(row, None if xla is None else xla.ms)))
    notes = [f"{row.form}: {row.note}" for row in rows if row.note]
    if notes:
        table.caption, table.caption_justify = escape("\n".join(notes)), "left"
    return table


def _cells(row: Measured, xla_ms: float | None) -> tuple[str, ...]:
    timing, rates = row.timing, row.rates
    if timing is None or rates is None:
        return (row.form, *["-"] * (len(_COLUMNS) - 1))
    below, above = (100 * (edge / timing.ms - 1) for edge in (timing.low_ms, timing.high_ms))
    return (
        row.form,
        f"{timing.ms:.4g}",
        f"{below:.1f} {above:+.1f} %",
        "-" if xla_ms is None else f"{xla_ms / timing.ms:.3f}",
        in_units(rates[0]),
        in_units(rates[1]),
        f"{100 * (row.of_ceiling or 0):.0f} % {row.bound}",
        f"{row.count.launches:.0f}",
        in_units(row.count.bytes) + "B",
        in_units(row.temporary_bytes) + "B",
        "-" if row.error is None else f"{row.error:.0e}",
    )


def in_units(count: float) -> str:
    """Returns a number for reading, to three digits; the unit follows.

    >>> in_units(123456789) + "B"
    '123 MB'
    """
    unit = 0
    while count >= 999.5 and unit < len(_UNITS) - 1:
        count, unit = count / 1e3, unit + 1
    return f"{count:.3g} {_UNITS[unit]}"


def gain_in_words(rows: Sequence[Measured]) -> str | None:
    """Returns the line that splits what the kernels gain over XLA's form; None unless both ran."""
    forms = {row.form: row for row in rows}
    if not {"pallas", "xla"} <= set(forms):
        return None
    before, after = forms["xla"], forms["pallas"]
    gain = gain_of(before, after)
    if gain is None:
        return None
    counts = (
        f"traffic {gain.traffic_ms:+.3g} ms "
        f"({in_units(before.count.bytes)}B -> {in_units(after.count.bytes)}B)",
        f"launches {gain.launches_ms:+.3g} ms "
        f"({before.count.launches:.0f} -> {after.count.launches:.0f})",
        f"arithmetic {gain.arithmetic_ms:+.3g} ms "
        f"({in_units(before.count.flops)}FLOP -> {in_units(after.count.flops)}FLOP)",
    )
    return f"gain {gain.total_ms:+.3g} ms = {', '.join(counts)}, rest {gain.rest_ms:+.3g} ms"
