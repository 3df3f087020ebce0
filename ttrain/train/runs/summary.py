"""Describe a run's data at the start, and the run itself at its end."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttrain.core.units import counted, format_bytes, format_count, format_duration
from ttrain.parallel.ranks import Ranks
from ttrain.train.checkpoint.progress import Progress
from ttrain.train.logging.chart import Series, draw, new_figure
from ttrain.train.logging.meter import loop_speed
from ttrain.train.logging.metrics import read_metrics
from ttrain.train.runs.record import START, continue_command, override

if TYPE_CHECKING:
    from ttrain.data.batches import Dataset

TOKENS, VALUES = "tokens", "target values"  # what steps count
_BITS = "bits_per_byte"
_ALIKE = 0.1  # speeds that differ by less than this share of the greater are told as one


def unit_of(data: Mapping[str, Any]) -> str:
    """Unit that a step counts, by the description of the data."""
    return TOKENS if "tokens" in data else VALUES


@dataclass(frozen=True)
class Recorded:
    """Numbers of a run's metrics, over all attempts."""

    mfu: float | None = None  # mean over the time of the steps
    step_ms: float | None = None  # median
    tokens_per_s: float | None = None  # median
    rates: Mapping[str, float] = field(default_factory=dict)  # the last learning rate of every group, by its input
    val_metrics: Mapping[str, float] = field(default_factory=dict)  # of the newest evaluation, besides the loss


@dataclass(frozen=True)
class Summary:
    """The numbers of a finished run. Losses are in nats per token, or mean squared errors."""

    model: str
    parameters: int
    progress: Progress
    steps: int
    recorded: Recorded
    peak_memory: int
    baseline: tuple[str, float] | None = None  # name and loss of the best prediction that ignores the input
    ranks: Ranks = field(default_factory=Ranks)  # that trained together
    caution: str | None = None  # what has to be known of the numbers; see Device.caution
    unit: str = TOKENS  # what `progress.tokens` counts
    averaged: bool = False  # whether evaluations read an average of the weights

    def to_dict(self) -> dict[str, Any]:
        """Values for summary.json."""
        progress = self.progress
        return {
            "model": self.model,
            "parameters": self.parameters,
            "step": progress.step,
            "steps": self.steps,
            "tokens": progress.tokens,
            "seconds": round(progress.seconds, 3),
            "train/loss": progress.train_loss,
            "val/loss": progress.val_loss,
            "val/bits_per_byte": self.recorded.val_metrics.get(_BITS),
            "best_val_loss": progress.best_val_loss,
            "best_step": progress.best_step,
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.recorded.mfu,
            "median_step_ms": self.recorded.step_ms,
            "median_tokens_per_s": self.recorded.tokens_per_s,
            "peak_memory_bytes": self.peak_memory,
            "learning_rates": dict(self.recorded.rates),
            "val_metrics": self.val_metrics,
            "baseline": None if self.baseline is None else {"name": self.baseline[0], "loss": self.baseline[1]},
            **({"ranks": self.ranks.count, "slices": self.ranks.slices} if self.ranks.slices > 1 else {}),
            **({"val_loss_of_average": True} if self.averaged else {}),
            **({} if self.caution is None else {"caution": self.caution}),
        }

    def lines(self) -> list[tuple[str, str]]:
        """Label and value of every line for people."""
        progress, bits, rates = self.progress, self.recorded.val_metrics.get(_BITS), self.recorded.rates
        lines = [
            ("model", f"{self.model}, {format_count(self.parameters)} parameters"),
            (
                "steps",
                f"{progress.step} in {format_duration(progress.seconds)}, {format_count(progress.tokens)} {self.unit}",
            ),
            ("train loss", _loss(progress.train_loss)),
            ("val loss", self._val_loss()),
        ]
        if bits is not None:
            lines.append(("bits per byte", f"{bits:.4f} of held-out text"))
        if self.val_metrics:
            lines.append(("val metrics", ", ".join(f"{name} {value:.4f}" for name, value in self.val_metrics.items())))
        if self.baseline is not None:
            compared = next((f"; compare {name}" for name in self.val_metrics if name.endswith("/ce")), "")
            lines.append((self.baseline[0], f"{self.baseline[1]:.4f} (what ignoring the input can reach{compared})"))
        if self.tokens_per_s:
            lines.append(("speed", self._speed(self.tokens_per_s)))
        if self.ranks.slices > 1:
            shared = ", each with its shard of the optimizer" if self.ranks.sharding else ""
            lines.append(("ranks", f"{self.ranks.count} on {self.ranks.slices} slices of every batch{shared}"))
        if len(rates) > 1:
            shown = (f"{name.removeprefix('lr/')} {rate:.2e}" for name, rate in rates.items())
            lines.append(("learning rates", ", ".join(shown)))
        lines.append(("peak memory", format_bytes(self.peak_memory)))
        return lines if self.caution is None else [("WARNING", self.caution), *lines]

    @property
    def val_metrics(self) -> dict[str, float]:
        """The model's further metrics."""
        return {name: value for name, value in self.recorded.val_metrics.items() if name != _BITS}

    @property
    def tokens_per_s(self) -> float | None:
        """Over the time of the loop, all attempts."""
        return loop_speed(self.progress.tokens, self.progress.seconds)

    def _speed(self, mean: float) -> str:
        mfu = f", mfu {100 * self.recorded.mfu:.1f} %" if self.recorded.mfu else ""
        median, step = self.recorded.tokens_per_s, self.recorded.step_ms
        differs = median and step and abs(median - mean) > _ALIKE * max(median, mean)
        told = f"; {format_count(median)} in the median step, {step:.4g} ms" if differs and median and step else ""
        return f"{format_count(mean)} {self.unit}/s{mfu}{told}"

    @property
    def loss_baseline(self) -> tuple[str, float] | None:
        """The baseline where the loss can be compared with it: a sum of several terms can't."""
        return None if self.val_metrics else self.baseline

    def _val_loss(self) -> str:
        progress = self.progress
        best = progress.best_val_loss
        better = best is not None and progress.val_loss is not None and best < progress.val_loss
        shown = _loss(progress.val_loss) + (f" (best {best:.4f} at step {progress.best_step})" if better else "")
        return f"{shown}, with the average of the weights" if self.averaged and progress.val_loss is not None else shown


