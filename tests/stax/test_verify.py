# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""`verify` names the first wrong equation, shows it by a file, and leaves honest programs alone."""

import dataclasses
import inspect
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import pytest
from jax import lax

from tests.harness import inputs
from tests.stax_passes.test_attention_rewrites import B, D, H, T, out, scores, softmax, tri
from tpjax.core import _jax
from tpjax.stax.verification.verify import Difference, check
from tpjax.stax_passes import attention, fold
from tpjax.stax_passes.engine import Match, Recogniser, rewriting_pass
from tpjax.stax_passes.pipeline import CLEAN_UP, PASSES
from tpjax.stax_passes.sweep import ExactRule, sweeping_pass


def verified(
    fn: Any, args: tuple[Any, ...], passes: Any = PASSES, folder: Any = None
) -> Difference | None:
    """Returns what `check` says of the call, and fails where it could not say anything."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jaxpr = jax.make_jaxpr(fn)(*args)
        return check("mine", jaxpr, passes, jax.tree.leaves(args), folder=folder)


def found(fn: Any, args: tuple[Any, ...], passes: Any, folder: Any = None) -> Difference:
    """Returns the difference that must be there."""
    difference = verified(fn, args, passes, folder)
    assert difference is not None
    return difference


def line_of(fn: Any, text: str) -> str:
    """Returns file:line, as sources are written, of the line of `fn` that holds `text`."""
    lines, start = inspect.getsourcelines(fn)
    (at,) = [start + i for i, line in enumerate(lines) if text in line]
    return f"{os.path.relpath(inspect.getsourcefile(fn) or '')}:{at}"


def outcome(path: Path | str) -> tuple[int, str]:
    """Returns exit code and output of a reproducer, run by itself, far from this project."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(path)], cwd="/", env=env, capture_output=True, text=True, check=False
    )
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def replacing(primitive: str, build: Any, tier: Any = "close") -> Any:
    """Returns a pass that puts `build` in place of every equation of the primitive."""

    def extract(graph, node):
        return Match(node.outs[0], node.ins, build, frozenset())

    row = Recogniser(f"other_{primitive}", frozenset({primitive}), extract, tier, "")
    return rewriting_pass("others", (row,))


def swapping(primitive: str) -> Any:
    """Returns an exact pass with a fault: it swaps the operands of the primitive."""

    def start(level):
        def edit(level, eqn):
            if eqn.primitive.name != primitive:
                return eqn
            level.log.hit("swap", eqn)
            return eqn.replace(invars=eqn.invars[::-1])

        return edit

    return sweeping_pass("swap_operands", "", start, (ExactRule("swap", None),))


# -- planted faults -------------------------------------------------------------------------------


def wave(x: Any, y: Any) -> Any:
    a = x * 2
    b = jnp.sin(a)
    return (b + y).sum()


def test_F02_wrong_numbers_name_rule_equation_and_line(tmp_path: Path) -> None:
    wrong = replacing("sin", lambda x: jnp.sin(x) * 1.001)
    args = inputs("f32[8,16]", 0), inputs("f32[8,16]", 1)
    difference = found(wave, args, (CLEAN_UP, wrong), tmp_path)
    assert difference.rule == "other_sin"
    assert difference.primitive == "sin"
    assert "= sin" in difference.equation
    assert difference.source == line_of(wave, "b = jnp.sin")
    assert difference.where == ""
    assert 0.9e-3 < difference.max_rel < 1.1e-3
    message = difference.message("mine")
    for part in ("mine", "other_sin", difference.source, difference.equation, "Reproducer"):
        assert part in message
    assert message.count("Reproducer") == 1
    path = Path(difference.reproducer or "")
    assert path.parent == tmp_path
    text = path.read_text()
    assert "import tpjax" not in text
    assert "f32[1,16]" in text  # one row of the eight is enough
    code, shown = outcome(path)
    assert code == 1
    assert "instead of" in shown
    before, after = text.index("ORIGINAL = ("), text.index("REPLACEMENT = (")
    original = text[before : text.index("\n)\n", before)].replace("ORIGINAL", "REPLACEMENT")
    mended = tmp_path / "mended.py"
    mended.write_text(text[:after] + original + text[text.index("\n)\n", after) :])
    assert outcome(mended) == (0, "no difference\n")


def differences(x: Any, y: Any) -> Any:
    a = x + y
    b = a * 3.0
    c = b - y
    return jnp.exp(c)


