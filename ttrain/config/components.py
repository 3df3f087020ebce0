"""Our own rows of the registry. Importing this module loads settings only: no torch, no component."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ttrain.config.registry import loaded, register, rows
from ttrain.core.options import option, rule
from ttrain.data.settings import DocumentsConfig, RegressionConfig, TextConfig, TokensConfig
from ttrain.device.settings import DeviceConfig
from ttrain.engine.settings import EngineConfig
from ttrain.models.settings import AGILLMConfig, GPTConfig, LlamaConfig, MLPConfig
from ttrain.nn.precision import PRECISIONS, PrecisionConfig
from ttrain.optim.settings import (
    AdafactorConfig,
    AdamWConfig,
    LionConfig,
    MuonConfig,
    NorMuonConfig,
    ScheduleConfig,
    ScheduleFreeConfig,
    SGDConfig,
)
from ttrain.parallel.place import rank_here
from ttrain.parallel.settings import ParallelConfig
from ttrain.train.settings import LoggerConfig, WandbConfig
from ttrain.train.supervise.heartbeat import VARIABLE

# Tables of names -> (config, target) that families of devices hold in their own folders.
FAMILIES = ("ttrain.device.ttnn.settings:DEVICES",)


@dataclass
class TaskConfig:
    """Task of the command."""

    name: str = option("train", "what the command does")

    @rule
    def _one_model(self, others: Any) -> Iterator[str]:
        if self.name not in ("sample", "chat", "eval"):
            return
        run, folder = others.run.dir, getattr(others.model, "from_", None)
        if run is None and folder is None:
            yield f"task={self.name}: needs a trained model. Give run.dir=<run directory> or model.from=<model folder>."
        elif run is not None and folder is not None and not others.source.merged:
            yield f"task={self.name}: run.dir and model.from both name a model. Give one of them."

    @rule
    def _restarts(self, others: Any) -> Iterator[str]:
        """Ranks that ttrain started are watched by the process that did so."""
        supervised = self.name == "train" and others.supervise.wanted(others.source.explicit)
        if supervised and rank_here() is not None and VARIABLE not in os.environ:
            yield (
                "supervise.enabled=true: one of several ranks can't start the others again. Leave it out, and let "
                "torchrun do so with --max-restarts=3."
            )


TASKS = ("train", "sample", "chat", "eval", "export", "plan", "prepare", "runs", "report", "verify", "profile", "bench",
         "doctor")  # fmt: skip
for _task in TASKS:
    register("task", _task, config=TaskConfig, target=f"ttrain.tasks.{_task}:run")
register("task", "lr_finder", config=TaskConfig, target="ttrain.tasks.training.lr_finder:run")

register("model", "mlp", config=MLPConfig, target="ttrain.models.mlp:MLP")
register("model", "gpt", config=GPTConfig, target="ttrain.models.gpt:GPT")
register("model", "llama", config=LlamaConfig, target="ttrain.models.llama:Llama")
register("model", "agillm", config=AGILLMConfig, target="ttrain.models.agillm:AGILLM")

for _engine in ("dynamic", "static", "traced"):
    register("engine", _engine, config=EngineConfig, target=f"ttrain.config.targets:{_engine}_engine")

for _device in ("auto", "cpu", "cuda"):
    register("device", _device, config=DeviceConfig, target=f"ttrain.device.torch.device:{_device}")
register("device", "null", config=DeviceConfig, target="ttrain.config.targets:null_device")
for _names in FAMILIES:
    for _device, (_config, _target) in loaded(_names).items():
        register("device", _device, config=_config, target=_target)

register("optimizer", "sgd", config=SGDConfig, target="ttrain.optim.sgd:SGD")
register("optimizer", "adamw", config=AdamWConfig, target="ttrain.optim.adamw:AdamW")
register("optimizer", "lion", config=LionConfig, target="ttrain.optim.lion:Lion")
register("optimizer", "adafactor", config=AdafactorConfig, target="ttrain.optim.adafactor:Adafactor")
register("optimizer", "schedule_free", config=ScheduleFreeConfig, target="ttrain.optim.schedule_free:ScheduleFree")
register("optimizer", "muon", config=MuonConfig, target="ttrain.optim.muon:Muon")
register("optimizer", "normuon", config=NorMuonConfig, target="ttrain.optim.muon:NorMuon")

for _shape in ("constant", "linear", "cosine", "wsd"):
    register("schedule", _shape, config=ScheduleConfig, target=f"ttrain.optim.schedules:{_shape}")

register("data", "text", config=TextConfig, target="ttrain.data.text:open_text")
register("data", "tokens", config=TokensConfig, target="ttrain.data.tokens:open_tokens")
register("data", "documents", config=DocumentsConfig, target="ttrain.data.documents:open_documents")
register("data", "regression", config=RegressionConfig, target="ttrain.data.regression:open_regression")

for _precision in PRECISIONS:
    register("precision", _precision, config=PrecisionConfig, target=PrecisionConfig)

for _way in ("none", "ddp", "zero1"):
    register("parallel", _way, config=ParallelConfig, target=ParallelConfig)

register("logger", "console", config=LoggerConfig, target="ttrain.config.targets:no_views")
register("logger", "jsonl", config=LoggerConfig, target="ttrain.config.targets:no_views")
register("logger", "wandb", config=WandbConfig, target="ttrain.config.targets:wandb_views")

BUILT_IN = frozenset((row.group, row.name) for row in rows())
