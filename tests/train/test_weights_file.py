"""Files of weights: what is written is what PyTorch and safetensors read, and what would run code is not read."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ttrain.core.errors import CheckpointError, UserError
from ttrain.models.gpt import GPT
from ttrain.models.mlp import MLP
from ttrain.models.settings import GPTConfig, MLPConfig
from ttrain.nn.initialize import initial_values
from ttrain.train.weights_file import read_file, read_parameters, weights_of, write_pt, write_safetensors

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


def test_pt_files_hold_tensors_and_plain_values(tmp_path: Path) -> None:
    content = {"core": {"w": np.arange(4, dtype=np.float32)}, "cfg": {"d": 4}, "tie_weights": False, "step": 7}
    write_pt(tmp_path / "w.pt", content)
    found = torch.load(tmp_path / "w.pt", weights_only=True)
    assert found["core"]["w"].tolist() == [0, 1, 2, 3]
    assert (found["cfg"], found["tie_weights"], found["step"]) == ({"d": 4}, False, 7)


@pytest.mark.parametrize("archive", [True, False], ids=["archive", "before PyTorch 1.6"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_parameters_are_read_back(tmp_path: Path, dtype: torch.dtype, archive: bool) -> None:
    model, values = small()
    weights = {name: torch.from_numpy(value).to(dtype) for name, value in model.to_original(values).items()}
    torch.save({"model": weights, "iter_num": 3}, tmp_path / "w.pt", _use_new_zipfile_serialization=archive)
    found = read_parameters(tmp_path / "w.pt", model)
    assert found.keys() == values.keys()
    for path, value in values.items():
        assert found[path].dtype == np.float32
        np.testing.assert_array_equal(found[path], torch.from_numpy(value).to(dtype).float().numpy())


def test_our_own_names_are_read_back_for_any_model(tmp_path: Path) -> None:
    model = MLP(MLPConfig(layers=2, width=4))
    values = initial_values(model, seed=1)
    write_safetensors(tmp_path / "w.safetensors", values)
    found = read_parameters(tmp_path / "w.safetensors", model)
    assert all(np.array_equal(found[path], value) for path, value in values.items())


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("code ran",))


def test_a_pickle_with_code_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"core": {}, "x": Evil()}, tmp_path / "evil.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Evil()))
    for name in ("evil.pt", "plain.pt"):
        with pytest.raises(
            CheckpointError, match=f"{name} holds more than tensors and plain values, so reading it could"
        ):
            read_file(tmp_path / name)
    assert "code ran" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.pt", None, "is not a file"),
        ("empty.pt", b"", r"is not a \.pt file that can be read"),
        ("text.pt", b"hello, this is no archive", r"is not a \.pt file|holds more than tensors"),
        ("cut.pt", "cut", r"is not a \.pt file that can be read"),
        ("x.bin", b"", r"must end with \.pt or \.safetensors"),
        ("x.safetensors", b"\x08\0\0\0\0\0\0\0{", "is not a safetensors file that can be read"),
        ("tensor.pt", "tensor", "holds Tensor, expected a dictionary of weights"),
        ("list.pt", "list", "holds list, expected a dictionary of weights"),
    ],
)
def test_what_is_no_file_of_weights_is_refused(tmp_path: Path, name: str, content: Any, message: str) -> None:
    path = tmp_path / name
    if content == "cut":
        torch.save({"w": torch.zeros(1000)}, path)
        path.write_bytes(path.read_bytes()[:2000])
    elif content in ("tensor", "list"):
        torch.save(torch.zeros(3) if content == "tensor" else [1], path)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_file(path)


def test_wrong_weights_are_named(tmp_path: Path) -> None:
    model, values = small()
    changed = {**values, "norm.weight": np.ones(9, np.float32), "extra": np.ones(1, np.float32)}
    del changed["positions.weight"]
    write_safetensors(tmp_path / "w.safetensors", changed)
    with pytest.raises(CheckpointError) as refused:
        read_parameters(tmp_path / "w.safetensors", model)
    for expected in ("positions.weight: missing", "extra: not a parameter", "norm.weight: got [9], expected [8]"):
        assert expected in str(refused.value)
    assert weights_of(tmp_path / "w.safetensors", model).keys() == changed.keys() - {"extra"}
    write_safetensors(tmp_path / "other.safetensors", {"layer.weight": np.ones(3, np.float32)})
    with pytest.raises(CheckpointError, match=r"holds no weight of mlp: got layer\.weight"):
        weights_of(tmp_path / "other.safetensors", MLP(MLPConfig()))
    with pytest.raises(CheckpointError, match=r"other\.safetensors: the weights do not fit this model"):
        read_parameters(tmp_path / "other.safetensors", model)


def test_weights_of_takes_what_is_there_under_the_originals_names(tmp_path: Path) -> None:
    model, values = small()
    for transposed in (False, True):
        weights = model.to_original(values, transposed)
        del weights["transformer.wpe.weight"], weights["lm_head.weight"]
        write_safetensors(tmp_path / "w.safetensors", weights)
        found = weights_of(tmp_path / "w.safetensors", model)
        assert found.keys() == values.keys() - {"positions.weight"}
        assert all(np.array_equal(value, values[path]) for path, value in found.items())


def test_a_file_that_can_not_be_written_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for write, name in ((write_safetensors, "w.safetensors"), (write_pt, "w.pt")):
        with pytest.raises(UserError, match=r"can't be written"):
            write(tmp_path / "file" / name, {"w": np.ones(2, np.float32)})
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
