# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Every rule has a contract that is listed, and no pass reports a rule that is not."""

import ast
from collections import Counter
from typing import get_args

import jax
import pytest

from tests.house import sources
from tests.stax_passes.test_canonical import FIRES
from tpjax.stax_passes import contracts
from tpjax.stax_passes.pipeline import PASSES, optimize
from tpjax.stax_passes.report import Tier
from tpjax.stax_passes.sweep import ExactRule, sweeping_pass

LISTED = contracts.all_contracts(offered=False)


def test_the_document_is_current() -> None:
    """docs/rules.md holds the contracts of the live passes."""
    text = contracts.DOCUMENT.read_text()
    assert contracts.document(text) == text, "run: python -m tpjax.stax_passes.contracts"


def test_every_pass_has_rules_with_contracts_and_names_of_their_own() -> None:
    stages = {row.stage for row in LISTED}
    assert stages == {run.__name__ for run in contracts.passes_once()}
    assert not [name for name, n in Counter(row.rule for row in LISTED).items() if n > 1]
    for row in LISTED:
        assert len(row.contract) > 10, row
        assert row.contract != contracts.UNSTATED, row
        assert row.tier in get_args(Tier), row
        assert row.lives_at.startswith("tpjax.stax_passes."), row
    for run in contracts.passes_once():
        tiers = {row.tier for row in LISTED if row.stage == run.__name__}
        if hasattr(run, "exact_rules"):
            assert tiers == {getattr(run, "tier", "exact")}, run


def test_what_fires_is_listed() -> None:
    """In the whole table of rules that must fire, under all passes."""
    names = {(row.stage, row.rule) for row in LISTED}
    for _, fn, args, *_ in FIRES:
        _, reports = optimize(jax.make_jaxpr(fn)(*args), PASSES, verify=True)
        fired = {(report.name, hit.rule) for report in reports for hit in report.hits}
        assert fired <= names


def test_a_pass_cannot_report_what_it_does_not_declare() -> None:
    def start(level):
        def edit(level, eqn):
            level.log.hit("other", eqn)
            return eqn

        return edit

    run = sweeping_pass("careless", "Reports another rule.", start, (ExactRule("mine", None),))
    with pytest.raises(AssertionError, match="other is not declared"):
        run(jax.make_jaxpr(lambda x: x + 1)(1.0))


def test_hits_are_made_where_names_are_checked() -> None:
    """A `Hit` is made by the log of a sweep, which knows the rules, or by the engine from a row."""
    makers = {
        source.path
        for source in sources()
        if source.is_product
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Hit"
    }
    assert makers == {"tpjax/stax_passes/engine.py", "tpjax/stax_passes/sweep.py"}
