# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Derivatives of every kind through a kernel that brings only a first one, in reverse mode.

    first derivative, reverse mode     the kernel's forward and backward pass
    forward mode, second derivatives   those of the operator's plain form, with one warning

A kernel is a function with a `jax.custom_vjp`, which JAX refuses to differentiate in any other way.
So its forward and backward pass are told apart (`_Passes`), each called with a rule of its own
(`call_with_rule`); between them stands a `linear_map`, which reverse mode transposes into the
backward pass and forward mode evaluates as the plain form's derivative.

What is kept for the backward pass is what the kernel's rule keeps: an operand or result that is
kept is that array, not another one, and names that the rule gives (`checkpoint_name`) are seen by
rematerialisation policies. Operands that the rule does not keep are kept too, for the plain form;
XLA drops them where nothing reads them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import jaxpr_as_fun

from tpjax.core import _jax
from tpjax.core.autodiff import (
    Arrays,
    Tangents,
    call_with_rule,
    floating,
    linear_map,
    pull,
    push,
    replaced,
)

Function = Callable[..., Any]


def differentiable(run: Function, plain: Function, warn: Callable[[], None]) -> Function:
    """Returns `run` with derivatives of every kind and order.

    Args:
      run: takes arrays, None where absent, and returns arrays; JAX can differentiate it once, in
        reverse mode. It is traced again, perhaps much later, when it is differentiated.
      plain: the same function in plain JAX.
      warn: called when a derivative is that of `plain`.
    """

    def call(*operands: Any) -> Any:
        if _jax.at_top_level():
            return run(*operands)
        given, tree = jax.tree.flatten(operands)

        def flat(fn: Function) -> Function:
            return lambda *xs: fn(*jax.tree.unflatten(tree, xs))

        kernel = _Kernel(flat(run), flat(plain), warn)
        jaxpr, result = jax.make_jaxpr(kernel.run, return_shape=True)(*given)
        results = call_with_rule(jaxpr, kernel.rule, *given)
        return jax.tree.unflatten(jax.tree.structure(result), results)

    return call


class _Passes(NamedTuple):
    """A kernel's two passes, by its own rule.

    The forward pass takes the operands and makes arrays; `result_at` and `kept_at` are places in
    the list of both, operands first.
    """

    forward: _jax.Jaxpr
    names: tuple[str | None, ...]
    """Of what is made, as the kernel's rule gave them with `checkpoint_name`."""
    result_at: tuple[int, ...]
    result_tree: Any
    kept_at: tuple[int, ...]
    """What the backward pass needs."""
    pull_tree: Any
    """With what is kept: maps cotangents of the results to those of the floating operands."""


def _passes(run: Function, operands: Arrays) -> _Passes:
    """Traces `run` as reverse mode does."""
    both, (result, back) = jax.make_jaxpr(partial(pull, run), return_shape=True)(*operands)
    place = {id(v): i for i, v in enumerate(both.invars)}
    made_at: list[int] = []  # without operands, and nothing twice
    for i, v in enumerate(both.outvars):
        if id(v) not in place:
            place[id(v)] = len(place)
            made_at.append(i)

    def make(*operands: Array) -> list[Array]:
        outs = jaxpr_as_fun(both)(*operands)
        return [outs[i] for i in made_at]

    named = [eqn for eqn in both.eqns if eqn.primitive.name == "name"]
    names = {id(v): eqn.params["name"] for eqn in named for v in eqn.outvars}
    at = tuple(place[id(v)] for v in both.outvars)
    result_tree = jax.tree.structure(result)
    return _Passes(
        jax.make_jaxpr(make)(*operands),
        tuple(names.get(id(both.outvars[i])) for i in made_at),
        at[: result_tree.num_leaves],
        result_tree,
        at[result_tree.num_leaves :],
        jax.tree.structure(back),
    )


class _Kernel:
    """A kernel, of arrays that are all given, and the rules of its derivatives."""

    def __init__(self, run: Function, plain: Function, warn: Callable[[], None]):
        self.run, self._plain, self._warn = run, plain, warn

    def rule(self, operands: Arrays, tangents: Tangents) -> tuple[Arrays, Tangents]:
        """Returns the results and their tangents."""
        passes = _passes(self.run, operands)
        made = self._forward(passes, operands)
        pairs = zip(made, passes.names, strict=True)
        made = [x if name is None else checkpoint_name(x, name) for x, name in pairs]
        everything = [*operands, *made]
        results = [everything[i] for i in passes.result_at]
        return results, self._tangents(passes, operands, made, tangents)

    def _forward(self, passes: _Passes, operands: Arrays) -> Arrays:
        """Runs the forward pass; of what it makes only the results have tangents."""

        def rule(operands: Arrays, tangents: Tangents) -> tuple[Arrays, Tangents]:
            made = self._forward(passes, operands)
            everything = [None] * (len(operands) + len(made))
            along = self._tangents(passes, operands, made, tangents)
            return made, replaced(everything, passes.result_at, along)[len(operands) :]

        return call_with_rule(passes.forward, rule, *operands)

    def _tangents(
        self, passes: _Passes, operands: Arrays, made: Arrays, tangents: Tangents
    ) -> list[Array]:
        """Returns the tangents of the results, as a map that transposes to the backward pass."""
        count, everything = len(operands), [*operands, *made]
        places = [*range(count), *sorted({i for i in passes.kept_at if i >= count})]
        moving = [i for i, t in enumerate(tangents) if t is not None]
        gradients = floating(operands)

        def apply(fixed: Arrays, x: Arrays) -> Arrays:
            self._warn()
            along = replaced([None] * count, moving, x)
            return jax.tree.leaves(push(self._plain, fixed[:count], along))

        def transpose(fixed: Arrays, cts: Arrays) -> Arrays:
            by_place = dict(zip(places, fixed, strict=True))
            kept = [by_place[i] for i in passes.kept_at]
            pulled = self._backward(passes, fixed[:count], kept, cts)
            return [pulled[gradients.index(i)] for i in moving]

        fixed = [everything[i] for i in places]
        along = [t for t in tangents if t is not None]
        like = [everything[i] for i in passes.result_at]
        return linear_map(apply, transpose, fixed, along, like)

    def _backward(
        self, passes: _Passes, operands: Arrays, kept: Arrays, cts: Arrays
    ) -> list[Array]:
        """Returns cotangents of the floating operands; their derivative is the plain form's."""
        first, last = len(operands), len(operands) + len(kept)

        def run(*args: Array) -> list[Array]:
            back = jax.tree.unflatten(passes.pull_tree, args[first:last])
            return list(back(jax.tree.unflatten(passes.result_tree, args[last:])))

        def of_plain(*args: Array) -> list[Array]:
            result, back = pull(self._plain, *args[:first])
            return list(back(jax.tree.unflatten(jax.tree.structure(result), args[first:])))

        def rule(args: Arrays, tangents: Tangents) -> tuple[Arrays, Tangents]:
            self._warn()
            outs = self._backward(passes, args[:first], args[first:last], args[last:])
            some = [*args[:first], *args[last:]]
            return outs, push(of_plain, some, [*tangents[:first], *tangents[last:]])

        args = (*operands, *kept, *cts)
        return call_with_rule(jax.make_jaxpr(run)(*args), rule, *args)
