# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Recognises attention between two matrix products, and calls `flash_attention` instead.

    out = softmax(scale (query . key) + bias, masked) . value

Anchored at the softmax's exponential. Backwards lie the scores (`tpjax.stax_passes.scores`),
forwards the product with the values. Axes may stand in any order, heads may be merged or repeated,
masks may be spelled in any way: they are evaluated (`tpjax.stax_passes.masks`).
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpjax.pallas import flash_attention
from tpjax.stax_passes.axes import Axes, Layout
from tpjax.stax_passes.engine import Bound, Match, Recogniser, rewriting_pass
from tpjax.stax_passes.graph import Graph, Node
from tpjax.stax_passes.masks import Band, BlindQueryError, band_of
from tpjax.stax_passes.operands import HALF, Operand, common_dtype, operand_of, unrepeat
from tpjax.stax_passes.scores import MASKED, Part, Scores, Unknown
from tpjax.stax_passes.softmax import Softmax, softmax_around


@dataclass
class _Side:
    """The product of weights and values, read: which operand is which and what its axes are."""

    node: Node
    value: int
    value_layout: Layout
    out_layout: Layout
    inside: set[int]
    features: int


def _values(
    graph: Graph, axes: Axes, weights: int, layout: Layout, key: list[int]
) -> "_Side | None":
    """Follows the weights forward to their product with the values; None where there is none."""
    inside: set[int] = set()
    while True:
        users = graph.users_of(weights)
        products = [n for n in users if n.name == "dot_general"]
        if products:
            return _product(graph, axes, products[0], weights, layout, key, inside | {weights})
        steps = [n for n in users if n.name in ("convert_element_type", "transpose", "reshape")]
        if len(steps) != 1:
            return None
        inside.add(weights)
        node, weights = steps[0], steps[0].outs[0]
        if node.name == "transpose":
            layout = axes.keep(layout[i] for i in node.eqn.params["permutation"])
        elif node.name == "reshape":
            after = axes.reshape(layout, graph.shape(weights))
            if after is None:
                return None
            layout = after


def _product(
    graph: Graph,
    axes: Axes,
    node: Node,
    weights: int,
    layout: Layout,
    key: list[int],
    inside: set[int],
) -> "_Side":
    at = node.ins.index(weights)
    value = node.ins[1 - at]
    contract, batch = node.eqn.params["dimension_numbers"]
    ours, theirs = (contract[at], batch[at]), (contract[1 - at], batch[1 - at])
    if [layout[i] for i in ours[0]] != [key]:
        raise Unknown("the softmax is not taken over the axis that is contracted with the values")
    value_layout: list[list[int] | None] = [None] * len(graph.shape(value))
    for i, j in zip((*ours[0], *ours[1]), (*theirs[0], *theirs[1]), strict=True):
        value_layout[j] = layout[i]
    free = [i for i, axis in enumerate(value_layout) if axis is None]
    if len(free) != 1:
        raise Unknown("the values have not exactly one axis of features")
    features = axes.atom(graph.shape(value)[free[0]])
    value_layout[free[0]] = [features]
    rest = [layout[i] for i in range(len(layout)) if i not in (*ours[0], *ours[1])]
    parts = [rest, [[features]]] if at == 0 else [[[features]], rest]
    out = axes.keep([*(layout[i] for i in ours[1]), *parts[0], *parts[1]])
    kept = axes.keep(axis or [] for axis in value_layout)
    return _Side(node, value, kept, out, inside, features)


@dataclass
class _Roles:
    """The atoms of the operator's axes; a query head is a key head and a place in its group."""

    batch: list[int]
    tokens: list[int]
    keys: list[int]
    heads: list[int]
    group: list[int]
    width: list[int]
    features: list[int]

    def query(self) -> Layout:
        return [self.batch, self.tokens, self.heads + self.group, self.width]

    def key(self) -> Layout:
        return [self.batch, self.keys, self.heads, self.width]

    def value(self) -> Layout:
        return [self.batch, self.keys, self.heads, self.features]

    def out(self) -> Layout:
        return [self.batch, self.tokens, self.heads + self.group, self.features]

    def scores(self) -> Layout:
        return [self.batch, self.heads + self.group, self.tokens, self.keys]


def _atoms(layout: Layout) -> list[int]:
    return [atom for axis in layout for atom in axis]


