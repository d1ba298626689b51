# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""What `explain` says: sites, near misses, passes and cost, as tables and as stable plain data."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

import tpjax
from tests.harness import inputs
from tests.stax.functions import block, loss, norm, params
from tpjax.pallas import rms_norm
from tpjax.stax.explanation import SCHEMA_VERSION, spell
from tpjax.stax_passes.engine import rewriting_pass
from tpjax.stax_passes.unify import Rule

FILE = "tests/stax/functions.py"


def _args() -> Any:
    return params(), inputs("f32[12,16]", 9)


TABLE = inputs("f32[3,1]", 1)


def test_schema() -> None:
    report = tpjax.explain(block)(*_args()).as_dict()
    assert json.loads(json.dumps(report)) == report
    assert report["schema_version"] == SCHEMA_VERSION == 1
    assert set(report) == {
        "schema_version", "name", "sites", "near_misses", "passes", "cost", "constants", "lifted",
        "notes",
    }  # fmt: skip
    assert [site["op"] for site in report["sites"]] == ["flash_attention", "rms_norm"]
    for site in report["sites"]:
        assert set(site) == {"op", "label", "source", "implementation", "refused"}
        assert site["label"] == site["implementation"] == "xla"
        assert site["source"].rpartition(":")[0].endswith(FILE)
        assert all(set(r) == {"implementation", "reason"} for r in site["refused"])
    for one in report["passes"]:
        assert set(one) == {"name", "hits", "rules", "equations_before", "equations_after"}
    assert set(report["cost"]) == {"before", "after"}
    assert set(report["cost"]["before"]) == {"flops", "bytes", "equations"}
    before, after = report["cost"]["before"], report["cost"]["after"]
    assert before["equations"] == report["passes"][0]["equations_before"]
    assert after["equations"] == report["passes"][-1]["equations_after"] < before["equations"]


def test_kernels_of_another_platform_and_their_cost() -> None:
    x = jax.ShapeDtypeStruct((512, 1024), jnp.bfloat16)
    scale = jax.ShapeDtypeStruct((1024,), jnp.bfloat16)
    with tpjax.use(platform="cuda"):
        report = tpjax.explain(rms_norm)(x, scale).as_dict()
    (site,) = report["sites"]
    assert (site["label"], site["refused"]) == ("pallas", [])
    after = report["cost"]["after"]
    assert after["flops"] == 4 * 512 * 1024
    assert after["bytes"] == 2 * (2 * 512 * 1024 + 1024)

    def layers(x: jax.Array, scale: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, _: (rms_norm(h, scale), None), x, None, length=5)[0]

    with tpjax.use(platform="cuda"):
        five = tpjax.explain(layers)(x, scale).as_dict()["cost"]["after"]
    assert (five["flops"], five["bytes"]) == (5 * after["flops"], 5 * after["bytes"])


def test_shapes_will_do_and_nothing_runs() -> None:
    ran = []

    def watched(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: ran.append(1))
        return norm(x, x[0])

    report = tpjax.explain(watched)(jax.ShapeDtypeStruct((3, 16), jnp.float32))
    jax.effects_barrier()
    assert len(report.sites) == 1
    assert ran == []


def test_traced_anew_though_compiled_before() -> None:
    inner = tpjax.compile(norm)
    outer = tpjax.compile(jax.jit(lambda x: inner(x, x[0]) + 1))
    x = inputs("f32[3,16]", 0)
    for _ in range(2):
        outer(x)
        assert [site.op for site in outer.explain(x).sites] == ["rms_norm"]
        assert [site.op for site in tpjax.explain(outer)(x).sites] == ["rms_norm"]


def test_calls_by_name_are_sites_too() -> None:
    report = tpjax.explain(lambda x: rms_norm(x, None) + norm(x, x[0]))(inputs("f32[3,16]", 0))
    assert [site.op for site in report.sites] == ["rms_norm", "rms_norm"]
    assert __file__.endswith(report.sites[0].source.rpartition(":")[0])
    assert report.sites[1].source.rpartition(":")[0].endswith(FILE)


def test_a_loss_inside_a_train_step() -> None:
    compiled = tpjax.compile(loss)
    step = tpjax.explain(lambda p, x: jax.value_and_grad(compiled)(p, x))(*_args())
    assert sorted(site.op for site in step.sites) == ["flash_attention", "rms_norm"]


def test_nothing_recognised() -> None:
    report = tpjax.explain(lambda x: jnp.sin(x) + 1)(jnp.ones(3))
    assert report.as_dict()["sites"] == []
    assert "nothing recognised" in str(report)


def test_near_misses_have_a_reason() -> None:
    def over_rows(x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=0, keepdims=True) + 1e-6)

    report = tpjax.explain(over_rows)(inputs("f32[8,4]", 0))
    (miss,) = report.as_dict()["near_misses"]
    assert miss["source"].rpartition(":")[0].endswith("test_explain.py")
    assert "axis" in miss["reason"]
    assert "nothing recognised" in str(report)


def test_a_failed_rule_is_labelled_as_written() -> None:
    def refuse(x: Any) -> Any:
        raise ArithmeticError("planted")

    mine = rewriting_pass("mine", (Rule("sine", jnp.sin, refuse, num_args=1),))
    with pytest.warns(UserWarning, match="sine"):
        report = tpjax.explain(lambda x: jnp.sin(x), passes=(mine,))(1.0)
    (site,) = report.as_dict()["sites"]
    assert (site["op"], site["label"], site["implementation"]) == ("sine", "as written", None)
    assert "planted" in site["refused"][0]["reason"]


def test_tables() -> None:
    report = tpjax.compile(block).explain(*_args())
    text = str(report)
    parts = "rms_norm", "flash_attention", "xla", FILE, "fuse_norm", "FLOPs", "bytes, unfused"
    for part in parts:
        assert part in text, text
    assert "\x1b" not in text
    console = Console(width=200, record=True, force_terminal=True)
    with console.capture() as shown:
        console.print(report)
    assert "\x1b" in shown.get()
    assert "flash_attention" in shown.get()


def test_closed_over_arrays_are_listed() -> None:
    table, helper = inputs("f32[16]", 0), jax.jit(lambda x: x * TABLE)
    report = tpjax.explain(lambda x: helper(x * table))(jnp.ones(16))
    assert report.as_dict()["lifted"] == ["closure table: float32[16]"]
    assert "reads at each call: closure table" in str(report)
    assert report.as_dict()["constants"] == ["float32[3,1]"]
    assert "closes over" in str(report)


def test_spell() -> None:
    assert [spell(x) for x in (0.0, 999.0, 1.5e3, 2e13)] == ["0", "999", "1.5 k", "20 T"]
