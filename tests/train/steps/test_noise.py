"""The gradient-noise scale: of noise that is known, and of steps beside the gradients that they are made of."""

from __future__ import annotations

import numpy as np
import pytest

from tests.models.session import Session, token_batch
from ttrain.models.gpt import GPT
from ttrain.models.settings import GPTConfig
from ttrain.optim.adamw import AdamW
from ttrain.optim.settings import AdamWConfig
from ttrain.train.steps.step import NoiseScale
from ttrain.train.steps.step_graph import StepGraph


@pytest.mark.parametrize("parts", [2, 4])
def test_known_noise_is_found(parts: int) -> None:
    """Gradients of rows are G plus noise of covariance S: the scale is tr(S) / |G|^2."""
    generator, rows, size, deviation = np.random.default_rng(0), 32, 400, 0.7
    mean = generator.standard_normal(size) / 20
    noise, found = NoiseScale(rows // parts), []
    for _ in range(300):
        small = mean + deviation * generator.standard_normal((parts, size)) / np.sqrt(rows / parts)
        found.append(noise.add(float(np.linalg.norm(small[0] / parts)), float(np.linalg.norm(small.mean(0))), parts))
    wanted = size * deviation**2 / float(mean @ mean)
    assert np.mean([each for each in found[100:] if each is not None]) == pytest.approx(wanted, rel=0.15)
    assert noise.add(float("nan"), 1.0, parts) is None and noise.add(1.0, 1.0, 1) is None


def test_the_first_micro_batch_tells_its_norm() -> None:
    model, optimizer = GPT(GPTConfig(layers=1, heads=2, width=16, context=8, vocabulary=11)), AdamW(AdamWConfig())
    session = Session(model, optimizer, 2, gradient_accumulation=2)
    graph = StepGraph(model, optimizer, 2, 2, noise=True)
    fields, weights = session.prepared(token_batch(11, 2, 8, 1))
    step = session.engine.build("noise", lambda g: graph.trace_accumulate(g, first=True))
    told = step({**fields, **weights, "seed": 0})["noise_norm"]
    whole = np.concatenate([gradient.ravel() for gradient in session.gradients().values()])
    assert told == pytest.approx(float(np.linalg.norm(whole.astype(np.float64))), rel=1e-6)
    assert "noise_norm" not in session.steps["accumulate_first"]({**fields, **weights, "seed": 0})
