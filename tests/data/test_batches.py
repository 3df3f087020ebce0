"""Batches: pure, repeatable, parts of one stream, and never across the boundary of the splits."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttrain.core.errors import DataError
from ttrain.core.spec import DType, TensorSpec
from ttrain.data.batches import Sizes, TokenDataset, unigram_entropy
from ttrain.data.settings import DataConfig, TextConfig
from ttrain.data.text import open_text

ORDERS = st.sampled_from(["random", "epoch"])
ALL_ORDERS = st.sampled_from(["random", "epoch", "sequential"])


def dataset(train: int, val: int, context: int, order: str = "random", limit: int | None = None) -> TokenDataset:
    """Ids that tell their own position: train counts up from 0, val from `train`."""
    ids = np.arange(train + val, dtype=np.uint32)
    config = DataConfig(order=order, limit=limit)
    return TokenDataset(ids[:train], ids[train:], context, train + val, config)


@settings(max_examples=60, deadline=None)
@given(
    context=st.integers(1, 9),
    train=st.integers(1, 60),
    val=st.integers(1, 60),
    order=ORDERS,
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
    order=ALL_ORDERS,
    split=st.sampled_from(["train", "val"]),
    seed=st.integers(0, 2**40),
    first=st.integers(0, 10**6),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    limit=st.one_of(st.none(), st.integers(1, 9)),
)
def test_batches_of_any_sizes_are_parts_of_one_stream(
    order: str, split: str, seed: int, first: int, sizes: list[int], limit: int | None
) -> None:
    data = dataset(90, 40, 4, order, limit)
    whole = data.batch(split, seed, first, sum(sizes))["tokens"]
    firsts = [first + sum(sizes[:number]) for number in range(len(sizes))]
    parts = [data.batch(split, seed, at, rows)["tokens"] for at, rows in zip(firsts, sizes, strict=True)]
    assert (np.concatenate(parts) == whole).all()


def test_a_batch_is_the_same_in_another_process() -> None:
    script = (
        "import numpy as np; from ttrain.data.batches import TokenDataset; "
        "from ttrain.data.settings import DataConfig; "
        "ids = np.arange(1000, dtype=np.uint16); "
        "[print(TokenDataset(ids[:900], ids[900:], 8, 1000, DataConfig(order=order)).batch(split, 7, 123 * 5, 5)"
        "['tokens'][:, 0].tolist()) for order in ('random', 'epoch') for split in ('train', 'val')]"
    )
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    here = [
        dataset(900, 100, 8, order).batch(split, 7, 123 * 5, 5)["tokens"][:, 0].tolist()
        for order in ("random", "epoch")
        for split in ("train", "val")
    ]
    assert printed.splitlines() == [str(row) for row in here]


@pytest.mark.parametrize("order", ["random", "epoch"])
def test_seeds_and_places_give_other_batches(order: str) -> None:
    data = dataset(5000, 100, 8, order)
    seen = {data.batch("train", seed, first, 4)["tokens"].tobytes() for seed in range(5) for first in range(0, 60, 4)}
    assert len(seen) == 5 * 15


def test_random_order_draws_every_start_about_equally_often() -> None:
    data = dataset(44, 10, 4)
    starts = np.concatenate([data.batch("train", 1, index * 100, 100)["tokens"][:, 0] for index in range(80)])
    counts = np.bincount(starts, minlength=40)
    assert len(counts) == 40 and counts.min() > 120 and counts.max() < 290  # 200 expected


@settings(max_examples=40, deadline=None)
@given(context=st.integers(1, 8), train=st.integers(1, 150), seed=st.integers(0, 2**40), first=st.integers(0, 3))
def test_a_pass_takes_every_piece_once(context: int, train: int, seed: int, first: int) -> None:
    train += context
    data = dataset(train, context + 1, context, "epoch")
    pieces = (train - 1) // context
    starts = data.batch("train", seed, first * pieces, pieces)["tokens"][:, 0]
    ordered = np.sort(starts)
    assert ordered[0] <= (train - 1) % context
    assert (np.diff(ordered) == context).all()


def test_passes_are_shuffled_and_shifted_anew() -> None:
    data = dataset(1000, 10, 7, "epoch")
    passes = [data.batch("train", 3, index * 142, 142)["tokens"][:, 0] for index in range(12)]
    assert len({order.tobytes() for order in passes}) == 12
    assert len({int(order.min()) for order in passes}) > 1
    assert not (np.diff(passes[0]) == 7).all()


@settings(max_examples=60, deadline=None)
@given(
    phases=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 40)), min_size=1, max_size=5),
    seed=st.integers(0, 2**40),
)
def test_a_pass_reads_no_token_twice_whatever_the_lengths(phases: list[tuple[int, int]], seed: int) -> None:
    """Counted by the tokens' own positions. A longer length leaves out at most the rest of a piece."""
    data, length = dataset(100, 13, 12, "epoch"), 96  # 8 pieces of 12, and 3 tokens that passes leave out
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
    passes = position // length
    if not any(12 % context for context, _ in phases):
        assert passes * length - counts[:passes].sum() <= 12 * len(phases)


@pytest.mark.parametrize("order", ["random", "epoch"])
def test_a_limit_repeats_the_first_sequences(order: str) -> None:
    data, free = dataset(500, 10, 4, order, limit=3), dataset(500, 10, 4, order)
    first = free.batch("train", 5, 0, 3)["tokens"]
    assert (data.batch("train", 5, 0, 8)["tokens"] == first[[0, 1, 2, 0, 1, 2, 0, 1]]).all()
    assert (data.batch("val", 5, 0, 2)["tokens"] == free.batch("val", 5, 0, 2)["tokens"]).all()


