"""Make components from small configs, by registered name. Nothing else in ttrain looks a name up.

A target takes its own small config first, then what its group hands it; see each function. Only these functions import
the modules behind the names, when they are called. The last functions are targets of components that do not take their
small config as it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from ttrain.config.registry import component
from ttrain.config.schema import Config
from ttrain.core.errors import ConfigError, UserError, raised_as
from ttrain.core.options import as_keys, key_of
from ttrain.core.waiting import Waiting
from ttrain.data.batches import Dataset, Sizes
from ttrain.data.tokenizer import Tokenizer
from ttrain.device.base import Device
from ttrain.device.info import info_of
from ttrain.device.settings import DeviceConfig
from ttrain.engine.base import Engine
from ttrain.engine.settings import EngineConfig
from ttrain.engine.state import State
from ttrain.models.base import Model
from ttrain.models.settings import AGILLMConfig
from ttrain.nn.lora import attach
from ttrain.nn.settings import LoraConfig, PrecisionConfig
from ttrain.objectives.base import Objective
from ttrain.objectives.frozen import FrozenModel
from ttrain.optim.groups import learning_rates, trained
from ttrain.parallel.ranks import Ranks
from ttrain.parallel.settings import ParallelConfig, place
from ttrain.parallel.world import World
from ttrain.train.checkpoint.adapters import PeftAdapter
from ttrain.train.checkpoint.hub_folder import find_folder, read_config
from ttrain.train.logging.loggers import Console, Logger
from ttrain.train.runs.warm_start import WarmStart, WeightSource, open_warm_start
from ttrain.train.settings import LoggerConfig, WandbConfig
from ttrain.train.steps.resident import Resident
from ttrain.train.steps.session import Session
from ttrain.train.steps.step_graph import StepGraph


def made(group: str, config: Any, *given: Any) -> Any:
    """Return the component of a group that a config names: target(config, *given).

    Of an optimizer and a schedule `given` is nothing and the steps of the run, of an engine a device and a state. A
    logger makes views of the metrics beside the console, and is given the run directory, the config as plain values,
    the id that it gave an earlier attempt, and a function that prints a line for the user.
    """
    return component(group, config.name).load()(config, *given)


def build_dataset(config: Config, first: Callable[[Dataset], None] = lambda _: None) -> Dataset:
    """The dataset, with the sizes that the model asks for: target(config.data, sizes).

    `first` may refuse it before it is compared with the model and with the lengths that sequences are to have. Raises
    DataError for data that can't be used, ConfigError with every problem that shows once the data is known.
    """
    with Waiting("Reading the data"):
        objective = made("objective", config.objective)
        if getattr(config.model, "from_", None) is not None and hasattr(objective, "labels_of"):
            objective.labels_of(read_config(find_folder(config.model.from_)))
        stored = config.objective if getattr(config.objective, "top_k", None) else None
        rows = objective if config.objective.reads_rows else None
        sizes = replace(data_sizes(config.model), rows=rows, stored=stored)
        dataset: Dataset = made("data", config.data, sizes)
    first(dataset)
    if problems := data_problems(dataset, config):
        raise ConfigError(problems)
    return dataset


def data_problems(data: Any, config: Config) -> list[str]:
    """Every problem that only shows once the data is built and before a device is touched."""
    found, model, lengths = list[str](), config.model, config.train.length_schedule
    if lengths and not hasattr(data, "at"):
        fixed = f"data={config.data.name} can't change the length of its sequences"
        found.append(f"train.length_schedule={lengths}: {fixed}. Leave it empty.")
    vocabulary = getattr(model, "vocabulary", None)
    if vocabulary is not None and data.vocabulary is not None and vocabulary < data.vocabulary:
        larger = f"Give model.vocabulary={data.vocabulary} or more, or null to take the tokenizer's."
        added = getattr(data, "description", {}).get("end_token", {})
        if getattr(model, "from_", None) is None:
            advice = larger
        elif added.get("added") and data.vocabulary == vocabulary + 1:
            advice = (
                f"One of them, {added['text']}, is added to end a document, because the tokenizer has no token known "
                "for that. Name one of its own: data.end_token=<token>."
            )
        else:
            advice = "Give the tokenizer of model.from."
        found.append(f"model.vocabulary={vocabulary}: the tokenizer has {data.vocabulary} ids. {advice}")
    return found


def data_sizes(model: Any) -> Sizes:
    """Return what a model asks of its data by its config: the context, or the numbers of inputs and outputs."""
    width = getattr(model, "width", None)
    if hasattr(model, "inputs"):
        return Sizes(inputs=model.inputs or width, outputs=model.outputs or width)
    return Sizes(context=getattr(model, "context", None))


def with_adapters(lora: LoraConfig, explicit: Collection[str]) -> LoraConfig:
    """The config of a new run's adapters with what the folder of lora.from says of them."""
    if lora.from_ is None:
        return lora
    return PeftAdapter.open(lora.from_).adopted(lora, explicit)


