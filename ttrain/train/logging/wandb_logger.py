"""Weights & Biases as a view of the metrics; the lines that a W&B run already has are noted in wandb.json of the run.

Online, W&B's history can only grow: a resumed attempt repeats steps that an earlier attempt sent, and leaves them out.
Offline attempts lie on this disk until they are synced, each in a folder of its own under wandb/, and a sync of one may
replace another. So an offline attempt begins with all lines that were not sent online, and the folders of earlier ones
are set aside: one folder holds the whole history.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ttrain.core.errors import UserError, raised_as
from ttrain.core.files import read_json, replace_file, to_json
from ttrain.train.logging.metrics import METRICS, Event, Metrics, read_events, read_metrics
from ttrain.train.settings import WandbConfig

RECORD = "wandb.json"
SUPERSEDED = "superseded"
_KINDS = ("train/loss", "val/loss")
_ALERTS = ("spike", "rollback", "skipped", "not_moving", "held_out", "save_failed", "failed")  # events
_SAMPLE = ("step", "name", "prompt", "text", "reward")
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
        advice = "Run: pip install wandb, or give logger=console."
        with raised_as(UserError, "logger=wandb needs wandb", advice, ImportError):
            import wandb
        self._wandb: Any = wandb
        self._config, self._folder, self._run_config = config, folder, run_config
        self._place = Path(os.environ.get("WANDB_DIR") or folder) / "wandb"
        record = read_json(folder / RECORD)
        self._id = run_id or record.get("id")  # a run that was killed before its first save has it here only
        self._project = record.get("project")
        self._online: dict[str, int] = record.get("online", {})  # kind of line -> last step that was sent online
        self._told = dict(self._online)  # the same for this attempt
        self.mode = self._mode(say)
        if self.mode != "disabled":
            self._set_earlier_aside()
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
        self._id, self._project = str(self._run.id), getattr(self._run, "project", None)
        self._note(active=True)
        self._samples = [event for event in read_events(folder) if event["kind"] == "sample"]
        self._shown = len(self._samples)  # of them, in the newest table
        for line in read_metrics(folder / METRICS) if self.mode != "disabled" else ():
            self.log(line)  # what the W&B run lacks of the earlier lines

    @property
    def run_id(self) -> str | None:
        """Return the id that a later attempt continues; None when disabled, because there is no run then."""
        return None if self.mode == "disabled" else self._id

    def log(self, metrics: Metrics) -> None:
        """Send a line, unless the W&B run has it: a resumed attempt repeats steps."""
        kind, step = _kind(metrics), int(metrics["step"] or 0)
        if step > self._told.get(kind, 0):
            self._told[kind] = step
            self._run.log({key: value for key, value in metrics.items() if value is not None} | self._table())

    def tell(self, event: Event) -> None:
        """Alert whoever watches of what a guard did, and keep a sample for the table, which goes with the next line."""
        if event["kind"] in _ALERTS:
            self._run.alert(f"{self._folder.name}: {event['kind']}", event["message"], level="WARN")
        elif event["kind"] == "sample":
            self._samples.append(event)

    def _table(self) -> dict[str, Any]:
        """Return a table of all samples, if there are new ones."""
        if self._shown == len(self._samples):
            return {}
        self._shown = len(self._samples)
        rows = [[event.get(key) for key in _SAMPLE] for event in self._samples]
        return {"samples": self._wandb.Table(columns=list(_SAMPLE), data=rows)}

    def upload(self, kind: str, path: Path) -> None:
        """Keep a file or folder as an artifact of the run."""
        if self.mode != "disabled":
            self._run.log_artifact(str(path), name=f"{kind}-{self._id}", type=kind)

    def close(self, exit_code: int) -> None:
        newest = sorted(self._folder.glob("checkpoints/step_*/manifest.json"))[-1:]
        found = {"config": [self._folder / "config.yaml"], "checkpoint": [file.parent for file in newest]}
        try:
            if table := self._table():
                self._run.log({"step": self._samples[-1]["step"], **table})
            for kind in self._config.artifacts:
                for path in found[kind]:
                    self.upload(kind, path)
        finally:
            self._run.finish(exit_code=exit_code)
        if self.mode == "online":
            self._online = dict(self._told)
        self._note(active=False)

    def _note(self, active: bool) -> None:
        """Write wandb.json."""
        elsewhere = None if self._place.parent == self._folder else str(self._place.absolute())  # the run may be moved
        facts = {"id": self._id, "project": self._project, "place": elsewhere}
        content = {**facts, "mode": self.mode, "active": active, "online": self._online}
        replace_file(self._folder / RECORD, to_json(content))

    def _set_earlier_aside(self) -> None:
        """Move the folders of earlier offline attempts, which this one repeats, to wandb/superseded/."""
        for attempt in _offline(self._place, self._id):
            target = self._place / SUPERSEDED
            target.mkdir(exist_ok=True)
            os.replace(attempt, target / attempt.name)

    def _mode(self, say: Callable[[str], None]) -> str:
        mode = self._config.mode or os.environ.get("WANDB_MODE") or "online"
        mode = _MODES.get(mode, mode)
        if mode == "online" and not self._logged_in():
            say("W&B: no account is logged in on this machine (wandb login).")
            return self._offline(say)
        return mode

    def _offline(self, say: Callable[[str], None]) -> str:
        append = "--append " if self._online else ""  # after a part that is online already
        say(f"W&B keeps this run offline; later: wandb sync {append}{self._place}/offline-run-*")
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
        project = self._project if self._id else None  # where the run is that goes on
        return self._wandb.init(
            project=config.project or project or environment.get("WANDB_PROJECT") or "ttrain",
            entity=config.entity,
            mode=mode,
            dir=str(self._place.parent),
            id=self._id,
            resume="allow" if self._id else None,
            name=config.run_name or environment.get("WANDB_NAME") or self._folder.name,
            group=config.group,
            tags=config.tags,
            config=self._run_config,
            reinit="create_new",  # several jobs of a sweep in one process are several runs
            settings=self._wandb.Settings(**settings),
        )


def note_earlier_attempts(run: Path) -> None:
    """Note what killed or uploaded attempts told, before a resume cuts the metrics.

    A killed attempt told every line that is recorded. `wandb sync` leaves a mark beside an offline one that it sent.
    """
    record = read_json(run / RECORD)
    attempts = _offline(Path(record.get("place") or run / "wandb"), record.get("id"))
    synced = bool(attempts) and any(attempts[-1].glob("*.wandb.synced"))
    if not synced and not record.get("active"):
        return
    if synced or record.get("mode") == "online":
        told: dict[str, int] = dict(record.get("online", {}))
        for line in read_metrics(run / METRICS):
            told[_kind(line)] = max(told.get(_kind(line), 0), int(line["step"]))
        record["online"] = told
    replace_file(run / RECORD, to_json({**record, "active": False}))


def _offline(place: Path, run_id: str | None) -> list[Path]:
    """Folders of a run's offline attempts, the oldest first; others may lie beside them."""
    return [] if run_id is None else sorted(place.glob(f"offline-run-*-{run_id}"))


def _kind(line: Metrics) -> str:
    return next((kind for kind in _KINDS if kind in line), "")
