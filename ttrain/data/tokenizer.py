"""Text to token ids and back. Every tokenizer is written as a `tokenizer.json` that the `tokenizers` library reads."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ttrain.core.errors import DataError
from ttrain.data.corpus import cut

Ids = NDArray[Any]  # uint16 where the vocabulary allows, else uint32

_UNICODE_SIZE = 0x110000
_UNKNOWN = "\ufffd"
_PIECES_AT_ONCE = 16  # what the library encodes in parallel in one call
CALL_CHARACTERS = 1 << 20  # likewise, of many short texts
_NAMED_CHARACTERS = 8  # most that an error message lists


class Tokenizer(ABC):
    """Text to ids in [0, vocabulary) and back."""

    name: str
    vocabulary: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """Smallest unsigned type that holds every id."""
        return np.dtype(np.uint16 if self.vocabulary <= 1 << 16 else np.uint32)

    @property
    def hash(self) -> str:
        """SHA-256 of the JSON, in hexadecimal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @property
    def description(self) -> dict[str, Any]:
        """What a run record says of this tokenizer."""
        return {"name": self.name, "vocabulary": self.vocabulary, "sha256": self.hash}

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Raises DataError that names the characters this tokenizer has no id for."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            # Undecodable bytes of a command line arrive as lone surrogates, which no UTF-8 text holds.
            raise unseen(text[error.start : error.end], self) from None
        return [int(token) for piece in self.encode_pieces([text]) for token in piece]

    @abstractmethod
    def encode_pieces(self, texts: Iterable[str]) -> Iterator[Ids]:
        """Ids of a long text that arrives, and is encoded, some at a time. Raises as `encode` does."""

    def encode_documents(self, texts: Iterable[str]) -> Iterator[Ids]:
        """Ids of each of many texts. Raises as `encode` does."""
        for text in texts:
            yield np.concatenate([np.zeros(0, self.dtype), *self.encode_pieces([text])])

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids. Defined for all ids: what stands for no text becomes U+FFFD."""

    @abstractmethod
    def to_json(self) -> str:
        """The content of a tokenizer.json."""

    @staticmethod
    def from_json(text: str) -> Tokenizer:
        """The tokenizer that a tokenizer.json describes. Raises DataError when it describes none."""
        try:
            described = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise DataError(f"the tokenizer is not JSON: {error}. Give a tokenizer.json.") from None
        if described == ByteTokenizer().described:
            return ByteTokenizer()
        characters = _characters_of(described)
        return CharTokenizer(characters) if characters is not None else LibraryTokenizer(text)


class CharTokenizer(Tokenizer):
    """One id per character, numbered by code point."""

    name = "char"

    def __init__(self, characters: str) -> None:
        self.characters = "".join(sorted(set(characters)))
        self.vocabulary = len(self.characters)
        self._codes = _code_points(self.characters)
        self._id_of = np.full(_UNICODE_SIZE, self.vocabulary, np.uint32)
        self._id_of[self._codes] = np.arange(self.vocabulary, dtype=np.uint32)

    @staticmethod
    def of(texts: Iterable[str]) -> CharTokenizer:
        """The tokenizer of every character in a text."""
        seen = np.zeros(_UNICODE_SIZE, np.bool_)
        for text in texts:
            seen[_code_points(text)] = True
        return CharTokenizer("".join(map(chr, np.flatnonzero(seen))))

    def encode_pieces(self, texts: Iterable[str]) -> Iterator[Ids]:
        for text in texts:
            ids = self._id_of[_code_points(text)]
            if ids.size and ids.max() == self.vocabulary:
                raise unseen(set(text) - set(self.characters), self)
            yield ids.astype(self.dtype)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.characters[i] if 0 <= i < self.vocabulary else _UNKNOWN for i in ids)

    @property
    def described(self) -> dict[str, Any]:
        model = {
            "type": "WordLevel",
            "vocab": {character: number for number, character in enumerate(self.characters)},
            "unk_token": "",
        }
        split = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
        return _described(model, split, {"type": "Fuse"})

    def to_json(self) -> str:
        return json.dumps(self.described)


class ByteTokenizer(Tokenizer):
    """One id per byte of the text's UTF-8; covers every text."""

    name = "byte"
    vocabulary = 256

    def encode_pieces(self, texts: Iterable[str]) -> Iterator[Ids]:
        for text in texts:
            yield np.frombuffer(text.encode(), np.uint8).astype(self.dtype)

    def decode(self, ids: Sequence[int]) -> str:
        # 0xff never occurs in UTF-8, so it decodes to U+FFFD.
        return bytes(i if 0 <= i < 256 else 0xFF for i in ids).decode("utf-8", errors="replace")

    @property
    def described(self) -> dict[str, Any]:
        model: dict[str, Any] = {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {character: byte for byte, character in enumerate(_visible_bytes())},
            "merges": [],
        }
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        return _described(model, level, level)

    def to_json(self) -> str:
        return json.dumps(self.described)


