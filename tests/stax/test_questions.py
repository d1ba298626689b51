# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Python code that asks for the value of an array: one entry for each sequence of answers."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import io_callback

import tpjax
from tests.harness import assert_close, inputs
from tests.stax.functions import TOL, block, params
from tpjax.stax.capture import CaptureError

X = inputs("f32[4]", 0)


def _sign(x: Any) -> Any:
    if bool((x > 0).all()):
        return x + 1
    return x - 1


def test_G04_branches_on_data() -> None:
    compiled = tpjax.compile(_sign)
    for values in ([1.0, 2.0], [-3.0, 1.0], [7.0, 8.0], [-1.0, -1.0]):
        x = jnp.asarray(values)
        assert_close(str(values), compiled(x), _sign(x), 0)
    assert len(compiled.entries()) == 2
    asked = str(compiled.explain_recompile())
    assert "bool asked at tests/stax/test_questions.py:" in asked
    assert "was True, is now False" in asked
    strict = tpjax.compile(_sign, strict=True)
    with pytest.raises(CaptureError, match=r"test_questions.py:\d+.*jax.lax.cond"):
        strict(X)


def test_G05_integers_made_from_data() -> None:
    compiled = tpjax.compile(lambda x: x + int(x.sum()))
    for values, entries in (([1, 0], 1), ([2, 3], 2), ([0, 1], 2)):
        x = jnp.asarray(values)
        assert_close(str(values), compiled(x), x + sum(values), 0)
        assert len(compiled.entries()) == entries


def test_G06_a_gate_keeps_a_scalar_in_the_program() -> None:
    compiled = tpjax.compile(lambda x: x * tpjax.gate(x.sum()))
    for seed in range(6):
        x = inputs("f32[4]", seed)
        assert_close(str(seed), compiled(x), x * x.sum(), 1e-6)
    assert len(compiled.entries()) == 1
    with pytest.raises(RuntimeError, match="gate: it must be called in a function given to"):
        tpjax.gate(X.sum())
    with pytest.raises(ValueError, match=r"gate: value must be a scalar; got shape \(4,\)"):
        tpjax.compile(lambda x: x * tpjax.gate(x))(X)
    with pytest.raises(TypeError, match="gate: value must be an array that is traced; got 2"):
        tpjax.compile(lambda x: x * tpjax.gate(2))(X)  # pyright: ignore
    with pytest.raises(TypeError, match=r"stay an array.*test_questions.py:\d+"):
        tpjax.compile(lambda x: x * int(tpjax.gate(x.sum())))(X)
    under_jit = jax.jit(tpjax.compile(lambda x: x * tpjax.gate(x.sum())))
    assert_close("under jit", under_jit(X), X * X.sum(), 1e-6)


