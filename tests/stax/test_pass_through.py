# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""What the compiler does not know, or must not touch, stays: values, gradients, effects, refs."""

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import checkify, io_callback

import tpjax
from tests.harness import assert_close, inputs
from tests.stax.forms import FORMS, NO_GRAD, NO_VMAP, powered, sine
from tests.stax.functions import TOL, block, choices_of, norm, operators_of, params

Fn = Callable[..., Any]

QUICK = {"xla_backend_optimization_level": 0}


def _norm(x: jax.Array) -> jax.Array:
    return norm(x, jnp.ones(x.shape[-1]))


def _between(form: Fn) -> Fn:
    """Returns the form with a norm before and after it, which a rewrite must still find."""
    return lambda x, scale: norm(form(norm(x, scale)), scale)


def _uses(name: str, fn: Fn) -> Fn:
    """Returns the value of a form and, where JAX has them, its gradients and a batch of it."""

    def of(x: jax.Array, scale: jax.Array) -> dict[str, Any]:
        result = {"value": fn(x, scale)}
        if name not in NO_GRAD:
            total = lambda *args: jnp.sum(jnp.sin(fn(*args)))  # noqa: E731
            result["gradient"] = jax.grad(total, (0, 1))(x, scale)
        if name not in NO_VMAP:
            result["batch"] = jax.vmap(fn, (0, None))(jnp.stack([x, 2 * x]), scale)
        return result

    return of


@pytest.mark.parametrize("name", FORMS)
def test_forms_pass_through(name: str) -> None:
    fn, args = _between(FORMS[name]), (0.5 * inputs("f32[4,8]", 1), inputs("f32[8]", 2))
    both = jax.jit(
        lambda *a: (_uses(name, tpjax.compile(fn))(*a), _uses(name, fn)(*a)), compiler_options=QUICK
    )
    (actual, expected), choices = choices_of(both, *args)
    assert_close(name, actual, expected, 10 * TOL)
    assert {choice.op for choice in choices} == {"rms_norm"}
    assert_close(f"{name}, called outside", tpjax.compile(fn)(*args), expected["value"], 10 * TOL)


# -- forms behind JAX's flags ---------------------------------------------------------------------


def _ruled(p: Any, x: jax.Array) -> jax.Array:
    return powered(2, block(p, sine(x)))


def _looped(p: Any, x: jax.Array) -> jax.Array:
    return lax.scan(lambda h, shift: (_ruled(p, h + shift), None), x, jnp.arange(2.0))[0]


def _saved(p: Any, x: jax.Array) -> jax.Array:
    named = lambda p, x: checkpoint_name(_ruled(p, x), "kept")  # noqa: E731
    policy = jax.checkpoint_policies.save_only_these_names("kept")
    return jax.checkpoint(named, policy=policy)(p, jax.checkpoint(_ruled)(p, x))


def _grad(fn: Fn) -> Fn:
    return jax.value_and_grad(lambda p, x: jnp.sum(jnp.sin(fn(p, x))), (0, 1))


FLAGS: dict[str, dict[str, Fn]] = {
    "jax_scan3": {"scan": _looped},  # which JAX itself neither differentiates nor batches yet
    "jax_remat3": {"checkpoint": _grad(_saved)},
    "jax_custom_vjp3": {"gradient": _grad(_ruled), "in a scan": _grad(_looped)},
    "jax_custom_jvp3": {"gradient": _grad(_ruled), "in a scan": _grad(_looped)},
}
"""JAX's flags for new forms of equations, and what is written with those."""


@pytest.fixture
def flag(request: pytest.FixtureRequest) -> Iterator[str]:
    """Switches the flag on, which every cache of JAX's notes."""
    jax.config.update(request.param, True)
    yield request.param
    jax.config.update(request.param, False)


@pytest.mark.parametrize("flag", FLAGS, indirect=True)
def test_forms_behind_flags(flag: str) -> None:
    args = params(), inputs("f32[12,16]", 9)
    for name, fn in FLAGS[flag].items():
        assert "3" in str(jax.make_jaxpr(fn)(*args)), f"{flag} makes no new form in {name}"
        both = jax.jit(lambda *a, fn=fn: (tpjax.compile(fn)(*a), fn(*a)), compiler_options=QUICK)
        actual, expected = both(*args)
        assert_close(f"{flag}, {name}, around", actual, expected, 10 * TOL)


@pytest.mark.parametrize("flag", FLAGS, indirect=True)
def test_flags_around_a_compiled_function(flag: str) -> None:
    def both(*args: Any) -> Any:
        def uses(fn: Fn) -> Any:
            loop = lambda x: lax.scan(lambda h, _: (fn(args[0], h), None), x, length=2)[0]  # noqa: E731
            if flag == "jax_scan3":
                return loop(args[1])
            return _grad(lambda p, x: sine(loop(jax.checkpoint(fn)(p, x))))(*args)

        return uses(tpjax.compile(_ruled)), uses(_ruled)

    args = params(), inputs("f32[12,16]", 9)
    (actual, expected), choices = choices_of(jax.jit(both, compiler_options=QUICK), *args)
    assert_close(f"around, {flag}", actual, expected, 10 * TOL)
    assert {choice.op for choice in choices} == {"rms_norm", "flash_attention"}


