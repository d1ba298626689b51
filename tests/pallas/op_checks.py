# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""What every row of the table must pass; `test_ops.py` applies it to all, and to planted faults."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tpjax
from tests.harness import assert_close, inputs
from tests.pallas import numpy_answers
from tpjax.core.operator import Op, Sample, parse_spec
from tpjax.pallas.dispatch import record_choices


def arrays_of(op: Op, sample: Sample, seed: int = 0) -> tuple[jax.Array | None, ...]:
    """Returns random arrays of the sample."""
    pairs = enumerate(zip(sample.specs, op.integers_below(sample), strict=True), seed)
    return tuple(None if spec is None else inputs(spec, i, below) for i, (spec, below) in pairs)


def shapes_of(sample: Sample) -> tuple[jax.ShapeDtypeStruct | None, ...]:
    """Returns shapes and dtypes of the sample."""
    parsed = (None if s is None else parse_spec(s) for s in sample.specs)
    return tuple(None if p is None else jax.ShapeDtypeStruct(p[1], p[0]) for p in parsed)


def with_gradients(op: Op, fn: Callable[..., Any], sample: Sample) -> Callable[..., Any]:
    """Returns (cotangent, *arrays) -> output and gradients by position, of `fn` on the sample."""
    positions, call = op.differentiable(sample), sample.call_of(fn)

    def run(cotangent: Any, *arrays: Any) -> dict[str, Any]:
        if not positions:
            return {"out": call(*arrays), "gradients": {}}

        def of_some(*some: Any) -> Any:
            full = list(arrays)
            for i, x in zip(positions, some, strict=True):
                full[i] = x
            return call(*full)

        out, vjp = jax.vjp(of_some, *(arrays[i] for i in positions))
        cotangent = jax.tree.map(of_inexact, cotangent)
        gradients = dict(zip(map(str, positions), vjp(cotangent), strict=True))
        return {"out": out, "gradients": gradients}

    return run


def of_inexact(cotangent: jax.Array) -> Any:
    """Returns the cotangent as JAX wants it: that of integers, as positions are, has no values."""
    if jnp.issubdtype(cotangent.dtype, jnp.inexact):
        return cotangent
    return np.zeros(cotangent.shape, jax.dtypes.float0)


def problem(op: Op, sample: Sample, seed: int = 0) -> tuple[Any, ...]:
    """Returns random cotangents of the operator's results, then random arrays of the sample."""
    results = jax.eval_shape(sample.call_of(op.reference), *shapes_of(sample))
    rng = np.random.default_rng(seed + 7)

    def random(x: Any) -> jax.Array:
        return jnp.asarray(rng.standard_normal(x.shape).astype(x.dtype))

    return (jax.tree.map(random, results), *arrays_of(op, sample, seed))


_answers: dict[tuple[str, str, int], Any] = {}


def answer(op: Op, sample: Sample, seed: int = 0) -> Any:
    """Returns output and gradients of the reference for `problem`, in float64 on the CPU.

    A production shape is computed in float32 on the default device: float64 would take long. Where
    the plain form is the reference itself, NumPy answers.
    """
    key = (op.name, str(sample), seed)
    if key not in _answers:
        wide = np.float32 if sample.slow else np.float64
        device = jax.devices()[0] if sample.slow else jax.devices("cpu")[0]
        operands = jax.tree.map(
            lambda x: np.asarray(x, wide) if jnp.issubdtype(x.dtype, jnp.floating) else x,
            problem(op, sample, seed),
        )
        if op.name in numpy_answers.OPS:
            _answers[key] = numpy_answers.answer(op, sample, *operands)
            return _answers[key]
        x64, exact = jax.enable_x64(not sample.slow), jax.default_matmul_precision("highest")
        with x64, exact, jax.default_device(device):
            run = jax.jit(with_gradients(op, op.reference, sample))
            _answers[key] = jax.tree.map(np.asarray, run(*operands))
    return _answers[key]


def tolerance(op: Op, sample: Sample) -> float:
    """Returns the row's tolerance for the widest-rounding dtype of the sample."""
    dtypes = {str(s.dtype) for s in shapes_of(sample) if s is not None}
    return max(op.tol[d] for d in dtypes if d in op.tol)


def compare(op: Op, sample: Sample, got: Any, want: Any) -> None:
    """Asserts that outputs and gradients agree; the reference's are rounded to the dtypes got."""
    want = jax.tree.map(lambda w, g: np.asarray(w).astype(g.dtype), want, got)
    assert_close(f"{op.name} {sample}", got, want, tolerance(op, sample))


def check(op: Op, sample: Sample, fn: Callable[..., Any]) -> None:
    """Asserts that `fn`, under jit, gives the operator's output and gradients on the sample."""
    got = jax.jit(with_gradients(op, fn, sample))(*problem(op, sample))
    compare(op, sample, got, answer(op, sample))


def check_vmap(op: Op, sample: Sample, fn: Callable[..., Any]) -> None:
    """Asserts that vmap over two problems gives the answers of both."""
    seeds = (0, 50)
    sets = [problem(op, sample, seed) for seed in seeds]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *sets)
    got = jax.jit(jax.vmap(with_gradients(op, fn, sample)))(*stacked)
    answers = [answer(op, sample, seed) for seed in seeds]
    compare(op, sample, got, jax.tree.map(lambda *xs: np.stack(xs), *answers))


def refusal(op: Op, sample: Sample) -> str | None:
    """Returns why the kernel refuses the sample on Hopper, or None."""
    with tpjax.use(platform="cuda"), record_choices() as choices, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a fallback warns is tested elsewhere
        jax.eval_shape(sample.call_of(op.fn), *shapes_of(sample))
    (choice,) = choices
    return dict(choice.refused).get("pallas")


def operand_names(op: Op) -> list[str]:
    """Returns the names of the operands that the implementations are given, in order."""
    sample = op.samples[0]
    with record_choices() as choices:
        jax.eval_shape(sample.call_of(op.fn), *shapes_of(sample))
    assert choices[0].key is not None
    return [name for name, _ in choices[0].key.operands]


def has_kernel(op: Op) -> bool:
    """Returns whether the operator has a kernel."""
    return any(i.name == "pallas" for i in op.implementations)


def quick_samples(op: Op) -> list[Sample]:
    """Returns the samples that a CPU runs."""
    return [s for s in op.samples if not s.slow]


def samples_for_kernel(op: Op) -> list[Sample]:
    """Returns the quick samples that the operator's kernel runs.

    Raises:
      AssertionError: there is a kernel and it refuses them all: nothing would test it.
    """
    if not has_kernel(op):
        return []
    refusals = {str(s): refusal(op, s) for s in quick_samples(op)}
    assert None in refusals.values(), f"{op.name}: the kernel refuses every sample: {refusals}"
    return [s for s in quick_samples(op) if refusals[str(s)] is None]
