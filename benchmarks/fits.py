"""Print which mode of parallel fits which memory, by plans of published sizes on 1 to 64 GPUs.

    python -m benchmarks.fits > table.md

It takes 5 to 10 s for each model, mode and number of ranks, 20 minutes in all, and prints a row as soon as it is done.
A rank has one sequence of 1,024 tokens in bf16, with AdamW. A cell names the smallest memory of a GPU that suffices,
in GB, and the mode that sends least of those that fit it.
"""

from __future__ import annotations

from ttrain.config.compose import load
from ttrain.config.schema import Config
from ttrain.core.waiting import waited_for
from ttrain.parallel.settings import SEVERAL
from ttrain.tasks.training.modes import Planned, planned

PRESETS = {  # with the ids of their vocabularies
    "gpt2": {"124M": 50257, "1.5B": 50257},
    "llama": {
        "SmolLM2-135M": 49152, "Qwen3-0.6B": 151936, "Llama-3.2-1B": 128256, "SmolLM2-1.7B": 49152,
        "Llama-3.2-3B": 128256,
    },
}  # fmt: skip
RANKS = (1, 2, 4, 8, 16, 32, 64)
MEMORY = (16, 24, 48, 80)  # GB of a GPU
SPARE = 1.5e9  # bytes that the driver, NCCL and libraries take, about


def config_of(model: str, preset: str, vocabulary: int, mode: str, ranks: int) -> Config:
    sizes = [f"model.preset={preset}", f"model.vocabulary={vocabulary}", "model.context=1024"]
    run = [f"train.batch_size={ranks}", "precision=bf16", "device=cuda", "engine=static", "plan.time=false"]
    return load(["task=plan", f"model={model}", *sizes, *run, f"parallel={mode}", f"parallel.world={ranks}"])


def cell(found: list[Planned]) -> str:
    for gb in MEMORY:
        fitting = [each for each in found if each.memory + SPARE <= gb * 1e9]
        if fitting:
            return f"{gb} {min(fitting, key=lambda each: each.sent).mode}"
    return "–"


def main() -> None:
    print(f"| model | {' | '.join(map(str, RANKS))} |\n| --- {'| --- ' * len(RANKS)}|", flush=True)
    for model, presets in PRESETS.items():
        for preset, vocabulary in presets.items():
            cells = []
            for ranks in waited_for(RANKS, f"Planning {preset}"):
                modes = SEVERAL if ranks > 1 else ("none",)
                given = (config_of(model, preset, vocabulary, mode, ranks) for mode in modes)
                cells.append(cell([planned(each, None) for each in given]))
            print(f"| {'GPT-2 ' * (model == 'gpt2')}{preset} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
