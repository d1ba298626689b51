# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Rules whose pattern is an ordinary JAX function: traced at the candidate's shapes, then unified.

No pattern language: `Rule("relu", lambda x: jnp.maximum(x, 0), jax.nn.relu)`. A pattern argument
stands for any value; a numeric literal of the pattern must be met by an equal constant.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from tpjax.core import _jax
from tpjax.stax_passes.engine import Match
from tpjax.stax_passes.graph import Graph, Node, build
from tpjax.stax_passes.report import Tier

COMMUTATIVE = frozenset({"add", "mul", "max", "min", "and", "or", "xor", "eq", "ne"})
MAX_ASSIGNMENTS = 512
"""Assignments of shapes to a pattern's arguments that are tried at one candidate."""
NAMES_ONLY = frozenset({"sharding", "out_sharding", "name"})
"""Parameters in which two equations may differ and compute the same."""


@dataclass(eq=False)
class Rule:
    """A row: where `pattern` stands, compute `replacement` instead; both take the same arguments.

    The pattern must have one result and may be called with shapes and dtypes that do not fit it: an
    error there means that it does not match.
    """

    name: str
    pattern: Callable[..., Any]
    replacement: Callable[..., Any]
    tier: Tier = "close"
    contract: str = "as the author of the rule states"
    op: str | None = None
    num_args: int | None = None
    _traced: dict[Any, "Graph | None"] = field(default_factory=dict, repr=False)

    @property
    def anchor(self) -> "_Anything":
        """Every primitive may end a pattern; which do is known once it is traced."""
        return _Anything()

    def arity(self) -> int:
        """Returns how many arguments the pattern takes."""
        if self.num_args is not None:
            return self.num_args
        return self.pattern.__code__.co_argcount

    def extract(self, graph: Graph, node: Node) -> "Match | None":
        """Returns the match that ends at the node, or None."""
        if len(node.outs) != 1 or not hasattr(graph.avals[node.outs[0]], "shape"):
            return None
        for avals in self._assignments(graph, node):
            pattern = self._trace(avals)
            if pattern is None or pattern.producer.get(pattern.outputs[0]) is None:
                continue
            bound: dict[int, int] = {}
            inside: set[int] = set()
            if _unify(pattern, pattern.outputs[0], graph, node.outs[0], bound, inside):
                return self._match(pattern, node.outs[0], bound, inside)
        return None

    def _match(
        self, pattern: Graph, root: int, bound: dict[int, int], inside: set[int]
    ) -> "Match | None":
        if any(value not in bound for value in pattern.inputs):
            return None
        operands = tuple(bound[value] for value in pattern.inputs)
        interior = frozenset(inside - {root} - set(operands))
        return Match(root, operands, self.replacement, interior, self.op)

    def _assignments(self, graph: Graph, node: Node) -> Iterator[tuple[Any, ...]]:
        """Yields shapes and dtypes for the arguments: those of the values around the candidate."""
        around: dict[tuple[Any, ...], Any] = {}
        layer = [node]
        for _ in range(_depth(self, graph, node)):
            below: list[Node] = []
            for one in layer:
                for value in one.ins:
                    aval = graph.avals[value]
                    if hasattr(aval, "shape"):
                        around.setdefault((aval.shape, aval.dtype, bool(aval.weak_type)), aval)
                    made = graph.node_of(value)
                    if made is not None:
                        below.append(made)
            layer = below[:64]
        tries = itertools.product(around.values(), repeat=self.arity())
        yield from itertools.islice(tries, MAX_ASSIGNMENTS)

    def _trace(self, avals: tuple[Any, ...]) -> "Graph | None":
        key = tuple((a.shape, a.dtype, bool(a.weak_type)) for a in avals)
        if key not in self._traced:
            try:
                traced = jax.make_jaxpr(self.pattern)(*avals)
                graph = build(traced)
                self._traced[key] = graph if len(graph.outputs) == 1 else None
            except Exception:  # any error: the pattern cannot be called with these shapes
                self._traced[key] = None
        return self._traced[key]


class _Anything:
    def __contains__(self, name: object) -> bool:
        return True


def _depth(rule: Rule, graph: Graph, node: Node) -> int:
    """Returns how many equations back the arguments can lie: the pattern's own length."""
    traced = [g for g in rule._traced.values() if g is not None]
    return min(max((len(g.nodes) for g in traced), default=8), 16)


def _unify(
    pattern: Graph, p: int, graph: Graph, g: int, bound: dict[int, int], inside: set[int]
) -> bool:
    """Whether the value `g` is an instance of the pattern's `p`; binds arguments on the way."""
    if p in pattern.inputs:
        a, b = pattern.avals[p], graph.avals[g]
        if getattr(b, "shape", None) != a.shape or b.dtype != a.dtype:
            return False
        return bound.setdefault(p, g) == g
    constant = pattern.constant(p)
    if constant is not None:
        other = graph.constant(g)
        return (
            other is not None and other.shape == constant.shape and other.dtype == constant.dtype
            and np.array_equal(other, constant)
        )  # fmt: skip
    a, b = pattern.node_of(p), graph.node_of(g)
    if a is None or b is None or a.eqn.primitive is not b.eqn.primitive or not _same_params(a, b):
        return False
    orders = [b.ins, b.ins[::-1]] if a.name in COMMUTATIVE else [b.ins]
    for ins in orders:
        trial, values = dict(bound), set(inside)
        pairs = zip(a.ins, ins, strict=True)
        if all(_unify(pattern, i, graph, j, trial, values) for i, j in pairs):
            bound.update(trial)
            inside |= values | {g}
            return True
    return False


def _same_params(a: Node, b: Node) -> bool:
    p, q = a.eqn.params, b.eqn.params
    if _jax.subjaxprs(a.eqn) or set(p) != set(q):
        return False
    return all(_same(p[k], q[k]) for k in p if k not in NAMES_ONLY)


def _same(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:  # arrays and foreign objects without a plain equality are not equal
        return a is b
