# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Gated linear units and the gated MLP: the door, what is kept, activations, odd sizes.

On a GPU: `python -m pytest -m gpu tests/pallas/test_gated.py`.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpjax
from tests.harness import assert_close, inputs
from tests.pallas import op_checks as checks
from tpjax.core.operator import Sample
from tpjax.core.products import ACTIVATIONS
from tpjax.pallas import gated_linear_unit, gated_mlp
from tpjax.pallas.products import finishes, gated
from tpjax.pallas.products.plain import Launcher
from tpjax.pallas.products.rows import GATED_LINEAR_UNIT, GATED_MLP

X, W, DOWN = jnp.ones((4, 6)), jnp.ones((6, 2, 8)), jnp.ones((8, 6))


@pytest.mark.parametrize(
    ("error", "says", "call"),
    [
        (ValueError, "x must be of rank 1", lambda: gated_linear_unit(X[0, 0], W)),
        (ValueError, r"\[6, 2, F\]", lambda: gated_linear_unit(X, W[:, 0])),
        (ValueError, r"\[6, 2, F\]", lambda: gated_linear_unit(X, jnp.ones((2, 6, 8)))),
        (ValueError, r"\[6, F\] where w_up", lambda: gated_linear_unit(X, W, W[:, 0])),
        (ValueError, "w_up must be", lambda: gated_linear_unit(X, W[:, 0], DOWN)),
        (TypeError, "w must be of the dtype", lambda: gated_linear_unit(X, W.astype("bfloat16"))),
        (ValueError, "an activation", lambda: gated_linear_unit(X, W, activation="silu")),
        (ValueError, "w_down must be", lambda: gated_mlp(X, W, DOWN.T)),
    ],
)
def test_door(error, says, call):
    """Wrong operands are refused with what must hold."""
    with pytest.raises(error, match=says):
        call()


def test_nothing_to_do():
    """No rows, and no hidden features, give empty results and zeros."""
    assert gated_linear_unit(X[:0], W).shape == (0, 8)
    assert_close("no hidden", gated_mlp(X, W[..., :0], DOWN[:0]), np.zeros((4, 6), "f"), 1e-6)


NAMED = {
    "relu": jax.nn.relu,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
    "sigmoid": jax.nn.sigmoid,
    "swish": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "gelu_exact": partial(jax.nn.gelu, approximate=False),
    "linear": lambda x: x,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    """Values are those of `jax.nn`, slopes their derivatives, in kernels' arithmetic too."""
    x = jnp.concatenate([jnp.linspace(-12, 12, 999), jnp.array([-200.0, -90.0, 90.0, 200.0])])
    wanted = jax.vmap(jax.value_and_grad(NAMED[name]))(x)
    for table in (ACTIVATIONS, finishes._ACTIVATIONS):
        got = table[name].value(x), table[name].slope(x)
        assert_close(name, got, wanted, 1e-6)


def test_what_is_kept():
    """The gradient keeps operands, and gate and up rounded; no hidden rows."""
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((128, 40), (40, 2, 24), (24, 40))]
    with tpjax.use(platform="cuda"):
        pull = jax.eval_shape(lambda *xs: jax.vjp(gated_mlp, *xs)[1], *shapes)
    kept = sorted(x.shape for x in jax.tree.leaves(pull))
    assert set(kept) == {(128, 40), (40, 2, 24), (24, 40), (1, 128, 2, 24)}


def test_two_arrays_are_one():
    """Weights given as two arrays give what the stacked ones give."""
    x, w, down = inputs("f32[5,6]", 0), inputs("f32[6,2,8]", 1), inputs("f32[8,6]", 2)
    got = gated_mlp(x, w[:, 0], down, w[:, 1], activation="gelu")
    assert_close("two", got, gated_mlp(x, w, down, activation="gelu"), 1e-6)


def test_pull_of_many_tiles():
    """What multiplies nothing goes over several tiles, the last ones not full."""
    gate_up, dhidden = inputs("bf16[1,150,2,550]", 0), inputs("bf16[1,150,550]", 1)
    options = gated._Options("swish", Launcher("gated_linear_unit", "races", None))
    with tpjax.use(interpret="races"):
        got = gated._pulled(gate_up, dhidden, options)

    def forward(gate_up):
        return jax.nn.silu(gate_up[:, :, 0]) * gate_up[:, :, 1]

    wide = (x.astype(jnp.float32) for x in (gate_up, dhidden))
    want = jax.vjp(forward, next(wide))[1](next(wide))[0]
    assert_close("pull", got, want.astype(got.dtype), 6e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 3, 7, 63, 1000, 1031])
def test_odd_sizes_on_gpu(size):
    """Sizes that fill no tile, along each axis."""
    # Fewer than 128 rows are refused; of one feature roundings are no random ones.
    for rows, features, hidden in ((size + 128, 128, 256), (200, size + 2, 256), (200, 128, size)):
        x, up, down = f"bf16[{rows},{features}]", f"{features},2,{hidden}", f"{hidden},{features}"
        for op, specs in ((GATED_LINEAR_UNIT, ()), (GATED_MLP, (f"bf16[{down}]",))):
            sample = Sample((x, f"bf16[{up}]", *specs), {"activation": "gelu_exact"})
            checks.check(op, sample, partial(op.fn, implementation="pallas"))


@pytest.mark.gpu
def test_two_arrays_on_gpu():
    """Weights given as two arrays, forward and backward."""
    sample = Sample(("bf16[700,256]", "bf16[256,512]", "bf16[512,256]", "bf16[256,512]"))
    checks.check(GATED_MLP, sample, partial(gated_mlp, implementation="pallas"))


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_on_gpu(activation):
    """Every activation in the kernels."""
    options = {"activation": activation}
    sample = Sample(("bf16[300,128]", "bf16[128,2,192]", "bf16[192,128]"), options)
    checks.check(GATED_MLP, sample, partial(gated_mlp, implementation="pallas"))
