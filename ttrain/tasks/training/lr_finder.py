"""task=lr_finder: the loss while the learning rate rises from step to step, and rates that follow (Smith, 2017)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ttrain.config import build
from ttrain.config.schema import Config, LrFinderConfig
from ttrain.core.errors import Interrupted, OutOfMemory, UserError
from ttrain.core.files import replace_file, to_json
from ttrain.core.folders import RESULTS, claim_results
from ttrain.core.waiting import Waiting
from ttrain.device.base import Device
from ttrain.tasks.training.run import Run
from ttrain.tasks.training.start import start_run
from ttrain.train.forecast.limits import is_out_of_memory, memory_message
from ttrain.train.logging.chart import new_figure, smoothed, window
from ttrain.train.logging.loggers import Console
from ttrain.train.loop.interrupt import StopRequests
from ttrain.train.settings import without_phases
from ttrain.train.steps.step import Rates

ROOT = Path("outputs/lr_finder")
RISE = 0.5  # the loss diverges once it has risen again by this share of its fall
_NOISE = 4.0  # times the median distance of a loss from the mean around it: less is no rise and no fall


def run(config: Config) -> dict[str, Any]:
    """Print what the range test suggests, write results.json and plot.png into lr_finder.out, and return the results.

    Nothing is trained that stays: no checkpoint is written. Raises UserError for a device that computes nothing.
    """
    settings = config.lr_finder
    constant = replace(config.schedule, name="constant", warmup=0, steps=None)
    train = without_phases(config.train, steps=settings.steps)
    with ExitStack() as stack:
        run = start_run(replace(config, train=train, schedule=constant), stack)
        device = stack.enter_context(closing(build.build_device(run.config.device, run.config.precision)))
        if not device.computes:
            raise UserError(f"device={config.device.name}: computes no values. Choose another, such as device=cpu.")
        folder = claim_results("lr_finder.out", settings.out, ROOT, f"{run.model_name}_{device.name}")
        console, stop = build.build_console(run.config.logger), stack.enter_context(StopRequests())
        for warning in run.warnings:
            console.say(f"WARNING: {warning}")
        rates, losses, diverged = _losses(run, device, settings, console, stop)
    findings, command = find(rates, losses), None
    if (rate := findings["suggested"]) is not None:
        command = config.source.command({"optimizer.lr": f"{rate:.1e}"}, without=["lr_finder"], task="train")
    names = {"model": run.model_name, "optimizer": config.optimizer.name, "seed": run.config.run.seed}
    found = {"command": command, "rates": rates, "losses": losses, "diverged": diverged, "config": run.stored}
    results = {**names, **findings, **found}
    replace_file(folder / RESULTS, to_json(results))
    _draw(results, folder / "plot.png")
    for label, value in _lines(results, folder):
        print(f"{label.ljust(15)}{value}")
    if stop.requested is not None:
        raise Interrupted(f"interrupted; what was measured is in {folder}")
    return results


def _losses(
    run: Run, device: Device, settings: LrFinderConfig, console: Console, stop: StopRequests
) -> tuple[list[float], list[float], bool]:
    """Rates and losses of the steps until the loss diverged or the test ended; whether it diverged."""
    built: dict[str, Any] = {}
    rates: list[float] = []
    losses: list[float] = []
    diverged = False
    try:
        with ExitStack() as stack:
            with Waiting("Placing the model and building its steps", console.say):
                session = stack.enter_context(closing(run.open(device)))
                run.origin.set_values(session, run.config.run.seed)
                run.add_reference(session)
                built.update(session.build_training(further=False))
            peak, constant = run.config.optimizer.lr, run.rates

            def rising(step: int) -> Rates:
                """Return every learning rate of the constant schedule, in proportion to the test's."""
                return {name: rate * rate_of(settings, step) / peak for name, rate in constant(step).items()}

            run_step = run.stepper(session, built, settings.steps, rising)
            console.start(0, settings.steps)
            for number in range(1, settings.steps + 1):
                result, rate = run_step(number), rate_of(settings, number)
                if diverged := not (result.finite or result.overflowed):
                    break
                if result.loss is not None:
                    rates.append(rate)
                    losses.append(result.loss)
                console.log({"train/loss": result.loss, "lr": rate})
                console.advance()
                if (diverged := has_diverged(losses, settings)) or stop.requested is not None:
                    break
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(memory_message(error, device.name, built, run.shrinking_keys())) from error
    finally:
        console.close()
    return rates, losses, diverged


def rate_of(settings: LrFinderConfig, step: int) -> float:
    """The learning rate of a step, counted from 1: equal factors from lr_finder.low to lr_finder.high."""
    return float(settings.low * (settings.high / settings.low) ** ((step - 1) / max(settings.steps - 1, 1)))


