# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""`tpjax.cache`: what it sets and restores, a second process that starts warm, and bad folders."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tpjax
from tests.harness import ROOT, assert_close, inputs, run_python
from tests.stax.functions import loss, norm
from tpjax.core import store as stores
from tpjax.stax import persistence
from tpjax.stax.persistence import SETTINGS
from tpjax.stax_passes.decisions import KIND

ARGS = inputs("f32[4,16]", 0), inputs("f32[16]", 1)


def settings() -> dict[str, Any]:
    """Returns JAX's settings that a cache changes."""
    return {name: getattr(jax.config, name) for name in SETTINGS}


@pytest.fixture(autouse=True)
def _as_before():
    """Switches the cache off after each test, and sees that nothing stays."""
    before = settings()
    yield
    tpjax.cache(None)
    assert settings() == before
    assert stores.active() is None


def files(folder: Path, kind: str) -> list[str]:
    """Returns the names of the files of one kind in the cache's folder."""
    return sorted(os.listdir(folder / kind)) if (folder / kind).exists() else []


def test_it_is_on_in_a_block(tmp_path):
    before = settings()
    with tpjax.cache(tmp_path / "new") as cache:
        assert cache.folder == tmp_path / "new"
        assert dict(cache.before) == before
        assert settings()["jax_compilation_cache_dir"] == str(tmp_path / "new" / "xla")
        tpjax.compile(norm)(*ARGS)
        assert len(files(tmp_path / "new", KIND)) == 1
        assert any("norm" in name for name in files(tmp_path / "new", "xla"))
    assert settings() == before
    assert stores.active() is None
    tpjax.compile(lambda x: norm(x, x[0]))(*ARGS[:1])
    assert len(files(tmp_path / "new", KIND)) == 1


def test_it_is_on_until_it_is_switched_off(tmp_path):
    before = settings()
    tpjax.cache(str(tmp_path / "a"))
    tpjax.cache(tmp_path / "b")
    store = stores.active()
    assert store is not None
    assert store.folder == tmp_path / "b"
    tpjax.cache(None)
    assert (settings(), stores.active()) == (before, None)
    tpjax.cache(None)
    assert settings() == before


def _compile_and_fail(folder: Path) -> None:
    assert settings()["jax_compilation_cache_dir"] == str(folder / "xla")
    jax.jit(lambda x: x * 3 + 1)(ARGS[0])
    raise ZeroDivisionError


def test_blocks_in_blocks_and_errors(tmp_path):
    with tpjax.cache(tmp_path / "a"):
        outer = settings()
        with pytest.raises(ZeroDivisionError), tpjax.cache(tmp_path / "b"):
            _compile_and_fail(tmp_path / "b")
        assert settings() == outer
        with tpjax.cache(None):
            assert stores.active() is None
            assert settings()["jax_compilation_cache_dir"] is None
        assert settings() == outer
        jax.jit(lambda x: x * 3 + 2)(ARGS[0])
    assert len(files(tmp_path / "b", "xla")) == 1
    assert len(files(tmp_path / "a", "xla")) == 1


