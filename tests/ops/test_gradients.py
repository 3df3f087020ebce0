"""Every gradient rule against torch autograd on the op's reference in fp64."""

from __future__ import annotations

from tests.ops.harness import Interpreter, all_cases, assert_within, draw, every_op, only, record
from ttrain.autodiff import backward
from ttrain.core.spec import DType
from ttrain.device.base import Device
from ttrain.graph import Case, Op
from ttrain.testing.cases import leaves_of, output_choices, reference_gradients, weighted_loss
from ttrain.testing.compare import GRADIENT


@every_op(only(all_cases(*GRADIENT, where=lambda op: True), lambda op, case, dtype: op.differentiable))
def test_gradient_equals_autograd(device: Device, op: Op, case: Case, dtype: DType) -> None:
    """Every case that backward may pass through."""
    for chosen in output_choices(op, case, dtype):
        arrays = draw(op, case, dtype)
        graph, values, outputs = record(op, case, dtype)
        leaves = leaves_of(op, values)
        loss = weighted_loss([outputs[index] for index in chosen], arrays, op.name)
        _, expected = reference_gradients(graph, arrays, loss, leaves)
        found = backward(loss, list(leaves.values()))
        interpreter = Interpreter(device)
        interpreter.run(graph, arrays)
        for name, gradient in zip(leaves, found, strict=True):
            what = f"d{op.name}/d{name} from outputs {chosen}"
            assert_within(interpreter.read(gradient), expected[name], dtype, GRADIENT[dtype], what)
