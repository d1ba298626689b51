# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Python values as parts of a key: what Python calls equal need not make the same program."""

from typing import Any

import numpy as np


def atom(value: Any) -> tuple[type, Any]:
    """Returns a Python value with its type; 0.0 is not -0.0, 1 not True, and NaN equals itself.

    >>> atom(0.0) == atom(-0.0), atom(1) == atom(True), atom(float("nan")) == atom(float("nan"))
    (False, False, True)
    """
    floating = isinstance(value, float | complex | np.inexact)
    return type(value), repr(value) if floating else value


def exact(value: Any) -> Any:
    """Returns what `atom` does, of the items where the value is a tuple.

    >>> exact((1, "a")) == exact((True, "a")), exact((2, "a")) == exact((2, "a"))
    (False, True)
    """
    return (tuple, tuple(map(exact, value))) if type(value) is tuple else atom(value)


class Same:
    """A guard on which object it is: equal to a guard on the same object alone."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        name = getattr(self.value, "__qualname__", None)
        return name if isinstance(name, str) else f"{type(self.value).__name__} object"
