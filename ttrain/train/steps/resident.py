"""Training data that lies on the device: uploaded once, so that a step is handed the places of its samples at most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttrain import ops
from ttrain.core.spec import DType, TensorSpec
from ttrain.engine.state import State
from ttrain.graph import Graph, Kind, Value
from ttrain.models.base import LOSS_WEIGHT, Batch, valid_targets

PLACES = "places"  # step input int64 [rows]: the numbers of a batch's examples in the split
LIMIT = 256 * 2**20  # bytes that lie on a device without being asked for
PARTS = 3  # bf16 numbers whose sum is an fp32 one


@dataclass(frozen=True)
class Picked:
    """Batches of a training split that lies on the device: the numbers of its examples."""

    dataset: Any  # whose training split has numbered examples
    target: tuple[int, ...]  # shape of an example's targets

    def batch(self, split: str, seed: int, first: int, rows: int) -> dict[str, NDArray[Any]]:
        """`places` int64 [rows]; `targets` only has the shape of the batch's, of which all count."""
        assert split == "train"
        targets = np.broadcast_to(np.float32(0), (rows, *self.target))
        return {PLACES: self.dataset.places(seed, first, rows).astype(np.int64), "targets": targets}


@dataclass(frozen=True)
class Resident:
    """Fields by name as they lie there: one batch for all steps, or the `examples` of a split to pick from.

    With `in_parts` an fp32 field lies there as three bf16 ones, whose sum it is to the bit, for a device that looks up
    rows in bf16 only.
    """

    fields: Mapping[str, TensorSpec]  # of one batch
    examples: int | None = None  # None: the fields of this one batch
    in_parts: bool = False

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Of the persistent tensors, by name."""
        return {name: spec for parts in self._parts().values() for name, spec in parts.items()}

    def _parts(self) -> dict[str, dict[str, TensorSpec]]:
        found = {}
        for name, spec in self.fields.items():
            if self.examples is not None:
                spec = replace(spec, shape=(self.examples, *spec.shape[1:]))
            if self.examples is not None and self.in_parts and spec.dtype is DType.FP32:
                narrow = spec.with_dtype(DType.BF16)
                found[name] = {f"data/{name}/{part}": narrow for part in range(PARTS)}
            else:
                found[name] = {f"data/{name}": spec}
        return found

    def values(self, graph: Graph, rows: int) -> dict[str, Value]:
        """What stands for the batch's fields in a step."""
        found = {}
        for name, parts in self._parts().items():
            values = [graph.state_value(part, spec, Kind.CACHE) for part, spec in parts.items()]
            if self.examples is not None:
                places = graph.input(PLACES, TensorSpec((rows,), DType.INT64))
                values = [ops.embedding(places, value) for value in values]
            found[name] = values[0]
            if len(values) > 1:
                first, *rest = (ops.cast(value, DType.FP32) for value in values)
                found[name] = sum(rest, first)
        return found

    def write(self, state: State, source: Any) -> None:
        """The one batch, or all examples of a dataset's training split."""
        if isinstance(source, Mapping):
            batch = source
        else:
            assert self.examples is not None
            batch = source.examples(np.arange(self.examples, dtype=np.uint64))
        for name, parts in self._parts().items():
            rest = np.ascontiguousarray(batch[name])
            *narrow, last = parts
            for part in narrow:  # the upper half of an fp32 number's bits is a bf16 one
                value = (rest.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
                state.write(part, value)
                rest = rest - value
            state.write(last, rest)

    def picked(self, dataset: Any) -> Any:
        """The data, from whose training split steps read the numbers of examples."""
        return Picked(dataset, self.fields["targets"].shape[1:])

    def prepare(self, batch: Batch) -> tuple[dict[str, Any], dict[str, int]]:
        """See models.base.Prepare, of a model whose loss is the mean over the targets."""
        fields = {} if self.examples is None else {PLACES: batch[PLACES]}
        return fields, {LOSS_WEIGHT: valid_targets(batch)}
