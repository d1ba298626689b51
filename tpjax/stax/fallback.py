# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""When a rewritten program does not compile: whether that is our fault, and which kernel's.

    try:
        return entry.run(*inputs)
    except Exception as error:
        failure = failure_of(entry.jaxpr, entry.original, entry.reports, inputs)
        if failure is None:
            raise                                   # the user's own error, or one at run time
        if strict:
            raise StrictError(failure.strict_message(name)) from error
        warnings.warn(failure.message(name))        # once; then run the original

A failure is ours exactly where the rewritten program cannot be lowered and compiled, without being
run, and the original can. That needs no list of exceptions: an error of the user's own code while
it is traced, or in a compiler option, stops the original too; and an error at run time (a callback,
checkify, a deleted buffer, no memory left) does not stop the compiler. It costs a compilation of
each program, after a failure only. A caller that knows that the capture was not finished need not
ask: that is the user's error.

Under somebody else's jit the program is not ours to replace: `tpjax.pallas.failures` has the error
that is raised there name operator and line.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.extend.core import jaxpr_as_fun

from tpjax.core import _jax
from tpjax.pallas.failures import noted_kernel, reason_of, sentence
from tpjax.stax_passes.report import Report


class Blame(NamedTuple):
    """A kernel that does not compile: who put it where, and why it does not."""

    rule: str
    op: str
    source: str
    """file:line of the user's code that it stands for."""
    reason: str


@dataclass(frozen=True)
class Failure:
    """A rewritten program that does not compile, though the original does."""

    error: Exception
    blamed: tuple[Blame, ...]
    """The kernels that do not compile by themselves; none: the fault is in how they stand."""

    def reasons(self) -> str:
        """Returns rule, kernel, line and reason of every kernel at fault, or the error."""
        if not self.blamed:
            return f"the rewritten program does not compile: {sentence(self.error)}"
        parts = (
            f"the kernel of {one.op}, which {one.rule} puts in ({one.source}), does not compile: "
            f"{one.reason}"
            for one in self.blamed
        )
        return "; ".join(parts)

    def message(self, name: str) -> str:
        """Returns the warning that the function `name` runs as written, and why."""
        return f"compile: {name} runs as written: {self.reasons()}."

    def strict_message(self, name: str) -> str:
        """Returns what to raise instead under `strict`."""
        return (
            f"compile: strict=True, and in {name} {self.reasons()}. Leave strict out to run the "
            "original code."
        )


def failure_of(
    rewritten: _jax.Jaxpr,
    original: _jax.Jaxpr,
    reports: Sequence[Report],
    inputs: Sequence[Any] | None = None,
) -> Failure | None:
    """Returns why the rewritten program does not compile; None: it does, or the original neither.

    Args:
      rewritten: the program after the passes.
      original: the program before them, with the same inputs.
      reports: what the passes did.
      inputs: of the call, for their shardings; nothing is run on them. None: shapes alone.
    """
    if rewritten is original:
        return None
    avals = rewritten.in_avals if inputs is None else [_aval(x) for x in inputs]
    error = _compile_error(rewritten, avals)
    if error is None or _compile_error(original, avals) is not None:
        return None
    return Failure(error, tuple(blame(reports)))


def blame(reports: Sequence[Report]) -> list[Blame]:
    """Returns the kernels among the reports' hits that do not compile by themselves."""
    found: dict[Blame, None] = {}
    for hit in (hit for report in reports for hit in report.hits):
        for choice in hit.choices:
            if choice.implementation == "xla" or choice.key is None:
                continue
            kernel = noted_kernel(choice.op, choice.implementation, choice.key)
            reason = None if kernel is None else reason_of(kernel)
            if reason is not None:
                found[Blame(hit.rule, choice.op, hit.source, reason)] = None
    return list(found)


def _aval(x: Any) -> Any:
    """Returns the type and placement of an input, which need not exist any more."""
    aval = jax.typeof(x)
    placed = isinstance(x, jax.Array) and getattr(x, "committed", False)
    weak, sharding = bool(aval.weak_type), x.sharding if placed else None
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=weak)


def _compile_error(jaxpr: _jax.Jaxpr, avals: Sequence[Any]) -> Exception | None:
    try:
        jax.jit(jaxpr_as_fun(jaxpr)).lower(*avals).compile()
    except Exception as error:
        return error
    return None