def _roles(
    axes: Axes, query: Operand, key: Operand, value: Operand, keys: list[int], width: list[int],
    features: int, masks: list[Part],
) -> _Roles:  # fmt: skip
    shared = [a for a in _atoms(key.layout) if a not in (*keys, *width)]
    if set(shared) != {a for a in _atoms(value.layout) if a not in (*keys, features)}:
        raise Unknown("keys and values are not shared by the same batch and head axes")
    rows = [a for a in _atoms(query.layout) if a not in (*shared, *width)]
    masked = [a for part in masks for a in _atoms(part.layout) if a in rows]
    tokens = masked[:1] or sorted(rows, key=lambda a: axes.sizes[a])[-1:]
    # heads stand next to the features in most code; either choice means the same
    heads = shared[-1:] if len(shared) > 1 else []
    batch = [a for a in shared if a not in heads]
    group = [a for a in rows if a not in tokens]
    return _Roles(batch, tokens, keys, heads, group, width, [features])


@dataclass
class _Masking:
    """What the operator is told about visibility: a band, and arrays for what is not one."""

    band: Band
    masks: list[Part]
    biases: list[Part]


def _masking(graph: Graph, scores: Scores, roles: _Roles) -> _Masking:
    """Sorts masks and additive masks into one band and the arrays that stay."""
    band, masks, biases = Band(None, None), [], []
    for part in scores.masks:
        if graph.scalar(part.value) == float(part.keep):
            continue  # everything is visible
        found = _band(graph, part, roles, lambda x, part=part: x.astype(bool) == part.keep)
        if found is None:
            masks.append(part)
        else:
            band = _both(band, found)
    for part in scores.biases:
        found = _band(graph, part, roles, lambda x, part=part: _additive(x, part.factor))
        if found is None:
            biases.append(part)
        else:
            band = _both(band, found)
    return _Masking(band, masks, biases)


class _NotAMask(Exception):
    pass


def _additive(x: np.ndarray, factor: float) -> np.ndarray:
    x = x.astype(np.float32) * factor
    if not ((x == 0) | (x <= MASKED)).all():
        raise _NotAMask
    return x == 0


def _band(graph: Graph, part: Part, roles: _Roles, visible: Any) -> Band | None:
    at = {tuple(axis): i for i, axis in enumerate(part.layout) if axis}
    if not {tuple(roles.tokens), tuple(roles.keys)} <= set(at):
        return None
    try:
        return band_of(graph, part.value, at[tuple(roles.tokens)], at[tuple(roles.keys)], visible)
    except _NotAMask:
        return None
    except BlindQueryError:
        raise Unknown(
            "the mask hides every key from some query: there the original averages the values (or "
            "gives NaN), the operator gives 0"
        ) from None


def _both(a: Band, b: Band) -> Band:
    def least(x: int | None, y: int | None) -> int | None:
        return y if x is None else x if y is None else min(x, y)

    return Band(least(a.left, b.left), least(a.right, b.right))


def _extract(graph: Graph, exp: Node) -> "Match | str | None":
    softmax = softmax_around(graph, exp)
    if softmax is None or graph.size(softmax.scores) == 0:
        return None
    axes = Axes()
    layout = axes.fresh(graph.shape(softmax.scores))
    scores = Scores(graph, axes, softmax.scores, layout)
    keys = layout[softmax.axis]
    if not keys:
        return None  # one key: nothing to attend over
    try:
        side = _values(graph, axes, softmax.weights, layout, keys)
        return None if side is None else _attention(graph, softmax, scores, side, keys)
    except Unknown as reason:
        return str(reason)


def _attention(
    graph: Graph, softmax: Softmax, scores: Scores, side: _Side, keys: list[int]
) -> Match:
    axes = scores.axes
    query, key, width = _query_key(graph, scores, scores.walk(), keys)
    value = operand_of(graph, axes, side.value, side.value_layout)
    unrepeat(graph, axes, key, value)
    dtype = common_dtype(graph, (query, key, value))
    roles = _roles(
        axes, query, key, value, keys, width, side.features, scores.masks + scores.biases
    )
    masking = _masking(graph, scores, roles)
    arrays = (query, key, value, *masking.masks, *masking.biases)
    root = side.node.outs[0]
    inside = frozenset((softmax.inside | scores.inside | side.inside) - {root})
    replacement = _replacement(axes, roles, masking, arrays, scores.scale, dtype, side.out_layout)
    return Match(root, tuple(o.value for o in arrays), replacement, inside, "flash_attention")


