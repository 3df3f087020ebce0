"""Two ways to run a graph on real numbers without a device: value by value, and by a plan's byte offsets.

Both take each op's arithmetic from its reference. The second follows the plan to the byte on a range of memory that
starts as garbage, and is as unkind as a kernel may be: it scribbles over its outputs and its workspace before it reads
an input, except where it works element by element.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from ttrain.core.spec import TensorSpec
from ttrain.device.base import Delivery, Kernel
from ttrain.device.torch.kernels.common import TORCH_DTYPES
from ttrain.graph import Graph, Node, Value
from ttrain.plan import Plan
from ttrain.plan.arena import GradientReuse

Tensor = torch.Tensor
Tensors = Mapping[str, Tensor]
GARBAGE = 0x7B  # as fp32 about 1.3e36: no sum hides it


def random_tensors(specs: Mapping[str, TensorSpec], seed: int, bound: int = 2) -> dict[str, Tensor]:
    """Normal floats; integers from 0 to below `bound`."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(spec.shape, generator=generator).to(TORCH_DTYPES[spec.dtype])
        if spec.dtype.is_floating
        else torch.randint(0, bound, spec.shape, generator=generator)
        for name, spec in specs.items()
    }


def specs(table: Mapping[str, Value]) -> dict[str, TensorSpec]:
    return {name: value.spec for name, value in table.items()}


def reference(node: Node, inputs: list[Tensor | None], exact: bool = False) -> list[Tensor]:
    """The node's outputs, computed in fp64, in their dtypes or left `exact`, and in memory of their own."""
    attributes: Any = node.attributes
    wide = [x.double() if x is not None and x.is_floating_point() else x for x in inputs]
    results = node.op.reference(*wide, **attributes)
    results = [results] if isinstance(results, torch.Tensor) else list(results)
    pairs = zip(results, node.outputs, strict=True)
    return [
        result.detach().to(result.dtype if exact else TORCH_DTYPES[out.spec.dtype]).reshape(out.shape).clone()
        for result, out in pairs
    ]


def run_plainly(
    graph: Graph, inputs: Tensors, state: Tensors, exact: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(outputs, new state) where every value has memory of its own."""
    values: dict[Value, Tensor] = {value: inputs[name].clone() for name, value in graph.inputs.items()}
    values.update({value: state[name].clone() for name, value in graph.state.items()})
    newest = dict(graph.state)
    for node in graph.nodes:
        results = reference(node, [None if value is None else values[value] for value in node.inputs], exact)
        values.update(zip(node.outputs, results, strict=True))
        for index, source in node.op.aliases(node).items():
            for name, value in newest.items():
                if value is node.inputs[source] and not node.op.view:
                    newest[name] = node.outputs[index]
    return (
        {name: values[value] for name, value in graph.outputs.items()},
        {name: values[value] for name, value in newest.items()},
    )


def run_planned(
    plan: Plan, kernels: Mapping[str, Kernel], inputs: Tensors, state: Tensors, reuse: GradientReuse | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(outputs, new state) on one range of bytes, as the plan lays it out; what state lends lies before it."""
    memory = _Memory(plan, state, reuse or GradientReuse(0, {}))
    for name, value in plan.graph.inputs.items():
        memory.buffer(value).copy_(inputs[name])
    for node in plan.launched:
        kernel = kernels[node.op.name]
        ins = [None if value is None else memory.buffer(value) for value in node.inputs]
        outs = [memory.buffer(output) for output in node.outputs]
        work = memory.workspace(node, kernel)
        if node.op.elementwise and kernel.delivery is Delivery.OUT:
            _element_by_element(node, ins, outs[0])
            continue
        if kernel.delivery is Delivery.RETURNS or kernel.overwrites or node.op.aliases(node):
            results = reference(node, ins)
        else:
            _scribble([*outs, *work])
            results = reference(node, ins)
        _scribble(work)
        for out, result in zip(outs, results, strict=True):
            out.copy_(result)
    return (
        {name: memory.buffer(value).clone() for name, value in plan.graph.outputs.items()},
        {name: memory.state[name].clone() for name in plan.graph.state},
    )


class _Memory:
    """The bytes of a step: one arena, and the state beside it."""

    def __init__(self, plan: Plan, state: Tensors, reuse: GradientReuse) -> None:
        self.plan, self.aliased = plan, reuse.nbytes
        self.arena = torch.full((reuse.nbytes + plan.arena_bytes,), GARBAGE, dtype=torch.uint8)
        self.state = {name: state[name].clone() for name in plan.graph.state}
        for name, (first, _) in reuse.tensors.items():
            place = self._place(first - reuse.nbytes, plan.graph.state[name].spec)
            self.state[name] = place.copy_(state[name])

    def buffer(self, value: Value) -> Tensor:
        """A view, not a copy."""
        owner = self.plan.placement.owner_of(value)
        if owner.kind.is_state:
            return self.state[owner.name].view(value.shape)
        return self._place(self.plan.owned[owner].offset, value.spec)

    def workspace(self, node: Node, kernel: Kernel) -> list[Tensor]:
        wanted = kernel.workspace(*node.specs, node.attributes)
        blocks = self.plan.scratch[node]
        return [self._place(block.offset, spec) for block, spec in zip(blocks, wanted, strict=True)]

    def _place(self, offset: int, spec: TensorSpec) -> Tensor:
        start = self.aliased + offset
        return self.arena[start : start + spec.nbytes].view(TORCH_DTYPES[spec.dtype]).view(spec.shape)


def _scribble(buffers: list[Tensor]) -> None:
    for buffer in buffers:
        buffer.view(-1).view(torch.uint8).fill_(GARBAGE)


def _element_by_element(node: Node, ins: list[Tensor | None], out: Tensor) -> None:
    """Each element is written before the next one's inputs are read."""
    spread = [None if x is None else x.expand(out.shape) for x in ins]
    attributes: Any = node.attributes
    for place in itertools.product(*map(range, out.shape)):
        out[place] = node.op.reference(*[None if x is None else x[place].double() for x in spread], **attributes)
