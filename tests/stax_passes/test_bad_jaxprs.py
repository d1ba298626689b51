# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Jaxprs that no pass knows are left as they are, or come out right; none makes a pass fail."""

import sys
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

import tpjax
from tests.harness import assert_close, inputs
from tests.stax_passes.programs import as_function, assert_same_bits, evaluate
from tpjax.core import _jax
from tpjax.stax_passes.pipeline import CLEAN_UP, PASSES, optimize

X = inputs("f32[2,3]", 0)


def _optimized(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """Returns the jaxpr after all passes, each checked; a warning of a failed pass is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result, _ = optimize(jaxpr, verify=True)
        assert optimize(jaxpr)[0].out_avals == result.out_avals
    assert result.out_avals == jaxpr.out_avals
    return result


def _check(fn: Callable[..., Any], *args: Any) -> _jax.Jaxpr:
    jaxpr = jax.make_jaxpr(fn)(*args)
    result = _optimized(jaxpr)
    leaves = jax.tree.leaves(args)
    assert_same_bits("optimized", evaluate(result, *leaves), evaluate(jaxpr, *leaves))
    return result


# -- primitives that nobody has heard of ----------------------------------------------------------

twist_p = Primitive("twist")
twist_p.def_impl(lambda x, *, by: x * by)
twist_p.def_abstract_eval(lambda x, *, by: jax.typeof(x) if not hasattr(x, "shape") else x)
mlir.register_lowering(twist_p, mlir.lower_fun(lambda x, *, by: x * by, multiple_results=False))
ad.deflinear2(twist_p, lambda ct, x, *, by: [twist_p.bind(ct, by=by)])
batching.defvectorized(twist_p)


class _Odd:
    """A parameter that can be hashed, as JAX asks, and not compared."""

    __hash__ = object.__hash__

    def __rmul__(self, x: Any) -> Any:
        return x * 2

    def __eq__(self, other: object) -> bool:
        if other is self:
            return True
        raise TypeError("not comparable")


@pytest.mark.parametrize("by", [2.0, _Odd()], ids=["number", "odd"])
def test_unknown_primitives_stay(by: Any) -> None:
    def fn(x: Any) -> Any:
        a = twist_p.bind(x * 1.0, by=by)
        b = twist_p.bind(x, by=by)
        unused = twist_p.bind(b + 1, by=by)
        del unused
        inner = jax.jit(lambda y: twist_p.bind(jnp.negative(-y), by=by))(a)
        return a, b, inner, lax.scan(lambda c, _: (twist_p.bind(c, by=by), None), x, None, 2)[0]

    result = _check(fn, X)
    assert 2 <= str(result).count("twist[") <= 5


def test_unknown_primitives_compile_and_differentiate() -> None:
    fn = lambda x: twist_p.bind(x * 1.0, by=2.0) + twist_p.bind(x, by=2.0)  # noqa: E731
    compiled = tpjax.compile(fn)
    assert_close("value", compiled(X), 4 * X, 1e-6)
    assert_close("gradient", jax.grad(lambda x: compiled(x).sum())(X), jnp.full_like(X, 4), 1e-6)
    assert_close("vmap", jax.vmap(compiled)(X), 4 * X, 1e-6)


# -- effects, references, odd sizes and dtypes ----------------------------------------------------


def test_effects_of_every_kind_stay_in_order() -> None:
    seen: list[str] = []

    def note(name: str) -> Callable[..., Any]:
        def callback(x: Any) -> Any:
            seen.append(f"{name} {float(np.sum(x)):g}")
            return np.asarray(x)

        return callback

    def fn(x: Any) -> Any:
        jax.debug.callback(note("first"), x * 1.0, ordered=True)
        y = io_callback(note("second"), jax.typeof(x).update(weak_type=False), x, ordered=True)
        jax.debug.callback(note("third"), y + 1, ordered=True)

        def turn(c: Any, _: Any) -> Any:
            jax.debug.callback(note("turn"), c, ordered=True)
            return c + 1.0, None

        c, _ = lax.scan(turn, jnp.float32(0), None, 2)
        jax.debug.callback(note("last"), c, ordered=True)
        return x

    x = jnp.ones(2)
    jaxpr = jax.make_jaxpr(fn)(x)
    result = _optimized(jaxpr)
    assert result.effects == jaxpr.effects
    for run in (as_function(jaxpr), as_function(result), tpjax.compile(fn)):
        seen.clear()
        run(x)
        jax.effects_barrier()
        assert seen == ["first 2", "second 2", "third 4", "turn 0", "turn 1", "last 2"]


def test_references_keep_their_order() -> None:
    def fn(x: Any) -> Any:
        ref = jax.new_ref(x * 1.0)
        ref[0] = ref[1] * 1.0
        before = ref[...]
        ref[...] += 1
        lax.fori_loop(0, 2, lambda i, c: (ref.__setitem__(i, ref[i] * 2), c)[1], 0)
        return before, ref[...], jax.freeze(ref)

    jaxpr = jax.make_jaxpr(fn)(X)
    result = _optimized(jaxpr)
    expected = jax.jit(fn)(X)
    assert_close("optimized", tuple(as_function(result)(X)), expected, 0)
    assert_close("compiled", tpjax.compile(fn)(X), expected, 0)


def _mixed(x: Any) -> Any:
    one = np.asarray(1, x.dtype)
    y = jnp.transpose(jnp.reshape(x * one, x.shape))
    return y, jnp.concatenate([x.ravel(), x.ravel()]), jnp.where(x == x, x, x), x.astype(x.dtype)


DTYPES = (
    "float8_e4m3fn", "float8_e5m2", "int4", "uint4", "int2", "complex64", "float16", "bfloat16",
    "int8", "uint8", "int16", "uint16", "bool", "uint32",
)  # fmt: skip
SIZES = ((), (1,), (0,), (0, 3), (2, 0, 1), (2, 3))


@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_empty_arrays(dtype: str, shape: tuple[int, ...]) -> None:
    kind = getattr(jnp, "bool_" if dtype == "bool" else dtype)
    x = jnp.zeros(shape, kind)

    def fn(x: Any) -> Any:
        wide = lax.convert_element_type(x, jnp.complex64 if dtype == "complex64" else jnp.float32)
        back = lax.convert_element_type(wide, kind)
        return *_mixed(x), back, lax.bitcast_convert_type(x, x.dtype), wide + 0.0

    if dtype == "bool":
        fn = lambda x: (x, ~~x, x & True, lax.convert_element_type(x, jnp.int8))  # noqa: E731
    jaxpr = jax.make_jaxpr(fn)(x)
    result = _optimized(jaxpr)
    assert len(result.eqns) <= len(jaxpr.eqns)


def test_keys_are_no_numbers() -> None:
    def fn(key: Any, keys: Any) -> Any:
        same = jnp.reshape(jnp.reshape(keys, (2, 2)), (4,))
        back = jax.random.wrap_key_data(jax.random.key_data(key))
        both = jnp.where(jnp.asarray([True, False, True, False]), same, keys[::-1])
        picked = lax.dynamic_index_in_dim(jnp.stack([key, back]), 1, keepdims=False)
        turned = lax.scan(lambda k, _: (jax.random.split(k)[0], k), key, None, 3)
        held = lax.cond(True, lambda k: k, lambda k: jax.random.fold_in(k, 1), picked)
        other = jax.random.key(0), jax.random.key(0, impl="rbg")
        return same, both, picked, turned, held, other, jax.random.normal(key, (2,)), keys[:0]

    _check(fn, jax.random.key(0), jax.random.split(jax.random.key(1), 4))


def test_sizes_that_are_not_known_yet() -> None:
    """Symbolic sizes, as jax.export traces them, are no integers to reckon with."""
    (n,) = export.symbolic_shape("n")
    spec = jax.ShapeDtypeStruct((n, 3), jnp.float32)

    def fn(x: Any) -> Any:
        y = jnp.reshape(jnp.reshape(x * 1.0, (-1,)), x.shape) + jnp.zeros(x.shape)
        return jnp.transpose(jnp.transpose(y)), jnp.broadcast_to(1.0, x.shape) * y, x[:-1] + x[1:]

    exported = export.export(jax.jit(tpjax.compile(fn)))(spec)
    expected = fn(X)
    for actual, plain in zip(exported.call(X), expected, strict=True):
        assert_close("exported", actual, plain, 1e-6)


# -- long and deep --------------------------------------------------------------------------------


def _deep(levels: int, kinds: tuple[str, ...]) -> Callable[[Any], Any]:
    def at(level: int) -> Callable[[Any], Any]:
        if level == levels:
            return lambda x: jnp.sin(x * 1.0)
        inner = at(level + 1)
        match kinds[level % len(kinds)]:
            case "jit":
                return jax.jit(lambda x: inner(x) + 0.5)
            case "scan":
                return lambda x: lax.scan(lambda c, _: (inner(c), None), x, None, length=1)[0]
            case "cond":
                return lambda x: lax.cond(x[0, 0] > 9, lambda y: y, inner, x)
            case "while":
                return lambda x: lax.while_loop(
                    lambda s: s[0] < 1, lambda s: (s[0] + 1, inner(s[1])), (0, x)
                )[1]
            case _:
                return jax.checkpoint(inner)

    return at(0)


@pytest.mark.parametrize("kind", ["jit", "scan", "cond", "while", "checkpoint"])
def test_control_flow_nested_fifty_deep(kind: str) -> None:
    fn = _deep(50, (kind,))
    jaxpr = jax.make_jaxpr(fn)(X)
    result = _optimized(jaxpr)
    assert "mul" not in str(_innermost(result))
    assert_same_bits("deep", evaluate(result, X), evaluate(jaxpr, X))


def _innermost(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    while bodies := [b for eqn in jaxpr.eqns for b in _jax.all_subjaxprs(eqn) if b.eqns]:
        jaxpr = bodies[-1]
    return jaxpr


@pytest.mark.slow
def test_control_flow_nested_two_hundred_deep() -> None:
    fn = _deep(200, ("jit", "scan", "checkpoint"))
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)  # JAX's own tracing of it recurses
    try:
        jaxpr = jax.make_jaxpr(fn)(X)
    finally:
        sys.setrecursionlimit(limit)
    result, _ = optimize(jaxpr, (CLEAN_UP,))
    assert len(str(len(result.eqns))) > 0


def _chain(length: int) -> _jax.Jaxpr:
    """A chain of equations, made of one: tracing so many would take most of a minute."""
    jaxpr = jax.make_jaxpr(lambda x: jnp.sin(x))(X)
    eqns, var = [], jaxpr.invars[0]
    for _ in range(length):
        new = _jax.Var(var.aval)
        eqns.append(jaxpr.eqns[0].replace(invars=[var], outvars=[new]))
        var = new
    return jaxpr.replace(eqns=eqns, outvars=[var])


def test_a_chain_of_fifty_thousand_equations() -> None:
    jaxpr = _chain(50_000)
    for entry in PASSES:
        passes = entry if isinstance(entry, tuple) else (entry,)
        for run in passes:
            result, report = run(jaxpr)
            assert result is jaxpr, report
    dead = jaxpr.replace(outvars=[jaxpr.eqns[10].outvars[0]])
    result, _ = optimize(dead, (CLEAN_UP,))
    assert len(result.eqns) == 11


@pytest.mark.slow
def test_fifty_thousand_equations_through_everything() -> None:
    result = _optimized(_chain(50_000))
    assert len(result.eqns) == 50_000
