"""TensorBoard as a view of the metrics. An attempt writes its files anew, so that no step is there twice or missing."""

from __future__ import annotations

from pathlib import Path

from ttrain.core.errors import UserError, raised_as
from ttrain.train.logging.metrics import METRICS, Event, Metrics, read_events, read_metrics


class TensorBoardLogger:
    """Scalars by step, and samples as texts, below `tensorboard/` of the run."""

    run_id = None

    def __init__(self, folder: Path) -> None:
        """Raises UserError where the package is missing."""
        advice = "Run: pip install tensorboard, or give logger=console."
        with raised_as(UserError, "logger=tensorboard needs tensorboard", advice, ImportError):
            from torch.utils.tensorboard import SummaryWriter
        place = folder / "tensorboard"
        for earlier in place.glob("events.out.tfevents.*"):
            earlier.unlink()
        self._writer = SummaryWriter(str(place))
        for line in read_metrics(folder / METRICS):
            self.log(line)
        for event in read_events(folder):
            self.tell(event)

    def log(self, metrics: Metrics) -> None:
        for key, value in metrics.items():
            if key != "step" and value is not None:
                self._writer.add_scalar(key, value, metrics["step"])

    def tell(self, event: Event) -> None:
        if event["kind"] == "sample":
            text = f"{event['prompt']}**{event['text']}**"
            self._writer.add_text(f"samples/{event['name']}", text, event["step"])

    def close(self, exit_code: int) -> None:
        self._writer.close()
