"""Chat templates of tokenizers and losses on replies alone, against Transformers; and what templates may not do."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.conftest import configured, theirs
from ttrain.core.errors import DataError
from ttrain.data.batches import Sizes
from ttrain.data.chat import jinja, sandbox
from ttrain.data.chat.jinja import TokenizerTemplate, chat_settings
from ttrain.data.chat.messages import Template
from ttrain.data.documents import DocumentDataset, open_documents
from ttrain.data.library_tokenizer import LibraryTokenizer
from ttrain.data.settings import DocumentsConfig

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
    "all kinds": (
        "{%- macro said(m, mark='>') -%}{{ mark ~ m.role.upper() ~ ': ' ~ m.content.split('i') | join('I') }}"
        "{{ caller() if caller is defined else '' }}{%- endmacro -%}"
        "{%- for m in messages[::-1] if m.role != 'system' -%}{{ loop.length }}{{ loop.last }}"
        "{{ loop.previtem is defined }}"
        "{% set text %}{{ said(m) | indent(2) }}{% endset %}{{ text.strip().rjust(30) }}{% else %}none{%- endfor -%}"
        "{%- for key, value in messages[0].items() | sort -%}{{ '%s=%-5s' % (key, value) }}{{ '{:>4}'.format(key) }}"
        "{%- endfor -%}{% call said(messages[0], mark='*') %}!{% endcall %}{{ [1, [2, [3]]] | tojson }}"
        "{%- for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x * 1700000000 }}{% endfor -%}"
        "{{ {'n': 1700000000} | tojson(indent=2) }}{{ 2 ** 10 + 7 % 4 }}"
        "{{ messages | map(attribute='role') | unique | list }}"
    ),
}

pytestmark = pytest.mark.usefixtures("empty_place")
TOLD = ("marked", "by prefixes")  # templates that tell replies


def opened(folder: Path, *rows: Any, context: int = 64, **options: Any) -> DocumentDataset:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    given = {"tokenizer": str(folder / "tokenizer.json"), "template": "tokenizer", "order": "sequential", **options}
    return open_documents(DocumentsConfig(sources=["rows.jsonl"], **given), Sizes(context=context))


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("name", TEMPLATES)
def test_texts_and_prompts_equal_those_of_transformers(folder: Path, name: str, tools: Any) -> None:
    configured(folder, TEMPLATES[name])
    other = theirs(folder, TEMPLATES[name])
    for replies in (False, True):
        ours = TokenizerTemplate(chat_settings(folder / "tokenizer.json"), replies and name in TOLD)
        for chat in (CHAT, CHAT[1:3], CHAT[:2]):
            how: dict[str, Any] = {"tools": tools, "tokenize": False}
            assert ours.render(chat, tools).text == other.apply_chat_template(chat, **how)
            assert ours.prompt(chat, tools) == other.apply_chat_template(chat, add_generation_prompt=True, **how)


def test_the_tokens_of_marked_replies_equal_those_of_transformers(folder: Path) -> None:
    configured(folder, TEMPLATES["marked"])
    wanted = theirs(folder, TEMPLATES["marked"]).apply_chat_template(
        CHAT, return_dict=True, return_assistant_tokens_mask=True
    )
    text, replies = TokenizerTemplate(chat_settings(folder / "tokenizer.json"), True).render(CHAT)
    tokenizer = LibraryTokenizer((folder / "tokenizer.json").read_text())
    ((ids, marks),) = tokenizer.encode_marked([(text, replies)])
    assert ids.tolist() == wanted["input_ids"] and marks.tolist() == [bool(mask) for mask in wanted["assistant_masks"]]
    assert (ids == next(tokenizer.encode_documents([text]))).all() and 0 < marks.sum() < len(marks)


def test_marks_outlive_filters_and_those_that_do_not_are_refused() -> None:
    marked = "{% generation %}{{ m.content }}{% endgeneration %}"
    loop = "{% for m in messages %}{% filter FILTER %}BODY{% endfilter %}{% endfor %}"
    assert TokenizerTemplate({"chat_template": loop.replace("FILTER", "upper").replace("BODY", marked)}, True).render(
        [{"role": "assistant", "content": "aé"}]
    ) == ("AÉ", ((0, 2),))
    nested = marked.replace("{{", "{% generation %}b{% endgeneration %}{{")
    for filtering, body in (("replace('(', '')", marked), ("trim", nested)):
        source = loop.replace("FILTER", filtering).replace("BODY", body)
        with pytest.raises(ValueError, match="nests or changes"):
            TokenizerTemplate({"chat_template": source}, True).render([{"role": "assistant", "content": "a"}])


@pytest.mark.parametrize("attention", ["sequence", "document"])
@pytest.mark.parametrize(
    ("template", "amid", "last"),
    [
        ("marked", "hi, \nhi é<|im_end|>", "hi, \nhi é<|im_end|>"),
        ("by prefixes", "hi, \nhi é <|im_end|>\n", "hi, \nhi é <|im_end|>\n"),
        ("plain", " hi, \nhi é \n", " hi, \nhi é <|im_end|>"),
        ("<{role}>{content}</>", "hi, \nhi é </>", "hi, \nhi é </><|im_end|>"),
    ],
)
def test_targets_are_the_replies_alone(folder: Path, template: str, amid: str, last: str, attention: str) -> None:
    """And the end token, where one is put after a conversation."""
    configured(folder, TEMPLATES.get(template, ""))
    options = {"loss_on": "replies", "attention": attention, "held_out": 0.5, "long_documents": "cut"}
    named = "tokenizer" if template in TEMPLATES else template
    one = [USER, REPLY, {**USER, "content": "Bye"}, REPLY]
    data = opened(folder, {"messages": one}, one[:2], one[:2], template=named, context=256, **options)
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
    data = opened(folder, CHAT, CHAT[1:3], {"text": "Say hi."}, loss_on="replies", held_out=0.3, context=16)
    documents = {
        data.tokenizer.decode(part): marks  # type: ignore[union-attr]
        for split in ("train", "val")
        for part, marks in zip(
            np.split(data._splits[split], data._ends[split][:-1]),
            np.split(data._marks[split], data._ends[split][:-1]),  # type: ignore[index]
            strict=True,
        )
    }
    template = TokenizerTemplate(chat_settings(folder / "tokenizer.json"))
    assert documents.keys() == {template.render(CHAT).text, template.render(CHAT[1:3]).text, "Say hi.<|im_end|>"}
    assert documents["Say hi.<|im_end|>"].all() and not documents[template.render(CHAT).text].all()


def test_whole_documents(folder: Path) -> None:
    """Against a walk: neighbours as long as they fit, nothing after them, and what is too long cut or left out."""
    rows = [
        {"text": letter * count}
        for letter, count in zip("abcdefghijkl", (2, 5, 30, 1, 9, 3, 3, 3, 40, 6, 2, 8), strict=True)
    ]
    for rule in ("cut", "skip"):
        options = {"tokenizer": "byte", "template": "plain", "attention": "document", "held_out": 0.2, "context": 12}
        data = opened(folder, *rows, long_documents=rule, **options)
        documents = [part.tolist() for part in np.split(data._splits["train"], data._ends["train"][:-1])]
        kept = [part[:12] for part in documents if rule == "cut" or len(part) <= 12]
        batch, number = data.batch("train", 0, 0, len(data._whole("train"))), 0
        for tokens, targets, positions in zip(
            *(batch[name].tolist() for name in ("tokens", "targets", "positions")), strict=True
        ):
            place = 0
            while number < len(kept) and place + len(kept[number]) <= 12:
                part, size = kept[number], len(kept[number])
                assert tokens[place : place + size] == part and targets[place : place + size] == [*part[1:], -1]
                assert positions[place : place + size] == list(range(size))
                place, number = place + size, number + 1
            assert place and targets[place:] == [-1] * (12 - place) == [-1] * len(targets[place:])
        assert number == len(kept)
        long = sum(size > 12 for split in ("train", "val") for size in np.diff(data._ends[split], prepend=0))
        what = "lose their end" if rule == "cut" else "are left out"
        assert f"{long} of 12 documents are longer than model.context=12 and {what}." in data.description["notices"]


def test_replies_that_are_cut_off_are_told(folder: Path) -> None:
    configured(folder, TEMPLATES["marked"])
    long = [{"role": "user", "content": "Say " * 30}, REPLY]
    options: dict[str, Any] = {"loss_on": "replies", "long_documents": "cut", "held_out": 0.3, "context": 24}
    with pytest.raises(
        DataError, match=r"documents is longer than model\.context=24, so .*cut leaves no reply of the"
    ) as caught:
        opened(folder, long, [long[0], *long], **options)
    assert caught.value.exit_code == 2
    told = opened(folder, *([{**USER, "content": f"Say {n}"}, REPLY] for n in range(6)), long, **options)
    assert told.description["notices"][-2:] == [
        "1 of 7 documents are longer than model.context=24 and lose their end.",
        "1 of these lose all that the assistant says, so nothing is learnt of them.",
    ]


ESCAPES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ lipsum.__globals__['os'].system('touch escaped') }}",
    "{{ messages.append(1) }}",
    "{{ '%s'.format.__globals__.os }}",
    "{{ strftime_now.__globals__.json }}",
    "{{ raise_exception.__closure__[0].cell_contents }}",
    "{{ cycler.__init__.__globals__.os.popen('touch escaped').read() }}",
    "{{ messages | tojson(cls=namespace) }}",
    "{% include '/etc/passwd' %}",
    "{{ self.__init__.__globals__ }}",
    "{{ ('{0.__class__.__base__}').format(1) | length + messages.__len__.__self__ }}",
)


@pytest.mark.parametrize("escape", ESCAPES)
def test_a_template_does_not_leave_the_sandbox(folder: Path, escape: str) -> None:
    configured(folder, escape)
    with pytest.raises(DataError, match=r"rows.jsonl:1: the tokenizer's chat template (refuses|fails)") as caught:
        opened(folder, CHAT, CHAT[1:3])
    assert caught.value.exit_code == 2 and not Path("escaped").exists() and "\n" not in str(caught.value)


NESTED = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
DOUBLED = "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
ENDLESS = (
    NESTED,
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "{{ 10 ** (10 ** 10) }}",
)
LARGE = (
    "{{ 'a' * 10 ** 11 }}",
    "{{ 'a' | center(10 ** 9) }}",
    "{{ '%99999999999d' % 1 }}",
    "{{ '{:{}}'.format(1, 10 ** 9) }}",
    "{{ ('a\n' * 99999) | indent(9999) }}",
    "{{ ('\t' * 99999).expandtabs(9999) }}",
    "{{ ('a' * 99999).translate({97: 'a' * 9999}) }}",
    "{{ range(99999) | list | tojson(indent=9999) }}",
    "{% set x = 'a' * 99999 %}{{ x.replace('a', x) }}",
    DOUBLED,
)


@pytest.mark.parametrize("template", [*ENDLESS, *LARGE])
def test_a_template_that_takes_too_much_is_told(folder: Path, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line that names its file, whatever is done with bad rows."""
    monkeypatch.setattr(sandbox, "SECONDS", 0.01)
    monkeypatch.setattr(sandbox, "MEMORY", 256 << 20)
    monkeypatch.setattr(jinja, "SANDBOX", sandbox.Sandbox())
    configured(folder, template)
    does = "takes more than 256.0 MiB of memory" if template in LARGE else r"computes for more than 0\.01 s, so it may"
    said = rf"(rows\.jsonl:1: )?the chat template of .*tokenizer_config\.json {does}"
    before = resource.getrusage(resource.RUSAGE_SELF)
    with pytest.raises(DataError, match=said) as caught:
        opened(folder, CHAT, CHAT[1:3], bad_rows="skip")
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
    assert after.ru_maxrss - before.ru_maxrss < 64 << 10 and after.ru_utime - before.ru_utime < 1


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ([], {}, "has no messages"),
        (CHAT[:2], {"loss_on": "replies"}, "has no reply of the assistant"),
        ([{"role": "judge", "content": "x"}], {}, "the tokenizer's chat template refuses it: no judge"),
        ([{"content": "x"}], {}, "message 1 is not an object with a role"),
        ([USER, {"role": "user"}], {"bad_rows": "stop"}, ""),
    ],
)
def test_conversations_that_cannot_be_used(folder: Path, row: Any, options: dict[str, Any], message: str) -> None:
    configured(folder, TEMPLATES["marked" if "loss_on" in options else "loops and refusals"])
    if not message:  # the template takes it
        assert opened(folder, row, CHAT[1:3], context=8, **options).description["bad_rows"] == 0
        return
    with pytest.raises(DataError) as caught:
        opened(folder, CHAT[1:3], row, **options)
    assert f"rows.jsonl:2: {message}" in str(caught.value) and caught.value.exit_code == 2
    skipped = opened(folder, CHAT[1:3], row, CHAT, context=8, bad_rows="skip", **options)
    assert skipped.description["bad_rows"] == 1


