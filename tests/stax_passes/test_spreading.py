# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Functions of broadcasts: what must fire, near misses, and bits that depend on no place."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.harness import assert_close, inputs
from tests.stax_passes.moving import optimized, values_and_gradients
from tests.stax_passes.programs import as_function, assert_same_bits, evaluate, primitives
from tpjax.stax_passes.pipeline import CLEAN_UP, optimize
from tpjax.stax_passes.spreading import FUNCTIONS, sink_broadcasts

GROUP = ((*CLEAN_UP, sink_broadcasts),)
V = inputs("f32[7]", 0)
U = inputs("f32[7]", 1)
H = inputs("bf16[2,3,4]", 2)
X = inputs("f32[5,7]", 3)
B = "broadcast_in_dim"


def rows(v: Any) -> Any:
    return jnp.broadcast_to(v, (5, *v.shape))


def columns(v: Any) -> Any:
    return jnp.broadcast_to(v[:, None], (7, 5))


FIRES: list[tuple[str, Any, tuple[Any, ...], list[str]]] = [
    ("function", lambda v: jnp.sin(rows(v)), (V,), ["sin", B]),
    ("of columns", lambda v: jnp.cos(columns(v)), (V,), ["cos", B]),
    ("chain", lambda v: jnp.tanh(jnp.sin(rows(v)) * 2 + 1), (V,), ["sin", "mul", "add", "tanh", B]),
    ("of two", lambda v, u: rows(v) * rows(u), (V, U), ["mul", B]),
    ("with a number", lambda v: 2.0 * rows(v), (V,), ["mul", B]),
    ("with numbers", lambda v: jnp.full((5, 7), 2.0) * rows(v), (V,), [B, "mul", B]),
    ("of a scalar", lambda v: jnp.cos(jnp.broadcast_to(v[3], (5, 7))), (V,),
     ["slice", "squeeze", "cos", B]),
    ("conversion", lambda h: rows(h).astype(jnp.float32), (H,), ["convert_element_type", B]),
    ("of a repeat", lambda h: jnp.repeat(h, 2, 1).astype(jnp.float32), (H,),
     ["convert_element_type", B, "reshape"]),
    ("choice", lambda v, u: lax.select(rows(v) > 0, rows(v), rows(u)), (V, U),
     ["gt", "select_n", B]),
    ("power", lambda v: rows(v) ** 3, (V,), ["integer_pow", B]),
    ("then with an array", lambda v, x: jnp.sin(rows(v)) * x, (V, X), ["sin", B, "mul"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fn", "args", "left"), [row[1:] for row in FIRES], ids=[r[0] for r in FIRES]
)
def test_functions_of_broadcasts_are_computed_first(fn, args, left) -> None:
    result, fired, _ = optimized(fn, args, GROUP)
    assert fired["sink_broadcast"]
    assert primitives(result) == left
    assert_same_bits("values", evaluate(result, *args), evaluate(jax.make_jaxpr(fn)(*args), *args))
    new = lambda *xs: as_function(result)(*xs)  # noqa: E731
    tol = 1e-6 if args[0] is not H else 6e-3
    assert_close("gradients", values_and_gradients(new, args), values_and_gradients(fn, args), tol)


STAYS: list[tuple[str, Any, tuple[Any, ...]]] = [
    ("with an array", lambda v, x: rows(v) * x, (V, X)),
    ("of unlike broadcasts", lambda v: rows(v)[:, :5] * columns(v)[:5], (V,)),
    ("only more axes", lambda v: jnp.sin(v[:, None]), (V,)),
    ("bits that depend on the place", lambda v: jnp.arctan(rows(v)), (V,)),
    ("in one version of JAX", lambda v: jnp.exp(rows(v)), (V,)),
    ("a sum over rows", lambda v: rows(v).sum(0), (V,)),
    ("a number", lambda v: jnp.sin(jnp.full((5, 7), 2.0)) + v, (V,)),
]  # fmt: skip


@pytest.mark.parametrize(("fn", "args"), [row[1:] for row in STAYS], ids=[r[0] for r in STAYS])
def test_near_misses_that_must_not_fire(fn, args) -> None:
    result, fired, _ = optimized(fn, args, GROUP)
    assert not fired["sink_broadcast"]
    assert_same_bits("values", evaluate(result, *args), evaluate(jax.make_jaxpr(fn)(*args), *args))


def test_what_is_saved_for_the_gradient_is_small() -> None:
    fn = lambda v, x: jnp.tanh(jnp.sin(rows(v))) * x  # noqa: E731
    result, _ = optimize(jax.make_jaxpr(fn)(V, X), GROUP)

    def saved(f: Any) -> int:
        return sum(
            leaf.size for leaf in jax.tree.leaves(jax.vjp(f, V, X)[1]) if hasattr(leaf, "size")
        )

    assert saved(lambda *xs: as_function(result)(*xs)) < saved(fn)


def _operands(name: str, length: int, dtype: str) -> list[Any]:
    x, y = (inputs(f"f32[{length}]", seed).astype(dtype) for seed in (1, 2))
    small = {"select_n": [x > 0, x, y], "not": [x > 0]}
    if name in ("and", "or", "xor"):
        return [x > 0, y > 0]
    if name in small:
        return small[name]
    if name in ("log1p", "sqrt", "rsqrt"):
        return [jnp.abs(x) + jnp.asarray(0.1, dtype)]
    two = ("add", "div", "eq", "ge", "gt", "le", "lt", "max", "min", "mul", "ne", "sub")
    return [x, y] if name in two else [x]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_bits_do_not_depend_on_the_place(name, dtype) -> None:
    """Each function of the table gives an element the same bits in arrays of every length."""
    params = {
        "convert_element_type": {"new_dtype": jnp.dtype("int32"), "weak_type": False,
                                 "sharding": None},
        "integer_pow": {"y": 3}, "round": {"rounding_method": lax.RoundingMethod.TO_NEAREST_EVEN},
    }.get(name, {})  # fmt: skip
    primitive = getattr(lax, f"{name}_p")
    if name in ("log1p", "expm1", "sin", "cos", "tanh", "sqrt", "rsqrt"):
        params = {"accuracy": None}
    for length in (1, 3, 7, 16, 33):
        operands = _operands(name, length, dtype)
        wide = [jnp.broadcast_to(x[:, None], (length, 5)) for x in operands]
        got = jnp.broadcast_to(primitive.bind(*operands, **params)[:, None], (length, 5))
        assert_same_bits(name, [got], [primitive.bind(*wide, **params)])
