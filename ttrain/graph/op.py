"""The contract of an op: everything that ttrain knows about it, declared once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ttrain.core.errors import GraphError, ShapeError
from ttrain.core.spec import TensorSpec
from ttrain.graph.graph import Graph, Node, Value


@dataclass(frozen=True)
class Case:
    """One test case of an op: input shapes (None for an absent input) and attributes.

    `integers` maps an input's name to the exclusive upper bound of its random int64 values; `holes` names those in
    which some values are -1 instead (no target there). `positive` names inputs whose values must be above zero. The
    tensors of a list input are named `<list>.<number>`.
    """

    shapes: tuple[tuple[int, ...] | None, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    integers: Mapping[str, int] = field(default_factory=dict)
    positive: tuple[str, ...] = ()
    holes: tuple[str, ...] = ()


class Op:
    """Base of every op. Subclasses state facts; they hold no tensors and touch no device.

    Class attributes:
        name: as the graph prints it and as kernel tables spell it.
        family: section of the documentation.
        inputs, outputs: names in order. A trailing "?" marks an optional input, a trailing "*" a list of any length.
        saves: the inputs and outputs whose values backward reads.
        elementwise: output 0 may share the buffer of an input of the same size.
        cheap: recomputing costs one pass over the input, so backward may do it instead of keeping the output.
        view: output 0 is input 0 under another shape, without a copy.
        mutates: output name -> input name whose buffer it overwrites.
        wide: floating-point inputs that are fp32 at least even where a step computes in bf16.
        constants: floating-point inputs that never get a gradient.
        differentiable: False for ops that only occur after backward.
        on_host: its outputs lie in host memory beside a device that has its own; see place.py.
        transfer: moves a value between such a device and the host.
    """

    name: ClassVar[str]
    family: ClassVar[str]
    inputs: ClassVar[tuple[str, ...]]
    outputs: ClassVar[tuple[str, ...]] = ("y",)
    saves: ClassVar[tuple[str, ...]] = ()
    elementwise: ClassVar[bool] = False
    cheap: ClassVar[bool] = False
    view: ClassVar[bool] = False
    mutates: ClassVar[Mapping[str, str]] = {}
    wide: ClassVar[tuple[str, ...]] = ()
    constants: ClassVar[tuple[str, ...]] = ()
    differentiable: ClassVar[bool] = True
    on_host: ClassVar[bool] = False
    transfer: ClassVar[bool] = False

    @property
    def base_name(self) -> str:
        """The name without a word about where it runs."""
        return self.name

    def infer(self, *specs: Any, **attributes: Any) -> TensorSpec | Sequence[TensorSpec]:
        """Specs of the outputs from those of the inputs. Raises ShapeError (got, expected, fix)."""
        raise GraphError(f"op {self.name} declares no shape rule")

    def vjp(self, node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        """Record the nodes that turn gradients of the outputs into gradients of the inputs.

        A gradient of an output is None where nothing downstream needs it.
        """
        raise GraphError(f"op {self.name} has no gradient rule: it must not lie between a parameter and the loss")

    def reference(self, *tensors: Any, **attributes: Any) -> Any:
        """The same function in plain torch, differentiable by torch autograd: the oracle of the tests (fp64)."""
        raise GraphError(f"op {self.name} declares no reference")

    def flops(self, node: Node) -> int:
        """Floating-point operations of one execution; a multiply-add counts two."""
        return sum(output.spec.size for output in node.outputs)

    def nbytes(self, node: Node) -> int:
        """Bytes read and written by one execution, each tensor counted once."""
        return sum(value.spec.nbytes for value in {*node.values, *node.outputs})

    def decompose(self, node: Node, inputs: tuple[Value | None, ...]) -> Sequence[Value] | None:
        """Record the same computation with simpler ops on `inputs`; None where the op is a primitive."""
        return None

    def rematerialized(self, node: Node) -> Node | None:
        """A node on values that backward keeps, whose outputs stand for this node's where named; None: not cheaply."""
        return node if self.cheap and not self.view else None

    def rematerialized_outputs(self, node: Node) -> Sequence[Value]:
        """Outputs that `rematerialized` makes again."""
        return node.outputs[:1] if self.cheap and not self.view else ()

    def aliases(self, node: Node) -> dict[int, int]:
        """Output index -> index of the input whose buffer it is (views and in-place updates)."""
        if self.view:
            return {0: 0}
        return {self.outputs.index(out): self.inputs.index(into) for out, into in self.mutates.items()}

    def derived(self, given: Mapping[str, Any], attributes: Mapping[str, Any]) -> Mapping[str, Any]:
        """Inputs of a test case that can't be random because they follow from the others, as fp64 tensors by name."""
        return {}

    def cases(self) -> Sequence[Case]:
        """Shapes and attributes that the generated tests run. Must not be empty."""
        return ()

    # What follows is shared machinery; subclasses leave it alone.

    def infer_outputs(self, specs: Sequence[TensorSpec | None], attributes: Mapping[str, Any]) -> list[TensorSpec]:
        inferred = self.infer(*specs, **attributes)
        return [inferred] if isinstance(inferred, TensorSpec) else list(inferred)

    def record(self, *inputs: Value | None, graph: Graph | None = None, **attributes: Any) -> Any:
        """Append a node; returns its only output, or a tuple of its outputs."""
        if graph is None:
            graph = next(value.graph for value in inputs if value is not None)
        node = graph.append(self, inputs, attributes)
        return node.outputs[0] if len(node.outputs) == 1 else node.outputs

    def require(self, condition: bool, got: object, expected: str, fix: str = "") -> None:
        """Raise ShapeError unless the condition holds."""
        if not condition:
            raise ShapeError(f"{self.name}: got {got}, expected {expected}.{' ' + fix if fix else ''}")


class _Registry:
    """Every op by name. Closed: a second declaration under a name is an error."""

    def __init__(self) -> None:
        self._ops: dict[str, Op] = {}

    def add(self, op: Op) -> None:
        if op.name in self._ops:
            raise GraphError(f"op {op.name!r} is declared twice")
        self._ops[op.name] = op

    def __getitem__(self, name: str) -> Op:
        return self._ops[name]

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._ops.values())

    def __len__(self) -> int:
        return len(self._ops)

    def names(self) -> list[str]:
        return list(self._ops)


REGISTRY = _Registry()


def declare(cls: type[Op]) -> type[Op]:
    """Class decorator: put one instance of an op into the registry."""
    REGISTRY.add(cls())
    return cls


def op(name: str) -> Op:
    """A declared op by name."""
    return REGISTRY[name]
