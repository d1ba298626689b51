# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Brings equations to one form and removes those that change nothing.

Every rule keeps the bits of evaluating the original equations one by one: NaNs count as equal
whatever their payload, and so do subnormal numbers that a machine flushes to zero. Hence `x + 0.0`
stays (it turns -0.0 into 0.0), `x * 0.0` and `x - x` stay (NaN, infinity), and `x ** 1.0` stays (a
power of floats rounds as the machine likes) where `x ** 1` goes. A rule fires only if shape, dtype,
weak type and sharding stay; and only if gradients of the new equations are those of the old, so
that a chain of dtypes is cut short only where it comes back to where it started.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tpjax.core import _jax
from tpjax.stax_passes.sweep import Atom, Edit, Edited, ExactRule, Level, sweeping_pass
from tpjax.stax_passes.table import apply_rows, rows_in

MIRRORED = {
    lax.add_p: lax.add_p, lax.mul_p: lax.mul_p, lax.and_p: lax.and_p, lax.or_p: lax.or_p,
    lax.xor_p: lax.xor_p, lax.eq_p: lax.eq_p, lax.ne_p: lax.ne_p, lax.lt_p: lax.gt_p,
    lax.gt_p: lax.lt_p, lax.le_p: lax.ge_p, lax.ge_p: lax.le_p,
}  # fmt: skip
"""The primitive that gives the same bits with its operands swapped."""


UNIFORM = frozenset({"broadcast_in_dim", "pvary", "reshape", "reshard", "squeeze"})
"""Primitives whose result has one number everywhere if the operand has."""


def number(level: Level, atom: Atom) -> np.ndarray | None:
    """Returns the number that every element of the operand is, as an array of rank 0, or None."""
    while (maker := level.maker(atom)) is not None and maker.primitive.name in UNIFORM:
        atom = maker.invars[0]
    if (
        not isinstance(atom, _jax.Literal)
        or _jax.array_type(atom).shape
        or _jax.is_tracer(atom.val)
    ):
        return None
    return np.asarray(atom.val)


# -- arithmetic -----------------------------------------------------------------------------------


def _constant_last(level: Level, eqn: _jax.Equation) -> _jax.Equation | None:
    left, right = eqn.invars
    if not isinstance(left, _jax.Literal) or isinstance(right, _jax.Literal):
        return None
    return eqn.replace(primitive=MIRRORED[eqn.primitive], invars=[right, left])


def _drop_operand(
    neutral: Callable[[np.ndarray], bool], level: Level, eqn: _jax.Equation
) -> "Atom | str | None":
    """Returns the first operand if the second is neutral; complex numbers round, so they stay."""
    x, constant = eqn.invars
    if not _jax.is_array(x.aval) or jnp.issubdtype(_jax.array_type(x).dtype, jnp.complexfloating):
        return None
    value = number(level, constant)
    if value is None:
        return None
    if not neutral(value):
        if eqn.primitive is lax.add_p and value == 0:
            return "adding 0.0 turns -0.0 into 0.0"
        return None
    result = eqn.outvars[0].aval
    return x if x.aval is result else f"the result is {result}, not {x.aval}"


def _is_one(value: np.ndarray) -> bool:
    return value.dtype != np.bool_ and bool(value == 1)


def _is_zero(value: np.ndarray) -> bool:
    return bool(value == 0) and not np.signbit(value.astype(np.float64))


def _leaves_sums(value: np.ndarray) -> bool:
    """-0.0 is neutral to a sum of floats; 0.0 is not, as -0.0 + 0.0 is 0.0."""
    if jnp.issubdtype(value.dtype, jnp.floating):
        return bool(value == 0) and bool(np.signbit(value.astype(np.float64)))
    return bool(value == 0)


def _all_ones(value: np.ndarray) -> bool:
    return bool(np.invert(value) == 0)


def _undone(level: Level, eqn: _jax.Equation) -> Atom | None:
    """f(f(x)) is x."""
    inner = _same_inside(level, eqn)
    return None if inner is None else inner.invars[0]


def _repeated(level: Level, eqn: _jax.Equation) -> Atom | None:
    """f(f(x)) is f(x)."""
    return None if _same_inside(level, eqn) is None else eqn.invars[0]


def _same_inside(level: Level, eqn: _jax.Equation) -> _jax.Equation | None:
    inner = level.maker(eqn.invars[0])
    if inner is None or inner.primitive is not eqn.primitive or inner.params != eqn.params:
        return None
    return inner


def _first_power(level: Level, eqn: _jax.Equation) -> Atom | None:
    return eqn.invars[0] if eqn.params["y"] == 1 else None


def _known_choice(level: Level, eqn: _jax.Equation) -> Atom | None:
    which, cases = number(level, eqn.invars[0]), eqn.invars[1:]
    return cases[int(which)] if which is not None and 0 <= int(which) < len(cases) else None


# -- dtypes ---------------------------------------------------------------------------------------


