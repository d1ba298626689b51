# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""How a call outside every transformation runs: two roads.

The fast one is a `jax.jit` whose trace captures and rewrites, so that a call that hits its cache
costs what jit's own does. The keyed one looks entries up in Python: for calls with NNX modules, for
functions that ask for the value of an array, and to verify.
"""

import functools
import threading
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax

from tpjax.core import _jax
from tpjax.stax import modules
from tpjax.stax.capture import Call, CaptureError, donated_inputs, evaluate, jitted_program
from tpjax.stax.entries import Entry, check_arguments
from tpjax.stax.explanation import StrictError
from tpjax.stax.free import NOTHING, Reading, settled
from tpjax.stax.program import MAX_ENTRIES, Program
from tpjax.stax.static import unboxed


class _KeyedRoadError(Exception):
    """Tracing met a module or a question: this call needs the other road."""


class _DonationError(Exception):
    """Tracing met a jit that is the whole function and donates: the jit around it must too."""


@dataclass
class _Variant:
    """The jit for one set of guards of free values."""

    keyed: bool
    """Whether its calls take the keyed road."""
    jit: Any = None
    argnums: frozenset[int] = frozenset()
    argnames: frozenset[str] = frozenset()
    """Arguments that the function, a jit itself, donates."""


class Lowered(NamedTuple):
    """A call lowered for the compiler, and what its later calls will look for."""

    lowered: Any
    """What `jax.jit(fn).lower` returns."""
    entry: Entry | None
    """The entry; None where it was made earlier and jit has it."""
    inputs: list[Any]
    variant: _Variant | None = None
    run: Any = None


class Roads:
    """Runs the top-level calls of one program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._variants: OrderedDict[Any, _Variant] = OrderedDict()
        self._calling = threading.local()

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs the call."""
        return settled(lambda last: self._call(args, kwargs, last))

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], last: bool) -> Any:
        self._calling.last = last
        reading = self.program.read(args)
        variant = self._variants.get(reading.key) or self._variant(reading)
        while not variant.keyed:
            try:
                return self._run_fast(variant, reading, args, kwargs)
            except _DonationError:
                continue
            except _KeyedRoadError:
                pass
            except (TypeError, ValueError):
                # A module need not be a pytree that jit can take.
                if not modules.any_module((args, kwargs)):
                    program = self.program
                    check_arguments(program.name, program.fn, args, kwargs, program.static.argnames)
                    raise
            variant.keyed = True
        return self._run_keyed(reading, args, kwargs)

    def clear(self) -> None:
        """Forgets every jit."""
        self._variants.clear()

    def free_executables(self) -> None:
        """Lets go of what jit compiled, of entries long gone too; those kept compile again."""
        for variant in self._variants.values():
            variant.jit = None

    def lower(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "Lowered":
        """Returns the call lowered, as `jax.jit(fn).lower` does, so that the call can use it."""
        return settled(lambda last: self._lower(args, kwargs, last))

    def _lower(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], last: bool) -> "Lowered":
        self._calling.last, self._calling.failed = last, None
        reading = self.program.read(args)
        variant = self._variant(reading)
        if not variant.keyed and not modules.any_module((args, kwargs)):
            state = self._calling
            state.reading, state.variant, state.made = reading, variant, None
            given, named = self.program.static.boxed(args, kwargs)
            given = (reading.arrays, *given) if reading.arrays else given
            try:
                while not variant.keyed:
                    try:
                        lowered = self._jit(variant, reading).lower(*given, **named)
                    except _DonationError:
                        continue
                    except _KeyedRoadError:
                        variant.keyed = True
                        continue
                    except Exception:
                        state.failed = self._of_fast_road(None, variant, reading, args, kwargs)
                        raise
                    self._keep_made(variant, reading)
                    return self._of_fast_road(lowered, variant, reading, args, kwargs)
            finally:
                state.reading = NOTHING  # its arrays are the user's to let go of
        with self.program.taken_apart(args, kwargs, reading) as call:
            entry = self._entry_of(reading, call, args, kwargs)
            inputs, run = _inputs(entry, reading.arrays, call), entry.run or _own_jit(entry)
            try:
                return Lowered(run.lower(*inputs), entry, inputs, run=run)
            except Exception:
                self._calling.failed = Lowered(None, entry, inputs, run=run)
                raise

    def _of_fast_road(
        self, lowered: Any, variant: _Variant, reading: Reading, args: Any, kwargs: Any
    ) -> "Lowered":
        entry = self._calling.made
        leaves = [] if entry is None else self._leaves(entry, reading, args, kwargs)
        return Lowered(lowered, entry, leaves, variant)

    def keep(self, lowered: "Lowered") -> None:
        """Makes later calls use what was lowered, once it is compiled."""
        entry = lowered.entry
        if lowered.run is not None and entry is not None and entry.kept:
            with self.program.lock:
                if self.program.entries.get(entry.key) is entry:
                    self.program.entries[entry.key] = replace(entry, run=lowered.run)

    def falls_back(self, error: Exception, lowered: "Lowered | None" = None) -> bool:
        """Makes the call run as written if it is our fault that it does not compile.

        Args:
          error: what lowering or compiling it raised.
          lowered: the call; None: the one that this thread has just failed to lower.
        """
        lowered, self._calling.failed = lowered or self._calling.failed, None
        entry = None if lowered is None else lowered.entry
        if lowered is None or entry is None or not entry.kept:
            return False
        now = self.program.entries.get(entry.key)
        done = now is not None and now.as_written is not None  # by another call of the same entry
        if not done and not self._falls_back(entry, lowered.inputs, error):
            return False
        if lowered.variant is not None:
            lowered.variant.jit = None
        return True

    def _variant(self, reading: Reading) -> _Variant:
        with self.program.lock:
            if reading.key not in self._variants:
                keyed = bool(reading.modules) or self.program.options["verify"]
                self._keep(reading.key, _Variant(keyed))
            return self._variants[reading.key]

    def _keep(self, key: Any, variant: _Variant) -> None:
        self._variants[key] = variant
        if len(self._variants) > MAX_ENTRIES:
            self._variants.popitem(last=False)

    def _run_fast(
        self, variant: _Variant, reading: Reading, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        state = self._calling
        state.reading, state.variant, state.made = reading, variant, None
        jitted = variant.jit or self._jit(variant, reading)
        given, named = self.program.static.boxed(args, kwargs)
        try:
            if reading.arrays:
                result = jitted(reading.arrays, *given, **named)
            else:
                result = jitted(*given, **named)
        except Exception as error:
            entry = state.made  # None: the capture was not finished, so the error is the user's
            if entry is None or not self._falls_back(
                entry, self._leaves(entry, reading, args, kwargs), error
            ):
                raise
            variant.jit = None
            return self._run_fast(variant, reading, args, kwargs)
        finally:
            state.reading = NOTHING  # its arrays are the user's to let go of
        self._keep_made(variant, reading)
        return result

    def _keep_made(self, variant: _Variant, reading: Reading) -> None:
        """Keeps the variant under the guards that tracing has added, if it was traced now."""
        made = self._calling.made
        if made is not None and not made.kept:
            variant.jit = None
        elif made is not None:
            with self.program.lock:
                key = self.program.free.again(reading).key
                if key not in self._variants:
                    self._keep(key, variant)

    def _jit(self, variant: _Variant, reading: Reading) -> Any:
        """Returns the variant's jit, made if need be; free arrays are its first argument."""
        program = self.program
        with program.lock:
            if variant.jit is None:
                shift = 1 if reading.arrays else 0

                @functools.wraps(program.fn, updated=())
                def traced(*args: Any, **kwargs: Any) -> Any:
                    return self._trace(args[0] if shift else (), args[shift:], kwargs)

                traced.__name__ = program.name
                if shift and hasattr(traced, "__wrapped__"):
                    del traced.__wrapped__  # its signature lacks the first argument
                variant.jit = jax.jit(
                    traced,
                    static_argnums=tuple(i + shift for i in program.static.argnums),
                    static_argnames=program.static.argnames,
                    donate_argnums=tuple(sorted(i + shift for i in variant.argnums)),
                    donate_argnames=tuple(sorted(variant.argnames)),
                    compiler_options=program.compiler_options or None,
                )
            return variant.jit

    def _trace(self, arrays: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs while jit traces: captures and rewrites, once a signature for all threads."""
        state, program = self._calling, self.program
        args, kwargs = unboxed(args, kwargs)
        if modules.any_module((args, kwargs)):
            raise _KeyedRoadError
        with program.taken_apart(args, kwargs, state.reading) as call:
            keep = functools.partial(self._keep_donation, state.variant, args, kwargs)
            with program.lock:
                reading = program.free.again(state.reading)  # as other threads know it by now
                entry = program.entry(program.key(reading, call, args, kwargs))
                if entry is None:
                    entry = program.make((), call, reading, args, kwargs, keep, state.last)
            if entry is None:
                raise _KeyedRoadError
            state.made = entry
            return call.finish(entry.after, evaluate(entry.jaxpr, _inputs(entry, arrays, call)))

    def _keep_donation(
        self,
        variant: _Variant,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        jaxpr: _jax.Jaxpr,
    ) -> None:
        """Makes the jit of its own donate what the function, a jit itself, donates."""
        flat = donated_inputs(jaxpr)
        if not any(flat):
            return
        rest, static = iter(flat), self.program.static
        nums, names = set(), set()
        for i, arg in enumerate(args):
            marks = [] if i in static.argnums else [next(rest) for _ in jax.tree.leaves(arg)]
            nums |= {i} if marks and all(marks) else set()
        for name in sorted(kwargs):
            fixed = name in static.argnames
            marks = [] if fixed else [next(rest) for _ in jax.tree.leaves(kwargs[name])]
            names |= {name} if marks and all(marks) else set()
        donated = variant.argnums | nums, variant.argnames | names
        if donated != (variant.argnums, variant.argnames):
            variant.argnums, variant.argnames = donated
            variant.jit = None
            raise _DonationError

    def _run_keyed(self, reading: Reading, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with self.program.taken_apart(args, kwargs, reading) as call:
            entry = self._entry_of(reading, call, args, kwargs)
            inputs = _inputs(entry, reading.arrays, call)
            if self.program.options["verify"] and entry.as_written is None:
                entry = self.program.verified(entry, inputs)
            results = entry.run(*inputs) if entry.run else self._first_run(entry, inputs)
            return call.finish(entry.after, results)

    def _first_run(self, entry: Entry, inputs: list[Any]) -> list[Any]:
        run = _own_jit(entry)
        try:
            results = run(*inputs)
        except Exception as error:
            if not (entry.kept and self._falls_back(entry, inputs, error)):
                raise
            return self._first_run(self.program.entries[entry.key], inputs)
        if entry.kept:
            self.program.entries[entry.key] = replace(entry, run=run)
        return results

    def _entry_of(
        self, reading: Reading, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Entry:
        """Returns the entry for the call; questions are answered on the way."""
        program, key = self.program, None
        answers: tuple[Any, ...] = ()
        while True:
            with program.lock:
                known = program.free.again(reading)  # with the guards that captures added by now
                if key is None or known is not reading:
                    reading, key, answers = known, program.key(known, call, args, kwargs), ()
                entry = program.entry(key, answers)
                if entry is not None:
                    return entry
                question = program.question(key, answers)
                if question is None:
                    entry = program.make(
                        answers, call, reading, args, kwargs, last=self._calling.last
                    )
                    if entry is not None:
                        return entry
                    continue
            asked, run, lifted = question
            if any(isinstance(x, jax.ShapeDtypeStruct) for x in call.leaves):
                raise CaptureError(
                    f"compile: {program.name} asks at {asked.source} for the value of an array, "
                    "and a shape has none. Give arrays in place of shapes."
                )
            value = run(*(reading.arrays[i] for i in lifted), *call.leaves)[0]
            answers += (asked.answer(value),)

    def _leaves(
        self, entry: Entry, reading: Reading, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[Any]:
        rest = self.program.static.close(self.program.fn, args, kwargs)[1:]
        return [*(reading.arrays[i] for i in entry.lifted), *jax.tree.leaves(rest)]

    def _falls_back(self, entry: Entry, inputs: list[Any], error: Exception) -> bool:
        """Makes the entry run as written if its rewritten program does not compile.

        Returns False where that is not what failed. Under `strict` it raises `StrictError`.
        """
        from tpjax.stax.fallback import failure_of

        failure = None
        if entry.as_written is None:
            failure = failure_of(entry.jaxpr, entry.original, entry.reports, inputs)
        if failure is None:
            return False
        name = self.program.name
        if self.program.options["strict"]:
            raise StrictError(failure.strict_message(name)) from error
        warnings.warn(failure.message(name), stacklevel=6)
        self.program.as_written(entry, failure.reasons())
        return True


def roads_of(program: Program) -> Roads:
    """Returns the program's roads, one object however many views the program has."""
    with program.lock:
        if program.roads is None:
            program.roads = Roads(program)
    return program.roads


def _inputs(entry: Entry, arrays: Any, call: Call) -> list[Any]:
    return [*(arrays[i] for i in entry.lifted), *call.leaves]


def _own_jit(entry: Entry) -> Any:
    options = dict(entry.options) or None
    return jitted_program(
        entry.jaxpr, entry.name, donate_argnums=entry.donated, compiler_options=options
    )
