"""Chat templates, losses on replies and rows of public data sets, against Transformers; what templates may not do."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import forked
from tests.data.conftest import config_of, configured, read, theirs
from tests.data.conftest import rows as write_rows
from ttrain.core.errors import DataError
from ttrain.data.batches import Sizes
from ttrain.data.chat import jinja, sandbox
from ttrain.data.chat.conversation import Chat
from ttrain.data.chat.jinja import TokenizerTemplate, chat_settings
from ttrain.data.chat.messages import Rendered, Template
from ttrain.data.documents import DocumentDataset, open_documents
from ttrain.data.library_tokenizer import LibraryTokenizer
from ttrain.data.sources import DocumentReader, find_sources

USER, REPLY = {"role": "user", "content": "  Say “hi” & <b> twice\n"}, {"role": "assistant", "content": "hi, \nhi é "}
CHAT = [{"role": "system", "content": "Be brief."}, USER, REPLY, {**USER, "content": "Again?"}, {**REPLY, "name": None}]
TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "é<&>"}}]
HEAD = "{% for m in messages %}\n    {% if loop.first and m.role != 'system' %}\n{{ bos_token }}{% endif %}\n"
TEMPLATES = {
    "marked": HEAD
    + "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m['content'] | trim }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "by prefixes": "{%- if tools %}{{ tools | tojson(indent=2) }}{% endif -%}{%- for m in messages -%}"
    "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}",
    "loops and refusals": "{{ bos_token }}{% set ns = namespace(n=0) %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% continue %}{% endif %}"
    "{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('no ' + m.role) }}{% endif %}"
    "{% set ns.n = ns.n + 1 %}[{{ ns.n }}] {{ m | tojson }}{{ eos_token }}{% if ns.n > 2 %}{% break %}{% endif %}"
    "{% endfor %}{{ strftime_now('%Y') }}",
}

pytestmark = pytest.mark.usefixtures("inside")
TOLD = ("marked", "by prefixes")  # templates that tell replies


def opened(folder: Path, *rows: Any, context: int = 64, **options: Any) -> DocumentDataset:
    given = {"tokenizer": str(folder / "tokenizer.json"), "template": "tokenizer", "order": "sequential", **options}
    return open_documents(config_of(write_rows("rows.jsonl", *rows), **given), Sizes(context=context))


def replying(template: str, **more: Any) -> TokenizerTemplate:
    """Return a template that tells replies."""
    return TokenizerTemplate({"chat_template": template, **more}, True)


def parts(template: Any, *messages: Any) -> list[str]:
    """Return what is learned of a conversation."""
    text, spans = template.render(Chat.of([*messages]))
    return [text[start:end] for start, end in spans]


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("name", TEMPLATES)
def test_texts_and_prompts_equal_those_of_transformers(folder: Path, name: str, tools: Any) -> None:
    configured(folder, TEMPLATES[name])
    other = theirs(folder, TEMPLATES[name])
    for replies in (False, name in TOLD):
        ours = TokenizerTemplate(chat_settings(folder / "tokenizer.json"), replies)
        for chat in (CHAT, CHAT[1:3], CHAT[:2]):
            how: dict[str, Any] = {"tools": tools, "tokenize": False}
            assert ours.render(Chat.of(chat, tools)).text == other.apply_chat_template(chat, **how)
            assert ours.prompt(Chat.of(chat, tools)) == other.apply_chat_template(
                chat, add_generation_prompt=True, **how
            )


def test_the_tokens_of_marked_replies_equal_those_of_transformers(folder: Path) -> None:
    configured(folder, TEMPLATES["marked"])
    wanted = theirs(folder, TEMPLATES["marked"]).apply_chat_template(
        CHAT, return_dict=True, return_assistant_tokens_mask=True
    )
    text, replies = TokenizerTemplate(chat_settings(folder / "tokenizer.json"), True).render(Chat.of(CHAT))
    tokenizer = LibraryTokenizer((folder / "tokenizer.json").read_text())
    ((ids, marks),) = tokenizer.encode_marked([(text, replies)])
    assert ids.tolist() == wanted["input_ids"] and marks.tolist() == [bool(mask) for mask in wanted["assistant_masks"]]
    assert (ids == next(tokenizer.encode_documents([text]))).all() and 0 < marks.sum() < len(marks)


def test_marks_outlive_filters_and_those_that_do_not_are_refused() -> None:
    marked = "{% generation %}{{ m.content }}{% endgeneration %}"
    nested = marked.replace("{{", "{% generation %}b{% endgeneration %}{{")
    loop, reply = (
        "{% for m in messages %}{% filter FILTER %}BODY{% endfilter %}{% endfor %}",
        {**REPLY, "content": "aé"},
    )
    assert parts(replying(loop.replace("FILTER", "upper").replace("BODY", marked)), reply) == ["AÉ"]
    for filtering, body in (("replace('(', '')", marked), ("trim", nested)):
        with pytest.raises(ValueError, match="nests or changes"):
            parts(replying(loop.replace("FILTER", filtering).replace("BODY", body)), reply)


@pytest.mark.parametrize(
    ("template", "amid", "last", "attention"),
    [
        ("marked", "hi, \nhi é<|im_end|>", "hi, \nhi é<|im_end|>", "sequence"),
        ("by prefixes", "hi, \nhi é <|im_end|>\n", "hi, \nhi é <|im_end|>\n", "document"),
        ("plain", " hi, \nhi é \n", " hi, \nhi é <|im_end|>", "document"),
        ("<{role}>{content}</>", "hi, \nhi é </>", "hi, \nhi é </><|im_end|>", "sequence"),
    ],
)
def test_targets_are_the_replies_alone(folder: Path, template: str, amid: str, last: str, attention: str) -> None:
    """And the end token, where one is put after a conversation."""
    configured(folder, TEMPLATES.get(template, ""))
    options = {"attention": attention, "held_out": 0.5, "long_documents": "cut", "context": 256}
    named = "tokenizer" if template in TEMPLATES else template
    one = [USER, REPLY, {**USER, "content": "Bye"}, REPLY]
    data = opened(folder, {"messages": one}, one[:2], one[:2], template=named, loss_on="replies", **options)
    assert data.tokenizer is not None
    spoken = []
    for split in ("train", "val"):
        batch = data.batch(split, 0, 0, 1)
        targets, tokens = batch["targets"][0], batch["tokens"][0]
        spoken.append(data.tokenizer.decode(targets[targets >= 0].tolist()))
        assert (targets[:-1] == tokens[1:])[targets[:-1] >= 0].all()
    assert sorted(spoken) == sorted([amid + last, last * 2])


def test_tokens_of_a_conversation_are_the_templates_and_texts_count_whole(folder: Path) -> None:
    configured(folder, TEMPLATES["marked"])
    data: Any = opened(folder, CHAT, CHAT[1:3], {"text": "Say hi."}, loss_on="replies", held_out=0.3, context=16)
    documents = {
        data.tokenizer.decode(ids): marks
        for split, ends in data._ends.items()
        for ids, marks in zip(*(np.split(each[split], ends[:-1]) for each in (data._splits, data._marks)), strict=True)
    }
    template = TokenizerTemplate(chat_settings(folder / "tokenizer.json"))
    long, short = (template.render(Chat.of(chat)).text for chat in (CHAT, CHAT[1:3]))
    assert documents.keys() == {long, short, "Say hi.<|im_end|>"}
    assert documents["Say hi.<|im_end|>"].all() and not documents[long].all()


@pytest.mark.parametrize(("rule", "what"), [("cut", "lose their end"), ("skip", "are left out")])
def test_whole_documents(folder: Path, rule: str, what: str) -> None:
    """Against a walk: neighbours as long as they fit, nothing after them, and what is too long cut or left out."""
    sizes = (2, 5, 30, 1, 9, 3, 3, 3, 40, 6, 2, 8)
    rows = [{"text": letter * count} for letter, count in zip("abcdefghijkl", sizes, strict=True)]
    options = {"tokenizer": "byte", "template": "plain", "attention": "document", "held_out": 0.2, "context": 12}
    data = opened(folder, *rows, long_documents=rule, **options)
    documents = [part.tolist() for part in np.split(data._splits["train"], data._ends["train"][:-1])]
    left = [part[:12] for part in documents if rule == "cut" or len(part) <= 12]
    batch = data.batch("train", 0, 0, len(data._whole("train")))
    fields = (batch[name].tolist() for name in ("tokens", "targets", "positions"))
    for tokens, targets, positions in zip(*fields, strict=True):
        place = 0
        while left and place + len(left[0]) <= 12:
            part, end = left.pop(0), place
            place += len(part)
            assert tokens[end:place] == part and targets[end:place] == [*part[1:], -1]
            assert positions[end:place] == list(range(len(part)))
        assert place and targets[place:] == [-1] * (12 - place)
    long = sum(size > 12 for ends in data._ends.values() for size in np.diff(ends, prepend=0))
    assert not left and f"{long} of 12 documents are longer than model.context=12 and {what}." in notices(data)


def notices(data: DocumentDataset) -> list[str]:
    return list(data.description["notices"])


def test_replies_that_are_cut_off_are_told(folder: Path) -> None:
    configured(folder, TEMPLATES["marked"])
    long = [{"role": "user", "content": "Say " * 30}, REPLY]
    options: dict[str, Any] = {"loss_on": "replies", "long_documents": "cut", "held_out": 0.3, "context": 24}
    with pytest.raises(DataError, match=r"longer than model\.context=24, so .*cut leaves no reply of the"):
        opened(folder, long, [long[0], *long], **options)
    told = opened(folder, *([{**USER, "content": f"Say {n}"}, REPLY] for n in range(6)), long, **options)
    assert notices(told)[-2:] == [
        "1 of 7 documents are longer than model.context=24 and lose their end.",
        "1 of these lose all that the assistant says, so nothing is learned of them.",
    ]


ESCAPES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ lipsum.__globals__['os'].system('touch escaped') }}",
    "{{ messages.append(1) }}",
    "{{ raise_exception.__closure__[0].cell_contents }}",
    "{{ messages | tojson(cls=namespace) }}",
    "{% include '/etc/passwd' %}",
)


@pytest.mark.parametrize("escape", ESCAPES)
def test_a_template_does_not_leave_the_sandbox(folder: Path, escape: str) -> None:
    configured(folder, escape)
    with pytest.raises(DataError, match=r"rows.jsonl:1: the tokenizer's chat template (refuses|fails)") as caught:
        opened(folder, CHAT, CHAT[1:3])
    assert caught.value.exit_code == 2 and not Path("escaped").exists() and "\n" not in str(caught.value)


DOUBLED = "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
ENDLESS = ("{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3, "{{ 10 ** (10 ** 10) }}")
LARGE = ("{{ 'a' * 10 ** 11 }}", "{{ ('a\n' * 99999) | indent(9999) }}", DOUBLED)


@pytest.mark.parametrize("template", [*ENDLESS, *LARGE])
def test_a_template_that_takes_too_much_is_told(folder: Path, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line names its file, for every way to treat bad rows."""
    monkeypatch.setattr(sandbox, "SECONDS", 0.01)
    monkeypatch.setattr(sandbox, "MEMORY", 256 << 20)
    monkeypatch.setattr(jinja, "SANDBOX", sandbox.Sandbox())
    configured(folder, template)
    does = "takes more than 256.0 MiB of memory" if template in LARGE else r"computes for more than 0\.01 s, so it may"
    said = rf"(rows\.jsonl:1: )?the chat template of {re.escape(str(folder))} {does}"
    before = resource.getrusage(resource.RUSAGE_SELF)
    with pytest.raises(DataError, match=said) as caught:
        opened(folder, CHAT, CHAT[1:3], bad_rows="skip")
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
    assert after.ru_maxrss - before.ru_maxrss < 64 << 10 and after.ru_utime - before.ru_utime < 1


