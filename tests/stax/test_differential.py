# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Every array function of JAX gives the same plain and compiled: value, types and gradient."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpjax
from tests.fuzz.evaluation import EndlessError, Evaluator, same_bits
from tests.fuzz.oracle import Gradient, same_program
from tests.harness import assert_close
from tests.stax.calls import CALLS
from tests.stax.differential import LEFT_OUT, OLDER, calls_of, functions

FUNCTIONS = functions()
HALF = 6e-3
CLOSE = {"nn.standardize": 1e-6, "nn.dot_product_attention": 1e-6}
"""Functions that are operators of ours: to relative RMS, not to the bit."""

NEWEST = (0, 12)
"""The tables are those of this JAX; what an older one lacks is no fault."""


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    """Functions of NumPy's name warn of odd arguments; plain and compiled alike."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _compare(name: str, fn: Any, tame: Any, odd: Any) -> bool:
    """Compares plain and compiled; returns whether passes rewrote the function at all."""
    plain = jax.make_jaxpr(fn)(*tame)
    compiled = jax.make_jaxpr(tpjax.compile(fn))(*tame)
    assert compiled.out_avals == plain.out_avals, name  # shapes, dtypes, weak types
    if same_program(plain, compiled):
        return False
    evaluator = Evaluator()
    values = [[np.asarray(x) for x in jax.tree.leaves(args)] for args in (tame, odd)]
    for args in values:
        try:
            expected = evaluator(plain, *args)
        except EndlessError:  # JAX's own loop does not end for some odd numbers
            assert args is not values[0], name
            continue
        actual = evaluator(compiled, *args)
        if name in CLOSE:
            if np.isfinite(args[0]).all():
                half = expected[0].dtype == jnp.bfloat16
                assert_close(name, actual, expected, HALF if half else CLOSE[name])
            continue
        for x, y in zip(actual, expected, strict=True):
            assert same_bits(x, y), (name, x, y, plain, compiled)
    gradient = Gradient(plain, values[0], evaluator)
    if name not in CLOSE:
        gradient.compare(compiled)
    return True


def _run(module: str, *, every: bool) -> tuple[int, int]:
    called, rewritten, faults = 0, 0, []
    for name in FUNCTIONS:
        if not name.startswith(module + ".") or name in LEFT_OUT:
            continue
        calls = calls_of(name, FUNCTIONS[name], every=every)
        called += bool(calls)
        for kind in calls:
            try:
                rewritten += _compare(name, *calls[kind])
            except Exception as error:
                faults.append(f"{name}({kind}): {type(error).__name__}: {error}"[:2000])
    assert not faults, "\n".join(faults)
    return called, rewritten


MODULES = {"jnp": 230, "lax": 120, "nn": 25, "special": 40}
"""The modules, and how many functions of each are called at least."""
assert sum(MODULES.values()) >= 300


@pytest.mark.parametrize("module", MODULES)
def test_F03_every_function_is_the_same_compiled(module: str) -> None:
    called, rewritten = _run(module, every=False)
    assert called >= MODULES[module]
    assert rewritten > 3  # else nothing was compared


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_F03_every_function_with_all_operands(module: str) -> None:
    _run(module, every=True)


def test_the_tables_are_those_of_this_jax() -> None:
    """A function that JAX adds is called, or needs a row; a row for one that is gone must go."""
    for name, fn in FUNCTIONS.items():
        if name in LEFT_OUT:
            assert name not in CALLS, name
            continue
        assert calls_of(name, fn), (
            f"{name} takes none of the operands: give it a row in CALLS or LEFT_OUT"
        )
    if jax.__version_info__ >= NEWEST:
        rows = {*LEFT_OUT, *CALLS} - {*OLDER}
        assert rows <= set(FUNCTIONS), f"gone from JAX: {rows - set(FUNCTIONS)}"
