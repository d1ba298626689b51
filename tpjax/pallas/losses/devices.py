# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Tokens, and the vocabulary, split over the devices of a mesh in context.

As `tpjax.pallas.partition` says for tokens. The vocabulary is split where an explicit axis of the
mesh splits the head along it already, or over the mesh axis that the caller names: each device
then holds its columns of the head, and `psum` and `pmax` of a few numbers a token join them.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array, lax
from jax.sharding import AxisType, PartitionSpec

from tpjax.core.errors import message
from tpjax.core.operator import Partitioning
from tpjax.pallas.partition import choose_splits, free_axes, vary_alike

OP = "linear_cross_entropy"

Local = Callable[..., tuple[Array, Array, Array]]
"""Takes the mesh axes that split the vocabulary, or None, then hidden, head, labels and weights;
returns the weighted sum of losses, then lse and losses."""

PARTITIONING = Partitioning(inputs=("RD", "VD", "R", "R"), outputs=("R", "R", "R"), sharded="RV")


def over_devices(
    run: Local,
    operands: tuple[Array, Array, Array, Array],
    vocab_axis: int,
    mesh_axis: str | None,
) -> tuple[Array, Array, Array]:
    """Returns what `run` does, each device on its part; the sum is that of all devices."""
    axes = free_axes()
    if mesh_axis not in axes:  # the caller's own shard_map, a mesh axis of one device, or None
        axis_name = mesh_axis if _is_manual(mesh_axis) else None
        if not axes:
            return run(axis_name, *vary(operands, axis_name))
    else:
        axis_name = None
    hidden, head, _, _ = operands
    tokens = tuple(f"R{i}" for i in range(hidden.ndim - 1))
    of_head = ("V", "D") if vocab_axis == 0 else ("D", "V")
    names = ((*tokens, "D"), of_head, tokens, tokens)
    free = {n: kind for n, kind in axes.items() if n != mesh_axis}
    splits = choose_splits(PARTITIONING, names, operands, free)
    if mesh_axis in axes:
        _check_divides(head.shape[vocab_axis], mesh_axis)
        splits["V"] = (*splits.get("V", ()), mesh_axis)
    columns = (*splits.get("V", ()), *((axis_name,) if axis_name else ()))
    over_tokens = tuple(a for n in tokens for a in splits.get(n, ()))

    def local(*parts: Array) -> tuple[Array, Array, Array]:
        total, lse, losses = run(columns or None, *vary(parts, columns))
        return (lax.psum(total, over_tokens) if over_tokens else total), lse, losses

    specs = [PartitionSpec(*(splits.get(n) for n in dims)) for dims in names]
    explicit = {n for n, kind in axes.items() if kind == AxisType.Explicit}
    split = jax.shard_map(
        local,
        in_specs=tuple(specs),
        out_specs=(PartitionSpec(), specs[2], specs[2]),
        axis_names=set(axes),
    )
    wanted = [[splits.get(n, ()) for n in dims] for dims in names]
    return split(*(_resharded(x, w, explicit) for x, w in zip(operands, wanted, strict=True)))


def vary(operands: Any, columns: Any) -> list[Array]:
    """Returns the operands with hidden and head varying over all mesh axes that any does.

    What a token has beside them does not vary over the axes that split the vocabulary.
    """
    hidden, head, *others = operands
    hidden, head = vary_alike([*operands])[:2]
    own = {columns} if isinstance(columns, str) else set(columns or ())
    axes = tuple(jax.typeof(hidden).manual_axis_type.varying - own)
    return [hidden, head, *(_varying_over(x, axes) for x in others)]


def _varying_over(x: Array, axes: tuple[str, ...]) -> Array:
    missing = tuple(a for a in axes if a not in jax.typeof(x).manual_axis_type.varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def _is_manual(mesh_axis: str | None) -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if mesh_axis is not None and mesh_axis not in kinds:
        must = f"an axis of the mesh in context, {tuple(kinds)}"
        remedy = "Enter it with jax.set_mesh, or call inside jax.shard_map."
        raise ValueError(message(OP, "mesh_axis", must, repr(mesh_axis), remedy))
    return mesh_axis is not None and kinds[mesh_axis] == AxisType.Manual


def _check_divides(columns: int, mesh_axis: str) -> None:
    parts = jax.sharding.get_abstract_mesh().shape[mesh_axis]
    if columns % parts:
        must = f"of a vocabulary that the {parts} devices of {mesh_axis!r} divide"
        remedy = "Leave mesh_axis out, or choose a vocabulary that they divide."
        raise ValueError(message(OP, "head", must, f"{columns} columns", remedy))


def _resharded(x: Any, splits: list[tuple[str, ...]], explicit: set[str]) -> Any:
    """Returns the array split over those of the mesh axes that are explicit."""
    if not explicit:
        return x
    spec = (tuple(a for a in axes if a in explicit) or None for axes in splits)
    return jax.sharding.reshard(x, PartitionSpec(*spec))


def outer_devices(mesh_axis: str | None) -> int:
    """Returns of how many devices' heads one is, where the caller's own shard_map has split it."""
    if not _is_manual(mesh_axis):
        return 1
    return jax.sharding.get_abstract_mesh().shape[mesh_axis]
