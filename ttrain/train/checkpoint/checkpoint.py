"""Checkpoints: directories of safetensors and JSON, which appear only when they are complete and verified.

    checkpoints/step_00000100/
        parameters-00001-of-00001.safetensors   unpadded, by module path; fp32, or bf16 where the run kept them so
        optimizer-00001-of-00001.safetensors    moments, by `<parameter>/<name>`, likewise
        frozen-00001-of-00001.safetensors       parameters that no step writes, likewise; none where all are trained. By
                                                hard links a run has one file of it. One in fewer bits is several
                                                tensors, `<path>/nf4` and so on, see device/quantized.py
        buffers-00001-of-00001.safetensors      saved buffers of the model, by module path; none where it has none
        config.json  tokenizer.json  tokenizer_config.json
        manifest.json                           step, progress, val_loss, size and SHA-256 of every other file, and its
                                                own SHA-256; written last, and again when the state is evaluated after
                                                it was saved

Several ranks divide the tensors of a checkpoint: files of rank 1 are called parameters-rank1-00001-of-00001 and so on.
A tensor of which each rank has a part is in the files of all of them, as `<name>[<start>:<stop> of <shape>]`.

Only safetensors and JSON are ever read, so a checkpoint can't run code.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, get_args, get_type_hints

import numpy as np

from ttrain.core.errors import CheckpointError, raised_as
from ttrain.core.files import parsed_object, read_object, sha256_file, to_json
from ttrain.core.names import listed
from ttrain.core.spec import DType
from ttrain.core.waiting import waited_for
from ttrain.data.batches import Dataset
from ttrain.engine.state import State
from ttrain.graph import Kind
from ttrain.models.weight_checks import Weights
from ttrain.optim.base import AVERAGE
from ttrain.optim.groups import frozen
from ttrain.train.checkpoint.tensor_files import lazy_tensors, tensors_in, tensors_of, whole
from ttrain.train.protocols import SAVED_KINDS, Array, StateValues
from ttrain.train.steps.step import LossScale

_ROWS = 64  # of held-out data, read at a time


@dataclass
class Progress(LossScale):
    """Progress of a run, with its loss scale.

    Dropout masks and learning rates are functions of the seed and `step`; batches of the seed and what was read before.
    """

    step: int = 0  # optimizer steps done
    tokens: int = 0  # tokens (or examples) trained on
    seconds: float = 0.0  # time of the loop over all attempts, see logging.metrics.Meter
    train_loss: float | None = None  # of the newest step
    val_loss: float | None = None  # of the newest evaluation
    evaluated_at: int | None = None  # step of the newest evaluation
    best_val_loss: float | None = None
    best_step: int | None = None
    stale_evaluations: int = 0  # in a row, without a lower val/loss
    held_out: str | None = None  # SHA-256 of the data that all of these are of
    wandb_id: str | None = None
    lr_factor: float = 1.0  # what rollbacks have left of the learning rate
    skipped_steps: int = 0  # whose update was not applied
    rollbacks: int = 0
    compacted: bool = False  # whether rank matrices were compacted afterwards: such parameters are for inference
    read_samples: int = 0  # sequences (or examples) of the training data, whatever batches they came in
    read_tokens: int = 0  # position in the stream of tokens, see steps.phases.Position
    read_sources: dict[str, tuple[int, int]] = field(default_factory=dict)  # the same of each source that has a weight
    rollout: str = ""  # see steps.phases.Position
    spent: float = 0.0  # seconds of steps, evaluations and saves over all attempts: what train.minutes counts

    def evaluated(self, loss: float, min_improvement: float = 0.0) -> bool:
        """Notes an evaluation after the current step; whether it is the best so far."""
        self.val_loss, self.evaluated_at = loss, self.step
        improved = self.best_val_loss is None or loss < self.best_val_loss - min_improvement
        if improved:
            self.best_val_loss, self.best_step, self.stale_evaluations = loss, self.step, 0
        else:
            self.stale_evaluations += 1
        return improved

    def measure_on(self, held_out: str) -> str | None:
        """Take this as the held-out data of val/loss; return a note where earlier losses do not compare with it."""
        other, self.held_out = self.held_out != held_out, held_out
        if not other or self.best_val_loss is None:
            return None
        note = (
            f"The held-out data is not what it was: the best val/loss {self.best_val_loss:.4f} (step {self.best_step}) "
            f"and {self.stale_evaluations} evaluations without a lower one do not count any more."
        )
        self.val_loss = self.evaluated_at = self.best_val_loss = self.best_step = None
        self.stale_evaluations = 0
        return note

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Progress:
        """Raises CheckpointError where it is none of this version's."""
        hints = get_type_hints(cls)
        for name, value in stored.items():
            if name not in hints:
                raise CheckpointError(f"the progress holds {name!r}, which this version of ttrain does not know.")
            kinds, least = {hints[name], *get_args(hints[name])}, -np.inf if name.endswith("_loss") else 0
            known = type(value) in kinds or (type(value) is int and float in kinds)
            if name == "read_sources":
                read = value.values() if isinstance(value, dict) else [value]
                known = all(isinstance(n, list) and [*map(type, n)] == [int, int] and min(n) >= 0 for n in read)
            if not known or (isinstance(value, int | float) and not least <= value < np.inf):
                expected = getattr(hints[name], "__name__", hints[name])
                raise CheckpointError(f"the progress holds {name}={value!r}, expected {expected}. It was changed.")
        return cls(**stored)


