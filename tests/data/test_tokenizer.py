"""Tokenizers, ours and those of other programs: what goes in comes out again, is told as changed, or is refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.data.conftest import config_of, rows
from ttrain.core.errors import CheckpointError, DataError
from ttrain.data import library_tokenizer as tokenizer_module
from ttrain.data.batches import Sizes, TokenDataset
from ttrain.data.corpus import cut
from ttrain.data.documents import open_documents
from ttrain.data.library_tokenizer import LibraryTokenizer, parse_tokenizer, read_tokenizer, train_bpe
from ttrain.data.settings import TextConfig, TokensConfig
from ttrain.data.text import open_text
from ttrain.data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer
from ttrain.data.tokens import open_tokens
from ttrain.tasks.prepare import prepare
from ttrain.train.runs.resume import check_tokenizer

ALPHABET = "aZ09 \n\t\r.é中😀"
TEXTS = st.text(ALPHABET, max_size=60)
WORDS = "the cat sat on the mat\nand the other cat sat on the hat\n" * 40


def all_kinds() -> list[Tokenizer]:
    return [CharTokenizer(ALPHABET), ByteTokenizer(), train_bpe([WORDS], 300)]


@pytest.mark.parametrize("tokenizer", all_kinds(), ids=lambda tokenizer: str(tokenizer.name))
def test_the_library_reads_our_json_and_gives_our_ids(tokenizer: Tokenizer) -> None:
    library = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    assert library.get_vocab_size() == tokenizer.vocabulary

    @settings(max_examples=40, deadline=None)
    @given(text=TEXTS, others=st.lists(st.integers(-3, tokenizer.vocabulary + 3), max_size=20))
    def check(text: str, others: list[int]) -> None:
        ids = tokenizer.encode(text)
        assert all(type(token) is int and 0 <= token < tokenizer.vocabulary for token in ids)
        assert library.encode(text).ids == ids
        assert library.decode(ids) == tokenizer.decode(ids) == text
        decoded = tokenizer.decode(others)
        decoded.encode()
        assert "\ufffd" in decoded or all(0 <= token < tokenizer.vocabulary for token in others)

    check()
    again = parse_tokenizer(tokenizer.to_json())
    assert type(again) is type(tokenizer)
    assert (again.name, again.vocabulary, again.hash) == (tokenizer.name, tokenizer.vocabulary, tokenizer.hash)
    assert again.hash == hashlib.sha256(tokenizer.to_json().encode()).hexdigest()


def test_how_ids_are_numbered() -> None:
    """Characters by code point, bytes by value."""
    assert ByteTokenizer().encode("aé中") == list("aé中".encode())
    tokenizer = CharTokenizer.of(["hello", " wörld"])
    assert tokenizer.characters == " dehlorwö"
    assert tokenizer.encode("hölle") == [tokenizer.characters.index(c) for c in "hölle"]
    assert tokenizer.dtype == np.uint16


def test_unseen_characters_are_named() -> None:
    with pytest.raises(DataError, match=r"U\+000A.*'x'.*U\+00E9.*U\+4E2D.*data\.tokenizer=byte") as caught:
        CharTokenizer("abc").encode("abcé中\nx")
    assert "'a'" not in str(caught.value) and str(caught.value).isascii()
    with pytest.raises(DataError, match=r"and 12 more"):
        CharTokenizer("a").encode("bcdefghijklmnopqrstu")
    for tokenizer in all_kinds():  # bytes of a command line that are no text
        with pytest.raises(DataError, match=r"U\+DCFF"):
            tokenizer.encode("a" + b"\xff".decode(errors="surrogateescape"))


def test_bpe_learns_merges_and_is_repeatable() -> None:
    first, second = train_bpe([WORDS], 300), train_bpe([WORDS[:100], WORDS[100:]], 300)
    assert first.hash == second.hash and 256 < first.vocabulary <= 300
    assert len(first.encode(WORDS)) < len(WORDS) / 2
    assert train_bpe(["ab"], 5000).vocabulary < 300
    pieces = list(first.encode_pieces(LINES[i : i + 1000] for i in range(0, len(LINES), 1000)))
    assert len(pieces) > 2 and np.concatenate(pieces).tolist() == Library.from_str(first.to_json()).encode(LINES).ids


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    surrogate = b'{"model": {"type": "WordLevel", "vocab": {"\\ud800": 0}}}'
    for content in (b"", b"{", b"[]", b"{}", b'{"model": 3}', surrogate, b"\xff\x00"):
        file.write_bytes(content)
        with pytest.raises(DataError, match="data.tokenizer="):
            read_tokenizer(file)
    with pytest.raises(DataError, match="No such file"):
        read_tokenizer(tmp_path / "absent.json")


def test_a_json_that_only_resembles_ours_is_left_to_the_library() -> None:
    described = {**json.loads(CharTokenizer("ab").to_json()), "normalizer": {"type": "Lowercase"}}
    tokenizer = parse_tokenizer(json.dumps(described))
    assert isinstance(tokenizer, LibraryTokenizer) and tokenizer.encode("AB") == [0, 1]
    with pytest.raises(DataError, match="U\\+0063"):
        tokenizer.encode("abc")


def test_the_config_names_the_tokenizer(tmp_path: Path) -> None:
    text, file = tmp_path / "a.txt", tmp_path / "tokenizer.json"
    text.write_text("aaabbb ccc", encoding="utf-8")
    file.write_text(CharTokenizer("abc ").to_json(), encoding="utf-8")
    kinds = {"char": CharTokenizer, "byte": ByteTokenizer, "bpe": LibraryTokenizer, str(file): CharTokenizer}
    assert {name: type(opened(text, name)) for name in kinds} == kinds
    with pytest.raises(DataError, match=r"data\.tokenizer=chars is neither char, byte, bpe nor the path"):
        opened(text, "chars")


def opened(text: Path, name: str) -> Tokenizer:
    """Return the tokenizer of a text of which 2/5 are held out."""
    tokenizer = open_text(
        TextConfig(path=str(text), tokenizer=name, held_out=0.4, vocabulary_size=258), Sizes(context=1)
    ).tokenizer
    assert tokenizer is not None
    return tokenizer


def test_held_out_text_has_no_unseen_character_but_does_not_shape_bpe(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("ab" * 45 + "xy" * 30, encoding="utf-8")
    tokenizer = opened(text, "char")
    assert tokenizer.decode(tokenizer.encode("abxy")) == "abxy"
    merges = json.loads(opened(text, "bpe").to_json())["model"]["merges"]
    assert merges and not any("x" in part for merge in merges for part in merge)


LINES = "".join(f"The cat {i} sat on\n\n  the mat, {i * i} times.\n" for i in range(600))


@pytest.fixture(autouse=True)
def small_pieces(inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text is cut into many pieces, and documents are encoded in several calls of the library."""
    monkeypatch.setattr(tokenizer_module, "cut", partial(cut, size=len(LINES) // 20))
    monkeypatch.setattr(tokenizer_module, "CALL_CHARACTERS", 100)


def byte_level(alphabet: bool = True, text: str = LINES, **options: Any) -> Any:
    """Byte-pair encoding as byte-level ones are trained, with or without the symbols that the text lacks."""
    library: Any = Library(models.BPE(**options))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    symbols = pre_tokenizers.ByteLevel.alphabet() if alphabet else []
    trainer = trainers.BpeTrainer(
        vocab_size=330, show_progress=False, initial_alphabet=symbols, special_tokens=["<s>", "<pad>"]
    )
    library.train_from_iterator([text[:20_000]], trainer)
    return library


def sentence_piece(fallback: bool = True) -> Any:
    """Return a tokenizer like Llama's: a blank before a text, blanks as U+2581, bytes for an unknown character."""
    library: Any = Library(models.BPE(byte_fallback=fallback))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)] if fallback else []
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, special_tokens=bytes_, max_token_length=8)
    library.train_from_iterator(LINES[:20_000].splitlines(keepends=True), trainer)
    described = json.loads(library.to_str())
    described["added_tokens"] = []  # the bytes are no special tokens
    library = Library.from_str(json.dumps(described))
    strip = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(strip)
    return library


