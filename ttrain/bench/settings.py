"""Small config of each benchmark."""

from __future__ import annotations

from dataclasses import dataclass

from ttrain.core.options import option

ENGINES = ("dynamic", "static", "traced")
BASELINES = ("eager", "compile", "compile_all")
PRECISIONS = ("fp32", "bf16")
MLP_SIZES = ("tiny", "256", "1024x512")
GPT_SIZES = ("char", "nano", "gpt2")


@dataclass
class BenchConfig:
    """What every benchmark against PyTorch has."""

    name: str = option("gpt", "registered name of the benchmark")
    precision: list[str] = option(list(PRECISIONS), "precisions, each measured by itself", choices=PRECISIONS)
    engines: list[str] = option(list(ENGINES), "engines that take part", choices=ENGINES)
    baselines: list[str] = option(
        list(BASELINES),
        "PyTorch: eager; compile: compiled model, fused optimizer; compile_all: both compiled",
        choices=BASELINES,
    )
    seconds: float = option(
        15.0, "time for the interleaved steps of one precision, in s; building and compiling come on top", above=0
    )
    rounds: int = option(20, "how often every contender has its turn, in random order; fewer if time is up", minimum=3)
    startup: bool = option(
        True,
        "whether a process of its own per contender measures peak memory and time to first step, with empty and with "
        "filled compile caches",
    )
    compare: str | None = option(None, "results.json of an earlier run to compare with", path=True)
    out: str | None = option(
        None, "new folder for the results; null takes outputs/bench/<date>/<time>_<bench>_<size>", path=True
    )


@dataclass
class MLPBenchConfig(BenchConfig):
    """A multilayer perceptron of two layers on mean squared error, trained by SGD."""

    name: str = option("mlp", "registered name of the benchmark")
    size: str = option(
        "1024x512",
        "batch and width: tiny is 32 and 64, 256 is 256 and 256, 1024x512 is 1024 and 512",
        choices=MLP_SIZES,
    )
    precision: list[str] = option(["fp32"], "precisions, each measured by itself", choices=PRECISIONS)


@dataclass
class GPTBenchConfig(BenchConfig):
    """A decoder-only transformer on next-token prediction, trained by AdamW with clipping."""

    name: str = option("gpt", "registered name of the benchmark")
    size: str = option(
        "char",
        "char: 4 layers, 128 wide, 12 x 64 tokens; nano: 6 layers, 384 wide, 8 x 256 tokens; "
        "gpt2: 124M parameters, 2 x 256 tokens",
        choices=GPT_SIZES,
    )
