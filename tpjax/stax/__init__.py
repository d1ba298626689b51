# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The driver: captures a function, has its jaxpr rewritten, runs it, and explains what was done."""
