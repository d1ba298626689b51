# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: written beside the training, whole or not at all, checked when read.

    runs/tiny-001/checkpoints/step_000400/state    parameters, optimiser, step, key (orbax)
                                         /meta     config, position in the text, history, check sums

A checkpoint appears under its name once it is complete, and an older one goes only after that. Each
array has a check sum, so that a damaged file is told from a good one, and its shape and dtype are
compared with the model's before anything is read.
"""

import errno
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jaxtyping import Array, UInt32

from tpjax.core.errors import message
from tpjax.core.operator import nbytes
from tpjax.training.metrics import spell_bytes
from tpjax.training.step import State

FORMAT = 1
"""Version of what `meta` holds; another one is refused."""

_PREFIX = "step_"


class SaveError(RuntimeError):
    """A checkpoint could not be written; those before it are whole."""


class RestoreError(RuntimeError):
    """A checkpoint is damaged, foreign, or of another model; it was not changed."""


def _storable(state: State) -> dict[str, Any]:
    """The state as plain arrays in dicts: the key as its bits."""
    return {**state._asdict(), "rng": jax.random.key_data(state.rng)}


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def leaf_specs(state: State) -> dict[str, str]:
    """Returns dtype and shape of each array of a state, by its path: "float32[256, 128]"."""
    leaves = jax.tree_util.tree_leaves_with_path(jax.eval_shape(_storable, state))
    return {_name(path): f"{x.dtype}{list(x.shape)}" for path, x in leaves}


def _check_sum(x: Array) -> UInt32[Array, ""]:
    """The sum of all words, each times an odd number: a change of one word changes it."""
    if x.dtype.itemsize == 8:
        x = jax.lax.bitcast_convert_type(x, jnp.uint32)
    words = (
        x
        if x.dtype == jnp.bool_
        else jax.lax.bitcast_convert_type(x, f"uint{x.dtype.itemsize * 8}")
    )
    words = words.astype(jnp.uint32).reshape(-1)
    places = 2 * jax.lax.iota(jnp.uint32, words.size) + 1
    return jnp.sum(words * places, dtype=jnp.uint32)


@jax.jit
def _check_sums(tree: Any) -> list[UInt32[Array, ""]]:
    return [_check_sum(x) for x in jax.tree.leaves(tree)]


def check_sums(state: State) -> list[int]:
    """Returns a check sum of each array of the state, computed where the array is."""
    return [int(x) for x in jax.device_get(_check_sums(_storable(state)))]


def _is_not_orbax(record: logging.LogRecord) -> bool:
    """Keeps orbax's log of a failed write, pages of it, off the console: `SaveError` tells it."""
    return "orbax" not in record.pathname


