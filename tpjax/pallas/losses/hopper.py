# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of a linear head on Hopper: which calls the kernels run, and in which form."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from tpjax.core.operator import Key
from tpjax.pallas import dispatch
from tpjax.pallas.losses import terms
from tpjax.pallas.losses.again import two_pass
from tpjax.pallas.losses.at_once import one_pass
from tpjax.pallas.losses.logit_kernel import CONFIGS, Config
from tpjax.pallas.losses.of_sum import two_pass_sum
from tpjax.pallas.losses.setup import Setup
from tpjax.pallas.losses.terms import Options
from tpjax.pallas.tuning import config_for

MULTIPLE = 64
"""Of which features and vocabulary are multiples: elements of a line in shared memory."""


def unsupported(key: Key) -> str | None:
    """Returns why the kernels cannot run the call, in words that follow "no kernel for this call:".

    Args:
      key: the call, of one device.
    """
    hidden, head = key.aval("hidden"), key.aval("head")
    one, axis = key.option("form") == "one_pass", key.option("vocab_axis")
    dtypes = ("bfloat16",) if one else ("bfloat16", "float16")
    if hidden.dtype.name not in dtypes:
        where = " in one pass" if one else ""
        return f"hidden must be of dtype {' or '.join(dtypes)}{where}; it is {hidden.dtype.name}"
    features, columns = hidden.shape[1], head.shape[axis]
    if features % MULTIPLE or not features:
        return f"hidden must have a multiple of {MULTIPLE} features; it has {features}"
    if columns % MULTIPLE:
        return f"the vocabulary must be a multiple of {MULTIPLE}; it has {columns} columns"
    if one and key.option("softcap") is not None and key.option("label_smoothing") > 0:
        return "smoothed labels with capped logits take two passes"
    return None


def cross_entropy_hopper(
    hidden: Array,
    head: Array,
    labels: Array,
    weights: Array,
    *,
    form: str,
    reduced: bool,
    config: Config | None = None,
    **options: Any,
) -> tuple[Array, Array, Array]:
    """Returns what `cross_entropy_xla` does, for a call that the kernels support."""
    static = Options(**options)
    sizes = (*hidden.shape, head.shape[static.vocab_axis], form)
    chosen = config or config_for("linear_cross_entropy", sizes, CONFIGS, CONFIGS[0])
    setup = Setup(static, dispatch.current_target().interpret, chosen)
    if form == "one_pass":
        return one_pass(setup, hidden, head, labels, weights)
    if reduced and hidden.dtype == jnp.bfloat16 and not (static.label_smoothing and static.softcap):
        return two_pass_sum(setup, hidden, head, labels, weights)
    lse, loss = two_pass(setup, hidden, head, labels)
    return terms.weighted(loss, weights).sum(), lse, loss
