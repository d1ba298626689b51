# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Random programs: lists of instructions, drawn and shrunk by hypothesis, and traced to jaxprs."""

from collections import Counter
from functools import partial
from typing import Any

import jax
import numpy as np
from hypothesis import strategies as st
from jax.experimental import io_callback

from tests.fuzz import elementwise, moving, nesting
from tests.fuzz.pool import Pool, inputs, is_number, is_whole
from tpjax.core import _jax

Program = list[tuple[str, int, "Program"]]
"""Instructions: which, the number that chooses operands and constants, and a body if it has one."""

RESULTS = 6
"""How many values a program returns: the last ones, so that the others may be dead."""


def _ignore(*_: Any) -> None:
    return None


def _same(x: Any) -> Any:
    return x


def _call_back(pool: Pool) -> Any:
    x = pool.pick(is_number)
    if x is not None:
        jax.debug.callback(_ignore, x, ordered=bool(pool.numbers.below(2)))


def _ordered_call(pool: Pool) -> Any:
    x = pool.pick(is_whole, lambda v: not jax.typeof(v).weak_type)
    if x is None:
        return None
    return io_callback(_same, jax.ShapeDtypeStruct(np.shape(x), x.dtype), x, ordered=True)


EFFECTS = {"call_back": (1, _call_back), "ordered_call": (1, _ordered_call)}
PLAIN = elementwise.ROWS | moving.ROWS | EFFECTS
NO_EFFECTS_IN = frozenset(
    {"vmap", "gradient", "while", "cond", "custom_jvp", "custom_vjp", "layers"}
)
"""Instructions in whose bodies JAX itself refuses some effects, or orders them anew."""

assert not set(PLAIN) & set(nesting.ROWS)

_plain_name = st.sampled_from([n for n, (often, _) in PLAIN.items() for _ in range(often)])
_nest_name = st.sampled_from([n for n, (often, _) in nesting.ROWS.items() for _ in range(often)])
_number = st.integers(0, 2**40)
_plain = st.tuples(_plain_name, _number, st.just([]))


def _with_nests(body: Any, plain: int) -> Any:
    nest = st.tuples(_nest_name, _number, body)
    return st.integers(0, plain).flatmap(lambda i: nest if i == plain else _plain)


_innermost = st.lists(_plain, min_size=1, max_size=4)
_inner = st.lists(_with_nests(_innermost, 4), min_size=1, max_size=4)
programs: st.SearchStrategy[Program] = st.lists(_with_nests(_inner, 5), min_size=3, max_size=11)
"""Random programs, with control flow up to two deep."""


def _run(program: Program, pool: Pool, *, effects: bool = True) -> None:
    for name, number, body in program:
        pool.numbers.rest = number
        if name in nesting.ROWS:
            inner = partial(_run, body, effects=effects and name not in NO_EFFECTS_IN)
            results = nesting.ROWS[name][1](pool, inner)
        elif name in EFFECTS and not effects:
            continue
        else:
            results = PLAIN[name][1](pool)
        if results is not None:
            pool.add(*(results if isinstance(results, tuple | list) else (results,)))


def run(program: Program, *values: Any) -> tuple[Any, ...]:
    """Runs the program on `pool.inputs`; returns its last values."""
    pool = Pool(values)
    _run(program, pool)
    return tuple(pool.values[-RESULTS:])


def trace(program: Program) -> _jax.Jaxpr:
    """Returns the jaxpr of the program."""
    return jax.make_jaxpr(partial(run, program))(*inputs(tame=True))


def primitives(jaxpr: _jax.Jaxpr) -> Counter[str]:
    """Returns how often each primitive stands in the jaxpr, bodies included, opaque ones too."""
    found, stack = Counter[str](), [jaxpr]
    while stack:
        for eqn in stack.pop().eqns:
            found[eqn.primitive.name] += 1
            stack.extend(_jax.all_subjaxprs(eqn))
    return found


def depth(program: Program) -> int:
    """Returns how deep the bodies of a program are nested."""
    return max((1 + depth(body) for _, _, body in program if body), default=0)


def source(program: Program) -> str:
    """Returns code that runs the program."""
    return (
        "from tests.fuzz.oracle import check\n"
        f"check({program!r}, jit=True)  # tests.fuzz.generator.trace shows its jaxpr"
    )
