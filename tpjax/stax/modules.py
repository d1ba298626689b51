# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Flax NNX modules of a call: captured as state in, state out, and updated once.

A module is a pytree, but a call may change it: batch statistics, random streams, counters. So the
call becomes a pure function from the modules' state to the new state, and what the program returns
is written back. All modules of a call are split together, which keeps what they share: those among
the arguments, and those that the function itself names in its closure or its globals. Flax is not
imported here before a program has done so itself.
"""

import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax

from tpjax.stax.capture import Call, set_aside
from tpjax.stax.keys import atom

_TAG = "tpjax"


def is_module(x: Any) -> bool:
    """Returns whether `x` is an NNX object that a call may change: a module, a variable."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and (isinstance(x, nnx.Variable) or nnx.graph.is_graph_node(x))


def any_module(tree: Any) -> bool:
    """Returns whether a module stands anywhere in the pytree."""
    if "flax.nnx" not in sys.modules:
        return False
    return any(map(is_module, jax.tree.leaves(tree, is_leaf=is_module)))


def flags_in(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yields the plain attributes of the modules in a pytree: ".dropout.deterministic", False."""
    if not any_module(tree):
        return
    from flax import nnx

    for path, module in nnx.iter_modules(tree):
        for name, value in vars(module).items():
            if (
                isinstance(value, bool | int | float | str) or _is_settings(value)
            ) and not name.startswith("_"):
                yield "".join(f".{part}" for part in (*path, name)), value


def _is_settings(x: Any) -> bool:
    plain = bool | int | float | str | None
    return isinstance(x, dict) and all(isinstance(leaf, plain) for leaf in jax.tree.leaves(x))


def snapshot(key: Any, name: str, places: tuple[tuple[Any, Any], ...]) -> Any:
    """Returns the key of a call whose modules have attributes without a hash, as these are now.

    Args:
      key: `Call.key`.
      name: the function's.
      places: what the modules are in, each with its name.

    Raises:
      TypeError: an attribute is neither hashable nor a container of what is.
    """
    from flax import nnx

    graphdef, *rest = key
    try:
        attributes = [(name, _frozen(getattr(x, "value", x))) for name, x in graphdef.attributes]
    except TypeError:
        for where, tree in places:
            for path, module in nnx.iter_modules(tree):
                for attribute, value in vars(module).items():
                    if not attribute.startswith("_") and not _is_state(value):
                        _demand_hash(name, where, (*path, attribute), value)
        raise
    return tuple(graphdef.nodes), tuple(attributes), *rest


def _is_state(x: Any) -> bool:
    leaves = jax.tree.leaves(x, is_leaf=is_module)
    return any(is_module(leaf) or isinstance(leaf, jax.Array) for leaf in leaves)


def _demand_hash(name: str, where: Any, path: tuple[Any, ...], value: Any) -> None:
    try:
        _frozen(value)
    except TypeError:
        where = " ".join(where) if isinstance(where, tuple) else where
        where = f"argument {where}" if isinstance(where, int) else where
        raise TypeError(
            f"compile: {name} is called with a module whose attribute "
            f"{where}{''.join(f'.{part}' for part in path)} cannot be hashed "
            f"({type(value).__name__}), so no entry can be found by it. Give its class a hash (a "
            "frozen dataclass has one), or wrap what holds arrays in nnx.data."
        ) from None


def _frozen(x: Any) -> Any:
    """Returns the value as part of a key, containers copied."""
    if isinstance(x, dict):
        return type(x), tuple((k, _frozen(v)) for k, v in x.items())
    if isinstance(x, list | tuple):
        return type(x), tuple(map(_frozen, x))
    if isinstance(x, set):
        return type(x), frozenset(x)
    hash(x)
    return atom(x)


def rebound(fn: Any, names: tuple[tuple[str, str], ...], values: tuple[Any, ...]) -> Any:
    """Returns the function with other values under some of its free names.

    Args:
      fn: a Python function; `names` is empty for any other callable.
      names: pairs of "closure" or "global" and the name.
      values: what stands there instead.
    """
    if not names:
        return fn
    new = dict(zip(names, values, strict=True))
    cells = [
        types.CellType(new["closure", name]) if ("closure", name) in new else cell
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
    ]
    outer = {name: value for (where, name), value in new.items() if where == "global"}
    namespace = {**fn.__globals__, **outer} if outer else fn.__globals__
    made = types.FunctionType(fn.__code__, namespace, fn.__name__, fn.__defaults__, tuple(cells))
    made.__kwdefaults__, made.__qualname__ = fn.__kwdefaults__, fn.__qualname__
    return made


def _take_out(tree: Any) -> tuple[tuple[Any, ...], list[Any], Callable[[Any, Any], Any], Any]:
    """Returns the modules of the pytree, its other leaves, what puts both back, and its shape."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_module)
    where = [is_module(x) for x in leaves]

    def put_back(modules: Any, others: Any) -> Any:
        modules, others = iter(modules), iter(others)
        return jax.tree.unflatten(treedef, [next(modules if m else others) for m in where])

    modules = tuple(x for x, m in zip(leaves, where, strict=True) if m)
    others = [x for x, m in zip(leaves, where, strict=True) if not m]
    return modules, others, put_back, (treedef, tuple(where))


def taken_out(named: tuple[Any, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Returns a call's modules and other leaves for `taken_apart`, or None if it has no modules.

    Args:
      named: the modules under the function's free names.
      args: the arguments.
      kwargs: those by name.
    """
    if "flax.nnx" not in sys.modules:
        return None
    found = _take_out((named, args, dict(kwargs)))
    return found if found[0] else None


@contextmanager
def taken_apart(
    function: Callable[[tuple[Any, ...]], Callable[..., Any]],
    name: str,
    found: Any,
    numbers: bool = True,
) -> Iterator[Call]:
    """Takes apart a call with modules among its arguments or under the function's free names.

    `Call.finish`, called inside the block, changes the modules, if the call changed them.

    Args:
      function: returns the function that has other modules under those free names.
      name: the function's.
      found: what `taken_out` returned.
      numbers: whether Python numbers among the arguments are traced.
    """
    from flax import nnx

    modules, others, put_back, shape = found
    others, kept, put_numbers_back = set_aside(others, numbers)
    with nnx.update_context(_TAG):
        with nnx.split_context(_TAG) as outside:
            graphdef, values = outside.flatten(modules, with_paths=False)
            numbered = [(index, x) for x, index in outside.ref_index.items()]
            variables = [x for _, x in numbered if isinstance(x, nnx.Variable)]
        state_leaves, state_tree = jax.tree.flatten(values)
        count = len(state_leaves)

        def pure(*leaves: Any) -> tuple[list[Any], dict[str, Any]]:
            after: dict[str, Any] = {}
            with nnx.merge_context(_TAG, True) as inside:
                state = jax.tree.unflatten(state_tree, leaves[:count])
                merged = inside.unflatten(graphdef, state)
            before = nnx.graphdef(merged)
            fn_named, fn_args, fn_kwargs = put_back(merged, put_numbers_back(leaves[count:]))
            result = function(fn_named)(*fn_args, **fn_kwargs)
            made, results, after["put_back"], _ = _take_out(result)
            after["stable"] = nnx.graphdef(merged) == before
            after["any_made"] = bool(made)
            with nnx.split_context(_TAG) as inside:
                after["graphdef"], new_values = inside.flatten(merged, with_paths=False)
                after["made"], made_values = inside.flatten(made, with_paths=False)
            new_leaves, after["tree"] = jax.tree.flatten(new_values)
            made_leaves, after["made_tree"] = jax.tree.flatten(made_values)
            after["size"], after["made_size"] = len(new_leaves), len(made_leaves)
            return [*new_leaves, *made_leaves, *results], after

        def settle(jaxpr: Any, after: dict[str, Any]) -> dict[str, Any]:
            new, old = jaxpr.outvars[: after["size"]], jaxpr.invars[:count]
            one_each = len(variables) == len(values) == count
            stable = after["stable"] and after["tree"] == state_tree and one_each
            changed = [i for i, (a, b) in enumerate(zip(new, old, strict=False)) if a is not b]
            return after | {"changed": changed if stable else None}

        def finish(after: dict[str, Any], results: list[Any]) -> Any:
            size, end = after["size"], after["size"] + after["made_size"]
            stable = after["changed"] is not None  # nothing but values: the graph stays as it is
            for i in after["changed"] or ():  # others may belong to a trace that forbids changes
                variables[i].set_raw_value(results[i])
            if stable and not after["any_made"]:
                return after["put_back"]((), results[end:])
            with nnx.merge_context(_TAG, False) as outside:
                if stable:
                    for index, x in numbered:
                        outside.index_ref[index] = x
                else:
                    new_values = jax.tree.unflatten(after["tree"], results[:size])
                    outside.unflatten(after["graphdef"], new_values)
                made_values = jax.tree.unflatten(after["made_tree"], results[size:end])
                made = outside.unflatten(after["made"], made_values)
            return after["put_back"](made, results[end:])

        pure.__name__ = pure.__qualname__ = name
        yield Call(
            (graphdef, state_tree, shape, kept), [*state_leaves, *others], pure, settle, finish
        )
