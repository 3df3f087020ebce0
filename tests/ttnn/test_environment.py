"""Modes, refusals and messages before a device is open; the stub compiler; the doctor."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests import forked
from ttrain.core.errors import EXIT_DEVICE_BUSY, DeviceBusy, DeviceUnavailable
from ttrain.device.ttnn.mock import stub_compiler
from ttrain.device.ttnn.mock.stub_compiler import return_only
from ttrain.device.ttnn.runtime import environment, examine, mesh
from ttrain.device.ttnn.runtime.environment import holders
from ttrain.device.ttnn.settings import TenstorrentConfig


def test_the_stub_compiles_for_mocked_boards_only(tmp_path: Path) -> None:
    (tmp_path / "ncrisc.ld").write_text("  .text 0xFFC00000 :", "ascii")
    (tmp_path / "brisc.ld").write_text("  .text : { }", "ascii")
    tool = tmp_path / stub_compiler.COMPILER
    tool.write_text(stub_compiler.script_text(tmp_path), "ascii")
    tool.chmod(0o755)
    environment_ = {stub_compiler.MOCK_VARIABLE: "board.yaml", "PATH": ""}
    for script, address in (("ncrisc.ld", 0xFFC00000), ("brisc.ld", 0x5000)):
        out = tmp_path / f"{script}.elf"
        subprocess.run([tool, "-O2", "-T", tmp_path / script, "-o", out, "x.o"], env=environment_, check=True)
        assert out.read_bytes() == return_only(address)
    words = [tool, "-o", tmp_path / "y", "x.o"]
    done = subprocess.run(words, env={"PATH": ""}, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "mocked boards only" in done.stderr and not (tmp_path / "y").exists()


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stub_compiler.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DeviceUnavailable, match=r"^ttnn is not installed[^\n]*pip install 'ttrain\[tt\]'[^\n]*$"):
        environment.variables(TenstorrentConfig())


@pytest.mark.parametrize(("minor", "has_wheel"), [(10, True), (11, False), (12, True), (13, False)])
def test_the_extra_installs_ttnn_where_its_absence_is_told_with_it(
    minor: int, has_wheel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, minor, 0))
    assert (f"no wheel for Python 3.{minor}" in stub_compiler.missing_ttnn()) == (not has_wheel)
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8")
    (extra,) = re.findall(r'^tt = \["(.*)"\]$', project, re.MULTILINE)
    marker = Requirement(extra).marker
    machine = {"python_version": f"3.{minor}", "sys_platform": "linux", "platform_machine": "x86_64"}
    assert marker is not None and marker.evaluate(machine) == has_wheel


@pytest.mark.parametrize("card", [False, True], ids=["no card", "a card"])
def test_silicon_needs_a_card_and_refuses_the_variables_of_other_modes(
    card: bool, no_card: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if card:
        (tmp_path / "nothing" / "0").mkdir(parents=True)
        monkeypatch.setenv(stub_compiler.MOCK_VARIABLE, "x")
    with pytest.raises(DeviceUnavailable, match=stub_compiler.MOCK_VARIABLE if card else "device.mode=mock"):
        environment.variables(TenstorrentConfig(name="n150"))


def test_a_ttnn_without_its_runtime_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "wheel").mkdir()
    with pytest.raises(DeviceUnavailable, match=r"is not whole: it has no runtime/.*--force-reinstall"):
        stub_compiler.runtime_root(tmp_path / "root", tmp_path / "wheel")
    assert not (tmp_path / "root").exists()


def test_modes_have_kernel_caches_of_their_own(no_card: None, tmp_path: Path) -> None:
    (tmp_path / "lib.so").write_bytes(b"\x7fELF libttsim_init")
    (tmp_path / "soc_descriptor.yaml").write_text("arch_name: WORMHOLE_B0\n", "ascii")
    mock = environment.variables(TenstorrentConfig(mode="mock"))
    simulator = environment.variables(TenstorrentConfig(mode="simulator", simulator=str(tmp_path / "lib.so")))
    assert len({mock["TT_METAL_CACHE"], simulator["TT_METAL_CACHE"]}) == 2
    assert mock[stub_compiler.MOCK_VARIABLE].endswith("n150.yaml")
    (tmp_path / "nothing" / "0").mkdir(parents=True)
    assert not {"TT_METAL_CACHE", "TT_METAL_RUNTIME_ROOT"} & environment.variables(TenstorrentConfig()).keys()


def runtime(opening: Any) -> Any:
    kinds = SimpleNamespace(WORKER=1, ETH=2)
    return SimpleNamespace(DispatchCoreType=kinds, MeshShape=lambda *shape: shape, open_mesh_device=opening)


def test_a_held_card_is_busy_and_never_a_silent_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "holders_text", lambda: "It is held by process 7 (train).")
    config = TenstorrentConfig(open_timeout_s=1)
    with pytest.raises(DeviceBusy, match=r"did not open within 1 s. It is held by process 7") as caught:
        mesh._opened(runtime(lambda shape, **options: time.sleep(5)), config)
    assert caught.value.exit_code == EXIT_DEVICE_BUSY == 75


def test_a_failure_to_open_names_the_reason() -> None:
    def fail(shape: Any, **options: Any) -> None:
        raise RuntimeError("TT_FATAL\ninfo:\nEthernet link 0 is down\nbacktrace:\nx")

    with pytest.raises(DeviceUnavailable, match="device=n150: Ethernet link 0 is down$"):
        mesh._opened(runtime(fail), TenstorrentConfig(name="n150"))


def test_holders_are_found_by_their_open_files(tmp_path: Path) -> None:
    nodes, processes = tmp_path / "dev", tmp_path / "proc"
    (processes / "42" / "fd").mkdir(parents=True)
    nodes.mkdir()
    (nodes / "0").touch()
    os.symlink(nodes / "0", processes / "42" / "fd" / "3")
    (processes / "42" / "cmdline").write_bytes(b"python\0train.py\0")
    (processes / "43" / "fd").mkdir(parents=True)
    assert holders(nodes, processes) == {42: "python train.py"}


def test_the_doctor_tries_the_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from ttrain.tasks import doctor

    monkeypatch.setenv("TTRAIN_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = doctor._cpp_compiler()
    assert (found.state, found.text) == ("missing", "CXX=no-such-compiler can't be run")
    assert "g++ or clang++" in found.fix
    refuses = tmp_path / "refuses"
    refuses.write_text("#!/bin/sh\necho 'error: not today' >&2\nexit 1\n", "ascii")
    refuses.chmod(0o755)
    monkeypatch.setenv("CXX", str(refuses))
    found = doctor._cpp_compiler()
    assert found.state == "broken"
    assert "not today" in found.text


def test_the_doctor_opens_all_chips_over_their_links(monkeypatch: pytest.MonkeyPatch) -> None:

    def probe(mode: str, name: str, seconds: float, chips: int = 1) -> dict[str, Any]:
        if chips > 1:
            return {"error": "Ethernet link 3 is down"}
        return {"opened": {"arch": "wormhole_b0", "cores": [8, 7], "chips": 2}}

    monkeypatch.setattr(examine, "probe", probe)
    card, links = examine._open_cards()
    assert card.state == "ok"
    assert (links.subject, links.state, links.text) == ("fabric links", "broken", "Ethernet link 3 is down")
    assert "device.mesh=[1,1]" in links.fix


def test_every_finding_that_is_not_ok_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from ttrain.tasks import doctor

    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("TT_METAL_SIMULATOR", str(tmp_path / "lib.so"))
    monkeypatch.setattr(examine, "DRIVER", tmp_path / "none")
    monkeypatch.setattr(examine, "probe", lambda *_: {"error": "no"})
    findings = list(doctor.examine())
    assert {finding.subject for finding in findings} >= {"C++ compiler", "torch", "driver", "cards", "simulator"}
    assert [finding.subject for finding in findings if finding.state != "ok" and not finding.fix] == []


def test_a_process_keeps_the_mode_of_its_first_import(tmp_path: Path) -> None:
    pytest.importorskip("ttnn", reason="the package ttnn is not installed")
    code = "import ttnn\nfrom ttrain.cli import main\nmain(['device=n150', 'device.mode=mock', 'run.dir=run'])"
    (tmp_path / "first.py").write_text(code, "ascii")
    assert "Use a fresh process" in forked.run("first", cwd=tmp_path, TTRAIN_CACHE=str(tmp_path)).stderr
