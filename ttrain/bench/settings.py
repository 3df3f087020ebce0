"""Small config of each benchmark."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ttrain.core.options import option, rule
from ttrain.device.family import family_of
from ttrain.nn.precision import PRECISIONS

ENGINES = ("dynamic", "static", "traced")
BASELINES = ("eager", "compile", "compile_all")
DEFAULT_PRECISIONS = ["fp32", "bf16"]
MLP_SIZES = ("tiny", "256", "1024x512")
GPT_SIZES = ("char", "nano", "nano32", "gpt2", "smollm2", "smollm2-lora")
NEIGHBOURS = ("busy", "same")
_LISTS = {"precision": "fp32", "batch": "256", "dim": "256", "layers": "2", "size": "1024", "work": "gpt"}
PRODUCT_SIZES = [128, 256, 512, 1024, 2048, 4096]


def _baselines(*names: str) -> list[str]:
    """Those that take part unless a config says otherwise."""
    what = "PyTorch: eager; compile: compiled model, fused optimizer; compile_all: both compiled"
    return option(list(names), what, choices=BASELINES)


def _seconds(default: float, of: str) -> float:
    what = f"time for the interleaved steps of one {of}, in s; building and compiling come on top"
    return option(default, what, above=0)


@dataclass
class BenchConfig:
    """What every benchmark has."""

    name: str = option("gpt", "registered name of the benchmark")
    compare: str | None = option(None, "results.json of an earlier run to compare with", path=True)
    out: str | None = option(
        None, "new folder for the results; null takes outputs/bench/<date>/<time>_<bench>_<size>", path=True
    )
    markdown: str | None = option(
        None,
        "page to put the result into, between marks that name the benchmark; what stood between them is replaced",
        path=True,
    )

    @rule
    def _measures_something(self, others: Any) -> Iterator[str]:
        if others.task.name != "bench":
            return
        contest, device = hasattr(self, "baselines"), others.device
        if getattr(self, "engines", None) == [] and not getattr(self, "baselines", []):
            both = " and bench.baselines=[]" if contest else ""
            yield f"bench.engines=[]{both}: nobody takes part. Name at least one."
        for key, example in _LISTS.items():
            if getattr(self, key, None) == []:
                yield f"bench.{key}=[]: name at least one, such as [{example}]."
        if isinstance(self, ChipBenchConfig) and family_of(device).modelled is None and device.name != "auto":
            chip = others.family_that(lambda each: each.modelled)
            yield (
                f"device={device.name}: bench={self.name} is about a {chip.title} chip. Give device={chip.modelled}, "
                "or leave it out; without a card the times come from the cost model."
            )
        elif device.name == "null":
            yield "device=null: computes nothing, so there is nothing to time. Give device=cpu or device=cuda."
        for name in getattr(self, "precision", []) if contest else []:
            yield from others.lacks_precision("bench.precision", name, "bench.precision=[bf16]")
        for key in sorted(others.source.explicit):
            if key.partition(".")[0] in ("model", "data", "train", "lora", "optimizer", "schedule", "precision"):
                yield f"{key}: task=bench does not read it; the keys of bench decide what is measured."
            elif key == "engine.name":
                yield f"engine={others.engine.name}: task=bench takes its engines from bench.engines."


@dataclass
class TimedConfig(BenchConfig):
    """A benchmark whose contenders take turns."""

    seconds: float = _seconds(15.0, "table")
    rounds: int = option(20, "how often every contender has its turn, in random order; fewer if time is up", minimum=3)


@dataclass
class ContestConfig(BenchConfig):
    """A benchmark of our engines against PyTorch."""

    precision: list[str] = option(DEFAULT_PRECISIONS, "precisions, each measured by itself", choices=PRECISIONS)
    resident_batch: bool = option(
        False, "whether one batch stays on the device for all steps, instead of another one being uploaded for each"
    )
    engines: list[str] = option(list(ENGINES), "engines that take part", choices=ENGINES)
    baselines: list[str] = _baselines(*BASELINES)


@dataclass
class TrainingBenchConfig(ContestConfig, TimedConfig):
    """A benchmark of training steps of one size."""

    startup: bool = option(
        True,
        "whether a process of its own per contender measures peak memory and time to first step, with empty and with "
        "filled compile caches",
    )
    beside: str | None = option(
        None,
        "what every turn is taken again beside, as a row of its own: busy is a process that keeps one core busy, same "
        "one that does the same steps; null: nothing",
        choices=NEIGHBOURS,
    )


@dataclass
class MLPBenchConfig(TrainingBenchConfig):
    """A multilayer perceptron of two layers on mean squared error, trained by SGD."""

    name: str = option("mlp", "registered name of the benchmark")
    size: str = option(
        "1024x512",
        "batch and width: tiny is 32 and 64, 256 is 256 and 256, 1024x512 is 1024 and 512",
        choices=MLP_SIZES,
    )
    precision: list[str] = option(["fp32"], "precisions, each measured by itself", choices=PRECISIONS)


@dataclass
class GPTBenchConfig(TrainingBenchConfig):
    """A decoder-only transformer on next-token prediction, trained by AdamW with clipping."""

    name: str = option("gpt", "registered name of the benchmark")
    size: str = option(
        "char",
        "char: 4 layers, 128 wide, 12 x 64 tokens; nano: 6 layers, 384 wide, 8 x 256 tokens; nano32: 32 x 256 tokens "
        "and a vocabulary of 256, as others published for one chip; gpt2: 124M parameters, 2 x 256 tokens; "
        "smollm2: SmolLM2's 135M parameters, 2 x 256 tokens, beside Transformers; smollm2-lora: the same by adapters "
        "of rank 8, beside PEFT",
        choices=GPT_SIZES,
    )


@dataclass
class SweepConfig(ContestConfig, TimedConfig):
    """A benchmark of many sizes, each for a few seconds."""

    seconds: float = _seconds(3.0, "size")
    rounds: int = option(10, "how often every contender has its turn, in random order; fewer if time is up", minimum=3)
    precision: list[str] = option(["fp32"], "precisions, each measured by itself", choices=PRECISIONS)
    engines: list[str] = option(["static", "traced"], "engines that take part", choices=ENGINES)
    baselines: list[str] = _baselines("eager", "compile")


@dataclass
class ShapesBenchConfig(SweepConfig):
    """A perceptron of two layers at every batch and width."""

    name: str = option("shapes", "registered name of the benchmark")
    batch: list[int] = option([32, 256, 2048], "examples of a batch", minimum=1, maximum=2**20)
    dim: list[int] = option([64, 256, 2048], "width of the layers", minimum=1, maximum=2**16)


@dataclass
class DepthBenchConfig(SweepConfig):
    """A perceptron at every number of layers and width."""

    name: str = option("depth", "registered name of the benchmark")
    layers: list[int] = option([2, 8, 32], "number of layers", minimum=1, maximum=1024)
    dim: list[int] = option([64, 512], "width of the layers", minimum=1, maximum=2**16)
    batch: int = option(256, "examples of a batch", minimum=1, maximum=2**20)


@dataclass
class MatmulBenchConfig(SweepConfig):
    """One square matrix product at every size, with the share of the device's peak."""

    name: str = option("matmul", "registered name of the benchmark")
    size: list[int] = option(PRODUCT_SIZES, "rows and columns of the matrices", minimum=1, maximum=2**15)
    baselines: list[str] = option(["eager"], "PyTorch: eager is torch.mm", choices=("eager",))


