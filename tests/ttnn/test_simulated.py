"""A simulator is told as such wherever its numbers are shown, and is taken for no other board than it is."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ttrain.core.errors import DeviceUnavailable
from ttrain.device.ttnn.problems import problems
from ttrain.device.ttnn.runtime import environment
from ttrain.device.ttnn.runtime.environment import MOCK_VARIABLE
from ttrain.device.ttnn.runtime.identity import BOARDS, check_board, checked_simulator
from ttrain.device.ttnn.settings import TenstorrentConfig

LIBRARY = b"\x7fELF\x02\x01\x01" + b"\0" * 64 + b"libttsim_init\0"


def simulator(folder: Path, arch: str = "WORMHOLE_B0", content: bytes = LIBRARY) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "libttsim.so").write_bytes(content)
    (folder / "soc_descriptor.yaml").write_text(f"grid:\n  x_size: 10\narch_name: {arch}\n", "utf-8")
    return folder / "libttsim.so"


def simulated(path: Path | str | None, name: str = "tt") -> TenstorrentConfig:
    return TenstorrentConfig(name=name, mode="simulator", simulator=None if path is None else str(path))


def test_paths_that_hold_a_simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative, below the home, through a link whose target is named otherwise, and a netlist's folder."""
    library = simulator(tmp_path / "wh")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for given in (library, "wh/libttsim.so", "./wh/../wh/libttsim.so", "~/wh/libttsim.so"):
        assert checked_simulator(simulated(given)) == library
    library.rename(library.with_name("libttsim.so.1"))
    (tmp_path / "wh" / "link.so").symlink_to("libttsim.so.1")
    assert checked_simulator(simulated("wh/link.so")) == tmp_path / "wh" / "link.so"
    (tmp_path / "wh" / "run.sh").touch()
    assert checked_simulator(simulated("wh")) == tmp_path / "wh"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("nothing.so", r"nothing.so can't be read \(No such file"),
        ("empty", "is no simulator"),
        ("wh", "is no simulator. Give a simulator's library"),
        ("other.so", "is no simulator"),
        ("wh/soc_descriptor.yaml", "is no simulator"),
        ("wh/libttsim.so/lib.so", "can't be read"),
        ("alone/libttsim.so", r"alone/soc_descriptor.yaml can't be read \(No such file"),
        ("nameless/libttsim.so", "names no arch_name"),
    ],
)
def test_other_paths_are_told_in_one_line(tmp_path: Path, monkeypatch: Any, given: str, told: str) -> None:
    simulator(tmp_path / "wh")
    simulator(tmp_path / "alone").with_name("soc_descriptor.yaml").unlink()
    simulator(tmp_path / "nameless").with_name("soc_descriptor.yaml").write_text("grid:\n", "utf-8")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other.so").write_bytes(LIBRARY.replace(b"libttsim", b"libother"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DeviceUnavailable, match=told) as caught:
        checked_simulator(simulated(given))
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2
    assert f"device.simulator={given}" in str(caught.value)


@pytest.mark.parametrize("arch", ["WORMHOLE_B0", "BLACKHOLE", "QUASAR"])
def test_a_board_of_another_architecture_is_refused_before_ttnn_is_asked(tmp_path: Path, arch: str) -> None:
    library = simulator(tmp_path, arch)
    fitting = [*(board for board, facts in BOARDS.items() if facts.arch == arch.lower()), "tt"]
    for name in fitting:
        assert checked_simulator(simulated(library, name)) == library
    for name in BOARDS.keys() - fitting:
        with pytest.raises(DeviceUnavailable, match=f"device={name}: .*the simulator has {arch.lower()}") as caught:
            checked_simulator(simulated(library, name))
        assert all(f"device={board}" in str(caught.value) for board in fitting)


# What ttnn 0.81 tells of machines (architecture, chips that it sees, name of the cluster), and which boards they have.
MACHINES = {
    ("wormhole_b0", 1, "N150"): {"n150"}, ("wormhole_b0", 4, "N150"): {"n150"}, ("wormhole_b0", 2, "N300"): {"n300"},
    ("wormhole_b0", 8, "T3K"): {"n300", "t3000"}, ("wormhole_b0", 32, "GALAXY"): set(), ("blackhole", 1, "P100"): set(),
    ("blackhole", 1, "P150"): {"p150"}, ("blackhole", 4, "P150_X4"): {"p150"},
    ("wormhole_b0", 2, "CUSTOM"): {"n150", "n300"},
}  # fmt: skip


