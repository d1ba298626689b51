# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of jaxprs: the same in every process, another one for every other program."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.harness import ROOT, inputs
from tpjax.core import fingerprints as module
from tpjax.core.fingerprints import UnstableError, fingerprint

X, Y = inputs("f32[4,4]", 0), inputs("f32[4,4]", 1)


def of(fn: Callable[..., Any], *args: Any) -> str:
    """Returns the fingerprint of the traced function."""
    return fingerprint(jax.make_jaxpr(fn)(*args))


def _half(x):
    return x / 2


def _halved(name: str) -> Callable[..., Any]:
    """Returns a function whose rule, alike in all but identity, has that name."""

    def backward(_, g):
        return (g / 2,)

    backward.__qualname__ = backward.__name__ = name
    rule = jax.custom_vjp(_half)
    rule.defvjp(lambda x: (_half(x), None), backward)
    return rule


def _scan(length: int, step: float) -> Callable[..., Any]:
    return lambda x, y: lax.scan(lambda c, _: (c * step, c.sum()), x, None, length=length)


_CONSTANT = np.arange(16, dtype=np.float32).reshape(4, 4)
_OTHER = _CONSTANT + (_CONSTANT == 15)
# Written on one line each, as the line of the user counts.
PAIRS = {
    "a literal": [lambda x, y, v=v: x + v for v in (1.0, 2.0)],
    "a sign of zero": [lambda x, y, v=v: x + v for v in (0.0, -0.0)],
    "a type of literal": [lambda x, y, v=v: jnp.where(x > 0, v, v) for v in (1, 1.0)],
    "wiring": [lambda x, y, s=s: x - y if s else y - x for s in (True, False)],
    "one operand twice": [lambda x, y, s=s: jnp.sin(x) + jnp.sin(x if s else y) for s in (1, 0)],
    "a primitive": [lambda x, y, f=f: f(x, y) for f in (lax.max, lax.min)],
    "a parameter": [lambda x, y, a=a: lax.rev(x, (a,)) for a in (0, 1)],
    "a dtype": [lambda x, y, d=d: x.astype(d) for d in (jnp.bfloat16, jnp.float16)],
    "a precision": [lambda x, y, p=p: jnp.dot(x, y, precision=p) for p in ("highest", "high")],
    "a constant": [lambda x, y, c=c: x + c for c in (_CONSTANT, _OTHER)],
    "a jax array": [lambda x, y, c=c: x + c for c in (X, Y)],
    "an output": [lambda x, y, s=s: (x, y) if s else (y, x) for s in (True, False)],
    "more outputs": [lambda x, y, s=s: (x,) * s for s in (1, 2)],
    "a body": [_scan(3, step) for step in (0.5, 0.25)],
    "a length": [_scan(length, 0.5) for length in (3, 4)],
    "a branch": [lambda x, y, f=f: lax.cond(True, f, lax.cos, x) for f in (lax.sin, lax.tan)],
    "a name of a rule": [lambda x, y, f=f: f(x) for f in map(_halved, "ab")],
    "a name of a jit": [lambda x, y, f=f: f(x) for f in (jax.jit(jnp.sinh), jax.jit(jnp.cosh))],
    "an effect": [lambda x, y, s=s: (jax.debug.print("{}", x) if s else None, x) for s in (1, 0)],
    "a key": [lambda x, y, s=s: jax.random.normal(jax.random.key(s)) for s in (1, 2)],
    "shared or not": [lambda x, y, f=f: f[0](x) + f[1](x) for f in ([jax.jit(jnp.sin)] * 2, [jax.jit(lambda x: jnp.sin(x)), jax.jit(lambda x: jnp.sin(x))])],  # noqa: E501
}  # fmt: skip


@pytest.mark.parametrize("what", PAIRS)
def test_other_programs_have_others(what):
    first, second = PAIRS[what]
    assert of(first, X, Y) != of(second, X, Y)
    assert of(first, X, Y) == of(first, X, Y)


def test_a_rule_of_the_same_name_is_the_same():
    first, second = (lambda x, f=f: f(x) for f in map(_halved, "aa"))
    assert of(first, X) == of(second, X)


def test_types_of_inputs_count():
    shapes = [
        X, inputs("f32[4,5]", 0), inputs("bf16[4,4]", 0),
        jax.ShapeDtypeStruct((4, 4), jnp.float32, weak_type=True),
    ]  # fmt: skip
    found = [of(lambda x: x[0] + x[0], x) for x in shapes]
    assert len(set(found)) == len(shapes)


def test_the_line_of_the_user_counts():
    def one(x):
        return x + 1.0

    def two(x):
        return x + 1.0

    assert of(one, X) != of(two, X)


def test_names_and_tracing_again_do_not_count():
    def fn(x):
        return jnp.sin(x) + inner(x)

    def inner(x):
        return jax.nn.silu(x)

    one = of(fn, X)
    jax.clear_caches()
    of(lambda x: x * 3, Y)
    assert of(fn, X) == one


