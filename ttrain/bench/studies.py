"""What each benchmark measures. Its name in the config leads here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ttrain.bench.contender import ranks_name
from ttrain.bench.settings import (
    ChipBenchConfig,
    ContestConfig,
    CoreGridBenchConfig,
    DepthBenchConfig,
    DispatchBenchConfig,
    GPTBenchConfig,
    MatmulBenchConfig,
    MemoryBenchConfig,
    MLPBenchConfig,
    ScalingBenchConfig,
    ShapesBenchConfig,
    StartupBenchConfig,
    SubdevicesBenchConfig,
    TrainingBenchConfig,
)
from ttrain.bench.workload import GPT_WORK, MLP_WORK, Case, MLPWork, ProductWork, Work
from ttrain.device.family import Variant

T = TypeVar("T")
CHIP_GPT, CHIP_MLP = GPT_WORK["nano32"], MLP_WORK["1024x512"]


@dataclass(frozen=True)
class Study:
    """Cases, each done by all contenders. The first baseline is what the others' work is checked against.

    `kind` tells how: "contest" is interleaved steps, before them starts in processes of their own where the config asks
    for that; "sweep" the same over many sizes, shown in one table; "startup" starts only; "memory" peak memory first;
    "chip" variants of running a case on one chip instead of contenders.
    """

    name: str
    label: str  # short, for file names
    cases: tuple[Case, ...]
    contenders: tuple[str, ...]
    reference: str
    kind: str = "contest"
    variants: tuple[tuple[Variant, ...], ...] = ()  # of each case, on a chip


def mlp(config: MLPBenchConfig, seed: int) -> Study:
    """bench=mlp."""
    return _training(config, MLP_WORK[config.size], seed)


def gpt(config: GPTBenchConfig, seed: int) -> Study:
    """bench=gpt."""
    return _training(config, GPT_WORK[config.size], seed)


def shapes(config: ShapesBenchConfig, seed: int) -> Study:
    """bench=shapes."""
    works = [MLPWork(layers=2, width=dim, rows=rows) for rows in _unique(config.batch) for dim in _unique(config.dim)]
    return _contest(config, "sweep", "shapes", works, seed)


def depth(config: DepthBenchConfig, seed: int) -> Study:
    """bench=depth."""
    works = [MLPWork(layers, dim, config.batch) for layers in _unique(config.layers) for dim in _unique(config.dim)]
    return _contest(config, "sweep", "depth", works, seed)


def matmul(config: MatmulBenchConfig, seed: int) -> Study:
    """bench=matmul."""
    works = [ProductWork(size) for size in _unique(config.size)]
    return _contest(config, "sweep", "matmul", works, seed)


def scaling(config: ScalingBenchConfig, seed: int) -> Study:
    """bench=scaling."""
    found = _contest(config, "contest", f"scaling_{config.size}", [GPT_WORK[config.size]], seed)
    contenders = [ranks_name(name, "ddp", config.ranks) for name in _unique(config.baselines)]
    for name in _unique(config.engines):
        contenders += [name, *(ranks_name(name, mode, config.ranks) for mode in ("ddp", "zero1"))]
    return replace(found, contenders=tuple(contenders), reference=contenders[0], variants=())


def startup(config: StartupBenchConfig, seed: int) -> Study:
    """bench=startup."""
    known: dict[str, Work] = {"mlp": CHIP_MLP, "gpt": GPT_WORK["char"]}
    works = [known[name] for name in _unique(config.work)]
    return _contest(config, "startup", "startup", works, seed)


def memory(config: MemoryBenchConfig, seed: int) -> Study:
    """bench=memory."""
    known: dict[str, Work] = {"mlp": CHIP_MLP, **GPT_WORK}
    return _contest(config, "memory", "memory", [known[name] for name in _unique(config.work)], seed)


def dispatch(config: DispatchBenchConfig, seed: int) -> Study:
    """bench=dispatch."""

    def ways(engines: Iterable[str]) -> tuple[Variant, ...]:
        return tuple(Variant(f"{name}, {kind}", name, kind) for name in engines for kind in ("worker", "eth"))

    listed: list[tuple[Work, tuple[Variant, ...]]] = [
        (CHIP_MLP, ways(_unique(config.engines))),
        (CHIP_GPT, ways(name for name in _unique(config.engines) if name != "dynamic")),
    ]
    listed += [(ProductWork(size), ways(["static"])) for size in _unique(config.size)]
    return _chip(config, listed, seed)


def core_grid(config: CoreGridBenchConfig, seed: int) -> Study:
    """bench=core_grid."""
    names = _unique(config.engines)
    ways = tuple(Variant(f"{name}, {part} grid", name, part=part) for name in names for part in ("full", "half"))
    return _chip(config, [(CHIP_MLP, ways)], seed)


def subdevices(config: SubdevicesBenchConfig, seed: int) -> Study:
    """bench=subdevices."""
    ways = (
        Variant("full, 1 queue", "static"),
        Variant("half, 1 queue", "static", part="half"),
        Variant("half each, 2 queues", "static", part="both"),
    )
    return _chip(config, [(ProductWork(size), ways) for size in _unique(config.size)], seed)


def _training(config: TrainingBenchConfig, work: Work, seed: int) -> Study:
    size = getattr(config, "size", "")
    return _contest(config, "contest", f"{config.name}_{size}", [work], seed)


def _contest(
    config: ContestConfig,
    kind: str,
    label: str,
    works: Sequence[Work],
    seed: int,
) -> Study:
    cases = tuple(case for work in works for case in _cases(work, config, seed))
    contenders = tuple(_unique([*config.baselines, *config.engines]))
    variants = tuple(Variant(name, name) for name in _unique(config.engines))
    return Study(
        config.name, label, cases, contenders, "eager" if "eager" in contenders else contenders[0], kind,
        (variants,) * len(cases),
    )  # fmt: skip


def _chip(config: ChipBenchConfig, listed: Sequence[tuple[Work, tuple[Variant, ...]]], seed: int) -> Study:
    pairs = [(case, variants) for work, variants in listed if variants for case in _cases(work, config, seed)]
    cases, variants = tuple(case for case, _ in pairs), tuple(ways for _, ways in pairs)
    return Study(config.name, config.name, cases, (), "", "chip", variants)


def _cases(work: Work, config: ContestConfig | ChipBenchConfig, seed: int) -> list[Case]:
    """The work in every precision. The factors of a product stay on the device anyway."""
    resident = config.resident_batch and not isinstance(work, ProductWork)
    return [Case(work, precision, seed, resident) for precision in _unique(config.precision)]


def _unique(values: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(values))
