# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""tpjax: FlashAttention, fused norms and memory that fits, for JAX functions not written for it.

    import tpjax

    loss = tpjax.compile(loss)          # attention, norms and the like run in kernels
    print(loss.explain(params, batch))  # which, where in your code, and why others do not

Every name is loaded at its first use, so that the import costs no more than JAX's.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpjax.pallas.dispatch import use
    from tpjax.stax.driver import compile, explain
    from tpjax.stax.persistence import cache
    from tpjax.stax.questions import gate
    from tpjax.stax_passes.pipeline import optimize
    from tpjax.stax_passes.rules import rule

__all__ = ["cache", "compile", "explain", "gate", "optimize", "rule", "use"]
__version__ = "0.1.0"

_HOMES = {
    "cache": "tpjax.stax.persistence",
    "compile": "tpjax.stax.driver",
    "explain": "tpjax.stax.driver",
    "gate": "tpjax.stax.questions",
    "optimize": "tpjax.stax_passes.pipeline",
    "rule": "tpjax.stax_passes.rules",
    "use": "tpjax.pallas.dispatch",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
