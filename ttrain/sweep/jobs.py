"""Make jobs from the overrides of `-m`: the values that are swept, and the checked config of every combination."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override

from ttrain.config.compose import Composed, Composer
from ttrain.config.schema import Config
from ttrain.core.errors import ConfigError

_LONGEST_NAME = 80


@dataclass
class Job:
    """One combination. `problem` says why it can't run; then it has no config."""

    number: int
    overrides: tuple[str, ...]  # as the command line of the job has them
    axes: dict[str, str] = field(default_factory=dict)  # swept key -> value as written
    name: str = ""  # its folder in the sweep's
    config: Config | None = None
    problem: str | None = None

    @property
    def key(self) -> str:
        """Text that makes it the same job when the sweep is run again."""
        return json.dumps(sorted(each for each in self.overrides if not each.startswith(("hydra.", "run.dir="))))

    @property
    def numbered(self) -> list[str]:
        """Overrides that give ${hydra:job.num} its value."""
        return [f"hydra.job.num={self.number}", f"hydra.job.id='{self.number}'"]

    @property
    def default_name(self) -> str:
        """The job's number, and what is special about it."""
        label = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in self.axes.items())
        label = re.sub(r"[^\w.,=+-]+", "_", label)[:_LONGEST_NAME].strip("._,")
        return f"{self.number:03d}_{label}" if label else f"{self.number:03d}"

    @property
    def task(self) -> str:
        return "train" if self.config is None else self.config.task.name

    @property
    def run_dir(self) -> str | None:
        """The run directory that a training job was given, None where it has that of the sweep."""
        return None if self.config is None or self.task != "train" else self.config.run.dir


Compose = Callable[[Job], Job]


@dataclass(frozen=True)
class SweepOverrides:
    """The parsed overrides of a sweep: those of every job and the swept ones, and those of Hydra."""

    overrides: list[Override]
    hydra: list[str]

    @classmethod
    def read(cls, composer: Composer, master: Composed) -> SweepOverrides:
        """Read overrides of the command line, after those of `hydra.sweeper.params` in a config file."""
        params = master.root.hydra.sweeper.get("params") or {}
        parsed, problems = composer.parsed([f"{key}={value}" for key, value in params.items()], sweep=True)
        if problems:
            raise ConfigError(problems)
        ours = [*parsed, *(override for override in master.overrides if not override.is_hydra_override())]
        last = {override.key_or_group: override for override in ours}
        hydra = [str(override.input_line) for override in master.overrides if override.is_hydra_override()]
        return cls(list(last.values()), hydra)

    @property
    def swept(self) -> list[Override]:
        return [override for override in self.overrides if override.is_sweep_override()]

    def _fixed(self, own: bool) -> list[str]:
        single = [override for override in self.overrides if not override.is_sweep_override()]
        return [str(each.input_line) for each in single if each.key_or_group.startswith("sweep.") == own]

    @property
    def fixed(self) -> list[str]:
        """Overrides that all jobs share, without those of the sweep itself."""
        return self._fixed(own=False)

    @property
    def own(self) -> list[str]:
        """Overrides of the sweep itself and of Hydra; jobs are checked with them and run without."""
        return [*self._fixed(own=True), *self.hydra]

    def setting(self, key: str, master: Composed) -> Any:
        """A key of the section `sweep`: from the overrides where they give it, else as composed."""
        given = [override.value() for override in self.overrides if override.key_or_group == f"sweep.{key}"]
        return given[0] if given else master.job.sweep.get(key)

    def combinations(self) -> list[Job]:
        """Return every combination in the order of the overrides, the last axis fastest; not composed yet."""
        for override in self.swept:
            if not override.is_discrete_sweep():
                raise ConfigError(
                    f"{override.input_line}: an interval has no list of values. Give sweep.search=tpe to let a search "
                    f"choose, or values such as {override.key_or_group}=1,2."
                )
            if override.key_or_group.startswith("sweep."):
                raise ConfigError(f"{override.input_line}: keys of the sweep itself can't be swept.")
        keys = [override.key_or_group for override in self.swept]
        values = itertools.product(*(override.sweep_string_iterator() for override in self.swept))
        return [self.job_of(dict(zip(keys, each, strict=True)), number) for number, each in enumerate(values)]

    def example(self) -> Job:
        """Return a job with the first value of every swept key, to check the overrides that all jobs share."""
        if not self.swept:
            raise ConfigError("sweep.search: nothing to search. Give ranges, such as optimizer.lr=interval(1e-4,1e-2).")
        axes = {}
        for override in self.swept:
            sweep = override.value()
            first = sweep.start if isinstance(sweep, IntervalSweep) else next(iter(override.sweep_string_iterator()))
            axes[override.key_or_group] = str(first)
        return self.job_of(axes)

    def job_of(self, axes: dict[str, str], number: int = -1) -> Job:
        """Return the job of these values; one that a search chose has no number yet."""
        return Job(number, (*self.fixed, *(f"{key}={value}" for key, value in axes.items())), axes)


def compose_job(composer: Composer, job: Job, own: Sequence[str] = ()) -> Job:
    """Give the job its checked config, or the problem that it has. `own` are the overrides of the sweep itself."""
    try:
        job.config = composer.typed([*job.overrides, *own, *job.numbered])
    except ConfigError as error:
        job.problem = str(error)
    return job


def check_directories(jobs: Sequence[Job]) -> None:
    """Raises ConfigError where two jobs were given one run directory."""
    given = Counter(job.run_dir for job in jobs if job.run_dir is not None)
    twice = [folder for folder, count in given.items() if count > 1]
    if twice:
        raise ConfigError(
            f"run.dir={twice[0]}: two jobs of the sweep would write there. Leave run.dir out, or give "
            f"run.dir='{twice[0]}/${{hydra:job.num}}'."
        )
