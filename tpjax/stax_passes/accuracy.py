# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Measures each close rule against float64: the program as written beside the rewritten one.

    python -m tpjax rules --measure

Every close rule has cases in `CASES`: a function as people write it, which the rule recognises, and
random data of several lengths and sizes. Value and gradients (a random cotangent) are compared with
the same function computed in float64 from the same numbers. The unit is the ulp of the result's
dtype: its spacing at the exact element, or at the RMS of all of them where that is larger.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from tpjax.pallas.dispatch import use
from tpjax.stax_passes.contracts import passes_once, rules_of
from tpjax.stax_passes.engine import Bound
from tpjax.stax_passes.pipeline import PASSES, optimize

DTYPES = ("float32", "bfloat16", "float16")

Draw = Callable[[np.random.Generator, float], tuple[np.ndarray, ...]]


class Case(NamedTuple):
    """One program that a close rule rewrites, on data of one length."""

    rule: str
    what: str
    """The program and its shape, in words."""
    fn: Callable[..., Any]
    draw: Draw
    """Makes the arguments, in float64, of a generator and a magnitude."""
    magnitudes: tuple[float, ...]
    dtypes: tuple[str, ...] = DTYPES
    interpreted: bool = False
    """Whether to run the GPU kernel in the interpreter, which takes seconds."""


class Errors(NamedTuple):
    """Largest and RMS error in ulps, of the value and of the gradients."""

    value: float
    value_rms: float
    gradient: float
    gradient_rms: float


class Measured(NamedTuple):
    """One line of the table: a case at a magnitude in a dtype."""

    rule: str
    case: str
    magnitude: float
    dtype: str
    runs: str
    """The implementation that ran: xla, pallas, or pallas in the interpreter."""
    original: Errors
    rewritten: Errors

    def in_words(self) -> dict[str, str]:
        """Returns the line for reading: errors as "value / gradients", largest, then RMS."""
        original, rewritten = (
            f"{e.value:.3g} / {e.gradient:.3g} (RMS {e.value_rms:.2g} / {e.gradient_rms:.2g})"
            for e in (self.original, self.rewritten)
        )
        return {
            "rule": self.rule,
            "case": f"{self.case}; times {self.magnitude:g}",
            "dtype": self.dtype,
            "runs": self.runs,
            "ulps as written": original,
            "ulps rewritten": rewritten,
        }


# -- programs as people write them ----------------------------------------------------------------


def _wide(x: Any) -> Any:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _rms(x: Any, scale: Any) -> Any:
    y = _wide(x)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)
    return y.astype(x.dtype) * scale


def _layer(x: Any, scale: Any, bias: Any) -> Any:
    y = _wide(x)
    mean = jnp.mean(y, -1, keepdims=True)
    variance = jnp.mean(jnp.square(y - mean), -1, keepdims=True)
    return ((y - mean) / jnp.sqrt(variance + 1e-6) * scale + bias).astype(x.dtype)


def _fast_layer(x: Any, scale: Any, bias: Any) -> Any:
    y = _wide(x)
    mean = jnp.mean(y, -1, keepdims=True)
    variance = jnp.maximum(jnp.mean(y * y, -1, keepdims=True) - mean * mean, 0.0)
    return ((y - mean) * jax.lax.rsqrt(variance + 1e-6) * scale + bias).astype(x.dtype)


def _attend(query: Any, key: Any, value: Any) -> Any:
    scores = jnp.einsum("bthd,bshd->bhts", query, key) * query.shape[-1] ** -0.5
    weights = jax.nn.softmax(_wide(scores), -1).astype(query.dtype)
    return jnp.einsum("bhts,bshd->bthd", weights, value)


def _attend_causal(query: Any, key: Any, value: Any) -> Any:
    scores = _wide(jnp.einsum("bthd,bshd->bhts", query, key)) * query.shape[-1] ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    weights = jax.nn.softmax(scores, -1).astype(query.dtype)
    return jnp.einsum("bhts,bshd->bthd", weights, value)


def _attend_biased(query: Any, key: Any, value: Any, bias: Any) -> Any:
    scores = jnp.einsum("bthd,bshd->bhts", query, key) * query.shape[-1] ** -0.5 + bias
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, -1), value)


