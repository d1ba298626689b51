# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Trains a byte-level language model on real text, through `tpjax.compile`.

    python train.py                                  the King James Bible: minutes on two CPU cores
    python train.py --config=small --data=stdlib     a larger preset, another text
    python train.py --data=notes/ --steps=1000       a file or folder of your own
    python train.py --resume                         go on with the newest run
    python train.py --config=125m --compile=False    the same step under plain jax.jit, to compare
    python train.py --help                           all flags: one for each field of the config

All devices that JAX finds are used. Ctrl-C and SIGTERM finish the step, save, and say how to go on.
Exit codes: 0 done; 1 an error, told in a line; 2 a wrong command line; 130 after Ctrl-C, 143 after
SIGTERM.
"""

import dataclasses
import hashlib
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console

import tpjax
from tpjax.core.errors import message
from tpjax.models import flops_per_token
from tpjax.models.sampling import sample
from tpjax.training import console as show
from tpjax.training.baseline import Baseline, ngram_baseline
from tpjax.training.checkpoint import Checkpoints, RestoreError, SaveError
from tpjax.training.config import Config, override
from tpjax.training.data import Batches, Corpus, Split, load_text
from tpjax.training.flags import DEFAULT_PRESET, NEWEST, Request, read_command_line
from tpjax.training.folder import CHECKPOINTS, REPORT, new_folder, old_folder
from tpjax.training.loop import NonFiniteError, Parts, Progress, evaluation, fit
from tpjax.training.mesh import Placement, devices_of, dtype_of, place
from tpjax.training.metrics import (
    Memory,
    memory_of,
    peak_flops,
    spell_bytes,
    spell_count,
    spell_seconds,
)  # fmt: skip
from tpjax.training.report import write_report
from tpjax.training.step import State, loss_of, new_model, step_of
from tpjax.training.stop import Stop

SHAPES = ("vocab_size", "num_layers", "embed_dim", "num_heads", "num_kv_heads", "head_dim",
          "hidden_dim", "tied", "scan_layers", "param_dtype", "optimizer")  # fmt: skip
"""Fields that say which arrays a state holds: a run goes on with the same."""


class Run(NamedTuple):
    """What a command line came to: everything decided, nothing computed."""

    config: Config
    folder: Path
    checkpoints: Checkpoints
    place: Placement
    dtype_reason: str
    corpus: Corpus
    split: Split
    saved: dict[str, Any] | None
    """What lies beside the checkpoint to go on from; None for a new run."""
    changes: tuple[str, ...]
    """Fields that differ from those of the run gone on with."""

    @property
    def digest(self) -> str:
        """Tells this text from another."""
        return hashlib.sha256(self.corpus.data).hexdigest()


def prepare(request: Request) -> Run:
    """Decides all that a run needs and checks it, so that a mistake costs seconds."""
    devices = devices_of(request.platform)
    folder, saved, before = None, None, None
    if request.resume is None:
        config = request.config()
    else:
        named = None if request.resume == NEWEST else request.resume
        folder = old_folder(named, request.out)
        saved = Checkpoints(folder / CHECKPOINTS, 1).read_meta()
        before = Config.from_dict(saved["config"])
        start = before if request.preset is None else Request(request.preset).config()
        config = override(start, {"stop_at": 0, **request.fields})

    placement = place(config, devices)
    dtype, reason = dtype_of(config, devices[0].platform)
    model = dataclasses.replace(config.model, dtype=dtype)
    config = dataclasses.replace(config, model=model)
    changes = () if before is None else differences(before, config)
    corpus = load_text(config.data)
    split = corpus.split(config.length)
    if folder is None:
        folder = new_folder(request.out, request.preset or DEFAULT_PRESET)
    checkpoints = Checkpoints(folder / CHECKPOINTS, config.keep_checkpoints)
    run = Run(config, folder, checkpoints, placement, reason, corpus, split, saved, changes)
    if saved is not None:
        check_saved(run, saved)
    return run


def differences(before: Config, after: Config) -> tuple[str, ...]:
    """Returns the fields whose change may change what the run learns, as "name: old -> new"."""
    old, new = before.as_dict(), after.as_dict()
    old, new = old | old.pop("model"), new | new.pop("model")
    return tuple(
        f"{name}: {old[name]} -> {new[name]}"
        for name in new
        if name not in ("stop_at", "max_length") and old[name] != new[name]
    )


def check_saved(run: Run, saved: dict[str, Any]) -> None:
    """Raises where a run cannot go on from what was saved."""
    if saved["digest"] != run.digest:
        must, got = "the one the run was trained on", f"other bytes: {run.corpus}"
        remedy = "Start a run of its own for another text."
        raise ValueError(message("resume", "the text", must, got, remedy))
    for change in run.changes:
        name = change.split(":")[0]
        if name in SHAPES:
            must, remedy = "that of the checkpoint", "Leave it out, or start a run of its own."
            raise ValueError(message("resume", name, must, change, remedy))
    step = saved["progress"]["step"]
    if step >= run.config.last_step:
        must, got = "before the last step", f"step {step} of {run.config.last_step}"
        remedy = f"The run is done; train on with --steps={2 * step}, say."
        raise ValueError(message("resume", str(run.folder), must, got, remedy))


def describe(run: Run, memory: Memory | None, params: int, compile_s: float) -> dict[str, str]:
    """Returns what the console says of a run before it starts."""
    c, mesh = run.config, run.place.mesh
    device, windows = mesh.devices.flat[0], (run.split.train.size - 1) // c.length
    per_epoch = windows / c.batch_size
    rows = {
        "parameters": f"{params:,} ({c.model.num_layers} layers of {c.model.embed_dim} features)",
        "devices": f"{mesh.size} x {device.device_kind} ({device.platform}), JAX {jax.__version__}",
        "mesh": f"data={mesh.size}: {c.batch_size // mesh.size} of {c.batch_size} sequences each"
        + (f"; {run.place.note}" if run.place.note else ""),
        "dtype": f"{c.model.dtype}, {run.dtype_reason}; parameters and statistics "
        f"{c.model.param_dtype}",
        "data": f"{run.corpus}; {run.split.validation.size:,} of them held out",
        "batch": f"{c.batch_size} sequences x {c.length} bytes = {c.tokens_per_step:,} tokens a "
        f"step; {per_epoch:,.0f} steps an epoch",
        "length": f"{c.steps:,} steps, {c.steps / per_epoch:.2f} epochs",
        "optimizer": f"{c.optimizer}, rate {c.learning_rate:g}, {c.warmup_steps} steps of warm-up, "
        f"then {c.schedule}",
        "compiled by": f"{'tpjax.compile' if c.compile else 'plain jax.jit'} in {compile_s:.1f} s",
        "memory": "not told by this backend",
        "folder": f"{run.folder}",
    }
    if memory is not None:
        room = (device.memory_stats() or {}).get("bytes_limit")
        rows["memory"] = (
            f"{spell_bytes(memory.total_bytes)} a device for the compiled step, "
            f"{spell_bytes(memory.temporaries_bytes)} of it temporary"
            + (f"; {spell_bytes(room)} there" if room else "")
        )
    if run.saved is not None:
        changed = f"; changed: {', '.join(run.changes)}" if run.changes else ""
        rows["resumed"] = f"from step {run.saved['progress']['step']}{changed}"
    return rows


def write_text(run: Run, state: State) -> tuple[str, str]:
    """Returns a prompt, the beginning of a held-out line, and what the model writes after it."""
    c = run.config
    if c.sample_length == 0:
        return "", ""
    lines = bytes(run.split.validation[:4096]).split(b"\n")
    prompt = max(lines[:8], key=len)[: min(32, c.length)] or b"\n"
    window = min(c.length, len(prompt) + c.sample_length)
    model = dataclasses.replace(c.model, max_length=window)
    graph, _ = new_model(dataclasses.replace(c, model=model, length=window))
    tokens = sample(
        nnx.merge(graph, state.params), jnp.asarray([[*prompt]], jnp.int32), c.sample_length,
        temperature=0.8, key=jax.random.fold_in(state.rng, state.step),
    )  # fmt: skip
    written = bytes(np.asarray(tokens[0]).clip(0, 255).astype(np.uint8))
    return prompt.decode(errors="replace"), written.decode(errors="replace")


class Built(NamedTuple):
    """The compiled run."""

    parts: Parts
    state: State
    progress: Progress
    explanation: Any
    """What `tpjax.explain` says of the loss; None under plain jax.jit."""
    facts: dict[str, str]
    memory: Memory | None


def build(run: Run, log: show.Log, stop: Stop) -> Built:
    """Makes or restores the state, and compiles the step."""
    c = run.config
    graph, init = new_model(c)
    plain = loss_of(graph)
    loss = tpjax.compile(plain) if c.compile else plain

    init = jax.jit(init, out_shardings=run.place.replicated)
    progress = Progress()
    if run.saved is None:
        state = init()
    else:
        shapes = jax.eval_shape(init)
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=run.place.replicated), shapes
        )
        state = run.checkpoints.restore(like, run.saved)
        progress = Progress(**run.saved["progress"])

    batches = Batches(run.split.train, c.batch_size, c.length, c.seed)
    held_out = Batches(run.split.validation, c.batch_size, c.length)
    tokens = run.place.put(batches.batch(progress.sample_index))
    start = time.perf_counter()
    step = jax.jit(step_of(c, loss), donate_argnums=0, out_shardings=run.place.replicated)
    step = step.lower(state, tokens).compile()
    compile_s = time.perf_counter() - start
    explanation = tpjax.explain(plain)(state.params, tokens) if c.compile else None

    memory = memory_of(step)
    params = sum(x.size for x in jax.tree.leaves(state.params))
    mesh = run.place.mesh
    peak = peak_flops(mesh.devices.flat[0].device_kind, c.model.dtype)
    parts = Parts(
        config=c,
        place=run.place,
        step=step,
        evaluate=evaluation(loss, run.place, held_out),
        batches=batches,
        checkpoints=run.checkpoints,
        meta={"config": c.as_dict(), "digest": run.digest, "text": str(run.corpus)},
        log=log,
        stop=stop,
        flops_per_step=flops_per_token(c.model, c.length) * c.tokens_per_step,
        peak_flops=None if peak is None else peak * mesh.size,
    )
    facts = describe(run, memory, params, compile_s)
    return Built(parts, state, progress, explanation, facts, memory)


def median_of_steps(progress: Progress) -> tuple[float, float] | None:
    """Returns the median ms/step and tokens/s over the rows of the history, the first left out."""
    rows = [row for row in progress.history if "step_ms" in row]
    rows = rows[1:] or rows
    if not rows:
        return None
    step_ms, tokens_per_s = (
        float(np.median([row[key] for row in rows])) for key in ("step_ms", "tokens_per_s")
    )
    return step_ms, tokens_per_s


def finish(console: Console, run: Run, built: Built, sampled: tuple[str, str], end: str) -> None:
    """Shows what came of the run and writes the report."""
    progress, config = built.progress, run.config
    counted: Baseline | None = None
    rows = {"steps": f"{progress.step:,} of {config.steps:,} ({end})"}
    if progress.validation_loss is not None:
        counted = ngram_baseline(run.split.train, run.split.validation)
        part = "" if end == "done" else " on a part of the held-out text"
        rows["validation loss"] = f"{progress.validation_loss:.4f} nats per byte{part}"
        rows["counting"] = str(counted)
    median = median_of_steps(progress)
    if median is not None:
        rows["speed"] = f"{median[0]:.1f} ms/step, {spell_count(median[1])} tokens/s (median)"
        rows["time in steps"] = spell_seconds(progress.train_s)
    if progress.bad_steps:
        rows["rejected steps"] = f"{progress.bad_steps} with a loss or gradient that is not finite"
    if sampled[1]:
        console.print(f"\nSample after {sampled[0]!r}:", markup=False)
        console.print(sampled[0] + sampled[1], markup=False, style="cyan")
    if built.explanation is not None:
        console.print("\nWhat tpjax.compile did:")
        console.print(built.explanation)
    path = run.folder / REPORT
    versions = {"python": platform.python_version(), "tpjax": tpjax.__version__}
    try:
        write_report(
            path, config=config, history=progress.history, prompt=sampled[0], sample=sampled[1],
            kernels=built.explanation and built.explanation.as_dict(), baseline=counted,
            environment=built.facts | versions,
            memory=built.memory._asdict() if built.memory else None,
            summary={"steps": progress.step, "rejected steps": progress.bad_steps},
            subtitle=f"{run.corpus}; {end}",
        )  # fmt: skip
        rows["report"] = str(path)
    except RuntimeError as error:
        rows["report"] = f"not written: {error}"
    steps = run.checkpoints.steps()
    newest = run.checkpoints.path(steps[-1]).name if steps else ""
    rows["checkpoint"] = str(run.folder / CHECKPOINTS / newest) if steps else "none"
    show.show_pairs(console, "Result", rows)


def resume_command(run: Run, request: Request, done: bool) -> str:
    """Returns the command line that goes on with the run, with more steps where it is done."""
    words = ["python", "train.py", f"--resume={run.folder}"]
    if done:
        words.append(f"--steps={2 * run.config.steps}")
    if request.platform is not None:
        words.append(f"--platform={request.platform}")
    return shlex.join(words)


def main(argv: list[str]) -> int:
    """Runs the command line; returns the exit code."""
    console = show.new_console()
    try:
        request = read_command_line(argv)
    except (ValueError, TypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if request.help is not None:
        print(__doc__, request.help, sep="\n")
        return 0
    try:
        run = prepare(request)
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1

    log = show.Log(console, run.config.last_step, run.config.log_interval)
    with Stop() as stop, jax.set_mesh(run.place.mesh):
        try:
            built = build(run, log, stop)
        except RestoreError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        show.show_pairs(console, "Run", built.facts)
        state, failed, sampled = built.state, None, ("", "")
        try:
            state = fit(built.parts, state, built.progress)
        except (NonFiniteError, SaveError) as error:
            failed = error
        done = built.progress.step == run.config.steps and failed is None
        if done:
            sampled = write_text(run, state)
        end = "done" if done else f"stopped by {stop.name}" if stop.signal else "stopped"
        finish(console, run, built, sampled, end)
    if failed is not None:
        print(f"error: {failed}", file=sys.stderr)
    console.print(f"To go on: {resume_command(run, request, done)}", markup=False, soft_wrap=True)
    return 1 if failed is not None else 0 if done else stop.exit_code


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv))
    except KeyboardInterrupt:  # before there was anything to save, or for the second time
        sys.exit(130)