class LibraryTokenizer(Tokenizer):
    """Whatever a tokenizer.json describes, run by the `tokenizers` library. No special tokens are added to a text."""

    def __init__(self, text: str) -> None:
        from tokenizers import Tokenizer as LibraryModel

        try:
            self._model = LibraryModel.from_str(text)
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"the tokenizers library cannot read the tokenizer: {error}. Give another.") from None
        self._text = text
        ids = self._model.get_vocab(with_added_tokens=True).values()
        if not ids:
            raise DataError("the tokenizer has an empty vocabulary. Give another tokenizer.json.")
        described = json.loads(text)
        self.name = str(described["model"].get("type") or "library").lower()
        self.vocabulary = max(ids) + 1
        self._covers_all = self._covers_every_text(described)
        self._known: set[str] = set()

    def encode_pieces(self, texts: Iterable[str]) -> Iterator[Ids]:
        batch: list[str] = []
        for piece in cut(texts):
            batch.append(piece)
            if len(batch) == _PIECES_AT_ONCE:
                yield from self._encode(batch)
                batch = []
        yield from self._encode(batch)

    def encode_documents(self, texts: Iterable[str]) -> Iterator[Ids]:
        """See Tokenizer. Several texts go through the library in one call, which it spreads over the processor."""
        for group in _groups(texts, CALL_CHARACTERS):
            pieces = [list(cut([text])) for text in group]
            encoded = self._encode([piece for several in pieces for piece in several])
            for several in pieces:
                yield np.concatenate([np.zeros(0, self.dtype), *islice(encoded, len(several))])

    def token_id(self, token: str) -> int | None:
        """The id of a token by its text, None where there is no such token."""
        return self._model.token_to_id(token)

    def special_tokens(self) -> list[str]:
        """Texts of the tokens that no text is split into."""
        return [str(token.content) for token in self._model.get_added_tokens_decoder().values()]

    def with_token(self, token: str) -> LibraryTokenizer:
        """This tokenizer with one special token more, under the next id."""
        from tokenizers import Tokenizer as LibraryModel

        model = LibraryModel.from_str(self._text)
        model.add_special_tokens([token])
        return LibraryTokenizer(model.to_str())

    def decode(self, ids: Sequence[int]) -> str:
        known = [int(i) for i in ids if 0 <= i < self.vocabulary]
        return self._model.decode(known, skip_special_tokens=False) + _UNKNOWN * (len(ids) - len(known))

    def to_json(self) -> str:
        return self._text

    def _encode(self, pieces: list[str]) -> Iterator[Ids]:
        if not self._covers_all:
            self._require_known(set().union(*pieces) if pieces else set())
        for encoding in self._model.encode_batch_fast(pieces, add_special_tokens=False):
            yield np.asarray(encoding.ids, self.dtype)

    def _require_known(self, characters: set[str]) -> None:
        """The library drops in silence what it has neither an id nor an unknown token for."""
        fresh = characters - self._known
        missing = {character for character in fresh if not character.isspace() and not self._has_id(character)}
        if missing:
            raise unseen(missing, self)
        self._known |= fresh

    def _has_id(self, character: str) -> bool:
        try:
            return bool(self._model.encode(character, add_special_tokens=False).ids)
        except Exception:  # the library raises plain Exception when an unknown token is named but has no id
            return False

    def _covers_every_text(self, described: dict[str, Any]) -> bool:
        """Whether this works on bytes, or has an id for what it does not know."""
        pre = described.get("pre_tokenizer") or {}
        kinds = {pre.get("type"), *(step.get("type") for step in pre.get("pretokenizers", []))}
        model = described["model"]
        unknown = model.get("unk_token")
        has_unknown = model.get("unk_id") is not None or (unknown and self._model.token_to_id(unknown) is not None)
        return "ByteLevel" in kinds or bool(model.get("byte_fallback") or has_unknown)


