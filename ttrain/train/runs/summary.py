"""Describe a run's data at the start, and the run itself at its end."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttrain.core.tables import Table
from ttrain.core.units import counted, format_bytes, format_count, format_duration
from ttrain.parallel.ranks import Ranks
from ttrain.train.checkpoint.checkpoint import Progress
from ttrain.train.logging.chart import Series, draw, new_figure
from ttrain.train.logging.metrics import EVAL, loop_speed
from ttrain.train.runs.record import START, continue_command, override
from ttrain.train.settings import TrainConfig
from ttrain.train.steps.phases import PhaseSchedule

if TYPE_CHECKING:
    from ttrain.data.batches import Dataset

TOKENS, VALUES = "tokens", "target values"  # what steps count
BITS = "val/bits_per_byte"
_ALIKE = 0.1  # speeds that differ by less than this share of the greater are told as one


def unit_of(data: Mapping[str, Any]) -> str:
    """Unit that a step counts, by the description of the data."""
    return TOKENS if "tokens" in data or "tokenizer" in data else VALUES


def summarize(
    progress: Progress, lines: Sequence[Mapping[str, Any]], ranks: Ranks, baseline: tuple[str, float], **facts: Any
) -> dict[str, Any]:
    """Return the numbers of a finished run for summary.json. Losses are in nats per token, or mean squared errors.

    `lines` are those of its metrics, `baseline` name and loss of the best prediction that ignores the input. `facts`
    are further entries; those that are None are left out. With `evals` only the entries of train.evals of these names
    are kept: earlier attempts may have had others.
    """
    found, kept = recorded(lines), facts.pop("evals", None)
    if kept is not None:
        found["evals"] = {key: value for key, value in found["evals"].items() if key.rpartition("/")[0] in kept}
    return {
        "step": progress.step,
        "tokens": progress.tokens,
        "seconds": round(progress.seconds, 3),
        "train/loss": progress.train_loss,
        "val/loss": progress.val_loss,
        "best_val_loss": progress.best_val_loss,
        "best_step": progress.best_step,
        "skipped_steps": progress.skipped_steps,
        "tokens_per_s": loop_speed(progress.tokens, progress.seconds),
        **found,
        "baseline": {"name": baseline[0], "loss": baseline[1]},
        **({"ranks": ranks.count, "slices": ranks.slices} if ranks.slices > 1 else {}),
        **{key: value for key, value in facts.items() if value is not None},
    }


def summary_lines(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return label and value of every line for people."""
    bits, rates, metrics, unit = (summary[key] for key in (BITS, "learning_rates", "val_metrics", "unit"))
    steps, skipped = f"{summary['step']} in {format_duration(summary['seconds'])}", summary["skipped_steps"]
    sources = {}
    for name, facts in summary.get("sources", {}).items():
        drawn = f"{100 * facts['share']:.1f} % of sequences, {_epochs(facts['epochs'])}"
        sources[f"source {name}"] = f"{drawn}, val loss {_loss(facts['val/loss'])}"
    shown = (f"{name.removeprefix('lr/')} {rate:.2e}" for name, rate in rates.items() if len(rates) > 1)
    compared = next((f"; compare {name}" for name in metrics if name.endswith("/ce")), "")
    baseline, ranks = summary["baseline"], summary.get("ranks")
    lines = {
        "WARNING": summary.get("caution"),
        "model": f"{summary['model']}, {format_count(summary['parameters'])} parameters",
        "steps": f"{steps}, {format_count(summary['tokens'])} {unit}",
        "train loss": _loss(summary["train/loss"]),
        "val loss": _val_loss(summary),
        "skipped": skipped and f"the updates of {counted(skipped, 'step')}",
        "bits per byte": None if bits is None else f"{bits:.4f} of held-out text",
        **sources,
        "val metrics": ", ".join(f"{name} {value:.4f}" for name, value in metrics.items()),
        **{key: _loss(value) for key, value in summary["evals"].items()},
        baseline["name"]: f"{baseline['loss']:.4f} (what ignoring the input can reach{compared})",
        "speed": summary["tokens_per_s"] and _speed(summary),
        "ranks": ranks and f"{ranks} on {summary['slices']} slices of every batch",
        "learning rates": ", ".join(shown),
        "peak memory": format_bytes(summary["peak_memory_bytes"]),
    }
    return [(label, text) for label, text in lines.items() if text]


