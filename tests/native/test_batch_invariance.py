"""Bits of a token's hidden state, logits and log-probability: read whole, in chunks or one by one, in any batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.session import initial_values
from tests.native.conftest import open_device
from tests.native.test_numbers import run_all
from tests.ttnn.runs import adamw, agillm, gpt, llama
from ttrain import ops
from ttrain.autodiff import backward
from ttrain.core import processor
from ttrain.core.attention_mask import AttentionMask
from ttrain.core.errors import UserError
from ttrain.core.spec import DType
from ttrain.device.torch.device import TorchDevice
from ttrain.device.torch.native.native import Sizing
from ttrain.device.torch.native.rows import NativeKernels
from ttrain.device.torch.native.toolchain import Toolchain
from ttrain.engine.state import State
from ttrain.engine.traced import TracedEngine
from ttrain.graph import Graph, Kind, Value
from ttrain.ops.attention import log_sum_exp
from ttrain.train.sampling.decode import cache_tensors
from ttrain.train.steps.step_graph import StepGraph

TEXTS, TIME, LONG, VOCABULARY = 5, 24, 37, 61
MUP: dict[str, Any] = {"parametrization": "mup", "base_width": 12}
MODELS: dict[str, Callable[..., Any]] = {
    "llama": lambda *given, **sizes: llama(*given, width=48, hidden=70, **sizes),
    "window": lambda *given, **sizes: llama(
        *given, width=40, hidden=64, window=9, qk_norm=True, logit_cap=5.0, **sizes
    ),
    "experts": lambda *given, **sizes: llama(
        *given, width=48, experts=7, experts_per_token=3, expert_width=34, shared_experts=1, **sizes
    ),
    "gpt": lambda *given, **sizes: gpt(*given, width=36, heads=3, recompute="block", **MUP, **sizes),
    "agillm": lambda *given, rank=20, **sizes: agillm(
        *given, layers=2, width=36, heads=3, rank=rank, objective="ar", dropout=0.0, **sizes
    ),
}
Outputs = dict[str, np.ndarray]


class Device(TorchDevice):
    """A CPU with kernels that it shares."""

    def __init__(self, native: NativeKernels) -> None:
        super().__init__("cpu", threads=native.sizing.threads)
        self.native = native

    def compiler(self) -> NativeKernels:
        return self.native


def kernels(folder: Path, threads: int) -> NativeKernels:
    """Kernels that cut the smallest work for all their threads."""
    sizing = Sizing(threads, thread_cost=1, logits=900, batch_invariant=True)
    return NativeKernels(TorchDevice("cpu", threads=threads).kernels, sizing, Toolchain(folder))


class Run:
    """A model of sequences and caches of so many places, with steps that tell what it makes of each token."""

    def __init__(
        self, native: NativeKernels, model: Any, counts: list[int], texts: int, rows: int, training: bool = False
    ) -> None:
        """Caches of so many texts are read so many tokens at a time, whole texts so many rows."""
        self.model, self.texts, self.rows, self.training = model, texts, rows, training
        caches = cache_tensors([self.cached_trace(1)])
        tensors = StepGraph(self.model, adamw(), rows=1).state_tensors(training=False)
        self.state = State(Device(native), [*tensors, *caches])
        self.engine = TracedEngine(self.state.device, self.state)
        self.steps = {count: self.engine.build(f"cached {count}", self.cached_trace(count)) for count in counts}
        self.step = self.engine.build("whole", self.whole_trace)

    def write(self, model: Any) -> None:
        """Take the weights of a model of fewer places."""
        for path, value in initial_values(model, 7).items():
            shape = self.model.parameters()[path].shape
            rest = [(0, new - old) for new, old in zip(shape, value.shape, strict=True)]
            self.state.write(path, np.pad(value, rest) * (5 if value.ndim == 2 else 1))  # norms stay near one

    def outputs(self, graph: Graph, hidden: Value) -> None:
        """Logits and their log-sum-exp, as when sampling."""
        logits = self.model.scores(hidden)
        for name, value in {"hidden": hidden, "logits": logits, "log_sum_exp": log_sum_exp(logits)}.items():
            graph.output(name, value)

    def whole_trace(self, graph: Graph) -> None:
        """The same and log-probabilities of all tokens, in training with a backward pass."""
        if self.training:
            loss = self.model.loss(graph, self.rows, training=True)
            weights = [value for value in graph.state.values() if value.kind is Kind.PARAMETER]
            graph.output("norm", ops.global_norm(backward(loss, weights)))
        hidden = self.model.hidden(graph, self.rows, self.training)
        self.outputs(graph, hidden)
        targets = ops.reshape(graph.inputs["tokens"], hidden.shape[:1])
        graph.output("log_probs", self.model.log_probs(hidden, targets)[0])
        graph.output("of_logits", ops.log_probs(self.model.scores(hidden), targets)[0])

    def cached_trace(self, count: int) -> Callable[[Graph], None]:
        return lambda graph: self.outputs(graph, self.model.extend(graph, count, "causal", self.texts))

    def whole(self, texts: np.ndarray) -> Outputs:
        """Outputs [rows, time, ...] of texts [rows, time]."""
        found = self.step({"tokens": texts} | ({"targets": texts, "loss_weight": 1.0} if self.training else {}))
        log_probs = np.take_along_axis(found["logits"], texts.reshape(-1, 1), 1)[:, 0] - found["log_sum_exp"]
        for name in ("log_probs", "of_logits"):
            assert found[name].tobytes() == log_probs.tobytes(), name
        return {n: found[n].reshape(*texts.shape, *found[n].shape[1:]) for n in ("hidden", "logits", "log_sum_exp")}

    def one(self, text: np.ndarray, count: int) -> Outputs:
        """The same of one text [time], read so many tokens at a time."""
        parts = []
        for start in range(0, len(text), count):
            places = np.arange(start, start + count)
            inputs = {"tokens": text[None, start : start + count], "positions": places, "visible": places + 1}
            parts.append(self.steps[count](inputs))
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def together(self, texts: np.ndarray) -> Outputs:
        """The same of texts [n, time], a token of each at a time, each text two places behind the one before."""
        (count, time), parts = texts.shape, []
        first = np.arange(count) * self.model.length  # place of the text's caches
        for turn in range(time + 2 * (count - 1)):
            positions = (turn - 2 * np.arange(count)).clip(0, time - 1)
            inputs = {"positions": positions, "places": first + positions, "visible": first + positions + 1}
            parts.append(self.steps[count]({"tokens": texts[range(count), positions][None], **inputs}))
        rows = [parts[2 * row :][:time] for row in range(count)]
        return {name: np.stack([[part[name][row] for part in rows[row]] for row in range(count)]) for name in parts[0]}


def assert_same(found: Outputs, expected: Outputs) -> None:
    for name, array in expected.items():
        assert found[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize(
    ("name", "compute", "threads", "kind", "training"),
    [
        ("llama", DType.FP32, 2, "native", True),
        ("window", DType.BF16, 1, "native", True),
        ("gpt", DType.BF16, 2, "native", True),
        ("experts", DType.BF16, 2, "native", True),
        ("experts", DType.FP32, 1, "x86-64-v3", False),
        ("agillm", DType.FP32, 1, "native", False),
        ("window", DType.FP32, 2, "x86-64-v3", False),
    ],
)
def test_bits_of_a_token_are_the_same_however_it_is_read(
    folder: Path, name: str, compute: DType, threads: int, kind: str, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(processor.VARIABLE, kind)
    try:
        processor.march()
    except UserError as error:
        pytest.skip(str(error))
    texts, native = np.random.default_rng(3).integers(0, VOCABULARY, (TEXTS, TIME)), kernels(folder, threads)
    short, long = (MODELS[name](compute, context=time, vocabulary=VOCABULARY) for time in (TIME, LONG))
    run, longer = Run(native, short, [1, 8], 1, TEXTS, training), Run(native, long, [TEXTS], TEXTS, 1)
    native.prepare(node for each in (run, longer) for plan in each.engine.plans for node in plan.launched)
    run.write(short)
    longer.write(short)
    expected = run.whole(texts)
    assert_same(longer.together(texts), expected)
    padded = longer.whole(np.pad(texts[1:2], [(0, 0), (0, LONG - TIME)]))
    assert_same({key: x[:, :TIME] for key, x in padded.items()}, {key: x[1:2] for key, x in expected.items()})
    for count in run.steps:
        assert_same(run.one(texts[2], count), {key: x[2] for key, x in expected.items()})


def test_scores_add_in_one_order_with_a_cache_and_without(folder: Path) -> None:
    """Large parts of a score cancel, so what is left of it tells the order of adding."""
    device = open_device(Sizing(1, batch_invariant=True), folder)
    queries, keys = torch.tensor([[4096.0, 1, 4096, 1]] * 2), torch.tensor([[4096.0, 1, -4096, 1], [0, 0, 0, 0]])
    values, last = torch.tensor([[1.0, 2, 3, 4], [-4, -3, -2, -1]]), torch.tensor([1])
    q, k, v = (x.bfloat16()[None] for x in (queries, keys, values))
    whole = ("attention", [q, k, v, None, None, None], {"heads": 1, "scale": 1.0, "mask": AttentionMask()})
    cached = ("cached_attention", [q[None, :, 1:], k[None], v[None], last, last + 1], {"scale": 1.0})
    (rows, _), (row,) = run_all(device, [whole, cached])
    assert torch.equal(rows[0, 1], row.flatten())
    device.close()


def test_an_op_without_such_a_kernel_is_named(folder: Path) -> None:
    """Keys narrower than values have none."""
    run = Run(kernels(folder, 1), MODELS["agillm"](DType.FP32, rank=10, context=TIME, vocabulary=VOCABULARY), [], 1, 1)
    with pytest.raises(UserError, match=r"device.batch_invariant=true: op attention at blocks.0 has no such kernel"):
        run.whole(np.zeros((1, TIME), np.int64))
