# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Finds what a function reads besides its arguments, following names through the running program.

Followed are the function itself and functions of the same package (or folder) that it names,
wrappers made by `functools` and by libraries, methods of objects, pytrees, and of other objects the
attributes that the code names. What lies deeper is not found.
"""

import dis
import enum
import functools
import os
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from tpjax.core import _tracing
from tpjax.stax import modules

MAX_DEPTH = 6
"""Attributes of attributes that are followed."""
MAX_LEAVES = 20_000
"""Leaves of one pytree that are read; a larger one is known by identity."""
SMALL_BYTES = 4096
"""NumPy arrays up to this size are guarded by value, so that a change in place is seen."""

MISSING = object()
"""What is found under a name that is not there."""
_ATOMS = (bool, int, float, complex, str, bytes, type(None), type(...), np.generic, np.dtype, range)


class Same:
    """A guard on which object it is: equal to a guard on the same object alone."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        name = getattr(self.value, "__qualname__", None)
        return name if isinstance(name, str) else f"{type(self.value).__name__} object"


@dataclass
class Watch:
    """Where the values were found, to see cheaply at the next call whether all are there still."""

    places: list[tuple[Callable[[], Any], Any]] = field(default_factory=list)
    trees: list[tuple[Any, list[Any], Any]] = field(default_factory=list)
    mutable: bool = False
    """Whether something was read that these two lists do not show."""

    def unchanged(self) -> bool:
        """Returns whether every value is still where it was."""
        if self.mutable or not all(get() is value for get, value in self.places):
            return False
        for tree, leaves, structure in self.trees:
            now, shape = jax.tree.flatten(tree)
            same = len(now) == len(leaves) and all(a is b for a, b in zip(now, leaves, strict=True))
            if not same or shape != structure:
                return False
        return True


@dataclass(frozen=True)
class _Names:
    """Names in a function's code, nested functions included."""

    globals: tuple[str, ...]
    attributes: frozenset[str]


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> _Names:
    found: dict[str, None] = {}
    attributes: set[str] = set()
    stack = [code]
    while stack:
        current = stack.pop()
        for instruction in dis.get_instructions(current):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                found[instruction.argval] = None
            elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
                attributes.add(instruction.argval)
        stack.extend(c for c in current.co_consts if isinstance(c, types.CodeType))
    return _Names(tuple(found), frozenset(attributes))


