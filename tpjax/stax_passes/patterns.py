# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""A pattern as traced at some types, met with a graph: closely (`unify`) or loosely (`guesses`).

Loosely, only what computes counts: casts between floats, broadcasts and reshapes are passed over on
both sides, as they change with the types that a pattern is traced at. That says which values the
arguments may be, hence at which types to trace the pattern; whether it is there, `unify` decides.
"""

from collections.abc import Iterator
from typing import Any

from tpjax.core import _jax
from tpjax.stax_passes.equality import DERIVATIVES, NAMES_ONLY, same_params, same_value
from tpjax.stax_passes.graph import MARKS_VARYING, MOVES, Graph, Node, build

COMMUTATIVE = frozenset({"add", "mul", "max", "min", "and", "or", "xor", "eq", "ne"})
LOOSE = frozenset(MOVES | MARKS_VARYING)
MAX_STEPS = 4096
"""Equations of a pattern that are compared at one candidate, all orders of operands together."""
MAX_ROOTS = 16

Goals = tuple[int, int, Any] | None
"""Pairs that have yet to be shown alike: a value of the pattern, one of the graph, and the rest."""


class Pattern:
    """A pattern's jaxpr as a graph, with where it ends and what of it depends on its arguments."""

    def __init__(self, jaxpr: _jax.Jaxpr) -> None:
        """Reads the jaxpr, which has one result."""
        self.graph = graph = build(jaxpr)
        self.arguments = graph.inputs
        (self.root,) = graph.outputs
        self.varying = set(graph.inputs)
        for node in graph.nodes:
            if not self.varying.isdisjoint(node.ins):
                self.varying.update(node.outs)
        self.moved = {
            value
            for value in self.varying
            if graph.peel(value, "transpose", *LOOSE) in graph.inputs
        }
        """Values that are an argument in another form: they may well serve others too."""
        value, tail = self.root, []
        while (node := graph.made_by(value, *LOOSE)) is not None and value in self.varying:
            tail.append(node.name)
            value = node.ins[0]
        self.loose = value not in graph.inputs
        """Whether something is computed; a pattern of moves alone is compared move by move."""
        if not self.loose:
            value, tail = self.root, []
        self.head = graph.node_of(value)
        self.at = 0 if self.head is None else self.head.outs.index(value)
        self.tail = tail[::-1]
        """Names of the moves from the head's result to the root."""

    @property
    def ends(self) -> str:
        """The primitive of the last equation that computes."""
        return "" if self.head is None else self.head.name

    def key(self) -> Any:
        """Returns what two patterns have in common that meet a graph loosely in the same way."""
        numbers: dict[int, Any] = {value: i for i, value in enumerate(self.arguments)}

        def seat(value: int) -> Any:
            if self.loose:
                value = self.graph.peel(value, *LOOSE)
            if value not in self.varying:
                return "constant"
            return numbers[value]

        rows = []
        for i, node in enumerate(self.graph.nodes):
            numbers.update({out: (i, k) for k, out in enumerate(node.outs)})
            if not (self.loose and node.name in LOOSE) and not self.varying.isdisjoint(node.outs):
                rows.append((i, node.name, tuple(map(seat, node.ins))))
        order = {row[0]: k for k, row in enumerate(rows)}
        renamed = [(name, tuple(_renumber(s, order) for s in ins)) for _, name, ins in rows]
        return tuple(renamed), _renumber(seat(self.root), order)

    def roots(self, graph: Graph, node: Node) -> Iterator[int]:
        """Yields the values of the graph that may be the whole pattern, if the node is its head."""
        stack = [(node.outs[self.at], 0)] if self.at < len(node.outs) else []
        count = 0
        while stack and count < MAX_ROOTS:
            value, steps = stack.pop()
            if steps == len(self.tail):
                count += 1
                yield value
                continue
            users = graph.users_of(value)
            stack += [(u.outs[0], steps + 1) for u in users if u.name == self.tail[steps]]

    def guesses(self, graph: Graph, node: Node) -> Iterator[list[tuple[int, ...]]]:
        """Yields, for each argument, the values that it may be if the node is the head."""
        if self.head is None or node.name != self.ends or len(node.ins) != len(self.head.ins):
            return
        for chains in _Loose(self, graph).all(self.head, node):
            if all(value in chains for value in self.arguments):
                yield [chains[value] for value in self.arguments]


def _renumber(seat: Any, order: dict[int, int]) -> Any:
    if isinstance(seat, tuple) and isinstance(seat[0], int):
        return order[seat[0]], seat[1]
    return seat


def _is_number(graph: Graph, value: int) -> bool:
    aval = graph.avals[value]
    return _jax.is_array(aval) and aval.dtype.kind in "biufV"


def _swaps(pattern: Node, node: Node) -> bool:
    return pattern.name in COMMUTATIVE and len(node.ins) == 2 and node.ins[0] != node.ins[1]


