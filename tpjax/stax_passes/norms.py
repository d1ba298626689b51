# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Recognises RMSNorm and LayerNorm as people write them, and calls the operators instead.

    rms_norm(x)   = x rsqrt(mean(x^2) + eps) scale
    layer_norm(x) = (x - mean(x)) rsqrt(var(x) + eps) scale + bias

Read from the reciprocal square root outwards: backwards to the statistic, forwards over the product
that uses it. Where converts stand, whether a square is x*x or x**2, whether the variance is centred
or E[x^2] - E[x]^2, and whether one divides by a root or multiplies by its reciprocal makes no
difference.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from tpjax.pallas import layer_norm, rms_norm
from tpjax.stax_passes.engine import Bound, Match, Recogniser, also_used, rewriting_pass
from tpjax.stax_passes.graph import Graph, Node


@dataclass
class _Reader:
    """What was read so far: values that vanish, and the parts of the norm."""

    graph: Graph
    inside: set[int] = field(default_factory=set)

    def step(self, value: int, *names: str) -> Node | None:
        """Returns the node that makes the value, noted as inside, if it is one of `names`."""
        node = self.graph.made_by(value, *names)
        if node is not None:
            self.inside.add(value)
        return node

    def moves(self, value: int) -> int:
        """Follows a per-row value back through converts, broadcasts and reshapes, as inside."""
        while (
            node := self.graph.made_by(value, "convert_element_type", "broadcast_in_dim", "reshape")
        ) is not None and keeps_rows(self.graph, node):
            self.inside.add(value)
            value = node.ins[0]
        return value

    def past_guard(self, value: int) -> int:
        """Follows past `jnp.var`'s NaN guard and a clamp at zero: no finite variance changes."""
        graph = self.graph
        node = graph.made_by(value, "select_n", "max")
        if node is None:
            return value
        if node.name == "max":
            other = [v for v in node.ins if graph.scalar(v) != 0.0]
            kept = other[0] if len(other) == 1 else None
        else:
            chosen = graph.constant(node.ins[0])
            kept = (
                None
                if chosen is None or chosen.size != 1
                else node.ins[1 + int(chosen.reshape(()))]
            )
        if kept is None:
            return value
        self.inside.add(value)
        return self.moves(kept)

    def plus_constant(self, value: int) -> tuple[int, float] | None:
        """Returns (v, eps) where the value is v + eps."""
        node = self.step(value, "add")
        if node is None:
            return None
        for at, other in ((0, 1), (1, 0)):
            eps = self.graph.scalar(node.ins[other])
            if eps is not None:
                return self.moves(node.ins[at]), eps
        return None

    def mean(self, value: int) -> tuple[int, tuple[int, ...]] | None:
        """Returns (y, axes) where the value is the mean of y over the axes."""
        graph = self.graph
        node = self.step(self.moves(value), "div", "mul")
        if node is None:
            return None
        for at, other in ((0, 1), (1, 0)) if node.name == "mul" else ((0, 1),):
            count = graph.scalar(node.ins[other])
            if count is None:
                continue
            total = self.step(self.moves(node.ins[at]), "reduce_sum")
            if total is None:
                continue
            axes = tuple(total.eqn.params["axes"])
            length = math.prod(graph.shape(total.ins[0])[a] for a in axes)
            if math.isclose(count if node.name == "div" else 1 / count, length, rel_tol=1e-6):
                return total.ins[0], axes
        return None

    def square_of(self, value: int) -> int | None:
        """Returns v where the value is v squared."""
        square = self.graph.peel(value, "convert_element_type")  # sums of bfloat16 run in float32
        node = self.step(square, "square", "integer_pow", "mul")
        if node is None:
            return None
        self.inside.add(value)
        squared = {
            "square": True,
            "integer_pow": node.eqn.params.get("y") == 2,
            "mul": node.ins[0] == node.ins[-1],
        }[node.name]
        return node.ins[0] if squared else None

    def centred(self, value: int) -> int | None:
        """Returns x where the value is x - mean(x) over the last axis, or x - 0."""
        graph = self.graph
        node = graph.made_by(value, "sub")
        if node is None:
            return None
        if graph.scalar(node.ins[1]) == 0.0:
            return node.ins[0]
        reader = _Reader(graph)
        mean = reader.mean(node.ins[1])
        last = len(graph.shape(value)) - 1
        if mean is None or mean[1] != (last,) or not same_array(graph, mean[0], node.ins[0]):
            return None
        self.inside |= reader.inside | {value}
        return node.ins[0]


@dataclass(frozen=True)
class _Statistic:
    """rsqrt's argument, read: over which array, how centred, with which eps."""

    x: int
    centred: bool
    eps: float


