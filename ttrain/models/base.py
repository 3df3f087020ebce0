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


def loss_weights(counts: Mapping[str, int]) -> dict[str, float]:
    """The weight inputs: one over how many terms each averages."""
    return {name: 1.0 / max(count, 1) for name, count in counts.items()}


def means(sums: Mapping[str, float], counts: Mapping[str, int]) -> dict[str, float | None]:
    """Return weighted sums as the means that they are, None for a mean over no term, which the sum gives as 0.

    A metric `<term>/<name>` averages by the weight `<term>_loss_weight` where there is one, all else by `loss_weight`.
    """
    own = {name: f"{name.partition('/')[0]}_{LOSS_WEIGHT}" for name in sums}
    terms = {name: counts.get(weight, counts[LOSS_WEIGHT]) for name, weight in own.items()}
    return {name: value if terms[name] or value != 0 else None for name, value in sums.items()}


class Model(Protocol):
    """Records a forward pass on symbolic tensors. Built from its small config and the compute dtype.

    Step inputs that a model declares while it records: the fields of `batch_specs`, `loss_weight` fp32 [], and where it
    draws random numbers `seed` int64 []. One that must not be zero says so with the `example` of Graph.input: steps are
    run once before there is a batch.
    """

    config: Any
    compute: DType

    @property
    def parameter_count(self) -> int:
        """Number of trained elements; tied parameters count once."""

    def parameters(self, adapters: bool = True) -> dict[str, Parameter]:
        """Parameters by path, tied ones once; without `adapters` only those that the model is built with."""

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
    """A model of several loss terms: it names further numbers to log, and tells how its terms are averaged."""

    def loss_and_metrics(self, graph: Graph, rows: int, training: bool) -> tuple[Value, dict[str, Value]]:
        """The loss, and further sums fp32 [] over the batch by names such as ar/ce.

        Like the loss they are weighted so that micro-batches add up. A name holds a slash; before it stands the term,
        whose weight input is `<term>_loss_weight` where it has one of its own.
        """

    def prepare(self, batch: Batch) -> tuple[dict[str, NDArray[Any]], dict[str, int]]:
        """A whole step's batch with the fields that the model derives from it, and for each weight input its count.

        A weight input is a step input fp32 [] whose value is one over its count: `loss_weight` and those of the model.
        """


class LanguageModel(Model, Protocol):
    """A model that can be sampled from."""

    def logits(self, graph: Graph, rows: int, count: int | None = None) -> Value:
        """Scores of the next token, fp32 [1, vocabulary], at one position, or [count, vocabulary] at so many.

        Declares the inputs `tokens` int64 [rows, context] and `position` int64 [] or [count], indices into the rows
        laid end to end: with one row, the place of the last token of the text.
        """


class CachedModel(LanguageModel, Protocol):
    """A model that reads a growing text with caches, see models/cache.py. Sampling is faster then."""

    @property
    def context(self) -> int:
        """Longest text."""

    def extend(self, graph: Graph, count: int, mask: str) -> Value:
        """Hidden states [count, width] of `count` tokens; the caches hold what comes before, and take these."""

    def scores(self, rows: Value) -> Value:
        """Scores of the next token after each of these rows of hidden states: [N, width] -> fp32 [N, vocabulary]."""
