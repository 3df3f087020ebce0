"""Weights & Biases as a view of the metrics."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ttrain.core.errors import UserError
from ttrain.train.logging.metrics import Metrics
from ttrain.train.logging.wandb_history import WandbHistory
from ttrain.train.settings import WandbConfig

_SETTINGS = {"console": "off", "init_timeout": 60}  # seconds; of wandb's settings, unless the environment has them
_MODES = {"dryrun": "offline", "run": "online"}  # older words that wandb still takes in WANDB_MODE


class WandbLogger:
    """One W&B run per job. Never prompts: where no account is logged in, the run stays offline on the disk.

    A key that is null is left to wandb, which reads it from the environment: WANDB_ENTITY, WANDB_TAGS and its like.
    """

    def __init__(
        self,
        config: WandbConfig,
        folder: Path,
        run_config: dict[str, Any],
        run_id: str | None,
        say: Callable[[str], None],
    ) -> None:
        """`run_id` continues that run, which an earlier attempt began; None begins a new one. Raises UserError."""
        self._wandb = _import_wandb()
        self._history = WandbHistory(folder, Path(os.environ.get("WANDB_DIR") or folder))
        self._config, self._folder, self._run_config = config, folder, run_config
        self._id = run_id or self._history.run_id  # a run that was killed before its first save has it here only
        self.mode = self._mode(say)
        if self.mode != "disabled":
            self._history.set_earlier_aside(self._id)
        try:
            self._run = self._start(self.mode)
        except Exception as error:  # whatever the network does, training goes on
            if self.mode != "online":
                raise UserError(f"W&B could not start: {error}. Fix that, or give logger=console.") from error
            say(f"W&B could not start online ({error}).")
            self.mode = self._offline(say)
            self._run = self._start(self.mode)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        for line in self._history.begin(str(self._run.id), self.mode, getattr(self._run, "project", None)):
            self._log(line)

    @property
    def run_id(self) -> str | None:
        """Return the id that a later attempt continues; None when disabled, because there is no run then."""
        return None if self.mode == "disabled" else str(self._run.id)

    def log(self, metrics: Metrics) -> None:
        if self._history.is_new(metrics):  # a resumed attempt repeats steps that W&B already has
            self._log(metrics)

    def _log(self, metrics: Metrics) -> None:
        self._run.log({key: value for key, value in metrics.items() if value is not None})

    def close(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)
        self._history.end(self.mode)

    def _mode(self, say: Callable[[str], None]) -> str:
        mode = self._config.mode or os.environ.get("WANDB_MODE") or "online"
        mode = _MODES.get(mode, mode)
        if mode == "online" and not self._logged_in():
            say("W&B: no account is logged in on this machine (wandb login).")
            return self._offline(say)
        return mode

    def _offline(self, say: Callable[[str], None]) -> str:
        append = "--append " if self._history.online else ""  # after a part that is online already
        say(f"W&B keeps this run offline; later: wandb sync {append}{self._history.place}/offline-run-*")
        return "offline"

    def _logged_in(self) -> bool:
        try:
            return bool(self._wandb.login(prompt=False, verify=False))
        except TypeError:  # versions whose login has no `prompt`
            return bool(self._wandb.api.api_key)
        except Exception:  # a malformed key: the run still must not stop or ask
            return False

    def _start(self, mode: str) -> Any:
        config, environment = self._config, os.environ
        settings = {key: value for key, value in _SETTINGS.items() if f"WANDB_{key.upper()}" not in environment}
        project = self._history.project if self._id else None  # where the run is that goes on
        return self._wandb.init(
            project=config.project or project or environment.get("WANDB_PROJECT") or "ttrain",
            entity=config.entity,
            mode=mode,
            dir=str(self._history.place.parent),
            id=self._id,
            resume="allow" if self._id else None,
            name=config.run_name or environment.get("WANDB_NAME") or self._folder.name,
            group=config.group,
            tags=config.tags,
            config=self._run_config,
            reinit="create_new",  # several jobs of a sweep in one process are several runs
            settings=self._wandb.Settings(**settings),
        )


def _import_wandb() -> Any:
    try:
        import wandb
    except ImportError:
        raise UserError("logger=wandb needs the package wandb: pip install wandb, or give logger=console.") from None
    return wandb
