"""Counter-based random numbers and shuffles."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttrain.data.counter import derive_key, random_normals, random_words, shuffled

KEYS = st.integers(0, 2**64 - 1)


def counters(count: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.uint64)


def test_words_are_those_of_splitmix64() -> None:
    # The generator's published first outputs for seed 1234567.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert random_words(1234567, counters(4)).tolist() == published


@settings(max_examples=60, deadline=None)
@given(key=KEYS, size=st.integers(1, 700))
def test_a_shuffle_is_a_bijection(key: int, size: int) -> None:
    placed = shuffled(np.full(size, key, np.uint64), counters(size), size)
    assert sorted(placed.tolist()) == list(range(size))


@settings(max_examples=30, deadline=None)
@given(key=KEYS, size=st.integers(2, 2**50), positions=st.lists(st.integers(0, 2**50), min_size=1, max_size=20))
def test_a_shuffle_does_not_depend_on_what_is_asked_with_it(key: int, size: int, positions: list[int]) -> None:
    asked = np.array([position % size for position in positions], np.uint64)
    together = shuffled(np.full(len(asked), key, np.uint64), asked, size)
    alone = [int(shuffled(np.full(1, key, np.uint64), asked[i : i + 1], size)[0]) for i in range(len(asked))]
    assert together.tolist() == alone
    assert together.max() < size


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