def held_out_hash(dataset: Dataset, samples: int) -> str:
    """SHA-256 of the first so many held-out samples: of what is read, wherever it lies and however it is batched."""
    digests: dict[str, hashlib._Hash] = {}
    for first in range(0, samples, _ROWS):
        for name, array in dataset.batch("val", 0, first, min(_ROWS, samples - first)).items():
            digest = digests.setdefault(name, hashlib.sha256(f"{array.dtype} {array.shape[1:]}".encode()))
            digest.update(np.ascontiguousarray(array).data)
    whole = hashlib.sha256()
    for name in sorted(digests):
        whole.update(f"{name} {digests[name].hexdigest()}\n".encode())
    return whole.hexdigest()


FORMAT = 2
MANIFEST = "manifest.json"
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.(safetensors|json)")
UNFINISHED = ".unfinished_"
_STORED = {DType.BF16: "BF16", DType.INT8: "I8", DType.UINT8: "U8"}  # in the words of safetensors
STEMS = {
    Kind.PARAMETER: "parameters", Kind.FROZEN: "frozen", Kind.OPTIMIZER: "optimizer", Kind.BUFFER: "buffers",
}  # fmt: skip # of file names


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on the disk, by its manifest. `verify` has to pass before anything else is read."""

    path: Path
    step: int
    val_loss: float | None
    files: dict[str, dict[str, Any]]
    progress: dict[str, Any]
    saved_at: float  # seconds since 1970
    # While it is open, nobody removes the files.
    reader: IO[str] | None = field(default=None, repr=False, compare=False)

    def verify(self, known: Collection[str] = ()) -> Checkpoint:
        """Checks names and sizes of all files, and the SHA-256 of all but those `known` to be right.

        Raises CheckpointError at the first that is wrong.
        """
        present = {entry.name for entry in self.path.iterdir()} - {MANIFEST}
        if extra := sorted(present - self.files.keys()):
            raise CheckpointError(f"{self.path} holds {extra[0]!r}, which its manifest does not list. Remove it.")
        for name in waited_for(self.files, f"Verifying {self.path}", str):
            _verify_file(self.path / name, self.files[name], name in known)
        return self

    def files_of(self, *kinds: Kind) -> list[str]:
        """Names of the files that hold tensors of these kinds."""
        return sorted(name for name in self.files if name.startswith(tuple(STEMS[kind] for kind in kinds)))

    def holds(self, state: StateValues, kind: Kind) -> bool:
        """True if it has files of all tensors of a kind in their shapes and dtypes."""
        files = self.files_of(kind)
        try:
            whole = all((self.path / name).stat().st_size == self.files[name]["bytes"] for name in files)
            found = tensors_in(self.path / file for file in files) if whole else {}
        except (OSError, CheckpointError):
            return False
        specs = {name: state.spec(name) for name in state.names(kind)}
        dtypes = {name: _STORED.get(spec.dtype, "F32") for name, spec in specs.items()}
        return {n: (t.shape, t.dtype) for n, t in found.items()} == {n: (s.shape, dtypes[n]) for n, s in specs.items()}

    @property
    def config(self) -> dict[str, Any]:
        """The resolved config of the run that wrote it."""
        return read_object(self.path / "config.json")

    @property
    def tokenizer(self) -> str | None:
        """The tokenizer's JSON; None for a model that has none."""
        path = self.path / "tokenizer.json"
        with raised_as(CheckpointError, f"{path} is not text that can be read", of=(OSError, UnicodeDecodeError)):
            return path.read_text("utf-8") if path.name in self.files else None

    @property
    def tokenizer_config(self) -> dict[str, Any]:
        """The tokenizer's end token and chat template, as a tokenizer_config.json has them; what is known of them."""
        return read_object(self.path / "tokenizer_config.json") if "tokenizer_config.json" in self.files else {}

    def load(self, state: State) -> tuple[str, ...]:
        """Copies parameters, buffers and optimizer state into the state; returns what to tell of it.

        Names and shapes must fit (see `match`), else CheckpointError and nothing is copied. Numbers are rounded to the
        nearest where the state has a narrower dtype than the checkpoint, and kept as they are otherwise.
        """
        wanted = {name: tuple(state.spec(name).shape) for name in state.names(*SAVED_KINDS)}
        found = tensors_in(self.path / file for file in self.files_of(*SAVED_KINDS))
        shapes = {name: tensor.shape for name, tensor in found.items()}
        told = f"{self.path} does not fit this model and optimizer"
        advice = "Give the optimizer that it was trained with, or start a new run with train.init_from."
        with raised_as(CheckpointError, told, advice, CheckpointError):
            zeros, averages, notes = match(shapes, wanted, state, self.config)
        for name in waited_for((name for name in found if name in wanted), "Reading tensors", str):
            state.write(name, np.asarray(found[name]))
        for name in zeros:
            state.write(name, np.zeros(wanted[name], np.float32))
        for name in averages:
            state.write(name, state.read(name.rpartition("/")[0]))
        return notes

    def weights(self, averages: bool = False) -> Mapping[str, Array]:
        """Parameters and saved buffers by path; those in fewer bits are Quantized.

        With `averages`, those that the run keeps stand in their place, if there are any. Each is read when it is
        asked for.
        """
        plain = whole(lazy_tensors(self.path / name for name in self.files_of(*STEMS.keys() - {Kind.OPTIMIZER})))
        kept = lazy_tensors(self.path / name for name in self.files_of(Kind.OPTIMIZER)) if averages else {}
        names = {path: f"{path}/{AVERAGE}" for path in plain}
        return Weights(plain.keys(), lambda path: kept[names[path]] if names[path] in kept else plain[path])


