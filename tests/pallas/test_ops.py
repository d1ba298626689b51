# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The table of operators: every row on every sample, in every form that can run here.

On a GPU: `python -m pytest -m gpu tests/pallas/test_ops.py` runs all samples on the device.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import tpjax
from tests.pallas import numpy_answers
from tests.pallas import op_checks as checks
from tpjax.core.operator import Implementation, Op, Sample, nbytes, parse_spec
from tpjax.pallas import OPS, rms_norm
from tpjax.pallas.dispatch import call, record_choices
from tpjax.pallas.norms import tiles
from tpjax.pallas.partition import dimensions

ROWS = {op.name: op for op in OPS}
EVERY = [(op, s) for op in OPS for s in op.samples]
QUICK = [(op, s) for op, s in EVERY if not s.slow]
KERNEL = [(op, s) for op in OPS for s in checks.samples_for_kernel(op)]
FIRST = [next((op, s) for op, s in KERNEL if op is row) for row in OPS if checks.has_kernel(row)]


def named(value: object) -> str | None:
    """Names a row or a sample in the list of tests."""
    return value.name if isinstance(value, Op) else str(value)


def over(cases: list[tuple[Op, Sample]]) -> pytest.MarkDecorator:
    """Runs the test for every row and sample."""
    return pytest.mark.parametrize(("op", "sample"), cases, ids=named)


@over(QUICK)
def test_xla(op, sample):
    """The plain form, under jit: output and gradients against float64."""
    checks.check(op, sample, partial(op.fn, implementation="xla"))


@over(QUICK)
def test_xla_vmap(op, sample):
    """The plain form under vmap."""
    checks.check_vmap(op, sample, partial(op.fn, implementation="xla"))


@over(KERNEL)
def test_interpreted(op, sample):
    """The kernels in the interpreter, under jit, against float64; data races are errors."""
    with tpjax.use(interpret="races"), record_choices() as choices:
        checks.check(op, sample, op.fn)
    assert {c.implementation for c in choices} == {"pallas"}


@over(FIRST)
def test_interpreted_vmap(op, sample):
    """The kernels in the interpreter under vmap."""
    with tpjax.use(interpret=True):
        checks.check_vmap(op, sample, partial(op.fn, implementation="pallas"))


@over(EVERY)
def test_lowers_for_cuda(op, sample):
    """Every sample, production shapes too, lowers for a GPU, through the kernel that runs it."""
    refused = checks.refusal(op, sample)
    wanted = "xla" if refused or not checks.has_kernel(op) else "pallas"
    out = jax.eval_shape(sample.call_of(op.reference), *checks.shapes_of(sample))
    run = checks.with_gradients(op, partial(op.fn, implementation=wanted), sample)
    with tpjax.use(platform="cuda"):
        traced = jax.jit(run).trace(out, *checks.shapes_of(sample))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("mosaic_gpu" in text) == (wanted == "pallas")


@over(EVERY)
def test_cost(op, sample):
    """Traffic is operands and results, once each; arithmetic is near what XLA counts.

    XLA counts what a mask hides too, and comparisons; a lookup reads no more rows than there are.
    """
    shapes = checks.shapes_of(sample)
    cost = sample.call_of(op.cost)(*shapes)
    reference = sample.call_of(op.reference)
    everything = nbytes([*shapes, *jax.tree.leaves(jax.eval_shape(reference, *shapes))])
    if op.name == "embedding":
        assert 0.2 * everything < cost.bytes <= everything
    else:
        assert cost.bytes == everything
    if not sample.slow:
        counted = jax.jit(reference).lower(*shapes).cost_analysis() or {}
        operations = counted.get("flops", 0) + counted.get("transcendentals", 0)
        if operations:  # dropout of nothing is a copy
            assert 0.5 < operations / cost.flops < 10


@over([(op, s) for op, s in EVERY if checks.has_kernel(op)])
def test_partitioning_names_every_dimension(op, sample):
    """One letter is one size (or 1, broadcast); results are named by letters of the operands.

    A row without a kernel is split by XLA, which asks for no letters.
    """
    split, sizes = op.partitioning, {}
    shapes = checks.shapes_of(sample)
    letters_of = dict(zip(checks.operand_names(op), split.inputs, strict=True))
    for argument, x in zip(op.arguments(sample), shapes, strict=True):
        letters = letters_of[argument]
        if x is None or x.ndim < len(letters) - 1:
            continue
        for name, size in zip(dimensions(letters, x.ndim), x.shape, strict=True):
            known = sizes.get(name, 1)
            assert 1 in (size, known) or size == known, name
            sizes[name] = max(size, known)
    results = jax.tree.leaves(jax.eval_shape(sample.call_of(op.reference), *shapes))
    assert len(results) <= len(split.outputs)  # a row names optional results too, last
    for letters, x in zip(split.outputs, results, strict=False):
        named_sizes = zip(dimensions(letters, x.ndim), x.shape, strict=True)
        assert all(sizes[name] == size for name, size in named_sizes)
    letters = set("".join(split.inputs))
    assert letters >= set(split.sharded) | set("".join(split.alike))


