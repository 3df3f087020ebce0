"""Compare ops and models on a device with PyTorch in fp64, and the engines with each other."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ttrain.autodiff import backward
from ttrain.core.errors import ConfigError, TtrainError
from ttrain.core.names import did_you_mean
from ttrain.core.spec import DType
from ttrain.device.base import Device
from ttrain.device.torch.device import TorchDevice
from ttrain.engine.base import Engine, traced_graph
from ttrain.engine.state import State, StateTensor
from ttrain.engine.static import StaticEngine
from ttrain.graph import REGISTRY, Case, Graph, Kind, Op, Stage, Value
from ttrain.models.base import Model, loss_weights, preparation
from ttrain.nn.initialize import generator_of, initial_value
from ttrain.nn.module import use
from ttrain.testing import cases
from ttrain.testing.compare import EXACT, GRADIENT, MODEL, Comparison, Tolerance, compare, tolerance, verdict

MakeEngine = Callable[[Device, State], Engine]
LOSS = "loss"
_SPREAD = 0.02  # standard deviation of what is added to parameters that start at 0 or 1, so that every path matters
TOGETHER = 100  # trials in one step: planning takes the square of their number


def reach(op: Op, device: Device) -> tuple[tuple[int, ...], bool]:
    """Return the numbers of the outputs of an op that can be seen on a device, none where it can't run.

    The other value is True where the op can be given inputs of its own. A decomposition may leave out what only a fused
    backward reads.

    Where a kernel holds an output in a layout of its own, such as the statistics of layer norm on a card, the numbers
    in it are its own business, and an op that reads them is verified through the backward of the one that makes them.
    """
    graph, _, outputs = cases.record(op, cases.cases_of(op)[0], DType.FP32)
    node, alone, values = graph.nodes[0], True, list(outputs)
    if op.view or op.name in device.kernels:
        alone = device.arenas or not {"mean", "rstd"} <= set(op.inputs)
    else:
        try:
            values = list(op.decompose(node, node.inputs) or ())
        except TtrainError:
            values = []
    shown = [index for index, value in enumerate(values) if device.arenas or not _special(value, device)]
    return tuple(shown), alone


def _special(value: Value, device: Device) -> bool:
    """True if the device holds a value otherwise than its spec says."""
    node = value.producer
    kernel = None if node is None else device.kernels.get(node.op.name)
    if node is None or kernel is None or kernel.layouts is None:
        return False
    return kernel.layouts(*node.specs, node.attributes)[value.index] is not None


class Trial(ABC):
    """One recorded function whose results are compared. `label` tells it apart from the others of a step."""

    label: str
    dtype: DType
    labels: dict[str, Any]  # what a comparison says of it

    @abstractmethod
    def record(self, graph: Graph, feeds: dict[str, Any]) -> tuple[dict[str, Value], Value | None]:
        """Record it on inputs and state of its own, whose numbers join `feeds`.

        Returns by name what is compared, and the loss. With a loss that is the loss itself, and gradients of the rest.
        """

    @abstractmethod
    def allowed(self, name: str, value: Value, uniform: bool) -> tuple[str, DType, Tolerance, float]:
        """Return what is compared under a name, the dtype whose ULP count, the allowed error, and the least cosine.

        `uniform` is the device's `uniform_compute`.
        """

    def trace(self, graph: Graph, feeds: dict[str, Any]) -> None:
        """Record it with its gradients, and make outputs of the step of what is compared."""
        made, loss = self.record(graph, feeds)
        if loss is not None:
            leaves = {name: value for name, value in made.items() if value is not loss}
            made |= zip(leaves, backward(loss, list(leaves.values())), strict=True)
        for name, value in made.items():
            graph.output(f"{self.label}: {name}", value)

    @cached_property
    def expected(self) -> dict[str, tuple[Value, np.ndarray]]:
        """The values that are compared by name, each with what PyTorch makes of it in fp64."""
        graph, feeds = Graph(), dict[str, Any]()
        made, loss = self.record(graph, feeds)
        if loss is not None:
            leaves = {name: value for name, value in made.items() if value is not loss}
            found, gradients = cases.reference_gradients(graph, feeds, loss, leaves)
            return {name: (value, gradients.get(name, found)) for name, value in made.items()}
        known = cases.by_reference(graph, feeds)
        return {name: (value, known[value].double().numpy()) for name, value in made.items() if value in known}

    def compared(
        self, outputs: Mapping[str, Any], engine: str, factor: float = 1.0, uniform: bool = False
    ) -> Iterator[Comparison]:
        """Yield what the engine delivered against PyTorch in fp64; `uniform` is the device's `uniform_compute`."""
        labels: dict[str, Any] = {**self.labels, "engine": engine, "dtype": self.dtype}
        if isinstance(error := outputs.get(self.label), Exception):
            yield compare(error, np.zeros(()), self.dtype, EXACT, quantity="-", **labels)
            return
        for name, (value, wanted) in self.expected.items():
            quantity, unit, allowed, cosine = self.allowed(name, value, uniform)
            least, got = 1 - (1 - cosine) * factor, outputs[f"{self.label}: {name}"]
            got = np.reshape(got, wanted.shape) if np.size(got) == wanted.size else got
            yield compare(got, wanted, unit, allowed * factor, quantity=quantity, least_cosine=least, **labels)


