"""Prove that a plan computes its graph: no buffer is overwritten before its last reader."""

from __future__ import annotations

from collections.abc import Mapping

from ttrain.core.errors import PlanError
from ttrain.device.base import Delivery, Kernel, of_side
from ttrain.graph.verify import follow
from ttrain.plan.arena import check_overlap
from ttrain.plan.lifetime import overwritable, read_values
from ttrain.plan.plan import Plan


def check(plan: Plan, kernels: Mapping[str, Kernel]) -> None:
    """Raise PlanError naming the first place where the plan is wrong.

    Proofs that do not use how the plan was made: buffers that are live together share no byte, and are used within
    their lifetimes; following the contents of every buffer through the step, each launch finds the values that it
    reads; and every kernel can deliver as the plan expects.
    """
    check_overlap([*plan.blocks, *plan.aliased.values()])
    check_overlap(plan.host_blocks)
    graph, placement = plan.graph, plan.placement
    kept = [value for value in graph.state.values() if value.name not in plan.aliased]  # what state lends is lost
    follow(graph, placement.owner_of, (*graph.inputs.values(), *kept), PlanError, read_values, placement.elided)
    check_lifetimes(plan)
    check_delivery(plan, kernels)


def check_lifetimes(plan: Plan) -> None:
    """Raise PlanError where a buffer is used before or after its lifetime, or is too small."""
    nodes, elided = plan.graph.nodes, plan.placement.elided
    uses = {time: (*read_values(node), *node.outputs) for time, node in enumerate(nodes) if node not in elided}
    for time, values in {**uses, len(nodes): tuple(plan.graph.outputs.values())}.items():
        for value in values:
            owner = plan.placement.owner_of(value)
            block = plan.aliased.get(owner.name) if owner.kind.is_state else plan.owned[owner]  # None: it lends nothing
            if block is not None and not block.start <= time <= block.end:
                raise PlanError(f"{value!r} is used at launch {time}, outside the lifetime of its buffer.")
            if owner.spec.nbytes < value.spec.nbytes:
                raise PlanError(f"{value!r} does not fit the buffer of {owner!r}.")


def check_delivery(plan: Plan, kernels: Mapping[str, Kernel]) -> None:
    """Raise PlanError where a kernel could not deliver as the plan expects."""
    owner_of = plan.placement.owner_of
    for node in plan.launched:
        kernel = of_side(kernels, node.on_host)[node.op.name]
        aliases = node.op.aliases(node)
        if kernel.delivery is Delivery.INPLACE and len(aliases) != len(node.outputs):
            raise PlanError(f"{node.op.name} delivers in place, but {node!r} has outputs of its own.")
        inputs = {owner_of(value): value for value in node.values}
        for index, output in enumerate(node.outputs):
            if index in aliases or owner_of(output) not in inputs:
                continue
            if index or inputs[owner_of(output)] not in overwritable(node, kernel):
                raise PlanError(f"{node!r} would write over its own input {inputs[owner_of(output)]!r}.")
