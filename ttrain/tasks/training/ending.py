"""How a run ends: summary.json and the loss curve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ttrain.device.base import Device
    from ttrain.tasks.training.setup import Setup
    from ttrain.train.checkpoint.progress import Progress
    from ttrain.train.runs.run_directory import RunDirectory
    from ttrain.train.runs.summary import Summary


def summarize(
    setup: Setup,
    run: RunDirectory,
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

    train, dataset = setup.config.train, setup.dataset
    baseline = dataset.baseline(train.eval_sequences)  # of the very targets that evaluations count
    val_metrics = last_val_metrics(run.metrics)
    summary = Summary(
        model=setup.model_name,
        parameters=setup.model.parameter_count,
        progress=progress,
        steps=train.steps,
        recorded=recorded_steps(run.metrics),
        peak_memory=device.memory().get("peak", 0),
        baseline=(baseline.name, baseline.value),
        rates=last_rates(run.metrics),
        bits_per_byte=val_metrics.pop("bits_per_byte", None),
        val_metrics=val_metrics,
        ranks=setup.world.ranks,
        caution=device.caution,
        unit=unit_of(dataset.description),
        averaged=averaged,
    )
    run.write_summary({**summary.to_dict(), "engine": dict(counters)})
    draw_loss_curve(run.metrics, run.loss_curve, summary.loss_baseline, summary.caution)
    return summary
