# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: the same bits come back, damage is told, and a failed save harms none before it."""

import errno
import gc
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.harness import assert_close, inputs, run_python
from tpjax.training.checkpoint import Checkpoints, RestoreError, SaveError, check_sums
from tpjax.training.step import State

META = {"progress": {"step": 3, "last_loss": 0.1 + 0.2}}


def _state(step: int, rows: int = 64, seed: int = 0) -> State:
    params = {
        "layers": {0: {"kernel": inputs(f"f32[{rows},16]", seed)}},
        "scale": inputs("bf16[16]", seed),
    }
    optimizer = {"mu": inputs(f"f32[{rows},16]", seed + 1), "count": jnp.int32(step)}
    return State(params, optimizer, jnp.int32(step), jax.random.key(seed))


@pytest.fixture
def saved(tmp_path: Path) -> Checkpoints:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    for step in (1, 2, 3):
        checkpoints.save(_state(step, seed=step), META)
    checkpoints.wait()
    return checkpoints


def _restore(checkpoints: Checkpoints, like: State | None = None) -> State:
    fresh = Checkpoints(checkpoints.folder, checkpoints.keep)
    return fresh.restore(like or _state(0), fresh.read_meta())


def test_what_was_saved_comes_back_to_the_bit(saved: Checkpoints):
    assert saved.steps() == [2, 3]
    assert saved.read_meta()["progress"] == META["progress"]
    assert_close("state", _restore(saved), _state(3, seed=3), 0)


