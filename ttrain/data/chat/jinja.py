"""The chat template of a tokenizer: it makes a text of a conversation, and marks the replies in it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

from ttrain.core.errors import DataError, raised_as
from ttrain.data.chat.conversation import REPLIES, Chat, fitted_calls, joined_parts
from ttrain.data.chat.messages import Rendered, Span
from ttrain.data.chat.sandbox import SANDBOX, Variant
from ttrain.data.end_token import CONFIG_FILE, read_folder_facts, read_tokenizer_config, token_text
from ttrain.data.gguf_file import gguf_settings, is_gguf

TEMPLATE_FILE = "chat_template.jinja"
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_PROBE = {"role": REPLIES, "content": "\ue001"}  # a reply that begins as no other does
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def chat_settings(file: Path) -> dict[str, Any]:
    """Return `tokenizer_settings` with a template. Raises DataError where there is none."""
    settings = tokenizer_settings(file)
    if "chat_template" not in settings:
        told = f"{file} has no chat template, in itself or in {TEMPLATE_FILE} or {CONFIG_FILE} beside it"
        mend = "Give the tokenizer.json of a model for chats, or data.template=chatml, plain or a text"
        raise DataError(f"data.template=tokenizer: {told}. {mend}.")
    return settings


def tokenizer_settings(file: Path) -> dict[str, Any]:
    """Return what the files beside a tokenizer.json say, in the form of a tokenizer_config.json.

    The keys are `chat_template`, a text, which a file of its own may hold; the special tokens that templates name; and
    what the config.json and generation_config.json of a model say, see `read_folder_facts`. Each is there where it is
    known. A GGUF file says the same in its metadata.
    """
    if is_gguf(file):
        return gguf_settings(file)
    config = read_tokenizer_config(file.with_name(CONFIG_FILE))
    found: Any = config.get("chat_template")
    beside = file.with_name(TEMPLATE_FILE)
    if os.path.exists(beside):
        with raised_as(DataError, f"{beside} can't be read", of=(OSError, UnicodeDecodeError)):
            found = beside.read_text("utf-8")
    if isinstance(found, list):  # several under names
        named = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
        found = named.get("default")
    special: dict[str, Any] = {name: text for name in SPECIAL if (text := token_text(config.get(name))) is not None}
    special |= read_folder_facts(file.parent)
    return {"chat_template": found, **special} if isinstance(found, str) else special


class TokenizerTemplate:
    """A chat template of Transformers, from `chat_settings`. With `replies` it tells what the assistant wrote.

    Replies are what the template itself marks with {% generation %}. In one without marks a reply reaches from the
    prompt for it, which the template makes, to where the next message begins. `place` says where the template is from.

    Raises DataError for what is no template, and where a rendering takes too long or too much memory.
    """

    def __init__(self, settings: Mapping[str, Any], replies: bool = False, place: object = "the tokenizer") -> None:
        self._source: str = settings["chat_template"]
        self._names = {name: settings[name] for name in SPECIAL if name in settings} | {"documents": None}
        self._marks = ("", "")
        if replies and _GENERATION.search(self._source):
            nonce = str(int.from_bytes(os.urandom(8), "big"))  # filters such as upper leave digits alone
            self._marks = (f"\ue000{nonce}(", f"\ue000{nonce})")
        self._replies, self._place = replies, place
        self._answer(Chat([]))

    def render(self, chat: Chat) -> Rendered:
        """Return a conversation as text. Raises ValueError, which says what is wrong with it."""
        chat = self._fitted(chat)
        text, compared = self._answer(chat, *self._variants(chat))
        for number, message in enumerate(chat.messages, 1):
            if isinstance(content := message.get("content"), dict) and repr(content) in text:
                raise ValueError(f"message {number} has as content an object, which the chat template can't write")
        if self._marks[0]:
            return _silenced(_unmarked(text, *self._marks), chat, [marks for _, _, marks in compared])
        around = [compared[place : place + 3] for place in range(0, len(compared), 3)]
        prompts = any(before != prompt for before, prompt, _ in around)
        spans = (self._reply(chat, text, *each, prompts) for each in zip(chat.replies, around, strict=False))
        return Rendered(text, tuple(spans))

    def prompt(self, chat: Chat) -> str:
        """Return the text that the next reply follows."""
        chat = self._fitted(chat)
        text, _ = self._answer(chat, (chat.messages, True))
        return _unmarked(text, *self._marks).text if self._marks[0] else text

    def _answer(self, chat: Chat, *variants: Variant) -> tuple[str, list[list[int]]]:
        """Return the text of the first variant of a conversation, and how further ones compare."""
        return SANDBOX.render(self._source, self._marks, {**self._names, "tools": chat.tools}, variants, self._place)

    def _fitted(self, chat: Chat) -> Chat:
        """Return the conversation with its values in the form that the template expects.

        A template that knows text alone writes a list or an object as Python does, and one that expects an object
        writes a text as JSON once more.
        """
        if not chat.messages:
            raise ValueError("has no messages")
        for number, message in enumerate(chat.messages, 1):
            if not isinstance(message.get("role"), str):
                raise ValueError(f"message {number} is not an object with a role")
        messages = [{key: value for key, value in each.items() if value is not None} for each in chat.messages]
        for fit in (joined_parts, fitted_calls):
            if any(fit(message, None) is not message for message in messages):
                try:
                    text = self._answer(chat, (messages, False))[0]
                except ValueError:
                    text = None
                messages = [fit(message, text) for message in messages]
        return chat._replace(messages=messages)

    def _variants(self, chat: Chat) -> list[Variant]:
        """Return what has to be rendered to find the replies of a conversation, the whole of it first."""
        messages = chat.messages
        found = [(messages, False)]
        if self._marks[0]:
            parts = range(1, len(messages) + 1) if chat.silent else ()
            return found + [(messages[:number], False) for number in parts]
        for number in chat.replies if self._replies else ():
            before = messages[:number] or [_PROBE]  # no template renders nothing
            found += [(before, False), (before, True), (messages[: number + 1], False)]
        return found

    def _reply(self, chat: Chat, text: str, number: int, around: list[list[int]], prompts: bool) -> Span:
        """Return where reply `number` lies in the text: after what the template writes before a reply.

        `around` compares the text before it, its prompt, and the text up to its end. `prompts` is True where the
        template writes prompts.
        """
        (shared, before, _), (prompt, asked, _), (same, end, _) = around
        if not number:
            return min(shared, end), end  # the probe's own prompt
        if shared < before or same < end:
            rewrites = "the tokenizer's chat template writes earlier messages another way once later ones follow"
            raise ValueError(f"message {number + 1}: {rewrites}, which hides the reply. Use data.loss_on=all")
        if prompt == asked == before:
            probed = [*chat.messages[:number], _PROBE]
            _, ((prompt, _, _),) = self._answer(chat, (chat.messages, False), (probed, False))
            if not text[before:prompt].strip():  # a blank belongs to the word after it
                return before, end
            if not prompts:
                ignores = "the tokenizer's chat template ignores add_generation_prompt"
                raise ValueError(
                    f"message {number + 1}: {ignores}, so {text[before:prompt]!r} before the reply would be learned "
                    "with it. Mend this, mark the replies with {% generation %}, or use data.loss_on=all"
                )
        return max(before, min(prompt, end)), end


def _silenced(rendered: Rendered, chat: Chat, counts: list[int]) -> Rendered:
    """Leave out the marked parts of messages that are not learned; `counts` are the parts up to each message."""
    if not chat.silent:
        return rendered
    if counts != sorted(counts) or counts[-1] != len(rendered.replies):
        raise ValueError("the tokenizer's chat template marks other parts once later messages follow")
    parts = [rendered.replies[start:end] for start, end in zip([0, *counts], counts, strict=False)]
    return rendered._replace(replies=tuple(chain(*(part for n, part in enumerate(parts) if n not in chat.silent))))


def _unmarked(text: str, opening: str, closing: str) -> Rendered:
    """Return the text without the marks, and what lay between them. Raises ValueError for nested marks."""
    split = re.split(f"({re.escape(opening)}|{re.escape(closing)})", text)
    texts, marks = split[::2], split[1::2]
    if marks != [opening, closing] * (len(marks) // 2) or any(opening[1:-1] in piece for piece in texts):
        raise ValueError("the tokenizer's chat template nests or changes what it marks with {% generation %}")
    ends = list(accumulate(map(len, texts)))
    return Rendered("".join(texts), tuple(zip(ends[::2], ends[1::2], strict=False)))
