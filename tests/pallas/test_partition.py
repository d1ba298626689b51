# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Kernels under a mesh: each device works on its part, and no operand is gathered.

The interpreter does not run on several devices, so the wrapper is put around the plain form: what
it splits, sums and gathers is the same. That kernels lower inside it is tested beside.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

from tests.harness import run_python
from tests.pallas.op_checks import operand_names
from tpjax.core.operator import Partitioning
from tpjax.pallas import OPS
from tpjax.pallas.partition import choose_splits, dimensions, split_over_devices

AUTO, EXPLICIT, MANUAL = AxisType.Auto, AxisType.Explicit, AxisType.Manual

SETUP = """
from dataclasses import replace
from functools import partial
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import tpjax
from tests.harness import assert_close, inputs
from tpjax.pallas import OPS, flash_attention, layer_norm, rms_norm
from tpjax.pallas.partition import split_over_devices

ROWS = {op.name: op for op in OPS}
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit

def split(name, *operands, **options):
    row = ROWS[name]
    operands += (None,) * (len(row.partitioning.inputs) - len(operands))
    run = partial(row.implementations[-1].run, **options)
    results = 1 + sum(options.get(n, False) for n in ("return_lse", "return_max"))
    partitioning = replace(row.partitioning, outputs=row.partitioning.outputs[:results])
    return split_over_devices(run, partitioning, operands)

def with_gradients(fn):
    def run(dout, *arrays):
        out, vjp = jax.vjp(fn, *arrays)
        return [out, *vjp(dout)]
    return run

def place(mesh, specs, arrays):
    if isinstance(arrays, tuple):
        return tuple(place(mesh, s, a) for s, a in zip(specs, arrays))
    return jax.device_put(arrays, NamedSharding(mesh, P(*specs)))

def check(name, mesh, fn, plain, specs, arrays, moves=("all-gather", "all-to-all", "permute")):
    want = jax.jit(with_gradients(plain))(*arrays)
    with jax.set_mesh(mesh):
        placed = place(mesh, specs, arrays)
        run = jax.jit(with_gradients(fn))
        text = run.lower(*placed).compile().as_text()
        got = run(*placed)
    assert not [m for m in moves if m in text], (name, [m for m in moves if m in text])
    assert_close(name, jax.device_get(got), jax.device_get(want), 2e-6)
    return got
"""

NORMS = """
x, dy = inputs("f32[8,6,64]", 0), inputs("f32[8,6,64]", 1)
scale, bias = inputs("f32[64]", 2), inputs("f32[64]", 3)
for kinds, spec in [
    ((AUTO, AUTO), (("a", "b"),)),
    ((EXPLICIT, EXPLICIT), ("a", "b")),
    ((EXPLICIT, EXPLICIT), (None, ("a", "b"))) ,
    ((EXPLICIT, EXPLICIT), ("b",)),
]:
    if spec == (None, ("a", "b")):
        x, dy = x[:, :4], dy[:, :4]
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=kinds)
    for name, fn, vectors in [
        ("rms_norm", rms_norm, (scale,)), ("layer_norm", layer_norm, (scale, bias)),
    ]:
        specs = (spec, spec, *[()] * len(vectors))
        got = check(name, mesh, partial(split, name, eps=1e-6), fn, specs, (dy, x, *vectors))
        parts = {s.data.shape for s in got[0].addressable_shards}
        assert parts != {x.shape}, (spec, parts)
print("norms agree")
"""