# Keys of summary.json that are numbers; a model's further metrics are not among them.
NUMBERS = tuple(
    key
    for key, value in Summary("", 0, Progress(), 0, Recorded(), 0).to_dict().items()
    if not isinstance(value, str | dict) and key != "baseline"
)


def extent_line(
    dataset: Dataset, steps: int, rows: Sequence[int], tokens: int | None = None, limit: int | None = None
) -> str:
    """Files, bytes, tokens, sequences a pass and the passes that `steps` make; the first and the last read `rows`.

    `tokens` that those steps read are given where they are not all alike; `limit` is data.limit.
    """
    described = dataset.description
    counts = described.get("tokens") or described.get("examples") or {}
    source = described.get("source")
    parts = [f"Data: {', '.join(source) if isinstance(source, list) else source}"]
    if "files" in described:
        size = described["bytes"]
        parts.append(f", {counted(described['files'], 'file')}, ")
        parts.append(format_bytes(sum(size.values()) if isinstance(size, dict) else size))
    if not counts:
        return "".join(parts) + "."
    unit = "token" if "tokens" in described else "example"
    parts.append(f": {counted(counts['train'], unit)} to train on, {counts['val']:,} held out.")
    length = dataset.fields["tokens"].shape[0] if "tokens" in described else 1
    # Documents follow one another without end; elsewhere the last token of a split is a target alone.
    whole = counts["train"] - ("tokens" in described and "documents" not in described)
    laid = described.get("sequences")  # of whole documents, which fill sequences in part
    sequences = min(laid["train"] if laid else max(1, whole // length), limit or whole)
    a_pass = sequences * length if limit or laid else counts["train"]
    passes = (steps * rows[-1] * length if tokens is None else tokens) / a_pass
    of = " to ".join(f"{each:,}" for each in dict.fromkeys(rows))
    what = f"{counted(sequences, 'sequence')} of {counted(length, 'token')}"
    if unit == "example":
        what = counted(sequences, unit)
    only = " (data.limit)" if limit else ""
    parts.append(f" A pass is {what}{only}; {counted(steps, 'step')} of {of} make {_passes(passes)}.")
    return "".join(parts)


def _passes(passes: float) -> str:
    if 0 < passes < 0.01:
        return "less than 0.01 passes"
    return f"{passes:,.2f} passes" if passes < 100 else f"{passes:,.0f} passes"


def recorded(metrics: Path) -> Recorded:
    """Read the numbers of a run's metrics; each line has the means over the steps since the line before."""
    lines = list(read_metrics(metrics))
    timed = [line for line in lines if line.get("tokens_per_s") and line.get("step_ms")]
    before = [0, *(line["step"] for line in timed)]
    rated = [
        ((line["step"] - last) * line["step_ms"], line["mfu"])
        for line, last in zip(timed, before, strict=False)
        if line.get("mfu") is not None
    ]
    whole = sum(time for time, _ in rated)
    mfu = round(sum(time * mfu for time, mfu in rated) / whole, 4) if whole > 0 else None
    # of one line, so that both figures agree
    median = sorted(timed, key=lambda line: line["step_ms"])[len(timed) // 2] if timed else {}
    measured = {name.removeprefix("val/"): value for name, value in _newest(lines, "val").items() if value is not None}
    measured.pop("loss", None)
    return Recorded(mfu, median.get("step_ms"), median.get("tokens_per_s"), _newest(lines, "lr"), measured)


def _newest(lines: Sequence[Mapping[str, Any]], prefix: str) -> dict[str, Any]:
    """Return the values of `prefix` and of what follows `prefix/` in the newest line that has any."""
    found = ({key: line[key] for key in line if key.partition("/")[0] == prefix} for line in reversed(lines))
    return next(filter(None, found), {})


def print_summary(
    summary: Summary, run: Path, on: tuple[str, str | None], *, writes_text: bool = True, start: str = START
) -> None:
    """Prints the summary, where the run is, and the commands that go on from it.

    `on` has the overrides with which the run trains on and what its learning rate does then, `writes_text` tells that
    the model can be sampled, `start` is what commands begin with.
    """
    from rich.console import Console
    from rich.text import Text

    overrides, rate = on
    rows = [
        *summary.lines(),
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


def draw_loss_curve(
    metrics: Path, image: Path, baseline: tuple[str, float] | None = None, caution: str | None = None
) -> bool:
    """Draw train and held-out loss over steps into a PNG. Return False where there is nothing to draw, or no room."""
    lines = list(read_metrics(metrics))
    curves = [
        Series(key, [(line["step"], line[key]) for line in lines if line.get(key) is not None], **style)
        for key, style in _CURVES.items()
    ]
    if not any(len(curve.points) > 1 for curve in curves):
        return False
    figure, axes = new_figure()
    if baseline is not None:
        axes.axhline(baseline[1], label=baseline[0], color="gray", linestyle=":")
    draw(axes, curves)
    axes.set(xlabel="step", ylabel="loss")
    if caution is not None:
        axes.set_title(caution, fontsize="small", wrap=True)
    try:
        figure.savefig(image, dpi=120)
    except OSError:  # a picture is not worth a run that is done
        return False
    return True


_CURVES: dict[str, dict[str, bool]] = {"train/loss": {"noisy": True}, "val/loss": {"markers": True}}


def _loss(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4f}"
