# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""What a jaxpr costs, equation by equation, before any compiler has fused it.

FLOPs are additions, multiplications and elementary functions, each counted as one; a multiply-add
is two. Bytes are unfused: what each equation would read and write if it ran alone, which XLA's
fusion lowers and which a kernel never writes, so they compare two forms of a program and predict no
run time; a change of shape alone counts nothing. A scan counts as its length times its body, a
`cond` as its dearest branch. The trips of a `while` are not known: its body counts once, and the
cost says so.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tpjax.core import _jax
from tpjax.core.operator import Choice, Cost, Key

NO_FLOPS = frozenset({
    "bitcast_convert_type", "broadcast_in_dim", "concatenate", "convert_element_type", "copy",
    "copy_p", "device_put", "dynamic_slice", "dynamic_update_slice", "gather",
    "iota", "mesh_cast", "pad", "random_fold_in", "random_seed", "reduce_precision", "reshard",
    "rev", "scatter", "select_n", "sharding_constraint", "slice", "split", "transpose",
})  # fmt: skip
"""Primitives that move numbers and compute none."""

NO_BYTES = frozenset({
    "expand_dims", "name", "optimization_barrier", "pcast", "pvary", "random_unwrap", "random_wrap",
    "reshape", "squeeze", "stop_gradient",
})  # fmt: skip
"""Primitives that say something of numbers and leave them where they are."""

_FOLDS = frozenset({
    "argmax", "argmin", "cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "reduce",
    "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum",
    "reduce_xor",
})  # fmt: skip
"""Primitives that use each element of their first operand once."""

_DIFFERENTIABLE_CALLS = frozenset({
    "call_hi_primitive", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr",
})  # fmt: skip

_KERNELS = frozenset({"pallas_call", "mpmd_map", "core_map", "run_state", "ffi_call"})


@dataclass(frozen=True)
class ProgramCost:
    """FLOPs and unfused bytes of a program, and how many equations say it."""

    flops: float
    bytes: float
    equations: int
    notes: tuple[str, ...] = ()
    """What the numbers leave out, in words."""

    def as_dict(self) -> dict[str, Any]:
        """Returns the three numbers by name."""
        return {"flops": self.flops, "bytes": self.bytes, "equations": self.equations}


def cost_of(jaxpr: _jax.Jaxpr, choices: Sequence[Choice] = ()) -> ProgramCost:
    """Returns the cost of one run of the jaxpr.

    Args:
      jaxpr: of the program.
      choices: what dispatch chose in it; a kernel, which hides its arithmetic, costs what its
        operator's row in `OPS` says of the call.
    """
    notes: dict[str, None] = {}
    flops = moved = 0.0
    stack: list[tuple[_jax.Jaxpr, float]] = [(jaxpr, 1.0)]
    while stack:
        body, times = stack.pop()
        for eqn in body.eqns:
            one = _operator_cost(eqn, choices)
            inner = [] if one is not None else _bodies(eqn, notes)
            if inner:
                stack.extend((each, times * count) for each, count in inner)
                continue
            if one is None:
                one = _kernel_cost(eqn, notes) if _is_kernel(eqn) else _equation_cost(eqn)
            flops += times * one.flops
            moved += times * one.bytes
    return ProgramCost(flops, moved, _jax.count_equations(jaxpr), tuple(notes))


def _bodies(eqn: _jax.Equation, notes: dict[str, None]) -> list[tuple[_jax.Jaxpr, float]]:
    """Returns the jaxprs that run in place of the equation, and how often each does."""
    name, params = eqn.primitive.name, eqn.params
    if _is_kernel(eqn):
        return []
    if name == "scan":
        return [(params["jaxpr"], float(params["length"]))]
    if name == "while":
        notes["a while loop, its trips unknown, counts as one"] = None
        return [(params["cond_jaxpr"], 1.0), (params["body_jaxpr"], 1.0)]
    if name == "cond":
        costs = [(cost_of(branch).flops, i) for i, branch in enumerate(params["branches"])]
        return [(params["branches"][max(costs)[1]], 1.0)] if costs else []
    if name == "shard_map":
        mesh, manual = params["mesh"], params.get("newly_manual_axes", ())
        return [(params["jaxpr"], float(math.prod(mesh.shape[axis] for axis in manual)))]
    found = [v for v in params.values() if hasattr(v, "eqns") and hasattr(v, "invars")]
    return [(found[0], 1.0)] if found else []


def _is_kernel(eqn: _jax.Equation) -> bool:
    return eqn.primitive.name in _KERNELS


def _operator_cost(eqn: _jax.Equation, choices: Sequence[Choice]) -> Cost | None:
    """Returns the cost of the operator that the equation calls a kernel for, or None.

    Only the call itself stands where the user wrote it: JAX traces what is in it once, and keeps
    the line of whoever came first.
    """
    if not choices or not (_is_kernel(eqn) or eqn.primitive.name in _DIFFERENTIABLE_CALLS):
        return None
    source, shapes = _jax.source_of(eqn), {_shape(v) for v in eqn.invars}
    near = [c for c in choices if c.source == source and c.key and c.implementation != "xla"]
    if not near or not _holds_kernel(eqn):
        return None
    # Several calls on one line are told apart by the shape of their first operand, if by anything.
    fits = [c for c in near if c.key and c.key.operands[0][1] and c.key.operands[0][1][0] in shapes]
    choice = (fits or near)[0]
    assert choice.key is not None
    return operator_cost(choice.op, choice.key)


