# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The inside of a compiled function: capture, rewrite, its own jit, and what that remembers."""

import functools
import itertools
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import jax

from tpjax.core import _jax
from tpjax.core.errors import UnsupportedError
from tpjax.pallas.dispatch import record_choices
from tpjax.stax import modules
from tpjax.stax.capture import Capture, capture_call, donated_inputs, evaluate
from tpjax.stax.explanation import Explanation, StrictError, demand_kernels
from tpjax.stax.options import EXACT, resolve
from tpjax.stax.static import SameObject, Static, static_of
from tpjax.stax_passes.pipeline import CLEAN_UP, PASSES, optimize
from tpjax.stax_passes.report import Report
from tpjax.stax_passes.rules import with_rules

MAX_ENTRIES = 256
"""Rewritten jaxprs that one compiled function keeps; the least recently traced goes first."""

_retrace = jax.make_user_context(0)
_retrace_count = itertools.count(1)
_nested: ContextVar[list[tuple[Report, ...]] | None] = ContextVar("tpjax_nested", default=None)


@contextmanager
def fresh_traces() -> Iterator[None]:
    """Hides JAX's caches of traces, so that everything inside is traced and chosen again."""
    with _retrace(next(_retrace_count)):
        yield


class _SawModuleError(Exception):
    """Tracing met a module: this call needs the road that writes state back."""


class _SawDonationError(Exception):
    """Tracing met a jit that is the whole function and donates: the jit around it must too."""