def saved(library: Any, name: str = "tokenizer.json") -> str:
    library.save(name)
    return name


def text_of(text: str, library: Any, **options: Any) -> TokenDataset:
    Path("book.txt").write_text(text, "utf-8", newline="")
    config = TextConfig(path="book.txt", tokenizer=saved(library), held_out=0.25, **options)
    return open_text(config, Sizes(context=8))


def notices(dataset: Any) -> str:
    return "\n".join(dataset.description.get("notices", ()))


def whole(dataset: Any) -> str:
    """The text that the two splits of a dataset are decoded to."""
    assert dataset.tokenizer is not None
    return "".join(dataset.tokenizer.decode(dataset._splits[split].tolist()) for split in ("train", "val"))


def templated(library: Any) -> None:
    library.post_processor = processors.TemplateProcessing(single="<s> $A <s>", special_tokens=[("<s>", 0)])


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {  # of a tokenizer, and what is told of each
    "truncated": (lambda library: library.enable_truncation(64), "truncation is left off"),
    "padded": (
        lambda library: library.enable_padding(pad_id=1, pad_token="<pad>", length=100_000), "padding is left off",
    ),
    "random": (lambda library: setattr(library.model, "dropout", 0.5), "dropout is left off"),
    "stripping": (
        lambda library: setattr(library, "normalizer", normalizers.Sequence([normalizers.Strip()])),
        "Strip is left off",
    ),
    "templated": (templated, ""),
    "ignoring": (lambda library: setattr(library.model, "ignore_merges", True), ""),
}  # fmt: skip


