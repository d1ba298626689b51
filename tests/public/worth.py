# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""What each pass is worth on real programs: all passes with one left out, and one pass alone.

    python -m tests.public.worth                      # jaxprs alone: a minute
    python -m tests.public.worth --xla                # XLA's memory, FLOPs and compile time too
    python -m tests.public.worth --programs=LSTM,GPT  # those whose names hold one of the words

Of each program (a loss) are counted: equations, each body once; kernels, which are hits of passes
that rewrite to operators; bytes of residuals, which are what `jax.vjp` keeps for the backward pass
besides arguments; and of value and gradient compiled for the CPU, temporary bytes, FLOPs, seconds
of CPU time for tracing derivatives, lowering and XLA together, and milliseconds of a run (the best
of many). Large programs are only traced, as for a GPU: what kernels keep is counted there.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from tests.public import transformers
from tests.public.programs import LARGE, PROGRAMS, values
from tpjax.core import _jax
from tpjax.pallas.dispatch import use
from tpjax.stax_passes.contracts import passes_once
from tpjax.stax_passes.engine import rows_of
from tpjax.stax_passes.pipeline import PASSES, optimize

DEEP = {"Llama of 16 layers": partial(transformers.llama, 16)}
NOISE = {"compile_s": 0.1, "run_ms": 0.1}
"""Times that differ by a smaller share are not told apart."""
RUN_S, MIN_RUNS = 0.3, 30
"""Seconds over which a program is run again and again, and how often at least."""


class Numbers(NamedTuple):
    """What is counted of one program; smaller is better, but for kernels."""

    equations: int
    kernels: int
    residual_bytes: int
    temp_bytes: float = float("nan")
    flops: float = float("nan")
    compile_s: float = float("nan")
    run_ms: float = float("nan")


def numbers_of(jaxpr: _jax.Jaxpr, num_params: int, kernels: int, run_on: Any) -> Numbers:
    """Returns the numbers of a loss whose first inputs are the parameters.

    Args:
      jaxpr: the loss.
      num_params: how many of its inputs are differentiated.
      kernels: how many there are.
      run_on: arguments to run it on, or None not to compile it.
    """
    fn = lambda *args: jaxpr_as_fun(jaxpr)(*args)[0]  # noqa: E731
    types = [_jax.array_type(var) for var in jaxpr.invars]
    avals = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in types]
    found = Numbers(_distinct(jaxpr), kernels, _residual_bytes(fn, avals, num_params))
    if run_on is None:
        return found
    start = time.process_time()
    step = jax.jit(jax.value_and_grad(fn, argnums=tuple(range(num_params))))
    compiled = step.lower(*avals).compile()
    seconds = time.process_time() - start
    cost: Any = compiled.cost_analysis()
    memory: Any = compiled.memory_analysis()
    runs: list[float] = []
    while len(runs) < MIN_RUNS or sum(runs) < RUN_S:
        begun = time.perf_counter()
        jax.block_until_ready(compiled(*run_on))
        runs.append(time.perf_counter() - begun)
    return found._replace(
        temp_bytes=memory.temp_size_in_bytes, flops=cost.get("flops", 0.0), compile_s=seconds,
        run_ms=1e3 * min(runs),
    )  # fmt: skip


def _distinct(jaxpr: _jax.Jaxpr) -> int:
    seen: dict[int, _jax.Jaxpr] = {}
    stack = [jaxpr]
    while stack:
        body = stack.pop()
        if id(body) not in seen:
            seen[id(body)] = body
            for eqn in body.eqns:
                stack.extend(_jax.all_subjaxprs(eqn))
    return sum(len(body.eqns) for body in seen.values())


def _residual_bytes(fn: Callable[..., Any], avals: Sequence[Any], num_params: int) -> int:
    def forward(*args: Any) -> Any:
        data = args[num_params:]
        _, pullback = jax.vjp(lambda *params: fn(*params, *data), *args[:num_params])
        return jax.tree.leaves(pullback)

    jaxpr = jax.make_jaxpr(forward)(*avals)
    given = {*jaxpr.invars, *jaxpr.constvars}
    kept = {v: v.aval for v in jaxpr.outvars if isinstance(v, _jax.Var) and v not in given}
    return sum(aval.size * aval.dtype.itemsize for aval in map(_jax.array_type, kept))


# -- passes left out ------------------------------------------------------------------------------


