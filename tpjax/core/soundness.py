# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Whether a jaxpr is well typed, every body in it looked at once.

JAX's own check does not look into the bodies of loops and branches, and into that of a call as
often as it is called: here each level is checked by itself, with a stub of the right types for what
is inside a call.
"""

from typing import Any

import jax.extend.core as jex

from tpjax.core import _jax

STUBBED = frozenset({"jit", "pjit", "remat2", "checkpoint"})
"""Primitives into whose bodies JAX would look each time; it never does into those of loops."""

_stub = jex.Primitive("stub")
_stub.multiple_results = True
_stub.def_abstract_eval(lambda *, types: list(types))


def check(jaxpr: _jax.Jaxpr) -> None:
    """Raises `jax.extend.core.JaxprTypeError` if the jaxpr, or a body in it, is not well typed."""
    _check(jaxpr, {})


def _check(jaxpr: _jax.Jaxpr, stubs: dict[int, Any], *, only_bodies: bool = False) -> None:
    stack = [jaxpr]
    while stack:
        level = stack.pop()
        eqns = []
        for eqn in level.eqns:
            bodies = _jax.subjaxprs(eqn)
            fresh = [body for body in bodies if id(body) not in stubs]
            for body in fresh:  # the body is kept, as its id must stay its own
                stubs[id(body)] = body, _stub_of(body, eqn)
            if eqn.primitive.name == "shard_map":  # JAX looks into it, and knows its axes
                with _jax.inside(eqn):
                    for body in fresh:
                        _check(body, stubs, only_bodies=True)
            else:
                stack.extend(fresh)
            if bodies and eqn.primitive.name in STUBBED:
                eqn = _jax.with_subjaxprs(eqn, [stubs[id(body)][1] for body in bodies])
            eqns.append(eqn)
        if level is not jaxpr or not only_bodies:
            _jax.check(_jax.edited(level, eqns, level.outvars))


def _stub_of(body: _jax.Jaxpr, like: _jax.Equation) -> _jax.Jaxpr:
    """Returns a body of the same types and effects that computes nothing."""
    types = tuple(body.out_avals)
    results = [_jax.Var(aval) for aval in types]
    eqn = like.replace(
        primitive=_stub, invars=[], outvars=results, params={"types": types}, effects=set()
    )
    return body.replace(
        constvars=[], consts=[], eqns=[eqn], outvars=results, debug_info=body.debug_info
    )
