# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The report of a training run: one HTML file that needs nothing else, for a browser or a phone."""

import dataclasses
import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from tpjax.core.errors import message
from tpjax.training.baseline import Baseline
from tpjax.training.chart import Reference, Series, line_chart, number

MAX_ROWS = 60
"""Rows of the table of numbers; a longer history is thinned, its last row kept."""

_COLUMNS = {
    "step": "step",
    "loss": "train loss (nats per byte)",
    "validation_loss": "validation loss (nats per byte)",
    "tokens_per_s": "tokens/s",
    "step_ms": "ms/step",
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
    "mfu": "MFU",
}

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>$style</style>
</head>
<body>
<header><h1>$title</h1><p>$subtitle</p></header>
<main>
$body
</main>
<footer>Written by tpjax at $time.</footer>
</body>
</html>
""")

_STYLE = """
:root { --ground: #fbfbf9; --panel: #fff; --ink: #1c1e21; --soft: #5b6168; --line: #dfe1e4;
  --s0: #3b6fb6; --s1: #c2571a; --s2: #2b8a5e; --good: #21734c; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ground: #14161a; --panel: #1c1f24; --ink: #e8eaed;
  --soft: #a2a9b1; --line: #343a42; --s0: #7fb0f2; --s1: #f2a065; --s2: #6fcf9f; --good: #6fcf9f;
  --bad: #ff9d94; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 1rem; background: var(--ground);
  color: var(--ink); font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0.5rem 0 0; } h2 { font-size: 1.15rem; margin: 2.2rem 0 0.6rem; }
h3 { font-size: 1rem; margin: 0 0 0.4rem; }
header p, footer, .note, figcaption { color: var(--soft); } header p { margin: 0.2rem 0 1.2rem; }
footer { margin-top: 2.5rem; font-size: 0.85rem; }
.cards, .charts { display: grid; gap: 0.8rem; margin: 0; padding: 0; list-style: none; }
.cards { grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); }
.charts { grid-template-columns: repeat(auto-fit, minmax(min(100%, 27rem), 1fr)); }
.card, figure { margin: 0; padding: 0.8rem 1rem; background: var(--panel);
  border: 1px solid var(--line); border-radius: 0.6rem; }
