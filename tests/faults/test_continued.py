"""A run that is continued goes on as itself, whatever it had written when it ended, and by one process at a time."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.faults.conftest import Train, losses
from tests.train.checkpoint.test_checkpoint import constant, content
from tests.train.reading import tensors
from ttrain.cli import main
from ttrain.core import waiting
from ttrain.core.files import lock_file
from ttrain.tasks.training.run import Run
from ttrain.train.checkpoint.checkpoint import MANIFEST, UNFINISHED, read_checkpoint
from ttrain.train.checkpoint.retention import find_checkpoint, prune_checkpoints
from ttrain.train.checkpoint.save import save_checkpoint
from ttrain.train.logging.metrics import read_metrics
from ttrain.train.loop.evaluation import Evaluation
from ttrain.train.loop.loop import Loop
from ttrain.train.runs import resume
from ttrain.train.runs.run_directory import RECORD, RunDirectory, read_config

OWN = ["model.width=6", "optimizer.lr=0.02", "run.seed=5", "train.save_every=100"]  # none is a default


class Killed(BaseException):
    """Leaves a run as a kill does: nothing is written on the way out."""


def killed(train: Any, monkeypatch: pytest.MonkeyPatch, *overrides: str, step: int = 3, owner: Any = Loop) -> None:
    """Runs until `step` would be trained, or with `owner` Run until the attempt would be recorded."""
    name = "_turn" if owner is Loop else "record"
    original = getattr(owner, name)

    def call(self: Any, *arguments: Any) -> Any:
        if owner is Run or arguments[0] >= step:
            raise Killed
        return original(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, call)
        with pytest.raises(Killed):
            train(*overrides)


def test_a_resume_of_nothing_says_that_a_new_run_starts(train: Train) -> None:
    """The folder was misspelt, or the run was killed before it began: another experiment would train unnoticed."""
    Path("empty").mkdir()
    for folder, override in (("misspelt", "resume=auto"), ("empty", "resume=auto")):
        told = train.told(f"run.dir={folder}", override, "train.steps=2")
        assert f"resume=auto: {folder} holds no run yet; a new one starts" in told
        assert "holds no run" not in train.told(f"run.dir={folder}", override, "train.steps=3")


def test_the_end_of_a_run_is_not_told_as_its_first_step(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume of a run that lacks its last evaluation alone."""

    def dies(*arguments: Any) -> Any:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Evaluation, "__call__", dies)
        with pytest.raises(Killed):
            train("run.dir=run", "train.steps=4")
    monkeypatch.setattr(waiting, "AFTER", 0.001)
    told = train.told("run.dir=run", "resume=auto", "train.steps=4")
    assert "All 4 steps are done" in told and "The first step is under way" not in told


@pytest.mark.parametrize("owner", [Loop, Run])
def test_before_its_first_checkpoint_a_run_starts_again_as_itself(
    train: Train, monkeypatch: pytest.MonkeyPatch, owner: Any
) -> None:
    assert train("run.dir=whole", *OWN, "train.steps=6") == 0
    killed(train, monkeypatch, "run.dir=run", *OWN, owner=owner)
    before = read_config(Path("run"))
    told = train.command("run.dir=run", "resume=auto", "train.steps=6")
    assert "starts again with its own config" in told and "Changed since the run started: train.steps: 8 -> 6" in told
    assert tensors("run") == tensors("whole") and losses("run") == losses("whole")
    before["train"]["steps"] = 6
    after = read_config(Path("run"))
    assert {**after, "resume": None} == {**before, "resume": None}


HALF = {
    "gone": lambda text: None,
    "a section less": lambda text: text[: text.index("\nrecover:") + 1],
    "of another kind": lambda text: "- 1\n",
}


def spoil(run: Path, how: str) -> None:
    text = HALF[how]((run / "config.yaml").read_text())
    (run / "config.yaml").unlink() if text is None else (run / "config.yaml").write_text(text)


