# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Line charts as inline SVG, for a page that must stand alone: no script, no plotting package.

Colours are classes `series-0`, `series-1`, ... and `reference`, styled by the page.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 480, 280
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 14, 46
MAX_POINTS = 400
"""Longer series are thinned to bucket means: a curve has no more pixels than that."""


@dataclass(frozen=True)
class Series:
    """One curve: `(x, y)` pairs in the order of x. Values that are not finite leave a gap."""

    name: str
    points: Sequence[tuple[float, float]]
    markers: bool = False
    """Whether each point gets a dot, for values measured seldom."""


@dataclass(frozen=True)
class Reference:
    """A dashed horizontal line: something to compare the curves with."""

    name: str
    y: float


def line_chart(
    title: str,
    x_label: str,
    y_label: str,
    series: Iterable[Series],
    reference: Reference | None = None,
    *,
    from_zero: bool = False,
) -> str:
    """Returns the chart as one `<svg>` element, or "" where no series has a finite point."""
    curves = [Series(s.name, _thin(s.points), s.markers) for s in series]
    curves = [s for s in curves if any(map(_finite, s.points))]
    points = [p for s in curves for p in s.points if _finite(p)]
    if not points:
        return ""
    ys = [y for _, y in points] + ([reference.y] if reference else [])
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    x_ticks = ticks(x_low, x_high)
    y_ticks = ticks(min([0.0, *ys]) if from_zero else min(ys), max(ys))
    scale = _Scale(x_low, x_high, y_ticks[0], y_ticks[-1])
    description = "; ".join(_describe(s) for s in curves)
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(title)}</title><desc>{escape(description)}</desc>",
        *_axes(scale, x_ticks, y_ticks, x_label, y_label),
    ]
    if reference:
        y = scale.y(reference.y)
        parts.append(f'<path class="reference" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
    for index, curve in enumerate(curves):
        parts += _curve(scale, curve, index)
    legend = [(f"series-{i}", s.name) for i, s in enumerate(curves)]
    legend += [("reference", reference.name)] if reference else []
    return "".join([*parts, "</svg>", _legend(legend) if len(legend) > 1 else ""])


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Returns about `count` round numbers, equally spaced, that enclose `low` to `high`."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    rough = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next((m * unit for m in (1, 2, 2.5, 5) if m * unit >= rough), 10 * unit)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def number(value: float) -> str:
    """Returns a number as people read it: 1,234,567 or 0.00123."""
    if isinstance(value, int) or (abs(value) >= 1000 and math.isfinite(value)):
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _short(value: float) -> str:
    """Returns a number that fits beside an axis: 15k, 2.5M."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return number(value)


@dataclass(frozen=True)
class _Scale:
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        share = (value - self.x_low) / ((self.x_high - self.x_low) or 1.0)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.y_low) / ((self.y_high - self.y_low) or 1.0)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _finite(point: tuple[float, float]) -> bool:
    return math.isfinite(point[0]) and math.isfinite(point[1])


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    points = [(float(x), float(y)) for x, y in points]
    if len(points) <= MAX_POINTS:
        return points
    size = math.ceil(len(points) / MAX_POINTS)
    buckets = [points[i : i + size] for i in range(0, len(points), size)]
    return [(b[-1][0], math.fsum(y for _, y in b) / len(b)) for b in buckets]


def _describe(series: Series) -> str:
    points = [p for p in series.points if _finite(p)]
    (x0, y0), (x1, y1) = points[0], points[-1]
    return f"{series.name}: {number(y0)} at {number(x0)}, {number(y1)} at {number(x1)}"


def _axes(
    scale: _Scale, x_ticks: list[float], y_ticks: list[float], x_label: str, y_label: str
) -> list[str]:
    parts = []
    for value in y_ticks:
        y = scale.y(value)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        where = f'x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end"'
        parts.append(f"<text {where}>{_short(value)}</text>")
    for value in x_ticks:
        if scale.x_low <= value <= scale.x_high:
            where = f'x="{scale.x(value):.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle"'
            parts.append(f"<text {where}>{_short(value)}</text>")
    middle_x, middle_y = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    where = f'x="{middle_x}" y="{HEIGHT - 8}" text-anchor="middle"'
    parts.append(f'<text class="label" {where}>{escape(x_label)}</text>')
    where = f'transform="translate(13 {middle_y}) rotate(-90)" text-anchor="middle"'
    parts.append(f'<text class="label" {where}>{escape(y_label)}</text>')
    return parts


def _curve(scale: _Scale, series: Series, index: int) -> list[str]:
    runs: list[list[str]] = [[]]
    dots = []
    for point in series.points:
        if not _finite(point):
            runs.append([])
            continue
        x, y = scale.x(point[0]), scale.y(point[1])
        runs[-1].append(f"{x:.1f} {y:.1f}")
        tip = f"{series.name}: {number(point[1])} at {number(point[0])}"
        dots.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{escape(tip)}</title></circle>'
        )
    path = "".join("M" + "L".join(run) for run in runs if run)
    shown = "".join(dots) if series.markers or len(dots) == 1 else ""
    return [f'<g class="series-{index}"><path d="{path}"/>{shown}</g>']


def _legend(entries: list[tuple[str, str]]) -> str:
    items = "".join(
        f'<li><svg class="key" viewBox="0 0 22 8" aria-hidden="true"><g class="{kind}">'
        f'<path class="{kind}" d="M1 4H21"/></g></svg>{escape(name)}</li>'
        for kind, name in entries
    )
    return f'<ul class="legend">{items}</ul>'
