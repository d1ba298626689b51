# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Operands for array functions of JAX, and how those are called that take none of them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy import special

X = np.asarray([[-0.0, 0.5, 1.5], [-2.25, 0.25, 3.0]], np.float32)
Y = np.asarray([[2.0, -1.5, 0.75], [0.25, 3.5, -0.5]], np.float32)
N = np.asarray([[-7, 0, 3], [5, 2, 12]], np.int32)
ODD = np.asarray([[-0.0, np.inf, np.nan], [-np.inf, 3e38, -1.2e-38]], np.float32)
ODD_WHOLE = np.asarray([[-(2**31), 2**31 - 1, 0], [-1, 31, 32]], np.int32)
P = X > 0
Z = (X + 1j * Y).astype(np.complex64)
S = (X @ X.T + np.eye(2, dtype=np.float32)).astype(np.float32)

OPERANDS: dict[str, Any] = {
    "x": ((X,), (ODD,)),
    "x, y": ((X, Y), (ODD, ODD[::-1])),
    "n": ((N,), (ODD_WHOLE,)),
    "n, n": ((N, N[::-1]), (ODD_WHOLE, ODD_WHOLE[::-1])),
    "x, y, x": ((X, Y, X), (ODD, Y, ODD)),
    "p": ((P,), (~P,)),
    "p, p": ((P, ~P), (P, P)),
    "p, x, y": ((P, X, Y), (P, ODD, X)),
    "z": ((Z,), (ODD + 1j * Y,)),
    "v": ((X[0],), (ODD[0],)),
    "v, v": ((X[0], Y[0]), (ODD[0], Y[1])),
    "x, y, x, y": ((X, Y, X, Y), (ODD, Y, X, Y)),
    "x, m": ((X, Y.T), (ODD, X.T)),
    "s": ((S,), (ODD[:, :2],)),
    "empty": ((X[:0],), (X[:0],)),
    "half": ((X.astype(jnp.bfloat16),), (X.astype(jnp.bfloat16),)),
    "scalar": ((1.5,), (-0.0,)),
}
"""Operands to try in order: tame ones, and odd ones of the same types."""

WHOLE = ("n", "n, n", "p", "p, p")
ALSO = ("empty", "half", "scalar")
"""Operands for functions that take some of the others too."""
FLOATS = tuple(kind for kind in OPERANDS if kind not in WHOLE and kind not in ALSO)

I3: Any = np.asarray([0, 2, 1], np.int32)
T: Any = X[None, :, :, None]  # [1, 2, 3, 1]
K: Any = Y[None, None].transpose(2, 3, 0, 1)[:2, :2]  # [2, 2, 1, 1]
NC: Any = np.ones((1, 2, 4), np.float32) * np.arange(4, dtype=np.float32)
OIC: Any = np.ones((3, 2, 2), np.float32) * np.asarray([0.5, -1], np.float32)

Call = Callable[..., Any]
"""A function of `X`, or of `N`, or of the operands named."""


def _axis(fn: Any, **keywords: Any) -> Call:
    return lambda x: fn(x, axis=1, **keywords)


def _axes(fn: Any) -> Call:
    return lambda x: fn(x, (1,))


_gather = lax.GatherDimensionNumbers((1,), (0,), (0,))
_scatter = lax.ScatterDimensionNumbers((1,), (0,), (0,))
_rows: Any = np.asarray([[0], [1], [0]], np.int32)


def _scattered(fn: Any) -> Call:
    return lambda x: fn(x, _rows, jnp.concatenate([x, x[:1]]), _scatter)


