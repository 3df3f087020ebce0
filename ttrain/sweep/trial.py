"""task=trial: compare variants of a config with the config, seed by seed, until each has a verdict.

Each run is a job of the sweep's runner: it has a folder, a log and a status in the folder of the trial. A run that is
done is not started again. A verdict is `better`, `worse` (or diverged), `bounded`, `equal` (to the bit), `failed`, or
`open` after the last seed.
"""

from __future__ import annotations

import csv
import json
import re
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import compress
from pathlib import Path
from statistics import fmean, stdev, variance
from typing import Any

from ttrain.cli import parse_arguments
from ttrain.config.compose import Composer
from ttrain.config.schema import Config
from ttrain.core.errors import ConfigError, Interrupted, TtrainError, UserError, raised_as
from ttrain.core.files import lock_file, read_json, replace_file, to_json
from ttrain.core.tables import fitted, window
from ttrain.core.units import counted, format_duration
from ttrain.graph import Kind
from ttrain.sweep.jobs import FINISHED, Job, Status, SweepFolder, now
from ttrain.sweep.outcome import cell
from ttrain.sweep.paired import interval
from ttrain.sweep.run import Runner
from ttrain.sweep.search import Grid
from ttrain.tasks.training.expected import steps_seconds
from ttrain.tasks.training.run import Run
from ttrain.tasks.training.start import start_run
from ttrain.train.checkpoint.retention import list_checkpoints
from ttrain.train.logging.metrics import METRICS, read_events, read_metrics
from ttrain.train.runs.record import own_state
from ttrain.train.supervise.child import say
from ttrain.train.task_settings import BASELINE, TrialConfig

ROOT, RESULTS, RESULT = Path("outputs/trials"), Path("outputs/results.tsv"), "trial.json"
NUMBERS = ("val/loss", "val/bits_per_byte", "seconds", "peak_memory_bytes")  # of summary.json: means over the seeds
_OURS = ("task", "trial", "sweep", "run")  # sections that a trial gives itself
COLUMNS = ("time", "commit", "trial", "name", "status", "seeds", *NUMBERS, "difference", "low", "high", "command")


def value_of(status: Status) -> Any:
    """Return the number that judges a run that has ended; None where it has none."""
    return status["objective"] if status["state"] == FINISHED else None


def has_diverged(run: Path) -> bool:
    """Return whether the last failure of a run was a number that is not finite."""
    return [event.get("error") for event in read_events(run) if event["kind"] == "failed"][-1:] == ["NonFiniteError"]


def bits_of(run: Path) -> Any:
    """Return all losses of a run and hashes of its last parameters. Runs with equal bits have equal ones."""
    lines, last = read_metrics(run / METRICS), list_checkpoints(run / "checkpoints")[0][-1:]
    losses = [(line["step"], key, line[key]) for line in lines for key in line if re.match("(train|val)/loss", key)]
    hashes = [each.files[name] for each in last for name in each.files_of(Kind.PARAMETER, Kind.FROZEN)]
    return losses, hashes or run  # without a checkpoint it is equal to none


@dataclass
class Arm:
    """An arm of a trial: the baseline or a variant, with a job for each seed, and how those that ended have ended."""

    name: str
    jobs: list[Job]
    ends: list[Status] = field(default_factory=list)
    differences: list[float] = field(default_factory=list)  # from the baseline
    interval: tuple[float, float] | None = None  # of the mean difference
    verdict: str | None = None
    reason: str | None = None

    @property
    def values(self) -> list[float]:
        return [value for value in map(value_of, self.ends) if value is not None]

    def compare(self, base: Status, settings: TrialConfig) -> None:
        """Compare the run of the next seed with that of the baseline, and judge."""
        own, count = self.ends[len(self.differences)], len(self.differences) + 1
        if value_of(own) is None:
            self.reason = re.split(r"\n|\. ", own.get("reason") or f"no {settings.metric}")[0]
            self.verdict = "worse" if has_diverged(own["run"]) else "failed"
            return
        self.differences.append(value_of(own) - value_of(base))
        if count == 1 and bits_of(own["run"]) == bits_of(base["run"]):
            self.verdict, self.reason = "equal", "losses and parameters have the same bits"
        elif count > 1:
            low, high = self.interval = interval(self.differences, settings.level, settings.seeds)
            last = "open" if count == settings.seeds else None
            self.verdict = "better" if high < 0 else "worse" if low > 0 else last
            if settings.bound is not None and max(-low, high) <= settings.bound:
                self.verdict = "bounded"

    def facts(self, base: Arm) -> dict[str, Any]:
        """Return the results of the arm as JSON values."""
        summaries, count = [read_json(end["run"] / "summary.json") for end in self.ends], len(self.differences)
        known = {key: [each[key] for each in summaries if each.get(key) is not None] for key in NUMBERS}
        independent = [variance(arm.values[:count]) for arm in (self, base) if count > 1]
        low, high = self.interval or (None, None)
        return {
            "name": self.name, "verdict": self.verdict, "reason": self.reason, "seeds": len(self.ends),
            **{key: fmean(values) if values else None for key, values in known.items()},
            "deviation": stdev(self.values) if len(self.values) > 1 else None,
            "difference": fmean(self.differences) if count else None, "low": low, "high": high,
            "differences": self.differences,
            "variance_ratio": variance(self.differences) / sum(independent) if any(independent) else None,
        }  # fmt: skip


