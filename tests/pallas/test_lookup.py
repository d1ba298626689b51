# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Embedding: ids that name no row, the order of its gradient's sum, edges, the door.

On a GPU: `python -m pytest -m gpu tests/pallas/test_lookup.py`.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpjax
from tests.harness import assert_close, inputs
from tests.pallas.test_dispatch import chosen
from tpjax.pallas import embedding
from tpjax.pallas.lookup import kernels

TOL = {"float32": 1e-6, "bfloat16": 6e-3, "float16": 1e-3}


def summed(dy, ids, num_rows):
    """Returns the gradient of the table in float64, id after id."""
    total = np.zeros((num_rows, dy.shape[-1]))
    rows, places = np.asarray(dy, np.float64).reshape(-1, dy.shape[-1]), np.asarray(ids).reshape(-1)
    for row, place in zip(rows, places, strict=True):
        if 0 <= place < num_rows:
            total[place] += row
    return total.astype(dy.dtype)


def check(spec, ids, fn=embedding):
    """Compares the gradient of the table with the sum in float64."""
    table = inputs(spec, 0)
    dtype = spec.split("[")[0]
    dy = inputs(f"{dtype}[{','.join(map(str, (*ids.shape, table.shape[1])))}]", 1)
    out, (got,) = jax.jit(lambda t, dy: _both(fn, t, ids, dy))(table, dy)
    want = summed(dy, ids, table.shape[0])
    assert_close(f"{spec} {ids.shape}", got, want, TOL[str(table.dtype)])
    named = (np.asarray(ids) >= 0) & (np.asarray(ids) < table.shape[0])
    rows = np.asarray(table)[np.where(named, np.asarray(ids), 0)]
    assert_close("rows", out, np.where(named[..., None], rows, np.zeros_like(rows)), 0)


def _both(fn, table, ids, dy):
    out, vjp = jax.vjp(lambda t: fn(t, ids), table)
    return out, vjp(dy)


def ids_of(shape, low, high, seed=0):
    """Returns random ids."""
    return jnp.asarray(np.random.default_rng(seed).integers(low, high, shape), jnp.int32)


def test_plain_form():
    """Ids that name no row, negative ones too: zeros, and no gradient; ids that repeat."""
    check("f32[7,5]", ids_of((3, 11), -4, 12))
    check("bf16[7,5]", ids_of((63,), 0, 7))
    check("f16[1,3]", ids_of((1, 1, 2), -1, 1))


CHUNK = kernels.CHUNK
CASES = [
    ("f32[40,128]", jnp.zeros(3 * CHUNK + 1, jnp.int32) + 39),  # one id over all chunks
    ("bf16[9,256]", ids_of((2, CHUNK), -2, 11)),  # ids that name no row are passed over
    ("f16[300,128]", jnp.concatenate([jnp.arange(CHUNK), jnp.arange(CHUNK - 1, CHUNK + 9)])),
]
"""The last: an id begins with the last place of a chunk and ends with the first of the next."""


@pytest.mark.parametrize(("spec", "ids"), CASES, ids=["one id", "no row", "over an edge"])
def test_interpreted(spec, ids):
    """The kernels in the interpreter; data races are errors."""
    with tpjax.use(interpret="races"):
        check(spec, ids, partial(embedding, implementation="pallas"))


def test_order():
    """Every place is in one chunk, ids ascend; a joint is an id's first and last chunk."""
    ids = ids_of((1031,), -1, 5)
    order = kernels.ordered(ids, 4)  # -1 and 4 name no row
    places, keys = np.split(np.asarray(order.chunks)[:, : 2 * CHUNK], 2, axis=1)
    assert sorted(places.ravel()) == list(range(places.size))
    assert (np.diff(keys.ravel()) >= 0).all()
    for chunk, (key, last) in enumerate(np.asarray(order.joints)[:, :2]):
        if key < 4:
            where = np.flatnonzero((keys == key).any(1))
            assert (where[0], where[-1]) == (chunk, last)
            assert last > chunk
    joined = {k for k in range(4) if (keys == k).any(1).sum() > 1}
    assert {int(k) for k in np.asarray(order.joints)[:, 0] if k < 4} == joined