def test_a_template_that_rewrites_earlier_messages_tells_no_replies(folder: Path) -> None:
    configured(folder, "{% for m in messages %}{{ loop.revindex }}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    with pytest.raises(DataError, match=r"writes earlier messages another way.*data\.loss_on=all"):
        opened(folder, CHAT, CHAT[1:3], loss_on="replies")
    assert opened(folder, CHAT, CHAT[1:3], context=8).description["bad_rows"] == 0


def test_where_templates_are_found(folder: Path) -> None:
    file = folder / "tokenizer.json"
    configured(folder, [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}])
    assert chat_settings(file) == {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "chat_template": "d"}
    (folder / "chat_template.jinja").write_text("of its own")
    assert chat_settings(file)["chat_template"] == "of its own"
    (folder / "chat_template.jinja").unlink()
    loops = "{% for m in messages %}"
    none = r"data\.template=tokenizer: .* Give the tokenizer\.json of a model for chats"
    for template, tokenizer, message in (
        (None, str(file), none),
        (None, "bpe", none),
        (loops, str(file), r"chat template, line \d+: Unexpected end of template"),
        (loops * 25 + "{% endfor %}" * 25, str(file), r"chat template, line \d+: too many"),
    ):
        configured(folder, template)
        with pytest.raises(DataError, match=message):
            opened(folder, CHAT, tokenizer=tokenizer)


