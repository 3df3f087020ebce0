"""The chat template that a tokenizer brings, rendered in the sandbox, and which parts of a text are replies."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ttrain.core.errors import DataError
from ttrain.data.chat.messages import Rendered, Span
from ttrain.data.chat.sandbox import Exceeded, Meter, compiled
from ttrain.data.end_token import CONFIG_FILE, read_token_ids, read_tokenizer_config, token_text

TEMPLATE_FILE = "chat_template.jinja"
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def template_file(file: Path) -> Path:
    """Where the template of a tokenizer.json stands, if there is one."""
    beside = file.with_name(TEMPLATE_FILE)
    return beside if os.path.exists(beside) else file.with_name(CONFIG_FILE)


def chat_settings(file: Path, key: str = "data.template=tokenizer") -> dict[str, Any]:
    """`tokenizer_settings` with a template. Raises DataError where there is none."""
    settings = tokenizer_settings(file)
    if "chat_template" not in settings:
        raise DataError(
            f"{key}: neither {file.with_name(TEMPLATE_FILE)} nor chat_template in {file.with_name(CONFIG_FILE)} is "
            "there. Give the tokenizer.json of a model for chats, or data.template=chatml, plain or a text."
        )
    return settings


def tokenizer_settings(file: Path) -> dict[str, Any]:
    """What the files beside a tokenizer.json say, in the form of a tokenizer_config.json.

    That is `chat_template`, a text, which a file of its own may hold, and the special tokens that templates name, where
    they are there. The ids that the configs of a model beside it name come with them, under their names there.
    """
    config = read_tokenizer_config(file.with_name(CONFIG_FILE))
    found: Any = config.get("chat_template")
    beside = file.with_name(TEMPLATE_FILE)
    if os.path.exists(beside):
        try:
            found = beside.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{beside} can't be read: {error}.") from None
    if isinstance(found, list):  # several under names
        named = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
        found = named.get("default")
    special: dict[str, Any] = {name: text for name in SPECIAL if (text := token_text(config.get(name))) is not None}
    special |= read_token_ids(file.parent)
    return {"chat_template": found, **special} if isinstance(found, str) else special


class TokenizerTemplate:
    """A chat template of Transformers, from `chat_settings`. `replies` tells the parts that the assistant wrote.

    Those are what the template itself marks with {% generation %}. In one without marks a reply reaches from the prompt
    for it, which the template makes, to where the next message begins. `place` says where the template is from.

    Raises DataError for what is no template, and whenever a rendering takes too long or too much memory.
    """

    def __init__(self, settings: Mapping[str, Any], replies: bool = False, place: object = "the tokenizer") -> None:
        source: str = settings["chat_template"]
        self._names = {name: settings[name] for name in SPECIAL if name in settings}
        self._marks: tuple[str, ...] = ()
        if replies and _GENERATION.search(source):
            nonce = str(int.from_bytes(os.urandom(8), "big"))  # filters such as upper leave digits alone
            self._marks = (f"\ue000{nonce}(", f"\ue000{nonce})")
        self._replies, self._place, self._meter = replies, place, Meter()
        self._template = compiled(source, self._meter, *self._marks)

    def render(self, messages: Sequence[Any], tools: Any = None) -> Rendered:
        """A conversation as text. Raises ValueError, which says what is wrong with it."""
        if not messages:
            raise ValueError("has no messages")
        plain = _plain(messages)
        text = self._text(plain, tools)
        if not self._replies:
            return Rendered(text)
        if self._marks:
            return _unmarked(text, *self._marks)
        replies = (number for number, message in enumerate(plain) if message["role"] == "assistant")
        return Rendered(text, tuple(self._reply(text, plain, number, tools) for number in replies))

    def prompt(self, messages: Sequence[Any], tools: Any = None) -> str:
        """The text that the next reply follows."""
        text = self._text(_plain(messages), tools, True)
        return _unmarked(text, *self._marks).text if self._marks else text

    def _text(self, messages: list[Any], tools: Any, prompting: bool = False) -> str:
        from jinja2 import TemplateError

        known = {**self._names, "messages": messages, "tools": tools, "documents": None}
        self._meter.start()
        try:
            text: str = self._template.render(**known, add_generation_prompt=prompting)
        except Exceeded as error:
            raise DataError(
                f"the chat template of {self._place} {error}, so it may never end. Mend it, or give "
                "data.template=chatml, plain or a text."
            ) from None
        except TemplateError as error:
            raise ValueError(f"the tokenizer's chat template refuses it: {error.message or error}") from None
        except Exception as error:  # whatever a template may do wrong
            raise ValueError(f"the tokenizer's chat template fails: {type(error).__name__}: {error}") from None
        return text

    def _reply(self, text: str, messages: list[Any], number: int, tools: Any) -> Span:
        """Where reply `number` lies in the text: after what the template writes before a reply."""
        before, prompt = (self._text(messages[:number], tools, asked) if number else "" for asked in (False, True))
        through = self._text(messages[: number + 1], tools)
        if not (through.startswith(before) and text.startswith(through)):
            raise ValueError(
                f"message {number + 1}: the tokenizer's chat template writes earlier messages another way once later "
                "ones follow, so the reply can't be told from the rest. Use data.loss_on=all"
            )
        shared = next((place for place, pair in enumerate(zip(prompt, through)) if pair[0] != pair[1]), len(prompt))
        return max(len(before), min(shared, len(through))), len(through)


def _plain(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages without what is null, which templates would write as None."""
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {number} is not an object with a role")
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def _unmarked(text: str, opening: str, closing: str) -> Rendered:
    """The text without the marks, and what lay between them. Raises ValueError where they stand inside each other."""
    spans: list[Span] = []
    whole = start = 0
    pieces: list[str] = []
    split = re.split(f"({re.escape(opening)}|{re.escape(closing)})", text)
    marks = split[1::2]
    if marks != [opening, closing] * (len(marks) // 2) or any(opening[1:-1] in piece for piece in split[::2]):
        raise ValueError("the tokenizer's chat template nests or changes what it marks with {% generation %}")
    for piece in split:
        if piece == opening:
            start = whole
        elif piece == closing:
            spans.append((start, whole))
        else:
            pieces.append(piece)
            whole += len(piece)
    return Rendered("".join(pieces), tuple(spans))
