# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Turns indexing whose indices are known into slices: gathers, dynamic slices and updates.

`x[jnp.arange(n)]`, `jnp.take(x, table)` and `lax.dynamic_slice(x, (0, 2), ...)` are traced as if
the indices came at run time. XLA does not undo a gather, and the gradient of one is a scatter, the
slowest move there is; that of a slice is a padding. Indices are known once constants are folded;
where they are handed to a small jitted helper, as `jnp.take` is, the helper is opened.

What JAX does with an index that is out of bounds (clamp, fill, or nothing defined) is kept: dynamic
slices are clamped, and a gather with such an index stays as it is.
"""

from typing import Any

import numpy as np
from jax import lax

from tpjax.core import _jax, parts
from tpjax.stax_passes.fold import DTYPES, compute
from tpjax.stax_passes.sweep import Atom, ExactRule, Level
from tpjax.stax_passes.table import Table

MAX_INDICES = 2**16
"""Indices of a gather that are looked at."""
MAX_HELPER = 16
"""Equations of a helper that is opened for the sake of a constant operand."""

INDEXES = {"gather": 1, "dynamic_slice": 1, "dynamic_update_slice": 2, "pad": 1}
"""What moves elements as numbers say, and the first operand that is such a number."""
HELPS = frozenset(INDEXES) | {
    "lt", "ge", "add", "sub", "select_n", "convert_element_type", "broadcast_in_dim", "reshape",
    "squeeze", "clamp", "concatenate", "iota", "max", "min", "slice",
}  # fmt: skip
"""What stands in the helpers with which jax.numpy takes elements."""

KEPT_BUT_ZEROS = (
    "the same bits; gradients too, but that a gather adds them to 0.0, which turns -0.0 into 0.0"
)


def known(level: Level, atom: Atom) -> np.ndarray | None:
    """Returns the operand's numbers if it is a small constant."""
    if isinstance(atom, _jax.Literal):
        if _jax.is_tracer(atom.val) or not _jax.is_array(atom.aval):
            return None
        return np.asarray(atom.val, _jax.array_type(atom).dtype)
    aval = _jax.array_type(atom)
    if not _jax.is_array(aval) or aval.dtype not in DTYPES or aval.size > MAX_INDICES:
        return None
    made = level.maker(atom)
    if made is None:
        return _constant(level, atom) if np.issubdtype(aval.dtype, np.integer) else None
    if made.primitive.name not in ("iota", "broadcast_in_dim") or not _jax.is_local(aval):
        return None
    operands = [known(level, x) if isinstance(x, _jax.Literal) else None for x in made.invars]
    return None if any(x is None for x in operands) else compute(made, operands)  # pyright: ignore


def _constant(level: Level, atom: Atom) -> np.ndarray | None:
    """Returns the value of a constant of the jaxpr that is a NumPy array, or None."""
    pairs = zip(level.jaxpr.constvars, level.jaxpr.consts, strict=True)
    value = next((value for var, value in pairs if var is atom), None)
    return np.asarray(value) if isinstance(value, np.ndarray) else None


def _known_starts(level: Level, atoms: list[Atom]) -> list[int] | None:
    values = [known(level, atom) for atom in atoms]
    return None if any(v is None for v in values) else [int(v) for v in values]  # pyright: ignore


def _window(starts: list[int], sizes: Any, strides: Any = None) -> dict[str, Any]:
    """Returns the parameters of the slice of the given size at the given place."""
    limits = tuple(int(a + n) for a, n in zip(starts, sizes, strict=True))
    return {"start_indices": tuple(starts), "limit_indices": limits, "strides": strides}


# -- dynamic slices -------------------------------------------------------------------------------


def known_start(level: Level, eqn: _jax.Equation) -> _jax.Equation | None:
    """A dynamic slice at known indices is a slice, moved inside as JAX does."""
    x, *at = eqn.invars
    if not _jax.is_local(x.aval):
        return None
    starts = _known_starts(level, at)
    if starts is None:
        return None
    sizes = eqn.params["slice_sizes"]
    room = zip(starts, sizes, _jax.array_type(x).shape, strict=True)
    starts = [min(max(a, 0), int(size - n)) for a, n, size in room]
    return eqn.replace(primitive=lax.slice_p, invars=[x], params=_window(starts, sizes))


def whole_update(level: Level, eqn: _jax.Equation) -> Atom | None:
    """An update of the whole array is the update, wherever it starts: it is moved inside."""
    del level
    return eqn.invars[1]  # taken only if it has the result's type


# -- gathers --------------------------------------------------------------------------------------


def known_indices(level: Level, eqn: _jax.Equation) -> "list[_jax.Equation] | str | None":
    """A gather at known indices that are one window, or rows at equal steps, is a slice."""
    indices = known(level, eqn.invars[1])
    x, numbers = eqn.invars[0], eqn.params["dimension_numbers"]
    if indices is None or not _jax.is_local(x.aval) or indices.size > MAX_INDICES:
        return None
    if numbers.operand_batching_dims or not indices.size:
        return None
    sizes, shape = eqn.params["slice_sizes"], _jax.array_type(x).shape
    rows = indices.reshape(-1, indices.shape[-1]).astype(np.int64)
    axes = numbers.start_index_map
    last = np.array([shape[d] - sizes[d] for d in axes])
    if "CLIP" in str(eqn.params["mode"]):
        rows = rows.clip(0, last)
    elif ((rows < 0) | (rows > last)).any():
        return "an index is out of bounds"
    if len(rows) == 1:
        starts = [0] * len(shape)
        for d, start in zip(axes, rows[0], strict=True):
            starts[d] = int(start)
        return _in_shape(eqn, _cut(eqn, _window(starts, sizes), sizes))
    if axes != numbers.collapsed_slice_dims or len(axes) != 1:
        return None
    (axis,), line = axes, rows[:, 0]
    if any(n != size for d, (n, size) in enumerate(zip(sizes, shape, strict=True)) if d != axis):
        return None
    batch = [
        i for i in range(len(_jax.array_type(eqn.outvars[0]).shape)) if i not in numbers.offset_dims
    ]
    if batch != list(range(axis, axis + indices.ndim - 1)):
        return None
    step = int(line[1] - line[0])
    if not step or (np.diff(line) != step).any():
        return "the indices are not at equal steps"
    return _steps(eqn, axis, line, step)


