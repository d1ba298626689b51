# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The command `python -m tpjax bench`: what it prints and writes; its options are the parser's."""

import argparse
import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from tpjax.core.errors import did_you_mean
from tpjax.core.operator import Op
from tpjax.core.store import Store
from tpjax.pallas.bench.clock import FEWEST_GROUPS, GROUPS
from tpjax.pallas.bench.configs import tune_op
from tpjax.pallas.bench.picture import draw, matplotlib_or_reason
from tpjax.pallas.bench.results import Findings, Measured
from tpjax.pallas.bench.run import by_words, measure
from tpjax.pallas.bench.tables import (
    ceilings_in_words,
    console,
    gain_in_words,
    heading,
    table_of,
)
from tpjax.pallas.ops import OPS


def run_command(options: argparse.Namespace) -> list[str]:
    """Runs the command; returns what went wrong, a line each.

    Raises:
      ValueError: an option that makes no sense, in a sentence with the remedy.
    """
    ops = _named(options.op)
    choose = by_words(options.samples)
    if not any(choose(sample) for op in ops for sample in op.samples):
        raise ValueError(_no_sample(ops, options.samples or ()))
    groups = GROUPS if options.groups is None else options.groups
    if groups < FEWEST_GROUPS:
        raise ValueError(
            f"bench: --groups must be at least {FEWEST_GROUPS}, or no interval holds the median "
            f"with 95 %; got {groups}."
        )
    if options.tune is not None or options.record:
        store = None if options.tune is None else Store(Path(options.tune).expanduser())
        words = ["production"] if options.samples is None else options.samples
        lines = []
        for op in ops:
            for line in tune_op(op, store, choose=by_words(words)):
                print(line, flush=True)
                lines.append(line)
        if any(" ms " in line for line in lines):
            return []
        return ["no kernel of these operators ran here, so there is no config to keep."]
    _check_files(options)
    findings = _shown(measure(ops, choose, groups=groups))
    if options.json:
        Path(options.json).write_text(json.dumps(findings.as_dict(), indent=1) + "\n")
    if options.picture:
        draw(findings, Path(options.picture))
    faults = [row for row in findings.rows if row.failed]
    return [f"{row.form} of {row.op} {row.direction} {row.sample}: {row.note}" for row in faults]


def _named(names: Sequence[str]) -> list[Op]:
    known = {op.name: op for op in OPS}
    for name in names:
        if name not in known:
            raise ValueError(f"bench: unknown operator {name!r}. {did_you_mean(name, known)}")
    return [known[name] for name in dict.fromkeys(names)] or [*OPS]


def _no_sample(ops: Sequence[Op], words: Sequence[str]) -> str:
    got = " ".join(map(repr, words)) or "none, and this machine's"
    shown = "Name an operator to see its samples."
    if len(ops) == 1:
        shown = f"Samples of {ops[0].name}: {'; '.join(map(str, ops[0].samples))}."
    return (
        f"bench: --samples must be production, small, all or text of a sample; got {got}. {shown}"
    )


def _check_files(options: argparse.Namespace) -> None:
    """Finds out before minutes of measuring that what was asked for cannot be written."""
    for option in ("json", "picture"):
        path = getattr(options, option)
        if path and not Path(path).resolve().parent.is_dir():
            raise ValueError(f"bench: --{option} must be in a folder that exists; got {path!r}.")
    if options.picture:
        if Path(options.picture).suffix not in (".png", ".svg", ".pdf"):
            raise ValueError(
                f"bench: --picture must end in .png, .svg or .pdf; got {options.picture!r}."
            )
        reason = matplotlib_or_reason()
        if reason:
            raise ValueError(f"bench: --picture: {reason}.")


def _shown(measured: Iterable[Measured]) -> Findings:
    """Prints each table as soon as its rows are there; returns them all."""
    out, said = console(), set[str]()
    out.print(heading())
    rows: list[Measured] = []
    for _, same in groupby(measured, key=lambda row: (row.op, row.sample, row.direction)):
        group = list(same)
        rows += group
        for words in {ceilings_in_words(row.ceilings) for row in group} - said:
            out.print(words, markup=False)
            said.add(words)
        out.print(table_of(group))
        gain = gain_in_words(group)
        if gain:
            out.print(gain + "\n", markup=False)
    return Findings(tuple(rows))
