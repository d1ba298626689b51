# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Evaluates jaxprs one equation at a time, quickly for thousands of small programs.

XLA takes 30 ms to compile one equation. So moves, which compute nothing, are NumPy's; equations
that work on each element alone run flat and padded to one length, and are compiled once for each
dtype; the others run as they are. What one equation of some operands gave is remembered: the same
program after another pass repeats most of it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpjax.core import _jax

LANES = 64
MAX_TURNS = 1000

ELEMENTWISE = frozenset({
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "cbrt", "ceil", "clamp", "clz", "complex", "conj", "convert_element_type", "cos", "cosh",
    "digamma", "div", "eq", "eq_to", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor",
    "ge", "gt", "igamma", "imag", "integer_pow", "is_finite", "le", "le_to", "lgamma", "log",
    "log1p", "logistic", "lt", "lt_to", "max", "min", "mul", "mulhi", "ne", "neg", "nextafter",
    "not", "or", "polygamma", "population_count", "pow", "real", "reduce_precision", "rem", "round",
    "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign",
    "sin", "sinh", "sqrt", "square", "sub", "tan", "tanh", "xor", "bessel_i0e", "bessel_i1e",
})  # fmt: skip
"""Primitives of which each result element depends on the same element of the operands alone."""


def _broadcast(x: Any, shape: Any, broadcast_dimensions: Any, **_: Any) -> Any:
    sizes = [1] * len(shape)
    for axis, size in zip(broadcast_dimensions, x.shape, strict=True):
        sizes[axis] = size
    return np.broadcast_to(x.reshape(sizes), shape)


def _slice(x: Any, start_indices: Any, limit_indices: Any, strides: Any) -> Any:
    return x[tuple(map(slice, start_indices, limit_indices, strides or (1,) * x.ndim))]


MOVES: dict[str, Any] = {
    "reshape": lambda x, new_sizes, **_: x.reshape(new_sizes),
    "squeeze": lambda x, dimensions: x.squeeze(tuple(dimensions)),
    "transpose": lambda x, permutation: x.transpose(permutation),
    "rev": lambda x, dimensions: np.flip(x, tuple(dimensions)),
    "concatenate": lambda *xs, dimension: np.concatenate(xs, dimension),
    "broadcast_in_dim": _broadcast, "slice": _slice,
    "copy": lambda x, **_: x, "copy_p": lambda x, **_: x, "stop_gradient": lambda x, **_: x,
    "name": lambda x, **_: x, "optimization_barrier": lambda *xs, **_: xs,
}  # fmt: skip
"""Primitives that compute nothing."""


class EndlessError(Exception):
    """A loop goes on and on."""


