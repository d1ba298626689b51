# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Runs a kernel on each device's part of its operands: XLA cannot split a kernel by itself.

Under a mesh of several devices (`jax.set_mesh`) a kernel is wrapped in `jax.shard_map`; how follows
from the row's `Partitioning` and from the kind of each mesh axis:

  Explicit  as the operands are split already: the type of an array says so. Where two operands
            differ, the first decides and the other is resharded; a split of a dimension that is
            not in `sharded` is undone first.
  Auto      nobody says how the operands are split, so the leading dimension of the first operand
            is, over every axis of the mesh, in order, that still divides it. Over the other axes
            every device computes the same.
  Manual    the caller's own shard_map has split already: nothing to do.

A dimension of size 1 that is larger elsewhere is broadcast and stays whole. Letters in one entry of
`alike` are split alike or not at all. Gradients of operands that stay whole are summed over
devices, and so are results without the dimension that is split: it is one they sum over.

Without a mesh in context there is nothing to follow: arrays placed by `in_shardings` alone are
gathered by XLA before a kernel.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

from tpjax.core.operator import Partitioning

Splits = dict[str, tuple[str, ...]]
"""Mesh axes that split a dimension, by its name."""


def free_axes() -> dict[str, AxisType]:
    """Returns the mesh axes in context, of more than one device, that no shard_map has taken."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {n: t for n, t in kinds if t != AxisType.Manual and mesh.shape[n] > 1}


def split_over_devices(
    run: Callable[..., Any], partitioning: Partitioning, operands: Sequence[Any]
) -> Any:
    """Returns `run(*operands)`, computed by each device on its part where a mesh is in context."""
    axes = free_axes()
    if not axes:
        return run(*vary_alike(operands))
    names = [
        None if x is None else dimensions(letters, x.ndim)
        for letters, x in zip(partitioning.inputs, operands, strict=True)
    ]
    splits = choose_splits(partitioning, names, operands, axes)
    sizes = _sizes(names, operands)
    given = [i for i, x in enumerate(operands) if x is not None]
    specs = [_spec(names[i], operands[i].shape, sizes, splits) for i in given]

    def local(*parts: Any) -> Any:
        full: list[Any] = [None] * len(operands)
        for i, part in zip(given, parts, strict=True):
            full[i] = part
        results = run(*vary_alike(full))
        leaves, tree = jax.tree.flatten(results)
        pairs = zip(leaves, outs, strict=False)  # a row names optional results too, last
        return jax.tree.unflatten(tree, [_summed(x, out, splits) for x, out in pairs])

    first = names[0]
    assert first is not None, "the first operand is never optional"
    rank = len(first) - len(partitioning.inputs[0])
    outs = [dimensions(letters, len(letters) + rank) for letters in partitioning.outputs]
    out_specs = tuple(PartitionSpec(*(splits.get(d) for d in out)) for out in outs)
    mapped = jax.shard_map(
        local,
        in_specs=tuple(specs),
        out_specs=out_specs if len(outs) > 1 else out_specs[0],
        axis_names=set(axes),
    )
    explicit = {n for n, kind in axes.items() if kind == AxisType.Explicit}
    parts = [_resharded(operands[i], s, explicit) for i, s in zip(given, specs, strict=True)]
    return mapped(*parts)


def _summed(x: Any, dims: tuple[str, ...], splits: Splits) -> Any:
    """Returns a result summed over the devices that split nothing of it, but what it sums over."""
    over = {axis for split in splits.values() for axis in split}
    over -= {axis for d in dims for axis in splits.get(d, ())}
    return jax.lax.psum(x, tuple(sorted(over))) if over else x


def dimensions(letters: str, rank: int) -> tuple[str, ...]:
    """Returns the names of an array's dimensions; the first letter stands for all leading axes.

    >>> dimensions("RD", 3), dimensions("RD", 1)
    (('R0', 'R1', 'D'), ('D',))
    """
    lead = rank - len(letters) + 1
    assert lead >= 0, f"{letters} names more dimensions than the {rank} there are"
    return (*(f"{letters[0]}{i}" for i in range(lead)), *letters[1:])


def choose_splits(
    partitioning: Partitioning,
    names: Sequence[tuple[str, ...] | None],
    operands: Sequence[Any],
    axes: dict[str, AxisType],
) -> Splits:
    """Returns the mesh axes that split each dimension, by the rules of the module."""
    sizes = _sizes(names, operands)
    mesh = jax.sharding.get_abstract_mesh()
    found: Splits = {}
    used: set[str] = set()

    def offer(name: str, mesh_axis: str) -> None:
        """Splits the dimension, and those that are split alike, if all are divisible."""
        if mesh_axis in used or name[0] not in partitioning.sharded:
            return
        group = next((g for g in partitioning.alike if name[0] in g), "")
        peers = [n for n in sizes if n == name or n[0] in group]
        parts = mesh.shape[mesh_axis] * math.prod(mesh.shape[a] for a in found.get(name, ()))
        whole = [n for n in peers if sizes[n] == 1 and n != name]
        if any(sizes[n] % parts for n in peers if n not in whole):
            return
        used.add(mesh_axis)
        for n in peers:
            if n not in whole:
                found[n] = (*found.get(n, ()), mesh_axis)

    for dims, x in zip(names, operands, strict=True):
        if dims is None:
            continue
        for name, entry, size in zip(dims, _spec_of(x), x.shape, strict=True):
            for mesh_axis in entry:
                if axes.get(mesh_axis) == AxisType.Explicit and size == sizes[name]:
                    offer(name, mesh_axis)
    leading = next((n for n in names[0] or () if n[0] in partitioning.sharded), None)
    for mesh_axis, kind in axes.items():
        if kind == AxisType.Auto and leading is not None:
            offer(leading, mesh_axis)
    return found


def vary_alike(operands: Sequence[Any]) -> list[Any]:
    """Returns the operands, all varying over each manual mesh axis that one of them varies over.

    A kernel's gradient is then summed over devices where an operand was the same on all.
    """
    varying = [frozenset() if x is None else _varying(x) for x in operands]
    union = frozenset().union(*varying)
    return [
        x if x is None or union == own else jax.lax.pcast(x, tuple(union - own), to="varying")
        for x, own in zip(operands, varying, strict=True)
    ]


def _varying(x: Any) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying


def _sizes(names: Sequence[tuple[str, ...] | None], operands: Sequence[Any]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for dims, x in zip(names, operands, strict=True):
        for name, size in zip(dims or (), () if x is None else x.shape, strict=True):
            sizes[name] = max(size, sizes.get(name, 1))
    return sizes


def _spec_of(x: Any) -> list[tuple[str, ...]]:
    """Returns the mesh axes that split each dimension of an array, as its type tells."""
    entries = [*jax.typeof(x).sharding.spec]
    entries += [None] * (x.ndim - len(entries))
    return [e if isinstance(e, tuple) else (e,) if isinstance(e, str) else () for e in entries]


def _spec(
    dims: tuple[str, ...] | None, shape: tuple[int, ...], sizes: dict[str, int], splits: Splits
) -> PartitionSpec:
    assert dims is not None
    return PartitionSpec(
        *(splits.get(d) if size == sizes[d] else None for d, size in zip(dims, shape, strict=True))
    )


def _resharded(x: Any, spec: PartitionSpec, explicit: set[str]) -> Any:
    """Returns the array split as the spec says, as far as explicit axes go."""
    if not explicit:
        return x
    entries = [(e,) if isinstance(e, str) else e or () for e in spec]  # one axis is its name alone
    wanted = [tuple(a for a in entry if a in explicit) or None for entry in entries]
    return jax.sharding.reshard(x, PartitionSpec(*wanted))
