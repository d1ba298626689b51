# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""What must hold of every pass on every program: values, types, effects, gradients, a fixpoint."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from tests.fuzz.evaluation import Evaluator, same_bits
from tests.fuzz.generator import Program, trace
from tests.fuzz.pool import inputs
from tests.fuzz.rounding import within_rounding
from tpjax.core import _jax
from tpjax.stax_passes.pipeline import CLEAN_UP, EXACT_PASSES, PASSES, optimize
from tpjax.stax_passes.sweep import Pass

ALONE: tuple[Pass, ...] = tuple(
    dict.fromkeys(p for e in EXACT_PASSES for p in (e if isinstance(e, tuple) else (e,)))
)
"""Every exact pass."""

CLOSE = ("fuse_attention", "fuse_norm", "simplify_products")
"""The passes that do not keep every bit."""

PIPELINES: dict[str, tuple[Any, ...]] = {
    "CLEAN_UP": (CLEAN_UP,),
    "CLEAN_UP reversed": CLEAN_UP[::-1],
    "PASSES": PASSES,
    "PASSES reversed": PASSES[::-1],
}
"""In which orders they are run on every program, besides each alone."""


class Difference(AssertionError):
    """A pass changed what it must keep."""


@contextmanager
def _told(what: str, *jaxprs: _jax.Jaxpr) -> Iterator[None]:
    """Turns a failure in the block into a difference that shows the jaxprs."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    except Exception as error:
        shown = "\n-- after --\n".join(map(str, jaxprs))
        raise Difference(f"{what}: {type(error).__name__}: {error}\n{shown}") from error


def check(
    program: Program, *, jit: bool = False, gradients: bool = True, seed: int = 0
) -> Counter[str]:
    """Checks every pipeline on the program; returns what was compared, and how it came out.

    Args:
      program: the instructions.
      jit: compare the whole programs compiled by XLA too, which takes most of a second.
      gradients: compare gradients too, which takes half of the time.
      seed: of the inputs.

    Raises:
      Difference: some pass does not keep what it must; says which, and shows the jaxprs.
    """
    jaxpr = trace(program)
    counts = Counter({"programs": 1})
    points = [inputs(tame=tame, seed=seed) for tame in (True, False)]
    evaluator = Evaluator()
    expected = [_outcome(evaluator, jaxpr, args) for args in points]
    gradient = Gradient(jaxpr, points[0], evaluator) if gradients else None
    counts[gradient.state if gradient else "no gradient"] += 1
    watched = {"CLEAN_UP", "PASSES", _name(ALONE[len(jaxpr.eqns) % len(ALONE)])}
    seen, differentiated = {_shape_of(jaxpr)}, {_shape_of(jaxpr)}
    for name, result, close in _results(jaxpr):
        shape = _shape_of(result)
        with _told(name, jaxpr, result):
            assert result.in_avals == jaxpr.in_avals, (result.in_avals, jaxpr.in_avals)
            assert result.out_avals == jaxpr.out_avals, (result.out_avals, jaxpr.out_avals)
            if name == "CLEAN_UP":
                _assert_settled(result)
            if jit and name == "PASSES" and not close:
                counts[compare_compiled(jaxpr, result, points[0])] += 1
            if shape not in seen:
                seen.add(shape)
                counts["rewritten, close" if close else "rewritten"] += 1
                for args, outcome in [] if close else zip(points, expected, strict=True):
                    _assert_same(_outcome(evaluator, result, args), outcome)
            if gradient and not close and name in watched and shape not in differentiated:
                differentiated.add(shape)
                counts[gradient.compare(result)] += 1
    return counts


def _name(run: Pass) -> str:
    return getattr(run, "__name__", str(run))


def _results(jaxpr: _jax.Jaxpr) -> Iterator[tuple[str, _jax.Jaxpr, bool]]:
    """Yields each way to run passes by name, what it makes, and whether a close rule fired."""
    for run in ALONE:
        with _told(_name(run), jaxpr):
            result, report = run(jaxpr)
            assert report.hits or result is jaxpr, "changed without a hit"
        yield _name(run), result, False
    for name, passes in PIPELINES.items():
        with _told(name, jaxpr):
            result, reports = optimize(jaxpr, passes)
        yield name, result, any(r.hits for r in reports if r.name in CLOSE)


def same_program(a: _jax.Jaxpr, b: _jax.Jaxpr) -> bool:
    """Returns whether two jaxprs have the same equations, whatever variables are called."""
    return _shape_of(a) == _shape_of(b)


def _shape_of(jaxpr: _jax.Jaxpr) -> Any:
    """Returns what equal programs have in common, whatever their variables are called."""
    names: dict[Any, Any] = {}
    for var in (*jaxpr.constvars, *jaxpr.invars):
        names[var] = len(names)

    def read(atom: Any) -> Any:
        if isinstance(atom, _jax.Literal):
            return str(atom.aval), np.asarray(atom.val).tobytes()
        return names[atom]

    lines = []
    for eqn in jaxpr.eqns:
        operands = tuple(map(read, eqn.invars))
        for var in eqn.outvars:
            names[var] = len(names)
        params = tuple(
            _shape_of(v) if isinstance(v, _jax.Jaxpr) else str(v) if isinstance(v, tuple) else id(v)
            for v in eqn.params.values()
        )
        lines.append((eqn.primitive.name, operands, params, len(eqn.outvars)))
    return tuple(lines), tuple(map(read, jaxpr.outvars)), len(jaxpr.constvars)


Outcome = tuple[list[Any], list[tuple[str, list[Any]]]]


def _outcome(evaluator: Evaluator, jaxpr: _jax.Jaxpr, args: list[Any]) -> Outcome:
    """Returns the results, and what was called back in order."""
    evaluator.log = log = []
    results = evaluator(jaxpr, *args)
    evaluator.log = []
    return results, log


def _assert_same(actual: Outcome, expected: Outcome) -> None:
    for k, (x, y) in enumerate(zip(actual[0], expected[0], strict=True)):
        assert same_bits(x, y), f"result {k} is {x}, not {y}"
    names = [[name for name, _ in log] for _, log in (actual, expected)]
    assert names[0] == names[1], f"called back: {names[0]}, not {names[1]}"
    for (_, xs), (_, ys) in zip(actual[1], expected[1], strict=True):
        assert all(map(same_bits, xs, ys)), f"called back with {xs}, not {ys}"


def _assert_settled(jaxpr: _jax.Jaxpr) -> None:
    """R01: once clean, nothing is left to clean."""
    again, reports = optimize(jaxpr, (CLEAN_UP,))
    found = [hit.rule for report in reports for hit in report.hits]
    assert again is jaxpr, f"the second run changes the program: {found}"
    assert not found, f"the second run reports {found}"


# -- gradients ------------------------------------------------------------------------------------


class Gradient:
    """The gradient of a program for one cotangent of each float result, one by one."""

    def __init__(self, jaxpr: _jax.Jaxpr, args: list[Any], evaluator: Evaluator) -> None:
        """Differentiates the program, if JAX can."""
        self.like, self.args, self.evaluator = jaxpr, args, evaluator
        self.state = "gradients"
        rng = np.random.default_rng(len(jaxpr.eqns))
        self.cotangents = [
            np.asarray(rng.integers(-4, 5, aval.shape) / 2).astype(aval.dtype)
            for aval in map(_jax.array_type, jaxpr.outvars)
            if jnp.issubdtype(aval.dtype, jnp.floating)
        ]
        try:
            self.jaxpr = self._trace(jaxpr)
            self.expected = self._evaluate(self.jaxpr)
        except Exception:  # JAX cannot: an ordered callback in a checkpoint, say
            self.state = "no gradient"

    def _trace(self, jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
        fn = vjp_of(jaxpr)
        return jax.make_jaxpr(fn)(self.args, self.cotangents)

    def _evaluate(self, jaxpr: _jax.Jaxpr) -> list[Any]:
        return self.evaluator(jaxpr, *self.args, *self.cotangents)

    def compare(self, result: _jax.Jaxpr) -> str:
        """Compares the gradient of a rewritten program; says whether to the bit."""
        if self.state == "no gradient":
            return "no gradient compared"
        actual = self._evaluate(self._trace(result))
        if all(map(_equal_but_for_zeros, actual, self.expected)):
            return "gradients equal in bits"
        fault = within_rounding(
            self.jaxpr,
            [*self.args, *self.cotangents],
            self.expected,
            actual,
            start=self.cotangents,
        )
        assert fault is None, f"gradient: {fault}"
        return "gradients summed in another order"


def vjp_of(jaxpr: _jax.Jaxpr) -> Callable[[list[Any], list[Any]], list[Any]]:
    """Returns the gradient of a jaxpr for its float inputs, given its operands and cotangents."""
    floats = [_is_float(var) for var in jaxpr.invars]
    wanted = [_is_float(var) for var in jaxpr.outvars]

    def gradient(args: list[Any], cotangents: list[Any]) -> list[Any]:
        def fn(*chosen: Any) -> list[Any]:
            rest = iter(chosen)
            values = [next(rest) if f else x for f, x in zip(floats, args, strict=True)]
            results = jaxpr_as_fun(jaxpr)(*values)
            return [r for r, keep in zip(results, wanted, strict=True) if keep]

        _, back = jax.vjp(fn, *(x for x, f in zip(args, floats, strict=True) if f))
        return list(back(cotangents))

    return gradient


def _is_float(atom: Any) -> bool:
    return jnp.issubdtype(_jax.array_type(atom).dtype, jnp.floating)


def _equal_but_for_zeros(x: Any, y: Any) -> bool:
    """An absent cotangent and one of 0.0 differ in the sign that a sum with -0.0 has."""
    return x is y or same_bits(x + 0, y + 0)


# -- compiled -------------------------------------------------------------------------------------

OPTIONS: dict[str, Any] = {"xla_allow_excess_precision": False}
"""Else XLA drops conversions to bfloat16 and back from one of two programs."""


def compare_compiled(jaxpr: _jax.Jaxpr, result: _jax.Jaxpr, args: list[Any]) -> str:
    """Compares two jaxprs, each compiled as a whole; says how near they are."""
    actual, expected = (
        [np.asarray(x) if not _jax.is_key(x) else x for x in _compiled(j, args)]
        for j in (result, jaxpr)
    )
    if all(map(_near, actual, expected)):
        return "compiled: within 1e-6"
    fault = within_rounding(jaxpr, args, expected, actual, ulps=4.0)
    assert fault is None, f"compiled: {fault}"
    return "compiled: within rounding"


def _compiled(jaxpr: _jax.Jaxpr, args: list[Any]) -> list[Any]:
    return jax.jit(jaxpr_as_fun(jaxpr), compiler_options=OPTIONS)(*args)


def _near(x: Any, y: Any) -> bool:
    if same_bits(x, y):
        return True
    if _jax.is_key(x) or not jnp.issubdtype(x.dtype, jnp.inexact):
        return False
    size = np.abs(np.where(np.isfinite(y), y, 0)).max(initial=0)
    with np.errstate(all="ignore"):
        near = np.abs(x - y) <= 1e-6 * size
    return bool((near | (x == y) | (np.isnan(x) & np.isnan(y))).all())