def _query_key(
    graph: Graph, scores: Scores, node: Node, keys: list[int]
) -> tuple[Operand, Operand, list[int]]:
    """Returns query and key with their layouts, from that of their product."""
    axes, layout = scores.axes, scores.layout
    contract, batch = node.eqn.params["dimension_numbers"]
    precision = node.eqn.params.get("precision")
    if "HIGH" in str(precision) and graph.dtype(node.ins[0]) not in HALF:
        raise Unknown(f"the product of queries and keys asks for precision {precision}")
    width = [axes.atom(graph.shape(node.ins[0])[i]) for i in contract[0]]
    shapes = [graph.shape(v) for v in node.ins]
    free = [
        [i for i in range(len(shape)) if i not in (*contract[k], *batch[k])]
        for k, shape in enumerate(shapes)
    ]
    out = list(layout)
    layouts: list[list[list[int]]] = [[[] for _ in shape] for shape in shapes]
    for k in (0, 1):
        for i, axis in zip(batch[k], out, strict=False):
            layouts[k][i] = axis
        for i, atom in zip(contract[k], width, strict=True):
            layouts[k][i] = [atom]
    order = [(k, i) for k in (0, 1) for i in free[k]]
    for (k, i), axis in zip(order, out[len(batch[0]) :], strict=True):
        layouts[k][i] = axis
    sides = [keys in [layouts[k][i] for i in free[k]] for k in (0, 1)]
    if sum(sides) != 1:
        raise Unknown("the softmax is taken over an axis that is not the keys' own")
    at = sides.index(True)
    if [layouts[at][i] for i in free[at] if layouts[at][i]] != [keys]:
        raise Unknown(
            "the keys have an axis of their own besides tokens: heads that queries have not"
        )
    kept = [axes.keep(one) for one in layouts]
    operands = [operand_of(graph, axes, v, one) for v, one in zip(node.ins, kept, strict=True)]
    return operands[1 - at], operands[at], width


def _replacement(
    axes: Axes, roles: _Roles, masking: _Masking, arrays: tuple[Any, ...], scale: float,
    dtype: np.dtype, out_layout: Layout,
) -> Any:  # fmt: skip
    """Returns the function from the match's operands to the value of the product it replaces."""
    layouts = [o.layout for o in arrays]
    band, masks, biases = masking.band, masking.masks, masking.biases
    window = None
    if band.left is not None or band.right not in (None, 0):
        T, S = axes.size(roles.tokens), axes.size(roles.keys)
        window = (T if band.left is None else band.left, S if band.right is None else band.right)

    def replacement(*values: jax.Array) -> jax.Array:
        wanted = (roles.query(), roles.key(), roles.value())
        query, key, value = (
            axes.arrange(x.astype(dtype), layout, want)
            for x, layout, want in zip(values, layouts[:3], wanted, strict=False)
        )
        extra = [
            axes.arrange(x, layout, roles.scores())
            for x, layout in zip(values[3:], layouts[3:], strict=True)
        ]
        visible = [x.astype(bool) == part.keep for x, part in zip(extra, masks, strict=False)]
        added = [
            x.astype(jnp.float32) * part.factor
            for x, part in zip(extra[len(masks) :], biases, strict=True)
        ]
        mask = None
        for x in visible:
            mask = x if mask is None else mask & x
        out = flash_attention(
            query, key, value, sum(added[1:], added[0]) if added else None, mask,
            scale=scale, is_causal=band.right == 0, local_window_size=window,
        )  # fmt: skip
        return axes.arrange(out, roles.out(), out_layout)

    return replacement


ATTENTION = Recogniser(
    "attention",
    anchor=frozenset({"exp"}),
    extract=_extract,
    tier="close",
    contract=(
        "scores, softmax and sums in float32 (float64 for float64), weights rounded to the dtype "
        "of the values, the result rounded once, where the original may round between its steps; a "
        "key that the original fills with, or adds, -3e4 or less has weight 0; a query that sees "
        "no key gives 0 and gradient 0, where the original averages the values or gives NaN; a "
        "value that is not finite makes the queries that see it NaN, in the original all"
    ),
    ulps=(Bound("float32", 64, 64, 1.5), Bound("bfloat16", 4, 12), Bound("float16", 4, 12)),
)

fuse_attention = rewriting_pass("fuse_attention", (ATTENTION,))
