# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Whether a jaxpr is well typed, the bodies of loops and branches included."""

from tpjax.core import _jax

UNSEEN = frozenset({"scan", "while", "cond"})
"""Primitives whose bodies JAX's own check does not look into."""


def check(jaxpr: _jax.Jaxpr) -> None:
    """Raises `jax.extend.core.JaxprTypeError` when the jaxpr, or a body in it, is not well typed.

    A body that stands in several places is looked at once.
    """
    _jax.check(jaxpr)
    _check_bodies(jaxpr, {})


def _check_bodies(jaxpr: _jax.Jaxpr, seen: dict[int, _jax.Jaxpr]) -> None:
    stack = [jaxpr]
    while stack:
        for eqn in stack.pop().eqns:
            for body in _jax.subjaxprs(eqn):
                if id(body) in seen:
                    continue
                seen[id(body)] = body
                if eqn.primitive.name in UNSEEN:
                    _jax.check(body)
                if eqn.primitive.name == "shard_map":
                    with _jax.inside(eqn):
                        _check_bodies(body, seen)
                else:
                    stack.append(body)