STARTS = ["prefix space", "metaspace", "sentencepiece"]


def as_start(kind: str) -> Any:
    """Return a tokenizer that treats the start of a text in its own way."""
    library = byte_level() if kind in ("byte-level", "prefix space") else sentence_piece()
    if kind == "prefix space":
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif kind == "metaspace":
        library.normalizer = None
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    return library


@pytest.mark.parametrize("change", CHANGES)
def test_settings_for_single_sentences_do_not_touch_a_text(change: str) -> None:
    library = byte_level()
    make, told = CHANGES[change]
    make(library)
    dataset = text_of(LINES, library)
    assert whole(dataset) == LINES and dataset.tokenizer is not None
    assert notices(dataset).count("\n") == 0 and told in notices(dataset) and bool(told) == bool(notices(dataset))
    again = parse_tokenizer(dataset.tokenizer.to_json())
    assert again.notices == () and again.hash == dataset.tokenizer.hash
    prompt = LINES[:900]
    assert again.decode(again.encode(prompt)) == prompt
    assert Library.from_str(again.to_json()).encode(prompt, add_special_tokens=False).ids == again.encode(prompt)


def test_such_settings_do_not_touch_documents_and_token_files() -> None:
    library = byte_level()
    for change in ("truncated", "padded", "random"):
        CHANGES[change][0](library)
    source = rows("rows.jsonl", *({"text": f"{number} {LINES[:900]}"} for number in range(8)))
    config, sizes = config_of(source, tokenizer=saved(library), held_out=0.3), Sizes(context=8)
    prepare(config, "tokens", progress=False)
    read: list[Any] = [open_documents(config, sizes) for _ in range(2)]  # the second time from the cache
    read.append(open_tokens(TokensConfig(path="tokens"), sizes))
    for data in read:
        assert "left off" in notices(data)
        assert sorted(whole(data).split("<|endoftext|>"))[1:] == [f"{number} {LINES[:900]}" for number in range(8)]


