# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""What both forms on Hopper share: how kernels are called, and statistics from their sums."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from tpjax.core.operator import Interpret
from tpjax.pallas.losses import logit_kernel, terms
from tpjax.pallas.losses.logit_kernel import LOG2E, Job, Operands, Sums
from tpjax.pallas.losses.terms import Options, Statistics


class Setup(NamedTuple):
    """Static facts of a call on kernels."""

    options: Options
    interpret: Interpret
    config: logit_kernel.Config

    def run(self, kind: str, hidden: Array, head: Array, labels: Array, *vectors: Array) -> Any:
        """Returns what the kernel of this kind makes; labels count the columns of `head`."""
        options = self.options
        smoothed = options.label_smoothing > 0
        sizes = (options.vocab_axis, options.softcap, smoothed, self.config, self.interpret)
        return logit_kernel.run(Job(kind, *sizes), Operands(hidden, head, labels, vectors))

    def gradient(
        self, hidden: Array, head: Array, labels: Array, vectors: Any, first: Any, columns: int
    ) -> Array:
        """Returns the gradient of the logits of so many columns, from `first` on.

        Labels, and lse, a, b and e in `vectors`, are as the kernel takes them.
        """
        options = self.options
        smoothed = options.label_smoothing > 0
        sizes = (options.vocab_axis, options.softcap, smoothed, self.config, self.interpret)
        at = jnp.asarray(first, jnp.int32).reshape(1)
        operands = Operands(hidden, head, labels - first, tuple(vectors), at)
        return logit_kernel.run(Job("gradient", *sizes, columns), operands)

    def evaluate(self, hidden: Array, head: Array, labels: Array) -> Statistics:
        """Returns the statistics of all tokens; labels count the columns of all devices."""
        labels = labels - terms.first_column(head, self.options)
        sums = self.run("sums", hidden, head, labels)
        return self.joined(_log2_sum(sums) / LOG2E, sums, head)

    def exact_shift(self, hidden: Array, head: Array, labels: Array) -> Array:
        """Returns lse of this device's columns, in units of log2; labels count those."""
        return _log2_sum(self.run("sums", hidden, head, labels))

    def joined(self, lse: Array, sums: Sums, head: Array) -> Statistics:
        """Returns the statistics for this device's lse [R] and sums over its tiles."""
        options = self.options
        label = sums.label.sum(0)
        every = label if sums.every is None else sums.every.sum(0)
        top, total = lse, jnp.ones_like(lse)
        if options.axis_name is not None:
            top = lax.pmax(lse, options.axis_name)
            total, label, every = lax.psum((jnp.exp(lse - top), label, every), options.axis_name)
        vocab = terms.vocab_size(head, options)
        return terms.finished(top, total, label, every, vocab, options)


def _log2_sum(sums: Sums) -> Array:
    """Returns the log2 of the sum of exponentials over all tiles."""
    top = sums.top.max(0)
    return top + jnp.log2((sums.total * jnp.exp2(sums.top - top)).sum(0))