def _verify_file(path: Path, entry: dict[str, Any], known: bool) -> None:
    if path.is_symlink() or not path.is_file():
        raise CheckpointError(f"{path} is missing, though the manifest lists it. Use another checkpoint.")
    if (size := path.stat().st_size) != entry["bytes"]:
        raise CheckpointError(f"{path} has {size} bytes, the manifest says {entry['bytes']}: the file is truncated.")
    if known:
        return
    if sha256_file(path) != entry["sha256"]:
        raise CheckpointError(f"{path} does not have the SHA-256 of the manifest: the file was changed or damaged.")
    if path.suffix == ".safetensors":
        list(tensors_of(path))  # raises for a file that is none


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a directory, verified. Raises CheckpointError where it is missing, incomplete or damaged."""
    with raised_as(CheckpointError, f"{path} can't be read"):
        return read_manifest(path).verify()


def read_manifest(path: Path) -> Checkpoint:
    """The checkpoint in a directory by its manifest alone, without reading the tensors."""
    file = path / MANIFEST
    with raised_as(CheckpointError, f"{file} can't be read"):
        if not file.exists():
            raise CheckpointError(f"{path} is not a complete checkpoint: it has no {MANIFEST}, the last file.")
        data = file.read_bytes()  # once: a run that goes on may replace it
    manifest = parsed_object(file, data)
    if manifest.get("format", FORMAT) != FORMAT:
        told = f"{path} has checkpoint format {manifest['format']!r}; this ttrain reads {FORMAT}"
        raise CheckpointError(f"{told}. Give it to the version that wrote it, or train again.")
    try:
        listed = manifest["files"].items()
        files = {name: {"bytes": int(entry["bytes"]), "sha256": str(entry["sha256"])} for name, entry in listed}
        val_loss = None if manifest["val_loss"] is None else float(manifest["val_loss"])
        facts = int(manifest["step"]), val_loss, files, dict(manifest["progress"]), float(manifest["saved_at"])
    except (KeyError, TypeError, ValueError, AttributeError):
        raise CheckpointError(f"{file} is not a manifest of ttrain: {str(manifest)[:80]!r}.") from None
    for name in files:
        if not _FILE_NAME.fullmatch(name) or name == MANIFEST:
            raise CheckpointError(f"{file} lists {name!r}; it may list .safetensors and .json in its own folder only.")
    if "config.json" not in files:
        raise CheckpointError(f"{file} lists no config.json.")
    if data != sealed({key: value for key, value in manifest.items() if key != "sha256"}).encode():
        raise CheckpointError(f"{file} does not have its own SHA-256: the file was changed or damaged.")
    return Checkpoint(path, *facts)


def step_name(step: int) -> str:
    """The folder of the checkpoint of a step."""
    return f"step_{step:08d}"


def sealed(manifest: dict[str, Any]) -> str:
    """The text of a manifest, with the SHA-256 of the text that it has without that line."""
    digest = hashlib.sha256(to_json(manifest).encode()).hexdigest()
    return to_json({**manifest, "sha256": digest})


Shapes = Mapping[str, tuple[int, ...]]  # by name


def match(
    stored: Shapes, wanted: Shapes, state: State, config: Mapping[str, Any]
) -> tuple[list[str], list[str], tuple[str, ...]]:
    """Return tensors of the state that start as zeros, averages that start as their weights, and what to tell of both.

    Names and shapes have to be equal, else CheckpointError, but for the optimizer's tensors of parameters that are
    frozen on one side. A parameter that was frozen when the checkpoint was written (`config` is that run's) starts with
    zeros, as it would in a new run; what is stored for one that is frozen now is left out. Averages may begin and end
    with any attempt.
    """
    before = {key: _strings(config.get("optimizer"), key) for key in ("freeze", "unfreeze")}
    kept = {name for name in stored if _averages(name)}
    missing = sorted(name for name in state.names(Kind.OPTIMIZER) if name in wanted and name not in stored)
    averages = [name for name in missing if _averages(name)]
    zeros = [name for name in missing if name not in averages and frozen(_parameter(name), **before)]
    trained = {_parameter(name) for name in state.names(Kind.GRADIENT)}
    idle = set(state.names(Kind.PARAMETER)) - trained if trained else set()
    unused = [name for name in sorted(stored.keys() - wanted.keys()) if _parameter(name) in idle or name in kept]
    _require_equal(
        {name: shape for name, shape in stored.items() if name not in unused},
        {name: shape for name, shape in wanted.items() if name not in zeros and name not in averages},
    )
    dropped, gone = [name for name in unused if name not in kept], set() if kept & wanted.keys() else kept
    notes = {
        "Frozen until now, so their optimizer state starts from zero: {}. Optimizers that correct moments by the "
        "step's number, such as AdamW, make their first updates larger than usual.": zeros,
        "No averages of the weights were kept until now, so they start as the weights are.": averages,
        "Averages of the weights are kept no more; those of the checkpoint are dropped.": gone,
        "Frozen from now on, so what the optimizer kept is dropped: {}.": dropped,
    }
    told = (note.format(listed(dict.fromkeys(map(_parameter, names)))) for note, names in notes.items() if names)
    return zeros, averages, tuple(told)


def _averages(name: str) -> bool:
    return name.endswith(f"/{AVERAGE}")


def _strings(section: Any, key: str) -> list[str]:
    """A list of texts of a config that may be anything."""
    given = section.get(key) if isinstance(section, dict) else None
    return [item for item in given if isinstance(item, str)] if isinstance(given, list) else []


def _parameter(name: str) -> str:
    """The parameter that a tensor of the optimizer or a gradient belongs to."""
    return name.rpartition("/")[0]


def _require_equal(stored: Shapes, wanted: Shapes) -> None:
    parts = {
        "it lacks": sorted(wanted.keys() - stored.keys()),
        "it also holds": sorted(stored.keys() - wanted.keys()),
        "other shapes:": [
            f"{name} {stored[name]} instead of {shape}"
            for name, shape in sorted(wanted.items())
            if stored.get(name, shape) != shape
        ],
    }
    if any(parts.values()):
        raise CheckpointError("; ".join(f"{told} {listed(names)}" for told, names in parts.items() if names) + ".")