class OpTrial(Trial):
    """One case of one op in one dtype."""

    def __init__(
        self, op: Op, number: int, case: Case, dtype: DType, chosen: tuple[int, ...] | None, seen: tuple[int, ...] = ()
    ) -> None:
        """`chosen` are the outputs that a loss is formed from.

        None of them runs forward only, and compares the outputs `seen`.
        """
        self.op, self.case, self.dtype, self.chosen, self.seen = op, case, dtype, chosen, seen
        self.label = f"{op.name}-{number}" + ("" if chosen is None else f" from {list(chosen)}")
        self.labels = {"subject": op.name, "case": self.label}

    @cached_property
    def arrays(self) -> cases.Arrays:
        return cases.draw(self.op, self.case, self.dtype)

    def record(self, graph: Graph, feeds: dict[str, Any]) -> tuple[dict[str, Value], Value | None]:
        """Record the op; what it overwrites is state."""
        ordered = cases.input_names(self.op, self.case)
        probe, _, _ = cases.record(self.op, self.case, self.dtype)
        aliases = {} if self.op.view else self.op.aliases(probe.nodes[0])
        written = {ordered[index] for index in aliases.values()}
        values = dict[str, Value]()
        for name, spec in cases.input_specs(self.op, self.case, self.dtype).items():
            if spec is not None:
                key = f"{self.label}: {name}"
                feeds[key] = self.arrays[name]
                given = graph.state_value(key, spec, Kind.PARAMETER) if name in written else graph.input(key, spec)
                values[name] = given
        recorded = self.op.record(*(values.get(name) for name in ordered), graph=graph, **self.case.attributes)
        outputs = recorded if isinstance(recorded, tuple) else (recorded,)
        if self.chosen is None:
            return {str(index): outputs[index] for index in self.seen if index < len(outputs)}, None
        kept = [outputs[index] for index in self.chosen]
        loss = cases.weighted_loss(kept, feeds, self.op.name, f"{self.label}: ")
        return cases.leaves_of(self.op, values), loss

    def allowed(self, name: str, value: Value, uniform: bool) -> tuple[str, DType, Tolerance, float]:
        if self.chosen is not None:
            return f"d{name}", self.dtype, GRADIENT[self.dtype], -math.inf
        output = cases.output_name(self.op, self.case, int(name))
        return output, *tolerance(self.op.name, output, value.spec.dtype, self.dtype, uniform), -math.inf


