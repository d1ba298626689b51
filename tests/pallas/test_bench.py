# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The benchmark: what it times, how it judges, what it prints and writes."""

import json
import re
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.harness import ROOT
from tpjax.__main__ import main
from tpjax.core.operator import Cost, Sample, nbytes
from tpjax.pallas import OPS, rms_norm
from tpjax.pallas.bench import Findings, by_words, clock, command, gain_of, measure, median_of, run
from tpjax.pallas.bench.ceilings import Ceilings, measure_ceilings, product_dtype
from tpjax.pallas.bench.clock import Timing, time_together
from tpjax.pallas.bench.hlo import Count
from tpjax.pallas.bench.picture import draw
from tpjax.pallas.bench.programs import random_arrays, random_cotangents, work_of
from tpjax.pallas.bench.results import Measured
from tpjax.pallas.bench.tables import gain_in_words

ROWS = {op.name: op for op in OPS}
RMS, ATTENTION = ROWS["rms_norm"], ROWS["flash_attention"]
CEILINGS = Ceilings("float32", 1e12, 1e10, 0.01)
"""One TFLOP/s, 10 GB/s, 10 us a launch."""


def chosen(sample: Sample) -> bool:
    """Says of the first sample of the norm that it is wanted."""
    return str(sample) == "f32[6,256] f32[256]"


@pytest.fixture
def quick(monkeypatch) -> None:
    """Has the ceilings given, and groups of one call."""
    monkeypatch.setattr(run, "measure_ceilings", lambda dtype: CEILINGS)
    monkeypatch.setattr(clock, "GROUP_MS", 1e-3)
    monkeypatch.setattr(time_together, "__defaults__", (6, 1e-3))


def test_the_median_lies_between_order_statistics():
    """Of 15 groups between the 4th and the 12th: 2 P(X < 4), X ~ B(15, 1/2), is 3.5 %."""
    times = np.random.default_rng(0).permutation(15).astype(float)
    timing = median_of([*times], calls=3)
    assert timing == Timing(7.0, 3.0, 11.0, 1 - 2 * (1 + 15 + 105 + 455) / 2**15, 15, 3)
    assert median_of([1.0, 5.0, 2.0, 9.0, 4.0, 3.0])[:4] == (3.5, 1.0, 9.0, 1 - 2 / 2**6)
    assert median_of([4.0])[:4] == (4.0, 4.0, 4.0, 0.0)


def test_the_interval_holds_the_median_as_often_as_it_says():
    draws = np.random.default_rng(1).lognormal(size=(2000, 15))
    timings = [median_of([*row]) for row in draws]
    held = np.mean([t.low_ms <= 1.0 <= t.high_ms for t in timings])
    assert abs(held - timings[0].confidence) < 0.02
    assert timings[0].confidence >= clock.CONFIDENCE


def test_programs_run_in_turn(monkeypatch):
    """Each round begins with another one; what fails is left out, and says how."""
    order = []

    def note(name: str, seconds: float) -> float:
        order.append(name)
        ticks[0] += seconds
        return seconds

    def failing() -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: too large")

    ticks = [0.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: ticks[0])
    fast, slow = (lambda: note("fast", 0.001)), (lambda: note("slow", 1.0))
    first, none, last = time_together([fast, failing, slow], groups=9, group_ms=4.0)
    assert isinstance(none, jax.errors.JaxRuntimeError)
    assert isinstance(first, Timing)
    assert isinstance(last, Timing)
    assert (first.groups, first.calls) == (9, 4)
    assert (last.groups, last.calls) == (clock.FEWEST_GROUPS, 1)
    assert (round(first.ms, 6), round(last.ms, 6)) == (1.0, 1000.0)
    rounds = re.sub("(fast){4}", "f", "".join(order[4:])).replace("slow", "s")
    assert rounds == "fssf" * 3 + "fff"


def test_random_arrays_are_what_the_row_says():
    op = replace(RMS, fn=lambda x, ids, flags: x, reference=lambda x, ids, flags: (x, ids))
    sample = Sample(("bf16[40,50]", "i32[1000]", "bool[100]"), below={"ids": 7})
    x, ids, flags = random_arrays(op, sample)
    assert (x.dtype, ids.dtype, flags.dtype) == (jnp.bfloat16, jnp.int32, jnp.bool_)
    assert {*np.asarray(ids).tolist()} == set(range(7))
    assert 0.9 < float(jnp.std(x.astype(jnp.float32))) < 1.1
    cotangents = random_cotangents(op, sample)
    assert cotangents[0].shape == (40, 50)
    assert cotangents[1] is None


def test_the_work_of_gradients():
    """A norm's gradients read x and dy and write dx; attention's take five products of two."""
    sample = RMS.samples[0]
    x, scale = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((6, 256), (256,)))
    work = work_of(RMS, sample)
    assert work["fwd"] == sample.call_of(RMS.cost)(x, scale)[:2]
    assert work["fwd+bwd"][1] - work["fwd"][1] == nbytes((x, scale, x, x, scale))
    assert work["fwd+bwd"][0] == 3 * work["fwd"][0]
    found = work_of(ATTENTION, ATTENTION.samples[0])
    assert found["fwd+bwd"][0] == 3.5 * found["fwd"][0]
    said = replace(RMS, cost=lambda x, scale: Cost(1.0, 2.0, 30.0, 40.0))
    assert work_of(said, sample) == {"fwd": (1.0, 2.0), "fwd+bwd": (31.0, 42.0)}


