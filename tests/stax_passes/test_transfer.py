# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Repeated layers are read once, and places that differ in anything a row looks at are not."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpjax
from tests.harness import assert_close, inputs
from tests.stax_passes.spellings import rewritten
from tpjax.stax_passes import engine
from tpjax.stax_passes.attention import ATTENTION
from tpjax.stax_passes.engine import Match, Recogniser, rewriting_pass
from tpjax.stax_passes.norms import NORM
from tpjax.stax_passes.pipeline import CLEAN_UP
from tpjax.stax_passes.unify import Rule

T, D, H, F = 8, 16, 2, 8
X = inputs(f"f32[2,{T},{D}]", 1)


@dataclasses.dataclass(eq=False)
class CountedRule(Rule):
    """A rule that keeps the nodes that it was tried at."""

    attempts: list[Any] = dataclasses.field(default_factory=list)

    def extract(self, graph: Any, node: Any) -> Any:
        self.attempts.append(node)
        return super().extract(graph, node)


def counted(row: Any) -> tuple[Any, list[Any]]:
    """Returns the row, and the list that grows by one at each attempt of it."""
    if isinstance(row, Rule):
        copy = CountedRule(row.name, row.pattern, row.replacement, num_args=row.num_args)
        return copy, copy.attempts
    attempts: list[Any] = []

    def extract(graph: Any, node: Any) -> Any:
        attempts.append(node)
        return row.extract(graph, node)

    return dataclasses.replace(row, extract=extract), attempts


def norm(x: Any, scale: Any, eps: float = 1e-6) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * scale


def block(x: Any, w: Any) -> Any:
    """A layer as one writes it: norms, causal attention, a gated MLP."""
    seen = jnp.tril(jnp.ones((T, T), bool))
    y = norm(x, w["scale"][0])
    q, k, v = (jnp.einsum("btd,dhf->bthf", y, w["qkv"][i]) for i in range(3))
    scores = jnp.einsum("bthf,bshf->bhts", q, k) / np.sqrt(F)
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), -1)
    x = x + jnp.einsum("bhts,bshf,dhf->btd", weights, v, w["out"])
    y = norm(x, w["scale"][1])
    return x + (jax.nn.silu(y @ w["up"]) * (y @ w["up"])) @ w["up"].T


def weights(layers: int) -> list[dict[str, Any]]:
    specs = {"scale": f"2,{D}", "qkv": f"3,{D},{H},{F}", "out": f"{D},{H},{F}", "up": f"{D},{D}"}
    return [
        {
            name: inputs(f"f32[{spec}]", 10 * i + j) * 0.3
            for j, (name, spec) in enumerate(specs.items())
        }
        for i in range(layers)
    ]


GATED = tpjax.rule(lambda a, b: jax.nn.silu(a) * b, lambda a, b: b * jax.nn.silu(a), name="gated")
PLUS = tpjax.rule(lambda x: x + 1, lambda x: x - 1, name="never")


@pytest.mark.parametrize("how", ["python", "jit"])
@pytest.mark.parametrize(
    ("row", "op", "hits"),
    [(ATTENTION, "flash_attention", 1), (NORM, "rms_norm", 2), (GATED, None, 1)],
)
def test_G15_equal_layers_are_read_once(how: str, row: Any, op: Any, hits: int) -> None:
    """Twelve layers take no more attempts than two, each is rewritten, and the values stay."""
    layer = jax.jit(block) if how == "jit" else block

    def net(x: Any, ws: Any) -> Any:
        for w in ws:
            x = layer(x, w)
        return x

    number = {}
    for layers in (2, 12):
        mine, attempts = counted(row)
        compiled = tpjax.compile(net, passes=(CLEAN_UP, rewriting_pass("mine", (mine,))))
        ws = weights(layers)
        fired = [hit for report in compiled.explain(X, ws).passes for hit in report.hits]
        assert len([h for h in fired if h.rule == row.name and h.op == op]) == hits * layers
        number[layers] = len(attempts)
        if how == "python" and layers == 2:
            assert_close("layers", compiled(X, ws), jax.jit(net)(X, ws), 1e-5)
            number[layers] = len(attempts) // 2  # the call is a second run of the pass
    assert number[12] == number[2] <= 12


def test_G15_what_a_rule_does_not_match_is_not_tried_again() -> None:
    """A rule that fits nowhere looks at each kind of place once."""

    def net(x: Any, ws: Any) -> Any:
        for w in ws:
            x = block(x, w)
        return x

    mine, attempts = counted(PLUS)
    for layers in (2, 12):
        attempts.clear()
        rewritten(net, rewriting_pass("mine", (mine,)), X, weights(layers))
        assert 0 < len(attempts) <= 6, layers