def train_bpe(texts: Iterable[str], vocabulary_size: int) -> LibraryTokenizer:
    """Byte-level byte-pair encoding learnt from a text: the 256 bytes, then merges until there are enough ids.

    A short text can give fewer ids. GPT-2's rule splits the text into words.
    """
    from tokenizers import Tokenizer as LibraryModel
    from tokenizers import decoders, models, pre_tokenizers, trainers

    model = LibraryModel(models.BPE())
    # The library's stubs don't declare these as settable.
    settable = cast(Any, model)
    settable.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    settable.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary_size, initial_alphabet=alphabet, show_progress=False)
    model.train_from_iterator(cut(texts), trainer)
    return LibraryTokenizer(model.to_str())


def read_tokenizer(path: Path | str, key: str = "data.tokenizer") -> Tokenizer:
    """The tokenizer in a file. Raises DataError, which names `key`, when there is none."""
    file = Path(path).expanduser()
    try:
        return Tokenizer.from_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{key}={path}: {error.strerror or error}. Give the path of a tokenizer.json.") from None
    except (UnicodeDecodeError, DataError) as error:
        raise DataError(f"{key}={path}: {error}") from None


def unseen(characters: Iterable[str], tokenizer: Tokenizer) -> DataError:
    """The error that names characters a tokenizer has no id for."""
    ordered = sorted(characters)
    named = ", ".join(f"{character!a} (U+{ord(character):04X})" for character in ordered[:_NAMED_CHARACTERS])
    more = f" and {len(ordered) - _NAMED_CHARACTERS} more" if len(ordered) > _NAMED_CHARACTERS else ""
    return DataError(
        f"the {tokenizer.name} tokenizer of {tokenizer.vocabulary} ids never saw {named}{more}. "
        "Leave these characters out, or train with data.tokenizer=byte or bpe, which cover every text."
    )


def _groups(texts: Iterable[str], size: int) -> Iterator[list[str]]:
    """The texts in lists of about `size` characters."""
    group: list[str] = []
    held = 0
    for text in texts:
        group.append(text)
        held += len(text)
        if held >= size:
            yield group
            group, held = [], 0
    if group:
        yield group


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


def _characters_of(described: Any) -> str | None:
    """The characters of a JSON that CharTokenizer wrote; None for any other."""
    model = described.get("model") if isinstance(described, dict) else None
    if not isinstance(model, dict) or model.get("type") != "WordLevel" or not isinstance(model.get("vocab"), dict):
        return None
    characters = list(model["vocab"])
    if not characters or any(len(character) != 1 or "\ud800" <= character <= "\udfff" for character in characters):
        return None
    joined = "".join(characters)
    return joined if CharTokenizer(joined).described == described else None


def _code_points(text: str) -> NDArray[Any]:
    if text.isascii():
        return np.frombuffer(text.encode("ascii"), np.uint8)
    return np.frombuffer(text.encode("utf-32-le"), "<u4")


def _visible_bytes() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2): itself or from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    stand_ins = iter(range(0x100, 0x200))
    return [chr(byte) if byte in visible else chr(next(stand_ins)) for byte in range(256)]