CALLS: dict[str, Call] = {
    "jnp.apply_along_axis": lambda x: jnp.apply_along_axis(jnp.sum, 0, x),
    "jnp.apply_over_axes": lambda x: jnp.apply_over_axes(jnp.sum, x, [0]),
    "jnp.arange": lambda x: x + jnp.arange(3),
    "jnp.argpartition": lambda x: jnp.argpartition(x, 1),
    "jnp.argwhere": lambda x: jnp.argwhere(x, size=3),
    "jnp.array_split": lambda x: jnp.array_split(x, 2),
    "jnp.asarray": lambda x: jnp.asarray(x) * 2,
    "jnp.astype": lambda x: jnp.astype(x, jnp.int8),
    "jnp.bartlett": lambda x: x * jnp.bartlett(3),
    "jnp.blackman": lambda x: x * jnp.blackman(3),
    "jnp.gcd": lambda n: jnp.gcd(n // 2, n[::-1] // 3),  # of the lowest integer it never ends
    "jnp.lcm": lambda n: jnp.lcm(n // 2, n[::-1] // 3),
    "jnp.hamming": lambda x: x * jnp.hamming(3),
    "jnp.hanning": lambda x: x * jnp.hanning(3),
    "jnp.kaiser": lambda x: x * jnp.kaiser(3, 2.0),
    "jnp.bincount": lambda n: jnp.bincount(n[0], length=4),
    "jnp.broadcast_arrays": lambda x: jnp.broadcast_arrays(x, x[:1]),
    "jnp.broadcast_to": lambda x: jnp.broadcast_to(x, (2, 2, 3)),
    "jnp.choose": lambda x: jnp.choose(np.asarray([0, 1, 0]), x, mode="clip"),
    "jnp.compress": lambda x: jnp.compress(np.asarray([True, False, True]), x, axis=1, size=2),
    "jnp.delete": lambda x: jnp.delete(x, 1, axis=1),
    "jnp.diag_indices": lambda x: x[jnp.diag_indices(2)],
    "jnp.dsplit": lambda x: jnp.dsplit(x[None], 3),
    "jnp.hsplit": lambda x: jnp.hsplit(x, 3),
    "jnp.vsplit": lambda x: jnp.vsplit(x, 2),
    "jnp.split": lambda x: jnp.split(x, 3, axis=1),
    "jnp.einsum": lambda x: jnp.einsum("ij,kj->ki", x, x),
    "jnp.empty": lambda x: x + jnp.empty((3,)),
    "jnp.expand_dims": _axis(jnp.expand_dims),
    "jnp.extract": lambda x: jnp.extract(x > 0, x, size=4),
    "jnp.eye": lambda x: x @ jnp.eye(3, k=1),
    "jnp.identity": lambda x: x @ jnp.identity(3),
    "jnp.fill_diagonal": lambda x: jnp.fill_diagonal(x, 2.0, inplace=False),
    "jnp.flatnonzero": lambda x: jnp.flatnonzero(x, size=4),
    "jnp.frompyfunc": lambda x: jnp.frompyfunc(lambda a, b: a * b, 2, 1)(x, x),
    "jnp.fromfunction": lambda x: x + jnp.fromfunction(lambda i, j: i - j, (2, 3)),
    "jnp.full": lambda x: x + jnp.full((3,), -0.0),
    "jnp.full_like": lambda x: x * jnp.full_like(x, 1),
    "jnp.indices": lambda x: x * jnp.indices((2, 3)),
    "jnp.insert": lambda x: jnp.insert(x, 1, 5.0, axis=1),
    "jnp.interp": lambda x: jnp.interp(x, np.asarray([0.0, 1, 2], np.float32), x[0]),
    "jnp.intersect1d": lambda x: jnp.intersect1d(x, x[0], size=3),
    "jnp.union1d": lambda x: jnp.union1d(x, x[0], size=8),
    "jnp.setdiff1d": lambda x: jnp.setdiff1d(x, x[0], size=3),
    "jnp.setxor1d": lambda x: jnp.setxor1d(x, x[0], size=6),
    "jnp.mask_indices": lambda x: x[:, :2][jnp.mask_indices(2, jnp.triu, size=3)],
    "jnp.moveaxis": lambda x: jnp.moveaxis(x, 0, 1),
    "jnp.nonzero": lambda x: jnp.nonzero(x, size=4),
    "jnp.ones": lambda x: x * jnp.ones((2, 3)),
    "jnp.zeros": lambda x: x - jnp.zeros((2, 3)),
    "jnp.pad": lambda x: [
        jnp.pad(x, 1, mode=m) for m in ("constant", "edge", "reflect", "wrap", "mean")
    ],
    "jnp.partition": lambda x: jnp.partition(x, 1),
    "jnp.permute_dims": lambda x: jnp.permute_dims(x, (1, 0)),
    "jnp.piecewise": lambda x: jnp.piecewise(x, [x < 0, x > 1], [-1.0, jnp.sin, lambda v: v * 2]),
    "jnp.place": lambda x: jnp.place(x, x > 0, x[0], inplace=False),
    "jnp.polyfit": lambda x: jnp.polyfit(np.arange(3, dtype=np.float32), x[1], 1),
    "jnp.positive": lambda x: jnp.positive(x) + 1,
    "jnp.put": lambda x: jnp.put(x, np.asarray([0, 4, 9]), 2.0, inplace=False),
    "jnp.put_along_axis": lambda x: jnp.put_along_axis(
        x, np.asarray([[0], [1]]), 2.0, 1, inplace=False
    ),
    "jnp.ravel_multi_index": lambda n: jnp.ravel_multi_index((n[0], n[1]), (4, 5), mode="clip"),
    "jnp.repeat": lambda x: jnp.repeat(x, 2, axis=1),
    "jnp.reshape": lambda x: jnp.reshape(x, (3, 2), order="F"),
    "jnp.resize": lambda x: jnp.resize(x, (4, 4)),
    "jnp.rollaxis": lambda x: jnp.rollaxis(x, 1),
    "jnp.roots": lambda x: jnp.roots(x[1], strip_zeros=False),
    "jnp.squeeze": lambda x: jnp.squeeze(x[None], 0),
    "jnp.swapaxes": lambda x: jnp.swapaxes(x, 0, 1),
    "jnp.tile": lambda x: jnp.tile(x, (2, 1)),
    "jnp.top_k": lambda x: jnp.top_k(x, 2),
    "jnp.tri": lambda x: x * jnp.tri(2, 3),
    "jnp.tril_indices": lambda x: x[jnp.tril_indices(2)],
    "jnp.triu_indices": lambda x: x[jnp.triu_indices(2)],
    "jnp.unique": lambda x: jnp.unique(x, size=4),
    "jnp.unique_all": lambda x: tuple(jnp.unique_all(x, size=4)),
    "jnp.unique_counts": lambda x: tuple(jnp.unique_counts(x, size=4)),
    "jnp.unique_inverse": lambda x: tuple(jnp.unique_inverse(x, size=4)),
    "jnp.unique_values": lambda x: jnp.unique_values(x, size=4),
    "jnp.unpackbits": lambda n: jnp.unpackbits(n.astype(jnp.uint8)),
    "jnp.vectorize": lambda x: jnp.vectorize(jnp.dot, signature="(n),(n)->()")(x, x),
    "jnp.block": lambda x: jnp.block([[x, x], [x * 2, x]]),
    "jnp.take": lambda x: jnp.take(x, I3, axis=1),
    "jnp.select": lambda x: jnp.select([x > 1, x > 0], [x, -x], 7.0),
    "lax.approx_max_k": lambda x: lax.approx_max_k(x, 2),
    "lax.approx_min_k": lambda x: lax.approx_min_k(x, 2),
    "lax.argmax": lambda x: lax.argmax(x, 1, jnp.int32),
    "lax.argmin": lambda x: lax.argmin(x, 1, jnp.int32),
    "lax.associative_scan": lambda x: lax.associative_scan(jnp.multiply, x, axis=1),
    "lax.bitcast_convert_type": lambda x: lax.bitcast_convert_type(x, jnp.int32),
    "lax.broadcast": lambda x: lax.broadcast(x, (2,)),
    "lax.broadcast_in_dim": lambda x: lax.broadcast_in_dim(x, (2, 2, 3), (0, 2)),
    "lax.broadcast_to_rank": lambda x: lax.broadcast_to_rank(x, 3),
    "lax.broadcasted_iota": lambda x: x + lax.broadcasted_iota(jnp.float32, (2, 3), 1),
    "lax.collapse": lambda x: lax.collapse(x, 0),
    "lax.concatenate": lambda x: lax.concatenate([x, x], 1),
    "lax.cond": lambda x: lax.cond(x[0, 1] > 0, jnp.sin, jnp.cos, x),
    "lax.conv": lambda x: lax.conv(T * x[1, 2], K, (1, 1), "SAME"),
    "lax.conv_general_dilated": lambda x: lax.conv_general_dilated(NC * x[1, 2], OIC, (1,), "SAME"),
    "lax.conv_general_dilated_local": lambda x: lax.conv_general_dilated_local(
        x[None, :1, :2], np.ones((1, 2, 1), np.float32), (1,), "VALID", (2,)
    ),
    "lax.conv_general_dilated_patches": lambda x: lax.conv_general_dilated_patches(
        x[None], (2,), (1,), "VALID"
    ),
    "lax.conv_transpose": lambda x: lax.conv_transpose(
        NC.transpose(0, 2, 1) * x[1, 2], OIC.transpose(2, 1, 0), (2,), "SAME"
    ),
    "lax.conv_with_general_padding": lambda x: lax.conv_with_general_padding(
        NC * x[1, 2], OIC, (1,), [(1, 0)], None, None
    ),
    "lax.convert_element_type": lambda x: lax.convert_element_type(x, jnp.float16),
    "lax.custom_linear_solve": lambda x: lax.custom_linear_solve(
        lambda v: 2 * v, x, lambda matvec, b: b / 2, symmetric=True
    ),
    "lax.custom_root": lambda x: lax.custom_root(
        lambda v: v - x, x, lambda f, v: v - f(v), lambda g, y: y / g(jnp.ones_like(y))
    ),
    "lax.dot_general": lambda x: lax.dot_general(x, x, (((1,), (1,)), ((), ()))),
    "lax.dynamic_index_in_dim": lambda x: lax.dynamic_index_in_dim(x, 1),
    "lax.dynamic_slice": lambda x: lax.dynamic_slice(x, (1, 1), (1, 2)),
    "lax.dynamic_slice_in_dim": lambda x: lax.dynamic_slice_in_dim(x, 2, 2, 1),
    "lax.dynamic_update_index_in_dim": lambda x: lax.dynamic_update_index_in_dim(x, x[0], 1, 0),
    "lax.dynamic_update_slice": lambda x: lax.dynamic_update_slice(x, x[:1, :2], (1, 5)),
    "lax.dynamic_update_slice_in_dim": lambda x: lax.dynamic_update_slice_in_dim(x, x[:1], 1, 0),
    "lax.expand_dims": _axes(lax.expand_dims),
    "lax.fft": lambda x: lax.fft(lax.complex(x, x), "fft", (3,)),
    "lax.fori_loop": lambda x: lax.fori_loop(0, 3, lambda i, v: v * 2 + i, x),
    "lax.full": lambda x: x + lax.full((2, 3), -0.0),
    "lax.full_like": lambda x: x * lax.full_like(x, 1.0),
    "lax.gather": lambda x: lax.gather(x, _rows, _gather, (1, 3)),
    "lax.index_in_dim": lambda x: lax.index_in_dim(x, 1),
    "lax.index_take": lambda x: lax.index_take(x, (jnp.asarray(I3 % 2),), (0,)),  # pyright: ignore
    "lax.integer_pow": lambda x: lax.integer_pow(x, -3),
    "lax.iota": lambda x: x + lax.iota(jnp.float32, 3),
    "lax.map": lambda x: lax.map(jnp.sin, x),
    "lax.pad": lambda x: lax.pad(x, -1.0, ((1, 0, 0), (-1, 2, 1))),
    "lax.platform_dependent": lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos),
    "lax.ragged_dot": lambda x: lax.ragged_dot(
        x, jnp.stack([x[:, :1] * 0 + 1] * 2).repeat(2, 1)[:, :3], jnp.asarray([1, 1], jnp.int32)
    ),
    "lax.reduce": lambda x: lax.reduce(x, np.float32(0), lax.add, (1,)),
    "lax.reduce_and": lambda x: lax.reduce_and(x > 0, (1,)),
    "lax.reduce_or": lambda x: lax.reduce_or(x > 0, (1,)),
    "lax.reduce_xor": lambda n: lax.reduce_xor(n, (1,)),
    "lax.reduce_max": _axes(lax.reduce_max),
    "lax.reduce_min": _axes(lax.reduce_min),
    "lax.reduce_prod": _axes(lax.reduce_prod),
    "lax.reduce_sum": _axes(lax.reduce_sum),
    "lax.reduce_precision": lambda x: lax.reduce_precision(x, 5, 3),
    "lax.reduce_window": lambda x: lax.reduce_window(x, -np.inf, lax.max, (1, 2), (1, 1), "SAME"),
    "lax.reshape": lambda x: lax.reshape(x, (3, 2)),
    "lax.rev": _axes(lax.rev),
    "lax.rng_bit_generator": lambda x: lax.rng_bit_generator(jnp.zeros(4, jnp.uint32), (3,)),
    "lax.scan": lambda x: lax.scan(lambda c, r: (c * 2 + r, c), x[0], x),
    "lax.scatter": _scattered(lax.scatter),
    "lax.scatter_add": _scattered(lax.scatter_add),
    "lax.scatter_sub": _scattered(lax.scatter_sub),
    "lax.scatter_max": _scattered(lax.scatter_max),
    "lax.scatter_min": _scattered(lax.scatter_min),
    "lax.scatter_mul": lambda x: lax.scatter_mul(x, _rows[:2], x, _scatter, unique_indices=True),
    "lax.scatter_apply": lambda x: lax.scatter_apply(
        x, _rows[:2], jnp.sin, _scatter, update_shape=(2, 3), unique_indices=True
    ),
    "lax.slice": lambda x: lax.slice(x, (0, 1), (2, 3), (1, 2)),
    "lax.slice_in_dim": lambda x: lax.slice_in_dim(x, 1, 3, axis=1),
    "lax.split": lambda x: lax.split(x, (1, 2), 1),
    "lax.squeeze": lambda x: lax.squeeze(x[:1], (0,)),
    "lax.stop_gradient": lambda x: lax.stop_gradient(x) * x,
    "lax.switch": lambda x: lax.switch(x[0, 1].astype(int), [jnp.sin, jnp.cos], x),
    "lax.tile": lambda x: lax.tile(x, (1, 2)),
    "lax.top_k": lambda x: lax.top_k(x, 2),
    "lax.transpose": lambda x: lax.transpose(x, (1, 0)),
    "lax.cumsum": lambda x: lax.cumsum(x, 1, reverse=True),
    "lax.while_loop": lambda x: lax.while_loop(
        lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * 2), (0, lax.stop_gradient(x))
    )[1],
    "nn.one_hot": lambda n: jax.nn.one_hot(n, 4),
    "nn.glu": lambda x: jax.nn.glu(x[:, :2]),
    "nn.dot_product_attention": lambda x: jax.nn.dot_product_attention(
        *[x[None, :, None]] * 3, is_causal=True
    ),
    "special.bernoulli": lambda x: x[0, 0] + special.bernoulli(4),
    "special.bessel_jn": lambda x: special.bessel_jn(x[0], v=2, n_iter=5),
    "special.hyp2f1": lambda x: special.hyp2f1(0.5, 1.0, 1.5, jnp.clip(x, -0.5, 0.5)),
    "special.multigammaln": lambda x: special.multigammaln(jnp.abs(x) + 2, 2),
    "special.sph_harm_y": lambda x: special.sph_harm_y(
        jnp.asarray([2]), jnp.asarray([1]), x[0, 1:2], x[1, 1:2], n_max=2
    ),
}
"""Functions that need other operands, or a static one, or are more than their first call."""