def found(fn: Callable[..., Any], rows: Any, *args: Any) -> tuple[list[Any], list[Any]]:
    _, report = rewritten(fn, rewriting_pass("mine", rows), *args)
    return [hit.op for hit in report.hits], [(m.source, m.reason) for m in report.near_misses]


def uneven(x: Any, ws: Any) -> Any:
    """Layers that differ in what a norm or a mask depends on."""
    total = 0.0
    for i, w in enumerate(ws):
        seen = jnp.tril(jnp.ones((T, T), bool), k=i % 3)
        x = norm(x, w["scale"][0], eps=(1e-6, 1e-5, 0.0)[i % 3])
        q, k, v = (jnp.einsum("btd,dhf->bthf", x, w["qkv"][j]) for j in range(3))
        scores = jnp.einsum("bthf,bshf->bhts", q, k) / (np.sqrt(F) + i % 2)
        p = jax.nn.softmax(jnp.where(seen, scores, -1e30), -1)
        total += p.sum() if i == 4 else 0.0
        x = x + jnp.einsum("bhts,bshf,dhf->btd", p, v, w["out"])
        x = (
            norm(x, w["scale"][1])
            if i != 3
            else x * jax.lax.rsqrt(jnp.mean(x * w["scale"][1], -1, keepdims=True) ** 2 + 1e-6)
        )
    return x, total


def test_places_that_differ_are_read_on_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without carrying over: the same hits, near misses and values."""
    args = X, weights(7)
    rows = (ATTENTION, NORM, GATED)
    with_transfer = found(uneven, rows, *args)
    new, _ = rewritten(uneven, rewriting_pass("mine", rows), *args)
    monkeypatch.setattr(engine, "MAX_ATTEMPTS", 0)
    assert with_transfer == found(uneven, rows, *args)
    assert len(set(with_transfer[0])) == 2
    assert any("also used" in reason for _, reason in with_transfer[1])
    assert any("eps is 0" in reason for _, reason in with_transfer[1])
    assert_close("uneven", jax.jit(new)(*args), jax.jit(uneven)(*args), 1e-5)


def _squares(graph: Any, node: Any) -> Any:
    if node.ins[0] != node.ins[1]:
        return None
    return Match(node.outs[0], node.ins[:1], jnp.square, frozenset())


def test_one_value_in_place_of_two_is_another_place() -> None:
    """x * y and x * x are alike in all but that, in whichever order they stand."""
    row = Recogniser("squares", frozenset({"mul"}), _squares, "exact", "")
    for fn in (lambda x, y: (x * y) + (x * x), lambda x, y: (x * x) + (x * y)):
        new, report = rewritten(fn, rewriting_pass("mine", (row,)), X, X + 1)
        assert len(report.hits) == 1
        assert_close("squares", new(X, X + 1), fn(X, X + 1), 1e-6)


def test_a_constant_is_part_of_the_place() -> None:
    """Arrays that are equal in shape alone are no reason to carry over."""
    tables = [np.array([i, 1, 2], np.float32) for i in range(4)]

    def scaled(graph: Any, node: Any) -> Any:
        table = graph.known.get(node.ins[1])
        factor = None if table is None else float(np.asarray(table)[0])
        return Match(node.outs[0], node.ins[:1], lambda x: x * factor, frozenset())

    def fn(x: Any) -> Any:
        for table in tables:
            x = jnp.sin(x) * table
        return x

    row = Recogniser("scaled", frozenset({"mul"}), scaled, "close", "")
    new, report = rewritten(fn, rewriting_pass("mine", (row,)), jnp.ones(3))
    assert len(report.hits) == 4
    expected = jnp.ones(3)
    for i in range(4):
        expected = jnp.sin(expected) * i
    assert_close("scaled", new(jnp.ones(3)), expected, 1e-6)


def test_reasons_name_the_lines_of_their_own_place() -> None:
    """A near miss is carried over within a line; on another line it is read anew."""

    def fn(x: Any, y: Any) -> Any:
        first = jnp.exp(jnp.sin(x)) + jnp.sin(x)
        second = jnp.exp(jnp.sin(y)) + jnp.sin(y)
        return first + second

    rule = tpjax.rule(lambda x: jnp.exp(jnp.sin(x)), jnp.cos)
    jaxpr = jax.make_jaxpr(fn)(X, X)
    for run in CLEAN_UP:
        jaxpr, _ = run(jaxpr)
    _, report = rewriting_pass("mine", (rule,))(jaxpr)
    line = fn.__code__.co_firstlineno
    assert [int(m.source.rsplit(":")[-1]) for m in report.near_misses] == [line + 1, line + 2]
    assert all(m.source in m.reason for m in report.near_misses)