def test_forms_side_by_side(quick):
    """Every form of both directions; refused where it cannot run, a fault where it is wrong."""

    def wrong(x, scale):
        return rms_norm(x, scale, implementation="xla") * 1.1

    def broken(x, scale):
        raise TypeError("no such thing")

    others = {"same": RMS.reference, "wrong": wrong, "broken": broken}
    rows = list(measure([RMS], chosen, others))
    forms = ["pallas", "xla", "same", "wrong", "broken", "reference"]
    assert [row.form for row in rows] == forms * 2
    assert [row.direction for row in rows] == ["fwd"] * 6 + ["fwd+bwd"] * 6
    for row in rows:
        ran = row.form in ("xla", "same", "wrong", "reference")
        assert (row.timing is not None) == ran
        assert row.failed == (row.form in ("wrong", "broken")), row
        assert (row.note == "") == (row.form in ("xla", "same", "reference"))
    by_form = {row.form: row for row in rows[:6]}
    assert by_form["pallas"].note == "the kernel needs cuda; this is cpu"
    assert by_form["broken"].note == "TypeError: no such thing"
    assert by_form["wrong"].error == pytest.approx(0.1, rel=1e-3)
    assert by_form["xla"].error is not None
    assert by_form["xla"].error < 1e-6
    assert by_form["xla"].count.bytes >= by_form["xla"].bytes
    assert by_form["xla"].bound == "bytes"


def test_a_result_that_is_no_number_is_a_fault(quick):
    def hollow(x, scale):
        return rms_norm(x, scale, implementation="xla").at[0, 0].set(jnp.nan)

    row = next(r for r in measure([RMS], chosen, {"hollow": hollow}) if r.form == "hollow")
    assert row.failed
    assert row.error != row.error


def test_errors_are_relative_to_the_reference():
    """Root mean squares of each leaf, the worst counts; equal infinities are no difference."""
    want = (jnp.array([3.0, 4.0]), jnp.array([-jnp.inf, 5.0]), jnp.zeros(3))
    got = (jnp.array([3.0, 4.1]), jnp.array([-jnp.inf, 5.0]), jnp.zeros(3))
    assert run._error(want, want) == 0
    assert run._error(got, want) == pytest.approx(0.1 / 5)
    assert not run._error((*want[:2], jnp.full(3, jnp.nan)), want) < jnp.inf
    assert not run._error((want[0], -want[1], want[2]), want) < jnp.inf
    assert run._error(jnp.array([1, 2, 4]), jnp.array([1, 2, 2])) == pytest.approx(2 / 3)


def measured(form: str, ms: float, *counts: float) -> Measured:
    """Returns a row that ran so long and did so much: launches, bytes, operations."""
    row = Measured("op", "f32[8]", "fwd", form, CEILINGS, 2e9, 1e6)
    return replace(row, timing=Timing(ms, ms, ms, 0.96, 15, 1), count=Count(*counts))


XLA = measured("xla", 5.0, 7, 30e6, 3e9)
OURS = replace(measured("pallas", 2.5, 1, 10e6, 2e9), error=1e-3)


def test_a_gain_is_split():
    """20 MB at 10 GB/s, 6 launches of 10 us, a GFLOP at a TFLOP/s; the parts add up."""
    gain = gain_of(XLA, OURS)
    assert gain is not None
    assert gain[3:] == pytest.approx((2.5, 2.0, 0.06, 1.0, -0.56))
    assert gain.total_ms == pytest.approx(sum(gain[4:]))
    assert gain_of(replace(XLA, timing=None), OURS) is None
    words = gain_in_words([XLA, OURS]) or ""
    assert "traffic +2 ms (30 MB -> 10 MB), launches +0.06 ms (7 -> 1)" in words
    assert gain_in_words([OURS]) is None


def test_a_row_beside_the_ceilings():
    """2 GFLOP of a TFLOP/s take 2 ms, and 1 MB of 10 GB/s only 0.1."""
    assert OURS.bound == "flops"
    assert OURS.of_ceiling == pytest.approx(0.8)
    assert OURS.rates == pytest.approx((0.8e12, 0.4e9))
    assert replace(OURS, flops=0.0).bound == "bytes"
    assert product_dtype(map(jnp.ones, (2, 3))) == "float32"
    mixed = [jnp.ones(2, jnp.float32), None, jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.int8)]
    assert product_dtype(mixed) == "bfloat16"
    assert product_dtype([]) == "float32"


