"""How a run ends: summary.json and the loss curve, then a sample and the summary on the terminal."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ttrain.device.base import Device
    from ttrain.engine.base import Step
    from ttrain.tasks.training.setup import Setup
    from ttrain.train.checkpoint.progress import Progress
    from ttrain.train.runs.run_directory import RunDirectory
    from ttrain.train.runs.summary import Summary


def summarize(
    setup: Setup, device: Device, run: RunDirectory, progress: Progress, counters: Mapping[str, int]
) -> Summary:
    """Writes summary and loss curve of a run that is done."""
    from ttrain.train.runs.summary import Summary, draw_loss_curve, last_rates, last_val_metrics, recorded_steps

    val_metrics = last_val_metrics(run.metrics)
    baseline = setup.dataset.baseline(setup.config.train.eval_sequences)  # of the very targets that evaluations count
    summary = Summary(
        model=setup.model_name,
        parameters=setup.model.parameter_count,
        progress=progress,
        steps=setup.config.train.steps,
        recorded=recorded_steps(run.metrics),
        peak_memory=device.memory().get("peak", 0),
        baseline=(baseline.name, baseline.value),
        rates=last_rates(run.metrics),
        bits_per_byte=val_metrics.pop("bits_per_byte", None),
        val_metrics=val_metrics,
        caution=device.caution,
    )
    run.write_summary({**summary.to_dict(), "engine": dict(counters)})
    draw_loss_curve(run.metrics, run.loss_curve, summary.loss_baseline, summary.caution)
    return summary


def tell(setup: Setup, summary: Summary, run: RunDirectory, progress: Progress, logits: Step | None) -> None:
    """Prints a sample, where the model writes text, and the summary."""
    from ttrain.config.rates import train_on
    from ttrain.train.runs.summary import print_summary

    writes_text = setup.prompt is not None and logits is not None
    if logits is not None and setup.prompt is not None:
        _print_sample(setup, logits, setup.prompt)
    on = train_on(setup.config, progress)
    print_summary(summary, run.path, on, writes_text=writes_text, plugins=setup.config.plugins)


def _print_sample(setup: Setup, logits: Step, prompt: list[int]) -> None:
    from ttrain.train.sampling.draw import print_samples
    from ttrain.train.sampling.stream import Stop

    config, tokenizer = setup.config, setup.dataset.tokenizer
    settings = dataclasses.replace(config.sample, count=1)
    assert tokenizer is not None
    how = "" if settings.mode == "ar" else f", a token at a time (task=sample draws with sample.mode={settings.mode})"
    print(f"\nA sample of what the model writes{how}:\n", flush=True)
    stop = Stop.of(tokenizer, settings.stop, tokenizer.config.get("eos_token"))
    print_samples(logits, tokenizer, prompt, settings, stop)
