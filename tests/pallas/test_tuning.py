# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Kernel configs: measured by a clock that is told the times, kept, and taken by the kernels."""

import functools
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import chain, repeat
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.harness import run_python
from tests.pallas import op_checks as checks
from tpjax.core import store as stores
from tpjax.core.errors import UnsupportedError
from tpjax.core.operator import Op, Sample
from tpjax.core.store import Store
from tpjax.pallas import OPS, bench, tuning
from tpjax.pallas.attention.config import CONFIGS
from tpjax.pallas.dispatch import use
from tpjax.pallas.norms import config as norms
from tpjax.pallas.tuning import KIND, Request, config_for, tune

KINDS = ["NVIDIA H200"]
TIMES = [5.0, 3.0, 4.0]


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch) -> Iterator[Store]:
    """Makes a store the process's, on a machine that says it is an H200."""
    monkeypatch.setattr(tuning, "_device_kind", lambda: KINDS[-1])
    made = Store(tmp_path)
    stores.activate(made)
    yield made
    stores.activate(None)


def tuned(request: Request, times: list[float | None], store: Store) -> Any:
    """Tunes with a clock that tells these times, and 9 ms for the configs that follow."""
    rest = chain(times, repeat(9.0))
    return tune(request, lambda: next(rest), store)


REQUEST = Request("rms_norm", (6, 256, "float32"), norms.CONFIGS)


def ask(**changes: Any) -> Any:
    """Returns the config that a kernel gets."""
    request = REQUEST._replace(**changes)
    return config_for(*request, norms.CONFIGS[0])


def test_the_fastest_is_kept_and_taken(store):
    assert ask() is norms.CONFIGS[0]
    found = tuned(REQUEST, list(TIMES), store)
    assert [m.ms for m in found][:4] == [3.0, 4.0, 5.0, 9.0]
    assert ask() is norms.CONFIGS[1]
    assert ask(shapes=(7, 256, "float32")) is norms.CONFIGS[0]
    assert ask(op="layer_norm") is norms.CONFIGS[0]
    stores.activate(None)
    assert ask() is norms.CONFIGS[0]


def test_what_is_as_fast_as_the_preferred_config_does_not_replace_it(store):
    """Half a percent is noise, five are not."""
    assert tuned(REQUEST, [3.0, 4.0, 2.99], store)[0].ms == 3.0
    assert ask() is norms.CONFIGS[0]
    assert tuned(REQUEST, [3.0, 4.0, 2.85], store)[0].ms == 2.85
    assert ask() is norms.CONFIGS[2]