def _holds_kernel(eqn: _jax.Equation) -> bool:
    stack = [eqn]
    while stack:
        one = stack.pop()
        if _is_kernel(one):
            return True
        stack.extend(e for body, _ in _bodies(one, {}) for e in body.eqns)
    return False


def _kernel_cost(eqn: _jax.Equation, notes: dict[str, None]) -> Cost:
    """Returns the cost of a kernel of no known operator: its own estimate, or its bytes."""
    source = _jax.source_of(eqn)
    estimate = eqn.params.get("cost_estimate")
    if estimate is not None:
        return Cost(float(estimate.flops), float(estimate.bytes_accessed))
    notes[f"the arithmetic of a kernel ({source}) is not known"] = None
    return Cost(0.0, _traffic(eqn))


def operator_cost(op: str, key: Key) -> Cost | None:
    """Returns the cost of one call of the operator, by its row in `OPS`; None without a row."""
    import jax

    from tpjax.pallas import OPS

    row = next((row for row in OPS if row.name == op), None)
    if row is None:
        return None
    given = {n: jax.ShapeDtypeStruct(*aval) for n, aval in key.operands if aval is not None}
    return row.cost(**given, **dict(key.options))


def _equation_cost(eqn: _jax.Equation) -> Cost:
    name = eqn.primitive.name
    if name in NO_BYTES:
        return Cost(0.0, 0.0)
    count = _FLOPS.get(name)
    if count is not None:
        return Cost(count(eqn), _traffic(eqn))
    if name in NO_FLOPS:
        return Cost(0.0, _traffic(eqn))
    sizes = [_size(v) for v in (eqn.invars[:1] if name in _FOLDS else eqn.outvars)]
    return Cost(float(max(sizes, default=0)), _traffic(eqn))


def _shape(var: Any) -> tuple[int, ...]:
    return tuple(getattr(var.aval, "shape", ()))


def _size(var: Any) -> int:
    return math.prod(_shape(var))


def _traffic(eqn: _jax.Equation) -> float:
    """Returns the bytes of the equation's operands and results."""
    total = 0
    for var in (*eqn.invars, *eqn.outvars):
        dtype = getattr(var.aval, "dtype", None)
        total += _size(var) * getattr(dtype, "itemsize", 0)
    return float(total)


def _dot(eqn: _jax.Equation) -> float:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return 2.0 * _size(eqn.outvars[0]) * math.prod(_shape(eqn.invars[0])[i] for i in contracted)


def _ragged_dot(eqn: _jax.Equation) -> float:
    return 2.0 * _size(eqn.outvars[0]) * _shape(eqn.invars[0])[-1]


def _convolution(eqn: _jax.Equation) -> float:
    kernel = _shape(eqn.invars[1])
    features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    return 2.0 * _size(eqn.outvars[0]) * math.prod(kernel) / max(features, 1)


def _window(eqn: _jax.Equation) -> float:
    return float(_size(eqn.outvars[0]) * math.prod(eqn.params["window_dimensions"]))


def _sort(eqn: _jax.Equation) -> float:
    size = _size(eqn.invars[0])
    length = _shape(eqn.invars[0])[eqn.params.get("dimension", -1)]
    return float(size * math.ceil(math.log2(max(length, 2))))


def _fourier(eqn: _jax.Equation) -> float:
    points = math.prod(eqn.params["fft_lengths"])
    return 5.0 * max(_size(eqn.invars[0]), _size(eqn.outvars[0])) * math.log2(max(points, 2))


def _cubic(factor: float) -> Callable[[_jax.Equation], float]:
    def count(eqn: _jax.Equation) -> float:
        *batch, rows, columns = _shape(eqn.invars[0])
        return factor * math.prod(batch) * rows * columns * min(rows, columns)

    return count


def _triangular_solve(eqn: _jax.Equation) -> float:
    return float(_size(eqn.outvars[0]) * _shape(eqn.invars[0])[-1])


_FLOPS: dict[str, Callable[[_jax.Equation], float]] = {
    "dot_general": _dot,
    "ragged_dot_general": _ragged_dot,
    "ragged_dot": _ragged_dot,
    "conv_general_dilated": _convolution,
    "reduce_window": _window,
    "reduce_window_sum": _window,
    "reduce_window_max": _window,
    "reduce_window_min": _window,
    "sort": _sort,
    "top_k": _sort,
    "fft": _fourier,
    "cholesky": _cubic(1 / 3),
    "lu": _cubic(2 / 3),
    "geqrf": _cubic(4 / 3),
    "eigh": _cubic(9.0),
    "svd": _cubic(22.0),
    "triangular_solve": _triangular_solve,
    "integer_pow": lambda eqn: float(_size(eqn.outvars[0]) * max(abs(eqn.params["y"]) - 1, 1)),
}
"""FLOPs of the primitives that do more than one operation for each element."""
