# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The attention family: `row` is its line of the table, `entry` the function people call."""
