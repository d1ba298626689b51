# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""What must not change a bit of attention's results: the batch around a sequence, and packing."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpjax
from tests.harness import assert_close, inputs
from tests.pallas.test_attention_features import TOL, call, outputs_and_gradients
from tpjax.core.attention import attention_reference
from tpjax.pallas.attention.entry import flash_attention

KERNEL = partial(flash_attention, implementation="pallas")


def operands(length, D, heads=(2, 1), batch=1, seed=0):
    """Returns query, key, value and the output's cotangent of one row."""
    H, K = heads
    q, k = (f"bf16[{batch},{length},{n},{D}]" for n in (H, K))
    return [inputs(spec, seed + i) for i, spec in enumerate((q, k, k, q))]


def with_gradients(*arrays, **options):
    """Returns output and the gradients of query, key and value."""
    *inner, dout = arrays
    out, vjp = jax.vjp(partial(KERNEL, is_causal=True, **options), *inner)
    return out, *vjp(dout)


def check_batch(length, D):
    """A sequence alone, and as the last of three."""
    alone = operands(length, D)
    others = operands(length, D, batch=2, seed=9)
    together = [jnp.concatenate(pair) for pair in zip(others, alone, strict=True)]
    want, got = jax.jit(with_gradients)(*alone), jax.jit(with_gradients)(*together)
    assert_close("alone", tuple(x[2:] for x in got), want, 0)


def check_packed(length, start, D, others=50):
    """A document alone, and behind another one that ends somewhere before `start`."""
    alone = operands(length, D)
    total = start + length
    row = [
        x.at[:, start:].set(own) for x, own in zip(operands(total, D, seed=9), alone, strict=True)
    ]
    ids = jnp.asarray(np.repeat([1, 2, 3], [others, start - others, length]))[None]
    want = jax.jit(with_gradients)(*alone)
    got = jax.jit(partial(with_gradients, query_segment_ids=ids))(*row)
    assert_close("alone", tuple(x[:, start:] for x in got), want, 0)


def test_interpreted():
    """In the interpreter, whose key blocks are of 64."""
    with tpjax.use(interpret=True):
        check_batch(70, 64)
        check_packed(100, 128, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128, 256])
def test_on_gpu(D):
    """At real sizes: output and gradients, bit for bit."""
    check_batch(1000, D)
    check_packed(900, 1280, D, others=300)


VMAPPED = [
    ("query",),
    ("key", "value"),
    ("alibi_slopes",),
    ("query_seq_lengths", "sinks"),
    ("bias", "mask"),
    ("query_segment_ids", "key_value_segment_ids", "prefix_lengths"),
]


def check_vmap(names, T=40, D=64):
    """vmap over these operands alone is the same as a loop over them."""
    shapes = {
        "bias": (1, T, T), "mask": (T, T), "alibi_slopes": (2,), "sinks": (2,),
        "query_seq_lengths": [T - 3], "prefix_lengths": [9],
        "query_segment_ids": np.sort(np.arange(T) % 3)[None],
        "key_value_segment_ids": np.sort(np.arange(T) % 3)[None],
    }  # fmt: skip
    given = [call(T, T, 2, 1, D, is_causal=True, seed=seed, **shapes) for seed in (0, 1)]
    given[1] |= {"query_seq_lengths": jnp.array([7]), "prefix_lengths": jnp.array([30])}
    for name in ("query_segment_ids", "key_value_segment_ids"):
        given[1][name] = 1 - jnp.minimum(given[0][name], 1)
    moving = {name: jnp.stack([one[name] for one in given]) for name in names}
    options = {n: x for n, x in given[0].items() if not isinstance(x, jax.Array)}
    still = {n: x for n, x in given[0].items() if n not in moving and n not in options}

    def run(fn, own):
        return outputs_and_gradients(fn, {**still, **options, **own})

    got = jax.jit(jax.vmap(partial(run, KERNEL)))(moving)
    for i in range(2):
        want = run(attention_reference, {name: x[i] for name, x in moving.items()})
        for name, expected in want.items():
            assert_close(name, got[name][i], expected, TOL.get(name, 6e-3))


@pytest.mark.parametrize("names", [VMAPPED[1], VMAPPED[3]], ids=str)
def test_vmap_over_some_operands(names):
    """A batching rule for each operand, in the interpreter."""
    with tpjax.use(interpret=True):
        check_vmap(names)


@pytest.mark.gpu
@pytest.mark.parametrize("names", VMAPPED, ids=str)
def test_vmap_over_any_operand_on_gpu(names):
    """The same for every operand."""
    check_vmap(names, 300, 128)
