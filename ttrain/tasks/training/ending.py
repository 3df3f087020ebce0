"""End a run: write summary.json and the loss curve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ttrain.device.base import Device
    from ttrain.tasks.training.run import Run
    from ttrain.train.checkpoint.progress import Progress
    from ttrain.train.runs.run_directory import RunDirectory
    from ttrain.train.runs.summary import Summary


def summarize(
    run: Run,
    folder: RunDirectory,
    device: Device,
    progress: Progress,
    counters: Mapping[str, int],
    averaged: bool,
) -> Summary:
    """Write summary and loss curve of a run that is done; `averaged` tells that weights are averages."""
    from ttrain.train.runs.summary import (
        Summary,
        draw_loss_curve,
        last_rates,
        last_val_metrics,
        recorded_steps,
        unit_of,
    )

    train, dataset = run.config.train, run.dataset
    baseline = dataset.baseline(train.eval_sequences)  # of the very targets that evaluations count
    val_metrics = last_val_metrics(folder.metrics)
    summary = Summary(
        model=run.model_name,
        parameters=run.model.parameter_count,
        progress=progress,
        steps=train.steps,
        recorded=recorded_steps(folder.metrics),
        peak_memory=device.memory().get("peak", 0),
        baseline=(baseline.name, baseline.value),
        rates=last_rates(folder.metrics),
        bits_per_byte=val_metrics.pop("bits_per_byte", None),
        val_metrics=val_metrics,
        ranks=run.world.ranks,
        caution=device.caution,
        unit=unit_of(dataset.description),
        averaged=averaged,
    )
    folder.write_summary({**summary.to_dict(), "engine": dict(counters)})
    draw_loss_curve(folder.metrics, folder.loss_curve, summary.loss_baseline, summary.caution)
    return summary
