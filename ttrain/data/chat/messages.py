"""Messages of a conversation to one text, by templates that are filled in: nothing in them is ever run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from string import Formatter
from typing import Any, NamedTuple, TypeVar

from ttrain.core.errors import DataError
from ttrain.core.names import with_line_breaks
from ttrain.data.chat.conversation import REPLIES, Chat, joined_parts, json_kind

Span = tuple[int, int]  # start and end of characters
ROLES = ("system", "developer", "user", "assistant", "tool")

# One message each. {role} is the role as the row has it, {Role} begins with a capital letter.
TEMPLATES = {"plain": "{Role}: {content}\n", "chatml": "<|im_start|>{role}\n{content}<|im_end|>\n"}
_FIELDS = ("role", "Role", "content")
_Made = TypeVar("_Made")
_Part = tuple[str, str]  # a text, and the name of the field after it, empty where there is none


class Rendered(NamedTuple):
    """A conversation as text, and the parts of it that are replies."""

    text: str
    replies: tuple[Span, ...] = ()


def tried(make: Callable[..., _Made], *given: Any) -> _Made | Exception:
    """Return what is made, or the error of a conversation that can't be used."""
    try:
        return make(*given)
    except (ValueError, DataError) as error:
        return error


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
        try:
            parts = list(Formatter().parse(text))
        except ValueError as error:
            raise DataError(f"data.template={given!r}: {error}. Write a brace of the text twice.") from None
        for _, name, form, conversion in parts:
            if name is not None and (name not in _FIELDS or form or conversion):
                raise DataError(f"data.template={given!r}: has {{{name}}}, not {{role}}, {{Role}} or {{content}}.")
        if "content" not in {name for _, name, _, _ in parts}:
            raise DataError(f"data.template={given!r}: has no {{content}}, so every message would be the same.")
        place = next(place for place, (_, name, _, _) in enumerate(parts) if name == "content")
        whole: list[_Part] = [(literal, name or "") for literal, name, _, _ in parts]
        # What a message has before its first content, and after it.
        self._head: list[_Part] = [*whole[:place], (whole[place][0], "")]
        self._tail = whole[place + 1 :]

    def render(self, messages: Iterable[Any], tools: Any = None) -> Rendered:
        """Return a conversation as text. Raises ValueError, which says what is wrong with it."""
        return self._render(Chat.of(messages, tools))

    def render_all(self, chats: Sequence[Chat]) -> list[Rendered | Exception]:
        """Return conversations as texts, with a ValueError in the place of each that can't be used."""
        return [tried(self._render, chat) for chat in chats]

    def prompt(self, messages: Iterable[Any], tools: Any = None) -> str:
        """Return the text that the next reply follows."""
        chat = Chat.of(messages, tools)
        if chat.tools:
            raise ValueError("has tools, which only the template of a tokenizer can write")
        asked = [*chat.messages, {"role": REPLIES, "content": ""}]
        *told, (before, _) = (self._message(number, message) for number, message in enumerate(asked, 1))
        return "".join(map("".join, told)) + before.rstrip(" ")  # a blank belongs to the word after it

    def to_jinja(self) -> str:
        """Return a template for Transformers' apply_chat_template that writes the same."""
        fields = {"role": "message['role']", "Role": "message['role'] | capitalize", "content": "message['content']"}
        reply = {"role": _quoted(REPLIES), "Role": _quoted(REPLIES.capitalize())}

        def joined(parts: Iterable[_Part], values: Mapping[str, str]) -> str:
            return " ~ ".join(f"{_quoted(literal)} ~ {values.get(name, _quoted(''))}" for literal, name in parts)

        message = joined([*self._head, ("", "content"), *self._tail], fields)
        asked = joined([*self._head[:-1], (self._head[-1][0].rstrip(" "), "")], reply)
        return (
            f"{{%- set text %}}{{% for message in messages %}}{{{{ {message} }}}}{{% endfor %}}"
            f"{{% endset -%}}{{{{ text ~ {asked} if add_generation_prompt else text.rstrip('\\n') }}}}"
        )

    def _render(self, chat: Chat) -> Rendered:
        """Join the messages, without line breaks at the end. Of a reply its content and what follows it count."""
        text, replies, learnt = "", list[Span](), set(chat.replies)
        for number, message in enumerate(chat.messages):
            before, rest = self._message(number + 1, message)
            if number in learnt:
                replies.append((len(text) + len(before), len(text) + len(before) + len(rest)))
            text += before + rest
        text = text.rstrip("\n")
        return Rendered(text, tuple((start, min(end, len(text))) for start, end in replies))

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
        values = {"role": role, "Role": role.capitalize(), "content": content, "": ""}
        head, tail = ("".join(literal + values[name] for literal, name in part) for part in (self._head, self._tail))
        return head, content + tail


def _quoted(text: str) -> str:
    """Return a text as it is written in a template of Jinja2."""
    escaped = text.encode("unicode_escape").decode().replace("'", "\\'")
    return f"'{escaped}'"
