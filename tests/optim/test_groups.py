"""Which parameters share an update, and what their learning-rate inputs are called."""

from __future__ import annotations

import pytest

from ttrain.core.spec import DType
from ttrain.models.gpt import GPT
from ttrain.models.settings import GPTConfig
from ttrain.optim.adamw import AdamW
from ttrain.optim.groups import flat_parameters, learning_rates
from ttrain.optim.settings import AdamWConfig

MODEL = GPT(GPTConfig(layers=2, heads=1, width=4, context=4, vocabulary=5, tied=False))
PARAMETERS = MODEL.parameters()


def runs(compute: DType = DType.FP32, **options: object) -> dict[str, list[str]]:
    found = flat_parameters(PARAMETERS, AdamW(AdamWConfig(**options)), compute)
    return {run.name: [parameter.path for parameter in run.parameters] for run in found}


def test_matrices_decay_and_vectors_do_not() -> None:
    found = runs()
    assert found.keys() == {"lr/adamw/decay/fp32", "lr/adamw/no_decay/fp32"}
    assert all(PARAMETERS[path].spec.rank == 2 for path in found["lr/adamw/decay/fp32"])
    assert all(PARAMETERS[path].spec.rank == 1 for path in found["lr/adamw/no_decay/fp32"])


def test_norms_are_apart_where_the_rest_is_read_as_bf16() -> None:
    found = runs(DType.BF16)
    assert found.keys() == {"lr/adamw/decay/bf16", "lr/adamw/no_decay/bf16", "lr/adamw/no_decay/fp32"}
    assert all("norm" in path for path in found["lr/adamw/no_decay/fp32"])


def test_every_parameter_is_in_exactly_one_run() -> None:
    found = runs(DType.BF16, lr_multipliers={"blocks": 0.5, "blocks.1": 0.1, "head.weight": 2.0})
    paths = [path for members in found.values() for path in members]
    assert sorted(paths) == sorted(PARAMETERS)


def test_the_longest_prefix_wins_and_prefixes_end_at_dots() -> None:
    found = runs(decay_rule="none", lr_multipliers={"blocks": 0.5, "blocks.1.attention": 0.1})
    assert {path.rpartition(".")[0] for path in found["lr/blocks.1.attention/adamw/no_decay/fp32"]} == {
        "blocks.1.attention.qkv",
        "blocks.1.attention.projection",
    }
    assert "blocks.1.attention_norm.weight" in found["lr/blocks/adamw/no_decay/fp32"]
    assert "norm.weight" in found["lr/adamw/no_decay/fp32"]


def test_rates_are_peak_times_schedule_times_factor_with_lr_first() -> None:
    config = AdamWConfig(lr=0.1, lr_multipliers={"head": 0.5, "blocks": 3.0})
    rates = learning_rates(PARAMETERS, config, lambda step: 1 / step)
    assert rates(2) == pytest.approx({"lr": 0.05, "lr/head": 0.025, "lr/blocks": 0.15})
    assert next(iter(rates(1))) == "lr"


def test_no_lr_input_without_a_parameter_that_reads_it() -> None:
    tops = {path.split(".")[0] for path in PARAMETERS}
    config = AdamWConfig(lr=1.0, lr_multipliers=dict.fromkeys(tops, 0.5))
    assert "lr" not in learning_rates(PARAMETERS, config, lambda step: 1.0)(1)
    assert learning_rates(PARAMETERS, AdamWConfig(lr=1.0), lambda step: 1.0)(1) == {"lr": 1.0}
