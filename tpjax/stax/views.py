# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""What a call would do, without running it: its rewritten jaxpr, and the explanation."""

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax

from tpjax.core import _jax, parts
from tpjax.pallas.dispatch import record_choices
from tpjax.stax.capture import captured_from, evaluate
from tpjax.stax.explanation import Explanation
from tpjax.stax.program import Program, nested_reports
from tpjax.stax_passes.decisions import optimize_warm
from tpjax.stax_passes.report import Report

_retrace = jax.make_user_context(0)
_retrace_count = itertools.count(1)


@contextmanager
def fresh_traces() -> Iterator[None]:
    """Hides JAX's caches of traces, so that everything inside is traced and chosen again."""
    with _retrace(next(_retrace_count)):
        yield


def rewritten_jaxpr(
    program: Program, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> _jax.Jaxpr:
    """Returns the call's jaxpr rewritten; free arrays are constants of it."""
    with fresh_traces(), _captured(program, args, kwargs) as captured:
        return program.rewrite(captured)[0]


@contextmanager
def _captured(
    program: Program, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[_jax.Jaxpr]:
    """Captures the call anew; questions are answered where the arguments have values."""
    reading = program.read(args)
    numbers = _jax.at_top_level()
    with program.taken_apart(args, kwargs, reading, numbers) as call:
        known = not any(isinstance(x, jax.ShapeDtypeStruct) for x in call.leaves)
        can_answer = known and not program.options["strict"] and _jax.at_top_level()
        answers: tuple[Any, ...] = ()
        while True:
            captured = captured_from(call, answers if can_answer else None)
            if captured.question is None:
                break
            asked = evaluate(captured.jaxpr, call.leaves)[0]
            answers += (captured.question.answer(asked),)
        yield captured.jaxpr


def explanation_of(
    program: Program, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Explanation:
    """Returns what is rewritten in the call, traced anew with all it calls, and not run."""
    reports: list[tuple[Report, ...]] = []
    token = nested_reports.set(reports)
    try:
        with (
            fresh_traces(),
            record_choices() as choices,
            _captured(program, args, kwargs) as captured,
        ):
            direct, reading = tuple(choices), program.read(args)
            jaxpr, lifted = parts.lifted(captured, program.free.inputs(reading, captured))
            result, own = optimize_warm(jaxpr, program.passes(), options=program.options["mode"])
    finally:
        nested_reports.reset(token)
    inputs = tuple(f"{reading.paths[i]}: {jax.typeof(reading.arrays[i])}" for i in lifted)
    paths = {id(x): path for x, path in reading.by_path()}
    return Explanation.of(program.name, jaxpr, result, own, tuple(reports), direct, inputs, paths)
