"""Each known trap of captured training, one test. Oracles: torch.optim on the same gradients, or the static engine.

SILENT marks a trap that elsewhere trains on wrong numbers without a word; RAISES one that must be refused by name.
Sources of the traps are issues of PyTorch, burn, tt-metal and tinygrad about captured or compiled training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.session import Session, tensor_by_tensor_equal, token_batch
from ttrain import ops
from ttrain.autodiff import backward
from ttrain.core.errors import CaptureError, GraphError, ShapeError, UserError
from ttrain.core.spec import TensorSpec
from ttrain.device.null import NullDevice
from ttrain.device.settings import DeviceConfig
from ttrain.engine.state import State, StateTensor
from ttrain.engine.static import StaticEngine
from ttrain.engine.traced import TracedEngine
from ttrain.graph import Graph, Kind
from ttrain.models.gpt import GPT
from ttrain.models.mlp import MLP
from ttrain.models.settings import GPTConfig, MLPConfig
from ttrain.optim.adamw import AdamW
from ttrain.optim.settings import AdamWConfig, SGDConfig
from ttrain.optim.sgd import SGD

Device = Callable[[], Any]
ROWS, STEPS, DROPOUT = 4, 20, 0.3
GPT_SIZE = {"layers": 2, "heads": 2, "width": 32, "context": 16, "vocabulary": 29}


def open_computing(kind: str) -> Any:
    """A device that computes and captures; skips naming what the machine lacks."""
    from ttrain.device.torch.device import cpu, cuda

    if kind == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device on this machine")
        return cuda(DeviceConfig(name="cuda"))
    from ttrain.device.torch.native.toolchain import find_compiler

    try:
        find_compiler()
    except UserError as error:
        pytest.skip(f"no C++ compiler: {error}")
    return cpu(DeviceConfig(name="cpu", threads=1))


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> Iterator[Callable[[], Any]]:
    """Opens a device of its own for every run: one that holds a capture refuses the memory of another run."""
    opened: list[Any] = []

    def open_one() -> Any:
        opened.append(open_computing(request.param))
        return opened[-1]

    yield open_one
    for each in opened:
        each.close()


def mlp_session(engine: str, device: Device, optimizer: Any = None, **options: Any) -> Session:
    model = MLP(MLPConfig(inputs=6, outputs=3, width=16, layers=2, activation="tanh"))
    return Session(
        model, optimizer or AdamW(AdamWConfig(clip_norm=1.0)), ROWS, engine=engine, device=device(), **options
    )


def gpt_session(engine: str, device: Device, dropout: float = 0.0, **options: Any) -> Session:
    model = GPT(GPTConfig(**GPT_SIZE, dropout=dropout))
    return Session(model, AdamW(AdamWConfig()), ROWS, engine=engine, device=device(), **options)


def regression_batch(index: int, rows: int = ROWS) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(index)
    return {
        "inputs": generator.standard_normal((rows, 6)).astype(np.float32),
        "targets": generator.standard_normal((rows, 3)).astype(np.float32),
    }


def text_batch(index: int, rows: int = ROWS) -> dict[str, np.ndarray]:
    return token_batch(GPT_SIZE["vocabulary"], rows, GPT_SIZE["context"], index)


class TorchMLP:
    """The MLP and torch.optim, fed with the same batches: the oracle of schedules and optimizer state."""

    def __init__(self, session: Session, optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer]) -> None:
        self.values = {n: torch.tensor(v, requires_grad=True) for n, v in session.parameters().items()}
        self.optimizer = optimizer(list(self.values.values()))

    def train(self, batch: dict[str, np.ndarray], lr: float) -> float:
        x, layers = torch.from_numpy(batch["inputs"]), sorted({name.rsplit(".", 1)[0] for name in self.values})
        for number, layer in enumerate(layers):
            x = x @ self.values[f"{layer}.weight"].T + self.values[f"{layer}.bias"]
            x = x.tanh() if number < len(layers) - 1 else x
        loss = (x - torch.from_numpy(batch["targets"])).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(self.values.values()), 1.0)
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()
        return float(loss.detach())

    def check(self, session: Session, tolerance: float = 1e-5) -> None:
        for name, value in session.parameters().items():
            np.testing.assert_allclose(value, self.values[name].detach().numpy(), rtol=tolerance, atol=tolerance)


def torch_adamw(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    matrices = [p for p in parameters if p.ndim >= 2]
    others = [p for p in parameters if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return _OneRate(torch.optim.AdamW(groups, betas=(0.9, 0.95)))


class _OneRate:
    """An optimizer whose learning rate is set for all groups at once."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self.param_groups = optimizer, [{}]

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def step(self) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self.param_groups[0]["lr"]
        self._optimizer.step()


