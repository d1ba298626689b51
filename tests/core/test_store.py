# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""The store of entries: damage, several writers, full disks, folders that cannot be written."""

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_python
from tpjax.core import store as stores
from tpjax.core.store import Store, key_of

KIND, DATA = "notes", b"0123456789" * 20
KEY, OTHER = key_of(["a"]), key_of(["b"])


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Returns a store in a folder of its own that is not there yet."""
    return Store(tmp_path / "deep" / "store")


def test_what_is_put_comes_back(store):
    assert store.get(KIND, KEY) is None
    assert store.put(KIND, KEY, DATA)
    assert store.put("other", KEY, b"")
    assert (store.get(KIND, KEY), store.get("other", KEY)) == (DATA, b"")
    assert store.get(KIND, OTHER) is None
    assert Store(store.folder).get(KIND, KEY) == DATA
    assert store.put(KIND, KEY, b"new")
    assert store.get(KIND, KEY) == b"new"


def test_keys_know_their_parts():
    keys = {
        key_of(parts) for parts in (["ab"], ["a", "b"], ["a", "", "b"], ["b", "a"], [b"ab", ""])
    }
    assert len(keys) == 5
    assert key_of(["a"]) == key_of([b"a"])
    assert len(KEY) == 64


def warned(*actions: Callable[[], Any]) -> tuple[list[Any], list[str]]:
    """Returns what the actions return, and what they warn of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [action() for action in actions]
    return results, [str(one.message) for one in caught]


def damage(change: Callable[[bytes], bytes]) -> Callable[[Store], None]:
    """Returns what rewrites the entry's file."""

    def do(store: Store) -> None:
        path = store.path(KIND, KEY)
        path.write_bytes(change(path.read_bytes()))

    return do


def foreign(store: Store) -> None:
    """Puts another entry's file in the entry's place."""
    store.put(KIND, OTHER, DATA)
    os.replace(store.path(KIND, OTHER), store.path(KIND, KEY))


def a_folder(store: Store) -> None:
    """Puts a folder in the entry's place."""
    store.path(KIND, KEY).unlink()
    store.path(KIND, KEY).mkdir()


DAMAGES = {
    "nothing left": (damage(lambda raw: b""), "cut off at 0 bytes"),
    "half of the header": (damage(lambda raw: raw[:20]), "cut off at 20 bytes"),
    "cut off": (damage(lambda raw: raw[:-1]), "has 199 bytes where 200 were written"),
    "longer": (damage(lambda raw: raw + b"x"), "has 201 bytes"),
    "one bit": (damage(lambda raw: raw[:-9] + bytes([raw[-9] ^ 4]) + raw[-8:]), "is damaged"),
    "a bit of the checksum": (damage(lambda raw: raw[:12] + b"\1" + raw[13:]), "is damaged"),
    "another program's": (damage(lambda raw: b"PK\3\4" * 100), "is not of this store"),
    "another format": (damage(lambda raw: raw[:9] + b"\7" + raw[10:]), "is not of this store"),
    "another entry's": (foreign, "is damaged"),
    "a folder": (a_folder, "cannot be read"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_F05_a_damaged_entry_is_ignored_with_one_warning(what, store):
    do, words = DAMAGES[what]
    store.put(KIND, KEY, DATA)
    do(store)
    results, (message,) = warned(*[lambda: store.get(KIND, KEY)] * 2)
    assert results == [None, None]
    assert words in message
    assert str(store.path(KIND, KEY)) in message
    if what != "a folder":
        assert store.put(KIND, KEY, DATA)
        assert store.get(KIND, KEY) == DATA


def test_an_entry_of_no_use_goes_with_one_warning(store):
    store.put(KIND, KEY, DATA)
    _, (message,) = warned(*[lambda: store.discard(KIND, KEY, "says nothing")] * 2)
    assert "says nothing; it is not used" in message
    assert not store.path(KIND, KEY).exists()


WRITER = """
import random, sys, warnings
from tpjax.core.store import Store, key_of
warnings.simplefilter("error")
me, folder = int(sys.argv[1]), sys.argv[2]
draw, keys = random.Random(me), [key_of([str(i)]) for i in range(3)]
reads = 0
for round in range(400):
    store = Store(folder) if round % 50 == 0 else store
    key = draw.choice(keys)
    text = bytes([me]) * draw.choice([0, 1, 1000, 100_000, 1_000_000][: 3 + (round % 40 == 0) * 2])
    assert store.put("k", key, text)
    found = store.get("k", draw.choice(keys))
    assert found is None or len(set(found)) <= 1, "two writers in one entry"
    reads += found is not None
print(reads)
"""


def test_F05_processes_that_build_one_key_do_not_clash(tmp_path):
    root = str(Path(stores.__file__).parents[2])
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(i), str(tmp_path)],
            env=dict(os.environ, PYTHONPATH=root), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(4)
    ]  # fmt: skip
    for process in started:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert int(out) > 300
    names = sorted(p.name for p in (tmp_path / "k").iterdir())
    assert len(names) == 3
    assert not any(name.endswith(".tmp") for name in names)


