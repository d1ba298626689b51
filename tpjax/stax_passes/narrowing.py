# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Moves data before it is converted to a wider dtype, so that half the bytes are moved.

    reshape(float32(x))   becomes   float32(reshape(x))

XLA keeps the order: what it cannot fuse (concatenations, paddings, gathers) it moves in the wide
dtype, and what autodiff saves of a move is wide too. A conversion that comes to stand directly
before its reader is taken in by the product or the kernel there; one that comes to stand before the
conversion back goes.

The values are the same whatever moves. So that gradients are too, every element must be moved to at
most one place and the wide array must have no other reader: else cotangents that were summed in the
wide dtype would be summed in the narrow one. And the narrow array may have one reader besides, as
of three cotangents the order matters.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from tpjax.core import _jax
from tpjax.stax_passes.indexing import known
from tpjax.stax_passes.sweep import Atom, ExactRule, Level
from tpjax.stax_passes.table import Table, table_pass

NARROWED = "the same bits; gradients too"
NAME = "narrow_move"

Refusal = Callable[[Level, _jax.Equation, Atom], str | None]
"""Why the move of an operand that is converted from that array does not go first, or None."""


def _move(
    operands: "Callable[[_jax.Equation], list[int]]",
    refuse: Refusal,
    level: Level,
    eqn: _jax.Equation,
) -> "list[_jax.Equation] | str | None":
    """Returns the move of what the operands are converted from, and its conversion."""
    at = operands(eqn)
    makers = [level.maker(eqn.invars[i]) for i in at]
    if any(made is None or not _widens(made) for made in makers):
        return None
    source = makers[0].invars[0]  # pyright: ignore[reportOptionalMemberAccess]
    invars = list(eqn.invars)
    for i, made in zip(at, makers, strict=True):
        assert made is not None
        if not _alike(made, makers[0]):
            return None
        invars[i] = made.invars[0]
    reason = _other_readers(level, eqn, at, makers) or refuse(level, eqn, source)
    if reason is not None:
        return reason if _has_gradient(source) else None
    return _written(eqn, invars, makers[0], source)


def _widens(eqn: _jax.Equation) -> bool:
    """Returns whether the equation converts an array of no mesh to a dtype of more bytes."""
    if eqn.primitive.name != "convert_element_type" or eqn.params["sharding"] is not None:
        return False
    (x,), (y,) = eqn.invars, eqn.outvars
    if not _jax.is_local(x.aval) or not _jax.is_local(y.aval) or not isinstance(x, _jax.Var):
        return False
    a, b = _jax.array_type(x).dtype, _jax.array_type(y).dtype
    numbers = not jnp.issubdtype(b, jnp.complexfloating)
    return numbers and a.itemsize < b.itemsize


def _alike(a: Any, b: Any) -> bool:
    x, y = _jax.array_type(a.invars[0]), _jax.array_type(b.invars[0])
    return a.params == b.params and (x.dtype, x.weak_type) == (y.dtype, y.weak_type)


def _has_gradient(atom: Atom) -> bool:
    return jnp.issubdtype(_jax.array_type(atom).dtype, jnp.inexact)


def _other_readers(
    level: Level, eqn: _jax.Equation, at: list[int], makers: list[Any]
) -> str | None:
    for i, made in zip(at, makers, strict=True):
        wide, narrow = eqn.invars[i], made.invars[0]
        assert isinstance(wide, _jax.Var)
        assert isinstance(narrow, _jax.Var)
        if (count := level.uses(wide)) != 1:
            return _summed(f"the wide array is read {count} times", narrow)
        if _has_gradient(narrow) and level.uses(narrow) > 2:
            name = _jax.array_type(narrow).dtype.name
            return f"the {name} array has more readers: cotangents would be added in another order"
    return None


