# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""A model and text small enough to train in a test."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import tpjax
from tpjax.training.checkpoint import Checkpoints
from tpjax.training.config import PRESETS, Config, override
from tpjax.training.console import Log, new_console
from tpjax.training.data import Batches, load_text
from tpjax.training.loop import Parts, evaluation
from tpjax.training.mesh import Placement, devices_of, place
from tpjax.training.step import Loss, Params, State, Step, loss_of, new_model, step_of
from tpjax.training.stop import Stop

FIELDS: dict[str, Any] = {
    "num_layers": 1,
    "embed_dim": 32,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 16,
    "hidden_dim": 48,
    "batch_size": 4,
    "length": 24,
    "steps": 20,
    "warmup_steps": 4,
    "eval_interval": 10,
    "eval_batches": 2,
    "sample_length": 8,
    "optimizer": "adamw",
    "compile": False,
}
"""Fields of a run that takes seconds: AdamW and plain jax.jit compile faster."""

IDLE = ("stop_at", "eval_interval", "checkpoint_interval", "max_bad_steps", "keep_checkpoints")
"""Fields that the step does not depend on."""

POISON = 255
"""A byte that King James's text does not have; a batch with it has no finite loss."""

FLAGS = [f"--{name}={value}" for name, value in FIELDS.items()]


def config(**fields: Any) -> Config:
    """Returns the small run, with other fields replaced."""
    return override(PRESETS["tiny"], FIELDS | fields)


def write_text(folder: Path) -> Path:
    """Writes real text of which 5 % is more than a window, and returns the file."""
    path = folder / "text.txt"
    path.write_bytes(bytes(load_text("kjv").data[:40_000]))
    return path


class Compiled(NamedTuple):
    """The functions of a run."""

    init: Callable[[], State]
    step: Step
    loss: Loss


@functools.cache
def _compiled(c: Config, where: Placement) -> Compiled:
    graph, init = new_model(c)
    plain = loss_of(graph)
    clean: Loss = tpjax.compile(plain) if c.compile else plain

    def loss(params: Params, tokens: Int[Array, "B T+1"]) -> Float[Array, ""]:
        return jnp.where(jnp.any(tokens == POISON), jnp.nan, clean(params, tokens))

    step = jax.jit(step_of(c, loss), donate_argnums=0, out_shardings=where.replicated)
    return Compiled(jax.jit(init, out_shardings=where.replicated), step, jax.jit(loss))


def compiled(c: Config) -> Compiled:
    """Returns the functions of a run, compiled once for all tests in a process."""
    idle = {name: getattr(PRESETS["tiny"], name) for name in IDLE}
    return _compiled(override(c, idle), place(c, devices_of(None)))


@contextlib.contextmanager
def parts(folder: Path, c: Config) -> Iterator[tuple[Parts, State]]:
    """Yields what the loop works with and the state of step 0, under the mesh of the run."""
    where = place(c, devices_of(None))
    data = load_text("kjv").data[:40_000]
    with jax.set_mesh(where.mesh), Stop() as stop:
        init, step, loss = compiled(c)
        yield (
            Parts(
                config=c,
                place=where,
                step=step,
                evaluate=evaluation(loss, where, Batches(data[-2_000:], c.batch_size, c.length)),
                batches=Batches(data[:-2_000], c.batch_size, c.length, c.seed),
                checkpoints=Checkpoints(folder / "checkpoints", c.keep_checkpoints),
                meta={"config": c.as_dict()},
                log=Log(new_console(), c.last_step, c.log_interval),
                stop=stop,
                flops_per_step=1e9,
                peak_flops=1e12,
            ),
            init(),
        )
