# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Gives matrix products their operands as they are: not transposed, not repeated.

    dot(transpose(x), y)      becomes   dot(x, y) over other axes
    dot(query, repeat(key))   becomes   dot(query in groups, key)

XLA folds transposes into its products, but after autodiff: by then the transposed copy has been
saved beside the array itself, and a repeated key or value (grouped-query attention) in full, G
times as large as it is; and the gradient of a repeat is a sum in the narrow dtype of the operands.

A transpose that changes the order of the product's own axes stays, as absorbing it would put one
behind the product. A transpose behind a product stays too, unless it undoes one before it. Runs
after the recognisers of attention, which know the repeated form.
"""

from typing import Any, NamedTuple

from jax import lax

from tpjax.core import _jax
from tpjax.stax_passes.engine import Bound
from tpjax.stax_passes.sweep import Atom, ExactRule, Level
from tpjax.stax_passes.table import Table, table_pass

REORDERED = (
    "the same products, summed in the machine's order: up to 1e-6 of the largest result in "
    "float32, the last bit of a narrower one"
)
GROUPED = (
    f"{REORDERED}; the gradient of what was repeated is summed inside the product, in its precision"
)


class Product(NamedTuple):
    """A dot_general, read: its operands, and the axes of each that are contracted and shared."""

    operands: tuple[Any, Any]
    contract: tuple[tuple[int, ...], tuple[int, ...]]
    batch: tuple[tuple[int, ...], tuple[int, ...]]

    def rank(self, side: int) -> int:
        """Returns how many axes an operand has."""
        return len(_jax.array_type(self.operands[side]).shape)

    def free(self, side: int) -> list[int]:
        """Returns the axes of an operand that the result has and the other operand has not."""
        taken = (*self.contract[side], *self.batch[side])
        return [i for i in range(self.rank(side)) if i not in taken]


def product_of(eqn: _jax.Equation) -> Product | None:
    """Returns the equation as a product of arrays on no mesh, or None."""
    if eqn.params.get("out_sharding") is not None:
        return None
    if not all(_jax.is_local(atom.aval) for atom in (*eqn.invars, *eqn.outvars)):
        return None
    contract, batch = (
        tuple(tuple(map(int, s)) for s in d) for d in eqn.params["dimension_numbers"]
    )
    return Product((eqn.invars[0], eqn.invars[1]), contract, batch)  # pyright: ignore


def _with(eqn: _jax.Equation, product: Product, **changes: Any) -> _jax.Equation:
    numbers = {"dimension_numbers": (product.contract, product.batch)}
    return eqn.replace(invars=list(product.operands), params=eqn.params | numbers, **changes)


def _renamed(product: Product, side: int, x: Atom, axes: Any) -> Product:
    """Returns the product of `x` instead: axis i of the operand is axis `axes[i]` of it."""

    def put(pair: Any, value: Any) -> Any:
        return (value, pair[1]) if side == 0 else (pair[0], value)

    contract = tuple(axes[i] for i in product.contract[side])
    batch = tuple(axes[i] for i in product.batch[side])
    return Product(
        put(product.operands, x), put(product.contract, contract), put(product.batch, batch)
    )


# -- transposes -----------------------------------------------------------------------------------


def absorb_transpose(level: Level, eqn: _jax.Equation) -> "_jax.Equation | str | None":
    """The product of a transpose is one of the array itself over other axes."""
    product, reason = product_of(eqn), None
    if product is None:
        return None
    for side in (0, 1):
        made = _transpose_before(level, product.operands[side])
        if made is None:
            continue
        order = made.params["permutation"]
        free = [order[i] for i in product.free(side)]
        if free != sorted(free):
            reason = "the order of the product's axes would change"
            continue
        product = _renamed(product, side, made.invars[0], order)
    return reason if product.operands == tuple(eqn.invars) else _with(eqn, product)


def _transpose_before(level: Level, atom: Atom) -> _jax.Equation | None:
    made = level.maker(atom)
    if made is None or made.primitive is not lax.transpose_p:
        return None
    return made if _jax.is_local(made.invars[0].aval) else None


def undo_transpose(level: Level, eqn: _jax.Equation) -> "_jax.Equation | None":
    """A transpose behind a product that undoes those before it goes with them."""
    made = level.maker(eqn.invars[0])
    if made is None or made.primitive is not lax.dot_general_p:
        return None
    product = product_of(made)
    if product is None or level.uses(made.outvars[0]) != 1:
        return None
    shared = len(product.batch[0])
    where: list[Any] = [("batch", i) for i in range(shared)]
    plain: list[Any] = list(where)
    for side in (0, 1):
        before = _transpose_before(level, product.operands[side])
        axes = range(product.rank(side)) if before is None else before.params["permutation"]
        free = [axes[i] for i in product.free(side)]
        where += [(side, i) for i in free]
        plain += [(side, i) for i in sorted(free)]
        if before is not None:
            product = _renamed(product, side, before.invars[0], axes)
    if product.operands == tuple(made.invars) or where == plain:
        return None
    if [where[i] for i in eqn.params["permutation"]] != plain:
        return None
    return _with(made, product, outvars=eqn.outvars, ctx=eqn.ctx, source_info=eqn.source_info)


# -- repeats --------------------------------------------------------------------------------------


class Repeat(NamedTuple):
    """An array of which every element stands `count` times in a row along one axis."""

    source: Any
    axis: int
    """The axis of the array along which it is repeated."""
    count: int
    merged: bool
    """Whether the axis is one of the source, made longer; else the source has no such axis."""
    kept: dict[int, int]
    """Axes of the array, as axes of the source; the others of the source have length one."""


def repeat_of(level: Level, atom: Atom) -> Repeat | None:
    """Returns how the operand repeats another array along one axis, or None."""
    made, merged = level.maker(atom), False
    if made is not None and made.primitive is lax.reshape_p:
        merged = True
        made = None if made.params["dimensions"] is not None else level.maker(made.invars[0])
    if made is None or made.primitive is not lax.broadcast_in_dim_p or len(made.invars) != 1:
        return None
    (source,), dims = made.invars, made.params["broadcast_dimensions"]
    if not _jax.is_local(source.aval) or made.params["sharding"] is not None:
        return None
    before, wide = _jax.array_type(source).shape, _jax.array_type(made.outvars[0]).shape
    given = {int(d): i for i, d in enumerate(dims) if before[i] == wide[d]}
    spread = [i for i in range(len(wide)) if i not in given]
    if len(spread) != 1:
        return None
    (axis,) = spread
    if not merged:
        return Repeat(source, axis, wide[axis], False, given)
    at = axis - 1
    joined = (*wide[: max(at, 0)], wide[at] * wide[axis], *wide[axis + 1 :])
    if axis == 0 or _jax.array_type(atom).shape != joined:
        return None
    kept = {d if d < axis else d - 1: i for d, i in given.items()}
    return Repeat(source, at, wide[axis], True, kept)


def group_product(level: Level, eqn: _jax.Equation) -> "list[_jax.Equation] | str | None":
    """A product that shares an axis along which one operand is repeated is one of its groups.

    Not if the other operand is larger: its reshape into groups would be saved for the gradient
    beside it, which is more than the repeats.
    """
    product = product_of(eqn)
    if product is None or 0 in _jax.array_type(eqn.outvars[0]).shape:
        return None
    for side in (0, 1):
        repeat = repeat_of(level, product.operands[side])
        if repeat is None or repeat.axis not in product.batch[side]:
            continue
        repeated, other = (_jax.array_type(product.operands[i]).size for i in (side, 1 - side))
        if repeat.merged and other > repeated:
            return f"the other operand is larger ({other} elements, {repeated} with repeats)"
        options = ("precision", "preferred_element_type")
        return level.write(
            eqn, _grouped, product.operands[1 - side], repeat.source, side=side,
            repeat=(repeat.axis, repeat.count, repeat.merged, tuple(sorted(repeat.kept.items()))),
            contract=product.contract, batch=product.batch,
            options=tuple((name, eqn.params[name]) for name in options),
        )  # fmt: skip
    return None


def _grouped(
    x: Any, base: Any, *, side: int, repeat: Any, contract: Any, batch: Any, options: Any
) -> Any:
    """Returns the product of `x` and the repeated `base`, which is operand `side`, in groups.

    The group becomes the first axis of `x` that `base` has not, so that it stands behind those
    shared in the result; there it is moved only if the original has it elsewhere.
    """
    axis, count, merged, kept = repeat
    rank = x.ndim
    shared, place = list(batch[1 - side]), dict(kept)
    base = base.squeeze([i for i in range(base.ndim) if i not in place.values()])
    place = {d: sorted(place.values()).index(i) for d, i in kept}
    at = batch[side].index(axis)
    group = shared[at]
    if merged:  # the heads of x are (heads of base, group)
        x = x.reshape(*x.shape[:group], x.shape[group] // count, count, *x.shape[group + 1 :])
        group, rank = group + 1, rank + 1

    def axis_of(i: int) -> int:
        return i + 1 if merged and i >= group else i

    pairs = [(axis_of(i), place[d]) for i, d in zip(shared, batch[side], strict=True) if d in place]
    over = [(axis_of(i), place[d]) for i, d in zip(contract[1 - side], contract[side], strict=True)]
    taken = {i for i, _ in (*pairs, *over)}
    free = [i for i in range(rank) if i not in taken]
    own = [i for i in free if i != group]
    if free != [group, *own]:
        order = [*(i for i, _ in pairs), group, *own, *(i for i, _ in over)]
        x = x.transpose(order)
        pairs, over = ([(order.index(i), d) for i, d in part] for part in (pairs, over))
    numbers: Any = tuple(tuple(zip(*part, strict=True)) or ((), ()) for part in (over, pairs))
    # bound as it is, so that no flag of now fills in the precision
    out = lax.dot_general_p.bind(
        x, base, dimension_numbers=numbers, out_sharding=None, **dict(options)
    )
    first = len(pairs)  # where the group is; then come the axes of x alone, then those of base
    seat = at + 1 if merged else at
    order = list(range(out.ndim))
    order.insert(seat, order.pop(first))
    out = out if seat == first else out.transpose(order)
    if merged:
        out = out.reshape(*out.shape[:at], out.shape[at] * count, *out.shape[at + 2 :])
    if side == 0:
        lead = len(batch[0])
        own, rest = (
            list(part) for part in (range(lead, lead + len(own)), range(lead + len(own), out.ndim))
        )
        out = out.transpose([*range(lead), *rest, *own])
    return out


# -- the table ------------------------------------------------------------------------------------

ULPS = (Bound("float32", 32, 32, 2), Bound("bfloat16", 2, 2, 2), Bound("float16", 2, 2, 2))

RULES: Table = {
    "dot_general": (
        ExactRule("absorb_transpose", absorb_transpose, REORDERED, "close", ULPS),
        ExactRule("group_product", group_product, GROUPED, "close", ULPS),
    ),
    "transpose": (ExactRule("undo_transpose", undo_transpose, REORDERED, "close", ULPS),),
}

simplify_products = table_pass(
    "simplify_products", "Gives products their operands untransposed and unrepeated.", RULES
)
