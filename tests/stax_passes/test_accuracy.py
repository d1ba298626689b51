# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The bounds that close rules state, held to float64 on the data of `python -m tpjax rules`."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.harness import assert_close
from tests.stax_passes.spellings import rewritten
from tpjax.stax_passes import accuracy
from tpjax.stax_passes.accuracy import CASES, broken, close_rules, measured
from tpjax.stax_passes.attention import fuse_attention
from tpjax.stax_passes.norms import fuse_norm

QUICK = [
    case._replace(dtypes=case.dtypes[:2], magnitudes=case.magnitudes[-1:])
    for case in CASES
    if case.what.endswith(("norm of 64", "rms_norm of 256", "4096, mean 30 deviations", "16 keys"))
]


def test_every_close_rule_states_bounds_and_is_measured() -> None:
    rules = close_rules()
    assert {case.rule for case in CASES} == set(rules)
    for row in rules.values():
        assert {bound.dtype for bound in row.ulps} == set(accuracy.DTYPES), row.name


def _hold(case: accuracy.Case, seed: int) -> None:
    for line in measured((case,), seed):
        assert not broken(line, close_rules()[case.rule].ulps)


@pytest.mark.parametrize("case", QUICK, ids=[case.what for case in QUICK])
def test_bounds_hold(case: accuracy.Case) -> None:
    _hold(case, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=[case.what for case in CASES])
def test_bounds_hold_on_long_rows_and_more_seeds(case: accuracy.Case) -> None:
    for seed in (2, 3):
        _hold(case, seed)


@pytest.mark.parametrize(
    ("what", "dtype", "wrong"),
    [
        ("rms_norm of 64", "float32", 1e-5), ("rms_norm of 64", "bfloat16", 0.01),
        ("256 queries, 256 keys", "float32", 1e-4), ("256 queries, 256 keys", "bfloat16", 0.03),
    ],
)  # fmt: skip
def test_a_planted_error_breaks_the_bound(
    what: str, dtype: str, wrong: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    (case,) = [case for case in CASES if case.what == what]
    fn = lambda *x: (case.fn(*x).astype(jnp.float32) * (1 + wrong)).astype(dtype)  # noqa: E731
    monkeypatch.setattr(accuracy, "_rewritten", lambda case, args: (fn, "planted"))
    (line,) = measured((case._replace(dtypes=(dtype,), magnitudes=(1.0,)),))
    assert broken(line, close_rules()[case.rule].ulps)


def _attend(mask: Any, query: Any, key: Any, value: Any) -> Any:
    scores = jnp.einsum("td,sd->ts", query, key) / 8
    scores = jnp.where(mask, scores, -jnp.inf)
    top = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - top)
    return (weights / weights.sum(-1, keepdims=True)) @ value


def test_attention_hides_what_the_contract_says() -> None:
    """No key: 0 where the original gives NaN. A hidden NaN stays hidden; a seen one is NaN."""
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.standard_normal((4, 64)), jnp.float32) for _ in range(3))
    mask = jnp.asarray([[1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 1, 0], [0, 0, 1, 0]], bool)
    value = value.at[3, 0].set(jnp.nan)
    new, report = rewritten(_attend, fuse_attention, mask, query, key, value)
    assert len(report.hits) == 1
    out, old = new(mask, query, key, value), _attend(mask, query, key, value)
    assert np.isnan(old[:, 0]).all()
    assert np.isnan(old[1]).all()
    assert np.isnan(out[0, 0])
    assert_close("no key", out[1], jnp.zeros(64), 0)
    assert_close("hidden NaN", out[2, 1:], old[2, 1:], 1e-6)
    assert np.isfinite(out[2:]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_norms_keep_what_is_not_finite_in_its_row(bad: float) -> None:
    def norm(x):
        return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)

    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 8)), jnp.float32).at[1, 2].set(bad)
    new, report = rewritten(norm, fuse_norm, x)
    assert len(report.hits) == 1
    assert (np.isnan(new(x)) == np.isnan(norm(x))).all()
    assert_close("other rows", new(x)[::2], norm(x)[::2], 1e-6)
