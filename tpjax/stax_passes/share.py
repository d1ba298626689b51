# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Merges equations that compute the same value from the same operands.

Two equations are the same when primitive, parameters, operands, types and context agree; operands
of commutative primitives in any order. Draws of random numbers with one key merge, as they are
equal. Equations with effects, and what stands apart on purpose (barriers, collectives), never
merge.

Casts to a narrower float of a value that may have a gradient do not merge either: the gradient, a
sum over all that read them, would be summed in the narrower dtype. XLA merges them, after autodiff.

A small jitted helper hides what it computes. One that computes what stands beside it, or inside
another helper, is opened, so that the two merge; the others stay calls.
"""

from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax import lax

from tpjax.core import _jax, parts
from tpjax.stax_passes.canonical import keeps_values
from tpjax.stax_passes.hashing import literal_key, signature
from tpjax.stax_passes.sweep import Atom, Edited, ExactRule, Level, sweeping_pass

NOTHING: Mapping[Any, Hashable] = MappingProxyType({})

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


MAX_OPENED = 64
"""Equations of a helper up to which it is looked into."""

FREE = frozenset({"broadcast_in_dim", "iota", "reshape", "squeeze", "pvary", "pcast"})
"""Primitives that cost nothing to repeat: no helper is opened for them."""

LAYER = "repeated_layer"
"""The name of a jit that `share_layers` made: one body of many calls stays one."""

MERGED = (
    "the same bits; cotangents are summed where the values merge, before they are multiplied with "
    "the derivative and not after, so gradients may round elsewhere, or overflow at the end of the "
    "dtype's range"
)


class _Merger:
    """The edit of one level: it remembers what was computed, and which helpers to open."""

    def __init__(self, level: Level) -> None:
        self.seen: dict[Hashable, _jax.Equation] = {}
        self.hiding = hiding(level.jaxpr)
        self.fixed = without_gradient(level.jaxpr)

    def __call__(self, level: Level, eqn: _jax.Equation) -> Edited:
        if not (self.hiding and eqn.outvars and eqn.outvars[0] in self.hiding):
            return self._merged(level, eqn)
        if not _jax.is_small_helper(eqn, MAX_OPENED) or _jax.subjaxprs(eqn)[0].consts:
            return self._merged(level, eqn)
        level.log.hit("shared_with_call", eqn)
        return self._opened(level, eqn)

    def _merged(self, level: Level, eqn: _jax.Equation) -> _jax.Equation | None:
        key = None if narrows(eqn) and eqn.invars[0] not in self.fixed else _key(eqn)
        first = eqn if key is None else self.seen.setdefault(key, eqn)
        if first is eqn:
            return eqn
        level.log.hit("common_subexpression", eqn)
        for var, same in zip(eqn.outvars, first.outvars, strict=True):
            level.replace(var, same)
        return None

    def _opened(self, level: Level, call: _jax.Equation) -> list[_jax.Equation]:
        """Returns the helper's equations, those merged that stand beside it already."""
        eqns, results = parts.opened(call)
        put: list[_jax.Equation] = []
        for original, copy in zip(_jax.subjaxprs(call)[0].eqns, eqns, strict=True):
            eqn = level.read(copy)
            if original.outvars and original.outvars[0] in self.hiding:
                put.extend(self._opened(level, eqn))
            elif self._merged(level, eqn) is not None:
                put.append(eqn)
        for var, result in zip(call.outvars, results, strict=True):
            level.replace(var, level.current(result))
        return put


def narrows(eqn: _jax.Equation) -> bool:
    """Returns whether the equation is a cast from a float to one of fewer bits."""
    if eqn.primitive is not lax.convert_element_type_p or isinstance(eqn.invars[0], _jax.Literal):
        return False
    source, target = (_jax.array_type(atom) for atom in (eqn.invars[0], eqn.outvars[0]))
    return has_gradient(source) and not keeps_values(source.dtype, target.dtype)


def has_gradient(aval: Any) -> bool:
    """Returns whether a value of the type may have a gradient."""
    return _jax.is_array(aval) and jnp.issubdtype(aval.dtype, jnp.inexact)


