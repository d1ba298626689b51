# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""How far results move if every rounding error falls otherwise: the bound where bits may differ.

A rule that keeps values may still make autodiff add cotangents in another order, and XLA fuses
what it compiles as it likes. Where that happens, results may differ as far as they do when the
last bits of every computed number are drawn at random, and no further. This needs no assumption
about cancellation: what cancels shows in the draws.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.fuzz.evaluation import MOVES, Evaluator, run_primitive
from tpjax.core import _jax

SUMS = frozenset({
    "add", "add_any", "sub", "reduce_sum", "dot_general", "cumsum", "conv_general_dilated",
    "reduce_window_sum", "scatter-add", "reduce_window",
})  # fmt: skip
"""Primitives whose rounding errors are as large as their operands, even where these cancel."""

DRAWS = 8
ROOM = 8.0
"""How much further than the draws the results may be apart."""


class _Rough(Evaluator):
    """An evaluator that rounds at random; only what depends on the operands given, if any are."""

    def __init__(self, seed: int, ulps: float, start: list[Any] | None) -> None:
        super().__init__()
        self.rng, self.ulps = np.random.default_rng(seed), ulps
        self.everything = start is None
        self.reached = {id(x): x for x in start or []}

    def leaf(self, eqn: _jax.Equation, values: list[Any]) -> list[Any]:
        results = run_primitive(eqn, values)
        if not self._reaches(values):
            return results
        if eqn.primitive.name not in MOVES:
            sizes = _sizes(eqn, values, results)
            results = [self._rounded(r, size) for r, size in zip(results, sizes, strict=True)]
        return self._mark(results)

    def rows(self, x: Any) -> list[Any]:
        rows = super().rows(x)
        return self._mark(rows) if self._reaches([x]) else rows

    def stack(self, rows: Any, aval: Any) -> Any:
        rows = list(rows)
        result = super().stack(rows, aval)
        return self._mark([result])[0] if self._reaches(rows) else result

    def _reaches(self, values: list[Any]) -> bool:
        return self.everything or any(id(v) in self.reached for v in values)

    def _mark(self, results: list[Any]) -> list[Any]:
        self.reached.update((id(r), r) for r in results)
        return results

    def _rounded(self, x: Any, size: Any) -> Any:
        if not isinstance(x, np.ndarray) or not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        real = jnp.zeros((), x.dtype).real.dtype
        noise = self.rng.uniform(-self.ulps, self.ulps, x.shape) * float(jnp.finfo(real).eps)
        with np.errstate(all="ignore"):
            wide = np.complex128 if jnp.issubdtype(x.dtype, jnp.complexfloating) else np.float64
            return np.where(np.isfinite(x), x.astype(wide) + noise * size, x).astype(x.dtype)


def _sizes(eqn: _jax.Equation, values: list[Any], results: list[Any]) -> list[Any]:
    """Returns how large the numbers are whose rounding each result has."""
    name = eqn.primitive.name
    if name not in SUMS or not all(isinstance(v, np.ndarray) for v in values):
        return [np.abs(_wide(r)) if isinstance(r, np.ndarray) else 0 for r in results]
    if name in ("add", "add_any", "sub"):
        return [np.abs(_wide(values[0])) + np.abs(_wide(values[1]))]
    absolute = [np.abs(v) if jnp.issubdtype(v.dtype, jnp.inexact) else v for v in values]
    return [_wide(r) for r in run_primitive(eqn, absolute)]


def _wide(x: np.ndarray) -> np.ndarray:
    complex_ = jnp.issubdtype(x.dtype, jnp.complexfloating)
    return np.where(np.isfinite(x), x, 0).astype(np.complex128 if complex_ else np.float64)


def within_rounding(
    jaxpr: _jax.Jaxpr,
    args: list[Any],
    expected: list[Any],
    actual: list[Any],
    *,
    start: list[Any] | None = None,
    ulps: float = 2.0,
) -> str | None:
    """Returns None if `actual` is as near to `expected` as other roundings of the jaxpr are.

    Otherwise says which result is too far off.

    Args:
      jaxpr: what `expected` are the results of.
      args: its operands.
      expected: its results, evaluated one by one.
      actual: the results under test.
      start: those of `args` on which a number must depend to be rounded otherwise; None: all are.
      ulps: the largest rounding error drawn.
    """
    apart = [_distance(a, e) for a, e in zip(actual, expected, strict=True)]
    if start is not None:
        # c * inf + d * inf may be NaN where (c + d) * inf is not: only finite sums have one value.
        apart = [np.where(np.isfinite(e), d, 0.0) for d, e in zip(apart, expected, strict=True)]
    reach = [np.zeros(np.shape(d)) for d in apart]
    for scale in (1.0, 16.0, 256.0):  # numbers at a step of floor or argmax need a larger push
        for seed in range(DRAWS):
            drawn = _Rough(seed, ulps * scale, start)(jaxpr, *args)
            for k, (d, e) in enumerate(zip(drawn, expected, strict=True)):
                step = _distance(d, e)
                reach[k] = np.maximum(reach[k], step if scale == 1.0 else step * (step > 1e-2))
        bad = [k for k, (d, r) in enumerate(zip(apart, reach, strict=True)) if not _fits(d, r)]
        if not bad:
            return None
    k = bad[0]
    return f"result {k}: {actual[k]} is not {expected[k]}; roundings reach {np.max(reach[k]):.3g}"


def _fits(apart: np.ndarray, reach: np.ndarray) -> bool:
    """Elements are held to the reach of the whole result: few draws miss that of one element."""
    return not apart.size or float(apart.max()) <= ROOM * float(reach.max()) + 1e-37


def _distance(a: Any, e: Any) -> np.ndarray:
    """Returns how far numbers are apart; what is no number is infinitely far from what is."""
    if _jax.is_key(a):
        return np.zeros(())
    with np.errstate(all="ignore"):
        if jnp.issubdtype(a.dtype, jnp.inexact):
            complex_ = jnp.issubdtype(a.dtype, jnp.complexfloating)
            wide = np.complex128 if complex_ else np.float64
            a, e = a.astype(wide), e.astype(wide)
            same = (a == e) | (np.isnan(a) & np.isnan(e))
            return np.where(same, 0.0, np.nan_to_num(np.abs(a - e), nan=np.inf))
        return np.where(a == e, 0.0, np.inf)
