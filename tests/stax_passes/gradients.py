# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Compares the gradients of a rewritten jaxpr with those of the original, one by one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tests.harness import assert_close
from tests.stax_passes.programs import as_function, assert_same_bits, evaluate
from tpjax.core import _jax


def gradients(fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Returns the gradients of the floating results of `fn` by its floating arguments.

    Cotangents are random numbers, the same for the same results; equations are evaluated one by
    one.
    """
    at = [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating)]

    def pulled_back(*floats: Any) -> Any:
        def floating(*floats: Any) -> list[Any]:
            full = list(args)
            for i, x in zip(at, floats, strict=True):
                full[i] = x
            return [y for y in jax.tree.leaves(fn(*full)) if jnp.issubdtype(y.dtype, jnp.floating)]

        results, pull = jax.vjp(floating, *floats)
        keys = jax.random.split(jax.random.key(7), len(results))
        return pull([jax.random.normal(k, y.shape, y.dtype) for k, y in zip(keys, results)])  # noqa: B905

    floats = [args[i] for i in at]
    return evaluate(jax.make_jaxpr(pulled_back)(*floats), *floats)


def assert_gradients(
    what: str, fn: Callable[..., Any], jaxpr: _jax.Jaxpr, *args: Any, tol: float = 0
) -> None:
    """Asserts that the jaxpr's gradients are those of `fn`: the same bits unless `tol` is given."""
    actual, expected = gradients(as_function(jaxpr), *args), gradients(fn, *args)
    if tol:
        assert_close(what, actual, expected, tol)
    else:
        assert_same_bits(what, actual, expected)
