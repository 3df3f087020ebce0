"""Tokenizers from a `tokenizer.json`, which the `tokenizers` library runs, and those that it trains."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import accumulate, groupby, islice, takewhile, tee
from pathlib import Path
from string import ascii_letters
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ttrain.core.errors import DataError, raised_as
from ttrain.core.folders import at_home
from ttrain.data.corpus import cut
from ttrain.data.gguf_file import gguf_tokenizer, is_gguf
from ttrain.data.tokenizer import UNKNOWN, ByteTokenizer, CharTokenizer, Ids, Tokenizer, UnseenText

Marks = NDArray[np.bool_]  # of the tokens of a text

CALL_CHARACTERS = 1 << 20  # what the library encodes in parallel in one call
_NO_TOKEN = "\ue000no token\ue000"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def parse_tokenizer(text: str) -> Tokenizer:
    """The tokenizer that a tokenizer.json describes. Raises DataError when it describes none."""
    with raised_as(DataError, "the tokenizer is not JSON", "Give a tokenizer.json.", (ValueError, RecursionError)):
        described = json.loads(text)
    if isinstance(described, dict):
        described = {**described, "truncation": None, "padding": None}  # no tokenizer here obeys them
    return _own(described) or LibraryTokenizer(text)


def read_tokenizer(path: Path | str, key: str = "data.tokenizer") -> Tokenizer:
    """The tokenizer in a tokenizer.json or a GGUF file. Raises DataError, which names `key`, when there is none."""
    file = at_home(path)
    with (
        raised_as(DataError, f"{key}={path}", "Give the path of a tokenizer.json."),
        raised_as(DataError, f"{key}={path}", of=(UnicodeDecodeError, DataError)),
    ):
        return parse_tokenizer(gguf_tokenizer(file) if is_gguf(file) else file.read_text(encoding="utf-8"))


class LibraryTokenizer(Tokenizer):
    """Tokenizer of any tokenizer.json, run by the `tokenizers` library. No special tokens are added to a text.

    Settings of the file that are meant for single sentences are off, see `_switch_off`; `notices` tells which. A text
    is encoded as a whole, whatever the pieces that the library gets: only its start is treated as the start of a text.
    """

    def __init__(self, text: str) -> None:
        self._model = _library_model(text)
        described = json.loads(self._model.to_str())
        self.notices = tuple(_switch_off(described))
        if self.notices:
            text = json.dumps(described)
            self._model = _library_model(text)
        ids = self._model.get_vocab(with_added_tokens=True).values()
        if not ids:
            raise DataError("the tokenizer has an empty vocabulary. Give another tokenizer.json.")
        self._text, self.described = text, described
        self.name = str(described["model"].get("type") or "library").lower()
        self.vocabulary = max(ids) + 1
        self.unknown = described["model"].get("unk_id")
        if unknown := described["model"].get("unk_token"):
            self.unknown = self.token_id(unknown)
        steps = _parts(described.get("normalizer"))
        self.normalizers = [str(step["type"]) for step in steps if step["type"] != "Sequence"]
        _refuse_unknown(self._model)

    def encode_pieces(self, texts: Iterable[str]) -> Iterator[Ids]:
        pieces = ((piece, not number) for number, piece in enumerate(cut(texts)))
        yield from (self._ids([encoding]) for encoding in self._encoded(pieces))

    def encode_documents(self, texts: Iterable[str]) -> Iterator[Ids]:
        """Yield the ids of each text. Several go through the library in one call, which it spreads over the cores."""
        yield from (self._ids(encodings) for _, encodings in self._documents(texts))

    def encode_marked(self, texts: Iterable[tuple[str, Sequence[tuple[int, int]]]]) -> Iterator[tuple[Ids, Marks]]:
        """Yield the ids of texts, and for each token if it holds characters of the text's parts."""
        texts, again = tee(texts)
        for (pieces, encodings), (_, parts) in zip(self._documents((text for text, _ in texts), True), again):
            starts = accumulate(map(len, pieces), initial=0)
            places = [np.array(each.offsets, np.int64).reshape(-1, 2) + start for each, start in zip(encodings, starts)]
            first, end = np.concatenate([np.zeros((0, 2), np.int64), *places]).T
            end = np.maximum(end, first + 1)  # a token that covers nothing, as one of blanks may, counts where it is
            marks = [(first < stop) & (end > start) for start, stop in parts]
            yield self._ids(encodings), np.any([np.zeros(len(first), np.bool_), *marks], axis=0)

    @property
    def start(self) -> list[int]:
        """Ids that the post-processor puts before a text, as in Transformers 5; none where a config of ours says so."""
        return [] if self.config.get("add_bos_token") is False else _start(self.described.get("post_processor"))

    def token_id(self, token: str) -> int | None:
        """The id of a token by its text, None where there is no such token."""
        return self._model.token_to_id(token)

    def special_tokens(self) -> list[str]:
        """Texts of the tokens that no text is split into."""
        return [str(token.content) for token in self._model.get_added_tokens_decoder().values()]

    def with_token(self, token: str) -> LibraryTokenizer:
        """Return a copy with one special token more, under the next id."""
        model = _library_model(self._text)
        model.add_special_tokens([token])
        extended = LibraryTokenizer(model.to_str())
        extended.notices = self.notices
        return extended

    def decode(self, ids: Sequence[int]) -> str:
        known = [int(i) for i in ids if 0 <= i < self.vocabulary]
        return self._model.decode(known, skip_special_tokens=False) + UNKNOWN * (len(ids) - len(known))

    def byte_counts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Bytes of each id. Tokens of bytes are counted by their names: a part of a character decodes to nothing."""
        decoders = {part["type"] for part in _parts(self.described.get("decoder"))}
        added = {token.content for token in self._model.get_added_tokens_decoder().values()}
        vocabulary = self._model.get_vocab(with_added_tokens=True)
        # A token as it looks behind another one, which is a letter if there is one: some decoders join or part them.
        anchor = next((vocabulary[letter] for letter in ascii_letters if letter in vocabulary), 0)
        tokens = sorted(vocabulary.values())
        texts = self._model.decode_batch([[], [anchor], *([token] for token in tokens)], skip_special_tokens=False)
        pairs = self._model.decode_batch([[anchor, token] for token in tokens], skip_special_tokens=False)
        counts = np.zeros((2, self.vocabulary), np.int64)
        before = len(texts[1].encode())
        counts[0, tokens] = [len(text.encode()) - before for text in pairs]
        counts[1, tokens] = [len(text.encode()) for text in texts[2:]]
        for name, token in vocabulary.items():
            if name in added:
                counts[:, token] = len(name.encode())
            elif "ByteLevel" in decoders:
                counts[:, token] = len(name)
            elif "ByteFallback" in decoders and _BYTE_TOKEN.fullmatch(name):
                counts[:, token] = 1
        return counts[0], counts[1]

    def to_json(self) -> str:
        return self._text

    @cached_property
    def _continuing(self) -> Any:
        """The library's model for what follows the start of a text: it puts nothing in front."""
        described = json.loads(json.dumps(self.described))
        for part in _parts(described.get("pre_tokenizer")):
            if part["type"] == "ByteLevel":
                part["add_prefix_space"] = False
            elif part["type"] == "Metaspace":
                part["prepend_scheme"] = "never"
        described["normalizer"] = _without(described.get("normalizer"), "Prepend")
        return self._model if described == self.described else _refuse_unknown(_library_model(json.dumps(described)))

    def _ids(self, encodings: Iterable[Any]) -> Ids:
        return np.concatenate([np.zeros(0, self.dtype), *(np.asarray(each.ids, self.dtype) for each in encodings)])

    def _documents(self, texts: Iterable[str], offsets: bool = False) -> Iterator[tuple[list[str], list[Any]]]:
        """Yield the pieces of each text and their encodings."""
        documents, again = tee([*cut([text])] for text in texts)
        pieces = ((piece, not number) for document in again for number, piece in enumerate(document))
        encodings = self._encoded(pieces, offsets)
        for document in documents:
            yield document, [*islice(encodings, len(document))]

    def _encoded(self, pieces: Iterable[tuple[str, bool]], offsets: bool = False) -> Iterator[Any]:
        """Yield the encodings of pieces, each given with True if it begins a text; a call has `CALL_CHARACTERS`."""
        pieces, again = tee(pieces)
        ends = accumulate(len(piece) for piece, _ in again)
        for (_, begins), group in groupby(zip(ends, pieces), lambda pair: (pair[0] // CALL_CHARACTERS, pair[1][1])):
            yield from self._encodings([piece for _, (piece, _) in group], begins, offsets)

    def _encodings(self, pieces: list[str], begins: bool, offsets: bool) -> list[Any]:
        model = self._model if begins else self._continuing
        encode = model.encode_batch if offsets else model.encode_batch_fast
        try:
            return list(encode(pieces, add_special_tokens=False))
        except Exception as error:  # the library raises plain Exception
            words = (word for piece in pieces if self._fails(piece) for word in (*piece.split(), piece))
            word = next(filter(self._fails, words), None)
            if word is None:
                raise DataError(f"the tokenizers library cannot encode the text: {error}. Give another.") from None
            # Some models know a character at the start or the end of a word alone.
            failing = {character for character in {*word} if self._fails(character) or self._fails(character * 3)}
            raise UnseenText(failing if 0 < len(failing) < len({*word}) else [word], self) from None

    def _fails(self, text: str) -> bool:
        with suppress(Exception):  # as above
            self._model.encode(text, add_special_tokens=False)
            return False
        return True


def train_bpe(texts: Iterable[str], vocabulary_size: int) -> LibraryTokenizer:
    """Byte-level byte-pair encoding learned from a text: the 256 bytes, then merges until there are enough ids.

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


def _own(described: Any) -> Tokenizer | None:
    """The tokenizer of bytes or characters that a JSON is of; None for any other."""
    if described == ByteTokenizer().described:
        return ByteTokenizer()
    try:
        characters = "".join(described["model"]["vocab"]) if described["model"]["type"] == "WordLevel" else ""
        tokenizer = CharTokenizer(characters)
    except (LookupError, TypeError, ValueError):
        return None
    return tokenizer if characters and tokenizer.described == described else None


def _library_model(text: str) -> Any:
    from tokenizers import Tokenizer as LibraryModel

    with raised_as(DataError, "the tokenizers library cannot read the tokenizer", "Give another.", Exception):
        return LibraryModel.from_str(text)


def _switch_off(described: dict[str, Any]) -> Iterator[str]:
    """Take out of a description what would cut, lengthen or vary each piece of a text, and tell of each."""
    for key, does in (("truncation", "nothing is cut"), ("padding", "nothing is padded")):
        if described.get(key) is not None:
            described[key] = None
            yield f"The tokenizer's {key} is left off: {does}."
    if described["model"].get("dropout"):
        described["model"]["dropout"] = None
        yield "The tokenizer's dropout is left off: a text always gets the same tokens."
    if any(part["type"] == "Strip" for part in _parts(described.get("normalizer"))):
        described["normalizer"] = _without(described["normalizer"], "Strip")
        yield "The tokenizer's normalizer Strip is left off: blanks at the ends of a text are kept."


def _refuse_unknown(model: Any) -> Any:
    """The model, which fails where byte-pair encoding would drop in silence what it has no id for.

    It does so where it has an unknown token that is none of its tokens.
    """
    if getattr(model.model, "unk_token", "") is None:
        model.model.unk_token = _NO_TOKEN
    return model


def _parts(step: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield a normalizer, pre-tokenizer, decoder or post-processor of a description, and all parts of a sequence."""
    if step:
        yield step
        for key in ("normalizers", "pretokenizers", "decoders", "processors"):
            for child in step.get(key, ()):
                yield from _parts(child)


def _start(post_processor: dict[str, Any] | None) -> list[int]:
    """Ids that a post-processor of a description puts before a text."""
    for part in _parts(post_processor):
        if "cls" in part:
            return [part["cls"][1]]
        if "single" in part:
            before = takewhile(lambda piece: "SpecialToken" in piece, part["single"])
            return [number for piece in before for number in part["special_tokens"][piece["SpecialToken"]["id"]]["ids"]]
    return []


def _without(step: dict[str, Any] | None, kind: str) -> dict[str, Any] | None:
    """A normalizer without its parts of one kind."""
    if step is None or step["type"] == kind:
        return None
    if step["type"] != "Sequence":
        return step
    return {**step, "normalizers": [kept for child in step["normalizers"] if (kept := _without(child, kind))]}