def test_the_state_may_be_donated_once_save_returns(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    spoil = jax.jit(lambda s: jax.tree.map(lambda x: x * 0, s), donate_argnums=0)
    for seed in range(4):
        state = _state(seed + 1, rows=50_000, seed=seed)
        checkpoints.save(state, META)
        params = spoil(state.params)
        checkpoints.wait()
        assert float(params["layers"][0]["kernel"].sum()) == 0.0
    assert_close("state", _restore(checkpoints, _state(0, rows=50_000)).params,
                 _state(4, rows=50_000, seed=3).params, 0)  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
def test_one_flipped_bit_changes_a_check_sum(dtype: str):
    x = np.asarray(inputs("f32[257]", 0) > 0 if dtype == "bool" else inputs("f32[257]", 0))
    x = np.array(jnp.asarray(x).astype(dtype))
    base = _state(1)

    def sums(x: np.ndarray) -> list[int]:
        return check_sums(base._replace(params={"x": jnp.asarray(x)}))

    before, rng = sums(x), np.random.default_rng(0)
    for at in rng.integers(0, x.size, 5):
        flipped = x.copy()
        if dtype == "bool":
            flipped[at] = not flipped[at]
        else:
            flipped.view(f"u{x.itemsize}")[at] ^= 1 << int(rng.integers(8 * x.itemsize))
        assert sums(flipped) != before


def _data_files(folder: Path) -> list[Path]:
    """The files that hold the arrays, largest first."""
    files = [p for p in (folder / "state").rglob("*") if p.is_file() and p.parent.name == "d"]
    return sorted(files, key=lambda p: -p.stat().st_size)


def _flip(folder: Path) -> None:
    path = _data_files(folder)[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def _truncate(folder: Path) -> None:
    path = _data_files(folder)[0]
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _edit_meta(change: dict[str, Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "meta" / "metadata"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))

    return edit


DAMAGE = {
    "a flipped bit": (_flip, "must be an intact checkpoint"),
    "half a file": (_truncate, "must be an intact checkpoint"),
    "no arrays": (lambda f: shutil.rmtree(f / "state"), "must be an intact checkpoint"),
    "no meta data": (lambda f: shutil.rmtree(f / "meta"), "unreadable meta data"),
    "meta data cut off": (
        lambda f: (f / "meta" / "metadata").write_text("{"),
        "unreadable meta data",
    ),
    "another format": (_edit_meta({"format": 99}), "a checkpoint of format 1; got format 99"),
    "other bits": (_edit_meta({"check_sums": [0] * 6}), "other bits than were saved in "),
}


# Where one array cannot be read, orbax drops the reads of the others half done; Python tells of
# each when it is collected, which must happen here and not in the middle of another test.
@pytest.mark.filterwarnings("ignore:Exception ignored:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_told_and_nothing_is_touched(saved: Checkpoints, damage: str):
    spoil, told = DAMAGE[damage]
    spoil(saved.path(3))
    files = {p: p.read_bytes() for p in saved.folder.rglob("*") if p.is_file()}
    with pytest.raises(RestoreError) as error:
        _restore(saved)
    assert told in str(error.value)
    assert "step_000003" in str(error.value)
    assert files == {p: p.read_bytes() for p in saved.folder.rglob("*") if p.is_file()}
    shutil.rmtree(saved.path(3))  # as the message says, the one before stands
    assert_close("state", _restore(saved), _state(2, seed=2), 0)
    del error
    gc.collect()


def test_a_foreign_checkpoint_is_refused(tmp_path: Path):
    path = tmp_path / "checkpoints" / "step_000001"
    with ocp.StandardCheckpointer() as other:
        other.save(path.absolute(), {"weights": jnp.ones(3)})
    with pytest.raises(RestoreError, match="unreadable meta data"):
        _restore(Checkpoints(tmp_path / "checkpoints", 1))


@pytest.mark.parametrize("folder", ["nowhere", ""])
def test_no_checkpoint_is_told(tmp_path: Path, folder: str):
    with pytest.raises(RestoreError, match="must be a run with a checkpoint"):
        Checkpoints(tmp_path / folder, 1).read_meta()


def test_another_model_is_named_by_its_first_array(saved: Checkpoints):
    with pytest.raises(RestoreError) as error:
        _restore(saved, _state(0, rows=32))
    told = "params/layers/0/kernel float32[32, 16]; got float32[64, 16] (2 of 6 arrays differ)"
    assert told in str(error.value)


def _full(*args: object, **kwargs: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_with_too_little_room_is_told_with_the_numbers(
    saved: Checkpoints, monkeypatch: pytest.MonkeyPatch
):
    usage = shutil.disk_usage(saved.folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**20))
    with pytest.raises(SaveError, match=r"\(6.1 MiB needed, 1.0 MiB free\)"):
        saved.save(_state(4, rows=50_000), META)
    assert saved.steps() == [2, 3]


def test_a_failed_write_does_not_keep_the_next_from_being_made(
    saved: Checkpoints, monkeypatch: pytest.MonkeyPatch
):
    saved.save(_state(4, seed=4), META)
    saved._saver.wait_until_finished()
    with monkeypatch.context() as patch:
        patch.setattr(saved._saver, "wait_until_finished", _full)
        with pytest.raises(SaveError, match="step 4 must be written"):
            saved.save(_state(5, seed=5), META)
    saved.wait()
    assert_close("state", _restore(saved), _state(5, seed=5), 0)


def test_what_a_killed_process_left_half_written_is_cleared_away(saved: Checkpoints):
    (saved.folder / "step_000004.orbax-checkpoint-tmp").mkdir()
    assert saved.steps() == [2, 3]
    saved.save(_state(4), META)
    saved.wait()
    assert sorted(p.name for p in saved.folder.iterdir()) == ["step_000003", "step_000004"]


def test_a_full_disk_leaves_the_checkpoints_before_it(
    saved: Checkpoints, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        patch.setattr(saved._saver, "save", _full)
        with pytest.raises(SaveError) as error:
            saved.save(_state(4, seed=4), META)
    assert "step 4 must be written" in str(error.value)
    assert "No space left on device" in str(error.value)
    assert "The checkpoint of step 3 stands" in str(error.value)
    assert_close("state", _restore(saved), _state(3, seed=3), 0)
    saved.save(_state(5, seed=5), META)  # there is room again
    saved.wait()
    assert saved.steps() == [3, 5]


# In a process of its own: tensorstore's threads go on reporting to a loop that orbax has closed.
BREAKS_OFF = """
import resource
from pathlib import Path
from tests.harness import assert_close
from tests.training.test_checkpoint import META, _restore, _state
from tpjax.training.checkpoint import Checkpoints, SaveError
saved = Checkpoints(Path({folder!r}), keep=2)
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
saved.save(_state(4, rows=50_000), META)
try:
    saved.wait()
except SaveError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
assert_close("state", _restore(saved), _state(3, seed=3), 0)
saved.save(_state(5, seed=5), META)
saved.wait()
"""


def test_a_write_that_breaks_off_leaves_no_half_checkpoint(saved: Checkpoints):
    out = run_python(BREAKS_OFF.format(folder=str(saved.folder)))
    assert "step 4 must be written" in out
    assert "File too large. The checkpoint of step 3 stands" in out
    assert sorted(p.name for p in saved.folder.iterdir()) == ["step_000003", "step_000005"]
