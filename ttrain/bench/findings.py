"""Enters what measuring processes find into the rows of a result."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ttrain.bench.process import Event
from ttrain.bench.results import SIMULATED, CaseResult, Row


def note_start(row: Row, event: Event, temperature: str) -> None:
    """Enter what a start found into the row. Of several starts the median counts."""
    if event["event"] == "failed":
        row.fail(event["reason"])
        return
    if temperature == "cold":
        row.cold_samples_s.append(event["first_step_s"])
        row.cold_s = statistics.median(row.cold_samples_s)
        return
    row.warm_samples_s.append(event["first_step_s"])
    row.warm_s, row.imports_s = statistics.median(row.warm_samples_s), event["imports_s"]
    row.base_bytes, row.peak_bytes, row.steady_bytes = event["base_bytes"], event["peak_bytes"], event["steady_bytes"]
    row.losses, row.facts = event["losses"], event["facts"]
    row.side, row.description = event["side"], event["description"]


def note_memory(row: Row, event: Event) -> None:
    """Enter what a process that measured memory found."""
    if event["event"] == "failed":
        row.fail(event["reason"])
        return
    row.base_bytes, row.peak_bytes, row.steady_bytes = event["base_bytes"], event["peak_bytes"], event["steady_bytes"]
    row.planned_bytes = event["planned_bytes"]
    row.side, row.description = event["side"], event["description"]


def note_host(found: CaseResult, row: Row, event: Event) -> None:
    """Enter the host's time on a mocked board."""
    if event["event"] == "failed":
        row.fail(event["reason"])
        return
    row.round_ms, row.fastest_ms = event["ms"], min(event["ms"])
    row.status, row.side, row.description = "ok", "ttrain", "host dispatch on a mocked board"
    found.device = event["device"]


def note_event(found: CaseResult, event: Event) -> None:
    """Enter one event of the interleaved process into the case's rows."""
    kind = event["event"]
    row = found.rows.get(event.get("contender", ""))
    if kind == "environment":
        found.device, found.parameters = event["device"], event["parameters"]
        found.basis = SIMULATED if event["device"].get("mode") == "simulator" else found.basis
        found.flops_per_step, found.peak_flops = event["flops_per_step"], event["peak_flops"]
    elif kind == "round":
        found.others_cpu = event["others_cpu"]
        for turn in event["turns"]:
            _note_turn(found.rows[turn["contender"]], turn)
    elif kind == "seated":
        found.rows.setdefault(
            event["contender"], replace(found.rows[event["like"]], contender=event["contender"], round_ms=[])
        )
    elif row is not None:
        _note_contender(row, event)


def _note_contender(row: Row, event: Event) -> None:
    kind = event["event"]
    if kind == "failed":
        row.fail(event["reason"])
    elif kind == "built":
        row.side, row.description = event["side"], event["description"]
    elif kind == "checked":
        row.losses, row.checked_against = event["losses"], event["reference"]
        row.loss_difference, row.weight_difference = event["loss_difference"], event["weight_difference"]
        row.status, row.reason = ("invalid", event["problem"]) if event["problem"] else ("ok", None)
    elif kind == "facts":
        row.facts = event["facts"]
    elif kind == "planned":
        row.planned_ms = event["step_ms"]


def _note_turn(row: Row, turn: Mapping[str, Any]) -> None:
    times = sorted(1e3 * seconds for seconds in turn["seconds"])
    middle = len(times) // 2
    row.round_ms.append(times[middle] if len(times) % 2 else (times[middle - 1] + times[middle]) / 2)
    row.fastest_ms = min(times[0], row.fastest_ms or times[0])
