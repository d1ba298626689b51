# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The inside of a compiled function: its options, its entries, and how one is made.

`tpjax.stax.roads` runs calls outside every transformation. A call inside one has its rewritten
equations traced into the caller's program, and is captured once a signature too.
"""

import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import jax

from tpjax.core import _jax, _tracing, parts
from tpjax.core.errors import UnsupportedError
from tpjax.stax import modules
from tpjax.stax.capture import (
    Call,
    Captured,
    CaptureError,
    captured_from,
    donated_inputs,
    evaluate,
    jitted_program,
    take_apart,
)
from tpjax.stax.entries import (
    Entry,
    History,
    Key,
    Recent,
    Recompiles,
    answers_in,
    check_arguments,
    signature_of,
    signature_of_value,
)
from tpjax.stax.explanation import StrictError, demand_kernels
from tpjax.stax.free import FreeValues, Reading, settled
from tpjax.stax.keys import exact
from tpjax.stax.names import classes_in
from tpjax.stax.options import EXACT, resolve
from tpjax.stax.questions import Question, may_ask
from tpjax.stax.static import SameObject, Static, static_of
from tpjax.stax_passes.decisions import optimize_warm
from tpjax.stax_passes.pipeline import EXACT_PASSES, PASSES
from tpjax.stax_passes.plugins import PASS_GROUP, RULE_GROUP, named
from tpjax.stax_passes.report import Report
from tpjax.stax_passes.rules import demand_exact, with_rules

MAX_ENTRIES = 256
"""Entries that one compiled function keeps; the least recently used goes first."""
QUESTIONS = 2
"""Questions that it keeps for each of them, on average."""

nested_reports: ContextVar[list[tuple[Report, ...]] | None] = ContextVar(
    "tpjax_nested_reports", default=None
)
"""While a call is explained: what was done in each compiled function that it called."""


class Program:
    """A function, its options and its entries: what the views bound to different objects share."""

    def __init__(self, fn: Callable[..., Any], options: Mapping[str, Any], bound: int) -> None:
        self.fn = fn
        self.given, self.bound = dict(options), bound
        self.options = options = resolve(options)
        # `traced` is what an own jit traces: compiler options belong to the outermost jit.
        self.traced, jitted = _tracing.under_another_jit(fn)
        self.compiler_options = jitted.compiler_options if jitted else {}
        nums, names = options["static_argnums"], options["static_argnames"]
        if jitted and not nums and not names:
            nums, names = jitted.static_argnums, jitted.static_argnames
        self.static: Static = static_of(fn, nums, names, bound)
        self.name = options["name"] or getattr(fn, "__name__", type(fn).__name__)
        self.free = FreeValues(fn)
        self.lock = threading.RLock()
        self.entries, self.questions, self._inlined = Recent(), Recent(), Recent()
        self._history = History()
        self._gone = 0
        self._warned = False
        self.roads: Any = None
        """Set and read by `tpjax.stax.roads`."""
        self._of_objects: Program | None = None
        self.base: Program | None = None
        """The program that this one is of objects, or None."""

    def of_objects(self) -> "Program":
        """Returns the program as a method of objects that are no pytrees: known by identity."""
        with self.lock:
            if self._of_objects is None:
                made = Program(self.fn, self.given, self.bound)
                made.static, made.base = self.static.and_first(), self
                self._of_objects = made
        return self._of_objects

    def with_options(self, options: Mapping[str, Any]) -> "Program":
        """Returns the same function with other options; those not named stay."""
        if self.base is not None:
            return self.base.with_options(options).of_objects()
        return Program(self.fn, self.given | dict(options), self.bound)

    def passes(self) -> Any:
        """Returns the passes that the options ask for."""
        passes = self.options["passes"]
        if passes is None:
            passes = EXACT_PASSES if self.options["mode"] == EXACT else PASSES
        rules = named(RULE_GROUP, self.options["rules"])
        if self.options["mode"] == EXACT:
            demand_exact(rules)  # of a rule by name, the tier is known once it is loaded
        return with_rules(named(PASS_GROUP, passes), rules)

    def read(self, args: tuple[Any, ...]) -> Reading:
        """Returns the function's free values now."""
        return self.free.read(*(args[0].get(),) if self.base is not None else ())

    def _function(
        self, reading: Reading, values: tuple[Any, ...], outermost: bool = True
    ) -> Callable[..., Any]:
        """Returns the function with `values` in place of the modules that it names."""
        fn = modules.rebound(self.traced if outermost else self.fn, reading.module_names, values)
        if self.base is None:
            return fn

        @functools.wraps(fn, updated=())
        def method(same: SameObject, *args: Any, **kwargs: Any) -> Any:
            return fn(same.get(), *args, **kwargs)

        return method

    @contextmanager
    def taken_apart(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        reading: Reading,
        numbers: bool = True,
    ) -> Iterator[Call]:
        """Takes the call apart, in a block in which its `finish` may be called.

        Unless `numbers`, Python numbers and strings among the arguments stay what they are.
        """

        def close(values: tuple[Any, ...]) -> Any:
            return self.static.close(self._function(reading, values, numbers), args, kwargs)

        fn, rest, named = close(reading.modules)
        found = modules.taken_out(reading.modules, rest, named)
        if found is None:
            yield take_apart(fn, rest, named, numbers)
            return
        with modules.taken_apart(
            lambda values: close(values)[0], self.name, found, numbers
        ) as call:
            yield call

    def key(self, reading: Reading, call: Call, args: Any, kwargs: Any) -> Key:
        """Returns everything that an entry for the call depends on, besides answers."""
        try:
            avals = tuple(jax.typeof(x) for x in (*reading.arrays, *call.leaves))
        except TypeError:
            check_arguments(self.name, self.fn, args, kwargs, self.static.argnames)
            raise
        static = self.static.key(args, kwargs)
        rest = reading.key, avals, static, _jax.trace_context()
        try:
            return Key(call.key, *rest)
        except TypeError:  # an attribute of a module is a dict, say
            if not modules.any_module((reading.modules, args, kwargs)):
                raise
        named = (*zip(reading.module_names, reading.modules, strict=True), *enumerate(args))
        return Key(modules.snapshot(call.key, self.name, (*named, *kwargs.items())), *rest)

    def entry(self, key: Key, answers: tuple[Any, ...] = ()) -> Entry | None:
        """Returns the entry for the key and the answers, which counts as used now, or None."""
        return self.entries.use((key, exact(answers)))

    def question(
        self, key: Key, answers: tuple[Any, ...]
    ) -> tuple[Question, Any, tuple[int, ...]] | None:
        """Returns what Python asks next, the program that answers it, and its free arrays."""
        return self.questions.use((key, exact(answers)))

    def make(
        self,
        answers: tuple[Any, ...],
        call: Call,
        reading: Reading,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        check: Callable[[_jax.Jaxpr], None] = lambda jaxpr: None,
        last: bool = False,
    ) -> Entry | None:
        """Captures and rewrites the call as a new entry; None where a question came first.

        Args:
          answers: to the questions that are known.
          call: the call taken apart.
          reading: the free values.
          args: the call's, for people.
          kwargs: the call's, for people.
          check: sees the jaxpr as captured before it is rewritten; what it raises ends the making.
          last: whether free values that change meanwhile are taken as they are.

        Raises:
          ChangedError: other free values are to be read, or they changed meanwhile: begin again.
        """
        self.free.follow(classes_in(args, kwargs, reading.modules))
        captured = captured_from(call, None if self.options["strict"] else answers)
        jaxpr, lifted = parts.lifted(captured.jaxpr, self.free.inputs(reading, captured.jaxpr))
        reading, kept = self._settled(reading, args, captured, jaxpr, lifted, last)
        key = self.key(reading, call, args, kwargs)
        if captured.question is not None:
            asked = captured.question, jitted_program(jaxpr, self.name), tuple(lifted)
            self.questions.put((key, exact(answers)), asked, QUESTIONS * MAX_ENTRIES)
            return None
        check(captured.jaxpr)
        rewritten, reports = self.rewrite(jaxpr)
        flags = (*(False for _ in lifted), *donated_inputs(captured.jaxpr))
        entry = Entry(
            self._history.made + 1,
            self._signature(reading, args, kwargs, key, answers),
            reports,
            jaxpr=rewritten,
            original=jaxpr,
            after=captured.after,
            lifted=tuple(lifted),
            donated=tuple(i for i, flag in enumerate(flags) if flag),
            options=self.compiler_options,
            kept=kept,
            name=self.name,
            key=(key, exact(answers)),
        )
        if not kept:
            return entry
        self._history.add(entry.signature, MAX_ENTRIES)
        self._gone += self.entries.put(entry.key, entry, MAX_ENTRIES)
        if self._gone >= MAX_ENTRIES and self.roads is not None:
            self._gone = 0
            self.roads.free_executables()
        self._warn_of_recompiles()
        return entry

    def _settled(
        self,
        reading: Reading,
        args: tuple[Any, ...],
        captured: Captured,
        jaxpr: _jax.Jaxpr,
        lifted: list[int],
        last: bool,
    ) -> tuple[Reading, bool]:
        """Returns the reading with the guards the program needs, and whether to keep that."""
        self.free.guard(reading, captured.read, jaxpr, lifted)
        reading = self.free.again(reading)
        kept = self.free.settle(reading, self.read(args), last)
        return self.free.again(reading), kept

    def _signature(
        self, reading: Reading, args: Any, kwargs: Any, key: Any, answers: tuple[Any, ...]
    ) -> Mapping[str, str]:
        """Returns what tells the entry from the others, for people."""
        if self.base is not None:
            args = (args[0].get(), *args[1:])
        found = signature_of(self.fn, args, kwargs, self.static.argnames)
        known = ((self.question(key, answers[:i]), v) for i, v in enumerate(answers))
        asked = [(question[0], value) for question, value in known if question is not None]
        arrays = {p: str(jax.typeof(x)) for p, x in zip(reading.paths, reading.arrays, strict=True)}
        for (kind, name), module in zip(reading.module_names, reading.modules, strict=True):
            found |= signature_of_value(f"{kind} {name}", module)
        return found | arrays | reading.guards | answers_in(asked)

    def _warn_of_recompiles(self) -> None:
        limit = self.options["recompile_limit"]
        if self._warned or self._history.made <= limit:
            return
        self._warned = True
        busiest = self.recompiles().busiest()
        if busiest is None:
            return
        path, times, change = busiest
        warnings.warn(
            f"compile: {self.name} has {self._history.made} entries, more than recompile_limit="
            f"{limit}; what changes most is {path} ({times} times, last from {change.was} to "
            f"{change.now}). Keep it the same, pass it as an array, or raise recompile_limit; "
            "explain_recompile() tells every change.",
            stacklevel=2,
        )

    def recompiles(self) -> Recompiles:
        """Returns why each entry but the first was made."""
        return self._history.recompiles(self.name)

    def rewrite(self, jaxpr: _jax.Jaxpr) -> tuple[_jax.Jaxpr, tuple[Report, ...]]:
        """Returns the jaxpr rewritten, and the reports; `strict` raises what others warn of."""
        strict, verify, mode = (self.options[name] for name in ("strict", "verify", "mode"))
        passes = self.passes()  # an error in the definition of a rule is the caller's to mend
        try:
            result = optimize_warm(jaxpr, passes, verify=verify or strict, options=mode)
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

    def verified(self, entry: Entry, inputs: list[Any]) -> Entry:
        """Returns the entry if it computes what the original does on the inputs, else that one.

        Raises:
          StrictError: it does not, under `strict`.
        """
        from tpjax.stax.verification.verify import check

        difference = check(self.name, entry.original, self.passes(), inputs)
        if difference is None:
            return entry
        if self.options["strict"]:
            raise StrictError(difference.strict_message(self.name))
        warnings.warn(difference.message(self.name), stacklevel=4)
        return self.as_written(entry, difference.message(self.name))

    def as_written(self, entry: Entry, reason: str) -> Entry:
        """Makes the original program run in place of the entry's, and returns that entry."""
        entry = replace(entry, jaxpr=entry.original, run=None, as_written=reason)
        with self.lock:
            self.entries[entry.key] = entry
        return entry

    def inline(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs the rewritten equations under whatever trace is on."""
        return settled(lambda last: self._inline(args, kwargs, last))

    def _inline(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], last: bool) -> Any:
        reading = self.read(args)
        with self.taken_apart(args, kwargs, reading, numbers=False) as call:
            nested = nested_reports.get()
            key = self.key(reading, call, args, kwargs)
            entry = self._inlined.get(key) if nested is None else None
            if entry is None:
                try:
                    entry = self._capture_inline(call, reading, args, kwargs, last)
                except CaptureError:
                    if not may_ask():
                        raise
                    entry = None
            if entry is not None:
                if nested is not None:
                    nested.append(entry.reports)
                inputs = [*(reading.arrays[i] for i in entry.lifted), *call.leaves]
                return call.finish(entry.after, evaluate(entry.jaxpr, inputs))
        # A compiled function around this one can answer what its code asks.
        return self._function(reading, reading.modules, False)(*args, **kwargs)

    def _capture_inline(
        self, call: Call, reading: Reading, args: Any, kwargs: Any, last: bool
    ) -> Entry:
        self.free.follow(classes_in(args, kwargs, reading.modules))
        captured = captured_from(call, None)
        jaxpr, lifted = parts.lifted(captured.jaxpr, self.free.inputs(reading, captured.jaxpr))
        reading, kept = self._settled(reading, args, captured, jaxpr, lifted, last)
        key = self.key(reading, call, args, kwargs)
        jaxpr, reports = self.rewrite(jaxpr)
        entry = Entry(0, {}, reports, jaxpr=jaxpr, after=captured.after, lifted=tuple(lifted))
        of_caller = any(map(_jax.is_tracer, jaxpr.consts))
        if nested_reports.get() is None and not of_caller and kept:
            with self.lock:
                self._inlined.put(key, entry, MAX_ENTRIES)
        return entry

    def clear(self) -> None:
        """Forgets every entry."""
        with self.lock:
            self.entries.clear()
            self.questions.clear()
            self._inlined.clear()
            self.free.forget()
            self._history, self._gone, self._warned = History(), 0, False
            if self.roads is not None:
                self.roads.clear()
            if self._of_objects is not None:
                self._of_objects.clear()
