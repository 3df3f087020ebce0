"""Planned memory over the launches of a step, as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ttrain.core.errors import UserError
from ttrain.plan.plan import Plan
from ttrain.train.forecast.step_cost import CLASSES, PlannedBuffer

COLOURS = {"inputs": "#9aa5b1", "activations": "#3b7dd8", "gradients": "#d9822b", "update": "#5aa469",
           "workspace": "#b5567a"}  # fmt: skip


def memory_over_time(plan: Plan) -> dict[str, np.ndarray]:
    """Live bytes of the arena by class, at each launch."""
    count = max(len(plan.graph.nodes), 1)
    series = {name: np.zeros(count + 1) for name in CLASSES}
    for buffer in map(PlannedBuffer.of, plan.blocks):
        series[buffer.group][max(buffer.start, 0)] += buffer.nbytes
        series[buffer.group][min(buffer.end, count - 1) + 1] -= buffer.nbytes
    return {name: np.cumsum(change)[:-1] for name, change in series.items()}


def save_picture(plans: Mapping[str, Plan], placed: Mapping[str, int], path: Path) -> None:
    """One panel a step: what is live in the arena at each launch, and the arena as packed. Raises UserError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.2 * len(plans)), layout="constrained")
    FigureCanvasAgg(figure)
    for index, (name, plan) in enumerate(plans.items()):
        axes = figure.add_subplot(len(plans), 1, index + 1)
        series = memory_over_time(plan)
        launches = np.arange(len(next(iter(series.values()))))
        stacked = [values / 2**20 for values in series.values()]
        axes.stackplot(launches, stacked, labels=list(series), colors=[COLOURS[group] for group in series], step="post")
        axes.axhline(
            plan.arena_bytes / 2**20,
            color="black",
            linewidth=0.8,
            linestyle="--",
            label="arena as packed, beside what gradients lend",
        )
        axes.set(title=f"step {name}", xlabel="node, in the order of launching", ylabel="MiB")
        axes.margins(x=0)
        axes.legend(loc="upper right", fontsize="small", ncols=3)
    state = ", ".join(f"{kind} {size / 2**20:.1f} MiB" for kind, size in placed.items())
    figure.suptitle(f"Planned memory of the arena (beside it lie: {state})", fontsize="medium")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"plan.picture={path}: can't be written: {why}. Give another file, such as plan.png.") from None
