"""Graphs and plans as text, one line a node with stage, place in the model, shapes and attributes; and as a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from ttrain.core.errors import UserError, raised_as
from ttrain.device.base import Kernel, of_side
from ttrain.engine.base import Engine
from ttrain.graph import Graph, Node, Stage, Value
from ttrain.plan.lifetime import BEFORE
from ttrain.plan.plan import Plan
from ttrain.train.forecast.step_cost import CLASSES, PlannedBuffer

COLOURS = {"inputs": "#9aa5b1", "activations": "#3b7dd8", "gradients": "#d9822b", "update": "#5aa469",
           "workspace": "#b5567a"}  # fmt: skip


def show(graph: Graph, stages: Iterable[Stage] = tuple(Stage)) -> str:
    """Every node of the given stages."""
    wanted = set(stages)
    nodes = [node for node in graph.nodes if node.stage in wanted]
    width = _scope_width(nodes)
    lines = [f"input  {value!r}" for value in graph.inputs.values()]
    lines += [f"{value.kind.value:9} {value!r}" for value in graph.state.values()]
    lines += [show_node(node, width) for node in nodes]
    lines += [f"output {name} = {value.label}" for name, value in graph.outputs.items()]
    return "\n".join(lines)


def _scope_width(nodes: Iterable[Node]) -> int:
    """Characters of the longest scope."""
    return max((len(node.scope) for node in nodes), default=0)


def show_node(node: Node, width: int = 0) -> str:
    """One node on one line, its scope padded to `width`."""
    again = f"  (copy {node.copy})" if node.copy else ""
    return f"{node.stage.value:8} {node.scope:{width}}  {node.text(lambda value: value.label)}{again}"


def show_plan(plan: Plan, kernels: Mapping[str, Kernel] | None = None) -> str:
    """The op list with buffers: one line a node, then one line a buffer.

    A value is shown where it lies: `@<offset>+<bytes>` in the arena, `=<name>` in state. A node without a number is not
    launched: a view, or a copy that the kernel before it made unnecessary. Where there are several ways to run a node,
    a row of the device's `kernels` tells which one it takes.
    """
    lines, launch, width = [f"arena: {plan.arena_bytes} bytes"], 0, _scope_width(plan.graph.nodes)
    lines.append(f" node launch stage    {'scope':{width}}  outputs = op(inputs)")
    for time, node in enumerate(plan.graph.nodes):
        elided = node in plan.placement.elided
        number = "-" if elided else str(launch)
        launch += not elided
        work = "".join(f" workspace @{block.offset}+{block.nbytes}" for block in plan.scratch.get(node, []))
        text = node.text(partial(_place, plan), lambda value: f"{_place(plan, value)}:{value.spec}")
        place = f"{time:5} {number:>6} {node.stage.value:8} {node.scope:{width}}"
        way = None if elided or kernels is None else of_side(kernels, node.on_host)[node.op.name].way
        lines.append(f"{place}  {text}{work}" + (f" by {way(*node.specs, node.attributes)}" if way else ""))
    lines.append("")
    lines.append(f"{'offset':>12} {'bytes':>12} {'live':>11}  what")
    for buffer in sorted(map(PlannedBuffer.of, plan.blocks), key=lambda b: (b.offset, b.start)):
        live = "..".join("in" if time == BEFORE else str(time) for time in dict.fromkeys((buffer.start, buffer.end)))
        lines.append(f"{buffer.offset:12} {buffer.nbytes:12} {live:>11}  {buffer.group}: {buffer.label}")
    return "\n".join(lines)


def product_ways(engine: Engine) -> dict[str, str]:
    """The way that each product and attention of an engine's steps goes, where its device has several; see Kernel."""
    found = {}
    for node in (node for plan in engine.plans for node in plan.launched):
        if (way := of_side(engine.kernels, node.on_host)[node.op.name].way) is not None:
            specs = ", ".join(str(value.spec) for value in node.values)
            settings = (f"{name}={value}" for name, value in sorted(node.attributes.items()))
            found[" ".join([f"{node.op.name}({specs})", *settings])] = way(*node.specs, node.attributes)
    return found


def show_ways(ways: Mapping[str, str]) -> str:
    """Return lines on products and attention by their way, as `product_ways` found it; equal ones count once."""
    attention = {way for name, way in ways.items() if name.startswith("attention")}
    counts = sorted(Counter(way for name, way in ways.items() if not name.startswith("attention")).items())
    products = ", ".join(f"{count} {way}" for way, count in counts)
    told = [f"Matrix products by device.matmul, equal ones counted once: {products}."] if counts else []
    return "\n".join(told + [f"Attention by {way}." for way in sorted(attention)])


def _place(plan: Plan, value: Value) -> str:
    owner = plan.placement.owner_of(value)
    if owner.kind.is_state:
        return f"={owner.name}"
    block = plan.owned[owner]
    return f"@{block.offset}+{block.nbytes}"


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
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.2 * len(plans)), layout="constrained")
    panels = figure.subplots(len(plans), squeeze=False)[:, 0]
    for axes, (name, plan) in zip(panels, plans.items(), strict=True):
        series = memory_over_time(plan)
        launches = np.arange(len(next(iter(series.values()))))
        stacked = [values / 2**20 for values in series.values()]
        axes.stackplot(launches, stacked, labels=list(series), colors=[COLOURS[group] for group in series], step="post")
        packed = {"linewidth": 0.8, "linestyle": "--", "label": "arena as packed, beside what gradients lend"}
        axes.axhline(plan.arena_bytes / 2**20, color="black", **packed)
        axes.set(title=f"step {name}", xlabel="node, in the order of launching", ylabel="MiB")
        axes.margins(x=0)
        axes.legend(loc="upper right", fontsize="small", ncols=3)
    state = ", ".join(f"{kind} {size / 2**20:.1f} MiB" for kind, size in placed.items())
    figure.suptitle(f"Planned memory of the arena (beside it lie: {state})", fontsize="medium")
    told = f"plan.picture={path}: can't be written"
    with raised_as(UserError, told, "Give another file, such as plan.png.", (OSError, ValueError)):
        figure.savefig(path, dpi=120)
