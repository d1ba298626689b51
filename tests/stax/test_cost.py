# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The cost model against arithmetic done by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.harness import run_python
from tpjax.stax.cost import cost_of


def _struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _scan(x: Any, w: Any) -> Any:
    return lax.scan(lambda h, _: (h @ w, None), x, None, length=5)[0]


def _conv(x: Any, w: Any) -> Any:
    numbers = "NHWC", "HWIO", "NHWC"
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)


FLOPS = {
    "dot": (jnp.dot, (_struct(4, 8), _struct(8, 16)), 2 * 4 * 8 * 16),
    "batched": (jnp.matmul, (_struct(3, 4, 8), _struct(3, 8, 2)), 2 * 3 * 4 * 8 * 2),
    "sum": (lambda x: lax.reduce_sum_p.bind(x, axes=(0,), out_sharding=None), (_struct(6, 7),), 42),
    "elementwise": (lambda x: jnp.exp(x) * x, (_struct(6, 7),), 84),
    "moves": (lambda x: x.T.reshape(-1)[:3].astype(jnp.bfloat16), (_struct(6, 7),), 0),
    "scan": (_scan, (_struct(4, 8), _struct(8, 8)), 5 * 2 * 4 * 8 * 8),
    "jit": (jax.jit(jnp.dot), (_struct(4, 8), _struct(8, 16)), 2 * 4 * 8 * 16),
    "checkpoint": (jax.checkpoint(jnp.dot), (_struct(4, 8), _struct(8, 16)), 2 * 4 * 8 * 16),
    "custom_jvp": (jax.nn.relu, (_struct(6, 7),), 42),
    "conv": (_conv, (_struct(2, 8, 8, 3), _struct(3, 3, 3, 5)), 2 * (2 * 8 * 8 * 5) * 27),
    "cumsum": (lambda x: lax.cumsum(x, 0), (_struct(6, 7),), 42),
    "cond": (
        lambda x: lax.cond(x[0] > 0, lambda x: x * x * x, lambda x: x, x),
        (_struct(10),),
        2 * 10 + 1,
    ),
}


@pytest.mark.parametrize("name", FLOPS)
def test_flops(name: str) -> None:
    fn, args, flops = FLOPS[name]
    assert cost_of(jax.make_jaxpr(fn)(*args)).flops == flops


def test_bytes_are_operands_and_results_of_each_equation() -> None:
    cost = cost_of(jax.make_jaxpr(lambda x: jnp.exp(x) + 1)(_struct(10, dtype=jnp.bfloat16)))
    assert cost.bytes == (20 + 20) + (20 + 2 + 20)
    assert (cost.equations, cost.notes) == (2, ())


def test_a_while_loop_is_flagged() -> None:
    loop = jax.make_jaxpr(lambda x: lax.while_loop(lambda h: h.sum() < 9, lambda h: h * 2, x))
    cost = cost_of(loop(_struct(10)))
    assert cost.flops >= 10
    assert "while" in cost.notes[0]


def test_shard_map_counts_every_device() -> None:
    run_python(
        """
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from tpjax.stax.cost import cost_of
mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
double = jax.shard_map(lambda x: x * 2, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
assert cost_of(jax.make_jaxpr(double)(jnp.ones(12))).flops == 12
""",
        devices=4,
    )