def test_a_template_that_rewrites_earlier_messages_tells_no_replies(folder: Path) -> None:
    configured(folder, "{% for m in messages %}{{ loop.revindex }}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    with pytest.raises(DataError, match=r"writes earlier messages another way.*data\.loss_on=all"):
        opened(folder, CHAT, CHAT[1:3], loss_on="replies")
    assert opened(folder, CHAT, CHAT[1:3], context=8).description["bad_rows"] == 0


def test_where_templates_are_found(folder: Path, tmp_path: Path) -> None:
    file = folder / "tokenizer.json"
    configured(folder, [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}])
    assert chat_settings(file) == {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "chat_template": "d"}
    (folder / "chat_template.jinja").write_text("of its own")
    assert chat_settings(file)["chat_template"] == "of its own"
    (folder / "chat_template.jinja").unlink()
    configured(folder, None)
    for tokenizer in (str(file), "bpe"):
        with pytest.raises(
            DataError, match=r"data\.template=tokenizer: .* Give the tokenizer\.json of a model for chats"
        ):
            opened(folder, CHAT, tokenizer=tokenizer)
    loops = "{% for m in messages %}"
    for template, message in ((loops, "Unexpected end of template"), (loops * 25 + "{% endfor %}" * 25, "too many")):
        configured(folder, template)
        with pytest.raises(DataError, match=rf"chat template, line \d+: {message}"):
            opened(folder, CHAT)


@pytest.mark.parametrize("template", ["plain", "chatml", "'{role}'\\n “é😀 {{x}} {content} {Role}{{% "])
def test_transformers_writes_what_filled_in_templates_do(folder: Path, template: str) -> None:
    ours = Template(template)
    other = theirs(folder, ours.to_jinja())
    for chat in (CHAT, CHAT[:2], CHAT[1:3]):
        assert other.apply_chat_template(chat, tokenize=False) == ours.render(chat).text
        assert other.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == ours.prompt(chat)


def test_prompts_of_templates_that_are_filled_in() -> None:
    assert Template("plain").prompt([USER]) == "User:   Say “hi” & <b> twice\n\nAssistant:"
    assert Template("chatml").prompt([REPLY]) == "<|im_start|>assistant\nhi, \nhi é <|im_end|>\n<|im_start|>assistant\n"