class Evaluator:
    """Evaluates jaxprs on arrays of NumPy and keys of JAX; remembers what each equation gave."""

    def __init__(self) -> None:
        """Remembers nothing."""
        self.log: list[tuple[str, list[Any]]] = []
        """What was called back, in order."""
        self._known: dict[Any, tuple[Any, list[Any]]] = {}
        self._literals: dict[int, tuple[Any, Any]] = {}
        self._equal: dict[Any, Any] = {}

    def __call__(self, jaxpr: _jax.Jaxpr, *args: Any) -> list[Any]:
        """Returns the results of evaluating every equation on its own, bodies included."""
        env = dict(zip(jaxpr.constvars, map(self._constant, jaxpr.consts), strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        for eqn in jaxpr.eqns:
            values = [env[v] if type(v) is _jax.Var else self._read(v, env) for v in eqn.invars]
            env.update(zip(eqn.outvars, self._equation(eqn, values), strict=True))
        return [self._read(atom, env) for atom in jaxpr.outvars]

    def _read(self, atom: Any, env: dict[Any, Any]) -> Any:
        if not isinstance(atom, _jax.Literal):
            return env[atom]
        if id(atom) not in self._literals:
            value = _host(np.asarray(atom.val, _jax.array_type(atom).dtype))
            bits_of = (value.dtype, value.shape, value.tobytes())
            self._literals[id(atom)] = atom, self._equal.setdefault(bits_of, value)
        return self._literals[id(atom)][1]

    def _constant(self, value: Any) -> Any:
        if id(value) not in self._literals:
            self._literals[id(value)] = value, _host(value)
        return self._literals[id(value)][1]

    def _equation(self, eqn: _jax.Equation, values: list[Any]) -> list[Any]:
        match eqn.primitive.name:
            case "jit" | "pjit" | "remat2" | "checkpoint":
                return self(eqn.params["jaxpr"], *values)
            case "closed_call" | "custom_jvp_call" | "custom_vjp_call":
                return self(eqn.params["call_jaxpr"], *values)
            case "cond":
                branches = eqn.params["branches"]
                return self(branches[min(max(int(values[0]), 0), len(branches) - 1)], *values[1:])
            case "while":
                return self._while(eqn, values)
            case "scan":
                return self._scan(eqn, values)
            case "debug_callback" | "io_callback":
                self.log.append((eqn.primitive.name, values))
                return values[: len(eqn.outvars)]
        key = (eqn.primitive, *eqn.params.values(), *map(id, values))
        try:
            known = self._known.get(key)
        except TypeError:  # a parameter without a hash
            key = (eqn.primitive, id(eqn.params), *map(id, values))
            known = self._known.get(key)
        if known is None:
            results = [without_subnormals(x) for x in self.leaf(eqn, values)]
            known = self._known[key] = (eqn.params, values), results
        return known[1]

    def leaf(self, eqn: _jax.Equation, values: list[Any]) -> list[Any]:
        """Returns the results of one equation without bodies."""
        return run_primitive(eqn, values)

    def rows(self, x: Any) -> list[Any]:
        """Returns the rows of a scanned operand."""
        return [_host(row) for row in x]

    def stack(self, rows: Any, aval: Any) -> Any:
        """Returns rows as a result of a scan."""
        rows = list(rows)
        return np.stack(rows) if rows else np.zeros(aval.shape, aval.dtype)

    def _while(self, eqn: _jax.Equation, values: list[Any]) -> list[Any]:
        cond, body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        carry, turns = values[cond + body :], 0
        while np.any(self(eqn.params["cond_jaxpr"], *values[:cond], *carry)[0]):  # any, if batched
            carry = self(eqn.params["body_jaxpr"], *values[cond : cond + body], *carry)
            turns += 1
            if turns > MAX_TURNS:
                raise EndlessError(f"a loop goes on after {MAX_TURNS} turns")
        return carry

    def _scan(self, eqn: _jax.Equation, values: list[Any]) -> list[Any]:
        num_consts, num_carry = _jax.loop_parts(eqn)
        consts, carry = values[:num_consts], values[num_consts : num_consts + num_carry]
        xs = [self.rows(x) for x in values[num_consts + num_carry :]]
        steps, stacked = range(eqn.params["length"]), []
        for i in reversed(steps) if eqn.params["reverse"] else steps:
            results = self(eqn.params["jaxpr"], *consts, *carry, *(x[i] for x in xs))
            carry = results[:num_carry]
            stacked.append(results[num_carry:])
        if eqn.params["reverse"]:
            stacked.reverse()
        outs = eqn.outvars[num_carry:]
        return [*carry, *(self.stack((r[k] for r in stacked), v.aval) for k, v in enumerate(outs))]


def _host(x: Any) -> Any:
    return x if isinstance(x, jax.Array) and _jax.is_key(x) else np.asarray(x)


def run_primitive(eqn: _jax.Equation, values: list[Any]) -> list[Any]:
    """Returns the results of one equation."""
    name = eqn.primitive.name
    keys = any(isinstance(x, jax.Array) for x in values)
    if name in MOVES and not keys:
        out = MOVES[name](*values, **eqn.params)
        return list(out) if eqn.primitive.multiple_results else [out]
    if name in ELEMENTWISE and not keys:
        return [_flat(eqn, values)]
    params = eqn.primitive.get_bind_params(eqn.params)
    out = eqn.primitive.bind(*values, **params)
    return [_host(x) for x in out] if eqn.primitive.multiple_results else [_host(out)]


def _flat(eqn: _jax.Equation, values: list[Any]) -> Any:
    shape = _jax.array_type(eqn.outvars[0]).shape
    size = int(np.prod(shape))
    lanes = -(-max(size, 1) // LANES) * LANES
    padded = []
    for x in values:
        buffer = np.ones(lanes, x.dtype)
        buffer[:size] = np.broadcast_to(x, shape).reshape(-1)
        padded.append(buffer)
    params = eqn.params
    if eqn.primitive.name == "convert_element_type":
        params = dict(params, weak_type=False)
    return np.asarray(eqn.primitive.bind(*padded, **params))[:size].reshape(shape)


FLUSHED = frozenset(map(jnp.dtype, (jnp.float32, jnp.float64, jnp.bfloat16)))


def without_subnormals(x: Any) -> Any:
    """Returns the array with zeros for subnormal numbers, as machines flush them where they like.

    Those of float16, on which machines compute in float32, stay.
    """
    if not isinstance(x, np.ndarray) or x.dtype not in FLUSHED or not x.size:
        return x
    small = (x != 0) & (np.abs(x) < jnp.finfo(x.dtype).tiny)
    return np.where(small, np.copysign(np.zeros((), x.dtype), x), x) if small.any() else x


def bits(x: Any) -> np.ndarray:
    """Returns the bits of an array; NaNs are one value, whatever their payload."""
    if isinstance(x, jax.Array) and _jax.is_key(x):
        x = jax.random.key_data(x)
    x = np.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = np.stack([x.real, x.imag])
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    x = np.where(np.isnan(x), np.asarray(np.nan, x.dtype), x)
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


def same_bits(x: Any, y: Any) -> bool:
    """Returns whether two arrays have the same bits; NaNs are one value."""
    if x is y:
        return True
    a, b = bits(x), bits(y)
    return a.shape == b.shape and a.dtype == b.dtype and not (a != b).any()
