"""Text from ids as they are drawn: where it ends, and the part that can be shown already."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from ttrain.core.names import with_line_breaks
from ttrain.data.end_token import end_ids, own_end
from ttrain.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Stop:
    """Ends of a sample, which are not printed: ids of tokens, and texts among what was drawn."""

    ids: frozenset[int] = frozenset()
    texts: tuple[str, ...] = ()

    @staticmethod
    def of(tokenizer: Any, texts: Sequence[str], end_token: str | None = None) -> Stop:
        """The token between documents, where the tokenizer has one, and `texts`, of which some may name special tokens.

        `end_token` is data.end_token. What the tokenizer's model says of its end counts too.
        """
        special = special_tokens(tokenizer)
        named = (tokenizer.token_id(text) for text in texts if text in special)
        ids = {end_id(tokenizer, end_token), *end_ids(getattr(tokenizer, "config", {})), *named}
        return Stop(frozenset(ids - {None}), tuple(with_line_breaks(text) for text in texts if text not in special))

    def also(self, tokenizer: Any, text: str | None) -> Stop:
        """Return these stops and a text, or the special token that it begins with."""
        if text is None:
            return self
        found = max(
            (token for token in special_tokens(tokenizer) if text.strip().startswith(token)), key=len, default=None
        )
        if found is None:
            return Stop(self.ids, (*self.texts, text))
        return Stop(self.ids | {tokenizer.token_id(found)}, self.texts)


def _shown(text: str, stops: Sequence[str]) -> tuple[int, bool]:
    """Return how many characters of a growing text can be shown, and True if a stop ends it there.

    That stop counts which ends first, and the longest of those. What may be the beginning of one is held back.
    """
    found = [(place + len(stop), -len(stop)) for stop in stops if (place := text.find(stop)) >= 0]
    if found:
        return sum(min(found)), True
    begun = (size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
    return len(text) - max(begun, default=0), False


def stream_text(
    tokenizer: Tokenizer, prompt: list[int], drawn: Iterator[int], write: Callable[[str], None], stop: Stop, echo: bool
) -> str:
    """Writes the text as tokens arrive, up to a stop, and returns it whole, where `echo` says so with the prompt.

    A character whose bytes are not all there yet is held back. Tokens are decoded together with those before them,
    because some tokenizers treat the start of a text differently. Of a prompt is not shown what the tokenizer puts
    before a text, nor one token that is no text, because it is a stop, special or unknown.
    """
    before = len(tokenizer.start) if prompt[: len(tokenizer.start)] == tokenizer.start else 0
    start = tokenizer.decode(prompt[before:])
    special = {*stop.ids, getattr(tokenizer, "unknown", None)}
    if not echo or (len(prompt) == 1 and (prompt[0] in special or start in special_tokens(tokenizer))):
        start = ""
    write(start)
    recent, known = list(prompt[-1:]), tokenizer.decode(prompt[-1:])
    whole, size, written, ends = "", 0, 0, False
    for token in takewhile(lambda token: token not in stop.ids, drawn):
        recent.append(token)
        text = tokenizer.decode(recent)
        if len(text) > len(known) and not text.endswith("\ufffd"):
            whole += text[len(known) :]
            size, ends = _shown(whole, stop.texts)
            if size > written:
                write(whole[written:size])
            recent, known, written = [token], tokenizer.decode([token]), max(size, written)
        if ends:
            break
    else:
        whole += tokenizer.decode(recent)[len(known) :]
        size, ends = _shown(whole, stop.texts)
    whole = whole[:size] if ends else whole
    if whole[written:]:
        write(whole[written:])
    return start + whole


def print_text(text: str) -> None:
    """Writes what a model wrote to stdout. A terminal, which would obey control characters, is shown them escaped."""
    if sys.stdout.isatty():
        text = re.sub(r"[\0-\x08\x0b-\x1f\x7f-\x9f]", lambda found: f"\\x{ord(found[0]):02x}", text)
    print(text, end="", flush=True)


def end_id(tokenizer: Any, end_token: str | None) -> int | None:
    """The token that ends a document, or the one that is named; None where the tokenizer has none of itself."""
    end = own_end(tokenizer, end_token)
    return None if end is None else end.id


def special_tokens(tokenizer: Any) -> set[str]:
    """Return the special tokens of a tokenizer; none of one that knows none."""
    return set(tokenizer.special_tokens()) if hasattr(tokenizer, "special_tokens") else set()
