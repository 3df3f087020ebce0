"""The number of cores that a container leaves, from fake control groups of both versions."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ttrain.core import cores, processor
from ttrain.core.errors import UserError
from ttrain.tasks import doctor
from ttrain.train.runs.record import environment_record


def write(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"{text}\n", "ascii")


def bounded(text: str) -> dict[str, str]:
    """Files of version 2 with that bound at the root and a group below."""
    return {"cpu.max": "max 100000", "a/cpu.max": "200000 100000", "a/b/cpu.max": text}


def first_version(mount: str) -> dict[str, str]:
    none = {f"{mount}/cpu.cfs_quota_us": "-1", f"{mount}/cpu.cfs_period_us": "100000"}
    group = f"{mount}/docker/x"
    return {**none, f"{group}/cpu.cfs_quota_us": "250000", f"{group}/cpu.cfs_period_us": "100000"}


@pytest.mark.parametrize(
    ("files", "membership", "expected"),
    [
        ({"cpu.max": "150000 100000"}, "0::/", 1.5),
        ({"cpu.max": "150000 100000"}, "0::/of/the/host", 1.5),  # a path that is not there inside a container
        ({"cpu.max": "50000 100000"}, "0::/", 0.5),
        ({"cpu.max": "max 100000"}, "0::/", None),
        ({"cpu.max": "nonsense"}, "0::/", None),
        (bounded("300000 100000"), "0::/a/b", 2.0),  # by the group above it
        (bounded("max 100000"), "0::/a/b", 2.0),
        (bounded("max 100000"), "0::/c", None),
        (first_version("cpu"), "5:memory:/docker/x\n3:cpu:/docker/x", 2.5),
        (first_version("cpu,cpuacct"), "3:cpu,cpuacct:/docker/x", 2.5),
        (first_version("cpu"), "3:cpu:/", None),
        ({}, "", None),
    ],
)
def test_the_least_quota_of_a_group_and_those_above_counts(
    tmp_path: Path, files: dict[str, str], membership: str, expected: float | None
) -> None:
    for name, text in files.items():
        write((tmp_path / "cgroup" / name).parent, Path(name).name, text)
    write(tmp_path, "membership", membership)
    assert cores.quota_cores(tmp_path / "cgroup", tmp_path / "membership") == expected


@pytest.mark.parametrize(
    ("text", "physical", "expected"),
    [("150000 100000", 8, 2), ("1000 100000", 8, 1), ("max 100000", 8, 4), ("max 100000", 2, 2), ("max", None, 4)],
)
def test_the_least_counts_and_a_part_of_a_core_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, physical: int | None, expected: int
) -> None:
    import psutil

    write(tmp_path / "cgroup", "cpu.max", text)
    monkeypatch.setattr(cores, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(cores, "MEMBERSHIP", tmp_path / "none")
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: physical)
    monkeypatch.setattr(cores, "affinity_cores", lambda: 4)
    assert cores.usable_cores() == expected
    assert cores.default_threads({}) == expected
    assert cores.default_threads({"OMP_NUM_THREADS": "7"}) == 7
    assert environment_record({}, None, {}, None, "")["cores"] == cores.core_limits()


@pytest.mark.parametrize(
    ("text", "state", "told"),
    [
        ("model name : A\nflags : fpu avx2 avx512f amx_tile\n", "ok",
         "avx2, avx512f, amx_tile (not avx512_vnni, avx512_bf16, amx_bf16)"),
        ("Features : fp asimd sve bf16\n", "ok", "asimd, sve, bf16"),
        ("model name : B\nflags : fpu sse2\n", "missing", "none (not avx2, "),
        (None, "missing", "none (not avx2, "),
    ],
)  # fmt: skip
def test_the_doctor_tells_cores_memory_and_vector_units(
    text: str | None, state: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.delenv(processor.VARIABLE, raising=False)
    monkeypatch.setattr(doctor, "core_limits", lambda: {"physical": 1, "affinity": 3, "quota": 2})
    cores, memory, vectors, precision = doctor._machine()
    assert cores.text.endswith(": 1 physical core, 3 that this process may use, a container's quota of 2")
    assert "GiB" in memory.text and memory.text.endswith(" free") and vectors.state == state
    assert vectors.text.startswith(told)
    assert precision.text.startswith(f"precision=auto is {'bf16' if told.endswith('bf16') else 'fp32'} on the CPU")


V3 = "sse4_1 sse4_2 ssse3 popcnt cx16 lahf_lm avx avx2 fma bmi1 bmi2 f16c abm movbe"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"


@pytest.mark.parametrize(
    ("machine", "flags", "given", "expected"),
    [
        ("x86_64", f"{V4} avx512_bf16 amx_bf16", None, ["avx2", "avx512f", "avx512_bf16", "amx_bf16"]),
        ("x86_64", f"{V4} avx512_bf16 amx_bf16", "native", ["avx2", "avx512f", "avx512_bf16", "amx_bf16"]),
        ("x86_64", f"{V4} avx512_bf16 amx_bf16", "x86-64-v4", ["avx2", "avx512f"]),
        ("x86_64", f"{V4} avx512_bf16 amx_bf16", " x86-64-v3 ", ["avx2"]),
        ("AMD64", V3, "x86-64-v3", ["avx2"]),
        ("x86_64", V3, "x86-64", []),
        ("aarch64", "fp asimd sve bf16", None, ["asimd", "sve", "bf16"]),
        ("aarch64", "fp asimd sve bf16", "armv8-a", ["asimd"]),
        ("x86_64", V3, "x86-64-v4", r"this processor \(A\) does not have avx512bw, avx512cd, .*Give a lower kind"),
        ("x86_64", V3, "znver3", "TTRAIN_MARCH=znver3 is not known on x86_64. .*: native .*, x86-64, .*x86-64-v4[.]"),
        ("aarch64", "asimd", "x86-64-v3", "TTRAIN_MARCH=x86-64-v3 is not known on aarch64. .*armv8-a[.]"),
    ],
)
def test_kernels_use_what_the_processor_and_the_kind_asked_for_both_have(
    machine: str, flags: str, given: str | None, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of extensions, or the words of a refusal."""
    (tmp_path / "cpuinfo").write_text(f"model name : A\nflags : {flags}\n\nmodel name : of another core\nflags : sse\n")
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(processor.platform, "machine", lambda: machine)
    monkeypatch.delenv(processor.VARIABLE, raising=False)
    if given is not None:
        monkeypatch.setenv(processor.VARIABLE, given)
    if isinstance(expected, list):
        assert processor.vector_extensions() == expected
        return
    with pytest.raises(UserError, match=expected) as caught:
        processor.vector_extensions()
    (vectors,) = (finding for finding in doctor._machine() if finding.subject == "vector units")
    assert (vectors.state, vectors.text) == ("broken", str(caught.value))


def test_work_of_others_is_what_the_cores_did_without_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three cores are ours: 10 s later they were busy for 9 + 8 s, 12 of them with this process."""
    import psutil

    reads = iter([[(0, 0), (0, 0), (0, 0)], [(7, 2), (10, 0), (8, 0)]])
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda process: {0, 2}, raising=False)
    monkeypatch.setattr(
        psutil, "cpu_times", lambda percpu: [SimpleNamespace(user=user, system=system) for user, system in next(reads)]
    )
    monkeypatch.setattr(
        cores, "time", SimpleNamespace(monotonic=count(0, 10).__next__, process_time=count(3, 12).__next__)
    )
    assert cores.OtherWork().cores() == pytest.approx(0.5)
