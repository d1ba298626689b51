# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""`tpjax.compile` as a callable: entries, options, arguments, methods, errors, threads."""

import functools
import inspect
import pickle
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tpjax
from tests.harness import assert_close, inputs
from tests.stax.functions import TOL, block, choices_of, norm, params
from tpjax.core import _jax
from tpjax.stax.capture import CaptureError
from tpjax.stax.explanation import StrictError
from tpjax.stax.options import OPTIONS
from tpjax.stax_passes.engine import rewriting_pass
from tpjax.stax_passes.report import Report
from tpjax.stax_passes.unify import Rule


def _counted(fn: Callable[..., Any], **options: Any) -> tuple[Any, list[int]]:
    """Returns `fn` compiled, and a list that grows by one item a trace."""
    traces: list[int] = []

    @functools.wraps(fn)
    def counting(*args: Any, **kwargs: Any) -> Any:
        traces.append(1)
        return fn(*args, **kwargs)

    return tpjax.compile(counting, **options), traces


def test_G01_one_trace_a_signature() -> None:
    compiled, traces = _counted(norm)
    for rows in (3, 3, 5, 3, 5):
        x = inputs(f"f32[{rows},16]", rows)
        assert_close("norm", compiled(x, jnp.ones(16)), norm(x, jnp.ones(16)), TOL)
    assert len(traces) == 2
    compiled(inputs("bf16[3,16]", 0), jnp.ones(16))
    assert len(traces) == 3
    compiled.clear()
    compiled(inputs("f32[3,16]", 0), jnp.ones(16))
    assert len(traces) == 4


def test_G03_python_numbers_are_traced_unless_static() -> None:
    compiled, traces = _counted(lambda x, factor: x * factor)
    x = inputs("f32[3]", 0)
    assert_close("twice", [compiled(x, 1.0), compiled(x, 2.0)], [x, 2 * x], 0)
    assert len(traces) == 1
    compiled, traces = _counted(lambda x, factor: x * factor, static_argnames="factor")
    for factor in (1.0, 2.0, 1.0):
        assert_close("static", compiled(x, factor), x * factor, 0)
    assert_close("by name", compiled(x, factor=2.0), x * 2.0, 0)
    assert len(traces) in (2, 3)  # by name and by position are two calls to jit


def test_G02_none_and_array_alternate() -> None:
    def shifted(x: jax.Array, shift: jax.Array | None = None) -> jax.Array:
        return x if shift is None else x + shift

    compiled, traces = _counted(shifted)
    x = inputs("f32[3]", 0)
    for _ in range(2):
        assert_close("None", compiled(x), x, 0)
        assert_close("given", compiled(x, x), x + x, 0)
    assert len(traces) == 2


class Pair(NamedTuple):
    """A named tuple of arrays."""

    left: Any
    right: Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["name"])
@dataclass
class Named:
    """A dataclass pytree with a static field."""

    x: Any
    name: str = "a"


def test_G02_arguments_bind_as_in_python() -> None:
    def fn(a: Any, /, b: Any, *rest: Any, c: Any = 3.0, **others: Any) -> Any:
        return Pair(a.left + b["k"][0], sum(rest)), c * others["d"].x, Named(a.right, "b")

    x = inputs("f32[3]", 0)
    args = Pair(x, x + 1), {"k": [x, None]}, x, 2 * x
    for kwargs in ({"d": Named(x)}, {"c": x, "d": Named(x, "z")}):
        actual, expected = tpjax.compile(fn)(*args, **kwargs), fn(*args, **kwargs)
        assert_close("results", actual, expected, 0)
        assert isinstance(actual[0], Pair)
        assert actual[2].name == "b"
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        tpjax.compile(fn)(args[0])


def test_decorator_forms_and_names() -> None:
    @tpjax.compile
    def plain(x: jax.Array) -> jax.Array:
        """Doubles."""
        return 2 * x

    @tpjax.compile(static_argnums=1, name="scaled_by")
    def scaled(x: jax.Array, n: int) -> jax.Array:
        return x * n

    x = inputs("f32[3]", 0)
    assert plain.__name__ == "plain"
    assert plain.__doc__ == "Doubles."
    assert plain.__module__ == __name__
    assert list(inspect.signature(plain).parameters) == ["x"]
    assert repr(scaled) == "<tpjax.compile(scaled_by)>"
    assert "jit_scaled_by" in scaled.lower(x, 3).as_text()
    assert_close("scaled", scaled(x, 3), 3 * x, 0)
    assert_close("again", tpjax.compile(scaled, name="other")(x, 3), 3 * x, 0)
    assert_close("lowered", scaled.lower(x, 3).compile()(x), 3 * x, 0)


def test_methods_know_their_object() -> None:
    class Scaled:
        def __init__(self, factor: float) -> None:
            self.factor = factor

        @tpjax.compile(static_argnames="times")
        def __call__(self, x: jax.Array, times: int = 1) -> jax.Array:
            return x * self.factor * times

    x = inputs("f32[3]", 0)
    two: Any = Scaled(2.0)
    three: Any = Scaled(3.0)
    for _ in range(2):
        assert_close("two", two(x), x * 2.0, 0)
        assert_close("three", three(x, times=2), x * 3.0 * 2, 0)
    bound: Any = two.__call__
    assert_close("jit of a method", jax.jit(bound)(x), x * 2.0, 0)
    assert_close("compiled again", tpjax.compile(bound)(x), x * 2.0, 0)
    assert list(inspect.signature(bound).parameters) == ["x", "times"]


