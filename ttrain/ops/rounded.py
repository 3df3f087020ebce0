"""Optimizers on state of which some is kept in bf16: computed in fp32, then rounded, stochastically where asked.

A bf16 number has 8 significant bits. Rounded to the nearest, a change smaller than 2^-9 of a number is lost every time:
a second moment with beta2 = 0.999 shrinks by at most 2^-10 of itself in a step, so it would never decay again, and
weights of 0.1 would not feel a learning rate of 1e-4. Stochastic rounding goes up with the probability of the part that
is cut off: its mean is the exact number, and small changes add up as they should (Gupta et al., "Deep Learning with
Limited Numerical Precision", 2015).

The random bits are a hash of (seed, stream, element), as a dropout mask's are (core/mask.py): 16 of them are added to
the 16 that a bf16 number has no room for. So they are the same on every engine and after a resume, a replay draws new
ones with every seed, and nothing is stored. An element's number counts the tensors of a list side by side, as
core.spec.run_offsets lays them; a slot's stream is the node's `stream` plus the slot's number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ttrain.core.spec import DType, TensorSpec
from ttrain.graph.graph import Node, Value
from ttrain.graph.op import Case, declare
from ttrain.ops.update import AdamWUpdate, OptimizerUpdate, SGDUpdate


class Rounded(OptimizerUpdate):
    """Written slots may have different dtypes. Those named in `stochastic` are rounded so where they are bf16.

    `seed` int64 [] is absent where no slot is named. The reference does not round: a result is one of the two bf16
    numbers beside it.
    """

    def infer(self, *specs: TensorSpec, count: int, **attributes: Any) -> Sequence[TensorSpec]:
        outputs, stochastic = super().infer(*specs, count=count, **attributes), attributes["stochastic"]
        written = set(self.slots) - {"gradients", "copies"}
        self.require(set(stochastic) <= written, f"stochastic={stochastic}", f"some of {sorted(written)}")
        seed = specs[-1]
        expected = TensorSpec((), DType.INT64) if stochastic else None
        self.require(seed == expected, f"seed {seed} for stochastic={stochastic}", "int64[] where a slot is named")
        return outputs

    def flops(self, node: Node) -> int:
        hashed = 12 * len(node.attributes["stochastic"])
        return super().flops(node) + hashed * sum(value.spec.size for value in node.values[: node.attributes["count"]])

    def reference(self, *tensors: Any, **attributes: Any) -> Any:
        settings = {key: value for key, value in attributes.items() if key not in ("stochastic", "stream")}
        return super().reference(*tensors, **settings)

    def decompose(self, node: Node, inputs: tuple[Value | None, ...]) -> Sequence[Value] | None:  # type: ignore[override]
        return None

    def cases(self) -> Sequence[Case]:
        """Those of the plain op; all that is written is rounded stochastically, or nothing."""
        written = tuple(name for name in self.slots if name not in ("gradients", "copies"))
        found = []
        for number, case in enumerate(super().cases()):
            rounding = {"stochastic": written if number % 2 == 0 else (), "stream": 8 * number}
            shapes = (*case.shapes, () if rounding["stochastic"] else None)
            found.append(Case(shapes, {**case.attributes, **rounding}, {"seed": 2**62}, case.positive))
        return found


@declare
class AdamWRounded(Rounded, AdamWUpdate):
    """adamw_update on state that is rounded."""

    name = "adamw_rounded"
    inputs = (*AdamWUpdate.inputs, "seed?")
    wide = ("lr", "step", "factor")
    scalars = (*AdamWUpdate.scalars, "seed")


@declare
class SGDRounded(Rounded, SGDUpdate):
    """sgd_update on state that is rounded."""

    name = "sgd_rounded"
    inputs = (*SGDUpdate.inputs, "seed?")
    wide = ("lr", "factor")
    scalars = (*SGDUpdate.scalars, "seed")
