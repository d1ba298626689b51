# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The programs that are compared: every form of an operator on a sample, with gradients too.

Forms are the row's implementations, the reference in full float32, and whatever the caller adds.
Traced one by one, because a preference holds for a thread. Those without a kernel of ours are
compiled one by one too: XLA times candidates while it compiles, and should do so undisturbed. The
others are compiled side by side after them.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpjax.core.errors import UnsupportedError
from tpjax.core.operator import Op, Sample, nbytes, parse_spec
from tpjax.pallas.dispatch import use

FORWARD, BOTH = DIRECTIONS = ("fwd", "fwd+bwd")
REFERENCE = "reference"
MOST_THREADS = 8


@dataclass(frozen=True)
class Program:
    """One form of an operator, on one sample and in one direction."""

    op: Op
    sample: Sample
    direction: str
    form: str
    """An implementation's name, "reference", or what the caller called it."""
    compiled: jax.stages.Compiled | None
    note: str = ""
    """Why there is nothing compiled."""
    failed: bool = False
    """Whether that is a fault, and not a refusal or too little memory."""


def shapes_of(sample: Sample) -> list[jax.ShapeDtypeStruct | None]:
    """Returns shapes and dtypes of the sample's arrays."""
    parsed = [None if spec is None else parse_spec(spec) for spec in sample.specs]
    return [None if p is None else jax.ShapeDtypeStruct(p[1], p[0]) for p in parsed]


def random_arrays(op: Op, sample: Sample) -> list[Any]:
    """Returns random arguments: standard normal, integers as the row bounds them, fair coins."""
    out: list[Any] = []
    pairs = zip(shapes_of(sample), op.integers_below(sample), strict=True)
    for i, (x, below) in enumerate(pairs):
        out.append(None if x is None else _random(jax.random.key(i), x, below))
    return out


def _random(key: jax.Array, x: Any, below: int = 2) -> jax.Array:
    if x.dtype == jnp.bool_:
        return jax.random.bernoulli(key, 0.5, x.shape)
    if jnp.issubdtype(x.dtype, jnp.integer):
        return jax.random.randint(key, x.shape, 0, below, jnp.int32).astype(x.dtype)
    return jax.random.normal(key, x.shape, jnp.float32).astype(x.dtype)


def random_cotangents(op: Op, sample: Sample) -> Any:
    """Returns random cotangents of the results that have any: None in the place of integers."""
    results = jax.eval_shape(sample.call_of(op.reference), *shapes_of(sample))
    inexact = jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.inexact) else None, results)
    return jax.tree.map(lambda x: _random(jax.random.key(99), x), inexact)


def with_gradients(
    op: Op, fn: Callable[..., Any], sample: Sample
) -> Callable[..., tuple[Any, tuple[Any, ...]]]:
    """Returns (*arrays, cotangents) -> results and gradients of `fn` on the sample."""
    at, call = op.differentiable(sample), sample.call_of(fn)

    def run(*given: Any) -> tuple[Any, tuple[Any, ...]]:
        *arrays, cotangents = given

        def forward(*some: Any) -> Any:
            full = list(arrays)
            for i, x in zip(at, some, strict=True):
                full[i] = x
            return call(*full)

        out, vjp = jax.vjp(forward, *(arrays[i] for i in at))
        leaves, tree = jax.tree.flatten(out)
        cotangent = jax.tree.leaves(cotangents, is_leaf=lambda x: x is None)
        pairs = zip(leaves, cotangent, strict=True)
        full = [np.zeros(x.shape, jax.dtypes.float0) if c is None else c for x, c in pairs]
        return out, vjp(jax.tree.unflatten(tree, full))

    return run


