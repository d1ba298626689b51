# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Instructions of random programs that work on each element alone.

Every instruction is a function of the pool; it returns a value, a tuple of values, or None where
the pool holds nothing for it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.fuzz.pool import (
    Accept,
    Pool,
    constant_like,
    is_bool,
    is_complex,
    is_float,
    is_number,
    is_real,
    is_whole,
    special,
)

Instruction = Callable[[Pool], Any]


def _unary(pool: Pool, accept: Accept, fns: tuple[Any, ...]) -> Any:
    x = pool.pick(accept)
    return None if x is None else pool.numbers.of(fns)(x)


def _binary(pool: Pool, accept: Accept, fns: tuple[Callable[[Any, Any], Any], ...]) -> Any:
    x = pool.pick(accept)
    if x is None:
        return None
    fn, swap = pool.numbers.of(fns), pool.numbers.below(2)
    y = pool.like(x)
    return fn(y, x) if swap else fn(x, y)


def _is_numeric(x: Any) -> bool:
    return is_number(x) and not is_bool(x)


def _still(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function, which has no derivative, of operands held still."""
    return lambda *xs: fn(*map(lax.stop_gradient, xs))


def _mul_by(pool: Pool) -> Any:
    """A product, quotient, sum or difference with a constant that rules look for."""
    x = pool.pick(_is_numeric)
    if x is None:
        return None
    c = np.asarray(pool.numbers.of((1, 0, 2, -1))).astype(x.dtype)
    if pool.numbers.below(4) == 3:
        c = np.asarray(special(x.dtype, pool.numbers), x.dtype)
    value = pool.numbers.of((c, lax.full_like(x, c), lax.broadcast(c, np.shape(x))))
    fn = pool.numbers.of((lax.mul, lax.add, lax.sub, lax.div, lax.max, lax.min))
    value = lax.full_like(x, c) if np.shape(value) != np.shape(x) else value
    return fn(value, x) if pool.numbers.below(2) else fn(x, value)


def _python_number(pool: Pool) -> Any:
    """Arithmetic with a Python number, as people write it."""
    x = pool.pick(is_real)
    if x is None:
        return None
    c = pool.numbers.of((1.0, 0.0, -0.0, 2.0, -1.0) if is_float(x) else (1, 0, 2, 7, 3))
    fns = (
        lambda: x * c, lambda: c * x, lambda: x + c, lambda: x - c, lambda: c - x,
        lambda: jnp.maximum(x, c), lambda: jnp.where(x > c, x, c), lambda: x / (c or 1),
        lambda: x // (c or 3), lambda: x % (c or 3), lambda: x**2,
    )  # fmt: skip
    return pool.numbers.of(fns)()


def _compare(pool: Pool) -> Any:
    fns = (lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge)
    return _binary(pool, is_real, fns)


def _total_order(pool: Pool) -> Any:
    x = pool.pick(is_float)
    fn = pool.numbers.of((lax.eq_to_p, lax.lt_to_p, lax.le_to_p))
    return None if x is None else fn.bind(x, pool.other(x))


def _select(pool: Pool) -> Any:
    x = pool.pick(is_number)
    if x is None:
        return None
    which = pool.pick(is_bool, lambda p: np.shape(p) in ((), np.shape(x)))
    if pool.numbers.below(5) == 4 or which is None:
        index = pool.pick(lambda i: i.dtype == jnp.int32 and np.shape(i) in ((), np.shape(x)))
        if index is None:
            return None
        return lax.select_n(jnp.clip(index, 0, 2), x, pool.like(x), pool.other(x))
    return lax.select_n(which, x, pool.like(x))


def _select_known(pool: Pool) -> Any:
    x = pool.pick(is_number)
    if x is None:
        return None
    which = jnp.full(np.shape(x), bool(pool.numbers.below(2)))
    return lax.select_n(which, x, pool.like(x))


def _clamp(pool: Pool) -> Any:
    x = pool.pick(is_real)
    if x is None:
        return None
    ends = constant_like(x, pool.numbers), pool.like(x)
    if pool.numbers.below(2):
        ends = tuple(np.asarray(special(x.dtype, pool.numbers), x.dtype) for _ in range(2))
    return lax.clamp(ends[0], x, ends[1])


def _shift(pool: Pool) -> Any:
    x = pool.pick(is_whole)
    if x is None:
        return None
    fn = pool.numbers.of((lax.shift_left, lax.shift_right_logical, lax.shift_right_arithmetic))
    by = pool.numbers.of((0, 1, 3, 8 * x.dtype.itemsize - 1, 8 * x.dtype.itemsize))
    amount = pool.other(x) if pool.numbers.below(4) == 3 else lax.full_like(x, by)
    return fn(x, amount)


REAL = ("float32", "bfloat16", "float16", "int32", "int8", "uint8", "uint32", "bool")


def _convert(pool: Pool) -> Any:
    x = pool.pick(is_number, lambda v: not is_complex(v))
    return None if x is None else lax.convert_element_type(x, pool.numbers.of(REAL))


def _round_trip(pool: Pool) -> Any:
    """A chain of conversions that comes back: exact if the middle is wider."""
    x = pool.pick(is_real)
    if x is None:
        return None
    middle = pool.numbers.of(REAL[:-1])
    return lax.convert_element_type(lax.convert_element_type(x, middle), x.dtype)


BITS = {1: ("int8", "uint8"), 2: ("float16", "bfloat16"), 4: ("float32", "int32", "uint32")}


def _bitcast(pool: Pool) -> Any:
    x = pool.pick(is_real, lambda v: v.dtype.itemsize in BITS)
    if x is None:
        return None
    dtype = jnp.dtype(pool.numbers.of(BITS[x.dtype.itemsize]))
    return None if dtype == x.dtype else lax.bitcast_convert_type(x, dtype)


def _twice(pool: Pool) -> Any:
    """The same computed twice, the second time perhaps with swapped operands."""
    x = pool.pick(is_real)
    if x is None:
        return None
    y, fn = pool.like(x), pool.numbers.of((lax.sub, lax.mul, lax.div, lax.add, lax.max))
    other = fn(y, x) if pool.numbers.below(2) else fn(x, y)
    return lax.sub(fn(x, y), other), other


def _undo(pool: Pool) -> Any:
    x = pool.pick(_is_numeric, lambda v: not is_complex(v))
    if x is None:
        return None
    fns = (lax.neg, jnp.abs, lax.sign) + ((lax.floor, lax.ceil) if is_float(x) else (jnp.invert,))
    if is_float(x):
        fns = (*fns, lambda v: lax.round(v, lax.RoundingMethod.TO_NEAREST_EVEN))
    fn = pool.numbers.of(fns)
    return fn(fn(x))


def _polar(pool: Pool) -> Any:
    x = pool.pick(is_complex)
    return None if x is None else pool.numbers.of((jnp.abs, jnp.sign, lambda v: v.conj() * v))(x)


def _to_complex(pool: Pool) -> Any:
    x = pool.pick(lambda v: v.dtype == jnp.float32)
    return None if x is None else lax.complex(x, pool.other(x))


SMOOTH = (
    lax.exp, lax.sin, lax.cos, lax.tanh, lax.logistic, lax.log1p, lax.expm1, lax.sqrt, lax.rsqrt,
    lax.log, lax.tan, lax.asin, lax.acos, lax.atan, lax.sinh, lax.cosh, lax.asinh, lax.acosh,
    lax.atanh, lax.cbrt, lax.exp2, lax.erf, lax.erfc, lax.square, lax.integer_pow,
    lambda x: lax.integer_pow(x, 1), lambda x: lax.integer_pow(x, -2), jax.nn.gelu,
)  # fmt: skip
SMOOTH = tuple(partial(f, y=3) if f is lax.integer_pow else f for f in SMOOTH)
RARE = (
    lambda x: lax.erf_inv(x.astype(jnp.float32)), lambda x: lax.lgamma(x.astype(jnp.float32)),
    lambda x: lax.digamma(x.astype(jnp.float32)), lambda x: lax.bessel_i0e(x.astype(jnp.float32)),
    lambda x: lax.bessel_i1e(x.astype(jnp.float32)),
)  # fmt: skip
ROUND = (
    lax.floor, lax.ceil, lax.sign, lax.is_finite,
    lambda x: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO),
    lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),
    lambda x: lax.reduce_precision(x, 5, 2),
)  # fmt: skip
BOTH = (lax.add, lax.mul, lax.sub, lax.div, lax.max, lax.min)
NUMPY = (jax.nn.relu, jax.nn.silu, jax.nn.softplus, jnp.nan_to_num, jax.nn.elu, jnp.round)
WHOLE = (lax.neg, jnp.abs, lax.sign, jnp.invert, lax.population_count, lax.clz, lax.square)
LOGIC = (lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor)

ROWS: dict[str, tuple[int, Instruction]] = {
    "arithmetic": (4, lambda p: _binary(p, is_float, BOTH)),
    "constant_arithmetic": (4, _mul_by),
    "python_number": (3, _python_number),
    "whole_arithmetic": (3, lambda p: _binary(p, is_whole, (*BOTH, lax.rem, jnp.floor_divide))),
    "complex_arithmetic": (1, lambda p: _binary(p, is_complex, BOTH[:4])),
    "binary_rare": (1, lambda p: _binary(p, is_float, (lax.pow, lax.atan2, lax.rem))),
    "nextafter": (1, lambda p: _binary(p, is_float, (_still(lax.nextafter),))),
    "smooth": (3, lambda p: _unary(p, is_float, SMOOTH)),
    "rare": (1, lambda p: _unary(p, is_float, RARE)),
    "negate": (1, lambda p: _unary(p, is_float, (lax.neg, lax.abs))),
    "round": (1, lambda p: _unary(p, is_float, ROUND)),
    "nn": (1, lambda p: _unary(p, is_float, NUMPY)),
    "whole": (1, lambda p: _unary(p, is_whole, WHOLE)),
    "not": (2, lambda p: _unary(p, lambda v: is_bool(v) or is_whole(v), (jnp.invert,))),
    "shift": (1, _shift),
    "logic": (1, lambda p: _binary(p, is_whole, LOGIC)),
    "bool_logic": (1, lambda p: _binary(p, is_bool, (*LOGIC, lambda x, y: ~x))),
    "compare": (2, _compare),
    "total_order": (1, _total_order),
    "select": (2, _select),
    "select_known": (1, _select_known),
    "clamp": (1, _clamp),
    "convert": (3, _convert),
    "round_trip": (2, _round_trip),
    "bitcast": (1, _bitcast),
    "twice": (3, _twice),
    "undo": (2, _undo),
    "complex_parts": (1, lambda p: _unary(p, is_complex, (lax.real, lax.imag, lax.conj, lax.neg))),
    "polar": (1, _polar),
    "to_complex": (1, _to_complex),
    "hold": (1, lambda p: _unary(p, is_number, (lax.stop_gradient, lax.optimization_barrier))),
}
"""By name, how often an instruction is drawn and what it does."""