@pytest.mark.parametrize("machine", MACHINES, ids=str)
def test_a_machine_is_taken_for_the_boards_that_it_has(machine: tuple[str, int, str]) -> None:
    arch, chips, cluster = machine
    found = SimpleNamespace(get_cluster_type=lambda: f"ClusterType.{cluster}")
    tt = SimpleNamespace(cluster=found, get_num_devices=lambda: chips)
    handle = SimpleNamespace(arch=lambda: f"Arch.{arch.upper()}")
    for name in [*BOARDS, "tt"]:
        if name in MACHINES[machine] | {"tt"}:
            check_board(tt, handle, TenstorrentConfig(name=name))
        else:
            with pytest.raises(DeviceUnavailable, match=rf"device={name}: has .* but this machine has {chips} {arch}"):
                check_board(tt, handle, TenstorrentConfig(name=name))


@pytest.mark.parametrize("mode", ["mock", "simulator"])
def test_variables_of_the_other_mode_are_not_passed_on(
    no_card: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str
) -> None:
    """ttnn would run a mocked board's empty kernels on the simulator that the environment names."""
    library = simulator(tmp_path / "wh")
    mine, path = (MOCK_VARIABLE, "n150.yaml") if mode == "mock" else (environment.SIMULATOR_VARIABLE, str(library))
    both = dict.fromkeys((MOCK_VARIABLE, environment.SIMULATOR_VARIABLE), "/some/where")
    monkeypatch.setattr(os, "environ", {**os.environ, **both})
    monkeypatch.setattr(environment.importlib, "import_module", str)
    monkeypatch.delitem(sys.modules, "ttnn", raising=False)
    assert environment.import_ttnn(TenstorrentConfig(mode=mode, simulator=str(library))) == "ttnn"
    assert [key for key in both if key in os.environ] == [mine] and os.environ[mine].endswith(path)


SIMULATED = "SIMULATED on n150: the numbers come from a simulator, not from a card"


def test_a_simulated_run_says_so_at_start_in_the_bar_at_the_end_and_wherever_it_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """On the reference functions of ttnn, which are told to be a simulator."""
    pytest.importorskip("ttnn", reason="the package ttnn is not installed")
    from tests.ttnn.doubles.golden import GoldenMesh
    from ttrain.cli import main
    from ttrain.config import registry
    from ttrain.device.ttnn.device import TenstorrentDevice

    row = registry.Component("device", "n150", TenstorrentConfig, lambda c: TenstorrentDevice(GoldenMesh(config=c), c))
    monkeypatch.setitem(registry._ROWS, ("device", "n150"), row)
    monkeypatch.chdir(tmp_path)

    def said(*overrides: str) -> str:
        capsys.readouterr()
        code = main(list(overrides))
        shown = capsys.readouterr()
        assert code == 0, shown.err
        return shown.err + shown.out

    given = ["device=n150", "device.mode=simulator", f"device.simulator={simulator(tmp_path / 'wh')}", "model=mlp"]
    given += ["data=regression", "model.width=32", "train.batch_size=32", "train.steps=3", "optimizer=sgd"]
    start, _, rest = said(*given, "run.dir=outputs/run").partition("First step")
    assert f"WARNING: {SIMULATED}" in start
    assert "SIMULATED: " in start + rest  # before the bar
    assert SIMULATED in rest and "WARNING" in rest
    run = tmp_path / "outputs" / "run"
    assert json.loads((run / "summary.json").read_text("utf-8"))["caution"].startswith(SIMULATED)
    assert SIMULATED in (run / "events.jsonl").read_text("utf-8")
    assert SIMULATED in said("task=runs")
    said("task=report", "run=outputs/run")
    assert SIMULATED in (run / "report.html").read_text("utf-8")


def test_a_simulator_still_needs_to_be_named() -> None:
    (said,) = problems(simulated(None), 2)
    assert "needs device.simulator=" in said
