# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Which array functions JAX has, by introspection, and how each is called.

A function that JAX adds is called with the first operands of `calls.OPERANDS` that it takes. If it
takes none it must get a row in `calls.CALLS`, or one in `LEFT_OUT` with the reason.
"""

import functools
import inspect
from collections.abc import Callable
from itertools import islice
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy import special

from tests.stax.calls import ALSO, CALLS, FLOATS, ODD, ODD_WHOLE, OPERANDS, WHOLE, Call, N, X

MODULES: dict[str, ModuleType] = {"jnp": jnp, "lax": lax, "nn": jax.nn, "special": special}

_NO_ARRAY = "returns no array that depends on one"
_MESH = "needs a named axis: tests of meshes call it"
_FILE = "reads or writes files and buffers"
OLDER = ("lax.psend", "lax.precv")
"""Functions of JAX 0.11 that 0.12 has no more."""
LEFT_OUT: dict[str, str] = {
    **dict.fromkeys(OLDER, _MESH),
    **dict.fromkeys(
        (
            "jnp.array_repr",
            "jnp.array_str",
            "jnp.broadcast_shapes",
            "jnp.can_cast",
            "jnp.einsum_path",
            "jnp.get_printoptions",
            "jnp.iscomplexobj",
            "jnp.isdtype",
            "jnp.isrealobj",
            "jnp.isscalar",
            "jnp.issubdtype",
            "jnp.ndim",
            "jnp.printoptions",
            "jnp.promote_types",
            "jnp.result_type",
            "jnp.set_printoptions",
            "jnp.shape",
            "jnp.size",
            "jnp.iterable",
            "lax.after_all",
            "lax.broadcast_shapes",
            "lax.conv_dimension_numbers",
            "lax.conv_general_permutations",
            "lax.conv_general_shape_tuple",
            "lax.conv_shape_tuple",
            "lax.conv_transpose_shape_tuple",
            "lax.dtype",
            "lax.padtype_to_pads",
            "lax.create_token",
            "lax.reduce_window_shape_tuple",
            "nn.get_scaled_dot_general_config",
            "lax.DotDimensionNumbers",
        ),
        _NO_ARRAY,
    ),
    **dict.fromkeys(
        (
            "lax.all_gather",
            "lax.all_to_all",
            "lax.axis_index",
            "lax.axis_size",
            "lax.pbroadcast",
            "lax.pcast",
            "lax.pmax",
            "lax.pmean",
            "lax.pmin",
            "lax.ppermute",
            "lax.pshuffle",
            "lax.psum",
            "lax.psum_scatter",
            "lax.psum_scatter_start",
            "lax.pswapaxes",
            "lax.ragged_all_to_all",
            "lax.with_sharding_constraint",
            "lax.broadcast_like",
        ),
        _MESH,
    ),
    **dict.fromkeys(
        (
            "jnp.from_dlpack",
            "jnp.frombuffer",
            "jnp.fromfile",
            "jnp.fromiter",
            "jnp.fromstring",
            "jnp.load",
            "jnp.save",
            "jnp.savez",
        ),
        _FILE,
    ),
    "jnp.trim_zeros": "the size of its result depends on numbers",
    "lax.composite": "a decorator of functions",
    "lax.empty": "holds whatever was in memory",
    "lax.stage": "a marker that JAX itself does not evaluate one by one",
    "lax.ragged_dot_general": "needs rows of groups: lax.ragged_dot is it",
    "lax.rng_uniform": "draws from the state of the machine",
    "nn.scaled_dot_general": "needs a GPU",
    "nn.scaled_matmul": "needs a GPU",
    "lax.scaled_dot": "needs float8 scales",
}
"""Functions that are not called, and why."""


def functions() -> dict[str, Callable[..., Any]]:
    """Returns the functions of the modules by name, as introspection finds them."""
    found = {}
    for short, module in MODULES.items():
        for name, value in vars(module).items():
            if name.startswith("_") or not callable(value) or inspect.isclass(value):
                continue
            found[f"{short}.{name}"] = value
    return found


@functools.cache
def calls_of(
    name: str, fn: Callable[..., Any], *, every: bool = False
) -> dict[str, tuple[Call, Any, Any]]:
    """Returns the calls to compare: by operands, the function of them, tame ones and odd ones.

    Without `every`, the first floats and the first whole numbers that the function takes.
    """
    if name in CALLS:
        call = CALLS[name]
        whole = "n" in inspect.signature(call).parameters
        tame, odd = ((N % 4,), (ODD_WHOLE,)) if whole else ((X,), (ODD,))
        return {"as in CALLS": (call, tame, odd)}
    found = {}
    for kinds in (FLOATS, WHOLE):
        fit = (kind for kind in kinds if _accepts(fn, OPERANDS[kind][0]))
        found |= {kind: (fn, *OPERANDS[kind]) for kind in (fit if every else islice(fit, 1))}
    if every and found:
        more = (kind for kind in ALSO if _accepts(fn, OPERANDS[kind][0]))
        found |= {kind: (fn, *OPERANDS[kind]) for kind in more}
    return found


def _accepts(fn: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    try:
        return bool(jax.make_jaxpr(fn)(*args).eqns)
    except Exception:
        return False
