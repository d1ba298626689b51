# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The kernels: `OPS`, one row an operator; each is called by its name, `tpjax.pallas.rms_norm`.

Loaded at first use: `import tpjax` brings no kernel.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpjax.pallas.attention.entry import flash_attention
    from tpjax.pallas.lookup.entry import embedding
    from tpjax.pallas.losses.entry import linear_cross_entropy
    from tpjax.pallas.norms.added import add_layer_norm, add_rms_norm
    from tpjax.pallas.norms.entry import layer_norm, rms_norm
    from tpjax.pallas.norms.fp8 import layer_norm_fp8, rms_norm_fp8
    from tpjax.pallas.ops import OPS
    from tpjax.pallas.plain.reductions import argmax, reduce
    from tpjax.pallas.plain.softmaxes import log_softmax, softmax
    from tpjax.pallas.products.entry import gated_linear_unit, gated_mlp, matmul
    from tpjax.pallas.randomness.entry import dropout
    from tpjax.pallas.rope.entry import rms_norm_rope, rotary_embedding

__all__ = [
    "OPS",
    "add_layer_norm",
    "add_rms_norm",
    "argmax",
    "dropout",
    "embedding",
    "flash_attention",
    "gated_linear_unit",
    "gated_mlp",
    "layer_norm",
    "layer_norm_fp8",
    "linear_cross_entropy",
    "log_softmax",
    "matmul",
    "reduce",
    "rms_norm",
    "rms_norm_fp8",
    "rms_norm_rope",
    "rotary_embedding",
    "softmax",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tpjax.pallas.ops import OPS

    found = {"OPS": OPS} | {op.name: op.fn for op in OPS}
    globals().update(found)
    return found[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