class ModelTrial(Trial):
    """The loss of one model with fixed parameters on one batch, and the gradient of each trained parameter."""

    def __init__(self, name: str, model: Model, rows: int, seed: int) -> None:
        self.model, self.rows, self.seed, self.dtype = model, rows, seed, model.compute
        self.label, self.labels = name, {"subject": name}
        self.parameters = model.parameters()
        self.values = {path: self._value(path) for path in self.parameters}
        self.values |= {path: buffer.first_values() for path, buffer in model.buffers().items()}
        fields, counts = preparation(model)(self._batch())
        scale = 2.0**16 if self.dtype is DType.FP16 else 1.0  # as in training, for small gradients
        weights = {name: np.asarray(weight, np.float32) for name, weight in loss_weights(counts, scale).items()}
        self.inputs: dict[str, np.ndarray] = {**fields, **weights, "seed": np.asarray(seed)}

    def _value(self, path: str) -> np.ndarray:
        parameter = self.parameters[path]
        noise = generator_of(self.seed, f"verify {path}").standard_normal(parameter.shape) * _SPREAD
        values = cases.rounded(initial_value(parameter, self.seed) + noise, parameter.spec.dtype)
        return np.pad(values, [(0, parameter.padding), *[(0, 0)] * (values.ndim - 1)])

    def _batch(self) -> dict[str, np.ndarray]:
        """Random rows; every third target of a language model is missing."""
        generator, fields = generator_of(self.seed, "verify batch"), {}
        vocabulary = getattr(self.model.config, "vocabulary", None) or 2
        for name, spec in self.model.batch_specs(self.rows).items():
            if spec.dtype.is_floating:
                fields[name] = cases.rounded(generator.standard_normal(spec.shape), spec.dtype)
            else:
                fields[name] = generator.integers(0, vocabulary, spec.shape)
                if name == "targets":
                    fields[name].reshape(-1)[::3] = -1
                elif name == "positions":  # three documents a row
                    fields[name][:] = np.arange(spec.shape[-1]) % -(-spec.shape[-1] // 3)
        return fields

    def record(self, graph: Graph, feeds: dict[str, Any]) -> tuple[dict[str, Value], Value | None]:
        """Record the loss, and each trained parameter as layers read it."""
        loss = self.model.loss(graph, self.rows, training=True)
        trained = {path: each for path, each in self.parameters.items() if each.trainable}
        made = {path: use(graph, parameter, self.dtype) for path, parameter in trained.items()}
        read = {name: self.values[name.removesuffix("/compute")] for name in graph.state}
        feeds |= self.inputs | {name: cases.rounded(read[name], v.spec.dtype) for name, v in graph.state.items()}
        return {LOSS: loss, **made}, loss

    def allowed(self, name: str, value: Value, uniform: bool) -> tuple[str, DType, Tolerance, float]:
        if name == LOSS:
            return LOSS, self.dtype, MODEL[self.dtype][0], -math.inf
        return f"d{name}", self.dtype, *MODEL[self.dtype]


def trials(op: Op, dtype: DType, seen: tuple[int, ...], alone: bool) -> list[Trial]:
    """Forward of every case of an op, and every gradient where backward may pass through."""
    found = list[Trial]()
    for number, case in enumerate(cases.cases_of(op)):
        if seen and alone:
            found.append(OpTrial(op, number, case, dtype, None, seen))
        if seen and op.differentiable:
            found += [OpTrial(op, number, case, dtype, tuple(c)) for c in cases.output_choices(op, case, dtype)]
    return found


def run_trials(device: Device, make: MakeEngine, chosen: Sequence[Trial], together: int = TOGETHER) -> dict[str, Any]:
    """Return the outputs of all trials, `together` in one step. If that step fails, each trial gets its own step.

    A trial that fails by itself too has its error among the outputs, under its label.
    """
    found: dict[str, Any] = {}
    for start in range(0, len(chosen), together):
        part = chosen[start : start + together]
        try:
            found |= _run(device, make, part)
        except Exception as error:  # whatever a kernel raises: the report has to name the op
            found |= {part[0].label: error} if len(part) == 1 else run_trials(device, make, part, together=1)
    return found


def _run(device: Device, make: MakeEngine, part: Sequence[Trial]) -> dict[str, Any]:
    """Return the outputs by name of one run of a step that does these trials, by an engine on a device."""
    feeds = dict[str, Any]()

    def trace(graph: Graph) -> None:
        for trial in part:
            with graph.stage(Stage.FORWARD):
                trial.trace(graph, feeds)

    used = traced_graph(trace).state
    state = State(device, [StateTensor(name, value.spec, value.kind) for name, value in used.items()])
    for name in state.names():
        state.write(name, np.asarray(feeds[name], np.float32))
    engine = make(device, state)
    try:
        step = engine.build("verify", trace)
        return step({name: _host(feeds[name], spec.dtype) for name, spec in step.inputs.items()})
    finally:
        engine.close()
        device.freeze(None)


def _host(array: np.ndarray, dtype: DType) -> np.ndarray:
    return np.asarray(array) if not dtype.is_floating or dtype is DType.FP64 else np.asarray(array, np.float32)


Each = Callable[[Sequence[Trial]], Iterable[Trial]]


def chosen_ops(names: Sequence[str], key: str = "") -> list[Op]:
    """Return ops by name or family; all where none is named.

    Raises ConfigError with the nearest valid name, after the `key` that the name was given to.
    """
    families = {op.family for op in REGISTRY.values()}
    for name in names:
        if name not in REGISTRY and name not in families:
            raise ConfigError(f"{key}{name}: no such op or family. {did_you_mean(name, {*REGISTRY, *families})}")
        if name in REGISTRY and not cases.cases_of(REGISTRY[name]):
            raise ConfigError(f"{key}{name}: the op has no cases to run. Declare some: see docs/extending.md.")
    return [op for op in REGISTRY.values() if not names or op.name in names or op.family in names]


@dataclass
class Verifier:
    """Compares ops and models on one device, by engines of these names. `notes` lists what could not be compared.

    `factor` multiplies every allowed error.
    """

    device: Device
    engines: Mapping[str, MakeEngine]
    dtype: DType = DType.FP32
    factor: float = 1.0
    notes: list[str] = field(default_factory=list)

    def ops(self, chosen: Sequence[Op], each: Each = iter) -> Iterator[Comparison]:
        """Compare ops in all their cases, forward and backward. `each` wraps the trials, to count them."""
        reached = {op: reach(op, self.device) for op in chosen if cases.cases_of(op)}
        self._note("Without cases to run, so not verified", [op for op in chosen if op not in reached])
        self._note(f"No kernel on {self.device.name}", [op for op, (seen, _) in reached.items() if not seen])
        inner = [op for op, (seen, alone) in reached.items() if seen and not alone]
        self._note("Verified through the backward of their forward op only", inner)
        planned = [trial for op, seen in reached.items() for trial in trials(op, self.dtype, *seen)]
        yield from self._compare("ops", planned, GRADIENT[self.dtype], each)

    def model(self, name: str, model: Model, rows: int = 2, seed: int = 0) -> Iterator[Comparison]:
        """Compare the loss of a model and the gradients of its parameters."""
        if self.device.uniform_compute:
            model.follow_compute()
        yield from self._compare(name, [ModelTrial(name, model, rows, seed)], MODEL[self.dtype][0])

    def _compare(
        self, subject: str, planned: Sequence[Trial], allowed: Tolerance, each: Each = iter
    ) -> Iterator[Comparison]:
        """Compare every engine with PyTorch, and those after the first one with it as well, of which the worst."""
        results = {name: run_trials(self.device, make, planned) for name, make in self.engines.items()}
        for engine, outputs in results.items():
            for trial in each(planned):
                yield from trial.compared(outputs, engine, self.factor, self.device.uniform_compute)
        (first, base), *others = results.items()
        for engine, values in others:
            labels: dict[str, Any] = {"subject": subject, "quantity": f"{engine} against {first}", "engine": engine}
            # Engines run the kernels of the first one, unless some compile their own, or plans join chains.
            compiled = self.device.groups or (self.device.compiles and engine == "traced")
            bound = allowed * self.factor if compiled else EXACT
            found = [
                compare(values[name], np.asarray(wanted), self.dtype, bound, case=name, dtype=self.dtype, **labels)
                for name, wanted in base.items()
                if not isinstance(wanted, Exception) and not isinstance(values.get(name, wanted), Exception)
            ]
            if found:
                yield max(found, key=lambda one: one.badness)

    def _note(self, what: str, ops: Sequence[Op]) -> None:
        if ops:
            self.notes.append(f"{what}: {', '.join(op.name for op in ops)}.")


def check_ops(
    *names: str, device: Device | None = None, dtype: DType = DType.FP32, engine: MakeEngine = StaticEngine
) -> None:
    """Compare ops, by name or family, with their fp64 references, in every declared case, forward and gradients.

    `device` is an open device; None takes the CPU. Raises VerifyError with the differences that rounding does not
    explain, and ConfigError for an unknown op.
    """
    with closing(TorchDevice("cpu")) if device is None else nullcontext(device) as opened:
        verdict(list(Verifier(opened, {getattr(engine, "name", "given"): engine}, dtype).ops(chosen_ops(names))))


def check_model(model: Model, rows: int = 2, device: Device | None = None, engine: MakeEngine = StaticEngine) -> None:
    """Compare the loss of a model and each gradient with autograd over the fp64 references of its ops.

    `rows` is the number of sequences or examples in a batch of random numbers. Raises VerifyError.
    """
    with closing(TorchDevice("cpu")) if device is None else nullcontext(device) as opened:
        verifier = Verifier(opened, {getattr(engine, "name", "given"): engine}, model.compute)
        verdict(list(verifier.model("model", model, rows)))
