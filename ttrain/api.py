"""Names that `import ttrain` offers to programs: configs, whole runs, and training one step at a time."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttrain.cli import run_task
from ttrain.config import build
from ttrain.config.compose import load
from ttrain.config.registry import register
from ttrain.config.schema import Config, to_dict
from ttrain.config.validate import typed_config
from ttrain.core.errors import TtrainError, UserError
from ttrain.core.options import option
from ttrain.parallel.settings import rank_zero_only
from ttrain.parallel.world import World
from ttrain.train.runs.warm_start import Origin
from ttrain.train.steps.step import StepResult

if TYPE_CHECKING:
    import numpy as np

    from ttrain.models.base import Batch, Model

__all__ = ["Config", "StepResult", "Training", "TtrainError", "UserError", "load_config", "option", "register", "run"]


def load_config(*overrides: str, config_dir: str | Path | None = None) -> Config:
    """Return the checked config of a command: `load_config("model=gpt2", "train.steps=10")`.

    `config_dir` is a folder of more YAML files, like `--config-dir`. Raises ConfigError, a UserError, with all
    problems.
    """
    return load(overrides, config_dir=config_dir)


def run(*overrides: str, config_dir: str | Path | None = None) -> Any:
    """Run the command `python -m ttrain` with these overrides in this process, without sweeps and supervision.

    Returns the result of the task: for task=train the lowest held-out loss, or None if there is none. Raises
    TtrainError where the command would end with a message.
    """
    with rank_zero_only():
        return run_task(load_config(*overrides, config_dir=config_dir))


class Training:
    """A model and an optimizer on a device, trained by calls instead of a loop. Use it as a context manager.

    The config chooses device, engine, optimizer, precision and rows. Data, files and logging are up to the caller.
    `model` replaces the model of the config.
    """

    def __init__(self, config: Config, model: Model | None = None) -> None:
        """Open the device, set initial values, and build the steps. Nothing is computed yet.

        Initial values come from model.from, train.init_from and lora.from, else they are drawn from run.seed. Those of
        a given `model` are always drawn. Raises UserError if the config has problems or a part can't be built, such as
        a device that is missing or a model without all its sizes.
        """
        config = typed_config(to_dict(config), config.source)  # a config made by hand is checked as a command's is
        if (config.parallel.processes or 1) > 1:
            raise UserError(f"parallel.processes={config.parallel.processes}: Training is one process. Leave it out.")
        if model is None and getattr(config.model, "vocabulary", 0) is None:
            raise UserError("model.vocabulary=null: there is no tokenizer here to ask. Give the number of token ids.")
        config = replace(config, lora=build.with_adapters(config.lora, config.source.explicit))
        self.config, self.steps = config, 0
        self.model = build.build_model(config) if model is None else model
        origin = Origin()
        if model is None:
            origin.warm = build.build_warm_start(config, self.model)
            origin.adapter = build.build_adapters(config.lora, self.model)
        with ExitStack() as stack:
            device = stack.enter_context(closing(build.build_device(config.device, config.precision)))
            if not device.computes:
                raise UserError(f"device={config.device.name}: computes no values. Choose another, such as device=cpu.")
            world = World(config.parallel.ranks())
            session = build.build_session(self.model, device, config, ranks=world.ranks)
            self._session = stack.enter_context(closing(session))
            origin.set_values(self._session, config.run.seed)
            self._built = self._session.build_training()
            self._train_step = session.train_step(self._built, config.run.seed, world)
            self._rates = build.build_rates(self.model, config)
            self._stack = stack.pop_all()

    def step(self, batch: Batch, lr: float | None = None) -> StepResult:
        """Do one optimizer step on the fields of a batch, each an array of train.batch_size rows.

        `lr` replaces the learning rate of the schedule. Raises ShapeError for a missing field or a wrong shape.
        """
        from ttrain.optim.groups import learning_rates

        step, rates = self.steps + 1, self._rates
        if lr is not None:
            optimizer = replace(self.config.optimizer, lr=lr)
            rates = learning_rates(self.model.parameters(), optimizer, lambda step: 1.0)
        result = self._train_step(batch, rates(step), step)
        self.steps = step
        return result

    def evaluate(self, batch: Batch) -> float | None:
        """Return the loss of train.batch_size / parallel.slices / train.gradient_accumulation rows, without dropout.

        It uses the averages of the weights if the config keeps them, and changes nothing. Returns None if no row has a
        target.
        """
        from ttrain.models.base import LOSS_WEIGHT, loss_weights
        from ttrain.train.steps.session import averaged

        fields, counts = self._session.prepare(batch)
        if not counts[LOSS_WEIGHT]:
            return None
        with averaged(self._built):
            return float(self._built["evaluate"]({**fields, **loss_weights(counts)})["loss"])

    def parameters(self) -> dict[str, np.ndarray]:
        """Return host copies of the parameters by path, bf16 as fp32."""
        return {path: self._session.state.read(path) for path in self.model.parameters()}

    def set_parameters(self, values: Mapping[str, np.ndarray]) -> None:
        """Overwrite parameters by path. Raises GraphError for an unknown path or another shape."""
        for path, value in values.items():
            self._session.state.write(path, value)

    def close(self) -> None:
        """Release the steps, then the device."""
        self._stack.close()

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
