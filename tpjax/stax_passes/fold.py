# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Computes now what depends on no input, where the result is the same on every machine.

Folded are moves, choices, comparisons, conversions, integer and boolean arithmetic, and sums,
differences and products of floats: IEEE 754 fixes their bits. Not folded are quotients, roots and
everything transcendental (machines differ in the last bit), results that are NaN or subnormal,
undefined integer operations, random bits, keys, and results over 1 MiB.

A scalar becomes an operand of its readers; an array of equal numbers stays a broadcast of one, and
an iota stays an iota, as these are the shortest forms of a constant; any other array becomes a
constant.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tpjax.core import _jax
from tpjax.stax_passes.sweep import Atom, ExactRule, Level, sweeping_pass

MAX_BYTES = 2**20
"""Bytes of the largest folded result, counted once for each of its readers."""

Evaluate = Callable[..., np.ndarray]


class RefusedError(Exception):
    """The result is not the same everywhere; the message says why, to follow "not folded:"."""


# -- how each primitive is computed ---------------------------------------------------------------


def _divide(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    _check_division(x, y)
    quotient = np.abs(x) // np.abs(y)  # rounds towards zero, as lax does
    return np.where((x < 0) != (y < 0), -quotient, quotient).astype(x.dtype)


def _remainder(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    _check_division(x, y)
    return np.fmod(x, y)


def _check_division(x: np.ndarray, y: np.ndarray) -> None:
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise RefusedError("a quotient of floats may differ by machine in its last bit")
    lowest = jnp.iinfo(x.dtype).min
    if (y == 0).any() or (lowest < 0 and ((x == lowest) | (y == lowest)).any()):
        raise RefusedError("the integer division is undefined or overflows")


def _shift(how: Callable[[Any, Any], Any]) -> Evaluate:
    def evaluate(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        bits = 8 * x.dtype.itemsize
        if ((y < 0) | (y >= bits)).any():
            raise RefusedError("the shift is by more bits than there are")
        return how(x, y).astype(x.dtype)

    return evaluate


def _shift_right_logical(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    unsigned = np.dtype(f"u{x.dtype.itemsize}")
    return (x.view(unsigned) >> y.astype(unsigned)).view(x.dtype)


def _select(which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    index = which.astype(np.int64)
    if ((index < 0) | (index >= len(cases))).any():
        raise RefusedError("the index of select_n is out of range")
    result = cases[0]
    for i, case in enumerate(cases[1:], 1):
        result = np.where(index == i, case, result)
    return result


def _convert(x: np.ndarray, new_dtype: Any, weak_type: bool, sharding: Any) -> np.ndarray:
    del weak_type, sharding
    from_float = jnp.issubdtype(x.dtype, jnp.floating)
    if from_float and jnp.issubdtype(new_dtype, jnp.integer):
        info, wide = jnp.iinfo(new_dtype), x.astype(np.float64)
        inside = np.isfinite(wide) & (wide > float(info.min) - 1) & (wide < float(info.max))
        if not inside.all():
            raise RefusedError("the float is out of the integer's range")
    if new_dtype == np.bool_:
        return x != 0
    result = x.astype(new_dtype)
    if jnp.issubdtype(new_dtype, jnp.floating) and jnp.finfo(new_dtype).bits < 32:
        # The way from a number that float32 does not hold may round there first.
        single = x.astype(np.float32)
        if (single.astype(x.dtype) != x).any() and not np.isnan(single).any():
            raise RefusedError("a machine may round the number in two steps")
    return result


def _iota(*, dtype: Any, shape: tuple[int, ...], dimension: int, sharding: Any) -> np.ndarray:
    del sharding
    line = np.arange(shape[dimension]).astype(dtype)
    return np.broadcast_to(
        line.reshape([-1 if i == dimension else 1 for i in range(len(shape))]), shape
    )


def _broadcast(
    x: np.ndarray, *, shape: tuple[int, ...], broadcast_dimensions: Any, sharding: Any
) -> np.ndarray:
    del sharding
    sizes = [1] * len(shape)
    for axis, size in zip(broadcast_dimensions, x.shape, strict=True):
        sizes[axis] = size
    return np.broadcast_to(x.reshape(sizes), shape)


def _reshape(x: np.ndarray, *, new_sizes: Any, dimensions: Any, sharding: Any) -> np.ndarray:
    if dimensions is not None:
        raise RefusedError("the reshape also permutes")
    del sharding
    return x.reshape(new_sizes)


def _slice(x: np.ndarray, *, start_indices: Any, limit_indices: Any, strides: Any) -> np.ndarray:
    steps = strides or (1,) * x.ndim
    return x[tuple(map(slice, start_indices, limit_indices, steps))]


def _clamp(low: np.ndarray, x: np.ndarray, high: np.ndarray) -> np.ndarray:
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise RefusedError("the order of -0.0 and 0.0 may differ by machine")
    return np.minimum(np.maximum(x, low), high)


def _extreme(how: Callable[[Any, Any], Any]) -> Evaluate:
    def evaluate(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        result = how(x, y)
        if jnp.issubdtype(x.dtype, jnp.inexact) and (result == 0).any():
            raise RefusedError("the order of -0.0 and 0.0 may differ by machine")
        return result

    return evaluate


def _not(x: np.ndarray) -> np.ndarray:
    return np.logical_not(x) if x.dtype == np.bool_ else np.invert(x)


def _shift_right_arithmetic(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    signed = np.dtype(f"i{x.dtype.itemsize}")  # lax fills with the top bit of unsigned numbers too
    return (x.view(signed) >> y.astype(signed)).view(x.dtype)


ELEMENTWISE: dict[str, Evaluate] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "abs": np.abs,
    "div": _divide, "rem": _remainder, "max": _extreme(np.maximum), "min": _extreme(np.minimum),
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "not": _not, "shift_left": _shift(np.left_shift),
    "shift_right_logical": _shift(_shift_right_logical),
    "shift_right_arithmetic": _shift(_shift_right_arithmetic), "select_n": _select, "clamp": _clamp,
    "convert_element_type": _convert, "floor": np.floor, "ceil": np.ceil,
    "square": lambda x: x * x, "is_finite": np.isfinite,
}  # fmt: skip
"""Primitives that work on each element alone, by what gives their bits."""

MOVES: dict[str, Evaluate] = {
    "iota": _iota, "broadcast_in_dim": _broadcast, "reshape": _reshape, "slice": _slice,
    "squeeze": lambda x, dimensions: np.squeeze(x, tuple(dimensions)),
    "transpose": lambda x, permutation: np.transpose(x, permutation),
    "concatenate": lambda *xs, dimension: np.concatenate(xs, dimension),
    "rev": lambda x, dimensions: np.flip(x, tuple(dimensions)),
}  # fmt: skip
"""Primitives that move elements and compute nothing."""


DTYPES = frozenset(
    np.dtype(name)
    for name in ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
) | frozenset(jnp.dtype(t) for t in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64))


def compute(eqn: _jax.Equation, operands: list[np.ndarray]) -> np.ndarray:
    """Returns the equation's result for the operands, or raises `RefusedError`."""
    name, aval = eqn.primitive.name, _jax.array_type(eqn.outvars[0])
    with np.errstate(all="ignore"):
        if name in MOVES:
            result = np.asarray(MOVES[name](*operands, **eqn.params))
        else:
            params = eqn.params if name == "convert_element_type" else {}
            result = np.asarray(ELEMENTWISE[name](*operands, **params))
            if name != "select_n":
                _check_numbers(result, operands)
    assert (result.shape, result.dtype) == (aval.shape, aval.dtype), (eqn, result.dtype)
    return result


def _check_numbers(result: np.ndarray, operands: list[np.ndarray]) -> None:
    """Raises where the result is not the same on every machine."""
    for x in (result, *operands):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            continue
        if x is result and np.isnan(x).any():
            raise RefusedError("the result has NaN")
        size = np.abs(x.astype(np.float64))
        if ((size > 0) & (size < float(jnp.finfo(x.dtype).tiny))).any():
            raise RefusedError("a subnormal number may be flushed to zero")


# -- the pass -------------------------------------------------------------------------------------


class _Folder:
    """The edit of one level: it remembers which variables are constants."""

    def __init__(self, level: Level) -> None:
        self.known: dict[_jax.Var, np.ndarray | _jax.Equation] = {}
        """The value, or the iota or broadcast that makes it."""
        for var, value in zip(level.jaxpr.constvars, level.jaxpr.consts, strict=True):
            if isinstance(value, np.ndarray) and _foldable(var.aval):
                self.known[var] = np.asarray(value)

    def __call__(self, level: Level, eqn: _jax.Equation) -> _jax.Equation | None:
        name = eqn.primitive.name
        if eqn.effects or (name not in ELEMENTWISE and name not in MOVES):
            return eqn
        if not all(self._is_known(atom) for atom in eqn.invars):
            return eqn
        if not all(_foldable(v.aval) for v in (*eqn.invars, *eqn.outvars)):
            return eqn
        (var,) = eqn.outvars
        shape = _jax.array_type(var).shape
        scalar = name == "broadcast_in_dim" and not _jax.array_type(eqn.invars[0]).shape
        if name == "iota" or (scalar and shape):
            self.known[var] = eqn
            return eqn
        try:
            self._check_bytes(level, eqn)
            value = compute(eqn, [self._value(atom) for atom in eqn.invars])
        except RefusedError as refusal:
            level.log.near_miss("fold", eqn, f"not folded: {refusal}")
            return eqn
        level.log.hit("fold", eqn)
        if shape and _is_uniform(value):
            self.known[var] = new = _broadcast_of(value, eqn)
            return new
        level.replace(var, _jax.literal(value, var.aval))
        return None

    def _is_known(self, atom: Atom) -> bool:
        if isinstance(atom, _jax.Literal):
            return not _jax.is_tracer(atom.val)
        return atom in self.known

    def _value(self, atom: Atom) -> np.ndarray:
        if isinstance(atom, _jax.Literal):
            return np.asarray(atom.val, _jax.array_type(atom).dtype)  # of a Python float too
        value = self.known[atom]
        if isinstance(value, _jax.Equation):
            value = self.known[atom] = compute(value, [self._value(a) for a in value.invars])
        return value

    def _check_bytes(self, level: Level, eqn: _jax.Equation) -> None:
        (var,) = eqn.outvars
        result = _nbytes(var.aval) * max(level.uses(var), 1)
        largest = max(result, *(_nbytes(atom.aval) for atom in eqn.invars))
        if largest > MAX_BYTES:
            size, limit = (f"{n / 2**20:.3g} MiB" for n in (largest, MAX_BYTES))
            raise RefusedError(f"{size} of constants, the limit is {limit}")


def _foldable(aval: Any) -> bool:
    return _jax.is_local(aval) and aval.dtype in DTYPES


def _nbytes(aval: Any) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize


def _is_uniform(value: np.ndarray) -> bool:
    """Returns whether all elements have the same bits."""
    if not value.size:
        return True
    rows = np.ascontiguousarray(value).reshape(-1, 1).view(np.uint8)
    return bool((rows == rows[0]).all())


def _broadcast_of(value: np.ndarray, eqn: _jax.Equation) -> _jax.Equation:
    (var,) = eqn.outvars
    first = value.reshape(-1)[0] if value.size else np.zeros((), value.dtype)
    scalar = var.aval.update(shape=(), sharding=None)
    params = {"shape": value.shape, "broadcast_dimensions": (), "sharding": None}
    return eqn.replace(
        primitive=lax.broadcast_in_dim_p,
        invars=[_jax.literal(np.asarray(first), scalar)],
        params=params,
    )


fold_constants = sweeping_pass(
    "fold_constants",
    "Computes now what depends on no input.",
    _Folder,
    (ExactRule("fold", None),),
)
