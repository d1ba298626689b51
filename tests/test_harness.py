# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Faults planted in known results: `assert_close` must catch each at the house's own tolerances."""

import os
import subprocess
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import STRICT_ROOMS, promotion_of
from tests.harness import ROOT, assert_close, inputs, run_python

TOL = {"float32": 1e-6, "bfloat16": 6e-3}
"""Where tolerances start; a test that needs a larger one says why."""


def rms_norm(x: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    """Returns x / sqrt(mean(x^2) + eps) over the last axis, in float64."""
    wide = x.astype(np.float64)
    return wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + eps)


def attention(scores: np.ndarray, value: np.ndarray, first_hidden: int = 1) -> np.ndarray:
    """Returns causal attention in float64; key `row + first_hidden` is the first one hidden."""
    hidden = np.triu(np.ones(scores.shape, bool), k=first_hidden)
    weights = np.exp(np.where(hidden, -np.inf, scores.astype(np.float64)))
    return weights / weights.sum(-1, keepdims=True) @ value.astype(np.float64)


X = np.asarray(inputs("f32[64,128]", seed=0))
SCORES, VALUE = np.asarray(inputs("f32[64,64]", seed=1)), X


def _changed(x: np.ndarray, index: tuple[int, ...], value: float) -> np.ndarray:
    x = x.copy()
    x[index] = value
    return x


