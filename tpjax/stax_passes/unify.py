# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Rules whose pattern is an ordinary JAX function: traced at the candidate's types, then unified.

No pattern language: `Rule("relu", lambda x: jnp.maximum(x, 0), jax.nn.relu)`. A pattern argument
stands for any value; a numeric literal of the pattern must be met by an equal constant.

What a pattern looks like is learnt by tracing it at a few made-up types (`Rule.prepare`). That
gives the primitives that may end it, and, met loosely with a candidate, the values that its
arguments may be. It is then traced at the types of these, once for each combination, and unified.
"""

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpjax.core import _jax
from tpjax.stax_passes.canonical import canonicalise
from tpjax.stax_passes.dead import drop_dead_code
from tpjax.stax_passes.fold import fold_constants
from tpjax.stax_passes.graph import Graph, Node
from tpjax.stax_passes.match import Match
from tpjax.stax_passes.movement import simplify_moves
from tpjax.stax_passes.patterns import Pattern, unify
from tpjax.stax_passes.report import Tier
from tpjax.stax_passes.share import share_subexpressions

SIZE = 8
"""Length of every axis of a made-up type."""
RANKS = (2, 3, 1, 4, 0, 5)
CHECKED = tuple(map(jnp.dtype, (jnp.float32, jnp.bfloat16, jnp.int32, jnp.bool_)))
MAX_PROBES = 96
"""Made-up types at which a pattern that raises is tried; then it is tried at types it meets."""
MAX_TYPES = 48
"""Combinations of types at which a pattern is traced at one candidate."""


class _MalformedError(Exception):
    """What the pattern returns makes it no pattern, at whatever types."""


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
    error: Exception | None = field(default=None, init=False, repr=False)
    """What the pattern raised when it was last traced in vain."""
    _reason: str | None = field(init=False, default=None, repr=False)
    _looks: list[Pattern] = field(init=False, default_factory=list, repr=False)
    _ends: set[str] = field(init=False, default_factory=set, repr=False)
    _keys: set[Any] = field(init=False, default_factory=set, repr=False)
    _kinds: list[Any] = field(init=False, default_factory=list, repr=False)
    _base: Any = field(init=False, default=None, repr=False)
    _probes: int = field(init=False, default=0, repr=False)
    _traced: dict[Any, tuple[Pattern, ...]] = field(init=False, default_factory=dict, repr=False)
    _lock: Any = field(init=False, default_factory=threading.RLock, repr=False)

    @property
    def anchor(self) -> set[str]:
        """The primitives that may end the pattern, as far as it has been traced."""
        return self._ends

    @property
    def was_traced(self) -> bool:
        """Whether the pattern could be traced at some types."""
        return bool(self._looks)

    @property
    def malformed(self) -> str | None:
        """Why the pattern can match nothing, if it is so at all types it was traced at."""
        return None if self._looks else self._reason

    def arity(self) -> int:
        """Returns how many arguments the pattern takes."""
        if self.num_args is not None:
            return self.num_args
        return self.pattern.__code__.co_argcount

    def prepare(self, graph: Graph) -> None:
        """Learns what the pattern looks like, for the kinds of dtypes that the graph has."""
        with self._lock:
            kinds = {_kind(aval) for aval in graph.avals} - {None, *self._kinds}
            if kinds or not self._looks:
                # floats first: most patterns are of floats, and the order must not depend on a hash
                self._kinds += sorted(kinds, key=lambda k: (k != jnp.float32, str(k)))
                self._probe(graph)

    def check(self) -> None:
        """Raises `ValueError` if the pattern is seen to be none: it is its argument, say."""
        with self._lock:
            if not self._probes:
                count = self.arity()
                self._first([(d,) * count for d in CHECKED], [(r,) * count for r in RANKS[:3]])
            if self.malformed is not None:
                raise ValueError(f"rule: {self.name} {self.malformed}.")

    def extract(self, graph: Graph, node: Node) -> "Match | str | None":
        """Returns the match whose last computation is the node, or why not, or None."""
        tried: set[Any] = set()
        index = 0
        while index < len(self._looks):  # it may grow: types can change what a pattern looks like
            look = self._looks[index]
            index += 1
            for values in _combinations(look, graph, node):
                avals = tuple(graph.avals[v] for v in values)
                if avals in tried:
                    continue
                if len(tried) >= MAX_TYPES:
                    return None
                tried.add(avals)
                for pattern in self._trace(avals):
                    for root in pattern.roots(graph, node):
                        bound = unify(pattern, graph, root)
                        if bound is not None:
                            return self._match(pattern, graph, root, bound)
        return None

    def _match(
        self, pattern: Pattern, graph: Graph, root: int, bound: dict[int, int]
    ) -> "Match | str":
        operands = tuple(bound[value] for value in pattern.arguments)
        inside = (g for p, g in bound.items() if p not in pattern.moved)
        interior = frozenset(inside) - {root, *operands}
        node = graph.node_of(root)
        assert node is not None
        for other in node.outs:
            if other != root and (graph.users_of(other) or graph.is_output(other)):
                return "the pattern ends in an equation with another result that is used too"
        return Match(root, operands, self.replacement, interior, self.op, casts=False)

    def _probe(self, graph: Graph) -> None:
        """Traces the pattern at made-up types, or at types of the graph where it raises at all."""
        count = self.arity()
        dtypes, ranks = _dtype_choices(self._kinds, count), _rank_choices(count)
        self._base = self._base or self._first(dtypes, ranks)
        if self._base is not None:
            for one in dtypes:
                self._trace(_made_up(one, self._base[1]))
            for rank in RANKS:
                self._trace(_made_up(self._base[0], (rank,) * count))
            for one, k in itertools.product(dtypes, range(count if count > 1 else 0)):
                if len(set(one)) > 1 and one[k] == np.int32:  # an index is often a scalar
                    ranks = self._base[1]
                    self._trace(_made_up(one, (*ranks[:k], 0, *ranks[k + 1 :])))
        if self._looks:
            return
        for avals in _types_of(graph, count):
            if self._probes >= 4 * MAX_PROBES or self._trace(avals):
                return

    def _first(self, dtypes: list[Any], ranks: list[Any]) -> Any:
        """Returns the first dtypes and ranks that can be traced, the likeliest tried first."""
        pairs = itertools.product(range(len(dtypes)), range(len(ranks)))
        for i, j in sorted(pairs, key=sum):
            if self._probes >= MAX_PROBES:
                return None
            if self._trace(_made_up(dtypes[i], ranks[j])):
                return dtypes[i], ranks[j]
        return None

    def _trace(self, avals: tuple[Any, ...]) -> tuple[Pattern, ...]:
        """Returns the pattern at these types: as written, and as the exact passes leave it."""
        key = avals, _jax.trace_context()
        with self._lock:
            if key not in self._traced:
                self._traced[key] = self._trace_anew(avals)
                for pattern in self._traced[key]:
                    look = pattern.key()
                    if look not in self._keys:
                        self._keys.add(look)
                        self._looks.append(pattern)
                        self._ends.add(pattern.ends)
            return self._traced[key]

    def _trace_anew(self, avals: tuple[Any, ...]) -> tuple[Pattern, ...]:
        self._probes += 1
        try:
            # in a context of its own: what a pattern calls is nobody's call to record
            jaxpr = Context().run(jax.make_jaxpr(self._one_result), *avals)
            pattern = Pattern(jaxpr)
            _demand_pattern(pattern, jaxpr)
        except _MalformedError as reason:
            self._reason = str(reason)
            return ()
        except Exception as error:  # any error: the pattern cannot be called with these types
            self.error = error
            return ()
        clean = _cleaned(jaxpr)
        cleaned = Pattern(clean)
        try:
            _demand_pattern(cleaned, clean)
        except _MalformedError:
            return (pattern,)
        return (pattern,) if clean is jaxpr else (cleaned, pattern)

    def _one_result(self, *args: Any) -> Any:
        with np.errstate(all="ignore"):  # a number of the pattern need not fit every made-up dtype
            result = self.pattern(*args)
        if not jax.tree_util.all_leaves([result]) or result is None:
            kind = type(result).__name__
            raise _MalformedError(f"has a pattern that returns a {kind}; it must return one array")
        return result


def _combinations(look: Pattern, graph: Graph, node: Node) -> Iterator[tuple[int, ...]]:
    """Yields values that the arguments may be: those that leave most to the pattern first."""
    for chains in itertools.islice(look.guesses(graph, node), MAX_TYPES):
        yield tuple(chain[-1] for chain in chains)
        uncast = [[v for v in chain if graph.dtype(v) == graph.dtype(chain[0])] for chain in chains]
        for choice in (uncast, chains):
            deepest = [chain[::-1] for chain in choice]
            yield from itertools.islice(itertools.product(*deepest), MAX_TYPES)


def _demand_pattern(pattern: Pattern, jaxpr: _jax.Jaxpr) -> None:
    """Raises, in words that follow the rule's name, if this can match nothing sensibly."""
    if pattern.root in pattern.arguments:
        raise _MalformedError("has a pattern that is its own argument: it would match every value")
    if pattern.root not in pattern.varying:
        raise _MalformedError("has a pattern that is a constant")
    if jaxpr.effects:
        raise _MalformedError("has a pattern with side effects, which no replacement may drop")
    read, stack = set[int](), [pattern.root]
    while stack:
        value = stack.pop()
        node = pattern.graph.node_of(value)
        if value not in read and node is not None:
            stack.extend(node.ins)
        read.add(value)
    unused = [i for i, value in enumerate(pattern.arguments) if value not in read]
    if unused:
        which = f"argument {unused[0] + 1} of its pattern"
        raise _MalformedError(f"cannot know {which}: the pattern's result does not depend on it")


