# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""A found pattern: what rows return and the engine puts a replacement for."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Match:
    """A found pattern: the value to replace, what it is made from, and the values that vanish."""

    root: int
    operands: tuple[int, ...]
    build: Callable[..., Any]
    """Takes the operands' arrays, returns the root's value."""
    interior: frozenset[int]
    """Values that only the pattern needs; used elsewhere, they make the match a near miss."""
    op: str | None = None
    casts: bool = True
    """Whether a value of another dtype is cast to the root's, rather than refused."""

    def moved(self, other: Callable[[int], int]) -> "Match":
        """Returns the same pattern found elsewhere, at the values that `other` gives."""
        return replace(
            self,
            root=other(self.root),
            operands=tuple(map(other, self.operands)),
            interior=frozenset(map(other, self.interior)),
        )
