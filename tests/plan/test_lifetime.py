"""Values that share a buffer: each case in which they may, and each in which they must not."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.engine.recording_device import RecordingDevice
from tests.graph.tools import PAIR, recorded
from ttrain import ops
from ttrain.core.spec import DType, TensorSpec
from ttrain.device.base import Delivery, Kernel
from ttrain.graph import Graph, Kind, Value
from ttrain.graph.verify import verify
from ttrain.plan import Plan, build_plan
from ttrain.train.forecast.step_cost import state_bytes

KNOWN = {
    "x": PAIR, "s": (Kind.GRADIENT, PAIR), "narrow": (Kind.GRADIENT, PAIR.with_dtype(DType.BF16)),
    "t": (Kind.OPTIMIZER, PAIR), "p": (2, 3), "seed": TensorSpec((), DType.INT64),
}  # fmt: skip


def planned(graph: Graph, fresh: tuple[str, ...] = ()) -> Plan:
    device = RecordingDevice()
    device.deliveries.update(dict.fromkeys(fresh, Delivery.RETURNS))
    return build_plan(verify(graph, "recording"), device.kernels)


def made(x: Value) -> Value:
    """A value of x's spec that is not elementwise in x."""
    return ops.transpose(ops.reshape(x, x.shape[::-1]))


# What is recorded, by name: what is launched: which values share a buffer (=) or do not (|). A value is named by its
# op, the last of that name, or as a step input or state. Kernels of what is fresh return results of their own.
# Delivery into state: the kernel that makes the value writes it there, and the copy is dropped.
DELIVERED: dict[str, Any] = {
    "a result: relu tanh: relu=s assign=s": lambda x, s: (y := ops.relu(x), new := ops.assign(s, y), [ops.tanh(new)]),
    "a view: transpose: ": lambda x, s: (ops.assign(s, made(x)),),
    "fresh results, which the engine copies: relu: ": lambda x, s: (ops.assign(s, ops.relu(x)),),
    "to readers too: relu tanh: relu=s": lambda x, s: (y := ops.relu(x), ops.assign(s, y), [ops.tanh(y)]),
    "not to state in use: relu tanh assign: relu|s": lambda x, s: (y := ops.relu(x), [ops.tanh(s)], ops.assign(s, y)),
    "not by a reader of the state: matmul matmul assign: ": lambda x, s: (
        ops.assign(s, ops.matmul(ops.matmul(x, s, transpose_b=True), s)),
    ),
    "not what is read after the next change: relu assign accumulate tanh: relu|s": lambda x, s: (
        y := ops.relu(x),
        ops.accumulate(ops.assign(s, y), x),
        [ops.tanh(y)],
    ),
    "what is read up to the next change: relu tanh accumulate: relu=s": lambda x, s: (
        y := ops.relu(x),
        new := ops.assign(s, y),
        [ops.tanh(y)],
        ops.accumulate(new, x),
    ),
    "no second value while the first is read: relu gelu tanh assign: relu=s gelu|s": lambda x, s: (
        y := ops.relu(x),
        new := ops.assign(s, y),
        z := ops.gelu(x),
        [ops.tanh(y)],
        ops.assign(new, z),
    ),
    "to the first of two: relu assign: relu=s": lambda x, s, t: (y := ops.relu(x), ops.assign(s, y), ops.assign(t, y)),
    "no output: relu assign: ": lambda x, s: (y := ops.relu(x), [y], ops.assign(s, y)),
    "no step input: assign: ": lambda x, s: (ops.assign(s, x),),
    "no other state: assign: ": lambda p, s: (ops.assign(s, p),),
    "no other dtype: relu assign: ": lambda x, narrow: (ops.assign(narrow, ops.relu(x)),),
}
# In-place reuse: an elementwise result takes the buffer of an input that dies.
IN_PLACE: dict[str, Any] = {
    "one read later: transpose relu add: relu|transpose": lambda x: ops.relu(y := made(x)) + y,
    "an output: transpose relu: relu|transpose": lambda x: [y := made(x), ops.relu(y)],
    "a step input: relu: relu|x": lambda x: ops.relu(x),
    "state: relu: relu|s": lambda s: ops.relu(s),
    "a broadcast operand: reduce_sum add: add|reduce_sum": lambda x: x + ops.reduce_sum(x, (0,)),
    "another dtype: cast transpose add: add|transpose": lambda x: x + made(ops.cast(x, DType.BF16)),
    "the same value twice: transpose multiply: multiply=transpose": lambda x: (y := made(x)) * y,
    "one that lives on in a view: transpose relu tanh: reshape=transpose relu|transpose": lambda x: (
        view := ops.reshape(y := made(x), (6,)),
        [ops.relu(y), ops.tanh(view)],
    ),
    "a dying view: transpose relu: relu=reshape": lambda x: ops.relu(ops.reshape(made(x), (6,))),
    "to state: transpose relu: relu=s relu=transpose": lambda x, s: (ops.assign(s, ops.relu(made(x))),),
    "from state: transpose relu tanh accumulate: transpose=s assign=s relu|transpose": lambda x, s, t: (
        y := made(x),
        ops.assign(s, y),
        ops.accumulate(t, ops.tanh(ops.relu(y))),
    ),
    "fresh results: transpose relu: relu|transpose": lambda x: ops.relu(made(x)),
    "not elementwise: transpose dropout: dropout|transpose": lambda x, seed: ops.dropout(made(x), seed, 0.5, 0),
}


