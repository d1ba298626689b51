# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The one module, outside the kernels, that touches JAX internals; tested on JAX 0.11.2 and 0.12.

Everything here is small and named for what it means to the compiler, so that a change in JAX is
mended in one place. `tpjax.pallas._mgpu` is its counterpart for kernels.
"""

import functools
import os
from collections import Counter
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax._src import config as _config
from jax._src import core as _core
from jax._src import flattree as _flattree
from jax._src import literals as _literals
from jax._src import named_sharding as _named_sharding
from jax._src import source_info_util as _source
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.state import types as _state
from jax.extend import core as jex

Jaxpr = jex.Jaxpr
Literal = jex.Literal
Var = jex.Var
Equation = jex.JaxprEqn
UNSPECIFIED = _named_sharding.UNSPECIFIED
"""The sharding of an operand of a jit that was given none."""


def hide_frames(folder: str) -> None:
    """Makes `source_of` and JAX's own error messages skip frames of files under `folder`."""
    _source.register_exclusion(folder)


def _summary(info: Any) -> str:
    frame = _source.user_frame(info.traceback)
    if frame is None:
        return "unknown"
    return f"{_short_path(frame.file_name, os.getcwd())}:{frame.start_line}"


@functools.lru_cache(maxsize=1024)
def _short_path(path: str, folder: str) -> str:
    short = os.path.relpath(path, folder)
    return path if short.startswith("..") else short


def source_of(eqn: Equation) -> str:
    """Returns "file:line" of the user's code that made the equation, or "unknown"."""
    return _summary(eqn.source_info)


def current_source() -> str:
    """Returns "file:line" of the user's code being traced now, or "unknown"."""
    return _summary(_source.current())


@contextmanager
def as_written_at(eqn: Equation):
    """Traces what stands in the block as if it were written where `eqn` was, in its contexts."""
    stack = _source.current_name_stack() + eqn.source_info.name_stack
    with _source.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
        yield


def renamed_under(call: Equation, inner: Equation) -> Equation:
    """Returns an equation of a jit's body as it is called where the jit stands in the caller."""
    outer = call.source_info.name_stack.extend(f"jit({call.params['name']})")
    stack = outer + inner.source_info.name_stack
    return inner.replace(source_info=inner.source_info.replace(name_stack=stack))


def here() -> Any:
    """Returns what makes contexts in which everything is traced as written at the line of now.

    JAX keeps the ten innermost frames of a line; more of ours than that, and the user's is lost.
    """
    return functools.partial(_source.user_context, _source.current().traceback)


