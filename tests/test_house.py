# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Holds the house rules (`tests.house`) on the sources, and on faults planted for each of them."""

import pytest

from tests.house import (
    MAX_FILE_LINES,
    MAX_FUNCTION_LINES,
    RULES,
    SPDX,
    Rule,
    Source,
    files_are_short,
    files_name_their_licence,
    functions_are_short,
    imports_point_down,
    internals_stay_in_their_modules,
    modules_differ_from_their_exports,
    no_path_of_one_machine,
    promises_have_an_issue,
    public_names_have_docstrings,
    sources,
    the_harness_compares,
)


def _name(rule: Rule) -> str:
    return rule.__name__


@pytest.mark.parametrize("rule", RULES, ids=_name)
def test_house(rule: Rule):
    faults = [f"{s.path}:{line}: {note}" for s in sources() for line, note in rule(s)]
    assert not faults, f"{rule.__doc__}\n" + "\n".join(faults)


def test_sources_are_found():
    paths = {s.path for s in sources()}
    assert {"tests/test_house.py", "tpjax/core/operator.py", "Makefile", ".ci/run"} <= paths


def _long_function(comment: str) -> str:
    return f"def launch():{comment}\n" + "    x = 1\n" * MAX_FUNCTION_LINES


_UP = "core imports stax (tpjax.stax.driver), which is above it"
PLANTED: tuple[tuple[Rule, str, str, int, str], ...] = (
    (imports_point_down, "tpjax/core/a.py", "import tpjax.stax.driver\n", 1, _UP),
    (imports_point_down, "tpjax/core/a.py", "\nfrom tpjax.stax import driver", 2, _UP),
    (imports_point_down, "tpjax/core/a.py", "from ..stax import driver", 1, _UP),
    (imports_point_down, "tpjax/core/__init__.py", "from ..stax import driver", 1, _UP),
    (
        imports_point_down,
        "tpjax/core/a.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import tpjax.stax.driver",
        3,
        _UP,
    ),
    (
        imports_point_down,
        "tpjax/core/a.py",
        "def f():\n    return importlib.import_module('tpjax.stax.driver')",
        2,
        _UP,
    ),
    (imports_point_down, "tpjax/pallas/a.py", "from tpjax import stax_passes", 1, "stax_passes"),
    (imports_point_down, "tpjax/stax/a.py", "from tpjax import compile", 1, "stax imports tpjax"),
    (imports_point_down, "tpjax/training/a.py", "import train", 1, "training imports train.py"),
    (imports_point_down, "tpjax/__main__.py", "import train", 1, "tpjax imports train.py"),
    (imports_point_down, "tpjax/models/a.py", "from tpjax.pallas import rms_norm", 1, "plain JAX"),
    (internals_stay_in_their_modules, "tpjax/stax/a.py", "import jax._src.core", 1, "jax._src"),
    (internals_stay_in_their_modules, "tests/a.py", "from jax._src import core", 1, "jax._src"),
    (internals_stay_in_their_modules, "train.py", "from jax import _src", 1, "jax._src"),
    (internals_stay_in_their_modules, "train.py", "import jax\njax._src.core", 2, "jax._src"),
    (files_are_short, "tests/a.py", "x = 1\n" * (MAX_FILE_LINES + 1), 401, "401 lines"),
    (functions_are_short, "tpjax/core/a.py", _long_function(""), 1, "launch has 81 lines"),
    (functions_are_short, "tpjax/core/a.py", _long_function("  # long: a table"), 1, "81"),
    (functions_are_short, "tpjax/pallas/a.py", _long_function("  # long: "), 1, "81"),
    (public_names_have_docstrings, "tests/a.py", "x = 1", 1, "module has no docstring"),
    (public_names_have_docstrings, "train.py", '"""A."""\ndef f(): ...', 2, "f is public"),
    (public_names_have_docstrings, "train.py", '"""A."""\nclass C: ...', 2, "C is public"),
    (
        public_names_have_docstrings,
        "train.py",
        '"""A."""\nclass C:\n    """A."""\n    def method(self): ...',
        4,
        "C.method is public",
    ),
    (
        public_names_have_docstrings,
        "train.py",
        '"""A."""\nif True:\n    async def f(): ...',
        3,
        "f is public",
    ),
    (files_name_their_licence, "tpjax/a.py", '"""A."""\n', 1, "SPDX"),
    (files_name_their_licence, "tools/a.sh", "#!/bin/sh\n" + SPDX[0] + "\n", 2, "SPDX"),
    (promises_have_an_issue, "tpjax/a.py", "x = 1  # TODO: mend\n", 1, "TODO"),
    (modules_differ_from_their_exports, "tpjax/stax/explain.py", "def explain(): ...", 1, "name"),
    (modules_differ_from_their_exports, "tpjax/core/norm.py", "x = 1\nnorm = 2", 2, "name"),
    (
        modules_differ_from_their_exports,
        "tpjax/pallas/__init__.py",
        "from tpjax.pallas.forward import flash_attention",
        1,
        "flash_attention is the name",
    ),
    (
        modules_differ_from_their_exports,
        "tpjax/pallas/__init__.py",
        '__all__ = ["flash_attention"]',
        1,
        "flash_attention is the name",
    ),
    (no_path_of_one_machine, "docs/a.md", "See `/" + "tmp/x`.", 1, "folder of some machine"),
    (no_path_of_one_machine, "tpjax/a.py", "x = '/" + "root/x'", 1, "folder of some machine"),
    (the_harness_compares, "tests/a.py", "assert np.allclose(x, y)", 1, "assert_close"),
    (the_harness_compares, "tests/a.py", "np.testing.assert_allclose(x, y)", 1, "assert_close"),
)