def build_model(config: Config, vocabulary: int | None = None) -> Model:
    """The model on symbolic tensors: target(config.model, compute dtype), and its adapters.

    `vocabulary` is the tokenizer's, taken where model.vocabulary is null. Raises ConfigError where the device can't
    place the parameters as its config says, or the model can't attend as that of the data does.
    """
    model, info = config.model, info_of(config.device)
    if isinstance(model, AGILLMConfig) and model.pad_vocabulary is None:
        model = replace(model, pad_vocabulary=info.row_multiple)
    if getattr(model, "vocabulary", 0) is None:
        model = replace(model, vocabulary=vocabulary)
    built = _model(model, config)
    problems = info.parameter_problems(config.device, list(built.parameters()), bool(getattr(model, "tied", False)))
    packing = getattr(config.data, "attention", "sequence") == "document"
    if packing and not hasattr(built, "packing_documents"):
        problems.append(
            f"data.attention=document: model={model.name} attends to whole sequences. Give data.attention=sequence."
        )
    if problems:
        raise ConfigError(problems)
    return built.packing_documents() if packing else built  # type: ignore[attr-defined]


def _model(sizes: Any, config: Config) -> Model:
    """The model of these sizes, in the precision and with the adapters of a config."""
    model = made("model", sizes, config.precision.compute)
    if config.lora.rank:
        attach(model, config.lora)
    made("objective", config.objective).attach(model)
    config.precision.set_masters(model.parameters().values())
    return model


def resolved_model(config: Any, model: Model) -> dict[str, Any]:
    """The model's config as checkpoints keep it: with its sizes, and without what a null leaves to the device."""
    kept = as_keys(model.config)
    return kept | ({"pad_vocabulary": config.pad_vocabulary} if isinstance(config, AGILLMConfig) else {})


def resized_model(model: Model, length: int, config: Config) -> Model | None:
    """Return the model as it records sequences of `length` tokens with the parameters it has.

    A model with parameters per position offers `at_length(length)`; any other is built with that context. None where
    parameters or buffers would change their shapes.
    """
    if hasattr(model, "at_length"):
        return model.at_length(length)
    if not hasattr(model.config, "context"):
        return None
    other = _model(replace(model.config, context=length), config)
    tensors: list[tuple[Any, Any]] = [(other.parameters(), model.parameters()), (other.buffers(), model.buffers())]
    same = all(tensor.spec == before[path].spec for after, before in tensors for path, tensor in after.items())
    return other if same else None


def shorter_model(model: Model, length: int, config: Config) -> Model | None:
    """See resized_model; None where the length is the model's context. Raises ConfigError where it can't be resized."""
    if length == model.config.context:
        return None
    shorter = resized_model(model, length, config)
    if shorter is None:
        raise ConfigError(
            f"train.length_schedule: model={model.config.name} has parameters or buffers whose shapes depend on "
            "model.context. Leave train.length_schedule empty."
        )
    return shorter


def build_warm_start(config: Config, model: Model, tokenizer: Tokenizer | None = None) -> WarmStart | None:
    """Open the source of a new run's initial values: model.from, else train.init_from; None without either.

    `tokenizer` is that of the data. Raises CheckpointError for what can't be taken, and where what starts anew
    would not be trained.
    """
    folder = getattr(config.model, "from_", None)
    source = folder or config.train.init_from
    if source is None:
        return None
    told = None if tokenizer is None else tokenizer.to_json()
    start = open_warm_start(source, model, told, config.train.init_anyway, whole=folder is not None)
    start.check_frozen(trained(model.parameters(), config.optimizer))
    return start


def build_adapters(lora: LoraConfig, model: Model) -> PeftAdapter | None:
    """Open a new run's first adapters; None without lora.from. Raises CheckpointError for what does not fit."""
    if lora.from_ is None:
        return None
    opened = PeftAdapter.open(lora.from_)
    opened.values(model)  # that they fit is known before a device is touched
    return opened


def learned_from(config: Config, dataset: Dataset | None) -> Config:
    """The config with what its objective found in the rows of the data, such as the names of classes."""
    objective = getattr(dataset, "objective", None)
    return config if objective is None else replace(config, objective=objective.config)


def build_objective(config: Config, slices: int) -> Objective:
    """The objective, with the frozen model that it reads, if any. Raises UserError where that can't be had."""
    objective: Objective = made("objective", config.objective)
    parts = config.train.gradient_accumulation
    objective.slice = parts, config.train.batch_size // slices // parts
    objective.balances = getattr(config.model, "balances", False)
    if (named := config.objective.frozen_source(config)) is not None:
        objective.frozen = open_frozen(*named, config)
    return objective


def open_frozen(key: str, given: str, config: Config) -> FrozenModel:
    """A model that an option `key` names, in the run's precision, to stand frozen beside the trained one."""
    with raised_as(UserError, f"{key}={given}", of=UserError):
        source = WeightSource.find(given)
        kind = component("model", source.model["name"]).config
        sizes = {each.name: source.model[key_of(each)] for each in fields(kind) if key_of(each) in source.model}
        frozen = FrozenModel(key, made("model", kind(**sizes), config.precision.compute), source)
    config.precision.set_masters(frozen.parameters)
    return frozen


