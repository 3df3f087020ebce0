"""task=export: a run's parameters as a file of weights or as a new run, compacted if asked; and files into runs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttrain.config import build
from ttrain.config.saved import continued
from ttrain.config.schema import Config, to_dict
from ttrain.core.errors import CheckpointError, ConfigError, DataError
from ttrain.core.units import format_bytes, format_count
from ttrain.core.waiting import Waiting
from ttrain.models.identity import FUNCTION, differing
from ttrain.models.settings import AGILLMConfig
from ttrain.nn.settings import LoraConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ttrain.train.protocols import Array

_FOR_EXPORT = ("export", "run", "device", "engine", "logger")


@dataclass
class _Parameters:
    """What is exported: parameters by path, the config of their model, and what is known of where they come from."""

    config: Config
    model: Any
    values: Mapping[str, Array]
    step: int
    tokenizer: str | None
    origin: str
    progress: Mapping[str, Any] = field(default_factory=dict)
    tokenizer_config: dict[str, Any] = field(default_factory=dict)

    @property
    def end_token(self) -> str | None:
        """The token that ends a document, where one is named."""
        from ttrain.data.end_token import named_end

        return named_end(self.config.data, self.tokenizer_config)


def run(config: Config) -> None:
    """Writes what export.file and export.dir ask for, and says what it wrote."""
    from ttrain.train.runs.export import export_problems, require_new
    from ttrain.train.runs.export_folder import folder_problem
    from ttrain.train.runs.export_gguf import gguf_problem

    with Waiting("Reading the parameters"):
        given = _from_run(config) if config.run.dir is not None else _from_file(config, _source(config))
    wanted, file = config.export, None if config.export.file is None else Path(config.export.file)
    if file is not None and given.config.lora.rank:
        raise ConfigError("export.merge=false: a file of weights has no adapters. Give export.dir.")
    problem_of = {"huggingface": folder_problem, "gguf": gguf_problem}.get(wanted.form)
    if problem_of is not None and (problem := problem_of(given.model.config)):
        raise ConfigError(problem)
    if file is not None and wanted.form != "gguf" and (problems := export_problems(given.model, file, wanted.form)):
        raise ConfigError(problems)
    if wanted.dir is not None:
        require_new(Path(wanted.dir))
    report = None
    if wanted.compact:
        with Waiting("Compacting the rank matrices"):
            given, report = _compacted(given)
    if file is not None:
        _write_file(given, file, wanted.form)
    if wanted.dir is not None:
        with Waiting(f"Writing {wanted.dir}"):
            if wanted.form == "huggingface":
                _write_folder(given, Path(wanted.dir), wanted.shard_mb)
            elif wanted.form == "peft":
                _write_adapters(given, Path(wanted.dir))
            else:
                _write_run(given, Path(wanted.dir), report)


def _write_file(given: _Parameters, file: Path, form: str) -> None:
    from ttrain.train.checkpoint.weights_file import Metadata
    from ttrain.train.runs.export import write_weights
    from ttrain.train.runs.export_gguf import write_gguf

    with Waiting(f"Writing {file}"):
        if form == "gguf":
            write_gguf(file, given.model, given.values, given.tokenizer, given.end_token, given.tokenizer_config)
        else:
            metadata = Metadata(build.stored_model(given.config.model, given.model), given.tokenizer)
            write_weights(given.model, given.values, file, form, given.step, metadata)
    size = format_bytes(file.stat().st_size)
    print(f"{file}: {format_count(given.model.parameter_count)} parameters, {size}.")


def _write_adapters(given: _Parameters, folder: Path) -> None:
    from ttrain.train.checkpoint.adapters import peft_names, write_peft

    if not given.config.lora.rank:
        raise ConfigError(f"export.form=peft: {given.origin} has no adapters. Give a run with lora.rank.")
    base = getattr(given.config.model, "from_", None) or given.config.train.init_from
    write_peft(folder, given.model, given.values, given.config.lora, base)
    print(f"{folder}: {len(peft_names(given.model)) // 2} adapters of {given.origin}, as PEFT reads them.")


def _source(config: Config) -> Path:
    from ttrain.train.checkpoint.hub_folder import find_folder

    if config.export.source is not None:
        return Path(config.export.source)
    return find_folder(config.model.from_, weights=True)  # the config's checks hold it so


def _from_run(config: Config) -> _Parameters:
    from ttrain.train.checkpoint.adapters import merged
    from ttrain.train.checkpoint.retention import find_checkpoint
    from ttrain.train.runs.resume import check_adapters, check_architecture

    assert config.run.dir is not None  # the config's checks hold it so
    checkpoint = find_checkpoint(Path(config.run.dir), config.export.checkpoint)
    whole = continued(checkpoint.config, config, _FOR_EXPORT)
    values: Mapping[str, Array] = checkpoint.weights()
    check_adapters(checkpoint.config, whole.lora, checkpoint.path)
    if whole.lora.rank and config.export.merge and config.export.form != "peft":
        values = merged(values, whole.lora.scale)
        whole = dataclasses.replace(whole, lora=LoraConfig())
    model = build.build_model(*whole.model_parts)
    check_architecture(checkpoint.config, model.config, checkpoint.path, FUNCTION)
    origin = f"step {checkpoint.step} of {config.run.dir}"
    told = (checkpoint.tokenizer, origin, checkpoint.progress, checkpoint.tokenizer_config)
    return _Parameters(whole, model, values, checkpoint.step, *told)


def _from_file(config: Config, path: Path) -> _Parameters:
    from ttrain.data.chat.jinja import tokenizer_settings
    from ttrain.data.library_tokenizer import parse_tokenizer
    from ttrain.models.agillm_weights import sizes_of
    from ttrain.train.checkpoint.weights_file import read_file, read_metadata, read_parameters

    content = read_file(path)
    if isinstance(config.model, AGILLMConfig):
        try:
            sized = dataclasses.replace(config.model, preset=None, **sizes_of(content))
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None
        config = dataclasses.replace(config, model=sized)
    metadata = read_metadata(path, content)
    tokenizer = _tokenizer(config, path, metadata.tokenizer)
    vocabulary = None if tokenizer is None else parse_tokenizer(tokenizer).vocabulary
    given, config = config, dataclasses.replace(config, lora=LoraConfig())
    model = build.build_model(*config.model_parts, vocabulary)
    if differences := differing(metadata.of(model), model.config):
        raise CheckpointError(f"{path} holds another function: {'; '.join(differences)}. Give these keys as they were.")
    values, step = with_added(given, read_parameters(path, model, content), vocabulary), content.get("step", 0)
    step = step if isinstance(step, int) and step >= 0 else 0
    settings = tokenizer_settings(path / "tokenizer.json") if path.is_dir() else {}
    return _Parameters(config, model, values, step, tokenizer, str(path), tokenizer_config=settings)


def with_added(config: Config, values: Mapping[str, Array], vocabulary: int | None) -> Mapping[str, Array]:
    """The values of a model that is no run of ours, with what the adapters of lora.from add to them."""
    from ttrain.train.checkpoint.adapters import PeftAdapter

    lora = build.with_adapters(config.lora, config.source.explicit)
    if lora.from_ is None and lora.rank:
        raise ConfigError(f"lora.rank={lora.rank}: is for training. Give lora.from=<folder of adapters> to add them.")
    if lora.from_ is None:
        return values
    model = build.build_model(*dataclasses.replace(config, lora=lora).model_parts, vocabulary)
    return PeftAdapter.open(lora.from_).added(values, model, lora.scale)


def _tokenizer(config: Config, path: Path, own: str | None) -> str | None:
    """The JSON of the tokenizer of a file, else that of export.tokenizer. Raises DataError where the two differ."""
    from ttrain.data.library_tokenizer import parse_tokenizer, read_tokenizer
    from ttrain.train.checkpoint.weights_file import same_tokenizer

    given = config.export.tokenizer
    other = None if given is None else read_tokenizer(given, "export.tokenizer").to_json()
    if own is None:
        return other
    try:
        own = parse_tokenizer(own).to_json()
    except (DataError, ValueError, KeyError) as error:
        raise DataError(f"{path} holds a tokenizer that can't be used: {error}") from None
    if not same_tokenizer(own, other):
        raise DataError(
            f"export.tokenizer={given} is not the tokenizer that {path} holds, so its token ids would change their "
            "meaning. Leave the key out."
        )
    return own


def _compacted(given: _Parameters) -> tuple[_Parameters, dict[str, Any]]:
    """The same function with rank matrices of fewer columns, and the report that is kept with it."""
    from ttrain.models.agillm_compact import compacted, describe, rank_matrix_path
    from ttrain.models.weight_checks import Weights

    if not isinstance(given.config.model, AGILLMConfig):
        name = given.config.model.name
        raise ConfigError(f"export.compact=true: only AGILLM has rank matrices, and this model is {name}.")
    layers = {layer: given.values[rank_matrix_path(layer)] for layer in range(given.model.layers)}
    matrices, report = compacted(layers)
    described = describe(report)
    print("layer  columns  kept  error of U U^T")
    for entry in report:
        print(f"{entry.layer:>5}  {entry.before:>7}  {entry.kept:>4}  {entry.error:>14.1e}")
    print(f"rank {given.model.rank} becomes {described['rank']}, for all layers alike.")
    padding = given.config.model.pad_vocabulary
    model_config = dataclasses.replace(given.model.config, rank=described["rank"], pad_vocabulary=padding)
    config = dataclasses.replace(given.config, model=model_config)
    narrower = {rank_matrix_path(layer): matrix for layer, matrix in matrices.items()}
    values = Weights(given.values, lambda path: narrower[path] if path in narrower else given.values[path])
    model = build.build_model(*config.model_parts)
    return dataclasses.replace(given, config=config, model=model, values=values), described


def _write_folder(given: _Parameters, folder: Path, shard_mb: int) -> None:
    from ttrain.train.runs.export_folder import Written, model_card, write_folder

    stored = {**to_dict(given.config), "model": build.stored_model(given.config.model, given.model)}
    card = model_card(folder.name, stored, given.model.parameter_count, given.origin, given.progress)
    what = Written(given.model, given.values, given.tokenizer, given.end_token, card, given.tokenizer_config)
    write_folder(folder, what, shard_mb * 1_000_000)
    parameters = format_count(given.model.parameter_count)
    print(f"{folder}: {parameters} parameters of {given.origin}, as AutoModelForCausalLM.from_pretrained reads them.")
    if given.tokenizer is None:
        print("It has no tokenizer. Give export.tokenizer=<tokenizer.json>.")


def _write_run(given: _Parameters, folder: Path, report: dict[str, Any] | None) -> None:
    from ttrain.train.checkpoint.checkpoint import CheckpointContent
    from ttrain.train.checkpoint.progress import Progress, position_after
    from ttrain.train.runs.export import Stored, write_run
    from ttrain.train.runs.record import environment_record

    stored = {**to_dict(given.config), "model": build.stored_model(given.config.model, given.model)}
    stored["run"]["dir"] = None  # a run does not know where it lies, so it can be moved
    stored["task"]["name"] = "train"
    progress = Progress(step=given.step, compacted=report is not None)
    progress.read = position_after(given.step, stored)
    told = (given.tokenizer, None, given.tokenizer_config)
    content = CheckpointContent(given.step, stored, progress.to_dict(), *told)
    arguments = list(given.config.source.overrides)
    attempt = {**environment_record(stored, {}, {}, None, arguments), "exported_from": given.origin}
    if report is not None:
        attempt["compacted"] = report
    written = write_run(folder, Stored(given.values, given.model), content, attempt)
    print(f"{written}: a run with the parameters of {given.origin}, without optimizer state.")
    if given.tokenizer is None:
        print("It has no tokenizer, so it can't be sampled. Give export.tokenizer=<tokenizer.json>.")