def _cleaned(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """Returns the jaxpr in the form in which the exact passes leave a program."""
    clean = canonicalise, fold_constants, simplify_moves, share_subexpressions, drop_dead_code
    for run in clean * 2:
        jaxpr, _ = run(jaxpr)
    return jaxpr


def _kind(aval: Any) -> Any:
    """Returns the dtype that stands for its like among made-up types, or None."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None or not hasattr(aval, "shape"):
        return None
    if _is_key(dtype):
        return dtype
    for kind, like in KINDS:
        if jnp.issubdtype(dtype, kind):
            return like
    return None


def _types_of(graph: Graph, count: int) -> Iterator[tuple[Any, ...]]:
    """Yields types of the graph for the arguments: the commonest first, alike before mixed."""
    types = Counter(aval for aval in graph.avals if _kind(aval) is not None)
    common = [aval for aval, _ in types.most_common(MAX_PROBES)]
    yield from ((aval,) * count for aval in common)
    if count > 1:
        yield from itertools.product(common[: round(MAX_PROBES ** (1 / count))], repeat=count)


def _is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


KINDS = tuple(
    (kind, jnp.dtype(like))
    for kind, like in (
        (jnp.floating, jnp.float32),
        (jnp.bool_, jnp.bool_),
        (jnp.integer, jnp.int32),
        (jnp.complexfloating, jnp.complex64),
    )
)


def _dtype_choices(kinds: list[Any], count: int) -> list[tuple[Any, ...]]:
    """Returns dtypes for the arguments, the likeliest first: alike, or one of another kind."""
    if count == 1:
        return [(kind,) for kind in kinds]
    pairs = [(kinds[0], other) for other in kinds[1:]]
    if {np.dtype(np.int32), np.dtype(np.bool_)} <= set(kinds[1:]):
        pairs.append((np.dtype(np.int32), np.dtype(np.bool_)))
    single = [(*(a,) * i, b, *(a,) * (count - i - 1)) for a, b in pairs for i in range(count)]
    alike = [(kind,) * count for kind in kinds]
    return [alike[0], *single[-count:], *alike[1:], *single[:-count]]


def _rank_choices(count: int) -> list[tuple[int, ...]]:
    """Returns ranks for the arguments, the likeliest first: alike, then with one axis between."""
    alike = [(rank,) * count for rank in RANKS]
    if count == 1:
        return alike
    scalar = [tuple(2 * (i != k) for i in range(count)) for k in range(count)]
    mixed = itertools.islice(itertools.product((3, 2, 1, 4, 0), repeat=count), MAX_PROBES**2)
    near = sorted(
        (ranks for ranks in mixed if len(set(ranks)) > 1), key=lambda ranks: max(ranks) - min(ranks)
    )
    return list(dict.fromkeys((*alike[:2], *near[:4], alike[2], *scalar, *alike[3:], *near)))


def _made_up(dtypes: tuple[Any, ...], ranks: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(
        jax.ShapeDtypeStruct(() if _is_key(dtype) else (SIZE,) * rank, dtype)
        for rank, dtype in zip(ranks, dtypes, strict=True)
    )
