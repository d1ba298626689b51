# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The equations that a match replaces, cut out as a program, and what the pass puts there."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from tpjax.core import _jax
from tpjax.stax.verification.faults import rounded
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


def _run_slice(
    graph: Graph, match: Match, kept: Slice, *args: Any, rounded: Any = lambda x: x
) -> Any:
    given = set(match.operands)
    env = graph.known | dict(zip(kept.inputs, args, strict=True))
    for node in kept.nodes:
        outs = map(rounded, _jax.bind(node.eqn, *(env[i] for i in node.ins)))
        env.update((v, x) for v, x in zip(node.outs, outs, strict=True) if v not in given)
    return env[match.root]


def replaced(graph: Graph, built: Built, kept: Slice) -> _jax.Jaxpr:
    """Returns what the pass puts there, as a program of the slice's inputs."""

    def run(*args: Any) -> Any:
        env = graph.known | dict(zip(kept.inputs, args, strict=True))
        return jaxpr_as_fun(built.jaxpr)(*(env[i] for i in built.match.operands))

    return jax.make_jaxpr(run)(*_avals(graph, kept))


class Probe(NamedTuple):
    """What one device of a shard_map has at a match."""

    device: int
    expected: Any
    value: Any
    """Of the replacement."""
    rounded: list[Any]
    """What the original gives when each equation is rounded at random."""
    inputs: list[Any]
    """Of the slice."""


def probes(
    eqn: _jax.Equation, graph: Graph, matches: Sequence[Built], ins: list[Any], trials: int
) -> list[list[Probe]]:
    """Returns what each device has at each match in the body of a shard_map."""
    mesh, manual = eqn.params["mesh"], tuple(eqn.params["newly_manual_axes"])

    def local(*args: Any) -> list[Any]:
        env = graph.known | dict(zip(graph.inputs, args, strict=True))
        for node in graph.nodes:
            outs = _jax.bind(node.eqn, *(env[i] for i in node.ins))
            env.update(zip(node.outs, outs, strict=True))
        return [_probe(graph, built, env, trials, manual) for built in matches]

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=eqn.params["in_specs"],
        out_specs=jax.P(manual),
        axis_names=set(manual),
        check_vma=eqn.params["check_vma"],
    )
    found = []
    for expected, value, noisy, inputs in jax.jit(mapped)(*ins):
        everything = map(list, (np.asarray(x) for x in (expected, value, *noisy, *inputs)))
        devices = list(zip(*everything, strict=True))
        found.append(
            [
                Probe(i, at[0], at[1], list(at[2 : 2 + trials]), list(at[2 + trials :]))
                for i, at in enumerate(devices)
            ]
        )
    return found


def _probe(graph: Graph, built: Built, env: Any, trials: int, manual: tuple[str, ...]) -> Any:
    """Returns what a device has at the match, while the body of the shard_map is traced."""
    match, kept = built.match, slice_of(graph, built.match)
    inputs = [env[i] for i in kept.inputs]
    (value,) = jaxpr_as_fun(built.jaxpr)(*(env[i] for i in match.operands))
    noise = (partial(rounded, rng=np.random.default_rng(trial)) for trial in range(trials))
    noisy = [_run_slice(graph, match, kept, *inputs, rounded=one) for one in noise]
    found = env[match.root], value, noisy, inputs
    return jax.tree.map(partial(_stacked, manual=manual), found)


def _stacked(x: Any, manual: tuple[str, ...]) -> Any:
    """Returns the value with an axis in front along which the devices' values are put."""
    missing = tuple(a for a in manual if a not in jax.typeof(x).manual_axis_type.varying)
    wide = jax.lax.pcast(x, missing, to="varying") if missing else x
    return jnp.expand_dims(wide, 0)


def _avals(graph: Graph, kept: Slice) -> list[Any]:
    return [graph.avals[v] for v in kept.inputs]
