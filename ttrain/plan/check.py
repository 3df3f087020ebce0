"""Proof that a plan computes what its graph says: no buffer is overwritten while somebody still reads it."""

from __future__ import annotations

from collections.abc import Mapping

from ttrain.core.errors import PlanError
from ttrain.device.base import Delivery, Kernel, of_side
from ttrain.graph.graph import Node, Value
from ttrain.plan.arena import check_overlap
from ttrain.plan.lifetime import overwritable, read_values
from ttrain.plan.plan import Plan


def check(plan: Plan, kernels: Mapping[str, Kernel]) -> None:
    """Raise PlanError naming the first place where the plan is wrong.

    Three proofs that do not use how the plan was made: buffers that are live together share no byte; following the
    contents of every buffer through the step, each launch finds the values that it reads, within their lifetimes; and
    every kernel can deliver as the plan expects.
    """
    check_overlap([*plan.blocks, *plan.lent.values()])
    check_overlap(plan.host_blocks)
    check_contents(plan)
    check_delivery(plan, kernels)


def check_contents(plan: Plan) -> None:
    """Follow what every buffer holds, launch by launch."""
    contents = _Contents(plan)
    newest = {value: value for value in plan.graph.state.values()}
    for time, node in enumerate(plan.graph.nodes):
        if node.op.view:
            contents.same(node.outputs[0], node.values[0])
        elif node in plan.placement.elided:
            contents.expect(node.input("value"), node.input("state"), time, node)
            contents.same(node.outputs[0], node.input("value"))
        else:
            for value in read_values(node):
                contents.expect(value, value, time, node)
            for output in node.outputs:
                contents.write(output, time, node)
        changed = [] if node.op.view else [node.outputs[index] for index in node.op.aliases(node)]
        newest.update((contents.owner(output), output) for output in changed)
    for state, value in newest.items():
        contents.expect(value, state, len(plan.graph.nodes), f"the next step's {state.name}")
    for name, value in plan.graph.outputs.items():
        contents.expect(value, value, len(plan.graph.nodes), f"output {name}")


class _Contents:
    """Which value each buffer holds at the moment."""

    def __init__(self, plan: Plan) -> None:
        self.placement, self.lent = plan.placement, plan.lent
        entering = (*plan.graph.inputs.values(), *plan.graph.state.values())
        self.meant: dict[Value, Value] = {value: value for value in entering}  # a view means the value it shows
        # By buffer. What state holds that is lent is lost.
        self.held = {value: value for value in entering if not (value.kind.is_state and value.name in self.lent)}

    def owner(self, value: Value) -> Value:
        return self.placement.owner_of(value)

    def same(self, value: Value, source: Value) -> None:
        self.meant[value] = self.meant[source]

    def write(self, output: Value, time: int, node: Node) -> None:
        owner = self._live(output, time, node)
        if owner.spec.nbytes < output.spec.nbytes:
            raise PlanError(f"{node!r}: {output!r} does not fit the buffer of {owner!r}.")
        self.meant[output] = self.held[owner] = output

    def expect(self, value: Value, where: Value, time: int, reader: Node | str) -> None:
        """`where` is the value whose buffer must hold `value`."""
        owner = self._live(where, time, reader)
        held = self.held.get(owner)
        if held is not self.meant[value]:
            raise PlanError(f"{reader} reads {value!r}, but its buffer holds {held!r} by then.")

    def _live(self, value: Value, time: int, reader: Node | str) -> Value:
        owner = self.owner(value)
        lifetime = self.lent.get(owner.name) if owner.kind.is_state else self.placement.lifetimes[owner]
        if lifetime is not None and not lifetime.start <= time <= lifetime.end:
            raise PlanError(f"{reader} uses {value!r} outside the lifetime of its buffer.")
        return owner


def check_delivery(plan: Plan, kernels: Mapping[str, Kernel]) -> None:
    """Raise PlanError where a kernel could not deliver as the plan expects."""
    owner_of = plan.placement.owner_of
    for node in plan.launched:
        kernel = of_side(kernels, node.on_host)[node.op.name]
        delivery = kernel.delivery
        aliases = node.op.aliases(node)
        if delivery is Delivery.INPLACE and len(aliases) != len(node.outputs):
            raise PlanError(f"{node.op.name} delivers in place, but {node!r} has outputs of its own.")
        inputs = {owner_of(value): value for value in node.values}
        for index, output in enumerate(node.outputs):
            if index in aliases or owner_of(output) not in inputs:
                continue
            if index or inputs[owner_of(output)] not in overwritable(node, kernel):
                raise PlanError(f"{node!r} would write over its own input {inputs[owner_of(output)]!r}.")
