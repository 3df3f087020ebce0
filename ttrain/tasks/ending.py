"""How a run ends: summary.json and the loss curve, then a sample and the summary on the terminal."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ttrain.engine.base import Step
    from ttrain.tasks.job import Job
    from ttrain.train.checkpoint.progress import Progress
    from ttrain.train.runs.run_directory import RunDirectory
    from ttrain.train.runs.summary import Summary
    from ttrain.train.steps.session import Session


def sum_up(job: Job, session: Session, run: RunDirectory, progress: Progress) -> None:
    """Summary and loss curve of a run that is done."""
    from ttrain.train.runs.summary import draw_loss_curve

    summary = _summary(job, run, progress)
    run.write_summary({**summary.to_dict(), "engine": session.engine.counters.as_dict()})
    draw_loss_curve(run.metrics, run.loss_curve, summary.loss_baseline, summary.caution)


def tell(job: Job, run: RunDirectory, progress: Progress) -> None:
    """Prints a sample and the summary."""
    from ttrain.config.rates import train_on
    from ttrain.train.runs.summary import print_summary

    writes_text = job.prompt is not None and "logits" in job.steps
    if writes_text:
        _print_sample(job, job.steps["logits"])
    on = train_on(job.config, progress)
    print_summary(_summary(job, run, progress), run.path, on, writes_text=writes_text, plugins=job.config.plugins)


def _print_sample(job: Job, logits: Step) -> None:
    from ttrain.train.sampling.draw import Stop, print_samples

    tokenizer, settings = job.dataset.tokenizer, dataclasses.replace(job.config.sample, count=1)
    assert tokenizer is not None and job.prompt is not None
    how = "" if settings.mode == "ar" else f", a token at a time (task=sample draws with sample.mode={settings.mode})"
    print(f"\nA sample of what the model writes{how}:\n", flush=True)
    stop = Stop.of(tokenizer, settings.stop, getattr(job.config.data, "end_token", None))
    print_samples(logits, tokenizer, job.prompt, settings, stop)


def _summary(job: Job, run: RunDirectory, progress: Progress) -> Summary:
    from ttrain.train.runs.summary import Summary, last_rates, last_val_metrics, recorded_steps

    baseline = job.baseline
    return Summary(
        model=job.model_name,
        parameters=job.model.parameter_count,
        progress=progress,
        steps=job.config.train.steps,
        recorded=recorded_steps(run.metrics),
        peak_memory=job.device.memory().get("peak", 0),
        baseline=(baseline.name, baseline.value),
        rates=last_rates(run.metrics),
        val_metrics=last_val_metrics(run.metrics),
        caution=job.device.caution,
    )
