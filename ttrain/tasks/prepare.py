"""task=prepare: write a text of any size, piece by piece, into token files for data=tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from ttrain.config import build
from ttrain.config.schema import Config
from ttrain.core.errors import DataError
from ttrain.core.files import replace_file, sha256_file
from ttrain.core.folders import at_home
from ttrain.core.units import format_bytes, format_count
from ttrain.core.waiting import Waiting, waited_for
from ttrain.data.batches import Sizes, Split, TokenDataset
from ttrain.data.corpus import Corpus
from ttrain.data.document_files import fill_documents
from ttrain.data.sequences.taught import ENTRY, LOG_PROBS, taught_file, taught_type
from ttrain.data.settings import DocumentsConfig, TextConfig, TokensConfig
from ttrain.data.sources import find_sources
from ttrain.data.text import encode_corpus
from ttrain.data.tokens import HEADER_FILE, open_tokens, split_writers, write_folder, write_header
from ttrain.objectives.distillation import REST, Distillation
from ttrain.objectives.settings import DistillationConfig

_ADVICE = "Make room or name another folder: prepare.dir=<folder>."


def run(config: Config) -> None:
    """Tokenize the corpus of `data` into `prepare.dir`, with a teacher's distributions, and say how to train on it."""
    # The config's checks hold it so.
    assert isinstance(config.data, TextConfig | DocumentsConfig) and config.prepare.dir is not None
    teacher = None if config.objective.frozen_source(config) is None else Teacher(config)
    header = prepare(config.data, config.prepare.dir, finish=teacher)
    for notice in header["corpus"].get("notices", ()):
        print(f"WARNING: {notice}")
    counts = ", ".join(f"{split} {format_count(part['tokens'])}" for split, part in header["splits"].items())
    print(f"{config.prepare.dir}: {counts} tokens of {header['vocabulary']} ids")
    keys: dict[str, object] = {"data": "tokens", "data.path": config.prepare.dir}
    if isinstance(config.data, DocumentsConfig) and teacher is None:
        keys["data.order"] = "sequential"
    fewest, context = min(part["tokens"] for part in header["splits"].values()), getattr(config.model, "context", None)
    if context is not None and fewest <= context and teacher is None:
        keys["model.context"] = max(1, fewest - 1)
    dropped = ["data", "prepare", "objective.teacher"]
    print(f"train on it: {config.source.command(keys, without=dropped, task='train')}")


