# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Captures a call as a jaxpr, with the way back from its results to what the call returns."""

import functools
import linecache
import os
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun

from tpjax.core import _jax, parts
from tpjax.stax.keys import atom
from tpjax.stax.questions import Question, asking, may_ask

_LIBRARIES = tuple(str(Path(m).parent) + os.sep for m in (jax.__file__,))
_OURS = tuple(
    str(Path(__file__).parent.parent / room) + os.sep
    for room in ("stax", "stax_passes", "pallas", "core")
)
for _folder in _OURS:
    _jax.hide_frames(_folder)


class CaptureError(TypeError):
    """A function did what cannot be traced, such as to ask for the value of an array."""


@dataclass(frozen=True)
class Call:
    """A call taken apart: its leaves, and a pure function of them that can be captured.

    `pure(*leaves)` returns the leaves of the result, and how to put the result together; once that
    was settled by the captured jaxpr, `finish(after, results)` turns results into what the call
    returns, and carries out what the call did to the modules it was given.
    """

    key: Any
    """Everything about the call besides its leaves; hashable."""
    leaves: list[Any]
    pure: Callable[..., tuple[list[Any], Any]]
    settle: Callable[[_jax.Jaxpr, Any], Any]
    finish: Callable[[Any, list[Any]], Any]


def set_aside(leaves: list[Any], numbers: bool) -> tuple[list[Any], Any, Callable[[Any], Any]]:
    """Returns the leaves that are traced, a key of the others, and what puts both back.

    Unless `numbers`, Python numbers and strings are not traced: under a caller's trace they are as
    known as they are without the compiler.
    """
    plain = (bool, int, float, complex, str, bytes)
    kept = {} if numbers else {i: x for i, x in enumerate(leaves) if isinstance(x, plain)}

    def put_back(traced: Any) -> list[Any]:
        rest = iter(traced)
        return [kept[i] if i in kept else next(rest) for i in range(len(leaves))]

    key = tuple((i, atom(x)) for i, x in kept.items())
    return [x for i, x in enumerate(leaves) if i not in kept], key, put_back


def take_apart(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], numbers: bool = True
) -> Call:
    """Returns the call of a function whose arguments are pytrees of arrays, numbers or shapes."""
    leaves, tree = jax.tree.flatten((args, dict(kwargs)))
    leaves, kept, put_back = set_aside(leaves, numbers)

    @functools.wraps(fn, updated=())
    def pure(*leaves: Any) -> tuple[list[Any], Any]:
        fn_args, fn_kwargs = jax.tree.unflatten(tree, put_back(leaves))
        return jax.tree.flatten(fn(*fn_args, **fn_kwargs))

    return Call((tree, kept), leaves, pure, lambda jaxpr, after: after, jax.tree.unflatten)


@dataclass(frozen=True)
class Captured:
    """A call as a jaxpr, or the question that its code asked before it could go on."""

    jaxpr: _jax.Jaxpr
    after: Any = None
    question: Question | None = None
    """What Python wanted to know of an array; `jaxpr` then computes that array, and no more."""
    read: tuple[Any, ...] = ()
    """Arrays, not traced, whose numbers the code turned into Python values."""


def captured_from(call: Call, answers: tuple[Any, ...] | None = ()) -> Captured:
    """Traces the call.

    Args:
      call: what to trace.
      answers: what Python is told when it asks for the value of a traced scalar, in order. Past the
        last one the capture ends with a `Question`. None: every question is an error.

    Raises:
      CaptureError: the function asked for a value that cannot be told.
      TypeError: the function returned something else than arrays and numbers.
    """
    found: dict[str, Any] = {}

    @functools.wraps(call.pure, updated=())
    def flat(*leaves: Any) -> list[Any]:
        with asking(answers) as conversation:
            try:
                results, found["after"] = call.pure(*leaves)
            except KeyboardInterrupt:
                raise
            except BaseException:  # also what a handler in the user's code made of `Stopped`
                if conversation.pending is None:
                    raise
        if conversation.pending is not None:
            found["question"], tracer = conversation.pending
            return [tracer]
        if conversation.refused and may_ask():  # swallowed here, but answered around this capture
            raise CaptureError(f"compile: Python asks at {conversation.refused}.")
        _check_results(call.pure, results, found["after"])
        found["read"] = conversation.read
        return results

    jaxpr = trace(flat, tuple(call.leaves), {})
    if "question" in found:
        return Captured(_answering(call, jaxpr, found["question"]), question=found["question"])
    return Captured(jaxpr, call.settle(jaxpr, found["after"]), read=tuple(found["read"]))


def _answering(call: Call, jaxpr: _jax.Jaxpr, question: Question) -> _jax.Jaxpr:
    """Returns the jaxpr with what the answer needs alone: the call's own program runs it again."""
    needed, twice = parts.needed_twice(jaxpr)
    if twice is not None:
        what = "changes a reference" if not _jax.acts_outside(twice) else "has an effect"
        raise CaptureError(
            f"compile: {_name(call.pure)} cannot be captured: at {question.source} Python asks for "
            f"the value of an array that depends on {twice.primitive.name} "
            f"({_jax.source_of(twice)}), which {what}, and it would run twice: for the answer, and "
            "in the program. Use jax.lax.cond or jnp.where there, or leave tpjax.compile off this "
            "function and put it on those that it calls before and after."
        )
    return needed


