# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Every style of writing on a mesh of virtual devices: shard_map, Auto and Explicit axes."""

import pytest

from tests.harness import run_python
from tests.stax.styles import STYLES

SOURCE = """
import jax, jax.numpy as jnp, tpjax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from tests.harness import assert_close, inputs
from tests.stax.functions import TOL, choices_of
from tests.stax.styles import DROPOUT, styles

QUICK = {"xla_backend_optimization_level": 0}
as_written = lambda fn: fn

def on_each_device(f):
    # Each device has statistics of its own, so they are not returned.
    local = lambda params, state, x: f(params, state, x)[0]
    return jax.shard_map(local, in_specs=(P(), P(), P("data")), out_specs=P("data"))

def by_sharding(f):
    return lambda params, state, x: f(params, state, x)[0]

def grad(f):
    def loss(params, state, x):
        y = f(params, state, x)
        return jnp.sum(jnp.sin(y)), y
    # A loop's equations, and so their derivatives, are alike however the loop was written.
    if STYLE in ("nnx, scanned", "linen, scanned"):
        return lambda *args: loss(*args)
    return jax.grad(loss, has_aux=True)

quick = lambda f: jax.jit(f, compiler_options=QUICK)
expected = {}
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
    # Flax's dropout does not run, compiled or not, on an array of explicit sharding.
    ways = (("shard_map", on_each_device, DROPOUT), ("sharding", by_sharding, 0.0))
    for way, transform, rate in ways:
        style = styles(rate)[STYLE]
        with jax.set_mesh(mesh):
            put = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh, spec))
            params, state = style.start()
            args = put(params, P()), put(state, P()), put(inputs("f32[4,4,8]", 7), P("data"))
            plain, inside = transform(style.make(as_written)), transform(style.make(tpjax.compile))
            around = tpjax.compile(plain)
            if way not in expected:
                expected[way] = quick(grad(plain))(*args)
            run = quick(lambda *args: (grad(inside)(*args), around(*args)))
            ((grads, y), z), choices = choices_of(run, *args)
            what = f"{way}, {kind.name}"
            assert {choice.op for choice in choices} == style.ops, (what, choices)
            masks = [dict(c.key.operands)["mask"] for c in choices if c.op == "flash_attention"]
            assert masks == [None] * len(masks), (what, "the mask is known to be causal")
            assert y.sharding.spec[0] == z.sharding.spec[0] == "data", (what, y.sharding)
            assert_close(f"{what}, inside", (grads, y), expected[way], 10 * TOL)
            assert_close(f"{what}, around", z, expected[way][1], 10 * TOL)
            print(what)
"""


@pytest.mark.parametrize("style", STYLES)
def test_G14_on_meshes(style: str) -> None:
    out = run_python(f"STYLE = {style!r}\n{SOURCE}", devices=2)
    assert len(out.splitlines()) == 4