def prepare(
    config: TextConfig | DocumentsConfig, destination: Path | str, *, progress: bool = True,
    finish: Callable[[Path, dict[str, Any]], dict[str, Any]] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Tokenize a corpus into a folder that data=tokens reads, and return the content of its `tokens.json`.

    data=text, or data=documents, makes the same tokens and splits of the same config. Memory does not grow with the
    text, except for the word counts while BPE is learned and for some bytes per document. The folder appears once it is
    complete; `finish` may add files and to the content before. Raises DataError where the corpus can't be used, and
    where the destination exists or can't be written.
    """
    final, delay = at_home(destination), 0.0 if progress else None
    if final.exists():
        raise DataError(f"{final} exists already. Give another folder, or remove it first.")
    if isinstance(config, DocumentsConfig):
        sources = find_sources(config)
        told = [notice for source in sources for notice in source.notices]
        fill = partial(fill_documents, config=config, sources=sources, delay=delay, told=told)
    else:
        fill = partial(_fill, corpus=Corpus(config), config=config, delay=delay)
    return write_folder(final, lambda folder: finish(folder, fill(folder)) if finish else fill(folder), _ADVICE)


def _fill(folder: Path, corpus: Corpus, config: TextConfig, delay: float | None) -> dict[str, Any]:
    with split_writers(folder) as writers:
        tokenizer, described = encode_corpus(config, corpus, delay, lambda split, ids: writers[split].add(ids))
        for split, writer in writers.items():
            if not writer.tokens:
                more = "Give more text or another data.held_out."
                raise DataError(f"the {split} split of {corpus.found.given} has no tokens. {more}")
        splits = {split: writer.finish() for split, writer in writers.items()}
    return write_header(folder, tokenizer, splits, described)


class Teacher:
    """The teacher of a config. It reads the folder that it is called with, and adds its distributions."""

    def __init__(self, config: Config) -> None:
        """Raises UserError where there is no such model, or it can't read model.context tokens."""
        asked = config.objective
        # The config's checks hold it so.
        assert isinstance(asked, DistillationConfig) and asked.teacher is not None and asked.top_k is not None
        self._config, self._asked, self._top_k, self._context = config, asked, asked.top_k, config.model.context
        self._frozen = build.open_frozen("objective.teacher", asked.teacher, config)
        self._model = self._frozen.at_length(self._context)
        for parameter in self._frozen.parameters:
            parameter.trainable = True  # a session wants something to train, though nothing is trained here

    def __call__(self, folder: Path, header: dict[str, Any]) -> dict[str, Any]:
        """Add the teacher's files, and return the `header` of the folder with the entry on them.

        Raises ConfigError where the teacher has other ids, and DataError where there is no room.
        """
        asked, context = self._asked, self._context
        tokens = cast(TokenDataset, open_tokens(TokensConfig(path=str(folder)), Sizes(context=context)))
        digest = self._frozen.check(asked.frozen_hash, tokens.tokenizer, context)
        ids = min(cast(int, tokens.vocabulary), self._model.vocabulary)
        if self._top_k > ids:
            raise DataError(f"objective.top_k={self._top_k}: the tokenizer has {ids} ids. Give fewer.")
        counts: dict[Split, int] = {"train": (tokens.tokens("train") - 1) // context, "val": tokens.val_samples}
        needed = sum(counts.values()) * context * taught_type(self._top_k).itemsize
        if needed > (free := shutil.disk_usage(folder).free):  # a mapped file can't tell
            few = f"the teacher's distributions take {format_bytes(needed)}, and {format_bytes(free)} are free"
            raise DataError(f"{few}. {_ADVICE[:-1]}, or a smaller objective.top_k than {self._top_k}.")
        with (
            closing(build.build_device(self._config.device, self._config.precision)) as device,
            closing(build.build_session(self._model, device, self._config, training=False)) as session,
        ):
            with Waiting("Loading the teacher"):
                self._frozen.write(session.state)
            rows, objective = session.graph.rows, cast(Distillation, build.made("objective", asked))
            record = partial(objective.record_top, teacher=self._model, rows=rows, ids=ids)
            step = session.engine.build("teacher", record)
            for split, count in counts.items():
                self._write(folder, step, tokens, split, count, rows)
        said = {"context": context, "top_k": asked.top_k, "temperature": asked.temperature, "teacher": asked.teacher}
        said["teacher_sha256"] = digest
        said["sha256"] = {split: sha256_file(taught_file(folder, split)) for split in counts}
        replace_file(folder / HEADER_FILE, json.dumps({**header, ENTRY: said}, indent=2))
        return {**header, ENTRY: said}

    def _write(self, folder: Path, step: Any, tokens: TokenDataset, split: Split, count: int, rows: int) -> None:
        """Write the array of a split, a batch of `rows` of its `count` sequences at a time."""
        kind, shape = taught_type(self._top_k), (count, self._context)
        array = np.lib.format.open_memmap(taught_file(folder, split), "w+", kind, shape)  # type: ignore[no-untyped-call]
        for first in waited_for(range(0, count, rows), f"The teacher reads the {split} split, in batches of {rows}"):
            places = np.arange(first, first + rows) % count
            batch = tokens.read(split, (places * self._context).astype(np.uint64))
            found: dict[str, list[Any]] = {}
            for name, part in step({key: batch[key] for key in step.inputs}).items():
                found.setdefault(name.partition(".")[0], []).append(part)
            whole = {name: np.concatenate(parts) for name, parts in found.items()}
            whole[LOG_PROBS] = np.concatenate([whole[LOG_PROBS], whole.pop(REST)], axis=1)
            for name, values in whole.items():
                if not np.isfinite(values).all():
                    raise DataError(f"objective.teacher={self._asked.teacher}: computes NaN. Give another.")
                live = array[name][first : first + rows]
                live[:] = values.reshape(rows, *live.shape[1:])[: len(live)]
        array.flush()