def without(run: Any) -> tuple[Any, ...]:
    """Returns PASSES with one of them left out."""
    groups = (
        tuple(p for p in entry if p is not run) if isinstance(entry, tuple) else entry
        for entry in PASSES
        if entry is not run
    )
    return tuple(entry for entry in groups if entry != ())


class Line(NamedTuple):
    """One program under one choice of passes."""

    program: str
    passes: str
    """all, none, "without" or "only" and the name of a pass."""
    numbers: Numbers


def lines(names: Sequence[str], xla: bool) -> Iterator[Line]:
    """Yields the numbers of each program under each choice of passes."""
    table = {**PROGRAMS, **DEEP, **LARGE}
    for name in names:
        fn, args = table[name]()
        jaxpr = jax.make_jaxpr(fn)(*args)
        num_params = len(jax.tree.leaves(args[0]))
        given = jax.tree.leaves(values(args)) if xla and name not in LARGE else None
        done: dict[str, Numbers] = {}
        for what, passes in _choices():
            with use(platform="cuda") if name in LARGE else nullcontext():
                result, reports = optimize(jaxpr, passes)
            fused = {p.__name__ for p in passes_once(passes or ()) if rows_of(p)}
            kernels = sum(len(r.hits) for r in reports if r.name in fused)
            text = str(result)
            run_on = None if what.startswith("only") else given
            if text not in done:
                with use(platform="cuda") if name in LARGE else nullcontext():
                    done[text] = numbers_of(result, num_params, kernels, run_on)
            yield Line(name, what, done[text]._replace(kernels=kernels))


def _choices() -> Iterator[tuple[str, tuple[Any, ...]]]:
    yield "all", PASSES
    yield "none", ()
    for run in passes_once():
        yield f"without {run.__name__}", without(run)
    for run in passes_once():
        yield f"only {run.__name__}", ((run,),) if run in _repeatable() else (run,)


def _repeatable() -> set[Any]:
    return {run for entry in PASSES if isinstance(entry, tuple) for run in entry}


# -- the table ------------------------------------------------------------------------------------


def table(found: Sequence[Line]) -> str:
    """Returns, for each pass, how much more of everything there is without it, as Markdown."""
    by = {(line.program, line.passes): line.numbers for line in found}
    programs = list(dict.fromkeys(line.program for line in found))
    rows = ["| pass | " + " | ".join(f.replace("_", " ") for f in Numbers._fields) + " |"]
    rows.append("|" + "---|" * (1 + len(Numbers._fields)))
    for choice, base, sign in (("without", "all", 1), ("only", "none", -1)):
        for run in passes_once():
            what = f"{choice} {run.__name__}"
            cells = [
                _cell([(p, getattr(by[p, base], f), getattr(by[p, what], f)) for p in programs],
                      f, sign)
                for f in Numbers._fields
            ]  # fmt: skip
            rows.append(f"| {what} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _cell(pairs: list[tuple[str, float, float]], what: str, sign: int) -> str:
    """Returns in how many programs the number changed, and where most: "+12 % LSTM (3 of 16)"."""
    noise = NOISE.get(what, 0.0)
    if what == "kernels":
        changes = [(after - before, p) for p, before, after in pairs]
    else:
        changes = [(after / before - 1, p) for p, before, after in pairs if before]
    changes = [(c, p) for c, p in changes if abs(c) > noise]  # not a number: not measured
    if not changes:
        return "-"
    better = sum((c > 0) == ((sign > 0) ^ (what == "kernels")) for c, _ in changes)
    most, program = max(changes, key=lambda c: abs(c[0]))
    shown = f"{most:+g}" if what == "kernels" else f"{most:+.1%}"
    worse = f", {len(changes) - better} the other way" if better < len(changes) else ""
    return f"{shown} {program} ({better} of {len(pairs)}{worse})"


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--xla", action="store_true", help="compile for the CPU too")
    parser.add_argument("--programs", default="", help="words, with commas, that names hold")
    parser.add_argument("--json", metavar="FILE", help="where to write every number")
    options = parser.parse_args()
    words = options.programs.split(",")
    names = [n for n in (*PROGRAMS, *DEEP, *LARGE) if any(word in n for word in words)]
    found = []
    for line in lines(names, options.xla):
        found.append(line)
        if line.passes in ("all", "none"):
            print(line.program, line.passes, line.numbers._asdict(), flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump([(p, what, n._asdict()) for p, what, n in found], file, indent=1)
    print(table(found))


if __name__ == "__main__":
    jnp.zeros(()).block_until_ready()  # start the backend before anything is timed
    main()
