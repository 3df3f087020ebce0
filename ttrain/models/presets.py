"""Named sizes of the transformers."""

from __future__ import annotations

Preset = dict[str, int]

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
