"""The measuring processes of a benchmark: `python -m ttrain.bench.worker <order.json> <events.jsonl>`.

An order holds a job, the contenders and what to do: `alone` measures one contender's start and memory, `together`
checks and times several in turns. Every finding is appended to the events file as one JSON line at once, so that
whoever started the process has all of it even if the process is ended.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ttrain.bench.check import STEPS, FirstSteps, agreement, first_steps
from ttrain.bench.contender import Contender, make_contender
from ttrain.bench.interleave import Seat, interleave
from ttrain.bench.memory import PeakMemory
from ttrain.bench.reason import reason
from ttrain.bench.workload import Job
from ttrain.config import build, registry
from ttrain.engine.settings import EngineConfig

if TYPE_CHECKING:
    from ttrain.device.settings import DeviceConfig

Emit = Callable[[Mapping[str, Any]], None]


def main(order: Path, events: Path) -> None:
    """Carry out an order."""
    given = json.loads(order.read_text("utf-8"))
    with open(events, "a", encoding="utf-8") as file:

        def emit(event: Mapping[str, Any]) -> None:
            file.write(json.dumps(event) + "\n")
            file.flush()

        registry.load_plugins(given["plugins"])
        run = alone if given["do"] == "alone" else together
        run(given, emit)


def device_of(order: Mapping[str, Any]) -> DeviceConfig:
    """The small config of the device."""
    values = order["device"]
    config: DeviceConfig = registry.component("device", values["name"]).config(**values)
    return config


def contender_of(name: str, order: Mapping[str, Any], job: Job) -> Contender:
    return make_contender(name, job, device_of(order), EngineConfig(**order["engine"]))


def alone(order: Mapping[str, Any], emit: Emit) -> None:
    """Start one contender in this fresh process: time to its first step, and memory."""
    job, name = Job.of(order["job"]), order["contenders"][0]
    opened = build.build_device(device_of(order))
    if not opened.computes:
        return emit({"event": "refused", "reason": _no_values(opened.name)})
    memory = PeakMemory(opened.name)
    base, imports = memory.now(), time.time() - psutil.Process().create_time()
    start = time.perf_counter()
    try:
        contender = contender_of(name, order, job)
        contender.build()
        built = time.perf_counter() - start
        first = contender.loss(contender.step(1))
        until_first = time.perf_counter() - start
        whole_peak = memory.peak()
        reset = memory.reset()
        losses = first_steps(contender, [first]).losses
        contender.synchronize()
    except Exception as error:  # what a contender raises is its result
        emit({"event": "failed", "contender": name, "reason": reason(error)})
        return
    steady = memory.peak() if reset else None
    peak = max(whole_peak, steady or memory.peak())
    emit(
        {
            "event": "alone", "contender": name, "side": contender.side, "description": contender.description,
            "imports_s": imports, "build_s": built, "first_step_s": until_first,
            "base_bytes": base, "peak_bytes": peak, "steady_bytes": steady, "losses": losses,
            "facts": contender.facts(),
        }
    )  # fmt: skip
    contender.close()


def together(order: Mapping[str, Any], emit: Emit) -> None:
    """Build all contenders in this process, check that they do the same work, and let them take turns."""
    job = Job.of(order["job"])
    opened = build.build_device(device_of(order))
    if not opened.computes:
        return emit({"event": "refused", "reason": _no_values(opened.name)})
    emit({"event": "environment", "device": opened.describe(), **_work_facts(job, opened.name, order)})
    built, firsts = _build_all(order, job, emit)
    if not built:
        return
    _check(job, built, firsts, order["reference"], emit)
    gc.freeze()  # what exists now lives to the end and need not be searched again
    seats = [Seat(contender, STEPS) for contender in built]
    for seat in seats:
        turn_seconds = order["seconds"] / (order["rounds"] * len(seats))
        seat.size(firsts[seat.contender.name].step_seconds, turn_seconds)
    cpu = _CpuShare()
    for turns in interleave(seats, order["rounds"], order["seconds"], each=opened.name == "cpu", seed=job.seed):
        emit({"event": "round", "turns": [asdict(turn) for turn in turns], "others_cpu": cpu.others()})
    for contender in built:
        emit({"event": "facts", "contender": contender.name, "facts": contender.facts()})
        contender.close()


def _no_values(device: str) -> str:
    return f"device {device} computes no values, so there is nothing to time. Give device=cpu or device=cuda."


def _build_all(order: Mapping[str, Any], job: Job, emit: Emit) -> tuple[list[Contender], dict[str, FirstSteps]]:
    """The contenders that can be built, and what their first steps gave."""
    built, firsts = [], {}
    for name in order["contenders"]:
        emit({"event": "building", "contender": name})
        try:
            contender = contender_of(name, order, job)
            contender.build()
            firsts[name] = first_steps(contender)
        except Exception as error:  # what a contender raises is its result
            emit({"event": "failed", "contender": name, "reason": reason(error)})
            continue
        built.append(contender)
        emit({"event": "built", "contender": name, "side": contender.side, "description": contender.description})
    return built, firsts


def _check(job: Job, built: Sequence[Contender], firsts: Mapping[str, FirstSteps], wanted: str, emit: Emit) -> None:
    """Compare everybody with the wanted reference, or with the first contender where that one could not be built."""
    reference = next((contender for contender in built if contender.name == wanted), built[0])
    for contender in built:
        mine = firsts[contender.name].losses
        found = agreement(job, contender, mine, reference, firsts[reference.name].losses)
        emit(
            {
                "event": "checked", "contender": contender.name, "reference": reference.name, "losses": mine,
                "loss_difference": found.loss, "weight_difference": found.weights,
                "problem": found.problem(job.precision, reference.name),
            }
        )  # fmt: skip


def _work_facts(job: Job, device: str, order: Mapping[str, Any]) -> dict[str, Any]:
    """FLOPs of one step as the ops of our graph declare them, and the peak that mfu is relative to."""
    from ttrain.train.peak import measured_peak
    from ttrain.train.session import flops_per_step
    from ttrain.train.step_graph import StepGraph

    graph = StepGraph(job.model, build.build_optimizer(job.work.optimizer), job.work.rows)
    return {
        "flops_per_step": flops_per_step(graph),
        "peak_flops": measured_peak(device, job.precision, order["device"].get("index", 0)),
        "parameters": job.model.parameter_count,
    }


class _CpuShare:
    """How much of all cores other processes used since the start."""

    def __init__(self) -> None:
        self._busy, self._own, self._start = self._read()

    def _read(self) -> tuple[float, float, float]:
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        own = psutil.Process().cpu_times()
        return sum(times[:8]) - idle, own.user + own.system, time.perf_counter()

    def others(self) -> float:
        busy, own, now = self._read()
        elapsed = max(now - self._start, 1e-9) * (psutil.cpu_count() or 1)
        return max(0.0, (busy - self._busy) - (own - self._own)) / elapsed


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
