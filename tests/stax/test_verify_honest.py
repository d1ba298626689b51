# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""`verify` leaves honest programs alone: every spelling that a rule knows, and random programs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz import pool
from tests.fuzz.generator import programs, run
from tests.harness import inputs, run_python
from tests.stax import functions
from tests.stax.test_verify import replacing, verified
from tests.stax_passes.test_attention_rewrites import FIRE as ATTENTION
from tests.stax_passes.test_attention_rewrites import B, D, H, T, out, scores, softmax
from tests.stax_passes.test_norm_rewrites import FIRE as NORMS


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_attention_spellings_pass(dtype: str) -> None:
    for fn, heads, _ in ATTENTION[:: 3 if dtype == "f32" else 7]:
        kv = f"{dtype}[{B},{T},{heads},{D}]"
        args = inputs(f"{dtype}[{B},{T},{H},{D}]", 1), inputs(kv, 2), inputs(kv, 3)
        difference = verified(fn, args)
        assert difference is None, f"{fn.__name__}: {difference.message('mine')}"


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_norm_spellings_pass(dtype: str) -> None:
    random, equal = inputs(f"{dtype}[2,32]", 1), jnp.full((2, 32), 0.3, _dtype(dtype))
    for fn, _ in NORMS[:: 1 if dtype == "f32" else 2]:
        for x in (random, equal):  # of equal elements, rounding alone is left of the difference
            difference = verified(fn, (x, inputs(f"{dtype}[32]", 2)))
            assert difference is None, f"{fn.__name__}: {difference.message('mine')}"


def _dtype(name: str) -> Any:
    return jnp.bfloat16 if name == "bf16" else jnp.float32


def test_queries_that_see_no_key_pass() -> None:
    """There the original averages the values and the operator gives 0, as its contract says."""

    def padded(q: Any, k: Any, v: Any, lengths: Any) -> Any:
        seen = jnp.arange(T)[None, :] < lengths[:, None]
        return out(softmax(jnp.where(seen[:, None, None], scores(q, k), -1e30), -1), v)

    args = tuple(inputs(f"f32[{B},{T},{H},{D}]", i) for i in range(3))
    assert verified(padded, (*args, jnp.array([9, 0]))) is None


def test_a_transformer_block_passes() -> None:
    args = functions.params(), inputs("f32[12,16]", 9)
    assert verified(functions.block, args) is None
    assert verified(jax.value_and_grad(functions.loss), args) is None


@settings(max_examples=3, deadline=None, suppress_health_check=[*HealthCheck], database=None)  # pyright: ignore
@given(program=programs)
def test_random_programs_pass(program) -> None:
    difference = verified(lambda *args: run(program, *args), tuple(pool.inputs(tame=False)))
    assert difference is None, difference.message("random")


def test_python_scalars_empty_arrays_and_numpy() -> None:
    fn = lambda a, b, c: (a * 1.0 + jnp.sin(b), (c * 1.0).sum())  # noqa: E731
    assert verified(fn, (2.0, np.float32(3), np.zeros((0, 3), np.float32))) is None


def test_a_program_that_magnifies_rounding_passes() -> None:
    """What is within the contract where it is replaced may be far apart at the end."""

    def fn(x: Any) -> Any:
        y = jnp.sin(x)
        for _ in range(8):
            y = jnp.tan(y * 40)
        return y, jnp.argmax(y), y > 0

    near = replacing("sin", lambda x: jnp.sin(x) * jnp.float32(1 + 2**-22))
    assert verified(fn, (inputs("f32[500]", 0),), (near,)) is None


SHARDED = """
import jax, jax.numpy as jnp, tempfile
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from tests.fuzz import pool
from tests.fuzz.generator import programs, run
from tests.harness import inputs, run_python
from tests.stax.functions import norm
from tests.stax.test_verify import found, outcome, replacing, swapping, verified

def fn(x):
    def body(x):
        y = jnp.sin(norm(x, jnp.ones(16)))
        return y - jax.lax.pmean(y, "d")
    return jax.shard_map(body, in_specs=P("d"), out_specs=P("d"))(x * 1.0)

for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        x = jax.device_put(inputs("f32[4,16]", 0), NamedSharding(mesh, P("d")))
        if kind == AxisType.Auto:
            assert verified(fn, (x,)) is None
            continue
        difference = found(fn, (x,), (replacing("sin", jnp.cos),))
        assert (difference.rule, difference.primitive) == ("other_sin", "sin")
        assert "in the shard_map of" in difference.where
        assert difference.where.endswith("device 0")
        assert outcome(difference.reproducer)[0] == 1
        difference = found(fn, (x,), (swapping("sub"),))
        assert difference.primitive == "shard_map"
        assert "needs its devices" in difference.note
"""


def test_under_a_mesh() -> None:
    run_python(SHARDED, devices=2)
