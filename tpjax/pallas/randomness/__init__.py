# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Dropout by a counter: the same mask forward, backward, and however an array is split."""
