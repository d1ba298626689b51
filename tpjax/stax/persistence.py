# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""`tpjax.cache`: a folder in which compiled work is kept for the next process.

Two things are kept: what tpjax decided (`tpjax.stax_passes.decisions`, tuned kernel configs), in a
store of its own, and what XLA compiled, in JAX's persistent compilation cache.
"""

import contextlib
import os
import secrets
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from tpjax.core import store as stores
from tpjax.core.errors import message

XLA = "xla"
"""The folder, within that of `tpjax.cache`, of JAX's cache."""
_DIR, _TIME = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
_SIZE, _ENABLED = "jax_persistent_cache_min_entry_size_bytes", "jax_enable_compilation_cache"
SETTINGS = (_ENABLED, _DIR, _TIME, _SIZE)
"""JAX's settings that `tpjax.cache` changes."""
_NEVER_S = 1e9
"""No program takes that long to compile, so that none is written."""

_REMEDY = 'Give a folder on this machine: tpjax.cache("~/.cache/tpjax"), or None to switch it off.'
_lock = threading.RLock()
_first: Mapping[str, Any] | None = None
"""JAX's settings before the first cache, while one is on."""


class Cache:
    """What `tpjax.cache` did; as a context manager, it goes back to how things were at the end."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        """The folder in use, or None: nothing is kept."""
        self.before: Mapping[str, Any] = MappingProxyType(_settings())
        """JAX's settings as they were."""
        self._store, self._first = stores.active(), _first

    def __enter__(self) -> "Cache":
        """Returns itself: it is on already."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Restores the settings of before, those of an enclosing `tpjax.cache` too."""
        global _first
        with _lock:
            stores.activate(self._store)
            _first = self._first
            _set(self.before)

    def __repr__(self) -> str:
        was = ", ".join(f"{name}={value!r}" for name, value in self.before.items())
        return f"<tpjax.cache({str(self.folder) if self.folder else None!r}); before: {was}>"


def cache(folder: str | os.PathLike[str] | None) -> Cache:
    """Keeps compiled work in a folder, so that the next process that compiles it starts warm.

    On for the whole process from now on, until `tpjax.cache(None)` or, used as a context manager,
    until the end of the block. What tpjax's passes decide is kept there, and JAX's persistent
    compilation cache is set to a folder in it (`jax_compilation_cache_dir`), small programs
    included. An entry is found only by the same program, passes, options, versions, source lines
    and kind of device. Damaged entries are made again; a folder that is full or cannot be written
    costs one warning and nothing else. Several processes may share it. JAX runs what it finds
    there, so the folder must be writable by nobody whom you do not trust.

    Args:
      folder: made if it is not there. None: keep nothing, with JAX's settings as they were before
        the first call.

    Returns:
      A `Cache`, whose `before` tells which settings of JAX stood before.

    Raises:
      TypeError: `folder` is no path.
      ValueError: it is a file, or no folder of this machine.

    Example:
      >>> import tempfile, tpjax
      >>> with tempfile.TemporaryDirectory() as folder, tpjax.cache(folder):
      ...     tpjax.compile(lambda x: x + 1)(1)
      Array(2, dtype=int32, weak_type=True)
    """
    global _first
    path = None if folder is None else _checked(folder)
    with _lock:
        made = path is not None and _made(path)
        result = Cache(path if made else None)
        if path is None:
            stores.activate(None)
            if _first is not None:
                _set(_first)
            _first = None
        elif made:
            _first = _first or result.before
            _switch_on(path)
        return result


def _checked(folder: Any) -> Path:
    """Returns the folder as an absolute path, or raises."""
    if not isinstance(folder, str | os.PathLike) or isinstance(os.fspath(folder), bytes):
        kind = f"{folder!r:.60} ({type(folder).__name__})"
        raise TypeError(message("cache", "folder", "a path or None", kind, _REMEDY))
    text = os.fspath(folder)
    if not text or "\0" in text or "://" in text:
        raise ValueError(
            message("cache", "folder", "a folder of this machine", repr(text), _REMEDY)
        )
    try:
        path = Path(text).expanduser().absolute()
    except RuntimeError as error:  # a user of that name is not known
        raise ValueError(message("cache", "folder", "a path", repr(text), _REMEDY)) from error
    for place in (path, *path.parents):
        if place.exists() and not place.is_dir():
            raise ValueError(message("cache", "folder", "a folder", f"the file {place}", _REMEDY))
    return path


def _made(path: Path) -> bool:
    """Returns whether the folder is there, made now if need be; warns if it cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        warnings.warn(
            f"cache: the folder {path} cannot be made ({error.strerror}), so it is not used. "
            "Choose another one.",
            stacklevel=3,
        )
        return False
    return True


def _switch_on(path: Path) -> None:
    writable = _writable(path)
    settings = {
        _ENABLED: True,
        _DIR: str(path / XLA),
        _TIME: 0.0 if writable else _NEVER_S,
        _SIZE: -1,
    }
    if writable or (path / XLA).is_dir():
        _set(settings)
    stores.activate(stores.Store(path, on_failure=_write_no_more, read_only=not writable))


def _writable(path: Path) -> bool:
    """Returns whether files can be made in the folder; warns if not."""
    probe = path / f"probe-{os.getpid()}-{secrets.token_hex(4)}.tmp"
    try:
        probe.write_bytes(b"tpjax")
        (path / XLA).mkdir(exist_ok=True)
    except OSError as error:
        warnings.warn(
            f"cache: nothing can be written to {path} ({error.strerror}): what is there is used, "
            "and nothing is added. Free space, or choose another folder.",
            stacklevel=4,
        )
        return False
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
    return True


def _write_no_more() -> None:
    """Keeps JAX from trying, and warning, at each program once nothing more can be written."""
    jax.config.update(_TIME, _NEVER_S)


def _settings() -> dict[str, Any]:
    return {name: getattr(jax.config, name) for name in SETTINGS}


def _set(settings: Mapping[str, Any]) -> None:
    """Gives JAX the settings; a cache that it has open in another folder is closed."""
    moved = getattr(jax.config, _DIR) != settings[_DIR]
    moved = moved or getattr(jax.config, _ENABLED) != settings[_ENABLED]
    for name, value in settings.items():
        jax.config.update(name, value)
    if moved:
        compilation_cache.reset_cache()
