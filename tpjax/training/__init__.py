# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""What `train.py` is made of: text, config, step, loop, checkpoints, console, report."""
