# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The contracts of all rules, read from the live passes and entry points, never written down twice.

`python -m tpjax rules` prints them; `python -m tpjax.stax_passes.contracts` writes those of this
project into docs/rules.md.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

from tpjax.stax_passes.engine import Bound, Recogniser, rows_of
from tpjax.stax_passes.pipeline import ON_REQUEST, PASSES
from tpjax.stax_passes.plugins import PASS_GROUP, RULE_GROUP, Group, named, origin
from tpjax.stax_passes.sweep import Pass

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
DOCUMENT = Path(__file__).parents[2] / "docs" / "rules.md"
UNSTATED = "its author states none"


class Contract(NamedTuple):
    """One rule, and what it promises of the numbers."""

    stage: str
    """The pass that it is a rule of; "apply_rules" for one that `tpjax.compile` is given."""
    rule: str
    tier: str
    """exact, close, or unknown if what offers the rule cannot be loaded."""
    contract: str
    """What may differ from evaluating the original equations one by one, and when."""
    lives_at: str
    """module:name of the function that looks for it."""
    comes_from: str = "tpjax"


EVERY: tuple[Pass | tuple[Pass, ...], ...] = (*PASSES, *ON_REQUEST)


def passes_once(passes: Iterable[Pass | tuple[Pass, ...]] = EVERY) -> tuple[Pass, ...]:
    """Returns the passes in running order, groups opened, each once."""
    flat = (p for entry in passes for p in (entry if isinstance(entry, tuple) else (entry,)))
    return tuple(dict.fromkeys(flat))


def rules_of(run: Pass) -> tuple[Any, ...]:
    """Returns the rows of a pass, exact or rewriting; of a pass that is no table, none."""
    return getattr(run, "exact_rules", ()) or rows_of(run)


def all_contracts(
    passes: Iterable[Pass | tuple[Pass, ...]] = EVERY, *, offered: bool = True
) -> tuple[Contract, ...]:
    """Returns the contract of every rule of the passes, in running order.

    Args:
      passes: as of `tpjax.optimize`.
      offered: whether to list what other distributions offer too, which imports it.
    """
    found = [_contract(run, row) for run in passes_once(passes) for row in rules_of(run)]
    if offered:
        found += _offered(RULE_GROUP, lambda row: [_contract(None, row)])
        found += _offered(PASS_GROUP, _of_passes)
    return tuple(found)


def _of_passes(value: Any) -> list[Contract]:
    found: list[Contract] = []
    for run in passes_once((value,)):
        name = getattr(run, "__name__", type(run).__name__)
        alone = Contract(name, name, "unknown", UNSTATED, _address(run))
        found += [_contract(run, row) for row in rules_of(run)] or [alone]
    return found


def _contract(run: Pass | None, row: Any) -> Contract:
    stage = "apply_rules" if run is None else getattr(run, "__name__", type(run).__name__)
    looks = row.extract if isinstance(row, Recogniser) else _looks(row)
    words = "; ".join(filter(None, (row.contract, _in_words(getattr(row, "ulps", ())))))
    return Contract(stage, row.name, row.tier, words or UNSTATED, _address(looks or run))


def _looks(row: Any) -> Callable[..., Any] | None:
    """Returns the function of a row of another kind that says what to look for, or None."""
    return getattr(row, "pattern", None) or getattr(row, "rewrite", None)


def _in_words(ulps: Iterable[Bound]) -> str:
    """Returns the bounds as a sentence, or nothing where there are none."""
    parts = []
    for bound in ulps:
        more = f" or {bound.times_original:g} times the original's" * bool(bound.times_original)
        parts.append(f"{bound.value:g} / {bound.gradient:g}{more} in {bound.dtype}")
    return f"error of value / gradients in ulps at most {', '.join(parts)}" if parts else ""


def _address(fn: Any) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "__qualname__", type(fn).__qualname__)
    return f"{getattr(fn, '__module__', '?')}:{name}"


def _offered(group: Group, read: Callable[[Any], list[Contract]]) -> Iterator[Contract]:
    """Yields the contracts of what distributions offer; what fails to load has its reason."""
    for entry in sorted(set(entry_points(group=group.entry_points))):
        try:
            (value,) = named(group, (entry.name,))
        except (ValueError, TypeError, RuntimeError) as error:
            yield Contract("?", entry.name, "unknown", str(error), entry.value, origin(entry))
            continue
        for one in read(value):
            yield one._replace(comes_from=origin(entry))


def rules_markdown() -> str:
    """Returns the contracts of this project's rules as Markdown."""
    lines = ["| pass | rule | tier | contract | lives at |", "|---|---|---|---|---|"]
    for row in all_contracts(offered=False):
        where = row.lives_at.removeprefix("tpjax.stax_passes.")
        cells = (row.stage, row.rule, row.tier, row.contract, f"`{where}`")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def document(text: str) -> str:
    """Returns the document with its table, between the two marks, made anew."""
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    return f"{head}{BEGIN}\n{rules_markdown()}\n{END}{tail}"


if __name__ == "__main__":
    DOCUMENT.write_text(document(DOCUMENT.read_text()))
