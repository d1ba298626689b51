# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Derivatives of every kind through a kernel: right, by its own passes where it has them, or told.

On a GPU: `python -m pytest -m gpu tests/pallas/test_differentiation.py`.
"""

import re
import warnings
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import tpjax
from tests.harness import assert_close, inputs, run_python
from tests.pallas import differentiation_cases as cases
from tests.pallas import op_checks as checks
from tpjax.core.operator import Implementation
from tpjax.pallas import OPS, dispatch, rms_norm

TOL = 3e-6
"""Of float32: up to six derivatives of sines follow one another, each a few roundings."""
X, SCALE = inputs("f32[2,4]", 0), inputs("f32[4]", 1)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    """Nothing has been launched or warned of before."""
    monkeypatch.setattr(dispatch, "_warned", set())
    cases.LAUNCHES.clear()


def told(run, *args):
    """Returns the result of a call and the warnings that it gave."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = jax.block_until_ready(run(*args))
    return result, [str(w.message) for w in caught]


def exact(run, *args):
    """Returns the result of a function of arrays, computed in float64 and rounded to float32."""
    with jax.enable_x64(True):
        wide = [np.asarray(a, np.float64) for a in args]
        result = jax.tree.map(np.asarray, jax.jit(run)(*wide))
    return jax.tree.map(lambda y: y.astype(np.float32), result)


HOW = pytest.mark.parametrize("how", [jax.jit, lambda f: f], ids=["jit", "eager"])


@HOW
@pytest.mark.parametrize("name", cases.FIRST)
def test_first_derivative_is_the_kernels(name, how):
    """Reverse mode launches each pass as often as it must, and says nothing."""
    transform, launches = cases.FIRST[name]
    got, warned = told(how(transform(cases.fake())), X, SCALE)
    assert_close(name, got, exact(transform(cases.reference), X, SCALE), TOL)
    assert warned == []
    ran = (cases.LAUNCHES["forward"], cases.LAUNCHES["backward"])
    assert ran == launches or (launches is None and min(ran) > 0)


EAGER = [
    "jvp",
    "jacfwd",
    "linearize",
    "jvp scan checkpoint",
    "hessian",
    "grad grad scan checkpoint",
]


@pytest.mark.parametrize(
    ("name", "how"),
    [(name, jax.jit) for name in cases.OTHERS] + [(name, lambda f: f) for name in EAGER],
    ids=[*cases.OTHERS, *(f"{name} eager" for name in EAGER)],
)
def test_other_derivatives_are_the_plain_forms(name, how):
    """Forward mode and higher orders are right, with one warning that names op, reason and line."""
    transform = cases.OTHERS[name]
    got, warned = told(how(transform(cases.fake())), X, SCALE)
    assert_close(name, got, exact(transform(cases.reference), X, SCALE), TOL)
    (warning,) = warned
    line = r"\(tests/pallas/differentiation_cases.py:\d+\)\.$"
    assert re.match(
        "fake: no kernel for this derivative: the kernel has first derivatives", warning
    )
    assert re.search(line, warning)


def test_a_line_is_told_of_once():
    """Whatever derivatives are taken, and however often; another line is told of again."""
    one, other = cases.fake(), cases.fake()
    warned = []
    for transform in (cases.push, lambda f: cases.push(cases.grad(f)), cases.push):
        warned += told(jax.jit(transform(one)), X, SCALE)[1]
    assert len(warned) == 1
    assert told(cases.push(other), X, SCALE)[1] == []  # `fake` is one line
    here = lambda x, s: dispatch.call("here", cases.WAYS, cases.operands(x, s), {})  # noqa: E731
    (warning,) = told(cases.push(here), X, SCALE)[1]
    assert re.match("here: .*test_differentiation.py:", warning)


