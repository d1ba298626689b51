# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""What a run shows: tables of what it is and what it did, and a line that moves while it works.

On a terminal the line is live; elsewhere (a file, CI) a plain line is printed every few steps, and
nothing that is printed has control codes.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from tpjax.training.metrics import spell_count, spell_seconds

PLAIN_WIDTH = 110
"""Columns of a table where there is no terminal to ask."""


def new_console() -> Console:
    """Returns the console of a run, on standard output."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


class Reading(NamedTuple):
    """What the progress line shows of a step."""

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    step_ms: float
    tokens_per_s: float
    mfu: float | None
    """Share of the devices' peak arithmetic, 0 to 1; None where the peak is unknown."""
    eta_s: float

    def __str__(self) -> str:
        shown = [
            f"loss {self.loss:.4f}",
            f"lr {self.learning_rate:.2e}",
            f"grad {self.grad_norm:.2f}",
            f"{self.step_ms:.0f} ms/step" if self.step_ms >= 10 else f"{self.step_ms:.1f} ms/step",
            f"{spell_count(self.tokens_per_s)} tok/s",
            *([f"MFU {self.mfu:.1%}"] if self.mfu is not None else []),
            f"ETA {spell_seconds(self.eta_s)}",
        ]
        return "  ".join(shown)


class Log:
    """The progress of a run on a console: `show` each step, `say` what happens."""

    def __init__(self, console: Console, steps: int, interval: int):
        self.console, self.steps, self.interval = console, steps, interval
        self._live: Progress | None = None
        self._task: Any = None

    @contextmanager
    def running(self, step: int) -> Iterator["Log"]:
        """Shows the live line, on a terminal, from `step` on until the block ends."""
        if not self.console.is_terminal:
            yield self
            return
        columns = (
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[reading]}"),
        )
        self._live = Progress(*columns, console=self.console, refresh_per_second=4)
        self._task = self._live.add_task("", total=self.steps, completed=step, reading="")
        try:
            with self._live:
                yield self
        finally:
            self._live = None

    def show(self, reading: Reading) -> None:
        """Shows the numbers of a step."""
        if self._live is not None:
            self._live.update(self._task, completed=reading.step, reading=str(reading))
        elif reading.step % self.interval == 0 or reading.step == self.steps:
            self.say(f"step {reading.step}/{self.steps}  {reading}")

    def say(self, text: str) -> None:
        """Prints a line, above the live one where there is one."""
        self.console.print(text, markup=False, soft_wrap=True)


def show_pairs(console: Console, title: str, pairs: Mapping[str, str]) -> None:
    """Prints names and values, one pair a row."""
    table = Table(title=title, title_justify="left", show_header=False, box=box.SIMPLE)
    table.add_column("name", no_wrap=True)
    table.add_column("value", overflow="fold")
    for name, value in pairs.items():
        table.add_row(name, escape(value))
    console.print(table)


class Stopwatch:
    """Times steps by the clock on the wall, pauses left out."""

    def __init__(self) -> None:
        self._mark: float | None = None

    def lap_ms(self) -> float | None:
        """Returns milliseconds since the last lap, None after a pause."""
        now, before = time.perf_counter(), self._mark
        self._mark = now
        return None if before is None else (now - before) * 1e3

    def pause(self) -> None:
        """Forgets the last lap: what comes now is not part of a step."""
        self._mark = None
