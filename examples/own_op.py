"""Add an op, and verify it and its gradient against PyTorch: `python own_op.py`. See docs/extending.md for more."""

from typing import Any

import ttrain
from ttrain import ops
from ttrain.core.spec import TensorSpec
from ttrain.graph import Case, Node, Op, Value, declare
from ttrain.graph.op import op


@declare
class Square(Op):
    """y = x^2. It has no kernel of its own: a device runs its decomposition."""

    name = "square"
    family = "elementwise"
    inputs = ("x",)
    saves = ("x",)  # what the gradient reads

    def infer(self, x: TensorSpec) -> TensorSpec:
        return x

    def vjp(self, node: Node, *gradients: Value | None) -> list[Value]:
        """dx = dy * 2x."""
        return [ops.multiply(gradients[0], ops.scale(node.input("x"), 2.0))]

    def decompose(self, node: Node, inputs: tuple[Value | None, ...]) -> list[Value]:
        return [ops.multiply(inputs[0], inputs[0])]

    def reference(self, x: Any) -> Any:
        """In plain torch."""
        return x**2

    def cases(self) -> list[Case]:
        return [Case(((4, 8),)), Case(((1, 1, 33),))]


def square(x: Value) -> Value:
    """Record the op into the graph of x."""
    return op("square").record(x)


if __name__ == "__main__":
    ttrain.run("task=verify", "verify.ops=[square]", "verify.model=false", "device=cpu")