def _cut(eqn: _jax.Equation, params: dict[str, Any], shape: Any) -> _jax.Equation:
    x = eqn.invars[0]
    out = _jax.Var(x.aval.update(shape=tuple(int(n) for n in shape), sharding=None))
    return eqn.replace(primitive=lax.slice_p, invars=[x], outvars=[out], params=params)


def _steps(eqn: _jax.Equation, axis: int, line: np.ndarray, step: int) -> list[_jax.Equation]:
    shape = list(_jax.array_type(eqn.invars[0]).shape)
    starts, limits, strides = [0] * len(shape), list(shape), [1] * len(shape)
    starts[axis], limits[axis] = int(line.min()), int(line.max()) + 1
    strides[axis], shape[axis] = abs(step), len(line)
    params = {
        "start_indices": tuple(starts),
        "limit_indices": tuple(limits),
        "strides": None if abs(step) == 1 else tuple(strides),
    }
    cut = _cut(eqn, params, shape)
    if step > 0:
        return _in_shape(eqn, cut)
    (x,) = cut.outvars
    turned = eqn.replace(
        primitive=lax.rev_p, invars=[x], outvars=[_jax.Var(x.aval)], params={"dimensions": (axis,)}
    )
    return [cut, *_in_shape(eqn, turned)]


def _in_shape(eqn: _jax.Equation, last: _jax.Equation) -> list[_jax.Equation]:
    """Returns the equation that makes the elements, and a reshape where the result needs one."""
    (out,), (made,) = eqn.outvars, last.outvars
    shape = _jax.array_type(out).shape
    if _jax.array_type(made).shape == shape:
        return [last.replace(outvars=[out])]
    params = {"new_sizes": shape, "dimensions": None, "sharding": None}
    return [
        last, eqn.replace(primitive=lax.reshape_p, invars=[made], outvars=[out], params=params)
    ]  # fmt: skip


# -- helpers --------------------------------------------------------------------------------------


def open_helper(level: Level, eqn: _jax.Equation) -> list[_jax.Equation] | None:
    """Puts the equations of a small jitted helper in its place, if they take at known indices."""
    if not any(known(level, atom) is not None for atom in eqn.invars):
        return None
    if not _jax.is_small_helper(eqn, MAX_HELPER):
        return None
    (body,) = _jax.subjaxprs(eqn)
    if body.consts or [v.aval for v in body.outvars] != [v.aval for v in eqn.outvars]:
        return None
    names, stack = set[str](), list(body.eqns)
    while stack:
        one = stack.pop()
        inner = _jax.subjaxprs(one)
        names.update(() if inner else (one.primitive.name,))
        stack.extend(e for b in inner for e in b.eqns)
    if not names <= HELPS:
        return None
    if not names.isdisjoint(INDEXES):
        steer = _steering(body)
        at = [a for a, v in zip(eqn.invars, body.invars, strict=True) if v in steer]
        if not at or any(known(level, atom) is None for atom in at):
            return None
        if not _read_once(body, [a for a in eqn.invars if a not in at], eqn):
            return None
    elif not all(_is_whole(v) for v in eqn.outvars) or any(
        known(level, atom) is None for atom in eqn.invars
    ):
        return None
    eqns, results = parts.opened(eqn)
    for var, result in zip(eqn.outvars, results, strict=True):
        level.replace(var, result)
    return eqns


def _steering(body: _jax.Jaxpr) -> set[_jax.Var]:
    """Returns the variables that the places of elements, or a padding, are made from."""
    found: set[_jax.Var] = set()
    for eqn in reversed(body.eqns):
        first = INDEXES.get(eqn.primitive.name, len(eqn.invars))
        if not found.isdisjoint(eqn.outvars):
            first = 0
        found.update(v for v in eqn.invars[first:] if isinstance(v, _jax.Var))
    return found


def _is_whole(var: _jax.Var) -> bool:
    return _jax.is_array(var.aval) and np.issubdtype(_jax.array_type(var).dtype, np.integer)


def _read_once(body: _jax.Jaxpr, atoms: list[Atom], eqn: _jax.Equation) -> bool:
    """Returns whether the body reads each operand once, so that its gradient is no sum."""
    if len(set(map(id, atoms))) != len(atoms):
        return False
    reads = [v for one in body.eqns for v in one.invars if isinstance(v, _jax.Var)]
    inputs = dict(zip(map(id, eqn.invars), body.invars, strict=True))
    return all(sum(v is inputs[id(atom)] for v in reads) <= 1 for atom in atoms)


# -- the table ------------------------------------------------------------------------------------

_OPEN = (ExactRule("open_helper", open_helper),)

INDEXED: Table = {
    "dynamic_slice": (ExactRule("known_start", known_start),),
    "dynamic_update_slice": (ExactRule("whole_update", whole_update),),
    "gather": (ExactRule("known_indices", known_indices, KEPT_BUT_ZEROS),),
    "jit": _OPEN,
    "pjit": _OPEN,
}