def keeps_values(source: Any, target: Any) -> bool:
    """Returns whether every value of one dtype is a value of the other."""
    if source == target or source == np.bool_:
        return True
    if jnp.issubdtype(source, jnp.integer):
        low, high = int(jnp.iinfo(source).min), int(jnp.iinfo(source).max)
        if jnp.issubdtype(target, jnp.integer):
            return int(jnp.iinfo(target).min) <= low and high <= int(jnp.iinfo(target).max)
        if jnp.issubdtype(target, jnp.floating):
            info = jnp.finfo(target)
            return high.bit_length() <= info.nmant + 1 and high.bit_length() < info.maxexp
    if jnp.issubdtype(source, jnp.floating) and jnp.issubdtype(target, jnp.floating):
        a, b = jnp.finfo(source), jnp.finfo(target)
        return a.nmant <= b.nmant and a.maxexp <= b.maxexp and b.minexp <= a.minexp
    return False


def _same_type(level: Level, eqn: _jax.Equation) -> Atom | None:
    return eqn.invars[0] if eqn.params.get("dimensions") is None else None


def _convert(level: Level, eqn: _jax.Equation) -> "Atom | _jax.Equation | None":
    """x -> wider -> x is x; whole numbers, which have no gradient, go the whole way at once."""
    inner = level.maker(eqn.invars[0])
    if inner is None or inner.primitive is not eqn.primitive or eqn.params["sharding"] is not None:
        return None
    x = inner.invars[0]
    ends = (x, eqn.invars[0], eqn.outvars[0])
    start, middle, end = (_jax.array_type(atom).dtype for atom in ends)
    if inner.params["sharding"] is not None or not _jax.is_array(x.aval):
        return None
    if not keeps_values(start, middle):
        return None
    if start == end and x.aval is eqn.outvars[0].aval:
        return x
    whole = start == np.bool_ or jnp.issubdtype(start, jnp.integer)
    return eqn.replace(invars=[x]) if whole and keeps_values(middle, end) else None


# -- movement -------------------------------------------------------------------------------------


def _in_order(eqn: _jax.Equation) -> bool:
    """Returns whether the equation changes the shape and leaves the elements in order."""
    name = eqn.primitive.name
    if name == "reshape":
        return eqn.params["dimensions"] is None and eqn.params["sharding"] is None
    if name == "broadcast_in_dim":
        dims = eqn.params["broadcast_dimensions"]
        sizes = {_jax.array_type(atom).size for atom in (eqn.invars[0], eqn.outvars[0])}
        same_size = len(eqn.invars) == 1 and len(sizes) == 1
        return same_size and list(dims) == sorted(dims) and eqn.params["sharding"] is None
    return name == "squeeze"


def _reshape(level: Level, eqn: _jax.Equation) -> "Atom | _jax.Equation | None":
    """A chain of reshapes that comes back is nothing; a reshape of a reshape is one.

    Taking axes of length one away or adding them is a reshape too; only of such, that stays.
    """
    inner = level.maker(eqn.invars[0])
    if inner is None or not _in_order(eqn) or not _in_order(inner):
        return None
    x = inner.invars[0]
    if x.aval is eqn.outvars[0].aval:
        return x
    if not _jax.is_local(x.aval) or not _jax.is_local(eqn.outvars[0].aval):
        return None
    if eqn.primitive is inner.primitive is lax.squeeze_p:
        return eqn.replace(invars=[x], params={"dimensions": _squeezed(inner, eqn)})
    if eqn.primitive is inner.primitive is lax.broadcast_in_dim_p:
        return None  # broadcasts of broadcasts have a rule, in whatever shapes
    shape = _jax.array_type(eqn.outvars[0]).shape
    params = {"new_sizes": shape, "dimensions": None, "sharding": None}
    return eqn.replace(primitive=lax.reshape_p, invars=[x], params=params)


def _squeezed(inner: _jax.Equation, outer: _jax.Equation) -> tuple[int, ...]:
    """Returns the axes that two squeezes take away together."""
    first = set(inner.params["dimensions"])
    rest = [i for i in range(len(_jax.array_type(inner.invars[0]).shape)) if i not in first]
    return tuple(sorted(first | {rest[i] for i in outer.params["dimensions"]}))


def _squeeze(level: Level, eqn: _jax.Equation) -> Atom | None:
    return None if eqn.params["dimensions"] else eqn.invars[0]


def _transpose(level: Level, eqn: _jax.Equation) -> "Atom | _jax.Equation | None":
    order = eqn.params["permutation"]
    if tuple(order) == tuple(range(len(order))):
        return eqn.invars[0]
    inner = level.maker(eqn.invars[0])
    if inner is None or inner.primitive is not eqn.primitive:
        return None
    composed = tuple(inner.params["permutation"][i] for i in order)
    x = inner.invars[0]
    if composed == tuple(range(len(order))):
        return x
    return eqn.replace(invars=[x], params=dict(eqn.params, permutation=composed))


