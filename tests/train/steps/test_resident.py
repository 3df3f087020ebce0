"""Data that lies on the device: the same numbers as of batches that are handed over, to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import Told
from ttrain.cli import main
from ttrain.config import build
from ttrain.core.errors import UserError
from ttrain.core.spec import DType, TensorSpec
from ttrain.data.batches import STREAM, Sizes, TokenDataset
from ttrain.data.settings import DataConfig, RegressionConfig
from ttrain.data.synthetic.regression import open_regression
from ttrain.device.settings import DeviceConfig
from ttrain.device.torch.device import TorchDevice
from ttrain.engine.state import State, StateTensor
from ttrain.graph import Kind
from ttrain.models.base import prepare_plain
from ttrain.models.gpt import GPT
from ttrain.models.mlp import MLP
from ttrain.models.settings import GPTConfig, MLPConfig
from ttrain.train.logging.metrics import read_metrics
from ttrain.train.steps import resident
from ttrain.train.steps.resident import INDICES, Resident, choose_resident

CONTEXT, TOKENS = 16, 90  # so few that a second step of order=sequential begins anew
MODEL = ["model.layers=1", "model.width=32", "model.heads=2", f"model.context={CONTEXT}", "model.dropout=0.1"]
TRAIN = ["train.batch_size=4", "train.log_every=1", "train.eval_every=3", "train.eval_sequences=4", "schedule.steps=20"]
QUIET = ["logger=jsonl", "device=cpu", "device.threads=1", "sample.tokens=1"]
GROWS = ["train.length_schedule=[4,8,16]", "train.batch_schedule=[2,4]", "train.gradient_accumulation=2"]
GROWS += ["train.phase_steps=2"]
UNREAD = ["device=cuda", "model.vocabulary=256"]
KEYS = ("train/loss", "val/loss", "grad_norm")


@pytest.fixture
def train(inside: Path) -> Any:
    """Trains for some steps in this process: `train("run", *overrides)` -> what the run's metrics say of its losses."""
    letters = np.random.default_rng(0).integers(97, 123, TOKENS + 30).astype(np.uint8)
    Path("text.txt").write_bytes(letters.tobytes())
    data = ["data.path=text.txt", "data.tokenizer=byte", "data.held_out=0.25"]

    def run(name: str, *overrides: str) -> list[dict[str, Any]]:
        assert main([*data, *MODEL, *TRAIN, *QUIET, f"run.dir={name}", *overrides]) == 0
        return losses(name)

    return run


def losses(run: str) -> list[dict[str, Any]]:
    lines = read_metrics(Path(run, "metrics.jsonl"))
    return [{key: line[key] for key in ("step", *KEYS) if key in line} for line in lines if line.keys() & {*KEYS}]


@pytest.mark.parametrize(
    "more",
    [
        ["engine=dynamic", "data.order=sequential"],
        ["data.order=epoch", "data.limit=3", "guard.nonfinite=skip", "train.gradient_accumulation=2"],
        ["data.order=random", "parallel.slices=2"],
        ["engine=traced", "precision=bf16", "data.order=epoch"],
        ["model=llama", "model.hidden=32", "data.order=random", *GROWS],
        ["model=agillm", "model.objective=ar_only", "data.order=epoch"],
    ],
    ids=" ".join,
)
def test_a_run_is_the_same_to_the_bit(more: list[str], train: Any) -> None:
    handed = train("host", "train.steps=6", *more, "data.resident=host")
    assert train("device", "train.steps=6", *more, "data.resident=device") == handed
    assert [line["step"] for line in handed if "train/loss" in line] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("more", [["data.order=sequential"], ["data.order=epoch", *GROWS]], ids=["read", "growing"])
def test_it_goes_on_from_either_place_at_the_same_token(more: list[str], train: Any) -> None:
    whole = train("whole", "train.steps=7", *more, "data.resident=host")
    train("stopped", "train.steps=3", *more, "data.resident=device")
    for place, name in (("device", "there"), ("host", "elsewhere")):
        given = ["resume=stopped/checkpoints/step_00000003", "train.steps=7", f"data.resident={place}"]
        assert main([*given, f"run.dir={name}"]) == 0
        later = [line for line in whole if line["step"] > 3]
        assert [line for line in losses(name) if line["step"] > 3] == later and len(later) == 6