# -- effects --------------------------------------------------------------------------------------

Say = Callable[..., None]


def _in_a_scan(say: Say, x: jax.Array) -> jax.Array:
    def body(h: jax.Array, i: jax.Array) -> Any:
        say("scan", i, h.sum() > -100)
        return h * 2.0, None

    return lax.scan(body, x, jnp.arange(3))[0]


def _in_a_while(say: Say, x: jax.Array) -> jax.Array:
    def body(i: jax.Array, h: jax.Array) -> jax.Array:
        say("while", i)
        return h + 1.0

    return lax.fori_loop(0, jnp.int32(x.size % 7), body, x)


def _in_a_branch(say: Say, x: jax.Array) -> jax.Array:
    def branch(name: str) -> Fn:
        return lambda x: (say(name), x * 2.0)[1]

    y = lax.cond(x[0, 0] < 100, branch("yes"), branch("no"), x)
    return lax.switch(jnp.int32(x.size % 3), [branch("0"), branch("1"), branch("2")], y)


def _in_calls(say: Say, x: jax.Array) -> jax.Array:
    def call(x: jax.Array) -> jax.Array:
        say("inside")
        return x + 1.0

    jax.jit(call)(x)  # nothing reads the result
    return jax.jit(jax.jit(call))(jax.jit(call)(x))


def _dead(say: Say, x: jax.Array) -> jax.Array:
    say("value", jnp.sum(x * 0 + 3))
    say("sum", (x > 1000).any())
    return jnp.zeros_like(x) + 1.0


def _equal(say: Say, x: jax.Array) -> jax.Array:
    say("again", x.shape[0] * jnp.ones(()))
    y = x * 2.0
    say("again", x.shape[0] * jnp.ones(()))
    say("again", x.shape[0] * jnp.ones(()))
    return y


def _between_writes(say: Say, x: jax.Array) -> jax.Array:
    ref = jax.new_ref(jnp.zeros(()))
    say("before", ref[...])
    ref[...] = 1.0
    say("between", ref[...])
    ref[...] += 1.0
    say("after", ref[...])
    return x


EFFECTS: dict[str, Callable[[Say, jax.Array], jax.Array]] = {
    "scan": _in_a_scan,
    "while": _in_a_while,
    "branches": _in_a_branch,
    "calls": _in_calls,
    "nothing reads it": _dead,
    "equal ones": _equal,
    "between writes": _between_writes,
    "known values": lambda say, x: (say("known", jnp.arange(3) + 1), x)[1],
}
"""Functions that say something on the way."""


def _log_of(fn: Fn, ordered: bool, transform: Fn, x: jax.Array) -> tuple[list[Any], Any]:
    log: list[Any] = []

    def say(what: str, *values: Any) -> None:
        note = lambda *values: log.append((what, *(np.asarray(v).tolist() for v in values)))  # noqa: E731
        io_callback(note, None, *values, ordered=ordered)

    run = transform(lambda x: _norm(fn(say, _norm(x))))
    results = [jax.block_until_ready(run(x)) for _ in range(2)]
    jax.effects_barrier()
    return log, results


@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "unordered"])
@pytest.mark.parametrize("name", EFFECTS)
def test_effects_happen_once_and_in_order(name: str, ordered: bool) -> None:
    x = inputs("f32[4,8]", 1)
    said, expected = _log_of(EFFECTS[name], ordered, jax.jit, x)
    assert said
    for where, transform in (
        ("outside", tpjax.compile),
        ("inside", lambda f: jax.jit(tpjax.compile(f))),
        ("twice", lambda f: tpjax.compile(lambda x: tpjax.compile(f)(x))),
    ):
        log, results = _log_of(EFFECTS[name], ordered, transform, x)
        key = str if not ordered else lambda _: 0
        assert sorted(log, key=key) == sorted(said, key=key), where
        assert_close(f"{name}, {where}", results, expected, TOL)


def test_effects_under_transformations() -> None:
    def fn(say: Say, x: jax.Array) -> jax.Array:
        say("row", x.sum() > -1000)
        return _norm(x * 2.0)

    transforms: dict[str, Fn] = {
        "vmap": lambda f: jax.jit(jax.vmap(f)),
        "grad": lambda f: jax.jit(jax.grad(lambda x: f(x).sum())),
    }
    for name, transform in transforms.items():
        said, _ = _log_of(fn, False, transform, inputs("f32[4,8]", 1))
        inside, _ = _log_of(fn, False, lambda f: transform(tpjax.compile(f)), inputs("f32[4,8]", 1))  # noqa: B023
        around, _ = _log_of(fn, False, lambda f: tpjax.compile(transform(f)), inputs("f32[4,8]", 1))  # noqa: B023
        assert said
        assert inside == around == said, name


