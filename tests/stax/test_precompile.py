# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""`Compiled.precompile`: later calls compile nothing, and threads make what one thread makes."""

import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import tpjax
from tests.harness import assert_close, inputs
from tests.stax.functions import norm
from tests.stax.kernels import not_compiled, not_lowered
from tpjax.core.operator import Implementation
from tpjax.pallas import failures
from tpjax.pallas.norms import implementations
from tpjax.stax.capture import CaptureError
from tpjax.stax.explanation import StrictError

_counters: list[list[str]] = []


def _listener(event: str, duration_secs: float, **kwargs: Any) -> None:
    del duration_secs, kwargs
    if event.endswith("backend_compile_duration"):
        for counter in _counters:
            counter.append(event)


jax.monitoring.register_event_duration_secs_listener(_listener)


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Collects an item for each program that XLA compiles in the block."""
    counter: list[str] = []
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters.remove(counter)


WEIGHT, SCALE = inputs("f32[4]", 9), 2.0


def plain(x: Any) -> Any:
    return jnp.tanh(x) @ x.T


def with_free_values(x: Any) -> Any:
    return (SCALE * WEIGHT * jnp.tanh(x)) @ x.T


def asks(x: Any) -> Any:
    return x * 2 if x.sum() > 0 else x - 1


def module_call(module: Any, x: Any) -> Any:
    return module(x) + 1


MODULE = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
SHAPES = tuple(jax.ShapeDtypeStruct((n, 4), jnp.float32) for n in (2, 3, 5))
ARRAYS = tuple(inputs(f"f32[{n},4]", n) for n in (2, 3, 5))
KINDS: dict[str, tuple[Callable[..., Any], dict[str, Any], Callable[[Any], tuple[Any, ...]], bool]]
KINDS = {
    "fast": (plain, {}, lambda x: (x,), True),
    "free values": (with_free_values, {}, lambda x: (x,), True),
    "exact": (plain, {"mode": "exact"}, lambda x: (x,), True),
    "questions": (asks, {}, lambda x: (x,), False),
    "module": (module_call, {}, lambda x: (MODULE, x), True),
    "method": (MODULE, {}, lambda x: (x,), True),
    "verify": (plain, {"verify": True}, lambda x: (x,), True),
    "a jit": (jax.jit(plain), {}, lambda x: (x,), True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_after_it_compiles_nothing(kind):
    fn, options, arguments, shapes_do = KINDS[kind]
    compiled = tpjax.compile(fn, **options)
    given = SHAPES if shapes_do else ARRAYS
    with compilations() as made:
        programs = compiled.precompile(*map(arguments, given))
    assert len(programs) == 3
    assert len(made) >= 3
    plainly = [fn(*arguments(x)) for x in ARRAYS]
    if kind == "verify":  # it evaluates the original beside the program
        return
    with compilations() as made:
        results = [compiled(*arguments(x)) for x in ARRAYS]
    assert made == []
    assert_close(kind, results, plainly, 1e-6)


def test_the_count_sees_a_compilation():
    compiled = tpjax.compile(lambda x: jnp.cos(x) * 3)
    with compilations() as made:
        compiled(ARRAYS[0])
    assert made


@pytest.mark.parametrize("kind", ["fast", "free values", "module"])
def test_F06_threads_make_what_one_thread_makes(kind):
    fn, options, arguments, _ = KINDS[kind]
    found = []
    for workers in (1, 4):
        jax.clear_caches()
        compiled = tpjax.compile(fn, **options)
        programs = compiled.precompile(*map(arguments, SHAPES), workers=workers)
        jaxprs = [str(compiled.jaxpr(*arguments(shape))) for shape in SHAPES]
        held = [str(e.jaxpr) for e in compiled.entries()]
        found.append((jaxprs, held, [program.as_text() for program in programs]))
    serial, parallel = found
    assert serial == parallel
    assert len(set(serial[2])) == len(SHAPES)


def test_calls_of_users_meanwhile():
    compiled = tpjax.compile(with_free_values, recompile_limit=32)
    sizes = range(2, 14)
    shapes = [(jax.ShapeDtypeStruct((n, 4), jnp.float32),) for n in sizes]
    arrays = [inputs(f"f32[{n},4]", n) for n in sizes]
    results: dict[int, Any] = {}
    errors: list[BaseException] = []

    def use(order: list[int]) -> None:
        try:
            for i in order:
                results[i] = compiled(arrays[i])
        except BaseException as error:
            errors.append(error)

    orders = (list(range(12)), list(range(11, -1, -1)))
    threads = [threading.Thread(target=use, args=(order,)) for order in orders]
    for thread in threads:
        thread.start()
    compiled.precompile(*shapes)
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(compiled.entries()) == len(sizes)
    assert_close(
        "results", [results[i] for i in range(12)], list(map(with_free_values, arrays)), 1e-6
    )


def test_arguments_by_name_and_of_methods():
    compiled = tpjax.compile(lambda x, y=1.0: x * y)
    compiled.precompile({"x": SHAPES[0], "y": 2.0}, (ARRAYS[1],))
    with compilations() as made:
        compiled(x=ARRAYS[0], y=3.0)
        compiled(ARRAYS[1])
    assert made == []


def test_nothing_to_compile():
    assert tpjax.compile(plain).precompile() == ()


def test_a_donated_argument_is_donated_later():
    compiled = tpjax.compile(jax.jit(lambda x: x + 1, donate_argnums=0))
    (program,) = compiled.precompile((SHAPES[0],))
    assert "input_output_alias" in program.as_text() or "donated" in program.as_text()
    x = ARRAYS[0] + 0
    with compilations() as made:
        compiled(x)
    assert made == []
    assert x.is_deleted()


@pytest.mark.parametrize("kernel", [not_lowered, not_compiled])
@pytest.mark.parametrize("keyed", [False, True])
def test_a_kernel_that_does_not_compile_is_left_out(kernel, keyed, monkeypatch):
    monkeypatch.setattr(
        implementations,
        "RMS_NORM",
        (Implementation("pallas", kernel), implementations.RMS_NORM[-1]),
    )
    failures._noted.clear()
    jax.clear_caches()
    options: Any = {"verify": True} if keyed else {}
    args = inputs("f32[4,16]", 0), inputs("f32[16]", 1)
    compiled = tpjax.compile(norm, **options)
    with pytest.warns(UserWarning, match="runs as written") as caught:
        compiled.precompile(args)
    assert len(caught) == 1
    with warnings.catch_warnings(), compilations() as made:
        warnings.simplefilter("error")
        result = compiled(*args)
    assert made == []
    assert_close("as written", result, norm(*args), 1e-6)
    with pytest.raises(StrictError, match="rms_norm"):
        tpjax.compile(norm, strict=True).precompile(args)
    jax.clear_caches()


BAD = {
    "an array": (lambda f: f.precompile(ARRAYS[0]), TypeError, r"calls\[0\] must be a tuple"),
    "a list": (lambda f: f.precompile((ARRAYS[0],), [1]), TypeError, r"calls\[1\] must be a tuple"),
    "no workers": (lambda f: f.precompile(workers=0), ValueError, "workers must be a number"),
    "half a worker": (lambda f: f.precompile(workers=0.5), ValueError, "workers must be"),
    "a word": (lambda f: f.precompile(("x",)), TypeError, "argument x of plain must be an array"),
    "too many": (lambda f: f.precompile((1, 2)), TypeError, "takes 1 positional argument"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input(what):
    do, kind, words = BAD[what]
    with pytest.raises(kind, match=words):
        do(tpjax.compile(plain))


def test_a_question_has_no_answer_for_a_shape():
    with pytest.raises(CaptureError, match=r"test_precompile.py:\d+ for the value of an array"):
        tpjax.compile(asks).precompile((SHAPES[0],))


def test_inside_a_transformation():
    compiled = tpjax.compile(plain)

    @jax.jit
    def outer(x: Any) -> Any:
        compiled.precompile((x,))
        return x

    with pytest.raises(RuntimeError, match="Call precompile outside of it"):
        outer(ARRAYS[0])


def test_it_says_what_the_argument_is():
    with pytest.raises(TypeError, match=re.escape("Write f.precompile((x, y), (x, z))")):
        tpjax.compile(plain).precompile({1: 2})  # pyright: ignore[reportArgumentType]
