"""The measuring processes of a benchmark: `python -m ttrain.bench.worker <order.json> <events.jsonl>`.

An order holds a case, the contenders and what to do: `alone` measures one contender's start and memory, `memory` its
memory above what the process needs for any work, `together` checks and times several in turns, `host` times what one
costs the host on a mocked board, `repeat` does steps beside another process until it is ended. Every finding is
appended to the events file as one JSON line at once, so that whoever started the process has all of it even if the
process is ended.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ttrain.bench.check import STEPS, FirstSteps, agreement, first_steps
from ttrain.bench.contender import Contender
from ttrain.bench.engines import EngineContender, device_of, step_graph
from ttrain.bench.expected import expected_seconds, roof_facts
from ttrain.bench.interleave import Seat, interleave
from ttrain.bench.memory import PeakMemory, return_free_memory
from ttrain.bench.process import Neighbour
from ttrain.bench.ranks import RanksContender
from ttrain.bench.reason import reason
from ttrain.bench.workload import Case, ProductWork
from ttrain.config import build, registry
from ttrain.device.settings import DeviceConfig
from ttrain.engine.settings import EngineConfig

if TYPE_CHECKING:
    from ttrain.device.base import Device

HOST_ROUNDS = 5  # measurements of host dispatch, each the fastest of some steps
Emit = Callable[[Mapping[str, Any]], None]


def main(order: Path, events: Path) -> None:
    """Carry out an order."""
    given = json.loads(order.read_text("utf-8"))
    with open(events, "a", encoding="utf-8") as file:

        def emit(event: Mapping[str, Any]) -> None:
            file.write(json.dumps(event) + "\n")
            file.flush()

        registry.load_plugins(given["plugins"])
        {"alone": alone, "memory": memory, "together": together, "host": host, "repeat": repeat}[given["do"]](
            given, emit
        )


def contender_of(name: str, order: Mapping[str, Any], case: Case) -> Contender:
    if " " in name:
        return RanksContender(name, case, order)
    return make_contender(name, case, device_of(order), EngineConfig(**order["engine"]))


def make_contender(name: str, case: Case, device: DeviceConfig, engine: EngineConfig) -> Contender:
    """A contender by its name in the config. `engine` gives the options that all engines of ours take."""
    if isinstance(case.work, ProductWork):
        from ttrain.bench.products import EngineProduct, TorchProduct

        return TorchProduct(name, case, device) if name == "eager" else EngineProduct(name, case, device, engine)
    if name in ("eager", "compile", "compile_all"):
        from ttrain.bench.baselines import PyTorchContender

        return PyTorchContender(name, case, device)
    return EngineContender(name, case, device, engine)


def alone(order: Mapping[str, Any], emit: Emit) -> None:
    """Start one contender in this fresh process: time to its first step, and memory."""
    case, name = Case.of(order["case"]), order["contenders"][0]
    opened = build.build_device(device_of(order))
    if not opened.computes:
        return emit({"event": "refused", "reason": _no_values(opened.name)})
    usage = PeakMemory(opened.name)
    base, imports = usage.now(), time.time() - psutil.Process().create_time()
    start = time.perf_counter()
    try:
        contender = contender_of(name, order, case)
        contender.build()
        built = time.perf_counter() - start
        first = contender.loss(contender.step(1))
        until_first = time.perf_counter() - start
        whole_peak = usage.peak()
        reset = usage.reset()
        losses = first_steps(contender, [first]).losses
        contender.synchronize()
    except Exception as error:  # what a contender raises is its result
        emit({"event": "failed", "contender": name, "reason": reason(error)})
        return
    steady = usage.peak() if reset else None
    peak = max(whole_peak, steady or usage.peak())
    emit(
        {
            "event": "alone", "contender": name, "side": contender.side, "description": contender.description,
            "imports_s": imports, "build_s": built, "first_step_s": until_first,
            "base_bytes": base, "peak_bytes": peak, "steady_bytes": steady, "losses": losses,
            "facts": contender.facts(),
        }
    )  # fmt: skip
    contender.close()


def memory(order: Mapping[str, Any], emit: Emit) -> None:
    """Peak memory of a contender in this fresh process, above what the process holds after the same work on a small
    scale and with the batches in memory: what a plan can speak of.
    """
    case, name = Case.of(order["case"]), order["contenders"][0]
    opened = build.build_device(device_of(order))
    if not opened.computes:
        return emit({"event": "refused", "reason": _no_values(opened.name)})
    usage = PeakMemory(opened.name)
    try:
        _warm_up(name, order, case)
        held = sum(array.nbytes for batch in case.batches for array in batch.values())
        return_free_memory()
        base = usage.now()
        usage.reset()
        contender = contender_of(name, order, case)
        contender.build()
        losses = first_steps(contender).losses
        building = usage.peak()
        reset = usage.reset()
        for number in range(STEPS + 1, 2 * STEPS + 1):
            contender.loss(contender.step(number))
        contender.synchronize()
    except Exception as error:  # what a contender raises is its result
        emit({"event": "failed", "contender": name, "reason": reason(error)})
        return
    emit(
        {
            "event": "memory", "contender": name, "side": contender.side, "description": contender.description,
            "base_bytes": base, "peak_bytes": max(building, usage.peak()),
            "steady_bytes": usage.peak() if reset else None, "planned_bytes": contender.planned_bytes(),
            "batch_bytes": held, "losses": losses, "facts": contender.facts(),
        }
    )  # fmt: skip
    contender.close()


def host(order: Mapping[str, Any], emit: Emit) -> None:
    """Host time of an optimizer step on a board that computes nothing."""
    from ttrain.train.steps.dry_run import dispatch_ms

    case, name = Case.of(order["case"]), order["contenders"][0]
    try:
        contender = contender_of(name, order, case)
        contender.build()
        assert isinstance(contender, EngineContender) and not contender.device.computes
        found = [dispatch_ms(contender.step) for _ in range(HOST_ROUNDS)]
    except Exception as error:  # what a contender raises is its result
        emit({"event": "failed", "contender": name, "reason": reason(error)})
        return
    emit({"event": "host", "contender": name, "ms": found, "device": contender.device.describe()})
    contender.close()


def _warm_up(name: str, order: Mapping[str, Any], case: Case) -> None:
    """The same ops on a small scale: modules, threads, compiled code and the libraries' own memory come to stay."""
    small = contender_of(name, order, replace(case, work=case.training.smaller()))
    small.build()
    first_steps(small)
    small.close()