FULL = """
import resource, warnings
from tpjax.core.store import Store, key_of
failures = []
store = Store({folder!r}, on_failure=lambda: failures.append(1))
assert store.put("k", key_of(["small"]), b"x" * 100)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))  # a write of more fails half way
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert not store.put("k", key_of(["large"]), b"x" * 100_000)
    assert not store.put("k", key_of(["large"]), b"x" * 100_000)
    assert not store.put("k", key_of(["other"]), b"x")
    assert store.get("k", key_of(["large"])) is None
    assert store.get("k", key_of(["small"])) == b"x" * 100
print(len(caught), len(failures), caught[0].message)
"""


def test_F05_a_full_disk_costs_one_warning(tmp_path):
    out = run_python(FULL.format(folder=str(tmp_path)))
    assert out.startswith("1 1 cache: ")
    assert "cannot be written (File too large), so nothing more is kept there" in out
    assert len(list((tmp_path / "k").iterdir())) == 1, "a part of an entry is left"


def test_F05_a_disk_that_fills_up_while_writing(store, monkeypatch):
    class Full:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def write(self, data):
            self.file.write(data[: len(data) // 2])
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(stores, "open", lambda *a: Full(open(*a)), raising=False)  # noqa: SIM115
    results, (message,) = warned(*[lambda: store.put(KIND, KEY, DATA)] * 2)
    assert results == [False, False]
    assert "No space left on device" in message
    assert list((store.folder / KIND).iterdir()) == []
    assert store.get(KIND, KEY) is None


@pytest.mark.parametrize("where", ["below a file", "in the kernel's folder"])
def test_F05_a_folder_that_cannot_be_written(where, tmp_path):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "store" if where == "below a file" else "/proc/store"
    store = Store(folder)
    get, put = lambda: store.get(KIND, KEY), lambda: store.put(KIND, KEY, DATA)
    results, (message,) = warned(get, put, put, get)
    assert results == [None, False, False, None]
    assert "cannot be written" in message


def test_a_read_only_store_is_silent(store):
    store.put(KIND, KEY, DATA)
    reader = Store(store.folder, read_only=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not reader.put(KIND, OTHER, DATA)
        assert reader.get(KIND, KEY) == DATA


def test_what_dead_processes_left_is_removed(store):
    store.put(KIND, KEY, DATA)
    old, young = store.folder / KIND / "x-1-aa.tmp", store.folder / KIND / "x-2-bb.tmp"
    for path in (old, young):
        path.write_bytes(b"half")
    past = time.time() - stores.OLD_S - 60
    os.utime(old, (past, past))
    os.utime(store.path(KIND, KEY), (past, past))
    store.put(KIND, OTHER, DATA)
    assert old.exists(), "one look for each process"
    Store(store.folder).put(KIND, OTHER, DATA)
    assert (old.exists(), young.exists()) == (False, True)
    assert store.get(KIND, KEY) == DATA


def test_the_oldest_of_too_many_entries_go(store, monkeypatch):
    keys = [key_of([str(i)]) for i in range(8)]
    for age, key in enumerate(keys):
        store.put(KIND, key, DATA)
        os.utime(store.path(KIND, key), (1e9 + age, 1e9 + age))
    monkeypatch.setattr(stores, "MAX_ENTRIES", 5)
    Store(store.folder).put(KIND, keys[7], DATA)
    assert [store.get(KIND, key) is not None for key in keys] == [False] * 3 + [True] * 5
