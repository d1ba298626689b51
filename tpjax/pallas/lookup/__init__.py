# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Embedding: rows of a table by their ids, and the sorted sum that its gradient is."""