def _written(
    eqn: _jax.Equation, invars: list[Atom], convert: Any, source: Atom
) -> list[_jax.Equation]:
    narrow = _jax.array_type(source)
    moved = [
        _jax.Var(var.aval.update(dtype=narrow.dtype, weak_type=narrow.weak_type))
        for var in eqn.outvars
    ]
    back = [
        convert.replace(invars=[a], outvars=[b], ctx=eqn.ctx, source_info=eqn.source_info)
        for a, b in zip(moved, eqn.outvars, strict=True)
    ]
    return [eqn.replace(invars=invars, outvars=moved), *back]


# -- which operands move, and when not ------------------------------------------------------------


def _first(eqn: _jax.Equation) -> list[int]:
    del eqn
    return [0]


def _every(eqn: _jax.Equation) -> list[int]:
    return list(range(len(eqn.invars)))


def _first_two(eqn: _jax.Equation) -> list[int]:
    del eqn
    return [0, 1]


def _never(level: Level, eqn: _jax.Equation, source: Atom) -> None:
    del level, eqn, source


def _repeats(level: Level, eqn: _jax.Equation, source: Atom) -> str | None:
    del level
    if _jax.array_type(source).size == _jax.array_type(eqn.outvars[0]).size:
        return None
    return _summed("elements are repeated", source)


def _may_take_twice(level: Level, eqn: _jax.Equation, source: Atom) -> str | None:
    """Refuses a gather that may take an element twice, or fill in what the dtype has not."""
    if not _has_gradient(source):
        return "a fill of its own" if "FILL" in str(eqn.params["mode"]) else None
    numbers, indices = eqn.params["dimension_numbers"], known(level, eqn.invars[1])
    rows_alone = numbers.collapsed_slice_dims == numbers.start_index_map
    if indices is None or numbers.operand_batching_dims or not rows_alone:
        return _summed("an index may be repeated", source)
    rows = indices.reshape(-1, indices.shape[-1])
    size = [_jax.array_type(source).shape[d] for d in numbers.start_index_map]
    if ((rows < 0) | (rows >= np.array(size))).any():
        return "an index is out of bounds"
    if len(np.unique(rows, axis=0)) == len(rows):
        return None
    return _summed("an index is repeated", source)


def _summed(what: str, source: Atom) -> str:
    return f"{what}: gradients would be summed in {_jax.array_type(source).dtype.name}"


def _pad(level: Level, eqn: _jax.Equation) -> "list[_jax.Equation] | str | None":
    """Returns the padding of what is converted, with the same number in its dtype."""
    value = eqn.invars[1]
    made = level.maker(eqn.invars[0])
    if made is None or not _widens(made) or not isinstance(value, _jax.Literal):
        return None
    if _jax.is_tracer(value.val):
        return None
    narrow = _jax.array_type(made.invars[0])
    number = np.asarray(value.val, _jax.array_type(value).dtype)
    with np.errstate(all="ignore"):
        cast = number.astype(narrow.dtype)
        same = cast.astype(number.dtype).tobytes() == number.tobytes()
    if not same and not (number != number and cast != cast):
        return f"the padding, {number}, is no {narrow.dtype.name}"
    fill = _jax.literal(cast, narrow.update(shape=(), sharding=None))
    new = _move(_first, _never, level, eqn)
    if not isinstance(new, list):
        return new
    return [new[0].replace(invars=[new[0].invars[0], fill]), *new[1:]]


def _row(operands: Any, refuse: Refusal = _never) -> tuple[ExactRule, ...]:
    return (ExactRule(NAME, partial(_move, operands, refuse), NARROWED),)


RULES: Table = {
    **dict.fromkeys(
        ("reshape", "squeeze", "transpose", "rev", "slice", "split", "dynamic_slice"), _row(_first)
    ),
    **dict.fromkeys(("concatenate", "stack"), _row(_every)),
    "dynamic_update_slice": _row(_first_two),
    "broadcast_in_dim": _row(_first, _repeats),
    "gather": _row(_first, _may_take_twice),
    "pad": (ExactRule(NAME, _pad, NARROWED),),
}

narrow_moves = table_pass(
    "narrow_moves", "Moves data before it is converted to a wider dtype.", RULES
)
