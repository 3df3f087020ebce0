"""The token that ends a document: the tokenizer's own, one that the user names, or an added one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttrain.core.errors import CheckpointError, DataError
from ttrain.core.files import read_json, read_object
from ttrain.core.names import did_you_mean
from ttrain.data.library_tokenizer import LibraryTokenizer, parse_tokenizer
from ttrain.data.tokenizer import Tokenizer

ADDED = "<|endoftext|>"
# What tokenizers call the end of a document; a separator serves where there is none of them.
_KNOWN = (ADDED, "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>")
_SEPARATORS = ("[SEP]",)
CONFIG_FILE = "tokenizer_config.json"
# What a model's folder says of its tokenizer beside it: a number, or of the end several, each of which ends a text.
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
MODEL_TYPE = "model_type"
OF_MODEL = (*TOKEN_IDS, MODEL_TYPE)  # what is known beside a tokenizer's config, and stands in that of a model
_WITH_IDS = (CONFIG_FILE, "config.json", "generation_config.json")  # the later counts


@dataclass(frozen=True)
class EndToken:
    """Text and id of the token that ends a document; `added` if the tokenizer did not have it."""

    text: str
    id: int
    added: bool


def with_end_token(tokenizer: Tokenizer, named: str | None, file: Path | None) -> tuple[Tokenizer, EndToken]:
    """Return the tokenizer, extended where it must be, and the token that ends a document.

    `named` is data.end_token; `file` is the tokenizer.json, None for a tokenizer made from the data. Without a name the
    token is the eos_token of the tokenizer_config.json beside the file, else the one known end token that the tokenizer
    has, else an added one. Raises DataError for a name that the file's tokenizer lacks, and where it has several known
    end tokens.
    """
    library = tokenizer if isinstance(tokenizer, LibraryTokenizer) else LibraryTokenizer(tokenizer.to_json())
    given = named
    if given is None and file is not None:
        given = tokenizer.config.get("eos_token")
    for names in (_KNOWN, _SEPARATORS) if given is None else ((given,),):
        found = {name: number for name in names if (number := library.token_id(name)) is not None}
        if len(found) > 1:
            which = "Say which ends a document: data.end_token=<token>"
            raise DataError(f"the tokenizer has {' and '.join(found)}. {which}.")
        for name, number in found.items():
            return library, EndToken(name, number, False)
    added = ADDED if given is None else given
    if given is not None and file is not None:
        key = "data.end_token" if named is not None else f"{CONFIG_FILE}: eos_token"
        near = did_you_mean(given, library.special_tokens())
        raise DataError(f"{key}={given}: {file} has no such token. {near} Give data.end_token=<token>.")
    if not added.strip():
        raise DataError(f"data.end_token={added!r}: must be visible text.")
    extended = library.with_token(added)
    number = extended.token_id(added)
    assert number is not None
    return extended, EndToken(added, number, True)


def own_end(tokenizer: Tokenizer | str, named: str | None) -> EndToken | None:
    """Return the token that ends a document, or the one named; None where the tokenizer has none, or several.

    The tokenizer may be given as JSON.
    """
    try:
        end = with_end_token(parse_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer, named, None)[1]
    except DataError:
        return None
    return None if end.added else end


def named_end(data: Any, tokenizer_config: Mapping[str, Any]) -> str | None:
    """Return data.end_token, else the eos_token of a tokenizer_config.json."""
    return getattr(data, "end_token", None) or token_text(tokenizer_config.get("eos_token"))


def read_tokenizer_config(file: Path) -> dict[str, Any]:
    """Return the content of a tokenizer_config.json, empty where there is none."""
    try:
        return read_object(file) if file.exists() else {}
    except CheckpointError as error:
        raise DataError(f"{error} Mend it, or give data.end_token=<token>.") from None


def read_folder_facts(folder: Path) -> dict[str, Any]:
    """Return `model_type` and the ids of special tokens that the configs of a model's folder name."""
    said = [read_json(folder / name) for name in _WITH_IDS]
    kind = next((kind for each in said if isinstance(kind := each.get(MODEL_TYPE), str)), None)
    return ({} if kind is None else {MODEL_TYPE: kind}) | {
        name: value for each in said for name in TOKEN_IDS if _is_ids(value := each.get(name))
    }


def end_ids(tokenizer_config: Mapping[str, Any]) -> list[int]:
    """Return the ids that end a text, by the configs of a model's folder."""
    given = tokenizer_config.get("eos_token_id", [])
    return list(given) if isinstance(given, list) else [given]


def _is_ids(value: Any) -> bool:
    numbers = value if isinstance(value, list) else [value]
    return bool(numbers) and all(type(number) is int and number >= 0 for number in numbers)


def token_text(described: Any) -> str | None:
    """Return the text of a special token from its entry in a tokenizer_config.json, None where there is none."""
    text = described.get("content") if isinstance(described, dict) else described
    return text if isinstance(text, str) and text else None
