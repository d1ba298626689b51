# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Matrix products and what is fused to their ends: `matmul`, gated linear units, the gated MLP."""