FAULTS: dict[str, tuple[Callable[[], np.ndarray], Callable[[], np.ndarray], str]] = {
    "gradient off by 0.1 %": (lambda: X * 1.001, lambda: X, "RMS error 0.001 is over"),
    "wrong eps": (lambda: rms_norm(X, 1e-5), lambda: rms_norm(X, 1e-6), "RMS error"),
    "mean forgotten": (lambda: X, lambda: X - X.mean(-1, keepdims=True), "RMS error"),
    "mask off by one": (
        lambda: attention(SCORES, VALUE, first_hidden=2),
        lambda: attention(SCORES, VALUE),
        "RMS error",
    ),
    "mask one key short": (
        lambda: _changed(attention(SCORES, VALUE), (63,), attention(SCORES, VALUE)[62]),
        lambda: attention(SCORES, VALUE),
        "RMS error",
    ),
    "unwritten output": (lambda: _changed(X, (3, 5), np.nan), lambda: X, r"worst at \[3, 5\]"),
    "overflow": (lambda: _changed(X, (3, 5), np.inf), lambda: X, "not finite"),
    "row of zeros": (lambda: _changed(X, (7,), 0.0), lambda: X, "RMS error"),
    "transposed": (lambda: X[:, :64].T, lambda: X[:, :64], "RMS error"),
    "rows in another order": (lambda: X[::-1], lambda: X, "RMS error"),
    "wrong sign": (lambda: -X, lambda: X, "RMS error 2 "),
    "zeros": (lambda: np.zeros_like(X), lambda: X, "RMS error 1 "),
    "expected zeros": (lambda: X, lambda: np.zeros_like(X), "RMS error inf"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_caught_in_float32(fault: str):
    wrong, right, note = FAULTS[fault]
    actual, expected = wrong().astype(np.float32), right().astype(np.float32)
    with pytest.raises(AssertionError, match=note):
        assert_close(fault, jnp.asarray(actual), expected, TOL["float32"])


SUBTLE = {"gradient off by 0.1 %", "wrong eps"}
"""Faults below the rounding of bfloat16: a float32 sample is what catches them."""


@pytest.mark.parametrize("fault", sorted(FAULTS.keys() - SUBTLE))
def test_planted_fault_is_caught_in_bfloat16(fault: str):
    wrong, right, note = FAULTS[fault]
    actual = jnp.asarray(wrong(), jnp.bfloat16)
    with pytest.raises(AssertionError, match=note):
        assert_close(fault, actual, jnp.asarray(right(), jnp.bfloat16), TOL["bfloat16"])


def test_wrong_eps_is_caught_in_bfloat16_where_inputs_are_small():
    small = X * 1e-2
    actual = jnp.asarray(rms_norm(small, 1e-5), jnp.bfloat16)
    with pytest.raises(AssertionError, match="RMS error"):
        assert_close("eps", actual, jnp.asarray(rms_norm(small), jnp.bfloat16), TOL["bfloat16"])


def test_one_wrong_element_does_not_hide_in_a_large_array():
    x = np.asarray(inputs("bf16[1024,1024]", seed=0))
    with pytest.raises(AssertionError, match=r"one element .* \[17, 4\]: got 0.0, expected"):
        assert_close("x", _changed(x, (17, 4), 0.0), x, TOL["bfloat16"])


def test_dtype_shape_and_structure_must_agree():
    x = inputs("f32[4,6]", seed=0)
    with pytest.raises(AssertionError, match="dtype bfloat16 is not the expected float32"):
        assert_close("x", x.astype(jnp.bfloat16), x, 1.0)
    with pytest.raises(AssertionError, match="dtype int32"):
        assert_close("x", jnp.zeros(3, jnp.int32), jnp.zeros(3), 1.0)
    with pytest.raises(AssertionError, match=r"shape \(6, 4\) is not the expected \(4, 6\)"):
        assert_close("x", x.T, x, 1.0)
    with pytest.raises(AssertionError, match=r"shape \(1, 4, 6\)"):
        assert_close("x", x[None], x, 1.0)
    with pytest.raises(AssertionError, match="tree structure"):
        assert_close("x", (x, x), [x, x], 1.0)
    with pytest.raises(AssertionError, match="tree structure"):
        assert_close("x", {"dx": x}, {"dx": x, "dscale": x}, 1.0)


def test_message_names_the_leaf_the_worst_element_and_both_values():
    x = jnp.ones((2, 3))
    with pytest.raises(AssertionError) as error:
        assert_close("grad", {"dx": x, "dy": x.at[1, 2].set(1.5)}, {"dx": x, "dy": x}, 1e-3)
    assert str(error.value) == (
        "grad['dy']: relative RMS error 0.204 is over the tolerance 0.001; "
        "worst at [1, 2]: got 1.5, expected 1.0"
    )


def test_a_reference_that_is_not_finite_is_refused():
    x = jnp.array([1.0, jnp.nan])
    with pytest.raises(AssertionError, match="the reference itself is not finite"):
        assert_close("x", x, x, 1.0)


def test_integers_and_booleans_must_be_equal():
    ids, mask = inputs("i32[8]", seed=0), inputs("bool[8]", seed=0)
    assert_close("ids", ids, np.asarray(ids), 0)
    with pytest.raises(AssertionError, match=r"values differ \(1 of 8 elements\)"):
        assert_close("ids", ids.at[2].add(1), ids, 1.0)
    with pytest.raises(AssertionError, match="values differ"):
        assert_close("mask", ~mask, mask, 1.0)


def test_one_wrong_element_is_found_by_the_scale_of_its_row():
    """A large row may be off by its own rounding, not by that of a larger one."""
    x = np.array(inputs("f32[4000,256]", seed=0))
    x[0] *= 20
    for row, by, passes in ((0, 3.0, True), (0, 5.0, False), (7, 1.0, False)):
        wrong = x.copy()
        wrong[row, 3] += by
        if passes:
            assert_close("x", wrong, x, 6e-3)
            continue
        with pytest.raises(AssertionError, match="one element is off"):
            assert_close("x", wrong, x, 6e-3)


def test_zero_tolerance_asks_for_the_same_values():
    x = inputs("f32[64]", seed=0)
    assert_close("x", x, np.asarray(x), 0)
    with pytest.raises(AssertionError):
        assert_close("x", jnp.nextafter(x, jnp.inf), x, 0)


def test_rounding_passes():
    assert_close("norm", jnp.asarray(rms_norm(X), jnp.float32), np.float32(rms_norm(X)), 1e-6)
    right = jnp.asarray(X).astype(jnp.bfloat16).astype(jnp.float32)
    assert_close("rounded", right, X, TOL["bfloat16"])
    assert_close("empty", jnp.zeros((0, 3)), np.zeros((0, 3), np.float32), 0)
    assert_close("zeros", jnp.zeros(3), np.zeros(3, np.float32), 0)


@pytest.mark.parametrize(
    ("spec", "dtype", "shape"),
    [
        ("bf16[2,128,4,64]", jnp.bfloat16, (2, 128, 4, 64)),
        ("f32[]", jnp.float32, ()),
        ("f16[3]", jnp.float16, (3,)),
        ("i32[4]", jnp.int32, (4,)),
        ("u8[2, 2]", jnp.uint8, (2, 2)),
        ("bool[3,3]", jnp.bool_, (3, 3)),
        ("f32[0,5]", jnp.float32, (0, 5)),
    ],
)
def test_inputs_have_the_dtype_and_shape_of_their_spec(spec: str, dtype, shape: tuple[int, ...]):
    x = inputs(spec, seed=0)
    assert (x.dtype, x.shape) == (jnp.dtype(dtype), shape)


def test_inputs_are_fresh_by_spec_and_seed():
    x = inputs("f32[1000]", seed=0)
    assert_close("same", inputs("f32[1000]", seed=0), x, 0)
    for other in (inputs("f32[1000]", seed=1), inputs("f32[1000,1]", seed=0)[:, 0]):
        assert abs(float(jnp.corrcoef(x, other)[0, 1])) < 0.15
    assert float(jnp.abs(jnp.mean(x))) < 0.15
    assert abs(float(jnp.std(x)) - 1) < 0.1


@pytest.mark.parametrize("spec", ["f32", "f32[2", "float32[2]", "f32[-1]", "f32[2,]", "[2]", ""])
def test_a_bad_spec_is_named(spec: str):
    with pytest.raises(ValueError, match="spec must be like"):
        inputs(spec, seed=0)


def test_run_python_has_its_own_devices_and_reports_failure():
    assert jax.device_count("cpu") == 1
    assert run_python("import jax; print(jax.device_count())", devices=3) == "3\n"
    with pytest.raises(AssertionError, match=r"(?s)exit code 1 on 1 devices.*ZeroDivisionError"):
        run_python("1 / 0")


def test_dtype_promotion_is_strict_in_the_rooms_that_state_their_dtypes():
    assert STRICT_ROOMS == ("core", "pallas")
    with promotion_of("pallas"), pytest.raises(jax.dtypes.TypePromotionError):
        jnp.add(jnp.ones(3, jnp.bfloat16), jnp.ones(3, jnp.float32))
    with promotion_of("stax"):
        assert (jnp.ones(3, jnp.bfloat16) + jnp.ones(3, jnp.float32)).dtype == jnp.float32


@pytest.mark.gpu
def test_gpu_runs_the_tests():
    assert jax.devices()[0].platform == "gpu"


def test_gpu_tests_fail_where_no_gpu_answers():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu"]
    env = dict(os.environ, CUDA_VISIBLE_DEVICES="")
    done = subprocess.run(
        [*command, "tests/test_harness.py"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    assert "1 error" in done.stdout, done.stdout