ATTENTION = """
def attend(q, k, v):
    options = {"scale": 0.25, "is_causal": True, "local_window_size": None}
    return split("flash_attention", q, k, v, **options)

def plain(q, k, v):
    return flash_attention(q, k, v, scale=0.25, is_causal=True)

for heads, kv_heads, kinds, spec in [
    (4, 2, (AUTO, AUTO), (("a", "b"),)),
    (4, 2, (EXPLICIT, EXPLICIT), ("a", None, "b")),
    (4, 1, (EXPLICIT, EXPLICIT), ("a", None, "b")),
]:
    q, k, v, dout = (
        inputs(f"f32[4,9,{n},16]", i) for i, n in enumerate((heads, kv_heads, kv_heads, heads))
    )
    key_spec = spec if kv_heads > 1 else spec[:1]
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=kinds)
    check("flash_attention", mesh, attend, plain, (spec, spec, key_spec, key_spec), (dout, q, k, v))

ids, lengths = jnp.arange(36).reshape(4, 9) // 5 % 2, jnp.array([9, 4, 7, 1])
options = {"scale": 0.25, "is_causal": True, "alignment": "bottom_right", "softcap": 3.0}
sinks = inputs("f32[4]", 9)
q, k, v = inputs("f32[4,9,4,16]", 0), inputs("f32[4,9,2,16]", 1), inputs("f32[4,9,2,8]", 2)
for rows, slopes_spec in ((1, (None, "b")), (4, ("a", "b"))):
    slopes = inputs(f"f32[{rows},4]", 8)
    douts = inputs("f32[4,9,4,8]", 5), inputs("f32[4,9,4]", 6)
    statistics = {"return_lse": True, "deterministic": False}

    def featured(q, k, v, slopes, sinks):
        extra = (None, None, None, lengths, lengths, ids, ids, slopes, sinks)
        return split("flash_attention", q, k, v, *extra, **options, **statistics)

    def plain_featured(q, k, v, slopes, sinks):
        return flash_attention(
            q, k, v, key_value_seq_lengths=lengths, prefix_lengths=lengths, query_segment_ids=ids,
            alibi_slopes=slopes[0] if len(slopes) == 1 else slopes, sinks=sinks, **options,
            **statistics,
        )

    spec = ("a", None, "b")
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(EXPLICIT, EXPLICIT))
    specs = ((spec, spec), spec, spec, spec, slopes_spec, ("b",))
    check("features", mesh, featured, plain_featured, specs, (douts, q, k, v, slopes, sinks))
print("attention agrees")
"""

PRODUCTS = """
from tpjax.pallas import gated_linear_unit, gated_mlp, matmul
a, b, bias = inputs("f32[4,6,8]", 0), inputs("f32[8,12]", 1), inputs("f32[12]", 2)
dout, residual, scale = inputs("f32[4,6,12]", 3), inputs("f32[4,6,12]", 4), inputs("f32[1]", 5)
options = {"activation": "swish", "out_dtype": jnp.dtype("float32")}
plain = lambda a, b, bias, residual, scale: matmul(
    a, b, bias, residual, scale[0], activation="swish")
x, dh, dy = inputs("f32[8,6]", 6), inputs("f32[8,4]", 7), inputs("f32[8,6]", 8)
w, down = inputs("f32[6,2,4]", 9), inputs("f32[4,6]", 10)
for kind, rows, split_by in ((AUTO, (("a", "b"),), None), (EXPLICIT, ("a",), "b")):
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind, kind))
    columns = (*rows, None, split_by)
    check("matmul", mesh, partial(split, "matmul", **options), plain,
          (columns, rows, (None, split_by), (split_by,), columns, ()),
          (dout, a, b, bias, residual, scale))
    for name, fn, specs, arrays in (
        ("gated_linear_unit", gated_linear_unit, ((*rows, split_by), rows), (dh, x, w)),
        ("gated_mlp", gated_mlp, (rows, rows), (dy, x, w, down)),
    ):
        specs = (*specs, (None, None, split_by), (split_by,))[:len(arrays)]
        check(name, mesh, partial(split, name, activation="swish"), fn, specs, arrays)
print("products agree")
"""

