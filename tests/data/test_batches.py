"""Batches, examples and counters, pure and repeatable; and runs, which read on at the very next sample."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.conftest import config_of
from tests.data.conftest import rows as write_rows
from ttrain.cli import main
from ttrain.core.errors import DataError
from ttrain.core.spec import DType, TensorSpec
from ttrain.data import batches
from ttrain.data.batches import Sizes, TokenDataset, unigram_entropy
from ttrain.data.counter import derive_key, random_normals, random_words, shuffled
from ttrain.data.documents import open_documents
from ttrain.data.settings import DataConfig, RegressionConfig, TextConfig, TokensConfig
from ttrain.data.synthetic.regression import RegressionDataset, open_regression
from ttrain.data.text import byte_counter, open_text
from ttrain.data.tokenizer import visible_bytes
from ttrain.data.tokens import open_tokens
from ttrain.parallel.ranks import Ranks
from ttrain.parallel.world import World
from ttrain.tasks.prepare import prepare
from ttrain.train.checkpoint.retention import find_checkpoint
from ttrain.train.logging.metrics import read_metrics
from ttrain.train.loop.evaluation import Evaluation
from ttrain.train.steps.step import StepResult, TrainStep

ORDERS = st.sampled_from(["random", "epoch", "sequential"])


def dataset(train: int, val: int, context: int, order: str = "random", limit: int | None = None) -> TokenDataset:
    """Ids that tell their own position: train counts up from 0, val from `train`."""
    ids = np.arange(train + val, dtype=np.uint32)
    config = DataConfig(order=order, limit=limit)
    return TokenDataset(ids[:train], ids[train:], context, train + val, config)


@settings(max_examples=40, deadline=None)
@given(
    context=st.integers(1, 9),
    train=st.integers(1, 60),
    val=st.integers(1, 60),
    order=st.sampled_from(["random", "epoch"]),
    seed=st.integers(0, 2**64),
    index=st.integers(0, 10**9),
    rows=st.integers(1, 7),
)
def test_sequences_are_windows_of_their_own_split(
    context: int, train: int, val: int, order: str, seed: int, index: int, rows: int
) -> None:
    train, val = train + context, val + context
    data = dataset(train, val, context, order)
    assert data.fields == {name: TensorSpec((context,), DType.INT64) for name in ("tokens", "targets")}
    for split, first, last in (("train", 0, train - 1), ("val", train, train + val - 1)):
        batch = data.batch(split, seed, index * rows, rows)
        tokens, targets = batch["tokens"], batch["targets"]
        assert tokens.shape == targets.shape == (rows, context)
        assert tokens.dtype == targets.dtype == np.int64
        assert tokens.flags.c_contiguous and targets.flags.c_contiguous
        assert (tokens == tokens[:, :1] + np.arange(context)).all()
        assert (targets == tokens + 1).all()
        assert tokens.min() >= first and targets.max() <= last


@settings(max_examples=60, deadline=None)
@given(
    ids=st.booleans(),
    split=st.sampled_from(["train", "val"]),
    seed=st.integers(0, 2**40),
    first=st.integers(0, 10**6),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    options=st.fixed_dictionaries({"order": ORDERS, "limit": st.none() | st.integers(1, 9)}),
)
def test_batches_of_any_sizes_are_parts_of_one_stream(
    ids: bool, split: str, seed: int, first: int, sizes: list[int], options: dict[str, Any]
) -> None:
    data: Any = dataset(90, 40, 4, **options) if ids else regression(examples=50, **options)
    whole = data.batch(split, seed, first, sum(sizes))
    firsts = [first + sum(sizes[:number]) for number in range(len(sizes))]
    parts = [data.batch(split, seed, at, rows) for at, rows in zip(firsts, sizes, strict=True)]
    for name, array in whole.items():
        found = np.concatenate([part[name] for part in parts])
        np.testing.assert_allclose(found, array, rtol=0 if ids else 1e-6, atol=0 if ids else 1e-6)


def test_a_batch_is_the_same_in_every_process_and_version() -> None:
    val = [980, 908, 988, 948, 972]
    for order, train in (("random", [142, 760, 34, 838, 137]), ("epoch", [530, 306, 186, 106, 82])):
        for split, expected in (("train", train), ("val", val)):
            batch = dataset(900, 100, 8, order).batch(split, 7, 123 * 5, 5)
            assert batch["tokens"][:, 0].tolist() == expected


@pytest.mark.parametrize("order", ["random", "epoch"])
def test_seeds_and_places_give_other_batches(order: str) -> None:
    data = dataset(5000, 100, 8, order)
    seen = {data.batch("train", seed, first, 4)["tokens"].tobytes() for seed in range(5) for first in range(0, 60, 4)}
    assert len(seen) == 5 * 15
    counts = np.bincount(dataset(44, 10, 4).batch("train", 1, 0, 8000)["tokens"][:, 0], minlength=40)
    assert len(counts) == 40 and counts.min() > 120 and counts.max() < 290  # random: 200 of each are expected


def test_passes_take_every_piece_once_shuffled_and_shifted_anew() -> None:
    data = dataset(1000, 10, 7, "epoch")
    epochs = [data.batch("train", 3, index * 142, 142)["tokens"][:, 0] for index in range(12)]
    assert len({order.tobytes() for order in epochs}) == 12
    assert len({int(order.min()) for order in epochs}) > 1 and max(order.min() for order in epochs) <= 999 % 7
    assert all((np.diff(np.sort(order)) == 7).all() for order in epochs) and not (np.diff(epochs[0]) == 7).all()


@settings(max_examples=40, deadline=None)
@given(
    phases=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 40)), min_size=1, max_size=5),
    seed=st.integers(0, 2**40),
)
def test_a_pass_reads_no_token_twice_whatever_the_lengths(phases: list[tuple[int, int]], seed: int) -> None:
    """Counted by the tokens' own positions. A longer length leaves out at most the rest of a piece."""
    data, length = dataset(100, 13, 12, "epoch"), 96  # 8 pieces of 12, and 3 tokens that epochs leave out
    counts, number, position = np.zeros((99, 100), np.int64), 0, 0
    for context, rows in [*phases, (12, 8)]:
        view = data.at(context, number, position)
        for each in range(number, number + rows):
            begins = view.position(seed, each)
            counts[begins // length] += np.bincount(view.batch("train", seed, each, 1)["tokens"][0], minlength=100)
        number += rows
        position = view.position(seed, number)
        assert position % 12 + context <= 12
    assert counts.max() == 1
    epochs = position // length
    if not any(12 % context for context, _ in phases):
        assert epochs * length - counts[:epochs].sum() <= 12 * len(phases)


@settings(max_examples=40, deadline=None)
@given(context=st.integers(1, 8), val=st.integers(1, 150), rows=st.integers(1, 20))
def test_evaluation_covers_the_held_out_split_once(context: int, val: int, rows: int) -> None:
    data = dataset(50, val + context, context)
    pieces = (val + context - 1) // context
    assert data.val_samples == pieces
    starts = [data.batch("val", at, at, rows)["tokens"][:, 0] - 50 for at in range(0, pieces, rows)]
    assert sorted(np.concatenate(starts)[:pieces]) == [piece * context for piece in range(pieces)]
    spread = dataset(50, 10_001, 10).batch("val", 0, 0, 80)["tokens"][:, 0] - 50
    assert len(np.unique(spread // 2000)) == 5 and abs(spread.mean() - 5000) < 1200


@pytest.mark.parametrize("order", ["random", "epoch"])
def test_one_token_more_than_the_context_is_enough_and_a_limit_repeats_the_first_sequences(order: str) -> None:
    short = dataset(9, 9, 8, order)
    assert short.batch("train", 0, 5 * 3, 3)["tokens"].tolist() == [list(range(8))] * 3
    assert short.batch("val", 0, 5 * 3, 3)["targets"].tolist() == [list(range(10, 18))] * 3
    assert short.val_samples == 1
    data, free = dataset(500, 10, 4, order, limit=3), dataset(500, 10, 4, order)
    first = free.batch("train", 5, 0, 3)["tokens"]
    assert (data.batch("train", 5, 0, 8)["tokens"] == first[[0, 1, 2, 0, 1, 2, 0, 1]]).all()
    assert (data.batch("val", 5, 0, 2)["tokens"] == free.batch("val", 5, 0, 2)["tokens"]).all()


@pytest.mark.parametrize(
    ("held_out", "context", "message"),
    [
        (0.5, 10, r"training split has 10 token.*model\.context=10 needs at least 11.*data\.path"),
        (0.2, 8, r"held-out split has 4 token.*model\.context=8 needs at least 9.*data\.held_out"),
        (0.5, None, "does not take"),
    ],
)
def test_a_split_shorter_than_that_is_refused(tmp_path: Path, held_out: float, context: Any, message: str) -> None:
    (tmp_path / "a.txt").write_text("x" * 10 + "y" * 10, encoding="utf-8")
    config = TextConfig(path=str(tmp_path / "a.txt"), held_out=held_out)
    with pytest.raises(DataError, match=message):
        open_text(config, Sizes(context=context))


def test_the_description_tells_where_the_tokens_come_from(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("é" * 15 + "ü" * 5, encoding="utf-8")
    data = open_text(TextConfig(path=str(file), held_out=0.25), Sizes(context=2))
    assert data.tokenizer is not None
    for split, token in (("train", 0), ("val", 1)):  # the end is held out, and never trained on
        assert all((array == token).all() for array in data.batch(split, 0, 0, 99).values())
    expected = {"source": str(file), "bytes": {"train": 30, "val": 10}, "tokens": {"train": 15, "val": 5}}
    expected |= {"sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    expected |= {"tokenizer": {"name": "char", "vocabulary": 2, "sha256": data.tokenizer.hash}}
    assert expected.items() <= data.description.items()


def test_unigram_entropy_is_that_of_the_counts() -> None:
    assert unigram_entropy([np.tile(np.arange(8), (2, 25)), np.tile(np.arange(8), 50)], 10) == pytest.approx(
        math.log(8)
    )
    assert unigram_entropy([np.zeros(9, np.int64)], 3) == 0
    shares = [0.5, 0.3, 0.2]
    ids = np.repeat(np.arange(-1, 3), [7, 50, 30, 20])
    assert unigram_entropy([ids[:40], ids[40:]], 3) == pytest.approx(-sum(p * math.log(p) for p in shares))


def test_the_baseline_is_of_the_targets_that_an_evaluation_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = np.random.default_rng(0).integers(0, 9, 905).astype(np.uint16)
    data = TokenDataset(ids[:100], ids[100:], 8, 9, DataConfig())
    monkeypatch.setattr(batches, "_ENTROPY_BATCH", 40)
    for samples, targets in ((None, ids[101:901]), (13, data.batch("val", 0, 0, 13)["targets"])):
        assert data.baseline(samples).value == pytest.approx(unigram_entropy([targets.astype(np.int64)], 9))
    # That of a very long split is sampled evenly.
    ids = np.repeat(np.arange(4, dtype=np.uint16), 10_000)
    monkeypatch.setattr(batches, "_ENTROPY_TOKENS", 6400)
    data = TokenDataset(ids[:9], ids, 8, 4, DataConfig())
    assert data.baseline().value == pytest.approx(math.log(4), abs=0.02)


def regression(inputs: int = 5, outputs: int = 3, **options: Any) -> RegressionDataset:
    return open_regression(RegressionConfig(**options), Sizes(inputs=inputs, outputs=outputs))


def test_fields_and_sizes_of_examples() -> None:
    least = regression(examples=2, held_out=0.01)
    assert least.description["examples"] == {"train": 1, "val": 1}
    assert least.batch("train", 0, 9 * 3, 3)["inputs"].shape == (3, 5)
    data = regression(7, 2)
    batch = data.batch("train", 0, 0, 6)
    assert {name: TensorSpec(array.shape[1:], DType.FP32) for name, array in batch.items()} == data.fields
    assert [array.dtype for array in batch.values()] == [np.float32] * 2 and batch["inputs"].shape == (6, 7)
    assert data.vocabulary is None and data.tokenizer is None


def test_examples_belong_to_the_data_seed_and_their_order_to_the_run_seed() -> None:
    """And held-out ones are never trained on."""
    first, second = (regression(examples=60, held_out=0.25, order="epoch", seed=seed) for seed in (0, 1))
    rows = [first.batch("train", seed, 0, 45)["inputs"] for seed in (1, 2)]
    train, again = ({row.tobytes() for row in each} for each in rows)
    val, other = ({row.tobytes() for row in data.batch("val", 1, 0, 15)["inputs"]} for data in (first, second))
    assert train == again and not np.array_equal(*rows) and len(train) == 45
    assert len(val) == 15 == first.val_samples and not train & val and not other & (train | val)


def test_targets_are_a_function_of_the_inputs_plus_noise() -> None:
    exact, noisy = regression(noise=0.0), regression(noise=0.5)
    numbers = np.arange(5000, dtype=np.uint64)
    clean, disturbed = exact.examples(numbers), noisy.examples(numbers)
    assert np.array_equal(clean["inputs"], disturbed["inputs"])
    noise = disturbed["targets"] - clean["targets"]
    assert noise.std() == pytest.approx(0.5, rel=0.05) and abs(noise.mean()) < 0.03
    # A smooth function: neighbours of an input have near targets, so a kernel fit explains most of the variance.
    inputs, targets = clean["inputs"].astype(np.float64), clean["targets"].astype(np.float64)
    distances = ((inputs[4500:, None] - inputs[None, :4500]) ** 2).sum(-1)
    weights = np.exp(-2 * distances)
    fitted = weights @ targets[:4500] / weights.sum(1, keepdims=True)
    assert ((fitted - targets[4500:]) ** 2).mean() < 0.6 * targets.var()


def test_the_baseline_is_the_error_of_answering_the_mean() -> None:
    data = regression(examples=2000, held_out=0.5)
    targets = np.concatenate([data.batch("val", 0, index * 100, 100)["targets"] for index in range(10)])
    assert data.baseline().name == "variance of the targets"
    for samples, counted in ((None, targets), (70, targets[:70])):
        expected = ((counted - counted.mean(0)) ** 2).mean()
        assert data.baseline(samples).value == pytest.approx(expected, rel=1e-5) and 0.3 < expected < 3


def test_examples_read_one_after_another_or_the_first_again_and_again() -> None:
    inputs = regression(limit=2).batch("train", 0, 0, 5)["inputs"]
    assert np.array_equal(inputs, inputs[[0, 1, 0, 1, 0]])
    data = regression(examples=20, held_out=0.25, order="sequential")
    epochs = np.concatenate([data.batch("train", 1, index * 6, 6)["inputs"] for index in range(5)])
    assert np.array_equal(epochs, np.tile(data.examples(np.arange(15, dtype=np.uint64))["inputs"], (2, 1)))


def test_vectors_are_for_models_that_take_them() -> None:
    with pytest.raises(DataError, match="not take"):
        open_regression(RegressionConfig(), Sizes(8))


def counters(count: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.uint64)


def test_words_are_those_of_splitmix64() -> None:
    # The generator's published first outputs for seed 1234567.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert random_words(1234567, counters(4)).tolist() == published


@settings(max_examples=60, deadline=None)
@given(key=st.integers(0, 2**64 - 1), size=st.integers(1, 700))
def test_a_shuffle_is_a_bijection_whatever_is_asked_together(key: int, size: int) -> None:
    placed = shuffled(np.full(size, key, np.uint64), counters(size), size)
    assert sorted(placed.tolist()) == list(range(size))
    last = np.array([size - 1], np.uint64)
    assert shuffled(np.full(1, key, np.uint64), last, size) == placed[-1:]
    assert shuffled(np.full(1, key, np.uint64), last, 2**50) < 2**50


@pytest.mark.parametrize("size", [2, 3, 5, 17])
def test_every_place_is_reached_about_equally_often(size: int) -> None:
    keys = random_words(7, counters(6000))
    for position in range(size):
        placed = shuffled(keys, np.full(keys.shape, position, np.uint64), size)
        expected = len(keys) / size
        assert np.abs(np.bincount(placed.astype(np.int64), minlength=size) - expected).max() < 0.25 * expected


def test_keys_depend_on_every_word_and_their_order() -> None:
    words = [0, 1, -1, 2**63, 5]
    keys = [derive_key(*chosen) for length in (1, 2, 3) for chosen in itertools.product(words, repeat=length)]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**64 for key in keys)


def test_normals_have_the_moments_of_a_normal_distribution() -> None:
    normals = random_normals(3, counters(200_000))
    moments = [float((normals**power).mean()) for power in (1, 2, 3, 4)]
    assert moments == pytest.approx([0, 1, 0, 3], abs=0.05)
    assert abs(np.corrcoef(normals[:-1], normals[1:])[0, 1]) < 0.01


# runs


QUIET = [
    "logger=jsonl", "device=cpu", "device.threads=1", "sample.tokens=1", "train.log_every=1", "train.peak_tflops=1",
    "train.save_every=null",
]  # fmt: skip
GPT = ["model.layers=1", "model.width=16", "model.heads=2", "model.context=16"]
TEXT = ["data.path=book.txt", "data.tokenizer=byte"]
AGILLM = ["model=agillm", "model.preset=null", *GPT, "model.rank=8", "model.objective=joint"]


@pytest.fixture(autouse=True)
def texts(inside: Path) -> None:
    """An empty current folder with a text and documents."""
    words = [f"word{number}" for number in np.random.default_rng(0).integers(0, 1000, 300)]
    Path("book.txt").write_text(" ".join(words))
    write_rows("rows.jsonl", *({"text": " ".join(words[number : number + 4])} for number in range(0, 300, 4)))


class Squares:
    """A step whose sums are of functions of single rows. Notes how many rows it was given."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, inputs: Any) -> dict[str, float]:
        targets = np.asarray(inputs["targets"], np.float64)
        self.rows.append(len(targets))
        counted = targets[targets >= 0] if inputs["targets"].dtype.kind == "i" else targets
        weight = inputs["loss_weight"]
        return {
            "loss": weight * float((counted**2).sum()),
            "a/b": weight * float(np.abs(counted).sum()),
            "activation_norm": 7.0,
        }


def ids(count: int) -> TokenDataset:
    held = np.random.default_rng(0).integers(0, 50, 3 * count + 1).astype(np.uint16)
    return TokenDataset(held, held, 3, 50, DataConfig())


def examples(count: int) -> RegressionDataset:
    return regression(2, 2, examples=count + 10, held_out=count / (count + 10))


@settings(max_examples=50, deadline=None)
@given(
    kind=st.sampled_from([ids, examples]),
    available=st.integers(1, 40),
    rows=st.integers(1, 70),
    samples=st.one_of(st.none(), st.integers(1, 60)),
)
def test_every_sample_counts_once(kind: Any, available: int, rows: int, samples: int | None) -> None:
    data, step = kind(available), Squares()
    assert data.val_samples == available
    found = Evaluation(step, data, rows, samples)()
    counted = data.batch("val", 0, 0, min(available, samples or available))["targets"].astype(np.float64)
    assert found is not None and set(step.rows) == {rows}
    assert found.loss == pytest.approx((counted**2).mean(), rel=1e-9)
    assert found.metrics == {"a/b": pytest.approx(np.abs(counted).mean(), rel=1e-9)}


@pytest.mark.parametrize("kind", [ids, examples])
def test_ranks_call_the_step_equally_often(kind: Any) -> None:
    """Each call gathers weights of zero3, so that a rank with a call more would wait for the others forever."""
    calls = []
    for rank in (0, 1):
        world, step = World(Ranks(rank, 2, 2)), Squares()
        world.gather = lambda records: [*map(dict, records), *map(dict, records)]  # type: ignore[method-assign]
        assert Evaluation(step, kind(7), 4, None, world=world)()
        calls.append(len(step.rows))
    assert calls[0] == calls[1]


def evaluated(run: str, *overrides: str) -> dict[str, float]:
    """The val/... numbers of a run whose weights are the first ones."""
    still = ["train.steps=1", "optimizer.lr=0", "guard.check_learning=null"]
    assert main([*QUIET, *still, *overrides, f"run.dir={run}"]) == 0
    (line,) = [line for line in read_metrics(Path(run, "metrics.jsonl")) if "val/loss" in line]
    return {name: value for name, value in line.items() if name.startswith("val/")}


def test_the_losses_of_a_run_are_the_same_for_every_batch_size() -> None:
    """One at a time, micro-batches with one left over, and a batch larger than the held-out split."""
    overrides = [*AGILLM, *TEXT, "data.held_out=0.2", "train.eval_sequences=null"]
    one = evaluated("one", *overrides, "train.batch_size=1")
    assert one.keys() == {"val/loss", "val/ar/ce", "val/sat/ce", "val/gate/ce", "val/bits_per_byte"}
    # The sums of several losses are not what bits are of; a byte is a token.
    assert one["val/bits_per_byte"] == pytest.approx(one["val/ar/ce"] / np.log(2), rel=1e-9)
    for size, parts in ((12, 3), (100, 1)):
        sizes = [f"train.batch_size={size}", f"train.gradient_accumulation={parts}"]
        assert evaluated(f"run{size}", *overrides, *sizes) == pytest.approx(one, rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "tokenizer"), [("text", "char"), ("documents", "bpe"), ("documents", "byte"), ("tokens", "bpe")]
)
def test_bytes_are_those_of_the_decoded_targets(kind: str, tokenizer: str) -> None:
    """Tokens that end documents have none."""
    Path("book.txt").write_text(Path("book.txt").read_text().replace("1", "é中"))
    Path("rows.jsonl").write_text(Path("rows.jsonl").read_text().replace("word1", "wörd"), "utf-8")
    options: dict[str, Any] = {"held_out": 0.2, "tokenizer": tokenizer, "vocabulary_size": 300}
    if kind == "documents":
        data: Any = open_documents(config_of("rows.jsonl", **options), SIZES)
    elif kind == "text":
        data = text(**options)
    else:
        prepare(config_of("rows.jsonl", **options), "tokens", progress=False)
        data = open_tokens(TokensConfig(path="tokens"), SIZES)
    batch, end = data.batch("val", 0, 0, data.val_samples), data.description.get("end_token", {}).get("id")
    ids = [token for token in batch["targets"].ravel().tolist() if token >= 0 and token != end]
    assert byte_counter(data.tokenizer, end)(batch) == len(raw(data.tokenizer, ids)) > len(ids) / 2


def raw(tokenizer: Any, ids: list[int]) -> bytes:
    """The bytes of tokens, which may begin and end inside a character."""
    if tokenizer.name == "bpe":
        letters = visible_bytes()
        return bytes(letters.index(letter) for i in ids for letter in tokenizer._model.id_to_token(i))
    return bytes(ids) if tokenizer.name == "byte" else tokenizer.decode(ids).encode()


CONTEXT = 16
SIZES = Sizes(context=CONTEXT)
DOCUMENTS = [*GPT, "data=documents", "data.sources=[rows.jsonl]", "data.tokenizer=byte"]
SOURCES: dict[str, tuple[list[str], Callable[[], Any]]] = {
    "text-epoch": ([*GPT, *TEXT, "data.order=epoch"], lambda: text(order="epoch")),
    "text-limit": ([*GPT, *TEXT, "data.limit=7"], lambda: text(limit=7)),
    "documents-shuffled": (DOCUMENTS, lambda: open_documents(config_of("rows.jsonl"), SIZES)),
    "regression-random": (
        ["model=mlp", "model.width=8", "data=regression", "data.examples=100"],
        lambda: regression(8, 8, examples=100),
    ),
}


def text(**options: Any) -> TokenDataset:
    return open_text(TextConfig(path="book.txt", **{"tokenizer": "byte", **options}), SIZES)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, np.ndarray]]:
    """Every batch that a step was given."""
    batches: list[dict[str, np.ndarray]] = []
    start = TrainStep.__call__

    def recorded(self: TrainStep, batch: Any, *given: Any) -> StepResult:
        batches.append({name: np.asarray(array) for name, array in batch.items()})
        return start(self, batch, *given)

    monkeypatch.setattr(TrainStep, "__call__", recorded)
    return batches


def joined(batches: list[dict[str, np.ndarray]]) -> np.ndarray:
    """Return the samples that the steps read, in order."""
    name = "tokens" if "tokens" in batches[0] else "inputs"
    return np.concatenate([batch[name] for batch in batches])


def attempt(batch: int, steps: int, *overrides: str) -> None:
    """Runs `run` up to a step with a batch size, from wherever it is."""
    sizes = [f"train.batch_size={batch}", f"train.steps={steps}", "train.keep_last=9", "train.eval_every=null"]
    assert main([*QUIET, *sizes, *overrides, "run.dir=run", "resume=auto"]) == 0


@pytest.mark.parametrize("source", SOURCES)
def test_legs_of_several_batch_sizes_read_one_stream(source: str, seen: list[dict[str, np.ndarray]]) -> None:
    """16, 4 and 20 a step, the last in micro-batches: samples 0 to 47, 48 to 59 and 60 to 99 of the stream."""
    overrides, opened = SOURCES[source]
    attempt(16, 3, *overrides)
    attempt(4, 6)
    attempt(20, 8, "train.gradient_accumulation=5")
    assert [len(next(iter(batch.values()))) for batch in seen] == [16] * 3 + [4] * 3 + [20] * 2
    assert np.array_equal(joined(seen), joined([opened().batch("train", 1337, 0, 100)]))
    progress = find_checkpoint(Path("run"), "last").progress
    assert progress["read_samples"] == 100
    assert progress["read_tokens"] == 100 * (CONTEXT if "tokens" in seen[0] else 1)


def test_growing_sequences_go_on_at_the_next_token(seen: list[dict[str, np.ndarray]]) -> None:
    """Over phases, with other batch sizes, another schedule and none."""
    overrides = [*DOCUMENTS, "data.order=sequential"]
    grows = ["train.length_schedule=[4,8,16]", "train.phase_steps=2"]
    attempt(6, 3, *overrides, *grows)
    attempt(5, 5)
    attempt(3, 6, f"model.context={CONTEXT}", "train.length_schedule=[8,16]", "train.phase_steps=5")
    attempt(2, 8, "train.length_schedule=[]")
    shapes = [batch["tokens"].shape for batch in seen]
    assert shapes == [(6, 4), (6, 4), (6, 8), (5, 8), (5, 16), (3, 16), (2, 16), (2, 16)]
    stream = np.concatenate([batch["tokens"].ravel() for batch in seen])
    opened = open_documents(config_of("rows.jsonl", order="sequential"), SIZES)
    assert np.array_equal(stream, opened.at(1, 0, 0).batch("train", 1337, 0, stream.size)["tokens"].ravel())
    progress = find_checkpoint(Path("run"), "last").progress
    assert (progress["read_samples"], progress["read_tokens"]) == (sum(rows for rows, _ in shapes), stream.size)