def test_settings_of_the_user_come_back(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "theirs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 7.0)
    try:
        theirs = settings()
        cache = tpjax.cache(tmp_path / "ours")
        assert "theirs" in repr(cache)
        assert "min_compile_time_secs=7.0" in repr(cache)
        tpjax.cache(None)
        assert settings() == theirs
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
        persistence.compilation_cache.reset_cache()


def test_the_folder_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with tpjax.cache("here") as cache:
        assert cache.folder == tmp_path / "here"
    with tpjax.cache("~/there") as cache:
        assert cache.folder == tmp_path / "home" / "there"


BAD = {
    "a number": (3, TypeError, "folder must be a path or None; got 3"),
    "bytes": (b"x", TypeError, "folder must be a path or None"),
    "a flag": (True, TypeError, "folder must be a path or None"),
    "nothing": ("", ValueError, "folder must be a folder of this machine; got ''"),
    "a bucket": ("gs://bucket/x", ValueError, "folder must be a folder of this machine"),
    "nobody's home": ("~nobody_of_that_name/x", ValueError, "folder must be a path"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_folders(what):
    folder, kind, words = BAD[what]
    with pytest.raises(kind, match=words) as caught:
        tpjax.cache(folder)
    assert "None to switch it off" in str(caught.value)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=r"must be a folder; got the file .*file\."):
            tpjax.cache(path)


def test_F05_a_folder_that_cannot_be_made_costs_one_warning():
    with pytest.warns(UserWarning, match="cannot be made") as caught, tpjax.cache("/proc/x"):
        result = tpjax.compile(norm)(*ARGS)
    assert len(caught) == 1
    assert_close("result", result, norm(*ARGS), 1e-6)


def test_F05_a_read_only_folder_is_read_with_one_warning(tmp_path, monkeypatch):
    with tpjax.cache(tmp_path):
        wanted = tpjax.compile(norm)(*ARGS)
    listing = {kind: files(tmp_path, kind) for kind in (KIND, "xla")}
    original = Path.write_bytes

    def refused(self: Path, data: bytes) -> int:  # root may write anywhere
        if tmp_path in self.parents:
            raise OSError(30, "Read-only file system")
        return original(self, data)

    monkeypatch.setattr(Path, "write_bytes", refused)
    jax.clear_caches()
    hits = []
    jax.monitoring.register_event_listener(lambda event, **kwargs: hits.append(event))
    with pytest.warns(UserWarning, match="Read-only file system") as caught:
        cache = tpjax.cache(tmp_path)
    assert len(caught) == 1
    with cache, warnings.catch_warnings():
        warnings.simplefilter("error")
        found = tpjax.compile(norm)(*ARGS)
        jax.jit(lambda x: x * 11)(ARGS[0])
        tpjax.compile(lambda x: norm(x, x[0]))(ARGS[0])
    assert {kind: files(tmp_path, kind) for kind in (KIND, "xla")} == listing
    assert "/jax/compilation_cache/cache_hits" in hits
    assert_close("read", found, wanted, 0.0)


FULL = """
import resource, warnings
import jax, jax.numpy as jnp, tpjax
tpjax.cache({folder!r})
resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for n in (2, 3, 4):
        tpjax.compile(lambda x: jnp.tanh(x * n) @ x.T)(jnp.ones((n, 4)))
print(*(w.message for w in caught), sep="\\n")
"""


def test_F05_a_full_disk(tmp_path):
    """JAX writes its own files, and warns of its own; ours come once, and stop both."""
    out = run_python(FULL.format(folder=str(tmp_path))).splitlines()
    ours = [line for line in out if line.startswith("cache:")]
    assert len(ours) == 1
    assert "File too large" in ours[0]
    assert files(tmp_path, KIND) == []


PROCESS = """
import json, sys, time
import jax, jax.numpy as jnp, numpy as np, tpjax
from tests.harness import inputs
from tests.stax.functions import block
from tpjax.stax_passes import decisions
runs, events, original = [], [], decisions.take_step
decisions.take_step = lambda jaxpr, run: runs.append(run.__name__) or original(jaxpr, run)
jax.monitoring.register_event_listener(lambda name, **rest: events.append(name.split("/")[-1]))
tpjax.cache(sys.argv[1])

@tpjax.compile
def loss(params, x):
    for one in params:
        x = block(one, x)
    return jnp.sum(jnp.sin(x)), jnp.float32(1) / jnp.float32(0)

specs = {"scale": "f32[16]", "q": "f32[16,16]", "k": "f32[16,16]", "v": "f32[16,16]"}
params = [{n: inputs(s, i) for i, (n, s) in enumerate(specs.items())} for _ in range(4)]
x = inputs("f32[8,16]", 9)
value = loss(params, x)[0]
grads = jax.jit(jax.grad(lambda p: loss(p, x)[0]))(params)
flat = np.concatenate([np.ravel(g) for g in jax.tree.leaves(grads)])
print(json.dumps({
    "value": float(value), "grads": flat.tobytes().hex(), "jaxpr": str(loss.jaxpr(params, x)),
    "explanation": loss.explain(params, x).as_dict(), "text": str(loss.explain(params, x)),
    "runs": len(runs), "hits": events.count("cache_hits"), "misses": events.count("cache_misses"),
}))
"""


def started(folder: Path, seed: int) -> "subprocess.Popen[str]":
    """Starts a process that compiles with the cache in the folder."""
    env = dict(os.environ, PYTHONHASHSEED=str(seed), PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu")
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PROCESS, str(folder)], cwd=ROOT, env=env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def ended(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """Returns what the process found."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return json.loads(out)


WORK = "runs", "hits", "misses"


def test_F05_a_second_process_does_less_and_finds_the_same(tmp_path):
    first, second = (ended(started(tmp_path, seed)) for seed in (1, 2))
    work = [{name: found.pop(name) for name in WORK} for found in (first, second)]
    assert first == second
    assert first["explanation"]["sites"]
    assert work[0]["misses"] > 0
    assert work[1]["misses"] == 0
    assert work[1]["hits"] >= work[0]["misses"]
    assert work[1]["runs"] < work[0]["runs"]  # the first one explains from what it has just kept


def test_F05_processes_at_once_find_the_same(tmp_path):
    first, second = [ended(process) for process in [started(tmp_path, seed) for seed in (1, 2)]]
    for found in (first, second):
        for name in WORK:
            found.pop(name)
    assert first == second


def test_the_gradient_and_explanation_are_those_without_a_cache(tmp_path):
    params = {"scale": inputs("f32[16]", 0)} | {
        n: inputs("f32[16,16]", i) for i, n in enumerate("qkv")
    }
    x = inputs("f32[8,16]", 9)
    plain = tpjax.compile(loss)
    wanted = plain(params, x), jax.jit(jax.grad(plain))(params, x), str(plain.explain(params, x))
    for _ in range(2):
        with tpjax.cache(tmp_path), warnings.catch_warnings():
            warnings.simplefilter("error")
            cached = tpjax.compile(loss)
            found = cached(params, x), jax.jit(jax.grad(cached))(params, x)
            assert str(cached.explain(params, x)) == wanted[2]
        assert_close("cached", found, wanted[:2], 0.0)


def test_what_tpjax_is_told_for_one_call_is_not_another_calls(tmp_path):
    with tpjax.cache(tmp_path):
        x = jnp.ones((4, 64), jnp.bfloat16)
        fn = tpjax.compile(norm)
        here = fn.explain(x, x[0])
        with tpjax.use(platform="cuda"):
            there = fn.explain(x, x[0])
        again = fn.explain(x, x[0])
    assert [e.labels["rms_norm"] for e in (here, there, again)] == [("xla",), ("pallas",), ("xla",)]
