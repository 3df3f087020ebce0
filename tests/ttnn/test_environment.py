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
from ttrain.device.ttnn.runtime import environment, examine, mesh
from ttrain.device.ttnn.runtime.environment import MOCK_VARIABLE, holders
from ttrain.device.ttnn.settings import TenstorrentConfig
from ttrain.tasks import doctor


def test_the_stub_compiles_for_mocked_boards_only(tmp_path: Path) -> None:
    """An executable of RISC-V whose entry is where the linker script puts text."""
    wheel, out = tmp_path / "wheel", tmp_path / "out.elf"
    (wheel / "runtime" / "hw").mkdir(parents=True)
    for _ in range(2):
        root = environment.runtime_root(tmp_path / "root", wheel)
    assert (root / "runtime" / "hw").resolve() == wheel / "runtime" / "hw"
    tool = root / "runtime" / "sfpi" / "compiler" / "bin" / "riscv-tt-elf-g++"
    for script, address in (("kernel_ncrisc.ld", 0xFFC00000), ("kernel_brisc.ld", 0x5000)):
        words, variables = [tool, "-O2", "-T", tmp_path / script, "-o", out, "x.o"], {MOCK_VARIABLE: "x", "PATH": ""}
        subprocess.run(words, env=variables, check=True)
        content = out.read_bytes()
        assert content[:6] == b"\x7fELF\x01\x01" and int.from_bytes(content[18:20], "little") == 243
        assert int.from_bytes(content[24:28], "little") == address and b"mocked boards only" in content
    out.unlink()
    done = subprocess.run(words, env={"PATH": ""}, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "mocked boards only" in done.stderr and not out.exists()


@pytest.mark.parametrize(("minor", "has_wheel"), [(10, True), (11, False), (12, True), (13, False)])
def test_a_missing_package_is_one_line_and_the_extra_installs_it_where_that_says_so(
    minor: int, has_wheel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, minor, 0))
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None)
    said = r"pip install 'ttrain\[tt\]'" if has_wheel else rf"no wheel for Python 3.{minor}"
    with pytest.raises(DeviceUnavailable, match=rf"^ttnn is not installed[^\n]*{said}[^\n]*$"):
        environment.variables(TenstorrentConfig())
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
        monkeypatch.setenv(MOCK_VARIABLE, "x")
    with pytest.raises(DeviceUnavailable, match=MOCK_VARIABLE if card else "device.mode=mock"):
        environment.variables(TenstorrentConfig(name="n150"))


def test_a_ttnn_without_its_runtime_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DeviceUnavailable, match=r"is not whole: it has no runtime/.*--force-reinstall"):
        environment.runtime_root(tmp_path / "root", tmp_path / "wheel")
    assert not (tmp_path / "root").exists()


def test_modes_have_kernel_caches_of_their_own(no_card: None, tmp_path: Path) -> None:
    (tmp_path / "lib.so").write_bytes(b"\x7fELF libttsim_init")
    (tmp_path / "soc_descriptor.yaml").write_text("arch_name: WORMHOLE_B0\n", "ascii")
    mock = environment.variables(TenstorrentConfig(mode="mock"))
    simulator = environment.variables(TenstorrentConfig(mode="simulator", simulator=str(tmp_path / "lib.so")))
    assert len({mock["TT_METAL_CACHE"], simulator["TT_METAL_CACHE"]}) == 2
    assert Path(mock[MOCK_VARIABLE]).name == "n150.yaml" and Path(mock[MOCK_VARIABLE]).is_file()
    (tmp_path / "nothing" / "0").mkdir(parents=True)
    assert not {"TT_METAL_CACHE", "TT_METAL_RUNTIME_ROOT"} & environment.variables(TenstorrentConfig()).keys()


def failing(shape: Any, **options: Any) -> None:
    raise RuntimeError("TT_FATAL\ninfo:\nEthernet link 0 is down\nbacktrace:\nx")


@pytest.mark.parametrize(
    ("opening", "error", "said"),
    [
        (lambda shape, **options: time.sleep(5), DeviceBusy, r"did not open within 1 s. It is held by process 7"),
        (failing, DeviceUnavailable, "device=n150: Ethernet link 0 is down$"),
    ],
    ids=["held", "broken"],
)
def test_a_card_that_does_not_open_is_told_of_and_never_a_silent_wait(
    opening: Any, error: type[DeviceUnavailable], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = SimpleNamespace(WORKER=1, ETH=2)
    tt = SimpleNamespace(DispatchCoreType=kinds, MeshShape=lambda *shape: shape, open_mesh_device=opening)
    monkeypatch.setattr(mesh, "import_ttnn", lambda config: tt)
    monkeypatch.setattr(mesh, "holders", lambda: "process 7 (train)")
    with pytest.raises(error, match=said) as caught:
        mesh.Mesh.open(TenstorrentConfig(name="n150", open_timeout_s=1))
    assert error is DeviceUnavailable or caught.value.exit_code == EXIT_DEVICE_BUSY == 75


def test_holders_are_found_by_their_open_files(tmp_path: Path) -> None:
    nodes, processes = tmp_path / "dev", tmp_path / "proc"
    (processes / "42" / "fd").mkdir(parents=True)
    os.symlink(nodes / "0", processes / "42" / "fd" / "3")
    (processes / "42" / "cmdline").write_bytes(b"python\0train.py\0")
    (processes / "43" / "fd").mkdir(parents=True)
    assert holders(nodes, processes) == "process 42 (python train.py)"


def test_the_doctor_tries_the_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
    assert found.state == "broken" and "not today" in found.text


def test_the_doctor_opens_all_chips_over_their_links(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = {"opened": {"arch": "wormhole_b0", "cores": [8, 7], "chips": 2}}
    broken = {"error": "Ethernet link 3 is down"}
    monkeypatch.setattr(examine, "probe", lambda *given: broken if given[-1] > 1 else opened)
    card, links = examine._open_cards()
    assert card.state == "ok"
    assert (links.subject, links.state, links.text) == ("fabric links", "broken", "Ethernet link 3 is down")
    assert "device.mesh=[1,1]" in links.fix


def test_every_finding_that_is_not_ok_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


def test_what_is_left_at_the_end_is_not_printed_as_leaks(tmp_path: Path) -> None:
    """In a process that ends by itself, which forks of tests do not."""
    pytest.importorskip("ttnn", reason="the package ttnn is not installed")
    code = (
        "import gc\nfrom ttrain.device.ttnn.runtime.environment import TenstorrentConfig, import_ttnn\n"
        "import_ttnn(TenstorrentConfig(mode='mock'))\ngc.freeze()"
    )
    words, variables = [sys.executable, "-c", code], {**os.environ, "TTRAIN_CACHE": str(tmp_path)}
    done = subprocess.run(words, env=variables, capture_output=True, text=True, check=True)
    assert "leaked" not in done.stderr
