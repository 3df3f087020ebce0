"""AGILLM-3 against plain PyTorch: logits, every loss, every gradient; with fold and without; all engines alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.plain_agillm import PlainAGILLM
from tests.models.session import ENGINES, Session, relative_error, tensor_by_tensor_equal, token_batch
from ttrain.graph import Graph
from ttrain.models.agillm import AGILLM
from ttrain.models.agillm_windows import window_starts
from ttrain.models.decoder import BlockInputs
from ttrain.models.settings import AGILLMConfig
from ttrain.optim.adamw import AdamW
from ttrain.optim.settings import AdamWConfig

SIZE: dict[str, Any] = {"layers": 2, "heads": 4, "width": 16, "rank": 12, "context": 11, "vocabulary": 23}
ROWS, STEPS = 2, 8


def model(**changes: Any) -> AGILLM:
    return AGILLM(AGILLMConfig(**{**SIZE, "dropout": 0.0, **changes}))


def session(ours: AGILLM, engine: str = "static") -> Session:
    return Session(ours, AdamW(AdamWConfig(lr=1e-2, clip_norm=1.0)), ROWS, engine=engine)


def batch_of(index: int, context: int = 11) -> dict[str, np.ndarray]:
    return token_batch(23, ROWS, context, index, masked=2)


def plain_of(ours: Session) -> PlainAGILLM:
    """The same parameters as leaves."""
    built: Any = ours.graph.model
    values = {path: torch.from_numpy(ours.state.read(path)).requires_grad_() for path in built.parameters()}
    return PlainAGILLM(values, built.layers, built.heads, standard=built.config.alibi == "standard")


FORMS: list[dict[str, Any]] = [
    {"fold": "on"},
    {"fold": "off"},
    {"rank": 3, "fold": "on"},  # a projector: M is not the identity
    {"rank": 3, "fold": "off"},
    {"heads": 1, "rank": 4, "tied": True},
    {"heads": 8, "alibi": "standard"},
    {"sat_stride": 2, "label_smoothing": 0.0},
    {"sat_max_windows": 2},
    {"sat_target": "legacy"},
    {"context": 33, "recompute": "block", "pad_vocabulary": 32},
    {"objective": "ar_only", "tied": True},
]


@pytest.mark.parametrize("options", FORMS, ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()))
def test_losses_and_every_gradient_equal_those_of_pytorch(options: dict[str, Any]) -> None:
    ours = session(model(**options))
    config, plain, batch = ours.graph.model.config, plain_of(ours), batch_of(1, options.get("context", 11))
    tokens, targets = (torch.from_numpy(batch[name]) for name in ("tokens", "targets"))
    loss, ar = plain.ar_losses(tokens, targets, config.label_smoothing)
    expected = {"ar/ce": ar.item()}
    if config.objective == "joint":
        legacy, length = config.sat_target == "legacy", tokens.shape[1]
        starts = [length - 2] if legacy else window_starts(length, config.sat_stride, config.sat_max_windows)
        smoothed, sat, gate = plain.sat_losses(tokens, targets, config.label_smoothing, starts, legacy)
        loss = loss + smoothed + 0.1 * gate
        expected |= {"sat/ce": sat.item(), "gate/ce": gate.item()}
    loss.backward()
    trained = ours.train(batch, 1, {"lr": 0.0})
    for outputs in (trained, ours.evaluate(batch)):
        for name, value in {"loss": loss.item(), **expected}.items():
            assert outputs[name] == pytest.approx(value, rel=1e-5), name
    for path, value in plain.values.items():
        assert value.grad is not None
        assert relative_error(ours.state.read(f"{path}/gradient"), value.grad.numpy()) < 1e-5, path


@pytest.mark.parametrize("fold", ["on", "off"])
def test_logits_equal_those_of_pytorch(fold: str) -> None:
    ours = session(model(fold=fold))
    batch, plain, built = batch_of(2), plain_of(ours), ours.graph.model
    tokens = torch.from_numpy(batch["tokens"])
    expected = plain.ar_logits(tokens).detach()
    for place in (0, 5, 10):
        one = ours.run(ours.graph.trace_logits, {"tokens": batch["tokens"][:1], "position": place})["logits"]
        assert relative_error(one[0], expected[0, place].numpy()) < 1e-5

    def trace(graph: Graph) -> None:
        graph.output("hidden", built.states(graph, ROWS, False, BlockInputs(mask="pairs")))  # type: ignore[attr-defined]

    hidden = ours.run(trace, {"tokens": batch["tokens"]})["hidden"]
    assert relative_error(hidden, plain.hidden(tokens, pairs=True).detach().numpy()) < 1e-5


def losses(engine: str, **options: Any) -> tuple[list[float], Session]:
    ours = session(model(**options), engine)
    found = [ours.train(batch_of(step), step, {"lr": 1e-2}, seed=step)["loss"] for step in range(1, STEPS + 1)]
    return found, ours


@pytest.mark.parametrize("rank", [12, 3])
def test_the_fold_changes_no_loss(rank: int) -> None:
    """A rank below the head width would change nothing at the start but the order of rounding too."""
    folded, plain = (losses("static", fold=fold, rank=rank)[0] for fold in ("on", "off"))
    assert folded == pytest.approx(plain, rel=1e-6)


def same_bits(runs: Sequence[tuple[list[float], Session]]) -> bool:
    (first, ours), *others = runs
    return all(
        first == found and tensor_by_tensor_equal(ours.parameters(), other.parameters()) for found, other in others
    )


def test_engines_agree() -> None:
    runs = {engine: losses(engine, dropout=0.1, layers=1) for engine in ENGINES}
    assert same_bits([runs["dynamic"], runs["static"]])
    assert runs["traced"][0] == pytest.approx(runs["static"][0], rel=2e-5)  # its kernels sum in another order


@pytest.mark.parametrize("engine", ["dynamic", "static"])
def test_computing_blocks_again_changes_no_bit(engine: str) -> None:
    assert same_bits([losses(engine, dropout=0.1, recompute=recompute) for recompute in ("none", "block")])


def test_dropout_differs_between_layers_passes_and_steps() -> None:
    """With the same tokens twice, only the masks can make the loss differ."""
    ours = session(model(dropout=0.5))
    first, second = (ours.train(batch_of(1), 1, {"lr": 0.0}, seed=seed) for seed in (1, 2))
    assert first["ar/ce"] != second["ar/ce"] and first["sat/ce"] != second["sat/ce"]
    graph = Graph()
    ours.graph.model.loss(graph, ROWS, training=True)
    streams = [node.attributes["stream"] for node in graph.nodes if node.op.name == "dropout"]
    assert len(streams) == len(set(streams)) == 4
