# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Errors in the house style: what must hold, what was got, and how to mend it."""

import difflib
from collections.abc import Iterable


class UnsupportedError(ValueError):
    """An implementation was asked for by name and cannot run this call."""


def message(op: str, argument: str, must: str, got: object, remedy: str = "") -> str:
    """Returns ``"{op}: {argument} must be {must}; got {got}. {remedy}"``."""
    return f"{op}: {argument} must be {must}; got {got}." + (f" {remedy}" if remedy else "")


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Returns the sentence that names the nearest valid spelling, then all of them."""
    valid = sorted(valid)
    near = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return f"{hint}Valid: {', '.join(valid)}."
