"""The interface of a model to the rest of ttrain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from numpy.typing import NDArray

from ttrain import ops
from ttrain.core.spec import DType, TensorSpec
from ttrain.graph import Graph, Value
from ttrain.nn.module import Buffer, Parameter

SCALAR = TensorSpec((), DType.FP32)
SEED = TensorSpec((), DType.INT64)
LOSS_WEIGHT = "loss_weight"  # step input fp32 []: the loss is loss_weight * sum over the batch

Batch = Mapping[str, NDArray[Any]]
TOKENS = "read_tokens"  # among counts: tokens that count as trained on, where they are not the terms of the loss

# A batch of a whole optimizer step -> the fields that steps take, and for each weight input how many terms it averages.
Prepare = Callable[[Batch], tuple[dict[str, NDArray[Any]], dict[str, int]]]


def valid_targets(batch: Batch) -> int:
    """Targets that count: token ids below zero mark positions without a target; real-valued targets all count."""
    targets = batch["targets"]
    return int((targets >= 0).sum()) if targets.dtype.kind == "i" else int(targets.size)


def prepare_plain(batch: Batch) -> tuple[dict[str, NDArray[Any]], dict[str, int]]:
    """`Prepare` of a model whose loss is the mean over the valid targets."""
    return dict(batch), {LOSS_WEIGHT: valid_targets(batch)}


def preparation(model: Any) -> Prepare:
    """`Prepare` of a model: its own, or the plain one."""
    return getattr(model, "prepare", prepare_plain)


def scored_positions(graph: Graph, count: int | None) -> Value:
    """Step input `position` of LanguageModel.logits, int64 [1] or [count]."""
    if count is None:
        return ops.reshape(graph.input("position", SEED), (1,))
    return graph.input("position", TensorSpec((count,), DType.INT64))


def loss_weights(counts: Mapping[str, int], scale: float = 1.0) -> dict[str, float]:
    """Return the weight inputs: `scale` over the number of terms that each averages."""
    return {name: scale / max(count, 1) for name, count in counts.items() if name != TOKENS}


def means(sums: Mapping[str, float], counts: Mapping[str, int]) -> dict[str, float | None]:
    """Return weighted sums as means; a mean over no term is None, where the sum is 0.

    A metric `<one>/<other>` is averaged by the weight `<one>_loss_weight` or `<other>_loss_weight` if there is such a
    one, all else by `loss_weight`.
    """
    own = {name: [f"{part}_{LOSS_WEIGHT}" for part in name.split("/")] for name in sums}
    terms = {name: min(counts.get(weight, counts[LOSS_WEIGHT]) for weight in weights) for name, weights in own.items()}
    return {name: value if terms[name] or value != 0 else None for name, value in sums.items()}


def next_token_entropy(sums: Mapping[str, Any]) -> Any:
    """Return the cross-entropy of the next token among what a model names; where none is named so, it is the loss."""
    return next((value for name, value in sums.items() if name.endswith("/ce")), sums["loss"])


class Model(Protocol):
    """Records a forward pass on symbolic tensors. It is built from its own config and the compute dtype.

    While a model records, it declares step inputs: the fields of `batch_specs`, `loss_weight` fp32 [], and `seed` int64
    [] if it draws random numbers. An input that must not be zero needs an `example` (Graph.input), because steps run
    once before there is a batch.
    """

    config: Any
    compute: DType

    @property
    def parameter_count(self) -> int:
        """Number of trained elements; tied parameters count once."""

    def parameters(self, adapters: bool = True) -> dict[str, Parameter]:
        """Return parameters by path, tied ones once; without `adapters` only those of the model itself."""

    def buffers(self) -> dict[str, Buffer]:
        """Tensors that are not trained by path, saved or derived."""

    def persistent(self) -> dict[str, Parameter | Buffer]:
        """Tensors that files of weights hold, by path: parameters, and buffers that are saved."""

    def follow_compute(self) -> None:
        """Let layers read every parameter in the compute dtype."""

    def batch_specs(self, rows: int) -> dict[str, TensorSpec]:
        """Specs of the batch's fields for `rows` sequences or examples."""

    def loss(self, graph: Graph, rows: int, training: bool) -> Value:
        """The loss fp32 []. With `training` it can be differentiated and dropout is on."""


class ModelWithMetrics(Model, Protocol):
    """A model of several loss terms. It names more numbers to log, and tells how its terms are averaged."""

    def loss_and_metrics(self, graph: Graph, rows: int, training: bool) -> tuple[Value, dict[str, Value]]:
        """Return the loss, and more sums fp32 [] over the batch by names such as ar/ce.

        Like the loss they are weighted so that micro-batches add up. The part of a name before its slash is the term. A
        term may have a weight input of its own, `<term>_loss_weight`.
        """

    def prepare(self, batch: Batch) -> tuple[dict[str, NDArray[Any]], dict[str, int]]:
        """Return a step's batch with the fields that the model derives from it, and the count of each weight input.

        A weight input is a step input fp32 [] whose value is one over its count: `loss_weight` and those of the model.
        """


class LanguageModel(Model, Protocol):
    """A model that can be sampled from."""

    def logits(self, graph: Graph, rows: int, count: int | None = None) -> Value:
        """Return scores of the next token, fp32 [1, vocabulary] at one position, or [count, vocabulary] at `count`.

        Declares the inputs `tokens` int64 [rows, context] and `position` int64 [] or [count], indices into the rows
        laid end to end. With one row, the position is that of the last token of the text.
        """


class CachedModel(LanguageModel, Protocol):
    """A model that reads growing texts with caches, see models/cache.py. Sampling is faster then."""

    @property
    def context(self) -> int:
        """Longest text."""

    def extend(self, graph: Graph, count: int, mask: str, texts: int = 1) -> Value:
        """Return hidden states [count, width] of `count` tokens of so many texts.

        The caches hold keys and values of the tokens before, and take those of these tokens.
        """

    def scores(self, rows: Value) -> Value:
        """Scores of the next token after each of these rows of hidden states: [N, width] -> fp32 [N, vocabulary]."""