def work_of(op: Op, sample: Sample) -> dict[str, tuple[float, float]]:
    """Returns FLOPs and least bytes of the sample by direction, from the row's cost.

    What the row leaves out of the backward call is taken to be what `Cost` says.
    """
    shapes = shapes_of(sample)
    cost = sample.call_of(op.cost)(*shapes)
    results = jax.tree.leaves(jax.eval_shape(sample.call_of(op.reference), *shapes))
    cotangents = [x for x in results if jnp.issubdtype(x.dtype, jnp.inexact)]
    flops, moved = cost.backward_flops, cost.backward_bytes
    if flops is None:
        flops = 2 * cost.flops
    if moved is None:
        gradients = [shapes[i] for i in op.differentiable(sample)]
        moved = nbytes((*shapes, *cotangents, *gradients))
    return {FORWARD: (cost.flops, cost.bytes), BOTH: (cost.flops + flops, cost.bytes + moved)}


def compile_all(
    ops: Sequence[Op],
    choose: Callable[[Sample], bool],
    others: Mapping[str, Callable[..., Any]] | None = None,
) -> list[Program]:
    """Returns every form of the operators on the samples chosen, compiled, grouped by sample.

    Args:
      ops: rows.
      choose: says of a sample whether it is wanted.
      others: more functions of the operator's signature to compare, by name.
    """
    lowered: list[tuple[Op, Sample, str, str, Any]] = []
    for op in ops:
        forms = [(i.name, op.fn) for i in op.implementations]
        forms += [*(others or {}).items(), (REFERENCE, op.reference)]
        for sample in filter(choose, op.samples):
            for direction in DIRECTIONS[: 2 if op.differentiable(sample) else 1]:
                for form, fn in forms:
                    with _as_form(form, op):
                        result = _attempt(partial(_lower, op, fn, sample, direction))
                    lowered.append((op, sample, direction, form, result))
    first = {i: _program(*row) for i, row in enumerate(lowered) if not _has_kernel(row[-1])}
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:
        rest = {i: pool.submit(_program, *r) for i, r in enumerate(lowered) if i not in first}
    return [first[i] if i in first else rest[i].result() for i in range(len(lowered))]


def _has_kernel(lowered: Any) -> bool:
    return not isinstance(lowered, Exception) and "mosaic" in lowered.as_text()


def _lower(op: Op, fn: Callable[..., Any], sample: Sample, direction: str) -> jax.stages.Lowered:
    shapes = shapes_of(sample)
    if direction == FORWARD:
        return jax.jit(sample.call_of(fn)).lower(*shapes)
    cotangents = jax.eval_shape(lambda: random_cotangents(op, sample))
    return jax.jit(with_gradients(op, fn, sample)).lower(*shapes, cotangents)


@contextmanager
def _as_form(form: str, op: Op) -> Iterator[None]:
    """Chooses the implementation of that name; multiplies in full float32 for the reference."""
    if form == REFERENCE:
        with jax.default_matmul_precision("highest"):
            yield
    elif form in [i.name for i in op.implementations]:
        with use(implementation=form):
            yield
    else:
        yield


def _attempt(work: Callable[[], Any]) -> Any:
    """Returns what the work gives, or the exception that it raised: one form must not end all."""
    try:
        return work()
    except Exception as error:
        return error


def _program(op: Op, sample: Sample, direction: str, form: str, lowered: Any) -> Program:
    """Returns the lowered program compiled, or why there is none."""
    found = lowered if isinstance(lowered, Exception) else _attempt(lowered.compile)
    if isinstance(found, Exception):
        return Program(op, sample, direction, form, None, in_words(found), is_fault(found))
    return Program(op, sample, direction, form, found)


def in_words(error: Exception) -> str:
    """Returns a line that says why a program did not run."""
    if isinstance(error, UnsupportedError):
        return str(error).split("no kernel for this call: ")[-1].split(". Leave")[0]
    kind = "" if isinstance(error, jax.errors.JaxRuntimeError) else f"{type(error).__name__}: "
    return (kind + str(error).split("\n")[0])[:160]


def is_fault(error: Exception) -> bool:
    """Returns whether the exception is neither a refusal nor a lack of memory."""
    return not isinstance(error, UnsupportedError) and "RESOURCE_EXHAUSTED" not in str(error)
