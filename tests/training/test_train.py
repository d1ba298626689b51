# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""`train.py` as people run it: to the end, resumed, stopped by a signal, asked wrongly."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

import train
from tests.harness import ROOT, assert_close
from tests.training import small
from tpjax.training.checkpoint import Checkpoints
from tpjax.training.step import State, new_model

CACHE: dict[str, Any] = {
    "jax_compilation_cache_dir": None,
    "jax_persistent_cache_min_compile_time_secs": 0.2,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module", autouse=True)
def _compile_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Lets the runs of this module, those in other processes too, share what XLA compiled."""
    before = {name: getattr(jax.config, name) for name in CACHE}
    folder = str(tmp_path_factory.mktemp("compiled"))
    for name, value in (CACHE | {"jax_compilation_cache_dir": folder}).items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def _main(*flags: str) -> int:
    return train.main(["train.py", *flags])


def _saved(folder: Path) -> tuple[dict, State]:
    checkpoints = Checkpoints(folder / "checkpoints", 2)
    meta = checkpoints.read_meta()
    return meta, checkpoints.restore(new_model(small.config())[1](), meta)


@pytest.fixture(scope="module")
def straight(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 20 steps."""
    folder = tmp_path_factory.mktemp("straight")
    assert _main(*small.FLAGS, f"--data={text}", f"--out={folder}", "--compile") == 0
    return folder


def test_a_run_says_what_it_is_and_what_came_of_it(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    flags = (*small.FLAGS, "--steps=4", "--compile", "--log_interval=2", "--eval_interval=2")
    assert _main(*flags, f"--data={text}", f"--out={tmp_path}") == 0
    out = capsys.readouterr().out
    for told in (
        "parameters    2", "1 x cpu (cpu)", "data=1: 4 of 4 sequences each",
        "float32, a CPU computes it fastest", "text.txt: text file", "of them held out",
        "4 sequences x 24 bytes = 96 tokens a step", "tpjax.compile in", "a device for the",
        "step 2/4  loss ", "ms/step", "tok/s", "ETA 0:00", "nats per byte on held-out text (all",
        "4-gram counts", "Sample after ", "flash_attention", "rms_norm", "xla",
        str(tmp_path / "report.html"), "step_000004",
        f"To go on: python train.py --resume={tmp_path} --steps=8",
    ):  # fmt: skip
        # a table folds a long path of a folder wherever it must
        assert re.sub(r"\s", "", told) in re.sub(r"\s", "", out), told
    assert "MFU" not in out  # the peak of a CPU is not known
    assert "\x1b" not in out
    report = (tmp_path / "report.html").read_text()
    for told in ("flash_attention", "4-gram counts", "text.txt", "batch_size", "parameters"):
        assert told in report, told


def test_ten_steps_and_ten_resumed_are_twenty(text: Path, straight: Path, tmp_path: Path):
    flags = (*small.FLAGS, "--compile", "--stop_at=10", f"--data={text}")
    assert _main(*flags, f"--out={tmp_path}") == 0
    meta, _ = _saved(tmp_path)
    assert meta["progress"]["step"] == 10
    assert _main(f"--resume={tmp_path}") == 0
    (once, state), (twice, resumed) = _saved(straight), _saved(tmp_path)
    assert twice["progress"]["last_loss"] == once["progress"]["last_loss"]
    assert twice["progress"]["sample_index"] == once["progress"]["sample_index"] == 80
    assert_close("state", resumed, state, 0)
    steps = [row["step"] for row in twice["progress"]["history"]]
    assert steps == [row["step"] for row in once["progress"]["history"]]


def _error(capsys: pytest.CaptureFixture[str], code: int, *flags: str) -> str:
    assert _main(*flags) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert "Traceback" not in captured.err
    return captured.err


def test_a_run_is_not_written_over(straight: Path, capsys: pytest.CaptureFixture[str]):
    error = _error(capsys, 1, f"--out={straight}")
    assert f"Go on with it by --resume={straight}" in error


def test_runs_without_a_folder_get_one_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from tpjax.training.folder import new_folder, old_folder

    monkeypatch.chdir(tmp_path)
    first, second = new_folder(None, "tiny"), new_folder(None, "tiny")
    assert [str(first), str(second)] == ["runs/tiny-001", "runs/tiny-002"]
    with pytest.raises(ValueError, match="must be a folder that holds a run"):
        old_folder(None, None)
    (first / "checkpoints" / "step_000001").mkdir(parents=True)
    assert old_folder(None, None) == first


RESUMED_WRONGLY = (
    (["--num_layers=3"], "num_layers must be that of the checkpoint; got num_layers: 1 -> 3"),
    (["--optimizer=muon"], "optimizer must be that of the checkpoint"),
    (["--data=stdlib"], "the text must be the one the run was trained on; got other bytes"),
    ([], "The run is done; train on with --steps=40"),
    (["--out=elsewhere"], "A run goes on in its own folder"),
)


@pytest.mark.parametrize(
    ("flags", "told"), RESUMED_WRONGLY, ids=["model", "optimizer", "text", "done", "out"]
)
def test_what_cannot_be_resumed_is_told(
    straight: Path, flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
):
    before = {p: p.read_bytes() for p in straight.rglob("*") if p.is_file()}
    assert told in _error(capsys, 1, f"--resume={straight}", *flags)
    assert before == {p: p.read_bytes() for p in straight.rglob("*") if p.is_file()}


def test_bad_input_is_told_before_anything_starts(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert "Did you mean 'tiny'?" in _error(capsys, 2, "--config=tiy")
    out = f"--out={tmp_path / 'run'}"
    assert "neither a path nor a name" in _error(capsys, 1, out, f"--data={tmp_path}/no.txt")
    blocked = f"--out={text}/run"
    assert "a folder that can be written" in _error(capsys, 1, blocked, f"--data={text}")
    short = tmp_path / "short.txt"
    short.write_text("In the beginning.")
    assert "at least" in _error(capsys, 1, out, f"--data={short}")
    nowhere = f"--resume={tmp_path / 'nowhere'}"
    assert "must be a run with a checkpoint" in _error(capsys, 1, nowhere)
    assert not (tmp_path / "run").exists()


def test_a_loss_that_blows_up_ends_the_run_and_says_where(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    flags = (*small.FLAGS, "--learning_rate=1e30", "--max_bad_steps=3", "--eval_interval=0")
    assert _main(*flags, f"--data={text}", f"--out={tmp_path}") == 1
    captured = capsys.readouterr()
    assert re.search(r"step \d+ rejected: loss \S+, gradient norm (nan|inf)", captured.out)
    assert re.search(r"error: train: loss and gradient .* none in steps \d+ to \d+", captured.err)
    assert (tmp_path / "report.html").exists()
    assert f"To go on: python train.py --resume={tmp_path}\n" in captured.out


def test_a_full_disk_at_the_end_is_told(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    run = train.build

    def build(*args: Any) -> train.Built:
        built = run(*args)
        monkeypatch.setattr(built.parts.checkpoints._saver, "save", full)
        monkeypatch.setattr(Checkpoints, "_new_saver", lambda self: built.parts.checkpoints._saver)
        return built

    monkeypatch.setattr(train, "build", build)
    flags = (*small.FLAGS, "--steps=4", "--checkpoint_interval=2", f"--data={text}")
    assert _main(*flags, f"--out={tmp_path}") == 1
    captured = capsys.readouterr()
    assert "warning: checkpoint: step 2 must be written" in captured.out
    assert "error: checkpoint: step 4 must be written" in captured.err
    assert "No space left on device" in captured.err


def _start(*flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", str(ROOT / "train.py"), *flags]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    env |= {name.upper(): str(getattr(jax.config, name)) for name in CACHE}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    )


def test_ctrl_c_saves_and_the_command_it_prints_goes_on(text: Path, straight: Path, tmp_path: Path):
    flags = (*small.FLAGS, "--compile", "--steps=20", "--log_interval=1", f"--data={text}")
    slow = "--eval_batches=1000"  # the evaluation at step 10 leaves time for the signal
    with _start(*flags, slow, f"--out={tmp_path}") as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("step 3/20"):
                process.send_signal(signal.SIGINT)
    out = "".join(lines)
    assert process.returncode == 130, out
    assert "SIGINT: saving step" in out
    assert (tmp_path / "report.html").exists()
    assert "Traceback" not in out
    command = re.search(r"To go on: python train\.py (\S+)\n", out)
    assert command, out
    assert _main(command[1]) == 0
    (once, state), (twice, resumed) = _saved(straight), _saved(tmp_path)
    assert twice["progress"]["last_loss"] == once["progress"]["last_loss"]
    assert_close("state", resumed, state, 0)


def test_a_gpu_that_is_not_there_is_told(tmp_path: Path):
    with _start("--platform=cuda", f"--out={tmp_path}") as process:
        assert process.stdout is not None
        out = process.stdout.read()
    assert process.returncode == 1, out
    assert "error: train: platform must be one that this machine has; got cuda" in out
    assert "Traceback" not in out
    assert not list(tmp_path.iterdir())
