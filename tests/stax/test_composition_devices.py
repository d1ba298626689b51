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
    return jax.value_and_grad(lambda p, s, x: jnp.sum(jnp.sin(f(p, s, x))))

for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
    for way, transform in (("shard_map", on_each_device), ("sharding", by_sharding)):
        # Flax's dropout does not run, compiled or not, on an array of explicit sharding.
        rate = 0.0 if (kind, way) == (AxisType.Explicit, "sharding") else DROPOUT
        style = styles(rate)[STYLE]
        with jax.set_mesh(mesh):
            put = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh, spec))
            params, state = style.start()
            args = put(params, P()), put(state, P()), put(inputs("f32[4,4,8]", 7), P("data"))
            plain = transform(style.make(as_written))
            fns = {
                "inside": transform(style.make(tpjax.compile)),
                "around": tpjax.compile(plain),
            }
            run = lambda *args: (
                grad(plain)(*args), {k: (grad(f)(*args), f(*args)) for k, f in fns.items()}
            )
            (expected, actual), choices = choices_of(jax.jit(run, compiler_options=QUICK), *args)
            what = f"{way}, {kind.name}"
            assert {choice.op for choice in choices} == style.ops, (what, choices)
            masks = [dict(c.key.operands)["mask"] for c in choices if c.op == "flash_attention"]
            assert masks == [None] * len(masks), (what, "the mask is known to be causal")
            for where, (result, y) in actual.items():
                assert y.sharding.spec[0] == "data", (what, where, y.sharding)
                assert_close(f"{what}, {where}", result, expected, 10 * TOL)
            print(what)
"""


@pytest.mark.parametrize("style", STYLES)
def test_G14_on_meshes(style: str) -> None:
    out = run_python(f"STYLE = {style!r}\n{SOURCE}", devices=2)
    assert len(out.splitlines()) == 4