def test_a_step_is_handed_indices_alone(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    upload = TorchDevice.upload_inputs
    monkeypatch.setattr(TorchDevice, "upload_inputs", lambda *args: (given.append(dict(args[2])), upload(*args)))
    train("run", "train.steps=1", "train.eval_every=null", "data.resident=device", "data.order=sequential")
    assert given[0].keys() == {INDICES, "loss_weight", "lr", "step", "seed"}
    assert given[0][INDICES].dtype == np.int64 and given[0][INDICES].tolist() == [0, 16, 32, 48]


def token_data(config: DataConfig, count: int = 1000, vocabulary: int = 60_000, check: bool = False) -> TokenDataset:
    ids = np.arange(count + 100).astype(np.uint16)
    return TokenDataset(ids[:count], ids[count:], CONTEXT, vocabulary, config, check_batches=check)


def model(**more: Any) -> GPT:
    return GPT(GPTConfig(layers=1, heads=2, width=4, context=CONTEXT, vocabulary=60_000, **more))


def place(device: str, data: Any, of: GPT | None = None, **config: Any) -> Resident | None:
    planned = build.planned_device(DeviceConfig(name=device))
    return choose_resident(DataConfig(**config), 1, of or model(), planned, data)


def test_where_a_stream_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "LIMIT", 4 * 2**18)
    config = DataConfig()
    small, at_most, large = (token_data(config, count) for count in (1000, 2**18 - CONTEXT, 2**18 - CONTEXT + 1))
    there = Resident({STREAM: TensorSpec((1000 + CONTEXT,), DType.INT32)})
    assert there == place("cuda", small) == place("cuda", small, resident="device")
    assert there == place("cpu", small, resident="device")
    assert place("cpu", small) is place("null", small) is place("cuda", small, resident="host") is None
    assert place("cuda", at_most) is not None and place("cuda", large) is None
    assert place("cuda", large, resident="device") is not None
    assert place("cuda", small, model(future_weight=0.1)) is place("cuda", object()) is place("cuda", None) is None


@pytest.mark.parametrize("at_once", [2**22, 7, TOKENS + CONTEXT])
def test_it_is_written_in_pieces_and_goes_on_behind_its_end(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "TOKENS_AT_ONCE", at_once)
    data = token_data(DataConfig(order="sequential"), TOKENS)
    found = place("cpu", data, resident="device")
    assert found is not None
    held = [StateTensor(name, spec, Kind.CACHE) for name, spec in found.specs.items()]
    state = State(build.build_device(DeviceConfig(name="cpu")), held)
    found.write(state, data.part)
    assert np.array_equal(state.read(f"data/{STREAM}"), np.arange(TOKENS + CONTEXT) % TOKENS)


def test_an_id_outside_the_vocabulary_is_found_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Told
) -> None:
    """The file is too large to be checked at the start; a device would read beyond its tables."""
    monkeypatch.setattr("ttrain.data.tokens.VERIFIED_BYTES", 0)
    monkeypatch.setattr(resident, "TOKENS_AT_ONCE", 10)
    ids = np.arange(200, dtype="<u2") % 50
    ids[123] = 50
    ids.tofile(tmp_path / "ids.bin")
    data = ["data=tokens", f"data.path={tmp_path}/ids.bin", "data.dtype=uint16", "data.vocabulary=50"]
    given = [*data, *MODEL, *QUIET, "train.steps=1", f"run.dir={tmp_path}/run", "data.resident=device"]
    assert "token 123 of the train split has id 50, but" in told(*given, code=2)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["data=documents", "data.sources=[x]"], "the host makes the sequences of data=documents. Give auto or host"),
        (["model.future_weight=0.3"], "model=gpt prepares every batch, which the host hands over. Give auto or host"),
        (["model=agillm"], "model=agillm prepares every batch"),
        (["device=n150"], "device=n150 looks up numbers in bf16 only, which holds neither ids of tokens nor fp32"),
    ],
)
def test_what_can_t_lie_there_is_refused(given: list[str], words: str, told: Told) -> None:
    text = ["data.max_bytes=20000"] * (given[0] != "data=documents")
    said = told("task=plan", "device=cpu", "data.resident=device", *text, *given, code=2)
    assert f"data.resident=device: {words}" in said


