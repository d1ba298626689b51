# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Kernels that do not compile: whose fault a failure is, what is said, and what runs instead."""

import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpjax
from tests.harness import assert_close, inputs
from tests.stax import kernels
from tests.stax.functions import norm
from tests.stax.kernels import no_gradient, not_compiled, not_lowered
from tpjax.core import _jax
from tpjax.core.operator import Implementation
from tpjax.pallas import failures, rms_norm
from tpjax.pallas.norms import implementations
from tpjax.stax.explanation import StrictError
from tpjax.stax.fallback import failure_of
from tpjax.stax_passes.pipeline import optimize

_jax.hide_frames(kernels.__file__)  # as those of tpjax's kernels are
XLA = implementations.RMS_NORM[-1]
FILE = "tests/stax/functions.py"


@pytest.fixture
def use_kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that puts a kernel into `rms_norm`, for one test and its traces."""

    def put(run: Any) -> None:
        monkeypatch.setattr(implementations, "RMS_NORM", (Implementation("pallas", run), XLA))
        failures._noted.clear()
        jax.clear_caches()

    yield put
    jax.clear_caches()


ARGS = inputs("f32[4,16]", 0), inputs("f32[16]", 1)
FAULTS = [
    (not_lowered, "Only interpret mode is supported on CPU"),
    (not_compiled, "no_such_kernel"),
]


def failure(fn: Any, *args: Any) -> Any:
    """Returns what `failure_of` says of the function's optimised program."""
    jaxpr = jax.make_jaxpr(fn)(*args)
    result, reports = optimize(jaxpr)
    return failure_of(result, jaxpr, reports, jax.tree.leaves(args))


@pytest.mark.parametrize(("kernel", "reason"), FAULTS)
def test_F02_a_kernel_that_fails_to_compile_is_blamed(kernel, reason, use_kernel) -> None:
    use_kernel(kernel)
    found = failure(lambda x, s: norm(x, s) + 1, *ARGS)
    assert found is not None
    (blamed,) = found.blamed
    assert (blamed.rule, blamed.op) == ("norm", "rms_norm")
    assert re.fullmatch(rf".*{FILE}:\d+", blamed.source)
    assert reason in blamed.reason
    assert "\n" not in found.message("mine")
    for part in ("mine runs as written", "rms_norm", "norm puts in", blamed.source, reason):
        assert part in found.message("mine")
    assert "strict=True" in found.strict_message("mine")


def test_the_one_at_fault_among_several(use_kernel, monkeypatch) -> None:
    use_kernel(not_compiled)
    good = Implementation("pallas", implementations.LAYER_NORM[-1].run)
    monkeypatch.setattr(implementations, "LAYER_NORM", (good, implementations.LAYER_NORM[-1]))

    def both(x: Any, s: Any) -> Any:
        y = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
        return norm(y * s, s)

    found = failure(both, *ARGS)
    assert [one.op for one in found.blamed] == ["rms_norm"]


def test_a_gradient_that_fails_to_compile_is_blamed(use_kernel) -> None:
    use_kernel(no_gradient)
    assert failure(norm, *ARGS) is None
    inner = tpjax.compile(norm)
    step = jax.grad(lambda x, s: inner(x, s).sum())
    jaxpr = jax.make_jaxpr(step)(*ARGS)
    plain = jax.make_jaxpr(jax.grad(lambda x, s: norm(x, s).sum()))(*ARGS)
    reports = optimize(jax.make_jaxpr(norm)(*ARGS))[1]
    found = failure_of(jaxpr, plain, reports)
    assert found is not None
    assert [one.op for one in found.blamed] == ["rms_norm"]


def test_what_is_not_our_fault(use_kernel) -> None:
    assert failure(norm, *ARGS) is None  # it compiles
    use_kernel(not_compiled)
    direct = lambda x, s: rms_norm(norm(x, s), s)  # noqa: E731
    assert failure(direct, *ARGS) is None  # the original has the kernel too: the user's own call

    def theirs(x: Any, s: Any) -> Any:
        return norm(x, s) + jax.ffi.ffi_call("of_the_user", jax.typeof(x))(x)

    assert failure(theirs, *ARGS) is None

    def at_run_time(x: Any, s: Any) -> Any:
        def callback(x: Any) -> Any:
            raise ArithmeticError("theirs")

        return jax.pure_callback(callback, x, x) + s

    assert failure(at_run_time, *ARGS) is None


def test_inputs_that_are_gone(use_kernel) -> None:
    use_kernel(not_compiled)
    x = inputs("f32[4,16]", 3) + 0
    jaxpr = jax.make_jaxpr(norm)(x, ARGS[1])
    result, reports = optimize(jaxpr)
    x.delete()
    assert failure_of(result, jaxpr, reports, [x, ARGS[1]]) is not None
    assert failure_of(result, jaxpr, reports) is not None


