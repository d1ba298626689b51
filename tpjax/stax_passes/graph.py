# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""A jaxpr as a graph of values: what recognisers read and an engine writes back by re-tracing.

Small jitted helpers (`jnp.where`, `jnp.tril`, `jax.nn.silu`) are looked through, so that a pattern
does not end at their border; the ones that no rewrite touched are emitted as the calls they were.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tpjax.core import _jax
from tpjax.stax_passes.fold import ELEMENTWISE, RefusedError, compute
from tpjax.stax_passes.fold import MOVES as MOVES_ELEMENTS

MAX_INLINED = 64
"""Equations of a jitted helper up to which a pattern may look through its border."""
MAX_KNOWN_DEPTH = 64
"""Steps back over which a value is evaluated when it depends on no input."""

MOVES = frozenset(
    {"convert_element_type", "broadcast_in_dim", "reshape", "stop_gradient", "squeeze"}
)
"""Primitives that leave the numbers of a per-row or scalar value as they are."""


MARKS_VARYING = frozenset({"pvary", "pcast"})
"""Primitives of `shard_map` that say over which devices a value may differ; the numbers stay."""

MOVES_PLACES = frozenset({"mesh_cast", "reshard"})
"""Primitives that move a value between devices; the numbers stay."""

ACROSS_DEVICES = frozenset({
    "all_gather", "all_gather_invariant", "all_to_all", "axis_index", "pbroadcast", "pmax", "pmin",
    "ppermute", "psum", "psum2", "psum_invariant", "ragged_all_to_all", "reduce_scatter",
    "unreduced_psum",
})  # fmt: skip
"""Primitives whose value depends on the device, so that it is not known while tracing."""


LOSSY_CAST = "lossy_cast"


def _loses(eqn: _jax.Equation) -> bool:
    """Whether a cast goes through integers, booleans or 8-bit floats: it changes the numbers."""
    dtypes = (getattr(eqn.invars[0].aval, "dtype", None), eqn.params["new_dtype"])
    return any(d is None or str(d) not in FLOATS for d in dtypes)


FLOATS = frozenset({"bfloat16", "float16", "float32", "float64"})
"""Dtypes between which a cast rounds within the tolerance of the `close` tier."""


@dataclass(eq=False)
class Node:
    """One equation, with its operands and results as value numbers of the graph."""

    eqn: _jax.Equation
    ins: tuple[int, ...]
    outs: tuple[int, ...]

    @property
    def name(self) -> str:
        """The primitive's name; "lossy_cast" for a cast that a pattern may not look through."""
        name = self.eqn.primitive.name
        return LOSSY_CAST if name == "convert_element_type" and _loses(self.eqn) else name


@dataclass
class Call:
    """A jitted helper that was looked through: nodes[start:stop] are its body."""

    node: Node
    start: int
    stop: int = 0


class Read(NamedTuple):
    """One question to a graph, and its answer: what `tpjax.stax_passes.transfer` asks again."""

    what: str
    value: int
    names: tuple[str, ...]
    answer: Any