KERNELS = """
def lowers(fn, mesh, specs, arrays):
    with jax.set_mesh(mesh), tpjax.use(platform="cuda"):
        traced = jax.jit(with_gradients(fn)).trace(*place(mesh, specs, arrays))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text, text[:3000]
    assert "manual_computation" in text, text[:3000]

q, k, v, dout = (inputs(f"bf16[4,64,{n},64]", i) for i, n in enumerate((4, 2, 2, 4)))
x, dy, scale = inputs("bf16[8,6,64]", 0), inputs("bf16[8,6,64]", 1), inputs("f32[64]", 2)
for kind in (AUTO, EXPLICIT):
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind, kind))
    lowers(rms_norm, mesh, (("a", "b"), ("a", "b"), ()), (dy, x, scale))
    lowers(flash_attention, mesh, (("a", None, "b"),) * 4, (dout, q, k, v))

mesh = jax.make_mesh((4,), ("a",), axis_types=(AUTO,))  # the caller's own shard_map
for fn, arrays, whole in [(layer_norm, (dy, x, scale), 1), (flash_attention, (dout, q, k, v), 0)]:
    specs = (P("a"),) * (len(arrays) - whole) + (P(),) * whole
    run = with_gradients(fn)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=list(specs))
    with tpjax.use(platform="cuda"):
        traced = jax.jit(mapped).trace(*arrays)
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
print("kernels lower")
"""


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (NORMS, "norms agree"),
        (ATTENTION, "attention agrees"),
        (PRODUCTS, "products agree"),
        (KERNELS, "kernels lower"),
    ],
    ids=["norms", "attention", "products", "kernels"],
)
def test_on_four_devices(source, says):
    """Values and gradients are those of one device; the compiled program moves no operand."""
    assert says in run_python(SETUP + source, devices=4)


def test_planted_fault_heads_split_alone():
    """Query heads split without their key heads give wrong values: `alike` is what holds them."""
    fault = """
row = ROWS["flash_attention"]
alone = replace(row.partitioning, alike=(), sharded="BH")
ROWS["flash_attention"] = replace(row, partitioning=alone)
"""
    with pytest.raises(AssertionError, match="flash_attention"):
        run_python(SETUP + fault + ATTENTION, devices=4)


def mesh_of(**axes):
    """Returns an abstract mesh of axes `name=(size, kind)`."""
    sizes, kinds = zip(*axes.values(), strict=True)
    return jax.sharding.AbstractMesh(sizes, tuple(axes), axis_types=kinds)


ROWS_ONLY = Partitioning(inputs=("RD", "D"), outputs=("RD",), sharded="R")


@pytest.mark.parametrize(
    ("axes", "rows", "wanted"),
    [
        ({"a": (2, AUTO), "b": (3, AUTO)}, 12, {"R0": ("a", "b")}),
        ({"a": (2, AUTO), "b": (3, AUTO)}, 8, {"R0": ("a",)}),  # 3 does not divide 4
        ({"a": (2, AUTO), "b": (3, AUTO)}, 9, {"R0": ("b",)}),
        ({"a": (2, AUTO)}, 7, {}),
    ],
    ids=str,
)
def test_auto_axes_split_the_leading_dimension(axes, rows, wanted):
    """Over every axis, in order, that divides what is left; other dimensions stay whole."""
    x, scale = jnp.zeros((rows, 6, 8)), jnp.zeros(8)
    names = [dimensions("RD", 3), dimensions("D", 1)]
    with jax.sharding.use_abstract_mesh(mesh_of(**axes)):
        kinds = {name: kind for name, (_, kind) in axes.items()}
        assert choose_splits(ROWS_ONLY, names, (x, scale), kinds) == wanted


def test_no_mesh_no_wrapper():
    """Without a mesh, or under the caller's shard_map, the kernel is called as it is."""
    seen = []

    def run(*operands):
        seen.append(operands)
        return operands[0]

    x = jnp.zeros((4, 8))
    assert split_over_devices(run, ROWS_ONLY, (x, None)) is x
    with jax.sharding.use_abstract_mesh(mesh_of(a=(1, AUTO))):
        assert split_over_devices(run, ROWS_ONLY, (x, None)) is x
    assert len(seen) == 2


def test_every_row_names_its_operands():
    """Letters of `sharded` and `alike` stand in the inputs."""
    for op in OPS:
        split = op.partitioning
        assert set(split.sharded) | set("".join(split.alike)) <= set("".join(split.inputs))
        assert len(split.inputs) == len(operand_names(op)), op.name