def test_edges():
    """No ids, an empty table, one id; other kinds of integers."""
    table = inputs("f32[5,3]", 0)
    assert embedding(table, jnp.zeros((2, 0), jnp.int32)).shape == (2, 0, 3)
    assert not np.any(embedding(table[:0], jnp.zeros(4, jnp.int32)))
    assert_close("one", embedding(table, jnp.int32(4)), table[4], 0)
    for dtype in (jnp.int8, jnp.uint8, jnp.uint32):
        assert_close(str(dtype), embedding(table, jnp.arange(5).astype(dtype)), table, 0)
    second = jax.hessian(lambda t: (embedding(t, jnp.array([1, 1, 4])) ** 3).sum())(table)
    assert second.shape == (5, 3, 5, 3)


def any_kind(x: Any) -> Any:
    """Hides the kind of a wrong argument from the type checker."""
    return x


TABLE, IDS = jnp.zeros((5, 4)), jnp.zeros(3, jnp.int32)
DOOR = [
    (lambda: embedding(TABLE[0], IDS), ValueError, r"table must be of rank 2, \[V, D\]; got .*4,"),
    (lambda: embedding(TABLE, jnp.ones(3)), TypeError, "ids must be integers; got float32"),
    (lambda: embedding(TABLE, any_kind(3)), TypeError, "ids must be an array; got int"),
    (lambda: embedding(IDS[None], IDS), TypeError, "table must be of dtype .*; got int32"),
]


@pytest.mark.parametrize(("wrong", "error", "text"), DOOR, ids=[d[2] for d in DOOR])
def test_door(wrong, error, text):
    """Wrong kinds, dtypes and ranks, in the house style."""
    with pytest.raises(error, match=text):
        wrong()


def test_kernel_refuses_with_the_reason():
    table = jax.ShapeDtypeStruct((7, 192), jnp.float32)
    reason = "a multiple of 128 features; it has 192"
    with tpjax.use(platform="cuda"), pytest.warns(UserWarning, match=reason):
        (choice,) = chosen(embedding, table, IDS)
    assert choice.implementation == "xla"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_gpu_sizes(dtype):
    """Odd numbers of ids, widths that fill no whole number of slices, on a GPU."""
    run = partial(embedding, implementation="pallas")
    for i, count in enumerate((1, 3, 7, 63, 1000, 1031)):
        for features in (128, 768, 1408, 2304):
            check(f"{dtype}[{5 + 97 * i},{features}]", ids_of((count,), -1, 7 + 90 * i, i), run)
    for spec, ids in CASES:
        check(spec, ids, run)


@pytest.mark.gpu
def test_gpu_same_bits_every_time():
    """The sum has one order, however many rows have one id."""
    table, dy = inputs("f32[50,1024]", 0), inputs("f32[20000,1024]", 1)
    ids = ids_of((20000,), 0, 50)
    run = jax.jit(lambda t, dy: _both(partial(embedding, implementation="pallas"), t, ids, dy)[1])
    first = run(table, dy)
    for _ in range(5):
        assert_close("again", run(table, dy), first, 0)


NARROW = [("int8", 200), ("uint8", 300), ("uint8", 256), ("int16", 40000), ("uint16", 70000)]


@pytest.mark.parametrize(("dtype", "num_rows"), NARROW)
def test_ids_too_narrow_for_the_number_of_rows(dtype, num_rows):
    """The last row that the dtype can name gets its gradient, and no other in its place."""
    most, table = np.iinfo(dtype).max, jnp.zeros((num_rows, 128))
    ids = jnp.asarray([0, 5, most], dtype)
    with tpjax.use(interpret=True):
        got = jax.grad(lambda t: embedding(t, ids).sum())(table)
    assert np.flatnonzero(np.asarray(got)[:, 0]).tolist() == [0, 5, most]


def test_ids_too_large_for_32_bits():
    """They name no row, with and without 64-bit types."""
    ids, table = np.array([2**32, -(2**63), 1]), jnp.eye(3)
    want = jnp.zeros((3, 3)).at[2, 1].set(1)
    numpy: Any = ids
    assert_close("NumPy", embedding(table, numpy), want, 0)
    with jax.enable_x64(True):
        assert_close("x64", embedding(table, jnp.asarray(ids)), want, 0)
    unsigned = jnp.asarray([2**32 - 1], jnp.uint32)
    assert_close("unsigned", embedding(table, unsigned), want[:1], 0)
