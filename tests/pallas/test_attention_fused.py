# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Attention's fused backward kernel: in the interpreter, lowered for CUDA, and on a GPU."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

import tpjax
from tests.pallas.test_attention_features import PACKED, call, check, outputs_and_gradients
from tpjax.pallas.attention import fused
from tpjax.pallas.attention.entry import flash_attention

FUSED, DETERMINISTIC = "flash_attention_backward_fused", "flash_attention_backward_query"
any_order = partial(call, deterministic=False)
"""A call whose gradients may be summed in any order."""


def test_no_races():
    """Causal, heads in a group, edges of arrays, two steps for each head.

    The interpreter takes two blocks of threads that add to one query for a race: the keys are those
    of one.
    """
    with tpjax.use(interpret="races"):
        check(any_order(150, 77, 2, 1, 64, is_causal=True))


INTERPRETED = {
    "all, float16, two tiles": any_order(70, 256, 1, 1, 64, dtype="f16"),
    "segments, window, softcap": any_order(
        90, 90, 1, 1, 64, query_segment_ids=PACKED, local_window_size=(40, 20), softcap=2.0
    ),
}


@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted(name):
    """Results and gradients, for cotangents of out and of lse."""
    with tpjax.use(interpret=True):
        check(INTERPRETED[name])


def test_planted_fault_keys_beyond_the_last(monkeypatch):
    """Keys beyond the last that count as seen are found in dquery.

    Where the only score is far below zero, the weight of a key of zeros is infinite.
    """
    monkeypatch.setattr(fused, "_bounded", lambda extras, *_: extras)
    with tpjax.use(interpret=True), pytest.raises(AssertionError, match="dquery"):
        check(any_order(5, 1, 1, 1, 64, scale=-60.0))


def lowered(given, transform=lambda fn: fn):
    """Returns what a call and its gradients are lowered to for CUDA."""
    run = transform(partial(outputs_and_gradients, flash_attention))
    with tpjax.use(platform="cuda"):
        traced = jax.jit(lambda: run(given)).trace()
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("tokens", [1000, 1024])
def test_lowers_for_cuda(tokens, is_causal):
    """The kernel passes the checks of layouts, shared memory and copies, and is the one used."""
    text = lowered(any_order(777, tokens, 4, 2, 64, is_causal=is_causal))
    assert FUSED in text
    assert DETERMINISTIC not in text


def test_lowers_under_vmap():
    """The sum in global memory has a batch axis too."""

    def batched(run):
        return lambda given: jax.vmap(lambda query: run({**given, "query": query}))(
            jnp.stack([given["query"]] * 2)
        )

    assert FUSED in lowered(any_order(100, 100, 1, 1, 64), batched)


OTHERS = {
    "asked for": call(90, 90, 1, 1, 64),
    "wide heads": any_order(90, 90, 1, 1, 128),
    "bias": any_order(90, 90, 1, 1, 64, bias=(90, 90)),
    "slopes": any_order(90, 90, 1, 1, 64, alibi_slopes=(1,)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls_are_deterministic(name):
    """What the kernel does not take, or may not, goes to the kernels of a fixed order."""
    text = lowered(OTHERS[name])
    assert FUSED not in text
    assert DETERMINISTIC in text


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_on_gpu(dtype):
    """Values and gradients at real sizes on the device: causal, ragged, and with features."""
    check(any_order(4096, 4096, 4, 2, 64, batch=2, dtype=dtype, is_causal=True))
    check(any_order(2048, 2048, 3, 3, 64, dtype=dtype))
    check(any_order(
        777, 1500, 4, 1, 64, batch=2, dtype=dtype, is_causal=True, alignment="bottom_right",
        local_window_size=(300, 100), key_value_seq_lengths=[1500, 400], softcap=5.0, sinks=(4,),
        mask=(777, 1500),
    ))  # fmt: skip
