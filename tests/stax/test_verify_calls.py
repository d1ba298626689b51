# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""What a call under `verify` may rely on: its effects, its buffers, and its result."""

import inspect
import re
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tpjax
from tests.harness import assert_close, inputs
from tests.stax.test_verify import found, line_of, replacing, swapping, verified, wave
from tpjax.stax.explanation import StrictError
from tpjax.stax.verification.compare import gap
from tpjax.stax.verification.verify import check
from tpjax.stax_passes.pipeline import CLEAN_UP, PASSES
from tpjax.stax_passes.sweep import ExactRule, sweeping_pass


def test_F02_compile_with_verify_runs_the_original() -> None:
    args = inputs("f32[8,16]", 0), inputs("f32[8,16]", 1)
    passes = CLEAN_UP, replacing("sin", lambda x: jnp.sin(x) * 1.001)
    compiled = tpjax.compile(wave, passes=passes, verify=True)
    line = re.escape(line_of(wave, "b = jnp.sin"))
    with pytest.warns(UserWarning, match=rf"wave runs as written: other_sin.*{line}") as caught:
        result = compiled(*args)
    assert len(caught) == 1
    assert_close("original", result, jax.jit(wave)(*args), 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_close("again", compiled(*args), result, 0)
        assert_close("honest", tpjax.compile(wave, verify=True)(*args), result, 1e-6)
    with pytest.raises(StrictError, match=rf"strict=True.*other_sin.*{line}"):
        tpjax.compile(wave, passes=passes, verify=True, strict=True)(*args)


def test_verify_runs_effects_once(capfd: Any) -> None:
    def fn(x: Any) -> Any:
        jax.debug.print("printed {}", x.sum())
        return jnp.sin(x) * 1.0

    passes = CLEAN_UP, replacing("sin", jnp.cos)
    with pytest.warns(UserWarning, match="other_sin"):
        tpjax.compile(fn, passes=passes, verify=True)(jnp.ones(3))
    tpjax.compile(fn, verify=True)(jnp.ones(3))
    jax.effects_barrier()
    assert capfd.readouterr().out == "printed 3.0\nprinted 3.0\n"


def test_effects_do_not_run_and_what_follows_them_is_passed_over(capfd: Any) -> None:
    calls = []

    def fn(x: Any) -> Any:
        jax.debug.print("printed {}", x)
        y = jax.experimental.io_callback(lambda x: calls.append(1) or x, x, x)
        z = lax.scan(lambda c, _: (jax.debug.callback(calls.append, 2) or c - x, None), x, None, 2)
        return jnp.sin(y) - x, jnp.sin(x) - 1, z

    args = (inputs("f32[3]", 0),)
    difference = found(fn, args, (replacing("sin", jnp.cos),))
    assert "jnp.sin(x) - 1" in inspect.getsource(fn)
    assert difference.source == line_of(fn, "jnp.sin(y)")  # both sines are on that line
    assert found(fn, args, (swapping("sub"),)).primitive == "sub"
    jax.effects_barrier()
    assert calls == []
    assert "printed" not in capfd.readouterr().out
    only = lambda x: jnp.sin(jax.experimental.io_callback(np.sin, x, x))  # noqa: E731
    assert verified(only, args, (replacing("sin", jnp.cos),)) is None


def test_what_is_printed_counts() -> None:
    def fn(x: Any) -> Any:
        y = x - 1
        jax.debug.print("printed {}", y * 1.0)
        return x

    def start(level):
        def edit(level, eqn):
            if eqn.primitive.name != "sub":
                return eqn
            level.log.hit("drop_sub", eqn)
            level.replace(eqn.outvars[0], eqn.invars[0])
            return None

        return edit

    args = (inputs("f32[3]", 0),)
    assert verified(fn, args) is None
    difference = found(
        fn, args, (CLEAN_UP, sweeping_pass("drop_sub", "", start, (ExactRule("drop_sub", None),)))
    )
    assert (difference.rule, difference.primitive) == ("drop_sub", "sub")
    assert difference.source == line_of(fn, "y = x - 1")


def test_nothing_is_donated() -> None:
    x = inputs("f32[4]", 0)
    fn = jax.jit(lambda x: jnp.sin(x) * 1.0, donate_argnums=0)
    assert verified(fn, (x,)) is None
    assert found(fn, (x,), (replacing("sin", jnp.cos),))
    assert not x.is_deleted()
    assert x.sum()


def test_a_folder_that_cannot_be_written_costs_only_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    args = inputs("f32[8,16]", 0), inputs("f32[8,16]", 1)
    wrong = (replacing("sin", jnp.cos),)
    difference = found(wave, args, wrong, tmp_path / "file")
    assert difference.reproducer is None
    assert "none could be written" in difference.note
    assert "No reproducer" in difference.message("mine")
    one, two = (found(wave, args, wrong, tmp_path).reproducer for _ in range(2))
    assert one != two


def test_what_cannot_be_evaluated_is_a_warning_not_an_error() -> None:
    x = inputs("f32[4]", 0)
    jaxpr = jax.make_jaxpr(lambda x: jnp.sin(x) * 1.0)(x)
    x.delete()
    with pytest.warns(UserWarning, match="mine could not be verified"):
        assert check("mine", jaxpr, PASSES, [x]) is None


def test_gap() -> None:
    x = np.array([1.0, np.nan, -0.0], np.float32)
    assert gap(x, x.copy(), None) is None
    assert gap(x, np.array([1.0, np.nan, 0.0], np.float32), None) is not None
    assert gap(x, np.array([1.0, np.nan, 0.0], np.float32), 1e-6) is None
    assert gap(x, np.array([1.0, 2.0, 0.0], np.float32), 1e-6) is not None
    big = np.ones(10**6, np.float32)
    one = big.copy()
    one[17] = 1.0005  # hidden in the RMS error, not as an element
    found = gap(one, big, 1e-6)
    assert found is not None
    assert found.index == (17,)
