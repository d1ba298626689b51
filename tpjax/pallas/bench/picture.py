# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Draws the roofline: what each form reaches, under what the device can. Needs matplotlib."""

import math
from pathlib import Path
from typing import Any

from tpjax.pallas.bench.results import Findings
from tpjax.pallas.bench.tables import heading, in_units

MARKERS = {"pallas": "o", "xla": "s", "reference": "^"}
OTHER_MARKERS = "DvP*X"
HOLLOW = "fwd"


def matplotlib_or_reason() -> str | None:
    """Returns why no picture can be drawn here, or None."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return "a picture needs matplotlib, which is not installed: pip install 'tpjax[picture]'"
    return None


def draw(findings: Findings, path: Path) -> None:
    """Writes the roofline of what ran; the path's suffix says what kind of picture.

    Operations a byte to the right, operations a second upwards, both by the row's cost: the same
    task stands in one column, whatever form does it. Filled: forward and backward.

    Args:
      findings: at least one row ran.
      path: .png, .svg or .pdf.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in findings.rows if row.rates is not None and row.flops > 0]
    tasks = list(dict.fromkeys((row.op, row.sample) for row in rows))
    figure = Figure(figsize=(10, 6 + 0.1 * len(tasks)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xscale="log", yscale="log")
    places = [row.flops / row.bytes for row in rows]
    ridges = [c.flops / c.bytes for c in findings.ceilings()]
    left = min([*places, *ridges]) / 3
    right = max([*places, *ridges]) * 3
    _draw_ceilings(axes, findings, left, right)
    forms = list(dict.fromkeys(row.form for row in rows))
    others = [form for form in forms if form not in MARKERS]
    markers = MARKERS | {f: OTHER_MARKERS[i % len(OTHER_MARKERS)] for i, f in enumerate(others)}
    for row, place in zip(rows, places, strict=True):
        color = f"C{tasks.index((row.op, row.sample)) % 10}"
        axes.plot(
            place,
            (row.rates or (math.nan,))[0] / 1e12,
            linestyle="none",
            marker=markers[row.form],
            color=color,
            fillstyle="none" if row.direction == HOLLOW else "full",
        )
    for i, (op, sample) in enumerate(tasks):
        shown = sample if len(sample) < 60 else sample[:57] + "..."
        axes.plot([], [], linestyle="none", marker=".", color=f"C{i % 10}", label=f"{op} {shown}")
    for form in forms:
        axes.plot([], [], linestyle="none", marker=markers[form], color="grey", label=form)
    axes.set_xlim(left, right)
    axes.set_xlabel("FLOP a byte that must move")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(f"{heading()}\nhollow: forward, filled: forward and backward", fontsize="medium")
    axes.grid(visible=True, which="major", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, fontsize="x-small")
    figure.savefig(path, dpi=150)


def _draw_ceilings(axes: Any, findings: Findings, left: float, right: float) -> None:
    """Draws the slope of the copy and a level for products in each dtype."""
    for i, ceilings in enumerate(sorted(findings.ceilings(), key=lambda c: -c.flops)):
        ridge = ceilings.flops / ceilings.bytes
        xs = [left, ridge, right]
        ys = [min(x * ceilings.bytes, ceilings.flops) / 1e12 for x in xs]
        axes.plot(xs, ys, color="black", linewidth=1)
        said = f"{ceilings.dtype} products: {in_units(ceilings.flops)}FLOP/s"
        place = right / (right / ridge) ** (
            0.33 * i
        )  # or the texts of near levels cover each other
        axes.annotate(said, (place, ys[-1]), ha="right", va="bottom", fontsize="x-small")
    rate = max(c.bytes for c in findings.ceilings())
    said = f"  copy: {in_units(rate)}B/s"
    axes.annotate(said, (left, left * rate / 1e12), va="top", fontsize="small")
