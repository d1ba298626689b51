# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Every use of Mosaic GPU (JAX's kernel language for NVIDIA GPUs), behind names that do not move.

The one module among the kernels that may touch JAX internals; tested on JAX 0.11.2 and 0.12.
"""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu

from tpjax.core.operator import Interpret


def interpret_params(interpret: Interpret) -> Any:
    """Returns the `interpret=` argument of `plgpu.kernel` for a `Target.interpret` value."""
    if not interpret:
        return None
    return plgpu.InterpretGPUParams(detect_races=interpret == "races")
