"""Documents: reading, templates, splits, order, sequences, the cache, and what is wrong with files that users have."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.conftest import config_of, read, rows
from ttrain.core.errors import DataError
from ttrain.data import sources as sources_module
from ttrain.data.batches import Sizes, unigram_entropy
from ttrain.data.chat.messages import Template
from ttrain.data.documents import DocumentDataset, open_documents
from ttrain.data.formats import compressed
from ttrain.data.library_tokenizer import LibraryTokenizer, train_bpe
from ttrain.data.settings import TokensConfig
from ttrain.data.sources import DocumentReader, find_sources
from ttrain.data.tokenizer import Tokenizer
from ttrain.data.tokens import open_tokens
from ttrain.tasks.prepare import prepare

END = 256  # what follows the 256 ids of the byte tokenizer


@pytest.fixture(autouse=True)
def cache(inside: Path) -> Path:
    return inside / "cache" / "ttrain" / "documents"


def texts(name: str, *values: str) -> str:
    return rows(name, *({"text": value} for value in values))


def many(name: str, count: int, start: str = "") -> str:
    generator = np.random.default_rng(len(name))
    return texts(name, *(f"{start}{i}:" + "x" * int(generator.integers(1, 30)) for i in range(count)))


def opened(*sources: str, context: int = 8, **options: Any) -> DocumentDataset:
    return open_documents(config_of(*sources, **options), Sizes(context=context))


def refused(*sources: str, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        opened(*sources, **options)
    assert caught.value.exit_code == 2
    return str(caught.value)


def stored(dataset: DocumentDataset, split: str) -> list[list[int]]:
    """The documents of a split as ids, cut after every end token."""
    found: list[list[int]] = [[]]
    for token in dataset._splits[split].tolist():
        found[-1].append(token)
        if token == END:
            found.append([])
    assert found.pop() == []
    return found


# reading


def test_sources_take_turns_and_a_folder_is_one_read_in_order_of_names() -> None:
    a, b, c = texts("a.jsonl", "a0", "a1", "a2", "a3"), texts("b.jsonl", "b0"), texts("c.jsonl", "c0", "c1")
    assert read(a, b, c) == ["a0", "b0", "c0", "a1", "c1", "a2", "a3"]
    assert read(a, b, c, max_documents=4) == ["a0", "b0", "c0", "a1"]
    Path("books/inner").mkdir(parents=True)
    for name in ("b.txt", "a.txt", "inner/c.txt", "left.md", ".hidden.txt"):
        Path("books", name).write_text(name)
    texts("books/d.jsonl", "row one", "row two")
    assert read("books") == ["a.txt", "b.txt", "row one", "row two", "inner/c.txt"]
    assert read("books", suffixes=[".md"]) == ["left.md"]


def test_documents_in_lines() -> None:
    """With delimiters, byte-order marks and line ends of Windows."""
    Path("c.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\r\n{"text": "two"}')
    Path("d.txt").write_bytes(b"\xef\xbb\xbfthree")
    assert read("c.jsonl", "d.txt") == ["one", "three", "two"]
    Path("a.txt").write_bytes(b"one\r\nmore\r\n\r\n\r\n two\n\nthree\n")
    assert read("a.txt", delimiter="") == ["one\r\nmore", " two", "three\n"]
    Path("b.txt").write_text("one\n\nmore\n<|end|>\ntwo, not <|end|> here\n<|end|>\n")
    assert read("b.txt", delimiter="<|end|>") == ["one\n\nmore", "two, not <|end|> here"]
    assert read("b.txt") == [Path("b.txt").read_text()]


CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hello {role}"},
    {"role": "assistant", "content": "Hi!"},
]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("plain", "System: Be kind.\nUser: Hello {role}\nAssistant: Hi!"),
        (r"[{role}] {content}\n{{}}\n", "[system] Be kind.\n{}\n[user] Hello {role}\n{}\n[assistant] Hi!\n{}"),
    ],
)
def test_chat_rows(template: str, expected: str) -> None:
    rows("a.jsonl", {"messages": CHAT}, CHAT, {"text": None, "messages": CHAT}, {"talk": 1, "text": "plain"})
    assert read("a.jsonl", template=template) == [expected, expected, expected, "plain"]
    rows("b.jsonl", {"talk": CHAT}, {"body": "words"})
    assert read("b.jsonl", template=template, chat_key="talk", text_key="body") == [expected, "words"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        *((given, r"has \{.*not \{role\}") for given in ("{content.a}", "{content!r}", "{content:>9}", "{0}{content}")),
        ("planar", "neither plain nor"),
        ("{role}", "no {content}"),
        ("{content", "a brace"),
    ],
)
def test_a_template_that_could_do_more_or_less_than_fill_in(template: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Template(template)


# what is wrong with files


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"text": "x"', "a.jsonl:3: not JSON: Expecting ',' delimiter at column"),
        ('{"txt": "x", "id": 1}', "a.jsonl:3: has neither 'text' (data.text_key) nor 'messages' (data.chat_key); its"),
        ('{"text": 5}', "a.jsonl:3: 'text' is a number, not text"),
        ('{"text": ["x"], "messages": null}', "a.jsonl:3: 'text' is a list, not text"),
        ('{"messages": null}', "a.jsonl:3: 'messages' is null, not a list of messages"),
        ('[{"text": "x"}, {"text": "y"}]', "a.jsonl:3: is a list of rows, not one conversation; write each row"),
        ("null", "a.jsonl:3: is null, not an object"),
        ('{"messages": "x"}', "a.jsonl:3: 'messages' is a text, not a list"),
        ('{"messages": [{"from": "human", "value": "x"}]}', "message 1 is not an object with role and content"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "a.jsonl:3: message 1 has the role 'robot'; known are"),
        ('{"messages": [{"role": "user", "content": null}]}', "a.jsonl:3: message 1 has as content null, not text"),
        ('{"messages": [{"role": null, "content": "x"}]}', "a.jsonl:3: message 1 has the role null; known are"),
        (r'{"text": "half \ud83d"}', "a.jsonl:3: has '\\ud83d', half of a surrogate pair"),
        ("[" * 100_000, "a.jsonl:3: not JSON that can be read"),
    ],
)  # fmt: skip
def test_a_bad_row_is_named_or_skipped(row: str, message: str) -> None:
    Path("a.jsonl").write_text('{"text": "one of two"}\n{"text": "another one"}\n' + row + "\n")
    assert message in refused("a.jsonl")
    data = opened("a.jsonl", bad_rows="skip")
    assert data.description["bad_rows"] == 1 and message in data.description["first_bad_row"]
    assert sum(data.description["documents"].values()) == 2


def test_bytes_that_are_no_text_name_the_line() -> None:
    Path("a.jsonl").write_bytes(b'{"text": "one"}\n{"text": "caf\xe9"}\n')
    assert "a.jsonl:2 is not UTF-8 text: byte 14 of the line (0xe9). Convert it" in refused("a.jsonl")
    Path("b.txt").write_bytes("text".encode("utf-16"))
    assert "it begins as UTF-16 does. Convert it" in refused("b.txt")
    Path("c.txt").write_bytes(b"one\ntwo\0\n")
    assert "c.txt:2 is not UTF-8 text: byte 4 of the line (0x00)" in refused("c.txt")


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl does not exist"),
        (["a.jsonl", "empty.jsonl"], "empty.jsonl is empty"),
        (["blank.jsonl"], "only blank documents"),
        (["nothing"], "without any file that ends in .jsonl or .txt or .parquet or .arrow (data.suffixes)"),
        (["others"], "others is a folder without any file"),
        (["table.csv"], "table.csv is a table; convert it to .jsonl"),
        (["a.jsonl", "a.jsonl"], "given twice"),
        ([".", "a.jsonl"], "given twice, by . and a.jsonl"),
        (["alone.jsonl"], "one document and needs at least two"),
        (["same.jsonl"], "3 documents, all equal, and needs"),
        (["short.jsonl"], "but model.context=8 needs at least 8. "),
        (["short.jsonl"], "at most"),
    ],
)
def test_sources_that_can_not_be_used(sources: list[str], message: str) -> None:
    given = {"a": ["one", "two"], "alone": ["alone"], "same": ["same"] * 3, "short": ["012345678", "ab"], "empty": []}
    for name, values in given.items():
        texts(f"{name}.jsonl", *values)
    Path("blank.jsonl").write_text("\n\n")
    for name in ("nothing", "others"):
        Path(name).mkdir()
    for name in ("others/a.md", "table.csv"):
        Path(name).touch()
    assert message in refused(*sources, suffixes=["a.jsonl"] if "." in sources else config_of().suffixes)


def test_a_document_too_long_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_module, "LONGEST_DOCUMENT", 100)
    Path("a.txt").write_text("twenty characters..\n" * 10)
    assert "a.txt:1: a document of more than" in refused("a.txt")
    texts("b.jsonl", "x" * 200, "y")
    assert "b.jsonl:1: a line of more than" in refused("b.jsonl")


# tokens and splits


def given(source: str) -> list[str]:
    return [json.loads(line)["text"] for line in Path(source).read_text().splitlines()]


def test_every_document_is_in_one_split_and_ends_with_the_token() -> None:
    source = many("a.jsonl", 200)
    data = opened(source, held_out=0.25)
    train, val = stored(data, "train"), stored(data, "val")
    decoded = [bytes(ids[:-1]).decode() for ids in [*train, *val]]
    assert sorted(decoded) == sorted(given(source)) and len(val) == 50
    trained = decoded[: len(train)]
    assert [text for text in given(source) if text in trained] == trained  # in reading order
    assert data.description["documents"] == {"train": 150, "val": 50}
    assert data.vocabulary == 257 and data.tokenizer is not None and data.tokenizer.vocabulary == 257
    ended = opened(texts("b.jsonl", "one<|endoftext|>", "two", "three"), context=2)  # its end token is not doubled
    assert sorted(map(len, [*stored(ended, "train"), *stored(ended, "val")])) == [4, 4, 6]


def test_equal_documents_fall_in_the_same_split() -> None:
    words = [f"document {i % 10}" for i in range(100)]
    data = opened(texts("a.jsonl", *words[:50]), texts("b.jsonl", *words[50:]))
    train, val = ({tuple(ids) for ids in stored(data, split)} for split in ("train", "val"))
    assert not train & val and len(train) == 9 and len(val) == 1
    other = opened("b.jsonl", "a.jsonl")  # whatever is read in between
    assert sorted(stored(data, "val")) == sorted(stored(other, "val"))


def saved(tokenizer: Tokenizer) -> str:
    Path("tokenizer.json").write_text(tokenizer.to_json())
    return "tokenizer.json"


def test_which_token_ends_a_document() -> None:
    source = many("a.jsonl", 30)
    base = train_bpe(["some words"], 260)
    both = LibraryTokenizer(base.to_json()).with_token("</s>").with_token("<eos>")
    for kind, named, config, found in (
        (base, None, None, ("<|endoftext|>", 260, True)),
        (LibraryTokenizer(base.to_json()).with_token("</s>"), None, None, ("</s>", 260, False)),
        (both, None, None, "has </s> and <eos>. Say which"),
        (both, "<eos>", None, ("<eos>", 261, False)),
        (both, "<eot>", None, "data.end_token=<eot>"),
        (both, None, {"eos_token": {"content": "<eos>"}}, ("<eos>", 261, False)),
        (both, None, {"eos_token": "<gone>"}, "tokenizer_config.json: eos_token=<gone>"),
        (both, None, "{", "tokenizer_config.json is not JSON that can be read"),
        (None, "<|stop|>", None, ("<|stop|>", 256, True)),
    ):
        if config is not None:
            Path("tokenizer_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        options = {"tokenizer": "byte" if kind is None else saved(kind), "end_token": named}
        if isinstance(found, str):
            assert found in refused(source, **options)
        else:
            assert opened(source, **options).description["end_token"] == dict(zip(("text", "id", "added"), found))


# the stream and its sequences


def test_blocks_are_the_stream_as_read_cut_without_gap_or_overlap() -> None:
    data = opened(many("a.jsonl", 40, "a"), many("b.jsonl", 25, "b"), order="sequential", context=16)
    expected = np.array([token for ids in stored(data, "train") for token in ids] * 3)
    firsts = range(0, len(expected) // 64 * 4, 4)
    found = np.concatenate([data.batch("train", 7, first, 4)["tokens"].ravel() for first in firsts])
    assert (found == expected[: len(found)]).all() and len(found) > 2 * len(expected) / 3
    batch = data.batch("train", 7, 3 * 4, 4)
    assert (batch["targets"][:, :-1] == batch["tokens"][:, 1:]).all() and (batch["targets"][:, -1] == -1).all()
    assert batch["tokens"].dtype == batch["targets"].dtype == np.int64 and batch["tokens"].shape == (4, 16)
    limited = opened("a.jsonl", limit=3)
    assert (limited.batch("train", 1, 0, 3)["tokens"] == limited.batch("train", 1, 4 * 3, 3)["tokens"]).all()


@pytest.mark.parametrize("buffer", [None, 7, 1000])
def test_a_pass_in_shuffled_order_holds_every_document_once(buffer: int | None) -> None:
    """Against the documents as read: each epoch is a permutation, and within groups of neighbours."""
    data = opened(many("a.jsonl", 60), order="shuffled", shuffle_buffer=buffer, context=8)
    documents, length, stream = stored(data, "train"), len(data._splits["train"]), data._streams["train"]
    orders = []
    for number in range(3):
        ids = data._splits["train"][stream.read(11, number * length, length)]
        parts = np.split(ids, np.flatnonzero(ids == END)[:-1] + 1)
        order = [documents.index(part.tolist()) for part in parts]
        size = min(buffer or len(documents), len(documents))
        assert [index // size for index in order] == [index // size for index in range(len(documents))]
        assert sorted(order) == list(range(len(documents)))
        orders.append(order)
    assert orders[0] != orders[1] != orders[2] and orders[0] != sorted(orders[0])
    assert stream.read(12, 0, length).tolist() != stream.read(11, 0, length).tolist()


@pytest.mark.parametrize("order", ["sequential", "shuffled"])
@pytest.mark.parametrize("split", ["train", "val"])
def test_documents_apart_have_their_own_positions_and_targets(order: str, split: str) -> None:
    """Against a walk over the tokens: a document ends with its end token, and the first token of a row begins anew."""
    source = texts("a.jsonl", *(letter * count for count, letter in enumerate("abcdefghijklmnop")))
    options: dict[str, Any] = {"order": order, "held_out": 0.4, "context": 11}
    batch = opened(source, attention="document", **options).batch(split, 3, 5, 9)
    assert (batch["tokens"] == opened(source, **options).batch(split, 3, 5, 9)["tokens"]).all()
    for tokens, targets, positions in zip(*(batch[name] for name in ("tokens", "targets", "positions")), strict=True):
        place = 0
        for column, token in enumerate(tokens):
            last = token == END or column == 10
            assert (positions[column], targets[column]) == (place, -1 if last else tokens[column + 1])
            place = 0 if last else place + 1


def documents_of(batch: dict[str, np.ndarray]) -> list[list[int]]:
    """Return the tokens of each document in the sequences, by position; other tokens are fill."""
    starts = np.flatnonzero(batch["positions"].ravel() == 0)[1:]
    return [ids.tolist() for ids in np.split(batch["tokens"].ravel(), starts) if ids.any()]


SCHEDULES: dict[str, list[tuple[int, int, int]]] = {  # sequences, length, seed of the attempt
    "growing": [(3, 8, 1), (5, 16, 1), (60, 24, 1)],
    "shrinking": [(7, 24, 1), (11, 16, 1), (90, 8, 1)],
    "at the end of an epoch": [(100, 8, 1), (1, 16, 1), (1, 24, 1), (1, 16, 1), (99, 24, 1)],
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("rule", "order"), [("cut", "sequential"), ("skip", "shuffled")])
def test_whole_documents_are_read_once_a_pass_whatever_the_lengths(rule: str, order: str, schedule: str) -> None:
    source = texts("a.jsonl", *(f"{number:03d}" + "x" * (number * 7 % 5) for number in range(64)))  # all fit
    data = opened(source, context=24, order=order, long_documents=rule, attention="document")
    given, seen = sorted(map(tuple, stored(data, "train"))), []
    number, position = 0, 0
    for sequences, length, seed in SCHEDULES[schedule]:
        view = data.at(length, number, position)
        for first in range(number, number + sequences, 2):  # two ranks
            for rank in range(min(2, number + sequences - first)):
                seen += documents_of(view.batch("train", seed, first + rank, 1))
        number += sequences
        position = view.position(seed, number)
    epochs = [seen[start : start + len(given)] for start in range(0, len(seen), len(given))]
    assert len(epochs) > 2 and all(sorted(map(tuple, each)) == given for each in epochs[:-1])
    assert (epochs[0] == epochs[1]) == (order == "sequential")
    rest = [tuple(ids) for ids in epochs[-1]]
    assert len(set(rest)) == len(rest) and position == (len(epochs) - 1) * len(data._splits["train"]) + sum(
        map(len, rest)
    )


def test_held_out_batches_are_fixed_and_cover_the_split() -> None:
    data = opened(many("a.jsonl", 200), held_out=0.3, context=8)
    count = data.val_samples
    assert count == len(data._splits["val"]) // 8
    found = np.concatenate([data.batch("val", index, index, 1)["tokens"] for index in range(count)])
    assert sorted(found.tolist()) == sorted(data._splits["val"][: count * 8].reshape(-1, 8).tolist())
    name, value = data.baseline()  # of the targets; the last position of a sequence has none
    assert name == "unigram entropy" and value == unigram_entropy([found[:, 1:]], 257) and 0 < value < np.log(257)


# the cache and task=prepare


def test_the_cache_is_used_again_until_a_file_or_a_key_changes(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = many("a.jsonl", 30)
    first = opened(source).description["sha256"]
    with monkeypatch.context() as patch:
        patch.setattr(DocumentReader, "documents", None)  # the files are not read again
        again = opened(source, order="sequential", shuffle_buffer=9, limit=5, context=4)
    assert again.description["sha256"] == first and len(list(cache.iterdir())) == 1
    opened(source, held_out=0.5)
    assert len(list(cache.iterdir())) == 2
    os.utime(source, ns=(1, 1))
    assert opened(source).description["sha256"] == first and len(list(cache.iterdir())) == 3
    Path(source).write_text(Path(source).read_text() + '{"text": "one more document"}\n')
    assert opened(source).description["sha256"] != first
    opened(source, cache="elsewhere")
    assert len(list(Path("elsewhere").iterdir())) == 1 and len(list(cache.iterdir())) == 4
    assert not [path for path in cache.iterdir() if path.name.startswith(".")]


def test_a_cache_that_can_not_be_written_is_told_with_the_key(cache: Path) -> None:
    """A file stands where a folder should be: this fails for every user."""
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.write_text("")
    message = refused(many("a.jsonl", 30))
    assert "cannot write" in message and "data.cache=<folder>" in message
    assert opened("a.jsonl", cache="free").description["documents"] == {"train": 27, "val": 3}


def test_what_is_left_out_is_told() -> None:
    Path("docs/sub").mkdir(parents=True)
    many("docs/a.jsonl", 30)
    Path("docs/a.jsonl").write_text(Path("docs/a.jsonl").read_text() + '{"text": null}\n{"text": ""}\n{"txt": 1}\n')
    Path("docs/b.md").write_text("not read")
    Path("docs/linked").symlink_to("sub")
    for _ in range(2):  # the second time from the cache
        data = opened("docs", bad_rows="skip")
        assert data.description["bad_rows"] == 2 and sum(data.description["documents"].values()) == 30
        bad, blank, links, others = data.description["notices"]
        assert "2 bad row(s)" in bad and "docs/a.jsonl:31: 'text' is null" in bad
        assert "1 blank document(s)" in blank and "1 linked folder(s)" in links and "docs/linked" in links
        assert "1 file(s) of docs are not read" in others and "docs/b.md" in others and "data.suffixes" in others
    assert "notices" not in opened("docs/a.jsonl", max_documents=9).description


def test_why_there_is_one_document_is_told() -> None:
    Path("rows.txt").write_bytes(Path(many("a.jsonl", 30)).read_bytes())
    Path("plain.txt").write_text("{braces} [and brackets] are no JSON\n" * 3)
    alone, plain, row = (refused(name) for name in ("rows.txt", "plain.txt", texts("one.jsonl", "alone")))
    assert all("one document and needs at least two" in told for told in (alone, plain, row))
    assert "name such files .jsonl" in alone and "data.delimiter splits a text file" in plain
    assert "JSON" not in plain and "data.delimiter" not in row


def test_a_file_that_may_not_be_looked_at_or_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = find_sources(config_of(many("a.jsonl", 30)))

    def denied(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(compressed, "open", denied, raising=False)
    assert "cannot read a.jsonl: Permission denied" in refused("a.jsonl")
    monkeypatch.setattr(os, "stat", denied)
    with pytest.raises(DataError, match=r"data\.sources: cannot read a\.jsonl: Permission denied"):
        source.stamps()


@pytest.mark.parametrize("name", ["train.bin", "val.ends", "tokens.json"])
def test_a_damaged_cache_is_named_and_what_a_killed_process_left_removed(cache: Path, name: str) -> None:
    source = many("a.jsonl", 30)
    opened(source)
    (folder,) = cache.iterdir()
    raw = bytearray((folder / name).read_bytes())
    raw[len(raw) // 2] ^= 1
    (folder / name).write_bytes(raw)
    assert f"remove {folder}" in refused(source)
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = folder.rename(cache / f".{folder.name}.{platform.node()}.{ended.pid}.tmp")
    foreign = left.with_name(f".{folder.name}.{platform.node()}.{os.getppid()}.tmp")  # of a process that is at work
    foreign.mkdir()
    opened(source)
    assert folder.is_dir() and not left.exists() and foreign.exists()


def test_a_source_that_changes_while_it_is_read(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    source = many("a.jsonl", 30)
    original = DocumentReader.in_turn

    def appended(self: DocumentReader, *given: Any) -> Any:
        with open(source, "a") as file:
            file.write('{"text": "late"}\n')
        return original(self, *given)

    monkeypatch.setattr(DocumentReader, "in_turn", appended)
    assert "changed while being read" in refused(source)
    assert not list(cache.iterdir())


def test_prepared_documents_keep_their_order() -> None:
    source = many("a.jsonl", 60)
    header = prepare(config_of(source, order="shuffled"), "tokens", progress=False)
    direct = opened(source, order="sequential", context=16)
    prepared = open_tokens(TokensConfig(path="tokens", order="sequential"), Sizes(context=16))
    assert header["end_token"]["id"] == END and prepared.vocabulary == direct.vocabulary
    assert prepared.description["tokenizer"] == direct.description["tokenizer"]
    expected, given = (data.batch("train", 1, 0, 48) for data in (direct, prepared))  # more than an epoch
    assert (expected["tokens"] == given["tokens"]).all() and (given["targets"] >= 0).all()
    assert (expected["targets"][:, :-1] == given["targets"][:, :-1]).all()
    ids = np.tile(prepared._splits["train"], 3)  # they go on when the length changes
    short, long = prepared.at(8, 0, 0), prepared.at(16, 20, 160)
    assert (short.batch("train", 1, 9 * 2, 2)["targets"].ravel() == ids[145:161]).all()
    assert (long.batch("train", 1, 10 * 2, 2)["tokens"].ravel() == ids[160:192]).all()