@pytest.mark.parametrize("template", ["plain", "chatml", "'{role}'\\n “é😀 {{x}} {content} {Role}{{% {content}"])
def test_transformers_writes_what_filled_in_templates_do(folder: Path, template: str) -> None:
    ours = Template(template)
    other = theirs(folder, ours.to_jinja())
    for chat in (CHAT, CHAT[:2], CHAT[1:3]):
        assert other.apply_chat_template(chat, tokenize=False) == ours.render(Chat.of(chat)).text
        assert other.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == ours.prompt(Chat.of(chat))
    assert Template("plain").prompt(Chat.of([USER])) == "User:   Say “hi” & <b> twice\n\nAssistant:"


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
    file = "rows.parquet" if table else write_rows("rows.jsonl", *rows)
    if table:
        pq.write_table(pa.Table.from_pylist(list(rows)), file)
    return read(file, **{"tokenizer": str(folder / "tokenizer.json"), "template": "tokenizer", **options})


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
    given = [{"type": "text", "text": "It's "}, {"type": "text", "text": "me."}]
    apart, joined = ([{"role": "user", "content": content}, ANSWER] for content in (given, "It's me."))
    options = {"template": template} if template in ("plain", "chatml") else {}
    if options:
        wanted = Template(template).render(Chat.of(joined)).text
    else:
        wanted = expected(folder, template, apart if template == LOOPED else joined)
    assert texts(folder, SHOWN if options else template, apart, **options) == [wanted]
    for other in ({"type": "image", "url": "x"}, {"type": "text"}, "me.", {"text": "me."}):
        with pytest.raises(DataError, match=r"rows\.jsonl:1: message 1 has a part of type"):
            texts(folder, template, [{"role": "user", "content": [*given, other]}, ANSWER], **options)