class Trial(Grid):
    """The order of the runs of a trial: a variant gets its next seed once it is judged by the seeds before."""

    def __init__(self, folder: SweepFolder, settings: TrialConfig, arms: Sequence[Arm], parallel: int) -> None:
        """The first arm is the baseline; `parallel` runs go on at once."""
        self._folder, self._settings, self._parallel = folder, settings, parallel
        self.arms, self.baseline, self.variants = arms, arms[0], arms[1:]
        self._places = {job.name: (arm, place) for arm in arms for place, job in enumerate(arm.jobs)}
        self.jobs = [arm.jobs[place] for place in range(settings.seeds) for arm in arms]
        self._began, self._started, self.problem = time.monotonic(), set[str](), ""
        for job in self.jobs:
            status = folder.status(job)
            if status.get("state") == FINISHED or (status and has_diverged(folder.path / status["run"])):
                self._take(job, status)
        self.title = f"{counted(len(self.variants), 'variant')} over at most {settings.seeds} seeds, {self._progress()}"

    def next(self) -> Job | None:
        for job in () if self.problem else self.jobs:
            arm, place = self._places[job.name]
            waiting = self.variants if arm is self.baseline else [arm]
            asked = any(each.verdict is None and len(each.differences) == place for each in waiting)
            if asked and job.name not in self._started:
                self._started.add(job.name)
                return job
        return None

    def tell(self, job: Job, status: Status) -> None:
        if status["state"] in (FINISHED, "failed"):
            self._take(job, status)
            say(f"trial: {self._progress()}")

    def _take(self, job: Job, status: Status) -> None:
        """Take in how a run ended, and judge what can be judged."""
        self._started.add(job.name)
        arm, base = self._places[job.name][0], self.baseline.ends
        arm.ends.append({**status, "run": self._folder.path / status["run"]})
        if arm is self.baseline and value_of(status) is None:
            self.problem = f"The baseline has no {self._settings.metric}: {status['reason']}"
        for each in () if self.problem else self.variants:
            if each.verdict is None and (seen := len(each.differences)) < min(len(each.ends), len(base)):
                each.compare(base[seen], self._settings)
                if each.verdict is not None:
                    say(f"trial: {each.name} is {each.verdict} after {counted(seen + 1, 'seed')}")

    def _progress(self) -> str:
        """Return how many runs are done, how many more there may be, and how long they may take."""
        going = [arm for arm in self.variants if arm.verdict is None]
        left = sum(self._settings.seeds - len(arm.ends) for arm in ([*going, self.baseline] if going else []))
        spent = [end["seconds"] for arm in self.arms for end in arm.ends]
        if not spent:
            return f"at most {left} runs"
        so_far, rest = time.monotonic() - self._began, left * fmean(spent) / self._parallel
        told = f"{len(spent)} of at most {len(spent) + left} runs, {format_duration(so_far)}"
        return f"{told}, at most {format_duration(rest)} to go" if left else told

    def results(self) -> dict[str, Any]:
        """Return the outcome as JSON values."""
        base, *variants = (arm.facts(self.baseline) for arm in self.arms)
        ratios = [each["variance_ratio"] for each in variants if each["variance_ratio"] is not None]
        return {
            "trial": str(self._folder.path), "finished": all(arm.verdict for arm in self.variants),
            "problem": self.problem or None, **asdict(self._settings), "baseline": base,
            "variance_ratio": fmean(ratios) if ratios else None, "variants": {each["name"]: each for each in variants},
        }  # fmt: skip