class Finder:
    """What a function reads now; `skip` are places that are not looked at.

    `arrays` and `guards` are by path, in the user's words: "global params['w']". `modules` are NNX
    modules under names of the function itself. `places` has for each path the name or attribute
    that it starts from.
    """

    def __init__(
        self, fn: Callable[..., Any], objects: tuple[Any, ...], skip: frozenset[str]
    ) -> None:
        self.skip = skip
        self.package, self.folder = _home_of(fn)
        self.module = getattr(fn, "__module__", None)
        self.attributes: set[str] = set()
        while True:  # an attribute named in a function found late counts in objects found early
            self.watch = Watch()
            self.arrays: dict[str, Any] = {}
            self.guards: dict[str, Any] = {}
            self.modules: dict[tuple[str, str], Any] = {}
            self.places: dict[str, str] = {}
            self.place = ""
            self.wrapped = False
            self.seen: set[Any] = set()
            before = len(self.attributes)
            self._callable(fn, "")
            for i, x in enumerate(objects):
                self._value(x, "self" if i == 0 else f"self{i}", 0)
            if len(self.attributes) == before:
                return

    def _callable(self, fn: Any, label: str) -> None:
        """Follows a function; `label` is empty for the one that is compiled."""
        fn = fn if label else _tracing.unjitted(fn)
        if isinstance(fn, types.MethodType):
            self._value(fn.__self__, "self", 0)
            fn = fn.__func__
        if isinstance(fn, functools.partial):
            self._value(fn.args, f"{label or 'partial'} arguments", 0)
            self._value(fn.keywords, f"{label or 'partial'} keywords", 0)
            self._callable(fn.func, label)
            return
        if not isinstance(fn, types.FunctionType):
            method = getattr(type(fn), "__call__", None)  # noqa: B004
            if not label and isinstance(method, types.FunctionType):
                self._value(fn, "self", 0)
                self._callable(method, "self.__call__")
            return
        if id(fn) in self.seen:
            return
        code, module = fn.__code__, fn.__globals__.get("__name__", "")
        cells = zip(code.co_freevars, fn.__closure__ or (), strict=True)
        within = f" of {label}" if label else ""
        if not self._is_home(module.partition(".")[0], os.path.dirname(code.co_filename)):
            if label == "" or self.wrapped or self._is_users(fn):
                self._library_wrapper(fn, cells, within)
            return
        self.seen.add(id(fn))
        names = _names_in(code)
        self.attributes |= names.attributes
        for name, cell in cells:
            self._place(cell, "closure", name, within)
        elsewhere = f" of {module}" if label and module != self.module else ""
        for name in names.globals:
            self._place(fn.__globals__, "global", name, elsewhere, label == "")
        for name, value in _defaults(fn):
            self._value(value, f"default {name}{within}", 0)

    def _library_wrapper(self, fn: Any, cells: Iterable[tuple[str, Any]], within: str) -> None:
        """Follows what a library's function wraps, as `jax.checkpoint` does: functions alone."""
        self.seen.add(id(fn))
        outer, self.wrapped = self.wrapped, True
        for name, cell in cells:
            if callable(_contents(cell)):
                self._place(cell, "closure", name, within)
        self.wrapped = outer

    def _place(self, home: Any, kind: str, name: str, within: str, own: bool = False) -> None:
        """Reads a closure cell, or a name of a module's globals; each once."""
        if (id(home), name) in self.seen:
            return
        self.seen.add((id(home), name))
        get = functools.partial(_contents, home)
        if not isinstance(home, types.CellType):
            get = functools.partial(home.get, name, MISSING)
        value = get()
        if isinstance(value, types.ModuleType) and not self._is_users(value):
            return
        self.watch.places.append((get, value))
        if (own or (kind == "closure" and not within)) and modules.is_module(value):
            self.modules[kind, name] = value
        elif value is not MISSING:
            self._at(f"{kind} {name}{within}", value, 0)

    def _at(self, path: str, value: Any, depth: int) -> None:
        """Reads a value that stands under a name or attribute of its own."""
        while path in self.places:  # another thing of the same name
            path += "'"
        self.places[path] = path
        if path in self.skip:
            return
        outer, self.place = self.place, path
        self._value(value, path, depth)
        self.place = outer

    def _value(self, value: Any, path: str, depth: int) -> None:
        self.places[path] = self.place
        if isinstance(value, _ATOMS):
            self.guards[path] = type(value), ("nan" if value != value else value)
        elif isinstance(value, jax.Array):
            self.arrays[path] = value
        elif isinstance(value, np.ndarray):
            self._numpy(value, path)
        elif isinstance(value, type):
            self.guards[path] = Same(value)
            if self._is_home(value.__module__.partition(".")[0], None):
                self._names_of(value, vars(value), path, depth)
        elif isinstance(value, enum.Enum):
            self.guards[path] = Same(value)
        elif isinstance(value, types.ModuleType):
            self._attributes(value, path, depth)
        elif isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            if not isinstance(value, types.FunctionType):
                self.watch.mutable = True
                self.guards[path] = Same(getattr(value, "__func__", type(value)))
            else:
                self.guards[path] = Same(value)
            self._callable(value, path)
        elif isinstance(value, jax.custom_jvp | jax.custom_vjp):
            self.guards[path] = Same(value)
            self._callable(value.__wrapped__, path)  # pyright: ignore[reportAttributeAccessIssue]
        elif callable(getattr(type(value), "free_functions", None)):
            self.guards[path] = Same(value)
            for fn in value.free_functions():
                self._callable(fn, path)
        else:
            self._structure(value, path, depth)

    def _numpy(self, value: np.ndarray, path: str) -> None:
        if value.nbytes <= SMALL_BYTES and not value.dtype.hasobject:
            self.watch.mutable = True
            self.guards[path] = value.shape, str(value.dtype), value.tobytes()
        else:
            self.guards[path] = Same(value)

    def _structure(self, value: Any, path: str, depth: int) -> None:
        if id(value) in self.seen or depth > MAX_DEPTH:
            return
        self.seen.add(id(value))
        try:
            pairs, structure = jax.tree_util.tree_flatten_with_path(value)
            hash(structure)
        except (RecursionError, SystemError, TypeError, ValueError):  # cyclic; keys of two kinds
            self.guards[path] = Same(value)
            return
        if len(pairs) == 1 and pairs[0][1] is value:
            self._attributes(value, path, depth)
            return
        if len(pairs) > MAX_LEAVES:
            self.guards[path] = Same(value)
            return
        self.watch.trees.append((value, [leaf for _, leaf in pairs], structure))
        self.guards[path] = structure
        for keys, leaf in pairs:
            self._value(leaf, path + jax.tree_util.keystr(keys), depth + 1)

    def _attributes(self, value: Any, path: str, depth: int) -> None:
        """Reads the attributes of an object, or names of a module, that the code names."""
        if isinstance(value, types.ModuleType):
            if self._is_users(value):
                self._names_of(value, vars(value), path, depth)
            return
        kind = type(value)
        own = getattr(value, "__dict__", {})
        found = self._names_of(value, own, path, depth) if isinstance(own, Mapping) else False
        for base in kind.__mro__:
            if self._is_home(base.__module__.partition(".")[0], None):
                fields = {name: x for name, x in vars(base).items() if name not in own}
                for name in self.attributes & fields.keys():  # the object may get its own later
                    self.watch.places.append((functools.partial(own.get, name, MISSING), MISSING))
                found |= self._names_of(value, fields, path, depth, vars(base))
        self.guards[path] = Same(kind if found else value)

    def _names_of(
        self, x: Any, fields: Mapping[str, Any], path: str, depth: int, home: Any = None
    ) -> bool:
        """Reads those of the object's fields that the code names; returns whether data are there.

        Methods and properties are followed as functions; slots are read from the object.
        """
        found = False
        for name in sorted(self.attributes & fields.keys()) if depth <= MAX_DEPTH else ():
            value = fields[name]
            inside = getattr(value, "fget", getattr(value, "__func__", value))
            get = functools.partial((fields if home is None else home).get, name, MISSING)
            if isinstance(value, types.MemberDescriptorType):  # a slot
                get = functools.partial(getattr, x, name, MISSING)
            elif isinstance(inside, types.FunctionType) and (home or isinstance(x, type)):
                if self._is_users(inside):
                    self._callable(inside, inside.__qualname__)
                continue
            found = True
            self.watch.places.append((get, get()))
            self._at(f"{path}.{name}", get(), depth + 1)
        return found

    def _is_users(self, x: Any) -> bool:
        return self._is_home(*_home_of(x))

    def _is_home(self, package: str, folder: str | None) -> bool:
        return package == self.package or (folder is not None and folder == self.folder)


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name not bound yet
        return MISSING


def _defaults(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yields the default values of parameters, with their names."""
    code = fn.__code__
    defaults = fn.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    yield from zip(names, defaults, strict=True)
    yield from (fn.__kwdefaults__ or {}).items()


def _home_of(x: Any) -> tuple[str, str | None]:
    """Returns the top-level package and the folder of the source of a function or module.

    Of a wrapper, it is that of the function inside.
    """
    if isinstance(x, types.ModuleType):
        name, file = x.__name__, getattr(x, "__file__", None)
    else:
        while not isinstance(x, types.FunctionType) or hasattr(x, "__wrapped__"):
            inner = next((getattr(x, n) for n in _INNER if hasattr(x, n)), None)
            x = getattr(type(x), "__call__", None) if inner is None else inner  # noqa: B004
            if not callable(x) or isinstance(
                x, types.WrapperDescriptorType | types.MethodWrapperType
            ):
                return "", None
        name, file = x.__globals__.get("__name__", ""), x.__code__.co_filename
    return name.partition(".")[0], os.path.dirname(file) if isinstance(file, str) else None


_INNER = ("__wrapped__", "__func__", "func")