@dataclass
class StartupBenchConfig(ContestConfig):
    """Time to the first step in fresh processes, with compile caches of their own that are empty, then filled."""

    name: str = option("startup", "registered name of the benchmark")
    work: list[str] = option(["gpt"], "what is started: mlp is 1024x512, gpt is char", choices=("mlp", "gpt"))
    repeats: int = option(3, "how often everybody starts cold and warm, in turns", minimum=1)
    precision: list[str] = option(["fp32"], "precisions, each measured by itself", choices=PRECISIONS)
    baselines: list[str] = _baselines("eager", "compile")


@dataclass
class MemoryBenchConfig(ContestConfig, TimedConfig):
    """Planned against measured: peak memory of every contender in a process of its own, and the time of a step."""

    seconds: float = _seconds(8.0, "table")
    name: str = option("memory", "registered name of the benchmark")
    work: list[str] = option(
        ["mlp", "nano", "gpt2"], "what is trained: mlp is 1024x512, char, nano and gpt2 are those of bench=gpt",
        choices=("mlp", "char", "nano", "gpt2"),
    )  # fmt: skip
    precision: list[str] = option(["fp32"], "precisions, each measured by itself", choices=PRECISIONS)
    engines: list[str] = option(["static", "traced"], "engines that take part", choices=ENGINES)
    baselines: list[str] = _baselines("eager")


