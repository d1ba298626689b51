# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The house rules: each takes a `Source`, parses it and yields (line, message); see `RULES`."""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.harness import ROOT

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
LAYERS = ("core", "pallas", "stax_passes", "stax", "models", "training", "tpjax", "train.py")
"""Rooms from the ground up; "tpjax" is `__init__` and `__main__` of the package."""
FORBIDDEN = {("models", "pallas"): "a model is plain JAX; tpjax.compile finds the kernels"}
INTERNALS = ("tpjax/core/_jax.py", "tpjax/core/_tracing.py", "tpjax/pallas/_mgpu.py")
"""The only modules that may import `jax._src`."""
COMPARISONS = {"allclose", "array_equal", "assert_allclose", "assert_array_equal"}
SPDX = (
    "# SPDX-FileCopyrightText: 2026 The tpjax authors",
    "# SPDX-License-Identifier: Apache-2.0",
)

Fault = tuple[int, str]
Rule = Callable[["Source"], Iterator[Fault]]
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Source(NamedTuple):
    """One text file: its path from the top folder, its text, the modules and folders beside it."""

    path: str
    text: str
    siblings: frozenset[str] = frozenset()

    @property
    def is_code(self) -> bool:
        return self.path.endswith(".py") and bool(self.text.strip())

    @property
    def is_product(self) -> bool:
        return self.is_code and (self.path == "train.py" or self.path.startswith("tpjax/"))

    @property
    def module(self) -> tuple[str, ...]:
        parts = self.path.removesuffix(".py").split("/")
        return tuple(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def tree(self) -> ast.Module:
        return _parse(self.text)


@cache
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


def layer_of(module: tuple[str, ...]) -> str | None:
    """Returns the layer that a dotted name belongs to, or None for other people's modules."""
    if module[0] == "train":
        return "train.py"
    if module[0] != "tpjax":
        return None
    return module[1] if len(module) > 1 and module[1] in LAYERS[:-2] else "tpjax"


def imported(source: Source) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yields line and dotted name of each import, wherever it stands and however it is spelt."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, tuple(a.name.split("."))) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, source)
            yield from ((node.lineno, (*base, a.name)) for a in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = getattr(node.func, "attr", getattr(node.func, "id", None))
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, tuple(node.args[0].value.split("."))


def _base(node: ast.ImportFrom, source: Source) -> tuple[str, ...]:
    """Returns the module that `from ... import` names, relative dots resolved."""
    named = tuple(node.module.split(".")) if node.module else ()
    if not node.level:
        return named
    up = node.level - source.path.endswith("__init__.py")
    return source.module[: len(source.module) - up] + named


def imports_point_down(source: Source) -> Iterator[Fault]:
    """A room may import itself and the rooms below it."""
    here = layer_of(source.module) if source.is_product else None
    if here is None:
        return
    for line, name in imported(source):
        there = layer_of(name)
        if there is None:
            continue
        if LAYERS.index(there) > LAYERS.index(here):
            yield line, f"{here} imports {there} ({'.'.join(name)}), which is above it"
        elif (here, there) in FORBIDDEN:
            yield line, f"{here} imports {there} ({'.'.join(name)}): {FORBIDDEN[here, there]}"


def internals_stay_in_their_modules(source: Source) -> Iterator[Fault]:
    """JAX's internals move without notice; three modules know them."""
    if not source.is_code or source.path in INTERNALS:
        return
    note = f"jax._src is for {' and '.join(INTERNALS)}"
    for line, name in imported(source):
        if name[:2] == ("jax", "_src"):
            yield line, note
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr == "_src":
            yield node.lineno, note


def files_are_short(source: Source) -> Iterator[Fault]:
    """A file that is too long holds two subjects."""
    lines = source.text.count("\n")
    if source.is_code and lines > MAX_FILE_LINES:
        yield MAX_FILE_LINES + 1, f"{lines} lines; a file has at most {MAX_FILE_LINES}"


def functions_are_short(source: Source) -> Iterator[Fault]:
    """A kernel's launcher may be long, with `# long: <reason>` on its def line."""
    if not source.is_code:
        return
    lines = source.text.splitlines()
    for node in ast.walk(source.tree):
        if not isinstance(node, Function):
            continue
        length = (node.end_lineno or 0) - node.lineno + 1
        excused = source.path.startswith("tpjax/pallas/") and re.search(
            r"#.*\blong: \w+", lines[node.lineno - 1]
        )
        if length > MAX_FUNCTION_LINES and not excused:
            most = f"a function has at most {MAX_FUNCTION_LINES}"
            yield node.lineno, f"{node.name} has {length} lines; {most}"


def public_names_have_docstrings(source: Source) -> Iterator[Fault]:
    """Modules everywhere; in the product also public functions, classes and their methods."""
    if not source.is_code:
        return
    if ast.get_docstring(source.tree) is None:
        yield 1, "the module has no docstring"
    if source.is_product:
        yield from _undocumented(source.tree, "")


def _undocumented(parent: ast.Module | ast.ClassDef, prefix: str) -> Iterator[Fault]:
    for node in _top_level(parent):
        if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
            continue
        marks = {getattr(d, "attr", getattr(d, "id", "")) for d in node.decorator_list}
        if ast.get_docstring(node) is None and not marks & {"overload", "override", "setter"}:
            yield node.lineno, f"{prefix}{node.name} is public and has no docstring"
        if isinstance(node, ast.ClassDef):
            yield from _undocumented(node, f"{node.name}.")


def _top_level(tree: ast.Module | ast.ClassDef) -> list[ast.stmt]:
    """Returns the statements of a module or class, those under its `if` or `try` included."""
    found, stack = [], list(tree.body)
    while stack:
        node = stack.pop()
        found.append(node)
        if isinstance(node, ast.If | ast.Try | ast.With):
            stack.extend(n for n in ast.iter_child_nodes(node) if isinstance(n, ast.stmt))
    return found


def files_name_their_licence(source: Source) -> Iterator[Fault]:
    """The two SPDX lines come first, after a `#!` line if there is one."""
    name = source.path.rsplit("/", 1)[-1]
    if not (source.is_code or name.endswith(".sh") or source.path in ("Makefile", ".ci/run")):
        return
    lines = source.text.splitlines()
    start = int(lines[0].startswith("#!"))
    if tuple(lines[start : start + 2]) != SPDX:
        yield start + 1, "the two SPDX lines are missing"


def promises_have_an_issue(source: Source) -> Iterator[Fault]:
    """What is left to do is written TODO(#12): an issue remembers it."""
    if not source.is_code:
        return
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        marks = r"\b(TODO|FIXME|XXX)\b(?!\(#\d+\))"
        if token.type == tokenize.COMMENT and re.search(marks, token.string):
            yield token.start[0], "a TODO names its issue: TODO(#12)"


def modules_differ_from_their_exports(source: Source) -> Iterator[Fault]:
    """`from tpjax.room import name` must not depend on whether a module of that name was loaded."""
    if not source.is_product:
        return
    is_package = source.path.endswith("__init__.py")
    taken = source.siblings if is_package else {source.module[-1]}
    for node in _top_level(source.tree):
        for name in _bound(node, source):
            if name in taken:
                yield node.lineno, f"{name} is the name of a module, and of what it exports"


def _bound(node: ast.stmt, source: Source) -> Iterator[str]:
    """Yields the names that a statement exports; only a package exports what it imports."""
    if isinstance(node, Function | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.ImportFrom) and source.path.endswith("__init__.py"):
        if _base(node, source) != source.module:
            yield from (a.asname or a.name for a in node.names)
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            name = target.id if isinstance(target, ast.Name) else ""
            yield name
            if name == "__all__":
                yield from ast.literal_eval(node.value)


def no_path_of_one_machine(source: Source) -> Iterator[Fault]:
    """Nothing may depend on, or tell of, the folders of the machine it was written on."""
    for number, line in enumerate(source.text.splitlines(), 1):
        if match := re.search(r"(?<![\w.~}/-])/(?:work|tmp|root|home)\b", line):
            yield number, f"{match.group()} is a folder of some machine"


def the_harness_compares(source: Source) -> Iterator[Fault]:
    """Only `assert_close` looks at shape, dtype, finiteness and error all at once."""
    if not source.is_code or not source.path.startswith("tests/"):
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr in COMPARISONS:
            yield node.lineno, f"{node.attr}: compare through tests.harness.assert_close"


RULES: tuple[Rule, ...] = (
    imports_point_down,
    internals_stay_in_their_modules,
    files_are_short,
    functions_are_short,
    public_names_have_docstrings,
    files_name_their_licence,
    promises_have_an_issue,
    modules_differ_from_their_exports,
    no_path_of_one_machine,
    the_harness_compares,
)


@cache
def sources() -> list[Source]:
    """Returns the text files that git tracks or would track."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    paths = [ROOT / name for name in sorted(filter(None, names.split("\0")))]
    found = []
    for path in paths:
        if not path.is_file() or b"\0" in (data := path.read_bytes())[:8192]:
            continue
        beside = {p.stem for p in path.parent.iterdir() if p.suffix == ".py" or _is_package(p)}
        name = path.relative_to(ROOT).as_posix()
        found.append(Source(name, data.decode(), frozenset(beside)))
    return found


def _is_package(path: Path) -> bool:
    return (path / "__init__.py").is_file()
