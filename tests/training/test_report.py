# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The run report: a page that shows everything, escapes everything and is never written in half."""

import errno
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tpjax.models import PRESETS
from tpjax.training import report
from tpjax.training.baseline import Baseline
from tpjax.training.chart import Reference, Series, line_chart, number, ticks
from tpjax.training.report import write_report

HOSTILE = """</title><script>alert("1")</script>' onload=x & $title \x00\x1b[31m\ud800 ünï"""

KERNELS: dict[str, Any] = {
    "schema_version": 1,
    "sites": [
        {"op": "flash_attention", "label": "xla", "source": "model.py:20", "implementation": "xla",
         "refused": [{"implementation": "pallas", "reason": "the kernel needs cuda; this is cpu"}]}
    ] * 4 + [
        {"op": "rms_norm", "label": "pallas", "source": "model.py:10", "implementation": "pallas",
         "refused": []},
        {"op": "layer_norm", "label": "as written", "source": "model.py:11",
         "implementation": None, "refused": []},
    ],
    "near_misses": [
        {"rule": "attention", "source": "model.py:30", "reason": "the softmax is over queries"}
    ],
    "passes": [
        {"name": "fuse_attention", "hits": 4, "equations_before": 420, "equations_after": 380}
    ],
    "cost": {"before": {"flops": 3e9, "bytes": 2e9, "equations": 420},
             "after": {"flops": 3e9, "bytes": 1e9, "equations": 380}},
    "constants": [],
    "notes": ["the body of a while is counted once"],
}  # fmt: skip


def history_of(count: int) -> list[dict[str, Any]]:
    rows = [
        {"step": 10 * i, "loss": 5.0 / i, "tokens_per_s": 15_000.0 + i, "step_ms": 136.5,
         "learning_rate": 0.02 / i, "grad_norm": 1.0 / i, "mfu": None}
        for i in range(1, count + 1)
    ]  # fmt: skip
    for row in rows[::5]:
        row["validation_loss"] = row["loss"] + 0.1
    return rows


class Page(HTMLParser):
    """Reads a page strictly: every element closed in order; keeps text, tags and attributes."""

    VOID = ("meta", "br")

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data + "\n"


def read(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def test_a_finished_run_shows_all_there_is(tmp_path):
    path = tmp_path / "runs" / "report.html"
    written = write_report(
        path,
        config={"batch_size": 16, "model": PRESETS["tiny"]},
        history=history_of(25),
        sample="the LORD said",
        prompt="And ",
        kernels=KERNELS,
        baseline=Baseline(4, 1.475),
        environment={"jax": "0.12.0", "dtype": "float32: no accelerator"},
        memory={"arguments_bytes": 10 * 2**20, "total_bytes": 3 * 2**30, "devices": 2},
        summary={"parameters": 853_120},
        subtitle="decoder on kjv; finished",
    )
    assert written == path
    page = read(path)
    words = [
        "decoder on kjv; finished", "the LORD said", "853,120", "model.num_kv_heads", "1.475",
        "flash_attention", "model.py:20", "the kernel needs cuda; this is cpu", "as written",
        "the softmax is over queries", "fuse_attention", "3,000,000,000", "no accelerator",
        "10.00 MiB", "3.00 GiB", "nats per byte", "tokens/s", "4-gram counts",
        "the body of a while is counted once", "25 of 25 logged steps",
    ]  # fmt: skip
    assert [word for word in words if word not in page.text] == []
    assert page.text.count("flash_attention") == 1  # four equal sites are one row
    # Last validation at step 210: 5 / 21 + 0.1, below the counts.
    assert "0.338" in page.text
    assert "-1.137" in page.text
    assert sum(tag == "svg" and "role" in attrs for tag, attrs in page.tags) == 4


def test_the_page_stands_alone(tmp_path):
    path = write_report(tmp_path / "r.html", config={"a": 1}, history=history_of(9))
    text, page = path.read_text(), read(path)
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "link", "img", "iframe", "object"})
    assert not re.search(r"https?:|//|url\(|@import|\ssrc=|\shref=", text)


def test_charts_are_drawn_and_described(tmp_path):
    path = write_report(
        tmp_path / "r.html", config={}, history=history_of(25), baseline=Baseline(4, 1.475)
    )
    charts = re.findall(r'<svg class="chart".*?</svg>', path.read_text(), re.DOTALL)
    for chart in charts:
        root = ElementTree.fromstring(chart)
        assert root.find("title") is not None
        assert root.find("desc") is not None
    loss = charts[0]
    assert "train: 5 at 10, 0.2 at 250" in loss
    assert 'class="reference"' in loss
    assert loss.count("<circle") == 5