@dataclass
class ScalingBenchConfig(ContestConfig, TimedConfig):
    """One process with all threads against several that share them and the batch, and against PyTorch's."""

    name: str = option("scaling", "registered name of the benchmark")
    size: str = option("nano", "what is trained, as in bench=gpt", choices=GPT_SIZES[:4])
    ranks: int = option(2, "processes that share a batch, a power of two", minimum=2, maximum=64)
    precision: list[str] = option(["fp32"], "precisions, each measured by itself", choices=PRECISIONS)
    engines: list[str] = option(["traced"], "engines that take part", choices=ENGINES)
    baselines: list[str] = option(
        ["eager"], "PyTorch's DistributedDataParallel: eager; compile: of the compiled model", choices=BASELINES[:2]
    )


@dataclass
class ChipBenchConfig(TimedConfig):
    """A benchmark of ways to use one chip of a card; on the cost model where there is no card."""

    precision: list[str] = option(["bf16"], "precisions, each measured by itself", choices=PRECISIONS)
    resident_batch: bool = option(
        False, "whether one batch stays on the device for all steps, instead of another one being uploaded for each"
    )


@dataclass
class DispatchBenchConfig(ChipBenchConfig):
    """Dispatch on worker cores against Ethernet cores: a perceptron, a transformer, matrix products."""

    name: str = option("dispatch", "registered name of the benchmark")
    engines: list[str] = option(list(ENGINES), "engines that take part", choices=ENGINES)
    size: list[int] = option(PRODUCT_SIZES, "rows and columns of the matrices", minimum=1, maximum=2**15)


@dataclass
class CoreGridBenchConfig(ChipBenchConfig):
    """All cores of a chip against half of them."""

    name: str = option("core_grid", "registered name of the benchmark")
    engines: list[str] = option(list(ENGINES), "engines that take part", choices=ENGINES)


@dataclass
class SubdevicesBenchConfig(ChipBenchConfig):
    """Matrix products on the whole chip, and on two halves with one command queue and with two."""

    name: str = option("subdevices", "registered name of the benchmark")
    size: list[int] = option([256, 512, 1024, 2048], "rows and columns of the matrices", minimum=1, maximum=2**15)


STUDIES: dict[str, type[BenchConfig]] = {
    "gpt": GPTBenchConfig,
    "mlp": MLPBenchConfig,
    "shapes": ShapesBenchConfig,
    "depth": DepthBenchConfig,
    "matmul": MatmulBenchConfig,
    "startup": StartupBenchConfig,
    "scaling": ScalingBenchConfig,
    "memory": MemoryBenchConfig,
    "dispatch": DispatchBenchConfig,
    "core_grid": CoreGridBenchConfig,
    "subdevices": SubdevicesBenchConfig,
}
