# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Runs a rewriting pass over a function and holds the rewritten program to the original."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from tests.harness import assert_close, inputs
from tpjax.core import soundness
from tpjax.stax_passes.report import Report


def rewritten(
    fn: Callable[..., Any], rewrite: Any, *args: Any
) -> tuple[Callable[..., Any], Report]:
    """Returns `fn` with its jaxpr rewritten, and the pass's report; the jaxpr is type-checked."""
    jaxpr, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    new, report = rewrite(jaxpr)
    soundness.check(new)
    tree = jax.tree.structure(shape)

    def run(*args: Any) -> Any:
        return jax.tree.unflatten(tree, jaxpr_as_fun(new)(*jax.tree.leaves(args)))

    return run, report


def assert_same(
    what: str, fn: Callable[..., Any], new: Callable[..., Any], args: tuple[Any, ...], tol: float
) -> None:
    """Asserts equal values, and equal gradients for a random cotangent, of every floating input."""
    floating = [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating)]

    def of(f: Callable[..., Any]) -> Any:
        def loss(*some: Any) -> Any:
            full = list(args)
            for i, x in zip(floating, some, strict=True):
                full[i] = x
            return f(*full)

        out, vjp = jax.vjp(loss, *(args[i] for i in floating))
        cotangent = jax.tree.map(
            lambda x: inputs(f"f32[{','.join(map(str, x.shape))}]", 99).astype(x.dtype), out
        )
        return out, vjp(cotangent)

    assert_close(what, jax.jit(lambda: of(new))(), jax.jit(lambda: of(fn))(), tol)
