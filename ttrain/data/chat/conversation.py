"""Conversations in rows: messages, tools, and the messages that are targets."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any, NamedTuple

TOOLS = "tools"  # column, or key of a row, with the tools that a conversation may call
CALLS = "tool_calls"  # key of a message with the calls of tools
REPLIES = "assistant"  # the role whose messages are replies

# Keys of a message that say if it is learned, by the value that means so.
LEARNED = {"weight": True, "train": True, "training": True, "loss": True, "masked": False}
_WORDS = {"weight", "weights", "train", "training", "trainable", "loss", "mask", "masked", "learn"}


def json_kind(value: Any) -> str:
    """Return the name of a value's type in JSON."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    kinds = {str: "a text", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return kinds.get(type(value), f"a {type(value).__name__}")  # tables hold more than JSON can


class Chat(NamedTuple):
    """A conversation: its messages, the tools that it may call, and the messages that are not learned (from 0)."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    silent: frozenset[int] = frozenset()

    @classmethod
    def of(cls, messages: Any, tools: Any = None, learns: str | None = None) -> Chat:
        """Return the conversation of a row; messages, tools and parts of them may be JSON as text.

        `learns` is data.loss_on where it is learned. Raises ValueError for what can't be read, or not be learned so.
        """
        given = parsed(messages)
        if not isinstance(given, list):
            raise ValueError(f"has {json_kind(given)}, not a list of messages")
        kept, silent = [], set()
        for number, message in enumerate(map(parsed, given)):
            if not isinstance(message, dict):
                raise ValueError(f"message {number + 1} is not an object with role and content")
            if learns is not None and not _is_learned(number + 1, message, learns):
                silent.add(number)
            _require_text_parts(number + 1, message.get("content"))
            kept.append(
                {key: parsed(value) if key == CALLS else value for key, value in message.items() if key not in LEARNED}
            )
        return cls(kept, _tools(tools), frozenset(silent))

    @property
    def replies(self) -> list[int]:
        """Numbers of the replies that are learned, from 0."""
        told = enumerate(self.messages)
        return [number for number, each in told if each.get("role") == REPLIES and number not in self.silent]


def parsed(value: Any) -> Any:
    """Return the object or list that a text holds as JSON, and any other value as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def _tools(given: Any) -> list[dict[str, Any]] | None:
    tools = None if isinstance(given, str) and given.strip() in ("", "null") else parsed(given)
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise ValueError(f"'tools' is {json_kind(tools)}, not a list of objects")
    found = [_with_parsed(parsed(tool), "function", "parameters") for tool in tools]
    for number, tool in enumerate(found, 1):
        if not isinstance(tool, dict) or not isinstance(tool.get("function", tool), dict):
            raise ValueError(f"tool {number} is {json_kind(tool)}, not an object such as {{'type': 'function', ..}}")
    return found


def _with_parsed(value: Any, *keys: str) -> Any:
    """Parse the texts under the keys of an object and, one level down, of what these hold."""
    if not isinstance(value, dict):
        return value
    return {key: _with_parsed(parsed(item), *keys) if key in keys else item for key, item in value.items()}


def _is_learned(number: int, message: dict[str, Any], learns: str) -> bool:
    """True unless a message says that it is not learned. Raises ValueError for what data.loss_on can't follow."""
    said: dict[str, bool] = {}
    for key, value in message.items():
        if value is None or not _WORDS & set(re.findall("[a-z]+", str(key).lower())):
            continue
        if key not in LEARNED or value not in (0, 1):
            what = f"{key}={value!r}" if key in LEARNED else f"the key {key!r}"
            say = f"{', '.join(LEARNED)} with 0, 1, true or false say if a message is learned"
            raise ValueError(f"message {number} has {what}; {say}")
        said[key] = bool(value) == LEARNED[key]
    if len({*said.values()}) > 1:
        raise ValueError(f"message {number}: {' and '.join(said)} contradict each other. Leave one of them out")
    role = message.get("role")
    learned = all(said.values())
    if said and learns == "all" and not learned:
        out = f"message {number}: its {next(iter(said))} takes it out of the loss, but data.loss_on=all trains on it"
        raise ValueError(f"{out}. Give data.loss_on=replies, or leave the key out")
    if said and learns == "replies" and learned and role != REPLIES:
        into = f"message {number}: its {next(iter(said))} puts a message of the role {role!r} into the loss"
        only = f"data.loss_on=replies trains only on the role {REPLIES!r}"
        raise ValueError(f"{into}, but {only}. Give data.loss_on=all, or leave the key out")
    return learned


def _require_text_parts(number: int, content: Any) -> None:
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else None
            raise ValueError(f"message {number} has a part of type {kind!r}, but only 'text' with a text can be read")


def joined_parts(message: dict[str, Any], shown: str | None) -> dict[str, Any]:
    """Return a message with the parts of its content as one text, unless a template that got the parts reads them.

    `shown` is what that template wrote, None where it failed.
    """
    content = message.get("content")
    if not isinstance(content, list) or not (shown is None or any(repr(part) in shown for part in content)):
        return message
    return {**message, "content": "".join(part["text"] for part in content)}


def fitted_calls(message: dict[str, Any], shown: str | None) -> dict[str, Any]:
    """Return a message with the arguments of its calls in the other form, object or JSON, where a template needs it.

    `shown` is what the template wrote of the form that they have, None where it failed.
    """
    calls = message.get(CALLS)
    if not isinstance(calls, list):
        return message
    return {**message, CALLS: [_fitted_call(call, shown) for call in calls]}


def _fitted_call(call: Any, shown: str | None) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(function := call.get("function"), dict):
        return {**call, "function": _fitted_call(function, shown)}
    given, written = call.get("arguments"), json.dumps(call.get("arguments"), ensure_ascii=False)
    if isinstance(given, str) and (shown is None or written in shown):  # JSON of JSON
        return {**call, "arguments": parsed(given)}
    if isinstance(given, dict) and (shown is None or repr(given) in shown):
        return {**call, "arguments": written}
    return call