@dataclass
class Graph:
    """The equations of one jaxpr level in order, with values numbered."""

    avals: list[Any] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    known: dict[int, Any] = field(default_factory=dict)
    """Values of literals and constants, by value number."""
    producer: dict[int, int] = field(default_factory=dict)
    users: dict[int, list[int]] = field(default_factory=dict)
    _folded: dict[int, Any] = field(default_factory=dict)
    _reads: list[Read] | None = None

    @contextmanager
    def watched(self) -> Iterator[list[Read]]:
        """Collects what the block asks of the graph, in order."""
        self._reads, before = [], self._reads
        try:
            yield self._reads
        finally:
            self._reads = before

    def _note(self, what: str, value: int, answer: Any, names: tuple[str, ...] = ()) -> None:
        if self._reads is not None:
            self._reads.append(Read(what, value, names, answer))

    def node_of(self, value: int) -> Node | None:
        """Returns the node that makes the value, or None for an input or a constant."""
        index = self.producer.get(value)
        node = None if index is None else self.nodes[index]
        self._note("node", value, node)
        return node

    def made_by(self, value: int, *names: str) -> Node | None:
        """Returns the node that makes the value if its primitive is one of `names`."""
        index = self.producer.get(value)
        node = None if index is None else self.nodes[index]
        if node is not None and node.name not in names:
            node = None
        self._note("made_by", value, node, names)
        return node

    def shape(self, value: int) -> tuple[int, ...]:
        """Returns the value's shape."""
        return tuple(getattr(self.avals[value], "shape", ()))

    def dtype(self, value: int) -> np.dtype:
        """Returns the value's dtype."""
        return self.avals[value].dtype

    def size(self, value: int) -> int:
        """Returns how many elements the value has."""
        return int(np.prod(self.shape(value)))

    def peel(self, value: int, *names: str) -> int:
        """Follows the value back through unary nodes named in `names`."""
        while (node := self.made_by(value, *names)) is not None:
            value = node.ins[0]
        return value

    def peel_moves(self, value: int) -> int:
        """Follows the value back through converts, broadcasts, reshapes and stopped gradients."""
        return self.peel(value, *MOVES)

    def restores(self, value: int, full: int, total: Node, *more: str) -> int | None:
        """Returns the axis of `full` over which `value` is the reduction `total`, put back there.

        Casts, transposes, added axes of length one, broadcasts and the primitives `more` may stand
        between; every other axis must come back to its own place, which equal lengths alone do not
        show. None: `value` is not such a reduction of `full`.
        """
        seats: list[int | None] = list(range(len(self.shape(full))))
        source = self.peel(total.ins[0], "convert_element_type")
        while full != source:
            node = self.made_by(full, "convert_element_type", "transpose")
            if node is None:
                return None
            seats, full = self._before(node, seats), node.ins[0]
        axes = tuple(total.eqn.params["axes"])
        rest = [seat for i, seat in enumerate(seats) if i not in axes]
        places: list[int | None] = list(range(len(self.shape(value))))
        names = ("convert_element_type", "transpose", "broadcast_in_dim", "reshape", *more)
        while value != total.outs[0]:
            node = self.made_by(value, *names)
            if node is None:
                return None
            if node.name == "max":  # with -inf, which is how an empty maximum starts
                value = next((v for v in node.ins if self.scalar(v) != -np.inf), value)
                continue
            before = self._before(node, places)
            if before is None:
                return None
            places, value = before, node.ins[0]
        shape = self.shape(value)
        if len(axes) != 1 or len(shape) != len(rest):
            return None
        if any(p != r for p, r, n in zip(places, rest, shape, strict=True) if n > 1):
            return None
        return seats[axes[0]]

    def _before(self, node: Node, places: list[int | None]) -> Any:
        """Returns what `places` says of the axes of a result, said of the operand's axes."""
        source, target = self.shape(node.ins[0]), self.shape(node.outs[0])
        if node.name == "transpose":
            order = tuple(node.eqn.params["permutation"])
            return [places[order.index(i)] for i in range(len(order))]
        if node.name == "broadcast_in_dim":
            return [places[i] for i in node.eqn.params["broadcast_dimensions"]]
        if node.name == "reshape":
            if [n for n in source if n > 1] != [n for n in target if n > 1]:
                return None
            long = [p for p, n in zip(places, target, strict=True) if n > 1]
            return [long.pop(0) if n > 1 else None for n in source]
        return places

    def source(self, value: int) -> str:
        """Returns file:line of the user's code that made the value."""
        node = self.node_of(value)
        return "an argument" if node is None else _jax.source_of(node.eqn)

    def constant(self, value: int, depth: int = MAX_KNOWN_DEPTH) -> np.ndarray | None:
        """Returns the value's numbers if it is a scalar or vector that depends on no input."""
        if value not in self._folded:
            with self.watched():  # the answer is noted, not the way to it
                self._folded[value] = self._constant(value, depth)
        result = self._folded[value]
        self._note("constant", value, result)
        return result

    def _constant(self, value: int, depth: int) -> np.ndarray | None:
        if value in self.known:
            known = self.known[value]
            hidden = _jax.is_tracer(known) or _jax.is_key(self.avals[value])
            return None if hidden else np.asarray(known)
        node = self.node_of(value)
        small = node is not None and self.size(value) <= 1 and len(node.outs) == 1
        if node is None or depth == 0 or not small or not is_pure(node):
            return None
        operands = [self.constant(i, depth - 1) for i in node.ins]
        if any(x is None for x in operands):
            return None
        if node.name in MARKS_VARYING | MOVES_PLACES:
            return operands[0]
        return _computed(node.eqn, operands)

    def scalar(self, value: int) -> float | None:
        """Returns the number that every element of the value has, if it depends on no input."""
        value = self.peel(value, "broadcast_in_dim", "reshape", *MARKS_VARYING, *MOVES_PLACES)
        constant = self.constant(value) if self.size(value) == 1 else None
        return None if constant is None else float(constant.reshape(()))

    def reaches_back(
        self, value: int, wanted: Callable[[Node], bool], through: frozenset[str]
    ) -> bool:
        """Returns whether a wanted node is found walking back from the value through `through`."""
        stack, seen = [value], set()
        while stack:
            node = self.node_of(stack.pop())
            if node is None or id(node) in seen:
                continue
            seen.add(id(node))
            if wanted(node):
                return True
            if node.name in through:
                stack.extend(node.ins)
        return False

    def users_of(self, value: int) -> list[Node]:
        """Returns the nodes that read the value."""
        nodes = [self.nodes[i] for i in self.users.get(value, ())]
        self._note("users", value, nodes)
        return nodes

    def index(self, node: Node) -> int:
        """Returns the node's place in the order of evaluation."""
        return self.producer[node.outs[0]]

    def is_output(self, value: int) -> bool:
        """Returns whether the jaxpr returns the value."""
        answer = value in self.outputs
        self._note("output", value, answer)
        return answer


