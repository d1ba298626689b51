# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Holds the tables of spellings of attention, and of what is nearly attention, to today's verdict.

Programs are traced and rewritten, not run; `-m slow` runs what is found beside the original.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxpr_as_fun

from tests.harness import inputs
from tests.stax_passes.attention_mask_spellings import (
    FLOATS_BS,
    MASKS,
    float_padding_lowest,
    outer_padding,
)
from tests.stax_passes.attention_near_misses import NEAR_MISSES, SQUARE, UNUSUAL, WRONG_HITS
from tests.stax_passes.attention_program_spellings import PROGRAMS
from tests.stax_passes.attention_spellings import PLAIN, Spelling
from tests.stax_passes.spellings import assert_same
from tpjax.core.operator import parse_spec
from tpjax.stax_passes.attention import fuse_attention
from tpjax.stax_passes.pipeline import CLEAN_UP, optimize
from tpjax.stax_passes.report import Report

SPELLINGS = (*PLAIN, *MASKS, *PROGRAMS)
MISSES = [(reason, row) for reason, rows in NEAR_MISSES.items() for row in rows]
BLIND = (outer_padding, float_padding_lowest)


def _name(row: Any) -> str:
    if isinstance(row, str):
        return "left"
    return row.fn.__name__ if isinstance(row, Spelling) else row[0].replace(" ", "_")


def rewrite(fn: Callable[..., Any], args: tuple[str, ...]) -> tuple[Callable[..., Any], Report]:
    """Returns the function cleaned up and rewritten, and what the attention pass reports."""
    avals = [jax.ShapeDtypeStruct(shape, dtype) for dtype, shape in map(parse_spec, args)]
    jaxpr, shape = jax.make_jaxpr(fn, return_shape=True)(*avals)
    new, reports = optimize(jaxpr, (CLEAN_UP, fuse_attention))
    tree = jax.tree.structure(shape)

    def run(*args: Any) -> Any:
        return jax.tree.unflatten(tree, jaxpr_as_fun(new)(*jax.tree.leaves(args)))

    return run, reports[-1]


@pytest.mark.parametrize("row", SPELLINGS, ids=_name)
def test_spelling(row: Spelling) -> None:
    """It is found, or left as written for the reason in the table."""
    _, report = rewrite(row.fn, row.args)
    reasons = [miss.reason for miss in report.near_misses]
    if row.reason is None:
        assert [hit.op for hit in report.hits] == ["flash_attention"] * row.count, reasons
    else:
        assert not report.hits, "found now: drop its reason, and `wanted`, from the table"
        assert bool(reasons) == bool(row.reason)
        assert all(row.reason in reason for reason in reasons), reasons


@pytest.mark.parametrize(("reason", "row"), MISSES, ids=_name)
def test_near_miss(reason: str, row: tuple[str, Callable[..., Any]]) -> None:
    """It is left as written, for the reason in the table."""
    _, report = rewrite(row[1], (SQUARE,) * 3)
    reasons = [miss.reason for miss in report.near_misses]
    assert not report.hits
    assert bool(reasons) == bool(reason), reasons
    assert all(reason in one for one in reasons), reasons


@pytest.mark.xfail(reason="issue 7: a wrong hit", raises=AssertionError, strict=True)
@pytest.mark.parametrize("row", WRONG_HITS, ids=_name)
def test_wrong_hit(row: tuple[str, Callable[..., Any]]) -> None:
    """It should be left as written; once it is, it moves to the near misses."""
    _, report = rewrite(row[1], (SQUARE,) * 3)
    assert not report.hits


@pytest.mark.parametrize("row", UNUSUAL, ids=_name)
def test_unusual(row: tuple[str, Callable[..., Any]]) -> None:
    """It is found, and gives the same numbers."""
    _, fn = row
    new, report = rewrite(fn, (SQUARE,) * 3)
    assert len(report.hits) == 1
    args = tuple(inputs(SQUARE, seed) for seed in range(3))
    assert_same(row[0], fn, new, args, 5e-6)  # sums over eight keys in another order


def _example(spec: str, seed: int) -> jax.Array:
    """Returns values that hide the first key from no query, sorted where they are tokens."""
    x = inputs(spec, seed, below=8)
    if x.dtype == jnp.bool_:
        return (x | jnp.eye(*x.shape[-2:], dtype=bool)).at[..., 0].set(True)
    if x.dtype == jnp.int32:
        return jnp.sort(x + 1, -1) if x.ndim else x
    return (x > 0).astype(x.dtype).at[..., 0].set(1) if spec == FLOATS_BS else x


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in SPELLINGS if row.reason is None], ids=_name)
def test_numbers_stay(row: Spelling) -> None:
    """What is found gives the same values and gradients."""
    if row.fn in BLIND:
        pytest.skip("a query sees no key: the operator gives 0, by its contract")
    new, _ = rewrite(row.fn, row.args)
    args = tuple(_example(spec, seed) for seed, spec in enumerate(row.args))
    half = "bf16" in row.args[0] or "half" in row.fn.__name__ or "float32_s" in row.fn.__name__
    # half precision rounds between the original's steps; float32 sums in another order
    assert_same(row.fn.__name__, row.fn, new, args, 3e-2 if half else 5e-6)


def test_tables_are_as_large_as_promised() -> None:
    """Sixty spellings are found, as many are not, and only what is missed is wanted."""
    names = [row.fn.__name__ for row in SPELLINGS]
    assert len(set(names)) == len(names)
    assert sum(row.reason is None for row in SPELLINGS) >= 60
    assert len(MISSES) >= 60
    assert not any(row.wanted and row.reason is None for row in SPELLINGS)
