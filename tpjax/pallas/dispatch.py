# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Which implementation runs a call: decided at trace time, explained, never by exceptions.

A call's `Key` (machine, shapes, dtypes, options) is walked down the operator's implementations; the
first that can run it does, and the reason of each refused one is kept for `tpjax.explain`.
`tpjax.use` states a preference; JAX keys its caches on it, so a jitted function never serves a
stale choice.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax

from tpjax.core import _jax
from tpjax.core.errors import UnsupportedError, did_you_mean
from tpjax.core.operator import (
    Choice,
    Implementation,
    Interpret,
    Key,
    Partitioning,
    Refusal,
    Target,
    key_of,
)
from tpjax.pallas.differentiation import differentiable
from tpjax.pallas.failures import Kernel, current_rule, note_kernel
from tpjax.pallas.partition import split_over_devices

IMPLEMENTATIONS = ("pallas", "xla")
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
ASSUMED_CAPABILITY = "9.0"
"""Compute capability assumed by `use(platform="cuda")` where no CUDA GPU is present."""


@dataclass(frozen=True)
class Preference:
    """What `use` asked for; hashable, because JAX's caches are keyed on it."""

    implementation: str | tuple[tuple[str, str], ...] | None = None
    interpret: Interpret = False
    platform: str | None = None

    def implementation_of(self, op: str) -> str | None:
        """Returns the implementation asked for `op` by name, or None for an automatic choice."""
        if isinstance(self.implementation, tuple):
            return dict(self.implementation).get(op)
        return self.implementation


for _room in ("core", "pallas"):  # a call's source is the line that called us
    _jax.hide_frames(str(Path(__file__).parents[1] / _room) + os.sep)

_preference = jax.make_user_context(Preference())
_recorders: ContextVar[tuple[list[Choice], ...]] = ContextVar("tpjax_recorders", default=())
_warned: set[tuple[str, str, str]] = set()


