# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The support table claims nothing that is not in the live tables, and misses nothing that is."""

import dataclasses

import pytest

import tpjax.pallas.support as support
from tpjax.core.operator import Implementation
from tpjax.pallas.ops import OPS


def test_F08_document_is_current() -> None:
    """docs/operators.md holds the table that the live operators give."""
    text = support.DOCUMENT.read_text()
    assert support.document(text) == text, "run: python -m tpjax.pallas.support"


def test_F08_every_implementation_has_a_row_that_runs() -> None:
    """Every implementation of every operator is listed, and runs at least one sample."""
    rows = support.support_rows()
    expected = [(op.name, i.name) for op in OPS for i in op.implementations]
    assert [(row.operator, row.implementation) for row in rows] == expected
    assert all(row.dtypes for row in rows)


def test_table_asks_the_implementations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that begins to refuse something changes the table: nothing in it is written down."""
    op = OPS[0]
    stub = Implementation(
        "pallas", op.implementations[0].run, lambda key: "it is Monday", ("cuda",)
    )
    monkeypatch.setattr(support, "OPS", (dataclasses.replace(op, implementations=(stub,)),))
    row = support.support_rows()[0]
    # The public function asks its own implementations; only where it runs is the row's to say.
    assert row.runs_on == "cuda"
    assert support.support_markdown() not in support.DOCUMENT.read_text()
