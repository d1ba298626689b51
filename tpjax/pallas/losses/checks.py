# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""What `linear_cross_entropy` asks of its arguments; each check names argument and remedy."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpjax.core._jax import is_tracer
from tpjax.core.errors import did_you_mean, message
from tpjax.core.losses import REDUCTIONS

OP = "linear_cross_entropy"
DTYPES = ("bfloat16", "float16", "float32", "float64")
FORMS = ("one_pass", "two_pass")
LAYOUTS = ("[V, D]", "[D, V]")


def _array(name: str, x: Any) -> None:
    if not isinstance(x, jax.Array | np.ndarray):
        remedy = "Convert it with jax.numpy.asarray."
        raise TypeError(message(OP, name, "an array", type(x).__name__, remedy))


def _floats(name: str, x: Any) -> None:
    _array(name, x)
    if str(x.dtype) not in DTYPES:
        raise TypeError(message(OP, name, f"of dtype {', '.join(DTYPES)}", x.dtype, "Cast it."))


def check_arrays(hidden: Any, head: Any, labels: Any, weights: Any, vocab_axis: int) -> None:
    """Checks shapes and dtypes of hidden [*B, D], head, labels [*B] and weights [*B]."""
    _floats("hidden", hidden)
    _floats("head", head)
    _array("labels", labels)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        remedy = "Targets are one token each, not a distribution."
        raise TypeError(message(OP, "labels", "integers", labels.dtype, remedy))
    if hidden.ndim < 1:
        raise ValueError(message(OP, "hidden", "of rank 1 or more, [*B, D]", hidden.shape))
    *lead, features = hidden.shape
    if head.ndim != 2 or head.shape[1 - vocab_axis] != features:
        must = f"{LAYOUTS[vocab_axis]} with the {features} features of hidden"
        turned = head.ndim == 2 and head.shape[vocab_axis] == features
        remedy = f"Pass vocab_axis={1 - vocab_axis} for a head {LAYOUTS[1 - vocab_axis]}."
        got = f"shape {head.shape}"
        raise ValueError(message(OP, "head", must, got, remedy if turned else ""))
    if head.shape[vocab_axis] == 0:
        raise ValueError(message(OP, "head", "of at least one word", f"shape {head.shape}"))
    for name, x in (("labels", labels), ("weights", weights)):
        if x is not None and x.shape != tuple(lead):
            must = f"of shape {tuple(lead)}, one for each token of hidden"
            raise ValueError(message(OP, name, must, f"shape {x.shape}", "Reshape it first."))
    if weights is not None:
        _floats("weights", weights)


def check_labels(labels: Any, vocab: int, ignored: int) -> None:
    """Checks that labels whose values are known are of the vocabulary, or ignored."""
    if is_tracer(labels) or not labels.size:
        return
    if isinstance(labels, jax.Array) and not labels.is_fully_addressable:
        return
    values = np.asarray(labels).astype(np.int64)
    bad = (values != ignored) & ((values < 0) | (values >= vocab))
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        must = f"in [0, {vocab}) or ignore_index, which is {ignored}"
        got = f"{values[at]} at {list(at)}"
        remedy = "Mark tokens that do not count by ignore_index."
        raise ValueError(message(OP, "labels", must, got, remedy))


def vocab_axis(x: Any) -> int:
    """Returns the axis as an int."""
    if isinstance(x, bool) or x not in (0, 1):
        remedy = "0 is for a head [V, D], 1 for [D, V]."
        raise ValueError(message(OP, "vocab_axis", "0 or 1", repr(x), remedy))
    return int(x)


def integer(name: str, x: Any) -> int:
    """Returns an integer that is known when tracing."""
    if isinstance(x, bool) or not isinstance(x, int | np.integer):
        raise TypeError(message(OP, name, "an integer known when tracing", repr(x)))
    return int(x)


def _number(name: str, x: Any) -> float:
    if is_tracer(x) or isinstance(x, bool) or not isinstance(x, int | float | np.number):
        remedy = "Pass a Python float."
        raise TypeError(message(OP, name, "a number known when tracing", repr(x), remedy))
    if not math.isfinite(x):
        raise ValueError(message(OP, name, "finite", x))
    return float(x)


def label_smoothing(x: Any) -> float:
    """Returns the share of the target that is spread over the vocabulary."""
    number = _number("label_smoothing", x)
    if not 0 <= number < 1:
        raise ValueError(message(OP, "label_smoothing", "in [0, 1)", x, "0.1 is usual."))
    return number


def z_loss(x: Any) -> float:
    """Returns the factor of the squared lse."""
    number = _number("z_loss", x)
    if number < 0:
        raise ValueError(message(OP, "z_loss", "zero or more", x, "1e-4 is usual."))
    return number


def softcap(x: Any) -> float | None:
    """Returns the bound of the logits, or None for none."""
    if x is None:
        return None
    number = _number("softcap", x)
    if number <= 0:
        raise ValueError(message(OP, "softcap", "above zero", x, "None leaves logits as they are."))
    return number


def _one_of(name: str, x: Any, valid: tuple[str, ...]) -> str:
    if x not in valid:
        must = " or ".join(map(repr, valid))
        raise ValueError(message(OP, name, must, repr(x), did_you_mean(str(x), valid)))
    return x


def reduction(x: Any) -> str:
    """Returns the reduction's name."""
    return _one_of("reduction", x, REDUCTIONS)


def form(x: Any, reduced: bool) -> str | None:
    """Returns the form asked for, or None; one pass is for a reduced loss."""
    if x is None:
        return None
    _one_of("form", x, FORMS)
    if x == "one_pass" and not reduced:
        remedy = "A token's loss may get any cotangent: its gradient cannot be formed before that."
        raise ValueError(message(OP, "form", "'two_pass' or None for reduction='none'", x, remedy))
    return x


def flag(name: str, x: Any) -> bool:
    """Returns a flag as a bool."""
    if not isinstance(x, bool | np.bool_):
        raise TypeError(message(OP, name, "True or False", repr(x)))
    return bool(x)
