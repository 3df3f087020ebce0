"""Objectives: what a model learns from its data. The default one is the loss that the model itself has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ttrain.core.spec import TensorSpec
from ttrain.data.batches import Batch
from ttrain.graph import Graph, Value
from ttrain.models.base import LOSS_WEIGHT, Model, ModelWithMetrics, Prepare, preparation, valid_targets
from ttrain.nn.experts import SHARES
from ttrain.objectives.settings import ObjectiveConfig


class Objective:
    """objective=next_token: the loss of the model itself, over the batches of any data.

    Another objective is a subclass, mostly of RowObjective. The loss of a row may depend on the other rows of its slice
    (`probe` and `coupled`).
    """

    config: Any
    balances = False  # whether the model has experts whose loads count for the loss
    slice = 1, 1  # micro-batches of a slice, and rows of each
    frozen: Any = None  # the FrozenModel that the loss reads beside the trained model; None without one

    def __init__(self, config: ObjectiveConfig) -> None:
        self.config = config

    @property
    def coupled(self) -> Callable[[Mapping[str, NDArray[Any]]], dict[str, Any]] | None:
        """Return a function from outputs of `probe` to step inputs; None where the loss of a row needs no other row.

        It takes the outputs for all rows of a slice, by name. Each micro-batch of the slice gets the inputs beside its
        fields; `loss` declares them. Here they are the shares of experts in all pairs.
        """
        return _expert_shares if self.balances and self.slice[0] > 1 else None

    def attach(self, model: Any) -> None:
        """Add the parts that the objective needs to a model, such as a head, before the model is used."""

    def fields(self, model: Model, rows: int) -> dict[str, TensorSpec]:
        """Return the specs of a batch's fields by name; the first axis of each has `rows` rows."""
        return model.batch_specs(rows)

    def prepare(self, model: Model) -> Prepare:
        """Return the function that makes the fields and the counts of a step from its batch: models.base.Prepare."""
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
        """Return whether batches have fields that follow from the weights before training.

        The method `reference` then computes them. It is called as `probe` is.
        """
        return False

    def summary(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics that an evaluation reports. A subclass may compute some of them from given sums."""
        return dict(metrics)

    def probe(self, model: Any, graph: Graph, rows: int) -> dict[str, Value]:
        """Return what the other rows of a slice have to know of these rows, by name, each [rows, ...].

        This is a forward pass with the weights before the step.
        """
        return {"loads": model.expert_loads(graph, rows)}


def _expert_shares(outputs: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Loads [rows, E] -> step input `SHARES` fp32 [E]. Loads are whole numbers, so their order changes no bit."""
    loads = outputs["loads"].sum(0, dtype=np.float64)
    return {SHARES: (loads / max(loads.sum(), 1)).astype(np.float32)}


class RowObjective(Objective):
    """The base of objectives whose steps have fields of their own, made from rows; see data/examples.py."""

    def prepare(self, model: Model) -> Prepare:
        """Return a function that completes the fields of a batch by `derive`, and leaves out what steps do not read."""

        def prepared(batch: Mapping[str, NDArray[Any]]) -> tuple[Batch, dict[str, int]]:
            fields = dict(batch)
            counts = self.derive(fields)
            return {name: fields[name] for name in self.fields(model, 1) if name in fields}, counts

        return prepared

    def derive(self, fields: Batch) -> dict[str, int]:
        """Add the fields to a batch that follow from others, and return the counts; see models.base.Prepare."""
        return {LOSS_WEIGHT: valid_targets(fields)}

    def given(self, model: Any, graph: Graph, rows: int) -> dict[str, Value]:
        """Return the fields as step inputs, by name."""
        return {name: graph.input(name, spec) for name, spec in self.fields(model, rows).items()}
