# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Flax NNX modules among the arguments: captured as state in, state out, and updated once.

A module is a pytree, but a call may change it: batch statistics, random streams, counters. So the
call becomes a pure function from the modules' state to the new state, and what the jaxpr returns is
written back. All modules of a call are split together, which keeps what they share. Flax is not
imported here before a program has done so itself.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax

from tpjax.stax.capture import Capture, trace

_TAG = "tpjax"


def is_module(x: Any) -> bool:
    """Returns whether `x` is an NNX object that a call may change: a module, a variable."""
    if "flax.nnx" not in sys.modules:
        return False
    from flax import nnx

    return isinstance(x, nnx.Variable) or nnx.graph.is_graph_node(x)


def any_module(tree: Any) -> bool:
    """Returns whether a module stands anywhere in the pytree."""
    if "flax.nnx" not in sys.modules:
        return False
    return any(map(is_module, jax.tree.leaves(tree, is_leaf=is_module)))


def jit(fn: Callable[..., Any], **options: Any) -> Any:
    """Returns `nnx.jit(fn)`, which takes modules and keeps what they share."""
    from flax import nnx

    return nnx.jit(fn, graph=True, graph_updates=True, **options)


def _take_out(tree: Any) -> tuple[tuple[Any, ...], list[Any], Callable[[Any, Any], Any]]:
    """Returns the modules of the pytree, its other leaves, and the function that puts both back."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_module)
    where = [is_module(x) for x in leaves]

    def put_back(modules: Any, others: Any) -> Any:
        modules, others = iter(modules), iter(others)
        return jax.tree.unflatten(treedef, [next(modules if m else others) for m in where])

    modules = tuple(x for x, m in zip(leaves, where, strict=True) if m)
    return modules, [x for x, m in zip(leaves, where, strict=True) if not m], put_back


@contextmanager
def captured(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[Capture]:
    """Traces `fn(*args, **kwargs)` with modules among the arguments; see `tpjax.stax.capture`.

    `Capture.finish`, called inside the block, changes the modules, if the call changed them.
    """
    from flax import nnx

    modules, others, put_back = _take_out((args, dict(kwargs)))
    after: dict[str, Any] = {}

    with nnx.update_context(_TAG):
        with nnx.split_context(_TAG) as outside:
            graphdef, state = outside.split(modules)
        state_leaves, state_tree = jax.tree.flatten(state)

        def pure(state_leaves: list[Any], others: list[Any]) -> list[Any]:
            with nnx.merge_context(_TAG, True) as inside:
                merged = inside.merge(graphdef, jax.tree.unflatten(state_tree, state_leaves))
            before = nnx.graphdef(merged)
            fn_args, fn_kwargs = put_back(merged, others)
            made, values, after["put_back"] = _take_out(fn(*fn_args, **fn_kwargs))
            after["same"] = not made and nnx.graphdef(merged) == before
            with nnx.split_context(_TAG) as inside:
                after["graphdef"], new_state = inside.split((merged, made))
            new_leaves, after["tree"] = jax.tree.flatten(new_state)
            after["size"] = len(new_leaves)
            return [*new_leaves, *values]

        pure.__name__ = pure.__qualname__ = getattr(fn, "__qualname__", type(fn).__name__)
        jaxpr = trace(pure, (state_leaves, others), {})
        size = after["size"]
        pairs = zip(jaxpr.outvars[:size], jaxpr.invars[:size], strict=False)
        untouched = after["same"] and all(new is old for new, old in pairs)

        def finish(results: list[Any]) -> Any:
            if untouched:
                return after["put_back"]((), results[size:])
            new_state = jax.tree.unflatten(after["tree"], results[:size])
            with nnx.merge_context(_TAG, False) as outside:
                _, made = outside.merge(after["graphdef"], new_state)
            return after["put_back"](made, results[size:])

        yield Capture(jaxpr, [*state_leaves, *others], finish)
