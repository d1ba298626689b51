# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Whether two arrays agree: in every bit, or within a tolerance; and where they differ most.

NaNs are one value, whatever their payload. Under a tolerance, NaN and the infinities must stand in
the same places; the rest must agree in relative RMS error, and no single element may hide in a
large array. Integers, booleans and keys are equal or not.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpjax.core import _jax

WORST_OVER_RMS = 32.0
"""How far one element may stand above the tolerance, in units of its size or the array's RMS."""
TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
"""Of the close tier where neither operator nor rule states one: sums in another order."""


@dataclass(frozen=True)
class Gap:
    """How two arrays differ."""

    text: str
    max_abs: float = float("nan")
    max_rel: float = float("nan")
    index: tuple[int, ...] = ()


def host(x: Any) -> np.ndarray:
    """Returns the value in the host's memory; keys as the integers that they hold."""
    if _jax.is_key(jax.typeof(x)):
        x = jax.random.key_data(x)
    return np.asarray(x)


def gap(
    actual: Any,
    expected: Any,
    tol: float | None,
    *,
    spread: float = 0.0,
    excused: np.ndarray | None = None,
) -> Gap | None:
    """Returns how `actual` differs from `expected` beyond what is allowed, or None.

    Args:
      actual: an array, or a scalar.
      expected: the same of the original program.
      tol: largest relative RMS error; None asks for every bit.
      spread: an RMS error that is allowed in any case, in units of the values.
      excused: True at elements that are not compared.
    """
    a, e = host(actual), host(expected)
    if (a.shape, a.dtype) != (e.shape, e.dtype):
        return Gap(f"{a.dtype}{list(a.shape)} instead of {e.dtype}{list(e.shape)}")
    if not a.size or a.dtype == jax.dtypes.float0:
        return None
    if excused is not None:
        a = np.where(excused, e, a)
    if tol is None or not jnp.issubdtype(a.dtype, jnp.inexact):
        wrong = ~_same_bits(a, e)
        return _worst("not the same bits", a, e, wrong) if wrong.any() else None
    x, y = _wide(a), _wide(e)
    misplaced = (np.isfinite(x) != np.isfinite(y)) | (np.isnan(x) != np.isnan(y))
    with np.errstate(invalid="ignore"):
        misplaced |= ~np.isfinite(y) & ~np.isnan(y) & (x != y)
    if misplaced.any():
        return _worst("NaN or infinity in other places", a, e, misplaced)
    finite = np.isfinite(y)
    error, size = np.abs(np.where(finite, x - y, 0.0)), np.abs(np.where(finite, y, 0.0))
    return _outside(a, e, error, size, tol, spread)


def distance(a: Any, b: Any) -> float:
    """Returns the RMS of the difference of two arrays, where both are finite."""
    x, y = _wide(host(a)), _wide(host(b))
    with np.errstate(invalid="ignore"):
        error = np.abs(x - y)
    return float(np.sqrt(np.mean(np.where(np.isfinite(error), error, 0.0) ** 2))) if x.size else 0.0


def _outside(
    a: np.ndarray, e: np.ndarray, error: np.ndarray, size: np.ndarray, tol: float, spread: float
) -> Gap | None:
    scale, rms = np.sqrt(np.mean(size**2)), np.sqrt(np.mean(error**2))
    allowed = max(tol * scale, spread)
    room = WORST_OVER_RMS * np.maximum(tol * np.maximum(size, scale), spread)
    if rms <= allowed and not (error > room).any():
        return None
    relative = rms / scale if scale else float("inf")
    what = f"relative RMS error {relative:.3g}, allowed {max(tol, allowed / (scale or 1)):.3g}"
    return _worst(what, a, e, error - room)


def _wide(x: np.ndarray) -> np.ndarray:
    is_complex = jnp.issubdtype(x.dtype, jnp.complexfloating)
    return x.astype(np.complex128 if is_complex else np.float64)


def _same_bits(a: np.ndarray, e: np.ndarray) -> np.ndarray:
    if jnp.issubdtype(a.dtype, jnp.complexfloating):
        return _same_bits(np.real(a), np.real(e)) & _same_bits(np.imag(a), np.imag(e))
    if not jnp.issubdtype(a.dtype, jnp.floating):
        return np.asarray(a == e)
    unsigned = f"u{a.dtype.itemsize}"
    same = np.ascontiguousarray(a).view(unsigned) == np.ascontiguousarray(e).view(unsigned)
    return same.reshape(a.shape) | (np.isnan(_wide(a)) & np.isnan(_wide(e)))


def _worst(what: str, a: np.ndarray, e: np.ndarray, badness: np.ndarray) -> Gap:
    index = tuple(int(i) for i in np.unravel_index(np.argmax(badness), badness.shape))
    at = f" at {list(index)[: a.ndim]}" if index else ""
    count = int((badness > 0).sum())
    text = f"{what}; {count} of {a.size} elements, worst{at}: {a[index]} instead of {e[index]}"
    if a.dtype == np.bool_ or not jnp.issubdtype(a.dtype, jnp.number):
        return Gap(text, 1.0, 1.0, index)
    with np.errstate(all="ignore"):
        error = np.abs(_wide(a) - _wide(e))
        error = error[np.isfinite(error)]
        size = np.abs(_wide(e))
        largest = float(error.max()) if error.size else float("inf")
        relative = largest / float(size[np.isfinite(size)].max(initial=0.0) or 1.0)
    return Gap(text, largest, relative, index)
