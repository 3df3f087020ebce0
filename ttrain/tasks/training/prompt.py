"""The prompt of the sample that ends a run: sample.prompt, or a piece of held-out text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from ttrain.config.schema import Config
from ttrain.data.batches import Dataset
from ttrain.data.end_token import named_end
from ttrain.train.sampling.draw import encode_prompt
from ttrain.train.sampling.stream import end_id, special_tokens

_CHARACTERS = 60  # at least, where there are as many
_TOKENS = 1024  # at most that are looked at


def sample_prompt(config: Config, dataset: Dataset) -> list[int] | None:
    """Return token ids, None where no text can be made. Raises UserError or DataError for a prompt that is no text."""
    tokenizer = dataset.tokenizer
    if tokenizer is None:
        return None
    end = named_end(config.data, tokenizer.config)
    found = _held_out(dataset, end_id(tokenizer, end)) if config.sample.prompt is None else []
    return found or encode_prompt(tokenizer, config.sample.prompt, end)


def shown_prompt(tokenizer: Any, prompt: list[int]) -> str:
    """Return the text of a prompt as lines that are marked as quoted, empty where it is blank or a special token."""
    before = len(tokenizer.start) if prompt[: len(tokenizer.start)] == tokenizer.start else 0
    text: str = tokenizer.decode(prompt[before:])
    blank = not text.strip() or (len(prompt) == 1 and text in special_tokens(tokenizer))
    return "" if blank else "\n".join(f"> {line}".rstrip() for line in text.strip("\n").split("\n"))


def _held_out(dataset: Any, end: int | None) -> list[int]:
    """Return some tokens of the first held-out sequence, as they are learnt: all before its first reply, or a line."""
    batch = dataset.batch("val", 0, 0, 1)
    tokens, learnt = batch["tokens"][0].tolist(), batch["targets"][0] >= 0
    if not learnt[0] and learnt.any():
        return list(tokens[: int(learnt.argmax()) + 1])
    parts = [list(part) for ended, part in groupby(tokens[:_TOKENS], lambda token: token == end) if not ended]
    start = dataset.tokenizer.start
    lines = [_line(dataset.tokenizer, part[len(start) :] if part[: len(start)] == start else part) for part in parts]
    line = max(lines, key=len, default=[])
    return dataset.tokenizer.with_start(line) if line else []


def _line(tokenizer: Any, tokens: Sequence[int]) -> list[int]:
    """Return tokens from the start of a line or word on, to the end of a word."""
    pieces = [tokenizer.decode([token]) for token in tokens]
    half = range(1, len(pieces) // 2)
    start = next((place for place in half if pieces[place - 1].endswith("\n")), 0)
    start = start or next((place for place in half if pieces[place - 1].isspace() or _begins_word(pieces[place])), 0)
    ends = [place for place in range(start + 1, len(pieces)) if pieces[place][:1].isspace()] or [len(pieces)]
    return list(tokens[start : next((end for end in ends if len("".join(pieces[start:end])) >= _CHARACTERS), ends[-1])])


def _begins_word(piece: str) -> bool:
    return piece[:1].isspace() and not piece.isspace()
