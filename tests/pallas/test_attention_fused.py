# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Attention's fused backward kernel: in the interpreter, and lowered for CUDA."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpjax
from tests.harness import assert_close, inputs
from tpjax.core.attention import attention_reference
from tpjax.pallas.attention import fused, hopper
from tpjax.pallas.attention.blocks import Region
from tpjax.pallas.attention.config import CONFIGS
from tpjax.pallas.attention.entry import flash_attention
from tpjax.pallas.attention.extras import Extras
from tpjax.pallas.attention.fused import FUSED_CONFIGS, FusedConfig, launch_fused
from tpjax.pallas.attention.scores import Plan

TOL = {"bfloat16": 6e-3, "float16": 1e-3}
IDS = np.repeat([7, 3, 5], [30, 45, 15])[None]


def gradients(fn, operands, **options):
    """Returns the gradients of query, key and value for random cotangents of out and lse."""

    def forward(*operands):
        return fn(*operands, **options, return_lse=True)

    (out, lse), vjp = jax.vjp(forward, *operands)
    dout, dlse = inputs(f"bf16{list(out.shape)}", 3), inputs(f"f32{list(lse.shape)}", 4)
    back = vjp((dout.astype(out.dtype), dlse))
    return dict(zip(("dq", "dk", "dv"), back, strict=True))


def check(monkeypatch, interpret, dtype, sizes, config, options):
    """Compares the gradients of the kernel with those of the float32 reference."""
    T, S, H, K, D = sizes
    shapes = (1, T, H, D), (1, S, K, D), (1, S, K, D)
    operands = [inputs(f"{dtype}{list(shape)}", i) for i, shape in enumerate(shapes)]
    launch = partial(launch_fused, config=config)
    monkeypatch.setattr(hopper, "launch_backward", launch)
    with tpjax.use(interpret=interpret, implementation="pallas"):
        got = jax.jit(partial(gradients, flash_attention, **options))(operands)
    want = gradients(attention_reference, operands, **options)
    assert_close("gradients", got, want, TOL[str(operands[0].dtype)])


CASES = {  # interpret, dtype, (T, S, H, K, D), config, options
    "group": ("races", "bf16", (70, 77, 2, 1, 128), FusedConfig(), {"is_causal": True}),
    "shares": ("races", "bf16", (130, 77, 1, 1, 64), FusedConfig(block=128), {"softcap": 2.0}),
    "turns": (True, "f16", (70, 140, 1, 1, 64), FusedConfig(stages=4), {"is_causal": True}),
    "segments": (
        True, "bf16", (90, 90, 1, 1, 64), FusedConfig(delta_first=True),
        {"query_segment_ids": IDS, "local_window_size": (40, 20)},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("interpret", "dtype", "sizes", "config", "options"), CASES.values(), ids=CASES
)
def test_interpreted(monkeypatch, interpret, dtype, sizes, config, options):
    """Gradients of the kernel, edges and several steps included; no data races.

    The interpreter takes two blocks of threads that add to one query for a race: with races told,
    the keys are those of one.
    """
    check(monkeypatch, interpret, dtype, sizes, config, options)


def test_planted_fault_keys_beyond_the_last(monkeypatch):
    """Keys beyond the last that count as seen are found in dquery.

    Where the only score is far below zero, the weight of a key of zeros is infinite.
    """
    monkeypatch.setattr(fused, "_is_ragged", lambda *_: False)
    with pytest.raises(AssertionError, match="gradients"):
        check(monkeypatch, True, "bf16", (5, 1, 1, 1, 64), FusedConfig(), {"scale": -60.0})


def lowered(widths, config, is_causal, transform=lambda fn: fn):
    """Returns what the kernel is lowered to for CUDA."""
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    q, k = shape((1, 777, 4, widths[0])), shape((1, 1000, 2, widths[0]))
    lse = jax.ShapeDtypeStruct((1, 4, 777), jnp.float32)
    region = Region(777, 1000, is_causal)
    plan = Plan(region, 0.1, None, False, False, CONFIGS[widths][0], False)
    run = transform(partial(launch_fused, plan=plan, config=config))
    traced = jax.jit(run).trace(q, k, k, Extras(), q, lse, q, lse)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


LOWERED = [
    (widths, config, is_causal)
    for widths, configs in FUSED_CONFIGS.items()
    for config in configs
    for is_causal in (True, False)
]


@pytest.mark.parametrize(("widths", "config", "is_causal"), LOWERED)
def test_lowers_for_cuda(widths, config, is_causal):
    """Every config passes the checks of layouts, shared memory and copies."""
    assert "flash_attention_backward_fused" in lowered(widths, config, is_causal)


def test_lowers_under_vmap():
    """The sum in global memory has a batch axis too."""

    def batched(run):
        def call(*operands):
            return jax.vmap(run)(*jax.tree.map(lambda x: x[None], operands))

        return call

    assert "flash_attention_backward_fused" in lowered((128, 128), None, True, batched)