def _computed(eqn: _jax.Equation, operands: list[Any]) -> np.ndarray:
    """Returns the equation's result: by NumPy where that is the same, as JAX compiles it first."""
    if eqn.primitive.name in ELEMENTWISE or eqn.primitive.name in MOVES_ELEMENTS:
        pairs = zip(operands, eqn.invars, strict=True)
        with suppress(RefusedError):
            return compute(eqn, [np.asarray(x, _jax.array_type(v).dtype) for x, v in pairs])
    return np.asarray(_jax.evaluate(eqn, *operands)[0])


def is_pure(node: Node) -> bool:
    """Returns whether evaluating the node on its own means what it means in place."""
    if node.name in ACROSS_DEVICES:
        return False
    return not node.eqn.effects and not _jax.subjaxprs(node.eqn)


def build(jaxpr: _jax.Jaxpr) -> Graph:
    """Returns the graph of the jaxpr's top level, small jitted helpers looked through."""
    graph = Graph()

    def fresh(aval: Any) -> int:
        graph.avals.append(aval)
        return len(graph.avals) - 1

    def constant(aval: Any, value: Any) -> int:
        number = fresh(aval)
        graph.known[number] = value
        return number

    def read(env: dict[Any, int], atom: Any) -> int:
        return constant(atom.aval, atom.val) if isinstance(atom, _jax.Literal) else env[atom]

    def add(body: _jax.Jaxpr, env: dict[Any, int]) -> list[int]:
        for var, value in zip(body.constvars, body.consts, strict=True):
            env[var] = constant(var.aval, value)
        for eqn in body.eqns:
            ins = tuple(read(env, atom) for atom in eqn.invars)
            if _jax.is_small_helper(eqn, MAX_INLINED):
                inner = _jax.subjaxprs(eqn)[0]
                call = Call(Node(eqn, ins, ()), len(graph.nodes))
                graph.calls.append(call)
                outs = tuple(add(inner, dict(zip(inner.invars, ins, strict=True))))
                call.node.outs, call.stop = outs, len(graph.nodes)
            else:
                outs = tuple(fresh(v.aval) for v in eqn.outvars)
                graph.nodes.append(Node(eqn, ins, outs))
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(env, atom) for atom in body.outvars]

    graph.inputs = tuple(fresh(v.aval) for v in jaxpr.invars)
    graph.outputs = tuple(add(jaxpr, dict(zip(jaxpr.invars, graph.inputs, strict=True))))
    for index, node in enumerate(graph.nodes):
        for value in node.outs:
            graph.producer[value] = index
        for value in dict.fromkeys(node.ins):
            graph.users.setdefault(value, []).append(index)
    return graph


def units(graph: Graph, touched: set[int], read: set[int]) -> Iterator[Node]:
    """Yields what to evaluate, in order: nodes, and whole calls that no rewrite touched.

    Args:
      graph: the graph.
      touched: indices of nodes whose results a rewrite replaces.
      read: values that a rewrite reads.
    """
    hits = sorted(touched)

    def sealed(call: Call) -> bool:
        hidden = (graph.producer.get(v, -1) for v in read if v not in call.node.outs)
        return not any(call.start <= i < call.stop for i in (*hits, *hidden))

    starts: dict[int, list[Call]] = {}
    for call in graph.calls:  # outermost first: a call is listed before the calls inside it
        starts.setdefault(call.start, []).append(call)
    index = 0
    while index <= len(graph.nodes):
        whole = next((c for c in starts.pop(index, []) if sealed(c)), None)
        if whole is not None:
            yield whole.node
            if whole.stop > index:
                index = whole.stop
                continue
        if index < len(graph.nodes):
            yield graph.nodes[index]
        index += 1


def live(graph: Graph, order: list[Node], operands: Mapping[int, Iterable[int]]) -> list[Node]:
    """Returns the units of `order` that outputs or effects need.

    Args:
      graph: the graph.
      order: units in order of evaluation.
      operands: for a replaced value, the values its replacement reads instead.
    """
    needed, kept = set(graph.outputs), []
    for node in reversed(order):
        stays = node.eqn.effects or _jax.must_stay(node.eqn)
        if stays or any(value in needed for value in node.outs):
            kept.append(node)
            replaced = next((value for value in node.outs if value in operands), None)
            needed.update(node.ins if replaced is None else operands[replaced])
    return kept[::-1]
