"""Open a trained model for a task: from a checkpoint of a run, a file of weights or a folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from ttrain.config import build
from ttrain.config.saved import continued
from ttrain.config.schema import Config
from ttrain.core.errors import CheckpointError, ConfigError, UserError, raised_as
from ttrain.core.names import listed
from ttrain.core.waiting import Waiting, waited_for
from ttrain.data.chat.jinja import TokenizerTemplate, tokenizer_settings
from ttrain.data.chat.messages import Template
from ttrain.data.end_token import named_end
from ttrain.data.gguf_file import gguf_tokenizer, is_gguf
from ttrain.data.library_tokenizer import parse_tokenizer
from ttrain.data.settings import TextConfig
from ttrain.models.agillm_weights import sizes_of
from ttrain.models.identity import WEIGHTS, differing
from ttrain.models.settings import AGILLMConfig
from ttrain.models.weight_checks import TOKENS
from ttrain.nn.settings import LoraConfig
from ttrain.train.checkpoint.adapters import PeftAdapter
from ttrain.train.checkpoint.checkpoint import Checkpoint
from ttrain.train.checkpoint.hub_folder import find_folder, tokenizer_file
from ttrain.train.checkpoint.retention import find_checkpoint
from ttrain.train.checkpoint.weights_file import read_file, read_metadata, read_parameters
from ttrain.train.protocols import Array
from ttrain.train.runs.resume import check_adapters, check_architecture
from ttrain.train.sampling.source import StepsByLength
from ttrain.train.sampling.stream import Stop
from ttrain.train.task_settings import CheckpointConfig


@dataclass
class OpenedModel:
    """A model that is on no device yet, its values by path, and what is known of where they come from."""

    config: Config
    values: Mapping[str, Array]
    tokenizer_json: str | None
    step: int | None
    origin: str  # the run, or the file or folder of weights
    tokenizer_config: dict[str, Any] = field(default_factory=dict)
    progress: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: Checkpoint | None = None  # that has the values

    @cached_property
    def tokenizer(self) -> Any:
        """Return the tokenizer; None where there is none."""
        if self.tokenizer_json is None:
            return None
        tokenizer = parse_tokenizer(self.tokenizer_json)
        tokenizer.config = self.tokenizer_config
        return tokenizer

    @cached_property
    def model(self) -> Any:
        """Build the model when it is first asked for. Raises CheckpointError where it would compute something else."""
        model = build.build_model(self.config, getattr(self.tokenizer, "vocabulary", None))
        if self.checkpoint is not None:
            check_architecture(self.checkpoint.config, model.config, self.checkpoint.path, WEIGHTS)
            if missing := [name for name in model.persistent() if name not in self.values]:
                raise CheckpointError(f"{self.checkpoint.path} lacks {listed(missing)}. Use another checkpoint.")
        return model

    @property
    def end_token(self) -> str | None:
        """The token that ends a document, where one is named."""
        return named_end(self.config.data, self.tokenizer_config)

    @property
    def stop(self) -> Stop:
        """Ends of what the model writes, as sample.stop says."""
        return Stop.of(self.tokenizer, self.config.sample.stop, self.end_token)

    @property
    def base(self) -> str | None:
        """Source of the initial values that the model was trained from."""
        return getattr(self.config.model, "from_", None) or self.config.train.init_from

    @property
    def template(self) -> str | None:
        """Template of conversations, in the words of data.template; None where there is none."""
        named: str | None = getattr(self.config.data, "template", None)
        if named is None and "chat_template" in self.tokenizer_config:
            return "tokenizer"
        return None if named == "tokenizer" and "chat_template" not in self.tokenizer_config else named

    def conversations(self) -> Any:
        """Return what makes texts of conversations: of a run, what made those it was trained on. Raises UserError."""
        if self.template is None:
            raise UserError(
                f"{self.origin}: has no template of conversations, neither with its tokenizer nor with its data. Give "
                "a run of data=documents, or beside model.from data=documents data.sources=[] data.template=chatml."
            )
        if self.template == "tokenizer":
            return TokenizerTemplate(self.tokenizer.config, place=self.origin)
        return Template(self.template)

    @contextmanager
    def on_device(self, chips: int | None = None) -> Iterator[StepsByLength]:
        """Put the model on the device of its config, of at most so many chips; give what builds its steps.

        Raises UserError for a device that can't do this.
        """
        config = self.config
        with ExitStack() as stack:
            device = stack.enter_context(closing(build.build_device(config.device, config.precision)))
            if not device.computes or device.chips > (chips or device.chips):
                why = "shares a batch between chips" if device.computes else "computes no values"
                raise UserError(f"device {device.name} {why}. Give device=cpu or one chip.")
            if device.caution is not None:
                print(f"WARNING: {device.caution}", file=sys.stderr)
            with Waiting("Loading the model"):
                session = build.build_session(self.model, device, config, training=False)
                stack.enter_context(closing(session))
                for name in waited_for(self.values, "Reading tensors", str):
                    session.state.write(name, self.values[name])
            yield StepsByLength(session, lambda length: build.resized_model(self.model, length, config))


def of_run(config: Config, wanted: CheckpointConfig, always_given: Iterable[str], needs: str = "") -> OpenedModel:
    """The model of run.dir, as its checkpoint says with what the user gave on top; the data is not needed.

    The section `wanted` says which checkpoint, and whether averages stand for the weights.

    Raises CheckpointError for other adapters, and where there is no tokenizer and `needs` tells what needs one.
    """
    run = config.run.dir
    assert run is not None  # the config's checks hold it so
    checkpoint = find_checkpoint(Path(run), wanted.checkpoint, partial(print, file=sys.stderr))
    if needs and checkpoint.tokenizer is None:
        raise CheckpointError(f"{checkpoint.path} has no tokenizer, so its model {needs}")
    config = continued(checkpoint.config, config, always_given)
    check_adapters(checkpoint.config, config.lora, checkpoint.path)
    told = (checkpoint.tokenizer_config, checkpoint.progress, checkpoint)
    values = checkpoint.weights(wanted.average)
    return OpenedModel(config, values, checkpoint.tokenizer, checkpoint.step, run, *told)


def of_given(config: Config, wanted: CheckpointConfig, needs: str, instead: str) -> OpenedModel:
    """The model of run.dir, else of model.from; `instead` says what to give for a run that has no tokenizer.

    Raises as `of_run` and `of_folder` do.
    """
    if config.run.dir is None:
        found = of_folder(config, needs)
    else:
        found = of_run(config, wanted, ("device", "engine", "logger", "sample"), f"{needs} {instead}")
    if getattr(build.made("objective", found.config.objective), "opened_by", TOKENS) != TOKENS:
        raise ConfigError(f"objective={found.config.objective.name}: its model predicts no tokens. {instead}")
    return found


def of_weights(config: Config, path: Path, tokenizer_of: Callable[[str | None], str | None]) -> OpenedModel:
    """The model of a file or folder, with the adapters of lora.from; `tokenizer_of` gets its own tokenizer's JSON.

    Raises CheckpointError where it holds another model than the config's.
    """
    content = read_file(path)
    if isinstance(config.model, AGILLMConfig):
        with raised_as(CheckpointError, str(path), of=CheckpointError):
            sized = replace(config.model, preset=None, **sizes_of(content))
        config = replace(config, model=sized)
    metadata, step = read_metadata(path, content), content.get("step")
    step = step if isinstance(step, int) and step >= 0 else None
    alone, tokenizer = replace(config, lora=LoraConfig()), tokenizer_of(metadata.tokenizer)
    settings = tokenizer_settings(tokenizer_file(path)) if path.is_dir() or is_gguf(path) else {}
    opened = OpenedModel(alone, {}, tokenizer, step, str(path), settings)
    if differences := differing(metadata.of(opened.model), opened.model.config):
        raise CheckpointError(f"{path} holds another model: {'; '.join(differences)}. Give these keys as they were.")
    vocabulary = getattr(opened.tokenizer, "vocabulary", None)
    opened.values = _with_added(config, read_parameters(path, opened.model, content), vocabulary)
    return opened


def of_folder(config: Config, needs: str) -> OpenedModel:
    """The model of model.from, with the adapters of lora.from.

    Raises CheckpointError where it has no tokenizer; `needs` tells what needs one.
    """
    folder = find_folder(config.model.from_, weights=True)  # the config's checks hold it so

    def required(text: str | None) -> str:
        text = gguf_tokenizer(folder) if text is None and is_gguf(folder) else text  # raises the reason
        if text is None:
            raise CheckpointError(f"{folder} has no tokenizer.json, so its model {needs} Bring the whole folder.")
        return text

    data = config.data if "data.template" in config.source.explicit else TextConfig()
    return of_weights(replace(config, data=data), folder, required)


def _with_added(config: Config, values: Mapping[str, Array], vocabulary: int | None) -> Mapping[str, Array]:
    """The values of a model that is no run of ours, with what the adapters of lora.from add to them."""
    lora = build.with_adapters(config.lora, config.source.explicit)
    if lora.from_ is None and lora.rank:
        raise ConfigError(f"lora.rank={lora.rank}: is for training. Give lora.from=<folder of adapters> to add them.")
    if lora.from_ is None:
        return values
    model = build.build_model(replace(config, lora=lora), vocabulary)
    return PeftAdapter.open(lora.from_).added(values, model, lora.scale)
