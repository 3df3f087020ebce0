"""Fields of rows that follow from the weights before training, such as a reference's log-probabilities: made once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from ttrain.core.errors import CheckpointError, UserError, raised_as
from ttrain.core.files import replace_file
from ttrain.core.folders import cache_folder
from ttrain.core.waiting import waited_for
from ttrain.data.batches import Split
from ttrain.parallel.world import World
from ttrain.train.checkpoint.tensor_files import open_shard
from ttrain.train.protocols import Array
from ttrain.train.steps.session import Session

FILE = "reference.safetensors"  # in the folder of a run: tensors `<split>/<field>` [rows of the split, ...]
SPLITS: tuple[Split, ...] = ("train", "val")


def add_reference(session: Session, dataset: Any, folder: Path | None, runs: Sequence[Path], world: World) -> None:
    """Add the fields that an objective's `reference` makes to the batches of an ExampleDataset.

    A new run has no `runs`: the fields are in the user's cache, or are computed with the present weights. A run that
    goes on has other weights by now, so one of the folders of `runs` must have the fields. Raises CheckpointError where
    none has. The `folder` of the run gets a copy, if any. All ranks read the fields, or all compute them together.
    """
    objective, model = session.graph.objective, session.graph.model
    if not objective.reads_reference(model):
        return
    from safetensors.numpy import save

    rows = waited_for([row for split in SPLITS for row in dataset.rows[split]], "Hashing rows")
    encoded = (dataset.objective.encode(row, dataset.encoder) for row in rows)
    data = _hash(objective.config.name, (array for each in encoded for array in each.values()))
    facts = repr((data, model.config, model.compute, session.engine.device.name))
    keys = [] if runs else [_hash(facts, map(session.state.read, model.parameters()))]
    cached = [cache_folder() / "reference" / f"{key}.safetensors" for key in keys]
    values = next(filter(None, (_read(path, data) for path in [*cached, *(run / FILE for run in runs)])), {})
    if world.first(None if values else (world.ranks.rank, "missing")) is not None:
        values = {}
    if not values and runs:
        raise CheckpointError(f"{runs[-1] / FILE}: is missing or of other rows. Bring both back, or give resume=none.")
    values = values or _computed(session, dataset)
    for path in [*cached, *([] if folder is None else [folder / FILE])]:
        with raised_as(UserError, f"{path}: can't be written", "Make room, or set TTRAIN_CACHE to another folder."):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, save(values, {"data": data}))
    for name, array in values.items():
        split, _, field = name.partition("/")
        dataset.known[split][field] = array


def _computed(session: Session, dataset: Any) -> dict[str, Array]:
    """Return the fields of all rows, by a forward pass over them."""
    objective, rows, found = cast(Any, session.graph.objective), session.graph.rows, dict[str, list[Array]]()
    step = session.engine.build("reference", partial(session.graph.trace_fields, objective.reference))
    counts: dict[str, int] = {split: len(dataset.rows[split]) for split in SPLITS}
    batches = [(split, at) for split in counts for at in range(0, counts[split], rows)]
    for split, at in waited_for(batches, "Computing the reference's log-probabilities of all rows, in batches"):
        batch = dataset.read(split, np.arange(at, at + rows) % counts[split])
        for name, array in step(session.prepare(batch)[0]).items():
            found.setdefault(f"{split}/{name}", []).append(array)
    session.engine.close()
    return {name: np.concatenate(parts)[: counts[name.partition("/")[0]]] for name, parts in found.items()}


def _hash(facts: str, arrays: Iterable[Array]) -> str:
    digest = hashlib.sha256(facts.encode())
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _read(path: Path, data: str) -> dict[str, Array]:
    """Return the fields in a file; nothing where there is no file, it is of other rows, or damaged in the cache."""
    if path.is_file():
        with suppress(*() if path.name == FILE else (CheckpointError,)), open_shard(path) as shard:
            if (shard.metadata() or {}).get("data") == data:
                return {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118 - no mapping
    return {}
