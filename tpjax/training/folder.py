# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: a new one for each, so that no run writes over another."""

import os
import re
from pathlib import Path

from tpjax.core.errors import message

RUNS = Path("runs")
"""Where runs go that were given no folder: runs/tiny-001, runs/tiny-002."""

CHECKPOINTS = "checkpoints"
REPORT = "report.html"


def _check_writable(folder: Path) -> None:
    """Makes the folder and a file in it, or raises with the reason before anything was computed."""
    probe = folder / f".probe-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        got, remedy = f"{folder} ({error.strerror or error})", "Name another folder with --out."
        raise RuntimeError(
            message("train", "--out", "a folder that can be written", got, remedy)
        ) from None


def _holds_run(folder: Path) -> bool:
    checkpoints = folder / CHECKPOINTS
    return (folder / REPORT).exists() or (checkpoints.is_dir() and any(checkpoints.iterdir()))


def new_folder(out: str | None, name: str) -> Path:
    """Returns the folder of a new run: `out`, or the next free number under `RUNS`.

    Raises:
      RuntimeError: it cannot be written.
      ValueError: there is a run in it.
    """
    if out is not None:
        folder = Path(out).expanduser()
        if _holds_run(folder):
            must, got = "a folder without a run", f"{folder}, which has one"
            remedy = f"Go on with it by --resume={folder}, or leave --out out for a new folder."
            raise ValueError(message("train", "--out", must, got, remedy))
        _check_writable(folder)
        return folder
    pattern = re.compile(re.escape(name) + r"-(\d+)")
    taken = [pattern.fullmatch(p.name) for p in RUNS.glob(f"{name}-*")]
    number = max((int(m[1]) for m in taken if m), default=0) + 1
    while True:
        folder = RUNS / f"{name}-{number:03}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1  # another run took it just now
            continue
        except OSError:
            pass
        _check_writable(folder)
        return folder


def old_folder(resume: str | None, out: str | None) -> Path:
    """Returns the folder of the run to go on with: the one named, or the newest under `RUNS`.

    Raises:
      ValueError: two folders are named, or none is and there is no run.
      RuntimeError: it cannot be written.
    """
    if resume is not None and out is not None and Path(resume) != Path(out):
        must, remedy = "the folder of the run", "A run goes on in its own folder: leave --out out."
        raise ValueError(message("resume", "--out", must, out, remedy))
    named = resume or out
    if named is not None:
        folder = Path(named).expanduser()
    else:
        runs = [p.parent for p in RUNS.glob(f"*/{CHECKPOINTS}") if any(p.iterdir())]
        if not runs:
            must, remedy = "a folder that holds a run", "Name one: --resume=FOLDER."
            raise ValueError(message("resume", "runs", must, f"none in {RUNS.absolute()}", remedy))
        folder = max(runs, key=lambda p: (p / CHECKPOINTS).stat().st_mtime)
    if (folder / CHECKPOINTS).is_dir():
        _check_writable(folder)
    return folder
