"""Calibration on a pretended chip whose constants are known: what is measured must be what it was made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks.wormhole.reproduce import scatter, stream
from ttrain.cli import main
from ttrain.device.base import Kernel, Launch
from ttrain.device.null.device import NullDevice
from ttrain.device.ttnn.cost.calibrate import Calibration, keep
from ttrain.device.ttnn.cost.step_time import FITTED, KEPT, known_constants
from ttrain.device.ttnn.cost.wormhole import CONSTANTS, Product, Program, Wormhole
from ttrain.device.ttnn.settings import TenstorrentConfig
from ttrain.tasks.plan import _recorded

TRUTH = replace(
    CONSTANTS, dram_efficiency=0.5, matrix_efficiency=0.8, launch=4.5, worker_dispatch=2.0, worker_call=90.0,
    native_host=25.0, scatter_efficiency=0.06, eth_call=70.0,
)  # fmt: skip


class Chip(NullDevice):
    """Runs nothing; its clock moves as the model says."""

    def __init__(self, model: Wormhole) -> None:
        super().__init__()
        self.model, self.now, self.issuer = model, 0.0, model.issuer  # microseconds
        self.queue: list[Program] = []

    def clock(self) -> float:
        return self.now / 1e6

    def synchronize(self) -> None:
        if self.queue:
            found = replace(self.model, issuer=self.issuer).step(self.queue)
            self.now += found.total + self.model.call - found.host / len(self.queue)
        self.queue, self.issuer = [], self.model.issuer

    def capture(self, launches: Sequence[Launch], name: str) -> Launch:
        for launch in launches:
            launch()
        programs, self.queue = self.queue, []

        def replay() -> None:
            self.queue, self.issuer = programs, "replay"

        return replay

    @property
    def kernels(self) -> dict[str, Kernel]:  # type: ignore[override]
        def row(programs: Callable[..., list[Program]]) -> Kernel:
            return Kernel(lambda ins, *_: lambda: self.queue.extend(programs(*(buffer.shape for buffer in ins))))

        return {
            "add": row(lambda a, b: [stream(a, b, a)]),
            "matmul": row(lambda a, b: [Product(a[0], a[1], b[1])]),
            "softmax": row(lambda x: [stream(x, x), scatter(x, x)]),
        }


@pytest.mark.parametrize("dispatch", ["worker", "eth"])
def test_what_is_measured_is_what_the_chip_was_made_of(dispatch: str) -> None:
    """And a step is predicted with it."""
    fitted = Wormhole(dispatch, issuer="native")
    true = replace(fitted, constants=TRUTH)
    chip = Chip(true)
    measured = Calibration(chip, fitted, _recorded, clock=chip.clock)
    found = measured.run()
    names = {"launch", "native_host", "dram_efficiency", "matrix_efficiency", "scatter_efficiency", f"{dispatch}_call"}
    assert names <= measured.changed.keys()
    for name in names:
        assert getattr(found, name) == pytest.approx(getattr(TRUTH, name), rel=0.05), name
    # What was not measured stays as fitted.
    assert found.python_host == CONSTANTS.python_host and found.clock_mhz == CONSTANTS.clock_mhz
    programs = [Product(2048, 512, 512), stream((2048, 512), (2048, 512)), scatter((1024, 1024), (1024, 1024))] * 4
    expected = true.step(programs).total
    assert measured.chip.step(programs).total == pytest.approx(expected, rel=0.05)
    assert fitted.step(programs).total != pytest.approx(expected, rel=0.05)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_measured_constants_are_kept_and_used_for_that_board_only(cache: Path) -> None:
    card = TenstorrentConfig(name="n300")
    assert known_constants(card) == (CONSTANTS, FITTED)
    said = keep(card, {"launch": 5.0, "worker_call": 80.0}, {"arch": "wormhole_b0"})
    assert "launch" in said and str(KEPT.path) in said
    constants, source = known_constants(card)
    assert (constants.launch, constants.worker_call) == (5.0, 80.0) and "2 constants measured on this card" in source
    keep(replace(card, dispatch="eth"), {"launch": 6.0, "eth_call": 60.0}, {})
    both, _ = known_constants(card)
    assert (both.launch, both.worker_call, both.eth_call) == (5.0, 80.0, 60.0)
    assert known_constants(replace(card, dispatch="eth"))[0].launch == 6.0
    assert known_constants(TenstorrentConfig(name="n150"))[0] == CONSTANTS


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["device=cpu"], "plan.calibrate=true: device=cpu has no cost model whose constants to measure."),
        (["device=p150"], "plan.calibrate=true: measures the cost model of a Wormhole card."),
        (["device=n150"], "device=n150: this machine has no Tenstorrent card"),
    ],
)
def test_where_nothing_can_be_measured_it_is_one_line(
    overrides: list[str], said: str, cache: Path, capsys: Any
) -> None:
    if overrides == ["device=n150"] and find_spec("ttnn") is None:
        pytest.skip("the package ttnn is not installed")
    assert main(["task=plan", "plan.calibrate=true", *overrides]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"ttrain: {said}") and shown.err.count("\n") == 1 and not shown.out