def test_a_run_whose_checkpoint_keeps_such_settings_goes_on() -> None:
    """Its checkpoint was written while they were obeyed; another tokenizer is still refused."""
    library = Library.from_str(CharTokenizer("abc").to_json())
    library.enable_truncation(2)
    tokenizer = parse_tokenizer(library.to_str())
    assert isinstance(tokenizer, CharTokenizer) and tokenizer.encode("abcabc") == [0, 1, 2, 0, 1, 2]
    library = byte_level()
    library.enable_truncation(64)
    checkpoint: Any = SimpleNamespace(tokenizer=library.to_str(), path=Path("run/step_1"))
    check_tokenizer(checkpoint, parse_tokenizer(library.to_str()))
    check_tokenizer(checkpoint, None)
    with pytest.raises(CheckpointError, match="trained with another tokenizer"):
        check_tokenizer(checkpoint, ByteTokenizer())


@pytest.mark.parametrize("kind", STARTS)
def test_only_the_start_of_a_text_is_treated_as_one(kind: str) -> None:
    tokenizer = LibraryTokenizer(as_start(kind).to_str())
    blank = " " if kind == "prefix space" else ""
    pieces = list(tokenizer.encode_pieces([LINES]))
    assert len(pieces) > 1 and tokenizer.decode(np.concatenate(pieces).tolist()) == blank + LINES
    documents = [LINES, "", "The cat", LINES[5:]]
    decoded = [tokenizer.decode(ids.tolist()) for ids in tokenizer.encode_documents(documents)]
    assert decoded == [text and blank + text for text in documents]


@pytest.mark.parametrize("kind", ["byte-level", "suffix", "prefix", "fallback", "characters", "no unknown token"])
def test_what_can_not_be_encoded_is_refused_by_character_and_place(kind: str) -> None:
    start = LINES[: LINES.index("\n", 4000) + 1]
    text = start + "thé mat\n" + start
    if kind == "byte-level":
        library: Any = byte_level(alphabet=False)
        assert "é" not in library.decode(library.encode("thé mat").ids)  # dropped in silence
    elif kind == "suffix":
        known = sorted({*LINES, *(c + "</w>" for c in {*LINES, "é"})})  # é is known at the end of a word alone
        library = Library(models.BPE({token: i for i, token in enumerate(known)}, [], end_of_word_suffix="</w>"))
    elif kind == "prefix":
        known = sorted({*LINES, "é", *("##" + c for c in LINES)})  # é is known at the start of a word alone
        library = Library(models.BPE({token: i for i, token in enumerate(known)}, [], continuing_subword_prefix="##"))
    elif kind == "fallback":
        described = json.loads(sentence_piece().to_str())
        del described["model"]["vocab"]["<0xA9>"]  # the second byte of é
        library = Library.from_str(json.dumps(described))
    elif kind == "characters":
        library = sentence_piece(fallback=False)
    else:
        words = {word: i for i, word in enumerate(sorted({*LINES.split()}))}
        library = Library(models.WordLevel(words, unk_token="[UNK]"))
        library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    line = text[: text.index("é")].count("\n") + 1
    with pytest.raises(DataError, match=rf"^book\.txt:{line}: .*never saw '(\\xe9' \(U\+00E9\)|th\\xe9')"):
        text_of(text, library)
    file = rows("rows.jsonl", *({"text": part} for part in ("The cat", "cat sat", "thé m")))
    with pytest.raises(DataError, match=r"^rows\.jsonl:3, character [13] of the document: .*never saw"):
        open_documents(config_of(file, tokenizer="tokenizer.json"), Sizes(context=2))


