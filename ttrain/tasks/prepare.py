"""task=prepare: text of any size into token files that data=tokens reads."""

from __future__ import annotations

from ttrain.config.schema import Config
from ttrain.core.units import format_count


def run(config: Config) -> None:
    """Tokenize the corpus of `data` into `prepare.dir`, and say how to train on it."""
    from ttrain.data.prepare import prepare
    from ttrain.data.settings import TextConfig

    assert isinstance(config.data, TextConfig) and config.prepare.dir is not None  # the config's checks hold it so
    header = prepare(config.data, config.prepare.dir)
    counts = ", ".join(f"{split} {format_count(part['tokens'])}" for split, part in header["splits"].items())
    print(f"{config.prepare.dir}: {counts} tokens of {header['vocabulary']} ids")
    print(f"train on it: python -m ttrain data=tokens data.path={config.prepare.dir}")
