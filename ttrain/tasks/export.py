"""task=export: a run's parameters as a file of weights or as a new run, compacted if asked; and files into runs."""

from __future__ import annotations

import dataclasses
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from ttrain.config import build
from ttrain.config.schema import Config, to_dict
from ttrain.core.errors import EXIT_DONE, ConfigError, DataError, UserError, raised_as
from ttrain.core.units import counted, format_bytes, format_count
from ttrain.core.waiting import Waiting
from ttrain.data.batches import Dataset
from ttrain.data.chat.messages import Template
from ttrain.data.library_tokenizer import parse_tokenizer, read_tokenizer
from ttrain.data.settings import DocumentsConfig
from ttrain.models.agillm_weights import compacted, rank_matrix_path
from ttrain.models.settings import AGILLMConfig
from ttrain.models.weight_checks import Weights
from ttrain.nn.module import ADAPTER
from ttrain.nn.settings import LoraConfig
from ttrain.objectives.settings import ObjectiveConfig
from ttrain.tasks.opening import OpenedModel, of_run, of_weights
from ttrain.train.checkpoint.adapters import merged, peft_names, write_peft
from ttrain.train.checkpoint.checkpoint import Progress
from ttrain.train.checkpoint.hub_folder import find_folder
from ttrain.train.checkpoint.save import CheckpointContent
from ttrain.train.checkpoint.weights_file import Metadata, same_tokenizer
from ttrain.train.logging.wandb_logger import WandbLogger
from ttrain.train.loop.evaluation import Evaluation
from ttrain.train.runs.export_folder import (
    Written,
    model_card,
    require_new,
    weight_state,
    whole_folder,
    write_folder,
    write_run,
    write_weights,
)
from ttrain.train.runs.export_gguf import export_problem, gguf_notices, write_gguf
from ttrain.train.runs.record import environment_record
from ttrain.train.runs.warm_start import unrounded
from ttrain.train.settings import WandbConfig
from ttrain.train.steps.phases import PhaseSchedule
from ttrain.train.task_settings import ExportConfig


def run(config: Config) -> None:
    """Writes what export.file and export.dir ask for, and says what it wrote."""
    with Waiting("Reading the parameters"):
        given = _from_run(config) if config.run.dir is not None else _from_file(config)
    if given.tokenizer_config.get("add_bos_token") is False and given.tokenizer_json is not None:
        given.tokenizer_json = json.dumps({**json.loads(given.tokenizer_json), "post_processor": None})
    wanted, file = config.export, None if config.export.file is None else Path(config.export.file)
    if file is not None and given.config.lora.rank:
        raise ConfigError("export.merge=false: a file of weights has no adapters. Give export.dir.")
    if problem := export_problem(given.model, file, wanted.form):
        raise ConfigError(problem)
    if wanted.dir is not None:
        require_new(Path(wanted.dir))
    report = None
    if wanted.compact:
        with Waiting("Compacting the rank matrices"):
            given, report = _compacted(given)
    with Waiting(f"Writing {' and '.join(filter(None, (wanted.file, wanted.dir)))}"):
        if file is not None:
            _write_file(given, file, wanted)
        if wanted.dir is not None and wanted.form == "huggingface":
            _write_folder(given, Path(wanted.dir), wanted.shard_mb)
        elif wanted.dir is not None and wanted.form == "peft":
            _write_adapters(given, Path(wanted.dir))
        elif wanted.dir is not None:
            _write_run(given, Path(wanted.dir), report)
    if isinstance(config.logger, WandbConfig):
        say = partial(print, file=sys.stderr)
        logger = WandbLogger(config.logger, Path(config.run.dir or ""), _stored(given), None, say)
        for path in filter(None, (wanted.file, wanted.dir)):
            logger.upload("export", Path(path))
        logger.close(EXIT_DONE)


def _stored(given: OpenedModel) -> dict[str, Any]:
    """Return the config as checkpoints keep it."""
    return {**to_dict(given.config), "model": build.resolved_model(given.config.model, given.model)}


