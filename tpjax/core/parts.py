# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Jaxprs with inputs, results, constants or equations taken out, put in, or made inputs."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from tpjax.core import _jax


def narrowed(
    jaxpr: _jax.Jaxpr, eqns: list[_jax.Equation], ins: list[bool], outs: list[bool]
) -> _jax.Jaxpr:
    """Returns the jaxpr with other equations and only the inputs and results marked True.

    Constants that nothing reads are left out too. An input that an effect names must be kept.
    """
    result = [v for v, keep in zip(jaxpr.outvars, outs, strict=True) if keep]
    read = {
        v for eqn in eqns for v in eqn.invars if isinstance(v, _jax.Var)
    } | _jax.named_by_effects(jaxpr)
    read.update(v for v in result if isinstance(v, _jax.Var))
    pairs = zip(jaxpr.constvars, jaxpr.consts, strict=True)
    kept = [(var, value) for var, value in pairs if var in read]
    names = jaxpr.debug_info
    return jaxpr.replace(
        constvars=[var for var, _ in kept],
        consts=[value for _, value in kept],
        invars=[v for v, keep in zip(jaxpr.invars, ins, strict=True) if keep],
        outvars=result,
        eqns=eqns,
        debug_info=names._replace(
            arg_names=names.filter_arg_names(ins), result_paths=names.filter_result_paths(outs)
        ),
    )


def with_inputs(jaxpr: _jax.Jaxpr, at: int, new: Sequence[_jax.Var]) -> _jax.Jaxpr:
    """Returns the jaxpr with more inputs, before the one at the position."""
    names = jaxpr.debug_info
    if names.arg_names is not None:
        old = tuple(names.arg_names)
        names = names._replace(arg_names=(*old[:at], *("",) * len(new), *old[at:]))
    invars = [*jaxpr.invars[:at], *new, *jaxpr.invars[at:]]
    return jaxpr.replace(invars=invars, debug_info=names)


_BY_INPUT = {"jit": ("in_shardings", "in_layouts", "donated_invars"), "shard_map": ("in_specs",)}
_BY_OUTPUT = {"jit": ("out_shardings", "out_layouts"), "shard_map": ("out_specs",)}


def narrowed_call(
    eqn: _jax.Equation, bodies: list[_jax.Jaxpr], ins: list[bool], outs: list[bool]
) -> _jax.Equation:
    """Returns the equation with narrowed bodies, for the operands and results marked True.

    `ins` is in the order of the equation's operands, as `outs` is in that of its results.
    """
    name = "jit" if eqn.primitive.name == "pjit" else eqn.primitive.name
    eqn = _jax.with_subjaxprs(eqn, bodies)
    params = eqn.params
    for key in _BY_INPUT.get(name, ()):
        params[key] = _keep(params[key], ins)
    for key in _BY_OUTPUT.get(name, ()):
        params[key] = _keep(params[key], outs)
    if name == "scan":
        params["ft_in"] = params["ft_in"].filter_with_mask(ins)
        params["ft_out"] = params["ft_out"].filter_with_mask(outs)
    if name == "while":
        cond, body = params["cond_nconsts"], params["body_nconsts"]
        params["cond_nconsts"] = sum(ins[:cond])
        params["body_nconsts"] = sum(ins[cond : cond + body])
    if isinstance(params.get("prevent_cse"), tuple):
        params["prevent_cse"] = _keep(params["prevent_cse"], ins)
    return eqn.replace(
        invars=list(_keep(eqn.invars, ins)), outvars=list(_keep(eqn.outvars, outs)), params=params
    )


def _keep(values: Any, keep: list[bool]) -> tuple[Any, ...]:
    return tuple(v for v, k in zip(values, keep, strict=True) if k)


