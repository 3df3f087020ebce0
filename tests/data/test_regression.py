"""Synthetic regression."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttrain.core.errors import DataError
from ttrain.core.spec import DType, TensorSpec
from ttrain.data.batches import Sizes
from ttrain.data.regression import RegressionDataset, open_regression
from ttrain.data.settings import RegressionConfig


def dataset(inputs: int = 5, outputs: int = 3, **options: Any) -> RegressionDataset:
    return open_regression(RegressionConfig(**options), Sizes(inputs=inputs, outputs=outputs))


def test_fields_and_sizes() -> None:
    data = dataset(7, 2)
    assert data.fields == {"inputs": TensorSpec((7,), DType.FP32), "targets": TensorSpec((2,), DType.FP32)}
    batch = data.batch("train", 0, 0, 6)
    assert {name: (array.shape, array.dtype) for name, array in batch.items()} == {
        "inputs": ((6, 7), np.float32),
        "targets": ((6, 2), np.float32),
    }
    assert data.vocabulary is None and data.tokenizer is None


@settings(max_examples=30, deadline=None)
@given(
    order=st.sampled_from(["random", "epoch", "sequential"]),
    split=st.sampled_from(["train", "val"]),
    first=st.integers(0, 10**6),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
)
def test_batches_of_any_sizes_are_parts_of_one_stream(order: str, split: str, first: int, sizes: list[int]) -> None:
    data, again = dataset(order=order, examples=50), dataset(order=order, examples=50)
    whole = data.batch(split, 3, first, sum(sizes))
    parts = [again.batch(split, 3, first + sum(sizes[:number]), rows) for number, rows in enumerate(sizes)]
    for name in whole:
        np.testing.assert_allclose(np.concatenate([part[name] for part in parts]), whole[name], rtol=1e-6, atol=1e-6)


def test_held_out_examples_are_never_trained_on() -> None:
    data = dataset(examples=60, held_out=0.25, order="epoch")
    assert data.description["examples"] == {"train": 45, "val": 15}
    train = {row.tobytes() for index in range(4) for row in data.batch("train", 1, index * 45, 45)["inputs"]}
    val = {row.tobytes() for row in data.batch("val", 1, 0, 15)["inputs"]}
    assert len(train) == 45 and len(val) == 15 and not train & val
    assert data.val_samples == 15


def test_the_examples_belong_to_the_data_seed_and_their_order_to_the_run_seed() -> None:
    first, second = dataset(examples=20, order="epoch"), dataset(examples=20, order="epoch", seed=1)
    rows = [first.batch("train", seed, 0, 18)["inputs"] for seed in (1, 2)]
    assert not np.array_equal(rows[0], rows[1])
    assert {row.tobytes() for row in rows[0]} == {row.tobytes() for row in rows[1]}
    assert not {row.tobytes() for row in rows[0]} & {row.tobytes() for row in second.batch("train", 1, 0, 18)["inputs"]}


def test_targets_are_a_function_of_the_inputs_plus_noise() -> None:
    exact, noisy = dataset(noise=0.0), dataset(noise=0.5)
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
    data = dataset(examples=2000, held_out=0.5)
    targets = np.concatenate([data.batch("val", 0, index * 100, 100)["targets"] for index in range(10)])
    assert data.baseline().name == "variance of the targets"
    for samples, counted in ((None, targets), (70, targets[:70])):
        expected = ((counted - counted.mean(0)) ** 2).mean()
        assert data.baseline(samples).value == pytest.approx(expected, rel=1e-5) and 0.3 < expected < 3


def test_examples_read_one_after_another() -> None:
    data = dataset(examples=20, held_out=0.25, order="sequential")
    passes = np.concatenate([data.batch("train", 1, index * 6, 6)["inputs"] for index in range(5)])
    assert np.array_equal(passes, np.tile(data.examples(np.arange(15, dtype=np.uint64))["inputs"], (2, 1)))


def test_a_limit_repeats_the_first_examples() -> None:
    data = dataset(limit=2)
    inputs = data.batch("train", 0, 0, 5)["inputs"]
    assert np.array_equal(inputs, inputs[[0, 1, 0, 1, 0]])


def test_sizes_must_be_the_models() -> None:
    assert open_regression(RegressionConfig(inputs=4, outputs=2), Sizes(inputs=4, outputs=2))
    with pytest.raises(DataError, match=r"data\.inputs=4, but model\.inputs=5"):
        open_regression(RegressionConfig(inputs=4), Sizes(inputs=5, outputs=2))
    with pytest.raises(DataError, match="does not take"):
        open_regression(RegressionConfig(), Sizes(context=8))


def test_two_examples_are_enough() -> None:
    data = dataset(examples=2, held_out=0.01)
    assert data.description["examples"] == {"train": 1, "val": 1}
    assert data.batch("train", 0, 9 * 3, 3)["inputs"].shape == (3, 5)
