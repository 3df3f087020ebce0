"""Averages of the weights: what they are after each step, and how they and the weights take each other's place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.optim.test_rules import PLACES, Layers, updates
from tests.optim.updates import Parameters, Updates, gradient
from ttrain.core.spec import DType
from ttrain.graph import Graph, Kind
from ttrain.graph.verify import verify
from ttrain.optim.adamw import AdamW
from ttrain.optim.averages import ScheduleFree
from ttrain.optim.muon import Muon
from ttrain.optim.settings import AdamWConfig, MuonConfig, ScheduleFreeConfig
from ttrain.parallel.ranks import Ranks
from ttrain.train.steps.step_graph import StepGraph

DECAY = 0.75  # an exponential mean from step 4 on


def weights(run: Any, slot: str = "") -> dict[str, np.ndarray]:
    return {path: run.state.read(path + slot) for path in run.model.parameters()}


@pytest.mark.parametrize(("place", "compute"), [*((place, DType.FP32) for place in PLACES), (PLACES[1], DType.BF16)])
def test_an_average_is_the_mean_until_it_is_exponential(place: str, compute: DType) -> None:
    """Of the master weights, whatever layers read."""
    model = Layers()
    model.compute = compute
    run = updates(place, Muon(MuonConfig()), model, ema=DECAY)
    wanted: dict[str, np.ndarray] = {}
    for step in range(1, 9):
        run.advance(step)
        for path, value in weights(run).items():
            share = max(1 - DECAY, 1 / step)
            wanted[path] = value if step == 1 else wanted[path] + share * (value - wanted[path])
    for path, value in weights(run, "/average").items():
        np.testing.assert_allclose(value, wanted[path], rtol=1e-6, atol=1e-6, err_msg=path)


@pytest.mark.parametrize("place", PLACES)
def test_weights_and_averages_take_each_others_place_bit_for_bit(place: str) -> None:
    for optimizer, ema in ((AdamW(AdamWConfig()), DECAY), (ScheduleFree(ScheduleFreeConfig()), None)):
        run = updates(place, optimizer, Layers(), ema=ema)
        for step in range(1, 4):
            run.advance(step)
        before = weights(run), weights(run, "/average")
        assert all(not np.array_equal(before[0][path], before[1][path]) for path in before[0])
        swap = run.engine.build("swap", run.graph.trace_swap)
        for places in (("/average", ""), ("", "/average")):
            swap({})
            for place_of, values in zip(places, before, strict=True):
                for path, value in weights(run, place_of).items():
                    assert np.array_equal(value, values[path]), path


def test_copies_that_layers_read_are_those_of_the_averages_meanwhile() -> None:
    run = Updates(Parameters(DType.BF16), AdamW(AdamWConfig()), ema=DECAY)
    model, state = run.model, run.state
    for path, parameter in model.parameters().items():
        state.write(path, gradient(path, parameter.shape, 1))
        state.write(f"{path}/average", gradient(path, parameter.shape, 2))
    swap = run.engine.build("swap", run.graph.trace_swap)
    for number in (2, 1):
        swap({})
        for path, parameter in model.parameters().items():
            if parameter.has_copy(DType.BF16):
                wanted = torch.from_numpy(gradient(path, parameter.shape, number)).bfloat16().float()
                assert np.array_equal(state.read(f"{path}/compute"), wanted.numpy())


def test_they_cost_nothing_where_they_are_off() -> None:
    traced = {}
    for ema in (None, DECAY):
        graph = Graph()
        steps = StepGraph(Layers(), AdamW(AdamWConfig()), rows=1, gradient_accumulation=2, ema=ema)
        steps.trace_update(graph)
        averages = [t for t in steps.state_tensors() if t.name.endswith("/average")]
        traced[ema] = sum(node.op.name == "update" for node in graph.nodes), len(averages)
        assert {t.kind for t in averages} <= {Kind.OPTIMIZER}
    assert traced[None] == (2, 0) and traced[DECAY] == (4, len(Layers().parameters()))


def test_a_rank_averages_its_share_before_others_overwrite_it() -> None:
    graph = Graph()
    steps = StepGraph(Layers(), Muon(MuonConfig()), rows=1, ema=DECAY, ranks=Ranks(0, 2, 2, shards=True))
    steps.trace_update(graph)
    verify(graph, "of two ranks")
    averaged = {t.name: t for t in steps.state_tensors() if t.name.endswith("/average")}
    assert len(averaged) == len(Layers().parameters()) and not all(t.parts for t in averaged.values())
