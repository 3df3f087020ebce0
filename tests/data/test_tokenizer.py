"""Tokenizers, against the `tokenizers` library reading the JSON that they write."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from ttrain.core.errors import DataError
from ttrain.data.corpus import Corpus
from ttrain.data.library_tokenizer import LibraryTokenizer, parse_tokenizer, read_tokenizer, train_bpe
from ttrain.data.settings import TextConfig
from ttrain.data.text import choose_tokenizer
from ttrain.data.tokenizer import (
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
)

ALPHABET = "aZ09 \n\t\r.é中😀"
TEXTS = st.text(ALPHABET, max_size=60)
WORDS = "the cat sat on the mat\nand the other cat sat on the hat\n" * 40


def all_kinds() -> list[Tokenizer]:
    return [CharTokenizer(ALPHABET), ByteTokenizer(), train_bpe([WORDS], 300)]


KINDS = pytest.mark.parametrize("tokenizer", all_kinds(), ids=lambda tokenizer: str(tokenizer.name))


@KINDS
def test_text_survives_encoding_and_decoding(tokenizer: Tokenizer) -> None:
    @settings(max_examples=40, deadline=None)
    @given(text=TEXTS)
    def check(text: str) -> None:
        ids = tokenizer.encode(text)
        assert all(type(token) is int and 0 <= token < tokenizer.vocabulary for token in ids)
        assert tokenizer.decode(ids) == text

    check()


@KINDS
def test_the_library_reads_our_json_and_gives_our_ids(tokenizer: Tokenizer) -> None:
    library = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    assert library.get_vocab_size() == tokenizer.vocabulary

    @settings(max_examples=40, deadline=None)
    @given(text=TEXTS)
    def check(text: str) -> None:
        ids = library.encode(text).ids
        assert tokenizer.encode(text) == ids
        assert library.decode(ids) == text

    check()


@KINDS
def test_json_round_trip_keeps_kind_ids_and_hash(tokenizer: Tokenizer) -> None:
    again = parse_tokenizer(tokenizer.to_json())
    assert type(again) is type(tokenizer)
    assert (again.name, again.vocabulary, again.hash) == (tokenizer.name, tokenizer.vocabulary, tokenizer.hash)
    assert again.hash == hashlib.sha256(tokenizer.to_json().encode()).hexdigest()
    text = "cat 09\n"
    known = "".join(c for c in text if tokenizer.name != "char" or c in ALPHABET)
    assert again.encode(known) == tokenizer.encode(known)


@KINDS
def test_every_id_sequence_decodes(tokenizer: Tokenizer) -> None:
    @settings(max_examples=40, deadline=None)
    @given(ids=st.lists(st.integers(-3, tokenizer.vocabulary + 3), max_size=20))
    def check(ids: list[int]) -> None:
        text = tokenizer.decode(ids)
        text.encode()
        if any(not 0 <= token < tokenizer.vocabulary for token in ids):
            assert "\ufffd" in text

    check()


def test_characters_are_numbered_by_code_point() -> None:
    tokenizer = CharTokenizer.of(["hello", " wörld"])
    assert tokenizer.characters == " dehlorwö"
    assert tokenizer.encode("hölle") == [tokenizer.characters.index(c) for c in "hölle"]
    assert tokenizer.dtype == np.uint16


def test_bytes_are_numbered_by_value() -> None:
    assert ByteTokenizer().encode("aé中") == list("aé中".encode())


def test_unseen_characters_are_named() -> None:
    with pytest.raises(DataError) as caught:
        CharTokenizer("abc").encode("abcé中\nx")
    message = str(caught.value)
    assert "U+00E9" in message and "U+4E2D" in message and "U+000A" in message and "'x'" in message
    assert "'a'" not in message and "data.tokenizer=byte" in message
    message.encode("ascii")
    with pytest.raises(DataError, match=r"and 12 more"):
        CharTokenizer("a").encode("bcdefghijklmnopqrstu")


@KINDS
def test_bytes_of_a_command_line_that_are_no_text_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"U\+DCFF"):
        tokenizer.encode("a" + b"\xff".decode(errors="surrogateescape"))


def test_bpe_learns_merges_and_is_repeatable() -> None:
    first, second = train_bpe([WORDS], 300), train_bpe([WORDS[:100], WORDS[100:]], 300)
    assert first.hash == second.hash
    assert 256 < first.vocabulary <= 300
    assert len(first.encode(WORDS)) < len(WORDS) / 2
    assert train_bpe(["ab"], 5000).vocabulary < 300


def test_bpe_in_pieces_gives_the_ids_of_the_whole() -> None:
    tokenizer = train_bpe([WORDS], 300)
    text = "".join(f"def f{i}(x):\n    return the cat {i}\n\n\nsat\n" for i in range(9000))
    assert len(text) > 4 * (1 << 16)
    pieces = list(tokenizer.encode_pieces(text[i : i + 1000] for i in range(0, len(text), 1000)))
    assert len(pieces) > 2
    assert np.concatenate(pieces).tolist() == tokenizers.Tokenizer.from_str(tokenizer.to_json()).encode(text).ids


def test_a_library_tokenizer_that_would_drop_characters_is_refused() -> None:
    dropping = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    assert dropping.encode("acb").ids == [2]  # in silence
    tokenizer = LibraryTokenizer(dropping.to_str())
    assert tokenizer.encode("aab") == [0, 2]
    with pytest.raises(DataError, match="U\\+0063"):
        tokenizer.encode("acb")


def test_a_library_tokenizer_with_an_unknown_token_uses_it() -> None:
    model = tokenizers.models.WordLevel({"[UNK]": 0, "cat": 1}, unk_token="[UNK]")
    word = tokenizers.Tokenizer(model)
    word.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    assert parse_tokenizer(word.to_str()).encode("cat dog cat") == [1, 0, 1]


def test_special_tokens_are_read_but_never_added() -> None:
    library = tokenizers.Tokenizer.from_str(train_bpe([WORDS], 300).to_json())
    library.add_special_tokens(["<|end|>"])
    end = library.token_to_id("<|end|>")
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", end)]
    )
    tokenizer = parse_tokenizer(library.to_str())
    assert tokenizer.vocabulary == end + 1
    assert tokenizer.encode("cat<|end|>cat").count(end) == 1
    assert tokenizer.decode([end]) == "<|end|>"


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"model": 3}', '{"model": {"type": "WordLevel", "vocab": {"\\ud800": 0}}}'],
)
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(content)
    with pytest.raises(DataError, match="data.tokenizer="):
        read_tokenizer(file)


def test_a_tokenizer_file_that_is_absent_or_binary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        read_tokenizer(tmp_path / "absent.json")
    (tmp_path / "binary").write_bytes(b"\xff\x00")
    with pytest.raises(DataError, match="data.tokenizer="):
        read_tokenizer(tmp_path / "binary")


def test_a_json_that_only_resembles_ours_is_left_to_the_library() -> None:
    described = json.loads(CharTokenizer("ab").to_json())
    described["normalizer"] = {"type": "Lowercase"}
    tokenizer = parse_tokenizer(json.dumps(described))
    assert isinstance(tokenizer, LibraryTokenizer)
    assert tokenizer.encode("AB") == [0, 1]
    with pytest.raises(DataError, match="U\\+0063"):
        tokenizer.encode("abc")


def test_the_config_names_the_tokenizer(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("aaabbb ccc", encoding="utf-8")
    file = tmp_path / "tokenizer.json"
    file.write_text(CharTokenizer("abc ").to_json(), encoding="utf-8")
    kinds = {"char": CharTokenizer, "byte": ByteTokenizer, "bpe": LibraryTokenizer, str(file): CharTokenizer}
    for name, kind in kinds.items():
        config = TextConfig(path=str(text), tokenizer=name)
        assert type(choose_tokenizer(config, Corpus(config))) is kind
    config = TextConfig(path=str(text), tokenizer="chars")
    with pytest.raises(DataError, match=r"data\.tokenizer=chars is neither char, byte, bpe nor the path"):
        choose_tokenizer(config, Corpus(config))


def test_held_out_text_has_no_unseen_character_but_does_not_shape_bpe(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("ab" * 45 + "xyxyxyxyxy", encoding="utf-8")
    config = TextConfig(path=str(text), tokenizer="char", held_out=0.1)
    tokenizer = choose_tokenizer(config, Corpus(config))
    assert tokenizer.decode(tokenizer.encode("abxy")) == "abxy"
    config = TextConfig(path=str(text), tokenizer="bpe", held_out=0.1)
    merges = json.loads(choose_tokenizer(config, Corpus(config)).to_json())["model"]["merges"]
    assert merges and not any("x" in part for merge in merges for part in merge)