def test_learning_rate_moves_under_replay(device: Device) -> None:
    """SILENT: a rate that is a Python number freezes at the captured step's value, also one chosen from the loss."""
    ours = mlp_session("traced", device)
    theirs, moments = TorchMLP(ours, torch_adamw), ours.state.names(Kind.OPTIMIZER)
    # SILENT: moments created lazily change the step between call one and call two.
    assert len(moments) == 2 * len(ours.parameters()) and not any(ours.state.read(name).any() for name in moments)
    plateau, best = 1e-2, np.inf
    for step in range(1, STEPS + 1):
        lr = plateau * 0.5 * (1 + np.cos(np.pi * step / STEPS))
        loss = ours.train(regression_batch(step), step, {"lr": lr})["loss"]
        assert loss == pytest.approx(theirs.train(regression_batch(step), lr), rel=1e-4)
        plateau, best = (plateau, loss) if loss < best else (plateau * 0.5, best)
    assert plateau < 1e-2, "the rate never moved, so this test would show nothing"
    theirs.check(ours)
    assert ours.engine.counters.captures == 1 and all(ours.state.read(name).any() for name in moments)


def test_dropout_mask_moves_under_replay(device: Device) -> None:
    """SILENT: a generator's state baked into the capture gives every step the same mask."""
    ours = gpt_session("traced", device, dropout=DROPOUT)
    batch, frozen = text_batch(0), {"lr": 0.0}
    losses = [ours.train(batch, 1, frozen, seed)["loss"] for seed in (1, 2, 3, 1, 2, 3)]
    assert len(set(losses[:3])) == 3
    assert losses[:3] == losses[3:]
    without = gpt_session("traced", device)
    assert len({without.train(batch, 1, frozen, seed)["loss"] for seed in (1, 2, 3)}) == 1


def test_adamw_step_number_moves_under_replay(device: Device) -> None:
    """SILENT: a stale step leaves step 1's bias correction in place. With a constant gradient every update is lr."""
    ours = mlp_session("traced", device, AdamW(AdamWConfig(clip_norm=None, weight_decay=0.0, betas=[0.9, 0.999])))
    batch = regression_batch(0)
    for step in range(1, 6):
        before = ours.parameters()
        ours.train(batch, step, {"lr": 1e-5})
        for name, value in ours.parameters().items():
            moved = np.abs(value - before[name])[np.abs(ours.gradients()[name]) > 1e-3]
            np.testing.assert_allclose(moved, 1e-5, rtol=0.05)


def test_results_and_inputs_do_not_alias_the_step(device: Device) -> None:
    """SILENT: a result that is a view changes at the next replay; an input that is kept changes with its owner."""
    ours, static = gpt_session("traced", device), gpt_session("static", device)
    logits = ours.engine.build("logits", ours.graph.trace_logits)
    tokens = text_batch(0, rows=1)["tokens"]
    given = tokens.copy()
    first = logits({"tokens": given, "position": 3})["logits"]
    kept = first.copy()
    given[:] = 0
    logits({"tokens": given, "position": 5})
    assert np.array_equal(first, kept)
    expected = static.run(static.graph.trace_logits, {"tokens": tokens, "position": 3})["logits"]
    np.testing.assert_allclose(kept, expected, rtol=1e-4, atol=1e-5)


def test_short_last_batch_is_refused_by_name(device: Device) -> None:
    """RAISES: an epoch's last batch of another size must not run on stale rows."""
    ours = mlp_session("traced", device)
    ours.train(regression_batch(1), 1, {"lr": 1e-2})
    before = ours.parameters()
    with pytest.raises(ShapeError, match=r"'inputs' has shape \[3, 6\], expected \[4, 6\]"):
        ours.train(regression_batch(2, rows=3), 2, {"lr": 1e-2})
    assert tensor_by_tensor_equal(before, ours.parameters())
    ours.train(regression_batch(2), 2, {"lr": 1e-2})


