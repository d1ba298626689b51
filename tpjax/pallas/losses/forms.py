# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Which form a call takes: by what one pass would hold."""

from tpjax.pallas.losses.at_once import block_size

MOST_BYTES = 1 << 32
"""One pass may hold so many bytes beside its operands and results."""


def one_pass_bytes(tokens: int, features: int, columns: int) -> int:
    """Returns the bytes of a block of logits and of the float32 gradient of the head.

    The latter is needed where there are several blocks.
    """
    block = block_size(tokens, features, columns)
    return 2 * block * columns + (4 * features * columns if block < tokens else 0)


def form_of(tokens: int, features: int, columns: int, *, reduced: bool) -> str:
    """Returns the form for a loss, reduced or of each token, of so many columns of the head."""
    if reduced and one_pass_bytes(tokens, features, columns) <= MOST_BYTES:
        return "one_pass"
    return "two_pass"
