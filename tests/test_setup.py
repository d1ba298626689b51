# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""tools/setup.sh on machines of every kind, with stand-ins for Python, pip and uv that only log."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import ROOT

TOOLS = ("sh", "dirname", "sed", "cat", "cksum", "rm", "mkdir", "cp", "chmod")
"""All that the script may need from a bare machine."""

PYTHON = """#!/bin/sh
# Answers as the Python {version} that it stands in for.
echo "python {version} $*" >>"$LOG"
case "$*" in
*version_info*) exec "{real}" -c "
import sys
sys.version_info, sys.executable = ({numbers}), '$0'
exec(sys.argv[1])" "$2" ;;
"-m venv "*)
    mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && chmod +x "$3/bin/python" ;;
*"pip install"*"$FAIL"*) [ -z "$FAIL" ] ;;
*) exit 0 ;;
esac
"""
UV = """#!/bin/sh
echo "uv $*" >>"$LOG"
case "$*" in
venv*) for last; do :; done
    mkdir -p "$last/bin" && printf '#!/bin/sh\\n' >"$last/bin/python"
    chmod +x "$last/bin/python" ;;
esac
"""


class Machine:
    """A copy of what the script reads, a PATH of its own, and a log of what was called."""

    def __init__(self, folder: Path):
        self.tree, self.bin, self.log = folder / "tree", folder / "bin", folder / "log"
        self.home = folder / "home"
        for made in (self.tree / "tools", self.tree / "tpjax", self.bin, self.home):
            made.mkdir(parents=True)
        for name in ("tools/setup.sh", "pyproject.toml", "tpjax/__init__.py"):
            shutil.copy(ROOT / name, self.tree / name)
        (self.tree / "requirements.lock").write_text("jax==0.12.9\njaxlib==0.12.9 ; a\nflax==1\n")
        (self.tree / "requirements-cuda.lock").write_text(
            "jax==0.12.9\njax-cuda13-plugin==0.12.9\n"
        )
        for name in TOOLS:
            (self.bin / name).symlink_to(str(shutil.which(name)))

    def add(self, path: str, text: str) -> None:
        """Puts a program on the machine; a bare name goes on PATH."""
        file = self.home / path if "/" in path else self.bin / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)

    def add_python(self, path: str, version: str = "3.12") -> None:
        """Puts an interpreter on the machine; the real one answers for its version."""
        numbers = version.replace(".", ", ")
        self.add(path, PYTHON.format(version=version, numbers=numbers, real=sys.executable))

    def setup(self, *args: str, **env: str) -> tuple[int, list[str], str]:
        """Runs the script; returns its exit code, the lines it wrote and what it called."""
        self.log.write_text("")
        base = {"PATH": str(self.bin), "HOME": str(self.home), "LOG": str(self.log), "FAIL": ""}
        done = subprocess.run(
            [self.tree / "tools/setup.sh", *args],
            env=base | env,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, (done.stdout + done.stderr).splitlines(), self.log.read_text()

    @property
    def venv(self) -> Path:
        return self.tree / ".venv"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


SHIM = "#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n"


def test_a_missing_python_is_one_clear_line(machine: Machine):
    machine.add("python3.12", SHIM)
    machine.add_python("python3", "3.11")
    code, lines, _ = machine.setup()
    assert (code, len(lines)) == (1, 1)
    assert "Python 3.12 or newer" in lines[0]
    assert "not found" in lines[0]
    assert not machine.venv.exists()


@pytest.mark.parametrize(
    ("path", "env"),
    [
        ("python3.12", {}),
        ("python3.13", {}),
        ("python3.14", {}),
        ("python3", {}),
        (".pyenv/versions/3.12.1/bin/python", {}),
        (".pyenv/versions/3.13.0/bin/python", {}),
        ("elsewhere/versions/3.12.7/bin/python", {"PYENV_ROOT": "{home}/elsewhere"}),
        ("own/python", {"PYTHON": "{home}/own/python"}),
    ],
)
def test_python_is_found(machine: Machine, path: str, env: dict[str, str]):
    machine.add("python3.12" if path != "python3.12" else "python3.13", SHIM)
    machine.add_python(path)
    code, lines, log = machine.setup(**{k: v.format(home=machine.home) for k, v in env.items()})
    assert code == 0, lines
    assert "-m venv .venv" in log
    assert "-m pip install -qq -r .venv/requirements.txt" in log
    assert "-m pip install -qq --no-deps -e ." in log


def test_an_old_python_is_passed_over(machine: Machine):
    machine.add_python("python3", "3.11")
    machine.add_python(".pyenv/versions/3.13.0/bin/python", "3.13")
    code, lines, log = machine.setup()
    assert code == 0
    assert lines[0].endswith(f"with {machine.home}/.pyenv/versions/3.13.0/bin/python")
    assert "python 3.13 -m venv .venv" in log


def test_the_named_version_comes_first(machine: Machine):
    for version in ("3.14", "3.13", "3.12"):
        machine.add_python(f"python{version}", version)
    _, _, log = machine.setup()
    assert "python 3.12 -m venv" in log


def test_a_second_call_does_nothing(machine: Machine):
    machine.add_python("python3.12")
    assert machine.setup()[0] == 0
    code, lines, log = machine.setup()
    assert (code, lines) == (0, [])
    assert "pip" not in log
    assert "venv" not in log.replace("sys, venv", "")


@pytest.mark.parametrize("name", ["pyproject.toml", "requirements.lock", "tools/setup.sh"])
def test_a_changed_file_installs_again(machine: Machine, name: str):
    machine.add_python("python3.12")
    machine.setup()
    with (machine.tree / name).open("a") as file:
        file.write("\n# changed\n")
    code, _, log = machine.setup()
    assert code == 0
    assert "pip install" in log
    assert "-m venv" not in log
    assert machine.setup()[2].count("pip install") == 0


def test_a_new_version_installs_again(machine: Machine):
    machine.add_python("python3.12")
    machine.setup()
    (machine.tree / "tpjax/__init__.py").write_text('__version__ = "9.9.9"\n')
    assert "pip install" in machine.setup()[2]


def test_a_broken_environment_is_built_again(machine: Machine):
    machine.add_python("python3.12")
    machine.setup()
    (machine.venv / "bin/python").write_text("#!/bin/sh\nexit 1\n")
    (machine.venv / "left over").touch()
    code, lines, log = machine.setup()
    assert code == 0
    assert "building it again" in lines[0]
    assert "-m venv .venv" in log
    assert not (machine.venv / "left over").exists()


def test_an_interrupted_installation_fails_and_is_built_again(machine: Machine):
    machine.add_python("python3.12")
    code, lines, _ = machine.setup(FAIL="requirements.txt")
    assert code == 1
    assert "the next call starts afresh" in lines[-1]
    assert not (machine.venv / "tpjax-stamp").exists()
    code, lines, log = machine.setup()
    assert code == 0
    assert "building it again" in lines[0]
    assert "-m venv .venv" in log


def test_uv_is_used_where_it_is(machine: Machine):
    machine.add_python("python3.12")
    machine.add("uv", UV)
    code, _, log = machine.setup()
    assert code == 0
    assert f"--python {machine.bin}/python3.12 .venv" in log
    call = "uv pip install --quiet --compile-bytecode --python .venv/bin/python"
    assert f"{call} -r .venv/requirements.txt" in log
    assert f"{call} --no-deps -e ." in log
    assert "-m pip install" not in log
    assert machine.setup()[2].count("uv pip") == 0


def test_uv_may_fetch_a_python(machine: Machine):
    machine.add("uv", UV)
    assert machine.setup()[0] == 0
    machine.add("uv", "#!/bin/sh\nexit 1\n")
    shutil.rmtree(machine.venv)
    code, lines, _ = machine.setup()
    assert (code, len(lines)) == (1, 1)
    assert "Python 3.12 or newer" in lines[0]


def test_the_oldest_jax_replaces_the_newest(machine: Machine):
    machine.add_python("python3.12")
    assert machine.setup(".venv-oldest", "oldest")[0] == 0
    pins = (machine.tree / ".venv-oldest/requirements.txt").read_text()
    assert pins == "jax==0.11.2\njaxlib==0.11.2 ; a\nflax==1\n"


def test_a_gpu_brings_the_cuda_packages(machine: Machine):
    machine.add_python("python3.12")
    machine.add("nvidia-smi", "#!/bin/sh\necho 'GPU 0: NVIDIA H200'\n")
    machine.setup()
    assert "cuda13" in (machine.venv / "requirements.txt").read_text()
    machine.setup(CUDA="0")
    assert "cuda13" not in (machine.venv / "requirements.txt").read_text()
    os.remove(machine.bin / "nvidia-smi")
    machine.setup(CUDA="1")
    assert "cuda13" in (machine.venv / "requirements.txt").read_text()
