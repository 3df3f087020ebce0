"""Named sizes of the transformer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ttrain.core.errors import ConfigError
from ttrain.core.names import did_you_mean
from ttrain.models.settings import GPTConfig

SIZES = ("layers", "heads", "width", "context")

# The first two are nanoGPT's character-level sizes for a laptop and for one GPU, named by their parameters with a
# vocabulary of 65. The others are GPT-2's (Radford et al., 2019, table 2); heads = width / 64. With the vocabulary of
# 50257 ids and a tied head they have 124,439,808, 354,823,168, 774,030,080 and 1,557,611,200 parameters.
PRESETS: dict[str, dict[str, int]] = {
    "0.8M": {"layers": 4, "heads": 4, "width": 128, "context": 64},
    "10.7M": {"layers": 6, "heads": 6, "width": 384, "context": 256},
    "124M": {"layers": 12, "heads": 12, "width": 768, "context": 1024},
    "355M": {"layers": 24, "heads": 16, "width": 1024, "context": 1024},
    "774M": {"layers": 36, "heads": 20, "width": 1280, "context": 1024},
    "1.5B": {"layers": 48, "heads": 25, "width": 1600, "context": 1024},
}


def resolved(config: GPTConfig) -> GPTConfig:
    """The config with the preset's numbers in every size left null; a null vocabulary stays, it is the tokenizer's."""
    numbers: dict[str, Any] = PRESETS[config.preset] if config.preset is not None else {}
    missing = {name: numbers[name] for name in SIZES if name in numbers and getattr(config, name) is None}
    return replace(config, **missing)


def required_sizes(config: GPTConfig) -> tuple[int, int, int, int, int]:
    """(layers, heads, width, context, vocabulary). Raises ConfigError for an unknown preset or a missing size."""
    if config.preset is not None and config.preset not in PRESETS:
        raise ConfigError(f"model.preset={config.preset}: no such preset. {did_you_mean(config.preset, PRESETS)}")
    sized = resolved(config)
    names = (*SIZES, "vocabulary")
    problems = [f"model.{name}: no value. Give a number." for name in names if getattr(sized, name) is None]
    if problems:
        raise ConfigError(problems)
    layers, heads, width, context, vocabulary = (int(getattr(sized, name)) for name in names)
    if width % heads:
        raise ConfigError(f"model.heads={heads}: must divide model.width={width}.")
    return layers, heads, width, context, vocabulary