@pytest.mark.parametrize("how", HALF)
def test_a_config_that_is_not_whole_is_no_config(train: Train, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Without a checkpoint the run is refused and stays as it is; with one, the checkpoint tells."""
    killed(train, monkeypatch, "run.dir=run", *OWN)
    spoil(Path("run"), how)
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file() and path.name != ".lock"}
    told = train.command("run.dir=run", "resume=auto", "train.steps=6", code=2)
    assert "config.yaml" in told and "has no checkpoint either" in told
    after = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file() and path.name != ".lock"}
    assert after == before

    assert train("run.dir=saved", *OWN, "train.steps=4") == 0
    assert train("run.dir=whole", *OWN, "train.steps=6", "schedule.steps=4") == 0
    spoil(Path("saved"), how)
    told = train.command("run.dir=saved", "resume=auto", "train.steps=6", "schedule.steps=4")
    assert "The config of the checkpoint is taken instead" in told
    assert tensors("saved") == tensors("whole")


def test_a_run_whose_checkpoints_are_all_damaged_is_left_alone(train: Train) -> None:
    assert train("run.dir=run", *OWN) == 0
    (Path("run/checkpoints/step_00000008") / MANIFEST).write_text("{}")
    before = read_config(Path("run")), losses("run")
    for overrides in (["resume=auto"], ["resume=run"], ["task=sample"], ["task=export", "export.file=x.safetensors"]):
        assert MANIFEST in train.command("run.dir=run", *overrides, code=2)
    assert (read_config(Path("run")), losses("run")) == before


def test_what_a_leg_was_told_holds_for_the_next(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it ended before its first checkpoint. A checkpoint that is named brings its own config."""
    assert train("run.dir=run", *OWN, "train.steps=4", "schedule=constant") == 0
    shutil.copytree("run", "named")
    killed(main_with, monkeypatch, "run.dir=run", "resume=auto", "train.steps=8", "optimizer.lr=0.005", step=6)
    assert main(["run.dir=run", "resume=auto"]) == 0
    assert read_config(Path("run"))["optimizer"]["lr"] == 0.005 and losses("run")[-1][0] == 8
    assert main(["resume=named/checkpoints/step_00000004", "train.steps=6"]) == 0
    assert read_config(Path("named"))["optimizer"]["lr"] == 0.02


def main_with(*overrides: str) -> int:
    return main(list(overrides))


@pytest.mark.parametrize("owner", [Loop, Run])
def test_a_branch_goes_on_from_where_it_branched_off(train: Train, monkeypatch: pytest.MonkeyPatch, owner: Any) -> None:
    """Also where it ended before its first own checkpoint, and the run that it came from is gone."""
    more = ["train.steps=8", "schedule=constant"]
    assert train("run.dir=whole", *OWN, *more) == 0
    assert train("run.dir=first", *OWN, *more, "train.steps=4") == 0
    killed(main_with, monkeypatch, "resume=first", "run.dir=second", "train.steps=8", step=6, owner=owner)
    assert read_checkpoint(Path("second/checkpoints/step_00000004")).step == 4
    shutil.rmtree("first")
    assert main(["run.dir=second", "resume=auto"]) == 0
    assert tensors("second") == tensors("whole") and losses("second") == losses("whole")


def test_a_kill_before_a_folder_is_a_run(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command begins again; a resume, which may leave out the settings of the run, does not."""
    assert train("run.dir=first", *OWN, "train.steps=4") == 0
    original = resume.note_progress

    def kill(*arguments: Any) -> None:
        original(*arguments)
        os._exit(9)

    command = ["resume=first", "run.dir=second", "train.steps=8"]
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(resume, "note_progress", kill)
        main(command)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert not Path("second", RECORD).exists()
    assert "not a run of ttrain" in train.command("run.dir=second", "resume=auto", code=2)
    assert main(command) == 0
    assert [step for step, _ in losses("second")] == list(range(1, 9))


def test_a_run_that_is_running_is_not_looked_into(train: Train) -> None:
    """Its files come and go: the first word is that it is in use, and by whom. Nothing in it is touched."""
    assert train("run.dir=run", *OWN, "train.save_every=4", "train.keep_last=9") == 0
    checkpoints = Path("run/checkpoints")
    shutil.copytree(checkpoints / "step_00000004", checkpoints / f"{UNFINISHED}replaced_step_00000006")
    holder = f"in use by process {os.getpid()} on {socket.gethostname()}"
    with closing(RunDirectory.open(Path("run"))):
        (checkpoints / "step_00000006").rename(checkpoints / f"{UNFINISHED}replaced_step_00000006")
        (checkpoints / "step_00000008" / "config.json").unlink()  # as in the middle of a removal
        before = sorted(checkpoints.rglob("*"))
        for overrides in (["resume=auto"], ["resume=run"], ["resume=run/checkpoints/step_00000008"], []):
            told = train.told("run.dir=run", *overrides, code=2)
            assert holder in told and "can't be read" not in told and "config.json" not in told
        assert sorted(checkpoints.rglob("*")) == before
    assert main(["run.dir=run", "resume=auto"]) == 0


def test_whoever_lists_runs_does_not_keep_one_from_being_continued(train: Train) -> None:
    """Looking at a lock holds it for a moment."""
    assert train("run.dir=run", *OWN) == 0
    with open("run/.lock", "a", encoding="utf-8") as file:
        assert lock_file(file)
        threading.Timer(0.05, file.close).start()
        RunDirectory.open(Path("run")).close()


def test_a_removal_and_a_reader_do_not_pass_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody begins to read between the question whether someone reads and the removal."""
    for step in (1, 2):
        save_checkpoint(tmp_path, constant(float(step)), content(step))
    original, tried = os.replace, []

    def replace(source: Any, target: Any) -> None:
        with open(Path(source) / "config.json", encoding="utf-8") as file:
            tried.append(lock_file(file))
        original(source, target)

    monkeypatch.setattr("ttrain.train.checkpoint.retention.os.replace", replace)
    assert [path.name for path in prune_checkpoints(tmp_path, 1, False)] == ["step_00000001"] and tried == [False]


def test_a_decay_branches_off_from_any_save(train: Train, capsys: Any) -> None:
    """One stable run, two decays; the same command again goes on with the same decay."""
    assert train("run.dir=a", "schedule=constant", "schedule.warmup=1", "train.steps=6") == 0
    branch = ("schedule=wsd", "schedule.decay_from=0", "train.steps=8")
    assert train("run.dir=b", "resume=a/checkpoints/step_00000004", *branch) == 0
    assert train("run.dir=c", "resume=a", *branch) == 0
    assert train("run.dir=c", "resume=auto", *branch[:2], "train.steps=10") == 0
    wanted = {"b": [0.5, 1, 1, 1, 0.775, 0.55, 0.325, 0.1], "c": [0.5, 1, 1, 1, 1, 1, 0.55, 0.1, 0.325, 0.1]}
    for run, factors in wanted.items():
        rates = [line["lr"] / 1e-3 for line in read_metrics(Path(run) / "metrics.jsonl") if "lr" in line]
        assert rates == pytest.approx(factors)
    assert [read_config(Path(run))["schedule"]["decay_from"] for run in "bc"] == [4, 6]
    capsys.readouterr()
    for given, message in (
        (["schedule=wsd", "schedule.decay_from=0"], "this one starts anew"),
        (["schedule.decay_from=3"], "schedule.decay_from=3: is for schedule=wsd, not cosine"),
        (["schedule=wsd", "schedule.decay_from=8"], "must be below train.steps=8, where the decay ends"),
        (["resume=a", *branch[:2], "train.steps=6"], "is step 6 here, and the schedule ends at step 6"),
    ):
        assert train("run.dir=d", *given) == 2 and message in capsys.readouterr().err


# runs whose parts are trained differently, kept in bf16 or averaged


PURE = ["precision=bf16_true", "optimizer.stochastic_rounding=true"]
EMA = "train.ema=0.5"
KEPT = {
    "moments, bf16 compute": ["optimizer.state_dtype=bf16", "precision=bf16"],
    "moments of muon": ["optimizer=muon", "optimizer.state_dtype=bf16", "precision=bf16"],
    "all": PURE,
    "weights alone": [*PURE, "optimizer.state_dtype=fp32"],
}
AVERAGED = {
    "weights": [EMA],
    "masters of muon": [EMA, "precision=bf16", "optimizer=muon"],
    "iterates": ["optimizer=schedule_free"],
}


def stored(run: str) -> dict[str, tuple[str, Any]]:
    """dtype and values of every tensor of the newest checkpoint."""
    from safetensors import safe_open

    found = {}
    for file in find_checkpoint(Path(run), "last").path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - not a mapping
                found[name] = (shard.get_slice(name).get_dtype(), shard.get_tensor(name).float().numpy())
    return found


def exported(train: Train, run: str, average: bool, file: str) -> dict[str, np.ndarray]:
    given = [f"run.dir={run}", "export.form=ttrain", f"export.file={file}"]
    assert train("task=export", *given, *([] if average else ["export.average=false"])) == 0
    return load_file(file)


@pytest.mark.parametrize(("how", "engine"), [*((how, "static") for how in KEPT | AVERAGED), ("all", "dynamic")])
def test_a_resumed_run_has_the_bits_of_one_that_was_never_stopped(train: Train, how: str, engine: str) -> None:
    overrides = [*(KEPT | AVERAGED)[how], f"engine={engine}", "schedule=constant"]
    parts = ["run.dir=parts", *overrides, "train.eval_every=1"]  # evaluating changes nothing
    assert train("run.dir=whole", *overrides) == train(*parts, "train.steps=3") == 0
    assert train("run.dir=parts", "resume=auto", "train.steps=8") == 0
    whole, other = stored("whole"), stored("parts")
    assert {name: dtype for name, (dtype, _) in whole.items()} == {name: dtype for name, (dtype, _) in other.items()}
    assert all(np.array_equal(values, other[name][1]) for name, (_, values) in whole.items())
    if how in KEPT:
        narrow = {"F32": how == "weights alone", "BF16": how != "weights alone"}
        assert all(narrow[dtype] for name, (dtype, _) in whole.items() if "/" in name)
        weights = {dtype for name, (dtype, _) in whole.items() if "/" not in name}
        assert weights == ({"F32"} if "moments" in how else {"BF16"})
        return
    assert {name.removesuffix("/average") for name in whole if name.endswith("/average")} == {
        name for name in whole if "/" not in name
    }
    for average in (True, False):
        for name, value in exported(train, "whole", average, f"{average}.safetensors").items():
            assert np.array_equal(value, whole[f"{name}/average" if average else name][1])


def test_another_dtype_on_resume(train: Train) -> None:
    """fp32 -> bf16 rounds to nearest, bf16 -> fp32 keeps the numbers; both are told."""
    assert train("run.dir=wide", "train.steps=2") == 0
    told = train.told("run.dir=narrow", "resume=wide", "optimizer.state_dtype=bf16", "train.steps=2")
    assert "optimizer.state_dtype: None -> bf16" in told
    assert train("run.dir=more", "resume=wide", "optimizer.state_dtype=bf16", "train.steps=4") == 0
    assert train("run.dir=back", "resume=more", "optimizer.state_dtype=fp32", "train.steps=6") == 0
    dtypes = [{d for name, (d, _) in stored(run).items() if "/" in name} for run in ("wide", "more", "back")]
    assert dtypes == [{"F32"}, {"BF16"}, {"F32"}]


def test_learning_rates_of_all_groups_are_seen_and_one_can_change_on_resume(train: Train, capsys: Any) -> None:
    overrides = [
        "schedule=constant",
        "optimizer.lr=5e-5",
        "optimizer.lr_multipliers={layers.2: 4.0, layers.1.bias: 2.0}",
    ]
    assert train("run.dir=a", *overrides, "train.steps=4") == 0
    lines = [line for line in read_metrics(Path("a/metrics.jsonl")) if "lr" in line]
    for line in lines:
        rates = {key: line[key] for key in line if key.startswith("lr")}
        assert rates == pytest.approx({"lr": 5e-5, "lr/layers.2": 2e-4, "lr/layers.1.bias": 1e-4})
    printed = capsys.readouterr()
    assert "learning rates" in printed.out and "lr 5.00e-05, layers.1.bias 1.00e-04, layers.2 2.00e-04" in printed.out
    assert json.loads(Path("a/summary.json").read_text())["learning_rates"]["lr/layers.2"] == pytest.approx(2e-4)
    assert train("run.dir=same", "resume=a", "train.steps=5") == 0
    code = train(
        "run.dir=head", "resume=a", "train.steps=5", "optimizer.lr_multipliers={layers.2: 40.0, layers.1.bias: 2.0}"
    )
    assert code == 0
    same, head = stored("same"), stored("head")
    moved = {name for name in same if not np.array_equal(same[name][1], head[name][1])}
    assert moved == {"layers.2.weight", "layers.2.bias"}


def test_the_norm_of_the_scope_is_recorded(train: Train) -> None:
    overrides = ["optimizer.clip_scope=[layers.0, layers.1]", "optimizer.clip_norm=0.1"]
    assert train("run.dir=a", *overrides) == train("run.dir=b", *overrides, "guard.nonfinite=skip") == 0
    for run in ("a", "b"):
        for line in read_metrics(Path(run) / "metrics.jsonl"):
            if "lr" in line:
                assert 0 < line["clipped_norm"] < line["grad_norm"]
    assert train("run.dir=c", "optimizer.clip_norm=0.1") == 0
    assert not any("clipped_norm" in line for line in read_metrics(Path("c/metrics.jsonl")))


def test_frozen_layers_stay_and_are_in_the_checkpoint(train: Train) -> None:
    overrides = ["optimizer.freeze=[layers]", "optimizer.unfreeze=[layers.*.bias, layers.2]"]
    assert "of them frozen" in train.told("run.dir=a", *overrides, "train.steps=2")
    before = stored("a")
    assert train("run.dir=a", "resume=auto", "train.steps=6") == 0
    after = stored("a")
    still = {name for name in before if "/" not in name and np.array_equal(before[name][1], after[name][1])}
    assert still == {"layers.0.weight", "layers.1.weight"}
    assert not any(name.startswith(tuple(f"{path}/" for path in still)) for name in after)


def test_another_set_of_frozen_layers_on_resume(train: Train) -> None:
    assert train("run.dir=a", "optimizer.freeze=[layers.0]", "train.steps=4") == 0
    first = stored("a")
    told = train.told("run.dir=b", "resume=a", "optimizer.freeze=[layers.1]", "train.steps=6")
    assert "Frozen until now, so their optimizer state starts from zero: layers.0.bias, layers.0.weight." in told
    assert "Frozen from now on, so what the optimizer kept is dropped: layers.1.bias, layers.1.weight." in told
    assert "optimizer.freeze: ['layers.0'] -> ['layers.1']" in told
    last = stored("b")
    assert not np.array_equal(first["layers.0.weight"][1], last["layers.0.weight"][1])
    assert np.array_equal(first["layers.1.weight"][1], last["layers.1.weight"][1])
    assert last["layers.0.weight/first_moment"][1].any() and "layers.1.weight/first_moment" not in last


def test_an_evaluation_reads_the_averages(train: Train) -> None:
    """A run that goes on from the averages as its weights has their loss before it changes them."""
    assert train("run.dir=a", EMA, "train.steps=4") == 0
    losses = [line["val/loss"] for line in read_metrics(Path("a/metrics.jsonl")) if "val/loss" in line]
    loss = {}
    for average in (True, False):
        exported(train, "a", average, "w.safetensors")
        assert train(f"run.dir={average}", "train.init_from=w.safetensors", "optimizer.lr=0", "train.steps=1") == 0
        loss[average] = [x["val/loss"] for x in read_metrics(Path(f"{average}/metrics.jsonl")) if "val/loss" in x][-1]
    assert losses[-1] == loss[True] != loss[False]


def test_they_begin_and_end_with_any_attempt(train: Train) -> None:
    assert train("run.dir=plain", "train.steps=3") == 0
    told = train.told("run.dir=on", "resume=plain", EMA, "optimizer.lr=0", "train.steps=4")
    assert "so they start as the weights are" in told
    on = stored("on")
    assert all(np.array_equal(on[name][1], on[f"{name}/average"][1]) for name in on if "/" not in name)
    told = train.told("run.dir=off", "resume=on", "train.ema=null", "train.steps=5")
    assert "Averages of the weights are kept no more" in told
    assert not any(name.endswith("/average") for name in stored("off"))


REFUSED = {
    "optimizer.freeze=[layrs]": "optimizer.freeze.layrs: no parameter's name begins so. Did you mean 'layers'?",
    "optimizer.stochastic_rounding=true": "precision=fp32 keeps fp32 weights, so there is nothing to round",
    "optimizer.freeze=layers": "optimizer.freeze",
    f"{EMA} optimizer=schedule_free": "keeps an average of its own",
    "optimizer=schedule_free optimizer.average_after=5 train.steps=5": "must be below train.steps=5",
    f"{EMA} precision=bf16_true": "train.ema=0.5: an average needs weights in fp32",
    "optimizer=schedule_free precision=bf16_true": "optimizer=schedule_free: an average needs weights",
    "optimizer=adafactor optimizer.state_dtype=bf16": "they change too little in a step for bf16",
}


@pytest.mark.parametrize("given", REFUSED)
def test_bad_parts_are_refused_before_anything_is_made(train: Train, given: str) -> None:
    assert REFUSED[given] in train.told("run.dir=a", *given.split(), code=2) and not Path("a").exists()


def test_a_group_with_a_rate_of_zero_is_no_fault(train: Train) -> None:
    assert train("run.dir=a", "optimizer.lr_multipliers={layers.0: 0.0}", "guard.check_learning=3") == 0


def test_pure_bf16_warns_unless_it_is_rounded_stochastically(train: Train) -> None:
    overrides = ["precision=bf16_true", "optimizer.lr=1e-7", "guard.check_learning=3"]
    assert "bf16 without a master copy" in train.told("run.dir=nearest", *overrides)
    told = train.told("run.dir=stochastic", *overrides, "optimizer.stochastic_rounding=true")
    assert "bf16 without a master copy" not in told
