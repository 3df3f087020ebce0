"""LoRA's adapters outside of a run: merged into weights, and read and written as the two files of PEFT."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ttrain.core.errors import CheckpointError, raised_as
from ttrain.core.files import read_object, replace_file, to_json
from ttrain.core.names import listed
from ttrain.engine.state import State
from ttrain.models.weight_checks import Weights, bf16_bits, mismatches
from ttrain.nn.lora import ALL, names
from ttrain.nn.module import ADAPTER
from ttrain.nn.settings import LoraConfig
from ttrain.train.checkpoint.hub_folder import ADAPTER_CONFIG as CONFIG
from ttrain.train.checkpoint.weights_file import metadata_of, read_file, write_safetensors
from ttrain.train.protocols import Array

FILE = "adapter_model.safetensors"
_PREFIX, _BASE = "base_model.model.", "ttrain_base"  # of names, and the entry that holds the digest of the model
_MATRICES = {"a.weight": "lora_A.weight", "b.weight": "lora_B.weight"}
# Keys of PEFT's config that leave the function of given matrices as it is, or that `adopted` reads.
_FREE = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules", "fan_in_fan_out",
    "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout",
    "lora_ga_config", "megatron_core", "merge_weights", "peft_version", "qalora_group_size", "r", "revision",
    "runtime_config", "target_modules",
}  # fmt: skip
# The values of others with which an adapter is plain LoRA. A key that is not here has to be off: None, False or [].
# PEFT changes the frozen weights when it loads other values of init_lora_weights, or has done so in training.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "task_type": ("CAUSAL_LM",), "bias": ("none",), "rank_pattern": ({},),
    "alpha_pattern": ({},), "init_lora_weights": (True, "gaussian", "orthogonal", "eva", "mica"),
}  # fmt: skip


def merged(values: Mapping[str, Array], scale: float) -> Weights:
    """Values by path in which every weight has what its adapter adds; adapters are gone. Made when asked for."""

    def read(name: str) -> Array:
        layer = name.removesuffix(".weight") + ADAPTER
        if f"{layer}b.weight" not in values:
            return values[name]
        a, b = (values[f"{layer}{matrix}.weight"] for matrix in "ab")
        return values[name] + np.float32(scale) * (b @ a)

    return Weights({name: None for name in values if ADAPTER not in name}, read)


def as_for(model: Any, values: Mapping[str, Array], lora: Mapping[str, Any]) -> Mapping[str, Array]:
    """Values of a source that was trained as `lora` says, for a model: merged unless it has the same adapters."""
    if not any(ADAPTER in name for name in values):
        return values
    scale = LoraConfig(rank=lora.get("rank"), alpha=lora.get("alpha", 1.0)).scale
    own = {path: parameter.shape for path, parameter in model.parameters().items() if ADAPTER in path}
    given = {name: values[name].shape for name in values if ADAPTER in name}
    scales = {module.scale for path, module in model.modules() if f".{path}".endswith(ADAPTER.rstrip("."))}
    return values if own == given and scales == {scale} else merged(values, scale)


def peft_names(model: Any) -> dict[str, str]:
    """The path of every adapter's matrix -> PEFT's name of it."""
    named = {}
    for path in model.parameters():
        layer, adapter, matrix = path.partition(ADAPTER)
        if adapter:
            called = names(layer, getattr(model, "original_name", None))[-1]
            named[path] = f"{_PREFIX}{called}.{_MATRICES[matrix]}"
    return named


def base_digest(model: Any, read: Callable[[str], Array]) -> str:
    """SHA-256 of the weights that adapters stand beside, in bf16: the same for a model kept in fp32 and one in bf16."""
    digest = hashlib.sha256()
    for path in sorted({path.partition(ADAPTER)[0] + ".weight" for path in model.parameters() if ADAPTER in path}):
        digest.update(path.encode() + bf16_bits(read(path)).tobytes())
    return digest.hexdigest()


def write_peft(folder: Path, model: Any, values: Mapping[str, Array], lora: LoraConfig, base: str | None) -> None:
    """Writes the adapters of a model into a new folder, with what PEFT has to know. `base` names the frozen model."""
    named = peft_names(model)
    layers = list(dict.fromkeys(name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in named.values()))
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout, "target_modules": layers,
        "bias": "none", "fan_in_fan_out": getattr(model, "fan_in_fan_out", False),
    }  # fmt: skip
    digest = {_BASE: base_digest(model, values.__getitem__)}
    write_safetensors(folder / FILE, {name: values[path] for path, name in named.items()}, digest)
    replace_file(folder / CONFIG, to_json(config))


@dataclass(frozen=True)
class PeftAdapter:
    """A folder of PEFT, its config read and understood."""

    folder: Path
    config: Mapping[str, Any]

    @classmethod
    def open(cls, folder: str) -> PeftAdapter:
        """Raises CheckpointError where it is none, or holds what is not understood."""
        path, wrong = Path(folder) / CONFIG, (CheckpointError, ValueError, KeyError, TypeError, re.error)
        told = f"lora.from={folder} holds no adapters of PEFT that can be read: {CONFIG}"
        with raised_as(CheckpointError, told, f"Give the folder with {CONFIG} and {FILE}.", wrong):
            config = read_object(path)
            other = {key: value for key, value in config.items() if key not in _FREE}
            other = {key: value for key, value in other.items() if value not in (None, False, [], *_PLAIN.get(key, ()))}
            rank, alpha, dropout = config["r"], config["lora_alpha"], config.get("lora_dropout") or 0.0
            if type(rank) is not int or rank < 1 or not alpha > 0 or not 0 <= dropout < 1:
                raise ValueError("r must be a whole number above 0, lora_alpha be above 0, lora_dropout in [0, 1)")
            _selects(config, "")  # raises for keys of other types
        if other:
            told = ", ".join(f"{key}={value!r}" for key, value in other.items())
            mend = "Let PEFT merge the adapters (merge_and_unload) and give the merged folder as model.from"
            raise CheckpointError(f"lora.from={folder}: {CONFIG} has {told}: only plain LoRA is understood. {mend}.")
        return cls(Path(folder), config)

    def adopted(self, lora: LoraConfig, given: Iterable[str]) -> LoraConfig:
        """The config with what the folder says; `given` are the keys that the user gave, which have to agree."""
        wanted: Any = self.config.get("target_modules")
        limited = any(self.config.get(key) not in (None, []) for key in ("layers_to_transform", "exclude_modules"))
        listed_all = not limited and (wanted == ALL or isinstance(wanted, list))
        targets = sorted([wanted] if wanted == ALL else wanted) if listed_all else self._layers()
        dropout = float(self.config.get("lora_dropout") or 0.0)
        found = replace(
            lora, rank=self.config["r"], alpha=float(self.config["lora_alpha"]), targets=targets, dropout=dropout
        )
        for key in ("rank", "alpha"):
            if f"lora.{key}" in given and getattr(lora, key) != getattr(found, key):
                told = f"has {key} {getattr(found, key)}, not {getattr(lora, key)}"
                raise CheckpointError(f"lora.from={self.folder} {told}. Leave the key out, or give other adapters.")
        return replace(found, **{key: getattr(lora, key) for key in ("targets", "dropout") if f"lora.{key}" in given})

    def _layers(self) -> list[str]:
        """Names of the layers that have matrices. Raises CheckpointError for one that PEFT would leave out."""
        names = [str(name).removeprefix(_PREFIX) for name in read_file(self.folder / FILE)]
        layers = sorted({name.rpartition(".lora_")[0] for name in names})
        if spare := [layer for layer in layers if not _selects(self.config, layer)]:
            told = f"{FILE} has matrices of {listed(spare)}, which {CONFIG} leaves out"
            raise CheckpointError(f"lora.from={self.folder}: {told}. Give the two files as PEFT wrote them.")
        return layers

    def values(self, model: Any) -> dict[str, Array]:
        """Return the values by our paths. Raises CheckpointError where they are not those of the model's adapters."""
        content, named = Weights.widened(read_file(self.folder / FILE)), peft_names(model)
        parameters = model.parameters()
        shapes = {name: parameters[path].shape for path, name in named.items()}
        problems = mismatches(content, shapes, "no adapter of this model")
        values = {path: content[name] for path, name in named.items() if name in content}
        problems += [f"{named[path]}: holds NaN or infinity" for path in values if not np.isfinite(values[path]).all()]
        if problems:
            told = listed(problems, between="; ")
            raise CheckpointError(f"lora.from={self.folder} is of another model or other lora.targets: {told}.")
        return values

    def apply(self, state: State, model: Any, read: Callable[[str], Array]) -> None:
        """Overwrites the adapters. `read` gives the weights of the model beside which they stand, by path.

        Raises CheckpointError where the folder says that it belongs to another model.
        """
        self._check_base(model, read)
        for path, value in self.values(model).items():
            state.write(path, value)

    def added(self, values: Mapping[str, Array], model: Any, scale: float) -> Weights:
        """The values of a frozen model with what the adapters add; `model` has both. Raises as `apply` does."""
        self._check_base(model, values.__getitem__)
        own = self.values(model)
        both = Weights({**dict.fromkeys(values), **own}, lambda name: (own if name in own else values)[name])
        return merged(both, scale)

    def _check_base(self, model: Any, read: Callable[[str], Array]) -> None:
        digest = metadata_of(self.folder / FILE).get(_BASE)
        if digest is not None and digest != base_digest(model, read):
            raise CheckpointError(f"lora.from={self.folder} was trained beside another model. Give that one's weights.")


def _selects(config: Mapping[str, Any], layer: str) -> bool:
    """True where PEFT gives a layer an adapter by the keys that name layers."""

    def matches(wanted: Any) -> bool:
        if isinstance(wanted, str):
            return re.fullmatch(wanted, layer) is not None
        return any(f".{layer}".endswith(f".{name}") for name in wanted or ())

    wanted, numbers = config.get("target_modules"), config.get("layers_to_transform")
    if matches(config.get("exclude_modules")) or not (wanted == ALL or matches(wanted)):
        return False
    own = [int(part) for part in layer.split(".") if part.isdecimal()]
    return numbers in (None, []) or (
        own[:1] == [numbers] if isinstance(numbers, int) else bool({*own[:1]} & {*numbers})
    )