def together(order: Mapping[str, Any], emit: Emit) -> None:
    """Build all contenders in this process, check that they do the same work, and let them take turns."""
    case = Case.of(order["case"])
    opened = build.build_device(device_of(order))
    if not opened.computes:
        return emit({"event": "refused", "reason": _no_values(opened.name)})
    emit({"event": "environment", "device": opened.describe(), **_work_facts(case, opened.name, order)})
    built, firsts = _build_all(order, case, emit)
    if not built:
        return
    _check(case, built, firsts, order["reference"], emit)
    gc.freeze()  # what exists now lives to the end and need not be searched again
    neighbours = [_neighbour(contender.name, order) for contender in built] if order.get("beside") else []
    seats = [Seat(contender, STEPS) for contender in built]
    seats += [Seat(contender, STEPS, beside=near) for contender, near in zip(built, neighbours, strict=False)]
    for seat in seats:
        emit({"event": "seated", "contender": seat.name, "like": seat.contender.name})
        turn_seconds = order["seconds"] / (order["rounds"] * len(seats))
        seat.size(firsts[seat.contender.name].step_seconds, turn_seconds)
    cpu = _CpuShare()
    for turns in interleave(seats, order["rounds"], order["seconds"], each=opened.name == "cpu", seed=case.seed):
        emit({"event": "round", "turns": [asdict(turn) for turn in turns], "others_cpu": cpu.others()})
    for contender in built:
        roof = roof_facts(contender, opened, str(case.dtypes.compute), order["device"].get("index", 0))
        emit({"event": "facts", "contender": contender.name, "facts": contender.facts() | roof})
    if order.get("planned"):
        _plan(case, built, opened, emit)
    for contender in built:
        contender.close()
    for neighbour in neighbours:
        neighbour.close()


