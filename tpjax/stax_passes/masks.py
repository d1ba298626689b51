# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""What a mask means, found by evaluating it, not by its spelling.

A mask that depends on no input is evaluated, a block of rows at a time, and compared with the band
that its visible entries span: causal, sliding window, or everything. Any other mask stays an array.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpjax.core import _jax
from tpjax.stax_passes.graph import Graph, Node

MAX_ELEMENTS = 2**30
"""Largest mask, in elements, that is evaluated to learn what it means (about a second)."""
MAX_WINDOW = 2**24
"""Largest intermediate, in elements, that is evaluated at once."""
BLOCK_ROWS = 256
MAX_DEPTH = 64

ELEMENTWISE: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "abs": np.abs,
    "max": np.maximum, "min": np.minimum, "sign": np.sign, "square": np.square,
    "ge": np.greater_equal, "gt": np.greater, "le": np.less_equal, "lt": np.less,
    "eq": np.equal, "ne": np.not_equal,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "not": lambda x: np.logical_not(x) if x.dtype == bool else np.invert(x),
    "select_n": lambda which, *cases: np.choose(which.astype(np.intp), np.broadcast_arrays(*cases)),
    "stop_gradient": lambda x: x, "copy": lambda x: x, "pvary": lambda x: x, "reshard": lambda x: x,
}  # fmt: skip


@dataclass(frozen=True)
class Band:
    """Key s is visible to query t when `-right <= t - s <= left`; None: no limit on that side."""

    left: int | None
    right: int | None

    @property
    def everything(self) -> bool:
        """Whether nothing is masked."""
        return self.left is None and self.right is None


Window = dict[int, tuple[int, int]]
"""The part of an array to evaluate: [start, stop) along some of its axes."""


class BlindQueryError(Exception):
    """A mask hides every key from some query, where the original does not give an operator's 0."""


class _NotEvaluated(Exception):
    pass


class Evaluation:
    """Evaluates a window of a value that depends on no input."""

    def __init__(self, graph: Graph, value: int) -> None:
        """Prepares the evaluation of `value`."""
        self.graph, self.value = graph, value

    def at(self, window: Window) -> np.ndarray | None:
        """Returns the value's numbers in the window, or None if they cannot be known here."""
        try:
            return self._at(self.value, window, 0)
        except _NotEvaluated:
            return None

    def constant_along(self, axis: int) -> bool:
        """Returns whether the value is the same all along the axis, judged by how it is made."""
        try:
            return self._constant(self.value, axis, 0)
        except _NotEvaluated:
            return False

    def _at(self, value: int, window: Window, depth: int) -> np.ndarray:
        graph = self.graph
        shape = graph.shape(value)
        # an axis of length one is broadcast: its one row serves every window
        window = {i: w for i, w in window.items() if shape[i] > 1}
        if value in graph.known:
            known = self._known(value)
            return known[tuple(slice(*window.get(i, (None,))) for i in range(known.ndim))]
        node = graph.node_of(value)
        if node is None or depth > MAX_DEPTH:
            raise _NotEvaluated
        taken = [w[1] - w[0] if (w := window.get(i)) else n for i, n in enumerate(shape)]
        if np.prod(taken) > MAX_WINDOW:
            raise _NotEvaluated
        return self._node(node, window, taken, depth + 1)

    def _known(self, value: int) -> np.ndarray:
        known = self.graph.known[value]
        if _jax.is_tracer(known):
            raise _NotEvaluated
        return np.asarray(known)

    def _node(self, node: Node, window: Window, shape: list[int], depth: int) -> np.ndarray:
        graph, dtype = self.graph, self.graph.dtype(node.outs[0])
        if node.name == "iota":
            along = node.eqn.params["dimension"]
            line = np.arange(*window.get(along, (0, shape[along]))).astype(dtype)
            return np.broadcast_to(
                line.reshape([-1 if i == along else 1 for i in range(len(shape))]), shape
            )
        if node.name in ELEMENTWISE:
            operands = [self._at(i, window if graph.shape(i) else {}, depth) for i in node.ins]
            return ELEMENTWISE[node.name](*operands)
        back = self._axes_before(node)
        inner = {j: w for i, w in window.items() if (j := back[i]) is not None}
        x = self._at(node.ins[0], inner, depth)
        if node.eqn.primitive.name == "convert_element_type":
            return x.astype(dtype)
        if node.name == "transpose":
            return x.transpose(node.eqn.params["permutation"])
        lengths = [1 if j is None else x.shape[j] for j in back]
        return np.broadcast_to(x.reshape(lengths), shape)

    def _axes_before(self, node: Node) -> list[int | None]:
        """Returns, for each axis of the result, the operand's axis that it is, or None."""
        source, target = (self.graph.shape(v) for v in (node.ins[0], node.outs[0]))
        if node.eqn.primitive.name == "convert_element_type":
            return list(range(len(target)))
        if node.name == "transpose":
            return list(node.eqn.params["permutation"])
        if node.name == "broadcast_in_dim":
            dims = tuple(int(i) for i in node.eqn.params["broadcast_dimensions"])
            return [dims.index(i) if i in dims else None for i in range(len(target))]
        if node.name in ("reshape", "squeeze"):  # ones that only add or drop axes of length one
            long_in = [i for i, n in enumerate(source) if n > 1]
            if [source[i] for i in long_in] == [n for n in target if n > 1]:
                rest = iter(long_in)
                return [next(rest) if n > 1 else None for n in target]
        raise _NotEvaluated

    def _constant(self, value: int, axis: int, depth: int) -> bool:
        graph = self.graph
        if graph.shape(value)[axis] == 1:
            return True
        if value in graph.known:
            known = self._known(value)
            return bool((known == np.take(known, [0], axis)).all())
        node = graph.node_of(value)
        if node is None or depth > MAX_DEPTH:
            raise _NotEvaluated
        if node.name == "iota":
            return node.eqn.params["dimension"] != axis
        if node.name in ELEMENTWISE:
            return all(self._constant(i, axis, depth + 1) for i in node.ins if graph.shape(i))
        before = self._axes_before(node)[axis]
        return before is None or self._constant(node.ins[0], before, depth + 1)