def without_gradient(jaxpr: _jax.Jaxpr) -> set[_jax.Var]:
    """Returns the values of the level that depend on no floating input, if any cast narrows."""
    fixed: set[_jax.Var] = set()
    if not any(map(narrows, jaxpr.eqns)):
        return fixed
    varying = {v for v in jaxpr.invars if has_gradient(v.aval)}
    for eqn in jaxpr.eqns:
        if any(v in varying for v in eqn.invars if isinstance(v, _jax.Var)):
            varying.update(v for v in eqn.outvars if has_gradient(v.aval))
        fixed.update(v for v in eqn.outvars if v not in varying)
    return fixed


def hiding(jaxpr: _jax.Jaxpr) -> set[_jax.Var]:
    """Returns the first results of the helpers that compute what is computed elsewhere too."""
    if not any(_may_open(eqn) for eqn in jaxpr.eqns):
        return set()
    found = _Numbering()
    found.walk(jaxpr, (), {})
    return found.hiding


def _may_open(eqn: _jax.Equation) -> bool:
    if not eqn.outvars or type(eqn.outvars[0]) is not _jax.Var:
        return False
    if eqn.params.get("name") == LAYER:
        return False
    return _jax.is_small_helper(eqn, MAX_OPENED) and not _jax.subjaxprs(eqn)[0].consts


Path = tuple[_jax.Var, ...]
"""The helpers around an equation, each by its first result."""


class _Numbering:
    """Gives equal values one number, as if every helper were open."""

    def __init__(self) -> None:
        self.hiding: set[_jax.Var] = set()
        self._seen: dict[Hashable, tuple[Path, list[Hashable]]] = {}

    def walk(self, jaxpr: _jax.Jaxpr, path: Path, number: dict[Any, Hashable]) -> None:
        """Numbers the values of a body whose inputs have their numbers."""
        for eqn in jaxpr.eqns:
            values: list[Hashable] = [(path, var) for var in eqn.outvars]
            key = None if narrows(eqn) else _key(eqn, number)
            first = (path, values) if key is None else self._seen.setdefault(key, (path, values))
            if first[1] is not values:
                if first[0] != path and not _is_free(eqn):
                    self._mark(first[0], path)
                values = first[1]
            elif _may_open(eqn):
                body = _jax.subjaxprs(eqn)[0]
                inner = dict(zip(body.invars, _numbers(eqn.invars, number), strict=True))
                self.walk(body, (*path, eqn.outvars[0]), inner)
                values[:] = _numbers(body.outvars, inner)
            number.update(zip(eqn.outvars, values, strict=True))

    def _mark(self, one: Path, other: Path) -> None:
        shared = 0
        while shared < min(len(one), len(other)) and one[shared] is other[shared]:
            shared += 1
        self.hiding.update(one[shared:], other[shared:])


def _is_free(eqn: _jax.Equation) -> bool:
    return eqn.primitive.name in FREE or all(isinstance(v, _jax.Literal) for v in eqn.invars)


def _numbers(atoms: Sequence[Atom], number: dict[Any, Hashable]) -> list[Hashable]:
    return [_operand_key(atom, number) for atom in atoms]


def _key(eqn: _jax.Equation, number: Mapping[Any, Hashable] = NOTHING) -> Hashable | None:
    """Returns what equal equations have in common, or None for one that merges with no other."""
    if eqn.effects or _jax.must_stay(eqn) or eqn.primitive.name in APART or not eqn.outvars:
        return None
    if any(type(var) is not _jax.Var for var in eqn.outvars):
        return None  # a dropped result has no variable that another reader could use
    operands = [_operand_key(atom, number) for atom in eqn.invars]
    if None in operands:
        return None
    if _is_commutative(eqn):
        operands.sort(key=hash)
    sign = signature(eqn)
    return None if sign is None else (sign, *operands)


def _operand_key(atom: Atom, number: Mapping[Any, Hashable]) -> Hashable | None:
    """Returns the operand's identity; equal literals are equal in bits and type."""
    if not isinstance(atom, _jax.Literal):
        return number.get(atom, atom)
    return literal_key(atom)


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
    "Merges equations that compute the same, in small jitted helpers too.",
    _Merger,
    (
        ExactRule("common_subexpression", None, MERGED),
        ExactRule("shared_with_call", None, MERGED),
    ),
)