def _statistic(reader: _Reader, value: int) -> "_Statistic | str | None":
    graph = reader.graph
    found = reader.plus_constant(reader.moves(value))
    if found is None:
        return None
    variance, eps = found
    while (inner := reader.past_guard(variance)) != variance:
        variance = inner
    difference = reader.step(variance, "sub")  # E[x^2] - E[x]^2
    mean = reader.mean(difference.ins[0] if difference is not None else variance)
    base = None if mean is None else reader.square_of(mean[0])
    if mean is None or base is None:
        return _over_other_axes(graph, variance)
    axes = mean[1]
    last = len(graph.shape(base)) - 1
    if eps <= 0:
        return f"eps is {eps:g}, and the operator needs one above zero"
    if axes != (last,):
        return _over_other_axes(graph, variance)
    if difference is None:
        x = reader.centred(base)
        if x is None:
            return _Statistic(base, False, eps)
        return _Statistic(x, not same_array(graph, base, x), eps)
    first = reader.square_of(reader.moves(difference.ins[1]))
    first = None if first is None else reader.mean(first)
    if first is None or first[1] != (last,) or not same_array(graph, first[0], base):
        return "the variance is not that of the array whose square is averaged"
    return _Statistic(base, True, eps)


def _over_other_axes(graph: Graph, variance: int) -> str | None:
    """Returns the reason where the variance is a mean over an axis that is not the last."""
    quotient = graph.made_by(graph.peel_moves(variance), "div", "mul")
    for value in () if quotient is None else quotient.ins:
        total = graph.made_by(graph.peel_moves(value), "reduce_sum")
        if total is None:
            continue
        axes = tuple(int(a) for a in total.eqn.params["axes"])
        if axes != (len(graph.shape(total.ins[0])) - 1,):
            shown = axes[0] if len(axes) == 1 else axes
            return f"the mean is taken over axis {shown}, the kernel normalises over the last axis"
    return None


@dataclass
class _Product:
    """The walk forward from the reciprocal root to the finished norm."""

    reader: _Reader
    statistic: _Statistic
    has_x: bool = False
    scale: int | None = None
    bias: int | None = None

    def factor(self, value: int) -> bool:
        """Takes the value as x, or as a scale over the last axis; returns whether it was one."""
        if not self.has_x and self._is_x(value):
            self.has_x = True
            return True
        if self.scale is None and self.bias is None and self._is_vector(value):
            self.scale = value
            return True
        return False

    def _is_x(self, value: int) -> bool:
        graph, statistic = self.reader.graph, self.statistic
        peeled = graph.peel(value, "convert_element_type")
        if not statistic.centred:
            return same_array(graph, peeled, statistic.x)
        node = graph.made_by(peeled, "sub")
        if node is None or not same_array(graph, node.ins[0], statistic.x):
            return False
        mean = self.reader.mean(node.ins[1])
        self.reader.inside.add(peeled)
        return mean is not None and same_array(graph, mean[0], statistic.x)

    def _is_vector(self, value: int) -> bool:
        """Whether the value varies along the last axis only."""
        graph = self.reader.graph
        length = graph.shape(self.statistic.x)[-1]
        return _vector(graph, value, length) is not None


def keeps_rows(graph: Graph, node: Node) -> bool:
    """Returns whether a statistic of each row stays with its row: only a last axis comes or goes.

    In square arrays another broadcast has the same shapes and another meaning.
    """
    if node.name == "convert_element_type":
        return True
    source, target = graph.shape(node.ins[0]), graph.shape(node.outs[0])
    if node.name == "broadcast_in_dim":
        dims = tuple(int(i) for i in node.eqn.params["broadcast_dimensions"])
        return dims == tuple(range(len(source))) and len(target) - len(source) <= 1
    return target in (source, (*source, 1)) or source == (*target, 1)


def _plain(graph: Graph, value: int) -> int:
    """Follows the array back through converts and subtracted zeros."""
    while True:
        value = graph.peel(value, "convert_element_type")
        node = graph.made_by(value, "sub")
        if node is None or graph.scalar(node.ins[1]) != 0.0:
            return value
        value = node.ins[0]


def same_array(graph: Graph, a: int, b: int) -> bool:
    """Returns whether two values are one array, casts and subtracted zeros aside."""
    return _plain(graph, a) == _plain(graph, b)