def _reason(error: BaseException) -> str:
    """The cause of a failed write in few words."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error).strip()
    for known in ("No space left on device", "File too large", "Permission denied", "Read-only"):
        if known in text:
            return known
    return text.splitlines()[0][:200] if text else type(error).__name__


class Checkpoints:
    """The checkpoints in one folder, newest `keep` of them."""

    def __init__(self, folder: Path, keep: int):
        self.folder, self.keep = folder, keep
        self._saver = self._new_saver()
        self._saving: int | None = None
        logging.getLogger("absl").addFilter(_is_not_orbax)  # adding it again changes nothing

    @staticmethod
    def _new_saver() -> ocp.AsyncCheckpointer:
        return ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler("state", "meta"))

    def path(self, step: int) -> Path:
        """Returns the folder of the checkpoint of that step."""
        return (self.folder / f"{_PREFIX}{step:06}").absolute()

    def steps(self) -> list[int]:
        """Returns the steps of the checkpoints that are complete, oldest first."""
        if not self.folder.is_dir():
            return []
        names = (
            p.name.removeprefix(_PREFIX) for p in self.folder.glob(f"{_PREFIX}*") if p.is_dir()
        )
        return sorted(int(name) for name in names if name.isdigit())

    def save(self, state: State, meta: dict[str, Any]) -> None:
        """Starts to write a checkpoint; returns once the state has been copied, and may be donated.

        Raises:
          SaveError: this one cannot be written, or the one still being written could not; then this
            one is written all the same.
        """
        late = self._finish()
        step = int(state.step)
        if step not in self.steps():  # else saved when the run last stopped here
            self._saving = step
            try:
                self._start(step, state, meta)
            except Exception as error:
                late = self._failed(error)
        if late is not None:
            raise late

    def _start(self, step: int, state: State, meta: dict[str, Any]) -> None:
        stored = _storable(state)
        self.folder.mkdir(parents=True, exist_ok=True)
        needed, free = nbytes(jax.tree.leaves(stored)), shutil.disk_usage(self.folder).free
        if needed > free:
            got = f"{spell_bytes(needed)} needed, {spell_bytes(free)} free"
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({got})")
        facts = {
            "format": FORMAT,
            "jax": jax.__version__,
            "leaves": leaf_specs(state),
            "check_sums": check_sums(state),
        }
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(stored), meta=ocp.args.JsonSave(meta | facts)
        )
        self._saver.save(self.path(step), args=items)

    def poll(self) -> None:
        """Raises `SaveError` if the checkpoint being written has failed by now."""
        if self._saving is not None:
            try:
                self._saver.check_for_errors()
            except Exception as error:
                raise self._failed(error) from error

    def wait(self) -> None:
        """Waits for the checkpoint being written, then deletes the oldest; raises `SaveError`."""
        failure = self._finish()
        if failure is not None:
            raise failure

    def _finish(self) -> SaveError | None:
        """Waits, tidies up, and returns what went wrong."""
        if self._saving is None:
            return None
        try:
            self._saver.wait_until_finished()
        except Exception as error:
            return self._failed(error)
        self._saving = None
        for path in [*self.folder.glob(f"{_PREFIX}*-tmp"), *map(self.path, self._outdated())]:
            shutil.rmtree(path, ignore_errors=True)
        return None

    def _outdated(self) -> list[int]:
        return self.steps()[: -self.keep]

    def _failed(self, error: BaseException) -> SaveError:
        """Clears away what was half written, and says what stands."""
        step, self._saving = self._saving, None
        self._saver = self._new_saver()
        assert step is not None
        for path in self.folder.glob(f"{self.path(step).name}*"):
            shutil.rmtree(path, ignore_errors=True)
        rest = self.steps()
        stands = f"The checkpoint of step {rest[-1]} stands" if rest else "There is no earlier one"
        must, got = f"written to {self.folder}", _reason(error)
        remedy = f"{stands}; free space or mend the folder, and the next save will be tried there."
        return SaveError(message("checkpoint", f"step {step}", must, got, remedy))

    def read_meta(self) -> dict[str, Any]:
        """Returns what was saved beside the newest state.

        Raises:
          RestoreError: there is none, it is damaged, or tpjax did not write it.
        """
        found = self.steps()
        if not found:
            must = "a run with a checkpoint"
            got = "none in it" if self.folder.is_dir() else "no such folder"
            remedy = "Check the path, or leave --resume out to start a run."
            raise RestoreError(message("resume", str(self.folder), must, got, remedy))
        path = self.path(found[-1])
        try:
            items = ocp.args.Composite(meta=ocp.args.JsonRestore())
            meta = self._saver.restore(path, args=items).meta
        except Exception as error:
            raise self._damaged(path, f"unreadable meta data ({_reason(error)})") from error
        if not isinstance(meta, dict) or meta.get("format") != FORMAT:
            found_format = meta.get("format") if isinstance(meta, dict) else None
            got = f"format {found_format!r}"
            remedy = "Another program or version wrote it; it was not changed."
            raise RestoreError(
                message("resume", str(path), f"a checkpoint of format {FORMAT}", got, remedy)
            )
        return meta

    def restore(self, like: State, meta: dict[str, Any]) -> State:
        """Returns the newest state, placed as `like` says.

        Args:
          like: shapes, dtypes and shardings of the state that the run wants.
          meta: what `read_meta` returned.

        Raises:
          RestoreError: the model or optimiser is another one, or an array is damaged.
        """
        path = self.path(self.steps()[-1])
        self._compare(path, meta["leaves"], leaf_specs(like))
        try:
            items = ocp.args.Composite(state=ocp.args.StandardRestore(_storable_like(like)))
            found = self._saver.restore(path, args=items).state
        except Exception as error:
            raise self._damaged(path, _reason(error)) from error
        for name, x, wanted in zip(
            leaf_specs(like), _check_sums(found), meta["check_sums"], strict=True
        ):
            if int(x) != wanted:
                raise self._damaged(path, f"other bits than were saved in {name}")
        found["rng"] = jax.random.wrap_key_data(found["rng"])
        return State(**found)

    def _compare(self, path: Path, saved: dict[str, str], wanted: dict[str, str]) -> None:
        for name in sorted({*wanted, *saved}, key=lambda n: (not n.startswith("params"), n)):
            has, needs = saved.get(name, "no such array"), wanted.get(name, "no such array")
            if has != needs:
                count = sum(saved.get(n) != wanted.get(n) for n in {*saved, *wanted})
                must = f"a checkpoint of this model: {name} {needs}"
                got = f"{has} ({count} of {len(wanted)} arrays differ)"
                remedy = "Resume with the flags of that run, or start another in a new --out."
                raise RestoreError(message("resume", str(path), must, got, remedy))

    def _damaged(self, path: Path, reason: str) -> RestoreError:
        before = self.steps()[:-1]
        earlier = f" to go on from step {before[-1]}" if before else ""
        remedy = f"Nothing was changed. Move that folder away{earlier}."
        return RestoreError(message("resume", str(path), "an intact checkpoint", reason, remedy))


def _storable_like(like: State) -> dict[str, Any]:
    """Shapes, dtypes and shardings of the arrays as stored."""
    shapes = jax.eval_shape(_storable, like)
    anywhere = jax.tree.leaves(like.params)[0].sharding
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=anywhere), shapes)
