# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The public function `linear_cross_entropy`: checks at the door, then dispatch."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from tpjax.core.losses import mean_divisor
from tpjax.core.norms import statistics_dtype
from tpjax.pallas import dispatch
from tpjax.pallas.losses import checks, devices, terms
from tpjax.pallas.losses.forms import form_of
from tpjax.pallas.losses.implementations import IMPLEMENTATIONS


def linear_cross_entropy(  # long: fifteen arguments, each explained
    hidden: Float[Array, "*B D"],
    head: Float[Array, "V D"] | Float[Array, "D V"],
    labels: Int[Array, "*B"],
    weights: Float[Array, "*B"] | None = None,
    *,
    vocab_axis: int = 0,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    return_token_losses: bool = False,
    return_lse: bool = False,
    mesh_axis: str | None = None,
    form: str | None = None,
    implementation: str | None = None,
) -> Any:
    """Returns the cross-entropy of the logits `hidden @ head` against labels, logits never in full.

        x[v] = softcap(hidden . head[v]),  lse = log sum_v exp(x[v])
        loss = lse - (1 - s) x[label] - s mean_v x[v] + z lse^2

    The head is cast to hidden's dtype; products are summed, and all else is computed, in float32
    (float64 for float64 hidden). Equal calls give equal bits, gradients too.

    Two forms, for which `form` asks. "one_pass" forms the gradient with the loss, 3 products in
    all, and holds a block of logits and, for more than one block, a float32 gradient of the head.
    "two_pass" forms the logits again, at most 4 products in all, and holds a block of logits and at
    most a float32 gradient of hidden; of a reduced loss the passes share what the head's gradient
    will take. By itself a reduced loss takes one pass where what that holds is at most 4 GiB, else
    two. A loss of each token takes two.

    Args:
      hidden: [*B, D], bfloat16, float16, float32 or float64.
      head: [V, D], as an embedding's table, or with `vocab_axis=1` [D, V], as a dense layer's
        kernel; of any of those dtypes, hidden's or not.
      labels: [*B], integers in [0, V), or `ignore_index`. Others are an error where their values
        are known; while tracing they make the token's loss, and its gradients, NaN.
      weights: [*B], what each token's loss is multiplied by; None means 1.
      vocab_axis: which axis of the head counts the vocabulary, 0 or 1.
      ignore_index: the label of tokens that do not count, as if of weight 0. Their rows of `hidden`
        must be finite all the same: the gradient of the head is a product with them.
      label_smoothing: s, in [0, 1): this much of the target is spread over the vocabulary.
      z_loss: z, zero or more.
      softcap: bounds logits by cap * tanh(x / cap); above 0; None leaves them as they are.
      reduction: "mean", the sum divided by that of the weights (0 where none counts); "sum"; or
        "none", the loss of each token, times its weight.
      return_token_losses: returns too what "none" would; beside a reduced loss without a gradient.
      return_lse: returns too lse [*B], of ignored tokens as well; beside a reduced loss without a
        gradient.
      mesh_axis: splits the vocabulary over the devices of this axis of the mesh in context; inside
        a shard_map over it, `head` is the device's part, and labels count all parts. None: as an
        explicit axis splits the head, else whole.
      form: "one_pass" or "two_pass"; None chooses.
      implementation: "pallas" or "xla"; None chooses.

    Returns:
      The loss, float32 (float64 for float64 hidden), a scalar or [*B]; or a tuple of it, then
      token losses, then lse, as asked for.

    Raises:
      ValueError: a wrong shape or value.
      TypeError: a wrong dtype or kind.
      UnsupportedError: the implementation asked for cannot run this call.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> hidden = jax.random.normal(jax.random.key(0), (2, 16, 64), jnp.bfloat16)
      >>> head = jax.random.normal(jax.random.key(1), (1000, 64), jnp.bfloat16)
      >>> labels = jnp.full((2, 16), 7)
      >>> linear_cross_entropy(hidden, head, labels).shape
      ()
      >>> losses, lse = linear_cross_entropy(
      ...     hidden, head.T, labels, vocab_axis=1, reduction="none", return_lse=True
      ... )
      >>> losses.shape, str(lse.dtype)
      ((2, 16), 'float32')

    Source: Wijmans et al. 2024 (Cut Your Losses), Hsu et al. 2024 (Liger Kernel, one pass).
    """
    vocab_axis = checks.vocab_axis(vocab_axis)
    checks.check_arrays(hidden, head, labels, weights, vocab_axis)
    static = {
        "vocab_axis": vocab_axis,
        "label_smoothing": checks.label_smoothing(label_smoothing),
        "z_loss": checks.z_loss(z_loss),
        "softcap": checks.softcap(softcap),
    }
    reduced = checks.reduction(reduction) != "none"
    wanted = checks.form(form, reduced)
    ignored = checks.integer("ignore_index", ignore_index)
    for name, x in (("return_token_losses", return_token_losses), ("return_lse", return_lse)):
        checks.flag(name, x)
    vocab = head.shape[vocab_axis] * devices.outer_devices(mesh_axis)
    labels, factors = _labels_and_factors(labels, weights, vocab, ignored, hidden.dtype)
    scaled = factors / mean_divisor(factors) if reduction == "mean" else factors
    if not labels.size:
        dispatch.check_name("linear_cross_entropy", IMPLEMENTATIONS, implementation)
        total, lse, losses = jnp.zeros((), scaled.dtype), scaled, scaled
    else:
        local = partial(_local, static, wanted, reduced, implementation)
        total, lse, losses = devices.over_devices(
            local, (hidden, head, labels, scaled), vocab_axis, mesh_axis
        )
    losses = terms.weighted(losses, factors)
    extra = (losses,) * return_token_losses + (lse,) * return_lse
    if not reduced:
        return (losses, *extra) if extra else losses
    return (total, *jax.lax.stop_gradient(extra)) if extra else total


