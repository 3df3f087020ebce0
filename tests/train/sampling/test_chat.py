"""task=chat, and answers to a file of prompts: what the model is asked, and when it stops."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Told
from tests.train.reading import write_rows
from ttrain.cli import main
from ttrain.data.library_tokenizer import read_tokenizer, train_bpe
from ttrain.tasks.sample import ending_of
from ttrain.train.sampling.source import TokenSource

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on chats by a tokenizer's template, one step long."""
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = train_bpe(["what is the time? it is nine\n"] * 20, 290)
    for token in ("<|im_start|>", "<|im_end|>", "<|endoftext|>"):
        tokenizer = tokenizer.with_token(token)
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}))
    rows = [[{"role": "user", "content": f"what {n}"}, {"role": "assistant", "content": "it is"}] for n in range(9)]
    write_rows(folder / "rows.jsonl", rows)
    sizes = ["model.layers=1", "model.width=16", "model.heads=2", "model.context=192"]
    chats = [f"data.sources=[{folder}/rows.jsonl]", f"data.tokenizer={folder}/tokenizer.json", "data.loss_on=replies"]
    rest = ["device=cpu", "engine=dynamic", "train.steps=1", "train.batch_size=2", "data.template=tokenizer"]
    rest += ["data.long_documents=cut"]
    cache = f"data.cache={folder}/cache"
    assert main(["data=documents", *sizes, *chats, *rest, cache, f"run.dir={folder}/run"]) == 0
    return folder / "run"


