# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Decisions kept between processes: what finds them, what they save, that none does harm."""

import contextlib
import json
import platform
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tpjax
from tests.harness import inputs
from tests.stax.functions import norm
from tpjax.core import store as stores
from tpjax.core.store import Store
from tpjax.pallas.dispatch import use
from tpjax.stax_passes import decisions
from tpjax.stax_passes.decisions import KIND, ingredients, optimize_warm
from tpjax.stax_passes.fold import fold_constants
from tpjax.stax_passes.pipeline import CLEAN_UP, PASSES, optimize
from tpjax.stax_passes.report import Report
from tpjax.stax_passes.rules import rule, with_rules


def program(x: Any, s: Any) -> Any:
    """A program in which passes of every kind find something, and something nearly fits."""
    y = norm(x * 1.0, s) + norm(x, s)
    y = y + jnp.exp(jnp.float32(0)) * (y - jnp.max(y, -1, keepdims=True))
    return jnp.where(True, jax.nn.softmax(y, -1) @ y.T, 0.0), jnp.float32(1) / jnp.float32(0)


ARGS = inputs("f32[4,64]", 0), inputs("f32[64]", 1)
JAXPR = jax.make_jaxpr(program)(*ARGS)


@pytest.fixture
def store(tmp_path) -> Iterator[Store]:
    """Makes a store the process's."""
    made = Store(tmp_path)
    stores.activate(made)
    yield made
    stores.activate(None)


@pytest.fixture
def runs(monkeypatch) -> list[str]:
    """Collects the names of the passes that are run."""
    names: list[str] = []
    original = decisions.take_step

    def step(jaxpr: Any, run: Any) -> Any:
        names.append(run.__name__)
        return original(jaxpr, run)

    monkeypatch.setattr(decisions, "take_step", step)
    return names


def entries(store: Store) -> list[Any]:
    """Returns the files of the entries."""
    folder = store.folder / KIND
    return sorted(folder.iterdir()) if folder.exists() else []


def same(found: Any, wanted: Any) -> None:
    """Asserts that two results of `optimize` are the same."""
    assert str(found[0]) == str(wanted[0])
    assert found[1] == wanted[1]


def test_the_second_time_does_less_and_finds_the_same(store, runs):
    wanted = optimize(JAXPR)
    same(optimize_warm(JAXPR, PASSES), wanted)
    first = len(runs)
    runs.clear()
    same(optimize_warm(JAXPR, PASSES), wanted)
    assert 0 < len(runs) < first / 2
    assert any(report.near_misses for report in wanted[1])
    assert any(hit.op for report in wanted[1] for hit in report.hits)


def test_types_are_not_checked_again(store, monkeypatch):
    optimize_warm(JAXPR, PASSES)
    monkeypatch.setattr(decisions, "fault_of", lambda *a: pytest.fail("checked"))
    optimize_warm(JAXPR, PASSES)


def test_without_a_store_nothing_is_asked(monkeypatch):
    monkeypatch.setattr(decisions, "fingerprint", lambda *a: pytest.fail("asked"))
    same(optimize_warm(JAXPR, PASSES), optimize(JAXPR))


def test_verify_looks_at_everything(store):
    optimize_warm(JAXPR, PASSES, verify=True)
    assert entries(store) == []


def _mesh() -> Any:
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",)))


def _patched(where: Any, name: str, value: Any) -> Callable[[], Any]:
    @contextlib.contextmanager
    def block() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(where, name, value)
            yield

    return block


_H200 = SimpleNamespace(platform="cpu", device_kind="another")
CHANGES: dict[str, tuple[str, Callable[[], Any]]] = {
    "x64": ("flags", lambda: jax.enable_x64(True)),
    "precision": ("flags", lambda: jax.default_matmul_precision("highest")),
    "promotion": ("flags", lambda: jax.numpy_dtype_promotion("strict")),
    "implementation": ("use", lambda: use(implementation="xla")),
    "platform": ("target", lambda: use(platform="cuda")),
    "mesh": ("mesh", _mesh),
    "jax": ("jax", _patched(jax, "__version__", "0.99")),
    "jaxlib": ("jaxlib", _patched(decisions, "jaxlib_version", "0.99")),
    "tpjax": ("tpjax", _patched(tpjax, "__version__", "0.99")),
    "python": ("python", _patched(platform, "python_version", lambda: "3.99")),
    "source": ("source", _patched(stores, "code_of", lambda *rooms: "other")),
    "device": ("device", _patched(jax, "devices", lambda *a: [_H200])),
}


