# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The command line: what it prints, and how it answers wrong ones."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import ROOT
from tpjax.__main__ import main
from tpjax.stax.shapes import parse_shapes
from tpjax.stax_passes import accuracy

MODULE = """
import jax, jax.numpy as jnp, tpjax

def norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale

def tree(p):
    return norm(p["x"], p["scale"])

def arguments():
    return ({"x": jnp.ones((2, 8)), "scale": jnp.ones(8)},)

tree.example = arguments

def branch(x):
    return x if x.sum() > 0 else -x

def attend(x):
    scores = jnp.einsum("bthd,bshd->bhts", x, x) / 8
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), x)

compiled = tpjax.compile(norm)

class Holder:
    norm = staticmethod(norm)

three = 3
"""


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cli_model.py").write_text(MODULE)
    (tmp_path / "cli_broken.py").write_text("1 / 0\n")
    (tmp_path / "cli_needy.py").write_text("import a_package_nobody_has\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("cli_model", "cli_broken", "cli_needy"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_as_a_command(tmp_path: Path) -> None:
    env = dict(os.environ, PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu")
    command = [sys.executable, "-m", "tpjax", "explain", "cli_model:norm"]
    shapes = ["--shapes", "f32[4, 128] scale=f32[128]"]
    done = subprocess.run(
        [*command, *shapes], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "rms_norm" in done.stdout
    assert "cli_model.py:5" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["cli_model:norm", "--shapes", "f32[4,128] f32[128]"],
        ["cli_model:Holder.norm", "--shapes", "f32[4,128] f32[128]", "--mode", "default"],
        ["cli_model:compiled", "--shapes", "f32[4,128] f32[128]"],
        ["cli_model:tree", "--example", "cli_model:arguments"],
        ["cli_model:tree"],
    ],
)
def test_json(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [site["op"] for site in report["sites"]] == ["rms_norm"]


def test_another_platform(capsys: pytest.CaptureFixture[str]) -> None:
    shapes = ["--shapes", "bf16[2,128,4,64]"]
    assert main(["explain", "cli_model:attend", *shapes, "--platform", "cuda", "--json"]) == 0
    (site,) = json.loads(capsys.readouterr().out)["sites"]
    assert site["label"] == "pallas"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["explain", "cli_modle:norm"], 2, "no module 'cli_modle' here. Did you mean 'cli_model'?"),
        (["explain", "cli_model:nrom"], 2, "cli_model has no 'nrom'. Did you mean 'norm'?"),
        (["explain", "cli_model"], 2, "expected module:function"),
        (["explain", "cli_model:three", "--shapes", "f32[]"], 2, "something to call; it is int"),
        (["explain", "cli_broken:f"], 2, "importing cli_broken raised ZeroDivisionError"),
        (["explain", "cli_needy:f"], 2, "importing cli_needy needs a_package_nobody_has"),
        (["explain", "cli_model:norm"], 2, "needs arguments: --shapes"),
        (["explain", "cli_model:norm", "--shapes", "f33[4]"], 2, "Did you mean 'f32'?"),
        (["explain", "cli_model:norm", "--shapes", "f32"], 2, 'must be like "f32[4,128]"'),
        (["explain", "cli_model:norm", "--shapes", "f32[4"], 2, 'must be like "f32[4,128]"'),
        (["explain", "cli_model:tree", "--mode", "exat"], 2, "Did you mean 'exact'?"),
        (["explain", "cli_model:tree", "--platform", "cudo"], 2, "Did you mean 'cuda'?"),
        (["explain", "cli_model:tree", "--jsn"], 2, "unrecognized arguments: --jsn"),
        (["rule"], 2, "unknown command 'rule'. Did you mean 'rules'?"),
        (["explian", "cli_model:tree"], 2, "unknown command 'explian'. Did you mean 'explain'?"),
        (["explain", "cli_model:branch", "--shapes", "f32[3]"], 1, "jax.lax.cond"),
        (["explain", "cli_model:norm", "--shapes", "f32[3]"], 1, "cannot be traced with these"),
    ],
)
def test_wrong_command_lines(
    arguments: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.count("\n") == 1


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "python -m tpjax explain mymodel:norm --shapes" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        main(["explain", "--help"])
    assert stopped.value.code == 0
    assert "dtype[size,size,...]" in capsys.readouterr().out


def test_ops(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops"]) == 0
    text = capsys.readouterr().out
    assert "flash_attention" in text
    assert main(["ops", "--json"]) == 0
    assert "rms_norm" in str(json.loads(capsys.readouterr().out))


def test_rules(capsys: pytest.CaptureFixture[str]) -> None:
    """Every rule of every pass, with pass, tier and contract."""
    assert main(["rules"]) == 0
    text = capsys.readouterr().out
    assert "E[x^2]" in text  # not taken for markup
    assert "convert_chain" in text
    assert main(["rules", "--json"]) == 0
    rows = {row["rule"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["attention"]["tier"] == "close"
    assert rows["norm"]["stage"] == "fuse_norm"
    assert "ulps" in rows["norm"]["contract"]
    assert rows["transpose_chain"]["lives_at"] == "tpjax.stax_passes.canonical:_transpose"


def test_rules_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = accuracy.CASES[0]._replace(dtypes=("bfloat16",), magnitudes=(1.0,))
    monkeypatch.setattr(accuracy.measured, "__defaults__", ((case,), 0))
    assert main(["rules", "--measure"]) == 0
    text = capsys.readouterr().out
    assert "rms_norm of 64; times 1" in text
    assert "bfloat16" in text
    assert main(["rules", "--measure", "--json"]) == 0
    (line,) = json.loads(capsys.readouterr().out)
    assert 0 < line["rewritten"]["value"] <= 0.51


def test_shapes() -> None:
    args, kwargs = parse_shapes(" f32[4, 128]  bool[] bfloat16[0] k=i32[2]")
    assert [(x.shape, str(x.dtype)) for x in args] == [
        ((4, 128), "float32"), ((), "bool"), ((0,), "bfloat16"),
    ]  # fmt: skip
    assert (kwargs["k"].shape, str(kwargs["k"].dtype)) == ((2,), "int32")
    assert parse_shapes("") == ((), {})
    for wrong in ("k=f32[2] f32[2]", "k=f32[] k=f32[]", "f32[2,,3]", "f32[-1]", "f32(3)"):
        with pytest.raises(ValueError, match=r"^shapes: "):
            parse_shapes(wrong)


def test_a_reader_that_has_enough_is_no_error() -> None:
    command = f"{shlex.quote(sys.executable)} -m tpjax rules --json | head -n 1"
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.stdout.strip() == "["
    assert done.stderr == ""