def _labels_and_factors(
    labels: Any, weights: Any, vocab: int, ignored: int, dtype: Any
) -> tuple[Array, Array]:
    """Returns labels as int32, and what each token's loss is multiplied by: NaN for a bad label."""
    checks.check_labels(labels, vocab, ignored)
    labels = jnp.asarray(labels)
    if jnp.issubdtype(labels.dtype, jnp.unsignedinteger):
        # Those too large for a signed integer are in no vocabulary.
        most = jnp.iinfo(f"int{8 * max(labels.dtype.itemsize, 4)}").max
        labels = jnp.where(labels > most, most, labels) if labels.dtype.itemsize >= 4 else labels
    if labels.dtype != jnp.int64:
        labels = labels.astype(jnp.int64 if labels.dtype.itemsize == 8 else jnp.int32)
    valid = labels != ignored
    factors = jnp.ones(labels.shape, statistics_dtype(dtype))
    if weights is not None:
        factors = jnp.asarray(weights).astype(factors.dtype)
    bad = (labels < 0) | (labels >= vocab)
    zero, nan = (jnp.asarray(x, factors.dtype) for x in (0, jnp.nan))
    factors = jnp.where(valid, jnp.where(bad, nan, factors), zero)
    return jnp.where(bad, -1, labels).astype(jnp.int32), factors


def _local(
    static: dict[str, Any],
    form: str | None,
    reduced: bool,
    implementation: str | None,
    columns: Any,
    hidden: Array,
    head: Array,
    labels: Array,
    weights: Array,
) -> tuple[Array, Array, Array]:
    """Runs the call of one device, `columns` naming the mesh axes that split the vocabulary."""
    lead, features = hidden.shape[:-1], hidden.shape[-1]
    tokens = math.prod(lead)
    form = form or form_of(tokens, features, head.shape[static["vocab_axis"]], reduced=reduced)
    operands = {
        "hidden": hidden.reshape(tokens, features),
        "head": head,
        "labels": labels.reshape(tokens),
        "weights": weights.reshape(tokens),
    }
    options = {**static, "axis_name": columns, "form": form, "reduced": reduced}
    total, lse, losses = dispatch.call(
        "linear_cross_entropy", IMPLEMENTATIONS, operands, options, implementation
    )
    return total, lse.reshape(lead), losses.reshape(lead)
