# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Finds what a function reads besides its arguments, following names through the running program.

Followed are the function itself, functions, classes and modules of the user's own code that it
names, wrappers made by `functools` and by libraries, methods of objects, containers, and of other
objects the attributes that the code names. What lies deeper is not found.
"""

import contextvars
import enum
import functools
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from tpjax.core import _tracing
from tpjax.stax import modules
from tpjax.stax.keys import Same, atom
from tpjax.stax.names import defaults_of, home_of, is_library, names_in

MAX_DEPTH = 6
"""Attributes of attributes that are followed."""
MAX_NESTING = 100
"""Containers in containers that are read; a deeper one is known by identity."""
MAX_LEAVES = 20_000
"""Leaves of one pytree that are read; a larger one is known by identity."""
SMALL_BYTES = 4096
"""NumPy arrays up to this size are guarded by value, so that a change in place is seen."""

FOUNDATIONS = frozenset({"flax", "jax", "jaxlib", "numpy", "optax"})
"""Packages whose own state is not a function's free values, not even for a function of theirs."""

MISSING = object()
"""What is found under a name that is not there."""
_ATOMS = (bool, int, float, complex, str, bytes, type(None), type(...), np.generic, np.dtype, range)
_LISTS = (list, deque, bytearray)
_SETS = (set, frozenset)
_UNCALLED = ("__init__", "__post_init__", "__repr__", "__str__", "__eq__", "__hash__", "__del__",
             "__init_subclass__", "__reduce__", "__getstate__", "__setstate__")  # fmt: skip
"""Special methods that are not followed; the first two are where the code may make the object."""


@dataclass
class Watch:
    """Where the values were found, to see cheaply at the next call whether all are there still."""

    places: list[tuple[Callable[[], Any], Any]] = field(default_factory=list)
    values: list[tuple[Callable[[], Any], Any]] = field(default_factory=list)
    trees: list[tuple[Any, list[Any], Any]] = field(default_factory=list)
    mutable: bool = False
    """Whether something was read that these lists do not show."""

    def unchanged(self) -> bool:
        """Returns whether every value is still where it was."""
        if self.mutable or not all(get() is value for get, value in self.places):
            return False
        if not all(get() == value for get, value in self.values):
            return False
        for tree, leaves, structure in self.trees:
            now, shape = jax.tree.flatten(tree)
            same = len(now) == len(leaves) and all(a is b for a, b in zip(now, leaves, strict=True))
            if not same or shape != structure:
                return False
        return True