.card span { display: block; color: var(--soft); font-size: 0.85rem; }
.card b { font-size: 1.35rem; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.chart { display: block; width: 100%; height: auto; }
.chart text { fill: var(--soft); font: 13px system-ui, sans-serif; }
.chart .label { fill: var(--ink); }
.chart path, .key path { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.grid { stroke: var(--line); } .reference { stroke: var(--soft); stroke-dasharray: 5 4; }
.series-0 path { stroke: var(--s0); } .series-0 circle { fill: var(--s0); }
.series-1 path { stroke: var(--s1); } .series-1 circle { fill: var(--s1); }
.series-2 path { stroke: var(--s2); } .series-2 circle { fill: var(--s2); }
.legend { display: flex; flex-wrap: wrap; gap: 0.2rem 1.1rem; margin: 0.3rem 0 0; padding: 0;
  list-style: none; font-size: 0.9rem; }
.key { width: 22px; height: 8px; margin-right: 0.4rem; vertical-align: middle; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: 0.92rem; }
th, td { text-align: left; padding: 0.35rem 0.8rem 0.35rem 0; vertical-align: top;
  border-bottom: 1px solid var(--line); } td { overflow-wrap: break-word; min-width: 3rem; }
thead th { color: var(--soft); white-space: nowrap; }
tbody th { font-weight: 500; } td.number { font-variant-numeric: tabular-nums; }
code, pre { font-family: ui-monospace, monospace; font-size: 0.88rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; padding: 1rem;
  background: var(--panel); border: 1px solid var(--line); border-radius: 0.6rem; }
.pallas { color: var(--good); font-weight: 600; } .failed { color: var(--bad); }
summary { cursor: pointer; } mark { background: none; color: var(--soft); }
"""


def write_report(
    path: str | os.PathLike[str],
    *,
    config: Any,
    history: Sequence[Mapping[str, Any]],
    sample: str = "",
    prompt: str = "",
    kernels: Mapping[str, Any] | None = None,
    baseline: Baseline | None = None,
    environment: Mapping[str, Any] | None = None,
    memory: Mapping[str, Any] | None = None,
    summary: Mapping[str, Any] | None = None,
    title: str = "tpjax training run",
    subtitle: str = "",
) -> Path:
    """Writes the report to `path`, whole or not at all, and returns the path.

    Args:
      path: the HTML file; its folder is made where missing.
      config: a mapping or dataclass, nested as it likes.
      history: one mapping per logged step with "step" and any of "loss", "validation_loss" (nats
        per byte), "tokens_per_s", "step_ms", "learning_rate", "grad_norm", "mfu"; absent or None
        where not measured. Empty for a run stopped before its first step.
      sample: text the model wrote after `prompt`.
      kernels: `Explanation.as_dict()` of the step; None where it was not compiled by tpjax.
      baseline: what counting reaches on the same validation text.
      environment: versions, devices, mesh, dtype and why.
      memory: bytes by name; keys ending in `_bytes` are shown in MiB or GiB.
      summary: more figures for the top of the page: parameters, total time.
      subtitle: one line on what was trained on what, and how it ended.

    Raises:
      RuntimeError: the file cannot be written. Nothing else is touched, a checkpoint least of all.
    """
    parts = [
        _cards(history, baseline, summary or {}),
        _section("Curves", _charts(history, baseline)),
        _section("Sample", _sample(prompt, sample)),
        *_kernels(kernels),
        _section("Memory of the compiled step", _pairs(memory or {})),
        _section("Config", _pairs(config)),
        _section("Environment", _pairs(environment or {})),
        _section("Numbers", _numbers(history)),
    ]
    page = _PAGE.substitute(
        title=_text(title),
        subtitle=_text(subtitle),
        style=_STYLE,
        body="\n".join(part for part in parts if part),
        time=time.strftime("%Y-%m-%d %H:%M:%S %z"),
    )
    return _write(Path(path), page)


def _write(path: Path, page: str) -> Path:
    """Writes a temporary file beside `path`, then renames it: an older report stays until then."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "w", encoding="utf-8", errors="replace") as file:
                file.write(page)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        got = f"{path} ({error.strerror or error})"
        remedy = "Free space or name another folder; the checkpoint is not touched."
        text = message("write_report", "path", "a file that can be written", got, remedy)
        raise RuntimeError(text) from error
    return path


def _text(value: object) -> str:
    """Returns the value as HTML text; control characters, forbidden there, become U+FFFD."""
    shown = (
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in str(value)
    )
    return escape("".join(shown))


def _value(name: str, value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, int | float):
        if name.endswith("_bytes"):
            gib = value >= 2**30
            return f"{value / (2**30 if gib else 2**20):,.2f} {'GiB' if gib else 'MiB'}"
        return number(value)
    return _text(value)


def _section(title: str, body: str) -> str:
    return f"<section><h2>{_text(title)}</h2>{body}</section>" if body else ""


def _column(history: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    return [(float(r["step"]), float(r[key])) for r in history if r.get(key) is not None]


def _last(history: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [y for _, y in _column(history, key)]
    return values[-1] if values else None


def _cards(
    history: Sequence[Mapping[str, Any]], baseline: Baseline | None, summary: Mapping[str, Any]
) -> str:
    cards: dict[str, str] = {}
    loss, trained = _last(history, "validation_loss"), _last(history, "loss")
    if loss is not None:
        cards["validation loss, nats per byte"] = f"{loss:.3f}"
    if baseline is not None:
        cards[f"{baseline.order}-gram counts, nats per byte"] = f"{baseline.nats_per_byte:.3f}"
    if baseline is not None and loss is not None and math.isfinite(loss):
        gap = loss - baseline.nats_per_byte
        cards["model minus counts"] = f"{gap:+.3f}"
    if trained is not None:
        cards["train loss, nats per byte"] = f"{trained:.3f}"
    rates = sorted(y for _, y in _column(history, "tokens_per_s"))
    if rates:
        cards["tokens/s, median"] = number(rates[len(rates) // 2])
    if history:
        cards["steps"] = number(int(history[-1]["step"]))
    items = {_text(k): _text(v) for k, v in cards.items()}
    items |= {_text(k): _value(k, v) for k, v in summary.items()}
    shown = "".join(f'<li class="card"><span>{k}</span><b>{v}</b></li>' for k, v in items.items())
    return f'<ul class="cards">{shown}</ul>' if shown else ""


def _charts(history: Sequence[Mapping[str, Any]], baseline: Baseline | None) -> str:
    def chart(title: str, unit: str, *series: Series, reference: Reference | None = None) -> str:
        zero = reference is None and title != "Loss"
        svg = line_chart(title, "step", unit, series, reference, from_zero=zero)
        return f"<figure><h3>{title}</h3>{svg}</figure>" if svg else ""

    counts = None
    if baseline is not None and math.isfinite(baseline.nats_per_byte):
        counts = Reference(f"{baseline.order}-gram counts", baseline.nats_per_byte)
    train = Series("train", _column(history, "loss"))
    validation = Series("validation", _column(history, "validation_loss"), markers=True)
    charts = [
        chart("Loss", "nats per byte", train, validation, reference=counts),
        chart("Throughput", "tokens/s", Series("tokens/s", _column(history, "tokens_per_s"))),
        chart("Gradient norm", "norm", Series("gradient norm", _column(history, "grad_norm"))),
        chart("Learning rate", "rate", Series("learning rate", _column(history, "learning_rate"))),
    ]
    shown = "".join(charts)
    empty = '<p class="note">The run stopped before a step was logged.</p>'
    return f'<div class="charts">{shown}</div>' if shown else empty


def _sample(prompt: str, sample: str) -> str:
    if not sample and not prompt:
        return ""
    return f"<pre><mark>{_text(prompt)}</mark>{_text(sample)}</pre>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table of cells that are HTML already."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    table = f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    return _scrolled(table)


def _scrolled(table: str) -> str:
    """Returns the table in a box that a finger or, having the focus, the arrow keys can move."""
    return f'<div class="scroll" role="region" aria-label="table" tabindex="0">{table}</div>'


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if not isinstance(value, Mapping):
        return {prefix or "value": value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _pairs(values: Any) -> str:
    rows = "".join(
        f'<tr><th scope="row"><code>{_text(k)}</code></th>'
        f'<td class="number">{_value(k, v)}</td></tr>'
        for k, v in _flat(values).items()
    )
    return _scrolled(f"<table><tbody>{rows}</tbody></table>") if rows else ""


def _kernels(kernels: Mapping[str, Any] | None) -> list[str]:
    if kernels is None:
        note = "The step did not go through tpjax.compile: XLA ran the model as written."
        return [_section("Kernels", f'<p class="note">{note}</p>')]
    sites: Counter[tuple[str, ...]] = Counter()
    for site in kernels.get("sites", ()):
        refused = "<br>".join(
            f"<code>{_text(r['implementation'])}</code>: {_text(r['reason'])}"
            for r in site.get("refused", ())
        )
        kind = {"pallas": "pallas", "as written": "failed"}.get(site["label"], "")
        label = f'<span class="{kind}">{_text(site["label"])}</span>'
        row = (f"<code>{_text(site['op'])}</code>", label,
               f"<code>{_text(site['source'])}</code>", refused)  # fmt: skip
        sites[row] += 1
    rows = [[*row[:3], number(count), row[3]] for row, count in sites.items()]
    none = '<p class="note">No line of the model was replaced.</p>'
    head = ("operator", "runs as", "line of the model", "times", "refused, and why")
    misses = Counter(
        (_text(m["rule"]), f"<code>{_text(m['source'])}</code>", _text(m["reason"]))
        for m in kernels.get("near_misses", ())
    )
    near = [[*row[:2], number(count), row[2]] for row, count in misses.items()]
    passes = [
        [_text(p["name"]), number(p["hits"]), number(p["equations_before"]),
         number(p["equations_after"])]
        for p in kernels.get("passes", ())
    ]  # fmt: skip
    miss_head = ("rule", "line of the model", "times", "what did not fit")
    pass_head = ("pass", "hits", "equations before", "after")
    return [
        _section("Kernels", _table(head, rows) if rows else none),
        _section("Near misses", _table(miss_head, near) if near else ""),
        _section("Passes", _table(pass_head, passes) if passes else ""),
        _section("Cost by the equations", _cost(kernels)),
    ]


def _cost(kernels: Mapping[str, Any]) -> str:
    cost = kernels.get("cost") or {}
    before, after = cost.get("before", {}), cost.get("after", {})
    names = {"flops": "FLOPs", "bytes": "bytes, unfused", "equations": "equations"}
    rows = [
        [name, number(before[key]), number(after[key])]
        for key, name in names.items()
        if key in before and key in after
    ]
    told = [f'<p class="note">{_text(note)}</p>' for note in kernels.get("notes", ())]
    return "".join([_table(("", "as written", "rewritten"), rows), *told]) if rows else ""


def _numbers(history: Sequence[Mapping[str, Any]]) -> str:
    if not history:
        return ""
    stride = math.ceil(len(history) / MAX_ROWS)
    rows = list(reversed(history[::-1][::stride]))
    keys = [key for key in _COLUMNS if any(row.get(key) is not None for row in rows)]
    cells = [["" if row.get(key) is None else number(row[key]) for key in keys] for row in rows]
    shown = _table([_COLUMNS[key] for key in keys], cells)
    return (
        f"<details><summary>{len(rows)} of {len(history)} logged steps</summary>{shown}</details>"
    )
