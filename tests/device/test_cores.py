"""How many cores a container leaves: fake control groups of both versions."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from ttrain.core import cores, processor
from ttrain.core.errors import UserError
from ttrain.tasks import doctor
from ttrain.train.runs.record import environment_record


def write(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"{text}\n", "ascii")


def quota(root: Path, membership: str) -> float | None:
    write(root.parent, "membership", membership)
    return cores.quota_cores(root, root.parent / "membership")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("150000 100000", 1.5), ("max 100000", None), ("50000 100000", 0.5), ("400000 200000", 2.0), ("nonsense", None)],
)
def test_version_2(tmp_path: Path, text: str, expected: float | None) -> None:
    write(tmp_path / "cgroup", "cpu.max", text)
    assert quota(tmp_path / "cgroup", "0::/") == expected
    assert quota(tmp_path / "cgroup", "0::/of/the/host") == expected  # a path that is not there inside a container


def test_a_group_is_bounded_by_those_above_it(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    write(root / "a", "cpu.max", "200000 100000")
    write(root / "a" / "b", "cpu.max", "300000 100000")
    assert quota(root, "0::/a/b") == 2.0
    write(root / "a" / "b", "cpu.max", "max 100000")
    assert quota(root, "0::/a/b") == 2.0
    assert quota(root, "0::/c") is None


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_version_1(tmp_path: Path, mount: str) -> None:
    root = tmp_path / "cgroup"
    write(root / mount / "docker" / "x", "cpu.cfs_quota_us", "250000")
    write(root / mount / "docker" / "x", "cpu.cfs_period_us", "100000")
    write(root / mount, "cpu.cfs_quota_us", "-1")
    write(root / mount, "cpu.cfs_period_us", "100000")
    assert quota(root, f"5:memory:/docker/x\n3:{mount}:/docker/x") == 2.5
    assert quota(root, f"3:{mount}:/") is None


def test_no_groups_at_all(tmp_path: Path) -> None:
    assert cores.quota_cores(tmp_path / "none", tmp_path / "neither") is None


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
    cores, memory, vectors = doctor._machine()
    assert cores.text.endswith(": 1 physical core, 3 that this process may use, a container's quota of 2")
    assert "GiB" in memory.text and memory.text.endswith(" free") and vectors.state == state
    assert vectors.text.startswith(told)


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
        (
            "x86_64",
            V3,
            "x86-64-v4",
            r"this processor \(A\) does not have avx512bw, avx512cd, .*Give a lower kind of x86",
        ),
        ("x86_64", V3, "znver3", "TTRAIN_MARCH=znver3 is not known on x86_64. .*: native .*, x86-64, .*x86-64-v4[.]"),
        ("aarch64", "asimd", "x86-64-v3", "TTRAIN_MARCH=x86-64-v3 is not known on aarch64. .*armv8-a[.]"),
    ],
)
def test_kernels_use_what_the_processor_and_the_kind_asked_for_both_have(
    machine: str,
    flags: str,
    given: str | None,
    expected: list[str] | str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
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