ZOO = """
import jax.experimental.pallas as pl
from jax.scipy.sparse.linalg import cg
from jax.experimental.custom_partitioning import custom_partitioning

def kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2

def written(x):
    ref = jax.new_ref(x)
    ref[0] = ref[1] + 1
    return ref[...]

@jax.custom_jvp
def third(x):
    return x / 3
third.defjvp(lambda p, t: (third(*p), t[0] / 3))

f8 = jnp.ones((4, 4), jnp.float8_e4m3fn)
ZOO = {
    "kernel": lambda x: pl.pallas_call(kernel, out_shape=x, interpret=True)(x),
    "reference": written,
    "solve": lambda x: cg(lambda v: x @ x.T @ v + v, x[0])[0],
    "callback": lambda x: jax.pure_callback(lambda v: np.asarray(v), x, x),
    "io": lambda x: jax.experimental.io_callback(print, None, x, ordered=True),
    "ffi": lambda x: jax.ffi.ffi_call("none", jax.typeof(x))(x, mode=np.int32(3)),
    "jvp": lambda x: jax.jvp(third, (x,), (x,)),
    "conv": lambda x: lax.conv(x[None, None], x[None, None, :2, :2], (1, 1), "SAME"),
    "gather": lambda x: x.at[jnp.array([0, 2])].add(1.0)[jnp.array([1])],
    "linear algebra": lambda x: (jnp.linalg.eigh(x), jnp.linalg.svd(x), jnp.fft.fft(x)),
    "sorts": lambda x: (jnp.sort(x), lax.top_k(x, 2), jnp.cumsum(x), lax.reduce_window(
        x, 0.0, lax.add, (2, 2), (1, 1), "SAME")),
    "keys": lambda x: jax.random.split(jax.random.wrap_key_data(jnp.zeros(2, jnp.uint32))),
    "types": lambda x: (x.astype(jnp.int4), x + f8.astype(jnp.float32), x.astype(jnp.complex64)),
    "empty": lambda x: jnp.zeros((0, 3)) @ jnp.ones((3, 0)),
    "map": lambda x: lax.associative_scan(jnp.add, lax.map(jnp.sin, x)),
    "switch": lambda x: lax.switch(x[0, 0].astype(int), [jnp.sin, jnp.cos, jnp.tan], x),
    "names": lambda x: jax.checkpoint(
        lambda v: jax.ad_checkpoint.checkpoint_name(jnp.sin(v), "s"),
        policy=jax.checkpoint_policies.save_only_these_names("s"))(x),
}
square = jnp.ones((4, 4))
for name, one in ZOO.items():
    print(name.replace(" ", "_") + ":" + fingerprint(jax.make_jaxpr(one)(square)))
"""
PROCESS = """
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from tpjax.core.fingerprints import fingerprint
from tests.stax.functions import norm
c, k = np.arange(12.0).reshape(3, 4), jax.random.key(3)

@jax.custom_vjp
def half(x):
    return x / 2
half.defvjp(lambda x: (x / 2, None), lambda _, g: (g / 2,))

def fn(x, s):
    y = half(norm(x, s)) + jax.nn.softmax(x @ c, -1) @ c.T + jax.random.normal(k, x.shape)
    y, total = lax.scan(lambda a, b: (a * b, a.sum()), y, jnp.arange(3.0))
    y = lax.while_loop(lambda a: a.sum() < 10, lambda a: a + 1, y)
    y = jax.checkpoint(lambda a: jnp.where(a > 0, a, jnp.nan))(y)
    jax.debug.print("{}", total.sum())
    return jnp.einsum("ij,kj->ik", y, y), jax.grad(lambda a: half(a).sum())(x)

mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
split = jax.shard_map(lambda a: lax.psum(a, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())
x, s = jnp.ones((4, 3)), jnp.ones(3)
jaxpr = jax.make_jaxpr(fn)(x, s)
from tpjax.stax_passes.pipeline import optimize
print(fingerprint(jaxpr), fingerprint(optimize(jaxpr)[0]), fingerprint(jax.make_jaxpr(split)(x)))
"""


def test_F05_every_process_finds_the_same():
    found = set()
    for seed in ("1", "2", "3"):
        env = dict(os.environ, PYTHONHASHSEED=seed, JAX_NUM_CPU_DEVICES="4", PYTHONPATH=str(ROOT))
        command = [sys.executable, "-c", PROCESS + ZOO]
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        found.add(done.stdout)
    assert len(found) == 1
    words = found.pop().split()
    assert len(set(words)) == len(words) > 3


def test_long_and_deep_programs():
    def long(x):
        for i in range(5000):
            x = lax.sin(x) if i % 3 else lax.add(x, x)
        return x

    def deep(x):
        body = lax.sin
        for _ in range(60):
            body = lambda x, inner=body: lax.cond(x > 0, inner, lax.cos, x)  # noqa: E731
        return body(x)

    assert of(long, 1.0) != of(deep, 1.0)


def test_a_constant_without_a_value_is_told_by_its_place():
    found = []

    @jax.jit
    def outer(y):
        found.append(of(lambda x: x + y, X))
        found.append(of(lambda x: x + y, X))
        return y

    outer(Y)
    assert len(set(found)) == 2  # of two lines
    jaxprs = []

    @jax.jit
    def again(y):
        jaxprs.append(of(lambda x: x + y, X))
        return y

    again(Y)
    again(inputs("f32[1,4]", 0))
    assert len(set(jaxprs)) == 2


def test_it_leaves_no_trace_in_a_program_around_it():
    keys = jax.random.key(3)
    found = []

    def outer(y):
        found.append(of(lambda x: x + jax.random.uniform(keys), X))
        return y

    assert jax.make_jaxpr(outer)(Y).eqns == []
    outer(Y)
    assert found[0] == found[1]


def test_too_many_constants_have_none(monkeypatch):
    monkeypatch.setattr(module, "MAX_CONSTANT_BYTES", 100)
    with pytest.raises(UnstableError, match="more than 100 bytes of constants"):
        of(lambda x: x + _CONSTANT + _OTHER, X)


def test_a_constant_that_is_gone_has_none():
    gone = jnp.ones((4, 4))
    jaxpr = jax.make_jaxpr(lambda x: x + gone)(X)
    gone.delete()
    with pytest.raises(UnstableError, match="cannot be read"):
        fingerprint(jaxpr)