# -- data -----------------------------------------------------------------------------------------


def _rows(length: int, vectors: int, offset: float = 0.0, count: int = 8) -> Draw:
    def draw(rng: np.random.Generator, magnitude: float) -> tuple[np.ndarray, ...]:
        x = (rng.standard_normal((count, length)) + offset) * magnitude
        return x, *(rng.standard_normal(length) for _ in range(vectors))

    return draw


def _tokens(queries: int, keys: int, width: int = 64, bias: bool = False) -> Draw:
    def draw(rng: np.random.Generator, magnitude: float) -> tuple[np.ndarray, ...]:
        """The magnitude is that of the scores."""
        shapes = [(1, queries, 2, width), (1, keys, 2, width), (1, keys, 2, width)]
        q, k, v = (rng.standard_normal(shape) for shape in shapes)
        added = (rng.standard_normal((1, 2, queries, keys)),) if bias else ()
        return q * magnitude, k, v, *added

    return draw


def _arrays(*shapes: tuple[int, ...]) -> Draw:
    def draw(rng: np.random.Generator, magnitude: float) -> tuple[np.ndarray, ...]:
        return tuple(magnitude * rng.standard_normal(shape) for shape in shapes)

    return draw


def _there_and_back(x: Any, y: Any) -> Any:
    return (x.transpose(1, 0, 2) @ y).transpose(1, 0, 2)


def _repeated_keys(query: Any, key: Any) -> Any:
    return jnp.einsum("bthd,bshd->bhts", query, jnp.repeat(key, 4, 2))


CASES: tuple[Case, ...] = (
    Case("norm", "rms_norm of 64", _rms, _rows(64, 1), (1e-3, 1.0, 1e3)),
    Case("norm", "rms_norm of 4096", _rms, _rows(4096, 1), (1.0, 1e3)),
    Case("norm", "rms_norm of 65536", _rms, _rows(65536, 1, count=2), (1.0,)),
    Case("norm", "layer_norm of 64", _layer, _rows(64, 2), (1.0, 1e3)),
    Case("norm", "layer_norm of 4096", _layer, _rows(4096, 2), (1.0,)),
    Case("norm", "layer_norm of 4096, mean 30 deviations", _layer, _rows(4096, 2, 30.0), (1.0,)),
    Case("norm", "layer_norm of 65536", _layer, _rows(65536, 2, count=2), (1.0,)),
    Case("norm", "E[x^2] - E[x]^2, 4096, mean 30 deviations", _fast_layer,
         _rows(4096, 2, 30.0), (1.0,)),
    Case("norm", "rms_norm of 256", _rms, _rows(256, 1), (1.0,), ("bfloat16",), interpreted=True),
    Case("norm", "layer_norm of 256", _layer, _rows(256, 2), (1.0,), ("bfloat16",),
         interpreted=True),
    Case("attention", "16 queries, 16 keys", _attend, _tokens(16, 16), (1.0, 30.0)),
    Case("attention", "256 queries, 256 keys", _attend, _tokens(256, 256), (1.0, 30.0)),
    Case("attention", "8 queries, 16384 keys", _attend, _tokens(8, 16384), (1.0, 30.0)),
    Case("attention", "causal, 256 tokens", _attend_causal, _tokens(256, 256), (1.0, 30.0)),
    Case("attention", "bias, 64 queries, 96 keys", _attend_biased, _tokens(64, 96, 32, True),
         (1.0,)),
    Case("attention", "causal, 128 tokens", _attend_causal, _tokens(128, 128), (1.0,),
         ("bfloat16",), interpreted=True),
    Case("absorb_transpose", "transposes of 257 x 64 and 48 x 257", lambda x, y: x.T @ y.T,
         _arrays((257, 64), (48, 257)), (1.0, 1e3)),
    Case("undo_transpose", "3 x 5 x 64, transposed and back", _there_and_back,
         _arrays((3, 5, 64), (64, 32)), (1.0, 1e3)),
    Case("group_product", "8 heads of queries, 2 of keys", _repeated_keys,
         _arrays((2, 33, 8, 64), (2, 65, 2, 64)), (1.0, 1e3)),
)  # fmt: skip
"""Every close rule has some; a test counts."""


