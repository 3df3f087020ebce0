"""task=report: one self-contained HTML page about a run, or about several side by side.

The page holds no script and loads nothing: curves are SVG in the page.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

import ttrain
from ttrain.config.schema import Config
from ttrain.core.files import write_chosen
from ttrain.core.units import format_bytes, format_count, format_duration
from ttrain.core.waiting import waited_for
from ttrain.train.logging.chart import Series, line_chart
from ttrain.train.runs.inspect import RunInfo, read_run

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
_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; margin: .5em 0 1.5em; }
td, th { border-bottom: 1px solid #8885; padding: .2em 1em .2em 0; text-align: left; vertical-align: top; }
pre { overflow-x: auto; border: 1px solid #8885; padding: .7em; font-size: 13px; }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(460px, 1fr)); gap: 1em; }
.warning { border-left: 4px solid #ee6677; padding-left: .7em; }
summary { cursor: pointer; font-weight: bold; }
"""


def run(config: Config) -> None:
    """Writes the page. Raises UserError or CheckpointError where a folder is not a run or the page can't be written."""
    given = config.report.run or [config.run.dir or ""]
    runs = [read_run(Path(path)) for path in waited_for(given, "Reading runs")]
    own = runs[0].path / "report.html" if len(runs) == 1 else Path("report.html")
    target = Path(config.report.out) if config.report.out else own
    write_chosen("report.out", target, page(runs), folders=True)
    print(target)


def page(runs: Sequence[RunInfo]) -> str:
    """The HTML page of one or several runs."""
    labels = _labels(runs)
    title = labels[0] if len(runs) == 1 else f"{len(runs)} runs"
    body = [f"<h1>{escape(title)}</h1>", _overview(runs, labels), *_warnings(runs, labels), _curves(runs, labels)]
    if len(runs) > 1:
        body.append(_differences(runs, labels))
    for info, label in zip(runs, labels, strict=True):
        body.append(_details(info, label, heading=len(runs) > 1))
    made = f"ttrain {ttrain.__version__}, {datetime.now():%Y-%m-%d %H:%M}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n<body>\n'
        + "\n".join(body)
        + f"\n<p><small>{escape(made)}</small></p>\n</body></html>\n"
    )


def _labels(runs: Sequence[RunInfo]) -> list[str]:
    """Folder names, with their parents where two are alike."""
    names = [info.path.resolve().name for info in runs]
    return [
        name if names.count(name) == 1 else str(info.path.resolve()) for name, info in zip(names, runs, strict=True)
    ]


def _overview(runs: Sequence[RunInfo], labels: Sequence[str]) -> str:
    facts = [_facts(info) for info in runs]
    rows = [[name, *(each[name] for each in facts)] for name in facts[0]]
    return _table([row for row in rows if any(row[1:])], ["", *labels] if len(runs) > 1 else None)


def _facts(info: RunInfo) -> dict[str, str]:
    """Name the main numbers of a run, empty where one is not known."""

    def shown(form: Callable[[Any], str], value: Any) -> str:
        return form(value) if value else ""

    summary = info.summary
    return {
        "state": info.state,
        "step": f"{info.step} of {info.steps}" if info.steps else str(info.step),
        **{key: info.shown(key) for key in ("train/loss", "val/loss", "val/bits_per_byte")},
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


def _warnings(runs: Sequence[RunInfo], labels: Sequence[str]) -> list[str]:
    """Tell why the numbers of two runs do not compare, or why those of one run are not those of a device."""
    found, same = [], "; bits per byte of the same text do"
    for key, meaning, but in (("tokenizer_hash", "tokenizer", same), ("data", "data", "")):
        values = {json.dumps(info.attempts[-1].get(key), sort_keys=True) for info in runs if info.attempts}
        if len(values) > 1:
            told = f"The runs differ in their {meaning}, so their losses do not compare{but}."
            found.append(f'<p class="warning">{told}</p>')
    for info, label in zip(runs, labels, strict=True):
        if info.caution:
            found.append(f'<p class="warning">{escape(label)}: {escape(info.caution)}.</p>')
    return found


def _curves(runs: Sequence[RunInfo], labels: Sequence[str]) -> str:
    charts = []
    for key, title in CURVES:
        series = []
        for info, label in zip(runs, labels, strict=True):
            points = [(float(line["step"]), float(line[key])) for line in info.metrics if line.get(key) is not None]
            name, markers = label if len(runs) > 1 else key, key.startswith("val/")
            series.append(Series(name, points, markers=markers, noisy=key == "train/loss"))
        chart = line_chart(series, title, "step", key)
        if chart:
            charts.append(f"<figure>{chart}</figure>")
    return f'<h2>Curves</h2>\n<div class="curves">{"".join(charts) or "Nothing was recorded yet."}</div>'


def _differences(runs: Sequence[RunInfo], labels: Sequence[str]) -> str:
    flat = [dict(_flat(info.config)) for info in runs]
    keys = dict.fromkeys(key for config in flat for key in config)
    rows = []
    for key in keys:
        values = [json.dumps(config.get(key)) for config in flat]
        if len(set(values)) > 1 and not key.startswith(("run.dir", "resume", "task.")):
            rows.append([key, *values])
    return "<h2>Settings that differ</h2>\n" + (_table(rows, ["", *labels]) if rows else "<p>None.</p>")


def _flat(values: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if not isinstance(values, dict) or not values:
        return [(prefix, values)]
    return [pair for key, value in values.items() for pair in _flat(value, f"{prefix}.{key}" if prefix else str(key))]


def _details(info: RunInfo, label: str, heading: bool) -> str:
    import yaml

    parts = [f"<h2>{escape(label)}</h2>"] if heading else []
    events = [[e.get("time", ""), e["kind"], str(e.get("step", "")), str(e.get("message", ""))] for e in info.events]
    parts.append("<h2>Events</h2>" + (_table(events, ["time", "kind", "step", "what"]) if events else "<p>None.</p>"))
    config = yaml.safe_dump(info.config, sort_keys=False, allow_unicode=True, width=120)
    parts.append(_folded("Config", config if info.config else "not recorded yet"))
    for number, attempt in enumerate(info.attempts, 1):
        parts.append(_folded(f"Environment of attempt {number}", json.dumps(attempt, indent=2, ensure_ascii=False)))
    plan = info.path / "plan.txt"
    if plan.exists():
        parts.append(_folded("Plan", plan.read_text("utf-8")))
    return "\n".join(parts)


def _folded(title: str, text: str) -> str:
    return f"<details open><summary>{escape(title)}</summary><pre>{escape(text.strip())}</pre></details>"


def _table(rows: Sequence[Sequence[str]], head: Sequence[str] | None = None) -> str:
    lines = ["<table>"]
    if head is not None:
        lines.append("<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>")
    lines += ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    return "\n".join([*lines, "</table>"])
