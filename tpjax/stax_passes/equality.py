# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""When two equations, jaxprs or constants say the same, whatever their variables are called."""

from typing import Any

import numpy as np

from tpjax.core import _jax

NAMES_ONLY = frozenset({"sharding", "out_sharding", "name"})
"""Parameters in which two equations may differ and compute the same."""
DERIVATIVES = frozenset({"jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "out_trees"})
"""Parameters that say how a function is differentiated, not what it computes."""
STRICT = frozenset({"sharding_constraint", "name"})
"""Primitives whose parameters all count: here a sharding or a name is all that they say."""
MAX_COMPARED = 2**20
"""Elements up to which two constants are compared by their numbers."""


def same_params(a: _jax.Equation, b: _jax.Equation, *, ignore: frozenset[str] = NAMES_ONLY) -> bool:
    """Returns whether two equations of one primitive have the same parameters, `ignore` aside."""
    p, q = a.params, b.params
    if p is q:
        return True
    if a.primitive.name in STRICT:
        ignore = frozenset()
    return p.keys() == q.keys() and all(same(p[k], q[k]) for k in p if k not in ignore)


def same(a: Any, b: Any) -> bool:
    """Returns whether two parameters are equal; jaxprs are if they compute the same one by one."""
    if a is b:
        return True
    if isinstance(a, _jax.Jaxpr) and isinstance(b, _jax.Jaxpr):
        return same_jaxpr(a, b)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    try:
        return bool(a == b)
    except Exception:  # arrays and foreign objects without a plain equality are not equal
        return False


def same_jaxpr(a: _jax.Jaxpr, b: _jax.Jaxpr) -> bool:
    """Returns whether two jaxprs are the same equations in the same order."""
    if len(a.eqns) != len(b.eqns) or list(a.in_avals) != list(b.in_avals):
        return False
    if len(a.consts) != len(b.consts) or len(a.outvars) != len(b.outvars):
        return False
    if not all(same_value(x, y) for x, y in zip(a.consts, b.consts, strict=True)):
        return False
    other: dict[Any, Any] = dict(zip((*a.constvars, *a.invars), (*b.constvars, *b.invars)))  # noqa: B905

    def agree(x: Any, y: Any) -> bool:
        if isinstance(x, _jax.Literal) or isinstance(y, _jax.Literal):
            both = isinstance(x, _jax.Literal) and isinstance(y, _jax.Literal)
            return both and x.aval == y.aval and same_value(x.val, y.val)
        return other.get(x) is y

    for e, f in zip(a.eqns, b.eqns, strict=True):
        if e.primitive is not f.primitive or len(e.invars) != len(f.invars):
            return False
        if not all(map(agree, e.invars, f.invars)) or len(e.outvars) != len(f.outvars):
            return False
        if any(x.aval != y.aval for x, y in zip(e.outvars, f.outvars, strict=True)):
            return False
        if not same_params(e, f, ignore=NAMES_ONLY | DERIVATIVES):
            return False
        other.update(zip(e.outvars, f.outvars, strict=True))
    return all(map(agree, a.outvars, b.outvars))


def same_value(a: Any, b: Any) -> bool:
    """Returns whether two constants have the same bits, shape and dtype; a NaN equals itself."""
    if a is b:
        return True
    if _jax.is_tracer(a) or _jax.is_tracer(b):
        return False
    try:
        if np.shape(a) != np.shape(b) or np.size(a) > MAX_COMPARED:
            return False
        x, y = np.asarray(a), np.asarray(b)
    except TypeError:  # keys of random numbers are not NumPy's
        return False
    return x.dtype == y.dtype and x.tobytes() == y.tobytes()