def test_evaluation_between_steps_changes_nothing(device: Device) -> None:
    """SILENT: steps that share an arena or a capture must not see one another's values."""
    plain, evaluated = gpt_session("traced", device, dropout=DROPOUT), gpt_session("traced", device, dropout=DROPOUT)
    evaluate = evaluated.engine.build("evaluate", evaluated.graph.trace_evaluate)
    for step in range(1, 6):
        inputs = (text_batch(step), step, {"lr": 1e-2}, step)
        losses = [evaluate({**text_batch(99), "loss_weight": 1 / 64})["loss"] for _ in range(2)]
        assert losses[0] == losses[1]
        assert plain.train(*inputs) == evaluated.train(*inputs)
    assert tensor_by_tensor_equal(plain.parameters(), evaluated.parameters())


def test_checkpoint_between_replays_continues_bit_for_bit(device: Device) -> None:
    """SILENT: state restored into other buffers than the captured ones is never read."""
    whole, first = gpt_session("traced", device, dropout=DROPOUT), gpt_session("traced", device, dropout=DROPOUT)
    for step in range(1, 4):
        for run in (whole, first):
            run.train(text_batch(step), step, {"lr": 1e-2}, step)
    saved = {name: first.state.read(name) for name in first.state.names(Kind.PARAMETER, Kind.OPTIMIZER)}
    second = gpt_session("traced", device, dropout=DROPOUT)
    second.train(text_batch(50), 1, {"lr": 1e-2}, 50)
    second.train(text_batch(51), 2, {"lr": 1e-2}, 51)  # captured by now, with other values
    for name, array in saved.items():
        second.state.write(name, array)
    for step in range(4, 8):
        inputs = (text_batch(step), step, {"lr": 1e-2}, step)
        assert whole.train(*inputs) == second.train(*inputs)
    assert tensor_by_tensor_equal(whole.parameters(), second.parameters())