def test_another_device_jax_or_kernel_was_not_measured(store, monkeypatch):
    tuned(REQUEST, list(TIMES), store)
    for where, name, value in (
        (tuning, "_device_kind", lambda: "NVIDIA B200"),
        (tuning, "_device_kind", lambda: None),
        (jax, "__version__", "0.99"),
        (stores, "code_of", lambda *rooms: "other"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, value)
            assert ask() is norms.CONFIGS[0]
    assert ask() is norms.CONFIGS[1]


def test_what_is_recorded_is_shipped_and_the_users_own_comes_first(store, tmp_path, monkeypatch):
    """`tuned.json` serves the device it was measured on; a measurement in the cache outdoes it."""
    monkeypatch.setattr(tuning, "SHIPPED", tmp_path / "tuned.json")
    tuning.SHIPPED.write_text("{}")
    monkeypatch.setattr(tuning, "_shipped", functools.cache(tuning._shipped.__wrapped__))
    times = chain([3.0, 2.0, 1.0], repeat(9.0))
    tune(REQUEST, lambda: next(times), None)
    assert ask() is norms.CONFIGS[2]
    tuning._shipped.cache_clear()
    assert ask() is norms.CONFIGS[2]
    with monkeypatch.context() as patch:
        patch.setattr(tuning, "_device_kind", lambda: "NVIDIA B200")
        assert ask() is norms.CONFIGS[0]
    tuned(REQUEST, list(TIMES), store)
    assert ask() is norms.CONFIGS[1]


def test_what_is_shipped_are_configs_that_exist():
    """A config that was recorded and is gone would silently be the heuristic's."""
    names = {"flash_attention": {repr(asdict(c)) for cs in CONFIGS.values() for c in cs}}
    names |= {op: {repr(asdict(c)) for c in norms.CONFIGS} for op in ("rms_norm", "layer_norm")}
    for ops in json.loads(tuning.SHIPPED.read_text()).values():
        for op, entries in ops.items():
            assert {repr(config) for config in entries.values()} <= names[op]


def test_a_config_that_does_not_run_is_not_chosen(store):
    tuned(REQUEST, [None, 3.0, None], store)
    assert ask() is norms.CONFIGS[1]
    tuned(REQUEST._replace(op="none"), [None] * len(norms.CONFIGS), store)
    assert ask(op="none") is norms.CONFIGS[0]


@pytest.mark.parametrize(
    "kept",
    [b"{", b"[]", b'{"config": 3}', b'{"config": {"tile_elements": 1}}', b"\xff"],
)
def test_nothing_but_a_known_config_is_taken(kept, store):
    tuned(REQUEST, list(TIMES), store)
    (path,) = (store.folder / KIND).iterdir()
    store.put(KIND, path.name.split(".")[0], kept)
    assert ask() is norms.CONFIGS[0]


def asked_by(op: Op, sample: Sample) -> set[Request]:
    """Returns what the operator's kernels ask for on the sample; nothing if they refuse it."""
    run, args = checks.with_gradients(op, op.fn, sample), checks.problem(op, sample)
    with use(implementation="pallas"), tuning.requests() as found, suppress(UnsupportedError):
        jax.eval_shape(run, *args)
    return set(found)


def test_the_kernels_ask(store):
    """Tuning times every config of a kernel that a sample reaches; kernels take the fastest."""
    times = iter(TIMES * 100)

    def timer(fn: Any, *args: Any) -> float:
        with tuning.requests() as again:
            jax.jit(fn).trace(*args)
        assert again  # traced anew: a program that jit kept has the config before
        return next(times)

    tuned_ops = set()
    with use(platform="cuda"):
        for op in (op for op in OPS if op.name in ("rms_norm", "layer_norm", "flash_attention")):
            for sample in (s for s in op.samples if not s.slow):
                found = asked_by(op, sample)
                if found:
                    one = replace(op, samples=(replace(sample, slow=True),))
                    lines = list(bench.tune_op(one, store, timer))
                    assert len(lines) == sum(len(request.configs) for request in found), op.name
                    tuned_ops.add(op.name)
                    break
    assert len(tuned_ops) == 3
    keys = [path.name.split(".")[0] for path in (store.folder / KIND).iterdir()]
    entries = [json.loads(store.get(KIND, key) or b"") for key in keys]
    assert {entry["op"] for entry in entries} >= tuned_ops
    assert all(entry["ms"] in TIMES and entry["device"] == KINDS[-1] for entry in entries)
    assert {entry["ms"] for entry in entries if entry["op"] == "rms_norm"} == {3.0}
    with use(platform="cuda", implementation="pallas"), tuning.requests() as requests:
        jax.make_jaxpr(OPS[0].fn)(jnp.ones((6, 256)), jnp.ones(256))
    (request,) = requests
    assert config_for(*request, None) is norms.CONFIGS[1]


def test_the_interpreter_gets_the_smallest_whatever_was_measured():
    out = run_python(
        "from tpjax.pallas import tuning\n"
        "from tpjax.pallas.dispatch import use\n"
        "with use(interpret=True): print(tuning._device_kind())\n"
        "with use(platform='cuda'): print(tuning._device_kind())\n"
        "print(tuning._device_kind())\n"
    )
    assert out.split() == ["None", "None", "cpu"]
