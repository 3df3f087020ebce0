"""Training data on the device: it is uploaded once, and a step gets at most the indices of its samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttrain import ops
from ttrain.core.errors import UserError
from ttrain.core.spec import DType, TensorSpec
from ttrain.data.batches import STREAM, Indexed
from ttrain.data.settings import DataConfig, DocumentsConfig
from ttrain.device.base import Device
from ttrain.engine.state import State
from ttrain.graph import Graph, Kind, Value
from ttrain.models.base import LOSS_WEIGHT, Batch, Model, preparation, prepare_plain, valid_targets

INDICES = "indices"  # step input int64 [rows]: where the samples of a batch are in the split
LIMIT = 256 * 2**20  # bytes that lie on a device without being asked for
TOKENS_AT_ONCE = 2**22  # tokens that are brought there at a time: a file of them may be larger than the host's memory


@dataclass(frozen=True)
class IndexBatches:
    """Batches of a training split that lies on the device: the indices of their samples."""

    dataset: Indexed

    def at(self, context: int, sequences: int, tokens: int) -> IndexBatches:
        """See data.batches.TokenSequences; examples have no length."""
        return IndexBatches(self.dataset.at(context, sequences, tokens)) if hasattr(self.dataset, "at") else self

    def position(self, seed: int, number: int) -> int:
        """See data.batches.TokenSequences."""
        return self.dataset.position(seed, number) if hasattr(self.dataset, "position") else number

    def batch(self, split: str, seed: int, first: int, rows: int) -> dict[str, NDArray[Any]]:
        """`indices` int64 [rows]; `targets` only has the shape of the batch's, of which all count."""
        assert split == "train"
        targets = np.broadcast_to(np.float32(0), (rows, *self.dataset.fields["targets"].shape))
        return {INDICES: self.dataset.indices(seed, first, rows).astype(np.int64), "targets": targets}


@dataclass(frozen=True)
class Resident:
    """Arrays that lie on the device, by name: the fields of one batch for all steps, or those that indices go into.

    Those are the arrays of a training split, as data.batches.Indexed has them.
    """

    arrays: Mapping[str, TensorSpec]
    indexed: bool = True  # whether a step is handed the indices of its samples

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Return the specs of the persistent tensors, by name."""
        return {f"data/{name}": spec for name, spec in self.arrays.items()}

    def values(self, graph: Graph, fields: Mapping[str, TensorSpec]) -> dict[str, Value]:
        """Return the values that stand in a step for these fields of its batch."""
        found = {name: graph.state_value(f"data/{name}", spec, Kind.CACHE) for name, spec in self.arrays.items()}
        if not self.indexed:
            return found
        rows, *length = fields["targets"].shape
        indices = graph.input(INDICES, TensorSpec((rows,), DType.INT64))
        if STREAM in found:
            tokens, targets = ops.token_windows(indices, found[STREAM], length[0])
            return {"tokens": tokens, "targets": targets}
        return {name: ops.embedding(indices, array) for name, array in found.items()}

    def write(self, state: State, part: Callable[[int, int], Batch]) -> None:
        """All rows of the arrays, of which `part` returns those from one number up to another."""
        count = next(iter(self.arrays.values())).shape[0]
        at_once = TOKENS_AT_ONCE if STREAM in self.arrays else count
        for start in range(0, count, at_once):
            rows = part(start, min(start + at_once, count))
            for name in self.arrays:
                state.write_rows(f"data/{name}", start, np.ascontiguousarray(rows[name]))

    def prepare(self, batch: Batch) -> tuple[dict[str, Any], dict[str, int]]:
        """See models.base.Prepare, of a model whose loss is the mean over the targets."""
        return {INDICES: batch[INDICES]} if self.indexed else {}, {LOSS_WEIGHT: valid_targets(batch)}


def choose_resident(data: DataConfig, rows: int, model: Model, device: Device, dataset: Any) -> Resident | None:
    """Return the part of the training split that lies on the device, as data.resident says.

    None if every batch is handed over.

    `rows` are those of a micro-batch. With auto none of a dataset that is None, since nobody has opened it. Raises
    UserError for what can't lie there.
    """
    asked = data.resident == "device"
    if not (asked or resident_by_default(data, model, device)):
        return None
    fields = model.batch_specs(rows)
    known = hasattr(dataset, "arrays") and fields.keys() <= dataset.fields.keys()
    found = Resident(dataset.arrays(fields) if known else {})
    why = _why_on_host(data, model, device, found.arrays)
    if asked and why:
        raise UserError(f"data.resident=device: {why}. Give auto or host.")
    small = sum(spec.nbytes for spec in found.specs.values()) <= LIMIT
    return found if asked or (small and not why) else None


def resident_by_default(data: DataConfig, model: Model, device: Device) -> bool:
    """Return whether data.resident=auto lets data that is small enough lie on the device.

    That takes memory of the device's own that looks rows up quickly, and a step that reads nothing the host makes.
    """
    gains = device.name not in ("cpu", "null") and not device.narrow_lookups
    plain = preparation(model) is prepare_plain and not isinstance(data, DocumentsConfig)
    return data.resident == "auto" and gains and plain


def _why_on_host(data: DataConfig, model: Model, device: Device, arrays: Mapping[str, TensorSpec]) -> str | None:
    """Return why the training split can't lie on the device in these arrays; None where it can."""
    if preparation(model) is not prepare_plain:
        return f"model={model.config.name} prepares every batch, which the host hands over"
    if device.chips > 1:
        return "the chips of a mesh share every batch, which the host hands over"
    if not arrays:
        return f"data={data.name} has no arrays that indices could go into"
    if device.narrow_lookups:
        return f"device={device.name} looks up numbers in bf16 only, which holds neither ids of tokens nor fp32"
    return None
