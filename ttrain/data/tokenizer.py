"""Text to token ids and back. Every tokenizer is written as a `tokenizer.json` that the `tokenizers` library reads."""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttrain.core.errors import DataError
from ttrain.core.names import listed

Ids = NDArray[Any]  # uint16 where the vocabulary allows, else uint32

_UNICODE_SIZE = 0x110000
UNKNOWN = "\ufffd"  # what ids that stand for no text are decoded to
_FEWEST_KNOWN = 0.5  # of the visible characters; below it a tokenizer is not one for this text
_SHOWN_BEFORE, _SHOWN_AFTER = 12, 20  # characters around a difference


class Tokenizer(ABC):
    """Text to ids in [0, vocabulary) and back."""

    name: str
    vocabulary: int
    notices: tuple[str, ...] = ()  # sentences about parts of its file that have no effect, and about changed texts
    config: dict[str, Any] = {}  # the keys of a tokenizer_config.json: the end token, a chat template
    unknown: int | None = None  # the id of unknown text
    normalizers: Sequence[str] = ()  # names of the steps that change a text before it is split
    described: dict[str, Any]  # the content of a tokenizer.json

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest unsigned type that holds every id."""
        return np.dtype(np.uint16 if self.vocabulary <= 1 << 16 else np.uint32)

    @property
    def start(self) -> list[int]:
        """Ids that its files put before every text, such as that of a bos_token; mostly none."""
        return []

    def with_start(self, ids: Sequence[int]) -> list[int]:
        """Ids of a text behind `start`, unless the text itself begins so."""
        return [*ids] if [*ids[: len(self.start)]] == self.start else [*self.start, *ids]

    @property
    def hash(self) -> str:
        """SHA-256 of the JSON, in hexadecimal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @property
    def description(self) -> dict[str, Any]:
        """The tokenizer's entry in a run's record."""
        return {"name": self.name, "vocabulary": self.vocabulary, "sha256": self.hash}

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text. Raises DataError that names the characters without an id."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            # Undecodable bytes of a command line arrive as lone surrogates, which no UTF-8 text holds.
            raise UnseenText(text[error.start : error.end], self) from None
        return [int(token) for piece in self.encode_pieces([text]) for token in piece]

    @abstractmethod
    def encode_pieces(self, texts: Iterable[str]) -> Iterator[Ids]:
        """Yield the ids of a long text that arrives in pieces. Raises as `encode` does."""

    def encode_documents(self, texts: Iterable[str]) -> Iterator[Ids]:
        """Yield the ids of each text. Raises as `encode` does."""
        for text in texts:
            yield np.concatenate([np.zeros(0, self.dtype), *self.encode_pieces([text])])

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids. An id that stands for no text becomes U+FFFD."""

    def byte_counts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return how many UTF-8 bytes each id stands for, int64 [vocabulary]: after another token, and first in a text.

        They add up to the bytes of the text, also where several tokens make one character.
        """
        counts = np.array([len(self.decode([token]).encode()) for token in range(self.vocabulary)], np.int64)
        return counts, counts

    def to_json(self) -> str:
        """Return the content of a tokenizer.json."""
        return json.dumps(self.described)


class CharTokenizer(Tokenizer):
    """One id per character, numbered by code point."""

    name = "char"

    def __init__(self, characters: str) -> None:
        self.characters = "".join(sorted(set(characters)))
        self.vocabulary = len(self.characters)
        codes = _code_points(self.characters)
        self._id_of = np.full(_UNICODE_SIZE, self.vocabulary, np.uint32)
        self._id_of[codes] = np.arange(self.vocabulary, dtype=np.uint32)
        vocab = {character: number for number, character in enumerate(self.characters)}
        split = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
        model = {"type": "WordLevel", "vocab": vocab, "unk_token": ""}
        self.described = _described(model, split, {"type": "Fuse"})

    @staticmethod
    def of(texts: Iterable[str]) -> CharTokenizer:
        """Return the tokenizer of all characters in the texts."""
        seen = np.zeros(_UNICODE_SIZE, np.bool_)
        for text in texts:
            seen[_code_points(text)] = True
        return CharTokenizer("".join(map(chr, np.flatnonzero(seen))))

    def encode_pieces(self, texts: Iterable[str]) -> Iterator[Ids]:
        for text in texts:
            ids = self._id_of[_code_points(text)]
            if ids.size and ids.max() == self.vocabulary:
                raise UnseenText(set(text) - set(self.characters), self)
            yield ids.astype(self.dtype)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.characters[i] if 0 <= i < self.vocabulary else UNKNOWN for i in ids)


