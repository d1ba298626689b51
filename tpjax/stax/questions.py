# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Python code that asks for the value of a traced scalar: `if x.sum() > 0`, `int(n)`, `range(n)`.

`jax.jit` refuses such code. Here the capture stops at the question, and the jaxpr up to there is a
small program that computes the answer. The compiled function runs it on the call's own arguments,
captures again with the answer given, and keeps one entry for each sequence of answers; so the data
decide which entry runs, and no data are hashed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from tpjax.core import _jax, _tracing
from tpjax.core.errors import message

_KINDS = {
    "__bool__": bool,
    "__int__": int,
    "__index__": int,
    "__float__": float,
    "__complex__": complex,
}


@dataclass(frozen=True)
class Question:
    """What Python wanted to know: the type of the answer, and where it was asked."""

    kind: type
    source: str

    def answer(self, value: Any) -> Any:
        """Returns the array's value as Python asked for it."""
        return self.kind(np.asarray(value).reshape(()).item())


class Stopped(BaseException):
    """Ends a capture at its first unanswered question; no `except Exception` stops it.

    What does stop it (`except:`, a `return` in `finally`) goes on in vain: the capture ends there
    all the same, and what it returns or raises is dropped.
    """


@dataclass
class _Conversation:
    """The questions of one capture, in order."""

    trace: Any
    answers: tuple[Any, ...] | None
    asked: int = 0
    pending: tuple[Question, Any] | None = None
    """The first question without an answer, and the tracer that it is about."""
    refused: str | None = None
    """Where Python asked last, if nothing is answered."""
    gated: list[Any] = field(default_factory=list)
    read: list[Any] = field(default_factory=list)

    def ask(self, tracer: Any, method: str) -> tuple[Any] | None:
        """Returns the answer in a tuple, or None where JAX's own error must come."""
        tracer = _tracing.traced_by(tracer, self.trace)
        kind = None if tracer is None else _kind_of(tracer, method)
        if kind is None:
            return None
        source = _jax.current_source()
        if any(tracer is gated for gated in self.gated):
            raise TypeError(
                f"gate: a gated value must stay an array; Python asks for its value ({source}). "
                "Leave tpjax.gate out to have one entry for each value."
            )
        if self.answers is None:
            self.refused = source
            return None
        if self.pending is None and self.asked == len(self.answers):
            self.pending = Question(kind, source), tracer
        if self.pending is not None:
            raise Stopped(source)
        self.asked += 1
        return (self.answers[self.asked - 1],)


def _kind_of(tracer: Any, method: str) -> type | None:
    """Returns the Python type that the method makes of a traced array with one number, or None."""
    if not _jax.is_array(tracer.aval) or np.prod(tracer.shape) != 1:
        return None
    if method == "tolist" and tracer.shape:
        return None  # a list of one number is no answer
    return _KINDS.get(method) or type(np.zeros((), tracer.dtype).item())


_current: ContextVar[_Conversation | None] = ContextVar("tpjax_conversation", default=None)


@contextmanager
def asking(answers: tuple[Any, ...] | None) -> Iterator[_Conversation]:
    """Answers, inside the block, what Python asks of arrays that the trace now on has made."""
    conversation = _Conversation(_tracing.current_trace(), answers)
    token = _current.set(conversation)
    try:
        with (
            _tracing.values_asked_of(conversation.ask),
            _tracing.reads_told_to(conversation.read.append),
        ):
            yield conversation
    finally:
        _current.reset(token)


def may_ask() -> bool:
    """Returns whether a capture is on that answers what Python asks of its arrays."""
    conversation = _current.get()
    return conversation is not None and conversation.answers is not None


def gate(value: jax.Array) -> jax.Array:
    """Returns a scalar that stays part of the program: one entry, whatever its value.

    For code that would otherwise turn an array into a Python number, as in `n = int(x.sum())`, and
    so have an entry for each value. A gated scalar that Python asks for its value raises.

    Args:
      value: a scalar array, traced by a compiled function.

    Raises:
      RuntimeError: called outside a compiled function.
      TypeError: `value` is no traced array.
      ValueError: `value` is no scalar.

    Example:
      >>> import jax.numpy as jnp, tpjax
      >>> @tpjax.compile
      ... def scaled(x):
      ...     return x * tpjax.gate(x.sum())
      >>> [float(scaled(jnp.float32(n))) for n in (1, 2, 3)], len(scaled.entries())
      ([1.0, 4.0, 9.0], 1)
    """
    conversation = _current.get()
    if conversation is None:
        raise RuntimeError(
            "gate: it must be called in a function given to tpjax.compile, while that is traced; "
            "outside of one an array is an array. Leave it out there."
        )
    if not _jax.is_tracer(value):
        raise TypeError(message("gate", "value", "an array that is traced", repr(value)))
    if value.shape != ():
        raise ValueError(message("gate", "value", "a scalar", f"shape {value.shape}"))
    conversation.gated.append(value)
    return value
