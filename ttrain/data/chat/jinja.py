"""The chat template that a tokenizer brings, run in Jinja2's sandbox with what Transformers puts in its reach."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from ttrain.core.errors import DataError
from ttrain.data.chat.messages import Rendered, Span
from ttrain.data.end_token import CONFIG_FILE, read_tokenizer_config, token_text

TEMPLATE_FILE = "chat_template.jinja"
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_SAFE = (3, 1, 6)  # earlier versions of Jinja2 have known ways out of the sandbox


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
    they are there.
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
    special = {name: text for name in SPECIAL if (text := token_text(config.get(name))) is not None}
    return {"chat_template": found, **special} if isinstance(found, str) else special


class TokenizerTemplate:
    """A chat template of Transformers, from `chat_settings`. `replies` tells the parts that the assistant wrote.

    Those are what the template itself marks with {% generation %}. In one without marks a reply reaches from the prompt
    for it, which the template makes, to where the next message begins. Raises DataError for what is no template.
    """

    def __init__(self, settings: Mapping[str, Any], replies: bool = False) -> None:
        source: str = settings["chat_template"]
        self._names = {name: settings[name] for name in SPECIAL if name in settings}
        self._marks: tuple[str, ...] = ()
        if replies and _GENERATION.search(source):
            nonce = str(int.from_bytes(os.urandom(8), "big"))  # filters such as upper leave digits alone
            self._marks = (f"\ue000{nonce}(", f"\ue000{nonce})")
        self._replies = replies
        self._template = _compiled(source, *self._marks)

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
        try:
            text: str = self._template.render(**known, add_generation_prompt=prompting)
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


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:  # json.dumps takes more, such as a class that it would call
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _compiled(source: str, opening: str = "", closing: str = "") -> Any:
    """The template in a sandbox: nothing of Python but data, no change to what it is given, no import, no file."""
    try:
        import jinja2
        from jinja2 import ext, nodes
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise DataError("data.template=tokenizer needs the package jinja2: pip install 'ttrain[hf]'.") from None
    if tuple(int(part) for part in re.findall(r"\d+", jinja2.__version__)[:3]) < _SAFE:
        raise DataError(f"jinja2 {jinja2.__version__} has holes in its sandbox: pip install -U 'jinja2>=3.1.6'.")

    class Generation(ext.Extension):
        """{% generation %} .. {% endgeneration %}: what the assistant wrote."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{opening}{caller()}{closing}"

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except Exception as error:  # such as Python's own where too many blocks stand inside each other
        line = getattr(error, "lineno", None)
        why = str(error) or type(error).__name__
        raise DataError(f"the tokenizer's chat template{f', line {line}' if line else ''}: {why}.") from None
