# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Results and gradients of operators that have no kernel, by their formulas, in NumPy.

What such an operator runs is its reference, or near to it: comparing the two would show nothing.
"""

from typing import Any

import numpy as np

from tpjax.core.operator import Op, Sample


def answer(op: Op, sample: Sample, cotangent: Any, x: Any, *others: Any) -> dict[str, Any]:
    """Returns output and gradients of x, as `op_checks.with_gradients` does."""
    options = dict(sample.options)
    axis = options.pop("axis", -1)
    out, gradient = OPS[op.name](np.asarray(x), np.asarray(cotangent), axis, *others, **options)
    return {"out": out, "gradients": {} if gradient is None else {"0": gradient}}


def _softmax(x: Any, g: Any, axis: int, mask: Any = None, softcap: float | None = None) -> Any:
    p, shown, slope = _weights(x, axis, mask, softcap)
    return p, slope * p * (g - (p * g * shown).sum(axis, keepdims=True))


def _log_softmax(x: Any, g: Any, axis: int, mask: Any = None, softcap: float | None = None) -> Any:
    p, shown, slope = _weights(x, axis, mask, softcap)
    with np.errstate(divide="ignore"):
        return np.log(p), slope * shown * (g - p * (g * shown).sum(axis, keepdims=True))


def _weights(x: Any, axis: int, mask: Any, softcap: float | None) -> Any:
    """Returns probabilities, what is visible, and the derivative of the capped scores."""
    shown = np.ones(x.shape, bool) if mask is None else np.broadcast_to(np.asarray(mask), x.shape)
    s = x if softcap is None else softcap * np.tanh(x / softcap)
    weights = np.where(shown, np.exp(s), 0)  # random numbers overflow nothing
    total = weights.sum(axis, keepdims=True)
    p = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    return p, shown, 1 if softcap is None else 1 - (s / softcap) ** 2


def _reduce(x: Any, g: Any, axis: Any, kind: str, keepdims: bool = False) -> Any:
    g = g if keepdims else np.expand_dims(g, axis)
    count = x.size / g.size
    over = {"axis": axis, "keepdims": True}
    if kind == "logsumexp":
        weights = np.exp(x)
        total = weights.sum(**over)
        out, gradient = np.log(total), g * weights / total
    elif kind == "var":
        out, gradient = x.var(**over), g * 2 / count * (x - x.mean(**over))
    elif kind == "max":  # equals share the gradient
        out = x.max(**over)
        gradient = g * (x == out) / (x == out).sum(**over)
    else:
        out = x.sum(**over) / (count if kind == "mean" else 1)
        gradient = np.broadcast_to(g / (count if kind == "mean" else 1), x.shape)
    return out if keepdims else np.squeeze(out, axis), gradient


def _argmax(x: Any, g: Any, axis: int) -> Any:
    del g
    return x.argmax(axis).astype(np.int32), None


OPS = {"softmax": _softmax, "log_softmax": _log_softmax, "reduce": _reduce, "argmax": _argmax}
"""Take x, the result's cotangent and what the operator takes; return result and gradient of x."""
