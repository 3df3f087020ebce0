"""Conversations in eval.text and rows of sample.prompts, against Transformers and rows that are written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import cache_home
from ttrain import load_config
from ttrain.cli import main
from ttrain.core.errors import UserError
from ttrain.data.library_tokenizer import train_bpe
from ttrain.tasks.sample import _rows

CHATS = [
    [{"role": "user", "content": f"the cat {number}"}, {"role": "assistant", "content": "sat on the mat"}]
    for number in range(12)
]
TEMPLATE = "{{ bos_token }}{% for m in messages %}<{{ m.role }}> {{ m.content }}</s>\n{% endfor %}"
SIZES = ["model.layers=1", "model.width=16", "model.heads=2", "model.context=64", "train.steps=2", "device=cpu",
         "train.batch_size=2", "train.eval_sequences=2", "device.threads=1", "sample.tokens=1"]  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", cache_home(tmp_path))
    write("chats.jsonl", [{"talk": chat} for chat in CHATS])


def write(name: str, rows: list[Any]) -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def measured(*overrides: str) -> dict[str, Any]:
    assert main(["task=eval", "device=cpu", "device.threads=1", "eval.out=out.json", *overrides]) == 0
    return dict(json.loads(Path("out.json").read_text())["text"])


def trained(*overrides: str) -> None:
    data = ["data=documents", "data.sources=[chats.jsonl]", "data.chat_key=talk", "data.held_out=0.3"]
    assert main([*SIZES, *data, "data.long_documents=cut", "run.dir=run", *overrides]) == 0


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("plain", "{Role}: {content}\n"),
        ("{role} says {content}|", "{role} says {content}|"),
    ],
)
def test_chats_are_rendered_as_the_run_did(template: str, message: str) -> None:
    trained("data.tokenizer=byte", f"data.template='{template}'")
    texts = ["".join(message.format(Role=m["role"].capitalize(), **m) for m in chat).rstrip("\n") for chat in CHATS]
    found = measured("run.dir=run", "eval.text=[chats.jsonl]")
    expected = measured("run.dir=run", f"eval.text=[{write('texts.jsonl', [{'text': text} for text in texts])}]")
    assert found["bytes"] == sum(len(text) for text in texts)
    same = ("tokens", "bytes", "loss", "bits_per_byte", "documents")
    assert [found[key] for key in same] == [expected[key] for key in same]
    silent = [{"talk": [chat[0], {**chat[1], "weight": 0}]} for chat in CHATS]  # nothing is learnt here
    assert measured("run.dir=run", f"eval.text=[{write('silent.jsonl', silent)}]")["loss"] == found["loss"]


def test_chats_are_rendered_by_the_template_of_a_folder() -> None:
    """As Transformers does; a BOS that the template writes is not put there twice."""
    transformers = pytest.importorskip("transformers", reason="the package transformers is not installed")
    made: Any = train_bpe([json.dumps(CHATS)], 300)
    Path("tokenizer.json").write_text(made.with_token("<s>").with_token("</s>").to_json())
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    Path("tokenizer_config.json").write_text(json.dumps(config))
    trained("data.tokenizer=tokenizer.json", "data.template=tokenizer", "model=llama", "model.hidden=24", *SIZES)
    assert main(["task=export", "run.dir=run", "export.form=huggingface", "export.dir=hf"]) == 0
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file="tokenizer.json", **config)
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in CHATS]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    write("messages.jsonl", [{"messages": chat} for chat in CHATS])
    for model, chats in (("run.dir=run", "chats.jsonl"), ("model.from=hf", "messages.jsonl")):
        found = measured(model, f"eval.text=[{chats}]")
        if model == "model.from=hf":  # a text follows bos_token, which is there once
            assert found["tokens"] == sum(len(each) - 1 for each in ids)
            assert found["bytes"] == sum(len(text) - len("<s>") for text in texts)
        expected = measured(model, f"eval.text=[{write('texts.jsonl', [{'text': text} for text in texts])}]")
        assert (found["loss"], found["tokens"]) == (expected["loss"], expected["tokens"])


def test_a_model_without_a_template_reads_no_chats(capsys: pytest.CaptureFixture[str]) -> None:
    Path("book.txt").write_text("the cat sat on the mat. " * 60)
    assert main([*SIZES, "data.path=book.txt", "data.tokenizer=byte", "run.dir=text"]) == 0
    write("messages.jsonl", [{"text": "the cat"}, {"messages": CHATS[0]}])
    assert main(["task=eval", "run.dir=text", "eval.text=[messages.jsonl]", "device=cpu"]) == 2
    said = capsys.readouterr().err
    assert "messages.jsonl:2 is a conversation. text: has no template of conversations" in said


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl"])
def test_only_a_line_feed_ends_a_row_of_prompts(name: str) -> None:
    rows = ["one\u2028two", "form\x0cfeed", "next\x85line", "a\rb", "\x1cgroup\x1e", "last"]
    lines = [json.dumps({"prompt": row}, ensure_ascii=False) if name.endswith("l") else row for row in rows]
    for end in ("\n", "\r\n"):
        Path(name).write_bytes(("\ufeff" + end.join(lines) + end + end).encode())
        assert [row[1] for row in _rows(Path(name))] == rows
    assert [row[0] for row in _rows(Path(name))] == [f"{name}:{number}" for number in range(1, 7)]
    Path(name).write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=rf"^sample\.prompts: {name}:1 is .*UTF-16 does. Convert it to UTF-8\.$"):
        list(_rows(Path(name)))


def test_lines_of_a_chat_end_at_line_feeds(monkeypatch: pytest.MonkeyPatch) -> None:
    import io
    import sys

    from ttrain.tasks import chat

    said: list[str] = []
    given = "\ufeffone\rtwo\u2028three\r\n/reset\n\x85four".encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given), "utf-8"))
    monkeypatch.setattr(chat._Conversation, "answer", lambda self, line: said.append(line))
    trained("data.tokenizer=byte", "data.template=chatml")
    chat.run(load_config("task=chat", "run.dir=run", "device=cpu"))
    assert said == ["one\rtwo\u2028three", "\x85four"]
