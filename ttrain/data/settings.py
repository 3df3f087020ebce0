"""Small config of each kind of data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ttrain.core.options import option, rule

TOKENIZERS = ("char", "byte", "bpe")
TOKEN_DTYPES = ("uint16", "uint32")


@dataclass
class DataConfig:
    """Keys of every kind of data."""

    name: str = option("text", "registered name of the data")
    held_out: float = option(0.1, "share at the end kept for evaluation and never trained on", above=0, below=1)
    order: str = option(
        "random",
        "random: every sequence is drawn independently; epoch: each one once per pass, shuffled anew for every pass; "
        "read: one after another as they lie there, again and again",
        choices=("random", "epoch", "read"),
    )
    resident: str = option(
        "auto",
        "where the training split lies: device, uploaded once, so that a step is handed the indices of its samples; "
        "host; auto: on a GPU, if it takes 256 MiB at most (4 bytes a token). data=documents stays on the host",
        choices=("auto", "device", "host"),
    )
    limit: int | None = option(
        None, "train on the first so many sequences of the order, again and again, to see a model overfit", minimum=1
    )


@dataclass
class TextConfig(DataConfig):
    """UTF-8 text, tokenized at the start of a run and kept in memory."""

    path: str | None = option(
        None,
        "UTF-8 file, or folder of them read in sorted order; null takes the running Python's standard library",
        path=True,
    )
    suffixes: list[str] = option([], "file-name endings to read from a folder, such as [.txt, .md]; empty reads all")
    separator: str = option("\n", "text put between two files, in which \\n is a line break")
    max_bytes: int | None = option(None, "read no more of the corpus than this; null reads all of it", minimum=1)
    tokenizer: str = option(
        "char", "char, byte, bpe (trained on the training split) or the path of a tokenizer.json", path=True
    )
    vocabulary_size: int = option(2048, "bpe only: token ids to train, the 256 bytes among them", minimum=256)


@dataclass
class TokensConfig(DataConfig):
    """Token ids in files, read through memory maps, so that the files may be larger than memory."""

    name: str = option("tokens", "registered name of the data")
    path: str | None = option(
        None,
        "folder made by task=prepare, folder with train.bin and maybe val.bin, or a file of raw ids; required",
        path=True,
    )
    dtype: str | None = option(
        None, "raw files only: little-endian type of an id; a prepared folder tells its own", choices=TOKEN_DTYPES
    )
    vocabulary: int | None = option(None, "raw files only: number of ids; a prepared folder tells its own", minimum=1)
    tokenizer: str | None = option(
        None, "raw files only: path of the tokenizer.json of the ids, for sampling", path=True
    )
    verify: bool = option(
        False, "check all ids and checksums at the start; false does so for files up to 256 MiB and else checks batches"
    )

    @rule
    def _has_a_path(self, others: Any) -> Iterator[str]:
        if self.path is None and others.task.name in ("train", "plan"):
            yield "data.path: no value. data=tokens needs data.path=<folder or file of token ids>."


@dataclass
class DocumentsConfig(DataConfig):
    """Documents of local files, tokenized once into memory-mapped files and laid end to end."""

    name: str = option("documents", "registered name of the data")
    sources: list[str] = option(
        [],
        "files or folders read in turn, a document of each: .jsonl, .parquet or .arrow with a row per document, else "
        "text; .jsonl and text may be compressed as .gz or .zst",
        path=True,
    )
    held_out: float = option(
        0.1,
        "share of the documents, chosen by their content, kept for evaluation and never trained on",
        above=0,
        below=1,
    )
    order: str = option(
        "shuffled",
        "read: documents as they are read, one of each source in turn; shuffled: anew for every pass, among as many "
        "neighbours as shuffle_buffer says",
        choices=("read", "shuffled"),
    )
    shuffle_buffer: int | None = option(
        1000, "documents next to each other that are shuffled together; null shuffles all of them", minimum=2
    )
    attention: str = option(
        "sequence",
        "sequence: a token attends to all before it in its sequence; document: to those of its own document, in which "
        "positions count from 0, and no token predicts the next document",
        choices=("sequence", "document"),
    )
    text_key: str = option("text", "key of a row's text")
    chat_key: str = option("messages", "key of a row's list of messages with role and content, where it has no text")
    template: str = option(
        "plain",
        "what a message becomes: plain (User: ..), chatml (<|im_start|>user ..) or a text with {role} or {Role} and "
        "{content}, in which \\n is a line break; tokenizer: the chat template beside the tokenizer.json makes all of "
        "it",
    )
    loss_on: str = option(
        "all",
        "which tokens of conversations are targets: all, or those of the assistant's replies; texts count whole",
        choices=("all", "replies"),
    )
    long_documents: str = option(
        "split",
        "split: documents lie end to end and continue in the next sequence; cut: every document lies whole in one "
        "sequence, what is longer than model.context loses its end; skip: what is longer is left out",
        choices=("split", "cut", "skip"),
    )
    delimiter: str | None = option(
        None, "line between two documents of a text file, '' for a blank one; null: every file is one document"
    )
    suffixes: list[str] = option(
        [".jsonl", ".txt", ".parquet", ".arrow"],
        "file-name endings to read from a folder, before a .gz or .zst too; empty reads all",
    )
    max_documents: int | None = option(None, "read no more documents than this; null reads all", minimum=2)
    bad_rows: str = option(
        "stop", "a row that can't be used: stop and name it, or skip it and count", choices=("stop", "skip")
    )
    tokenizer: str = option(
        "bpe",
        "char (of all documents), byte, bpe (trained on the training documents) or the path of a tokenizer.json",
        path=True,
    )
    vocabulary_size: int = option(2048, "bpe only: token ids to train, the 256 bytes among them", minimum=256)
    end_token: str | None = option(
        None,
        "token put after every document; null takes the tokenizer's own, or adds <|endoftext|> where it has none",
    )
    cache: str | None = option(
        None, "folder that keeps the tokenized documents for the next run; null takes the user's cache", path=True
    )

    @rule
    def _has_sources(self, others: Any) -> Iterator[str]:
        if not self.sources and others.task.name not in ("sample", "chat"):
            yield "data.sources=[]: no value. data=documents needs data.sources=[<file or folder>,<another>]."

    @rule
    def _is_read_on_the_host(self, others: Any) -> Iterator[str]:
        if self.resident == "device":
            yield (
                "data.resident=device: the host makes the sequences of data=documents, by where documents begin and "
                "what of them counts. Give auto or host, or data=tokens with the folder that task=prepare writes of "
                "them."
            )

    @rule
    def _has_targets(self, others: Any) -> Iterator[str]:
        if 1 in (getattr(others.model, "context", 0), *others.train.length_schedule):
            yield (
                "data=documents: the last token of a sequence has no target, so sequences of 1 token teach nothing. "
                "Give model.context and train.length_schedule of 2 or more."
            )

    @rule
    def _keeps_replies(self, others: Any) -> Iterator[str]:
        if others.task.name == "prepare" and self.loss_on != "all":
            yield (
                "data.loss_on=replies: data=tokens counts every token. Train on data=documents, which keeps tokens too."
            )


@dataclass
class RegressionConfig(DataConfig):
    """Synthetic regression: a fixed random two-layer teacher plus Gaussian noise."""

    name: str = option("regression", "registered name of the data")
    inputs: int | None = option(None, "features per example; null takes the model's", minimum=1)
    outputs: int | None = option(None, "targets per example; null takes the model's", minimum=1)
    examples: int = option(8192, "number of distinct examples, held-out ones included", minimum=2)
    noise: float = option(0.1, "standard deviation of the noise on targets, whose own variance is about 1", minimum=0)
    seed: int = option(0, "seed of the teacher and of the examples", minimum=0)


@dataclass
class PrepareConfig:
    """Options of task=prepare: the folder that it writes."""

    dir: str | None = option(
        None, "new folder for the token files, to be read with data=tokens data.path=<folder>", path=True
    )

    @rule
    def _reads_text(self, others: Any) -> Iterator[str]:
        if others.task.name != "prepare":
            return
        if self.dir is None:
            yield "prepare.dir: no value. task=prepare needs prepare.dir=<new folder for the token files>."
        if not isinstance(others.data, TextConfig | DocumentsConfig):
            yield (
                f"data={others.data.name}: task=prepare reads text. Give data=stdlib, data=text with data.path, or "
                "data=documents with data.sources."
            )
