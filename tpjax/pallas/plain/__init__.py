# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Operators whose best form is XLA's own: softmax and reductions."""
