# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Attention's Hopper kernels: in the interpreter, lowered for CUDA, and on a GPU."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import tpjax
from tests.harness import assert_close, inputs
from tpjax.core.attention import attention_reference
from tpjax.pallas.attention import blocks, forward, hopper, ring
from tpjax.pallas.attention.config import CONFIGS, heuristic
from tpjax.pallas.attention.entry import flash_attention
from tpjax.pallas.dispatch import record_choices

TOL = {"bfloat16": 6e-3, "float16": 1e-3}


def arrays(dtype, batch, T, S, H, K, D):
    """Returns query, key, value and the output's cotangent."""
    lead = "".join(f"{n}," for n in batch)
    q, k = f"{dtype}[{lead}{T},{H},{D}]", f"{dtype}[{lead}{S},{K},{D}]"
    return inputs(q, 0), inputs(k, 1), inputs(k, 2), inputs(q, 3)


def with_gradients(fn, **options):
    """Returns a function of (query, key, value, cotangent) that gives output and gradients."""

    def run(*operands):
        *inner, dout = operands
        out, vjp = jax.vjp(partial(fn, **options), *inner)
        return {"out": out, **dict(zip(("dq", "dk", "dv"), vjp(dout), strict=True))}

    return run


def check(run, operands, **options):
    """Compares output and gradients with the float32 reference."""
    want = with_gradients(attention_reference, **options)(*operands)
    assert_close("attention", run(*operands), want, TOL[str(operands[0].dtype)])


INTERPRETED = [  # interpret, dtype, T, S, H, K, D, options
    ("races", "bf16", 130, 77, 2, 1, 64, {"is_causal": True}),
    ("races", "f16", 5, 200, 1, 1, 128, {"scale": 0.3}),
    (True, "bf16", 77, 130, 2, 2, 128, {"is_causal": True}),
]


@pytest.mark.parametrize(
    ("interpret", "dtype", "T", "S", "H", "K", "D", "options"), INTERPRETED, ids=str
)
def test_interpreted(interpret, dtype, T, S, H, K, D, options):
    """Forward and gradients of the kernels, edges and several steps included; no data races."""
    run = with_gradients(flash_attention, **options)
    with tpjax.use(interpret=interpret), record_choices() as choices:
        check(jax.jit(run), arrays(dtype, (1,), T, S, H, K, D), **options)
    assert choices[0].implementation == "pallas"


def test_interpreted_vmap_and_scan():
    """The kernel under vmap inside scan, and one sequence's result is not another's."""
    operands = arrays("bf16", (1, 2, 1), 9, 9, 1, 1, 64)
    run = jax.vmap(with_gradients(flash_attention, is_causal=True))
    with tpjax.use(interpret=True):
        got = jax.jit(lambda xs: jax.lax.scan(lambda c, x: (c, run(*x)), None, xs)[1])(operands)
    want = with_gradients(attention_reference, is_causal=True)(*operands)
    assert_close("attention", got, want, TOL["bfloat16"])


def test_backward_outside_of_use():
    """The backward pass runs as the forward pass did, wherever it is called."""
    *operands, dout = arrays("bf16", (1,), 9, 9, 1, 1, 64)
    with tpjax.use(interpret=True):
        _, vjp = jax.vjp(flash_attention, *operands)
    want = with_gradients(attention_reference)(*operands, dout)
    assert_close("dq", vjp(dout)[0], want["dq"], TOL["bfloat16"])


def test_planted_fault_mask_off_by_one(monkeypatch):
    """A causal edge off by one in the kernel is found by the comparison of `test_interpreted`."""
    reach = blocks.Region.reach
    monkeypatch.setattr(blocks.Region, "reach", lambda self, q, ends: reach(self, q - 1, ends))
    operands = arrays("bf16", (1,), 64, 64, 1, 1, 64)
    with tpjax.use(interpret=True), pytest.raises(AssertionError, match="attention"):
        check(with_gradients(flash_attention, is_causal=True), operands, is_causal=True)


def test_planted_fault_slot_reused_too_early(monkeypatch):
    """A ring that is filled without waiting for its readers is found by the interpreter."""

    def careless(steps, rings, *rest):
        with monkeypatch.context() as patch:
            patch.setattr(ring.Ring, "await_free", lambda *_: None)
            ring.feed(steps, rings, *rest)

    monkeypatch.setattr(forward, "feed", careless)
    operands = arrays("bf16", (1,), 64, 256, 1, 1, 64)[:3]
    message = "RACE DETECTED|no threads observed phase"  # whichever is noticed first
    with tpjax.use(interpret="races"), pytest.raises(Exception, match=message):
        jax.block_until_ready(flash_attention(*operands))


LOWERED = [
    (widths, config, is_causal)
    for widths, configs in CONFIGS.items()
    for config in configs
    for is_causal in (True, False)
]


