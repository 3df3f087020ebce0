"""Reading text: which files, in which order, and what can't be read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ttrain.core.errors import DataError
from ttrain.data import corpus as corpus_module
from ttrain.data.batches import Sizes
from ttrain.data.corpus import Corpus, cut
from ttrain.data.settings import TextConfig
from ttrain.data.text import open_text
from ttrain.data.tokenizer import CharTokenizer
from ttrain.tasks.prepare import prepare

MIXED = "plain, é, 中文, 😀\r\n\ttabs\n"


def whole(corpus: Corpus) -> str:
    return "".join(corpus.text(0, corpus.size))


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_the_standard_library_is_the_default() -> None:
    data = open_text(TextConfig(max_bytes=3_000_000), Sizes(context=64))
    assert 2 < data.baseline().value < 4 and data.vocabulary is not None and 90 <= data.vocabulary <= 128
    corpus = Corpus(TextConfig())
    names = [file.as_posix() for file in corpus.found.files]
    root = os.path.dirname(os.__file__)
    assert names == sorted(names) and len(names) == data.description["files"] > 100 and f"{root}/os.py" in names
    inside = [os.path.relpath(name, root).split("/") for name in names]
    assert not any(part in ("test", "tests", "site-packages") for parts in inside for part in parts)


def test_a_library_that_can_not_be_listed_is_the_users_to_know(monkeypatch: pytest.MonkeyPatch) -> None:
    def walk(root: Path, onerror: Any) -> None:
        onerror(PermissionError(13, "Permission denied", str(root)))

    monkeypatch.setattr(os, "walk", walk)
    with pytest.raises(DataError, match="data.path=null: cannot read .*: Permission denied"):
        Corpus(TextConfig())


def test_a_folder_is_read_in_the_order_of_names_without_hidden_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a/b.md", "c.txt", ".hidden.txt", ".git/config"):
        write(tmp_path / name, name)
    corpus = Corpus(TextConfig(path=str(tmp_path), separator="|"))
    assert whole(corpus) == "a/b.md|a/z.txt|b.txt|c.txt"
    only = Corpus(TextConfig(path=str(tmp_path), separator="", suffixes=[".md"]))
    assert whole(only) == "a/b.md"


def test_bytes_are_reported_in_order_and_byte_order_marks_are_no_text(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", b"\xef\xbb\xbf" + MIXED.encode())
    write(tmp_path / "b.txt", b"\xef\xbb\xbfend")
    seen = bytearray()
    corpus = Corpus(TextConfig(path=str(tmp_path)))
    assert "".join(corpus.text(0, corpus.size, seen.extend)) == MIXED + "\nend"
    assert bytes(seen) == b"\n".join((tmp_path / name).read_bytes() for name in ("a.txt", "b.txt"))


@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(st.text("aé中😀\n", max_size=9), min_size=1, max_size=4).filter(any),  # no text at all is refused
    separator=st.sampled_from(["", "\n", "é"]),
    held_out=st.floats(0.05, 0.95),
    chunk=st.integers(1, 5),
    cap=st.one_of(st.none(), st.integers(1, 40)),
)
def test_the_splits_are_the_text_cut_once_between_characters(
    tmp_path_factory: Any, texts: list[str], separator: str, held_out: float, chunk: int, cap: int | None
) -> None:
    folder = tmp_path_factory.mktemp("texts")
    for number, text in enumerate(texts):
        write(folder / f"{number}.txt", text)
    joined = separator.join(texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_module, "READ_BYTES", chunk)
        corpus = Corpus(TextConfig(path=str(folder), separator=separator, held_out=held_out, max_bytes=cap))
        train = "".join(corpus.text(0, corpus.boundary))
        val = "".join(corpus.text(corpus.boundary, corpus.size))
    raw = joined.encode()
    size = len(raw) if cap is None else min(cap, len(raw))
    kept = raw[:size].decode(errors="ignore")
    assert train + val == kept
    target = round(len(kept.encode()) * (1 - held_out))
    assert target - 4 < len(train.encode()) <= target


@pytest.mark.parametrize("chunk", [1, 3, 1 << 20])
@pytest.mark.parametrize(
    ("content", "offset", "byte"),
    [
        (b"abc\xffdef", 3, "0xff"),
        ("é".encode() + b"\xe4\xb8", 2, "0xe4"),
        (b"ab\x00cd", 2, "0x00"),
        (b"\xff\xfea\x00b\x00", 0, "0xff"),
        (b"a\xc3(", 1, "0xc3"),
    ],
)
def test_what_is_not_utf8_text_is_named_with_its_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, offset: int, byte: str, chunk: int
) -> None:
    monkeypatch.setattr(corpus_module, "READ_BYTES", chunk)
    file = write(tmp_path / "data.bin", content)
    corpus = Corpus(TextConfig(path=str(tmp_path)))
    with pytest.raises(DataError, match=rf"byte {offset} \({byte}") as caught:
        whole(corpus)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("path", "suffixes", "message"),
    [
        ("absent.txt", [], r"data\.path: .*absent\.txt does not exist"),
        ("folder", [], r"data\.path=.*folder is a folder without any file"),
        ("empty.txt", [], r"data\.path=.*empty\.txt holds no text"),
        ("", [".md"], r"\.md \(data\.suffixes\)\. It has .*empty\.txt"),
    ],
)
def test_paths_that_hold_no_text_are_refused(tmp_path: Path, path: str, suffixes: list[str], message: str) -> None:
    (tmp_path / "folder").mkdir()
    write(tmp_path / "empty.txt", "")
    with pytest.raises(DataError, match=message):
        Corpus(TextConfig(path=str(tmp_path / path), suffixes=suffixes))


def test_a_file_that_may_not_be_read_or_shrinks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "a.txt", "0123456789")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    corpus = Corpus(TextConfig(path=str(file)))
    file.write_bytes(b"0123")
    with pytest.raises(DataError, match="cut to 4 bytes"):
        whole(corpus)
    monkeypatch.setattr(corpus_module, "open", refuse, raising=False)
    with pytest.raises(DataError, match=r"a\.txt: Permission denied"):
        whole(corpus)


@settings(max_examples=50, deadline=None)
@example(text="aaaa\naa", size=1, edges=[5])  # a line end at the start of a part is seen
@given(text=st.text("ab \n", max_size=200), size=st.integers(1, 20), edges=st.lists(st.integers(0, 200), max_size=6))
def test_pieces_depend_on_the_text_alone_and_end_at_line_ends(text: str, size: int, edges: list[int]) -> None:
    pieces = list(cut([text], size))
    assert "".join(pieces) == text
    assert all(size <= len(piece) <= 2 * size for piece in pieces[:-1])
    edges = sorted(min(edge, len(text)) for edge in edges)
    parts = [text[start:stop] for start, stop in zip([0, *edges], [*edges, len(text)], strict=True)]
    assert list(cut(parts, size)) == pieces
    assert all(piece.endswith("\n") for piece in cut(["a line of text\n" * 40], 20))


@pytest.mark.parametrize("prepared", [True, False])
def test_a_file_that_changes_while_being_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepared: bool
) -> None:
    """The tokenizer was made of the text as it was; nothing of the new one may be mixed in."""
    file = write(tmp_path / "a.txt", "ab" * 50)
    original = CharTokenizer.of

    def changing(texts: Any) -> CharTokenizer:
        made = original(texts)
        file.write_text("ba" * 50)
        os.utime(file, ns=(1, 1))
        return made

    monkeypatch.setattr(CharTokenizer, "of", changing)
    with pytest.raises(DataError, match=r"a\.txt changed while being read"):
        if prepared:
            prepare(TextConfig(path=str(file)), tmp_path / "tokens", progress=False)
        open_text(TextConfig(path=str(file)), Sizes(context=4))
    assert not (tmp_path / "tokens").exists()


def test_links_that_are_not_followed_are_told(tmp_path: Path) -> None:
    write(tmp_path / "books/a.txt", "text a")
    write(tmp_path / "elsewhere/b.txt", "text b")
    targets = {"linked": "elsewhere", "gone.txt": "nowhere.txt", "c.txt": "elsewhere/b.txt", ".hidden": "elsewhere"}
    for name, target in targets.items():
        (tmp_path / "books" / name).symlink_to(tmp_path / target)
    corpus = Corpus(TextConfig(path=str(tmp_path / "books"), separator="|"))
    assert whole(corpus) == "text a|text b"  # a linked file is read
    (notice,) = corpus.notices
    assert "2 linked folder(s) or broken link(s)" in notice and "gone.txt" in notice and "books/linked" in notice
    with pytest.raises(DataError, match=r"without any file.* 2 linked folder\(s\)"):
        Corpus(TextConfig(path=str(tmp_path / "books"), suffixes=[".md"]))


def test_rows_that_are_read_as_text_are_told(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", '{"text": "one"}\n' * 20)
    (notice,) = open_text(TextConfig(path=str(file)), Sizes(context=4)).description["notices"]
    assert "JSON syntax" in notice and f"data=documents 'data.sources=[{file}]'" in notice
    write(tmp_path / "plain.txt", "{braces}\n")
    renamed = write(tmp_path / "renamed.txt", b"\xef\xbb\xbf" + file.read_bytes())
    write(tmp_path / "all.json", json.dumps([{"text": "one"}] * 20))
    (notice,), (alone,) = (Corpus(TextConfig(path=str(path))).notices for path in (tmp_path, renamed))
    assert all(name in notice for name in ("rows.jsonl", "renamed.txt", "all.json")) and "plain.txt" not in notice
    assert "name such files .jsonl" in alone and "data.sources=" not in alone  # which would read it as one text
    renamed.unlink()
    assert not Corpus(TextConfig(path=str(tmp_path), suffixes=[".txt"])).notices


@pytest.mark.parametrize("ending", ["", "\r\n"])
def test_a_text_without_line_ends_or_with_those_of_windows_is_read_whole(tmp_path: Path, ending: str) -> None:
    text = ("word " * 60_000 + ending) * 2
    dataset = open_text(TextConfig(path=str(write(tmp_path / "a.txt", text)), tokenizer="bpe"), Sizes(context=4))
    assert dataset.tokenizer is not None
    assert "".join(dataset.tokenizer.decode(ids.tolist()) for ids in dataset._splits.values()) == text


def test_samples_are_spread_over_the_text_and_cover_a_short_one(tmp_path: Path) -> None:
    text = "".join(f"é{i:05d}\n" for i in range(5000))
    corpus = Corpus(TextConfig(path=str(write(tmp_path / "a.txt", text))))
    assert "".join(corpus.samples(1 << 20)) == text
    samples = list(corpus.samples(80))
    assert len(samples) in (16, 17) and all(sample in text for sample in samples)
    places = [text.index(sample) / len(text) for sample in samples[:16]]
    assert max(abs(place - i / 16) for i, place in enumerate(places)) < 0.001
