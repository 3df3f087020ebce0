"""Sources with weights: which source each sequence is of, epochs of each, what is held out, and runs on them."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import Told
from tests.data.conftest import config_of, rows
from tests.parallel.forks import Forks
from tests.train.reading import attempts, events, losses, tensors
from ttrain.cli import main
from ttrain.core.errors import CheckpointError, DataError
from ttrain.data.batches import Sizes
from ttrain.data.documents import open_documents
from ttrain.data.sequences.mixture import Mixture, quotas
from ttrain.data.settings import SourceConfig
from ttrain.train.checkpoint.checkpoint import Progress
from ttrain.train.logging.metrics import read_metrics
from ttrain.train.settings import TrainConfig
from ttrain.train.steps.phases import BatchReader, PhaseSchedule, Position

END = 256
COUNTS = {"a": 60, "b": 30, "c": 20}
SHARES = np.array([6, 3, 1]) / 10


def texts(letter: str, count: int) -> list[dict[str, str]]:
    return [{"text": letter * (number + 25)} for number in range(count)]


@pytest.fixture(autouse=True)
def sources(inside: Path) -> None:
    """Documents of one letter each, no two of a source of the same length."""
    for letter, count in COUNTS.items():
        rows(f"{letter}.jsonl", *texts(letter, count))


def entry(file: str, *weight: float, **more: Any) -> SourceConfig:
    return SourceConfig(f"{file}.jsonl", weight=list(weight) or None, **more)


def opened(*entries: Any, context: int = 16, **options: Any) -> Any:
    config = config_of(**{"held_out": 0.2, **options})
    config.sources = list(entries or map(entry, "abc", (6, 3, 1)))
    return open_documents(config, Sizes(context=context))


def letters(tokens: np.ndarray) -> str:
    """Return the letter of each row, which has no other."""
    found = ["".join(sorted({chr(token) for token in row if token not in (0, END)})) for row in tokens]
    assert set(found) <= {*COUNTS}
    return "".join(found)


@settings(max_examples=200, deadline=None)
@given(
    weights=st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1e6)), min_size=1, max_size=6).filter(any),
    count=st.integers(0, 10**9),
)
def test_quotas_add_up_and_grow_one_by_one(weights: list[float], count: int) -> None:
    found, after = quotas(weights, count), quotas(weights, count + 1)
    assert found.sum() == count and sorted(after - found) == [0] * (len(weights) - 1) + [1]
    assert np.abs(found - count * np.array(weights) / sum(weights)).max() <= len(weights)
    assert not any(found[np.array(weights) == 0])


def test_shares_keep_within_those_of_independent_draws() -> None:
    """Within 4 standard deviations of a binomial, which one of 20,000 counts exceeds; at ends of blocks within 3."""
    data = opened()
    for seed in range(3):
        drawn = np.array([data._drawn(seed, number) for number in range(1, 2600)])
        counts = np.arange(1, 2600)[:, None]
        assert (drawn.sum(1) == counts[:, 0]).all()
        deviations = np.abs(drawn - counts * SHARES)
        assert (deviations <= 4 * np.sqrt(counts * SHARES * (1 - SHARES)) + 1).all()
        assert deviations[255::256].max() <= 3
        seen = Counter(letters(data.batch("train", seed, 0, 2000)["tokens"]))
        assert [seen[letter] for letter in "abc"] == drawn[1999].tolist()
    orders = {letters(data.batch("train", seed, first, 64)["tokens"]) for seed in (1, 2) for first in (0, 256)}
    assert len(orders) == 4  # blocks and seeds differ


@pytest.mark.parametrize(("rule", "order"), [("split", "shuffled"), ("split", "sequential"), ("cut", "shuffled")])
def test_batches_follow_from_seed_and_position_and_passes_from_the_source_alone(rule: str, order: str) -> None:
    options: dict[str, Any] = {"long_documents": rule, "order": order, "context": 96, "attention": "document"}
    data = opened(**options)
    whole = data.batch("train", 7, 0, 600)
    for size in (1, 7, 200):
        parts = [data.batch("train", 7, first, min(size, 600 - first)) for first in range(0, 600, size)]
        assert all((np.concatenate([part[name] for part in parts]) == whole[name]).all() for name in whole)
    for stop in (1, 255, 256, 300):  # a run that is resumed knows the number, and what each source gave before it
        after = data.at(96, stop, 0, json.loads(json.dumps(data.read_before(7, stop))), (6, 3, 1))
        assert all((after.batch("train", 7, stop, 300)[name] == whole[name][stop : stop + 300]).all() for name in whole)
        assert after.read_before(7, 600) == data.read_before(7, 600)
    # each source by itself, whatever the others are: epochs over all its documents, in other orders if shuffled
    alone = opened(entry("b", 1), entry("c", 1, name="other"), **options).batch("train", 7, 0, 200)["tokens"]
    found = {letter: [] for letter in "ab"}
    for letter, row in zip(letters(whole["tokens"]), whole["tokens"], strict=True):
        found.setdefault(letter, []).append(row)
    other = [row for letter, row in zip(letters(alone), alone, strict=True) if letter == "b"]
    count = min(len(other), len(found["b"]))
    assert count > 40 and (np.array(other[:count]) == np.array(found["b"][:count])).all()
    for letter in "ab":
        documents = [
            len(each) for each in "".join(map(chr, np.concatenate(found[letter]))).replace("\0", "").split(chr(END))
        ]
        number = data.description["sources"][letter]["documents"]["train"]
        epochs = [documents[start : start + number] for start in range(0, len(documents) - number, number)]
        assert len(epochs) > 2 and all(len(set(each)) == number for each in epochs)
        assert (epochs[0] == epochs[1]) == (order == "sequential")


def test_a_reader_keeps_each_place_over_phases_and_resumes() -> None:
    """Weights, lengths and batch sizes that change, against a walk over one sequence after another."""
    data = opened(entry("a", 3, 0, 1), entry("b", 1))
    train = TrainConfig(length_schedule=[4, 8, 16], batch_schedule=[2, 6], batch_size=6, phase_steps=30)
    schedule = PhaseSchedule.of(train, 16, data.weights)
    assert [phase.weights for phase in schedule.phases] == [(3, 1), (0, 1), (1, 1)]
    whole = BatchReader(data, 3, schedule, 0, Position())
    streams = dict.fromkeys("ab", "")
    for step in range(1, 91):
        for letter, row in zip(letters(whole(step)["tokens"]), whole(step)["tokens"], strict=True):
            assert (step <= 30 or step > 60) or letter != "a"
            streams[letter] += "".join(map(chr, row))
    for letter, number in (("a", 48), ("b", 24)):  # nothing is left out or read twice in an epoch
        documents = [len(each) for each in streams[letter].split(chr(END))[:-1]]
        assert len(documents) > 20 and len(set(documents[:number])) == len(documents[:number])
        assert {*documents} <= {len(each["text"]) for each in texts(letter, COUNTS[letter])}
    for stop in (5, 30, 47, 60, 61):
        resumed = BatchReader(data, 3, schedule, stop, whole.before(stop + 1))
        for step in (stop + 1, 60, 61, 90):
            if step > stop:
                assert (resumed(step)["tokens"] == whole(step)["tokens"]).all()
                assert resumed.before(step) == whole.before(step)


def test_a_share_of_each_source_is_held_out_and_equal_documents_never_part() -> None:
    rows("d.jsonl", *texts("a", 20), *texts("d", 20))
    data = opened(*map(entry, "abcd", (1, 1, 1, 1)), held_out=0.25)
    told = data.description["sources"]
    assert {name: told[name]["documents"]["val"] / COUNTS[name] for name in "bc"} == pytest.approx(
        {"b": 0.25, "c": 0.25}, abs=0.04
    )
    assert told["a"]["documents"]["val"] >= 15 and told["d"]["documents"]["val"] >= 5
    kept = {split: set() for split in ("train", "val")}
    for part in data.parts.values():
        for split, ids in part._splits.items():
            kept[split] |= set("".join(map(chr, ids)).split(chr(END))[:-1])
    assert not kept["train"] & kept["val"]
    assert sum(part["documents"]["train"] + part["documents"]["val"] for part in told.values()) == 60 + 30 + 20 + 40
    # every held-out sequence once, and the first ones in proportion
    every = data.batch("val", 5, 0, data.val_samples)["tokens"]
    assert len({row.tobytes() for row in every}) == len(
        {row.tobytes() for each in data.parts.values() for row in each.batch("val", 0, 0, each.val_samples)["tokens"]}
    )
    for samples in (3, 10, data.val_samples):
        divided = data.divided(samples)
        assert sum(count for _, count in divided.values()) == samples
        parts = [part.batch("val", 0, 0, count)["tokens"] for part, count in divided.values() if count]
        assert sorted(map(bytes, np.concatenate(parts))) == sorted(
            map(bytes, data.batch("val", 0, 0, samples)["tokens"])
        )


def test_without_weights_documents_take_turns_up_to_a_limit() -> None:
    """A limit alone changes which documents are read, and nothing else: against files that hold no more."""
    for letter, limit in (("a", 20), ("b", 10)):
        rows(f"{letter}{limit}.jsonl", *texts(letter, limit))
    limited, short = opened(entry("a", limit=20), entry("b", limit=10)), opened("a20.jsonl", "b10.jsonl")
    assert not isinstance(limited, Mixture)
    assert (limited.batch("train", 1, 0, 40)["tokens"] == short.batch("train", 1, 0, 40)["tokens"]).all()
    mixed = opened(entry("a", 1, limit=20), entry("b", 1))
    assert mixed.description["sources"]["a"]["documents"] == {"train": 16, "val": 4}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([entry("a", 1), entry("b", 1, limit=31)], "limit=31 of b.jsonl is more than its 30 documents. Give a lower"),
        ([entry("a", limit=99)], "limit=99 of a.jsonl is more than its 60 documents"),
        ([entry("a", 1), entry("a", 1, name="again")], "a.jsonl is given twice, by a.jsonl and a.jsonl"),
        ([entry("a", 1), entry("blank", 1)], "blank.jsonl has no document to train on: all are blank, or equal"),
        ([entry("a", 1), entry("one", 1)], "data.sources: one.jsonl has one document and needs at least two"),
        ([entry("a", 1), entry("short", 1)], "data.sources: short.jsonl: the train split has 4 token(s), but"),
    ],
)  # fmt: skip
def test_sources_that_can_not_be_mixed(entries: list[SourceConfig], message: str) -> None:
    rows("blank.jsonl", {"text": " "}, {"text": ""})
    rows("one.jsonl", {"text": "z"})
    rows("short.jsonl", {"text": "zzz"}, {"text": "yyy"})
    with pytest.raises(DataError) as caught:
        opened(*entries)
    assert message in str(caught.value) and caught.value.exit_code == 2


MODEL = ["model.layers=1", "model.width=16", "model.heads=2", "model.context=16", "model.dropout=0.1"]
TRAIN = ["train.batch_size=4", "train.log_every=1", "train.eval_every=6", "train.save_every=5", "train.phase_steps=6"]
QUIET = ["logger=jsonl", "device=cpu", "device.threads=1", "sample.tokens=1", "train.keep_last=9", "schedule.steps=9"]
SOURCES = ["data=documents", "data.tokenizer=byte", "data.held_out=0.2", "engine=static", "parallel.slices=2"]
MIXED = (
    "data.sources=[{path:a.jsonl,weight:[3,1]},{path:b.jsonl,weight:1,limit:20,name:bees},{path:./c.jsonl,weight:.5}]"
)
RUN = [*SOURCES, MIXED, *MODEL, *TRAIN, *QUIET]


def test_runs_have_the_same_bits_over_resumes_and_ranks(told: Told, capsys: Any, tmp_path: Path) -> None:
    said = told(*RUN, "run.dir=whole", "train.steps=9")
    assert "in 9 steps a 66.7 %, 40 % 48 + 12" in " ".join(said.split())
    ranks = Forks([[*RUN, "run.dir=ranks", "train.steps=9", "parallel=ddp"]] * 2, tmp_path / "log")
    assert main([*RUN, "run.dir=parts", "train.steps=5"]) == 0
    assert main(["run.dir=parts", "resume=auto", "train.steps=9"]) == 0
    assert ranks.wait() and ranks.codes == [0, 0]
    assert tensors("whole") == tensors("parts") == tensors("ranks")
    assert (
        [each for each in losses("parts") if each[0] != 5 or each[1] == "train/loss"]
        == losses("whole")
        == losses("ranks")
    )
    assert not [each for each in attempts("parts")[1]["changes"] if each.startswith("data")]  # the config came back
    assert [(event["step"], "1, 1, 0.5" in event["message"]) for event in events("whole", "phase")] == [(7, True)]
    lines = list(read_metrics(Path("whole", "metrics.jsonl")))
    trained, measured = ([line for line in lines if key in line][-1] for key in ("train/loss", "val/loss"))
    read = json.loads(next(Path("whole", "checkpoints").glob("*9/manifest.json")).read_text())["progress"]
    assert sum(sequences for sequences, _ in read["read_sources"].values()) == read["read_samples"] == 36
    assert trained["train/share/bees"] == pytest.approx(read["read_sources"]["bees"][0] / 36, abs=1e-4)
    data = json.loads(Path("whole", "run.json").read_text())["attempts"][0]["data"]["sources"]
    tokens = data["a"]["tokens"]["train"]
    assert trained["train/epochs/a"] == pytest.approx(16 * read["read_sources"]["a"][0] / tokens, abs=1e-4)
    assert data["a"]["weight"] == [3, 1] and data["bees"]["documents"] == {"train": 16, "val": 4}
    # all targets of held-out sequences weigh alike: 15 of each sequence
    dataset = opened(entry("a", 1), entry("b", 1, limit=20), entry("c", 1))
    counts = np.array([count for _, count in dataset.divided(dataset.val_samples).values()])
    parts = np.array([measured[f"val/loss/{name}"] for name in ("a", "bees", "c")])
    assert measured["val/loss"] == pytest.approx(counts @ parts / counts.sum(), rel=1e-6)
    summary = json.loads(Path("whole", "summary.json").read_text())
    assert summary["sources"]["bees"] == {
        "share": trained["train/share/bees"],
        "epochs": trained["train/epochs/bees"],
        "val/loss": measured["val/loss/bees"],
    }
    assert "source bees" in capsys.readouterr().out and summary["val_metrics"] == {}
    # another mixture goes on where its sources were; what is new begins
    other = "data.sources=[{path:c.jsonl,weight:1},{path:b.jsonl,weight:1}]"
    said = told("resume=whole", "run.dir=other", "train.steps=10", *SOURCES[:3], other)
    assert "b is read from its start" in said and "c is read from its start" not in said


def test_a_plan_tells_the_mixture(capsys: Any) -> None:
    assert main(["task=plan", *RUN, "train.steps=12", "plan.time=false"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "in 12 steps a 66.7 %, 40 % 48 + 12" in said
    documents, held_out, tokens, _, epochs = re.search(
        r"c 11.1 %, 20 % (\d+) \+ (\d+) (\d+) \+ (\d+) (\S+) epochs", said
    ).groups()
    assert (documents, held_out) == ("16", "4")
    assert float(epochs) == pytest.approx(6 * 4 * 16 * (1 / 9 + 1 / 5) / int(tokens), abs=0.005)
    assert main(["task=plan", *RUN, "train.minutes=1", "plan.time=false"]) == 0  # has no steps to tell epochs of


@pytest.mark.parametrize("value", [[1], {"a": 3}, {"a": [1, "2"]}, {"a": [-1, 2]}, "a", {"a": [1, 2, 3]}])
def test_damaged_progress_of_sources_is_refused(value: Any) -> None:
    with pytest.raises(CheckpointError, match="the progress holds read_sources"):
        Progress.from_dict({"read_sources": value})
    assert Progress.from_dict({"read_sources": {"a": [1, 2]}}).read_sources == {"a": [1, 2]}
