"""The interface of an objective to the rest of ttrain, and the default: the loss that the model itself has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ttrain.core.spec import TensorSpec
from ttrain.graph import Graph, Value
from ttrain.models.base import Model, ModelWithMetrics, Prepare, preparation
from ttrain.nn.experts import SHARES
from ttrain.objectives.settings import ObjectiveConfig


class Objective:
    """objective=next_token: the loss of the model itself, over the batches of any data.

    Another objective is a subclass with its own fields, preparation and loss. It may also read rows of its own
    (`encode`, see data/examples.py), and couple the rows of a slice (`probe` and `coupled`).
    """

    config: Any
    balances = False  # whether the model has experts whose loads count for the loss
    slice = 1, 1  # micro-batches of a slice, and rows of each
    frozen: Any = None  # a second model that the loss reads, a FrozenModel, where there is one

    def __init__(self, config: ObjectiveConfig) -> None:
        self.config = config

    @property
    def coupled(self) -> Callable[[Mapping[str, NDArray[Any]]], dict[str, Any]] | None:
        """Return what turns outputs of `probe` into further step inputs, or None where rows stand for themselves.

        The outputs, by name, are those of all rows of a slice. Each of its micro-batches then has the inputs beside its
        fields; `loss` declares them. Here they are the shares of experts in all pairs.
        """
        return _expert_shares if self.balances and self.slice[0] > 1 else None

    def attach(self, model: Any) -> None:
        """Give a model the parts that are learned beside its own, before it is used."""

    def fields(self, model: Model, rows: int) -> dict[str, TensorSpec]:
        """Return the specs of a batch's fields for `rows` rows; the first axis of each is that of the rows."""
        return model.batch_specs(rows)

    def prepare(self, model: Model) -> Prepare:
        """Return what makes the fields and the counts of a step from its batch; see models.base.Prepare."""
        return preparation(model)

    def loss(self, model: Any, graph: Graph, rows: int, training: bool) -> tuple[Value, dict[str, Value]]:
        """Return the loss fp32 [], and further sums by name; see ModelWithMetrics.loss_and_metrics.

        Sums have the weight `loss_weight`, so that micro-batches and ranks add up to means.
        """
        if self.balances and self.coupled is not None:
            graph.input(SHARES, TensorSpec((model.config.experts,)))
        if hasattr(model, "loss_and_metrics"):
            return cast(ModelWithMetrics, model).loss_and_metrics(graph, rows, training)
        return model.loss(graph, rows, training), {}

    def reads_reference(self, model: Any) -> bool:
        """Return whether batches have fields that `reference`, alike to `probe`, computes with the first weights."""
        return False

    def summary(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of an evaluation, of which some may follow from others that are sums."""
        return dict(metrics)

    def probe(self, model: Any, graph: Graph, rows: int) -> dict[str, Value]:
        """Return what `rows` rows tell of themselves before their slice is trained on, each [rows, ...], by name.

        It is computed forward only, with the weights that the step then changes.
        """
        return {"loads": model.expert_loads(graph, rows)}


def _expert_shares(outputs: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Loads [rows, E] -> step input `SHARES` fp32 [E]. Loads are whole numbers, so their order changes no bit."""
    loads = outputs["loads"].sum(0, dtype=np.float64)
    return {SHARES: (loads / max(loads.sum(), 1)).astype(np.float32)}