@pytest.mark.parametrize("row", [*DELIVERED, *IN_PLACE])
def test_which_values_share_a_buffer(row: str) -> None:
    graph, (_, launched, pairs) = recorded((DELIVERED | IN_PLACE)[row], KNOWN), row.split(": ")
    plan = planned(graph, fresh=("relu",) if "fresh" in row else ())
    assert [node.op.name for node in plan.launched] == launched.split()
    values = {node.op.name: node.outputs[0] for node in graph.nodes} | graph.inputs | graph.state
    for one, sign, other in (re.split("([=|])", pair) for pair in pairs.split()):
        shared = plan.placement.owner_of(values[one]) is plan.placement.owner_of(values[other])
        assert shared is (sign == "="), (one, other)


def test_a_chain_of_elementwise_ops_takes_one_buffer() -> None:
    graph = Graph()
    x = graph.input("x", PAIR)
    y = ops.matmul(x, ops.transpose(x))
    for _ in range(5):
        y = ops.scale(ops.tanh(y), 2.0)
    graph.output("y", y)
    assert len(planned(graph).placement.lifetimes) == 3  # x, its transpose, and one for the chain


def test_how_long_step_inputs_and_outputs_live() -> None:
    graph = Graph()
    x = graph.input("x", PAIR)
    y = made(x)
    graph.output("y", ops.reshape(y, (6,)))
    graph.output("z", made(y))
    unused = graph.input("unused", PAIR)
    lifetimes = planned(graph).placement.lifetimes
    assert lifetimes[x] == (-1, 1) and lifetimes[unused] == (-1, -1)  # from the upload to the last reader
    assert lifetimes[y][1] == len(graph.nodes)


def test_workspace_lives_for_its_launch_beside_inputs_and_outputs() -> None:
    graph = recorded(made, KNOWN)

    def kernel(name: str) -> Kernel:
        return Kernel(lambda *_: lambda: None, workspace=lambda i, o, a: [TensorSpec((100,)), TensorSpec((3,))])

    plan = build_plan(graph, {"transpose": kernel("transpose")})
    (scratch,) = plan.scratch.values()
    taken = {block.offset // 64 for block in (*scratch, *plan.owned.values())}
    assert len(scratch) == 2 and len(taken) == 4  # no two at one place
    assert plan.arena_bytes >= 400 + 12 + 2 * PAIR.nbytes


def test_a_plan_counts_bytes_by_kind() -> None:
    found = state_bytes(planned(recorded(lambda x, s, p: ops.accumulate(s, x) * p, KNOWN)))
    assert {kind: nbytes for kind, nbytes in found.items() if nbytes} == {"parameter": 24, "gradient": 24}
    assert found.keys() == {kind.value for kind in Kind if kind.is_state}