@pytest.mark.parametrize(
    "said",
    [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}, {"loss": 0}, {"masked": True}],
)
@pytest.mark.parametrize("template", ["chatml", "by prefixes", "marked"])
def test_a_reply_that_says_so_is_not_learnt(template: str, said: dict[str, Any]) -> None:
    replies = [{"role": "assistant", "content": content} for content in ("one", "two", "three")]
    (key, no) = next(iter(said.items()))
    chat = [ASK, {**replies[0], key: not no}, ASK, {**replies[1], **said}, ASK, replies[2], {**replies[2], key: None}]
    ours: Any = Template(template) if template == "chatml" else replying(TEMPLATES[template])
    whole = ours.render(Chat.of([{"role": each["role"], "content": each["content"]} for each in chat]))
    found = ours.render(Chat.of(chat, learns="replies"))
    assert found.text == whole.text and found.replies == tuple(whole.replies[number] for number in (0, 2, 3))


LEARNING: list[tuple[dict[str, Any], dict[str, Any], str]] = [  # what a reply says, the config, and why it is refused
    ({"weight": 0.5}, {}, "weight=0.5; weight, train"),
    ({"weight": "0"}, {}, "weight='0'"),
    ({"train_detail": [{"begin_offset": 0}]}, {}, "the key 'train_detail'"),
    ({"loss_weight": 1}, {}, "the key 'loss_weight'"),
    ({"mask": 1}, {}, "the key 'mask'"),
    ({"train": True, "weight": 0}, {}, "train and weight contradict"),
    ({"weight": 0}, {"loss_on": "all"}, "weight takes it out of the loss, but data.loss_on=all"),
    ({"weight": 1, "role": "user"}, {}, "weight puts a message of the role 'user' into the loss"),
    ({"weight": 0}, {}, "has no reply of the assistant"),
]
REFUSED: list[tuple[Any, str, dict[str, Any], str]] = [  # a row, the template, the config, and why it is refused
    ([], "loops and refusals", {}, "has no messages"),
    ([{"role": "judge", "content": "x"}], "loops and refusals", {}, ".*chat template refuses it: no judge"),
    ([{"content": "x"}], "loops and refusals", {}, "message 1 is not an object with a role"),
    ([ASK, {"role": "tool", "content": {"it's": None}}, ANSWER], SHOWN, {}, "message 2 has as content an object"),
    (CHAT[:2], "marked", {"loss_on": "replies"}, "has no reply of the assistant"),
    *(
        ({"messages": [ASK, ANSWER], "tools": tools}, SHOWN, {}, ".*tool.*not (a list|an object)")
        for tools in ("look_up", "{", {"name": "look_up"}, 5, ["look_up"], [5], [{"function": "look_up"}])
    ),
    *(
        ([ASK, {**ANSWER, **said}], "marked", {"loss_on": "replies", "template": template, **options}, f".*{why}")
        for said, options, why in LEARNING
        for template in ("plain", "tokenizer")
    ),
]


