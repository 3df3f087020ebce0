"""Files of weights: what is written is what PyTorch and safetensors read, and what would run code is not read."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.session import initial_values
from ttrain.core.errors import CheckpointError, UserError
from ttrain.models.gpt import GPT
from ttrain.models.mlp import MLP
from ttrain.models.settings import GPTConfig, MLPConfig
from ttrain.train.checkpoint.weights_file import read_file, read_parameters, weights_of, write_pt, write_safetensors

SIZES = {"layers": 2, "heads": 2, "width": 8, "context": 4, "vocabulary": 11}


def small() -> tuple[GPT, dict[str, np.ndarray]]:
    model = GPT(GPTConfig(**SIZES))
    return model, initial_values(model, seed=3)


def test_safetensors_are_written_as_the_library_writes_them(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    weights = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a.x": np.float32([1.5]), "none": np.zeros((0, 3))}
    weights["half"] = np.float16([[1, 2]])
    write_safetensors(tmp_path / "made" / "w.safetensors", weights)
    found = load_file(tmp_path / "made" / "w.safetensors")
    assert found.keys() == weights.keys()
    assert all(
        np.array_equal(found[name], value) and found[name].dtype == np.float32 for name, value in weights.items()
    )
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["w.safetensors"]


@pytest.mark.parametrize("archive", [True, False], ids=["archive", "before PyTorch 1.6"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_parameters_are_read_back(tmp_path: Path, dtype: torch.dtype, archive: bool) -> None:
    model, values = small()
    weights = {name: torch.from_numpy(value).to(dtype) for name, value in model.to_original(values).items()}
    torch.save({"model": weights, "iter_num": 3}, tmp_path / "w.pt", _use_new_zipfile_serialization=archive)
    found = read_parameters(tmp_path / "w.pt", model)
    assert found.keys() == values.keys()
    for path, value in values.items():
        assert found[path].dtype == np.float32
        np.testing.assert_array_equal(found[path], torch.from_numpy(value).to(dtype).float().numpy())


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("code ran",))


def test_a_pickle_with_code_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"core": {}, "x": Evil()}, tmp_path / "evil.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Evil()))
    for name in ("evil.pt", "plain.pt"):
        with pytest.raises(CheckpointError, match=f"{name} is not a .pt file .* could run code"):
            read_file(tmp_path / name)
    assert "code ran" not in capsys.readouterr().out


def plant(pickled: bytes, path: Path) -> None:
    """An archive whose pickle is replaced."""
    torch.save({"w": torch.zeros(3)}, path)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, pickled if name.endswith("data.pkl") else content)


def cut(path: Path) -> None:
    torch.save({"w": torch.zeros(1000)}, path)
    os.truncate(path, 2000)


NO_FILES: list[tuple[str, Any, str]] = [
    ("gone.pt", None, "is not a file"),
    ("empty.pt", Path.touch, r"is not a \.pt file that can be read"),
    ("text.pt", lambda path: path.write_bytes(b"hello, this is no archive"), r"is not a \.pt file"),
    ("cut.pt", cut, r"is not a \.pt file that can be read"),
    ("x.bin", Path.touch, r"the name must end with \.pt or \.safetensors"),
    ("x.safetensors", lambda path: path.write_bytes(b"\x08\0\0\0\0\0\0\0{"), "is not a safetensors file that can be"),
    ("tensor.pt", partial(torch.save, torch.zeros(3)), "holds Tensor, expected a dictionary of weights"),
    ("list.pt", partial(torch.save, [1]), "holds list, expected a dictionary of weights"),
    ("program.pt", lambda path: torch.jit.script(torch.nn.Linear(2, 2)).save(str(path)), "(is|holds) "),
    *((f"{at}.pt", partial(plant, text), "(is|holds) ")
      for at, text in enumerate((b"", b"\x80\x02a.", b"\x80\x02\xfe.", b"\x80\x02}\x85."))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "make", "message"), NO_FILES, ids=[name for name, *_ in NO_FILES])
def test_what_is_no_file_of_weights_is_refused(tmp_path: Path, name: str, make: Any, message: str) -> None:
    path = tmp_path / name
    if make is not None:
        make(path)
    with pytest.raises(CheckpointError, match=f"{name}:? {message}") as refused:
        read_file(path)
    assert "weights_only" not in str(refused.value)


def test_archives_that_were_packed_anew_are_unpacked(tmp_path: Path) -> None:
    weight = torch.arange(4000.0)
    torch.save({"w": weight}, tmp_path / "whole.pt")
    with zipfile.ZipFile(tmp_path / "whole.pt") as whole, zipfile.ZipFile(tmp_path / "w.pt", "w", 8) as archive:
        for name in whole.namelist():
            archive.writestr(name, whole.read(name))
    assert (tmp_path / "w.pt").stat().st_size < 12_000  # compressed
    assert torch.equal(read_file(tmp_path / "w.pt")["w"], weight)


NO_WEIGHTS = {
    "number": (5, "is int, expected a tensor"),
    "nothing": (None, "is NoneType, expected a tensor"),
    "list": ([1.0], "is list, expected a tensor"),
    "integers": (torch.zeros(8, dtype=torch.int64), "holds torch.int64, expected floating numbers"),
    "complex": (torch.zeros(8, dtype=torch.complex64), "holds torch.complex64"),
    "sparse": (torch.zeros(8).to_sparse(), "is torch.sparse_coo, expected a dense tensor"),
    "meta": (torch.zeros(8, device="meta"), "is without values"),
}


@pytest.mark.parametrize("kind", NO_WEIGHTS)
@pytest.mark.parametrize("own", [True, False], ids=["own", "original"])
def test_values_that_are_no_weights_are_named(tmp_path: Path, kind: str, own: bool) -> None:
    value, message = NO_WEIGHTS[kind]
    model, values = small()
    named = dict(values) if own else model.to_original(values)
    content = {name: torch.from_numpy(value) for name, value in named.items()}
    content["norm.weight" if own else "transformer.ln_f.weight"] = value
    torch.save(content, tmp_path / "w.pt")
    for read in (read_parameters, weights_in):
        with pytest.raises(CheckpointError, match=r"w\.pt") as refused:
            read(tmp_path / "w.pt", model)
        assert message in str(refused.value) and str(tmp_path) in str(refused.value)


@pytest.mark.parametrize("bad", [float("nan"), 1e300])
def test_weights_that_are_not_finite_are_named(tmp_path: Path, bad: float) -> None:
    model, values = small()
    content = {name: torch.from_numpy(value).double() for name, value in values.items()}
    content["norm.weight"][3] = bad
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"w\.pt: norm\.weight holds NaN or infinity"):
        read_parameters(tmp_path / "w.pt", model)


def weights_in(path: Path, model: Any) -> Any:
    return weights_of(path, model, read_file(path))


def test_wrong_weights_are_named(tmp_path: Path) -> None:
    model, values = small()
    changed = {**values, "norm.weight": np.ones(9, np.float32), "extra": np.ones(1, np.float32)}
    del changed["positions.weight"]
    write_safetensors(tmp_path / "w.safetensors", changed)
    with pytest.raises(CheckpointError) as refused:
        read_parameters(tmp_path / "w.safetensors", model)
    for expected in ("positions.weight: missing", "extra: not a parameter", "norm.weight: got [9], expected [8]"):
        assert expected in str(refused.value)
    assert weights_in(tmp_path / "w.safetensors", model).keys() == changed.keys() - {"extra"}
    write_safetensors(tmp_path / "other.safetensors", {"layer.weight": np.ones(3, np.float32)})
    with pytest.raises(CheckpointError, match=r"holds no weight of mlp: got layer\.weight"):
        weights_in(tmp_path / "other.safetensors", MLP(MLPConfig()))
    with pytest.raises(CheckpointError, match=r"other\.safetensors: the weights do not fit this model"):
        read_parameters(tmp_path / "other.safetensors", model)


@pytest.mark.parametrize("write", [write_pt, write_safetensors])
def test_what_can_not_be_written_is_told_in_the_systems_words(tmp_path: Path, write: Any) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"can't be written"):
        write(tmp_path / "file" / "w.pt", {"w": np.ones(2, np.float32)})
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, limits[1]))
    try:
        with pytest.raises(UserError, match="can't be written: .*File too large"):
            write(tmp_path / "w.pt", {"w": np.ones(100_000, np.float32)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