def test_planted_fault_wrong_plain_form(monkeypatch):
    """A plain form that is not the kernel's function is found by the comparison above."""
    ways = (cases.WAYS[0], Implementation("xla", lambda *a: 1.001 * cases.plain(*a)))
    monkeypatch.setattr(cases, "WAYS", ways)
    with pytest.raises(AssertionError, match="jvp grad"):
        test_other_derivatives_are_the_plain_forms("jvp grad", jax.jit)


@pytest.fixture(params=["jax_custom_vjp3", "jax_custom_jvp3", "jax_remat3"])
def flag(request):
    """Turns on one of JAX's coming implementations of what we stand on."""
    jax.clear_caches()
    jax.config.update(request.param, True)
    yield
    jax.config.update(request.param, False)
    jax.clear_caches()


def test_under_the_new_flags(flag):
    """JAX's coming custom_vjp, custom_jvp and checkpoint change nothing."""
    test_first_derivative_is_the_kernels("grad scan", jax.jit)
    test_other_derivatives_are_the_plain_forms("jvp grad scan checkpoint", jax.jit)


MESH = """
import warnings
import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from tests.harness import assert_close, inputs
from tests.pallas import differentiation_cases as cases

x, scale = inputs("f32[8,4]", 0), inputs("f32[4]", 1)
second = lambda f: cases.push(cases.grad(f))
for transform in (cases.grad, cases.push, second, lambda f: second(cases.twice(jax.checkpoint(f)))):
    want = jax.jit(transform(cases.reference))(x, scale)
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((4,), ("a",), axis_types=(kind,))
        with jax.set_mesh(mesh), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            placed = jax.device_put(x, NamedSharding(mesh, P("a")))
            got = jax.block_until_ready(jax.jit(transform(cases.fake()))(placed, scale))
        assert_close(str(kind), jax.device_get(got), jax.device_get(want), 3e-6)
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,))
    for how in (jax.jit, lambda f: f):
        mapped = lambda f: jax.shard_map(f, mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a"))
        got = how(transform(mapped(cases.fake())))(x, scale)
        assert_close("outside shard_map", jax.device_get(got), jax.device_get(want), 3e-6)

total = jax.shard_map(
    lambda x, s: jax.lax.psum(cases.loss(cases.fake())(x, s), "a"),
    mesh=mesh, in_specs=(P("a"), P()), out_specs=P(),
)
grad = lambda f: jax.grad(f, (0, 1))
for transform in (grad, cases.push, lambda f: cases.push(grad(f))):
    want = jax.jit(transform(cases.loss(cases.reference)))(x, scale)
    got = jax.jit(transform(total))(x, scale)
    assert_close("with a sum", jax.device_get(got), jax.device_get(want), 3e-6)
print("agree", cases.LAUNCHES["backward"] > 0)
"""


def test_on_four_devices():
    """Under Auto and Explicit meshes, and inside the caller's shard_map, jitted or not."""
    assert "agree True" in run_python(MESH, devices=4)


def directions(op, sample):
    """Returns arrays like the floating operands that have gradients, by position."""
    arrays = checks.arrays_of(op, sample, seed=90)
    return {i: arrays[i] for i in op.differentiable(sample)}


def derivatives(op, sample, fn):
    """Returns (cotangent, directions, *arrays) -> a derivative of each kind, of `fn`."""
    places = list(directions(op, sample))

    def run(cotangent, along, *arrays):
        def of_some(*some):
            full = list(arrays)
            for i, x in zip(places, some, strict=True):
                full[i] = x
            return sample.call_of(fn)(*full)

        def pulled(*some):
            return jax.vjp(of_some, *some)[1](cotangent)

        some = tuple(arrays[i] for i in places)
        tangents = tuple(along[i] for i in places)
        _, forward = jax.jvp(of_some, some, tangents)
        gradient, over_reverse = jax.jvp(pulled, some, tangents)
        back = jax.vjp(pulled, *some)[1](tangents)
        return {"jvp": forward, "vjp": gradient, "jvp of vjp": over_reverse, "vjp of vjp": back}

    return run


