"""Initial values: distributions, and that they depend on (seed, path) alone."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.models.session import initial_values
from ttrain.models.agillm import AGILLM
from ttrain.models.gpt import GPT
from ttrain.models.mlp import MLP
from ttrain.models.settings import AGILLMConfig, GPTConfig, MLPConfig

SIZE = {"heads": 2, "width": 64, "context": 32, "vocabulary": 128}


def test_values_depend_on_seed_and_path_alone() -> None:
    two, three = GPT(GPTConfig(layers=2, tied=False, **SIZE)), GPT(GPTConfig(layers=3, bias=False, **SIZE))
    first, again, other = initial_values(two, 1), initial_values(two, 1), initial_values(two, 2)
    assert all(np.array_equal(first[path], again[path]) for path in first)
    assert not np.array_equal(first["embedding.weight"], other["embedding.weight"])
    elsewhere = initial_values(three, 1)["blocks.1.attention.qkv.weight"]
    assert np.array_equal(elsewhere, first["blocks.1.attention.qkv.weight"])
    assert not np.array_equal(elsewhere, first["blocks.0.attention.qkv.weight"])
    assert all(value.dtype == np.float32 for value in first.values())


def test_gpt_starts_as_nanogpt_does() -> None:
    values = initial_values(GPT(GPTConfig(layers=8, **SIZE)), 5)
    for path, value in values.items():
        if path.endswith("bias"):
            assert not value.any(), path
        elif "norm" in path:
            assert (value == 1).all(), path
        else:
            std = 0.02 / 4 if path.endswith(("projection.weight", "down.weight")) else 0.02  # sqrt(2 * 8) = 4
            assert value.std() == pytest.approx(std, rel=0.1), path
            assert abs(value.mean()) < 0.1 * std, path


def test_mlp_starts_as_torch_linear_does() -> None:
    values = initial_values(MLP(MLPConfig(layers=2, inputs=100, width=400, outputs=3)), 5)
    for path, value in values.items():
        bound = 1 / math.sqrt(100 if path.startswith("layers.0") else 400)
        assert np.abs(value).max() <= bound
        if value.size > 100:
            assert np.abs(value).max() > 0.95 * bound
            assert value.std() == pytest.approx(bound / math.sqrt(3), rel=0.05), path


def test_parameters_know_what_they_are_between() -> None:
    """Roles of the models: only embeddings, heads and what is no matrix are not hidden."""
    sizes: dict[str, int] = {"layers": 1, "heads": 2, "width": 8, "context": 4, "vocabulary": 5}
    models = [GPT(GPTConfig(**sizes, tied=False)), AGILLM(AGILLMConfig(**sizes, rank=4)), MLP(MLPConfig(layers=3))]
    ends = [
        {path: parameter.role.value for path, parameter in model.parameters().items() if parameter.role != "hidden"}
        for model in models
    ]
    matrices = [{path: role for path, role in found.items() if role != "vector"} for found in ends]
    assert matrices == [
        {"embedding.weight": "input", "positions.weight": "input", "head.weight": "output"},
        {"embedding.weight": "input", "ar_head.weight": "output", "sat_head.weight": "output",
         "sat_head.gate.weight": "output"},
        {"layers.0.weight": "input", "layers.2.weight": "output"},
    ]  # fmt: skip
    for model, found in zip(models, ends, strict=True):
        vectors = {path for path, parameter in model.parameters().items() if len(parameter.shape) < 2}
        assert {path for path, role in found.items() if role == "vector"} == vectors