class ByteTokenizer(Tokenizer):
    """One id per byte of the text's UTF-8; covers every text."""

    name = "byte"
    vocabulary = 256

    def __init__(self) -> None:
        model: dict[str, Any] = {
            "type": "BPE",
            **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
            **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
            "vocab": {character: byte for byte, character in enumerate(visible_bytes())},
            "merges": [],
        }
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        self.described = _described(model, level, level)

    def encode_pieces(self, texts: Iterable[str]) -> Iterator[Ids]:
        for text in texts:
            yield np.frombuffer(text.encode(), np.uint8).astype(self.dtype)

    def decode(self, ids: Sequence[int]) -> str:
        # 0xff never occurs in UTF-8, so it decodes to U+FFFD.
        return bytes(i if 0 <= i < 256 else 0xFF for i in ids).decode("utf-8", errors="replace")

    def byte_counts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """One byte for each id."""
        ones = np.ones(self.vocabulary, np.int64)
        return ones, ones


class UnseenText(DataError):
    """An error: a tokenizer has no id for `texts`, which are characters or words. `pattern` finds them."""

    def __init__(self, texts: Iterable[str], tokenizer: Tokenizer) -> None:
        ordered = sorted(texts)
        never = f"the {tokenizer.name} tokenizer of {tokenizer.vocabulary} ids never saw"
        mend = "Leave it out, or train with data.tokenizer=byte or bpe, which cover all."
        super().__init__(f"{never} {listed(map(_named, ordered), 8)}. {mend}")
        # Of words whole ones alone: others may hold them as a part.
        found = (re.escape(text) if len(text) == 1 else rf"(?<!\S){re.escape(text)}(?!\S)" for text in ordered)
        self.pattern = re.compile("|".join(found))


def check_round_trip(tokenizer: Tokenizer, samples: Iterable[str]) -> Iterator[str]:
    """Yield a sentence for each way in which samples come back changed from their ids.

    Raises DataError where less than half of the visible characters come back, and for a text that can't be encoded.
    """
    tokens = unknown = visible = returned = 0
    example: str | None = None
    for text in samples:
        ids = tokenizer.encode(text)
        known = [token for token in ids if token != tokenizer.unknown]
        tokens, unknown = tokens + len(ids), unknown + len(ids) - len(known)
        visible, returned = visible + _visible(text), returned + _visible(tokenizer.decode(known))
        if example is None and (back := tokenizer.decode(ids)) != text:
            example = _difference(text, back)
    if returned < _FEWEST_KNOWN * visible:
        few = f"{returned} of {visible} visible characters of a sample of the text, so it is not one for this text"
        raise DataError(f"the {tokenizer.name} tokenizer gives back {few}. Give another, such as byte or bpe.")
    if unknown and tokenizer.unknown is not None:
        token = tokenizer.decode([tokenizer.unknown])
        yield f"{unknown} of {tokens} tokens of a sample of the text are {token!r}, what the tokenizer does not know."
    if example is not None:
        why = f" (its normalizers: {', '.join(tokenizer.normalizers)})" if tokenizer.normalizers else ""
        yield f"The tokenizer changes the text{why}: {example}. The model learns and writes the changed text."


@contextmanager
def named_place(find: Callable[[re.Pattern[str]], str]) -> Iterator[None]:
    """Name the place of an unseen text in its error; `find` returns the place of the first match."""
    try:
        yield
    except UnseenText as error:
        raise DataError(f"{find(error.pattern)}: {error}") from None


def _visible(text: str) -> int:
    return sum(map(len, text.split())) - text.count(UNKNOWN)


def _difference(text: str, back: str) -> str:
    """Show the first place where two texts differ."""
    pairs = enumerate(zip(text, back, strict=False))
    first = next((place for place, (one, other) in pairs if one != other), min(len(text), len(back)))
    shown = slice(max(0, first - _SHOWN_BEFORE), first + _SHOWN_AFTER)
    return f"{text[shown]!r} comes back as {back[shown]!r}"


def _named(text: str) -> str:
    return f"{text!a} (U+{ord(text):04X})" if len(text) == 1 else f"{text!a}"


def _described(model: dict[str, Any], pre_tokenizer: dict[str, Any], decoder: dict[str, Any]) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }


def _code_points(text: str) -> NDArray[Any]:
    if text.isascii():
        return np.frombuffer(text.encode("ascii"), np.uint8)
    return np.frombuffer(text.encode("utf-32-le"), "<u4")


def visible_bytes() -> list[str]:
    """Return the character for each byte in a byte-level vocabulary (GPT-2): itself, or one from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    stand_ins = iter(range(0x100, 0x200))
    return [chr(byte) if byte in visible else chr(next(stand_ins)) for byte in range(256)]
