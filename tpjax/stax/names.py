# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""What a function's code names and assigns, and whose code it is."""

import dis
import functools
import os
import sys
import sysconfig
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

CHANGED = "[]"
"""Stands among a function's stores where something is changed in place."""
_STORES = ("STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR", "DELETE_GLOBAL", "DELETE_DEREF")
_MUTATORS = frozenset({
    "__setitem__", "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop",
    "popitem", "popleft", "remove", "reverse", "setattr", "setdefault", "sort", "update",
})  # fmt: skip


@dataclass(frozen=True)
class Names:
    """Names in a function's code, nested functions included."""

    globals: tuple[str, ...]
    imports: tuple[str, ...]
    """Modules that the function imports itself."""
    attributes: frozenset[str]
    stores: frozenset[str]
    """Names and attributes that are assigned to, and `CHANGED`."""


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> Names:
    """Returns what the code names; nothing is run."""
    found: dict[str, None] = {}
    imports: dict[str, None] = {}
    attributes: set[str] = set()
    stores: set[str] = set()
    stack = [code]
    while stack:
        current = stack.pop()
        for instruction in dis.get_instructions(current):
            name, argument = instruction.opname, instruction.argval
            if name in ("LOAD_GLOBAL", "LOAD_NAME"):
                found[argument] = None
            elif name == "IMPORT_NAME":
                imports[argument] = None
            elif name in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"):
                attributes.add(argument)
            elif name in _STORES:
                stores.add(argument)
            elif name in ("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"):
                stores.add(CHANGED)
        for constant in current.co_consts:  # getattr(x, "name"), match on keywords
            words = constant if isinstance(constant, tuple) else (constant,)
            attributes.update(w for w in words if isinstance(w, str) and w.isidentifier())
        stack.extend(c for c in current.co_consts if isinstance(c, types.CodeType))
    if _MUTATORS & (attributes | found.keys()):
        stores.add(CHANGED)
    return Names(tuple(found), tuple(imports), frozenset(attributes), frozenset(stores))


def defaults_of(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yields the default values of parameters, with their names."""
    code = fn.__code__
    defaults = fn.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    yield from zip(names, defaults, strict=True)
    yield from (fn.__kwdefaults__ or {}).items()


MAX_OBJECTS = 10_000
"""Objects of the arguments of one call that are looked at for their classes."""


def classes_in(*things: Any) -> set[type]:
    """Returns the classes of the user's own among the objects in containers and attributes."""
    found: set[type] = set()
    seen: set[int] = set()
    stack = list(things)
    while stack and len(seen) < MAX_OBJECTS:
        x = stack.pop()
        if id(x) in seen or isinstance(x, type | types.FunctionType | types.ModuleType):
            continue
        seen.add(id(x))
        if isinstance(x, dict):
            stack.extend(x.values())
        elif isinstance(x, list | tuple):
            stack.extend(x)
        elif not isinstance(x, jax.Array | np.ndarray) and hasattr(x, "__dict__"):
            stack.extend(vars(x).values())
        if not is_library(*home_of(type(x))):
            found.add(type(x))
    return found


_INNER = ("__wrapped__", "__func__", "func")


def home_of(x: Any) -> tuple[str, str | None]:
    """Returns the top-level package and the source file of a function, class or module.

    Of a wrapper, it is that of the function inside.
    """
    if isinstance(x, types.ModuleType):
        return x.__name__.partition(".")[0], getattr(x, "__file__", None)
    if isinstance(x, type):
        file = getattr(sys.modules.get(x.__module__), "__file__", None)
        return x.__module__.partition(".")[0], "" if x.__module__ == "__main__" else file
    while not isinstance(x, types.FunctionType) or hasattr(x, "__wrapped__"):
        inner = next((getattr(x, name) for name in _INNER if hasattr(x, name)), None)
        x = getattr(type(x), "__call__", None) if inner is None else inner  # noqa: B004
        if not callable(x) or isinstance(x, types.WrapperDescriptorType | types.MethodWrapperType):
            return "", None
    return x.__globals__.get("__name__", "").partition(".")[0], x.__code__.co_filename


@functools.lru_cache(maxsize=4096)
def is_library(package: str, file: str | None) -> bool:
    """Returns whether code is Python's own, an installed package's, or this compiler's."""
    if file is None or package in ("tpjax", "builtins"):
        return True
    path = os.path.abspath(file)
    return file.startswith("<frozen") or any(path.startswith(place) for place in _LIBRARIES)


_LIBRARIES = frozenset(
    os.path.abspath(sysconfig.get_path(name)) + os.sep
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
