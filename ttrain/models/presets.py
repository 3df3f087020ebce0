"""Named sizes of the transformers."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from ttrain.core.errors import ConfigError
from ttrain.core.names import did_you_mean

if TYPE_CHECKING:
    from ttrain.models.settings import TransformerConfig

SizedConfig = TypeVar("SizedConfig", bound="TransformerConfig")
Preset = dict[str, int]
_SIZES = ("layers", "heads", "width", "rank", "context")  # of those, the ones that a model has

# The first two are nanoGPT's character-level sizes for a laptop and for one GPU, named by their parameters with a
# vocabulary of 65. The others are GPT-2's (Radford et al., 2019, table 2); heads = width / 64. With the vocabulary of
# 50257 ids and a tied head they have 124,439,808, 354,823,168, 774,030,080 and 1,557,611,200 parameters.
GPT_PRESETS: dict[str, Preset] = {
    "0.8M": {"layers": 4, "heads": 4, "width": 128, "context": 64},
    "10.7M": {"layers": 6, "heads": 6, "width": 384, "context": 256},
    "124M": {"layers": 12, "heads": 12, "width": 768, "context": 1024},
    "355M": {"layers": 24, "heads": 16, "width": 1024, "context": 1024},
    "774M": {"layers": 36, "heads": 20, "width": 1280, "context": 1024},
    "1.5B": {"layers": 48, "heads": 25, "width": 1600, "context": 1024},
}


def _agillm(width: int, layers: int, heads: int, rank: int) -> Preset:
    return {"layers": layers, "heads": heads, "width": width, "rank": rank}


# AGILLM-3's: a number with x is the rank over the head width of 16. With the vocabulary of 128,815 ids, untied, `large`
# has 698,389,088 parameters.
AGILLM_PRESETS: dict[str, Preset] = {
    **{f"femto_{x}x": _agillm(16, 1, 1, 16 * x) for x in (1, 12, 24)},
    **{f"pico_{x}x": _agillm(32, 1, 2, 16 * x) for x in (1, 3, 6, 12, 24, 48)},
    **{f"nano_{x}x": _agillm(64, 2, 4, 16 * x) for x in (1, 3, 6, 12, 24, 48, 96)},
    **{f"micro_{x}x": _agillm(128, 4, 8, 16 * x) for x in (3, 6, 12, 24)},
    "small": _agillm(512, 8, 16, 64),
    "smallx2": _agillm(512, 16, 16, 64),
    "base": _agillm(768, 12, 24, 96),
    "base18": _agillm(768, 18, 24, 96),
    "large": _agillm(1024, 24, 16, 128),
}


def size_names(config: TransformerConfig) -> list[str]:
    """Names of the sizes that a model needs apart from the vocabulary."""
    declared = {field.name for field in fields(config)}
    return [name for name in _SIZES if name in declared]


def resolved(config: SizedConfig) -> SizedConfig:
    """The config with the preset's numbers in every size left null; a null vocabulary stays, it is the tokenizer's."""
    numbers: dict[str, Any] = config.presets[config.preset] if config.preset is not None else {}
    missing = {name: numbers[name] for name in size_names(config) if name in numbers and getattr(config, name) is None}
    return replace(config, **missing)


def required_sizes(config: TransformerConfig) -> tuple[int, ...]:
    """Numbers of `size_names`, then the vocabulary. Raises ConfigError for an unknown preset or an impossible size."""
    name = config.preset
    if name is not None and name not in config.presets:
        raise ConfigError(f"model.preset={name}: no such preset. {did_you_mean(name, config.presets)}")
    sized = resolved(config)
    names = (*size_names(config), "vocabulary")
    problems = [f"model.{name}: no value. Give a number." for name in names if getattr(sized, name) is None]
    if problems:
        raise ConfigError(problems)
    numbers = {name: int(getattr(sized, name)) for name in names}
    if numbers["width"] % numbers["heads"]:
        raise ConfigError(f"model.heads={sized.heads}: must divide model.width={sized.width}.")
    return tuple(numbers.values())