def bind(eqn: Equation, *invals: Any) -> list[Any]:
    """Evaluates the equation on values, keeping its source, name stack and contexts."""
    params = eqn.primitive.get_bind_params(eqn.params)
    with as_written_at(eqn):
        out = eqn.primitive.bind(*invals, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def traced_at(eqn: Equation, fn: Any, avals: Any) -> Jaxpr:
    """Traces `fn` at the types as if it were written where `eqn` was; for `run_at`."""

    def written_there(*args: Any) -> Any:
        with _source.user_context(eqn.source_info.traceback), eqn.ctx.manager:
            return fn(*args)

    return jax.make_jaxpr(written_there)(*avals)


def run_at(eqn: Equation, jaxpr: Jaxpr, *args: Any) -> list[Any]:
    """Evaluates the jaxpr as if its equations were written where `eqn` was, in its contexts."""
    with as_written_at(eqn):
        return list(_core.eval_jaxpr(jaxpr, jaxpr.consts, *args, propagate_source_info=False))


@contextmanager
def inside(eqn: Equation):
    """Traces what stands in the block as part of the equation's body: on a shard_map's axes."""
    if eqn.primitive.name != "shard_map":
        yield
        return
    mesh, manual = eqn.params["mesh"], eqn.params["newly_manual_axes"]
    axes = [(k, v) for k, v in mesh.shape.items() if k in manual | set(mesh.manual_axes)]
    types = dict.fromkeys(manual, jax.sharding.AxisType.Manual)
    with (
        _core.extend_axis_env_nd(axes),
        jax.sharding.use_abstract_mesh(mesh.abstract_mesh.update_axis_types(types)),
        _config._check_vma(eqn.params["check_vma"]),
    ):
        yield


_NO_MESH = jax.sharding.AbstractMesh((), ())


def evaluate(eqn: Equation, *invals: Any) -> list[Any]:
    """Evaluates the equation on known numbers, outside every trace and mesh."""
    params = eqn.primitive.get_bind_params(eqn.params)
    with _core.set_current_trace(_core.eval_trace), jax.sharding.use_abstract_mesh(_NO_MESH):
        out = eqn.primitive.bind(*invals, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def check(jaxpr: Jaxpr) -> None:
    """Raises `jax.extend.core.JaxprTypeError` when the jaxpr is not well typed."""
    try:
        _core.check_jaxpr(jaxpr)
    except NotImplementedError:
        # JAX 0.11.2 does not check a custom_vjp with effects: a kernel in the GPU interpreter.
        return


INTERPRETER_THREADS = 4
"""Warpgroups of the largest kernel block: the GPU interpreter gives each a CPU thread."""


def provide_interpreter_threads() -> None:
    """Makes JAX's CPU client, if it has not started, large enough for the GPU interpreter.

    Its thread pool has a thread for each core; a kernel with more warpgroups waits for ever.
    """
    from jax._src import xla_bridge

    if not xla_bridge.backends_are_initialized():
        os.environ.setdefault("NPROC", str(max(INTERPRETER_THREADS, os.cpu_count() or 1)))


def is_tracer(x: Any) -> bool:
    """Returns whether `x` is a value of an enclosing trace."""
    return isinstance(x, _core.Tracer)


def is_key(aval: Any) -> bool:
    """Returns whether the aval is of PRNG keys (or another dtype that NumPy does not have)."""
    return jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended)  # pyright: ignore


SUBJAXPRS: dict[str, tuple[str, ...]] = {
    "jit": ("jaxpr",),
    "pjit": ("jaxpr",),
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
    "remat2": ("jaxpr",),
    "checkpoint": ("jaxpr",),
    "shard_map": ("jaxpr",),
}
"""Primitives whose bodies a rewrite may enter, and the parameters that hold them."""


OPERATOR_PREFIX = "tpjax_"
"""How the jit equation of an operator in plain JAX form is named: passes leave it whole."""


def operator_of(eqn: Equation) -> str | None:
    """Returns the operator whose plain JAX form the jit equation is, or None."""
    name = eqn.params.get("name") if eqn.primitive.name in ("jit", "pjit") else None
    if not isinstance(name, str) or not name.startswith(OPERATOR_PREFIX):
        return None
    return name.removeprefix(OPERATOR_PREFIX)


def subjaxprs(eqn: Equation) -> list[Jaxpr]:
    """Returns the bodies of an equation that a rewrite may enter, in a fixed order."""
    found: list[Jaxpr] = []
    names = SUBJAXPRS.get(eqn.primitive.name, ())
    if not names or operator_of(eqn) is not None:
        return found
    for name in names:
        value = eqn.params[name]
        found.extend(value if isinstance(value, tuple | list) else (value,))
    return found


def with_subjaxprs(eqn: Equation, bodies: list[Jaxpr]) -> Equation:
    """Returns the equation with other bodies, given in the order of `subjaxprs`."""
    rest, params = list(bodies), dict(eqn.params)
    for name in SUBJAXPRS[eqn.primitive.name]:
        value = params[name]
        if isinstance(value, tuple | list):
            params[name] = type(value)(rest[: len(value)])
            rest = rest[len(value) :]
        else:
            params[name] = rest.pop(0)
    return eqn.replace(params=params)


def is_plain_jit(eqn: Equation) -> bool:
    """Returns whether the equation is a jit without donation, sharding or compiler option."""
    if eqn.primitive.name not in ("jit", "pjit") or operator_of(eqn) is not None:
        return False
    params = eqn.params
    placed = (*params["in_shardings"], *params["out_shardings"])
    laid_out = (*params["in_layouts"], *params["out_layouts"])
    return (
        all(s is UNSPECIFIED for s in placed)
        and all(x is None for x in laid_out)
        and not any(params["donated_invars"])
        and not params["compiler_options_kvs"]
    )


def is_small_helper(eqn: Equation, max_equations: int) -> bool:
    """Returns whether the equation is a plain jit of few equations and no control flow."""
    if not is_plain_jit(eqn):
        return False
    stack, count = [eqn], 0
    while stack:
        for body in subjaxprs(stack.pop()):
            count += len(body.eqns)
            if count > max_equations or body.effects:
                return False
            inner = [e for e in body.eqns if e.primitive.name in SUBJAXPRS]
            if not all(is_plain_jit(e) for e in inner):
                return False
            stack.extend(inner)
    return True


def retrace(fn: Any, like: Jaxpr) -> Jaxpr:
    """Traces `fn` to a jaxpr with the inputs of `like`: shapes, weak types and shardings too."""
    return jax.make_jaxpr(fn)(*like.in_avals)


def count_equations(jaxpr: Jaxpr) -> int:
    """Returns the number of equations, those of bodies that a rewrite may enter included."""
    counts: dict[int, int] = {}
    stack: list[tuple[Jaxpr, Any]] = [(jaxpr, None)]
    while stack:  # each body twice: before those in it, and after
        body, inner = stack.pop()
        if inner is not None:
            counts[id(body)] = len(body.eqns) + sum(counts[id(one)] for one in inner)
        elif id(body) not in counts:
            inner = [one for eqn in body.eqns for one in subjaxprs(eqn)]
            stack += [(body, inner), *((one, None) for one in inner)]
    return counts[id(jaxpr)]


def literal(value: np.ndarray, aval: Any) -> Literal:
    """Returns the value, an array or a scalar, as an operand that equations may hold."""
    assert (value.shape, value.dtype) == (aval.shape, aval.dtype), (value, aval)
    return Literal(_literals.TypedNdArray(value, aval), aval)


def must_stay(eqn: Equation) -> bool:
    """Returns whether the equation does something besides computing its results."""
    if eqn.primitive.name == "free_ref":
        return True
    if not eqn.effects and any(not isinstance(x.aval, _core.ShapedArray) for x in eqn.invars):
        return True  # it has a reference and does not say what for, as Scan3 does on JAX 0.11.2
    return any(not _partial_eval.dceable_effects.contains(effect) for effect in eqn.effects)


def lasting(jaxpr: Jaxpr) -> Counter[str]:
    """Returns the primitives of the equations that must stay, bodies included, and how many."""
    found: Counter[str] = Counter()
    stack = [jaxpr]
    while stack:
        for eqn in stack.pop().eqns:
            if must_stay(eqn):
                bodies = subjaxprs(eqn)
                stack.extend(bodies)
                found.update(() if bodies else (eqn.primitive.name,))
    return found


def named_by_effects(jaxpr: Jaxpr) -> set[Var]:
    """Returns the inputs and constants that effects name: references read or written."""
    named = (getattr(effect, "input", None) for effect in jaxpr.effects)
    return {var for var in named if isinstance(var, Var)}


def written_by(eqn: Equation) -> set[Var]:
    """Returns the references that the equation writes to."""
    writes = (e for e in eqn.effects if isinstance(e, _state.RefEffect))
    named = (e.input for e in writes if not isinstance(e, _state.ReadEffect))
    return {var for var in named if isinstance(var, Var)}


def acts_outside(eqn: Equation) -> bool:
    """Returns whether the equation has effects other than on references, as a callback has.

    Those of a kernel are its own: the GPU interpreter runs one as callbacks.
    """
    own = (_state.RefEffect, type(_core.internal_mutable_array_effect))
    if eqn.primitive.name == "pallas_call" or all(isinstance(e, own) for e in eqn.effects):
        return False
    bodies = all_subjaxprs(eqn)
    return not bodies or any(acts_outside(inner) for body in bodies for inner in body.eqns)


def all_subjaxprs(eqn: Equation) -> list[Jaxpr]:
    """Returns the bodies of an equation, also those that no rewrite may enter."""
    values = (v if isinstance(v, tuple | list) else (v,) for v in eqn.params.values())
    return [body for value in values for body in value if isinstance(body, Jaxpr)]


def is_array(aval: Any) -> bool:
    """Returns whether the type is an ordinary array's: not a reference, a token or a PRNG key's."""
    return isinstance(aval, _core.ShapedArray) and not is_key(aval)


def array_type(atom: Any) -> Any:
    """Returns the type of a variable or literal that is an array, with its shape and dtype."""
    return atom.aval


def has_size(aval: Any) -> bool:
    """Returns whether the sizes of an array are numbers, not symbols as jax.export traces them."""
    return all(isinstance(size, int) for size in aval.shape)


def is_local(aval: Any) -> bool:
    """Returns whether an array of this type is on no mesh, in the default memory, of known size."""
    return (
        is_array(aval)
        and has_size(aval)
        and aval is _core.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)
    )


