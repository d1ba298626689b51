# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Equations that no pass knows, or must not touch, as functions from [4, 8] to [4, 8] floats."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import checkify, hijax, sparse
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Fn = Callable[..., Any]

# -- primitives made here -------------------------------------------------------------------------

triple_p = Primitive("triple")
triple_p.def_impl(lambda x: 3.0 * x)
triple_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(triple_p, mlir.lower_fun(lambda x: 3.0 * x, multiple_results=False))
ad.deflinear2(triple_p, lambda g, x: [triple_p.bind(g)])
batching.defvectorized(triple_p)

split_p = Primitive("split_in_two")
split_p.multiple_results = True


def _halves(x: jax.Array, *, row: int) -> list[jax.Array]:
    return [x[:row], x[row:]]


@split_p.def_abstract_eval
def _(x: Any, *, row: int) -> list[Any]:
    return [x.update(shape=(n, *x.shape[1:])) for n in (row, x.shape[0] - row)]


split_p.def_impl(_halves)
mlir.register_lowering(split_p, mlir.lower_fun(_halves, multiple_results=True))


def _split_jvp(primals: Any, tangents: Any, *, row: int) -> Any:
    return split_p.bind(*primals, row=row), _halves(*map(ad.instantiate_zeros, tangents), row=row)


ad.primitive_jvps[split_p] = _split_jvp


class Cube(hijax.HiPrim):
    """x ** 3 with a derivative of its own: 5 x ** 2."""

    def __init__(self, aval: Any) -> None:
        self.in_avals, self.out_aval, self.params = (aval,), aval, {}
        super().__init__()

    def expand(self, x: Any) -> Any:
        return x * x * x

    def vjp_fwd(self, nzs_in: Any, x: Any) -> Any:
        return self(x), x

    def vjp_bwd_retval(self, res: Any, outgrad: Any) -> Any:
        return (5.0 * res * res * outgrad,)

    def batch(self, axis_data: Any, args: Any, dims: Any) -> Any:
        return Cube(jax.typeof(args[0]))(*args), dims[0]


# -- functions with rules of their own ------------------------------------------------------------


@jax.custom_jvp
def sine(x: jax.Array) -> jax.Array:
    """Returns sin(x), whose derivative is said to be 2 cos(x)."""
    return jnp.sin(x)


