"""Our own rows of the registry. Importing this module loads settings only: no torch, no component."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from ttrain.config.registry import register, rows
from ttrain.core.options import option, rule
from ttrain.data.settings import DocumentsConfig, RegressionConfig, SumsConfig, TextConfig, TokensConfig
from ttrain.device.settings import DeviceConfig, TorchConfig
from ttrain.engine.settings import EngineConfig
from ttrain.models.settings import AGILLMConfig, GPTConfig, LlamaConfig, MLPConfig
from ttrain.nn.settings import PRECISIONS, PrecisionConfig
from ttrain.objectives import settings as objectives
from ttrain.optim import settings as optim
from ttrain.parallel.settings import ParallelConfig, rank_here
from ttrain.train.settings import LoggerConfig, WandbConfig
from ttrain.train.supervise.child import VARIABLE

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
            yield f"task={self.name}: needs a trained model. Give run.dir=<run> or model.from=<model folder or .gguf>."
        elif run is not None and folder is not None and not others.source.merged:
            yield f"task={self.name}: run.dir and model.from both name a model. Give one of them."

    @rule
    def _restarts(self, others: Any) -> Iterator[str]:
        """Ranks that ttrain started are watched by the process that did so."""
        supervised = self.name == "train" and others.supervise.wanted(others.source.explicit)
        if supervised and rank_here() is not None and VARIABLE not in os.environ:
            told = "supervise.enabled=true: one of several ranks can't start the others again"
            yield f"{told}. Leave it out, and let torchrun do so with --max-restarts=3."


TASKS = ("train", "sample", "chat", "eval", "export", "plan", "prepare", "runs", "report", "verify", "profile", "bench",
         "doctor")  # fmt: skip
# Group, config, target in which {} stands for the name, names.
ROWS: tuple[tuple[str, type[Any], Any, tuple[str, ...]], ...] = (
    ("task", TaskConfig, "ttrain.tasks.{}:run", TASKS),
    ("task", TaskConfig, "ttrain.tasks.training.lr_finder:run", ("lr_finder",)),
    ("task", TaskConfig, "ttrain.config.json_schema:run", ("schema",)),
    ("task", TaskConfig, "ttrain.sweep.trial:run", ("trial",)),
    ("model", MLPConfig, "ttrain.models.mlp:MLP", ("mlp",)),
    ("model", GPTConfig, "ttrain.models.gpt:GPT", ("gpt",)),
    ("model", LlamaConfig, "ttrain.models.llama:Llama", ("llama",)),
    ("model", AGILLMConfig, "ttrain.models.agillm:AGILLM", ("agillm",)),
    ("engine", EngineConfig, "ttrain.config.build:our_engine", ("auto", "dynamic", "static", "traced")),
    ("device", TorchConfig, "ttrain.device.torch.device:open_device", ("auto", "cpu", "cuda", "mps", "xpu")),
    ("device", DeviceConfig, "ttrain.config.build:null_device", ("null",)),
    *(("device", config, target, (name,)) for key in FAMILIES for name, (config, target) in resolve_name(key).items()),
    ("optimizer", optim.SGDConfig, "ttrain.optim.sgd:SGD", ("sgd",)),
    ("optimizer", optim.AdamWConfig, "ttrain.optim.adamw:AdamW", ("adamw",)),
    ("optimizer", optim.LionConfig, "ttrain.optim.lion:Lion", ("lion",)),
    ("optimizer", optim.AdafactorConfig, "ttrain.optim.adafactor:Adafactor", ("adafactor",)),
    ("optimizer", optim.ScheduleFreeConfig, "ttrain.optim.averages:ScheduleFree", ("schedule_free",)),
    ("optimizer", optim.MuonConfig, "ttrain.optim.muon:Muon", ("muon",)),
    ("optimizer", optim.NorMuonConfig, "ttrain.optim.muon:NorMuon", ("normuon",)),
    ("schedule", optim.ScheduleConfig, "ttrain.optim.schedules:schedule", ("constant", "linear", "cosine", "wsd")),
    ("data", TextConfig, "ttrain.data.text:open_text", ("text",)),
    ("data", TokensConfig, "ttrain.data.tokens:open_tokens", ("tokens",)),
    ("data", DocumentsConfig, "ttrain.data.documents:open_documents", ("documents",)),
    ("data", RegressionConfig, "ttrain.data.synthetic.regression:open_regression", ("regression",)),
    ("data", SumsConfig, "ttrain.data.synthetic.sums:open_sums", ("sums",)),
    ("objective", objectives.ObjectiveConfig, "ttrain.objectives.base:Objective", ("next_token",)),
    ("objective", objectives.ClassificationConfig, "ttrain.objectives.texts:Classification", ("classification",)),
    ("objective", objectives.EmbeddingConfig, "ttrain.objectives.texts:Embedding", ("embedding",)),
    ("objective", objectives.DistillationConfig, "ttrain.objectives.distillation:Distillation", ("distillation",)),
    ("objective", objectives.GRPOConfig, "ttrain.objectives.grpo:GRPO", ("grpo",)),
    ("objective", objectives.DPOConfig, "ttrain.objectives.preferences:DPO", ("dpo",)),
    ("objective", objectives.PairsConfig, "ttrain.objectives.preferences:IPO", ("ipo",)),
    ("objective", objectives.PairsConfig, "ttrain.objectives.preferences:ORPO", ("orpo",)),
    ("objective", objectives.KTOConfig, "ttrain.objectives.preferences:KTO", ("kto",)),
    ("objective", objectives.SimPOConfig, "ttrain.objectives.preferences:SimPO", ("simpo",)),
    ("precision", PrecisionConfig, PrecisionConfig, (*PRECISIONS, "auto")),
    ("parallel", ParallelConfig, ParallelConfig, ("none", "ddp", "zero1", "zero3", "auto")),
    ("logger", LoggerConfig, "ttrain.config.build:no_views", ("console", "jsonl")),
    ("logger", WandbConfig, "ttrain.config.build:wandb_views", ("wandb",)),
    ("logger", LoggerConfig, "ttrain.config.build:tensorboard_views", ("tensorboard",)),
)
for _group, _config, _target, _names in ROWS:
    for _name in _names:
        _named = _target.format(_name) if isinstance(_target, str) else _target
        register(_group, _name, config=_config, target=_named)

BUILT_IN = frozenset((row.group, row.name) for row in rows())
