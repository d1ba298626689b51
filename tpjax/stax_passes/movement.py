# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Takes moves of data apart and together: slices, pieces, paddings and broadcasts of one another.

XLA does this too, but later: before it, autodiff turns every slice into a padding and a sum as long
as what was sliced, and keeps what a move made beside what it was made from. Rules that look for a
pattern, and the sharing of equal equations, meet one spelling of a move instead of many. Moves at
known indices are in `tpjax.stax_passes.indexing`.

A move through another that something else reads too would leave both, so most rules ask that nobody
does. In gradients a cotangent that is moved once instead of twice is added to others in another
order, and where 0.0 is no longer added to it, -0.0 stays -0.0.
"""

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

from jax import lax

from tpjax.core import _jax
from tpjax.stax_passes.indexing import INDEXED
from tpjax.stax_passes.sweep import Atom, ExactRule, Level
from tpjax.stax_passes.table import Table, table_pass

Range = tuple[int, int, int]
"""First element, one past the last, step."""

MAX_PIECES = 64
"""Pieces up to which a concatenation takes in another, so that a growing one stays linear."""

MOVED = "the same bits; gradients up to the order of their sums and the sign of zeros"


def ranges(eqn: _jax.Equation) -> list[Range]:
    """Returns, for each axis of a slice's operand, what is taken; the end is the least possible."""
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    steps = eqn.params["strides"] or (1,) * len(starts)
    counts = _jax.array_type(eqn.outvars[0]).shape
    return [
        (int(a), int(a + (n - 1) * s + 1) if n else int(a), int(s))
        for a, _, s, n in zip(starts, limits, steps, counts, strict=True)
    ]


def slice_params(taken: Iterable[Range]) -> dict[str, Any]:
    """Returns the parameters of the slice that takes the ranges."""
    starts, limits, steps = zip(*taken, strict=True)
    plain = all(step == 1 for step in steps)
    return {
        "start_indices": starts,
        "limit_indices": limits,
        "strides": None if plain else steps,
    }


def whole(taken: Range, size: int) -> bool:
    """Returns whether the range is every element of an axis, in order."""
    return taken == (0, size, 1)


def _lengths(taken: Iterable[Range]) -> list[int]:
    return [len(range(*one)) for one in taken]


def fresh(like: Atom, shape: Iterable[int], **changes: Any) -> _jax.Var:
    """Returns a new variable of the operand's type with another shape."""
    return _jax.Var(like.aval.update(shape=tuple(shape), sharding=None, **changes))


def same_kind(a: Atom, b: Atom) -> bool:
    """Returns whether two local arrays have one dtype and weak type."""
    x, y = _jax.array_type(a), _jax.array_type(b)
    local = _jax.is_local(x) and _jax.is_local(y)
    return local and (x.dtype, x.weak_type) == (y.dtype, y.weak_type)


def _maker(level: Level, eqn: _jax.Equation, name: str, *, alone: bool) -> _jax.Equation | None:
    """Returns the equation of that name that makes the operand; `alone`: for no other reader."""
    made = level.maker(eqn.invars[0])
    if made is None or made.primitive.name != name or not _jax.is_local(eqn.invars[0].aval):
        return None
    return made if not alone or _read_here_only(level, eqn.invars[0]) else None


# -- slices ---------------------------------------------------------------------------------------