@pytest.mark.parametrize(
    ("change", "told", "kept"),
    [
        (normalizers.Lowercase(), "Lowercase): 'ﬁ é\u0301\\nThe cat 0 sat on", ("ﬁ é\u0301\n" + LINES).lower()),
        (
            normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents()]),
            "NFKD, StripAccents): 'ﬁ é\u0301\\nThe cat 0 sat o' comes back as 'fi e\\nThe", "fi e\n" + LINES,
        ),
        (None, "0saton", None),
    ],
)  # fmt: skip
def test_a_change_that_is_meant_is_told_once_with_an_example(change: Any, told: str, kept: str | None) -> None:
    library = byte_level()
    if change is None:
        library.add_tokens([tokenizers.AddedToken("sat", lstrip=True, rstrip=True)])
    else:
        library.normalizer = change
    dataset = text_of("ﬁ é\u0301\n" + LINES, library)
    assert notices(dataset).count("changes the text") == 1 and told in notices(dataset)
    assert kept is None or whole(dataset) == kept


def word_piece(words: list[str]) -> Any:
    library: Any = Library(models.WordPiece({token: i for i, token in enumerate(["[UNK]", *words])}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return library


def test_unknown_tokens_are_counted_and_refused_where_they_are_most_of_the_text() -> None:
    text = "the cat sat\n" * 300 + "the dog sat\n"
    told = notices(text_of(text, word_piece(["the", "cat", "sat", "d", "do"])))
    assert "1 of 903 tokens of a sample of the text are '[UNK]'" in told
    assert "comes back as" in told  # blanks are not those of the text
    with pytest.raises(DataError, match="gives back 3 of 9 visible characters"):
        text_of("the cat sat" + "\n" * 200, word_piece(["the"]))
    # A run of unknown text that is fused is more than one unknown token.
    known = {"<unk>": 0, **{c: i for i, c in enumerate("abcdefgh \n", 1)}}
    library = Library(models.BPE(known, [], unk_token="<unk>", fuse_unk=True))
    with pytest.raises(DataError, match="gives back 400 of 2400 visible characters"):
        text_of("ab cd zzzzzzzzzz zzzzzzzzzz\n" * 100, library)
    told = notices(text_of("abcdefgh zzz\n" * 100, library))
    assert "100 of 1100 tokens of a sample of the text are '<unk>'" in told


def test_nothing_is_told_where_all_comes_back() -> None:
    Path("book.txt").write_text(LINES + "\r\n\té中😀\ufeff\ufffd", "utf-8", newline="")
    for name in ("char", "byte", "bpe", saved(byte_level()), saved(sentence_piece(), "piece.json")):
        dataset = open_text(TextConfig(path="book.txt", tokenizer=name, vocabulary_size=300), Sizes(context=8))
        assert not notices(dataset), name
        assert whole(dataset) == LINES + "\r\n\té中😀\ufeff\ufffd"


@pytest.mark.parametrize("kind", [*STARTS, "char", "byte", "bpe", "byte-level", "words"])
def test_bytes_of_tokens_add_up_to_those_of_the_text(kind: str) -> None:
    """Behind the start of a text and at it, where characters are several tokens, and of tokens that are no text."""
    text = LINES[:3000] + ("" if kind == "words" else "é中😀\ufeff ")
    library: Any = None
    if kind == "words":
        library, text = word_piece(sorted(set(LINES[:3000].split()))), " ".join(LINES[:3000].split())
        library.decoder = decoders.WordPiece()
    elif kind not in ("char", "byte", "bpe"):
        library = as_start(kind)
    Path("book.txt").write_text(text, "utf-8")
    tokenizer: Any = LibraryTokenizer(library.to_str()) if library else opened(Path("book.txt"), kind)
    ids = np.array(tokenizer.encode(text))
    inner, first = tokenizer.byte_counts()
    blank = 1 if kind == "prefix space" else 0  # this tokenizer gives it back
    assert len(inner) == len(first) == tokenizer.vocabulary
    assert first[ids[0]] + inner[ids[1:]].sum() == len(text.encode()) + blank
    if kind == "byte-level":
        assert inner[0] == len("<s>") and first[1] == len("<pad>")