def build_session(
    model: Model,
    device: Device,
    config: Config,
    training: bool = True,
    ranks: Ranks | None = None,
    resident: Resident | None = None,
    objective: Objective | None = None,
) -> Session:
    """The model on the device, its values still unset.

    Without `training` there are neither gradients nor the optimizer's tensors.
    """
    ranks, train, guard = ranks or Ranks(), config.train, config.guard
    if train.noise_scale and device.chips > 1:
        raise UserError("train.noise_scale=true: the chips of a mesh share every micro-batch. Leave it out.")
    rows = train.batch_size // ranks.slices // train.gradient_accumulation // device.chips
    graph = StepGraph(
        model,
        made("optimizer", config.optimizer),
        rows,
        train.gradient_accumulation,
        guarded=guard.nonfinite == "skip",
        watched=guard.activations,
        chips=device.chips,
        ranks=ranks,
        ema=train.ema,
        noise=train.noise_scale,
        resident=resident,
        low_bits=device.compiles and config.engine.name == "traced",  # for which compiled steps have kernels
        frees=device.arenas and device.host is None and device.chips == 1,
        objective=objective
        or (build_objective(config, ranks.slices) if training else made("objective", config.objective)),
        uniform_compute=device.uniform_compute,
    )
    state = State(device, graph.state_tensors(training))
    return Session(graph, state, made("engine", config.engine, device, state))


def build_rates(model: Model, config: Config) -> Callable[[int], dict[str, float]]:
    """Step, counted from 1, to its learning rates by the names of their step inputs."""
    schedule = made("schedule", config.schedule, config.train.last)
    return learning_rates(model.parameters(), config.optimizer, schedule)


def planned_ranks(config: ParallelConfig) -> Ranks:
    """The first of the ranks of a run that is planned only."""
    return config.ranks(count=config.world or config.processes or 1)


def build_world(config: ParallelConfig, device: DeviceConfig) -> World:
    """Join the ranks of a run; return once all of them are there."""
    here = place()
    if config.name == "none" or here is None:
        return World(config.ranks())
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # a rank's own message tells more
    from ttrain.device.torch.info import is_gpu
    from ttrain.parallel.distributed import DistributedWorld

    return DistributedWorld(here, config, is_gpu(device))


def build_device(config: DeviceConfig, precision: PrecisionConfig | None = None, world: World | None = None) -> Device:
    """The device, opened: target(config), with the group of ranks that it belongs to where there are any.

    Raises DeviceUnavailable or DeviceBusy. A precision may say how the device holds matrices.
    """
    if precision is not None:
        config = info_of(config).held(config, precision.name)
    opens = component("device", config.name).load()
    if world is None or world.group is None:
        return opens(config)
    return opens(replace(config, index=world.group.index), world.group)


def planned_device(config: DeviceConfig) -> Device:
    """A device that plans as the named one does and touches no hardware.

    The package of a device offers it as `planned(config)` in a module `planned` beside its target. Without one the plan
    is that of a device with a kernel for every op.
    """
    row = component("device", config.name)
    package = row.target.partition(":")[0].rpartition(".")[0] if isinstance(row.target, str) else ""
    if package and find_spec(f"{package}.planned") is not None:
        return replace(row, target=f"{package}.planned:planned").load()(config)
    return null_device(config)


def build_console(config: LoggerConfig, name: str | None = None, bar: bool = True) -> Console:
    """Return the console of a run; without a progress bar for logger=jsonl. `name` marks its messages."""
    return Console(bar=bar and "jsonl" not in _loggers(config), name=name)


def _loggers(config: LoggerConfig) -> list[str]:
    return [config.name, *getattr(config, "beside", ())]  # a plugin's may have no such key


def build_loggers(config: LoggerConfig, *given: Any) -> list[Logger]:
    """Return the views of all loggers that a config chooses; see `made` for what they are given."""
    rows = [component("logger", name) for name in _loggers(config)]
    if other := next((row.name for row in rows if not isinstance(config, row.config)), None):
        raise ConfigError(f"logger.beside=[{other}]: has keys of its own. Give logger=[{','.join(_loggers(config))}].")
    return [view for row in rows for view in row.load()(config, *given)]


def null_device(config: DeviceConfig) -> Device:
    """Shapes only."""
    from ttrain.device.null.device import NullDevice

    return NullDevice()


def our_engine(config: EngineConfig, device: Device, state: State) -> Engine:
    """Return the engine of ttrain that has the config's name."""
    engine = resolve_name(f"ttrain.engine.{config.name}:{config.name.title()}Engine")
    return engine(device, state) if config.name == "dynamic" else engine(device, state, config.rematerialize)


def no_views(*_: Any) -> list[Logger]:
    """The console and metrics.jsonl are enough."""
    return []


def tensorboard_views(config: LoggerConfig, folder: Path, *_: Any) -> list[Logger]:
    """TensorBoard."""
    from ttrain.train.logging.tensorboard_logger import TensorBoardLogger

    return [TensorBoardLogger(folder)]


def wandb_views(config: WandbConfig, *given: Any) -> list[Logger]:
    """Weights & Biases."""
    from ttrain.train.logging.wandb_logger import WandbLogger

    return [WandbLogger(config, *given)]
