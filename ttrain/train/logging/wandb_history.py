"""The lines of metrics.jsonl that a run's W&B run already has, noted in wandb.json of the run directory.

Online, W&B's history can only grow: a resumed attempt repeats steps that an earlier attempt sent, and leaves them out.
Offline attempts lie on this disk until they are synced, each in a folder of its own under wandb/, and a sync of one may
replace another. So an offline attempt begins with all lines that were not sent online, and the folders of earlier ones
are set aside: one folder holds the whole history.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ttrain.core.files import read_json, replace_file, to_json
from ttrain.train.logging.metrics import METRICS, Metrics, read_metrics

RECORD = "wandb.json"
SUPERSEDED = "superseded"
_KINDS = ("train/loss", "val/loss")


class WandbHistory:
    """Lines of one run directory that W&B was told, over all its attempts."""

    def __init__(self, run: Path, dir: Path) -> None:  # noqa: A002 - wandb's word
        """`dir` is the folder below which wandb writes the run of this attempt."""
        self._run, self.place = run, dir / "wandb"
        record = read_json(run / RECORD)
        self.run_id: str | None = record.get("id")
        self.project: str | None = record.get("project")
        self.online: dict[str, int] = record.get("online", {})  # kind of line -> last step that was sent online
        self._told = dict(self.online)  # the same for the attempt that runs now

    def begin(self, run_id: str, mode: str, project: str | None) -> Iterator[Metrics]:
        """Note that an attempt of the W&B run starts; yield the earlier lines that it has to be told first."""
        self.run_id, self.project = run_id, project
        self._write(mode, active=True)
        if mode == "disabled":
            return
        for line in read_metrics(self._run / METRICS):
            if self.is_new(line):
                yield line

    def set_earlier_aside(self, run_id: str | None) -> None:
        """Move the folders of earlier offline attempts, which the next attempt repeats, to wandb/superseded/."""
        for attempt in _offline(self.place, run_id):
            target = self.place / SUPERSEDED
            target.mkdir(exist_ok=True)
            os.replace(attempt, target / attempt.name)

    def is_new(self, line: Metrics) -> bool:
        """Return whether the W&B run lacks this line, and count the line as told."""
        kind, step = _kind(line), int(line["step"] or 0)
        if step <= self._told.get(kind, 0):
            return False
        self._told[kind] = step
        return True

    def end(self, mode: str) -> None:
        """Note what an attempt told, at its end."""
        if mode == "online":
            self.online = dict(self._told)
        self._write(mode, active=False)

    def _write(self, mode: str, active: bool) -> None:
        elsewhere = None if self.place.parent == self._run else str(self.place.absolute())  # the run may be moved
        facts = {"id": self.run_id, "project": self.project, "place": elsewhere}
        content = {**facts, "mode": mode, "active": active, "online": self.online}
        replace_file(self._run / RECORD, to_json(content))


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
