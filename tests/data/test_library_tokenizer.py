"""Tokenizers as other programs leave them: what goes in comes out again, is told as changed, or is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.conftest import cache_home
from ttrain.core.errors import CheckpointError, DataError
from ttrain.data.batches import Sizes, TokenDataset
from ttrain.data.corpus import PIECE_CHARACTERS
from ttrain.data.documents import open_documents
from ttrain.data.library_tokenizer import LibraryTokenizer, parse_tokenizer
from ttrain.data.prepare import prepare
from ttrain.data.settings import DocumentsConfig, TextConfig, TokensConfig
from ttrain.data.text import open_text
from ttrain.data.tokenizer import ByteTokenizer, CharTokenizer
from ttrain.data.tokens import open_tokens
from ttrain.tasks.training.start import _check_tokenizer

LINES = "".join(f"The cat {i} sat on\n\n  the mat, {i * i} times.\n" for i in range(4000))
assert len(LINES) > 2 * PIECE_CHARACTERS


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", cache_home(tmp_path))


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
    """As Llama's: a blank in front of a text, blanks as U+2581, bytes where a character is unknown."""
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


def truncated(library: Any) -> None:
    library.enable_truncation(64)


def padded(library: Any) -> None:
    library.enable_padding(pad_id=1, pad_token="<pad>", length=100_000)


def random(library: Any) -> None:
    library.model.dropout = 0.5


def stripping(library: Any) -> None:
    library.normalizer = normalizers.Sequence([normalizers.Strip()])


def templated(library: Any) -> None:
    library.post_processor = processors.TemplateProcessing(single="<s> $A <s>", special_tokens=[("<s>", 0)])


def ignoring(library: Any) -> None:
    library.model.ignore_merges = True


def prefixing(library: Any) -> None:
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (truncated, "truncation is left off"),
        (padded, "padding is left off"),
        (random, "dropout is left off"),
        (stripping, "Strip is left off"),
        (templated, ""),
        (ignoring, ""),
    ],
)
def test_settings_for_single_sentences_do_not_touch_a_text(change: Callable[[Any], None], told: str) -> None:
    library = byte_level()
    change(library)
    dataset = text_of(LINES, library)
    assert whole(dataset) == LINES
    assert notices(dataset).count("\n") == 0 and told in notices(dataset) and bool(told) == bool(notices(dataset))
    assert dataset.tokenizer is not None
    again = parse_tokenizer(dataset.tokenizer.to_json())
    assert again.notices == () and again.hash == dataset.tokenizer.hash
    prompt = LINES[:900]
    assert again.decode(again.encode(prompt)) == prompt
    assert Library.from_str(again.to_json()).encode(prompt, add_special_tokens=False).ids == again.encode(prompt)


@pytest.mark.parametrize("change", [truncated, padded, random])
def test_the_same_tokens_as_without_the_settings_in_documents_and_token_files(change: Callable[[Any], None]) -> None:
    Path("docs").mkdir()
    for number in range(8):
        Path(f"docs/{number}.txt").write_text(f"{number} {LINES[: 300 * (number + 1)]}", "utf-8")
    library = byte_level()
    saved(library, "plain.json")
    change(library)
    saved(library, "changed.json")
    read = {}
    for name in ("plain", "changed"):
        documents = DocumentsConfig(sources=["docs"], tokenizer=f"{name}.json", held_out=0.3)
        read[name] = [open_documents(documents, Sizes(context=8))._splits[split].tolist() for split in ("train", "val")]
        prepare(TextConfig(path="docs", tokenizer=f"{name}.json"), name, progress=False)
        read[name] += [np.fromfile(f"{name}/{split}.bin", "<u2").tolist() for split in ("train", "val")]
    assert read["plain"] == read["changed"]
    assert "left off" in notices(open_documents(documents, Sizes(context=8)))  # from the cache as well
    assert "left off" in notices(open_tokens(TokensConfig(path="changed"), Sizes(context=8)))


def test_a_char_tokenizer_that_was_saved_with_truncation_is_still_one() -> None:
    library = Library.from_str(CharTokenizer("abc").to_json())
    library.enable_truncation(2)
    tokenizer = parse_tokenizer(library.to_str())
    assert isinstance(tokenizer, CharTokenizer) and tokenizer.encode("abcabc") == [0, 1, 2, 0, 1, 2]


def test_a_run_whose_checkpoint_keeps_such_settings_goes_on() -> None:
    """Its checkpoint was written while they were obeyed; another tokenizer is still refused."""
    library = byte_level()
    truncated(library)
    checkpoint = SimpleNamespace(tokenizer=library.to_str(), path=Path("run/checkpoints/step_1"))
    point: Any = SimpleNamespace(checkpoint=checkpoint)
    given: Any = SimpleNamespace(tokenizer=parse_tokenizer(library.to_str()))
    _check_tokenizer(point, given)
    with pytest.raises(CheckpointError, match="trained with another tokenizer"):
        _check_tokenizer(point, SimpleNamespace(tokenizer=ByteTokenizer()))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["prefix space", "metaspace", "sentencepiece"])
