"""The cost of a run before it runs: parameters, operations, bytes moved, planned memory and checkpoint size."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ttrain.core.tables import Table, plain_table
from ttrain.core.units import format_bytes, format_count
from ttrain.device.base import Device
from ttrain.engine.base import Step, Trace
from ttrain.engine.state import State
from ttrain.graph import Graph, Kind, Node
from ttrain.models.base import Model
from ttrain.train.forecast.step_cost import CLASSES, op_costs, step_cost
from ttrain.train.protocols import SAVED_KINDS
from ttrain.train.steps.step_graph import StepGraph


@dataclass(frozen=True)
class PlanReport:
    """Sizes are bytes, operations are floating-point operations; a multiply-add counts two.

    `per_step` tells how often each built step runs in one optimizer step; steps of evaluation and sampling are absent
    from it. `placed` are the persistent bytes by kind; one arena serves all steps, since only one runs at a time.
    """

    parameters: dict[str, int]  # by group of modules
    placed: dict[str, int]
    checkpoint: int  # tensors of one checkpoint on disk
    costs: dict[str, dict[str, Any]]  # of each step, see step_cost
    per_step: dict[str, int]
    offloaded: dict[str, int] = field(default_factory=dict)  # persistent bytes in host memory by kind; not in `placed`

    @property
    def flops(self) -> dict[str, int]:
        """Operations of one optimizer step by stage, without what is computed again to save memory."""
        return self._summed("flops")

    @property
    def moved(self) -> dict[str, int]:
        """Bytes that the kernels of one optimizer step read and write, by stage."""
        return self._summed("moved")

    @property
    def held(self) -> dict[str, int]:
        """Bytes by what holds them on the device. Libraries allocate theirs by themselves during a launch."""
        return {**self.placed, "arena": self._most("arena"), "libraries": self._most("outside")}

    @property
    def on_host(self) -> dict[str, int]:
        """Bytes by what holds them in host memory."""
        return {**self.offloaded, "arena": self._most("host_arena")}

    @property
    def memory(self) -> int:
        """All bytes on the device."""
        return sum(self.held.values())

    @property
    def planned(self) -> bool:
        return any(cost["planned"] for cost in self.costs.values())

    def _most(self, what: str) -> int:
        return max((cost[what] for cost in self.costs.values()), default=0)

    def _summed(self, what: str) -> dict[str, int]:
        found: Counter[str] = Counter()
        for name, times in self.per_step.items():
            for key, count in self.costs[name][what].items():
                found[key] += times * count
        return dict(found)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "parameters": {"total": sum(self.parameters.values()), "groups": self.parameters},
            "flops_per_step": {"total": sum(self.flops.values()), **self.flops},
            "bytes_moved_per_step": {"total": sum(self.moved.values()), **self.moved},
            "memory": {"total": self.memory, **self.held},
            "checkpoint_bytes": self.checkpoint,
            "runs_per_step": self.per_step,
            "steps": self.costs,
            **({"host": {**self.on_host, **self._summed("transfers")}} if self.offloaded else {}),
        }

    def tables(self) -> list[Table]:
        """The report for people."""
        tables = [self._parameters(), self._work(), self._memory(), *([self._host()] if self.offloaded else [])]
        return [*tables, self._arenas(), self._largest()] if self.planned else tables

    def text(self) -> str:
        """The tables as plain text."""
        return "\n".join(map(plain_table, self.tables()))

    def _parameters(self) -> Table:
        total = sum(self.parameters.values())
        rows = [(name, f"{count:,}", f"{count / total:.1%}") for name, count in self.parameters.items()]
        return Table("Parameters", ("module", "count", "share"), [*rows, ("all", f"{total:,}", "")])

    def _work(self) -> Table:
        flops, moved = self.flops, self.moved
        flops["all"], moved["all"] = sum(flops.values()), sum(moved.values())
        rows = [
            (stage, format_count(count), format_bytes(size), f"{count / size:.1f}" if size else "")
            for (stage, count), size in zip(flops.items(), moved.values(), strict=True)
        ]
        again = sum(self._summed("executed_flops").values())
        more = again / flops["all"] - 1 if flops["all"] else 0.0
        notes = (f"Computing again to save memory adds {more:.1%}.",) if more > 0 else ()
        return Table("One optimizer step", ("stage", "FLOP", "bytes moved", "FLOP/byte"), rows, notes)

    def _memory(self) -> Table:
        notes = [f"A checkpoint takes {format_bytes(self.checkpoint)} on disk."]
        if not self.planned:
            notes.append(
                "engine=dynamic plans nothing: a value gets memory as it is made, until backward has passed it."
            )
        return _bytes_table("Memory", {**self.held, **({} if self.planned else {"arena": None})}, *notes)

    def _host(self) -> Table:
        transfers = self._summed("transfers").items()
        moved = ", ".join(f"{format_bytes(size)} {name.replace('_', ' ')}" for name, size in transfers)
        return _bytes_table("Memory of the host", self.on_host, f"Per optimizer step {moved}.")

    def _arenas(self) -> Table:
        costs = self.costs.values()
        rows = [
            ("runs per optimizer step", *(str(self.per_step.get(name, "-")) for name in self.costs)),
            ("kernels launched", *(str(cost["launches"]) for cost in costs)),
            *((f"peak: {group}", *(format_bytes(cost["memory"][group]) for cost in costs)) for group in CLASSES),
            ("peak", *(format_bytes(cost["peak"]) for cost in costs)),
            ("of it where gradients will lie", *(format_bytes(cost["borrowed"]) for cost in costs)),
            ("arena as packed", *(format_bytes(cost["arena"]) for cost in costs)),
            ("kept for backward", *("-" if cost["kept"] is None else format_bytes(cost["kept"]) for cost in costs)),
        ]
        return Table("Arena of each step", ("", *self.costs), rows)

    def _largest(self) -> Table:
        name = max(self.costs, key=lambda step: self.costs[step]["arena"])
        largest = self.costs[name]["largest"]
        rows = [(buffer["label"], buffer["group"], format_bytes(buffer["nbytes"])) for buffer in largest]
        return Table(f"Largest buffers at the peak of {name}", ("buffer", "class", "bytes"), rows)


def _bytes_table(title: str, sizes: Mapping[str, int | None], *notes: str) -> Table:
    """Return a table of bytes by what holds them; None is not known."""
    rows = [
        (_HOLDERS[name], "not planned" if size is None else format_bytes(size))
        for name, size in sizes.items()
        if size or name != "libraries"
    ]
    rows.append(("all", format_bytes(sum(size or 0 for size in sizes.values()))))
    return Table(title, ("kind", "bytes"), rows, notes)


_HOLDERS = {
    "parameter": "parameters", "frozen": "frozen parameters", "gradient": "gradients", "optimizer": "optimizer state",
    "copy": "compute copies", "buffer": "saved buffers", "constant": "derived buffers", "cache": "data on the device",
    "arena": "arena of all steps", "libraries": "libraries, during a launch",
}  # fmt: skip


def plan_report(graph: StepGraph, state: State, steps: Mapping[str, Step]) -> PlanReport:
    """The report on built steps, training steps first."""
    training = graph.train_steps()
    traces: dict[str, Trace] = {**training, **graph.further_steps()}
    costs = {}
    for name, step in steps.items():
        recorded = Graph()
        traces[name](recorded)
        costs[name] = step_cost(recorded, step.plan)
    return PlanReport(
        parameters=parameter_groups(graph.model),
        placed=_by_kind(state, on_host=False),
        offloaded={kind: size for kind, size in _by_kind(state, on_host=True).items() if size},
        checkpoint=sum(state.spec(name).nbytes for name in state.names(*SAVED_KINDS)),
        costs=costs,
        per_step=graph.repeats,
    )


def _by_kind(state: State, on_host: bool) -> dict[str, int]:
    return {kind.value: state.nbytes(kind, on_host) for kind in Kind if kind.is_state and state.names(kind)}


def op_table(step: str, nodes: Sequence[Node]) -> Table:
    """Launched ops of one run of a step: how often, bytes moved and operations, with shares of the whole."""
    costs = op_costs(nodes)
    moved, flops = (sum(cost[key] for cost in costs) for key in ("nbytes", "flops"))
    rows = []
    for cost in costs:
        nbytes, computed = cost["nbytes"], cost["flops"]
        work = format_bytes(nbytes), _share(nbytes, moved), format_count(computed), _share(computed, flops)
        rows.append((cost["op"], str(cost["count"]), *work))
    rows.append(("all", str(len(nodes)), format_bytes(moved), "", format_count(flops), ""))
    return Table(f"Ops of step {step}", ("op", "launches", "bytes moved", "share", "FLOP", "share"), rows)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else ""


def parameter_groups(model: Model) -> dict[str, int]:
    """Number of parameters per group of modules; modules of a list count together, as in `blocks.*.attention`."""
    groups: dict[str, int] = {}
    for path, parameter in model.parameters().items():
        module = re.sub(r"\.\d+(?=\.|$)", ".*", path.rpartition(".")[0])
        name = ".".join(module.split(".")[:3]) or path
        groups[name] = groups.get(name, 0) + parameter.spec.size
    return groups


def padding(state: State, steps: Mapping[str, Step], device: Device) -> tuple[dict[str, Any], Table]:
    """Return bytes with and without padding, of the persistent tensors and of every planned buffer; and as a table."""
    specs = [state.tensor(name).spec for name in state.names() if not state.on_host(name)]
    kept = [(spec.nbytes, device.layout_bytes(device.layout(spec))) for spec in specs]
    plans = {name: step.plan for name, step in steps.items() if step.plan is not None}
    owned = [(f"{name}: {x.spec}", x.spec.nbytes, block.nbytes) for name, plan in plans.items()
             for x, block in plan.owned.items() if not block.on_host]  # fmt: skip
    worst = sorted(((held - needed, what) for what, needed, held in owned if held > needed), reverse=True)[:3]
    values: dict[str, Any] = {"worst": [{"bytes": size, "what": what} for size, what in worst]}
    rows = []
    for key, label, sizes in (("state", "persistent tensors", kept),
                              ("buffer", "buffers of all steps", [pair for _, *pair in owned])):  # fmt: skip
        needed, held = (sum(pair[side] for pair in sizes) for side in (0, 1))
        values |= {f"{key}_bytes": needed, f"{key}_padded_bytes": held}
        rows.append((label, format_bytes(needed), format_bytes(held), f"{1 - needed / held:.1%}" if held else "-"))
    notes = dict.fromkeys(f"{what} wastes {format_bytes(size)}." for size, what in worst)
    return values, Table("Padding to tiles of 32 x 32", ("", "elements", "held", "waste"), rows, tuple(notes))
