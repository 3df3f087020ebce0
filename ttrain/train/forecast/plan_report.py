"""The cost of a run before it runs: parameters, operations, bytes moved, planned memory and checkpoint size."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ttrain.core.tables import Table, plain_table
from ttrain.core.units import format_bytes, format_count
from ttrain.engine.base import Step, Trace
from ttrain.engine.state import State
from ttrain.graph import Graph, Kind, Node, Stage
from ttrain.models.base import Model
from ttrain.train.forecast.step_cost import CLASSES, TRANSFERS, StepCost, op_costs, step_cost
from ttrain.train.protocols import SAVED_KINDS
from ttrain.train.steps.step_graph import StepGraph

STAGES = tuple(stage.value for stage in Stage)


@dataclass(frozen=True)
class PlanReport:
    """Sizes are bytes, operations are floating-point operations; a multiply-add counts two.

    `per_step` tells how often each built step runs in one optimizer step; steps of evaluation and sampling are absent
    from it. `placed` are the persistent bytes by kind; one arena serves all steps, since only one runs at a time.
    """

    parameters: dict[str, int]  # by group of modules
    placed: dict[str, int]
    checkpoint: int  # tensors of one checkpoint on disk
    costs: dict[str, StepCost]
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
    def arena(self) -> int:
        return self._most("arena")

    @property
    def outside(self) -> int:
        """The most that libraries allocate by themselves during a launch."""
        return self._most("outside")

    @property
    def memory(self) -> int:
        """All planned bytes, and what libraries take beside them."""
        return sum(self.placed.values()) + self.arena + self.outside

    @property
    def host_arena(self) -> int:
        return self._most("host_arena")

    @property
    def transfers(self) -> dict[str, int]:
        """Bytes of one optimizer step between host and device, by direction."""
        return {
            name: sum(times * self.costs[step].transfers[name] for step, times in self.per_step.items())
            for name in TRANSFERS
        }

    def _most(self, what: str) -> int:
        return max((getattr(cost, what) for cost in self.costs.values()), default=0)

    @property
    def planned(self) -> bool:
        return any(cost.planned for cost in self.costs.values())

    def _summed(self, what: str) -> dict[str, int]:
        parts = [(times, getattr(self.costs[name], what)) for name, times in self.per_step.items()]
        return {stage: sum(times * part[stage] for times, part in parts) for stage in STAGES}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "parameters": {"total": sum(self.parameters.values()), "groups": self.parameters},
            "flops_per_step": {"total": sum(self.flops.values()), **self.flops},
            "bytes_moved_per_step": {"total": sum(self.moved.values()), **self.moved},
            "memory": {"total": self.memory, **self.placed, "arena": self.arena, "libraries": self.outside},
            "checkpoint_bytes": self.checkpoint,
            "runs_per_step": self.per_step,
            "steps": {name: cost.to_dict() for name, cost in self.costs.items()},
            **({"host": {**self.offloaded, "arena": self.host_arena, **self.transfers}} if self.offloaded else {}),
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
        work = {stage: (self.flops[stage], self.moved[stage]) for stage in STAGES}
        flops = sum(self.flops.values())
        work["all"] = flops, sum(self.moved.values())
        rows = [
            (stage, format_count(count), format_bytes(size), f"{count / size:.1f}" if size else "")
            for stage, (count, size) in work.items()
        ]
        again = sum(times * sum(self.costs[name].executed_flops.values()) for name, times in self.per_step.items())
        notes = (f"Computing again to save memory adds {again / flops - 1:.1%}.",) if again > flops > 0 else ()
        return Table("One optimizer step", ("stage", "FLOP", "bytes moved", "FLOP/byte"), rows, notes)

    def _memory(self) -> Table:
        rows = [(_PLURAL[kind], format_bytes(size)) for kind, size in self.placed.items()]
        arena = format_bytes(self.arena) if self.planned else "not planned"
        rows.append(("arena of all steps", arena))
        if self.outside:
            rows.append(("libraries, during a launch", format_bytes(self.outside)))
        rows.append(("all", format_bytes(self.memory)))
        notes = [f"A checkpoint takes {format_bytes(self.checkpoint)} on disk."]
        if not self.planned:
            notes.append(
                "engine=dynamic plans nothing: a value gets memory as it is made, until backward has passed it."
            )
        return Table("Memory", ("kind", "bytes"), rows, tuple(notes))

    def _host(self) -> Table:
        rows = [(_PLURAL[kind], format_bytes(size)) for kind, size in self.offloaded.items()]
        rows.append(("arena of all steps", format_bytes(self.host_arena)))
        rows.append(("all", format_bytes(self.host_arena + sum(self.offloaded.values()))))
        moved = ", ".join(f"{format_bytes(size)} {name.replace('_', ' ')}" for name, size in self.transfers.items())
        return Table("Memory of the host", ("kind", "bytes"), rows, (f"Per optimizer step {moved}.",))

    def _arenas(self) -> Table:
        costs = self.costs.values()
        rows = [
            ("runs per optimizer step", *(str(self.per_step.get(name, "-")) for name in self.costs)),
            ("kernels launched", *(str(cost.launches) for cost in costs)),
            *((f"peak: {group}", *(format_bytes(cost.memory[group]) for cost in costs)) for group in CLASSES),
            ("peak", *(format_bytes(cost.peak) for cost in costs)),
            ("of it where gradients will lie", *(format_bytes(cost.borrowed) for cost in costs)),
            ("arena as packed", *(format_bytes(cost.arena) for cost in costs)),
            ("kept for backward", *("-" if cost.kept is None else format_bytes(cost.kept) for cost in costs)),
        ]
        return Table("Arena of each step", ("", *self.costs), rows)

    def _largest(self) -> Table:
        name = max(self.costs, key=lambda step: self.costs[step].arena)
        rows = [(buffer.label, buffer.group, format_bytes(buffer.nbytes)) for buffer in self.costs[name].largest]
        return Table(f"Largest buffers at the peak of {name}", ("buffer", "class", "bytes"), rows)


_PLURAL = {
    "parameter": "parameters", "frozen": "frozen parameters", "gradient": "gradients", "optimizer": "optimizer state",
    "copy": "compute copies", "buffer": "saved buffers", "constant": "derived buffers", "cache": "data on the device",
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
    moved, flops = sum(cost.nbytes for cost in costs), sum(cost.flops for cost in costs)
    rows = [
        (cost.op, str(cost.count), format_bytes(cost.nbytes), _share(cost.nbytes, moved), format_count(cost.flops),
         _share(cost.flops, flops))
        for cost in costs
    ]  # fmt: skip
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