def _write_file(given: OpenedModel, file: Path, wanted: ExportConfig) -> None:
    if wanted.form == "gguf":
        for notice in gguf_notices(given.model, wanted.dtype):
            print(f"WARNING: {notice}", file=sys.stderr)
        write_gguf(file, _written(given), wanted.dtype)
    else:
        metadata = Metadata(_stored(given)["model"], given.tokenizer_json)
        write_weights(given.model, given.values, file, wanted.form, given.step or 0, metadata)
    size = format_bytes(file.stat().st_size)
    print(f"{file}: {format_count(given.model.parameter_count)} parameters, {size}.")


def _written(given: OpenedModel) -> Written:
    """Add the template that task=chat talks by; the default one takes no place of a template that came along."""
    known, named = given.tokenizer_config, given.template
    if named not in (None, "tokenizer") and (named != DocumentsConfig().template or "chat_template" not in known):
        known = {**known, "chat_template": Template(str(named)).to_jinja()}
    form = known.get("model_type") if given.base or given.step is None else None
    return Written(given.model, given.values, given.tokenizer_json, given.end_token, known, form)


def _write_adapters(given: OpenedModel, folder: Path) -> None:
    if not given.config.lora.rank:
        raise ConfigError(f"export.form=peft: {given.origin} has no adapters. Give a run with lora.rank.")
    if stacked := [path for path, each in given.model.parameters().items() if ADAPTER in path and len(each.shape) == 3]:
        told = f"PEFT has no form for adapters of experts, such as {stacked[0]}"
        raise ConfigError(f"export.form=peft: {told}. Give export.form=huggingface, or lora.targets without experts.")
    with whole_folder(folder) as beside:
        write_peft(beside, given.model, given.values, given.config.lora, given.base)
    print(f"{folder}: {counted(len(peft_names(given.model)) // 2, 'adapter')} of {given.origin}, as PEFT reads them.")


def _from_file(config: Config) -> OpenedModel:
    source = config.export.source  # or model.from, as the config's checks hold it
    path = find_folder(config.model.from_, weights=True) if source is None else Path(source)
    return of_weights(config, path, partial(_tokenizer, config, path))


def _from_run(config: Config) -> OpenedModel:
    kept = of_run(config, config.export, ("export", "run", "device", "engine", "logger"))
    kept.origin = f"step {kept.step} of {kept.origin}"
    values, told = unrounded(kept.values, kept.model, kept.base, getattr(kept.config.model, "from_", None) is not None)
    given = dataclasses.replace(kept, values=values)
    if told is not None and config.export.form != "peft":
        print(f"WARNING: {told}", file=sys.stderr)
    if given.config.lora.rank and config.export.merge and config.export.form != "peft":
        alone = dataclasses.replace(given.config, lora=LoraConfig())
        given = dataclasses.replace(given, values=merged(given.values, given.config.lora.scale), config=alone)
        if kept.config.lora.base is not None and type(kept.config.objective) is ObjectiveConfig:
            print(_compared(kept, given))
    return given


def _compared(kept: OpenedModel, merged: OpenedModel) -> str:
    """Tell the losses of a run in fewer bits and of what is exported of it, on the run's held-out data."""
    base = kept.config.lora.base
    try:
        dataset = build.build_dataset(kept.config)
    except UserError as error:
        return f"The losses in {base} and of the export are not compared, for want of the run's data: {error}"
    one, other = (_held_out_loss(each, dataset) for each in (kept, merged))
    return f"val/loss is {one:.4f} in {base}, and {other:.4f} as exported: {one - other:+.4f} by fewer bits."


def _held_out_loss(given: OpenedModel, dataset: Dataset) -> float:
    with given.on_device(chips=1) as steps:
        graph, prepare = steps.session.graph, steps.session.graph.objective.prepare(given.model)
        step = steps.session.engine.build("evaluate", graph.trace_evaluate)
        found = Evaluation(step, dataset, graph.rows, given.config.train.eval_sequences, prepare)()
    assert found is not None  # nothing stops it
    return found.loss


