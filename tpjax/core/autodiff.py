# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Functions that say themselves how they are differentiated, whatever JAX does with them.

`call_with_rule` is a function with a rule for tangents, as `jax.custom_jvp` makes one. But it stays
one equation, with its rule, when a rematerialised or scanned function is taken apart to be
transposed, where JAX 0.11 replaces a `custom_jvp` by its body.

`linear_map` is a linear map told in both directions:

    out  = apply(fixed, x)             linear in x, any function of fixed
    ct_x = transpose(fixed, ct_out)

Reverse mode runs `transpose` and never `apply`; forward mode runs `apply`. The map's derivative
with respect to `fixed` is that of `apply`, which must be plain JAX. It is
`jax.custom_derivatives.linear_call`, but batched by vmap and differentiable in `fixed`.

No function given here may close over arrays that JAX is tracing.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax import Array
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from tpjax.core import _jax

Arrays = Sequence[Array]
Tangents = Sequence[Array | None]
"""None stands for a tangent of zeros."""
Rule = Callable[[Arrays, Tangents], tuple[Arrays, Tangents]]
Map = Callable[[Arrays, Arrays], Arrays]


def push(fn: Callable[..., Any], primals: Arrays, tangents: Tangents) -> Any:
    """Returns the derivative of `fn(*primals)` along the tangents, of which one is not None."""
    moving = [i for i, t in enumerate(tangents) if t is not None]

    def of_moving(*xs: Any) -> Any:
        return fn(*replaced(primals, moving, xs))

    return jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])[1]


def pull(fn: Callable[..., Any], *primals: Array) -> tuple[Any, Any]:
    """Returns what `jax.vjp` does, with respect to the floating `primals` alone."""
    moving = floating(primals)

    def of_moving(*xs: Any) -> Any:
        return fn(*replaced(primals, moving, xs))

    return jax.vjp(of_moving, *(primals[i] for i in moving))


def floating(arrays: Arrays) -> list[int]:
    """Returns the positions of the arrays that have gradients."""
    return [i for i, x in enumerate(arrays) if jax.numpy.issubdtype(x.dtype, jax.numpy.inexact)]


def replaced(old: Sequence[Any], places: Sequence[int], new: Sequence[Any]) -> list[Any]:
    """Returns the list with other values at some places."""
    full = list(old)
    for i, x in zip(places, new, strict=True):
        full[i] = x
    return full


def call_with_rule(jaxpr: _jax.Jaxpr, rule: Rule, *args: Array) -> list[Array]:
    """Returns the jaxpr's results; they are differentiated by the rule.

    Args:
      jaxpr: of the function.
      rule: takes arguments and their tangents, returns results and their tangents.
      args: the function's.
    """
    return _call_p.bind(*args, jaxpr=jaxpr, rule=rule)


def linear_map(apply: Map, transpose: Map, fixed: Arrays, x: Arrays, like: Arrays) -> list[Array]:
    """Returns `apply(fixed, x)`, whose transpose with respect to x is `transpose(fixed, ct)`.

    Args:
      apply: traced only where forward mode, or a derivative, asks for it.
      transpose: takes `fixed` and cotangents of the results, returns those of x.
      fixed: what the map depends on.
      x: what it is linear in.
      like: arrays of the types of the results.
    """
    types = tuple(_jax.tangent_type(y) for y in like)
    kept = {"apply": apply, "transpose": transpose, "num_fixed": len(fixed), "types": types}
    return _linear_p.bind(*fixed, *x, **kept)


def _known(tangents: Sequence[Any]) -> list[Array | None]:
    """Returns the tangents; None for those that are zero by form, as an integer's is."""
    zero = SymbolicZero | ad.Zero
    return [None if isinstance(t, zero) or t.dtype == jax.dtypes.float0 else t for t in tangents]


def _any_batched(dims: Sequence[int | None]) -> bool:
    """Returns whether vmap has anything to do: JAX asks a batching rule even where it has not."""
    return any(d is not None for d in dims)


def _over(axis: Any, in_axes: Any) -> Callable[..., Any]:
    """Returns the vmap of a function over the axis that a batching rule is given."""
    return partial(
        jax.vmap,
        in_axes=in_axes,
        axis_size=axis.size,
        axis_name=axis.name,
        spmd_axis_name=axis.spmd_name or axis.explicit_mesh_axis,
    )


