# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Times every implementation of the operators on their production samples, side by side in one run.

    python -m tpjax.pallas.bench                    # every operator
    python -m tpjax.pallas.bench rms_norm
    python -m tpjax.pallas.bench --tune ~/.cache/tpjax rms_norm
    python -m tpjax.pallas.bench --record           # the same into tpjax/pallas/tuned.json

Random data; median of five groups of calls, after a warm-up. Work is the row's `cost` forward, and
for attention 3.5 times that (for a norm, the bytes of five passes instead of two) forward and
backward. `--tune` times every config of the kernels, forward and backward, and keeps the fastest in
the folder, from where `tpjax.cache(folder)` has kernels take it.
"""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from tpjax.core.errors import UnsupportedError, did_you_mean
from tpjax.core.operator import Op, Sample, parse_spec
from tpjax.core.store import Store
from tpjax.pallas import tuning
from tpjax.pallas.dispatch import IMPLEMENTATIONS, use
from tpjax.pallas.ops import OPS

GROUPS = 5
BACKWARD_WORK = {"flash_attention": 3.5, "rms_norm": 2.5, "layer_norm": 2.5}
"""Forward and backward work as a multiple of the forward call's: 7 products of 2, 5 passes of 2."""


class Timing(NamedTuple):
    """One measured line."""

    op: str
    sample: str
    implementation: str
    direction: str
    ms: float | None
    """Median milliseconds a call; None where it did not run."""
    tflops: float
    """TFLOP/s by the row's cost."""
    tbytes: float
    """TB/s by the row's cost."""
    note: str


def arguments(sample: Sample) -> list[jax.Array | None]:
    """Returns random arguments for the sample, standard normal."""
    out: list[jax.Array | None] = []
    for i, spec in enumerate(sample.specs):
        if spec is None:
            out.append(None)
            continue
        dtype, shape = parse_spec(spec)
        out.append(jax.random.normal(jax.random.key(i), shape).astype(dtype))
    return out


def median_ms(fn: Callable[..., Any], *args: Any, budget_ms: float = 200.0) -> float:
    """Returns the median time of a call in milliseconds, over groups that fill the budget."""
    compiled = jax.jit(fn).lower(*args).compile()
    jax.block_until_ready(compiled(*args))
    start = time.perf_counter()
    jax.block_until_ready(compiled(*args))
    once_ms = (time.perf_counter() - start) * 1e3
    calls = max(3, min(200, int(budget_ms / max(once_ms, 1e-3))))
    times = []
    for _ in range(GROUPS):
        start = time.perf_counter()
        for _ in range(calls):
            out = compiled(*args)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / calls * 1e3)
    return sorted(times)[GROUPS // 2]


def _cotangent(op: Op, sample: Sample, args: list[Any]) -> Any:
    """Returns random cotangents of the results."""
    results = jax.eval_shape(sample.call_of(op.fn), *args)
    return jax.tree.map(lambda x: jax.random.normal(jax.random.key(99), x.shape, x.dtype), results)


def _both(op: Op, sample: Sample, args: list[Any]) -> Callable[..., Any]:
    """Returns the function of value and gradients for a cotangent, which is the last argument."""
    at, call = op.differentiable(sample), sample.call_of(op.fn)

    def run(*given: Any) -> Any:
        *inputs, cotangent = given

        def forward(*some: Any) -> Any:
            full = list(inputs)
            for i, x in zip(at, some, strict=True):
                full[i] = x
            return call(*full)

        out, vjp = jax.vjp(forward, *(inputs[i] for i in at))
        return out, vjp(cotangent)

    return run


def time_op(op: Op) -> Iterator[Timing]:
    """Yields forward and forward+backward timings of every implementation on the slow samples."""
    for sample in op.samples:
        if not sample.slow:
            continue
        args = arguments(sample)
        cost = sample.call_of(op.cost)(*args)
        cotangent = _cotangent(op, sample, args)
        forward = sample.call_of(op.fn)
        for name in IMPLEMENTATIONS:
            for direction, fn, given, work in (
                ("fwd", forward, args, 1.0),
                ("fwd+bwd", _both(op, sample, args), [*args, cotangent], BACKWARD_WORK[op.name]),
            ):
                ms, note = None, ""
                try:
                    with use(implementation=name):
                        ms = median_ms(fn, *given)
                except UnsupportedError as error:
                    note = str(error)
                except jax.errors.JaxRuntimeError as error:  # out of memory is a result
                    note = str(error).split("\n")[0][:80]
                seconds = float("inf") if ms is None else ms / 1e3
                rates = (work * cost.flops / seconds / 1e12, work * cost.bytes / seconds / 1e12)
                yield Timing(op.name, str(sample), name, direction, ms, *rates, note)


def tune_op(op: Op, store: Store | None, timer: Callable[..., float] = median_ms) -> Iterator[str]:
    """Yields a line for each config of the operator's kernel on each slow sample; keeps the best.

    Args:
      op: the operator.
      store: where the fastest config of each sample goes; None: into `tuned.json`.
      timer: takes a function and its arguments, returns milliseconds a call.
    """
    for sample in op.samples:
        if not sample.slow:
            continue
        args = arguments(sample)
        cotangent = _cotangent(op, sample, args)

        def measure(sample: Sample = sample, args: Any = (*args, cotangent)) -> float | None:
            try:
                return timer(_both(op, sample, list(args[:-1])), *args)
            except jax.errors.JaxRuntimeError:  # too large for the device
                return None

        with use(implementation="pallas"):
            try:
                with tuning.requests() as found:
                    jax.eval_shape(_both(op, sample, args), *args, cotangent)
            except UnsupportedError as error:
                yield f"{op.name:16s} {error}  {sample}"
                continue
            for request in dict.fromkeys(found):
                for best, (config, ms) in enumerate(tuning.tune(request, measure, store)):
                    shown = "  refused " if ms is None else f"{ms:9.3f} ms"
                    mark = " " if best else "*"
                    yield f"{op.name:16s} {mark} {shown}  {config}  {sample}"


def main(words: list[str]) -> None:
    """Prints the table for the named operators, all if none is named; after `--tune`, a folder."""
    known = {op.name: op for op in OPS}
    folder = None
    if words[:1] == ["--tune"]:
        if len(words) < 2:
            sys.exit("bench: --tune must be followed by the folder that tpjax.cache will be given.")
        folder, words = words[1], words[2:]
    recording = words[:1] == ["--record"]
    words = words[1:] if recording else words
    for name in words:
        if name not in known:
            sys.exit(f"bench: unknown operator {name!r}. {did_you_mean(name, known)}")
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}")
    for name in words or known:
        if folder is not None or recording:
            store = None if folder is None else Store(Path(folder).expanduser())
            for line in tune_op(known[name], store):
                print(line)
            continue
        for t in time_op(known[name]):
            shown = "  refused " if t.ms is None else f"{t.ms:9.3f} ms"
            rates = t.note or f"{t.tflops:7.1f} TFLOP/s {t.tbytes:6.2f} TB/s"
            print(f"{t.op:16s} {t.direction:8s} {t.implementation:7s} {shown} {rates}  {t.sample}")


if __name__ == "__main__":
    main(sys.argv[1:])