def slice_of_slice(level: Level, eqn: _jax.Equation) -> _jax.Equation | None:
    """x[a:b][c:d] is one slice of x."""
    inner = _maker(level, eqn, "slice", alone=True)
    if inner is None:
        return None
    taken = []
    for (a, _, s), (b, end, t) in zip(ranges(inner), ranges(eqn), strict=True):
        start, count = a + b * s, -(-(end - b) // t)
        taken.append((start, start + (count - 1) * s * t + 1 if count else start, s * t))
    return eqn.replace(invars=inner.invars, params=slice_params(taken))


def slice_of_pieces(level: Level, eqn: _jax.Equation) -> Atom | list[_jax.Equation] | None:
    """A slice that lies in one piece of a concatenation or a stack is a slice of the piece."""
    inner = _maker(level, eqn, "concatenate", alone=False) or _maker(
        level, eqn, "stack", alone=False
    )
    if inner is None:
        return None
    stacked = inner.primitive.name == "stack"
    axis = int(inner.params["axis" if stacked else "dimension"])
    taken = ranges(eqn)
    start, end, step = taken[axis]
    for piece in inner.invars:
        shape = list(_jax.array_type(piece).shape)
        size = 1 if stacked else shape[axis]
        if 0 <= start < end <= size:
            break
        start, end = start - size, end - size
    else:
        return None
    if not same_kind(piece, eqn.outvars[0]):
        return None
    taken[axis] = (start, end, step)
    if not stacked:
        if all(map(whole, taken, shape)):
            return piece
        return [_slice(eqn, piece, taken, eqn.outvars[0])]
    del taken[axis]
    added = []
    if not all(map(whole, taken, shape)):
        cut = fresh(piece, _lengths(taken))
        added.append(_slice(eqn, piece, taken, cut))
        piece = cut
    rank = len(shape) + 1
    dims = tuple(i for i in range(rank) if i != axis)
    return [*added, _broadcast(eqn, piece, dims, eqn.outvars[0])]


def slice_of_broadcast(level: Level, eqn: _jax.Equation) -> list[_jax.Equation] | None:
    """A slice of a broadcast is a smaller broadcast."""
    inner = _maker(level, eqn, "broadcast_in_dim", alone=False)
    if inner is None or not _is_plain_broadcast(inner):
        return None
    (x,), dims = inner.invars, inner.params["broadcast_dimensions"]
    before, wide = _jax.array_type(x).shape, _jax.array_type(inner.outvars[0]).shape
    taken = ranges(eqn)
    cut = [
        taken[d] if n == wide[d] else (0, n, 1) for d, n in zip(dims, before, strict=True)
    ]  # an axis of length one that was spread stays as it is
    added = []
    if not all(map(whole, cut, before)):
        part = fresh(x, _lengths(cut))
        added.append(_slice(eqn, x, cut, part))
        x = part
    return [*added, _broadcast(eqn, x, dims, eqn.outvars[0])]


def slice_of_pad(level: Level, eqn: _jax.Equation) -> Atom | _jax.Equation | None:
    """A slice that takes nothing of the padding is a slice of what was padded."""
    inner = _maker(level, eqn, "pad", alone=True)
    if inner is None or not isinstance(inner.invars[1], _jax.Literal):
        return None
    x, taken = inner.invars[0], []
    rows = zip(inner.params["padding_config"], _jax.array_type(x).shape, ranges(eqn), strict=True)
    for (low, _, interior), size, (start, end, step) in rows:
        if interior or not low <= start or not end <= low + size:
            return None
        taken.append((int(start - low), int(end - low), step))
    if not same_kind(x, eqn.outvars[0]):
        return None
    if all(map(whole, taken, _jax.array_type(x).shape)):
        return x
    return eqn.replace(invars=[x], params=slice_params(taken))


def _slice(like: _jax.Equation, x: Atom, taken: Iterable[Range], out: _jax.Var) -> _jax.Equation:
    return like.replace(
        primitive=lax.slice_p, invars=[x], outvars=[out], params=slice_params(taken)
    )


def _broadcast(like: _jax.Equation, x: Atom, dims: Iterable[int], out: _jax.Var) -> _jax.Equation:
    params = {
        "shape": _jax.array_type(out).shape,
        "broadcast_dimensions": tuple(dims),
        "sharding": None,
    }
    return like.replace(primitive=lax.broadcast_in_dim_p, invars=[x], outvars=[out], params=params)


def _is_plain_broadcast(eqn: _jax.Equation) -> bool:
    alone = len(eqn.invars) == 1 and eqn.params["sharding"] is None
    return alone and _jax.is_local(eqn.invars[0].aval)


# -- pieces ---------------------------------------------------------------------------------------


def empty_piece(level: Level, eqn: _jax.Equation) -> _jax.Equation | None:
    """Pieces without elements are left out of a concatenation."""
    del level
    axis = eqn.params["dimension"]
    full = [x for x in eqn.invars if _jax.array_type(x).shape[axis]]
    if not full or len(full) == len(eqn.invars):
        return None
    return eqn.replace(invars=full) if all(same_kind(x, eqn.outvars[0]) for x in full) else None


def nested_pieces(level: Level, eqn: _jax.Equation) -> _jax.Equation | None:
    """A concatenation in a concatenation along one axis is one of all pieces."""
    pieces: list[Any] = []
    for x in eqn.invars:
        made = level.maker(x)
        if made is None or made.primitive is not eqn.primitive or made.params != eqn.params:
            pieces.append(x)
        elif _read_here_only(level, x) and all(_jax.is_local(one.aval) for one in made.invars):
            pieces += made.invars
        else:
            pieces.append(x)
    if len(pieces) == len(eqn.invars) or len(pieces) > MAX_PIECES:
        return None
    return eqn.replace(invars=pieces)


class _Run(NamedTuple):
    """Pieces that stand side by side and are one slice; or a piece of another kind."""

    source: Any
    taken: list[Range]
    piece: Any
    """The piece if it is only one, else None."""


def neighbours(level: Level, eqn: _jax.Equation) -> Atom | list[_jax.Equation] | None:
    """Slices of one array that stand side by side as they did there are one slice."""
    axis = int(eqn.params["dimension"])
    cut = _all_of_a_split(level, eqn, axis)
    if cut is not None:
        return cut
    runs: list[_Run] = []
    for x in eqn.invars:
        run = _run(level, x)
        if runs and _follows(runs[-1], run, axis):
            joined = list(run.taken)
            joined[axis] = (runs[-1].taken[axis][0], run.taken[axis][1], 1)
            runs[-1] = _Run(run.source, joined, None)
        else:
            runs.append(run)
    if len(runs) == len(eqn.invars):
        return None
    added: list[_jax.Equation] = []
    pieces: list[Any] = []
    for run in runs:
        piece = run.piece
        if piece is None:
            piece = eqn.outvars[0] if len(runs) == 1 else fresh(run.source, _lengths(run.taken))
            added.append(_slice(eqn, run.source, run.taken, piece))
        pieces.append(piece)
    return added if len(runs) == 1 else [*added, eqn.replace(invars=pieces)]


def _run(level: Level, x: Atom) -> _Run:
    made = level.maker(x)
    if made is None or made.primitive is not lax.slice_p or not _read_here_only(level, x):
        return _Run(None, [], x)
    source = made.invars[0]
    return _Run(source, ranges(made), x) if _jax.is_local(source.aval) else _Run(None, [], x)


def _read_here_only(level: Level, x: Atom) -> bool:
    return isinstance(x, _jax.Var) and level.uses(x) == 1


def _follows(before: _Run, after: _Run, axis: int) -> bool:
    if before.source is not after.source or not (before.taken and after.taken):
        return False
    pairs = list(zip(before.taken, after.taken, strict=True))
    (_, end, step), (start, _, other) = pairs.pop(axis)
    return (step, other, end) == (1, 1, start) and all(a == b for a, b in pairs)


def _all_of_a_split(level: Level, eqn: _jax.Equation, axis: int) -> Atom | None:
    made = level.maker(eqn.invars[0])
    if made is None or made.primitive.name != "split" or made.params["axis"] != axis:
        return None
    pieces = itertools.zip_longest(made.outvars, eqn.invars)
    return made.invars[0] if all(a is b for a, b in pieces) else None


def split_of_pieces(level: Level, eqn: _jax.Equation) -> list[_jax.Equation] | None:
    """A split that cuts where pieces were put together gives the pieces."""
    inner = _maker(level, eqn, "concatenate", alone=False)
    if inner is None or inner.params["dimension"] != eqn.params["axis"]:
        return None
    pairs = list(itertools.zip_longest(eqn.outvars, inner.invars))
    if any(a is None or b is None or a.aval is not b.aval for a, b in pairs):
        return None
    for var, piece in pairs:
        level.replace(var, piece)
    return []


# -- broadcasts -----------------------------------------------------------------------------------


def broadcast_of_broadcast(level: Level, eqn: _jax.Equation) -> _jax.Equation | None:
    """A broadcast of a broadcast is one."""
    inner = _maker(level, eqn, "broadcast_in_dim", alone=True)
    if inner is None or not _is_plain_broadcast(inner) or not _is_plain_broadcast(eqn):
        return None
    outer = eqn.params["broadcast_dimensions"]
    dims = tuple(outer[d] for d in inner.params["broadcast_dimensions"])
    return eqn.replace(invars=inner.invars, params=eqn.params | {"broadcast_dimensions": dims})


def transpose_of_broadcast(level: Level, eqn: _jax.Equation) -> _jax.Equation | None:
    """A transpose of a broadcast that leaves the operand's axes in order is a broadcast."""
    inner = _maker(level, eqn, "broadcast_in_dim", alone=True)
    if inner is None or not _is_plain_broadcast(inner):
        return None
    order = list(eqn.params["permutation"])
    dims = [order.index(d) for d in inner.params["broadcast_dimensions"]]
    if dims != sorted(dims):
        return None
    return _broadcast(eqn, inner.invars[0], dims, eqn.outvars[0])


def tile_of_ones(level: Level, eqn: _jax.Equation) -> _jax.Equation | None:
    """Repeating axes of length one is a broadcast."""
    del level
    (x,) = eqn.invars
    shape, reps = _jax.array_type(x).shape, eqn.params["reps"]
    if not _jax.is_local(x.aval) or any(r != 1 for n, r in zip(shape, reps, strict=True) if n != 1):
        return None
    return _broadcast(eqn, x, range(len(shape)), eqn.outvars[0])


# -- the table ------------------------------------------------------------------------------------

RULES: Table = {
    "slice": (
        ExactRule("slice_of_slice", slice_of_slice, MOVED),
        ExactRule("slice_of_pieces", slice_of_pieces, MOVED),
        ExactRule("slice_of_broadcast", slice_of_broadcast, MOVED),
        ExactRule("slice_of_pad", slice_of_pad, MOVED),
    ),
    "split": (ExactRule("split_of_pieces", split_of_pieces, MOVED),),
    "concatenate": (
        ExactRule("empty_piece", empty_piece, MOVED),
        ExactRule("nested_pieces", nested_pieces, MOVED),
        ExactRule("neighbours", neighbours, MOVED),
    ),
    "broadcast_in_dim": (ExactRule("broadcast_of_broadcast", broadcast_of_broadcast, MOVED),),
    "transpose": (ExactRule("transpose_of_broadcast", transpose_of_broadcast, MOVED),),
    "tile": (ExactRule("tile_of_ones", tile_of_ones, MOVED),),
}

simplify_moves = table_pass(
    "simplify_moves",
    "Merges slices, pieces, paddings, broadcasts and constant indices.",
    {**RULES, **INDEXED},
)
