"""Text and token files: what is read, in which order, how it is prepared, and what is refused."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ttrain.cli import main
from ttrain.core.errors import DataError
from ttrain.data import corpus as corpus_module
from ttrain.data import tokens as tokens_module
from ttrain.data.batches import Sizes
from ttrain.data.corpus import Corpus, cut
from ttrain.data.library_tokenizer import read_tokenizer
from ttrain.data.settings import TextConfig, TokensConfig
from ttrain.data.text import open_text
from ttrain.data.tokenizer import CharTokenizer
from ttrain.data.tokens import open_tokens
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


# token files


SIZES = Sizes(context=16)
TEXT = "".join(f"line {i} of the text, with an é and a 中\n" for i in range(3000))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.txt"
    file.write_text(TEXT, encoding="utf-8")
    return file


def raw_file(path: Path, ids: Any, dtype: str = "<u2") -> Path:
    path.write_bytes(np.asarray(ids).astype(dtype).tobytes())
    return path


def config_of(path: Path, **options: Any) -> TokensConfig:
    return TokensConfig(path=str(path), **options)


def refused(message: str, path: Path, **options: Any) -> None:
    with pytest.raises(DataError, match=message):
        open_tokens(config_of(path, **options), SIZES)


@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe"])
def test_prepared_tokens_train_as_the_text_does(text: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "READ_BYTES", 1000)
    config = TextConfig(path=str(text), tokenizer=tokenizer, vocabulary_size=300)
    folder = text.parent / "tokens"
    header = prepare(config, folder, progress=False)
    monkeypatch.undo()
    direct, prepared = open_text(config, SIZES), open_tokens(config_of(folder), SIZES)
    assert prepared.vocabulary == direct.vocabulary == header["vocabulary"]
    assert prepared.tokenizer is not None and direct.tokenizer is not None
    assert prepared.tokenizer.hash == direct.tokenizer.hash == read_tokenizer(folder / "tokenizer.json").hash
    assert prepared.description["tokens"] == direct.description["tokens"]
    assert prepared.description["corpus"]["sha256"] == direct.description["sha256"]
    assert prepared.baseline() == direct.baseline()
    for split in ("train", "val"):
        for index in range(3):
            expected, given = direct.batch(split, 1, index * 4, 4), prepared.batch(split, 1, index * 4, 4)
            assert all((expected[name] == given[name]).all() for name in expected)
    ids = np.fromfile(folder / "train.bin", header["dtype"])
    assert prepared.tokenizer.decode(ids) == TEXT.encode()[: direct.description["bytes"]["train"]].decode()


def test_preparing_holds_little_of_the_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And shows its progress."""
    file = tmp_path / "long.txt"
    file.write_text("0123456789 abcdefghijk\n" * 500_000, encoding="ascii")
    tracemalloc.start()
    header = prepare(TextConfig(path=str(file)), tmp_path / "tokens")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert header["splits"]["train"]["tokens"] == 10_350_000
    assert peak < 14_000_000  # the ids alone are 23 MB; a table of all of Unicode takes 4.5
    shown = capsys.readouterr().err
    assert "learning the tokenizer: 100%" in shown and "writing tokens: 100%" in shown