@pytest.fixture
def asked(run: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Prompts that the model is given; it answers each with its number, the end of a message and more."""
    tokenizer, prompts = read_tokenizer(next(run.glob("checkpoints/*")) / "tokenizer.json"), list[str]()

    def tokens(self: TokenSource, prompt: list[int], number: int) -> Iterator[int]:
        prompts.append(tokenizer.decode(prompt))
        if "stop here" in prompts[-1]:
            raise KeyboardInterrupt
        yield from tokenizer.encode(f" it is {number}<|im_end|>\nand more")

    monkeypatch.setattr(TokenSource, "tokens", tokens)
    return prompts


HERE = ["device=cpu", "engine=dynamic"]


def talk(run: Path, monkeypatch: pytest.MonkeyPatch, text: str, *overrides: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    return main(["task=chat", f"run.dir={run}", *HERE, *overrides])


def message(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def test_a_conversation(run: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert talk(run, monkeypatch, "one\n\n two \n/reset\nthree\n", "sample.system=Be, brief.", "sample.tokens=8") == 0
    system, end = message("system", "Be, brief."), "<|im_start|>assistant\n"
    first = system + message("user", "one")
    later = first + message("assistant", "it is 0") + message("user", " two ")
    assert asked == [first + end, later + end, system + message("user", "three") + end]
    assert capsys.readouterr().out == " it is 0\n it is 1\n it is 2\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_is_shown_control_characters_escaped(
    terminal: bool, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    raw, escaped = "\x1b]0;é\x07\ta\n\r\x0b\x7f\x9b", "\\x1b]0;é\\x07\ta\n\\x0d\\x0b\\x7f\\x9b"
    tokenizer, shown = read_tokenizer(next(run.glob("checkpoints/*")) / "tokenizer.json"), escaped if terminal else raw
    monkeypatch.setattr(TokenSource, "tokens", lambda self, prompt, number: iter(tokenizer.encode(raw)))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    assert talk(run, monkeypatch, "one\n") == 0 and capsys.readouterr().out == f"{shown}\n"
    (tmp_path / "prompts.txt").write_text("what\n")
    command = ["task=sample", f"run.dir={run}", *HERE]
    assert main([*command, "sample.count=1", "sample.prompt=it"]) == 0 and capsys.readouterr().out == f"it{shown}\n"
    assert main([*command, "sample.count=1", f"sample.prompts={tmp_path}/prompts.txt"]) == 0
    row = json.dumps({"prompt": "what", "text": raw}, ensure_ascii=False) + "\n"
    assert capsys.readouterr().out == (row.replace("\x7f\x9b", "\\x7f\\x9b") if terminal else row)


def test_what_no_longer_fits_is_forgotten(run: Path, asked: list[str], monkeypatch: Any, capsys: Any) -> None:
    assert talk(run, monkeypatch, "".join(f"{n}{n * 'x'}\n" for n in (30, 31, 32, 33)), "sample.system=Hi") == 0
    assert len(read_tokenizer(next(run.glob("checkpoints/*")) / "tokenizer.json").encode(asked[-1])) <= 96
    assert asked[-1].startswith(message("system", "Hi") + "<|im_start|>user\n")
    assert "30xxx" not in asked[-1] and "33xxx" in asked[-1]
    assert "its oldest exchange is dropped" in capsys.readouterr().err


def test_what_is_no_text_is_told_and_the_talk_goes_on(
    run: Path, asked: list[str], monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one\n\xff\ntwo\n"), "utf-8"))
    assert main(["task=chat", f"run.dir={run}", *HERE]) == 0
    said = capsys.readouterr()
    assert said.out == " it is 0\n it is 1\n" and "'\\udcff'" in said.err and "\udcff" not in asked[-1]


def test_a_closed_stdin_is_an_empty_one(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert main(["task=chat", f"run.dir={run}", *HERE]) == 0


def test_ctrl_c_ends_it(run: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert talk(run, monkeypatch, "one\nstop here\nthree\n") == 0
    assert len(asked) == 2


def test_rows_of_prompts_with_nulls_tools_and_json_as_text(run: Path, tmp_path: Path, asked: list[str]) -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": "who"}]}]
    rows = [{"prompt": None, "messages": chat}, {"prompt": "", "messages": json.dumps(chat)}, {"prompt": chat}]
    rows += [{"messages": chat, "tools": "[]"}, {"prompt": "who", "messages": None}]
    write_rows(tmp_path / "prompts.jsonl", rows)
    answers = [f"sample.prompts={tmp_path}/prompts.jsonl", *HERE, "sample.batch_size=1"]
    assert main(["task=sample", f"run.dir={run}", *answers]) == 0
    assert asked == [message("user", "who") + "<|im_start|>assistant\n"] * 4 + ["who"]


def test_a_file_of_prompts(run: Path, tmp_path: Path, asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    prompts, results = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    chat = [{"role": "user", "content": "who"}]
    prompts.write_text(json.dumps({"prompt": "what"}) + "\n\n" + json.dumps({"messages": chat}) + "\n")
    command = ["task=sample", f"run.dir={run}", *HERE, "sample.count=2", "sample.batch_size=1"]
    assert main([*command, f"sample.prompts={prompts}", f"sample.results={results}"]) == 0
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert [row["text"] for row in rows] == [" it is 0", " it is 1", " it is 2", " it is 3"]
    assert [row.get("prompt") for row in rows] == ["what", "what", None, None] and rows[3]["messages"] == chat
    assert asked[1:3] == ["what", message("user", "who") + "<|im_start|>assistant\n"]
    assert len(list(tmp_path.iterdir())) == 2
    capsys.readouterr()
    (tmp_path / "prompts.txt").write_text("what\nwho\n")
    assert main([*command, f"sample.prompts={tmp_path / 'prompts.txt'}"]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["prompt"] for row in printed] == ["what", "what", "who", "who"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("\n \n", "prompts.jsonl: has no prompt"),
        ('{"messages": []}', "prompts.jsonl:1: is empty"),
        ('{"prompt": ""}', "prompts.jsonl:1: is empty"),
        ("{", "prompts.jsonl:1: not JSON"),
        ('{"text": 1}', "has neither a text 'prompt' nor a list 'messages'"),
        ('{"messages": [{"content": "x"}]}', "prompts.jsonl:1: message 1 is not an object with a role"),
        (None, "can't be read"),
    ],
)
def test_prompts_that_cannot_be_used(run: Path, tmp_path: Path, row: str | None, words: str, told: Told) -> None:
    file = tmp_path / "prompts.jsonl"
    if row is not None:
        file.write_text(row)
    assert words in told("task=sample", f"run.dir={run}", *HERE, f"sample.prompts={file}", code=2)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["task=sample", "sample.prompts=p.txt", "sample.prompt=x"], "sample.prompt and sample.prompts both"),
        (["task=chat", "sample.prompts=p.txt"], "sample.prompts: task=chat reads"),
        (["task=chat", "sample.prompt=x"], "sample.prompt: task=chat reads"),
        (["task=sample", "sample.results=r.jsonl"], "sample.results=r.jsonl: takes the answers"),
        (["task=sample", "sample.system=x"], "sample.system: begins a conversation"),
    ],
)
def test_a_key_that_would_do_nothing(overrides: list[str], words: str, told: Told) -> None:
    assert words in told("run.dir=run", "device=cpu", *overrides, code=2)


def test_the_model_of_a_folder(
    run: Path, tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any, told: Told
) -> None:
    """Talks by its own template up to its own ends, without a key of data."""
    folder, answers = tmp_path / "hf", [*HERE, f"model.from={tmp_path}/hf"]
    assert main(["task=export", f"run.dir={run}", f"export.dir={folder}", "export.form=huggingface"]) == 0
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n"))
    assert main(["task=chat", *answers]) == 0 and capsys.readouterr().out == " it is 0\n"
    assert asked == [message("user", "one") + "<|im_start|>assistant\n"]
    tokenizer = read_tokenizer(folder / "tokenizer.json")
    ends = [tokenizer.token_id("<|im_end|>"), *tokenizer.encode(" is")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    assert main(["task=sample", "sample.prompt=what", *answers]) == 0 and capsys.readouterr().out == "what it\n"
    (folder / "tokenizer_config.json").write_text("{}")
    assert "has no template of conversations" in told("task=chat", *answers, code=2)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n"))
    assert main(["task=chat", *answers, "data=documents", "data.sources=[]", "data.template=plain"]) == 0
    assert asked[-1] == "User: one\nAssistant:"
    assert "both name a model" in told("task=chat", *answers, f"run.dir={run}", code=2)


@pytest.mark.parametrize(
    ("template", "ending"),
    [("plain", "\nUser:"), ("chatml", "<|im_end|>"), ("[{role}] {content}", "[user]"), ("{content}", None)],
)
def test_what_ends_a_reply(template: str, ending: str | None) -> None:
    from ttrain.data.chat.messages import Template

    assert ending_of(Template(template)) == ending
