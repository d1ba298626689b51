# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Attention's kernels for wide heads, in the interpreter; on a GPU."""

import jax.numpy as jnp
import pytest

import tpjax
from tests.pallas.test_attention_features import PACKED, call, check


def test_no_races():
    """256 features, a causal edge, heads in a group, edges of arrays, several steps."""
    with tpjax.use(interpret="races"):
        check(call(70, 90, 2, 1, 256, is_causal=True))


def test_features_together():
    """Two workers that share keys see the same scores: edges on both sides, gain and mask."""
    with tpjax.use(interpret=True):
        check(call(
            90, 90, 1, 1, 256, is_causal=True, prefix_lengths=[50], query_segment_ids=PACKED,
            local_window_size=(40, 3), softcap=2.0, alibi_slopes=(1,), bias=(90, 90), mask=(90, 90),
        ))  # fmt: skip


def test_small_weights():
    """Weights below float16's range lose nothing; nor do large scores reach beyond the queries."""
    given = call(70, 90, 1, 1, 192, 128, sinks=(1,), bias=(70, 90))
    given |= {"bias": given["bias"] + 20, "sinks": jnp.asarray([40.0])}
    with tpjax.use(interpret=True):
        check(given)


@pytest.mark.gpu
@pytest.mark.parametrize("widths", [(256, 256), (192, 128), (160, 200)])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_on_gpu(widths, dtype):
    """Real sizes on the device, causal and with many features."""
    check(call(2000, 2000, 4, 2, *widths, batch=2, dtype=dtype, is_causal=True))
    check(call(
        777, 1500, 4, 4, *widths, batch=2, dtype=dtype, softcap=5.0, local_window_size=(300, 100),
        key_value_seq_lengths=[1500, 400], bias=(4, 777, 1500), alibi_slopes=(4,),
    ))  # fmt: skip