@settings(max_examples=60, deadline=None)
@given(context=st.integers(1, 8), val=st.integers(1, 150), rows=st.integers(1, 20))
def test_evaluation_covers_the_held_out_split_once(context: int, val: int, rows: int) -> None:
    val += context
    data = dataset(50, val, context)
    pieces = (val - 1) // context
    assert data.val_samples == pieces
    firsts = range(0, pieces, rows)
    starts = [int(start) for at in firsts for start in data.batch("val", at, at, rows)["tokens"][:, 0] - 50]
    assert sorted(starts[:pieces]) == [piece * context for piece in range(pieces)]


def test_the_first_held_out_batches_are_spread_over_the_split() -> None:
    data = dataset(50, 10_001, 10)
    starts = np.concatenate([data.batch("val", 0, index * 8, 8)["tokens"][:, 0] - 50 for index in range(10)])
    assert len(np.unique(starts // 2000)) == 5
    assert abs(starts.mean() - 5000) < 1200


@pytest.mark.parametrize("order", ["random", "epoch"])
def test_one_token_more_than_the_context_is_enough(order: str) -> None:
    data = dataset(9, 9, 8, order)
    assert data.batch("train", 0, 5 * 3, 3)["tokens"].tolist() == [list(range(8))] * 3
    assert data.batch("val", 0, 5 * 3, 3)["targets"].tolist() == [list(range(10, 18))] * 3
    assert data.val_samples == 1


def test_a_split_shorter_than_that_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("x" * 10 + "y" * 10, encoding="utf-8")

    def opened(held_out: float, context: int) -> TokenDataset:
        return open_text(TextConfig(path=str(file), held_out=held_out), Sizes(context=context))

    assert opened(0.5, 9).description["tokens"] == {"train": 10, "val": 10}
    with pytest.raises(
        DataError, match=r"training split has 10 token.*model\.context=10 needs at least 11.*data\.path"
    ):
        opened(0.5, 10)
    with pytest.raises(
        DataError, match=r"held-out split has 4 token.*model\.context=8 needs at least 9.*data\.held_out"
    ):
        opened(0.2, 8)
    with pytest.raises(DataError, match="does not take"):
        open_text(TextConfig(path=str(file)), Sizes(inputs=3, outputs=3))


def test_held_out_text_is_the_end_and_never_trained_on(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("t" * 800 + "v" * 200, encoding="utf-8")
    data = open_text(TextConfig(path=str(file), held_out=0.2), Sizes(context=50))
    assert data.tokenizer is not None
    t, v = data.tokenizer.encode("tv")
    for index in range(50):
        train, val = data.batch("train", 0, index * 8, 8), data.batch("val", 0, index * 8, 8)
        assert (train["tokens"] == t).all() and (train["targets"] == t).all()
        assert (val["tokens"] == v).all() and (val["targets"] == v).all()


def test_the_description_tells_where_the_tokens_come_from(tmp_path: Path) -> None:
    import hashlib

    file = tmp_path / "a.txt"
    file.write_text("é" * 20, encoding="utf-8")
    data = open_text(TextConfig(path=str(file), held_out=0.25), Sizes(context=2))
    described = data.description
    assert data.tokenizer is not None
    assert described["source"] == str(file)
    assert described["bytes"] == {"train": 30, "val": 10}
    assert described["tokens"] == {"train": 15, "val": 5}
    assert described["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert described["tokenizer"] == {"name": "char", "vocabulary": 1, "sha256": data.tokenizer.hash}


def test_unigram_entropy_is_that_of_the_counts() -> None:
    assert unigram_entropy([np.tile(np.arange(8), (2, 25)), np.tile(np.arange(8), 50)], 10) == pytest.approx(
        math.log(8)
    )
    assert unigram_entropy([np.zeros(9, np.int64)], 3) == 0
    shares = [0.5, 0.3, 0.2]
    ids = np.repeat(np.arange(-1, 3), [7, 50, 30, 20])
    assert unigram_entropy([ids[:40], ids[40:]], 3) == pytest.approx(-sum(p * math.log(p) for p in shares))


def test_the_baseline_is_of_the_targets_that_an_evaluation_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    from ttrain.data import batches

    ids = np.random.default_rng(0).integers(0, 9, 905).astype(np.uint16)
    data = TokenDataset(ids[:100], ids[100:], 8, 9, DataConfig())
    monkeypatch.setattr(batches, "_ENTROPY_BATCH", 40)
    for samples, targets in ((None, ids[101:901]), (13, data.batch("val", 0, 0, 13)["targets"])):
        assert data.baseline(samples).value == pytest.approx(unigram_entropy([targets.astype(np.int64)], 9))


def test_the_baseline_of_a_very_long_split_is_sampled_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    from ttrain.data import batches

    ids = np.repeat(np.arange(4, dtype=np.uint16), 10_000)
    monkeypatch.setattr(batches, "_ENTROPY_TOKENS", 6400)
    data = TokenDataset(ids[:9], ids, 8, 4, DataConfig())
    assert data.baseline().value == pytest.approx(math.log(4), abs=0.02)


def test_the_default_corpus_opens_quickly_and_its_baseline_is_plausible() -> None:
    started = time.process_time()
    data = open_text(TextConfig(), Sizes(context=64))
    assert time.process_time() - started < 5  # a small fraction of a second on a machine of its own
    assert data.baseline().name == "unigram entropy"
    assert 2.5 < data.baseline().value < 4
    assert data.vocabulary is not None and 90 <= data.vocabulary <= 128
    assert min(data.description["tokens"].values()) > 100_000
