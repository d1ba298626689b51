# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""What a compiled function returns is an array, also where it depends on no argument."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpjax
from tests.harness import assert_close

X = jnp.arange(3.0)
RETURNED: dict[str, Any] = {
    "a folded bf16 array": lambda: jnp.arange(3, dtype=jnp.bfloat16) * 2,
    "a folded f32 array": lambda: jnp.arange(3.0) * 2,
    "a uniform array": lambda: jnp.full((3,), 2, jnp.int8),
    "a NumPy array": lambda: np.arange(3, dtype=np.int8),
    "a weak scalar": lambda: 1.5 * 2,
    "a strong scalar": lambda: jnp.float32(2) * 3,
    "a flag": lambda: jnp.bool_(True),
    "a comparison": lambda: jnp.int32(2) > 1,
    "a complex number": lambda: jnp.complex64(2) * 1j,
    "a key": lambda: jax.random.key(0),
}
AROUND: dict[str, Any] = {
    "nothing": lambda f, x: f(x),
    "jit": lambda f, x: jax.jit(f)(x),
    "vmap": lambda f, x: jax.vmap(f)(x),
    "vjp": lambda f, x: jax.vjp(f, x)[0],
    "checkpoint": lambda f, x: jax.checkpoint(f)(x),
}


def _seen(around: Any, fn: Any) -> list[Any]:
    """Returns what the caller sees of the constant, inside the transformation, and the result."""
    seen: list[Any] = []

    def outer(x: jax.Array) -> Any:
        constant, other = fn(x)
        seen.append(isinstance(constant, jax.Array))
        seen.append(jax.typeof(constant))
        if jnp.issubdtype(constant.dtype, jnp.number):
            real = not jnp.issubdtype(constant.dtype, jnp.complexfloating)
            return constant * 1.5, constant.astype(int) if real else None, other
        return constant, other

    results = around(outer, X)
    seen += [jax.typeof(leaf) for leaf in jax.tree.leaves(results)]
    numbers = [y for y in jax.tree.leaves(results) if jnp.issubdtype(y.dtype, jnp.number)]
    return [seen, numbers]


@pytest.mark.parametrize("around", list(AROUND))
@pytest.mark.parametrize("name", list(RETURNED))
def test_a_constant_result_is_an_array_like_the_others(name, around) -> None:
    make = RETURNED[name]
    plain = lambda x: (jnp.asarray(make()) if isinstance(make(), np.ndarray) else make(), x)  # noqa: E731
    expected = _seen(AROUND[around], jax.jit(plain))
    actual = _seen(AROUND[around], tpjax.compile(lambda x: (make(), x)))
    assert actual[0] == expected[0]
    assert_close(name, actual[1], expected[1], tol=0)


def test_a_constant_result_can_be_indexed_and_updated_while_traced() -> None:
    table = tpjax.compile(lambda x: (jnp.arange(3.0) * 2, x))

    @jax.jit
    def uses(x: jax.Array, i: jax.Array) -> Any:
        constant, _ = table(x)
        return constant[i], constant.at[i].set(7.0)

    assert_close("used", uses(X, 1), (jnp.float32(2), jnp.asarray([0.0, 7.0, 4.0])), tol=0)
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.jit(lambda x: bool(table(x)[0][0] > 0))(X)