def has_diverged(losses: Sequence[float], settings: LrFinderConfig) -> bool:
    """Return whether the newest losses have risen above the lowest.

    Their mean has to be above the lowest such mean by more than noise, and by more than RISE of what it had fallen.
    """
    size = window(settings.steps)
    if len(losses) < 3 * size:
        return False
    sums = np.cumsum([0.0, *losses])
    means = (sums[size:] - sums[:-size]) / size
    noise = _NOISE * float(np.median(np.abs(np.asarray(losses[size:]) - means[:-1])))
    return bool(means[-1] > means.min() + max(noise, RISE * (means[0] - means.min())))


def find(rates: Sequence[float], losses: Sequence[float]) -> dict[str, Any]:
    """Find learning rates by the losses, over rates that rise by equal factors.

    Return `smoothed` losses; the rate that is `steepest`, where the smoothed loss falls fastest per factor of the rate;
    the one of its `lowest` value; the `last` one before it goes up again for good, or of the test; and the `suggested`
    one, half-way from steepest to lowest by factors. Rates are None where the loss falls by no more than its noise.
    """
    size, none = window(len(losses)), dict.fromkeys(("suggested", "steepest", "lowest", "last"))
    if len(losses) < 3 * size:
        return {"smoothed": list(losses), **none}
    start = float(np.mean(losses[:size]))
    clipped = np.minimum(losses, 2 * start - min(losses))  # one that explodes hides nothing beside it
    trend = np.asarray(smoothed(clipped.tolist(), size))
    lowest = int(np.argmin(trend))
    gained = start - float(trend[lowest])
    noise = _NOISE * float(np.median(np.abs(clipped - trend)))
    if gained <= noise or lowest == 0:
        return {"smoothed": trend.tolist(), **none}
    steepest = int(np.argmin(np.gradient(trend)[: lowest + 1]))
    above = np.flatnonzero(trend[lowest:] > trend[lowest] + max(noise, RISE * gained))
    last = lowest + int(above[0]) - 1 if len(above) else len(rates) - 1
    found = {"steepest": rates[steepest], "lowest": rates[lowest], "last": rates[last]}
    suggested = math.sqrt(rates[steepest] * rates[lowest])
    return {"smoothed": trend.tolist(), "suggested": suggested, **found}


def _lines(results: Mapping[str, Any], folder: Path) -> list[tuple[str, str]]:
    """Label and value of every line for people."""
    rates = results["rates"]
    steps = f"{len(rates)} steps" + (f", learning rate {rates[0]:.1e} to {rates[-1]:.1e}" if rates else "")
    lines = [("range test", f"{results['model']}, optimizer {results['optimizer']}: {steps}")]
    if results["steepest"] is None:
        lines.append(("no rate", "the loss did not fall by more than its noise; give another lr_finder.low, "
                      "lr_finder.high or more lr_finder.steps"))  # fmt: skip
    else:
        until = "before the loss diverged" if results["last"] < rates[-1] or results["diverged"] else (
            "of the test, the loss did not diverge; a larger lr_finder.high shows where it does"
        )  # fmt: skip
        lines += [
            ("steepest", f"{results['steepest']:.1e}, where the loss falls fastest"),
            ("lowest", f"{results['lowest']:.1e}, where it is lowest"),
            ("last", f"{results['last']:.1e}, the largest {until}"),
            ("suggested", f"{results['suggested']:.1e}, half-way from the first to the second by factors"),
            ("train", results["command"]),
        ]
    return [*lines, ("results", str(folder))]


def _draw(results: Mapping[str, Any], image: Path) -> None:
    """Loss over learning rate, with the rates that it suggests."""
    figure, axes = new_figure()
    rates, trend = results["rates"], results["smoothed"]
    axes.plot(rates, results["losses"], linewidth=0.8, alpha=0.5, color="tab:blue", label="train/loss")
    axes.plot(rates, trend, color="tab:blue", label="smoothed")
    for name, color in (("suggested", "tab:green"), ("last", "tab:red")):
        if results[name] is not None:
            axes.axvline(results[name], color=color, linestyle="--", label=f"{name} {results[name]:.1e}")
    axes.set(xscale="log", xlabel="learning rate", ylabel="loss")
    if trend and math.isfinite(low := min(trend)):
        span = max(trend[0] - low, 1e-3 * abs(low))
        axes.set_ylim(low - 0.2 * span, low + 1.5 * span)  # one that explodes would flatten the rest
    axes.legend()
    figure.savefig(image, dpi=120)
