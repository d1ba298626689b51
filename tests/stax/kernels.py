# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Kernels of `rms_norm` that do not compile on a CPU, each in another way."""

from typing import Any

import jax
import jax.experimental.pallas as pl


def not_lowered(x: Any, scale: Any, **options: Any) -> Any:
    """A kernel that Pallas cannot lower: there is no compiler for it on a CPU."""
    del scale, options

    def kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...] * 2

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def not_compiled(x: Any, scale: Any, **options: Any) -> Any:
    """A kernel that XLA does not know."""
    del scale, options
    return jax.ffi.ffi_call("no_such_kernel", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


@jax.custom_vjp
def _half_compiled(x: Any) -> Any:
    return x * 2


_half_compiled.defvjp(lambda x: (x * 2, None), lambda _, g: (not_compiled(g, None),))


def no_gradient(x: Any, scale: Any, **options: Any) -> Any:
    """A kernel whose backward pass XLA does not know."""
    del scale, options
    return _half_compiled(x)