def test_an_unfinished_folder_never_appears(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text.write_bytes(TEXT.encode() + b"\xff")
    with pytest.raises(DataError, match="0xff is not UTF-8"):
        prepare(TextConfig(path=str(text), tokenizer="byte"), text.parent / "tokens", progress=False)
    text.write_text(TEXT, encoding="utf-8")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare(TextConfig(path=str(text)), text.parent / "tokens", progress=False)
    assert [path.name for path in text.parent.iterdir()] == ["corpus.txt"]


def test_a_destination_or_text_that_can_not_be_used(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    folder = text.parent / "tokens"
    for place, content, fsync, message in (
        (text.parent, TEXT, os.fsync, "exists already"),
        (text / "inside", TEXT, os.fsync, r"cannot write .*Not a directory"),
        (folder, TEXT, full, r"cannot write .*No space left on device"),
        (folder, "abc", os.fsync, r"val split .* has no tokens.*data\.held_out"),
    ):
        text.write_text(content, encoding="utf-8")
        monkeypatch.setattr("os.fsync", fsync)
        with pytest.raises(DataError, match=message):
            prepare(TextConfig(path=str(text)), place, progress=False)
    assert [path.name for path in text.parent.iterdir()] == ["corpus.txt"]


@pytest.mark.parametrize(("dtype", "stored"), [("uint16", "<u2"), ("uint32", "<u4")])
def test_raw_files_need_their_type_and_vocabulary_and_may_have_splits(tmp_path: Path, dtype: str, stored: str) -> None:
    file = raw_file(tmp_path / "train.bin", np.arange(1000), stored)
    options: dict[str, Any] = {"dtype": dtype, "vocabulary": 1000}
    for path in (file, tmp_path):
        data = open_tokens(config_of(path, held_out=0.25, **options), SIZES)
        assert data.description["tokens"] == {"train": 750, "val": 250}
        assert data.batch("val", 0, 0, 3)["tokens"].min() >= 750
        assert data.vocabulary == 1000 and data.tokenizer is None
    for missing in options:
        refused(r"data\.dtype=uint16\|uint32 and data\.vocabulary", file, **{missing: options[missing]})
    raw_file(tmp_path / "val.bin", np.arange(400, 440), stored)
    data = open_tokens(config_of(tmp_path, held_out=0.25, **options), SIZES)
    assert data.description["tokens"] == {"train": 1000, "val": 40}
    assert data.batch("val", 0, 0, 2)["tokens"].min() >= 400


def test_a_raw_file_may_name_its_tokenizer(prepared: Path) -> None:
    file, options = prepared / "train.bin", {"dtype": "uint16", "tokenizer": str(prepared / "tokenizer.json")}
    data = open_tokens(config_of(file, vocabulary=100, **options), SIZES)
    tokenizer = read_tokenizer(prepared / "tokenizer.json")
    assert data.vocabulary == 100  # a padded vocabulary is fine
    assert data.tokenizer is not None and data.tokenizer.hash == tokenizer.hash
    refused(rf"has {tokenizer.vocabulary} ids, more than data\.vocabulary=5", file, vocabulary=5, **options)


def test_an_id_outside_the_vocabulary_is_named_with_its_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is too long to be read at the start, so it is read batch by batch."""
    ids = np.arange(200) % 50
    ids[60:] = 60
    config = config_of(raw_file(tmp_path / "all.bin", ids), dtype="uint16", vocabulary=50)
    with pytest.raises(DataError, match=r"token 60 of .*all\.bin has id 60, but the vocabulary has 50 ids"):
        open_tokens(config, SIZES)
    monkeypatch.setattr(tokens_module, "VERIFIED_BYTES", 100)
    data = open_tokens(config, SIZES)
    assert data.description["sha256"] == {"train": None}
    with pytest.raises(DataError, match=r"of the train split has id 60"):
        for index in range(20):
            data.batch("train", 0, index * 8, 8)
    config.verify = True
    with pytest.raises(DataError, match=r"token 60 of"):
        open_tokens(config, SIZES)


def test_a_file_far_larger_than_memory_opens_and_gives_batches(tmp_path: Path) -> None:
    file = tmp_path / "huge.bin"
    with open(file, "wb") as stream:
        stream.truncate(1 << 40)  # sparse: takes no room
    for order in ("random", "epoch"):
        data = open_tokens(config_of(file, dtype="uint16", vocabulary=10, order=order), SIZES)
        assert sum(data.description["tokens"].values()) == 1 << 39
        assert data.batch("train", 0, 10**7 * 8, 8)["tokens"].shape == (8, 16)
        assert data.batch("val", 0, 10**7 * 8, 8)["tokens"].sum() == 0


@pytest.fixture
def prepared(text: Path) -> Path:
    folder = text.parent / "tokens"
    prepare(TextConfig(path=str(text)), folder, progress=False)
    return folder


@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
def test_changed_files_are_refused(prepared: Path, name: str) -> None:
    content = bytearray((prepared / name).read_bytes())
    content[10] ^= 1
    for changed, message in (
        (content, "has changed since it was prepared"),
        (content[:-2], r"has \d+ tokens, but tokens\.json says \d+"),
        (content[:-1], "not a multiple of the 2 of uint16"),
        (b"", "is empty"),
    ):
        (prepared / name).write_bytes(changed)
        refused(f"{name}.*{message}", prepared)
    (prepared / name).unlink()
    refused(rf"cannot read .*{name}", prepared)


def test_a_damaged_header_is_refused(prepared: Path) -> None:
    header = json.loads((prepared / "tokens.json").read_text())
    other = [json.dumps({**header, "format": "another version"}), json.dumps({**header, "vocabulary": "9"})]
    for content in ("", "[]", "{}", "nonsense", '{"format": "other"}', '{"splits": {"train": 3}}', *other):
        (prepared / "tokens.json").write_text(content)
        refused(r"tokens\.json .*Prepare the tokens again", prepared)


def test_a_config_or_tokenizer_that_contradicts_the_folder_is_refused(prepared: Path) -> None:
    vocabulary = json.loads((prepared / "tokens.json").read_text())["vocabulary"]
    prepared = prepared.rename(prepared.parent / "elsewhere")  # it may be moved
    assert open_tokens(config_of(prepared, dtype="uint16", vocabulary=vocabulary), SIZES)
    refused(r"data\.dtype=uint32, but .* says uint16", prepared, dtype="uint32")
    refused(rf"data\.vocabulary=9, but .* says {vocabulary}", prepared, vocabulary=9)
    described = json.loads((prepared / "tokenizer.json").read_text())
    del described["model"]["vocab"]["x"]
    (prepared / "tokenizer.json").write_text(json.dumps(described))
    refused("not the one that the tokens were made with", prepared)


def test_paths_without_tokens_are_refused(tmp_path: Path) -> None:
    for path, message in (
        (None, r"data=tokens needs data\.path"),
        (str(tmp_path / "absent"), "does not exist"),
        (str(tmp_path), r"no tokens\.json and no train\.bin"),
    ):
        with pytest.raises(DataError, match=message):
            open_tokens(TokensConfig(path=path), SIZES)


def test_text_that_does_not_fit_in_memory_is_sent_to_prepare(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    with pytest.raises(DataError, match=r"task=prepare .* data=tokens"):
        open_text(TextConfig(path=str(text)), SIZES)
    assert open_text(TextConfig(path=str(text), max_bytes=250), Sizes(context=4)).description["bytes"]["train"] == 225


def test_the_command_that_trains_on_prepared_files_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The held-out part of the text is shorter than a default context."""
    (tmp_path / "book.txt").write_text("some words " * 100)
    folder = tmp_path / "tokens"
    text = [f"data.path={tmp_path}/book.txt", "data.tokenizer=byte", "data.held_out=0.02"]
    assert main(["task=prepare", *text, f"prepare.dir={folder}"]) == 0
    told = capsys.readouterr().out.splitlines()[-1]
    assert told == f"train on it: python -m ttrain data=tokens data.path={folder} model.context=21"
    quiet = ["device=cpu", "engine=dynamic", "train.steps=1", "train.batch_size=2", "logger=jsonl"]
    assert main(["data=tokens", f"data.path={folder}", *quiet, f"run.dir={tmp_path}/run"]) == 2
    advice = "Prepare the tokens anew with a larger data.held_out, or set model.context to at most 21."
    assert advice in capsys.readouterr().err
    assert main([*told.partition("ttrain ")[2].split(), *quiet, f"run.dir={tmp_path}/run"]) == 0
