# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Reads what stands between query-key products and the softmax: scale, masks and biases.

    scores = scale (query . key) + bias, with masked entries filled by a large negative number

The path is walked from the softmax back to the matrix product. Whatever it does not know ends the
walk with a reason in plain words, which becomes the near miss that `explain` shows.
"""

from dataclasses import dataclass, field

import numpy as np

from tpjax.stax_passes.axes import Axes, Layout
from tpjax.stax_passes.graph import Graph, Node

MASKED = -3e4
"""A fill or additive constant at or below this counts as masking."""

THROUGH = frozenset({
    "add", "sub", "mul", "div", "max", "min", "neg", "select_n", "tanh", "exp", "log", "clamp",
    "convert_element_type", "reshape", "transpose", "broadcast_in_dim", "squeeze", "copy",
    "stop_gradient",
})  # fmt: skip
LAYOUT = ("reshape", "transpose", "broadcast_in_dim", "squeeze")
SAME = ("convert_element_type", "copy", "reduce_precision")


class Unknown(Exception):
    """The path holds something that attention has not: the message says what, in plain words."""


@dataclass
class Part:
    """An array that masks or is added: which value, its layout, and how to read it."""

    value: int
    layout: Layout
    keep: bool = True
    """For a mask: whether True means visible."""
    factor: float = 1.0
    """For a bias: what the scores are multiplied by after it was added."""


@dataclass
class Scores:
    """The path from the softmax's argument back to the query-key product, read."""

    graph: Graph
    axes: Axes
    value: int
    layout: Layout
    scale: float = 1.0
    masks: list[Part] = field(default_factory=list)
    biases: list[Part] = field(default_factory=list)
    inside: set[int] = field(default_factory=set)
    fill: float = -np.inf
    """The largest of what masked scores are filled with, or has been added to them."""

    def walk(self) -> Node:
        """Returns the query-key product; raises `Unknown` where the path is not attention's."""
        while True:
            node = self.graph.node_of(self.value)
            if node is None or not self._leads(self.value):
                raise Unknown(
                    "the softmax's argument is not made from a product of queries and keys"
                )
            self.inside.add(self.value)
            if node.name == "dot_general":
                if self.fill > MASKED * max(1.0, abs(self.scale)):
                    raise Unknown(
                        f"masked scores are filled with {self.fill:g}, which is not far below "
                        f"scores multiplied by {self.scale:g}"
                    )
                return node
            if node.name in SAME:
                self.value = node.ins[0]
            elif node.name in LAYOUT:
                self.layout = self._before(node)
                self.value = node.ins[0]
            elif node.name in ("mul", "div", "neg"):
                self._scaled(node)
            elif node.name in ("add", "sub"):
                self._added(node)
            elif node.name == "select_n":
                self._selected(node)
            else:
                raise Unknown(
                    f"the scores go through {node.name}, which the operator does not have"
                )

    def _leads(self, value: int) -> bool:
        return self.graph.reaches_back(value, lambda n: n.name == "dot_general", THROUGH)

    def _before(self, node: Node) -> Layout:
        """Returns the layout of the node's operand from that of its result."""
        shape = self.graph.shape(node.ins[0])
        if node.name == "transpose":
            order = tuple(node.eqn.params["permutation"])
            return self.axes.keep(self.layout[order.index(i)] for i in range(len(order)))
        if node.name == "broadcast_in_dim":
            dims = tuple(node.eqn.params["broadcast_dimensions"])
            if self.graph.size(node.ins[0]) != self.graph.size(node.outs[0]):
                raise Unknown("the scores are broadcast")
            return self.axes.keep(self.layout[i] for i in dims)
        layout = self.axes.reshape(self.layout, shape)
        if layout is None:
            raise Unknown("a reshape between product and softmax mixes axes")
        return layout

    def _path(self, node: Node) -> tuple[int, int]:
        """Returns which operand of a binary node is the path, and the other."""
        leads = [self._leads(v) for v in node.ins]
        if all(leads):
            raise Unknown(f"both operands of {node.name} come from matrix products")
        at = leads.index(True)
        if self.graph.size(node.ins[at]) != self.graph.size(node.outs[0]):
            raise Unknown("the scores are broadcast")
        return node.ins[at], node.ins[1 - at]

    def _scaled(self, node: Node) -> None:
        if node.name == "neg":
            self.scale, self.value = -self.scale, node.ins[0]
            return
        path, other = self._path(node)
        factor = self.graph.scalar(other)
        if factor is None:
            kind = (
                "an array, which is not masking" if self.graph.size(other) > 1 else "a traced value"
            )
            raise Unknown(f"the scores are multiplied by {kind}; only a constant scale is known")
        if node.name == "div" and path != node.ins[0]:
            raise Unknown("a constant is divided by the scores")
        self.scale *= factor if node.name == "mul" else 1 / factor
        self.value = path

    def _added(self, node: Node) -> None:
        path, other = self._path(node)
        if node.name == "sub" and path != node.ins[0]:
            raise Unknown("the scores are subtracted from an array")
        sign = 1.0 if node.name == "add" else -1.0
        added = self.graph.scalar(other)
        if added is None:
            self._bias(other, self._layout_of(other), sign * self.scale)
        elif not abs(added * self.scale) < -MASKED:  # softmax does not see a smaller one
            raise Unknown(f"{added:g} is added to all scores, beside which they are lost")
        self.value = path

    def _layout_of(self, value: int) -> Layout:
        """Returns the layout of an operand beside the path, axes of length one empty."""
        shape = self.graph.shape(value)
        if not shape:
            return self.axes.keep([])
        return self.axes.keep(
            atoms if n > 1 else [] for atoms, n in zip(self.layout, shape, strict=True)
        )

    def _bias(self, value: int, layout: Layout, factor: float) -> None:
        value, layout = unbroadcast(self.graph, self.axes, value, layout)
        node = self.graph.made_by(value, "select_n")
        if node is not None and len(node.ins) == 3:  # where(mask, 0, -1e9), added
            fills = [self.graph.scalar(v) for v in node.ins[1:]]
            for zero, fill, keep in ((0, 1, False), (1, 0, True)):
                if fills[zero] == 0.0 and (fills[fill] or 0.0) * factor <= MASKED:
                    which = node.ins[0]
                    self.fill = max(self.fill, (fills[fill] or 0.0) * factor)
                    self._mask(
                        which, layout if self.graph.shape(which) else self.axes.keep([]), keep
                    )
                    return
        self._refuse_unmasking(value, factor)
        self.biases.append(Part(value, layout, factor=factor))

    def _refuse_unmasking(self, value: int, factor: float) -> None:
        """Refuses a known bias so large that what a mask hides could come back by it."""
        node = self.graph.made_by(value, "select_n")
        cases = [value] if node is None else node.ins[1:]
        for case in cases:
            known = self.graph.scalar(case)
            known = self.graph.constant(case) if known is None else np.asarray(known)
            if known is not None and known.size and not (known * factor).max() < -MASKED:
                raise Unknown(
                    f"up to {(known * factor).max():g} is added to scores, by which masked ones "
                    "could be seen again"
                )

    def _selected(self, node: Node) -> None:
        which, *cases = node.ins
        leads = [self._leads(v) for v in cases]
        if len(cases) != 2 or sum(leads) != 1:
            raise Unknown("a selection between two products")
        path = cases[leads.index(True)]
        fill = self.graph.scalar(cases[leads.index(False)])
        if fill is None:
            raise Unknown("masked scores are filled with something that is not one constant")
        if not np.isneginf(fill) and not fill * self.scale <= MASKED:
            raise Unknown(
                f"masked scores are filled with {fill:g}, which is not far below every score"
            )
        if self.graph.size(path) != self.graph.size(node.outs[0]):
            raise Unknown("the scores are broadcast")
        self.fill = max(self.fill, fill * self.scale)
        self._mask(which, self._layout_of(which), leads.index(True) == 1)
        self.value = path

    def _mask(self, value: int, layout: Layout, keep: bool) -> None:
        """Notes a mask, a conjunction as its parts."""
        value, layout = unbroadcast(self.graph, self.axes, value, layout)
        node = self.graph.made_by(value, "and" if keep else "or", "not")
        if node is None or self.graph.dtype(value) != np.bool_:
            self.masks.append(Part(value, layout, keep=keep))
        elif node.name == "not":
            self._mask(node.ins[0], layout, not keep)
        else:
            for operand in node.ins:
                shape = self.graph.shape(operand)
                inner = (
                    [a if n > 1 else [] for a, n in zip(layout, shape, strict=True)]
                    if shape
                    else []
                )
                self._mask(operand, self.axes.keep(inner), keep)


def unbroadcast(graph: Graph, axes: Axes, value: int, layout: Layout) -> tuple[int, Layout]:
    """Returns the smaller array that was broadcast or reshaped to the value, and its layout."""
    while True:
        node = graph.made_by(value, "broadcast_in_dim", "convert_element_type", "reshape")
        if node is None:
            return value, layout
        source = graph.shape(node.ins[0])
        if node.name == "broadcast_in_dim":
            dims = tuple(node.eqn.params["broadcast_dimensions"])
            layout = axes.keep(
                layout[i] if n > 1 else [] for i, n in zip(dims, source, strict=True)
            )
        elif node.name == "reshape":
            before = (
                axes.reshape(layout, source)
                if axes.shape(layout) == list(graph.shape(value))
                else None
            )
            if before is None:
                return value, layout
            layout = before
        elif graph.dtype(node.ins[0]) == np.bool_ or graph.dtype(value) == np.bool_:
            return value, layout  # a cast from or to bool changes what the numbers mean
        value = node.ins[0]
