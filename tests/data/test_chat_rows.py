"""Rows of conversations as public data sets hold them: JSON in texts, parts, weights; against Transformers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.conftest import configured, theirs
from tests.data.test_chat_templates import TEMPLATES, opened
from ttrain.core.errors import DataError
from ttrain.data.chat import jinja, sandbox
from ttrain.data.chat.conversation import Chat
from ttrain.data.chat.jinja import TokenizerTemplate
from ttrain.data.chat.messages import Rendered, Template
from ttrain.data.settings import DocumentsConfig
from ttrain.data.sources import DocumentReader, find_sources

pytestmark = pytest.mark.usefixtures("empty_place")
ASK, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello."}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "é": []}}}
SHOWN = "{{ tools | tojson if tools else '-' }}|{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
LOOPED = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endif %}\n{% endfor %}"
)
CALLED = "{% for m in messages %}{% for call in m.tool_calls %}{{ CALL }}{% endfor %}{{ m.role }}\n{% endfor %}"


def text_of(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def texts(folder: Path, jinja_text: str, *rows: Any, table: bool = False, **options: Any) -> list[str]:
    """Documents of rows, in a .jsonl file or a table."""
    configured(folder, jinja_text)
    file = Path("rows.parquet" if table else "rows.jsonl")
    if table:
        pq.write_table(pa.Table.from_pylist(list(rows)), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    given = {"tokenizer": str(folder / "tokenizer.json"), "template": "tokenizer", **options}
    config = DocumentsConfig(sources=[str(file)], **given)
    found = find_sources(config)
    return [document.text for document in DocumentReader(config).in_turn(found, [len] * len(found))]


def expected(folder: Path, template: str, messages: Any, tools: Any = None) -> str:
    return str(theirs(folder, template).apply_chat_template(messages, tools=tools, tokenize=False))


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize(
    "tools",
    [
        text_of([TOOL]),
        [text_of(TOOL)],
        [{**TOOL, "function": text_of(TOOL["function"])}],
        [{**TOOL, "function": {**TOOL["function"], "parameters": text_of(TOOL["function"]["parameters"])}}],  # type: ignore[dict-item]
        [TOOL],
    ],
)
def test_tools_and_messages_may_be_json_as_text(folder: Path, tools: Any, table: bool) -> None:
    messages = [ASK, ANSWER]
    wanted = expected(folder, SHOWN, messages, [TOOL])
    if not (table and tools == [TOOL]):  # a struct without fields is none in Parquet
        assert texts(folder, SHOWN, {"messages": messages, "tools": tools}, table=table) == [wanted]
    row = {"messages": text_of(messages), "tools": text_of([TOOL])}
    assert texts(folder, SHOWN, row, {**row, "tools": " "}, table=table) == [wanted, expected(folder, SHOWN, messages)]


@pytest.mark.parametrize("tools", ["look_up", "{", {"name": "look_up"}, 5, ["look_up"], [5], [{"function": "look_up"}]])
def test_tools_that_are_no_list_of_objects_are_refused(folder: Path, tools: Any) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .*tool.*not (a list|an object)"):
        texts(folder, SHOWN, {"messages": [ASK, ANSWER], "tools": tools})


@pytest.mark.parametrize("given", [{"word": "é", "n": [1]}, '{"word": "é", "n": [1]}'])
@pytest.mark.parametrize(
    ("written", "takes"),
    [
        ("call.function.arguments | tojson", dict),
        ("call | tojson", dict),
        ("call.function.arguments", str),
        ("call.function.name + call.function.arguments", str),
        ("call.function.arguments if call.function.arguments is string else call.function.arguments | tojson", str),
    ],
)
def test_arguments_of_calls_have_the_form_that_the_template_writes(
    folder: Path, written: str, takes: type, given: Any
) -> None:
    def chat(arguments: Any) -> list[Any]:
        return [ASK, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]

    template, value = CALLED.replace("CALL", written), {"word": "é", "n": [1]}
    wanted = expected(folder, template, chat(value if takes is dict else text_of(value)))
    calls_as_text = chat(given)
    calls_as_text[1] = {**calls_as_text[1], "tool_calls": text_of(calls_as_text[1]["tool_calls"])}
    assert texts(folder, template, chat(given), calls_as_text) == [wanted] * 2 and "word" in wanted


@pytest.mark.parametrize("template", ["plain", "chatml", SHOWN, LOOPED, SHOWN.replace("m.content", "'' + m.content")])
def test_parts_of_text_are_joined_unless_the_template_reads_parts(folder: Path, template: str) -> None:
    parts = [{"type": "text", "text": "It's "}, {"type": "text", "text": "me."}]
    chat = [{"role": "user", "content": parts}, ANSWER]
    if template in ("plain", "chatml"):
        wanted, options = (
            Template(template).render([{**ASK, "content": "It's me."}, ANSWER]).text,
            {"template": template},
        )
    else:
        wanted, options = expected(folder, template, [{**ASK, "content": "It's me."}, ANSWER]), {}
        wanted = expected(folder, template, chat) if template == LOOPED else wanted
    assert texts(folder, SHOWN if options else template, chat, **options) == [wanted]
    for other in ({"type": "image", "url": "x"}, {"type": "text"}, "me.", {"text": "me."}):
        with pytest.raises(DataError, match=r"rows\.jsonl:1: message 1 has a part of type"):
            texts(folder, template, [{"role": "user", "content": [*parts, other]}, ANSWER], **options)


def test_a_content_that_would_be_written_as_python_does_is_refused(folder: Path) -> None:
    chat = [ASK, {"role": "tool", "content": {"it's": None}}, ANSWER]
    with pytest.raises(DataError, match=r"rows\.jsonl:1: message 2 has as content an object"):
        texts(folder, SHOWN, chat)
    template = SHOWN.replace("m.content", "m.content | tojson")
    assert texts(folder, template, chat) == [expected(folder, template, chat)]


SILENT: list[dict[str, Any]] = [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}, {"loss": 0}]
SILENT.append({"masked": True})


@pytest.mark.parametrize("said", SILENT)
@pytest.mark.parametrize("template", ["chatml", "by prefixes", "marked"])
def test_a_reply_that_says_so_is_not_learnt(template: str, said: dict[str, Any]) -> None:
    replies = [{"role": "assistant", "content": content} for content in ("one", "two", "three")]
    (key, no) = next(iter(said.items()))
    chat = [ASK, {**replies[0], key: not no}, ASK, {**replies[1], **said}, ASK, replies[2], {**replies[2], key: None}]
    ours: Any = Template(template) if template == "chatml" else None
    ours = ours or TokenizerTemplate({"chat_template": TEMPLATES[template]}, True)
    whole = ours.render([{"role": each["role"], "content": each["content"]} for each in chat])
    (found,) = ours.render_all([Chat.of(chat, learns="replies")])
    assert found.text == whole.text and found.replies == tuple(whole.replies[number] for number in (0, 2, 3))


@pytest.mark.parametrize(
    ("message", "options", "why"),
    [
        ({"weight": 0.5}, {}, "weight=0.5; weight, train"),
        ({"weight": "0"}, {}, "weight='0'"),
        ({"train_detail": [{"begin_offset": 0}]}, {}, "the key 'train_detail'"),
        ({"loss_weight": 1}, {}, "the key 'loss_weight'"),
        ({"mask": 1}, {}, "the key 'mask'"),
        ({"train": True, "weight": 0}, {}, "train and weight contradict"),
        ({"weight": 0}, {"loss_on": "all"}, "weight takes it out of the loss, but data.loss_on=all"),
        ({"weight": 1, "role": "user"}, {}, "weight puts a message of the role 'user' into the loss"),
        ({"weight": 0}, {}, "has no reply of the assistant"),
    ],
)
@pytest.mark.parametrize("template", ["plain", "tokenizer"])
def test_what_is_said_of_learning_and_can_not_be_done_is_refused(
    folder: Path, template: str, message: dict[str, Any], options: dict[str, Any], why: str
) -> None:
    with pytest.raises(DataError, match=rf"rows\.jsonl:1: .*{why}"):
        texts(
            folder,
            TEMPLATES["marked"],
            [ASK, {**ANSWER, **message}],
            **{"loss_on": "replies", "template": template, **options},
        )


def test_what_is_not_read_of_rows_is_told(folder: Path) -> None:
    chat = [ASK, ANSWER]
    rows = [{"messages": chat, "tools": [TOOL]}, {"text": "", "messages": chat, "functions": [TOOL]}]
    data = opened(
        folder, *rows, {"text": "hi", "messages": chat}, {"text": " \n", "messages": []}, template="plain", context=2
    )
    assert data.description["documents"] == {"train": 2, "val": 1}
    assert data.description["blank_documents"] == 1
    told = " ".join(data.description["notices"])
    for what in (
        "1 row(s) have 'tools', which",
        "1 row(s) have 'functions'",
        "'messages' beside 'text', of which only",
    ):
        assert what in told


HEADED = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}"
BARE = (
    "{% for m in messages %}{{ '[' ~ m.content ~ ']' if m.role == 'user' else ' ' ~ m.content ~ '</s>' }}{% endfor %}"
)


@pytest.mark.parametrize("content", ["a", "assistant", " Hello."])
def test_what_introduces_a_reply_is_never_learnt(content: str) -> None:
    reply = {"role": "assistant", "content": content}
    asks = HEADED + "{% if add_generation_prompt %}<assistant>{% endif %}"
    ours = TokenizerTemplate({"chat_template": asks, "bos_token": "<s>"}, True)
    text, spans = ours.render([reply, ASK, reply])
    assert [text[start:end] for start, end in spans] == [f"{content.strip()}</s>"] * 2
    with pytest.raises(ValueError, match=r"message 2: .* ignores add_generation_prompt, so '<assistant>' before"):
        TokenizerTemplate({"chat_template": HEADED}, True).render([ASK, reply])
    text, ((start, end),) = TokenizerTemplate({"chat_template": BARE}, True).render([ASK, reply])
    assert text[start:end] == f" {content}</s>"
    after = HEADED + "{% if add_generation_prompt and messages[-1].role == 'user' %}<assistant>{% endif %}"
    text, spans = TokenizerTemplate({"chat_template": after}, True).render([ASK, reply, reply])
    assert [text[start:end] for start, end in spans] == [f"{content.strip()}</s>"] * 2


# the child process


def child(template: TokenizerTemplate) -> int:
    """Its number, while it is the only one."""
    template.render([ASK])
    process = jinja.SANDBOX._process
    assert process is not None
    return process.pid


def test_the_child_has_no_secret_and_no_file_and_ends_with_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    with open(__file__, "rb") as file:
        os.set_inheritable(file.fileno(), True)
        monkeypatch.setattr(jinja, "SANDBOX", sandbox.Sandbox())
        number = child(TokenizerTemplate({"chat_template": "{{ messages }}"}))
        assert b"secret" not in Path(f"/proc/{number}/environ").read_bytes()
        targets = {os.path.realpath(link) for link in Path(f"/proc/{number}/fd").iterdir()}
    assert all(target.rpartition("/")[2].startswith(("pipe:", "null")) for target in targets)
    script = (
        "import os, signal; from ttrain.data.chat import jinja\n"
        "jinja.TokenizerTemplate({'chat_template': 'x'})\n"
        "print(jinja.SANDBOX._process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    (pid,) = done.stdout.split()
    assert done.returncode == -signal.SIGKILL
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists() or "State:\tZ" in Path(f"/proc/{pid}/status").read_text():
            break
        signal.sigtimedwait([], 0.1)
    else:
        raise AssertionError("the child outlived its parent")


def test_one_child_renders_all_and_a_new_one_follows_a_dead_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MEMORY", 256 << 20)
    monkeypatch.setattr(jinja, "SANDBOX", sandbox.Sandbox())
    one, other = (TokenizerTemplate({"chat_template": text}) for text in ("{{ messages }}", "{{ messages | length }}"))
    number = child(one)
    assert child(other) == number
    greedy = TokenizerTemplate({"chat_template": "{{ 'x' * (10 ** messages[0].n) }}"}, place="somewhere")
    found = greedy.render_all([Chat.of([{**ASK, "n": n}]) for n in (1, 11, 1)])
    assert found[0] == Rendered("x" * 10) and len(found) == 2
    with pytest.raises(DataError, match="the chat template of somewhere takes more than 256.0 MiB of memory"):
        raise found[1]  # type: ignore[misc]
    assert child(other) != number


def test_rows_behind_the_last_document_are_of_no_matter(folder: Path) -> None:
    """And those of one source in turn with another: many are rendered at once."""
    Path("b.jsonl").write_text("".join(json.dumps([{**ASK, "content": str(n)}]) + "\n" for n in range(200)))
    Path("a.jsonl").write_text("".join(json.dumps([{**ASK, "content": str(-n)}]) + "\n" for n in range(1, 99)) + "{\n")
    configured(folder, "{{ messages[0].content }}")
    given = {"tokenizer": str(folder / "tokenizer.json"), "template": "tokenizer"}
    for most in (190, None):
        config = DocumentsConfig(sources=["a.jsonl", "b.jsonl"], max_documents=most, **given)
        documents = DocumentReader(config).in_turn(find_sources(config), [len] * 2)
        found = [next(documents).text for _ in range(190)]
        assert found == [str(n // 2 if n % 2 else -1 - n // 2) for n in range(190)]
        with pytest.raises(
            DataError if most is None else StopIteration, match=None if most else "a.jsonl:99: not JSON"
        ):
            for _ in range(20):
                next(documents)