sine.defjvp(lambda x, t: (jnp.sin(x[0]), 2.0 * jnp.cos(x[0]) * t[0]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def powered(power: int, x: jax.Array) -> jax.Array:
    """Returns x ** power, whose derivative is said to be 7."""
    return x**power


powered.defvjp(lambda power, x: (x**power, x), lambda power, x, g: (7.0 * g,))


@jax.custom_batching.custom_vmap
def plus_one(x: jax.Array) -> jax.Array:
    """Returns x + 1, and x + 2 when it is batched."""
    return x + 1.0


plus_one.def_vmap(lambda size, batched, x: (x + 2.0, batched[0]))


def _root(x: jax.Array) -> jax.Array:
    newton = lambda f, guess: lax.fori_loop(  # noqa: E731
        0, 20, lambda i, y: y - f(y) / (3 * y * y + 1), guess
    )
    return lax.custom_root(
        lambda y: y**3 + y - x, jnp.zeros_like(x), newton, lambda g, y: y / g(jnp.ones_like(y))
    )


def _kernel(x_ref: Any, o_ref: Any) -> None:
    o_ref[...] = x_ref[...] * 2.0


def _pallas(x: jax.Array) -> jax.Array:
    call = pl.pallas_call(_kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)
    return x + lax.stop_gradient(call(lax.stop_gradient(x)))


# -- references -----------------------------------------------------------------------------------


def _reference(x: jax.Array) -> jax.Array:
    ref = jax.new_ref(x)
    ref[0] = ref[0] * 2.0
    ref[1:] += 1.0
    ref[0] = ref[0] * 2.0
    return jax.freeze(ref)


def _reference_in_a_loop(x: jax.Array) -> jax.Array:
    ref = jax.new_ref(jnp.zeros_like(x))

    def body(i: jax.Array, carry: jax.Array) -> jax.Array:
        ref[i] = x[i] * carry
        return carry + 1.0

    lax.fori_loop(0, 4, body, 1.0)
    return ref[...] + ref[...]


# -- the table ------------------------------------------------------------------------------------


def _checked(x: jax.Array) -> jax.Array:
    def positive(x: jax.Array) -> jax.Array:
        checkify.check(jnp.all(x > -100), "too small: {x}", x=x.min())
        return x * 2.0

    error, y = checkify.checkify(positive)(x)
    return y + (error.get is None)


def _keys(x: jax.Array) -> jax.Array:
    keys = jax.random.split(jax.random.key(3), 4)
    again = jax.random.wrap_key_data(jax.random.key_data(keys))
    folded = jax.vmap(jax.random.fold_in)(keys, jnp.arange(4))
    draw = jax.vmap(lambda key: jax.random.normal(key, (8,)))
    choose = jnp.where(jnp.arange(4) < 2, again, folded)
    return x * draw(keys) + draw(choose) + draw(keys[::-1])


def _ragged(x: jax.Array) -> jax.Array:
    weights = jnp.arange(128.0).reshape(2, 8, 8) / 64
    return lax.ragged_dot(x, weights, jnp.array([1, 3]))


def _solve(x: jax.Array) -> jax.Array:
    matrix = x[:, :4] @ x[:, :4].T + 10 * jnp.eye(4)
    return jnp.linalg.solve(matrix, x) + jax.scipy.linalg.cho_solve(
        (jnp.linalg.cholesky(matrix), False), x
    )


def _callback(x: jax.Array) -> jax.Array:
    double = lambda x: np.asarray(x) * np.float32(2)  # noqa: E731
    made = jax.pure_callback(double, jax.typeof(x), lax.stop_gradient(x), vmap_method="sequential")
    return x * made


def _sparse(x: jax.Array) -> jax.Array:
    return sparse.BCOO.fromdense(jnp.eye(4) + jnp.eye(4, k=1), nse=7) @ x


FORMS: dict[str, Fn] = {
    "own primitive": triple_p.bind,
    "own primitive of two results": lambda x: jnp.concatenate(split_p.bind(x, row=1)[::-1]),
    "hijax primitive": lambda x: Cube(jax.typeof(x))(x),
    "custom_jvp": sine,
    "custom_vjp": functools.partial(powered, 2),
    "custom_vmap": lambda x: plus_one(x) + jax.vmap(plus_one)(x),
    "sequential_vmap": lambda x: jax.vmap(jax.custom_batching.sequential_vmap(jnp.tanh))(x),
    "custom_root": _root,
    "pure_callback": _callback,
    "checkify": _checked,
    "reference": _reference,
    "reference in a loop": _reference_in_a_loop,
    "optimization_barrier": lambda x: lax.optimization_barrier((x, x + 0.0))[1],
    "ragged_dot": _ragged,
    "key arrays": _keys,
    "pallas_call": _pallas,
    "linear algebra": _solve,
    "sparse": _sparse,
    "fft": lambda x: jnp.fft.irfft(jnp.fft.rfft(x) * 2j, 8),
    "complex": lambda x: jnp.real(lax.complex(x, x * x) * lax.complex(x, 2.0 * x)),
    "convolution": lambda x: lax.conv_general_dilated(
        x[None],
        jnp.sin(jnp.arange(192.0)).reshape(3, 8, 8),
        (1,),
        "SAME",
        dimension_numbers=("NWC", "WIO", "NWC"),
    )[0],
    "sort of several": lambda x: lax.sort((x, x * x), num_keys=1)[1],
    "top_k": lambda x: jnp.tile(lax.top_k(x, 4)[0], 2),
    "reduce_window": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 3), (1, 1), "SAME"),
    "scatter": lambda x: x.at[jnp.array([0, 0, 2])].add(x[1:]).at[:, 3].mul(2.0),
    "associative_scan": lambda x: lax.associative_scan(jnp.add, x, axis=0) + jnp.cumsum(x, 1),
    "composite": lambda x: (
        lax.composite(lambda x: jnp.tanh(x), "my.tanh")(lax.stop_gradient(x)) + x
    ),
    "platform_dependent": lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos),
    "switch": lambda x: lax.switch(
        jnp.int32(x[0, 0]), [jnp.sin, jnp.cos, lambda x: x * 2.0, lambda x: -x], x
    ),
    "named_scope": lambda x: jax.named_call(jnp.tanh, name="here")(x),
    "checkpoint_name": lambda x: checkpoint_name(x * 2.0, "kept"),
    "jit with donation": lambda x: jax.jit(lambda x: x * 3.0, donate_argnums=0)(x),
    "reduce_precision": lambda x: lax.reduce_precision(x, 8, 7),
    "linear_transpose": lambda x: jax.linear_transpose(lambda y: y[:, ::-1] * 2.0, x)(x)[0],
    "closure_convert": lambda x: jax.closure_convert(lambda y: y * jnp.sum(x), x)[0](
        x, *jax.closure_convert(lambda y: y * jnp.sum(x), x)[1]
    ),
}
"""Functions by what stands in them that a compiler may trip over."""

NO_GRAD: dict[str, str] = {
    "custom_vmap": "JAX differentiates no custom_vmap in reverse.",
    "sequential_vmap": "JAX differentiates no custom_vmap in reverse.",
}
"""Forms that JAX does not differentiate, and why."""

NO_VMAP: dict[str, str] = {
    "own primitive of two results": "It is made here without a rule.",
    "ragged_dot": "JAX has no rule for an operand that is batched alone.",
    "composite": "JAX has no rule.",
}
"""Forms that JAX does not batch, and why."""
