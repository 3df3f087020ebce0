"""The text of `ttrain --help`."""

from __future__ import annotations

import shutil
from typing import Any

import ttrain
from ttrain.config.compose import Composer
from ttrain.config.schema import Config
from ttrain.core.tables import fitted

MAIN_KEYS = (
    "run.dir", "run.seed", "resume",
    "train.steps", "train.batch_size", "train.gradient_accumulation", "train.eval_every", "train.save_every",
    "model.layers", "model.heads", "model.width", "model.context", "model.dropout", "model.preset",
    "optimizer.lr", "optimizer.weight_decay", "optimizer.betas", "optimizer.clip_norm", "schedule.warmup",
    "data.path", "data.tokenizer",
    "sample.prompt", "sample.tokens", "sample.temperature", "sample.top_k", "sample.top_p", "sample.seed",
)  # fmt: skip

WIDTH = 120  # columns where no window tells its own, as in a pipe

EXAMPLES = (
    ("ttrain", "train a small model on text that every machine has, in about a minute"),
    ("ttrain data.path=book.txt train.steps=3000", "train on your own UTF-8 file or folder"),
    ("ttrain model=gpt2 model.preset=355M precision=bf16", "choose another option of a group, set single keys"),
    ("ttrain run.dir=outputs/a resume=auto", "continue where that run stopped"),
    ("ttrain task=sample run.dir=outputs/a sample.prompt='def '", "write text with a trained model"),
    ("ttrain task=plan model=gpt2", "parameters, FLOPs, memory and time of a step, before it is run"),
    ("ttrain task=bench bench=gpt", "time the engines against PyTorch, eager and compiled, at the same work"),
    ("ttrain -m engine=dynamic,static run.seed=1,2", "a sweep: one run per combination"),
    ("ttrain --cfg job", "print the complete config instead of running"),
    ("ttrain --config-dir my_conf model=mine", "use your own YAML files beside those of ttrain"),
)


def help_text(composer: Composer) -> str:
    """Usage, groups with their options, main keys with defaults, examples."""
    config = composer.typed()
    parts = [
        f"ttrain {ttrain.__version__}: train language models from a config.",
        "Usage: ttrain [group=option] [key=value] [flags]      (the same as: python -m ttrain ...)",
        "Groups (the default in brackets)\n" + _table(_group_rows(composer, config)),
        "Main keys (docs/config.md lists every key, --cfg job those of a command)\n" + _table(_key_rows(config)),
        "Examples\n" + "\n".join(f"  {command}\n      {meaning}" for command, meaning in EXAMPLES),
        "Flags: --help, --version, --cfg job, --package, --json, --multirun or -m, --config-name, --config-dir,\n"
        "--config-path. --key=value is accepted as key=value.\n"
        "Exit codes: 0 done, 2 wrong input, 75 device busy, 130 interrupted, others a failure of ttrain.",
    ]
    return "\n\n".join(parts)


def _group_rows(composer: Composer, config: Config) -> list[tuple[str, str]]:
    order = list(Config.__dataclass_fields__)
    groups = sorted(composer.files.groups(), key=lambda group: order.index(group) if group in order else len(order))
    chosen = config.source.choices
    return [
        (group, ", ".join(f"[{name}]" if name == chosen.get(group) else name for name in composer.files.options(group)))
        for group in groups
    ]


def _key_rows(config: Config) -> list[tuple[str, str]]:
    rows = []
    for key in MAIN_KEYS:
        section, _, name = key.partition(".")
        holder: Any = getattr(config, section) if name else config
        value = getattr(holder, name or section)
        rows.append((f"{key}={shown(value)}", holder.__dataclass_fields__[name or section].metadata["help"]))
    return rows


def shown(value: Any) -> str:
    """A default as the command line would take it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return repr(value) if not value.strip() else value
    return str(value).replace(" ", "")


def _table(rows: list[tuple[str, str]]) -> str:
    """Two columns that fit the window."""
    columns = max(shutil.get_terminal_size((WIDTH, 24)).columns - 2, 20)
    return "\n".join(f"  {line}" for line in fitted(rows, columns, (0, 1)))