_call_p = Primitive("call_with_rule")
_call_p.multiple_results = True


def _run(*args: Any, jaxpr: _jax.Jaxpr, **_: Any) -> list[Array]:
    return jaxpr_as_fun(jaxpr)(*args)


def _call_jvp(primals: Any, tangents: Any, *, rule: Rule, **_: Any) -> tuple[Any, Any]:
    outs, along = rule(primals, _known(tangents))
    pairs = zip(outs, along, strict=True)
    return outs, [ad.Zero(_jax.tangent_type(y)) if t is None else t for y, t in pairs]


def _call_batch(axis: Any, args: Any, dims: Any, *, jaxpr: Any, rule: Rule) -> tuple[Any, Any]:
    dims = tuple(dims)
    if not _any_batched(dims):
        return call_with_rule(jaxpr, rule, *args), [None] * len(jaxpr.outvars)

    def batched_rule(primals: Arrays, tangents: Tangents) -> tuple[Arrays, Tangents]:
        moving = [i for i, t in enumerate(tangents) if t is not None]

        def one(primals: Arrays, xs: Arrays) -> tuple[Arrays, Tangents]:
            return rule(primals, replaced([None] * len(primals), moving, xs))

        axes = (dims, tuple(dims[i] for i in moving))
        return _over(axis, axes)(one)(tuple(primals), tuple(tangents[i] for i in moving))

    batched = jax.make_jaxpr(_over(axis, dims)(jaxpr_as_fun(jaxpr)))(*args)
    return call_with_rule(batched, batched_rule, *args), [0] * len(batched.outvars)


_call_p.def_impl(_run)
_call_p.to_lojax = _run
_call_p.def_effectful_abstract_eval(lambda *_, jaxpr, **__: (jaxpr.out_avals, jaxpr.effects))
mlir.register_lowering(_call_p, mlir.lower_fun(_run, multiple_results=True), cacheable=False)
ad.primitive_jvps[_call_p] = _call_jvp
batching.fancy_primitive_batchers[_call_p] = _call_batch


_linear_p = Primitive("linear_map")
_linear_p.multiple_results = True


def _apply(*args: Any, apply: Map, num_fixed: int, **_: Any) -> Arrays:
    return apply(args[:num_fixed], args[num_fixed:])


def _linear_jvp(primals: Any, tangents: Any, **kept: Any) -> tuple[Any, Any]:
    out, n = _linear_p.bind(*primals, **kept), kept["num_fixed"]
    along = _known(tangents)
    if any(t is not None for t in along[:n]):
        return out, push(partial(_apply, **kept), primals, along)
    return out, _linear_p.bind(*primals[:n], *map(ad.instantiate_zeros, tangents[n:]), **kept)


def _linear_transpose(
    cts: Any, *args: Any, transpose: Map, num_fixed: int, **_: Any
) -> list[Array | None]:
    fixed, x = args[:num_fixed], args[num_fixed:]
    ct_x = transpose(fixed, [ad.instantiate_zeros(ct) for ct in cts])
    asked = [c if ad.is_undefined_primal(a) else None for a, c in zip(x, ct_x, strict=True)]
    return [None] * num_fixed + asked


def _linear_batch(axis: Any, args: Any, dims: Any, **kept: Any) -> tuple[Any, Any]:
    n, mesh_axis = kept["num_fixed"], axis.explicit_mesh_axis
    if not _any_batched(dims):
        return _linear_p.bind(*args, **kept), [None] * len(kept["types"])
    pairs = zip(args[n:], dims[n:], strict=True)
    x = [batching.bdim_at_front(a, d, axis.size, mesh_axis) for a, d in pairs]
    over = _over(axis, (tuple(dims[:n]), 0))
    kept["apply"], kept["transpose"] = over(kept["apply"]), over(kept["transpose"])
    kept["types"] = tuple(_jax.batched_type(t, axis.size, mesh_axis) for t in kept["types"])
    return _linear_p.bind(*args[:n], *x, **kept), [0] * len(kept["types"])


_linear_p.def_impl(_apply)
_linear_p.def_abstract_eval(lambda *_, types, **__: types)
mlir.register_lowering(_linear_p, mlir.lower_fun(_apply, multiple_results=True))
ad.primitive_jvps[_linear_p] = _linear_jvp
ad.primitive_transposes[_linear_p] = _linear_transpose
batching.fancy_primitive_batchers[_linear_p] = _linear_batch
