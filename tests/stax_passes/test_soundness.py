# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""What a pass breaks inside of a body is seen, also where JAX's own check does not look."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from tpjax.core import _jax, soundness
from tpjax.stax_passes.pipeline import optimize
from tpjax.stax_passes.report import Report

X = jnp.asarray([0.5, -1.0])


def _step(x: jax.Array) -> jax.Array:
    return lax.add(lax.sin(x), lax.cos(x))


def _sharded(x: jax.Array) -> jax.Array:
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(
        lambda x: lax.psum(_looped(x), "d"), mesh=mesh, in_specs=P("d"), out_specs=P()
    )(x)


def _looped(x: jax.Array) -> jax.Array:
    return lax.scan(lambda c, _: (_step(c), None), x, None, length=2)[0]


BODIES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "top": _step,
    "jit": jax.jit(_step),
    "checkpoint": jax.checkpoint(_step),
    "scan": _looped,
    "while": lambda x: lax.while_loop(lambda c: c.sum() < 1, _step, x),
    "cond": lambda x: lax.cond(x.sum() > 0, lambda x: x, _step, x),
    "condition": lambda x: lax.while_loop(lambda c: _step(c).sum() < 1, lambda c: c + 1, x),
    "scan in jit": jax.jit(_looped),
    "scan in scan": lambda x: lax.scan(lambda c, _: (_looped(c), None), x, None, length=2)[0],
    "scan in shard_map": _sharded,
}


def _swapped(eqns: list[Any]) -> list[Any]:
    return eqns[::-1]


def _missing(eqns: list[Any]) -> list[Any]:
    return [eqn for eqn in eqns if eqn.primitive is not lax.sin_p]


def _wrong_type(eqns: list[Any]) -> list[Any]:
    return [e.replace(primitive=lax.lt_p) if e.primitive is lax.add_p else e for e in eqns]


def _breaks(fault: Callable[[list[Any]], list[Any]]) -> Any:
    """Returns the pass that edits the level with the sine, wherever it stands."""

    def walk(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
        eqns = []
        for eqn in jaxpr.eqns:
            bodies = _jax.subjaxprs(eqn)
            eqns.append(_jax.with_subjaxprs(eqn, list(map(walk, bodies))) if bodies else eqn)
        if any(eqn.primitive is lax.sin_p for eqn in eqns):
            eqns = fault(eqns)
        return _jax.edited(jaxpr, eqns, jaxpr.outvars)

    def break_it(jaxpr: _jax.Jaxpr) -> tuple[_jax.Jaxpr, Report]:
        return walk(jaxpr), Report("break_it", (), (), 0, 0)

    return break_it


@pytest.mark.parametrize("fault", [_swapped, _missing, _wrong_type])
@pytest.mark.parametrize("where", list(BODIES))
def test_R11_what_is_broken_in_a_body_names_the_pass(where: str, fault: Any) -> None:
    jaxpr = jax.make_jaxpr(BODIES[where])(X)
    soundness.check(jaxpr)
    with pytest.raises(RuntimeError, match="the pass break_it broke the program"):
        optimize(jaxpr, (_breaks(fault),), verify=True)
    with pytest.warns(UserWarning, match="break_it is left out"):
        result, _ = optimize(jaxpr, (_breaks(fault),))
    assert result is jaxpr