def test_a_callback_with_results_is_called_for_each() -> None:
    calls: list[int] = []

    def count() -> Any:
        calls.append(1)
        return np.int32(len(calls))

    @tpjax.compile
    def thrice(x: jax.Array) -> Any:
        ask = lambda: io_callback(count, jax.ShapeDtypeStruct((), jnp.int32), ordered=True)  # noqa: E731
        first, _, third = ask(), ask(), ask()
        return _norm(x), first, third

    _, first, third = thrice(inputs("f32[4,8]", 1))
    assert (int(first), int(third), len(calls)) == (1, 3, 3)


def test_debug_print(capfd: pytest.CaptureFixture[str]) -> None:
    @tpjax.compile
    def prints(x: jax.Array) -> jax.Array:
        jax.debug.print("first {}", x.shape[0], ordered=True)
        y = _norm(x)
        jax.debug.print("second {}", y.size + 0 * jnp.int32(y.sum()), ordered=True)
        return y

    for _ in range(2):
        prints(inputs("f32[4,8]", 1))
    jax.effects_barrier()
    assert capfd.readouterr().out.splitlines() == ["first 4", "second 32"] * 2


# -- references and checks ------------------------------------------------------------------------


def test_references_given_and_closed_over() -> None:
    def push(total: Any, x: jax.Array) -> jax.Array:
        total[...] += _norm(x)
        total[0] = total[0] * 2.0
        return total[...] * 1.0

    x = inputs("f32[4,8]", 1)
    ours, theirs, closed = (jax.new_ref(jnp.ones((4, 8))) for _ in range(3))
    compiled, plain = tpjax.compile(push), jax.jit(push)
    captured = tpjax.compile(lambda x: push(closed, x))
    under_jit = jax.jit(lambda ref, x: compiled(ref, x))
    for _ in range(2):
        expected = plain(theirs, x)
        assert_close("result", compiled(ours, x), expected, TOL)
        assert_close("reference", ours[...], theirs[...], TOL)
        assert_close("closed over", captured(x), expected, TOL)
    assert_close("under jit", under_jit(ours, x), plain(theirs, x), TOL)
    assert_close("reference, under jit", ours[...], theirs[...], TOL)


def test_checkify_around_and_inside() -> None:
    def checked(x: jax.Array) -> jax.Array:
        checkify.check(jnp.all(x > 0), "not positive: {}", x.min())
        return _norm(jnp.log(x))

    good, bad = jnp.abs(inputs("f32[4,8]", 1)) + 1, -jnp.ones((4, 8))
    errors = checkify.user_checks | checkify.nan_checks
    around = checkify.checkify(tpjax.compile(checked), errors=errors)
    within = tpjax.compile(checkify.checkify(checked, errors=errors))
    for name, run in (("around", jax.jit(around)), ("inside", within)):
        error, y = run(good)
        assert error.get() is None
        assert_close(name, y, _norm(jnp.log(good)), TOL)
        assert "not positive: -1" in str(run(bad)[0].get()), name


# -- the object -----------------------------------------------------------------------------------


def test_G14_pickling_gives_a_clear_error() -> None:
    compiled = tpjax.compile(block)
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"block is compiled .* Pickle the function"):
            attempt(compiled)


def test_G14_compiled_in_compiled_in_jit() -> None:
    inner = tpjax.compile(block)
    middle = tpjax.compile(lambda p, x: inner(p, inner(p, x)) * 2.0)
    outer = tpjax.compile(lambda p, x: middle(p, x) + inner(p, x))
    plain = lambda p, x: block(p, block(p, x)) * 2.0 + block(p, x)  # noqa: E731
    args = params(), inputs("f32[12,16]", 9)
    expected = jax.jit(plain)(*args)
    jitted = jax.jit(lambda p, x: outer(p, x))
    assert_close("outside", outer(*args), expected, TOL)
    assert_close("jit", jitted(*args), expected, TOL)
    found = operators_of(jax.make_jaxpr(jitted)(*args))
    # inner(p, x) stands twice, and is computed once.
    assert found == {"rms_norm": 2, "flash_attention": 2}


def test_state_of_libraries_is_no_free_value() -> None:
    """A function of JAX's own names what JAX is made of; none of that is read at each call."""
    x = inputs("f32[4,8]", 1)
    for fn in (jax.nn.softmax, checkify.checkify(_norm), jax.vmap(_norm)):
        compiled = tpjax.compile(fn)
        compiled(x)
        assert len(compiled.entries()[0].signature) < 100, fn
