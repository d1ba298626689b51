# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The loop: steps, and between them validation, checkpoints, the log, and the wish to stop.

The host reads the metrics of a step after it has sent the next one, so that the device never waits.
A batch is found by its global sample index, so that a run goes on where it stopped.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

import jax
from jaxtyping import Array, Float

from tpjax.core.errors import message
from tpjax.training.checkpoint import Checkpoints, SaveError
from tpjax.training.config import Config
from tpjax.training.console import Log, Reading, Stopwatch
from tpjax.training.data import Batches
from tpjax.training.mesh import Placement
from tpjax.training.step import Loss, Metrics, Params, State, Step
from tpjax.training.stop import Stop


class NonFiniteError(RuntimeError):
    """Too many steps in a row had a loss or gradient that is not finite."""


@dataclass
class Progress:
    """How far a run has come, on the host; saved beside the state."""

    step: int = 0
    """Steps done, rejected ones included."""
    sample_index: int = 0
    """The global index of the next sample."""
    bad_steps: int = 0
    """Steps rejected so far."""
    bad_in_a_row: int = 0
    last_loss: float | None = None
    """Loss of the last step, all its digits."""
    validation_loss: float | None = None
    """The last one measured, on a part or all of the text."""
    train_s: float = 0.0
    """Seconds spent in steps."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """One row for each logged step, with the means since the last one."""

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields as plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Parts:
    """What the loop works with; made in `train.py`."""

    config: Config
    place: Placement
    step: Step
    evaluate: Callable[[Params, int], float]
    """Takes parameters and a number of batches, 0 for all; returns nats per byte."""
    batches: Batches
    checkpoints: Checkpoints
    meta: dict[str, Any]
    """Saved with each checkpoint, beside the progress."""
    log: Log
    stop: Stop
    flops_per_step: float
    peak_flops: float | None
    """Of all devices together; None where unknown."""


def evaluation(loss: Loss, place: Placement, validation: Batches) -> Callable[[Params, int], float]:
    """Returns the function that measures the loss on held-out text, compiled at its first call.

    It takes whole batches in one fixed order: the samples that would fill a last batch by part are
    left out; a text of less than one batch is filled up from its beginning.
    """
    compiled = jax.jit(loss)

    def evaluate(params: Params, batches: int) -> float:
        whole = max(1, validation.num_windows // validation.batch_size)
        count = min(batches, whole) if batches else whole
        total: Float[Array, ""] | float = 0.0
        for i in range(count):
            total += compiled(params, place.put(validation.batch(i * validation.batch_size)))
        return float(total) / count

    return evaluate


class _Meter:
    """Reads the metrics of each step, one step late, into the progress and onto the console."""

    def __init__(self, parts: Parts, progress: Progress):
        self.parts, self.progress = parts, progress
        self.watch = Stopwatch()
        self.bad_window: tuple[int, int] | None = None
        """First and last of `max_bad_steps` rejected steps in a row, once there are as many."""
        self._pending: tuple[int, Metrics] | None = None
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._laps_ms: list[float] = []
        self._recent_ms: list[float] = []
        self._rate = 0.0

    def sent(self, step: int, metrics: Metrics) -> None:
        """Takes the metrics of the step just sent, and reads those of the step before it."""
        self.settle()
        self._pending = (step, metrics)

    def settle(self) -> None:
        """Waits for the last step that was sent, and reads its metrics."""
        if self._pending is None:
            return
        (step, metrics), self._pending = self._pending, None
        loss, norm, rate, finite = (x.item() for x in jax.device_get(metrics))
        lap_ms = self.watch.lap_ms()
        if lap_ms is not None:
            self.progress.train_s += lap_ms / 1e3
            self._laps_ms.append(lap_ms)
            self._recent_ms = [*self._recent_ms[-19:], lap_ms]
        if finite:
            self._losses.append(loss)
            self._norms.append(norm)
        self._rate = rate
        self._count(step, loss, norm, finite)
        self.progress.last_loss = loss if math.isfinite(loss) else None
        self.parts.log.show(self._reading(step, loss, norm, rate))
        if step % self.parts.config.log_interval == 0 or step == self.parts.config.last_step:
            self.end_row(step)

    def end_row(self, step: int) -> None:
        """Adds a row of means since the last one to the history, if there was a step since."""
        if not self._losses and not self._laps_ms:
            return
        row: dict[str, Any] = {"step": step, "learning_rate": self._rate}
        if self._losses:
            row |= {"loss": fmean(self._losses), "grad_norm": fmean(self._norms)}
        if self._laps_ms:
            row |= {"step_ms": fmean(self._laps_ms)}
            row |= {
                "tokens_per_s": self._tokens_per_s(row["step_ms"]),
                "mfu": self._mfu(row["step_ms"]),
            }
        self.progress.history.append(row)
        self._losses, self._norms, self._laps_ms = [], [], []

    def _count(self, step: int, loss: float, norm: float, finite: bool) -> None:
        progress = self.progress
        if finite:
            progress.bad_in_a_row = 0
            return
        progress.bad_steps += 1
        progress.bad_in_a_row += 1
        if progress.bad_in_a_row == self.parts.config.max_bad_steps:
            self.bad_window = (step - progress.bad_in_a_row + 1, step)
        self.parts.log.say(
            f"step {step} rejected: loss {loss}, gradient norm {norm}; parameters are as before it "
            f"({progress.bad_in_a_row} in a row, {progress.bad_steps} in all)"
        )

    def _tokens_per_s(self, step_ms: float) -> float:
        return self.parts.config.tokens_per_step / step_ms * 1e3

    def _mfu(self, step_ms: float) -> float | None:
        peak = self.parts.peak_flops
        return None if peak is None else self.parts.flops_per_step / (step_ms / 1e3) / peak

    def _reading(self, step: int, loss: float, norm: float, rate: float) -> Reading:
        step_ms = fmean(self._recent_ms) if self._recent_ms else math.inf
        left = self.parts.config.last_step - step
        return Reading(
            step, loss, rate, norm, step_ms, self._tokens_per_s(step_ms), self._mfu(step_ms),
            left * step_ms / 1e3 if left else 0.0,
        )  # fmt: skip


def _save(parts: Parts, state: State, progress: Progress) -> None:
    parts.checkpoints.save(state, {**parts.meta, "progress": progress.as_dict()})


def _is_due(step: int, interval: int, parts: Parts) -> bool:
    return interval > 0 and step % interval == 0 and step < parts.config.last_step


def _validate(parts: Parts, state: State, progress: Progress, batches: int) -> None:
    """Measures the loss on held-out text into the newest row of the history."""
    progress.validation_loss = parts.evaluate(state.params, batches)
    row: dict[str, Any] = {"step": progress.step}
    if not progress.history or progress.history[-1]["step"] != progress.step:
        progress.history.append(row)
    progress.history[-1]["validation_loss"] = progress.validation_loss
    part = f"{batches} batches of it" if batches else "all of it"
    parts.log.say(
        f"step {progress.step}: {progress.validation_loss:.4f} nats per byte "
        f"on held-out text ({part})"
    )


def _between_steps(parts: Parts, state: State, progress: Progress, meter: _Meter) -> None:
    """Validates and saves where it is time to; a save that fails is told, and tried again later."""
    c, step = parts.config, progress.step
    validate = _is_due(step, c.eval_interval, parts)
    save = _is_due(step, c.checkpoint_interval, parts)
    if validate or save:
        meter.settle()
        meter.watch.pause()
    if validate:
        _validate(parts, state, progress, c.eval_batches)
    try:
        parts.checkpoints.poll()
        if save:
            _save(parts, state, progress)
    except SaveError as error:
        parts.log.say(f"warning: {error}")
    if validate or save:
        meter.watch.lap_ms()


def fit(parts: Parts, state: State, progress: Progress) -> State:
    """Runs the steps that are left, or those until a signal comes, and saves; returns the state.

    `progress` is brought up to date as it goes.

    Raises:
      NonFiniteError: `max_bad_steps` steps in a row were rejected. The parameters saved are those
      of the
        last step that was taken.
      SaveError: the last checkpoint could not be written.
    """
    c = parts.config
    meter = _Meter(parts, progress)
    progress.bad_in_a_row = 0
    with parts.log.running(progress.step):
        meter.watch.lap_ms()
        while (
            progress.step < c.last_step and parts.stop.signal is None and meter.bad_window is None
        ):
            tokens = parts.place.put(parts.batches.batch(progress.sample_index))
            state, metrics = parts.step(state, tokens)
            progress.step += 1
            progress.sample_index += c.batch_size
            meter.sent(progress.step, metrics)
            _between_steps(parts, state, progress, meter)
        meter.settle()
        meter.end_row(progress.step)
    if parts.stop.signal is not None:
        parts.log.say(f"{parts.stop.name}: saving step {progress.step}, then stopping")
    _save(parts, state, progress)
    if progress.step == c.steps and meter.bad_window is None:
        _validate(parts, state, progress, 0)
    parts.checkpoints.wait()
    if meter.bad_window is not None:
        first, last = meter.bad_window
        must, got = "finite within max_bad_steps", f"none in steps {first} to {last}"
        remedy = (
            "Their updates were rejected: the checkpoint has the parameters of the step before. "
            "Resume with a lower --learning_rate or --clip_norm."
        )
        raise NonFiniteError(message("train", "loss and gradient", must, got, remedy))
    return state