@pytest.mark.parametrize(("row", "template", "options", "why"), REFUSED)
def test_rows_that_can_not_be_used_are_refused_or_skipped(
    folder: Path, row: Any, template: str, options: dict[str, Any], why: str
) -> None:
    configured(folder, TEMPLATES.get(template, template))
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: {why}") as caught:
        opened(folder, CHAT[1:3], row, **options)
    assert caught.value.exit_code == 2
    skipped = opened(folder, CHAT[1:3], row, CHAT, context=8, bad_rows="skip", **options)
    assert skipped.description["bad_rows"] == 1


def test_what_a_template_takes_is_no_bad_row(folder: Path) -> None:
    """A message without content, and a content that is no text."""
    assert texts(folder, TEMPLATES["loops and refusals"], [USER, {"role": "user"}])
    chat, template = [ASK, {"role": "tool", "content": {"it's": None}}], SHOWN.replace("content", "content | tojson")
    assert texts(folder, template, chat) == [expected(folder, template, chat)]


def test_what_is_not_read_of_rows_is_told(folder: Path) -> None:
    chat = [ASK, ANSWER]
    rows: list[Any] = [
        {"messages": chat, "tools": [TOOL], "masked": True},
        {"text": "", "messages": chat, "functions": [TOOL], "tools": "null", "weight": 0},
        {"messages": chat, "tools": "[]", "functions": None, "weight": 1, "train": True, "loss": None},
        {"text": "hi", "messages": chat},
        {"text": " \n", "messages": []},
    ]
    data = opened(folder, *rows, template="plain", context=2)
    assert data.description["documents"] == {"train": 3, "val": 1} and data.description["blank_documents"] == 1
    beside = ("'masked' beside", "'tools' beside", "'functions' beside", "'weight' beside")
    told = ("1 blank document(s)", "1 row(s) have 'messages' beside", *(f"1 row(s) have {key}" for key in beside))
    assert all(sum(notice.startswith(start) for notice in notices(data)) == 1 for start in told)
    assert len(notices(data)) == len(told)
    pq.write_table(pa.Table.from_pylist([{"messages": chat, "weight": 0.0}] * 2), "rows.parquet")
    reader = DocumentReader(config_of("rows.parquet"))
    assert len(list(reader.in_turn(find_sources(config_of("rows.parquet")), [len]))) == 2
    assert dict(reader.skipped.unread) == {"'weight' beside 'messages', which is not read": 2}


HEADED = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}"
BARE = (
    "{% for m in messages %}{{ '[' ~ m.content ~ ']' if m.role == 'user' else ' ' ~ m.content ~ '</s>' }}{% endfor %}"
)


@pytest.mark.parametrize("content", ["a", "assistant", " Hello."])
def test_what_introduces_a_reply_is_never_learnt(content: str) -> None:
    reply, wanted = {"role": "assistant", "content": content}, f"{content.strip()}</s>"
    asks = HEADED + "{% if add_generation_prompt %}<assistant>{% endif %}"
    after = HEADED + "{% if add_generation_prompt and messages[-1].role == 'user' %}<assistant>{% endif %}"
    assert parts(replying(asks, bos_token="<s>"), reply, ASK, reply) == [wanted] * 2
    assert parts(replying(after), ASK, reply, reply) == [wanted] * 2
    assert parts(replying(BARE), ASK, reply) == [f" {content}</s>"]
    with pytest.raises(ValueError, match=r"message 2: .* ignores add_generation_prompt, so '<assistant>' before"):
        parts(replying(HEADED), ASK, reply)


# the child process


def child(template: TokenizerTemplate) -> int:
    """Its number, while it is the only one."""
    template.render(Chat.of([ASK]))
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
    done = forked.run("-c", script)
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
    assert greedy.render(Chat.of([{**ASK, "n": 1}])) == Rendered("x" * 10)
    with pytest.raises(DataError, match="the chat template of somewhere takes more than 256.0 MiB of memory"):
        greedy.render(Chat.of([{**ASK, "n": 11}]))
    assert child(other) != number


def test_rows_behind_the_last_document_are_of_no_matter(folder: Path) -> None:
    rows = [[{**ASK, "content": str(number)}] for number in range(5)]
    file = Path(write_rows("rows.jsonl", *rows))
    file.write_text(file.read_text() + "{\n")
    configured(folder, "{{ messages[0].content }}")
    given = {"tokenizer": str(folder / "tokenizer.json"), "template": "tokenizer"}
    assert read("rows.jsonl", max_documents=5, **given) == list("01234")
    with pytest.raises(DataError, match="rows.jsonl:6: not JSON"):
        read("rows.jsonl", **given)
