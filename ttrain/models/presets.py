"""Named sizes of the transformers."""

from __future__ import annotations

from typing import Any

Preset = dict[str, Any]  # values of a config's fields

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


def _llama(layers: int, heads: int, kv_heads: int, width: int, hidden: int, base: float, **more: Any) -> Preset:
    sizes = {"layers": layers, "heads": heads, "kv_heads": kv_heads, "width": width, "hidden": hidden}
    return {**sizes, "context": 2048, "rotary_base": base, **more}


# Published models go by their names. Positions are computed, so their weights serve any context. With vocabularies of
# 49,152 (SmolLM2), 32,000 (TinyLlama), 128,256 (Llama-3.2) and 151,936 ids (Qwen) they have 134,515,008, 361,821,120,
# 1,711,376,384, 1,100,048,384, 1,235,814,400, 3,212,749,824, 494,032,768 and 596,049,920 parameters.
LLAMA_PRESETS: dict[str, Preset] = {
    "tiny": _llama(4, 4, 2, 128, 512, 1e4, context=64),  # 1.0M with a vocabulary of 100
    "SmolLM2-135M": _llama(30, 9, 3, 576, 1536, 1e5),
    "SmolLM2-360M": _llama(32, 15, 5, 960, 2560, 1e5),
    "SmolLM2-1.7B": _llama(24, 32, 32, 2048, 8192, 1.3e5),
    "TinyLlama-1.1B": _llama(22, 32, 4, 2048, 5632, 1e4, tied=False),
    "Llama-3.2-1B": _llama(16, 32, 8, 2048, 8192, 5e5, rotary_scaling="llama3"),
    "Llama-3.2-3B": _llama(28, 24, 8, 3072, 8192, 5e5, rotary_scaling="llama3"),
    "Qwen2.5-0.5B": _llama(24, 14, 2, 896, 4864, 1e6, norm_eps=1e-6, qkv_bias=True),
    "Qwen3-0.6B": _llama(28, 16, 8, 1024, 3072, 1e6, norm_eps=1e-6, qk_norm=True, head_width=128),
}
