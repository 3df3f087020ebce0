"""task=chat: a conversation with the model of run.dir=<run> or model.from=<folder>."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from typing import Any

from ttrain.config.schema import Config
from ttrain.core.errors import DataError
from ttrain.data.chat.conversation import Chat
from ttrain.tasks.opening import OpenedModel
from ttrain.tasks.sample import ending_of, opened_model
from ttrain.train.sampling.source import TokenSource
from ttrain.train.sampling.stream import TextStream, print_text


def run(config: Config) -> None:
    """Answers every line of stdin until it ends or Ctrl-C. `/reset` begins anew."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        # What is no text is refused as a message, and the talk goes on. Only a line feed ends a message.
        sys.stdin.reconfigure(errors="surrogateescape", newline="\n")
    with opened_model(config) as (given, source):
        talk = _Conversation(given, source)
        if sys.stdin.isatty():
            print("A line is a message. /reset begins anew; Ctrl-D or Ctrl-C ends.", file=sys.stderr)
        try:
            for line in _lines():
                if line.strip() == "/reset":
                    talk.reset()
                elif line.strip():
                    talk.answer(line)
        except KeyboardInterrupt:
            print(flush=True)


def _lines() -> Iterator[str]:
    """Yield the lines that the user writes."""
    mark = "\ufeff"  # that a file may begin with
    while True:
        try:
            yield input("> " if sys.stdin.isatty() else "").removesuffix("\r").removeprefix(mark)
        except EOFError:
            return
        mark = ""


class _Conversation:
    """The messages so far, and the replies that the model gives."""

    def __init__(self, given: OpenedModel, source: TokenSource) -> None:
        self._tokenizer, self._source, self._template = given.tokenizer, source, given.conversations()
        self._stop = given.stop.also(given.tokenizer, ending_of(self._template))
        system = source.config.system
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self._replies = 0  # so that every reply has random numbers of its own
        self.reset()

    def reset(self) -> None:
        self._messages: list[dict[str, Any]] = list(self._first)

    def answer(self, line: str) -> None:
        """Writes the reply to one message as it is drawn, and remembers both."""
        self._messages.append({"role": "user", "content": line})
        try:
            prompt = self._prompt()
        except (ValueError, DataError) as error:
            self._messages.pop()
            print(f"ttrain: {error}", file=sys.stderr)
            return
        drawn = self._source.tokens(prompt, self._replies)
        reply = TextStream(self._tokenizer, prompt, print_text, self._stop, echo=False).follow(drawn)
        print(flush=True)
        self._replies += 1
        self._messages.append({"role": "assistant", "content": reply.strip()})

    def _prompt(self) -> list[int]:
        """Ids of the conversation. The oldest exchanges are forgotten where no room would be left for a reply."""
        most = self._source.steps.context
        room = min(self._source.config.tokens, most // 2)
        while True:
            ids = self._tokenizer.encode(self._template.prompt(Chat(self._messages)))
            start = len(self._first)
            if len(ids) + room <= most or len(self._messages) <= start + 1:
                return ids
            del self._messages[start : start + 2]
            print("ttrain: the conversation outgrew the context; its oldest exchange is dropped.", file=sys.stderr)
