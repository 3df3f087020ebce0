"""Documents in Parquet, Arrow and compressed files: the same as in .jsonl, and what is wrong with such files."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tests import forked
from tests.data.conftest import config_of, read, rows
from ttrain.core.errors import DataError
from ttrain.data.sources import DocumentReader, find_sources
from ttrain.data.tokenizer import ByteTokenizer

WORDS = [f"document {number} with é" + " and more" * (number % 7) for number in range(60)]
pytestmark = pytest.mark.usefixtures("inside")
CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi!"}]


def refused(*sources: str, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        read(*sources, **options)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
    return str(caught.value)


def rows_of(words: list[str]) -> bytes:
    return "".join(json.dumps({"text": word}) + "\n" for word in words).encode()


def parquet(name: str, columns: dict[str, Any], **options: Any) -> str:
    pq.write_table(pa.table(columns), name, **options)
    return name


def arrow(name: str, columns: dict[str, Any], writer: Callable[..., Any] = pa.ipc.new_stream, size: int = 7) -> str:
    table = pa.table(columns)
    with writer(name, table.schema) as file:
        file.write_table(table, max_chunksize=size)
    return name


def written(form: str, words: list[str] = WORDS) -> str:
    """A file of the form that holds these documents."""
    name = {"groups": "a.parquet", "one group": "a.parquet", "stream": "a.arrow", "file": "a.arrow"}.get(form, form)
    if form == "groups":
        return parquet(name, {"id": list(range(len(words))), "text": words}, row_group_size=7, compression="zstd")
    if form == "one group":
        return parquet(name, {"text": pa.array(words).dictionary_encode(), "meta": [{"a": [1]}] * len(words)})
    if name == "a.arrow":
        return arrow(name, {"x": words, "text": words}, pa.ipc.new_file if form == "file" else pa.ipc.new_stream)
    raw = rows_of(words) if "json" in form else "\n\n".join(words).encode()
    half = raw.index(b"\n") + 9  # a frame may end anywhere in a row
    pack = zstandard.compress if form.endswith(".zst") else gzip.compress
    Path(name).write_bytes(pack(raw[:half]) + pack(raw[half:]))
    return name


FORMS = ["groups", "one group", "stream", "file", "a.jsonl.gz", "a.jsonl.zst", "a.txt.gz", "a.txt.zst", "a.ndjson.GZ"]


@pytest.mark.parametrize("form", FORMS)
def test_documents_are_those_of_the_rows(form: str) -> None:
    """And every byte of the file is told once, in order, so that progress and checksum are those of the file."""
    source, told = written(form), bytearray()
    config = config_of(source, delimiter="")
    documents = list(DocumentReader(config).in_turn(find_sources(config), [told.extend]))
    assert [document.text for document in documents] == WORDS and bytes(told) == Path(source).read_bytes()
    assert form.startswith("a.txt") or [each.place for each in documents][::59] == [f"{source}:1", f"{source}:60"]


def test_conversations_and_keys_of_tables() -> None:
    talks = pa.array([CHAT, None, CHAT[:1]])
    parquet("a.parquet", {"messages": talks, "text": ["one", "two", None]})
    assert read("a.parquet") == ["one", "two", "User: Hello"]
    parquet("b.parquet", {"talk": talks.slice(0, 1), "t.x": [{"y": 1}]})
    assert read("b.parquet", chat_key="talk") == ["User: Hello\nAssistant: Hi!"]
    arrow("c.arrow", {"a.b": ["dotted"], "b": [1]})
    assert read("c.arrow", text_key="a.b") == ["dotted"]


def test_templates_see_the_same_conversations_in_a_table() -> None:
    """Tools too; what a struct has to hold for other messages is not there for one that lacks it."""
    calls = [{"name": "look_up", "arguments": {"word": "é"}}, {"name": "count", "arguments": {"to": 3}}]
    call = {"role": "assistant", "content": None, "tool_calls": calls}
    talks = [{"messages": [*CHAT, call], "tools": [{"name": "look_up"}]}, {"messages": CHAT, "tools": None}]
    Path("tokenizer.json").write_text(ByteTokenizer().to_json())
    template = "{{ tools | tojson }}{% for m in messages %}{{ m | tojson }}{% endfor %}"
    Path("tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    rows("rows.jsonl", *talks)
    pq.write_table(pa.Table.from_pylist(talks), "rows.parquet")
    options = {"tokenizer": "tokenizer.json", "template": "tokenizer"}
    expected = read("rows.jsonl", **options)
    assert read("rows.parquet", **options) == expected and "tool_calls" not in expected[1] and "look_up" in expected[0]


def test_which_files_of_a_folder_are_read() -> None:
    Path("mixed/inner").mkdir(parents=True)
    Path("mixed/a.jsonl").write_bytes(rows_of(["a"]))
    Path("mixed/b.jsonl.gz").write_bytes(gzip.compress(rows_of(["b"])))
    Path("mixed/c.txt.zst").write_bytes(zstandard.compress(b"c"))
    parquet("mixed/d.parquet", {"text": ["d"]})
    arrow("mixed/inner/e.arrow", {"text": ["e"]})
    for name in ("f.md", "g.json.gz", "h.csv.zst"):
        Path("mixed", name).write_bytes(b"never read")
    assert read("mixed") == ["a", "b", "c", "d", "e"]
    assert read("mixed", suffixes=[".jsonl"]) == ["a", "b"] and read("mixed", suffixes=[".jsonl.gz"]) == ["b"]
    (source,) = find_sources(config_of("mixed"))
    assert "3 file(s) of mixed are not read" in source.notices[0]
    Path("mixed/a.jsonl.gz").write_bytes(gzip.compress(rows_of(["a"])))  # as `gzip -k` leaves it
    assert "mixed/a.jsonl.gz is given twice, by mixed and mixed, as mixed/a.jsonl too. Leave" in refused("mixed")
    Path("mixed/a.jsonl.gz").unlink()
    Path("mixed/link.parquet").symlink_to("d.parquet")
    assert "mixed/link.parquet is given twice" in refused("mixed")
    Path("hub").mkdir()  # where the names of the files themselves tell nothing
    Path("mixed/d.parquet").rename("blob")
    Path("hub/d.parquet").symlink_to("../blob")
    assert read("hub") == ["d"]
    assert (
        "1 linked folder(s) or broken link(s) are not read: mixed/link.parquet"
        in find_sources(config_of("mixed"))[0].notices[0]
    )


def saved_dataset(folder: str, *shards: list[str]) -> str:
    """Write a folder like Dataset.save_to_disk of the library datasets."""
    Path(folder).mkdir(parents=True)
    names = [f"data-{number:05}-of-{len(shards):05}.arrow" for number in range(len(shards))]
    for name, words in zip(names, shards, strict=True):
        arrow(f"{folder}/{name}", {"text": words})
    Path(folder, "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    Path(folder, "dataset_info.json").write_text("{}")
    return folder


def test_folders_that_datasets_saved() -> None:
    saved_dataset("one", WORDS[:30], WORDS[30:])
    arrow("one/data-00000-of-00001.arrow", {"text": ["left from a save before"]})
    Path("one/cache.pkl").write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")  # would run a command
    assert read("one") == WORDS and not Path("ran").exists()
    (source,) = find_sources(config_of("one"))
    assert "2 file(s) of one are not read" in source.notices[0] and "cache.pkl" in source.notices[0]
    Path("one/data-00001-of-00002.arrow").unlink()
    assert "names one/data-00001-of-00002.arrow, which is not there" in refused("one")
    saved_dataset("both/train", ["a"]), saved_dataset("both/test", ["b"])
    Path("both/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert "Name those to train on: both/test, both/train" in refused("both")
    assert read("both/train") == ["a"]


# what is wrong with files


@pytest.mark.parametrize(
    ("column", "kind"), [([1, 2], "a number"), ([{"a": "x"}], "an object"), ([["x"]], "a list"), ([b"x"], "a bytes")]
)
def test_a_column_of_another_type(column: list[Any], kind: str) -> None:
    parquet("a.parquet", {"text": column})
    assert f"a.parquet:1: 'text' is {kind}, not text" in refused("a.parquet")
    arrow("a.arrow", {"body": column})
    missing = "has neither a column 'text' (data.text_key) nor 'messages' (data.chat_key); its columns are body."
    assert missing in refused("a.arrow")
    assert f"a.arrow:1: 'body' is {kind}, not text" in refused("a.arrow", text_key="body")
    assert "b.parquet:1: " in refused(parquet("b.parquet", {"messages": column}))


def test_bad_rows_are_named_or_skipped() -> None:
    bad = pa.array([b"one", b"\xff\xfe", None, b"two", b""]).cast(pa.string(), safe=False)
    talks = pa.array([None, None, [{"role": "user", "content": 5}], None, None])
    parquet("a.parquet", {"text": bad, "messages": talks})
    assert "a.parquet:2: is not UTF-8 text: 0xff at byte 1. Mend" in refused("a.parquet")
    config = config_of("a.parquet", bad_rows="skip")
    reader = DocumentReader(config)
    assert [document.text for document in reader.in_turn(find_sources(config), [len])] == ["one", "two"]
    assert (reader.skipped.bad_rows, reader.skipped.blank) == (2, 1)
    assert str(reader.skipped.first_bad).startswith("a.parquet:2: is not UTF-8")
    assert "b.arrow:1: 'text' is null, not text" in refused(arrow("b.arrow", {"text": pa.array([None], pa.null())}))
    parquet("c.parquet", {"messages": [[{"role": "user", "content": np.datetime64("2020-01-01", "s")}]]})
    assert "c.parquet:1: message 1 has as content a datetime, not text" in refused("c.parquet")


@pytest.mark.parametrize("form", [form for form in FORMS if form != "a.ndjson.GZ"])
def test_files_that_are_damaged(form: str) -> None:
    """Cut anywhere, empty, with bytes behind the end, or something else altogether; flipped bits may change text."""
    source = Path(written(form, WORDS * 9))
    whole = source.read_bytes()
    damaged = [b"", whole[: len(whole) // 2], whole[:-1], whole[:-9], whole + b"garbage", rows_of(WORDS)]
    if form == "stream":
        ends = [at for at in range(8, len(whole), 8) if whole[at : at + 4] == b"\xff\xff\xff\xff"]
        damaged += [whole[:at] for at in ends[-4:]]  # between two batches
    for raw in damaged:
        source.write_bytes(raw)
        told = refused(str(source), rows("other.jsonl", {"text": "beside"}))
        assert str(source) in told and ("Fetch" in told or "Pack" in told or "is empty" in told)
    source, random = Path(written(form)), np.random.default_rng(5)
    whole = source.read_bytes()
    for place in random.integers(0, len(whole), 25):
        raw = bytearray(whole)
        raw[place] ^= 1 << int(random.integers(8))
        source.write_bytes(raw)
        try:
            read(str(source), bad_rows="skip")
        except DataError as error:
            assert "\n" not in str(error)


def test_text_in_compressed_files_that_is_none() -> None:
    parquet("d.parquet", {"text": WORDS})
    for name, content, message in (
        ("a.txt.gz", "text".encode("utf-16"), "a.txt.gz:1 is not UTF-8 text"),
        ("a.txt.gz", "text".encode("utf-16"), "begins as UTF-16"),
        ("b.jsonl", rows_of(WORDS), "begins as gzip does. Unpack it, or name it .gz and use data=documents"),
        ("d.parquet.gz", Path("d.parquet").read_bytes(), "is a table that is compressed as a whole. Unpack it"),
        ("e.json.gz", b"[1]", "is one JSON value; name it .jsonl"),
    ):
        Path(name).write_bytes(gzip.compress(content))
        assert message in refused(name)
    Path("c.txt.gz").write_bytes(gzip.compress(rows_of(WORDS)))
    (source,) = find_sources(config_of("c.txt.gz"))
    assert "c.txt.gz are read as plain text, JSON syntax included" in source.notices[0]


@pytest.mark.parametrize(("library", "form"), [("pyarrow", "groups"), ("zstandard", "a.jsonl.zst")])
def test_a_library_that_is_missing_names_the_extra(library: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = written(form)
    monkeypatch.setitem(sys.modules, library, None)
    told = refused(source)
    assert f"{source} needs {library}: " in told and told.endswith("Run: pip install 'ttrain[data]'")


def test_memory_does_not_grow_with_the_file() -> None:
    """A child process that reads 45 MiB in many row groups, and as much in one, takes little more than for 1 MiB."""
    script = (
        "import sys\n"
        "from ttrain.data.settings import DocumentsConfig\n"
        "from ttrain.data.sources import DocumentReader, find_sources\n"
        "for name in sys.argv[1:]:\n"
        "    config = DocumentsConfig(sources=[name], tokenizer='byte')\n"
        "    count = sum(len(found.text) for found in DocumentReader(config).in_turn(find_sources(config), [len]))\n"
        "    peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
        "    print(count, int(peak.split()[1]) // 1024)\n"  # ru_maxrss begins with that of the process that forked
    )
    words = [format(number, "09") * (1 << 13) for number in range(16)]
    parquet("small.parquet", {"text": words}, compression="none", use_dictionary=False)
    with pq.ParquetWriter("groups.parquet", pa.schema({"text": pa.string()}), use_dictionary=False) as file:
        for _ in range(40):
            file.write_table(pa.table({"text": words}))
    pages = {"use_dictionary": False, "compression": "none", "write_batch_size": 8}  # of a few rows, as texts make them
    parquet("one.parquet", {"text": words * 40}, **pages)
    names = [str(Path(f"{name}.parquet").absolute()) for name in ("small", "groups", "one")]
    done = forked.run("-c", script, *names)
    found = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert [count for count, _ in found] == [size * len(words[0]) for size in (16, 16 * 40, 16 * 40)]
    assert found[2][1] < found[0][1] + 24, found
