# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Merges equations that compute the same value from the same operands.

Two equations are the same when primitive, parameters, operands, types and context agree; operands
of commutative primitives in any order. Draws of random numbers with one key merge, as they are
equal. Equations with effects, and what stands apart on purpose (barriers, collectives), never
merge.
"""

from collections.abc import Hashable
from typing import Any

import jax.numpy as jnp
import numpy as np

from tpjax.core import _jax
from tpjax.stax_passes.sweep import Atom, Edit, ExactRule, Level, sweeping_pass

APART = frozenset({
    "optimization_barrier", "rng_uniform", "copy",
    "psum", "psum2", "psum_invariant", "pmax", "pmin", "ppermute", "pbroadcast",
    "all_gather", "all_gather_invariant", "all_to_all", "ragged_all_to_all",
    "reduce_scatter", "psum_scatter",
})  # fmt: skip
"""Primitives that two equations of one value do not share: barriers, state, collectives."""

COMMUTATIVE = frozenset({"add", "mul", "add_any", "and", "or", "xor", "eq", "ne"})
COMMUTATIVE_INTEGERS = frozenset({"max", "min"})
"""Of floats they are not, in bits: of -0.0 and 0.0, which is returned may depend on the order."""


def _start(level: Level) -> Edit:
    del level
    seen: dict[Hashable, _jax.Equation] = {}

    def edit(level: Level, eqn: _jax.Equation) -> _jax.Equation | None:
        key = _key(eqn)
        if key is None:
            return eqn
        first = seen.setdefault(key, eqn)
        if first is eqn:
            return eqn
        level.log.hit("common_subexpression", eqn)
        for var, same in zip(eqn.outvars, first.outvars, strict=True):
            level.replace(var, same)
        return None

    return edit


def _key(eqn: _jax.Equation) -> Hashable | None:
    """Returns what equal equations have in common, or None for one that merges with no other."""
    if eqn.effects or _jax.must_stay(eqn) or eqn.primitive.name in APART or not eqn.outvars:
        return None
    if any(type(var) is not _jax.Var for var in eqn.outvars):
        return None  # a dropped result has no variable that another reader could use
    operands = [_operand_key(atom) for atom in eqn.invars]
    if None in operands:
        return None
    if _is_commutative(eqn):
        operands.sort(key=hash)
    try:
        params = tuple((name, _exact(eqn.params[name])) for name in sorted(eqn.params))
        types = tuple(var.aval for var in eqn.outvars)
        key = (eqn.primitive, eqn.ctx, params, types, *operands)
        hash(key)
    except TypeError:
        return None  # a parameter without a hash
    return key


def _operand_key(atom: Atom) -> Hashable | None:
    """Returns the operand's identity; equal literals are equal in bits and type."""
    if not isinstance(atom, _jax.Literal):
        return atom
    if _jax.is_tracer(atom.val) or not _jax.is_array(atom.aval):
        return None
    return atom.aval, np.asarray(atom.val, _jax.array_type(atom).dtype).tobytes()


def _exact(value: Any) -> Hashable:
    """Returns the parameter with its type, so that True is not 1 and -0.0 is not 0.0."""
    if isinstance(value, float):
        return float, repr(value)
    if isinstance(value, tuple):
        return tuple(map(_exact, value))
    return type(value), value


def _is_commutative(eqn: _jax.Equation) -> bool:
    if len(eqn.invars) != 2 or not _jax.is_array(eqn.invars[0].aval):
        return False
    dtype = _jax.array_type(eqn.invars[0]).dtype
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return False
    name = eqn.primitive.name
    if name in COMMUTATIVE_INTEGERS:
        return not jnp.issubdtype(dtype, jnp.floating)
    return name in COMMUTATIVE


share_subexpressions = sweeping_pass(
    "share_subexpressions",
    "Merges equations that compute the same.",
    _start,
    (ExactRule("common_subexpression", None),),
)
