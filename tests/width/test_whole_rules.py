"""Rules of whole matrices on a mocked board, whose validators take every op."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.ttnn.runs import mlp
from tests.width.tools import on_mock
from ttrain.nn.module import Parameter
from ttrain.ops.update import Rule
from ttrain.optim.adafactor import Adafactor
from ttrain.optim.groups import orthogonalised
from ttrain.optim.muon import NorMuon
from ttrain.optim.settings import AdafactorConfig, NorMuonConfig


class Both:
    def __init__(self) -> None:
        self.config = NorMuonConfig()

    def rule(self, parameter: Parameter, decays: bool) -> Rule:
        hidden = orthogonalised(parameter)
        return (NorMuon(self.config) if hidden else Adafactor(AdafactorConfig())).rule(parameter, decays)


def declare() -> None:
    pass  # they are of the product


def model() -> Any:
    return mlp(layers=3)


def optimizer() -> Any:
    return Both()


def test_a_mocked_board_takes_their_ops_and_those_of_a_new_bias(tmp_path: Path) -> None:
    found = on_mock(tmp_path, __name__, "tests.width.test_new_attention_bias")
    assert found == [{"computes": False, "zero": True, "steps": 3}] * 2
