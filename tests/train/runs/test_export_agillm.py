"""AGILLM through the command line: the original's files out and in, and compaction that changes no score."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.plain_agillm import next_scores, pair_scores
from tests.train.runs.test_export import TRAIN, with_run
from ttrain.cli import main
from ttrain.data.library_tokenizer import parse_tokenizer
from ttrain.train.checkpoint.checkpoint import read_checkpoint
from ttrain.train.runs.run_directory import read_config

MODEL = ["model=agillm", "model.preset=null", "model.layers=2", "model.heads=2", "model.width=16", "model.rank=20"]
MODEL += ["model.context=12"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained run in it, and the original's file of it."""
    path = with_run(tmp_path_factory.mktemp("agillm"), *MODEL)
    assert main(["task=export", f"run.dir={path / 'run'}", f"export.file={path / 'whole.pt'}"]) == 0
    return path


@pytest.fixture(autouse=True)
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def original(file: str) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(file, weights_only=True)
    return content


def sampled(capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    capsys.readouterr()
    assert main(["task=sample", "sample.tokens=15", "sample.prompt=abc", *overrides]) == 0
    return capsys.readouterr().out


def test_the_originals_file_says_what_the_run_says(capsys: pytest.CaptureFixture[str]) -> None:
    """The likeliest text by the file's weights in torch is the one that task=sample writes."""
    content = original("whole.pt")
    assert content["step"] == 2 and content["cfg"] == {"d": 16, "layers": 2, "heads": 2, "rank": 20}
    text = sampled(capsys, "run.dir=run", "sample.temperature=0")
    tokenizer = parse_tokenizer(content["tokenizer_json"])
    ids = tokenizer.encode("abc")
    for _ in range(15):
        ids.append(int(next_scores(content, ids[-12:]).argmax()))
    assert text == tokenizer.decode(ids) + "\n"


def test_the_originals_file_becomes_a_run_again(capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes and tokenizer come from the file; the model that is named only says how it is built."""
    assert main(["task=export", "export.source=whole.pt", "export.dir=again", "model=agillm", "model.context=12"]) == 0
    folders = (Path(run) / "checkpoints" / "step_00000002" for run in ("run", "again"))
    expected, found = (dict(read_checkpoint(folder).weights()) for folder in folders)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[path], value) for path, value in expected.items())
    for mode in ("ar", "sat", "speculative"):
        assert len({sampled(capsys, f"run.dir={run}", f"sample.mode={mode}") for run in ("run", "again")}) == 1


def test_compaction_changes_the_rank_and_no_score(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["run.dir=run", "export.compact=true", "export.dir=compact", "export.file=compact.pt"]
    assert main(["task=export", *overrides]) == 0
    printed = capsys.readouterr().out
    assert "    1       20     8" in printed and "rank 20 becomes 8" in printed
    whole, compact = original("whole.pt"), original("compact.pt")
    assert compact["cfg"]["rank"] == 8 and compact["core"]["blocks.1.mha.U"].shape == (8, 8)
    ids = [int(token) for token in np.random.default_rng(0).integers(0, len(whole["core"]["emb.weight"]), 12)]
    torch.testing.assert_close(next_scores(compact, ids), next_scores(whole, ids), rtol=0, atol=1e-5)
    torch.testing.assert_close(pair_scores(compact, ids), pair_scores(whole, ids), rtol=0, atol=1e-5)
    saved = read_checkpoint(Path("compact/checkpoints/step_00000002"))
    assert saved.progress["compacted"] is True and read_config(Path("compact"))["model"]["rank"] == 8
    assert not any(name.startswith("optimizer") for name in saved.files)
    assert sampled(capsys, "run.dir=compact") == sampled(capsys, "run.dir=run")


def test_a_compacted_run_can_start_another(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["task=export", "run.dir=run", "export.compact=true", "export.dir=source"]) == 0
    data = ["data=text", "data.path=text.txt"]
    assert main([*data, *MODEL, "model.rank=8", *TRAIN, "train.init_from=source", "run.dir=next"]) == 0
    assert main(["run.dir=source", "resume=auto", *TRAIN, "train.steps=4", *data]) == 2
    assert "first_moment" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task=export", "run.dir=run", "export.dir=x", "export.form=huggingface"], "has no model.name=agillm"),
        (["task=export", "export.source=odd.pt", "export.dir=x", "model=agillm"], "core.blocks.0.mha.U"),
        (["task=export", "export.source=short.pt", "export.dir=x", "model=agillm"], "core.ln.bias: missing"),
        (["model=agillm", "data=stdlib", "model.objective=ar_only", "sample.mode=sat"], "needs a SAT head"),
        (["model=agillm", "data=stdlib", "model.context=8", "sample.slide=8"], "must be less than model.context=8"),
        (["task=sample", "run.dir=run", "sample.slide=12"], "must be less than model.context=12"),
        (["task=export", "run.dir=run", "export.source=whole.pt", "export.dir=x", "model=agillm"], "Give one"),
        (["task=export", "export.source=whole.pt", "export.file=whole.pt", "model=agillm"], "Give another name"),
    ],
)
def test_wrong_input_is_refused_and_leaves_nothing(overrides: list[str], message: str, capsys: Any) -> None:
    for name, gone in (("odd.pt", "blocks.0.mha.U"), ("short.pt", "ln.bias")):
        content = original("whole.pt")
        del content["core"][gone]
        torch.save(content, name)
    before = sorted(Path().iterdir())
    assert main(overrides) == 2
    errors = capsys.readouterr().err
    assert message in errors and "Traceback" not in errors
    assert sorted(Path().iterdir()) == before