def test_exact_pass_that_swaps_operands(tmp_path: Path) -> None:
    args = inputs("f32[4,8]", 0), inputs("f32[4,8]", 1)
    difference = found(differences, args, (CLEAN_UP, swapping("sub")), tmp_path)
    assert (difference.rule, difference.primitive) == ("swap_operands", "sub")
    assert difference.source == line_of(differences, "c = b - y")
    assert outcome(difference.reproducer or "")[0] == 1


def constants(x: Any) -> Any:
    two = jnp.full((), 2.0) * 3.0
    more = two + 1.0
    return x * more


def test_wrong_constant_fold_is_blamed_on_the_constant(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(fold.ELEMENTWISE, "mul", lambda x, y: (x * y + 0.5).astype(x.dtype))
    difference = found(constants, (inputs("f32[4]", 0),), PASSES, tmp_path)
    assert (difference.rule, difference.primitive) == ("fold_constants", "mul")
    assert difference.source == line_of(constants, "* 3.0")
    assert outcome(difference.reproducer or "")[0] == 1


def attend(q: Any, k: Any, v: Any) -> Any:
    s = scores(q, k)
    w = softmax(jnp.where(tri(), s, -1e30), -1)
    return out(w, v)


def test_mask_off_by_one_in_a_recogniser(tmp_path: Path, monkeypatch: Any) -> None:
    band_of = attention.band_of

    def off(*args: Any) -> Any:
        band = band_of(*args)
        return band and dataclasses.replace(band, right=(band.right and None) or 1)

    monkeypatch.setattr(attention, "band_of", off)
    args = tuple(inputs(f"f32[{B},{T},{H},{D}]", i) for i in range(3))
    difference = found(attend, args, (attention.fuse_attention,), tmp_path)
    assert (difference.rule, difference.primitive) == ("attention", "dot_general")
    assert difference.source.startswith("tests/stax_passes/test_attention_rewrites.py:")
    assert outcome(difference.reproducer or "")[0] == 1


def steps(x: Any, ts: Any) -> Any:
    def step(c: Any, t: Any) -> Any:
        late = jnp.exp(-t) - c
        return late, late.sum()

    return lax.scan(step, x, ts)


def test_fault_in_the_third_step_of_a_scan_only(tmp_path: Path) -> None:
    wrong = replacing("exp", lambda t: jnp.where(t < -2.5, jnp.exp(t) * 1.001, jnp.exp(t)))
    args = inputs("f32[4]", 0), jnp.arange(1.0, 5.0)
    difference = found(steps, args, (wrong,), tmp_path)
    assert difference.primitive == "exp"
    assert difference.source == line_of(steps, "jnp.exp(-t)")
    assert difference.where == f"in the scan of {line_of(steps, 'lax.scan')}, step 2"
    assert outcome(difference.reproducer or "")[0] == 1


@pytest.mark.parametrize("reverse", [False, True])
def test_last_step_of_a_long_scan(reverse: bool) -> None:
    def fn(x: Any) -> Any:
        return lax.scan(lambda c, t: (c + jnp.exp(t), None), x, ts, reverse=reverse)

    ts = jnp.arange(200.0)[:: -1 if reverse else 1] / 200
    wrong = replacing("exp", lambda t: jnp.where(t > 0.994, jnp.exp(t) * 1.001, jnp.exp(t)))
    difference = found(fn, (jnp.zeros(3),), (wrong,))
    assert difference.where.endswith(f"step {0 if reverse else 199}")


def in_bodies(kind: str, x: Any) -> Any:
    def body(x: Any) -> Any:
        y = jnp.sin(x)
        return y - x * 2

    match kind:
        case "jit":
            return jax.jit(body)(x)
        case "checkpoint":
            return jax.checkpoint(body)(x)
        case "cond":
            return lax.cond(x[0] > 1e9, jnp.cos, body, x)
        case "while":
            return lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, body(c[1])), (0, x))[1]
        case _:
            looped = lambda c, _: (jax.jit(jax.checkpoint(body))(c), None)  # noqa: E731
            return jax.jit(lambda x: lax.scan(looped, x, None, length=2)[0])(x)


@pytest.mark.parametrize("kind", ["jit", "checkpoint", "cond", "while", "nested"])
@pytest.mark.parametrize("how", ["rule", "sweep"])
def test_every_body_that_a_pass_enters(kind: str, how: str) -> None:
    wrong = replacing("sin", lambda x: x + 1) if how == "rule" else swapping("sub")
    difference = found(lambda x: in_bodies(kind, x), (inputs("f32[5]", 0),), (wrong,))
    text = "y = jnp.sin" if how == "rule" else "return y - x * 2"
    assert difference.source == line_of(in_bodies, text)
    small = kind == "jit" and how == "rule"  # a helper that matches look through
    assert (difference.where == "") == small
    assert difference.primitive == ("sin" if how == "rule" else "sub")