def _vector(graph: Graph, value: int, length: int) -> int | None:
    """Returns the [D] value that was broadcast along the last axis to make this one, or None."""
    while True:
        shape = graph.shape(value)
        if shape and shape[-1] == length and graph.size(value) == length:
            return value
        node = graph.made_by(value, "broadcast_in_dim", "convert_element_type", "reshape")
        if node is None or node.name == "reshape":
            return None
        if node.name == "broadcast_in_dim":
            dims = tuple(node.eqn.params["broadcast_dimensions"])
            if not dims or dims[-1] != len(shape) - 1:
                return None
        value = node.ins[0]


def _walk(product: _Product, value: int, divides: bool) -> int | str | None:
    """Returns the value of the finished norm, following the one use of each value forward.

    Returns the reason, in words, where a value before the norm is finished has a second use.
    """
    graph, root = product.reader.graph, None
    while True:
        users = graph.users_of(value)
        if root is None and graph.is_output(value):
            return f"the statistics (made at {graph.source(value)}) are also returned"
        if root is None and len(users) > 1:
            return also_used(graph, value, users[-1])
        if graph.is_output(value) or len(users) != 1:
            return root
        node = users[0]
        others = [v for v in node.ins if v != value]
        if node.name in ("broadcast_in_dim", "reshape") and root is None:
            if not keeps_rows(graph, node):
                return "the statistics are not put back on the rows that they were taken of"
        elif node.name == "convert_element_type":
            if root is not None and not _closes(product, node):
                return root
        elif node.name == "mul" and len(others) == 1 and not divides and product.factor(others[0]):
            pass
        elif node.name == "div" and divides and graph.scalar(node.ins[0]) == 1.0:
            divides = False
        elif node.name == "div" and divides and node.ins[1] == value and product.factor(others[0]):
            divides = False
            if not product.has_x:
                return None
        elif (
            node.name == "add"
            and root is not None
            and product.bias is None
            and product.statistic.centred
        ):
            if len(others) != 1 or not product._is_vector(others[0]):
                return root
            product.bias = others[0]
        else:
            return root
        product.reader.inside.add(value)
        value = node.outs[0]
        if product.has_x and graph.shape(value) == graph.shape(product.statistic.x):
            root = value


def _closes(product: _Product, node: Node) -> bool:
    """Whether a convert after the product belongs to the norm: it goes back to x's dtype."""
    graph = product.reader.graph
    origin = graph.peel(product.statistic.x, "convert_element_type")
    return graph.dtype(node.outs[0]) == graph.dtype(origin) or product.scale is None


def _extract(graph: Graph, node: Node) -> "Match | str | None":
    reader = _Reader(graph)
    statistic = _statistic(reader, node.ins[0])
    if not isinstance(statistic, _Statistic):
        return statistic
    product = _Product(reader, statistic)
    root = _walk(product, node.outs[0], divides=node.name == "sqrt")
    if isinstance(root, str):
        return root
    if root is None:
        return "the statistics are not multiplied with the array they were taken of"
    return _match(graph, product, root, node.outs[0])


def _match(graph: Graph, product: _Product, root: int, rstd: int) -> Match:
    statistic = product.statistic
    length = graph.shape(statistic.x)[-1]
    x = _plain(graph, statistic.x)
    if graph.dtype(root) != graph.dtype(x):  # the result keeps the upcast: so must the operand
        x = statistic.x
    vectors = [_vector(graph, v, length) for v in (product.scale, product.bias) if v is not None]
    operands = (x, *(v for v in vectors if v is not None))
    has_scale, has_bias, eps = product.scale is not None, product.bias is not None, statistic.eps

    def replacement(x: Any, *vectors: Any) -> Any:
        rest = [jnp.reshape(v, (length,)) for v in vectors]
        scale = rest.pop(0) if has_scale else None
        if not statistic.centred:
            return rms_norm(x, scale, eps=eps)
        return layer_norm(x, scale, rest.pop(0) if has_bias else None, eps=eps)

    inside = frozenset((product.reader.inside | {rstd}) - {root, x, statistic.x})
    return Match(
        root, operands, replacement, inside, "layer_norm" if statistic.centred else "rms_norm"
    )


NORM = Recogniser(
    "norm",
    anchor=frozenset({"rsqrt", "sqrt"}),
    extract=_extract,
    tier="close",
    contract=(
        "everything in float32 (float64 for float64) and rounded once, to the dtype of the "
        "original's result, where the original may round between its steps; the variance is "
        "centred and never negative, also where the original subtracts E[x]^2 from E[x^2]; a row "
        "that holds NaN or infinity gives NaN where the original does, other rows do not see it"
    ),
    ulps=(
        Bound("float32", 8, 8, 1.5),
        Bound("bfloat16", 0.51, 0.51),
        Bound("float16", 0.51, 0.51),
    ),
)

fuse_norm = rewriting_pass("fuse_norm", (NORM,))