def compare(op, sample, fn):
    """Asserts that derivatives of every kind are those of the reference, in float64."""
    problem = checks.problem(op, sample)
    args = (problem[0], directions(op, sample), *problem[1:])
    got = jax.jit(derivatives(op, sample, fn))(*args)
    wide = jax.tree.map(
        lambda x: np.asarray(x, np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x, args
    )
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        want = jax.jit(derivatives(op, sample, op.reference))(*wide)
        want = jax.tree.map(lambda w, g: np.asarray(w).astype(g.dtype), want, got)
    tol = checks.tolerance(op, sample)
    for kind, value in got.items():
        assert_close(f"{op.name} {kind}", value, want[kind], tol)


WITH_GRADIENTS = [op for op in OPS if op.diff]
KERNELS = [(o, checks.samples_for_kernel(o)[0]) for o in WITH_GRADIENTS if checks.has_kernel(o)]
PLAIN = [(op, checks.quick_samples(op)[0]) for op in WITH_GRADIENTS]


def over(pairs):
    """Runs the test for every row and sample."""
    ids = [f"{op.name}-{sample}" for op, sample in pairs]
    return pytest.mark.parametrize(("op", "sample"), pairs, ids=ids)


@over(KERNELS)
def test_interpreted(op, sample):
    """Every row's kernel, in the interpreter."""
    with tpjax.use(interpret=True), pytest.warns(UserWarning, match="no kernel for this deriv"):
        compare(op, sample, partial(op.fn, implementation="pallas"))


@over(PLAIN)
def test_xla(op, sample):
    """Every row's plain form: all derivatives are its own, and nothing is said."""
    compare(op, sample, partial(op.fn, implementation="xla"))


@pytest.mark.gpu
@over(KERNELS)
def test_gpu(op, sample):
    """Every row's kernel, on a GPU."""
    with pytest.warns(UserWarning, match="no kernel for this derivative"):
        compare(op, sample, partial(op.fn, implementation="pallas"))


@over(KERNELS)
def test_nothing_more_is_kept(op, sample):
    """Reverse mode keeps what the kernel's own rule keeps, and operands, which XLA may drop."""

    def kept(fn, *args):
        (*_, pull) = jax.eval_shape(lambda *a: jax.vjp(fn, *a), *args)
        return Counter(map(str, jax.tree.leaves(pull)))

    with tpjax.use(platform="cuda"), dispatch.record_choices() as choices:
        ours = kept(sample.call_of(op.fn), *checks.shapes_of(sample))
        (choice,) = {c.key for c in choices}
        assert choice is not None
        run = partial(op.implementations[0].run, **dict(choice.options))
        given = [a and jax.ShapeDtypeStruct(a.shape, a.dtype) for _, a in choice.operands]
        own = kept(run, *given)
    assert not own - ours
    assert not ours - own - Counter(map(str, given))


def test_traced_here_differentiated_elsewhere():
    """A derivative taken outside of `use` runs the kernel as the call inside chose it."""
    x, along = inputs("f32[2,128]", 0), inputs("f32[2,128]", 1)
    with tpjax.use(interpret=True):
        captured = jaxpr_as_fun(jax.make_jaxpr(rms_norm)(x))
    got = jax.jit(lambda x: jax.vjp(captured, x)[1]([along])[0])(x)
    assert_close("gradient", got, jax.vjp(rms_norm, x)[1](along)[0], 1e-6)


def test_compiled_function_is_differentiated_forward():
    """A rewrite that brought a kernel in is differentiated like the kernel."""

    def normalise(x, scale):
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale

    x, scale = inputs("f32[2,128]", 0), inputs("f32[128]", 1)
    run = jax.jit(cases.push(tpjax.compile(normalise)))
    with tpjax.use(interpret=True), dispatch.record_choices() as choices:
        got, warned = told(run, x, scale)
    assert [c.implementation for c in choices] == ["pallas"]
    assert ["rms_norm: no kernel for this derivative" in w for w in warned] == [True]
    assert_close("jvp", got, cases.push(normalise)(x, scale), 2e-6)
