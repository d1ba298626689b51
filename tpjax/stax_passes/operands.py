# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Reads query, key and value back to the arrays they were: transposes, repeated heads, upcasts."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from tpjax.stax_passes.axes import Axes, Layout
from tpjax.stax_passes.graph import Graph

HALF = (jnp.bfloat16, jnp.float16)


@dataclass
class Operand:
    """One of query, key, value: the value to read, and its layout."""

    value: int
    layout: Layout


def operand_of(graph: Graph, axes: Axes, value: int, layout: Layout) -> Operand:
    """Follows an operand back through transposes, which the operator's own layout makes again."""
    while (node := graph.made_by(value, "transpose")) is not None:
        order = tuple(node.eqn.params["permutation"])
        layout = axes.keep(layout[order.index(i)] for i in range(len(order)))
        value = node.ins[0]
    return Operand(value, layout)


def _repeated(graph: Graph, operand: Operand) -> "tuple[int, int, int] | None":
    """Returns (base, axis, repeats) where key or value heads were repeated along an axis."""
    node = graph.made_by(operand.value, "reshape")
    spread = None if node is None else graph.made_by(node.ins[0], "broadcast_in_dim")
    if spread is None:
        return None
    shape, wide = graph.shape(operand.value), graph.shape(spread.outs[0])
    dims = tuple(spread.eqn.params["broadcast_dimensions"])
    source = graph.shape(spread.ins[0])
    given = {i for i, n in zip(dims, source, strict=True) if n == wide[i]}
    for axis in range(len(shape)):
        merged = (
            *shape[:axis],
            wide[axis],
            wide[axis + 1] if axis + 1 < len(wide) else 0,
            *shape[axis + 1 :],
        )
        if merged == wide and set(range(len(wide))) - given == {axis + 1}:
            return spread.ins[0], axis, wide[axis + 1]
    return None


def unrepeat(graph: Graph, axes: Axes, key: Operand, value: Operand) -> None:
    """Reads grouped-query attention: repeated heads of key and value become the heads they were."""
    found = [f for f in (_repeated(graph, operand) for operand in (key, value)) if f is not None]
    if len(found) != 2:
        return
    heads = [op.layout[f[1]] for op, f in zip((key, value), found, strict=True)]
    if found[0][2] != found[1][2] or heads[0] != heads[1] or len(heads[0]) != 1:
        return
    _, group = axes.split(heads[0][0], axes.sizes[heads[0][0]] // found[0][2])
    for operand, repeat in zip((key, value), found, strict=True):
        operand.layout = axes.keep([a for a in axis if a != group] for axis in operand.layout)
        operand.value = repeat[0]
        shape = graph.shape(repeat[0])
        if len(shape) != len(
            operand.layout
        ):  # the repeated axis stood in the source with length one
            operand.layout.insert(repeat[1] + 1, [])


def common_dtype(graph: Graph, operands: tuple[Operand, ...]) -> np.dtype:
    """Follows the operands back through upcasts from half precision; returns the dtype to use."""
    peeled = [graph.peel(o.value, "convert_element_type") for o in operands]
    dtypes = {graph.dtype(v) for v in peeled}
    if len(dtypes) == 1 and next(iter(dtypes)) in HALF:
        for operand, value in zip(operands, peeled, strict=True):
            operand.value = value
        return next(iter(dtypes))
    return np.dtype(jnp.result_type(*(graph.dtype(o.value) for o in operands)))
