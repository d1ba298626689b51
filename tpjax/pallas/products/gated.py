# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""`gated_linear_unit` and `gated_mlp` on Hopper.

    forward    gate, up = x w            hidden = activation(gate) up        [out = hidden down]
    backward   dhidden [= dout down^T]   dgate = dhidden up activation'(gate)
               dx = [dgate, dup] w^T     dup = dhidden activation(gate)
               dw = x^T [dgate, dup]     [ddown = hidden^T dout]

in brackets what `gated_mlp` adds. Where there is no gradient, one kernel makes gate and up, and
from them the hidden rows, in registers. For the backward pass gate and up are kept (to form them
again would take a third more arithmetic in all); hidden rows are formed again at the end of the
product that gives dhidden, whose own result, and gradients of it, are in registers too. The other
products are XLA's. That rests on, in ms on an H200, 16384 rows, 4096 and 11008 features, bfloat16:

    hidden alone                 kernel 4.41, XLA 4.65
    hidden, gate and up          a kernel that writes all three 5.05, XLA 4.66
    dhidden and what follows     kernel 2.71, XLA 3.44; XLA's product, then a pass 2.78, which take
                                 a fifth more memory and in the whole 0.3 % less time
    down, ddown, dx, dw          kernels 13.17, XLA 13.03
    MLP, forward and backward    kernels 20.83, XLA 20.84; as it is here 20.61

All at the limit of the chip's power: what is saved between products is smaller in the whole.

Letters: R rows, D features, F hidden features, G groups under vmap. Gate and up are two halves of
[G, R, 2, F], as their weights are of [G, D, 2, F]: [G, D, 2 F] is the same memory. Numerics: gate
and up as kept are rounded to the dtype of x. Weights given as two arrays are read where they lie
where there is no gradient, and copied to one for it.

Source: Shazeer 2020 (GLU Variants Improve Transformer), equation 5, and its derivative.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tpjax.core.products import ACTIVATIONS
from tpjax.pallas import dispatch
from tpjax.pallas.products.finishes import Gated, GatedPull, ProductPull
from tpjax.pallas.products.grouped import product
from tpjax.pallas.products.kernel import Job
from tpjax.pallas.products.mainloop import Config
from tpjax.pallas.products.plain import Launcher


class _Operands(NamedTuple):
    """x [*R, D]; w [D, 2, F], or [D, F] and w_up alike; w_down [F, D].

    Kept as they came: reshaped, arrays would be kept twice.
    """

    x: Array
    w: Array
    w_up: Array | None
    w_down: Array | None


class _Options(NamedTuple):
    activation: str
    launcher: Launcher


class _Residuals(NamedTuple):
    """For the backward pass: the operands, gate and up [1, R, 2, F]."""

    operands: _Operands
    gate_up: Array


def _stacked(o: _Operands) -> Array:
    """Returns the weights of gate and up as one array [D, 2, F]."""
    return o.w if o.w_up is None else jnp.stack([o.w, o.w_up], axis=1)


def _hidden(o: _Operands, options: _Options) -> Array:
    """Returns the hidden rows [1, R, F]."""
    factors = (o.w[None],) if o.w_up is None else (o.w[None], o.w_up[None])
    return options.launcher(Gated(options.activation, o.w_up is None), _rows(o.x), factors)[0]


def _kept(o: _Operands, options: _Options) -> tuple[Array, Array]:
    """Returns the hidden rows, and gate and up [1, R, 2, F]."""
    w = _stacked(o)
    gate_up = (_rows(o.x)[0] @ w.reshape(w.shape[0], -1)).reshape(1, -1, *w.shape[1:])
    gate, up = (gate_up[:, :, half].astype(jnp.float32) for half in range(2))
    return (ACTIVATIONS[options.activation].value(gate) * up).astype(o.x.dtype), gate_up


def _down(o: _Operands, hidden: Array) -> Array:
    out = hidden if o.w_down is None else hidden @ o.w_down
    return out.reshape(*o.x.shape[:-1], out.shape[-1])


def _rows(x: Array) -> Array:
    return x.reshape(1, -1, x.shape[-1])


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gated(o: _Operands, options: _Options) -> Array:
    return _down(o, _hidden(o, options))


def _forward(o: _Operands, options: _Options) -> tuple[Array, _Residuals]:
    hidden, gate_up = _kept(o, options)
    return _down(o, hidden), _Residuals(o, gate_up)


_STREAM = Config(columns=512, cluster=1, group=1)
"""For a launch that multiplies nothing."""


def _pulled(gate_up: Array, dhidden: Array, options: _Options) -> Array:
    """Returns the gradient of gate and up [1, R, 2, F]: every number is moved once.

    XLA would write what the two halves share to memory.
    """
    job = Job(GatedPull(options.activation), _STREAM, options.launcher.interpret, "gated_pull")
    return product(job, None, (), (gate_up, dhidden))[0]


def _backward(options: _Options, kept: _Residuals, dout: Array) -> tuple[_Operands]:
    o, gate_up = kept
    dout, ddown = _rows(dout), None
    if o.w_down is None:
        dgate_up = _pulled(gate_up, dout, options)
    else:
        finish, down = ProductPull(options.activation), (o.w_down[None],)
        hidden, dgate_up = options.launcher(finish, dout, down, (gate_up,), transpose_b=True)
        ddown = hidden[0].T @ dout[0]
    w = _stacked(o)
    flat = dgate_up.reshape(-1, 2 * w.shape[-1])
    dx = (flat @ w.reshape(-1, flat.shape[-1]).T).reshape(o.x.shape)
    dw = (_rows(o.x)[0].T @ flat).reshape(w.shape)
    if o.w_up is None:
        return (_Operands(dx, dw, None, ddown),)
    return (_Operands(dx, dw[:, 0], dw[:, 1], ddown),)


_gated.defvjp(_forward, _backward)


def gated_linear_unit_pallas(
    x: Array, w: Array, w_up: Array | None, *, activation: str, config: Config | None = None
) -> Array:
    """Runs the kernels on a checked call that they support."""
    return _call("gated_linear_unit", x, w, w_up, None, activation, config)


def gated_mlp_pallas(
    x: Array,
    w: Array,
    w_down: Array,
    w_up: Array | None,
    *,
    activation: str,
    config: Config | None = None,
) -> Array:
    """Runs the kernels on a checked call that they support."""
    return _call("gated_mlp", x, w, w_up, w_down, activation, config)


def _call(
    op: str,
    x: Array,
    w: Array,
    w_up: Array | None,
    w_down: Array | None,
    activation: str,
    config: Config | None,
) -> Array:
    launcher = Launcher(op, dispatch.current_target().interpret, config)
    return _gated(_Operands(x, w, w_up, w_down), _Options(activation, launcher))
