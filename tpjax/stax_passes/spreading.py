# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Computes on rows and scalars before they are repeated, not after.

    sin(broadcast(x))            becomes   broadcast(sin(x))
    broadcast(x) * broadcast(y)  becomes   broadcast(x * y)
    float32(repeat(x))           becomes   repeat(float32(x))

XLA does some of this, after autodiff: by then what the function saves for its gradient has been
saved at full size. And a repeat that comes to stand before a matrix product goes
(`tpjax.stax_passes.contraction`).

Only functions whose bits do not depend on where in an array an element stands: of some, XLA's CPU
code computes the last elements of an odd length in another way than the first (`exp` and `log` in
JAX 0.11.2, `atan` in 0.12).
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from tpjax.core import _jax
from tpjax.stax_passes.canonical import keeps_values, number
from tpjax.stax_passes.hoist import is_short_range
from tpjax.stax_passes.sweep import Atom, ExactRule, Level
from tpjax.stax_passes.table import Table, table_pass

CONTRACT = (
    "the same bits; in gradients, sums over the repeated elements are taken before the derivative "
    "is multiplied with, not after"
)

FUNCTIONS = (
    "abs", "add", "and", "ceil", "convert_element_type", "cos", "div", "eq", "expm1",
    "floor", "ge", "gt", "integer_pow", "is_finite", "le", "log1p", "lt", "max",
    "min", "mul", "ne", "neg", "not", "or", "round", "rsqrt", "select_n", "sign", "sin", "sqrt",
    "square", "sub", "tanh", "xor",
)  # fmt: skip
"""Elementwise primitives that give an element the same bits at every place of every array."""


class Spread(NamedTuple):
    """An array that is another one broadcast, and perhaps reshaped then."""

    source: _jax.Var
    steps: tuple[_jax.Equation, ...]
    """The equations that make it, in order."""

    def recipe(self) -> Any:
        """Returns what two arrays that are spread alike have in common."""
        shape = _jax.array_type(self.source).shape
        return shape, tuple((e.primitive, tuple(sorted(e.params.items()))) for e in self.steps)


def _may_be_spread(made: _jax.Equation | None) -> bool:
    return made is not None and made.primitive in (lax.broadcast_in_dim_p, lax.reshape_p)


def spread_of(level: Level, atom: Atom) -> Spread | None:
    """Returns how the operand is made of a smaller array, or None."""
    steps: list[_jax.Equation] = []
    made = level.maker(atom)
    if made is not None and made.primitive is lax.reshape_p:
        if made.params["dimensions"] is not None or made.params["sharding"] is not None:
            return None
        steps.append(made)
        made = level.maker(made.invars[0])
    if made is None or made.primitive is not lax.broadcast_in_dim_p or len(made.invars) != 1:
        return None
    source = made.invars[0]
    if not isinstance(source, _jax.Var) or made.params["sharding"] is not None:
        return None
    if not _jax.is_local(source.aval) or not _jax.is_local(atom.aval):
        return None
    grows = _jax.array_type(source).size < _jax.array_type(atom).size
    return Spread(source, (made, *steps)) if grows else None


def sink_broadcast(level: Level, eqn: _jax.Equation) -> list[_jax.Equation] | None:
    """A function of arrays that are spread alike is computed on what is spread."""
    if not any(_may_be_spread(level.maker(atom)) for atom in eqn.invars):
        return None
    if eqn.params.get("sharding") is not None or not _jax.is_local(eqn.outvars[0].aval):
        return None
    if _loses_digits(eqn) or is_short_range(eqn.outvars[0].aval):
        return None
    first: Spread | None = None
    operands: list[Any] = []
    for atom in eqn.invars:
        if isinstance(atom, _jax.Literal) and not _jax.array_type(atom).shape:
            operands.append(atom)
            continue
        spread = spread_of(level, atom)
        if spread is None:
            constant = number(level, atom)
            if constant is None or not _jax.is_local(atom.aval):
                return None
            scalar = _jax.array_type(atom).update(shape=(), sharding=None)
            operands.append(_jax.literal(constant.astype(scalar.dtype), scalar))
            continue
        if first is not None and spread.recipe() != first.recipe():
            return None
        first = first or spread
        operands.append(spread.source)
    return None if first is None else _computed_first(eqn, operands, first)


def _loses_digits(eqn: _jax.Equation) -> bool:
    """Whether it is a cast to a narrower float: the gradient's sum would be taken in that."""
    if eqn.primitive is not lax.convert_element_type_p:
        return False
    source, target = (_jax.array_type(atom).dtype for atom in (eqn.invars[0], eqn.outvars[0]))
    floats = all(jnp.issubdtype(dtype, jnp.floating) for dtype in (source, target))
    return floats and not keeps_values(source, target)


def _computed_first(eqn: _jax.Equation, operands: list[Any], spread: Spread) -> list[_jax.Equation]:
    shape = _jax.array_type(spread.source).shape
    added: list[_jax.Equation] = []
    for i, x in enumerate(operands):
        if isinstance(x, _jax.Literal) and _jax.array_type(eqn.invars[i]).shape:
            operands[i] = _jax.Var(x.aval.update(shape=shape, sharding=None))
            params = {"shape": shape, "broadcast_dimensions": (), "sharding": None}
            added.append(
                eqn.replace(
                    primitive=lax.broadcast_in_dim_p,
                    invars=[x],
                    outvars=[operands[i]],
                    params=params,
                )
            )
    out = _jax.array_type(eqn.outvars[0])
    value = _jax.Var(out.update(shape=shape, sharding=None))
    added.append(eqn.replace(invars=operands, outvars=[value]))
    for step in spread.steps:
        last = step is spread.steps[-1]
        wide = _jax.array_type(step.outvars[0]).shape
        var = eqn.outvars[0] if last else _jax.Var(out.update(shape=wide, sharding=None))
        added.append(
            eqn.replace(primitive=step.primitive, invars=[value], outvars=[var], params=step.params)
        )
        value = var
    return added


RULES: Table = dict.fromkeys(FUNCTIONS, (ExactRule("sink_broadcast", sink_broadcast, CONTRACT),))

sink_broadcasts = table_pass(
    "sink_broadcasts", "Computes on arrays before they are repeated, not after.", RULES
)