def test_only_the_start_of_a_text_is_treated_as_one(kind: str) -> None:
    library = sentence_piece() if kind == "sentencepiece" else byte_level()
    if kind == "prefix space":
        prefixing(library)
    elif kind == "metaspace":
        library = sentence_piece()
        library.normalizer = None
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer = LibraryTokenizer(library.to_str())
    blank = " " if kind == "prefix space" else ""
    pieces = list(tokenizer.encode_pieces([LINES]))
    assert len(pieces) > 1
    assert tokenizer.decode(np.concatenate(pieces).tolist()) == blank + LINES
    documents = [LINES, "", "The cat", LINES[5:]]
    encoded = list(tokenizer.encode_documents(documents))
    assert [tokenizer.decode(ids.tolist()) for ids in encoded] == [text and blank + text for text in documents]


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
    Path("rows.jsonl").write_text(
        "".join(json.dumps({"text": part}) + "\n" for part in ("The cat", "cat sat", "thé m"))
    )
    with pytest.raises(DataError, match=r"^rows\.jsonl:3, character [13] of the document: .*never saw"):
        open_documents(DocumentsConfig(sources=["rows.jsonl"], tokenizer="tokenizer.json"), Sizes(context=2))


def lowercase(library: Any) -> None:
    library.normalizer = normalizers.Lowercase()


def compatible(library: Any) -> None:
    library.normalizer = normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents()])


def swallowing(library: Any) -> None:
    from tokenizers import AddedToken

    library.add_tokens([AddedToken("sat", lstrip=True, rstrip=True)])


def undecoded(library: Any) -> None:
    library.decoder = None


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lowercase, "(its normalizers: Lowercase): 'The cat 0 sat on\\n\\n  ' comes back as 'the cat 0 sat on"),
        (compatible, "(its normalizers: NFKD, StripAccents): 'ﬁ é\u0301\\nThe cat 0 sat o' comes back as 'fi e\\nThe"),
        (swallowing, "the text: 'The cat 0 sat on\\n\\n  the mat, ' comes back as 'The cat 0saton"),
        (undecoded, "the text: 'The cat 0 sat on\\n\\n  the ' comes back as 'The Ġ"),
    ],
)
def test_a_change_that_is_meant_is_told_once_with_an_example(change: Callable[[Any], None], told: str) -> None:
    library = byte_level()
    change(library)
    text = "ﬁ é\u0301\n" + LINES if change is compatible else LINES
    dataset = text_of(text, library)
    assert notices(dataset).count("changes the text") == 1
    assert told in notices(dataset)
    if change in (lowercase, compatible):
        assert whole(dataset) == (LINES.lower() if change is lowercase else "fi e\n" + LINES)


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


def test_a_run_of_unknown_text_that_is_fused_is_not_one_unknown_token() -> None:
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


@pytest.mark.parametrize("kind", ["char", "byte", "bpe", "byte-level", "prefix", "metaspace", "sentencepiece", "words"])
def test_bytes_of_tokens_add_up_to_those_of_the_text(kind: str) -> None:
    """Behind the start of a text and at it, where characters are several tokens, and of tokens that are no text."""
    text = LINES[:3000] + ("" if kind == "words" else "é中😀\ufeff ")
    library: Any = None
    if kind == "words":
        library, text = word_piece(sorted(set(LINES[:3000].split()))), " ".join(LINES[:3000].split())
        library.decoder = decoders.WordPiece()
    elif kind == "metaspace":
        library = sentence_piece()
        library.normalizer = None
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    elif kind == "sentencepiece":
        library = sentence_piece()
    elif kind in ("byte-level", "prefix"):
        library = byte_level()
        if kind == "prefix":
            prefixing(library)
    Path("book.txt").write_text(text, "utf-8")
    tokenizer = named(kind) if library is None else LibraryTokenizer(library.to_str())
    ids = np.array(tokenizer.encode(text))
    inner, first = tokenizer.byte_counts()
    blank = 1 if kind == "prefix" else 0  # this tokenizer gives it back
    assert len(inner) == len(first) == tokenizer.vocabulary
    assert first[ids[0]] + inner[ids[1:]].sum() == len(text.encode()) + blank
    if kind == "byte-level":
        assert inner[0] == len("<s>") and first[1] == len("<pad>")


def named(kind: str) -> Any:
    tokenizer = open_text(TextConfig(path="book.txt", tokenizer=kind, vocabulary_size=300), Sizes(context=8)).tokenizer
    assert tokenizer is not None
    return tokenizer