def test_G07_shapes_are_known() -> None:
    def shaped(x: Any) -> Any:
        half = x[: len(x) // 2]
        for _ in range(x.ndim):
            half = half * 2
        return half if x.shape[0] > 2 else half - 1

    compiled = tpjax.compile(shaped, strict=True)
    for x in (X, jnp.ones((2, 3))):
        assert_close("shaped", compiled(x), shaped(x), 0)
    assert len(compiled.entries()) == 2


def test_many_questions_make_a_tree() -> None:
    def walk(x: Any, steps: Any = 3) -> Any:
        for i in range(int(steps)):
            x = x + i if x.sum() > 0 else x * 2 - i
        return x * float(x[0]) if complex(x[1]).real > 0 else x

    compiled = tpjax.compile(walk)
    for seed in range(4):
        for scale in (-1, 1):
            x = scale * inputs("f32[4]", seed)
            for _ in range(2):
                assert_close("walk", compiled(x), walk(x), 1e-6)
    made = len(compiled.entries())
    compiled(x)
    assert len(compiled.entries()) == made


def test_questions_under_grad_and_in_nested_functions() -> None:
    def loss(p: Any, x: Any) -> Any:
        y = block(p, x)
        return y.sum() if x[0, 0] > 0 else (y * y).sum()

    inner = tpjax.compile(loss)
    outer = tpjax.compile(lambda p, x: jax.value_and_grad(inner)(p, x))
    p, seen = params(), set()
    for sign in (1, -1):
        x = sign * inputs("f32[12,16]", 0)
        value, grads = outer(p, x)
        assert_close("loss", value, loss(p, x), TOL)
        assert_close("gradient", grads, jax.grad(loss)(p, x), TOL)
        seen.add(bool(x[0, 0] > 0))
    assert seen == {True, False}
    assert len(outer.entries()) == 2


def test_questions_of_modules() -> None:
    class Gated(nnx.Module):
        def __init__(self) -> None:
            self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
            self.calls = nnx.Variable(jnp.int32(0))

        def __call__(self, x: Any) -> Any:
            self.calls[...] += 1
            x = self.norm(x)
            return x * 2 if self.calls[...] % 2 == 0 else x

    ours, theirs = Gated(), Gated()
    compiled = tpjax.compile(ours)
    for seed in range(4):
        x = inputs("f32[3,4]", seed)
        assert_close("gated", compiled(x), theirs(x), TOL)
    assert_close("state", nnx.state(ours), nnx.state(theirs), TOL)
    assert len(compiled.entries()) == 2


def test_effects_run_once(capfd: pytest.CaptureFixture[str]) -> None:
    @tpjax.compile
    def noisy(x: Any) -> Any:
        jax.debug.print("before {}", x[0])
        if x.sum() > 0:
            x = x + 1
        jax.debug.print("after {}", x[0])
        return x

    for x in (jnp.ones(2), -jnp.ones(2)):
        noisy(x)
        jax.effects_barrier()
        out = capfd.readouterr().out.split("\n")
        assert [line.split()[0] for line in out if line] == ["before", "after"]


@pytest.mark.parametrize("body", ["scan", "jit", "vmap"])
def test_a_question_inside_a_body_is_an_error(body: str) -> None:
    def asks(x: Any) -> Any:
        return x + 1 if x.sum() > 0 else x

    inner = {
        "scan": lambda x: jax.lax.scan(lambda c, _: (asks(c), None), x, None, length=2)[0],
        "jit": jax.jit(asks),
        "vmap": jax.vmap(asks),
    }[body]
    compiled = tpjax.compile(lambda x: inner(x))
    with pytest.raises(CaptureError, match=r"test_questions.py:\d+"):
        compiled(X)


def test_the_value_of_an_array_is_no_answer() -> None:
    for fn in (lambda x: x + np.asarray(x), lambda x: x if (x > 0) else -x):
        with pytest.raises((CaptureError, ValueError)):
            tpjax.compile(fn)(X)


def test_views_follow_the_answers() -> None:
    compiled = tpjax.compile(_sign)
    assert "add" in str(compiled.jaxpr(jnp.ones(2)))
    assert "sub" in str(compiled.jaxpr(-jnp.ones(2)))
    assert compiled.explain(jnp.ones(2)).name == "_sign"
    assert "subtract" in compiled.lower(-jnp.ones(2)).as_text()
    with pytest.raises(CaptureError):
        compiled.jaxpr(jax.ShapeDtypeStruct((2,), jnp.float32))


def test_what_python_asks_of_a_reference_is_its_value_then() -> None:
    def kept(x: Any) -> Any:
        total = jax.new_ref(jnp.zeros_like(x))
        total[...] = x
        total[...] += x
        jax.jit(lambda ref, x: ref.__setitem__(..., ref[...] + x))(total, x)
        first = total[...]
        if first > 4:
            total[...] = -x
        return first, (total[...] if total[...] > 0 else -10 * total[...])

    compiled = tpjax.compile(kept)
    for value in (3.0, 1.0, -1.0, 2.0):
        assert_close(str(value), compiled(jnp.float32(value)), kept(jnp.float32(value)), 1e-6)
    assert len(compiled.entries()) == 3


def test_a_question_may_read_a_reference_from_outside_but_not_one_written_before() -> None:
    ref = jax.new_ref(jnp.float32(0))

    @tpjax.compile
    def reads(x: Any) -> Any:
        out = x + 1 if ref[...] > 0 else x - 1
        ref[...] += x
        return out

    assert [float(reads(jnp.float32(2))) for _ in range(2)] == [1.0, 3.0]
    assert float(ref[...]) == 4

    def writes(held: Any, x: Any) -> Any:
        held[...] += x
        return x if held[...] > 5 else -x

    for fn, args in ((writes, (ref, X[0])), (lambda x: writes(ref, x), (X[0],))):
        with pytest.raises(CaptureError, match=r"py:\d+ Python asks.*py:\d+\).*jax.lax.cond"):
            tpjax.compile(fn)(*args)
    assert float(ref[...]) == 4


@pytest.mark.parametrize("where", ["here", "in a jit", "in a scan"])
def test_no_effect_runs_twice_for_a_question(where: str) -> None:
    calls: list[int] = []

    def count() -> Any:
        calls.append(1)
        return np.float32(len(calls))

    def counted(x: Any) -> Any:
        return x + io_callback(count, jax.ShapeDtypeStruct((), np.float32), ordered=True)

    run = {
        "here": counted,
        "in a jit": jax.jit(counted),
        "in a scan": lambda x: jax.lax.scan(lambda c, _: (counted(c), None), x, None, length=2)[0],
    }[where]

    def asks(x: Any) -> Any:
        y = run(x)
        return y if y > 0 else -y

    with pytest.raises(CaptureError, match=r"py:\d+ Python asks.*has an effect.*twice"):
        tpjax.compile(asks)(jnp.float32(1))
    assert not calls
    other = tpjax.compile(lambda x: run(x) if x > 0 else -run(x))
    other(jnp.float32(1))
    jax.effects_barrier()
    assert len(calls) == (2 if where == "in a scan" else 1)


def _bare_except(x: Any) -> Any:
    try:
        return x + 1 if x > 0 else x - 1
    except:  # noqa: E722
        return 100 * x


def _return_in_finally(x: Any) -> Any:
    out = x
    try:
        out = x + 1 if x > 0 else x - 1
    finally:
        return out  # noqa: B012


def _suppressed(x: Any) -> Any:
    with contextlib.suppress(BaseException):
        x = x + 1 if x > 0 else x - 1
        return x * 2 if x > 3 else x * 3
    return x


def _raises_another(x: Any) -> Any:
    try:
        return x + 1 if x > 0 else x - 1
    except BaseException:
        raise ValueError("no") from None


@pytest.mark.parametrize("fn", [_bare_except, _return_in_finally, _suppressed, _raises_another])
def test_no_handler_takes_a_question_for_a_failure(fn: Any) -> None:
    compiled = tpjax.compile(fn)
    for value in (3.0, -3.0, 1.0):
        assert_close(str(value), compiled(jnp.float32(value)), fn(jnp.float32(value)), 0)


def test_an_interrupt_after_a_question_comes_through() -> None:
    def interrupted(x: Any) -> Any:
        try:
            return x if x > 0 else -x
        except BaseException:
            raise KeyboardInterrupt from None

    with pytest.raises(KeyboardInterrupt):
        tpjax.compile(interrupted)(X[0])


def test_a_question_leaks_no_tracer() -> None:
    compiled = tpjax.compile(lambda x: x * int(x.sum()) if x[0] > 0 else x)
    with jax.checking_leaks():
        for x in (jnp.array([2.0, 1.0]), jnp.array([-2.0, 1.0])):
            assert_close("leaks", compiled(x), x * 3 if x[0] > 0 else x, 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
def test_item_and_tolist_of_a_scalar_are_questions(dtype: str) -> None:
    def fn(x: Any) -> Any:
        number, other = x[:1].item(), x[0].tolist()
        assert type(number) is type(other) is type(jnp.zeros((), dtype).item())
        return jnp.float32(10 * number + other)

    compiled = tpjax.compile(fn)
    for value in (1, 0, 1):
        x = jnp.full(2, value, dtype)
        assert_close(str(value), compiled(x), fn(x), 0)
    assert len(compiled.entries()) == 2
    assert f"{type(jnp.zeros((), dtype).item()).__name__} asked" in str(compiled.entries()[0])
    for fn in (lambda x: sum(x.tolist()), lambda x: x.item(0), lambda x: x[:1].tolist()[0]):
        with pytest.raises(CaptureError, match=r"test_questions.py:\d+"):
            tpjax.compile(fn)(X)
    with pytest.raises(jax.errors.ConcretizationTypeError):
        jax.jit(lambda x: x.item())(X[0])


def test_a_nested_function_that_catches_jax_errors_has_its_questions_answered() -> None:
    @tpjax.compile
    def inner(x: Any) -> Any:
        try:
            return x + 1 if x > 0 else x - 1
        except TypeError:
            return 100 * x

    compiled = tpjax.compile(lambda x: inner(x) * 2)
    for value in (3.0, -3.0):
        x = jnp.float32(value)
        assert_close(str(value), compiled(x), 2 * (x + 1 if value > 0 else x - 1), 0)
