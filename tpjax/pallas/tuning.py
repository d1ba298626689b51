# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Which config a kernel runs with: measured by the user, measured for `tuned.json`, or guessed.

`python -m tpjax bench --tune FOLDER` measures; with `tpjax.cache(FOLDER)` on, kernels read
what it found, by device kind, operator and shapes. `python -m tpjax bench --record` writes
the same into `tuned.json`, which comes with the library. Nothing is measured during a user's call,
and a config changes speed, never meaning.
"""

import json
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax

from tpjax.core import store as stores
from tpjax.pallas.dispatch import current_target

KIND = "tuned"


class Request(NamedTuple):
    """A kernel that asks for its config: the operator, its shapes, and what it may get."""

    op: str
    shapes: Hashable
    configs: tuple[Any, ...]


class Measured(NamedTuple):
    """What a config took; None where it did not run."""

    config: Any
    ms: float | None


_asked: ContextVar[list[Request] | None] = ContextVar("tpjax_configs_asked", default=None)
_trial: ContextVar[tuple[Request, Any] | None] = ContextVar("tpjax_config_trial", default=None)


def config_for(op: str, shapes: Hashable, configs: Sequence[Any], otherwise: Any) -> Any:
    """Returns the config that was measured to be the fastest, or `otherwise`.

    Args:
      op: the operator's name.
      shapes: what of the call decides how fast a config is; plain tuples, numbers and strings.
      configs: dataclasses worth trying; nothing else is ever returned but `otherwise`.
      otherwise: the heuristic's.
    """
    request = Request(op, shapes, tuple(configs))
    asked, trial = _asked.get(), _trial.get()
    if asked is not None:
        asked.append(request)
    if trial is not None and trial[0] == request:
        return trial[1]
    kind = _device_kind()
    if kind is None:
        return otherwise
    found = _stored(kind, request) or _shipped().get(kind, {}).get(op, {}).get(repr(shapes))
    return next((config for config in configs if asdict(config) == found), otherwise)


def _stored(kind: str, request: Request) -> Any:
    """Returns what the user's own measurements found, or None."""
    store = stores.active()
    raw = None if store is None else store.get(KIND, _key(kind, request))
    try:
        return None if raw is None else json.loads(raw)["config"]
    except (ValueError, TypeError, KeyError):
        return None


NOISE = 1.01
"""Times this close are the same: of such configs the one that kernels prefer unmeasured is kept."""
SHIPPED = Path(__file__).with_name("tuned.json")
"""Configs by device kind, operator and shapes, measured before a release."""


@cache
def _shipped() -> dict[str, dict[str, dict[str, Any]]]:
    return json.loads(SHIPPED.read_text())


def record(request: Request, config: Any) -> None:
    """Writes the config of a request on this device into `tuned.json`."""
    known, kind = _shipped(), _device_kind()
    assert kind is not None, "configs are recorded on the device that they were measured on"
    known.setdefault(kind, {}).setdefault(request.op, {})[repr(request.shapes)] = asdict(config)
    SHIPPED.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def _device_kind() -> str | None:
    """Returns the kind of device that calls are chosen for now, if it is here."""
    target = current_target()
    here = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    return None if target.interpret or target.platform != here else jax.devices()[0].device_kind


def _key(device_kind: str, request: Request) -> str:
    code = stores.code_of("pallas")
    return stores.key_of((device_kind, request.op, repr(request.shapes), jax.__version__, code))


@contextmanager
def requests() -> Iterator[list[Request]]:
    """Collects what kernels ask for while they are traced in the block."""
    found: list[Request] = []
    token = _asked.set(found)
    try:
        yield found
    finally:
        _asked.reset(token)


@contextmanager
def trying(request: Request, config: Any) -> Iterator[None]:
    """Gives the config to the kernel that asks for it in the block."""
    token = _trial.set((request, config))
    try:
        yield
    finally:
        _trial.reset(token)


def tune(
    request: Request, measure: Callable[[], float | None], store: stores.Store | None
) -> tuple[Measured, ...]:
    """Measures every config of the request and keeps the best; returns all, the best first.

    That is the fastest, or one that comes before it in the request and is as fast within `NOISE`.

    Args:
      request: what a kernel asked for on this device.
      measure: runs the call and returns its milliseconds, or None where that config cannot run it.
      store: where to keep it; None: in `tuned.json`.
    """
    found = []
    for config in request.configs:
        with trying(request, config):
            found.append(Measured(config, measure()))
    times = [float("inf") if m.ms is None else m.ms for m in found]
    best = next((i for i, ms in enumerate(times) if ms <= NOISE * min(times)), 0)
    order = sorted(range(len(found)), key=lambda i: (i != best, times[i]))
    found = [found[i] for i in order]
    kind = _device_kind()
    if store is None and found and found[0].ms is not None:
        record(request, found[0].config)
    elif store is not None and kind is not None and found and found[0].ms is not None:
        best = {"config": asdict(found[0].config), "ms": found[0].ms, "device": kind}
        entry = best | {"op": request.op, "shapes": repr(request.shapes)}
        store.put(KIND, _key(kind, request), json.dumps(entry).encode())
    return tuple(found)