@pytest.mark.parametrize(("kernel", "reason"), FAULTS)
@pytest.mark.parametrize("how", ["rule", "call"])
def test_F02_under_somebody_elses_jit_the_error_names_rule_and_line(
    kernel, reason, how, use_kernel
) -> None:
    use_kernel(kernel)
    fn = tpjax.compile(norm) if how == "rule" else lambda x, s: rms_norm(x, s)
    step = jax.jit(lambda x, s: fn(x, s).sum())
    for _ in range(2):  # the second time from jit's own cache of traces
        with pytest.raises(Exception, match=reason) as caught:
            step(*ARGS)
        text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
        file = FILE if how == "rule" else __file__.rpartition("/")[2]
        by = ", put in by norm" if how == "rule" else ""
        assert re.search(rf"the pallas kernel of rms_norm \(.*{file}:\d+{by}\)", text)
        assert "tpjax.use" in text
    with tpjax.use(implementation={"rms_norm": "xla"}):  # what the error advises
        jax.jit(lambda x, s: fn(x, s).sum())(*ARGS)


def test_errors_of_others_pass_as_they_are(use_kernel) -> None:
    rms_norm(*ARGS)
    use_kernel(XLA.run)
    jax.jit(rms_norm)(*ARGS)
    with pytest.raises(Exception, match="of_the_user") as caught:
        jax.jit(lambda x: jax.ffi.ffi_call("of_the_user", jax.typeof(x))(x))(ARGS[0])
    assert "tpjax" not in str(caught.value)
    with pytest.raises(ValueError, match="interpret") as caught:
        jax.jit(lambda x: not_lowered(x, None))(ARGS[0])
    assert not any("tpjax" in note for note in getattr(caught.value, "__notes__", ()))


# -- a compiled function --------------------------------------------------------------------------


@pytest.mark.parametrize(("kernel", "reason"), FAULTS)
def test_F02_the_original_runs_at_top_level(kernel, reason, use_kernel) -> None:
    use_kernel(kernel)
    compiled = tpjax.compile(norm)
    with pytest.warns(UserWarning, match=f"(?s)norm runs as written.*rms_norm.*{reason}") as caught:
        result = compiled(*ARGS)
    assert len(caught) == 1
    assert_close("original", result, jax.jit(norm)(*ARGS), 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_close("again", compiled(*ARGS), result, 0)


@pytest.mark.parametrize(("kernel", "reason"), FAULTS)
def test_F02_strict_raises(kernel, reason, use_kernel) -> None:
    use_kernel(kernel)
    compiled = tpjax.compile(norm, strict=True)
    with pytest.raises(StrictError, match=f"(?s)rms_norm.*{FILE}.*{reason}"):
        compiled(*ARGS)


def test_errors_of_the_user_are_theirs(use_kernel) -> None:
    use_kernel(XLA.run)

    def callback(x: Any) -> Any:
        raise ArithmeticError("theirs")

    compiled = tpjax.compile(lambda x, s: jax.pure_callback(callback, x, norm(x, s)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(jax.errors.JaxRuntimeError, match="theirs"):
            compiled(*ARGS)

    def raising(x: Any, s: Any) -> Any:
        raise KeyError(norm(x, s).shape)

    with pytest.raises(KeyError):
        tpjax.compile(raising)(*ARGS)


# -- F01: labels ----------------------------------------------------------------------------------


def both_labels(x: Any, s: Any) -> Any:
    y = norm(x, s)
    weights = jax.nn.softmax(y @ y.T, axis=-1)
    return jnp.sin(weights @ y), weights


def test_F01_every_region_has_a_label_and_a_reason(use_kernel) -> None:
    explanation = tpjax.explain(both_labels)(*ARGS)
    assert explanation.labels == {"rms_norm": ("xla",), "attention": ("as written",)}
    regions = {region.op: region for region in explanation.regions}
    assert dict(regions["rms_norm"].refused) == {"pallas": "the kernel needs cuda; this is cpu"}
    assert "also returned" in regions["attention"].refused[0][1]
    assert regions["rms_norm"].source.rpartition(":")[0].endswith(FILE)
    with tpjax.use(platform="cuda"):
        on_gpu = tpjax.explain(both_labels)(inputs("bf16[4,64]", 0), inputs("bf16[64]", 1))
    assert on_gpu.labels["rms_norm"] == ("pallas",)
    use_kernel(XLA.run)
    explanation = tpjax.explain(both_labels)(*ARGS)
    assert explanation.labels["rms_norm"] == ("pallas",)  # what a benchmark asserts


def test_F01_strict_raises_where_an_operator_does_not_get_its_kernel(use_kernel) -> None:
    with pytest.raises(StrictError, match=rf"rms_norm \(.*{FILE}:\d+\).*the kernel needs cuda"):
        tpjax.compile(norm, strict=True)(*ARGS)
    use_kernel(XLA.run)
    result = tpjax.compile(norm, strict=True)(*ARGS)
    assert np.isfinite(result).all()
