"""Messages of a conversation to one text, by templates that are filled in: nothing in them is ever run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from string import Formatter
from typing import Any, NamedTuple

from ttrain.core.errors import DataError
from ttrain.core.names import with_line_breaks

Span = tuple[int, int]  # start and end of characters
TOOLS = "tools"  # column, or key of a row, with the tools that a conversation may call
REPLIES = "assistant"  # the role whose messages are replies
ROLES = ("system", "developer", "user", "assistant", "tool")

# One message each. {role} is the role as the row has it, {Role} begins with a capital letter.
TEMPLATES = {
    "plain": "{Role}: {content}\n",
    "chatml": "<|im_start|>{role}\n{content}<|im_end|>\n",
}
_PARTS = ("role", "Role", "content")


def json_kind(value: Any) -> str:
    """What a value of JSON is called there."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    kinds = {str: "a text", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return kinds.get(type(value), f"a {type(value).__name__}")  # tables hold more than JSON can


class Rendered(NamedTuple):
    """A conversation as text, and which parts of it are replies."""

    text: str
    replies: tuple[Span, ...] = ()


class Template:
    """What a message becomes: a named template, or a text with {role}, {Role} and {content}.

    In a text of the user's, the two characters `\\n` stand for a line break and doubled braces for single ones. Raises
    DataError for an unknown name or another field.
    """

    def __init__(self, given: str) -> None:
        if given not in TEMPLATES and "{" not in given:
            raise DataError(
                f"data.template={given}: is neither {' nor '.join((*TEMPLATES, 'tokenizer'))}, nor a text with "
                "{content} such as '{role}: {content}\\n'."
            )
        text = TEMPLATES.get(given, with_line_breaks(given))
        try:
            parts = list(Formatter().parse(text))
        except ValueError as error:
            raise DataError(f"data.template={given!r}: {error}. Write a brace of the text twice.") from None
        for _, name, form, conversion in parts:
            if name is not None and (name not in _PARTS or form or conversion):
                raise DataError(
                    f"data.template={given!r}: has {{{name}}}. Only {{role}}, {{Role}}, {{content}} can stand."
                )
        if "content" not in {name for _, name, _, _ in parts}:
            raise DataError(f"data.template={given!r}: has no {{content}}, so every message would be the same.")
        self._parts = [(literal, name) for literal, name, _, _ in parts]

    def render(self, messages: Iterable[Any], tools: Any = None) -> Rendered:
        """The conversation as one text; line breaks at its end are left out. Of a reply its content and what follows
        it count.

        Raises ValueError, which says what is wrong with a message.
        """
        text, replies = "", list[Span]()
        for number, message in enumerate(messages, 1):
            before, rest = self._message(number, message)
            if message["role"] == REPLIES:
                replies.append((len(text) + len(before), len(text) + len(before) + len(rest)))
            text += before + rest
        text = text.rstrip("\n")
        return Rendered(text, tuple((start, min(end, len(text))) for start, end in replies))

    def prompt(self, messages: Iterable[Any], tools: Any = None) -> str:
        """The text that the next reply follows."""
        asked = [*messages, {"role": REPLIES, "content": ""}]
        *told, (before, _) = (self._message(number, message) for number, message in enumerate(asked, 1))
        return "".join(map("".join, told)) + before.rstrip(" ")  # a blank belongs to the word after it

    def to_jinja(self) -> str:
        """The same as a template for Transformers' apply_chat_template."""
        fields = {"role": "message['role']", "Role": "message['role'] | capitalize", "content": "message['content']"}

        def joined(parts: Iterable[tuple[str, str | None]], values: Mapping[str, str]) -> str:
            return " ~ ".join(f"{_quoted(literal)} ~ {values.get(name or '', _quoted(''))}" for literal, name in parts)

        place = next(place for place, (_, name) in enumerate(self._parts) if name == "content")
        reply = {"role": _quoted(REPLIES), "Role": _quoted(REPLIES.capitalize())}
        asked = [*self._parts[:place], (self._parts[place][0].rstrip(" "), None)]
        return (
            f"{{%- set text %}}{{% for message in messages %}}{{{{ {joined(self._parts, fields)} }}}}{{% endfor %}}"
            f"{{% endset -%}}{{{{ text ~ {joined(asked, reply)} if add_generation_prompt else text.rstrip('\\n') }}}}"
        )

    def _message(self, number: int, message: Any) -> tuple[str, str]:
        """What comes before its content, and the rest."""
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise ValueError(f"message {number} is not an object with role and content")
        role, content = message["role"], message["content"]
        if role not in ROLES:
            given = repr(role) if isinstance(role, str) else json_kind(role)
            raise ValueError(f"message {number} has the role {given}; known are {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise ValueError(f"message {number} has as content {json_kind(content)}, not text")
        values = {"role": role, "Role": role.capitalize(), "content": content}
        parts = [literal + (values[name] if name is not None else "") for literal, name in self._parts]
        place = next(place for place, (_, name) in enumerate(self._parts) if name == "content")
        before = "".join(parts[:place]) + self._parts[place][0]
        return before, "".join(parts).removeprefix(before)


def _quoted(text: str) -> str:
    """As a text in a template of Jinja2."""
    escaped = text.encode("unicode_escape").decode().replace("'", "\\'")
    return f"'{escaped}'"
