# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Losses: `row` holds their lines of the table, `entry` the functions people call."""
