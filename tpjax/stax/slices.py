# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The equations that a match replaces, cut out as a program, and what the pass puts there."""

from functools import partial
from typing import Any, NamedTuple

import jax
from jax.extend.core import jaxpr_as_fun

from tpjax.core import _jax
from tpjax.stax_passes.engine import Built
from tpjax.stax_passes.graph import Graph, Node
from tpjax.stax_passes.match import Match


class Slice(NamedTuple):
    """The nodes that a match replaces, and the values that they and the replacement read."""

    nodes: list[Node]
    inputs: list[int]


def slice_of(graph: Graph, match: Match) -> Slice:
    """Returns what a match replaces; inputs are its operands, and what is read besides, if any."""
    stops, needed, kept = set(match.operands), {match.root}, []
    for node in reversed(graph.nodes[: graph.producer[match.root] + 1]):
        if any(v in needed and v not in stops for v in node.outs):
            kept.append(node)
            needed.update(node.ins)
    made = {v for node in kept for v in node.outs} - stops
    values = dict.fromkeys((*match.operands, *sorted(needed)))
    return Slice(kept[::-1], [v for v in values if v not in made and v not in graph.known])


def original(graph: Graph, match: Match, kept: Slice) -> _jax.Jaxpr:
    """Returns the equations that the match replaces, as a program of the slice's inputs."""
    return jax.make_jaxpr(partial(_run_slice, graph, match, kept))(*_avals(graph, kept))


def _run_slice(graph: Graph, match: Match, kept: Slice, *args: Any) -> Any:
    given = set(match.operands)
    env = graph.known | dict(zip(kept.inputs, args, strict=True))
    for node in kept.nodes:
        outs = _jax.bind(node.eqn, *(env[i] for i in node.ins))
        env.update((v, x) for v, x in zip(node.outs, outs, strict=True) if v not in given)
    return env[match.root]


def replaced(graph: Graph, built: Built, kept: Slice) -> _jax.Jaxpr:
    """Returns what the pass puts there, as a program of the slice's inputs."""

    def run(*args: Any) -> Any:
        env = graph.known | dict(zip(kept.inputs, args, strict=True))
        return jaxpr_as_fun(built.jaxpr)(*(env[i] for i in built.match.operands))

    return jax.make_jaxpr(run)(*_avals(graph, kept))


def _avals(graph: Graph, kept: Slice) -> list[Any]:
    return [graph.avals[v] for v in kept.inputs]