@pytest.mark.parametrize("what", CHANGES)
def test_F05_a_change_of_anything_misses(what, store, runs):
    _, change = CHANGES[what]
    optimize_warm(JAXPR, PASSES)
    with change():
        optimize_warm(JAXPR, PASSES)
        assert len(entries(store)) == 2
        runs.clear()
        optimize_warm(JAXPR, PASSES)
        optimize_warm(JAXPR, PASSES, options="exact")
    optimize_warm(JAXPR, PASSES)
    assert len(entries(store)) == 3


def test_F05_every_ingredient_is_changed_once():
    before = ingredients(PASSES)
    tested = {"passes", "options"}  # below
    for name, change in CHANGES.values():
        with change():
            after = ingredients(PASSES)
        assert before[name] != after[name], name
        tested.add(name)
    assert tested == set(before)


def _rule(number: float) -> Any:
    return rule(lambda x: x * 3.0, lambda x: x * number + 0.0, name="mine")


_FIVE = rule(lambda x: x * 5.0, lambda x: x * 5.0, name="mine")
PASS_LISTS = {
    "as it is": PASSES,
    "one less": PASSES[:-1],
    "one less in a group": tuple(p[:-1] if isinstance(p, tuple) else p for p in PASSES),
    "another order": tuple(reversed(PASSES)),
    "a group is flat": tuple(q for p in PASSES for q in (p if isinstance(p, tuple) else (p,))),
    "exact": (CLEAN_UP,),
    "none": (),
    "a rule": with_rules(PASSES, (_rule(3.0),)),
    "a rule that closes over another number": with_rules(PASSES, (_rule(4.0),)),
    "another pattern": with_rules(PASSES, (_FIVE,)),
    "two rules": with_rules(PASSES, (_rule(3.0), _rule(4.0))),
}  # fmt: skip


def test_F05_a_changed_pass_list_misses(store):
    for count, (name, passes) in enumerate(PASS_LISTS.items(), 1):
        optimize_warm(JAXPR, passes)
        assert len(entries(store)) == count, name
    for passes in PASS_LISTS.values():
        same(optimize_warm(JAXPR, passes), optimize(JAXPR, passes))
    assert len(entries(store)) == len(PASS_LISTS)


def test_F05_another_program_misses(store):
    optimize_warm(JAXPR, PASSES)
    for other in (ARGS[0], ARGS[0][:2].astype(jnp.bfloat16)):
        optimize_warm(jax.make_jaxpr(program)(other[:3], ARGS[1]), PASSES)
    assert len(entries(store)) == 3