def _planted_source(path: str, text: str) -> Source:
    return Source(path, text, frozenset({"flash_attention", "forward"}))


@pytest.mark.parametrize(("rule", "path", "text", "line", "note"), PLANTED)
def test_planted_fault_is_caught(rule: Rule, path: str, text: str, line: int, note: str):
    faults = list(rule(_planted_source(path, text)))
    assert [n for n, _ in faults] == [line], faults
    assert note in faults[0][1]


SOUND: tuple[tuple[Rule, str, str], ...] = (
    (imports_point_down, "tpjax/stax/a.py", "from tpjax.core import errors\nimport jax"),
    (imports_point_down, "tpjax/stax/a.py", "from tpjax.stax import b\nfrom . import c"),
    (imports_point_down, "tpjax/training/a.py", "from tpjax.pallas import OPS"),
    (imports_point_down, "train.py", "import tpjax\nfrom tpjax.training import fit"),
    (imports_point_down, "tests/a.py", "import tpjax.stax"),
    (internals_stay_in_their_modules, "tpjax/core/_jax.py", "from jax._src import core"),
    (files_are_short, "tpjax/a.py", "x = 1\n" * MAX_FILE_LINES),
    (functions_are_short, "tpjax/pallas/a.py", _long_function("  # long: one grid, three roles")),
    (public_names_have_docstrings, "train.py", '"""A."""\ndef _f():\n    def g(): ...'),
    (public_names_have_docstrings, "tpjax/a/__init__.py", ""),
    (promises_have_an_issue, "tpjax/a.py", "x = 'TODO'  # TODO(#12): mend\n"),
    (modules_differ_from_their_exports, "tpjax/core/norm.py", "def rms_norm(): ..."),
    (modules_differ_from_their_exports, "tpjax/training/flags.py", "from absl import flags"),
    (
        modules_differ_from_their_exports,
        "tpjax/pallas/__init__.py",
        "from tpjax.pallas import forward",
    ),
    (no_path_of_one_machine, "docs/a.md", "https://example.org/work and ./tmp/x or runs/tmp"),
    (the_harness_compares, "tests/a.py", "assert_close('x', x, y, 0)"),
)


@pytest.mark.parametrize(("rule", "path", "text"), SOUND)
def test_sound_source_passes(rule: Rule, path: str, text: str):
    assert not list(rule(_planted_source(path, text)))


def test_every_rule_has_a_planted_fault():
    assert (
        {row[0] for row in PLANTED}
        == set(RULES)
        == {row[0] for row in SOUND} | {files_name_their_licence}
    )
