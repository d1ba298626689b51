# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""tpjax: FlashAttention, fused norms and memory that fits, for JAX functions that nobody wrote for it."""

from tpjax.pallas.dispatch import use

__all__ = ["use"]
__version__ = "0.1.0"
