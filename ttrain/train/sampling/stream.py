"""Text from ids as they are drawn: where it ends, and the part that can be shown already."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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
        """Return the stops of a tokenizer, and `texts`, of which some may name special tokens.

        Stops are the token that ends a document, `end_token` or the tokenizer's own, and those that its model names.
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

    The stop that ends first counts; if several do, the longest. Text that may begin a stop is held back.
    """
    found = [(place + len(stop), -len(stop)) for stop in stops if (place := text.find(stop)) >= 0]
    if found:
        return sum(min(found)), True
    begun = (size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
    return len(text) - max(begun, default=0), False


class TextStream:
    """Writes a text as its tokens arrive, up to a stop.

    A character whose bytes are not all there yet is held back. Tokens are decoded together with those before them,
    because some tokenizers treat the start of a text differently. Of a prompt, tokens that the tokenizer puts before a
    text are not shown. A prompt of one token that is a stop, special or unknown is not shown either.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: list[int], write: Callable[[str], object], stop: Stop, echo: bool
    ) -> None:
        """Write the prompt, if `echo` is true."""
        self._tokenizer, self._write, self._stop = tokenizer, write, stop
        before = len(tokenizer.start) if prompt[: len(tokenizer.start)] == tokenizer.start else 0
        self._start = tokenizer.decode(prompt[before:])
        special = {*stop.ids, getattr(tokenizer, "unknown", None)}
        if not echo or (len(prompt) == 1 and (prompt[0] in special or self._start in special_tokens(tokenizer))):
            self._start = ""
        write(self._start)
        self._recent, self._known = list(prompt[-1:]), tokenizer.decode(prompt[-1:])
        self._whole, self._written, self._ended = "", 0, False

    def push(self, token: int) -> bool:
        """Take in a token; return whether the text ends with it."""
        if token in self._stop.ids:
            return True
        self._recent.append(token)
        text = self._tokenizer.decode(self._recent)
        if len(text) > len(self._known) and not text.endswith("\ufffd"):
            self._show(text)
            self._recent, self._known = [token], self._tokenizer.decode([token])
        return self._ended

    def follow(self, drawn: Iterable[int]) -> str:
        """Take in tokens as they are drawn, up to the first that ends the text, and return it as `close` does."""
        any(map(self.push, drawn))
        return self.close()

    def close(self) -> str:
        """Write what was held back, and return the text, after an echo with its prompt."""
        if not self._ended:
            self._show(self._tokenizer.decode(self._recent))
            if self._whole[self._written :]:
                self._write(self._whole[self._written :])
        return self._start + self._whole

    def _show(self, text: str) -> None:
        """Write as much as can be shown of the text of the newest tokens."""
        self._whole += text[len(self._known) :]
        size, self._ended = _shown(self._whole, self._stop.texts)
        if size > self._written:
            self._write(self._whole[self._written : size])
        self._written = max(size, self._written)
        if self._ended:
            self._whole = self._whole[:size]


def print_text(text: str) -> None:
    """Write a model's text to stdout. On a terminal, which would obey control characters, they are escaped."""
    if sys.stdout.isatty():
        text = re.sub(r"[\0-\x08\x0b-\x1f\x7f-\x9f]", lambda found: f"\\x{ord(found[0]):02x}", text)
    print(text, end="", flush=True)


def end_id(tokenizer: Any, end_token: str | None) -> int | None:
    """Return the token that ends a document, `end_token` if it is given; None where the tokenizer has none."""
    end = own_end(tokenizer, end_token)
    return None if end is None else end.id


def special_tokens(tokenizer: Any) -> set[str]:
    """Return the special tokens of a tokenizer; none of one that knows none."""
    return set(tokenizer.special_tokens()) if hasattr(tokenizer, "special_tokens") else set()
