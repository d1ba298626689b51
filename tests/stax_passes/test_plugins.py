# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Passes and rules by name, from real distributions on the path: metadata and a module."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import tpjax
from tests.harness import assert_close, inputs
from tpjax.stax.program import Program
from tpjax.stax_passes.contracts import UNSTATED, all_contracts
from tpjax.stax_passes.norms import fuse_norm

X = inputs("f32[3]", 1)

MODULE = """
import jax.numpy as jnp
import tpjax
from tpjax.stax_passes.report import Report

MINUS = tpjax.rule(lambda x: x + 1, lambda x: x - 1, name="plus_to_minus")

def nothing(jaxpr):
    count = len(jaxpr.eqns)
    return jaxpr, Report("nothing", (), (), count, count)

TWICE = (nothing, nothing)
NUMBER = 3
"""

Offer = Callable[..., Any]


@pytest.fixture
def offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Offer]:
    """Returns a function that puts a distribution on the path, offering what its keywords say."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(name: str = "fancy-rules", module: str = "fancy_rules", **groups: Any) -> None:
        (tmp_path / f"{module}.py").write_text(MODULE)
        info = tmp_path / f"{name.replace('-', '_')}-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
        lines = []
        for group, entries in groups.items():
            lines.append(f"[tpjax.{group}]")
            lines += [f"{entry} = {where}" for entry, where in entries.items()]
        (info / "entry_points.txt").write_text("\n".join(lines))

    yield install
    for module in ("fancy_rules", "other_rules"):
        sys.modules.pop(module, None)


def compiled(fn: Any, option: str, value: Any) -> Any:
    options: dict[str, Any] = {option: value}
    return tpjax.compile(fn, **options)


def names(compiled: Any, x: Any = X) -> list[tuple[str, int]]:
    return [(report.name, len(report.hits)) for report in compiled.explain(x).passes]


def test_F07_built_in_passes_by_name() -> None:
    """Each goes by the name that reports give it, in groups too."""
    compiled = tpjax.compile(
        lambda x: (x * 1.0) * 3, passes=(("canonicalise", "drop_dead_code"), "fuse_norm")
    )
    assert names(compiled) == [("canonicalise", 1), ("drop_dead_code", 0), ("fuse_norm", 0)]
    program = Program(jnp.sin, {"passes": ("fuse_norm",)}, 0)
    assert program.passes() == (fuse_norm,)


def test_F07_built_in_rules_by_name() -> None:
    """The row of a built-in fusion is a rule too, and then runs first."""

    def norm(x: Any) -> Any:
        return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)

    fired = [pair for pair in names(tpjax.compile(norm, rules=("norm",))) if pair[1]]
    assert ("apply_rules", 1) in fired
    assert ("fuse_norm", 1) not in fired


def test_F07_a_rule_is_loaded_at_first_use(offer: Offer) -> None:
    offer(rules={"minus": "fancy_rules:MINUS"})
    compiled = tpjax.compile(lambda x: x + 1, rules=("minus",))
    assert "fancy_rules" not in sys.modules
    assert_close("minus", compiled(X), X - 1, 0)
    assert "fancy_rules" in sys.modules


def test_F07_a_pass_is_loaded_at_first_use(offer: Offer) -> None:
    """A tuple that is offered is a group."""
    offer(passes={"nothing": "fancy_rules:nothing", "twice": "fancy_rules:TWICE"})
    compiled = tpjax.compile(lambda x: x + 1, passes=("nothing", "twice", "canonicalise"))
    assert "fancy_rules" not in sys.modules
    assert names(compiled) == [*[("nothing", 0)] * 3, ("canonicalise", 0)]


@pytest.mark.parametrize(
    ("option", "given", "says"),
    [
        ("rules", "minas", "unknown rule 'minas'. Did you mean 'minus'.*Valid: attention, minus"),
        ("passes", "fuse_norms", "unknown pass 'fuse_norms'. Did you mean 'fuse_norm'"),
        ("passes", ("fold_constant",), "Did you mean 'fold_constants'"),
    ],
)
def test_F07_unknown_names_give_the_nearest(
    offer: Offer, option: str, given: Any, says: str
) -> None:
    offer(rules={"minus": "fancy_rules:MINUS"})
    with pytest.raises(ValueError, match=says):
        compiled(jnp.sin, option, (given,))


@pytest.mark.parametrize(
    ("group", "name", "where"),
    [("passes", "fuse_norm", "fancy_rules:nothing"), ("rules", "attention", "fancy_rules:MINUS")],
)
def test_F07_a_built_in_cannot_be_shadowed(offer: Offer, group: str, name: str, where: str) -> None:
    offer(**{group: {name: where}})
    with pytest.raises(ValueError, match=rf"{where} \(fancy-rules 1.5\).*{name}.*cannot be taken"):
        compiled(jnp.sin, group, (name,))
    assert_close("others", tpjax.compile(jnp.sin)(X), jnp.sin(X), 1e-6)


def test_F07_two_that_offer_one_name_are_named(offer: Offer) -> None:
    offer(rules={"minus": "fancy_rules:MINUS"})
    offer("other-rules", "other_rules", rules={"minus": "other_rules:MINUS"})
    with pytest.raises(ValueError, match="both offer a rule named 'minus'") as raised:
        tpjax.compile(jnp.sin, rules=("minus",))
    assert "fancy_rules:MINUS (fancy-rules 1.5)" in str(raised.value)
    assert "other_rules:MINUS (other-rules 1.5)" in str(raised.value)


@pytest.mark.parametrize(
    ("group", "where", "kind", "says"),
    [
        ("rules", "fancy_rules:GONE", RuntimeError, "cannot be loaded.*AttributeError.*GONE"),
        ("rules", "missing_module:MINUS", RuntimeError, "ModuleNotFoundError.*missing_module"),
        ("rules", "fancy_rules:NUMBER", TypeError, "must be a rule.*got 3"),
        ("rules", "fancy_rules:nothing", TypeError, "must be a rule.*got <function nothing"),
        ("passes", "fancy_rules:NUMBER", TypeError, "must be a function from a jaxpr.*got 3"),
        ("passes", "fancy_rules:MINUS", TypeError, "must be a function from a jaxpr"),
        ("passes", "fancy_rules:GONE", RuntimeError, "cannot be loaded"),
    ],
)
def test_F07_what_cannot_be_loaded_names_its_origin(
    offer: Offer, group: str, where: str, kind: type, says: str
) -> None:
    """At the first call, as nothing is imported before; module:attr and the distribution."""
    offer(**{group: {"bad": where}})
    sine = compiled(jnp.sin, group, ("bad",))
    with pytest.raises(kind, match=says) as raised:
        sine(X)
    assert f"{where} (fancy-rules 1.5)" in str(raised.value)


def test_F07_exact_mode_looks_at_the_tier_once_loaded(offer: Offer) -> None:
    offer(rules={"minus": "fancy_rules:MINUS"})
    compiled = tpjax.compile(lambda x: x + 1, mode="exact", rules=("minus",))
    with pytest.raises(ValueError, match=r"plus_to_minus is of tier 'close'"):
        compiled(X)


def test_F07_what_is_offered_is_listed_with_its_contract(offer: Offer) -> None:
    """In `python -m tpjax rules`: passes too, and what cannot be loaded with the reason."""
    offer(
        rules={"minus": "fancy_rules:MINUS", "gone": "fancy_rules:NOTHING"},
        passes={"twice": "fancy_rules:TWICE", "norm_again": "tpjax.stax_passes.norms:fuse_norm"},
    )
    rows = {row.rule: row for row in all_contracts() if row.comes_from != "tpjax"}
    assert set(rows) == {"plus_to_minus", "gone", "nothing", "norm"}
    assert rows["plus_to_minus"].stage == "apply_rules"
    assert rows["plus_to_minus"].contract == "as the author of the rule states"
    assert rows["plus_to_minus"].comes_from == "fancy_rules:MINUS (fancy-rules 1.5)"
    assert rows["gone"].tier == "unknown"
    assert "NOTHING" in rows["gone"].contract
    assert (rows["nothing"].tier, rows["nothing"].contract) == ("unknown", UNSTATED)
    assert "ulps" in rows["norm"].contract