@pytest.mark.parametrize("accumulation", [1, 2])
def test_state_of_a_captured_step_is_that_of_torch(device: Device, accumulation: int) -> None:
    """SILENT: a velocity at old addresses or set anew at every replay, gradients added to those of the last window."""
    optimizer = SGD(SGDConfig(momentum=0.9, nesterov=True, clip_norm=1.0))
    ours = mlp_session("traced", device, optimizer, gradient_accumulation=accumulation)
    theirs = TorchMLP(ours, lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True))
    for step in range(1, STEPS // accumulation):
        batch = regression_batch(step, rows=accumulation * ROWS)
        loss = ours.train(batch, step, {"lr": 0.05})["loss"]
        assert loss == pytest.approx(theirs.train(batch, 0.05), rel=1e-4)
    theirs.check(ours)
    assert ours.engine.counters.captures == (1 if accumulation == 1 else 3)


def test_second_run_in_the_process_is_clean(device: Device) -> None:
    """SILENT: captures or buffers of a closed run that leak into the next one."""
    results = []
    for _ in range(2):
        ours = gpt_session("traced", device, dropout=DROPOUT)
        for step in range(1, 5):
            ours.train(text_batch(step), step, {"lr": 1e-2}, step)
        results.append(ours.parameters())
        ours.engine.close()
    assert tensor_by_tensor_equal(*results)


@pytest.mark.parametrize("dropout", [0.0, DROPOUT])
def test_traced_equals_static(device: Device, dropout: float) -> None:
    traced, static = gpt_session("traced", device, dropout), gpt_session("static", device, dropout)
    for step in range(1, STEPS // 2):
        inputs = (text_batch(step), step, {"lr": 1e-3}, step)
        assert traced.train(*inputs)["loss"] == pytest.approx(static.train(*inputs)["loss"], rel=1e-5)
    assert traced.engine.counters.allocations_after_first == traced.engine.counters.nodes_after_first == 0


# Rules that need no arithmetic.


def doubling(graph: Graph) -> None:
    x = graph.input("x", TensorSpec((4, 4)))
    weight = graph.state_value("weight", TensorSpec((4, 4)), Kind.PARAMETER)
    loss = ops.mean(ops.relu(ops.matmul(x, weight)))
    graph.output("loss", loss)
    ops.assign(graph.state_value("weight/gradient", TensorSpec((4, 4)), Kind.GRADIENT), backward(loss, [weight])[0])


def null_engine(device: NullDevice, engine: type[StaticEngine] = TracedEngine) -> StaticEngine:
    spec = TensorSpec((4, 4))
    state = [StateTensor("weight", spec, Kind.PARAMETER), StateTensor("weight/gradient", spec, Kind.GRADIENT)]
    return engine(device, State(device, state))


INPUTS = {"x": np.zeros((4, 4), np.float32)}


def test_one_capture_however_often_it_runs() -> None:
    device = NullDevice()
    step = null_engine(device).build("train", doubling)
    for _ in range(5):
        step(INPUTS)
    assert (device.counters.captures, device.counters.replays) == (1, 4)


def test_allocation_after_a_capture_is_refused_with_its_purpose() -> None:
    """RAISES: elsewhere a warning, then corrupted memory or a hang, depending on the layout."""
    device = NullDevice()
    engine = null_engine(device)
    step = engine.build("train", doubling)
    step(INPUTS)
    step(INPUTS)
    with pytest.raises(CaptureError, match="scratch tensor: 64 bytes asked for after step train was captured"):
        device.allocate(TensorSpec((4, 4)), "scratch tensor")
    engine.close()
    device.allocate(TensorSpec((4, 4)), "scratch tensor")


@pytest.mark.parametrize(
    ("inside", "said"),
    [
        (lambda device, buffer: device.allocate(TensorSpec((4, 4))), "allocated while train is being captured"),
        (lambda device, buffer: device.upload(buffer, INPUTS["x"]), "host write while train is being captured"),
    ],
)
def test_what_would_happen_once_inside_a_capture_is_refused(inside: Callable[..., Any], said: str) -> None:
    """RAISES: a host write would happen once, at capture time."""
    device = NullDevice()
    buffer = device.allocate(TensorSpec((4, 4)))
    with pytest.raises(CaptureError, match=said):
        device.capture([lambda: inside(device, buffer)], "train")
    assert device.capturing is None


def test_kernel_that_reads_a_scalar_on_the_host_is_refused_by_name() -> None:
    """RAISES: what can't be a device input would silently keep its captured value."""
    device = NullDevice()
    device.host_scalars["relu"] = ("x",)
    with pytest.raises(CaptureError, match="kernel of relu on null reads x on the host"):
        null_engine(device).build("train", doubling)
    null_engine(device, StaticEngine).build("train", doubling)


def test_parameter_without_a_gradient_is_refused_by_name() -> None:
    """RAISES: a captured step would skip it without a word at every replay."""

    def forgetting(graph: Graph) -> None:
        used, unused = (graph.state_value(name, TensorSpec((4, 4)), Kind.PARAMETER) for name in ("used", "unused"))
        backward(ops.mean(used), [used, unused])

    with pytest.raises(GraphError, match="no gradient reaches unused"):
        forgetting(Graph())


def test_device_that_can_not_capture_is_refused() -> None:
    device = NullDevice()
    device.supports_capture = False
    with pytest.raises(CaptureError, match="engine=static"):
        null_engine(device)


def test_closing_frees_captures_before_the_device() -> None:
    """RAISES or hangs at exit elsewhere."""
    device = NullDevice()
    engine = null_engine(device)
    step = engine.build("train", doubling)
    step(INPUTS)
    step(INPUTS)
    engine.close()
    device.close()
    assert device.graphs == 0
    with pytest.raises(CaptureError, match="closed"):
        device.log("relu", [], [])


def test_step_built_after_a_capture_needs_no_memory_or_is_refused() -> None:
    """RAISES: a step that comes late and needs a larger arena names itself instead of allocating."""
    device = NullDevice()
    engine = null_engine(device)
    step = engine.build("train", doubling)
    step(INPUTS)
    step(INPUTS)

    def large(graph: Graph) -> None:
        graph.output("y", ops.scale(graph.input("big", TensorSpec((512, 512))), 2.0))

    late = engine.build("late", large)
    with pytest.raises(CaptureError, match="activations of train, late"):
        late({"big": np.zeros((512, 512), np.float32)})