def _check_results(fn: Callable[..., Any], results: list[Any], after: Any) -> None:
    for i, x in enumerate(results):
        try:
            jax.typeof(x)
        except TypeError:
            name = getattr(fn, "__qualname__", "the function")
            where = _result_path(after, i)
            raise TypeError(
                f"compile: {name} must return arrays and numbers; got {x!r:.60} "
                f"({type(x).__name__}) at result{where}. Return it from a function around the "
                "compiled one."
            ) from None


def _result_path(after: Any, index: int) -> str:
    if not isinstance(after, jax.tree_util.PyTreeDef):
        return f" leaf {index}"
    numbered = jax.tree.unflatten(after, range(after.num_leaves))
    path = jax.tree_util.tree_flatten_with_path(numbered)[0][index][0]
    return jax.tree_util.keystr(path)


def trace(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _jax.Jaxpr:
    """Returns the jaxpr of the call; a wish for an array's value becomes a `CaptureError`."""
    try:
        return jax.make_jaxpr(fn)(*args, **kwargs)
    except (
        jax.errors.ConcretizationTypeError,
        jax.errors.TracerArrayConversionError,
        jax.errors.TracerIntegerConversionError,
        jax.errors.NonConcreteBooleanIndexError,
    ) as error:
        raise CaptureError(_explain(fn, error)) from error
    except Exception as error:
        kind = type(error)  # of flax, which need not be there
        if kind.__name__ != "TraceContextError" or not kind.__module__.startswith("flax."):
            raise
        file, line, text = _user_line(error)
        raise CaptureError(
            f"compile: {_name(fn)} cannot be captured: it changes an NNX module or variable that "
            f"it reaches indirectly, through a helper, a container, an attribute or a default "
            f'({file}:{line}: "{text}"). Pass that as an argument, or name it directly in the '
            "function's closure or globals; inside jax.grad, jax.vmap or jax.jit, use nnx's own."
        ) from error


def donated_inputs(jaxpr: _jax.Jaxpr) -> list[bool]:
    """Returns which inputs are donated by a jit that is all there is in the jaxpr."""
    nothing = [False] * len(jaxpr.invars)
    if len(jaxpr.eqns) != 1 or "donated_invars" not in jaxpr.eqns[0].params:
        return nothing
    eqn = jaxpr.eqns[0]
    pairs = zip(eqn.invars, eqn.params["donated_invars"], strict=True)
    given = {var for var, donated in pairs if donated and isinstance(var, _jax.Var)}
    return [var in given for var in jaxpr.invars]


def evaluate(jaxpr: _jax.Jaxpr, leaves: list[Any]) -> list[Any]:
    """Runs the jaxpr's equations on the leaves, under whatever trace is on.

    A result that depends on no leaf is an array like the others, not the number that stands in the
    jaxpr: what the caller does with it follows its dtype and weak type.
    """
    results = jaxpr_as_fun(jaxpr)(*leaves)
    return [_as_array(x, var.aval) for x, var in zip(results, jaxpr.outvars, strict=True)]


def _as_array(value: Any, aval: Any) -> Any:
    if isinstance(value, jax.Array) or not _jax.is_array(aval):
        return value
    return lax.convert_element_type_p.bind(
        np.asarray(value, aval.dtype),
        new_dtype=aval.dtype,
        weak_type=bool(aval.weak_type),
        sharding=None,
    )


def jitted_program(jaxpr: _jax.Jaxpr, name: str, **options: Any) -> Any:
    """Returns the jaxpr as a function of its inputs, under `jax.jit` with the options."""

    def run(*inputs: Any) -> list[Any]:
        return evaluate(jaxpr, list(inputs))

    run.__name__ = run.__qualname__ = name
    return jax.jit(run, **options)


_REASONS: tuple[tuple[type[Exception], str, str], ...] = (
    (
        jax.errors.TracerBoolConversionError,
        "a branch asks whether an array is true, and its value is not known while tracing",
        "Use jax.lax.cond or jnp.where for a choice that depends on data, jax.lax.while_loop for a "
        "loop; an argument that is a Python flag can be named in static_argnames.",
    ),
    (
        jax.errors.TracerIntegerConversionError,
        "a Python integer is made from an array, and its value is not known while tracing",
        "Use jax.lax.dynamic_slice or jnp.take for an index that depends on data; an argument that "
        "is a Python number can be named in static_argnames.",
    ),
    (
        jax.errors.TracerArrayConversionError,
        "a NumPy array is made from a traced array, whose value is not known while tracing",
        "Use jax.numpy in place of numpy there, or jax.pure_callback for code that needs values.",
    ),
    (
        jax.errors.NonConcreteBooleanIndexError,
        "an array is indexed by a mask, so the size of the result depends on data",
        "Use jnp.where with three arguments, which keeps the size.",
    ),
    (
        Exception,
        "the value of an array is needed, and it is not known while tracing",
        "Compute with jax.numpy and jax.lax all the way; an argument that is a Python value can be "
        "named in static_argnames.",
    ),
)


def _explain(fn: Callable[..., Any], error: Exception) -> str:
    what, remedy = next((w, r) for kind, w, r in _REASONS if isinstance(error, kind))
    name = _name(fn)
    file, line, text = _user_line(error)
    return f'compile: {name} cannot be captured: {what} ({file}:{line}: "{text}"). {remedy}'


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", type(fn).__name__)


def _user_line(error: Exception) -> tuple[str, int, str]:
    """Returns file, line and text of the innermost frame that is the user's."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not f.filename.startswith(_LIBRARIES + _OURS)]
    own = [f for f in theirs if f"{os.sep}site-packages{os.sep}" not in f.filename]
    best = (own or theirs or list(frames))[-1]
    line = best.lineno or 0
    return best.filename, line, linecache.getline(best.filename, line).strip()