def close_rules() -> dict[str, Any]:
    """Returns the rules that are not exact, by name."""
    rows = (row for run in passes_once() for row in rules_of(run))
    return {row.name: row for row in rows if row.tier != "exact"}


def broken(line: Measured, ulps: Iterable[Bound]) -> list[str]:
    """Returns which of a rule's bounds the measurement exceeds, in words."""
    faults = []
    for bound in ulps:
        for what in ("value", "gradient") if bound.dtype == line.dtype else ():
            error, original = getattr(line.rewritten, what), getattr(line.original, what)
            limit = max(getattr(bound, what), bound.times_original * original)
            if not error <= limit:  # NaN too
                faults.append(f"{line.case}, {line.dtype}: {what} is off by {error:.3g} ulps")
    return faults


# -- measuring ------------------------------------------------------------------------------------


def measured(cases: tuple[Case, ...] = CASES, seed: int = 0) -> Iterator[Measured]:
    """Yields a line for every case, magnitude and dtype, on the machine as it is."""
    on_cpu = jax.default_backend() == "cpu"
    for case in cases:
        if case.interpreted and not on_cpu:
            continue
        exact = jax.jit(_with_gradients(case.fn))
        for dtype in case.dtypes:
            yield from _measure(case, dtype, exact, seed)


def _measure(case: Case, dtype: str, exact: Callable[..., Any], seed: int) -> Iterator[Measured]:
    original, rewritten, runs = jax.jit(_with_gradients(case.fn)), None, ""
    for magnitude in case.magnitudes:
        rng = np.random.default_rng(seed)
        args = [jnp.asarray(x, dtype) for x in case.draw(rng, magnitude)]
        shape = jax.eval_shape(case.fn, *args).shape
        args = [jnp.asarray(rng.standard_normal(shape), dtype), *args]
        with jax.enable_x64(True):
            wide = exact(*(jnp.asarray(np.asarray(x), "float64") for x in args))
            wide = [np.asarray(x) for x in wide]
        with use(interpret=True) if case.interpreted else nullcontext():
            if rewritten is None:
                fn, runs = _rewritten(case, args[1:])
                rewritten = jax.jit(_with_gradients(fn))
            errors = [_errors(f(*args), wide) for f in (original, rewritten)]
        runs += ", interpreted" * case.interpreted
        yield Measured(case.rule, case.what, magnitude, dtype, runs, *errors)


def _with_gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
    def run(cotangent: Any, *args: Any) -> list[Any]:
        value, pullback = jax.vjp(fn, *args)
        return [value, *pullback(cotangent)]

    return run


def _rewritten(case: Case, args: list[Any]) -> tuple[Callable[..., Any], str]:
    """Returns the function as the passes leave it, and which implementation it calls."""
    jaxpr, reports = optimize(jax.make_jaxpr(case.fn)(*args), PASSES)
    hits = [hit for report in reports for hit in report.hits if hit.rule == case.rule]
    if not hits:
        raise RuntimeError(f"{case.what}: the rule {case.rule} does not recognise it.")
    runs = ", ".join(dict.fromkeys(c.implementation for hit in hits for c in hit.choices))
    return lambda *x: jaxpr_as_fun(jaxpr)(*x)[0], runs or "plain"


def _errors(results: Any, exact: list[np.ndarray]) -> Errors:
    value, *gradients = [_ulps(np.asarray(x), y) for x, y in zip(results, exact, strict=True)]
    together = np.concatenate([g.ravel() for g in gradients])
    return Errors(*_summary(value), *_summary(together))


def _summary(ulps: np.ndarray) -> tuple[float, float]:
    return float(ulps.max()), float(np.sqrt(np.mean(ulps**2)))


def _ulps(result: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Returns the errors in spacings of the result's dtype at the scale of the exact numbers."""
    info = jnp.finfo(result.dtype)
    scale = np.maximum(np.abs(exact), np.sqrt(np.mean(exact**2)))
    exponent = np.floor(np.log2(np.maximum(scale, float(info.tiny))))
    return np.abs(result.astype(np.float64) - exact) / (float(info.eps) * 2.0**exponent)
