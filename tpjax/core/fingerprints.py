# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""A hash of a jaxpr that another process makes too: of what it computes, not of how it is named.

Variables, bodies and functions are numbered in the order in which they are met, so that wiring
counts and addresses do not. Literals and constants count by value, functions that JAX holds on to
(the rules of a custom_vjp) by name, and each equation by the user's line that made it, because
reports name lines. One walk, linear, without recursion over bodies.
"""

import dataclasses
import enum
import functools
import hashlib
import re
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any

import jax
import numpy as np

from tpjax.core import _jax

MAX_CONSTANT_BYTES = 2**28
"""Bytes of constants that are read, of one program: hashing more would cost more than it saves."""
MAX_DEPTH = 50
"""Of tuples and records within one parameter."""
_PLAIN = frozenset({int, bool, NoneType, str, float, complex, bytes})
_ADDRESS = re.compile(r" at 0x[0-9a-f]+|0x[0-9a-f]{6,}")
_SET = re.compile(r"\{([^{}]*)\}")
_TYPE_EXTRAS = ("sharding", "manual_axis_type", "vma", "memory_space", "layout")


class UnstableError(Exception):
    """There is no fingerprint that another process would make too; the message says why."""


def fingerprint(jaxpr: _jax.Jaxpr) -> str:
    """Returns the jaxpr's fingerprint, as hexadecimal digits.

    Raises:
      UnstableError: a parameter or a constant cannot be told by its value.
    """
    writer = _Writer()
    writer.number_of(jaxpr)
    for body in writer.bodies:  # grows while it is walked
        writer.add(body)
    return writer.digest.hexdigest()


class _Writer:
    """What was met so far; every object that is known by its id is kept alive."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self.bodies: list[_jax.Jaxpr] = []
        self._numbers: dict[int, tuple[int, Any]] = {}
        self._spelt: dict[int, tuple[str, Any]] = {}
        self._bytes_left = MAX_CONSTANT_BYTES
        self._depth = 0

    def number_of(self, x: Any) -> int:
        """Returns the number of a body or a function, in the order of first sight."""
        known = self._numbers.get(id(x))
        if known is None:
            known = self._numbers[id(x)] = (len(self._numbers), x)
            if isinstance(x, _jax.Jaxpr):
                self.bodies.append(x)
        return known[0]

    def add(self, body: _jax.Jaxpr) -> None:
        """Takes in one body."""
        names: dict[Any, int] = {}
        out: list[str] = [f"body {self.number_of(body)}"]
        spell = self._spell

        def define(variables: Any) -> None:
            for var in variables:
                names[var] = len(names)
                out.append(self._type(var.aval))

        def read(atom: Any) -> str:
            if isinstance(atom, _jax.Literal):
                return f"{self._type(atom.aval)}={self._number(atom.val)}"
            return str(names.get(atom, "_"))

        define(body.constvars)
        out.extend(self._constant(c) for c in body.consts)
        out.append("inputs")
        define(body.invars)
        for eqn in body.eqns:
            out.append(f"{eqn.primitive.name} {_jax.source_of(eqn)}")
            out.extend(map(read, eqn.invars))
            for key, value in eqn.params.items():
                out.append(key)
                out.append(repr(value) if type(value) in _PLAIN else spell(value))
            if eqn.effects:
                out.extend(sorted(self._effect(effect, names) for effect in eqn.effects))
            out.append(spell(eqn.ctx))
            define(eqn.outvars)
        out.append("outputs")
        out.extend(map(read, body.outvars))
        self.digest.update("\n".join(out).encode("utf-8", "surrogatepass"))

    def _spell(self, x: Any) -> str:
        """Returns a parameter's value in words."""
        kind = type(x)
        if kind in _PLAIN:
            return repr(x)
        if kind is tuple or kind is list:
            if all(type(one) in _PLAIN for one in x):
                return repr(x)
            return f"{kind.__name__}({self._all(x)})"
        if isinstance(x, _jax.Jaxpr):
            return f"body {self.number_of(x)}"
        known = self._spelt.get(id(x))
        if known is None:
            known = self._spelt[id(x)] = (f"{kind.__name__}:{self._anew(x)}", x)
        return known[0]

    def _all(self, values: Any) -> str:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise UnstableError(f"a parameter nests more than {MAX_DEPTH} deep")
        text = ",".join(map(self._spell, values))
        self._depth -= 1
        return text

    def _anew(self, x: Any) -> str:
        if isinstance(x, np.dtype | enum.Enum):
            return str(x)
        if isinstance(x, type):
            return f"{x.__module__}.{x.__qualname__}"
        if hasattr(x, "__array__") and hasattr(x, "dtype"):
            return self._constant(x)
        if isinstance(x, Mapping):
            return self._all(sorted(x.items(), key=lambda item: repr(item[0])))
        if isinstance(x, set | frozenset):
            return str(sorted(map(self._spell, x)))
        if isinstance(x, tuple | list):
            return self._all(x)
        if hasattr(x, "str_short"):
            return self._type(x)
        if isinstance(x, functools.partial):
            return self._all((x.func, x.args, x.keywords))
        if dataclasses.is_dataclass(x):
            return self._all([getattr(x, f.name, None) for f in dataclasses.fields(x)])
        if callable(x) or hasattr(x, "call_wrapped"):
            return f"{self.number_of(x)} {_function_name(x)}"
        return self._words(x)

    def _words(self, x: Any) -> str:
        """Returns what an object of another library says of itself, free of order and address."""
        text = repr(x)
        bare = _SET.sub(lambda m: "{" + ", ".join(sorted(m[1].split(", "))) + "}", text)
        bare = _ADDRESS.sub("", bare)
        return bare if _ADDRESS.search(text) is None else f"{self.number_of(x)} {bare}"

    def _type(self, aval: Any) -> str:
        known = self._spelt.get(id(aval))
        if known is None:
            known = self._spelt[id(aval)] = (self._type_anew(aval), aval)
        return known[0]

    def _type_anew(self, aval: Any) -> str:
        if not hasattr(aval, "dtype") or hasattr(aval, "inner_aval"):
            inner = getattr(aval, "inner_aval", None)
            return f"{type(aval).__name__} {self._words(aval)} {inner and self._type(inner)}"
        weak = "~" if getattr(aval, "weak_type", False) else ""
        text = f"{aval.dtype}{weak}{aval.shape}"
        if _jax.is_local(aval):
            return text
        extras = (f"{name} {self._words(getattr(aval, name, None))}" for name in _TYPE_EXTRAS)
        return f"{type(aval).__name__} {text} {' '.join(extras)}"

    def _effect(self, effect: Any, names: Mapping[Any, int]) -> str:
        on = getattr(effect, "input", None)
        where = names.get(on, "_") if isinstance(on, _jax.Var) else self._words(on)
        return f"effect {type(effect).__name__} {where}"

    def _number(self, value: Any) -> str:
        if isinstance(value, float):
            return float.hex(value)
        if isinstance(value, int):
            return int.__repr__(value)
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        """Returns a constant by its numbers; one that has none yet, by identity."""
        aval = jax.typeof(value)
        text = self._type(aval)
        if _jax.is_tracer(value) or not hasattr(aval, "dtype"):
            return f"{text} unknown {self.number_of(value)}"
        if _jax.is_key(aval):
            with jax.ensure_compile_time_eval():  # the fingerprint is no part of what is traced
                value = jax.random.key_data(value)
        self._bytes_left -= value.size * value.dtype.itemsize if hasattr(value, "size") else 16
        if self._bytes_left < 0:
            raise UnstableError(f"it holds more than {MAX_CONSTANT_BYTES} bytes of constants")
        try:
            data = np.asarray(value).tobytes()
        except Exception as error:  # deleted, or on devices of other processes
            raise UnstableError(f"a constant {text} cannot be read: {error}") from error
        return f"{text} {hashlib.sha256(data).hexdigest()}"


def _function_name(fn: Callable[..., Any]) -> str:
    """Returns the qualified name of a function, of what JAX wrapped it in, or of its type."""
    for _ in range(8):
        inner = getattr(fn, "__wrapped__", None) or getattr(fn, "f", None)
        if hasattr(fn, "__qualname__") or not callable(inner):
            break
        fn = inner
    named = fn if hasattr(fn, "__qualname__") else type(fn)
    return f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', '')}"