def test_json_holds_everything_and_is_documented():
    """Fields of the JSON have a line each in docs/bench.md."""
    found = json.loads(json.dumps(Findings((XLA, OURS)).as_dict()))
    assert found["schema"] == 1
    assert [row["ms"] for row in found["results"]] == [5.0, 2.5]
    assert found["gains"][0]["total_ms"] == 2.5
    assert found["machine"]["jax"] == jax.__version__
    assert found["ceilings"] == [CEILINGS._asdict()]
    text = (ROOT / "docs" / "bench.md").read_text()
    fields = {*found, *found["machine"], *found["ceilings"][0], *found["results"][0]}
    missing = {f for f in fields | {*found["gains"][0]} if f"`{f}`" not in text}
    assert not missing


@pytest.fixture
def one_row(monkeypatch, quick) -> None:
    """Has the command know the norm alone."""
    monkeypatch.setattr(command, "OPS", (RMS,))


def test_command(one_row, tmp_path, capsys):
    """A table for each direction, JSON and a picture; the exit code says that all went well."""
    paths = tmp_path / "found.json", tmp_path / "roofline.png"
    files = ["--json", str(paths[0]), "--picture", str(paths[1])]
    assert main(["bench", "rms_norm", "--samples", "[6,256]", "--groups", "6", *files]) == 0
    text = capsys.readouterr().out
    for said in ("rms_norm fwd  f32[6,256]", "rms_norm fwd+bwd", "reference", "of ceiling"):
        assert said in text
    assert "ceilings: 1 TFLOP/s in float32, 10 GB/s, 10 us a launch" in text
    assert "pallas: the kernel needs cuda; this is cpu" in text
    assert len(json.loads(paths[0].read_text())["results"]) == 6
    assert paths[1].read_bytes().startswith(b"\x89PNG")


def test_command_fails_where_a_form_is_wrong(monkeypatch, one_row, capsys):
    monkeypatch.setattr(run, "WRONG", -1.0)
    assert main(["bench", "--samples", "[6,256]", "--groups", "6"]) == 1
    assert "xla of rms_norm fwd f32[6,256] f32[256]: not what" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["rms"], "unknown operator 'rms'. Did you mean 'rms_norm'?"),
        (["rms_norm", "--samples", "[7,7]"], "got '[7,7]'. Samples of rms_norm: f32[6,256]"),
        (["--groups", "5"], "--groups must be at least 6"),
        (["--json", "nowhere/x.json"], "--json must be in a folder that exists"),
        (["--picture", "x.gif"], "--picture must end in .png, .svg or .pdf; got 'x.gif'"),
        (["--tune"], "--tune: expected one argument"),
        (["--tune", "x", "--record"], "not allowed with argument"),
    ],
)
def test_wrong_command_lines(words, says, one_row, capsys):
    assert main(["bench", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.count("\n") == 1


def test_a_picture_without_matplotlib(monkeypatch, one_row, capsys):
    """Said before anything is measured, with what to install."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "--picture", "x.png"]) == 2
    assert "pip install 'tpjax[picture]'" in capsys.readouterr().err


def test_a_picture_of_every_kind(tmp_path):
    rows = (XLA, OURS, replace(XLA, form="theirs", direction="fwd+bwd"))
    for suffix in (".svg", ".pdf"):
        path = tmp_path / f"roofline{suffix}"
        draw(Findings((*rows, replace(OURS, timing=None))), path)
        assert path.stat().st_size > 1000


def test_samples_by_words():
    small, large = Sample(("f32[2]",)), Sample(("bf16[9]",), {"is_causal": True}, slow=True)
    for words, wanted in (
        (None, [small]),
        (["production"], [large]),
        (["small"], [small]),
        (["all"], [small, large]),
        (["causal=True", "f32[2"], [small, large]),
        (["f64"], []),
    ):
        assert [*filter(by_words(words), (small, large))] == wanted


def test_tuning_by_command(one_row, tmp_path, monkeypatch, capsys):
    """`--tune` times configs of the samples, and says so where there is no kernel to tune."""
    assert main(["bench", "--tune", str(tmp_path), "--samples", "[6,256]"]) == 1
    printed = capsys.readouterr()
    assert "the kernel needs cuda" in printed.out
    assert "no kernel of these operators ran here" in printed.err


@pytest.mark.slow
def test_ceilings_of_this_machine():
    """Plausible, and measured once."""
    found = measure_ceilings("float32")
    assert 1e9 < found.flops < 1e16
    assert 1e8 < found.bytes < 1e14
    assert 0 <= found.launch_ms < 1
    assert measure_ceilings("float32") == found


@pytest.mark.gpu
def test_gpu():
    """On a GPU: both directions of the norm in a kernel each, less moved than XLA's form moves."""
    rows = tuple(measure([RMS], lambda sample: str(sample).startswith("bf16[16384,4096]")))
    assert not [row.note for row in rows if row.note]
    forms = {(row.form, row.direction): row for row in rows}
    for direction in ("fwd", "fwd+bwd"):
        ours, xla = forms["pallas", direction], forms["xla", direction]
        assert ours.count.kernels >= 1
        assert ours.count.bytes <= 1.1 * xla.count.bytes
        assert 0.3 < (ours.of_ceiling or 0) < 2
    assert len(Findings(rows).gains()) == 2
