# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Measures operators: compiles every form first, then times those of a sample in turn."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp

from tpjax.core.operator import Op, Sample
from tpjax.pallas.bench.ceilings import measure_ceilings, product_dtype
from tpjax.pallas.bench.clock import GROUPS, Timing, time_together
from tpjax.pallas.bench.hlo import Count, count_program
from tpjax.pallas.bench.programs import (
    BOTH,
    REFERENCE,
    Program,
    compile_all,
    in_words,
    is_fault,
    random_arrays,
    random_cotangents,
    shapes_of,
    work_of,
)
from tpjax.pallas.bench.results import WRONG, Measured


def by_words(words: Sequence[str] | None = None) -> Callable[[Sample], bool]:
    """Returns what says of a sample whether it is measured.

    Args:
      words: "production" shapes, "small" ones, "all", or text that the sample as printed holds; one
        that fits is enough. None: production shapes on a GPU, small ones elsewhere.
    """
    if words is None:
        words = ("small",) if jax.default_backend() == "cpu" else ("production",)
    known: dict[str, Callable[[Sample], bool]] = {
        "production": lambda sample: sample.slow,
        "small": lambda sample: not sample.slow,
        "all": lambda sample: True,
    }

    def fits(word: str, sample: Sample) -> bool:
        return known[word](sample) if word in known else word in str(sample)

    return lambda sample: any(fits(word, sample) for word in words)


def measure(
    ops: Sequence[Op],
    choose: Callable[[Sample], bool] | None = None,
    others: Mapping[str, Callable[..., Any]] | None = None,
    groups: int = GROUPS,
) -> Iterator[Measured]:
    """Yields what every form of the operators takes, sample by sample.

    The forms are ours, XLA's and the float32 reference, and `others`. All are compiled before
    anything is timed; those of a sample and direction run in turn, group by group, on equal
    arguments.

    Args:
      ops: rows of the table.
      choose: says of a sample whether it is measured; None: `by_words()`.
      others: more functions with the operator's signature, by name: another library's, say.
      groups: of calls, for each form.

    Example:
      >>> from tpjax.pallas.ops import OPS
      >>> rows = list(measure(OPS[:1], lambda sample: "f32[6,256]" in str(sample), groups=6))
      >>> [(row.direction, row.form, row.timing is not None) for row in rows][1:3]
      [('fwd', 'xla', True), ('fwd', 'reference', True)]
    """
    programs = compile_all(ops, choose or by_words(), others)
    for _, same in groupby(programs, key=lambda p: (p.op.name, str(p.sample), p.direction)):
        yield from _together(list(same), groups)


def _together(programs: list[Program], groups: int) -> Iterator[Measured]:
    """Yields what the forms of one sample and direction take."""
    op, sample, direction = programs[0].op, programs[0].sample, programs[0].direction
    flops, moved = work_of(op, sample)[direction]
    ceilings = measure_ceilings(product_dtype(shapes_of(sample)))
    plain = Measured(op.name, str(sample), direction, "", ceilings, flops, moved)
    args: list[Any] = random_arrays(op, sample)
    if direction == BOTH:
        args.append(random_cotangents(op, sample))
    ready = [p for p in programs if p.compiled is not None]
    runs = {p.form: _call(p, args) for p in ready}
    errors = _errors(runs)
    timings = dict(zip(runs, time_together(list(runs.values()), groups), strict=True))
    for program in programs:
        row = replace(plain, form=program.form, note=program.note, failed=program.failed)
        timing = timings.get(program.form)
        if isinstance(timing, Exception):
            row = replace(row, note=in_words(timing), failed=is_fault(timing))
        elif isinstance(timing, Timing) and program.compiled is not None:
            error = errors.get(program.form)
            wrong = error is not None and not error <= WRONG
            row = replace(
                row,
                timing=timing,
                count=_count(program, flops),
                temporary_bytes=_temporary_bytes(program.compiled),
                error=error,
                failed=wrong,
                note=f"not what the reference gives: error {error:.2g}" if wrong else "",
            )
        yield row


def _call(program: Program, args: list[Any]) -> Callable[[], Any]:
    assert program.compiled is not None
    compiled = program.compiled
    return lambda: compiled(*args)


def _errors(runs: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Returns how far each form's results and gradients are from the reference's, where both run.

    Why one does not run, the timing says.
    """
    found: dict[str, float] = {}
    with suppress(KeyError, jax.errors.JaxRuntimeError):
        want = jax.block_until_ready(runs[REFERENCE]())
        for name, run in runs.items():
            with suppress(jax.errors.JaxRuntimeError):
                if name != REFERENCE:
                    found[name] = _error(run(), want)
    return found


def _error(got: Any, want: Any) -> float:
    """Returns the largest relative RMS difference of a leaf; NaN if a value is not finite."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    differences = [float(_difference(x, y)) for x, y in pairs if x.dtype != jax.dtypes.float0]
    return max(differences, key=lambda x: (x != x, x), default=0.0)


@jax.jit
def _difference(x: jax.Array, y: jax.Array) -> jax.Array:
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    same = x == y  # infinities too, as the lse of a row that sees nothing is
    size = jnp.sqrt(jnp.mean(jnp.where(same & jnp.isinf(y), 0, y) ** 2))
    return jnp.sqrt(jnp.mean(jnp.where(same, 0, x - y) ** 2)) / jnp.where(size > 0, size, 1)


def _count(program: Program, flops: float) -> Count:
    """Returns the program's counts; a kernel's operations are the task's, by the row's cost."""
    assert program.compiled is not None
    count = count_program(program.compiled.as_text())
    return count._replace(flops=max(count.flops, flops)) if count.kernels else count


def _temporary_bytes(compiled: jax.stages.Compiled) -> int:
    analysis = compiled.memory_analysis()
    return 0 if analysis is None else int(analysis.temp_size_in_bytes)
