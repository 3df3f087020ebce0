"""task=sample: text from the model of run.dir=<run> or model.from=<folder>."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ttrain.config.schema import Config
from ttrain.core.errors import DataError, UserError, raised_as
from ttrain.core.folders import at_home
from ttrain.core.units import counted
from ttrain.data.chat.conversation import Chat, parsed
from ttrain.data.sources import read_lines
from ttrain.tasks.opening import OpenedModel, of_given
from ttrain.tasks.training.notices import idle
from ttrain.train.forecast.step_time import reading_rate
from ttrain.train.sampling.draw import encode_prompt
from ttrain.train.sampling.source import TokenSource, check_sampling, print_source, written
from ttrain.train.sampling.stream import Stop, print_text


@contextmanager
def opened_model(config: Config) -> Iterator[tuple[OpenedModel, TokenSource]]:
    """Open the model of run.dir, else of model.from, on the device, ready to write."""
    given = of_given(config, config.sample, "makes no text.", "Give a language model's run.")
    check_sampling(given.model, given.config.sample)
    for warning in idle(given.config, ["sample"]):
        print(f"WARNING: {warning}", file=sys.stderr)
    with given.on_device() as steps:
        yield given, TokenSource(steps, given.config.sample, given.tokenizer.vocabulary)


def run(config: Config) -> None:
    """Prints `sample.count` samples, or what follows each of `sample.prompts`."""
    rows = [] if config.sample.prompts is None else read_prompts(config.sample.prompts, "sample.prompts")
    with opened_model(config) as (given, source):
        if config.sample.prompts is not None:
            _write_results(given, source, rows)
            return
        prompt = encode_prompt(given.tokenizer, config.sample.prompt, given.end_token)
        device, index = source.steps.session.engine.device.name, given.config.device.index
        print_source(source, given.tokenizer, prompt, given.stop, partial(reading_rate, device, index))


def read_prompts(given: str, key: str) -> list[tuple[str, Any, Any]]:
    """Return what `_rows` yields of a file that a key names. Raises UserError where it has none."""
    if rows := list(_rows(at_home(given), key)):
        return rows
    raise UserError(f"{key}={given}: has no prompt. Give a file with a prompt a line.")


def _rows(file: Path, key: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the place and the content of every prompt, which is a text or the messages to answer, and its tools."""
    with (
        raised_as(UserError, f"{key}={file}: can't be read", "Give a file with a prompt a line."),
        raised_as(UserError, key, of=DataError),
    ):
        lines = [(number, line.removesuffix("\n").removesuffix("\r")) for number, line in read_lines(file, len, False)]
    for number, line in lines:
        place, row, tools = f"{file}:{number}", line, None  # type: tuple[str, Any, Any]
        if not line.strip():
            continue
        if file.suffix.lower() == ".jsonl":
            with raised_as(UserError, f"{place}: not JSON", "Write a row a line.", (ValueError, RecursionError)):
                row = json.loads(line)
            if isinstance(row, dict):
                prompt, tools = row.get("prompt"), row.get("tools")
                row = prompt if prompt or "messages" not in row else parsed(row["messages"])
            if not isinstance(row, str | list):
                raise UserError(f"{place}: has neither a text 'prompt' nor a list 'messages'.")
            if not row:
                raise UserError(f"{place}: is empty. Give a text, or at least one message.")
        yield place, row, tools


def _write_results(given: OpenedModel, source: TokenSource, rows: list[tuple[str, Any, Any]]) -> None:
    """Write what follows each prompt, a row of JSON for each sample, to sample.results or stdout.

    The file grows beside its place and takes it when it is whole, so what an interrupted command wrote is not lost.
    """
    texts = [(row, *encoded_prompt(given, place, row, tools)) for place, row, tools in rows]
    target, answers = given.config.sample.results, _answers(given, source, texts)
    if target is None:
        for answer in answers:
            print_text(answer)
        return
    file = at_home(target)
    beside = file.with_name(f"{file.name}.partial")
    with raised_as(UserError, f"sample.results={file}: can't be written"):
        with open(beside, "w", buffering=1, encoding="utf-8") as stream:  # a line at a time
            stream.writelines(answers)
            os.fsync(stream.fileno())
        os.replace(beside, file)
    print(f"{file}: {counted(len(texts) * given.config.sample.count, 'row')}.", file=sys.stderr)


def encoded_prompt(given: OpenedModel, place: str, row: Any, tools: Any) -> tuple[list[int], Stop]:
    """Return the ids of a prompt and what ends its answers. Raises UserError that names the row."""
    if isinstance(row, str):
        return encode_prompt(given.tokenizer, row, given.end_token), given.stop
    with raised_as(UserError, place, of=ValueError):
        template = given.conversations()
        stop = given.stop.also(given.tokenizer, ending_of(template))
        return given.tokenizer.encode(template.prompt(Chat.of(row, tools))), stop


def _answers(given: OpenedModel, source: TokenSource, prompts: list[tuple[Any, list[int], Stop]]) -> Iterator[str]:
    """Yield a row of JSON for each sample."""
    each = [prompt for prompt in prompts for _ in range(given.config.sample.count)]
    texts = written(source, given.tokenizer, [(ids, stop) for _, ids, stop in each], range(len(each)))
    for (row, _, _), text in zip(each, texts, strict=True):
        key = "prompt" if isinstance(row, str) else "messages"
        yield json.dumps({key: row, "text": text}, ensure_ascii=False) + "\n"


def ending_of(template: Any) -> str | None:
    """Return the text that the template puts after a reply, such as <|im_end|>; None where it puts none there."""
    reply, question = "\ue001", "\ue002"
    said = {"role": "assistant", "content": reply}, {"role": "user", "content": question}
    try:
        text: str = template.render(Chat([said[1], *said])).text
    except ValueError:
        return None
    between = text.partition(reply)[2].partition(question)[0]
    first = between.lstrip("\n")
    breaks = len(between) - len(first)
    return "\n" * breaks + first.partition("\n")[0].rstrip() if first.strip() else None
