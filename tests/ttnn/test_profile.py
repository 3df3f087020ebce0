"""Reports of ttnn's device profiler, hand-written in its format: programs, idle gaps, dispatch overhead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ttnn.runs import golden
from ttrain.cli import main
from ttrain.config import build
from ttrain.core.errors import UserError
from ttrain.device.ttnn.runtime.profile import OpTime, find_report, read_profile, read_report

# Columns as ttnn 0.81.1 names them; a report has many more.
RUNTIME = (
    "GLOBAL CALL COUNT,METAL TRACE ID,METAL TRACE REPLAY SESSION ID,DEVICE ID,DEVICE ARCH,OP NAME,CORE COUNT,"
    "AVAILABLE WORKER CORE COUNT,DEVICE FW START CYCLE,DEVICE FW END CYCLE,DEVICE FW DURATION [ns],"
    "DEVICE KERNEL DURATION [ns],OP TO OP LATENCY [ns],OP TO OP LATENCY BR/NRISC START [ns]\n"
    "1024,,,0,wormhole_b0,MatmulDeviceOperation,64,64,1000,5000,4000,3800,,\n"
    "2048,,,0,wormhole_b0,BinaryNgDeviceOperation,32,64,6000,7000,1000,900,1000,1010\n"
    "3072,,,0,wormhole_b0,MatmulDeviceOperation,56,64,10000,12000,2000,1900,3000,3010\n"
    "1025,,,1,wormhole_b0,MatmulDeviceOperation,64,64,900,5100,4200,3800,,\n"
)
TRACY = (
    "OP CODE,OP TYPE,GLOBAL CALL COUNT,DEVICE ID,CORE COUNT,HOST START TS,OP TO OP LATENCY [ns],"
    "DEVICE FW DURATION [ns],DEVICE KERNEL DURATION [ns],METAL TRACE ID,METAL TRACE REPLAY SESSION ID\n"
    "torch.add,python_fallback,1,,,17,,,,,\n"
    "Matmul,tt_dnn_device,2,0,64,18,0,500,400,3,1\n"
    "Matmul,tt_dnn_device,3,0,64,19,500,500,400,3,2\n"
)


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / ".logs" / "cpp_device_perf_report.csv"
    path.parent.mkdir()
    path.write_text(RUNTIME, "utf-8")
    return path


def test_times_by_hand(report: Path, tmp_path: Path) -> None:
    """Busy 4 + 1 + 2 us; idle 1 + 3 us; 4 of 11 us are overhead. A report of tracy also tells of ops on the host."""
    profile = read_profile(find_report(tmp_path), steps=1)
    whole = profile.whole
    assert (profile.device, whole.count, whole.busy, whole.gap) == (0, 3, 7000.0, 4000.0)
    assert profile.overhead == pytest.approx(4 / 11)
    matmul, add = profile.ops
    assert matmul == OpTime("MatmulDeviceOperation", 2, 64, 6000.0, 3000.0) and add.gap == 1000.0
    assert profile.longest_gaps[0] == (3000.0, "BinaryNgDeviceOperation", "MatmulDeviceOperation")
    (tmp_path / "ops_perf_results_x.csv").write_text(TRACY, "utf-8")
    profile = read_profile(tmp_path / "ops_perf_results_x.csv", steps=2)
    assert (profile.whole.count, profile.replayed, profile.overhead) == (2, 2, pytest.approx(1 / 3))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1,2\n", "is no report.*with columns OP CODE or OP NAME"),
        ("", "is no report"),
        *(
            (RUNTIME.replace(",4000,3800", f",{text},3800"), f"line 2: DEVICE FW DURATION .*'{text}'; a number of 0 or")
            for text in ("many", "inf", "nan", "-4000")
        ),
        (
            "OP CODE,DEVICE FW DURATION [ns],OP TO OP LATENCY [ns],CORE COUNT\nx,1,1,inf\n",
            "line 2: CORE COUNT is 'inf'",
        ),
    ],
)
def test_another_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "x.csv"
    path.write_text(text, "utf-8")
    with pytest.raises(UserError, match=said):
        read_report(path)
    with pytest.raises(UserError, match=r"wrote no report.*profile.csv=<file>"):
        find_report(tmp_path)


def test_the_task_prints_a_given_report(report: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["task=profile", f"profile.csv={report}", "profile.steps=1", f"profile.json={tmp_path / 'out.json'}"]
    assert main(overrides) == 0
    text = capsys.readouterr().out
    assert "Dispatch overhead 36.4%" in text and "MatmulDeviceOperation" in text
    assert json.loads((tmp_path / "out.json").read_text("utf-8"))["dispatches_per_step"] == 3


@pytest.mark.parametrize(
    "overrides", [["device=null"], ["device=n150", "device.mode=mock"]], ids=["null", "a mocked board"]
)
def test_without_a_profiler_the_task_ends_with_one_line(
    overrides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["task=profile", *overrides]) == 2
    said = capsys.readouterr().err.strip()
    assert "computes nothing that takes time" in said and "plan.show=ops" in said and "\n" not in said


def test_steps_are_profiled_after_a_warm_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On ttnn's reference functions, with a stub for the profiler that reports one program a step."""
    device: Any = golden()
    clock: list[int] = []

    def read(handle: Any) -> None:
        clock.append(sum(device.mesh.tt.calls.values()))
        rows = [f"{n},,,0,x,Op,1,64,{n},{n},10,10,5,5" for n in range(1, clock[-1] + 1)]
        (tmp_path / "cpp_device_perf_report.csv").write_text("\n".join([RUNTIME.partition("\n")[0], *rows]), "utf-8")

    monkeypatch.setattr(device.mesh.tt, "ReadDeviceProfiler", read, raising=False)
    monkeypatch.setattr(build, "build_device", lambda *_: device)
    overrides = ["task=profile", "model=mlp", "model.width=32", "device=n150", f"device.profile={tmp_path}"]
    assert main([*overrides, "profile.steps=2", f"profile.json={tmp_path / 'found.json'}"]) == 0
    values = json.loads((tmp_path / "found.json").read_text("utf-8"))
    assert values["steps"] == 2
    assert values["dispatches_per_step"] == (clock[1] - clock[0]) / 2 > 10
    assert values["dispatch_overhead"] == pytest.approx(1 / 3, abs=0.01)