class Program:
    """A function, its options and its cache: what the views bound to different objects share."""

    def __init__(self, fn: Callable[..., Any], options: Mapping[str, Any], bound: int) -> None:
        self.fn = fn
        self.given, self.bound = dict(options), bound
        self.options = options = resolve(options)
        nums, names = options["static_argnums"], options["static_argnames"]
        self.static: Static = static_of(fn, nums, names, bound)
        self.name = options["name"] or getattr(fn, "__name__", type(fn).__name__)
        self.takes_modules = False
        self.donated: tuple[frozenset[int], frozenset[str]] = frozenset(), frozenset()
        self.lock = threading.RLock()
        self.entries: OrderedDict[Any, tuple[_jax.Jaxpr, Callable[[list[Any]], Any]]] = (
            OrderedDict()
        )
        self._jits: dict[str, Any] = {}
        self._of_objects: Program | None = None
        self._base: Program | None = None

    def of_objects(self) -> "Program":
        """Returns the program as a method of objects that are no pytrees: known by identity."""
        with self.lock:
            if self._of_objects is None:
                fn = self.fn

                @functools.wraps(fn, updated=())
                def method(same: SameObject, *args: Any, **kwargs: Any) -> Any:
                    return fn(same.get(), *args, **kwargs)

                self._of_objects = Program(method, self.given, self.bound)
                self._of_objects.static = self.static.and_first()
                self._of_objects._base = self
        return self._of_objects

    def with_options(self, options: Mapping[str, Any]) -> "Program":
        """Returns the same function with other options; those not named stay."""
        if self._base is not None:
            return self._base.with_options(options).of_objects()
        return Program(self.fn, self.given | dict(options), self.bound)

    def passes(self) -> Any:
        """Returns the passes that the options ask for."""
        passes = self.options["passes"]
        if passes is None:
            passes = (CLEAN_UP,) if self.options["mode"] == EXACT else PASSES
        return with_rules(passes, self.options["rules"])

    def captured(self, args: tuple[Any, ...], kwargs: Any) -> AbstractContextManager[Capture]:
        """Returns the call as a jaxpr, in a block in which its `finish` may be called."""
        fn, args, kwargs = self.static.close(self.fn, args, kwargs)
        if modules.any_module((args, kwargs)):
            return modules.captured(fn, args, kwargs)
        return nullcontext(capture_call(fn, args, kwargs))

    def rewrite(self, jaxpr: _jax.Jaxpr) -> tuple[_jax.Jaxpr, tuple[Report, ...]]:
        """Returns the jaxpr rewritten, and the reports; `strict` raises what others warn of."""
        strict, verify = self.options["strict"], self.options["verify"]
        passes = self.passes()  # an error in the definition of a rule is the caller's to mend
        try:
            result = optimize(jaxpr, passes, verify=verify or strict)
        except UnsupportedError:
            raise  # an implementation that was asked for by name
        except Exception as error:
            if strict:
                raise StrictError(
                    f"compile: strict=True, and {self.name} fails: {error}"
                ) from error
            if verify:
                raise
            warnings.warn(f"compile: {self.name} runs as written: {error}", stacklevel=3)
            return jaxpr, ()
        if strict:
            demand_kernels(self.name, result[1])
        return result

    def inline(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs the rewritten equations under whatever trace is on."""
        with self.captured(args, kwargs) as call:
            jaxpr, reports = self.rewrite(call.jaxpr)
            nested = _nested.get()
            if nested is not None:
                nested.append(reports)
            return call.finish(evaluate(jaxpr, call.leaves))

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs the call outside every transformation."""
        while not self.takes_modules:
            try:
                return self.jit(False)(*args, **kwargs)
            except _SawDonationError:
                continue
            except _SawModuleError:
                pass
            except (TypeError, ValueError):
                # A module need not be a pytree that jit can take.
                if not modules.any_module((args, kwargs)):
                    raise
            self.takes_modules = True
        return self.jit(True)(*args, **kwargs)

    def jit(self, with_modules: bool) -> Any:
        """Returns the jit of its own: JAX's, or the one of Flax that takes modules."""
        key = "nnx" if with_modules else "jax"
        with self.lock:
            if key not in self._jits:
                inner = self._trace_modules if with_modules else self._trace_arrays

                @functools.wraps(self.fn, updated=())
                def traced(*args: Any, **kwargs: Any) -> Any:
                    return inner(args, kwargs)

                traced.__name__ = self.name
                make = modules.jit if with_modules else jax.jit
                self._jits[key] = make(
                    traced,
                    static_argnums=self.static.argnums,
                    static_argnames=self.static.argnames,
                    donate_argnums=tuple(sorted(self.donated[0])),
                    donate_argnames=tuple(sorted(self.donated[1])),
                )
        return self._jits[key]

    def _trace_modules(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with self.lock:
            return self.inline(args, kwargs)

    def _trace_arrays(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs while jit traces: captures and rewrites, once a signature for all threads."""
        if modules.any_module((args, kwargs)):
            raise _SawModuleError
        _, rest, named = self.static.close(self.fn, args, kwargs)
        leaves, tree = jax.tree.flatten((rest, named))
        avals = tuple(jax.typeof(x) for x in leaves)
        key = tree, avals, self.static.key(args, kwargs), _jax.trace_context()
        with self.lock:
            if key not in self.entries:
                with self.captured(args, kwargs) as call:
                    self._keep_donation(call.jaxpr, args, kwargs)
                    jaxpr, _ = self.rewrite(call.jaxpr)
                    self.entries[key] = jaxpr, call.finish
                if len(self.entries) > MAX_ENTRIES:
                    self.entries.popitem(last=False)
            self.entries.move_to_end(key)
            jaxpr, finish = self.entries[key]
        return finish(evaluate(jaxpr, leaves))

    def _keep_donation(
        self, jaxpr: _jax.Jaxpr, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Makes the jit of its own donate what the function, a jit itself, donates."""
        flat = donated_inputs(jaxpr)
        if not any(flat):
            return
        rest = iter(flat)
        static, names = self.static.argnums, self.static.argnames
        nums = set()
        for i, arg in enumerate(args):
            marks = [] if i in static else [next(rest) for _ in jax.tree.leaves(arg)]
            nums |= {i} if marks and all(marks) else set()
        found = set()
        for name in sorted(kwargs):
            marks = [] if name in names else [next(rest) for _ in jax.tree.leaves(kwargs[name])]
            found |= {name} if marks and all(marks) else set()
        donated = self.donated[0] | nums, self.donated[1] | found
        if donated != self.donated:
            self.donated = donated
            self._jits.pop("jax", None)
            raise _SawDonationError

    def clear(self) -> None:
        """Forgets every entry."""
        with self.lock:
            self.entries.clear()
            self._jits.clear()

    def explain(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Explanation:
        """Returns what is rewritten in the call, traced anew with all it calls, and not run."""
        reports: list[tuple[Report, ...]] = []
        token = _nested.set(reports)
        try:
            with (
                fresh_traces(),
                record_choices() as choices,
                self.captured(args, kwargs) as call,
            ):
                direct = tuple(choices)
                result, own = optimize(call.jaxpr, self.passes())
        finally:
            _nested.reset(token)
        return Explanation.of(self.name, call.jaxpr, result, own, tuple(reports), direct)