def _check_name(argument: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ValueError(f"use: unknown {argument} {value!r}. {did_you_mean(value, valid)}")


@contextmanager
def use(
    *,
    implementation: str | Mapping[str, str] | None = None,
    interpret: Interpret | None = None,
    platform: str | None = None,
) -> Iterator[None]:
    """Prefers an implementation, interpreter or platform for every operator called in the block.

    Args:
      implementation: "pallas" or "xla" for all operators, or a mapping from operator name to one. A
        choice made here that cannot run a call raises `UnsupportedError` with the reason. None
        keeps the preference of the enclosing block.
      interpret: True runs kernels in the GPU interpreter on the CPU (slow: seconds a call); "races"
        also reports data races. Never automatic.
      platform: chooses as on that platform, for lowering or export where it is absent; "cuda" then
        means a GPU of compute capability 9.0.

    Raises:
      ValueError: an unknown name, with the nearest valid one.

    Example:
      >>> import tpjax
      >>> with tpjax.use(implementation="xla"):
      ...     pass
    """
    chosen: str | tuple[tuple[str, str], ...] | None = None
    if isinstance(implementation, str):
        _check_name("implementation", implementation, IMPLEMENTATIONS)
        chosen = implementation
    elif implementation is not None:
        for name in implementation.values():
            _check_name("implementation", name, IMPLEMENTATIONS)
        chosen = tuple(sorted(implementation.items()))
    if platform is not None:
        _check_name("platform", platform, PLATFORMS)
    if interpret not in (None, True, False, "races"):
        raise ValueError(f"use: interpret must be True, False or 'races'; got {interpret!r}.")
    if interpret:
        _jax.provide_interpreter_threads()
    outer = preference()
    inner = replace(
        outer,
        implementation=outer.implementation if chosen is None else chosen,
        interpret=outer.interpret if interpret is None else interpret,
        platform=outer.platform if platform is None else platform,
    )
    with _preference(inner):
        yield


def preference() -> Preference:
    """Returns what the enclosing `use` blocks ask for."""
    return _preference.value


def current_target() -> Target:
    """Returns the machine for which calls are chosen now.

    It is the platform of `use(platform=)`, else of the default device, which is the one jit
    compiles for unless its arguments are committed elsewhere.
    """
    asked = preference()
    device = jax.config.jax_default_device
    if asked.platform is not None:
        platform = asked.platform
    elif device is not None:
        platform = device if isinstance(device, str) else device.platform
    else:
        platform = jax.default_backend()
    platform = "cuda" if platform == "gpu" else platform
    return Target(platform, _capability() if platform == "cuda" else None, asked.interpret)


def _capability() -> str:
    if jax.default_backend() != "gpu":
        return ASSUMED_CAPABILITY
    return str(getattr(jax.devices()[0], "compute_capability", ASSUMED_CAPABILITY))


@contextmanager
def record_choices() -> Iterator[list[Choice]]:
    """Collects every choice made while tracing inside the block, in order."""
    choices: list[Choice] = []
    token = _recorders.set((*_recorders.get(), choices))
    try:
        yield choices
    finally:
        _recorders.reset(token)


def check_name(op: str, implementations: tuple[Implementation, ...], asked: str | None) -> None:
    """Checks the name of an implementation, for empty calls too, which none of them has to run.

    Raises:
      UnsupportedError: there is none of that name.
    """
    names = tuple(i.name for i in implementations)
    if asked is not None and asked not in names:
        raise UnsupportedError(
            f"{op}: unknown implementation {asked!r}. {did_you_mean(str(asked), names)}"
        )


def choose(
    op: str, implementations: tuple[Implementation, ...], key: Key, asked: str | None = None
) -> tuple[Implementation, tuple[Refusal, ...]]:
    """Returns the first implementation that can run the call, and why those before it cannot.

    Args:
      op: the operator's name, for messages.
      implementations: the row's, in order of preference; the last one runs everything.
      key: the call.
      asked: the name of the only acceptable implementation, or None.

    Raises:
      UnsupportedError: the one asked for cannot run this call; the message has the reason.
    """
    check_name(op, implementations, asked)
    refused: list[Refusal] = []
    for implementation in implementations:
        if asked is not None and implementation.name != asked:
            continue
        reason = implementation.unfit_machine(key.target) or implementation.unsupported(key)
        if reason is None:
            return implementation, tuple(refused)
        refused.append(Refusal(implementation.name, reason))
    assert asked is not None, f"{op}: the last implementation must run every call"
    raise UnsupportedError(
        f"{op}: implementation {asked!r} was asked for, but no kernel for this call: "
        f"{refused[0].reason}. Leave the implementation out to let one be chosen."
    )


def call(
    op: str,
    implementations: tuple[Implementation, ...],
    operands: Mapping[str, Any],
    options: Mapping[str, Any],
    implementation: str | None = None,
    partitioning: Partitioning | None = None,
) -> Any:
    """Runs an operator on checked operands through the implementation chosen for this call.

    Args:
      op: the operator's name.
      implementations: the row's, in order of preference.
      operands: arrays by name, in the order `Implementation.run` takes them; None where absent.
      options: static keywords, hashable.
      implementation: name of the only acceptable one; None leaves it to `use`, then to the machine.
      partitioning: the row's; how a kernel is split under a mesh. None never splits it.
    """
    key = key_of(current_target(), operands, options)
    asked = implementation or preference().implementation_of(op)
    chosen, refused = choose(op, implementations, key, asked)
    source = _jax.current_source()
    choice = Choice(op, chosen.name, refused, source, key)
    for choices in _recorders.get():
        choices.append(choice)
    if asked is None:
        _warn_once(op, implementations, key, refused, source)
    plain = _named(op, implementations[-1].run, tuple(options.items()))
    if chosen.name == "xla":
        return plain(*operands.values())
    note_kernel(Kernel(op, chosen.name, key, source, chosen.run, current_rule.get()))
    called = _as_called_here(partial(chosen.run, **options))
    run = differentiable(called, plain, partial(_warn_derivative, op, source))
    if partitioning is None:
        return run(*operands.values())
    return split_over_devices(run, partitioning, tuple(operands.values()))


def _as_called_here(run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `run` with the preference and the source line of now.

    A derivative traces it again, perhaps elsewhere.
    """
    preferred, here = preference(), _jax.here()

    def called_here(*operands: Any) -> Any:
        with _preference(preferred), here():
            return run(*operands)

    return called_here


@cache
def _named(op: str, run: Callable[..., Any], options: tuple[tuple[str, Any], ...]) -> Any:
    """Returns the operator's plain JAX form as one jit equation that names it.

    Passes leave it whole: they would only recognise in it the operator that it is.
    """

    def form(*operands: Any) -> Any:
        return run(*operands, **dict(options))

    form.__name__ = form.__qualname__ = f"{_jax.OPERATOR_PREFIX}{op}"
    return jax.jit(form)


def _warn_once(
    op: str,
    implementations: tuple[Implementation, ...],
    key: Key,
    refused: tuple[Refusal, ...],
    source: str,
) -> None:
    """Warns of a fallback on a machine that has the kernel: only the call itself was in the way."""
    fits = {i.name for i in implementations if i.unfit_machine(key.target) is None}
    for name, reason in refused:
        if name in fits:
            _warn(op, "call", reason, source)


def _warn_derivative(op: str, source: str) -> None:
    reason = "the kernel has first derivatives in reverse mode only, so the plain form's is taken"
    _warn(op, "derivative", reason, source)


def _warn(op: str, what: str, reason: str, source: str) -> None:
    """Warns that there is no kernel, once for each line of the user's code."""
    if (op, reason, source) not in _warned:
        _warned.add((op, reason, source))
        warnings.warn(f"{op}: no kernel for this {what}: {reason} ({source}).", stacklevel=5)
