# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Every transformation of every style of writing, around a compiled function and inside one."""

from collections.abc import Callable
from typing import Any

import jax
import pytest

import tpjax
from tests.harness import assert_close, inputs
from tests.stax.functions import TOL, operators_of
from tests.stax.one_by_one import run_one_by_one
from tests.stax.styles import STYLES, Style
from tests.stax.transforms import TRANSFORMS
from tpjax.pallas.dispatch import record_choices

Fn = Callable[..., Any]


NOT_FOUND_AROUND = {
    "vmap over models": "Flax's norms then scale each model's rows by its own row, which no single "
    "norm does.",
}
"""Rows in which a rewrite of the transformed function does not find all, and why."""


def _as_written(fn: Fn) -> Fn:
    return fn


def _args(style: Style) -> tuple[Any, ...]:
    return (*style.start(), inputs("f32[2,4,8]", 7))


CELLS = [(name, style) for name, row in TRANSFORMS.items() for style in row.styles]


@pytest.mark.parametrize(("name", "style"), CELLS)
def test_G14_composes(name: str, style: str) -> None:
    transform, written = TRANSFORMS[name], STYLES[style]
    plain = (transform.plain or transform.of)(written.make(_as_written))
    fns = {"inside": transform.of(written.make(tpjax.compile))}
    if transform.order == 0 or style.startswith("plain"):
        # Equations of a derivative are alike however its function was written.
        fns["around"] = tpjax.compile(transform.of(written.make(_as_written)))
    chosen: dict[str, set[str]] = {}

    def run(*args: Any) -> dict[str, Any]:
        results = {"plain": plain(*args)}
        for where, fn in fns.items():
            with record_choices() as choices:
                results[where] = fn(*args)
            chosen[where] = {choice.op for choice in choices}
        return results

    args = _args(written)
    results, jaxpr = run_one_by_one(run, *args)
    tol = TOL if transform.order == 0 else 10 * TOL
    for where in fns:
        assert_close(f"{where}: {name}, {style}", results[where], results["plain"], tol)
    assert chosen["inside"] == written.ops
    if transform.order == 0 and name not in NOT_FOUND_AROUND:
        assert chosen["around"] == written.ops
        times = 2 * written.layers * transform.times
        assert operators_of(jaxpr) == dict.fromkeys(written.ops, times)


@pytest.mark.parametrize("style", STYLES)
def test_G14_eval_shape_and_export(style: str) -> None:
    args = _args(STYLES[style])
    plain, ours = (jax.jit(STYLES[style].make(wrap)) for wrap in (_as_written, tpjax.compile))
    assert jax.eval_shape(ours, *args) == jax.eval_shape(plain, *args)
    exported = jax.export.export(ours)(*args)
    assert str(exported.mlir_module()).count("tpjax_") >= 2
    quick = jax.jit(
        lambda *args: (exported.call(*args), plain(*args)),
        compiler_options={"xla_backend_optimization_level": 0},
    )
    actual, expected = quick(*args)
    assert_close(f"{style}, exported", actual, expected, TOL)