def _neighbour(contender: str, order: Mapping[str, Any]) -> Neighbour:
    """What runs beside a contender."""
    same = {**order, "do": "repeat", "contenders": [contender], "beside": None}
    return Neighbour(same if order["beside"] == "same" else None)


def repeat(order: Mapping[str, Any], emit: Emit) -> None:
    """One step after the other until somebody ends this process."""
    contender = contender_of(order["contenders"][0], order, Case.of(order["case"]))
    contender.build()
    contender.loss(contender.step(1))
    emit({"event": "built", "contender": contender.name})
    for number in count(2):
        contender.loss(contender.step(number))


def _plan(case: Case, built: Sequence[Contender], opened: Device, emit: Emit) -> None:
    """What `task=plan` expects of a step, from kernels that are timed now: while the machine is as it was just now."""
    for contender in built:
        seconds = expected_seconds(contender, opened)
        if seconds is not None:
            emit({"event": "planned", "contender": contender.name, "step_ms": 1e3 * seconds})


def _no_values(device: str) -> str:
    return f"device {device} computes no values, so there is nothing to time. Give device=cpu or device=cuda."


def _build_all(order: Mapping[str, Any], case: Case, emit: Emit) -> tuple[list[Contender], dict[str, FirstSteps]]:
    """The contenders that can be built, and what their first steps gave."""
    built, firsts = [], {}
    for name in order["contenders"]:
        emit({"event": "building", "contender": name})
        try:
            contender = contender_of(name, order, case)
            contender.build()
            firsts[name] = first_steps(contender)
        except Exception as error:  # what a contender raises is its result
            emit({"event": "failed", "contender": name, "reason": reason(error)})
            continue
        built.append(contender)
        emit({"event": "built", "contender": name, "side": contender.side, "description": contender.description})
    return built, firsts


def _check(case: Case, built: Sequence[Contender], firsts: Mapping[str, FirstSteps], wanted: str, emit: Emit) -> None:
    """Compare everybody with the wanted reference, or with the first contender where that one could not be built."""
    reference = next((contender for contender in built if contender.name == wanted), built[0])
    for contender in built:
        mine = firsts[contender.name].losses
        found = agreement(case, contender, mine, reference, firsts[reference.name].losses)
        emit(
            {
                "event": "checked", "contender": contender.name, "reference": reference.name, "losses": mine,
                "loss_difference": found.loss, "weight_difference": found.weights,
                "problem": found.problem(case.precision, reference.name),
            }
        )  # fmt: skip


def _work_facts(case: Case, device: str, order: Mapping[str, Any]) -> dict[str, Any]:
    """FLOPs of one step as the ops of our graph declare them, and the peak that mfu is relative to."""
    from ttrain.train.forecast.peak import measured_peak
    from ttrain.train.steps.session import flops_per_step

    peak = measured_peak(device, str(case.dtypes.compute), order["device"].get("index", 0))
    if isinstance(case.work, ProductWork):
        return {"flops_per_step": case.work.flops, "peak_flops": peak, "parameters": None}
    flops = flops_per_step(step_graph(case))
    return {"flops_per_step": flops, "peak_flops": peak, "parameters": case.model.parameter_count}


class _CpuShare:
    """How much of all cores other processes used since the start."""

    def __init__(self) -> None:
        self._busy, self._own, self._start = self._read()

    def _read(self) -> tuple[float, float, float]:
        times, process = psutil.cpu_times(), psutil.Process()
        idle = times.idle + getattr(times, "iowait", 0.0)
        own = [each.cpu_times() for each in (process, *process.children(recursive=True))]
        return sum(times[:8]) - idle, sum(each.user + each.system for each in own), time.perf_counter()

    def others(self) -> float:
        busy, own, now = self._read()
        elapsed = max(now - self._start, 1e-9) * (psutil.cpu_count() or 1)
        return max(0.0, (busy - self._busy) - (own - self._own)) / elapsed


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
