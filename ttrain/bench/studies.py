"""What each benchmark measures. Its name in the config leads here."""

from __future__ import annotations

from dataclasses import dataclass

from ttrain.bench.settings import BenchConfig, GPTBenchConfig, MLPBenchConfig
from ttrain.bench.workload import GPT_WORK, MLP_WORK, Job, Work


@dataclass(frozen=True)
class Study:
    """Jobs, each done by all contenders. The first baseline is what the others' work is checked against."""

    name: str
    label: str  # short, for file names
    jobs: tuple[Job, ...]
    contenders: tuple[str, ...]
    reference: str


def mlp(config: MLPBenchConfig, seed: int) -> Study:
    """bench=mlp."""
    return _training(config, config.size, MLP_WORK[config.size], seed)


def gpt(config: GPTBenchConfig, seed: int) -> Study:
    """bench=gpt."""
    return _training(config, config.size, GPT_WORK[config.size], seed)


def _training(config: BenchConfig, size: str, work: Work, seed: int) -> Study:
    jobs = tuple(Job(work, precision, seed) for precision in dict.fromkeys(config.precision))
    contenders = tuple(dict.fromkeys([*config.baselines, *config.engines]))
    reference = "eager" if "eager" in contenders else contenders[0]
    return Study(config.name, f"{config.name}_{size}", jobs, contenders, reference)
