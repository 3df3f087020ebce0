"""Small config of the benchmarks. A file of conf/bench is a choice of these keys."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ttrain.core.names import did_you_mean
from ttrain.core.options import option, rule

ENGINES = ("dynamic", "static", "traced")
BASELINES = ("eager", "compile", "compile_all", "reduce_overhead")
MEASURED = ("start", "memory", "steps")
NAMED_SIZES = ("tiny", "char", "nano", "nano32", "gpt2", "smollm2", "smollm2-lora")
SHAPED = re.compile(r"(char|nano|nano32|gpt2|smollm2|smollm2-lora)-([1-9]\d*)x([1-9]\d*)")  # rows, context
PERCEPTRON = re.compile(r"([1-9]\d*)x([1-9]\d*)(?:x([1-9]\d*))?")  # rows, width, layers
_LARGEST_PERCEPTRON = (2**20, 2**16, 1024)


@dataclass
class BenchConfig:
    """Options of task=bench, which times every size and precision with all engines and baselines."""

    size: list[str] = option(
        ["char"],
        "sizes to measure; a perceptron is <rows>x<width>[x<layers>], such as 1024x512, or tiny (32x64); a transformer "
        "is char (4 layers, 128 wide, 12 x 64 tokens), nano (6 layers, 384 wide, 8 x 256 tokens), nano32 (32 x 256 "
        "tokens), gpt2 (124M), smollm2 (135M, beside Transformers) or smollm2-lora (rank 8, beside PEFT), the last "
        "three with 2 x 256 tokens; gpt2-16x1024 has 16 x 1024",
        one=True,
    )
    precision: list[str] = option(
        ["fp32", "bf16"], "precisions, each measured separately", choices=("fp32", "bf16", "bf16_true", "bf8"), one=True
    )
    engines: list[str] = option(list(ENGINES), "engines that take part", choices=ENGINES, one=True)
    baselines: list[str] = option(
        list(BASELINES[:3]), "forms of PyTorch; compile_all compiles the optimizer too", choices=BASELINES, one=True
    )
    ranks: int = option(
        1,
        "processes that share the threads and the batch, a power of two; above 1, engines run alone, with ddp and "
        "with zero1",
        minimum=1,
        maximum=64,
    )
    resident_batch: bool = option(False, "keep one batch on the device instead of uploading one per step")
    measure: list[str] = option(
        ["steps"],
        "start: time to the first step with cold and warm compile caches; memory: peak beside the plan's; steps: time "
        "of a step",
        choices=MEASURED,
        one=True,
    )
    seconds: float = option(15.0, "seconds of steps per size and precision, without building and compiling", above=0)
    rounds: int = option(20, "turns of each contender, in random order; fewer if time is up", minimum=3)
    starts: int = option(1, "starts of each contender with cold and with warm caches", minimum=1)
    out: str | None = option(None, "new folder for results; null takes one below outputs/bench", path=True)

    @rule
    def _measures_something(self, others: Any) -> Iterator[str]:
        if others.task.name != "bench":
            return
        yield from (problem for size in self.size if (problem := size_problem(size)))
        for key, example in (("size", "char"), ("precision", "fp32"), ("measure", "steps")):
            if not getattr(self, key):
                yield f"bench.{key}=[]: name at least one, such as [{example}]."
        if not self.engines and not self.baselines:
            yield "bench.engines=[] and bench.baselines=[]: nobody takes part. Name at least one."
        if self.ranks & (self.ranks - 1):
            yield f"bench.ranks={self.ranks}: must be a power of two."
        if self.ranks > 1 and "memory" in self.measure:
            yield f"bench.ranks={self.ranks}: the memory of one process is measured. Leave out memory."

    @rule
    def _reads_what_is_given(self, others: Any) -> Iterator[str]:
        if others.task.name != "bench":
            return
        if others.device.name == "null":
            yield "device=null: computes nothing, so there is nothing to time. Give device=cpu or device=cuda."
        if others.device.name in ("mps", "xpu") and "memory" in self.measure:
            yield f"bench.measure: the memory of device={others.device.name} is not measured. Leave out memory."
        for name in self.precision:
            yield from others.lacks_precision("bench.precision", name, "bench.precision=[bf16]")
        for key in sorted(others.source.explicit):
            if key.partition(".")[0] in ("model", "data", "train", "lora", "optimizer", "schedule", "precision"):
                yield f"{key}: task=bench does not read it; the keys of bench decide what is measured."
            elif key == "engine.name":
                yield f"engine={others.engine.name}: task=bench takes its engines from bench.engines."


def size_problem(size: str) -> str | None:
    """Return why a size can't be done, as a sentence, or None."""
    if size in NAMED_SIZES or SHAPED.fullmatch(size):
        return None
    if (shape := PERCEPTRON.fullmatch(size)) is not None:
        given = zip(("rows", "width", "layers"), shape.groups(), _LARGEST_PERCEPTRON, strict=True)
        over = [f"{name} must be at most {most}" for name, number, most in given if int(number or 2) > most]
        return f"bench.size={size}: {', '.join(over)}." if over else None
    hint = did_you_mean(size, NAMED_SIZES)
    return f"bench.size={size}: no such size. {hint} Or give <rows>x<width>[x<layers>]."
