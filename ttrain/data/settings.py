"""Small config of each kind of data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ttrain.core.names import bare_name
from ttrain.core.options import option, rule
from ttrain.core.units import counted

TOKENIZERS = ("char", "byte", "bpe")
TOKEN_DTYPES = ("uint16", "uint32")


@dataclass
class DataConfig:
    """Keys of every kind of data."""

    name: str = option("text", "registered name of the data")
    held_out: float = option(0.1, "share at the end that is kept for evaluation", above=0, below=1)
    order: str = option(
        "random",
        "random draws sequences independently; epoch takes each once per epoch, shuffled; sequential takes them in "
        "order",
        choices=("random", "epoch", "sequential"),
    )
    resident: str = option(
        "auto",
        "place of the training split; auto is device on a GPU up to 256 MiB (4 bytes a token), else host",
        choices=("auto", "device", "host"),
    )
    limit: int | None = option(None, "first sequences to train on, to see a model overfit; null takes all", minimum=1)


@dataclass
class TextConfig(DataConfig):
    """UTF-8 text, tokenized at the start of a run and kept in memory."""

    path: str | None = option(None, "UTF-8 file or folder, read in order; null is Python's standard library", path=True)
    suffixes: list[str] = option([], "file-name endings to read from a folder, such as [.txt, .md]; empty reads all")
    separator: str = option("\n", "text between two files; \\n is a line break", verbatim=True)
    max_bytes: int | None = option(None, "most bytes to read; null reads all", minimum=1)
    tokenizer: str = option("char", "char, byte, bpe (learned from the text), or a tokenizer.json's path", path=True)
    vocabulary_size: int = option(2048, "bpe: token ids to train, including the 256 bytes", minimum=256)


@dataclass
class TokensConfig(DataConfig):
    """Token ids in files, read through memory maps, so that the files may be larger than memory."""

    name: str = option("tokens", "registered name of the data")
    path: str | None = option(
        None, "folder of task=prepare, folder with train.bin, perhaps val.bin, or file of raw ids; required", path=True
    )
    dtype: str | None = option(None, "raw files: little-endian type of an id", choices=TOKEN_DTYPES)
    vocabulary: int | None = option(None, "raw files: number of ids", minimum=1)
    tokenizer: str | None = option(None, "raw files: path of the ids' tokenizer.json, for sampling", path=True)
    verify: bool = option(False, "check all ids and checksums at the start; false does so up to 256 MiB")

    @rule
    def _has_a_path(self, others: Any) -> Iterator[str]:
        if self.path is None and others.task.name in ("train", "plan"):
            yield "data.path: no value. data=tokens needs data.path=<folder or file of token ids>."


@dataclass
class SourceConfig:
    """An entry of data.sources, where it is more than a path."""

    path: str = option("", "file or folder; required", path=True)
    name: str | None = option(None, "name in metrics; null takes the name of file or folder, without its endings")
    weight: list[float] | None = option(
        None, "relative share of training sequences; a list has one per phase", minimum=0, maximum=10**15, one=True
    )
    limit: int | None = option(None, "documents to read, from the first on; null reads all", minimum=1)


@dataclass
class DocumentsConfig(DataConfig):
    """Documents of local files, tokenized once into memory-mapped files and laid end to end."""

    has_rows: ClassVar[bool] = True  # that an objective may read

    name: str = option("documents", "registered name of the data")
    sources: list[str | SourceConfig] = option(
        [],
        "files or folders, read in turn: .jsonl, .parquet and .arrow have a document per row, other files are text; "
        "weights draw each sequence from one of them",
        path=True,
    )
    held_out: float = option(0.1, "share of documents, chosen by their hash, kept for evaluation", above=0, below=1)
    order: str = option(
        "shuffled",
        "sequential takes documents in order; shuffled mixes shuffle_buffer neighbours anew for every epoch",
        choices=("sequential", "shuffled"),
    )
    shuffle_buffer: int | None = option(1000, "neighbouring documents shuffled together; null shuffles all", minimum=2)
    attention: str = option(
        "sequence",
        "sequence attends to all earlier tokens of the sequence, document only to those of its document",
        choices=("sequence", "document"),
    )
    text_key: str = option("text", "key of a row's text")
    chat_key: str = option("messages", "key of a row's messages, for rows without text")
    template: str = option(
        "plain",
        "text form of a message: plain (User: ..), chatml (<|im_start|>user ..), your own text with {role} or {Role} "
        "and {content}, or tokenizer (its chat template); \\n is a line break",
    )
    loss_on: str = option("all", "targets in chats: all tokens, or the assistant's replies", choices=("all", "replies"))
    long_documents: str = option(
        "split",
        "split continues documents in the next sequence; cut puts whole documents into a sequence and cuts longer "
        "ones; skip leaves those out",
        choices=("split", "cut", "skip"),
    )
    delimiter: str | None = option(
        None, "line between two documents of a text file, '' for a blank line; null makes each file one document"
    )
    suffixes: list[str] = option(
        [".jsonl", ".txt", ".parquet", ".arrow"],
        "file-name endings to read from a folder, before .gz or .zst; empty reads all",
    )
    max_documents: int | None = option(None, "most documents to read; null reads all", minimum=2)
    bad_rows: str = option("stop", "stop at a bad row and name it, or skip and count it", choices=("stop", "skip"))
    tokenizer: str = option("bpe", "char, byte, bpe (learned from the text), or a tokenizer.json's path", path=True)
    vocabulary_size: int = option(2048, "bpe: token ids to train, including the 256 bytes", minimum=256)
    end_token: str | None = option(None, "token after each document; null takes the tokenizer's, or adds <|endoftext|>")
    cache: str | None = option(None, "folder for the tokenized documents; null takes the user's cache", path=True)

    @property
    def entries(self) -> list[SourceConfig]:
        """Return all sources as entries with the names that they have in metrics."""
        found = [SourceConfig(each) if isinstance(each, str) else each for each in self.sources]
        return [replace(each, name=each.name or bare_name(each.path) or each.path) for each in found]

    @property
    def weights(self) -> list[tuple[float, ...]]:
        """Return the weights of all sources, phase by phase; none where their documents take turns."""
        given = [each.weight for each in self.entries if each.weight]
        return list(zip(*(each * (max(map(len, given)) if len(each) == 1 else 1) for each in given), strict=False))

    @rule
    def _can_be_mixed(self, others: Any) -> Iterator[str]:
        entries, key, train = self.entries, "data.sources", others.train
        names, given = [each.name for each in entries], [each for each in entries if each.weight is not None]
        phases = max(len(train.length_schedule), len(train.batch_schedule))
        phases = phases if phases > 1 else max((len(each.weight or ()) for each in given), default=0)
        for number, each in enumerate(entries):
            count = len(each.weight or ())
            if not each.path.strip():
                yield f"{key}[{number}]: has no path. Give path: <file or folder>."
            elif given and names.index(each.name) < number:
                paths = f"{entries[names.index(each.name)].path} and {each.path} are both named {each.name!r}"
                yield f"{key}: {paths}. Give each its own: {{path: <file>, name: <name>}}."
            elif given and each.weight is None:
                yield f"{key}: {each.path} has no weight, but others have. Give every source a weight, or none."
            elif given and count not in (1, phases):
                has = f"weight={each.weight} of {each.name} has {counted(count, 'value')} for"
                yield f"{key}: {has} {counted(phases, 'phase')}. Give one weight, or one for each phase."
            elif given and not any(each.weight or ()):
                none = "nothing would be read of it. Leave the source out, or give a weight above 0"
                yield f"{key}: weight={each.weight} of {each.name}: {none}."
        for number, each_phase in enumerate(self.weights, 1):
            if not any(each_phase) and any(map(any, self.weights)):
                yield f"{key}: all weights of phase {number} are 0. Give a source a weight above 0 there."
        for reason, unfit in (("data.limit", self.limit is not None), ("task=prepare", others.task.name == "prepare")):
            if unfit and given:
                yield f"{key}: weights are not for {reason}. Leave out one of the two."

    @rule
    def _can_be_read(self, others: Any) -> Iterator[str]:
        if not self.sources and others.task.name not in ("sample", "chat"):
            yield "data.sources=[]: no value. data=documents needs data.sources=[<file or folder>,<another>]."
        if self.resident == "device":
            told = "data.resident=device: the host makes the sequences of data=documents"
            yield f"{told}. Give auto or host, or prepare the documents with task=prepare and give data=tokens."
        if 1 in (getattr(others.model, "context", 0), *others.train.length_schedule):
            yield "data=documents: sequences of 1 token have no target. Give model.context and lengths of 2 or more."
        if others.task.name == "prepare" and self.loss_on != "all":
            yield "data.loss_on=replies: data=tokens counts every token. Train on data=documents, which is kept too."


@dataclass
class RegressionConfig(DataConfig):
    """Synthetic regression: a fixed random two-layer teacher plus Gaussian noise."""

    name: str = option("regression", "registered name of the data")
    examples: int = option(8192, "number of examples, including held-out ones", minimum=2)
    noise: float = option(0.1, "standard deviation of the noise on targets, whose variance is about 1", minimum=0)
    seed: int = option(0, "seed of the teacher and of the examples", minimum=0)


@dataclass
class SumsConfig(DataConfig):
    """Sums of two numbers, made on the spot."""

    has_rows: ClassVar[bool] = True  # that an objective may read

    name: str = option("sums", "registered name of the data")
    largest: int = option(99, "largest number that is added; all are at least 0", minimum=1, maximum=999)


@dataclass
class PrepareConfig:
    """Options of task=prepare, which writes token files."""

    dir: str | None = option(None, "new folder for token files, for data=tokens data.path=<folder>", path=True)

    @rule
    def _reads_text(self, others: Any) -> Iterator[str]:
        if others.task.name != "prepare":
            return
        if self.dir is None:
            yield "prepare.dir: no value. task=prepare needs prepare.dir=<new folder for the token files>."
        if not isinstance(others.data, TextConfig | DocumentsConfig):
            yield f"data={others.data.name}: task=prepare reads text. Give data=text with data.path, or data=documents."