def _constants_out(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """Returns the jaxpr of one jit with that jit's constants as its own."""
    eqn = jaxpr.eqns[0] if len(jaxpr.eqns) == 1 else None
    if eqn is None or eqn.primitive.name not in ("jit", "pjit") or not eqn.params["jaxpr"].consts:
        return jaxpr
    body, count = eqn.params["jaxpr"], len(eqn.params["jaxpr"].consts)
    names = body.debug_info
    if names.arg_names is not None:
        names = names._replace(arg_names=("",) * count + tuple(names.arg_names))
    opened = body.replace(
        constvars=[], consts=[], invars=[*body.constvars, *body.invars], debug_info=names
    )
    outer = [_jax.Var(var.aval) for var in body.constvars]
    called = with_operands(eqn, opened, outer)
    return jaxpr.replace(
        constvars=[*outer, *jaxpr.constvars], consts=[*body.consts, *jaxpr.consts], eqns=[called]
    )


def with_operands(eqn: _jax.Equation, body: _jax.Jaxpr, more: Sequence[Any]) -> _jax.Equation:
    """Returns the jit with another body, which has more inputs, before the others."""
    count = len(more)
    params = eqn.params | {
        "jaxpr": body,
        "in_shardings": (_jax.UNSPECIFIED,) * count + tuple(eqn.params["in_shardings"]),
        "in_layouts": (None,) * count + tuple(eqn.params["in_layouts"]),
        "donated_invars": (False,) * count + tuple(eqn.params["donated_invars"]),
    }
    return eqn.replace(invars=[*more, *eqn.invars], params=params)


def lifted(jaxpr: _jax.Jaxpr, values: Sequence[Any]) -> tuple[_jax.Jaxpr, list[int]]:
    """Returns the jaxpr with those of its constants that are among `values` as first inputs.

    Also returns which of the values they are, in order. Constants are compared by identity.
    """
    jaxpr = _constants_out(jaxpr)
    index = {id(value): i for i, value in enumerate(values)}
    pairs = list(zip(jaxpr.constvars, jaxpr.consts, strict=True))
    found = [(index[id(const)], var) for var, const in pairs if id(const) in index]
    if not found:
        return jaxpr, []
    kept = [(var, const) for var, const in pairs if id(const) not in index]
    names = jaxpr.debug_info
    if names.arg_names is not None:
        names = names._replace(arg_names=("",) * len(found) + tuple(names.arg_names))
    made = jaxpr.replace(
        constvars=[var for var, _ in kept],
        consts=[const for _, const in kept],
        invars=[*(var for _, var in found), *jaxpr.invars],
        debug_info=names,
    )
    return made, [i for i, _ in found]


def needed_twice(jaxpr: _jax.Jaxpr) -> tuple[_jax.Jaxpr, _jax.Equation | None]:
    """Returns the jaxpr with only what its results need, to be run before the jaxpr itself.

    Also returns an equation among those that must not run twice, or None: one with an effect on
    anything but references that the jaxpr makes itself.
    """
    needed = {v for v in jaxpr.outvars if isinstance(v, _jax.Var)}
    own = {v for eqn in jaxpr.eqns for v in eqn.outvars}
    kept, twice = [], None
    for eqn in reversed(jaxpr.eqns):
        written = _jax.written_by(eqn)
        if any(v in needed for v in (*eqn.outvars, *written)):
            kept.append(eqn)
            needed.update(v for v in eqn.invars if isinstance(v, _jax.Var))
            if _jax.acts_outside(eqn) or not written <= own:
                twice = eqn
    return jaxpr.replace(eqns=kept[::-1]), twice


def inner_constants(jaxpr: _jax.Jaxpr) -> list[Any]:
    """Returns the constants of all bodies inside the jaxpr."""
    found: list[Any] = []
    seen: set[int] = set()
    stack = list(jaxpr.eqns)
    while stack:
        for body in _jax.all_subjaxprs(stack.pop()):
            if id(body) not in seen:
                seen.add(id(body))
                found.extend(body.consts)
                stack.extend(body.eqns)
    return found


def copied(
    eqns: Sequence[_jax.Equation], names: dict[Any, Any], like: _jax.Equation | None = None
) -> list[_jax.Equation]:
    """Returns copies of the equations with variables of their own.

    Args:
      eqns: in order.
      names: what stands for the variables that the copies read or make; those made and not yet
        named get new variables, and are added.
      like: the equation whose source line and contexts the copies have; None: they keep their own.
    """

    def named(atom: Any) -> Any:
        return atom if isinstance(atom, _jax.Literal) else names[atom]

    made: list[_jax.Equation] = []
    for eqn in eqns:
        for var in eqn.outvars:
            if var not in names:
                names[var] = _jax.Var(var.aval)
        place = {} if like is None else {"ctx": like.ctx, "source_info": like.source_info}
        invars, outvars = [named(v) for v in eqn.invars], [named(v) for v in eqn.outvars]
        made.append(eqn.replace(invars=invars, outvars=outvars, **place))
    return made


def opened(eqn: _jax.Equation) -> tuple[list[_jax.Equation], list[Any]]:
    """Returns the equations of a jit's body for its operands, and what stands for its results.

    They keep their source lines; profiles name them under the jit, as before.
    """
    body = _jax.subjaxprs(eqn)[0]
    assert not body.consts, "a helper that holds arrays is not opened"
    names: dict[Any, Any] = dict(zip(body.invars, eqn.invars, strict=True))
    eqns = [_jax.renamed_under(eqn, inner) for inner in copied(body.eqns, names)]
    return eqns, [names[v] if isinstance(v, _jax.Var) else v for v in body.outvars]


@functools.lru_cache(maxsize=4096)
def _traced(fn: Callable[..., Any], avals: tuple[Any, ...], static: Any) -> _jax.Jaxpr:
    return jax.make_jaxpr(functools.partial(fn, **dict(static)))(*avals)


def written_as(
    like: _jax.Equation, fn: Callable[..., Any], atoms: Sequence[Any], static: Mapping[str, Any]
) -> list[_jax.Equation]:
    """Returns the equations of `fn(*atoms, **static)`, to be put in place of `like`."""
    avals = tuple(atom.aval for atom in atoms)
    jaxpr = _traced(fn, avals, tuple(sorted(static.items())))
    wanted = [var.aval for var in like.outvars]
    assert jaxpr.out_avals == wanted, (fn, jaxpr.out_avals, wanted)
    assert not jaxpr.consts, "a written rule holds no array"
    names: dict[Any, Any] = dict(zip(jaxpr.invars, atoms, strict=True))
    names.update(zip(jaxpr.outvars, like.outvars, strict=True))
    return copied(jaxpr.eqns, names, like)


def retraced(fn: Callable[..., Any], like: _jax.Jaxpr) -> _jax.Jaxpr:
    """Traces `fn` to a jaxpr with the inputs of `like`, and no constants but those of `like`.

    Other arrays are operands in the equations, as the body of a checkpoint may have no constants.
    """
    made = _jax.retrace(fn, like)
    old = {id(value) for value in like.consts}
    pairs = list(zip(made.constvars, made.consts, strict=True))
    written: dict[Any, Any] = {
        var: _jax.Literal(value, var.aval)
        for var, value in pairs
        if id(value) not in old and _jax.is_array(var.aval) and not _jax.is_tracer(value)
    }
    if not written:
        return made
    kept = [(var, value) for var, value in pairs if var not in written]

    def instead(atom: Any) -> Any:
        return written.get(atom, atom) if isinstance(atom, _jax.Var) else atom

    return made.replace(
        constvars=[var for var, _ in kept],
        consts=[value for _, value in kept],
        eqns=[eqn.replace(invars=[instead(atom) for atom in eqn.invars]) for eqn in made.eqns],
        outvars=[instead(atom) for atom in made.outvars],
        debug_info=made.debug_info,
    )