@pytest.mark.parametrize("op", OPS, ids=named)
def test_samples_cover(op):
    """A row has float32, bfloat16, an odd size, and a production shape marked slow."""
    specs = [parse_spec(s) for sample in op.samples for s in sample.specs if s]
    assert {jnp.float32, jnp.bfloat16} <= {dtype.type for dtype, _ in specs}
    assert any(size % 2 and size > 1 for _, shape in specs for size in shape)
    assert any(s.slow for s in op.samples)
    assert set(op.tol) >= {dtype.name for dtype, _ in specs if jnp.issubdtype(dtype, jnp.floating)}
    assert op.implementations[-1].platforms is None
    assert checks.has_kernel(op) != bool(op.no_kernel)


@pytest.mark.parametrize("op", OPS, ids=named)
def test_help(op):
    """A docstring says what goes in and out, what is refused; shows a call; names its source."""
    parts = ["Args:", "Returns:", "Raises:", "UnsupportedError:", "Example:", "Source:"]
    for part in parts[: 5 if op.name == "matmul" else 6]:  # a matrix product is nobody's
        assert part in op.fn.__doc__, part


def test_names_are_unique():
    """A name is one row, and its public function is found under it."""
    assert len(ROWS) == len(OPS)
    for name, op in ROWS.items():
        assert getattr(tpjax.pallas, name) is op.fn
        assert name in tpjax.pallas.__all__


RMS = ROWS["rms_norm"]
F32 = RMS.samples[0]
"""The sample that planted faults are looked for in."""


def test_planted_fault_wrong_eps():
    """An eps ten times too large is found even where it is small beside the data."""
    with pytest.raises(AssertionError, match="tolerance"):
        checks.check(RMS, F32, lambda x, scale: rms_norm(x, scale, eps=1e-5))


def test_planted_fault_gradient():
    """A gradient off by 0.1 % is found."""

    @jax.custom_vjp
    def faulty(x, scale):
        return rms_norm(x, scale)

    def backward(kept, dy):
        dx, dscale = jax.vjp(rms_norm, *kept)[1](dy)
        return dx, dscale * 1.001

    faulty.defvjp(lambda x, scale: (rms_norm(x, scale), (x, scale)), backward)
    with pytest.raises(AssertionError, match=r"gradients.*1"):
        checks.check(RMS, F32, faulty)


@pytest.mark.parametrize("name", numpy_answers.OPS)
def test_planted_fault_wrong_reference(name):
    """Where the plain form is the reference, a fault of it is found all the same."""
    row = ROWS[name]

    def faulty(*arrays, **options):
        out = row.reference(*arrays, **options)
        return out + 1 if out.dtype == jnp.int32 else out * 1.001

    with pytest.raises(AssertionError):
        checks.check(replace(row, reference=faulty), row.samples[0], faulty)


@pytest.fixture
def untraced():
    """Kernels are traced anew, and a faulty one is not kept for the tests that follow."""
    jax.clear_caches()
    yield
    jax.clear_caches()


def test_planted_fault_unwritten_output(untraced, monkeypatch):
    """A kernel that never sends its result off is found."""
    monkeypatch.setattr(tiles.plgpu, "copy_smem_to_gmem", lambda *refs: None)
    with tpjax.use(interpret=True), pytest.raises(AssertionError, match="not finite"):
        checks.check(RMS, F32, rms_norm)


def test_planted_fault_kernel_refuses_everything():
    """A row whose kernel runs none of its samples is found."""
    lazy = Implementation("pallas", rms_norm, lambda key: "never", platforms=("cuda",))
    ways = (lazy, RMS.implementations[-1])

    def refusing(x, scale, **options):
        return call("refusing", ways, {"x": x, "scale": scale}, options)

    row = replace(RMS, fn=refusing, implementations=ways)
    with pytest.raises(AssertionError, match="refuses every sample"):
        checks.samples_for_kernel(row)


@pytest.mark.gpu
@over(EVERY)
def test_gpu(op, sample):
    """Every form that a GPU runs, on it: output and gradients, production shapes too."""
    forms = ["xla"]
    if checks.has_kernel(op) and checks.refusal(op, sample) is None:
        forms.append("pallas")
    for form in forms:
        run = checks.with_gradients(op, partial(op.fn, implementation=form), sample)
        # By default a GPU multiplies float32 as TF32, in anybody's JAX code.
        with jax.default_matmul_precision("highest"):
            got = jax.jit(run)(*checks.problem(op, sample))
        checks.compare(op, sample, got, checks.answer(op, sample))


@pytest.mark.gpu
@over(KERNEL)
def test_gpu_vmap(op, sample):
    """The kernels under vmap, on a GPU."""
    checks.check_vmap(op, sample, partial(op.fn, implementation="pallas"))
