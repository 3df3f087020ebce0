"""task=prepare: text of any size into token files that data=tokens reads."""

from __future__ import annotations

from ttrain.config.schema import Config
from ttrain.core.units import format_count


def run(config: Config) -> None:
    """Tokenize the corpus of `data` into `prepare.dir`, and say how to train on it."""
    from ttrain.data.prepare import prepare
    from ttrain.data.settings import DocumentsConfig, TextConfig

    # The config's checks hold it so.
    assert isinstance(config.data, TextConfig | DocumentsConfig) and config.prepare.dir is not None
    header = prepare(config.data, config.prepare.dir)
    for notice in header["corpus"].get("notices", ()):
        print(f"WARNING: {notice}")
    counts = ", ".join(f"{split} {format_count(part['tokens'])}" for split, part in header["splits"].items())
    print(f"{config.prepare.dir}: {counts} tokens of {header['vocabulary']} ids")
    keys: dict[str, object] = {"data": "tokens", "data.path": config.prepare.dir}
    if isinstance(config.data, DocumentsConfig):
        keys["data.order"] = "sequential"
    fewest, context = min(part["tokens"] for part in header["splits"].values()), getattr(config.model, "context", None)
    if context is not None and fewest <= context:
        keys["model.context"] = max(1, fewest - 1)
    print(f"train on it: {config.source.command(keys, without=['data', 'prepare'], task='train')}")