def _speed(summary: Mapping[str, Any]) -> str:
    mean, median, unit = summary["tokens_per_s"], summary["median_tokens_per_s"], summary["unit"]
    mfu = f", mfu {100 * summary['mfu']:.1f} %" if summary["mfu"] else ""
    differs = median and abs(median - mean) > _ALIKE * max(median, mean)
    told = f"; {format_count(median)} in the median step, {summary['median_step_ms']:.4g} ms" if differs else ""
    return f"{format_count(mean)} {unit}/s{mfu}{told}"


def _val_loss(summary: Mapping[str, Any]) -> str:
    loss, best = summary["val/loss"], summary["best_val_loss"]
    better = f" (best {best:.4f} at step {summary['best_step']})" if None not in (loss, best) and best < loss else ""
    average = ", with the average of the weights" if "val_loss_of_average" in summary and loss is not None else ""
    return _loss(loss) + better + average


def _loss(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4f}"


def extent_line(
    dataset: Dataset, steps: int, rows: Sequence[int], tokens: int | None = None, limit: int | None = None
) -> str:
    """Files, bytes, tokens, sequences per epoch, and the epochs that `steps` make; the first and the last read `rows`.

    `tokens` that those steps read are given where they are not all alike; `limit` is data.limit.
    """
    described = dataset.description
    counts = described.get("tokens") or described.get("examples") or {}
    source = described.get("source")
    told = f"Data: {', '.join(source) if isinstance(source, list) else source}"
    if "files" in described:
        size = described["bytes"]
        size = sum(size.values()) if isinstance(size, dict) else size
        told += f", {counted(described['files'], 'file')}, {format_bytes(size)}"
    if not counts:
        return f"{told}."
    of_tokens = "tokens" in described
    length = dataset.fields["tokens"].shape[0] if of_tokens else 1
    # Documents follow one another without end; elsewhere the last token of a split is a target alone.
    whole = counts["train"] - (of_tokens and "documents" not in described)
    laid = described.get("sequences")  # of whole documents, which fill sequences in part
    sequences = min(laid["train"] if laid else max(1, whole // length), limit or whole)
    an_epoch = sequences * length if limit or laid else counts["train"]
    epochs = (steps * rows[-1] * length if tokens is None else tokens) / an_epoch
    of = " to ".join(f"{each:,}" for each in dict.fromkeys(rows))
    what = f"{counted(sequences, 'sequence')} of {counted(length, 'token')}"
    what = what if of_tokens else counted(sequences, "example")
    only = " (data.limit)" if limit else ""
    trained = counted(counts["train"], "token" if of_tokens else "example")
    told += f": {trained} to train on, {counts['val']:,} held out."
    if "sources" in described:
        return told
    return f"{told} An epoch is {what}{only}; {counted(steps, 'step')} of {of} make {_epochs(epochs)}."


def mixture_table(dataset: Dataset, train: TrainConfig) -> Table | None:
    """Return a table of the sources of a mixture, with the epochs of each in the whole run; None for other data."""
    sources, context = dataset.description.get("sources", {}), dataset.fields["targets"].size
    schedule, rows = PhaseSchedule.of(train, context, getattr(dataset, "weights", ())), []
    reads = [count * phase.length for count, phase in zip(schedule.rows(0, train.last), schedule.phases, strict=True)]
    for number, (name, facts) in enumerate(sources.items()):
        shares = [phase.weights[number] / sum(phase.weights) for phase in schedule.phases]
        an_epoch = facts["sequences"]["train"] * context if "sequences" in facts else facts["tokens"]["train"]
        epochs = sum(share * tokens for share, tokens in zip(shares, reads, strict=True)) / an_epoch
        documents, tokens = (f"{facts[key]['train']:,} + {facts[key]['val']:,}" for key in ("documents", "tokens"))
        rows.append((name, ", ".join(f"{100 * share:.3g} %" for share in shares), documents, tokens, _epochs(epochs)))
    columns = ("", "sequences", "documents + held out", "tokens + held out", f"in {counted(train.last, 'step')}")
    return Table("Sources", columns, rows) if rows else None


def _epochs(epochs: float) -> str:
    if 0 < epochs < 0.01:
        return "less than 0.01 epochs"
    return f"{epochs:,.2f} epochs" if epochs < 100 else f"{epochs:,.0f} epochs"


def recorded(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return numbers for the summary from the lines of a run's metrics, over all attempts.

    Each line has the means over the steps since the line before. mfu is the mean over the time of the steps; step time
    and speed are those of the median line, learning rates the last ones of every group, by their inputs, and metrics of
    held-out data those of the newest evaluation, besides the loss. So are those of train.evals, each by itself.
    """
    timed = [line for line in lines if line.get("tokens_per_s") and line.get("step_ms")]
    before = [0, *(line["step"] for line in timed)]
    rated = [
        ((line["step"] - last) * line["step_ms"], line["mfu"])
        for line, last in zip(timed, before, strict=False)
        if line.get("mfu") is not None
    ]
    whole = sum(time for time, _ in rated)
    # Of one line, so that both figures agree. Of two the faster: the first one holds the first step, which compiles.
    median = sorted(timed, key=lambda line: line["step_ms"])[(len(timed) - 1) // 2] if timed else {}
    newest = _newest(lines, "val")
    measured = {name: value for name, value in newest.items() if value is not None and not name.startswith("val/loss")}
    bits = measured.pop(BITS, None)
    found = {**_newest(lines, "train"), **newest}
    names = [key.removeprefix("train/share/") for key in found if key.startswith("train/share/")]
    keys = {"share": "train/share", "epochs": "train/epochs", "val/loss": "val/loss"}
    sources = {name: {kind: found.get(f"{key}/{name}") for kind, key in keys.items()} for name in names}
    return {
        BITS: bits,
        "mfu": round(sum(time * mfu for time, mfu in rated) / whole, 4) if whole > 0 else None,
        "median_step_ms": median.get("step_ms"),
        "median_tokens_per_s": median.get("tokens_per_s"),
        "learning_rates": _newest(lines, "lr"),
        "evals": {key: value for line in lines for key, value in line.items() if key.startswith(EVAL)},
        "val_metrics": {key.removeprefix("val/"): value for key, value in measured.items()},
        **({"sources": sources} if sources else {}),
    }


def _newest(lines: Sequence[Mapping[str, Any]], prefix: str) -> dict[str, Any]:
    """Return the values of `prefix` and of what follows `prefix/` in the newest line that has any."""
    found = ({key: line[key] for key in line if key.partition("/")[0] == prefix} for line in reversed(lines))
    return next(filter(None, found), {})


def print_summary(
    summary: Mapping[str, Any], run: Path, on: tuple[str, str | None], *, writes_text: bool = True, start: str = START
) -> None:
    """Prints the summary, where the run is, and the commands that go on from it.

    `on` has the overrides with which the run trains on and what its learning rate does then, `writes_text` tells that
    the model can be sampled, `start` is what commands begin with.
    """
    from rich.console import Console
    from rich.text import Text

    overrides, rate = on
    rows = [
        *summary_lines(summary),
        ("run", str(run)),
        ("train on", f"{continue_command(start, run)} {overrides}"),
        *([] if rate is None else [("learning rate", rate)]),
    ]
    if writes_text:
        rows.append(("sample", f"{start} task=sample {shlex.quote(override('run.dir', run))}"))
    width = max(len(label) for label, _ in rows) + 2
    console = Console(highlight=False, soft_wrap=True)  # a command that is cut at the window's edge can't be copied
    console.print()
    for label, value in rows:
        console.print(Text.assemble((label.ljust(width), "bold"), value))


def draw_loss_curve(lines: Sequence[Mapping[str, Any]], image: Path, summary: Mapping[str, Any]) -> None:
    """Draw train and held-out loss over steps into a PNG, if there are points enough and room on the disk."""
    points = {
        key: [(line["step"], line[key]) for line in lines if line.get(key) is not None]
        for key in ("train/loss", "val/loss")
    }
    if not any(len(each) > 1 for each in points.values()):
        return
    figure, axes = new_figure()
    baseline = summary["baseline"]
    if not summary["val_metrics"]:  # a sum of several terms can't be compared with it
        axes.axhline(baseline["loss"], label=baseline["name"], color="gray", linestyle=":")
    draw(axes, [Series(key, each, noisy=key[0] == "t", markers=key[0] == "v") for key, each in points.items()])
    axes.set(xlabel="step", ylabel="loss")
    if "caution" in summary:
        axes.set_title(summary["caution"], fontsize="small", wrap=True)
    with suppress(OSError):  # a picture is not worth a run that is done
        figure.savefig(image, dpi=120)


# Keys of summary.json that are numbers; a model's further metrics are not among them.
_COMPUTED = summarize(Progress(), (), Ranks(), ("", 0.0))
_NUMBERS = (key for key, value in _COMPUTED.items() if not isinstance(value, dict))
NUMBERS = ("parameters", "steps", "peak_memory_bytes", *_NUMBERS)