def test_first_of_two_faults_and_only_what_is_wrong() -> None:
    def fn(x: Any, y: Any) -> Any:
        a = jnp.tanh(x) - y
        return jnp.sin(a) - y

    args = inputs("f32[4]", 0), inputs("f32[4]", 1)
    passes = (replacing("tanh", jnp.tanh), swapping("sub"), replacing("sin", jnp.cos))
    difference = found(fn, args, passes)
    assert difference.source == line_of(fn, "a = jnp.tanh")
    assert difference.primitive == "sub"


def test_a_pass_that_keeps_no_variable() -> None:
    def retraced(jaxpr: Any) -> Any:
        def fn(*args: Any) -> Any:
            env = dict(zip(jaxpr.invars, args, strict=True))
            for eqn in jaxpr.eqns:
                ins = [a.val if isinstance(a, _jax.Literal) else env[a] for a in eqn.invars]
                outs = _jax.bind(eqn, *(ins[::-1] if eqn.primitive.name == "sub" else ins))
                env.update(zip(eqn.outvars, outs, strict=True))
            return [env[v] for v in jaxpr.outvars]

        result = _jax.retrace(fn, jaxpr)
        _, report = CLEAN_UP[0](jaxpr)
        return result, dataclasses.replace(report, name="retraced")

    args = inputs("f32[4,8]", 0), inputs("f32[4,8]", 1)
    difference = found(differences, args, (retraced,))
    assert (difference.rule, difference.primitive) == ("retraced", "sub")
    assert difference.source == line_of(differences, "c = b - y")


def test_a_fault_of_the_engine_is_found_too() -> None:
    """Every replacement is right, but the pass returns the results in the wrong order."""
    right = replacing("sin", jnp.sin)

    def wired(jaxpr: Any) -> Any:
        result, report = right(jaxpr)
        return result.replace(outvars=result.outvars[::-1]), report

    wired.rows = right.rows  # pyright: ignore
    difference = found(lambda x: (jnp.sin(x), jnp.cos(x)), (inputs("f32[9]", 0),), (wired,))
    assert (difference.rule, difference.primitive) == ("wired", "sin")


def test_exact_tier_is_every_bit() -> None:
    near = lambda x: jnp.sin(x) * jnp.float32(1 + 2**-23)  # noqa: E731
    args = inputs("f32[64]", 0), inputs("f32[64]", 1)
    assert verified(wave, args, (replacing("sin", near, "close"),)) is None
    difference = found(wave, args, (replacing("sin", near, "exact"),))
    assert "bits" in difference.detail


@pytest.mark.parametrize(
    ("dtype", "wrong"),
    [
        ("i32[6]", lambda x: -x + (x == x.max())),
        ("bf16[64]", lambda x: -x * 1.05),
        ("f32[64]", lambda x: jnp.where(x == jnp.nanmax(x), jnp.nan, -x)),
        ("f32[64]", lambda x: jnp.where(x == jnp.nanmax(x), jnp.inf, -x)),
        ("f32[4096]", lambda x: jnp.where(x == jnp.nanmax(x), -x * 1.001, -x)),
    ],
)
def test_every_kind_of_value(dtype: str, wrong: Any, tmp_path: Path) -> None:
    x = inputs(dtype, 3)
    x = jnp.where(jnp.arange(x.size) == 1, jnp.nan, x) if dtype.startswith("f") else x
    x = x.at[2].set(100)
    difference = found(lambda x: -x, (x,), (replacing("neg", wrong),), tmp_path)
    assert outcome(difference.reproducer or "")[0] == 1


def test_complex_keys_and_booleans(tmp_path: Path) -> None:
    key, z, p = jax.random.key(7), inputs("f32[4]", 0) + 1j, inputs("bool[8]", 0)

    def drawn(key: Any, z: Any, p: Any) -> Any:
        x = jax.random.normal(jax.random.split(key)[0], (4,))
        return x * jnp.conj(z), ~p

    assert verified(drawn, (key, z, p)) is None
    bits = replacing("random_split", lambda key: jax.random.split(jax.random.fold_in(key, 1)))
    difference = found(drawn, (key, z, p), (bits,), tmp_path)
    assert difference.primitive == "random_split"
    assert outcome(difference.reproducer or "")[0] == 1
    difference = found(drawn, (key, z, p), (replacing("conj", lambda z: z),))
    assert difference.primitive == "conj"
    difference = found(drawn, (key, z, p), (replacing("not", lambda p: p),), tmp_path)
    assert outcome(difference.reproducer or "")[0] == 1
