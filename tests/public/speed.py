# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""How long the passes take, by number of equations; and what compiling 32 layers takes in all.

    python -m tests.public.speed                   # the curve: 1,000 to 50,000 equations
    python -m tests.public.speed 1000 5000         # at these sizes
    python -m tests.public.speed --llama           # 32 layers: jax.jit alone, and tpjax.compile

Times are CPU seconds of this process: the passes run on one core, XLA on as many as there are.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import tpjax
from tests.public import transformers
from tpjax.core import _jax, soundness
from tpjax.stax_passes.pipeline import PASSES, optimize

SIZES = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000)
X = jax.ShapeDtypeStruct((8, 8), jnp.float32)


# -- programs of any size -------------------------------------------------------------------------

UNARY: tuple[Callable[[Any], Any], ...] = (
    jnp.sin, jnp.tanh, lax.neg, jnp.abs, lax.exp2, lambda x: x * 1.0, lambda x: 2.0 * x,
    lambda x: x + 0.5,
)  # fmt: skip
BINARY: tuple[Callable[[Any, Any], Any], ...] = (lax.add, lax.mul, lax.sub, lax.max, lax.min)
MIXED: tuple[Callable[[Any, Any], Any], ...] = (
    *BINARY,
    lambda x, y: lax.dot(x, y),
    lambda x, y: lax.dot(x, y.T),
    lambda x, y: x.astype(jnp.bfloat16).astype(jnp.float32) + y,
    lambda x, y: (x - x.max(1, keepdims=True)) / y.sum(1, keepdims=True),
    lambda x, y: jnp.where(x > y, x, 0.0),
    lambda x, y: jnp.concatenate([x[:4], y[4:]]),
    lambda x, y: x.reshape(4, 16).reshape(8, 8) + y,
    lambda x, y: lax.dynamic_slice(jnp.pad(x, 1), (1, 1), (8, 8)) * y,
    lambda x, y: x + jnp.arange(8.0) * 2 + y,
    lambda x, y: jnp.take(x, jnp.arange(8), axis=0) + jax.nn.silu(y),
)


def _random(table: Sequence[Callable[..., Any]], each: int) -> Callable[[int], _jax.Jaxpr]:
    """Returns what makes a program of `count` equations: functions of the last eight values."""

    def make(count: int) -> _jax.Jaxpr:
        rng = np.random.default_rng(0)

        def fn(x: Any, y: Any) -> Any:
            pool = [x, y]
            for _ in range(count // each):
                op = table[int(rng.integers(len(table)))]
                recent = pool[-8:]
                args = [
                    recent[int(rng.integers(len(recent)))] for _ in range(1 + (op not in UNARY))
                ]
                pool.append(op(*args))
            return pool[-4:]

        return jax.make_jaxpr(fn)(X, X)

    return make


def _blocks(count: int) -> _jax.Jaxpr:
    fn, args = transformers.llama(max(1, count // 110))
    return jax.make_jaxpr(fn)(*args)


def _nested(count: int) -> _jax.Jaxpr:
    """Jitted blocks, each of its own code, with jitted helpers in them."""

    def block(i: int) -> Callable[[Any], Any]:
        def inner(x: Any) -> Any:
            return jax.jit(lambda y: jnp.sin(y) * (i + 0.5) + y)(jnp.tanh(x)) - x

        return jax.jit(lambda x: inner(inner(x)) + jnp.where(x > i, x, 0.0))

    def fn(x: Any) -> Any:
        for i in range(max(1, count // 20)):
            x = block(i)(x)
        return x

    return jax.make_jaxpr(fn)(X)


KINDS: dict[str, Callable[[int], _jax.Jaxpr]] = {
    "elementwise": _random((*UNARY, *BINARY), 1),
    "mixed": _random(MIXED, 3),
    "transformer blocks": _blocks,
    "nested jits": _nested,
}
"""By name, what makes a jaxpr of about so many equations."""


def seconds(jaxpr: _jax.Jaxpr) -> dict[str, float]:
    """Returns CPU seconds of the default passes, in all, by pass, and of the type check."""
    spent: defaultdict[str, float] = defaultdict(float)

    def timed(run: Any) -> Any:
        def timing(jaxpr: _jax.Jaxpr) -> Any:
            start = time.process_time()
            result = run(jaxpr)
            spent[run.__name__] += time.process_time() - start
            return result

        return timing

    passes = [tuple(map(timed, e)) if isinstance(e, tuple) else timed(e) for e in PASSES]
    start = time.process_time()
    result, _ = optimize(jaxpr, passes)
    total = time.process_time() - start
    start = time.process_time()
    soundness.check(result)
    return {"total": total, **spent, "type check": time.process_time() - start}


def curve(sizes: Sequence[int]) -> None:
    """Prints the table."""
    for kind, make in KINDS.items():
        for size in sizes:
            start = time.process_time()
            jaxpr = make(size)
            traced = time.process_time() - start
            count = _jax.count_equations(jaxpr)
            spent = seconds(jaxpr)
            total = spent.pop("total")
            split = ", ".join(f"{name} {s:.2f}" for name, s in spent.items() if s >= 0.005)
            each = 1e3 * total / count
            print(f"| {kind} | {count} | {traced:.2f} | {total:.2f} | {each:.3f} | {split} |",
                  flush=True)  # fmt: skip


# -- 32 layers ------------------------------------------------------------------------------------


def llama(compiled: bool, gradient: bool) -> dict[str, float]:
    """Returns CPU and wall seconds of tracing, lowering and XLA, in this fresh process."""
    loss, args = transformers.llama(32, 64, 4, 192, 256, 65, dtype="float32")
    jnp.zeros(()).block_until_ready()
    fn = tpjax.compile(loss) if compiled else loss
    fn = jax.value_and_grad(fn) if gradient else fn
    cpu, wall = time.process_time(), time.perf_counter()
    traced = jax.jit(fn).trace(*args)
    marks = [time.process_time()]
    lowered = traced.lower()
    marks.append(time.process_time())
    lowered.compile()
    marks.append(time.process_time())
    split = dict(zip(("trace", "lower", "XLA"), np.diff([cpu, *marks]).tolist(), strict=True))
    return {**split, "CPU s": marks[-1] - cpu, "wall s": time.perf_counter() - wall}


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("sizes", type=int, nargs="*", help="equations")
    parser.add_argument("--llama", action="store_true", help="compile 32 layers, four times")
    parser.add_argument("--only", help="one of them, in this process: (plain|compiled)(+gradient)")
    options = parser.parse_args()
    if options.only:
        print(json.dumps(llama("compiled" in options.only, "gradient" in options.only)))
    elif options.llama:
        for what in ("plain", "compiled", "plain+gradient", "compiled+gradient"):
            command = [sys.executable, "-m", "tests.public.speed", "--only", what]
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            split = json.loads(out)
            print(f"| {what} | " + " | ".join(f"{s:.2f}" for s in split.values()) + " |")
    else:
        curve(options.sizes or SIZES)


if __name__ == "__main__":
    main()