def _tokenizer(config: Config, path: Path, own: str | None) -> str | None:
    """The JSON of the tokenizer of a file, else that of export.tokenizer. Raises DataError where the two differ."""
    given = config.export.tokenizer
    other = None if given is None else read_tokenizer(given, "export.tokenizer").to_json()
    if own is None:
        return other
    with raised_as(DataError, f"{path} holds a tokenizer that can't be used", of=(DataError, ValueError, KeyError)):
        own = parse_tokenizer(own).to_json()
    if not same_tokenizer(own, other):
        raise DataError(
            f"export.tokenizer={given} is not the tokenizer that {path} holds, so its token ids would change their "
            "meaning. Leave the key out."
        )
    return own


def _compacted(given: OpenedModel) -> tuple[OpenedModel, dict[str, Any]]:
    """Return the same function with rank matrices of fewer columns, and the report that is kept with it."""
    if not isinstance(given.config.model, AGILLMConfig):
        name = given.config.model.name
        raise ConfigError(f"export.compact=true: only AGILLM has rank matrices, and this model is {name}.")
    layers = {layer: given.values[rank_matrix_path(layer)] for layer in range(given.model.layers)}
    matrices, report = compacted(layers)
    print("layer  columns  kept  error of U U^T")
    for entry in report["layers"]:
        print("{layer:>5}  {before:>7}  {kept:>4}  {error:>14.1e}".format(**entry))
    print(f"rank {given.model.rank} becomes {report['rank']}, for all layers alike.")
    padding = given.config.model.pad_vocabulary
    model_config = dataclasses.replace(given.model.config, rank=report["rank"], pad_vocabulary=padding)
    config = dataclasses.replace(given.config, model=model_config)
    narrower = {rank_matrix_path(layer): matrix for layer, matrix in matrices.items()}
    values = Weights(given.values, lambda path: narrower[path] if path in narrower else given.values[path])
    return dataclasses.replace(given, config=config, values=values, checkpoint=None), report


def _write_folder(given: OpenedModel, folder: Path, shard_mb: int) -> None:
    card = model_card(folder.name, _stored(given), given.model.parameter_count, given.origin, given.progress)
    write_folder(folder, _written(given), card, shard_mb * 1_000_000)
    parameters, opened_by = format_count(given.model.parameter_count), given.model.opened_by
    reads = f"{opened_by}.from_pretrained" if opened_by.startswith("Auto") else opened_by
    print(f"{folder}: {parameters} parameters of {given.origin}, as {reads} reads them.")
    if given.tokenizer_json is None:
        print("It has no tokenizer. Give export.tokenizer=<tokenizer.json>.")


def _write_run(given: OpenedModel, folder: Path, report: dict[str, Any] | None) -> None:
    stored = _stored(given)
    stored["run"]["dir"] = None  # a run does not know where it lies, so it can be moved
    stored["task"]["name"] = "train"
    step = given.step or 0
    samples, tokens, *_ = PhaseSchedule.of(given.config.train, stored["model"].get("context")).read(0, step)
    progress = Progress(step=step, compacted=report is not None, read_samples=samples, read_tokens=tokens)
    told = (given.tokenizer_json, None, given.tokenizer_config)
    content = CheckpointContent(step, stored, dataclasses.asdict(progress), *told)
    command = given.config.source.command()
    attempt = {**environment_record(stored, {}, {}, None, command), "exported_from": given.origin}
    if report is not None:
        attempt["compacted"] = report
    write_run(folder, weight_state(given.values, given.model), content, attempt)
    print(f"{folder}: a run with the parameters of {given.origin}, without optimizer state.")
    if given.tokenizer_json is None:
        print("It has no tokenizer, so it can't be sampled. Give export.tokenizer=<tokenizer.json>.")