class Finder:
    """What a function reads now; `skip` are paths that are no guards.

    `arrays` and `guards` are by path, in the user's words: "global params['w']". `modules` are NNX
    modules under names of the function itself. `numpy` tells whether NumPy is named, so that an
    array's numbers may be read unseen; `stores` what is assigned to.

    Args:
      fn: the function.
      objects: what it is a method of.
      classes: classes of its arguments, whose methods it may call.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        objects: tuple[Any, ...] = (),
        classes: Iterable[type] = (),
        skip: frozenset[str] = frozenset(),
    ) -> None:
        self.skip = skip
        package = home_of(_tracing.unjitted(fn))[0]
        self.package = None if package in FOUNDATIONS else package
        self.module = getattr(fn, "__module__", None)
        self.attributes: set[str] = set()
        self.stores: set[str] = set()
        self.numpy = False
        while True:  # an attribute named in a function found late counts in objects found early
            self.watch = Watch()
            self.arrays: dict[str, Any] = {}
            self.guards: dict[str, Any] = {}
            self.modules: dict[tuple[str, str], Any] = {}
            self.wrapped = False
            self.seen: set[Any] = set()
            self.kept: list[Any] = []
            before = len(self.attributes)
            self._callable(fn, "")
            for i, x in enumerate(objects):
                self._value(x, "self" if i == 0 else f"self{i}", 0)
            for kind in classes:
                self._class(kind, kind.__name__, 0, made=True)
            if len(self.attributes) == before:
                return

    def _first(self, *things: Any) -> bool:
        """Returns whether the thing is met for the first time; it is kept, so that its id is."""
        key = tuple(x if isinstance(x, str) else id(x) for x in things)
        if key in self.seen:
            return False
        self.seen.add(key)
        self.kept.append(things)
        return True

    def _callable(self, fn: Any, label: str) -> None:
        """Follows a function; `label` is empty for the one that is compiled."""
        fn = fn if label else _tracing.unjitted(fn)
        if isinstance(fn, types.MethodType):
            self._value(fn.__self__, f"self of {label}" if label else "self", 0)
            fn = fn.__func__
        if isinstance(fn, functools.partial):
            self._value(fn.args, f"{label or 'partial'} arguments", 0)
            self._value(fn.keywords, f"{label or 'partial'} keywords", 0)
            self._callable(fn.func, label)
        elif isinstance(fn, types.FunctionType):
            self._function(fn, label)
        elif not label:
            self._value(fn, "self", 0)

    def _function(self, fn: types.FunctionType, label: str) -> None:
        if not self._first(fn):
            return
        code, module = fn.__code__, fn.__globals__.get("__name__", "")
        cells = zip(code.co_freevars, fn.__closure__ or (), strict=True)
        within = f" of {label}" if label else ""
        if not self._is_home(module.partition(".")[0], code.co_filename):
            if label == "" or self.wrapped or self._is_users(fn):
                self._library_wrapper(cells, within)
            return
        names = names_in(code)
        self.attributes |= names.attributes
        self.stores |= names.stores
        self._guard(f"code of {label or fn.__qualname__}", Same(code))
        self.watch.places.append((lambda: fn.__code__, code))
        self.watch.places.append((lambda: fn.__defaults__, fn.__defaults__))
        if fn.__kwdefaults__:
            self.watch.mutable = True
        for name, cell in cells:
            self._place(cell, "closure", name, within)
        elsewhere = f" of {module}" if label and module != self.module else ""
        for name in names.globals:
            self._place(fn.__globals__, "global", name, elsewhere, label == "")
        for name in names.imports:
            self._place(sys.modules, "module", name, "")
        for name, value in defaults_of(fn):
            self._at(f"default {name}{within}", value, 0)

    def _library_wrapper(self, cells: Iterable[tuple[str, Any]], within: str) -> None:
        """Follows what a library's function wraps, as `jax.checkpoint` does: functions alone."""
        outer, self.wrapped = self.wrapped, True
        for name, cell in cells:
            if callable(_contents(cell)):
                self._place(cell, "closure", name, within)
        self.wrapped = outer

    def _place(self, home: Any, kind: str, name: str, within: str, own: bool = False) -> None:
        """Reads a closure cell, or a name of a module's globals; each once."""
        if not self._first(home, name):
            return
        get = functools.partial(_contents, home)
        if not isinstance(home, types.CellType):
            get = functools.partial(home.get, name, MISSING)
        value = get()
        if isinstance(value, types.ModuleType) and not self._is_users(value):
            self.numpy |= value is np
            return
        self.watch.places.append((get, value))
        if (own or (kind == "closure" and not within)) and modules.is_module(value):
            self.modules[kind, name] = value
        elif value is not MISSING:
            self._at(f"{kind} {name}{within}", value, 0)

    def _at(self, path: str, value: Any, depth: int) -> None:
        """Reads a value that stands under a name or attribute of its own."""
        while path in self.guards or path in self.arrays:  # another thing of the same name
            path += "'"
        self._value(value, path, depth)

    def _guard(self, path: str, guard: Any) -> None:
        if path not in self.skip:
            self.guards[path] = guard

    def _value(self, value: Any, path: str, depth: int) -> None:
        if isinstance(value, _ATOMS):
            self._guard(path, atom(value))
        elif isinstance(value, jax.Array):
            if path not in self.skip:
                self.arrays[path] = value
        elif isinstance(value, np.ndarray):
            self._numpy(value, path)
        elif isinstance(value, enum.Enum):
            self._guard(path, Same(value))
        elif isinstance(value, type):
            self._guard(path, Same(value))
            self._class(value, path, depth)
        elif isinstance(value, types.ModuleType):
            if self._is_users(value):
                self._fields(value, vars(value), path, depth, functions=False)
        elif isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            whole = value if isinstance(value, types.FunctionType) else type(value)
            self._guard(path, Same(getattr(value, "__func__", whole)))
            self._callable(value, path)
        elif isinstance(value, jax.custom_jvp | jax.custom_vjp):
            self._guard(path, Same(value))
            for name in ("__wrapped__", "fwd", "bwd", "jvp"):
                self._callable(getattr(value, name, None), path)
        elif isinstance(value, contextvars.ContextVar):
            self.watch.mutable = True
            self._value(value.get(None), f"{path}.get()", depth + 1)
        elif callable(getattr(type(value), "free_functions", None)):
            self._guard(path, Same(value))
            for fn in value.free_functions():
                self._callable(fn, path)
        elif depth <= MAX_DEPTH and self._first(value):
            self._structure(value, path, depth)

    def _numpy(self, value: np.ndarray, path: str) -> None:
        if value.nbytes > SMALL_BYTES or value.dtype.hasobject:
            self._guard(path, Same(value))
            return
        numbers = value.shape, str(value.dtype), value.tobytes()
        self.watch.values.append((value.tobytes, numbers[2]))
        self._guard(path, numbers)

    def _structure(self, value: Any, path: str, depth: int) -> None:
        tree = value
        if isinstance(value, Mapping) and type(value) is not dict:
            tree = dict(value)
        elif isinstance(value, _LISTS) and type(value) is not list:
            tree = list(value)
        elif isinstance(value, _SETS) and all(isinstance(x, _ATOMS) for x in value):
            self.watch.mutable = True
            self._guard(path, ("set", frozenset(map(atom, value))))
            return
        if _is_bottomless(tree):
            self._guard(path, Same(value))
            return
        try:
            pairs, structure = jax.tree_util.tree_flatten_with_path(tree)
            hash(structure)
        except (TypeError, ValueError):  # keys of two kinds cannot be sorted
            if not isinstance(tree, dict):
                self._guard(path, Same(value))
                return
            keyed = {f"[{key!r}]": x for key, x in tree.items()}
            pairs, structure = [((key,), x) for key, x in keyed.items()], tuple(keyed)
            tree = value = None
        if len(pairs) == 1 and pairs[0][1] is value:
            self._object(value, path, depth)
            return
        if len(pairs) > MAX_LEAVES:
            self._guard(path, Same(value))
            return
        if tree is value and value is not None:
            self.watch.trees.append((value, [leaf for _, leaf in pairs], structure))
        else:
            self.watch.mutable = True
        self._guard(path, structure)
        for keys, leaf in pairs:
            self._value(leaf, path + _spelled(keys), depth + 1)

    def _object(self, value: Any, path: str, depth: int) -> None:
        """Reads the attributes of an object that the code names, and follows its methods.

        The object itself is a guard too unless they are all it has.
        """
        own = getattr(value, "__dict__", {})
        own = own if isinstance(own, Mapping) else {}
        self.watch.mutable |= isinstance(value, threading.local)
        self.watch.places.append((lambda: value.__class__, type(value)))
        self.watch.places.append((lambda: getattr(value, "__dict__", own), own))
        read = self._fields(value, own, path, depth, functions=False)
        for base in type(value).__mro__:
            if self._is_users(base):
                fields = {name: x for name, x in vars(base).items() if name not in own}
                for name in self.attributes & fields.keys():  # the object may get its own later
                    self.watch.places.append((functools.partial(own.get, name, MISSING), MISSING))
                read |= self._fields(value, fields, path, depth, home=vars(base))
        slots = {name for base in type(value).__mro__ for name in getattr(base, "__slots__", ())}
        whole = self._is_users(type(value)) and read and own.keys() | slots <= read
        self._guard(path, Same(type(value) if whole else value))

    def _class(self, kind: type, path: str, depth: int, made: bool = False) -> None:
        """Follows the methods of a class and reads the attributes of it that the code names."""
        taken: set[str] = set()
        for i, base in enumerate(kind.__mro__ if self._first(kind, "class") else ()):
            if self._is_users(base):
                fields = {name: x for name, x in vars(base).items() if name not in taken}
                for name in self.attributes & fields.keys():  # a class below may get its own later
                    for below in kind.__mro__[:i]:
                        get = functools.partial(vars(below).get, name, MISSING)
                        self.watch.places.append((get, MISSING))
                self._fields(made or None, fields, path, depth, home=vars(base))
                taken |= fields.keys()

    def _fields(
        self,
        x: Any,
        fields: Mapping[str, Any],
        path: str,
        depth: int,
        home: Any = None,
        functions: bool = True,
    ) -> set[str]:
        """Reads those of the fields that the code names; returns the names of those with data.

        Of a class, methods and properties are followed as functions, those with two underscores
        always; slots are read from the object `x`.
        """
        read: set[str] = set()
        for name in sorted(fields) if depth <= MAX_DEPTH else ():
            special = functions and name.startswith("__") and name.endswith("__")
            if name in (_UNCALLED if x is not None else _UNCALLED[2:]):
                continue
            if not special and name not in self.attributes:
                continue
            value = fields[name]
            get = functools.partial((fields if home is None else home).get, name, MISSING)
            inside = getattr(value, "fget", getattr(value, "__func__", value))
            if functions and isinstance(inside, types.FunctionType):
                self.watch.places.append((get, value))
                self._guard(f"{path}.{name}()", Same(inside))
                if self._is_users(inside):
                    self._callable(inside, inside.__qualname__)
                continue
            if special or isinstance(value, types.GetSetDescriptorType):
                continue
            if isinstance(value, types.MemberDescriptorType):  # a slot
                if x is None or x is True:
                    continue
                get = functools.partial(getattr, x, name, MISSING)
            read.add(name)
            self.watch.places.append((get, get()))
            self._at(f"{path}.{name}", get(), depth + 1)
        return read

    def _is_users(self, x: Any) -> bool:
        return self._is_home(*home_of(x))

    def _is_home(self, package: str, file: str | None) -> bool:
        return package == self.package or not is_library(package, file)


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name not bound yet
        return MISSING


def _spelled(keys: Any) -> str:
    return keys[0] if keys and isinstance(keys[0], str) else jax.tree_util.keystr(keys)


def _is_bottomless(tree: Any) -> bool:
    """Returns whether a container holds itself or is very deep: flattening would not end well."""
    stack: list[tuple[Any, int]] = [(tree, 0)]
    above: list[int] = []
    while stack:
        x, depth = stack.pop()
        del above[depth:]
        if isinstance(x, dict | list | tuple):
            if depth > MAX_NESTING or id(x) in above:
                return True
            above.append(id(x))
            inside = x.values() if isinstance(x, dict) else x
            stack.extend((y, depth + 1) for y in inside if isinstance(y, dict | list | tuple))
    return False
