# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Exact passes that are tables: by primitive, rows of what to look for and what to put there."""

from collections.abc import Mapping

from tpjax.core import _jax
from tpjax.stax_passes.sweep import Edit, Edited, ExactRule, Level, Pass, sweeping_pass

Table = Mapping[str, tuple[ExactRule, ...]]
"""By primitive, the rows in order; a row's value is taken only if its type is the result's."""


def table_pass(name: str, summary: str, table: Table) -> Pass:
    """Returns the pass that tries the rows of the table at every equation, in order."""

    def edit(level: Level, eqn: _jax.Equation) -> Edited:
        return apply_rows(table, level, eqn)

    def start(level: Level) -> Edit:
        del level
        return edit

    return sweeping_pass(name, summary, start, rows_in(table))


def rows_in(table: Table) -> tuple[ExactRule, ...]:
    """Returns the rows of a table, each once."""
    return tuple({row.name: row for rows in table.values() for row in rows}.values())


def apply_rows(table: Table, level: Level, eqn: _jax.Equation) -> Edited:
    """Returns what the rows put in place of the equation: itself if none fires."""
    if eqn.effects:
        return eqn
    for row in table.get(eqn.primitive.name, ()):
        assert row.rewrite is not None, row.name
        new = row.rewrite(level, eqn)
        if new is None:
            continue
        if isinstance(new, str):
            level.log.near_miss(row.name, eqn, new)
        elif isinstance(new, list):
            level.log.hit(row.name, eqn)
            return new
        elif isinstance(new, _jax.Equation):
            level.log.hit(row.name, eqn)
            if new.primitive is not eqn.primitive:
                return new
            eqn = new
        elif new.aval is eqn.outvars[0].aval:
            level.log.hit(row.name, eqn)
            level.replace(eqn.outvars[0], new)
            return None
    return eqn