def _wrong(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    def do(kept: bytes) -> bytes:
        found = json.loads(kept)
        change(found)
        return json.dumps(found).encode()

    return do


def _nothing_found(found: dict[str, Any]) -> None:
    for step in found["steps"]:
        step[1] = 0


def _set(index: int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(found: dict[str, Any]) -> None:
        step = next(s for s in found["steps"] if s[1])
        step[index] = value

    return change


WRONG = {
    "nothing found": _wrong(_nothing_found),
    "another number of hits": _wrong(_set(1, 77)),
    "another pass": _wrong(_set(0, "no_such_pass")),
    "other equations": _wrong(_set(3, 1)),
    "another result": _wrong(lambda found: found.update(result="0" * 64)),
    "too few": _wrong(lambda found: found["steps"].pop()),
    "too many": _wrong(lambda found: found["steps"].append(found["steps"][-1])),
    "a step too short": _wrong(lambda found: found["steps"][0].pop()),
    "no steps": _wrong(lambda found: found.pop("steps")),
    "no json": lambda kept: kept[:-1],
    "no text": lambda kept: b"\xff\xfe",
    "a list": lambda kept: b"[]",
}


@pytest.mark.parametrize("what", WRONG)
def test_F05_wrong_decisions_change_nothing(what, store):
    wanted = optimize_warm(JAXPR, PASSES)
    (path,) = entries(store)
    key = path.name.split(".")[0]
    kept = store.get(KIND, key)
    assert kept is not None
    store.put(KIND, key, WRONG[what](kept))
    with pytest.warns(UserWarning, match="does not fit its program") as caught:
        same(optimize_warm(JAXPR, PASSES), wanted)
    assert len(caught) == 1
    assert str(path) in str(caught[0].message)
    assert store.get(KIND, key) == kept, "made again"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(optimize_warm(JAXPR, PASSES), wanted)


def test_a_pass_of_somebody_else_always_runs(store):
    calls = []

    def theirs(jaxpr: Any) -> Any:
        calls.append(jaxpr)
        return jaxpr, Report("theirs", (), (), len(jaxpr.eqns), len(jaxpr.eqns))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        theirs_last = (*PASSES, theirs)
        wanted = optimize(JAXPR, theirs_last)
        for _ in range(2):  # it closes over a list of jaxprs, whose value is told by no words
            same(optimize_warm(JAXPR, theirs_last), wanted)
    assert entries(store) == []
    assert len(calls) == 3


def test_a_pass_of_somebody_else_is_told_by_its_code(store, runs):
    def make(number: float) -> Any:
        def theirs(jaxpr: Any) -> Any:
            return jaxpr, Report("theirs", (), (), int(number), int(number))

        return theirs

    for count, number in enumerate((1.0, 2.0), 1):
        for _ in range(2):
            runs.clear()
            optimize_warm(JAXPR, (CLEAN_UP, make(number)))
            assert runs[-1] == "theirs"
        assert len(entries(store)) == count


FACTOR = 3.0


def test_a_rule_is_told_by_the_numbers_it_reads_from_its_module(store, monkeypatch):
    triple = rule(lambda x: jnp.sin(x) * 2, lambda x: x * FACTOR, name="triple")
    jaxpr = jax.make_jaxpr(lambda x: jnp.sin(x) * 2)(1.0)
    for count, factor in enumerate((3.0, 5.0), 1):
        monkeypatch.setitem(globals(), "FACTOR", factor)
        result, _ = optimize_warm(jaxpr, with_rules(PASSES, (triple,)))
        assert factor in [getattr(v, "val", None) for eqn in result.eqns for v in eqn.invars]
        assert len(entries(store)) == count  # no entry of the other number is found


def test_what_failed_is_not_kept(store):
    def broken(jaxpr: Any) -> Any:
        raise ZeroDivisionError

    failing = rule(lambda x: x * 1.5, lambda x: 1 / 0, name="failing")
    jaxpr = jax.make_jaxpr(lambda x: x * 1.5)(1.0)
    for passes in ((CLEAN_UP, broken), with_rules(PASSES, (failing,))):
        with pytest.warns(UserWarning, match=r"ZeroDivisionError"):
            optimize_warm(jaxpr, passes)
    assert entries(store) == []


def test_a_pass_that_breaks_the_types_is_left_out_and_nothing_is_kept(store):
    def breaks(jaxpr: Any) -> Any:
        count = len(jaxpr.eqns)
        wrong = [e.replace(outvars=e.invars[:1]) for e in jaxpr.eqns[:1]]
        return jaxpr.replace(eqns=[*wrong, *jaxpr.eqns[1:]]), Report("breaks", (), (), count, count)

    with pytest.warns(UserWarning, match="the pass breaks is left out"):
        found = optimize_warm(JAXPR, (breaks, fold_constants))
    assert len(found[0].eqns) > 1
    assert entries(store) == []


def test_lines_are_those_of_the_code_now(store):
    """The same code elsewhere is another program: reports name its lines."""
    source = "def fn(x):\n    return x * rsqrt((x * x).mean(-1, keepdims=True) + eps), 1 / zero()\n"
    lines = []
    for blank in ("", "\n\n"):
        scope: dict[str, Any] = {
            "rsqrt": jax.lax.rsqrt,
            "zero": lambda: jnp.float32(0),
            "eps": 1e-6,
        }
        exec(compile(blank + source, "mine.py", "exec"), scope)
        for _ in range(2):
            _, reports = optimize_warm(jax.make_jaxpr(scope["fn"])(ARGS[0]), PASSES)
            lines.append({m.source for r in reports for m in (*r.hits, *r.near_misses)})
    assert len(entries(store)) == 2
    assert lines[0] == lines[1] == {"mine.py:2"}
    assert lines[2] == lines[3] == {"mine.py:4"}