@pytest.mark.parametrize(("widths", "config", "is_causal"), LOWERED)
def test_lowers_for_cuda(widths, config, is_causal, monkeypatch):
    """Every config's three kernels pass the checks of layouts, shared memory and copies."""
    monkeypatch.setattr(hopper, "heuristic", lambda *_: config)
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    q, k = shape((1, 777, 4, widths[0])), shape((1, 1000, 2, widths[0]))
    v, dout = shape((1, 1000, 2, widths[1])), shape((1, 777, 4, widths[1]))
    run = with_gradients(flash_attention, is_causal=is_causal)
    with tpjax.use(platform="cuda"):
        lowered = jax.jit(run).trace(q, k, v, dout).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count("flash_attention_forward") > 0
    assert text.count("flash_attention_backward_query") > 0
    assert text.count("flash_attention_backward_key_value") > 0


def test_what_rematerialisation_saves():
    """A policy that keeps the named output and lse needs no second forward kernel."""
    operands = [jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)] * 4
    keep = jax.checkpoint_policies.save_only_these_names(hopper.OUT_NAME, hopper.LSE_NAME)

    def forwards(policy):
        fn = jax.checkpoint(lambda q, k, v: flash_attention(q * 2, k, v), policy=policy)
        with tpjax.use(platform="cuda"):
            traced = jax.jit(with_gradients(fn)).trace(*operands)
            return (
                traced.lower(lowering_platforms=("cuda",)).as_text().count("call @launch_forward")
            )

    assert (forwards(keep), forwards(None)) == (1, 2)


@pytest.mark.parametrize("longest_last", [True, False])
def test_every_tile_is_dealt_once(longest_last):
    """The grid visits each (head, tile) once, long tiles of a section first."""
    order = blocks.tile_order(3, 8, 2, blocks.L2_BYTES // 2, longest_last)
    assert order.section == 4
    head, tile = jax.vmap(order.locate)(jnp.arange(24, dtype=jnp.int32))
    assert len({*zip(map(int, head), map(int, tile), strict=True)}) == 24
    assert list(map(int, tile[:12:4])) == ([2, 1, 0] if longest_last else [0, 1, 2])


def test_interpreter_gets_two_workers():
    """The interpreter needs a CPU thread for each warpgroup."""
    for widths, configs in CONFIGS.items():
        config = heuristic(*widths, 4096, False, True)
        assert max(config.warpgroups, config.dq_warpgroups, config.dkv_warpgroups) == 2
        assert replace(config) in configs


def test_interpreter_without_threads_is_refused(monkeypatch):
    """It would hang; the error says how to get more. (Traced anew: no other test has 11 tokens.)"""
    monkeypatch.setenv("NPROC", "3")
    q = inputs("bf16[1,11,1,64]", 0)
    with tpjax.use(interpret=True), pytest.raises(RuntimeError, match=r"got 3\. .*NPROC=8"):
        flash_attention(q, q, q)


GPU = [  # dtype, batch, T, S, H, K, D, causal
    ("bf16", (2,), 4096, 4096, 4, 2, 128, True),
    ("bf16", (1,), 4096, 4096, 4, 4, 64, True),
    ("bf16", (2,), 1000, 777, 4, 1, 128, False),
    ("f16", (1,), 777, 1000, 2, 2, 64, True),
    ("f16", (3,), 64, 64, 3, 3, 64, True),
    ("bf16", (2, 2), 130, 5, 2, 1, 128, True),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "batch", "T", "S", "H", "K", "D", "causal"), GPU, ids=str)
def test_on_gpu(dtype, batch, T, S, H, K, D, causal):
    """The kernels on the device: values, gradients, and the same bits on every run."""
    run = jax.jit(with_gradients(flash_attention, is_causal=causal, implementation="pallas"))
    operands = arrays(dtype, batch, T, S, H, K, D)
    check(run, operands, is_causal=causal)
    assert_close("again", run(*operands), run(*operands), 0)


@pytest.mark.gpu
def test_transformations_on_gpu():
    """vmap, scan, remat and a batched cond around the kernel."""
    operands = arrays("bf16", (3, 2), 200, 200, 2, 2, 64)
    fn = partial(flash_attention, is_causal=True, implementation="pallas")
    run, want = with_gradients(fn), with_gradients(attention_reference, is_causal=True)(*operands)
    choose = jnp.array([True, False, True])
    for name, transformed in {
        "vmap": jax.vmap(run),
        "scan": lambda *xs: jax.lax.scan(lambda c, x: (c, run(*x)), None, xs)[1],
        "remat": with_gradients(jax.checkpoint(fn)),
        "cond": lambda *xs: jax.vmap(lambda p, *x: jax.lax.cond(p, run, run, *x))(choose, *xs),
    }.items():
        assert_close(name, jax.jit(transformed)(*operands), want, TOL["bfloat16"])
