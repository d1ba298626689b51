# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Runs passes on a function and compares the bits of its values and of its gradients."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tests.harness import inputs
from tests.stax_passes.programs import as_function, assert_same_bits, evaluate
from tpjax.core import _jax
from tpjax.stax_passes.pipeline import optimize


def optimized(
    fn: Callable[..., Any], args: tuple[Any, ...], passes: Any
) -> tuple[_jax.Jaxpr, Counter[str], list[str]]:
    """Returns the optimized jaxpr, the rules that fired, and the near misses."""
    result, reports = optimize(jax.make_jaxpr(fn)(*args), passes, verify=True)
    again, _ = optimize(result, passes)
    assert again is result, "the second run changes the program"
    fired = Counter(hit.rule for report in reports for hit in report.hits)
    return result, fired, [f"{m.rule}: {m.reason}" for r in reports for m in r.near_misses]


def values_and_gradients(fn: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    """Returns the results, and the gradients for a random cotangent, all one by one."""
    leaves = jax.tree.leaves(args)
    at = [i for i, x in enumerate(leaves) if jnp.issubdtype(jnp.result_type(x), jnp.floating)]
    flat = lambda *xs: jax.tree.leaves(fn(*jax.tree.unflatten(jax.tree.structure(args), xs)))  # noqa: E731
    values = evaluate(jax.make_jaxpr(flat)(*leaves), *leaves)
    wanted = [i for i, v in enumerate(values) if jnp.issubdtype(v.dtype, jnp.floating)]
    if not at or not wanted:
        return values

    def pulled(*xs: Any) -> Any:
        def inner(*ys: Any) -> Any:
            full = list(xs)
            for i, y in zip(at, ys, strict=True):
                full[i] = y
            out = flat(*full)
            return [out[i] for i in wanted]

        outs, pull = jax.vjp(inner, *(xs[i] for i in at))
        return pull([cotangent(i, out) for i, out in enumerate(outs)])

    return [*values, *evaluate(jax.make_jaxpr(pulled)(*leaves), *leaves)]


def cotangent(seed: int, like: Any) -> Any:
    """Returns a random cotangent of a value."""
    shape = ",".join(map(str, like.shape))
    return inputs(f"f32[{shape}]", 100 + seed).astype(like.dtype)


def assert_same(what: str, fn: Callable[..., Any], result: _jax.Jaxpr, args: Any) -> None:
    """Asserts equal bits of values and gradients."""
    new = lambda *xs: as_function(result)(*jax.tree.leaves(xs))  # noqa: E731
    assert_same_bits(what, values_and_gradients(new, args), values_and_gradients(fn, args))