class _Loose:
    """The search for values that a pattern's arguments may be, moves passed over."""

    def __init__(self, pattern: Pattern, graph: Graph) -> None:
        self.pattern, self.graph = pattern, graph
        self.chains: dict[int, tuple[int, ...]] = {}
        self.seen: set[tuple[int, int]] = set()
        self.trail: list[tuple[int, tuple[int, ...] | None] | tuple[int, int, None]] = []

    def all(self, head: Node, node: Node) -> Iterator[dict[int, tuple[int, ...]]]:
        choices: list[tuple[Goals, int]] = []
        goals: Goals = self._operands(head, node, False, None)
        if _swaps(head, node):
            choices.append((self._operands(head, node, True, None), 0))
        for _ in range(MAX_STEPS):
            if goals is None:
                yield dict(self.chains)
            else:
                p, g, rest = goals
                more = self._step(p, g, rest, choices)
                if more is not False:
                    goals = more
                    continue
            if not choices:
                return
            goals, mark = choices.pop()
            self._undo(mark)

    def _step(self, p: int, g: int, rest: Goals, choices: list[Any]) -> Any:
        """Returns the goals that remain, or False if the two are not alike."""
        pattern, graph = self.pattern, self.graph
        chain = [g]
        if pattern.loose:
            p = pattern.graph.peel(p, *LOOSE)
            while (node := graph.made_by(g, *LOOSE)) is not None:
                g = node.ins[0]
                chain.append(g)
        if p in pattern.arguments:
            before = self.chains.get(p)
            now = tuple(chain) if before is None else tuple(v for v in before if v in chain)
            self.trail.append((p, before))
            self.chains[p] = now
            return rest if now else False
        if p not in pattern.varying:
            return rest if _may_be_constant(pattern.graph, p, graph, g) else False
        if (p, g) in self.seen:
            return rest
        a, b = pattern.graph.node_of(p), graph.node_of(g)
        assert a is not None
        if b is None or a.name != b.name or len(a.ins) != len(b.ins):
            return False
        if len(a.outs) != len(b.outs) or a.outs.index(p) != b.outs.index(g):
            return False
        self.seen.add((p, g))
        self.trail.append((p, g, None))
        if _swaps(a, b):
            choices.append((self._operands(a, b, True, rest), len(self.trail)))
        return self._operands(a, b, False, rest)

    def _operands(self, a: Node, b: Node, swapped: bool, rest: Goals) -> Goals:
        ins = b.ins[::-1] if swapped else b.ins
        for p, g in zip(reversed(a.ins), reversed(ins), strict=True):
            rest = (p, g, rest)
        return rest

    def _undo(self, mark: int) -> None:
        while len(self.trail) > mark:
            entry = self.trail.pop()
            if len(entry) == 3:
                self.seen.discard(entry[:2])
            elif entry[1] is None:
                del self.chains[entry[0]]
            else:
                self.chains[entry[0]] = entry[1]


def _may_be_constant(pattern: Graph, p: int, graph: Graph, g: int) -> bool:
    """Whether the one may be the other, a constant that depends on the types perhaps."""
    if not _is_number(pattern, p) or not _is_number(graph, g) or pattern.scalar(p) is None:
        return True
    return graph.scalar(g) is not None


def unify(pattern: Pattern, graph: Graph, root: int) -> dict[int, int] | None:
    """Returns which value of the graph each argument and inner value of the pattern is.

    None: the value `root` is not an instance of the pattern. Types must be those that the pattern
    was traced at; numbers must have the same bits; operands of commutative primitives may be
    swapped. What depends on no argument is compared and left out of the answer.
    """
    bound: dict[int, int] = {}
    trail: list[int] = []
    choices: list[tuple[Goals, int]] = []
    goals: Goals = (pattern.root, root, None)
    for _ in range(MAX_STEPS):
        if goals is None:
            return bound
        p, g, rest = goals
        goals = rest
        if not (bound.get(p) == g or _alike(pattern, p, graph, g, bound)):
            while choices:
                goals, mark = choices.pop()
                for value in trail[mark:]:
                    del bound[value]
                del trail[mark:]
                break
            else:
                return None
            continue
        if p not in bound and p in pattern.varying:
            bound[p] = g
            trail.append(p)
        elif bound.get(p) == g:
            continue
        a, b = pattern.graph.node_of(p), graph.node_of(g)
        if a is None or b is None or p in pattern.arguments or _is_constant(pattern, p):
            continue
        pairs = list(zip(a.ins, b.ins, strict=True))
        if _swaps(a, b):
            swapped = zip(a.ins, b.ins[::-1], strict=True)
            choices.append((_with(swapped, goals), len(trail)))
        goals = _with(pairs, goals)
    return None


def _with(pairs: Any, rest: Goals) -> Goals:
    for p, g in reversed(list(pairs)):
        rest = (p, g, rest)
    return rest


def _is_constant(pattern: Pattern, p: int) -> bool:
    """Whether the value is compared by its number, not by how it was made."""
    return p not in pattern.varying and (
        pattern.graph.node_of(p) is None or _number(pattern.graph, p) is not None
    )


def _number(graph: Graph, value: int) -> Any:
    """Returns the one number of a value that depends on no input, in its dtype, or None."""
    if not _jax.is_array(graph.avals[value]):
        return None
    peeled = graph.peel(value, "broadcast_in_dim", "reshape")
    return graph.constant(peeled) if graph.size(peeled) == 1 else None


def _alike(pattern: Pattern, p: int, graph: Graph, g: int, bound: dict[int, int]) -> bool:
    """Whether the two values agree in themselves: in type, and in the equation that makes them."""
    a, b = pattern.graph.avals[p], graph.avals[g]
    if p in pattern.arguments:
        return p not in bound and a == b
    if getattr(a, "shape", None) != getattr(b, "shape", None) or a.dtype != b.dtype:
        return False
    if _is_constant(pattern, p):
        x, y = _number(pattern.graph, p), _number(graph, g)
        if x is not None:
            return y is not None and same_value(x.reshape(()), y.reshape(()))
        known = graph.known.get(g)
        return known is not None and same_value(pattern.graph.known[p], known)
    m, n = pattern.graph.node_of(p), graph.node_of(g)
    if m is None or n is None or m.eqn.primitive is not n.eqn.primitive or n.eqn.effects:
        return False
    if len(m.ins) != len(n.ins) or len(m.outs) != len(n.outs):
        return False
    if m.outs.index(p) != n.outs.index(g):
        return False
    return same_params(m.eqn, n.eqn, ignore=NAMES_ONLY | DERIVATIVES)
