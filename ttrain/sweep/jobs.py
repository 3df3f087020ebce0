"""From the overrides of `-m` to jobs: which values are swept, and the checked config of every combination."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from ttrain.config.compose import Composer, one_sentence
from ttrain.config.schema import Config
from ttrain.core.errors import ConfigError

_LONGEST_NAME = 80


@dataclass
class Job:
    """One combination. `problem` says why it can't run; then it has no config."""

    number: int
    overrides: tuple[str, ...]  # as the command line of the job has them
    axes: dict[str, str] = field(default_factory=dict)  # swept key -> value as written
    config: Config | None = None
    problem: str | None = None

    @property
    def key(self) -> str:
        """What makes it the same job when the sweep is run again."""
        return json.dumps(
            sorted(override for override in self.overrides if not override.startswith(("hydra.", "run.dir=")))
        )

    @property
    def name(self) -> str:
        """The job's folder: its number, and what is special about it."""
        label = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in self.axes.items())
        label = re.sub(r"[^\w.,=+-]+", "_", label)[:_LONGEST_NAME].strip("._,")
        return f"{self.number:03d}_{label}" if label else f"{self.number:03d}"


@dataclass(frozen=True)
class SweepOverrides:
    """The parsed overrides of a sweep: those of every job, and the swept ones."""

    overrides: list[Override]

    @classmethod
    def read(cls, composer: Composer, master: DictConfig) -> SweepOverrides:
        """Overrides of the command line, after those of `hydra.sweeper.params` in a config file."""
        _refuse_other_sweeper(master)
        params = master.hydra.sweeper.get("params") or {}
        overrides = [f"{key}={value}" for key, value in params.items()]
        overrides += list(OmegaConf.to_container(master.hydra.overrides.task, resolve=False))  # type: ignore[arg-type]
        with one_sentence(composer.loader):
            parsed = OverridesParser.create(config_loader=composer.loader).parse_overrides(overrides)
        last = {override.get_key_element(): override for override in parsed}
        return cls(list(last.values()))

    @property
    def swept(self) -> list[Override]:
        return [override for override in self.overrides if override.is_sweep_override()]

    @property
    def fixed(self) -> list[str]:
        """Overrides that all jobs share, without those of the sweep itself."""
        return [
            f"{override.get_key_element()}={override.get_value_element_as_str()}"
            for override in self.overrides
            if not override.is_sweep_override() and not override.key_or_group.startswith("sweep.")
        ]

    @property
    def own(self) -> list[str]:
        """Overrides of the sweep itself; jobs are checked with them and run without."""
        return [str(override.input_line) for override in self.overrides if override.key_or_group.startswith("sweep.")]

    def setting(self, key: str, master: DictConfig) -> Any:
        """A key of the section `sweep`: from the overrides where they give it, else as composed."""
        for override in self.overrides:
            if override.key_or_group == f"sweep.{key}":
                return override.value()
        return master.sweep.get(key)

    def combinations(self) -> list[Job]:
        """Every combination in the order of the overrides, the last axis fastest; not composed yet."""
        for override in self.swept:
            if not override.is_discrete_sweep():
                raise ConfigError(
                    f"{override.input_line}: an interval has no list of values. Give sweep.search=tpe to let a search "
                    f"choose, or values such as {override.key_or_group}=1,2."
                )
            if override.key_or_group.startswith("sweep."):
                raise ConfigError(f"{override.input_line}: keys of the sweep itself can't be swept.")
        (lists,) = BasicSweeper.split_arguments(self.overrides, None)
        keys = [override.get_key_element() for override in self.overrides]
        swept = {override.get_key_element() for override in self.swept}
        jobs = []
        for number, overrides in enumerate(lists):
            pairs = dict(zip(keys, overrides, strict=True))
            own = tuple(override for key, override in pairs.items() if not key.lstrip("+").startswith("sweep."))
            axes = {key.lstrip("+"): override.partition("=")[2] for key, override in pairs.items() if key in swept}
            jobs.append(Job(number, own, axes))
        return jobs


def _refuse_other_sweeper(master: DictConfig) -> None:
    target = str(master.hydra.sweeper.get("_target_", ""))
    if not target.endswith("BasicSweeper"):
        raise ConfigError(
            f"hydra/sweeper: ttrain runs sweeps itself, so {target.rpartition('.')[2]} can't be used. "
            f"For a search give sweep.search=tpe."
        )


def compose_job(composer: Composer, master: DictConfig, job: Job, own: Sequence[str] = ()) -> Job:
    """The job with its checked config, or with the problem that it has. `own` are the overrides of the sweep itself."""
    try:
        with one_sentence(composer.loader):
            tree = ConfigLoaderImpl.load_sweep_config(composer.loader, master, [*job.overrides, *own])
            tree.hydra.job.num, tree.hydra.job.id = job.number, str(job.number)
            job.config = composer.check(tree)
    except ConfigError as error:
        job.problem = str(error)
    return job


def check_directories(jobs: Sequence[Job]) -> None:
    """Raises ConfigError where two jobs were given one run directory."""
    taken: dict[str, Job] = {}
    for job in jobs:
        wanted = None if job.config is None or job.config.task.name != "train" else job.config.run.dir
        if wanted is None:
            continue
        if wanted in taken:
            raise ConfigError(
                f"run.dir={wanted}: two jobs of the sweep would write there. Leave run.dir out, or give "
                f"run.dir='{wanted}/${{hydra:job.num}}'."
            )
        taken[wanted] = job
