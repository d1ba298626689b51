# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Which kernel does not compile, and whose line asked for it.

A kernel is lowered and compiled long after the line that calls it was traced, as part of a program
that is not ours; what is raised there names neither. So dispatch notes the kernels that it chose.
Where Pallas cannot lower one, the error gets a note with operator and line. Where XLA refuses a
program, the noted kernels are compiled one by one, each once, and an error that one of them
explains is raised with its name; others pass as they are.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax

from tpjax.core import _jax
from tpjax.core.operator import Key

MAX_NOTED = 64
"""Kernels that are remembered, the most recently traced."""
MAX_SENTENCE = 240
"""Characters of a reason."""


@dataclass(frozen=True)
class Kernel:
    """One call of an operator for which a kernel was chosen."""

    op: str
    implementation: str
    key: Key
    source: str
    run: Callable[..., Any]
    """The implementation's: takes the operands, None where absent, and the options."""

    rule: str | None = None
    """The rewrite that put the call there; None: the user did."""

    def __str__(self) -> str:
        where = f"{self.source}, put in by {self.rule}" if self.rule else self.source
        return f"the {self.implementation} kernel of {self.op} ({where})"


_noted: OrderedDict[Any, Kernel] = OrderedDict()
_fresh: set[Any] = set()
"""Kernels noted since XLA last failed: only these may be behind an error that reads differently."""
_reasons: dict[Any, str | None] = {}
_lock = threading.Lock()
_hooked = False
current_rule: ContextVar[str | None] = ContextVar("tpjax_rule", default=None)
"""The rewrite whose replacement is being traced."""
_asking: ContextVar[bool] = ContextVar("tpjax_asking_kernels", default=False)


def note_kernel(kernel: Kernel) -> None:
    """Remembers a kernel that was chosen just now."""
    global _hooked
    with _lock:
        hook, _hooked = not _hooked, True
        _noted[_name(kernel), kernel.source] = kernel
        _noted.move_to_end((_name(kernel), kernel.source))
        _fresh.add(_name(kernel))
        if len(_noted) > MAX_NOTED:
            _noted.popitem(last=False)
    if hook:
        from tpjax.pallas._mgpu import on_kernel_failure

        on_kernel_failure(_add_note, _explained)


def noted_kernel(op: str, implementation: str, key: Key) -> Kernel | None:
    """Returns the kernel of an earlier call, if it is remembered or in the table of operators."""
    with _lock:
        name = op, implementation, key
        found = next((k for k in reversed(_noted.values()) if _name(k) == name), None)
    if found is not None:
        return found
    from tpjax.pallas import OPS

    for row in OPS:
        for one in row.implementations if row.name == op else ():
            if one.name == implementation:
                return Kernel(op, implementation, key, "unknown", one.run)
    return None


def reason_of(kernel: Kernel) -> str | None:
    """Returns in a sentence why the kernel does not compile by itself, or None if it does.

    Tried once for each kernel: forward, and if that compiles, its gradient.
    """
    name = (*_name(kernel), kernel.run)
    if name not in _reasons:
        token = _asking.set(True)
        try:
            _reasons[name] = _compiled(kernel)
        finally:
            _asking.reset(token)
    return _reasons[name]


def sentence(error: BaseException) -> str:
    """Returns the kind of the error and the first line of what it says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0].rstrip(".") if lines else "no reason given"
    if len(text) > MAX_SENTENCE:
        text = text[:MAX_SENTENCE] + " ..."
    return f"{type(error).__name__}: {text}"


def _name(kernel: Kernel) -> tuple[str, str, Key]:
    return kernel.op, kernel.implementation, kernel.key


def _compiled(kernel: Kernel) -> str | None:
    places = [i for i, (_, aval) in enumerate(kernel.key.operands) if aval is not None]
    avals = [jax.ShapeDtypeStruct(*kernel.key.operands[i][1]) for i in places]  # pyright: ignore
    floating = [n for n, a in enumerate(avals) if jax.numpy.issubdtype(a.dtype, jax.numpy.inexact)]

    def forward(*given: Any) -> Any:
        operands: list[Any] = [None] * len(kernel.key.operands)
        for i, x in zip(places, given, strict=True):
            operands[i] = x
        return kernel.run(*operands, **dict(kernel.key.options))

    def backward(*given: Any) -> Any:
        def some(*floats: Any) -> Any:
            full = list(given)
            for i, x in zip(floating, floats, strict=True):
                full[i] = x
            return forward(*full)

        out, pull = jax.vjp(some, *(given[i] for i in floating))
        return pull(out)

    from tpjax.pallas.dispatch import use

    no_mesh = jax.sharding.AbstractMesh((), ())
    with jax.sharding.use_abstract_mesh(no_mesh), use(interpret=kernel.key.target.interpret):
        for run in (forward, backward) if floating else (forward,):
            try:
                jax.jit(run).lower(*avals).compile()
            except Exception as error:
                return sentence(error)
    return None


def _text(kernel: Kernel, reason: str) -> str:
    return (
        f"tpjax: {kernel} does not compile: {reason}. "
        f"tpjax.use(implementation={{{kernel.op!r}: 'xla'}}) runs the operator without a kernel."
    )


def _add_note(error: Exception) -> None:
    """Adds to an error in lowering a kernel whose kernel it is, if it is one of ours."""
    if _asking.get():
        return
    source = _jax.current_source()
    with _lock:
        found = next((k for k in reversed(_noted.values()) if k.source == source), None)
    if found is not None:
        error.add_note(_text(found, sentence(error)))


def _explained(error: Exception) -> Exception | None:
    """Returns an error of XLA with the kernel at fault named, or None if it is none of ours."""
    if _asking.get():
        return None
    with _lock:
        suspects, fresh = list(reversed(_noted.values())), set(_fresh)
        _fresh.clear()
    for kernel in suspects:
        reason = reason_of(kernel)
        if reason is not None and (_name(kernel) in fresh or reason == sentence(error)):
            return type(error)(f"{error}\n{_text(kernel, reason)}")
    return None
