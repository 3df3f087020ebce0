"""Text from ids as they are drawn: what ends it, and what of it can be shown yet."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from ttrain.core.names import with_line_breaks
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
        from ttrain.data.end_token import end_ids

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


class _Writer:
    """Writes a text that grows up to the first stop in it; what may be the beginning of one is held back."""

    def __init__(self, stop: Stop, write: Callable[[str], None]) -> None:
        self._texts, self._write = stop.texts, write
        self._held, self.pieces = "", list[str]()
        self.stopped = False

    def add(self, text: str) -> None:
        """Goes on with `text`, a character at a time where stops are looked for: that which ends first counts."""
        for piece in text if self._texts else [text]:
            self._held += piece
            found = [stop for stop in self._texts if self._held.endswith(stop)]
            if found:
                self._held = self._held[: -len(max(found, key=len))]
                self.stopped = True
                break
        kept = 0 if self.stopped else max((_overlap(self._held, stop) for stop in self._texts), default=0)
        self._put(len(self._held) - kept)

    def close(self) -> str:
        """Writes what was held back; the whole text."""
        self._put(len(self._held))
        return "".join(self.pieces)

    def _put(self, count: int) -> None:
        if count:
            self.pieces.append(self._held[:count])
            self._write(self.pieces[-1])
            self._held = self._held[count:]


def _overlap(text: str, stop: str) -> int:
    """Number of characters at the end of a text that begin a stop."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


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
    writer = _Writer(stop, write)
    recent, shown = list(prompt[-1:]), tokenizer.decode(prompt[-1:])
    for token in takewhile(lambda token: token not in stop.ids, drawn):
        recent.append(token)
        text = tokenizer.decode(recent)
        if len(text) > len(shown) and not text.endswith("\ufffd"):
            writer.add(text[len(shown) :])
            recent, shown = [token], tokenizer.decode([token])
        if writer.stopped:
            break
    else:
        writer.add(tokenizer.decode(recent)[len(shown) :])
    return start + writer.close()


def print_text(text: str) -> None:
    """Writes what a model wrote to stdout. A terminal, which would obey control characters, is shown them escaped."""
    if sys.stdout.isatty():
        text = re.sub(r"[\0-\x08\x0b-\x1f\x7f-\x9f]", lambda found: f"\\x{ord(found[0]):02x}", text)
    print(text, end="", flush=True)


def end_id(tokenizer: Any, end_token: str | None) -> int | None:
    """The token that ends a document, or the one that is named; None where the tokenizer has none of itself."""
    from ttrain.data.end_token import own_end

    end = own_end(tokenizer, end_token)
    return None if end is None else end.id


def special_tokens(tokenizer: Any) -> set[str]:
    """Return the special tokens of a tokenizer; none of one that knows none."""
    return set(tokenizer.special_tokens()) if hasattr(tokenizer, "special_tokens") else set()
