# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""`matmul` on Hopper: forward in one kernel, each product of its gradient in another.

    forward    z = scale (a b) + bias               out = activation(z) + residual
    backward   dz = dout activation'(z)
               da = (dz scale) b^T                  db = p scale, p = a^T dz
               dbias = sum of dz over rows          dscale = sum of b p over K

Letters: G products, M rows, N columns, K terms of each sum. Where there is an activation, z is kept
in the dtype of the result. All sums are in a fixed order: runs agree to the last bit.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tpjax.core.operator import Interpret
from tpjax.core.products import ACTIVATIONS
from tpjax.pallas import dispatch
from tpjax.pallas.products.config import chosen
from tpjax.pallas.products.finishes import Affine, Plain
from tpjax.pallas.products.grouped import product
from tpjax.pallas.products.kernel import Finish, Job
from tpjax.pallas.products.mainloop import Config


class Launcher(NamedTuple):
    """What all launches of one call have in common."""

    op: str
    interpret: Interpret
    config: Config | None
    """None: as measured, or guessed, for each launch."""

    def __call__(
        self,
        finish: Finish,
        a: Array,
        factors: tuple[Array, ...],
        sides: tuple[Array, ...] = (),
        vectors: tuple[Array, ...] = (),
        **stored: Any,
    ) -> tuple[Array, ...]:
        """Runs `product`; `stored` are options of `Job`."""
        rows, terms = a.shape[:0:-1] if stored.get("transpose_a") else a.shape[1:]
        sums = len(finish.factors)
        columns = factors[0].shape[1 if stored.get("transpose_b") else -1] * sums
        size = a.shape[0], rows, columns, terms, sums
        config = self.config or chosen(self.op, *size, a.dtype.name)
        job = Job(finish, config, self.interpret, self.op, **stored)
        return product(job, a, factors, sides, vectors)


class _Operands(NamedTuple):
    """What the call was given, kept as it came: reshaped, arrays would be kept twice."""

    a: Array
    b: Array
    bias: Array | None
    residual: Array | None
    scale: Array | None


class _Options(NamedTuple):
    activation: str
    out_dtype: Any
    launcher: Launcher


class _Shape(NamedTuple):
    """Of the products: those of a batch that shares b are one."""

    groups: int
    rows: int
    terms: int
    columns: int

    def a(self, x: Array) -> Array:
        """Returns the left operand as [G, M, K]."""
        return x.reshape(self.groups, self.rows, self.terms)

    def b(self, x: Array) -> Array:
        """Returns the right operand as [G, K, N]."""
        return x.reshape(self.groups, self.terms, self.columns)

    def out(self, x: Array) -> Array:
        """Returns a result, or what is as large, as [G, M, N]."""
        return x.reshape(self.groups, self.rows, self.columns)


def _shape(x: _Operands) -> _Shape:
    terms, columns = x.b.shape[-2:]
    groups = math.prod(x.b.shape[:-2])
    return _Shape(groups, x.a.size // (groups * terms), terms, columns)


def _fwd(x: _Operands, options: _Options, keeps: bool) -> tuple[Array, ...]:
    """Launches the forward kernel; returns arrays [G, M, N]."""
    shape = _shape(x)
    given = [v for v in (x.scale, x.bias) if v is not None]
    vectors = (jnp.broadcast_to(v.astype(jnp.float32), (shape.columns,))[None] for v in given)
    sides = () if x.residual is None else (shape.out(x.residual),)
    finish: Finish = Plain()
    if given or sides or keeps or options.activation != "linear":
        has = x.scale is not None, x.bias is not None, x.residual is not None
        finish = Affine(options.activation, *has, keeps)
    a, b, out_dtype = shape.a(x.a), shape.b(x.b), options.out_dtype
    return options.launcher(finish, a, (b,), sides, tuple(vectors), out_dtype=out_dtype)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _matmul(x: _Operands, options: _Options) -> Array:
    return _fwd(x, options, False)[0].reshape(*x.a.shape[:-1], x.b.shape[-1])


def _forward(x: _Operands, options: _Options) -> tuple[Array, tuple[_Operands, Array | None]]:
    if options.activation == "linear":
        return _matmul(x, options), (x, None)
    out, z = _fwd(x, options, True)
    return out.reshape(*x.a.shape[:-1], x.b.shape[-1]), (x, z)


def _backward(
    options: _Options, kept: tuple[_Operands, Array | None], dout: Array
) -> tuple[_Operands]:
    (x, z), launcher = kept, options.launcher
    shape = _shape(x)
    a, b, dz = shape.a(x.a), shape.b(x.b), shape.out(dout).astype(jnp.float32)
    if z is not None:
        dz = dz * ACTIVATIONS[options.activation].slope(z.astype(jnp.float32))
    scaled = dz if x.scale is None else dz * x.scale.astype(jnp.float32)
    (da,) = launcher(Plain(), scaled.astype(a.dtype), (b,), transpose_b=True)
    # Of p two results are made: in float32 each is rounded once.
    p_dtype = None if x.scale is None else jnp.float32
    (db,) = launcher(Plain(), a, (dz.astype(a.dtype),), transpose_a=True, out_dtype=p_dtype)
    dscale = dbias = dresidual = None
    if x.scale is not None:
        dscale = (b.astype(jnp.float32) * db).sum((0, 1) if x.scale.size > 1 else None)
        dscale = dscale.reshape(x.scale.shape).astype(x.scale.dtype)
        db = (db * x.scale.astype(jnp.float32)).astype(b.dtype)
    if x.bias is not None:
        dbias = dz.sum((0, 1)).astype(x.bias.dtype)
    if x.residual is not None:
        dresidual = dout.astype(x.residual.dtype)
    da, db = da.reshape(x.a.shape), db.reshape(x.b.shape)
    return (_Operands(da, db, dbias, dresidual, dscale),)


_matmul.defvjp(_forward, _backward)


def matmul_pallas(
    a: Array,
    b: Array,
    bias: Array | None,
    residual: Array | None,
    scale: Array | None,
    *,
    activation: str,
    out_dtype: Any,
    config: Config | None = None,
) -> Array:
    """Runs the kernels on a checked call that they support."""
    launcher = Launcher("matmul", dispatch.current_target().interpret, config)
    operands = _Operands(a, b, bias, residual, scale)
    return _matmul(operands, _Options(activation, out_dtype, launcher))
