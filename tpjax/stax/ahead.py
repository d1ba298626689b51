# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Programs compiled before they are called, several at once.

Tracing, rewriting and lowering are Python and run in the caller's thread, where the caller's
settings hold, one after the other: they do not depend on how many threads there are. XLA compiles
in threads. What it made is found by later calls because jit finds what was lowered.
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tpjax.core import _jax
from tpjax.core.errors import message
from tpjax.pallas.dispatch import current_target
from tpjax.stax import modules
from tpjax.stax.entries import check_arguments
from tpjax.stax.program import Program
from tpjax.stax.roads import Lowered, Roads, roads_of

_REMEDY = "Write f.precompile((x, y), (x, z)), or f.precompile({'x': x, 'y': y})."


def compiled_ahead(
    program: Program, bound: tuple[Any, ...], calls: Sequence[Any], workers: int | None = None
) -> tuple[Any, ...]:
    """Returns what XLA compiled for the calls; see `Compiled.precompile`."""
    if workers is not None and (
        not isinstance(workers, int) or isinstance(workers, bool) or workers < 1
    ):
        raise ValueError(message("precompile", "workers", "a number of threads", repr(workers)))
    given = [_arguments(bound, i, call) for i, call in enumerate(calls)]
    if not _jax.at_top_level():
        raise RuntimeError(
            f"precompile: {program.name} is called inside a transformation of JAX, whose program "
            "is the one to compile. Call precompile outside of it."
        )
    roads = roads_of(program)
    lowered = [_lowered(roads, *one) for one in given]
    with ThreadPoolExecutor(workers or _workers()) as pool:
        jobs = [pool.submit(one.lowered.compile) for one in lowered]
        pairs = zip(given, lowered, jobs, strict=True)
        return tuple(_finished(roads, call, one, job) for call, one, job in pairs)


def _workers() -> int:
    """Returns how many threads pay: for a GPU one, as XLA times kernels on it while it compiles."""
    return (os.cpu_count() or 1) if current_target().platform == "cpu" else 1


def _arguments(bound: tuple[Any, ...], index: int, call: Any) -> tuple[Any, Mapping[str, Any]]:
    if type(call) is tuple:
        return (*bound, *call), {}
    if isinstance(call, dict) and all(isinstance(name, str) for name in call):
        return bound, call
    must = "a tuple of arguments, or a dict of them by name"
    raise TypeError(
        message("precompile", f"calls[{index}]", must, f"{call!r:.60} ({type(call).__name__})")
        + f" {_REMEDY}"
    )


def _lowered(roads: Roads, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Lowered:
    try:
        return roads.lower(args, kwargs)
    except Exception as error:
        if roads.falls_back(error):
            return roads.lower(args, kwargs)
        program = roads.program
        if isinstance(error, TypeError | ValueError) and not modules.any_module((args, kwargs)):
            check_arguments(program.name, program.fn, args, kwargs, program.static.argnames)
        raise


def _finished(roads: Roads, call: tuple[Any, Mapping[str, Any]], lowered: Lowered, job: Any) -> Any:
    """Returns what was compiled; where our program fails to compile, the original one."""
    try:
        compiled = job.result()
    except Exception as error:
        if not roads.falls_back(error, lowered):
            raise
        lowered = roads.lower(*call)
        compiled = lowered.lowered.compile()
    roads.keep(lowered)
    return compiled
