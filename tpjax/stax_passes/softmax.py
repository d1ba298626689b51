# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Reads a softmax around its exponential: exp(s - max s) / sum(exp(s - max s)), as spelled."""

from dataclasses import dataclass

import numpy as np

from tpjax.stax_passes.graph import MOVES, Graph, Node


@dataclass
class Softmax:
    """A softmax, read: its argument, its result, its axis, and the values between."""

    scores: int
    weights: int
    axis: int
    inside: set[int]


def softmax_around(graph: Graph, exp: Node) -> "Softmax | None":
    """Returns the softmax around the exponential, or None."""
    value, inside = exp.outs[0], {exp.outs[0]}
    for total in _sums(graph, value):
        axes = tuple(total.eqn.params["axes"])
        for divided in _divisions(graph, value, total):
            if len(axes) != 1 or graph.shape(divided.outs[0]) != graph.shape(value):
                continue
            scores = _without_max(graph, exp.ins[0], axes[0], inside)
            for step in (divided.ins[0], divided.ins[1]):
                while step != value and (node := graph.node_of(step)) is not None:
                    inside.add(step)
                    step = node.ins[0]
            inside.add(divided.outs[0])
            return Softmax(scores, divided.outs[0], axes[0], inside)
    return None


def _sums(graph: Graph, value: int) -> list[Node]:
    """Returns the sums over the value, or over casts of it."""
    found = []
    for user in graph.users_of(value):
        if user.name == "reduce_sum":
            found.append(user)
        elif user.name == "convert_element_type":
            found.extend(_sums(graph, user.outs[0]))
    return found


def _divisions(graph: Graph, value: int, total: Node) -> list[Node]:
    """Returns the divisions of the value by its sum."""
    stack, found = [value], []
    while stack:
        for user in graph.users_of(stack.pop()):
            if user.name == "convert_element_type":
                stack.append(user.outs[0])
            elif user.name == "div" and graph.restores(user.ins[1], value, total) is not None:
                found.append(user)
    return found


def _without_max(graph: Graph, value: int, axis: int, inside: set[int]) -> int:
    """Returns the scores before the maximum was subtracted, for numerical stability, from them."""
    node = graph.made_by(value, "sub")
    if node is None:
        return value
    steps, step = {value}, node.ins[1]
    while (made := graph.made_by(step, "max", "reduce_max", "transpose", *MOVES)) is not None:
        steps.add(step)
        if made.name == "reduce_max":
            if graph.restores(node.ins[1], node.ins[0], made, "max", "stop_gradient") != axis:
                return value
            inside |= steps
            return node.ins[0]
        low = [v for v in made.ins if graph.scalar(v) != -np.inf]
        step = low[0] if made.name == "max" else made.ins[0]
    return value
