# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The kernels: `OPS`, one row an operator; each is called by its name, `tpjax.pallas.rms_norm`.

Loaded at first use: `import tpjax` brings no kernel.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpjax.pallas.attention.entry import flash_attention
    from tpjax.pallas.norms.entry import layer_norm, rms_norm
    from tpjax.pallas.ops import OPS

__all__ = ["OPS", "flash_attention", "layer_norm", "rms_norm"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tpjax.pallas.ops import OPS

    found = {"OPS": OPS} | {op.name: op.fn for op in OPS}
    globals().update(found)
    return found[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