def edited(jaxpr: Jaxpr, eqns: list[Equation], outvars: list[Any]) -> Jaxpr:
    """Returns the jaxpr with other equations and results; effects and argument names stay."""
    return jaxpr.replace(eqns=eqns, outvars=outvars, debug_info=jaxpr.debug_info)


def loop_parts(eqn: Equation) -> tuple[int, int]:
    """Returns how many operands of a scan are constants, and how many are carried."""
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)


def with_more_constants(eqn: Equation, count: int) -> dict[str, Any]:
    """Returns the parameters of a scan that has `count` more constants, after those it has."""
    consts, carry, scanned = eqn.params["ft_in"].unpack()
    more = _flattree.nones(len(consts) + count)
    return eqn.params | {"ft_in": _flattree.pack((more, carry, scanned))}


def at_top_level() -> bool:
    """Returns whether no JAX transformation is tracing now, so that no tracer can be in reach."""
    return _core.trace_state_clean()


def trace_context() -> tuple[Any, ...]:
    """Returns what JAX keys traces on besides arguments: flags, mesh, user contexts; hashable."""
    return tuple(_config.trace_context())


def has_type(x: Any) -> bool:
    """Returns whether JAX can take the value as an array."""
    try:
        jax.typeof(x)
    except TypeError:
        return False
    return True


def batched_type(aval: Any, size: int, mesh_axis: Any) -> Any:
    """Returns the type of arrays of type `aval` stacked along a new leading axis."""
    return _core.unmapped_aval(size, 0, aval, mesh_axis)


def tangent_type(x: Any) -> Any:
    """Returns the type of the tangents of an array."""
    return jax.typeof(x).strip_weak_type().to_tangent_aval()
