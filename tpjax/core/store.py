# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""A folder of bytes by kind and key, kept between processes: `Store`.

An entry is one file, written beside its place and moved there, so that a reader sees a whole one or
none, and writers of one key do not meet. It holds a checksum of its kind, key and bytes. What does
not check is not used. Nothing here ever fails a caller: a store that cannot be written is read
only, with one warning. Entries are data and never run.
"""

import contextlib
import functools
import hashlib
import os
import secrets
import struct
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
MAGIC = b"tpjax\0st"
FORMAT = 1
"""Of the file around the bytes; another one is another file's name."""
_HEADER = struct.Struct(">8sH32sQ")
_TEMPORARY = ".tmp"
OLD_S = 3600.0
"""Age in seconds at which a file that was never moved to its place belongs to a dead process."""
MAX_ENTRIES = 10_000
"""Entries of one kind; the first writer of a process removes the oldest above that."""


def key_of(parts: Iterable[str | bytes]) -> str:
    """Returns the key for what an entry depends on: SHA-256 over the parts and their lengths."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.hexdigest()


@functools.cache
def code_of(*rooms: str) -> str:
    """Returns a digest of tpjax's own source in the rooms: other code may decide otherwise."""
    files = (file for room in rooms for file in sorted((_PACKAGE / room).rglob("*.py")))
    return key_of(file.read_bytes() for file in files)


class Store:
    """Bytes by kind and key in a folder, safe with other processes at work in it."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        on_failure: Callable[[], None] = lambda: None,
        read_only: bool = False,
    ) -> None:
        """Opens the folder, which is made when the first entry is.

        Args:
          folder: where entries are.
          on_failure: called once, if it turns out that nothing can be written.
          read_only: write nothing, silently.
        """
        self.folder = Path(folder)
        self._on_failure = on_failure
        self._tidied: set[Path] = set()
        self._warned: set[Path] = set()
        self._read_only = read_only

    def path(self, kind: str, key: str) -> Path:
        """Returns the file of an entry."""
        return self.folder / kind / f"{key}.{FORMAT}"

    def get(self, kind: str, key: str) -> bytes | None:
        """Returns the entry's bytes, or None; a damaged entry is None, with one warning."""
        path = self.path(kind, key)
        try:
            raw = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self._warn_of_entry(path, f"cannot be read ({error.strerror})")
            return None
        fault, data = _unpacked(kind, key, raw)
        if fault is not None:
            self._warn_of_entry(path, fault)
        return data

    def put(self, kind: str, key: str, data: bytes) -> bool:
        """Writes the entry in place of what was there; returns whether that could be done."""
        if self._read_only:
            return False
        path = self.path(kind, key)
        entry = _HEADER.pack(MAGIC, FORMAT, _checksum(kind, key, data), len(data)) + data
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._tidy(path.parent)
            _write(path, entry)
        except OSError as error:
            self._read_only = True
            self._on_failure()
            warnings.warn(
                f"cache: {path} cannot be written ({error.strerror or error}), so nothing more is "
                "kept there in this process. Free space, or choose another folder.",
                stacklevel=2,
            )
            return False
        return True

    def discard(self, kind: str, key: str, fault: str) -> None:
        """Removes an entry whose bytes are whole but of no use, and warns once why."""
        path = self.path(kind, key)
        with contextlib.suppress(OSError):
            path.unlink()
        self._warn_of_entry(path, fault)

    def _warn_of_entry(self, path: Path, fault: str) -> None:
        if path not in self._warned:
            self._warned.add(path)
            warnings.warn(
                f"cache: the entry {path} {fault}; it is not used, and made again.", stacklevel=3
            )

    def _tidy(self, folder: Path) -> None:
        """Removes what dead processes left half written, and the oldest of too many entries."""
        if folder in self._tidied:
            return
        self._tidied.add(folder)
        entries: list[tuple[float, str]] = []
        for file in os.scandir(folder):
            with contextlib.suppress(OSError):  # another process may be tidying too
                age = file.stat().st_mtime
                if not file.name.endswith(_TEMPORARY):
                    entries.append((age, file.path))
                elif time.time() - age > OLD_S:
                    os.unlink(file.path)
        for _, old in sorted(entries)[: max(len(entries) - MAX_ENTRIES, 0)]:
            with contextlib.suppress(OSError):
                os.unlink(old)


def _checksum(kind: str, key: str, data: bytes) -> bytes:
    return bytes.fromhex(key_of((kind, key, data)))


def _unpacked(kind: str, key: str, raw: bytes) -> tuple[str | None, bytes | None]:
    """Returns what is wrong with the entry, in words, and its bytes if nothing is."""
    if len(raw) < _HEADER.size:
        return f"is cut off at {len(raw)} bytes", None
    magic, version, checksum, length = _HEADER.unpack_from(raw)
    data = raw[_HEADER.size :]
    if magic != MAGIC or version != FORMAT:
        return f"is not of this store (format {FORMAT})", None
    if len(data) != length:
        return f"has {len(data)} bytes where {length} were written", None
    if _checksum(kind, key, data) != checksum:
        return "is damaged: its checksum does not fit", None
    return None, data


def _write(path: Path, entry: bytes) -> None:
    """Writes a file of its own, then moves it to its place at once."""
    name = f"{path.name[:16]}-{os.getpid()}-{secrets.token_hex(6)}{_TEMPORARY}"
    temporary = path.with_name(name)
    try:
        with open(temporary, "xb") as file:
            file.write(entry)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


_active: Store | None = None


def active() -> Store | None:
    """Returns the store that `tpjax.cache` switched on for this process, or None."""
    return _active


def activate(store: Store | None) -> None:
    """Makes the store the process's; None switches it off."""
    global _active
    _active = store
