"""Synthetic regression: every example is computed from its number, so nothing is stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttrain.core.errors import DataError
from ttrain.core.spec import DType, TensorSpec
from ttrain.data.batches import Baseline, Batch, Sizes, Split, drawn, places_of, sample_numbers
from ttrain.data.counter import Words, derive_key, random_normals
from ttrain.data.settings import RegressionConfig
from ttrain.data.tokenizer import Tokenizer

# Words that tell the streams of one seed apart.
_INPUTS, _NOISE, _FIRST_LAYER, _SECOND_LAYER = 11, 12, 13, 14

_HIDDEN = 32
_TANH_VARIANCE = 0.3943  # of tanh(z) for z ~ N(0, 1)
_BASELINE_EXAMPLES = 1 << 16


class RegressionDataset:
    """Examples with Gaussian inputs and targets = second @ tanh(first @ inputs) + noise.

    data.seed fixes the teacher, `first` and `second`. The last `held_out` share of the examples is the held-out split.
    """

    def __init__(self, config: RegressionConfig, inputs: int, outputs: int) -> None:
        self.vocabulary: int | None = None
        self.tokenizer: Tokenizer | None = None
        self.fields = {"inputs": TensorSpec((inputs,), DType.FP32), "targets": TensorSpec((outputs,), DType.FP32)}
        self._config = config
        train = config.examples - min(config.examples - 1, max(1, round(config.examples * config.held_out)))
        self._counts = {"train": train, "val": config.examples - train}
        self._shape = inputs, outputs
        self._first = self._weights(_FIRST_LAYER, inputs, _HIDDEN) / np.sqrt(inputs)
        self._second = self._weights(_SECOND_LAYER, _HIDDEN, outputs) / np.sqrt(_HIDDEN * _TANH_VARIANCE)
        self.description: dict[str, Any] = {
            "source": "synthetic regression",
            "examples": dict(self._counts),
            "inputs": inputs,
            "outputs": outputs,
            "noise": config.noise,
            "seed": config.seed,
            "order": config.order,
        }

    def batch(self, split: Split, seed: int, first: int, rows: int) -> Batch:
        """Return `inputs` fp32 [rows, inputs] and `targets` fp32 [rows, outputs]; see batches.Dataset."""
        if split == "val":
            places = places_of(self._config, split, seed, first, rows, self._counts["val"])
            return self.examples(places + np.uint64(self._counts["train"]))
        return self.examples(self.indices(seed, first, rows))

    def arrays(self, fields: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
        """See batches.Indexed."""
        return {name: spec.with_shape(self._counts["train"], *spec.shape[1:]) for name, spec in fields.items()}

    def part(self, start: int, stop: int) -> Batch:
        """See batches.Indexed."""
        return self.examples(np.arange(start, stop, dtype=np.uint64))

    def indices(self, seed: int, first: int, rows: int) -> Words:
        """See batches.Indexed; indices are numbers of examples."""
        count = self._counts["train"]
        if self._config.order == "random":
            return drawn(seed, sample_numbers(first, rows, self._config.limit), count)
        return places_of(self._config, "train", seed, first, rows, count)

    @property
    def val_samples(self) -> int:
        """See batches.Dataset."""
        return self._counts["val"]

    def baseline(self, samples: int | None = None) -> Baseline:
        """Return the mean squared error of the targets' mean as the answer, over at most the first 65,536 targets."""
        count = min(self.val_samples, samples or self.val_samples, _BASELINE_EXAMPLES)
        targets = self.batch("val", 0, 0, count)["targets"]
        return Baseline("variance of the targets", float(targets.var(axis=0).mean()))

    def examples(self, numbers: Words) -> Batch:
        """Return the examples with these numbers, uint64 [rows]."""
        inputs, outputs = self._shape
        features = self._normals(_INPUTS, numbers, inputs)
        targets = np.tanh(features @ self._first) @ self._second
        targets += self._config.noise * self._normals(_NOISE, numbers, outputs)
        return {"inputs": features.astype(np.float32), "targets": targets.astype(np.float32)}

    def _normals(self, stream: int, numbers: Words, width: int) -> NDArray[np.float64]:
        counters: Words = numbers[:, None] * np.uint64(width) + np.arange(width, dtype=np.uint64)
        return random_normals(derive_key(stream, self._config.seed), counters)

    def _weights(self, stream: int, rows: int, columns: int) -> NDArray[np.float64]:
        return self._normals(stream, np.arange(rows, dtype=np.uint64), columns)


def open_regression(config: RegressionConfig, sizes: Sizes) -> RegressionDataset:
    """Open the synthetic dataset with the model's sizes. Raises DataError where the model does not take vectors."""
    if sizes.inputs is None or sizes.outputs is None:
        raise DataError("data=regression gives vectors, which this model does not take. Use data=text.")
    return RegressionDataset(config, sizes.inputs, sizes.outputs)
