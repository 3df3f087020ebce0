"""Add an op, and verify it and its gradient against PyTorch: `python own_op.py`. See docs/extending.md for more."""

import ttrain
from ttrain import ops
from ttrain.graph import Case, Value, cases, composite


@composite
def scale_norm(x: Value, weight: Value, eps: float = 1e-6) -> Value:
    """y = x / sqrt(sum(x^2) + eps) * weight over the last axis of x [..., C]; weight [C] (Nguyen and Salazar, 2019).

    It has no kernel of its own: a device runs its body, and its gradient follows from that.
    """
    return x / ops.sqrt(ops.mean(x * x, -1) * float(x.spec.shape[-1]) + eps) * weight


cases(scale_norm, Case(((4, 8), (8,))), Case(((2, 3, 33), (33,))))

if __name__ == "__main__":
    ttrain.run("task=verify", "verify.ops=[scale_norm]", "verify.model=false", "device=cpu")
