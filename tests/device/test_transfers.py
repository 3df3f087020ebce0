"""Inputs go to a GPU in one copy, outputs come back in one. Stand-ins of streams and events note their order."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from ttrain.device.base import Buffers
from ttrain.device.torch import transfers


class Noted:
    """A stream or an event: it writes down what is asked of it."""

    order: list[str] = []

    def __init__(self, *given: Any) -> None:
        self.name = f"{type(self).__name__.lower()} {len(Noted.order)}"

    def wait(self, stream: Any) -> None:
        Noted.order.append(f"{stream} waits")

    def record(self, stream: Any) -> None:
        Noted.order.append(f"{stream} records")

    def synchronize(self) -> None:
        Noted.order.append("host waits")

    def __str__(self) -> str:
        return "beside"


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    class Computing(Noted):
        def __str__(self) -> str:
            return "computing"

    monkeypatch.setattr(Noted, "order", [])
    monkeypatch.setattr(torch.cuda, "Stream", Noted)
    monkeypatch.setattr(torch.cuda, "Event", Noted)
    monkeypatch.setattr(torch.cuda, "current_stream", Computing)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(transfers, "pinned", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))


def test_what_is_written_is_taken_before_the_next_run() -> None:
    buffers = Buffers(
        tokens=torch.zeros(2, 3, dtype=torch.int64), lr=torch.zeros(()), x=torch.zeros(5, dtype=torch.bfloat16)
    )
    inputs = transfers.Inputs(buffers)
    tokens, x = np.arange(6).reshape(2, 3), np.linspace(0, 1, 5, dtype=np.float32)
    take = inputs.write({"tokens": tokens, "lr": np.float32(0.5), "x": x})
    assert not buffers["tokens"].any(), "a run under way reads its own inputs"
    take()
    inputs.write({"lr": np.float32(0.25)})()  # the others stay
    assert buffers["tokens"].tolist() == tokens.tolist() and float(buffers["lr"]) == 0.25
    torch.testing.assert_close(buffers["x"], torch.from_numpy(x).bfloat16())
    one = ["host waits", "beside waits", "beside records", "computing waits", "computing records"]
    assert Noted.order == 2 * one


def test_outputs_are_copies_that_the_next_run_does_not_change() -> None:
    loss, logits = torch.tensor(1.5), torch.arange(6.0).view(2, 3).bfloat16()
    outputs = transfers.Outputs([loss, logits])
    found = outputs.read()
    loss.fill_(0), logits.fill_(0)
    outputs.read()
    assert found[0].shape == () and float(found[0]) == 1.5
    assert found[1].dtype == np.float32 and found[1].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert Noted.order == 2 * ["host waits"]
