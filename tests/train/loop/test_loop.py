"""The loop: what it feeds, when it evaluates and saves, how it ends, and that a resumed run continues exactly."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train import reading
from ttrain.core.errors import Interrupted, NonFiniteError, TtrainError
from ttrain.core.spec import TensorSpec
from ttrain.train.checkpoint import save as saver
from ttrain.train.checkpoint.checkpoint import read_checkpoint
from ttrain.train.checkpoint.retention import find_checkpoint, list_checkpoints
from ttrain.train.checkpoint.save import CheckpointContent, note_progress, save_checkpoint
from ttrain.train.logging.metrics import read_metrics
from ttrain.train.loop.interrupt import StopRequests
from ttrain.train.settings import GuardConfig
from ttrain.train.steps.step import StepResult, TrainStep, step_seed

MakeTraining = Any


def lines(training: Any) -> list[dict[str, Any]]:
    return list(read_metrics(training.run_directory.metrics))


def losses(training: Any) -> list[tuple[int, str, float]]:
    return reading.losses(training.run_directory.path)


def steps_on_disk(training: Any) -> list[int]:
    return reading.steps_on_disk(training.run_directory.path)


def interrupt_after(training: Any, step: int, number: int = signal.SIGINT) -> None:
    """Sends the process a signal while the step runs."""
    original = training.loop.train_step

    def run(batch: Any, rates: Any, current: int) -> StepResult:
        if current == step:
            os.kill(os.getpid(), number)
        return original(batch, rates, current)

    training.loop.train_step = run


def test_metrics_of_a_step(make_training: MakeTraining) -> None:
    training = make_training(steps=11, log_every=4, eval_every=None).run()
    found = [line for line in lines(training) if "train/loss" in line]
    assert [line["step"] for line in found] == [4, 8, 11] and found[0]["nonfinite_steps"] == 0
    named = "step train/loss lr grad_norm tokens_per_s step_ms tokens seconds nonfinite_steps"
    assert found[0].keys() == {*named.split()} and found[0]["lr"] == pytest.approx(0.48)
    assert found[0]["tokens_per_s"] * found[0]["step_ms"] / 1e3 == pytest.approx(found[0]["tokens"] / 4, rel=1e-2)


class Recorder:
    """A step with the given inputs that remembers its calls."""

    def __init__(self, name: str, inputs: str, asked: list[tuple[str, dict[str, Any]]]) -> None:
        self.name, self.asked = name, asked
        self.inputs = self.uploads = dict.fromkeys(inputs.split(), TensorSpec(()))

    def __call__(self, inputs: Any) -> dict[str, float]:
        assert inputs.keys() == self.inputs.keys()
        self.asked.append((self.name, dict(inputs)))
        return {"grad_norm": 2.0} if self.name == "update" else {"loss": 0.5, "grad_norm": 2.0}

    def start(self, inputs: Any) -> Callable[[], dict[str, float]]:
        return lambda: self(inputs)


def test_inputs_of_accumulation_steps() -> None:
    asked: list[tuple[str, dict[str, Any]]] = []
    micro = "tokens targets loss_weight seed"
    inputs = {"accumulate_first": micro, "accumulate_next": micro, "update": "lr lr/head step"}
    step = TrainStep({name: Recorder(name, names, asked) for name, names in inputs.items()}, 2, seed=5)
    tokens = np.arange(6).reshape(6, 1)
    targets = np.array([[1], [-1], [2], [3], [-1], [-1]])
    result = step({"tokens": tokens, "targets": targets}, {"lr": 0.1, "lr/head": 0.2}, 9)
    assert result == StepResult(loss=1.5, grad_norm=2.0, tokens=3)
    assert [name for name, _ in asked] == ["accumulate_first", "accumulate_next", "accumulate_next", "update"]
    assert [entry["tokens"].tolist() for _, entry in asked[:3]] == [[[0], [1]], [[2], [3]], [[4], [5]]]
    assert [entry["loss_weight"] for _, entry in asked[:3]] == [1 / 3] * 3
    assert [entry["seed"] for _, entry in asked[:3]] == [step_seed(5, 9, micro) for micro in range(3)]
    assert asked[3][1] == {"lr": 0.1, "lr/head": 0.2, "step": 9}


def test_a_step_gets_no_input_that_it_does_not_have() -> None:
    """Without dropout there is no seed, and plain SGD reads no step number. Real targets count by element."""
    asked: list[tuple[str, dict[str, Any]]] = []
    step = TrainStep({"train": Recorder("train", "inputs targets loss_weight lr", asked)}, 4, seed=0)
    result = step({"inputs": np.zeros((4, 3)), "targets": np.zeros((4, 2))}, {"lr": 0.1}, 1)
    assert result.tokens == 8 and asked[0][1]["loss_weight"] == 1 / 8


def test_seeds_differ_in_every_argument_and_repeat() -> None:
    seeds = {step_seed(s, t, m, r) for s in range(4) for t in range(10) for m in range(3) for r in range(3)}
    assert len(seeds) == 4 * 10 * 3 * 3 and all(0 <= seed < 2**63 for seed in seeds)
    assert step_seed(1, 2, 3, 4) == step_seed(1, 2, 3, 4) == 7597657864365363701


def test_evaluation_uses_held_out_batches_only(make_training: MakeTraining) -> None:
    whole = make_training("whole", steps=4, eval_sequences=None).run()
    assert [index for split, index in whole.dataset.asked if split == "val"] == [0, 4, 8] * 2  # counted first
    training = make_training(steps=8, eval_sequences=8).run()
    assert [entry for entry in training.dataset.asked if entry[0] == "val"] == [("val", 0), ("val", 4)] * 3
    assert [entry[1] for entry in training.dataset.asked if entry[0] == "train"] == list(range(0, 32, 4))


NEVER = {"save_every": None, "save_minutes": None, "eval_every": None}


@pytest.mark.parametrize(
    ("settings", "values", "saved"),
    [
        ({"steps": 5, **NEVER}, [3.0], [(5, 3.0)]),
        ({"steps": 11, "save_every": 2, "keep_last": 3, "keep_best": False, "eval_every": None}, [3.0],
         [(8, None), (10, None), (11, 3.0)]),
        ({"steps": 4, "eval_every": 1, "save_every": None, "keep_last": 1}, [3.0, 1.0, 2.0, 2.0], [(2, 1.0), (4, 2.0)]),
        ({"steps": 6, "save_every": 4, "eval_every": 3, "keep_last": 1}, [1.0, 2.0], [(3, 1.0), (6, 2.0)]),
        ({"steps": 6, **NEVER, "save_minutes": 1.0, "keep_last": 9}, [3.0], [(1, None), (3, None), (5, None), (6, 3)]),
    ],
    ids=["only the last", "by steps", "the best", "the best between two saves", "by time"],
)  # fmt: skip
def test_what_is_saved_and_kept(
    make_training: MakeTraining, settings: Any, values: list[float], saved: list[tuple[int, float | None]]
) -> None:
    seconds = itertools.count(0, 31)
    training = make_training(clock=lambda: float(next(seconds)), losses=values, **settings).run()
    kept = list_checkpoints(training.run_directory.checkpoints)[0]
    assert [(checkpoint.step, checkpoint.val_loss) for checkpoint in kept] == saved
    assert training.loop.context.progress.best_val_loss == min(values)


def test_early_stop(make_training: MakeTraining) -> None:
    settings = {"steps": 20, "eval_every": 2, "early_stop": 2, "min_improvement": 0.5}
    training = make_training(losses=[3.0, 2.0, 1.8, 1.6, 0.1], **settings)
    progress = training.loop.run()
    assert (progress.step, progress.best_step, progress.stale_evaluations) == (8, 4, 2)
    assert steps_on_disk(training)[-1] == 8
    training.close()
    assert make_training(resume=True, **settings).loop.run().step == 8


@pytest.mark.parametrize("attempts", [(7, 14), (3, 6, 14), (1, 13, 14)])
def test_resumed_run_is_the_uninterrupted_one(make_training: MakeTraining, attempts: tuple[int, ...]) -> None:
    """Batches, dropout seeds, losses, parameters and loop state, over two and three attempts, between evaluations."""
    settings = {"steps": 14, "save_every": 5}
    whole = make_training("whole", **settings).run()
    for number, attempt in enumerate(attempts):
        training = make_training("attempts", resume=number > 0, **settings)
        if attempt < 14:
            interrupt_after(training, attempt)
            with pytest.raises(Interrupted):
                training.loop.run()
            training.close()
        else:
            training.loop.run()
    assert losses(training) == losses(whole)
    for name, array in whole.model.state.arrays.items():
        assert array.tobytes() == training.model.state.arrays[name].tobytes()
    before = lines(training)
    training.close()
    again = make_training("attempts", resume=True, **settings)
    assert again.loop.run().step == 14 and lines(again) == before  # a finished run does nothing when resumed
    ended, expected = (vars(each.loop.context.progress).copy() for each in (training, whole))
    for timed in ("seconds", "spent"):
        assert ended.pop(timed) > 0 and expected.pop(timed) > 0
    assert ended == expected


def test_a_stop_during_an_evaluation_leaves_it_to_the_next_attempt(make_training: MakeTraining) -> None:
    whole = make_training("whole").run()
    training = make_training("attempts")
    original = training.dataset.batch

    def batch(split: str, *arguments: Any, **named: Any) -> Any:
        if split == "val" and training.loop.context.progress.step == 8:
            os.kill(os.getpid(), signal.SIGINT)
        return original(split, *arguments, **named)

    training.dataset.batch = batch
    with pytest.raises(Interrupted, match="after step 8"):
        training.loop.run()
    training.close()
    again = make_training("attempts", resume=True).run()
    assert losses(again) == losses(whole)


def test_a_second_signal_ends_the_process_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    child = os.fork()
    if child == 0:
        with StopRequests() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.requested == signal.SIGTERM
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert "once more ends the run at once" in capfd.readouterr().err


def test_nan_in_the_state_is_not_saved(make_training: MakeTraining) -> None:
    """The loss is still finite, but the update made an infinity."""
    training = make_training(keep_best=False, eval_every=None, async_save=False)
    original = training.model._update

    def update(inputs: Any) -> float:
        norm = original(inputs)
        if inputs["step"] == 4:
            training.model.state.arrays["table.weight/velocity"][0, 0] = np.inf
        return norm

    training.model._update = update
    with pytest.raises(NonFiniteError, match=r"Step 4: table\.weight/velocity holds NaN or Inf"):
        training.loop.run()
    assert steps_on_disk(training) == []


def test_nan_in_an_evaluation_stops(make_training: MakeTraining) -> None:
    training = make_training()
    original = training.model._loss
    training.model._loss = lambda inputs, masked: original(inputs, masked) if masked else (float("nan"), None)
    with pytest.raises(NonFiniteError, match="Step 4: the loss on held-out data is nan"):
        training.loop.run()
    training.model._loss, training.model._update = original, lambda inputs: float("inf")
    with pytest.raises(NonFiniteError, match="Step 5: grad_norm is inf.*guard.max_skips=1 names the first bad tensor"):
        training.loop.run()


def failing_saves(monkeypatch: pytest.MonkeyPatch, steps: list[int]) -> list[int]:
    """Each of these steps fails to be saved once, and is taken off the list."""
    original = saver.save_checkpoint

    def save(folder: Path, state: Any, content: Any, *rest: Any) -> Any:
        if content.step in steps:
            steps.remove(content.step)
            raise TtrainError(f"step {content.step} could not be saved: No space left on device")
        return original(folder, state, content, *rest)

    monkeypatch.setattr(saver, "save_checkpoint", save)
    return steps


@pytest.mark.parametrize("asynchronous", [True, False])
def test_one_failed_save_is_reported_and_a_second_stops_the_run(
    make_training: MakeTraining, monkeypatch: pytest.MonkeyPatch, capsys: Any, asynchronous: bool
) -> None:
    training = make_training(async_save=asynchronous, steps=16)
    fails = failing_saves(monkeypatch, [8, 12])
    with pytest.raises(TtrainError, match="step 12 could not be saved.*No space left"):
        training.loop.run()
    assert steps_on_disk(training) == [4]
    assert "WARNING: step 8 could not be saved" in capsys.readouterr().err
    kinds = [event["kind"] for event in reading.events(training.run_directory.path)]
    assert kinds[1:] == ["save_failed"] * 2
    training.close()

    again = make_training(resume=True, async_save=asynchronous, steps=16)
    fails[:] = [8, 16]  # a last one that fails is tried once more
    again.loop.run()
    assert steps_on_disk(again)[-1] == 16 and not fails


def test_a_full_disk_is_seen_before_a_save(make_training: MakeTraining, monkeypatch: pytest.MonkeyPatch) -> None:
    training = make_training()
    usage = shutil.disk_usage(training.run_directory.path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    with pytest.raises(TtrainError, match=r"step 8 could not be saved in .* 1\.0 MiB free, .* need 4\.0 MiB"):
        training.loop.run()
    assert list(training.run_directory.checkpoints.iterdir()) == []


def test_sigusr1_saves_and_goes_on(make_training: MakeTraining) -> None:
    training = make_training(save_every=None, eval_every=None, keep_last=9)
    interrupt_after(training, 5, signal.SIGUSR1)
    assert training.loop.run().step == 12
    assert steps_on_disk(training) == [5, 12]
    (event,) = reading.events(training.run_directory.path, "asked")
    assert event["message"] == "Saving step 5, as SIGUSR1 asked."


LONG = {"steps": 5, **NEVER}
SHORT = {"steps": 9, "save_every": 4, "eval_every": 4}


@pytest.mark.parametrize(
    ("settings", "step", "asynchronous", "added"),
    [(LONG, 5, True, False), (LONG, 5, False, True), (SHORT, 8, True, True), (SHORT, 8, False, False)],
)
def test_a_kill_during_an_evaluation_loses_no_step(
    make_training: Any, monkeypatch: pytest.MonkeyPatch, settings: Any, step: int, asynchronous: bool, added: bool
) -> None:
    """The last one, and one that comes together with a save; or when its loss is added to the checkpoint.

    The next attempt evaluates, as an undisturbed run does.
    """
    settings = {**settings, "async_save": asynchronous}
    whole = make_training("whole", **settings).run()
    child = os.fork()
    if child == 0:
        training = make_training("run", **settings)
        original = training.loop.evaluation

        def kill(stopped: Any) -> Any:
            if training.loop.context.progress.step < step:
                return original(stopped)
            if step < settings["steps"]:
                training.loop.checkpoints.join()  # the save beside training needs its time
            os.kill(os.getpid(), signal.SIGKILL)

        def added_too_late(path: Path, *_: Any, **__: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL) if path.name.endswith(f"{step}") else note_progress(path, *_, **__)

        if added:
            monkeypatch.setattr(saver, "note_progress", added_too_late)
        else:
            training.loop.evaluation = kill
        training.loop.run()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    again = make_training("run", resume=True, **settings)
    assert again.loop.context.progress.step == step and again.loop.context.progress.evaluated_at != step
    again.loop.run()
    assert losses(again) == losses(whole)
    for name, array in whole.model.state.arrays.items():
        assert array.tobytes() == again.model.state.arrays[name].tobytes()
    for checkpoint in list_checkpoints(whole.run_directory.checkpoints)[0]:
        same = read_checkpoint(again.run_directory.checkpoints / checkpoint.path.name)
        assert (same.val_loss, same.step) == (checkpoint.val_loss, checkpoint.step)
        ignored = {"seconds": 0.0, "spent": 0.0}
        assert same.progress | ignored == checkpoint.progress | ignored


@pytest.mark.parametrize("asynchronous", [True, False])
def test_tensors_are_written_once_and_the_loss_is_added(
    make_training: Any, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    written: list[tuple[int, float | None]] = []
    original = saver.save_checkpoint

    def save(folder: Path, state: Any, content: CheckpointContent, *rest: Any) -> Any:
        written.append((content.step, content.val_loss))
        return original(folder, state, content, *rest)

    monkeypatch.setattr(saver, "save_checkpoint", save)
    settings = {"steps": 8, "save_every": 2, "eval_every": 2, "keep_last": 1, "async_save": asynchronous}
    training = make_training(losses=[3.0, 1.0, 2.0, 2.5], **settings).run()
    assert written == [(step, None) for step in (2, 4, 6, 8)]
    kept = list_checkpoints(training.run_directory.checkpoints)[0]
    assert [checkpoint.verify().progress["evaluated_at"] for checkpoint in kept] == [4, 8]
    assert [checkpoint.progress["best_step"] for checkpoint in kept] == [4, 4]
    assert [checkpoint.val_loss for checkpoint in kept] == [1.0, 2.5]


def test_a_step_that_is_trained_again_is_saved_again(make_training: Any) -> None:
    """After a rollback the checkpoint of that step on the disk belongs to another history."""
    training = make_training(steps=4, save_every=2, eval_every=None, async_save=False, keep_last=9)
    loop, table, folder = training.loop, training.model.state.arrays, training.run_directory.checkpoints
    loop.run()
    (folder / "step_00000004").rename(folder.parent / "aside")
    assert loop.checkpoints.roll_back(4, "Step 4 was bad.", GuardConfig()) and loop.context.progress.step == 2
    (folder.parent / "aside").rename(folder / "step_00000004")
    loop.run()  # with half the learning rate
    stored = read_checkpoint(folder / "step_00000004").weights()["table.weight"]
    assert stored.tobytes() == table["table.weight"].tobytes()


def test_adding_to_a_checkpoint_fails_or_succeeds_as_a_whole(
    make_training: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader is not disturbed; a failure leaves the old files."""
    training = make_training(steps=4)
    saved = save_checkpoint(
        training.run_directory.checkpoints, training.model.state, CheckpointContent(4, {}, {"step": 4})
    )
    files = {path.name: path.stat().st_ino for path in saved.path.iterdir()}
    held = find_checkpoint(training.run_directory.path, "last")
    noted = note_progress(saved.path, {"step": 4, "val_loss": 1.5}, val_loss=1.5)
    assert (noted.val_loss, noted.progress["val_loss"]) == (1.5, 1.5)
    assert held.verify().progress == {"step": 4} and read_checkpoint(saved.path) == noted
    after = {path.name: path.stat().st_ino for path in saved.path.iterdir()}
    assert {name for name in files if files[name] != after[name]} == {"manifest.json"} and after.keys() == files.keys()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for name in ("write_synced", "os.replace"):
        with monkeypatch.context() as patch:
            patch.setattr(f"ttrain.train.checkpoint.save.{name}", fail)
            with pytest.raises(TtrainError, match="No space left"):
                note_progress(saved.path, {"step": 4, "val_loss": 9.0}, val_loss=9.0)
        assert read_checkpoint(saved.path) == noted
    assert [path.name for path in training.run_directory.checkpoints.iterdir()] == [saved.path.name]
