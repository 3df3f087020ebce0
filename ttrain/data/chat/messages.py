"""Make one text of the messages of a conversation, by templates that are filled in. Nothing in them is run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from string import Formatter
from typing import Any, NamedTuple

from ttrain.core.errors import DataError, raised_as
from ttrain.core.names import with_line_breaks
from ttrain.data.chat.conversation import REPLIES, Chat, joined_parts, json_kind

Span = tuple[int, int]  # start and end of characters
ROLES = ("system", "developer", "user", "assistant", "tool")

# One message each. {role} is the role as the row has it, {Role} begins with a capital letter.
TEMPLATES = {"plain": "{Role}: {content}\n", "chatml": "<|im_start|>{role}\n{content}<|im_end|>\n"}
_FIELDS = ("role", "Role", "content")


class Rendered(NamedTuple):
    """A conversation as text, and the parts of it that are replies."""

    text: str
    replies: tuple[Span, ...] = ()


class Template:
    """A template that is filled in for each message: a named one, or a text with {role}, {Role} and {content}.

    In a text of the user's, a backslash with an n stands for a line break, and doubled braces for single ones. Raises
    DataError for an unknown name or another field.
    """

    def __init__(self, given: str) -> None:
        if given not in TEMPLATES and "{" not in given:
            names = " nor ".join((*TEMPLATES, "tokenizer"))
            raise DataError(f"data.template={given}: is neither {names}, nor a text such as '{{role}}: {{content}}'.")
        text = TEMPLATES.get(given, with_line_breaks(given))
        with raised_as(DataError, f"data.template={given!r}", "Write a brace of the text twice.", ValueError):
            parts = list(Formatter().parse(text))
        for _, name, form, conversion in parts:
            if name is not None and (name not in _FIELDS or form or conversion):
                raise DataError(f"data.template={given!r}: has {{{name}}}, not {{role}}, {{Role}} or {{content}}.")
        if "content" not in {name for _, name, _, _ in parts}:
            raise DataError(f"data.template={given!r}: has no {{content}}, so every message would be the same.")
        self._text = text

    def render(self, chat: Chat) -> Rendered:
        """Join the messages, without line breaks at the end. Of a reply its content and what follows it count.

        Raises ValueError, which says what is wrong with a conversation.
        """
        text, replies, learned = "", list[Span](), set(chat.replies)
        for number, message in enumerate(chat.messages):
            before, rest = self._message(number + 1, message)
            if number in learned:
                replies.append((len(text) + len(before), len(text) + len(before) + len(rest)))
            text += before + rest
        text = text.rstrip("\n")
        return Rendered(text, tuple((start, min(end, len(text))) for start, end in replies))

    def prompt(self, chat: Chat) -> str:
        """Return the text that the next reply follows."""
        if chat.tools:
            raise ValueError("has tools, which only the template of a tokenizer can write")
        asked = [*chat.messages, {"role": REPLIES, "content": ""}]
        *told, (before, _) = (self._message(number, message) for number, message in enumerate(asked, 1))
        return "".join(map("".join, told)) + before.rstrip(" ")  # a blank belongs to the word after it

    def to_jinja(self) -> str:
        """Return a template for Transformers' apply_chat_template that writes the same."""
        fields = {"role": "message['role']", "Role": "message['role'] | capitalize", "content": "message['content']"}
        reply = {"role": _quoted(REPLIES), "Role": _quoted(REPLIES.capitalize())}
        text = self._text.format(**{name: f"\0{name}\0" for name in _FIELDS})

        def joined(given: str, values: Mapping[str, str]) -> str:
            """Join the texts between fields with the values of these."""
            parts = re.split("\0(.*?)\0", given)
            return " ~ ".join(values[part] if number % 2 else _quoted(part) for number, part in enumerate(parts))

        asked = joined(text.partition("\0content\0")[0].rstrip(" "), reply)
        return (
            f"{{%- set text %}}{{% for message in messages %}}{{{{ {joined(text, fields)} }}}}{{% endfor %}}"
            f"{{% endset -%}}{{{{ text ~ {asked} if add_generation_prompt else text.rstrip('\\n') }}}}"
        )

    def _message(self, number: int, message: dict[str, Any]) -> tuple[str, str]:
        """Return what comes before the content of a message, and the rest."""
        if not {"role", "content"} <= message.keys():
            raise ValueError(f"message {number} is not an object with role and content")
        message = joined_parts(message, None)
        role, content = message["role"], message["content"]
        if role not in ROLES:
            given = repr(role) if isinstance(role, str) else json_kind(role)
            raise ValueError(f"message {number} has the role {given}; known are {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise ValueError(f"message {number} has as content {json_kind(content)}, not text")
        filled = self._text.format(role=role, Role=role.capitalize(), content="\0")
        head, _, tail = filled.partition("\0")
        return head, content + tail.replace("\0", content)


def _quoted(text: str) -> str:
    """Return a text as it is written in a template of Jinja2."""
    escaped = text.encode("unicode_escape").decode().replace("'", "\\'")
    return f"'{escaped}'"