def run(config: Config) -> dict[str, Any]:
    """Train the baseline and all variants. Print a table and, as the last line, the results as JSON; return them.

    Raises UserError before anything runs if a variant can't be trained or nothing be written, Interrupted after a
    signal, and TtrainError if the baseline or a variant failed.
    """
    settings, (arms, forecast), flags = config.trial, _checked(config), config.source.flags
    with raised_as(UserError, f"The trial can't write {RESULTS}", "Start it in another folder."):
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        open(RESULTS, "a").close()
    given = {arm.name: replace(config.source, overrides=arm.jobs[0].overrides) for arm in arms}
    commands = {name: each.command(without=["hydra", "task"]) for name, each in given.items()}
    identity = json.dumps([commands, asdict(settings)], sort_keys=True)
    folder = SweepFolder.open(config.sweep.dir, identity, config.source.overrides, ROOT, same=True)
    try:
        trial = Trial(folder, settings, arms, config.sweep.parallel)
        say(f"trial {folder.path}: {trial.title}{forecast}")
        sweep = replace(config.sweep, objective=settings.metric, search=None, prune=None)
        Runner(folder, sweep, flags, trial).run()
        results = trial.results()
        _print(results)
        if results["finished"]:
            if not read_json(folder.path / RESULT).get("finished"):
                _append(results, commands)
            folder.finish(True)
        replace_file(folder.path / RESULT, to_json(results))
    finally:
        folder.close()
    failed = [arm.name for arm in trial.variants if arm.verdict == "failed"]
    if trial.problem or failed:
        raise TtrainError(trial.problem or f"{', '.join(failed)} failed; {folder.path} has the logs.")
    if not results["finished"]:
        raise Interrupted("interrupted; what is done is kept, and the same command again goes on.")
    return results


def _checked(config: Config) -> tuple[list[Arm], str]:
    """Return baseline and variants, all checked, and a text that tells how long their steps may take."""
    flags, own = parse_arguments(config.source.flags)
    arms, problems, runs = list[Arm](), list[str](), list[Run]()
    seeds = range(config.run.seed, config.run.seed + config.trial.seeds)
    with Composer(flags.config_name, flags.config_dir, flags.config_path) as composer:
        for name, given in {BASELINE: [], **config.trial.variants}.items():
            try:
                overrides = (*own, *_with(given, config.source.overrides), "task=train")
                typed = composer.typed(overrides)
                with ExitStack() as stack:
                    runs.append(start_run(typed, stack))
            except UserError as error:
                if name == BASELINE:  # whose problems the variants would repeat
                    raise
                told = error.problems if isinstance(error, ConfigError) else [str(error)]
                problems += [f"trial.variants.{name}: {each}" for each in told]
            else:
                jobs = [Job(0, (*overrides, f"run.seed={seed}"), name=f"{name}-{seed}", config=typed) for seed in seeds]
                arms.append(Arm(name, jobs))
    if problems:
        raise ConfigError(problems)
    whole = steps_seconds(runs[0]) * len(arms) * config.trial.seeds / config.sweep.parallel
    return arms, f"; {format_duration(whole)} of steps at the baseline's expected pace" if whole else ""


def _with(given: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Return the overrides of a variant: the command's, and those `given`. Raises ConfigError for keys of the trial."""
    keys, theirs = ([line.partition("=")[0].lstrip("+~") for line in lines] for lines in (given, overrides))
    if wrong := [key for key in keys if key.partition(".")[0] in (*_OURS, "plugins")]:
        raise ConfigError(f"{wrong[0]}: is the same for all runs of a trial. Leave it out.")
    kept = [key not in keys and key.partition(".")[0] not in _OURS for key in theirs]
    return [*compress(overrides, kept), *given]


def _append(results: dict[str, Any], commands: dict[str, str]) -> None:
    """Add a row for each arm to the table of all trials, in one write."""
    state = own_state() or {"commit": "-", "changed": False}
    shared = {"time": now(), "commit": state["commit"] + "-dirty" * state["changed"], "trial": results["trial"]}
    with open(RESULTS, "a", buffering=1 << 20, encoding="utf-8") as file:
        lock_file(file, wait=True)
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", delimiter="\t", lineterminator="\n")
        if not file.tell():
            writer.writeheader()
        for row in (results["baseline"], *results["variants"].values()):
            writer.writerow({**row, **shared, "status": row["verdict"], "command": commands[row["name"]]})


def _print(results: dict[str, Any]) -> None:
    """Print the table, the noise floor and what pairing saves, then all as a line of JSON."""
    last = ("verdict", "seeds", "seconds", "peak_memory_bytes", "reason")
    keys, arms = ("name", results["metric"], "difference", "low", "high", *last), results["variants"].values()
    rows = [[cell(key, row[key]) for key in keys] for row in (results["baseline"], *arms)]
    print(*fitted([keys, *rows], window(), {0, 5, 9}), sep="\n")
    print(f"All intervals of a variant hold together with probability {1 - results['level']:g}.")
    if (noise := results["baseline"]["deviation"]) is not None:
        print(f"Noise floor: over seeds the baseline has a standard deviation of {noise:.4f}.")
    if (ratio := results["variance_ratio"]) is not None:
        saved = f"saves {1 - ratio:.0%} of the seeds" if ratio < 1 else "saves no seeds"
        print(f"Pairing {saved}: paired differences have {ratio:.2f} times the variance of unpaired ones.")
    print(json.dumps(results), flush=True)
