# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""What a pass did: hits and near misses with the user's source lines, and equations counted."""

from dataclasses import dataclass
from typing import Literal

from tpjax.core.operator import Choice

Tier = Literal["exact", "close"]
"""exact: the bits of evaluating the original equations one by one; close: within its `tol`."""


@dataclass(frozen=True)
class Hit:
    """One place where a rule fired."""

    rule: str
    source: str
    """file:line of the user's code that made the replaced value."""
    op: str | None = None
    """The operator that runs now, or None for a rewrite into plain equations."""
    choices: tuple[Choice, ...] = ()
    """What dispatch decided for the operators of the replacement."""


@dataclass(frozen=True)
class NearMiss:
    """One place where a rule almost fired, and the first condition that failed, in plain words."""

    rule: str
    source: str
    reason: str
    failed: bool = False
    """Whether the rule matched and then raised, so that the original code runs in its place."""
    tier: Tier = "close"


@dataclass(frozen=True)
class Report:
    """What one pass did to one jaxpr, nested jaxprs included."""

    name: str
    hits: tuple[Hit, ...]
    near_misses: tuple[NearMiss, ...]
    equations_before: int
    equations_after: int
