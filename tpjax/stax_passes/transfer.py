# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Reads a repeated layer once: what a row found at one place is carried over to places alike.

While a row looks around an anchor, the graph notes each question and its answer. What the row found
follows from these alone. So at another anchor the same questions are asked, without the row; where
every answer corresponds, one to one, the finding does too. A single other answer, or one value that
stands where two stood, and the row looks for itself.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from tpjax.core import _jax
from tpjax.stax_passes.equality import same_params, same_value
from tpjax.stax_passes.graph import Graph, Node, Read
from tpjax.stax_passes.match import Match

MAX_ATTEMPTS = 4
"""Earlier findings, of one row at anchors of one type, that are tried on another anchor."""


class Attempt(NamedTuple):
    """What a row found at an anchor, and the questions that led there."""

    anchor: Node
    reads: tuple[Read, ...]
    finding: "Match | str | None"


class NotAlike(Exception):
    """The two places differ in something that the row looked at."""


def questions(reads: list[Read]) -> tuple[Read, ...]:
    """Returns the reads without repetitions, in order."""
    return tuple({(r.what, r.value, r.names): r for r in reads}.values())


def transferred(graph: Graph, attempt: Attempt, anchor: Node) -> "Match | str | None":
    """Returns what the row would find at the anchor, or raises `NotAlike`."""
    pairs = _Pairs(graph)
    pairs.nodes(attempt.anchor, anchor)
    for read in attempt.reads:
        _ask_again(graph, pairs, read)
    finding = attempt.finding
    if isinstance(finding, str) and not pairs.same_lines():
        raise NotAlike  # the words name lines of the user's code
    if not isinstance(finding, Match):
        return finding
    return finding.moved(pairs.other)


def _ask_again(graph: Graph, pairs: "_Pairs", read: Read) -> None:
    value = pairs.other(read.value)
    if read.what == "constant":
        answer = graph.constant(value)
        if not (answer is read.answer or same_value(answer, read.answer)):
            raise NotAlike
    elif read.what == "output":
        if graph.is_output(value) != read.answer:
            raise NotAlike
    elif read.what == "users":
        users = graph.users_of(value)
        if len(users) != len(read.answer):
            raise NotAlike
        for x, y in zip(read.answer, users, strict=True):
            pairs.nodes(x, y)
    else:
        by_name = read.what == "made_by"
        node = graph.made_by(value, *read.names) if by_name else graph.node_of(value)
        pairs.nodes(read.answer, node)


@dataclass
class _Pairs:
    """Which value and node there corresponds to one here; one to one."""

    graph: Graph
    _there: dict[int, int] = field(default_factory=dict)
    _here: dict[int, int] = field(default_factory=dict)
    _nodes: dict[int, tuple[Node, Node]] = field(default_factory=dict)

    def other(self, value: int) -> int:
        """Returns what corresponds to the value."""
        if value not in self._there:
            raise NotAlike
        return self._there[value]

    def same_lines(self) -> bool:
        """Returns whether all nodes that correspond were made by the same lines of code."""
        pairs = self._nodes.values()
        return all(_jax.source_of(a.eqn) == _jax.source_of(b.eqn) for a, b in pairs)

    def nodes(self, a: Node | None, b: Node | None) -> None:
        """Notes that the nodes correspond, with their operands and results."""
        if a is None or b is None:
            if a is not b:
                raise NotAlike
            return
        if id(a) in self._nodes:
            if self._nodes[id(a)][1] is not b:
                raise NotAlike
            return
        if a is not b:
            if a.eqn.primitive is not b.eqn.primitive or len(a.ins) != len(b.ins):
                raise NotAlike
            if len(a.outs) != len(b.outs) or a.eqn.effects != b.eqn.effects:
                raise NotAlike
            if not same_params(a.eqn, b.eqn, ignore=frozenset()):
                raise NotAlike
        self._nodes[id(a)] = a, b
        for x, y in zip((*a.ins, *a.outs), (*b.ins, *b.outs), strict=True):
            self._values(x, y)

    def _values(self, x: int, y: int) -> None:
        if x in self._there:
            if self._there[x] != y:
                raise NotAlike
            return
        graph = self.graph
        if y in self._here or graph.avals[x] != graph.avals[y]:
            raise NotAlike
        known = x in graph.known
        if known != (y in graph.known) or (
            known and not same_value(graph.known[x], graph.known[y])
        ):
            raise NotAlike
        self._there[x], self._here[y] = y, x