def test_donation_is_kept() -> None:
    @functools.partial(jax.jit, donate_argnums=0, donate_argnames="c")
    def step(a: jax.Array, b: jax.Array, *, c: jax.Array) -> Any:
        return a + 1, b.sum(), c * 2

    compiled = tpjax.compile(step)
    for _ in range(2):
        a, b, c = (inputs("f32[5]", i) for i in range(3))
        compiled(a, b, c=c)
        assert [x.is_deleted() for x in (a, b, c)] == [True, False, True]
    outer = jax.jit(tpjax.compile(lambda a: a + 1), donate_argnums=0)
    outer(a := inputs("f32[5]", 0))
    assert a.is_deleted()


def test_shardings_of_an_inner_jit_stay() -> None:
    device = jax.devices()[0]
    place = jax.sharding.SingleDeviceSharding(device)
    inner = jax.jit(lambda x: norm(x, x[0]), out_shardings=place, donate_argnums=0)
    (eqn,) = tpjax.compile(inner).jaxpr(inputs("f32[3,16]", 0)).eqns
    assert eqn.params["donated_invars"] == (True,)
    assert eqn.params["out_shardings"] == (place,)
    assert "rms_norm" in str(eqn)


def test_use_makes_another_entry() -> None:
    compiled, traces = _counted(norm)
    args = inputs("f32[3,16]", 0), jnp.ones(16)
    _, choices = choices_of(compiled, *args)
    assert [c.implementation for c in choices] == ["xla"]
    with tpjax.use(implementation="xla"):
        _, choices = choices_of(compiled, *args)
    assert [c.refused for c in choices] == [()]
    _, choices = choices_of(compiled, *args)
    assert choices == []
    assert len(traces) == 2


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"mod": "exact"}, TypeError, "unknown option 'mod'. Did you mean 'mode'"),
        ({"mode": "defalt"}, ValueError, "unknown mode 'defalt'. Did you mean 'default'"),
        ({"mode": 3}, ValueError, "mode must be one of its words; got 3"),
        ({"strict": 1}, ValueError, "strict must be True or False; got 1"),
        ({"passes": "all"}, ValueError, "passes must be a tuple of passes"),
        ({"passes": (), "mode": "exact"}, ValueError, "exclude each other"),
        ({"static_argnums": "x"}, ValueError, "static_argnums must be a position"),
        ({"static_argnums": 2}, ValueError, "static_argnums must be positions"),
        ({"static_argnames": "scal"}, ValueError, "Did you mean 'scale'"),
        ({"name": 1}, ValueError, "name must be a string"),
    ],
)
def test_G11_F07_wrong_options(options: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        tpjax.compile(norm, **options)


def test_options_are_one_table() -> None:
    for option in OPTIONS:
        assert f"{option.name}: {option.help}" in (tpjax.compile.__doc__ or "")
        assert option.valid(option.default)


@pytest.mark.parametrize("fn", [3, dict, "norm"])
def test_not_a_function(fn: Any) -> None:
    with pytest.raises(TypeError, match="fn must be a function"):
        tpjax.compile(fn)


def test_mode_exact_keeps_every_bit() -> None:
    args = params(), inputs("f32[12,16]", 9)
    exact = tpjax.compile(block, mode="exact")
    assert exact.explain(*args).sites == ()
    assert_close("bits", exact(*args), jax.jit(block)(*args), 0)
    assert tpjax.compile(block).explain(*args).sites


def test_passes_are_chosen() -> None:
    rule = Rule("plus_to_minus", lambda x: x + 1, lambda x: x - 1)
    compiled = tpjax.compile(lambda x: x + 1, passes=(rewriting_pass("mine", (rule,)),))
    assert int(compiled(3)) == 2
    report = compiled.explain(3).as_dict()
    assert [(p["name"], p["hits"]) for p in report["passes"]] == [("mine", 1)]


def _broken(jaxpr: _jax.Jaxpr) -> tuple[_jax.Jaxpr, Report]:
    raise KeyError("planted")


def _refuse(x: Any) -> Any:
    raise ArithmeticError("planted")


FAILING_RULE = rewriting_pass("mine", (Rule("sine", jnp.sin, _refuse, num_args=1),))


@pytest.mark.parametrize(("passes", "says"), [((_broken,), "_broken"), ((FAILING_RULE,), "sine")])
def test_a_failing_rewrite_keeps_the_original(passes: Any, says: str) -> None:
    x = inputs("f32[3]", 0)
    compiled = tpjax.compile(jnp.sin, passes=passes)
    with pytest.warns(UserWarning, match=says):
        assert_close("original", compiled(x), jnp.sin(x), 0)
    with warnings.catch_warnings(action="ignore"), pytest.raises(StrictError, match=says):
        tpjax.compile(jnp.sin, passes=passes, strict=True)(x)


def test_strict_demands_kernels() -> None:
    compiled = tpjax.compile(norm, strict=True)
    with pytest.raises(StrictError, match=r"rms_norm \(.*functions.py:\d+\) .* kernel"):
        compiled(inputs("f32[3,16]", 0), jnp.ones(16))
    assert tpjax.compile(jnp.sin, strict=True)(0.0) == 0


BRANCHES: dict[str, tuple[Callable[[jax.Array], Any], str]] = {
    "bool": (lambda x: x if x.sum() > 0 else -x, "jax.lax.cond"),
    "int": (lambda x: list(range(3))[x.astype(int)[0]], "dynamic_slice"),
    "float": (lambda x: x + float(x[0]), "static_argnames"),
    "numpy": (lambda x: x + np.sin(x), "jax.numpy"),
    "mask": (lambda x: x[x > 0], "jnp.where"),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_G12_a_branch_on_data_names_the_line(name: str) -> None:
    fn, remedy = BRANCHES[name]
    line = fn.__code__.co_firstlineno
    branching, x = lambda x, go: fn(x) if go else x, jnp.ones(3)
    strict = tpjax.compile(branching, static_argnums=1, strict=True)
    for call in (strict, jax.jit(tpjax.compile(branching, static_argnums=1), static_argnums=1)):
        with pytest.raises(CaptureError) as raised:
            call(x, True)
        assert f"{__file__}:{line}" in str(raised.value)
        assert remedy in str(raised.value)
        assert_close("the next call", call(x, False), x, 0)


def test_G14_pickling_says_what_to_do() -> None:
    with pytest.raises(TypeError, match="Pickle the function it was made from"):
        pickle.dumps(tpjax.compile(norm))


def test_G13_threads_build_one_entry_a_signature() -> None:
    compiled, traces = _counted(norm)
    scale = inputs("f32[16]", 1)
    xs = [inputs(f"f32[{rows},16]", rows) for rows in (2, 3, 4, 5)]
    start, results = threading.Barrier(16), [None] * 16

    def work(i: int) -> None:
        start.wait()
        results[i] = compiled(xs[i % 4], scale)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(traces) == len(compiled.entries()) == 4
    for i, result in enumerate(results):
        assert_close(f"thread {i}", result, norm(xs[i % 4], scale), TOL)


def test_errors_of_the_function_come_through() -> None:
    @tpjax.compile
    def wrong(x: jax.Array) -> jax.Array:
        raise LookupError("of the function")

    with pytest.raises(LookupError, match="of the function"):
        wrong(jnp.ones(3))
    with pytest.raises(TypeError, match="str"):
        tpjax.compile(lambda x: "text")(jnp.ones(3))


def test_options_of_an_inner_jit_are_kept() -> None:
    options = {"xla_cpu_enable_fast_math": True}
    inner = jax.jit(
        lambda x, mode: x * 2 if mode == "double" else x,
        static_argnames="mode",
        compiler_options=options,
    )
    compiled, x = tpjax.compile(inner), inputs("f32[3]", 0)
    assert_close("double", compiled(x, "double"), 2 * x, 0)
    assert_close("by name", compiled(x, mode="single"), x, 0)
    assert "mul" in str(compiled.jaxpr(x, "double"))
    wrong = jax.jit(lambda x: x, compiler_options={"no_such_option": True})
    with pytest.raises(RuntimeError, match="no_such_option"):
        tpjax.compile(wrong)(x)  # so options do reach the compiler
    with pytest.raises(ValueError, match="top-level"):  # as plain JAX
        jax.jit(tpjax.compile(inner), static_argnums=1)(x, "double")


def test_flags_are_part_of_the_key() -> None:
    compiled, x = tpjax.compile(lambda x: x @ x.T + 1.0), inputs("f32[3,4]", 0)
    assert compiled(x).dtype == jnp.float32
    with jax.enable_x64(True):
        wide = np.asarray(x, np.float64)
        assert_close("64 bits", compiled(wide), wide @ wide.T + 1.0, 1e-12)
    with jax.numpy_dtype_promotion("strict"):
        compiled(x)
    with jax.default_matmul_precision("highest"):
        assert "HIGHEST" in compiled.lower(x).as_text()
    assert "HIGHEST" not in compiled.lower(x).as_text()
    assert len(compiled.entries()) == 4


def test_donation_of_an_outer_jit_and_of_a_module() -> None:
    x = jnp.ones(128)
    assert "jax.buffer_donor" in _lowered(x) or "tf.aliasing_output" in _lowered(x)
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    @nnx.jit(donate_argnums=0)
    def step(model: nnx.Linear) -> None:
        model.kernel[...] += 1.0

    compiled, old = tpjax.compile(step), model.kernel[...]
    expected = np.asarray(old) + 2.0
    compiled(model)
    compiled(model)
    assert old.is_deleted()
    assert_close("stepped", model.kernel[...], expected, 1e-6)


def _lowered(x: jax.Array) -> str:
    return jax.jit(tpjax.compile(lambda x: x + 1), donate_argnums=0).lower(x).as_text()