def _whole_slice(level: Level, eqn: _jax.Equation) -> Atom | None:
    strides = eqn.params["strides"]
    return eqn.invars[0] if strides is None or all(s == 1 for s in strides) else None


def _no_padding(level: Level, eqn: _jax.Equation) -> Atom | None:
    config = eqn.params["padding_config"]
    return eqn.invars[0] if all(tuple(c) == (0, 0, 0) for c in config) else None


def _only_piece(level: Level, eqn: _jax.Equation) -> Atom | None:
    return eqn.invars[0] if len(eqn.invars) == 1 else None


def _reverse(level: Level, eqn: _jax.Equation) -> Atom | None:
    return eqn.invars[0] if not eqn.params["dimensions"] else _undone(level, eqn)


def _no_broadcast(level: Level, eqn: _jax.Equation) -> Atom | None:
    dims = eqn.params["broadcast_dimensions"]
    return eqn.invars[0] if tuple(dims) == tuple(range(len(dims))) else None


# -- the table ------------------------------------------------------------------------------------

RULES: dict[str, tuple[ExactRule, ...]] = {
    "add": (ExactRule("add_zero", partial(_drop_operand, _leaves_sums)),),
    "sub": (ExactRule("subtract_zero", partial(_drop_operand, _is_zero)),),
    "mul": (ExactRule("multiply_one", partial(_drop_operand, _is_one)),),
    "div": (ExactRule("divide_one", partial(_drop_operand, _is_one)),),
    "integer_pow": (ExactRule("first_power", _first_power),),
    "neg": (ExactRule("negate_twice", _undone),),
    "not": (ExactRule("not_twice", _undone),),
    "and": (ExactRule("and_ones", partial(_drop_operand, _all_ones)),),
    "or": (ExactRule("or_zero", partial(_drop_operand, _is_zero)),),
    "xor": (ExactRule("xor_zero", partial(_drop_operand, _is_zero)),),
    "shift_left": (ExactRule("shift_zero", partial(_drop_operand, _is_zero)),),
    "shift_right_logical": (ExactRule("shift_zero", partial(_drop_operand, _is_zero)),),
    "shift_right_arithmetic": (ExactRule("shift_zero", partial(_drop_operand, _is_zero)),),
    "abs": (ExactRule("abs_twice", _repeated),),
    "floor": (ExactRule("round_twice", _repeated),),
    "ceil": (ExactRule("round_twice", _repeated),),
    "round": (ExactRule("round_twice", _repeated),),
    "sign": (ExactRule("sign_twice", _repeated),),
    "select_n": (ExactRule("known_choice", _known_choice),),
    "convert_element_type": (
        ExactRule("convert_to_same", _same_type),
        ExactRule("convert_chain", _convert),
    ),
    "reshape": (ExactRule("reshape_to_same", _same_type), ExactRule("reshape_chain", _reshape)),
    "squeeze": (ExactRule("squeeze_nothing", _squeeze), ExactRule("reshape_chain", _reshape)),
    "broadcast_in_dim": (
        ExactRule("broadcast_to_same", _no_broadcast),
        ExactRule("reshape_chain", _reshape),
    ),
    "transpose": (ExactRule("transpose_chain", _transpose),),
    "slice": (ExactRule("whole_slice", _whole_slice),),
    "dynamic_slice": (ExactRule("whole_slice", _same_type),),
    "pad": (ExactRule("pad_nothing", _no_padding),),
    "concatenate": (ExactRule("concatenate_one", _only_piece),),
    "rev": (ExactRule("reverse_twice", _reverse),),
}
"""By primitive, the rules in order; a rule's value is taken only if its type is the result's."""


def _edit(level: Level, eqn: _jax.Equation) -> Edited:
    if eqn.primitive in MIRRORED and len(eqn.invars) == 2:
        swapped = _constant_last(level, eqn)
        if swapped is not None:
            level.log.hit("constant_last", eqn)
            eqn = swapped
    new = apply_rows(RULES, level, eqn)
    if isinstance(new, _jax.Equation):
        _forward_results(level, new)
    return new


def _forward_results(level: Level, eqn: _jax.Equation) -> None:
    """Lets readers of a call's result that is its operand, or a constant, read that instead."""
    if not _jax.is_plain_jit(eqn):
        return
    body = _jax.subjaxprs(eqn)[0]
    operands = dict(zip(body.invars, eqn.invars, strict=True))
    for var, result in zip(eqn.outvars, body.outvars, strict=True):
        atom = result if isinstance(result, _jax.Literal) else operands.get(result)
        if atom is not None and atom.aval is var.aval and level.uses(var):
            level.log.hit("forward_result", eqn)
            level.replace(var, atom)


def _start(level: Level) -> Edit:
    del level
    return _edit


canonicalise = sweeping_pass(
    "canonicalise",
    "Brings equations to one form and removes those that change nothing.",
    _start,
    (ExactRule("constant_last", None), *rows_in(RULES), ExactRule("forward_result", None)),
)