@pytest.mark.parametrize(
    ("given", "lies"),
    [
        (["device=cuda", "engine=traced", *GROWS], True),
        (["device=cpu", "data.resident=device", "model.vocabulary=256"], True),
        (UNREAD, False),
        (["device=cpu"], False),
    ],
)
def test_a_plan_counts_the_stream(given: list[str], lies: bool, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "text.txt").write_bytes(bytes(range(97, 107)) * 100)
    data = [f"data.path={tmp_path}/text.txt", "data.tokenizer=byte", "data.held_out=0.1"]
    file = tmp_path / "plan.json"
    assert main(["task=plan", "plan.time=false", *data, *MODEL, "train.batch_size=4", *given, f"plan.json={file}"]) == 0
    assert ("no data is read" in capsys.readouterr().out) == (given == UNREAD)
    memory = json.loads(file.read_text("utf-8"))["memory"]
    assert memory.get("cache", 0) == (4 * (900 + CONTEXT) if lies else 0)
    assert memory["total"] == sum(size for kind, size in memory.items() if kind != "total")


SIZES = Sizes(inputs=8, outputs=8)
EXAMPLES = ["model=mlp", "model.width=8", "data=regression", "data.examples=100", "train.batch_size=6", "device=cpu"]


def losses_on_examples(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    steps = ["train.steps=4", "train.log_every=1", "train.eval_every=2", f"run.dir={folder}"]
    assert main([*EXAMPLES, *steps, *overrides]) == 0
    return losses(str(folder))


@pytest.mark.parametrize("more", [["train.gradient_accumulation=2"], ["precision=bf16", "data.order=epoch"]])
def test_a_run_on_examples_is_the_same_to_the_bit(more: list[str], tmp_path: Path, monkeypatch: Any) -> None:
    handed = losses_on_examples(tmp_path / "host", *more, "data.resident=host")
    written: list[Any] = []
    write = Resident.write
    monkeypatch.setattr(Resident, "write", lambda self, *given: (written.append(self), write(self, *given)))
    assert losses_on_examples(tmp_path / "device", *more, "data.resident=device") == handed
    shapes = [{name: spec.shape for name, spec in resident.arrays.items()} for resident in written]
    assert len(handed) > 4 and shapes == [{"inputs": (90, 8), "targets": (90, 8)}]


def test_where_examples_lie() -> None:
    model = MLP(MLPConfig(layers=2, width=8))

    def found(device: str, **data: Any) -> Resident | None:
        config, planned = RegressionConfig(**data), build.planned_device(DeviceConfig(name=device))
        return choose_resident(config, 6, model, planned, open_regression(config, SIZES))

    assert found("cuda") == Resident(dict.fromkeys(("inputs", "targets"), TensorSpec((7373, 8))))
    assert found("cpu") is None and found("null") is None and found("cuda", resident="host") is None
    assert found("cuda", examples=5_000_000) is None
    assert found("cuda", examples=5_000_000, resident="device") is not None
    assert found("cpu", resident="device") is not None


def test_examples_that_can_t_lie_there_are_refused() -> None:
    config, model = RegressionConfig(resident="device"), MLP(MLPConfig(width=8))
    data = open_regression(config, SIZES)
    mesh: Any = type("Mesh", (), {"name": "t3000", "chips": 8, "narrow_lookups": True})()
    card: Any = type("Card", (), {"name": "n150", "chips": 1, "narrow_lookups": True})()
    with pytest.raises(UserError, match="chips of a mesh share every batch"):
        choose_resident(config, 1, model, mesh, data)
    with pytest.raises(UserError, match="device=n150 looks up numbers in bf16 only"):
        choose_resident(config, 1, model, card, data)
    device = build.planned_device(DeviceConfig(name="cpu"))
    with pytest.raises(UserError, match="data=regression has no arrays that indices could go into"):
        choose_resident(config, 1, model, device, object())
    preparing: Any = model
    preparing.prepare = lambda batch: prepare_plain(batch)
    with pytest.raises(UserError, match="data.resident=device: model=mlp prepares every batch.* Give auto or host"):
        choose_resident(config, 1, preparing, device, data)