def test_every_string_is_escaped(tmp_path):
    kernels = {
        "sites": [
            {"op": HOSTILE, "label": HOSTILE, "source": HOSTILE,
             "refused": [{"implementation": HOSTILE, "reason": HOSTILE}]}
        ],
        "near_misses": [{"rule": HOSTILE, "source": HOSTILE, "reason": HOSTILE}],
        "passes": [
            {"name": HOSTILE, "hits": 1, "equations_before": 1, "equations_after": 1}
        ],
        "notes": [HOSTILE],
        "cost": KERNELS["cost"],
    }  # fmt: skip
    both = {HOSTILE: HOSTILE}
    path = write_report(
        tmp_path / "r.html", config={"model": both}, history=history_of(3), sample=HOSTILE,
        prompt=HOSTILE, kernels=kernels, environment=both, memory=both, summary=both,
        title=HOSTILE, subtitle=HOSTILE,
    )  # fmt: skip
    text, page = path.read_text(encoding="utf-8"), read(path)
    assert "<script" not in text
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\ud800-\udfff]", text)
    shown = """</title><script>alert("1")</script>' onload=x & $title"""
    # title twice, subtitle, prompt, sample, config, environment, memory and summary key and value.
    assert page.text.count(shown) >= 20
    assert "ünï" in page.text


@pytest.mark.parametrize(
    "history",
    [
        [],
        [{"step": 1}],
        [{"step": 1, "loss": 5.5}],
        [{"step": 5, "loss": math.nan, "grad_norm": math.inf, "tokens_per_s": 0.0}],
        [{"step": 5, "validation_loss": math.nan}, {"step": 6, "loss": 2.0, "mfu": 0.4}],
    ],
)
def test_a_run_that_hardly_ran_has_a_report(tmp_path, history):
    page = read(
        write_report(tmp_path / "r.html", config={}, history=history, baseline=Baseline(4, 1.475))
    )
    if not any(math.isfinite(v) for r in history for k, v in r.items() if k != "step"):
        assert "The run stopped before a step was logged." in page.text
    assert "The step did not go through tpjax.compile" in page.text


def test_a_long_history_is_thinned_and_keeps_its_end(tmp_path):
    path = write_report(tmp_path / "r.html", config={}, history=history_of(50_000))
    assert path.stat().st_size < 200_000
    assert "500,000" in read(path).text


def test_a_new_report_replaces_the_old_at_once(tmp_path):
    path = tmp_path / "r.html"
    write_report(path, config={}, history=[], subtitle="first")
    write_report(path, config={}, history=[], subtitle="second")
    assert "second" in read(path).text
    assert os.listdir(tmp_path) == ["r.html"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_keeps_the_old_report_and_leaves_no_rest(tmp_path, monkeypatch, call):
    path = write_report(tmp_path / "r.html", config={}, history=[], subtitle="first")

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(report.os, call, full)
    words = (
        rf"write_report: path must be .*; got {re.escape(str(path))} \(No space left on device\)"
    )
    with pytest.raises(RuntimeError, match=words + ".*the checkpoint is not touched"):
        write_report(path, config={}, history=[], subtitle="second")
    assert "first" in read(path).text
    assert os.listdir(tmp_path) == ["r.html"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        RuntimeError, match=r"write_report: path must be a file that can be written"
    ):
        write_report(tmp_path / "file" / "r.html", config={}, history=[])


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 1), (1.2, 5.6), (-3, 4), (1e-5, 9e-5), (15e3, 16e3), (0, 0), (2, 2), (-1e9, 1e9)],
)
def test_ticks_are_round_few_and_enclose(low, high):
    found = ticks(low, high)
    assert found[0] <= low
    assert found[-1] >= high
    assert 2 <= len(found) <= 8
    step = found[1] - found[0]
    assert round(step / 10 ** math.floor(math.log10(step) + 1e-9), 6) in (1, 2, 2.5, 5)


def test_a_curve_goes_through_its_points():
    svg = line_chart("t", "x", "y", [Series("s", [(0, 0), (5, 10), (10, 5)])])
    path = re.findall(r'<g class="series-0"><path d="(M[^"]*)"', svg)[0]
    places = [tuple(map(float, p.split())) for p in path[1:].split("L")]
    (x0, y0), (x1, y1), (x2, y2) = places
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.11)
    assert y0 - y1 == pytest.approx(2 * (y0 - y2), abs=0.21)
    assert y1 < y2 < y0  # up is up


def test_what_is_not_finite_leaves_a_gap():
    svg = line_chart("t", "x", "y", [Series("s", [(0, 1), (1, 2), (2, math.nan), (3, 1), (4, 2)])])
    assert re.findall(r'<g class="series-0"><path d="(M[^"]*)"', svg)[0].count("M") == 2
    assert "nan" not in svg
    assert line_chart("t", "x", "y", [Series("s", [(0, math.nan)])]) == ""


def test_a_reference_beyond_the_curve_is_on_the_chart():
    svg = line_chart("t", "x", "y", [Series("s", [(0, 1), (1, 2)])], Reference("goal", 9.0))
    y = float(re.findall(r'class="reference" d="M\d+ ([\d.]+)H', svg)[0])
    assert 14 <= y <= 234


def test_numbers_read_well():
    shown = [number(x) for x in (1234567, 1234567.8, 0.00123456, 12.3456, 0, 999)]
    assert shown == ["1,234,567", "1,234,568", "0.001235", "12.35", "0", "999"]
