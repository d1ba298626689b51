# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The rewrites: `PASSES` in running order, and what each reports."""
