"""task=report: one self-contained HTML page about a run, or about several side by side.

The page holds no script and loads nothing: curves are SVG in the page, whose frame is report.html beside this module.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment

import ttrain
from ttrain.config.schema import Config
from ttrain.core.files import text_of, write_chosen
from ttrain.core.options import leaves
from ttrain.core.units import format_bytes, format_count, format_duration
from ttrain.core.waiting import waited_for
from ttrain.train.logging.chart import Series, line_chart
from ttrain.train.logging.metrics import EVAL
from ttrain.train.runs.run_directory import RunInfo, read_run

CURVES = (
    ("train/loss", "training loss"),
    ("val/loss", "held-out loss"),
    ("val/bits_per_byte", "held-out bits per byte"),
    ("lr", "learning rate"),
    ("grad_norm", "gradient norm before clipping"),
    ("tokens_per_s", "tokens per second"),
    ("step_ms", "milliseconds per step"),
    ("mfu", "share of the device's peak"),
    ("memory_bytes", "bytes of memory in use"),
)


def run(config: Config) -> None:
    """Writes the page. Raises UserError or CheckpointError where a folder is not a run or the page can't be written."""
    given = config.report.run or [config.run.dir or ""]
    runs = [read_run(Path(path)) for path in waited_for(given, "Reading runs")]
    own = runs[0].path / "report.html" if len(runs) == 1 else Path("report.html")
    target = Path(config.report.out) if config.report.out else own
    write_chosen("report.out", target, page(runs), folders=True)
    print(target)


def page(runs: Sequence[RunInfo]) -> str:
    """Return the HTML page of one or several runs."""
    paths = [info.path.resolve() for info in runs]
    names = [path.name for path in paths]
    labels = [name if names.count(name) == 1 else str(path) for name, path in zip(names, paths, strict=True)]
    evals = {key: key for info in runs for line in info.metrics for key in line if key.startswith(EVAL)}
    facts, several = [_facts(info, evals) for info in runs], len(runs) > 1
    overview = [[name, *(each[name] for each in facts)] for name in facts[0]]
    frame = Path(__file__).with_suffix(".html").read_text("utf-8")
    template = Environment(autoescape=True, trim_blocks=True).from_string(frame)
    return template.render(
        title=f"{len(runs)} runs" if several else labels[0],
        head=["", *labels] if several else None,
        overview=[row for row in overview if any(row[1:])],
        warnings=_warnings(runs, labels),
        charts=_charts(runs, labels, (*CURVES, *evals.items())),
        differing=_differing(runs),
        runs=[(label, _events(info), _texts(info)) for info, label in zip(runs, labels, strict=True)],
        made=f"ttrain {ttrain.__version__}, {datetime.now():%Y-%m-%d %H:%M}",
    )


def _facts(info: RunInfo, evals: Iterable[str]) -> dict[str, str]:
    """Name the main numbers of a run, empty where one is not known."""

    def shown(form: Callable[[Any], str], value: Any) -> str:
        return form(value) if value else ""

    summary = info.summary
    return {
        "state": info.state,
        "step": f"{info.step} of {info.steps}" if info.steps else str(info.step),
        **{key: info.shown(key) for key in ("train/loss", "val/loss", "val/bits_per_byte", *evals)},
        "best held-out loss": _best(info),
        "parameters": shown(format_count, summary.get("parameters")),
        "tokens": format_count(info.newest("tokens") or 0),
        "time in the loop": shown(format_duration, summary.get("seconds") or info.newest("seconds")),
        "tokens/s over that time": shown(format_count, info.tokens_per_s),
        "median step": shown(format_duration, (summary.get("median_step_ms") or 0) / 1e3),
        "peak memory": shown(format_bytes, summary.get("peak_memory_bytes")),
        "attempts": str(len(info.attempts)),
    }


def _best(info: RunInfo) -> str:
    since = max((event.get("step", 0) for event in info.events if event["kind"] == "held_out"), default=0)
    losses = {line["step"]: line["val/loss"] for line in info.metrics if line.get("val/loss") is not None}
    found = [(loss, step) for step, loss in losses.items() if step >= since]
    return f"{min(found)[0]:.4f} at step {min(found)[1]}" if found else ""


def _warnings(runs: Sequence[RunInfo], labels: Sequence[str]) -> Iterator[str]:
    """Tell why the numbers of two runs do not compare, or why those of one run are not those of a device."""
    same = "; bits per byte of the same text do"
    for key, meaning, but in (("tokenizer_hash", "tokenizer", same), ("data", "data", "")):
        values = {json.dumps(info.attempts[-1].get(key), sort_keys=True) for info in runs if info.attempts}
        if len(values) > 1:
            yield f"The runs differ in their {meaning}, so their losses do not compare{but}."
    for info, label in zip(runs, labels, strict=True):
        if info.caution:
            yield f"{label}: {info.caution}."


def _charts(runs: Sequence[RunInfo], labels: Sequence[str], curves: Iterable[tuple[str, str]]) -> list[str]:
    charts = []
    for key, title in curves:
        series = []
        for info, label in zip(runs, labels, strict=True):
            points = [(float(line["step"]), float(line[key])) for line in info.metrics if line.get(key) is not None]
            name, markers = label if len(runs) > 1 else key, key.startswith(("val/", EVAL))
            series.append(Series(name, points, markers=markers, noisy=key == "train/loss"))
        charts.append(line_chart(series, title, "step", key))
    return [chart for chart in charts if chart]


def _differing(runs: Sequence[RunInfo]) -> list[list[str]]:
    """Return the key of each setting that differs, and its value in each run."""
    flat = [dict(leaves(info.config)) for info in runs]
    keys = dict.fromkeys(key for config in flat for key in config)
    rows = [[key, *(json.dumps(config.get(key)) for config in flat)] for key in keys]
    own = ("run.dir", "resume", "task.")
    return [[key, *values] for key, *values in rows if len(set(values)) > 1 and not key.startswith(own)]


def _events(info: RunInfo) -> list[list[str]]:
    return [[str(event.get(key, "")) for key in ("time", "kind", "step", "message")] for event in info.events]


def _texts(info: RunInfo) -> Iterator[tuple[str, str]]:
    """Yield long texts about a run, each with its title."""
    config = yaml.safe_dump(info.config, sort_keys=False, allow_unicode=True, width=120)
    yield "Config", config if info.config else "not recorded yet"
    for number, attempt in enumerate(info.attempts, 1):
        yield f"Environment of attempt {number}", json.dumps(attempt, indent=2, ensure_ascii=False)
    if plan := text_of(info.path / "plan.txt"):
        yield "Plan", plan