def band_of(
    graph: Graph, value: int, query_axis: int, key_axis: int, visible: Callable[[np.ndarray], Any]
) -> Band | None:
    """Returns the band that the mask is, or None if it is not one or depends on an input.

    Args:
      graph: the graph.
      value: the mask; along every axis but the two given it must be constant.
      query_axis: its axis of queries t.
      key_axis: its axis of keys s.
      visible: maps the mask's numbers to booleans, True where the key is visible.

    Raises:
      BlindQueryError: a query sees no key.
    """
    T, S = graph.shape(value)[query_axis], graph.shape(value)[key_axis]
    if T * S > MAX_ELEMENTS:
        return None
    part = Evaluation(graph, value)
    others = [i for i in range(len(graph.shape(value))) if i not in (query_axis, key_axis)]
    if not all(part.constant_along(i) for i in others):
        return None
    rows: list[np.ndarray] = []
    for start in range(0, T, BLOCK_ROWS):
        stop = min(start + BLOCK_ROWS, T)
        block = part.at(dict.fromkeys(others, (0, 1)) | {query_axis: (start, stop)})
        if block is None:
            return None
        seen = np.moveaxis(np.asarray(visible(block), bool), (query_axis, key_axis), (-2, -1))
        seen = np.broadcast_to(seen.reshape(seen.shape[-2:]), (stop - start, S))
        if not seen.any(axis=1).all():
            raise BlindQueryError
        ends = seen.argmax(axis=1), S - 1 - seen[:, ::-1].argmax(axis=1), seen.sum(axis=1)
        rows.append(np.stack(ends, axis=1))
    return _band(*np.concatenate(rows).T, num_keys=S)


def _band(first: np.ndarray, last: np.ndarray, count: np.ndarray, *, num_keys: int) -> Band | None:
    """Returns the band whose rows have these first, last and numbers of visible keys, or None."""
    t = np.arange(len(first))
    left, right = int((t - first).max()), int((last - t).max())
    low, high = np.maximum(t - left, 0), np.minimum(t + right, num_keys - 1)
    if left < 0 or right < 0:
        return None  # it leaves the diagonal out
    if not ((first == low) & (last == high) & (count == high - low + 1)).all():
        return None
    unlimited = (low == 0).all(), (high == num_keys - 1).all()
    return Band(None if unlimited[0] else left, None if unlimited[1] else right)
