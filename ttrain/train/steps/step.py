"""One optimizer step on the host's side: the inputs of every micro-batch, and the calls into the built steps.

For a step of a single micro-batch an engine builds `train` (forward, backward and update in one). For several
micro-batches it builds `accumulate_first` (overwrites gradients), `accumulate_next` (adds to them) and `update`.

A guarded step is built in parts too, with `norm` before `update`. The host looks at the loss and at the gradient norm,
and does not run the update if one of them is not finite. Parameters and optimizer tensors then stay unchanged, on
every engine and device.

In fp16 the loss weights that a step is handed hold the loss scale, and its numbers are divided by it. Every step is
guarded, and the update divides the gradients.

A batch of several slices is computed slice by slice, each in micro-batches. Gradients of slices are summed in a tree:
`keep` sets a sum aside, `merge` adds one that was set aside, level by level as a counter carries. Several ranks sum
theirs during backward of the last micro-batch. The step of that micro-batch is `train`, which also does the last merges
and the update, or only the norm if the step is guarded.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ttrain.core.errors import ShapeError
from ttrain.engine.base import Look, Step
from ttrain.models.base import LOSS_WEIGHT, TOKENS, Batch, Prepare, loss_weights, means, prepare_plain
from ttrain.parallel.ranks import Ranks
from ttrain.parallel.world import Numbers, World, largest
from ttrain.train.protocols import Array, Inputs, Outputs

NOISE_NORM = "noise_norm"  # output of a step: norm of what the first micro-batch adds to the gradient
NORMS = GRAD_NORM, CLIPPED_NORM = "grad_norm", "clipped_norm"  # outputs of a step, see step_graph.py
PROBE = "probe"  # step: what a micro-batch tells of itself for the others of its slice
_NO_METRICS = {*NORMS, NOISE_NORM, "activation_norm"}  # among the outputs of steps with a loss
LOSS_SCALE = "loss_scale"  # input of an update: what its gradients were multiplied by
FIRST_SCALE = 2.0**16
_GOOD_STEPS = 2000  # in a row, after which the scale doubles
_DECAY = 0.95  # of the means over steps


@dataclass(kw_only=True)
class LossScale:
    """The factor of the loss that keeps gradients from being too small for fp16 (Micikevicius et al., 2018)."""

    loss_scale: float | None = None  # a power of two; None without fp16, and before its first step
    good_steps: int = 0  # in a row at this scale

    def adjust(self, good: bool) -> None:
        """Double any scale after many good steps, and halve it after one whose gradients overflowed."""
        if self.loss_scale is None:
            return
        self.good_steps = (self.good_steps + 1) % _GOOD_STEPS if good else 0
        if not (good and self.good_steps):
            self.loss_scale *= 2.0 if good else 0.5


@dataclass
class NoiseScale:
    """The simple noise scale tr(S) / |G|^2 (McCandlish et al., 2018), S being the covariance of one row's gradient.

    E |g_n|^2 = |G|^2 + tr(S) / n for a batch of n rows, so norms for two sizes give both numbers. Each is averaged over
    steps, as one step tells little; the means start anew with an attempt. A batch far below the scale is mostly noise,
    one far above it learns hardly more than a smaller one.
    """

    rows: int  # of a micro-batch
    noise: float = 0.0
    signal: float = 0.0

    def add(self, first: float, whole: float, parts: int) -> float | None:
        """Note the norms of a step of so many micro-batches: `first` as in NOISE_NORM. Return the scale in rows.

        None where none shows yet, and where a step is one micro-batch and tells nothing.
        """
        if parts < 2 or not math.isfinite(first + whole):
            return None
        one, all_ = (parts * first) ** 2, whole**2
        noise = (one - all_) / (parts - 1) * parts * self.rows
        signal = (parts * all_ - one) / (parts - 1)
        self.noise += (1 - _DECAY) * (noise - self.noise)
        self.signal += (1 - _DECAY) * (signal - self.signal)
        return self.noise / self.signal if self.noise > 0 and self.signal > 0 else None


Call = tuple[str, Inputs]  # name of a built step, and all its inputs
Rates = Mapping[str, float]  # learning rates by the names of their step inputs
Ahead = Callable[[int], tuple[Batch, Rates] | None]  # reads what a step takes, None where it may not be read yet


@dataclass(slots=True)  # frozen would cost a small step more than its sums do
class StepResult:
    """Numbers of one optimizer step. `loss` is the mean over the valid targets of the whole step, None without any."""

    loss: float | None
    grad_norm: float
    tokens: int
    applied: bool = True  # whether the parameters were updated
    activation_norm: float | None = None  # largest of the micro-batches, where it is watched
    metrics: dict[str, float | None] = field(default_factory=dict)  # further numbers that the model names, by name
    loss_scale: float | None = None  # of a step in fp16
    asked: Numbers = field(default_factory=dict)  # what ranks `ask`, the largest number of any by name

    @property
    def overflowed(self) -> bool:
        """Return whether gradients alone are not finite, in fp16 at a scale that can be halved."""
        finite = (self.loss or 0.0) + (self.activation_norm or 0.0)
        return (self.loss_scale or 0) > 1 and math.isfinite(finite) and not math.isfinite(self.grad_norm)

    @property
    def finite(self) -> bool:
        return self.bad is None

    @property
    def bad(self) -> str | None:
        """The first number that is not finite, in words; None where all are."""
        numbers = {"train/loss": self.loss, "grad_norm": self.grad_norm, "activation_norm": self.activation_norm}
        bad = ((key, value) for key, value in numbers.items() if value is not None and not math.isfinite(value))
        return next((f"{key} is {value}" for key, value in bad), None)


@dataclass(eq=False)
class TrainStep:
    """Runs one optimizer step over a batch in micro-batches of `rows`, as many as there are in it.

    Losses are sums weighted by `loss_weight` = 1 / valid targets of the whole step, so micro-batches weigh by their
    count of valid targets, and the gradient is that of the mean over the step however it is split. The same holds for
    every further weight that the model has.

    `wait` is called between a launch and the read that blocks, so that another run on the same chip can launch. Such a
    device takes in the first inputs of the next step meanwhile, which `ahead` reads.
    """

    steps: Mapping[str, Step]  # that train; `norm`, or `update` beside `train`, makes the update guarded
    rows: int
    seed: int
    prepare: Prepare = prepare_plain
    wait: Callable[[], None] | None = None  # of a device that computes beside the host
    world: World = field(default_factory=World)
    noise: NoiseScale | None = None  # where the steps measure the noise scale
    ahead: Ahead = lambda step: None
    scale: LossScale = field(default_factory=LossScale)
    asks: Callable[[], Numbers] = dict  # what this rank tells the others of itself, with the numbers of a step
    coupled: Callable[[Outputs], Inputs] = dict  # outputs of PROBE for a slice -> further inputs of its micro-batches

    def __post_init__(self) -> None:
        self.guarded = "norm" in self.steps or {"train", "update"} <= self.steps.keys()
        self.scaled = self.guarded and LOSS_SCALE in self.steps["update"].inputs
        if not self.scaled:
            self.scale.loss_scale = None

    def __call__(self, batch: Batch, rates: Rates, step: int) -> StepResult:
        """Run one optimizer step; `step` counts from 1.

        `batch` fields have the rows of the whole step, some whole micro-batches in each slice. `rates` are the lr
        inputs.
        """
        fields, counts = self.prepare(batch)
        calls, following = self._calls(fields, counts, rates, step), self._first_call(step + 1)
        outputs = [self._run(call, calls[number : number + 1]) for number, call in enumerate(calls[:-1], 1)]
        outputs.append(self._run(calls[-1], () if self.guarded else following))
        result, norms = self._result(outputs, counts)
        if self.guarded and result.applied:
            update = self.update(rates, norms, step)  # by the scale that its gradients have
            self.scale.adjust(good=True)
            self._run(update, following)
        elif result.overflowed:
            self.scale.adjust(good=False)
        return result

    def _first_call(self, step: int) -> Iterator[Call]:
        """Yield the first call of a step that may be read ahead of time: its inputs do not hang on the weights."""
        inputs = None if PROBE in self.steps else self.ahead(step)
        if inputs is not None:
            yield self.calls(*inputs, step)[0]

    def _run(self, call: Call, following: Iterable[Call]) -> Outputs:
        """Run a built step. While it computes, the device takes in the inputs of the `following` call, if it can."""
        name, inputs = call
        read = self.steps[name].start(inputs)
        if self.wait is not None:
            for name, inputs in following:
                self.steps[name].prefetch(inputs)
            self.wait()
        return read()

    def inspect(self, calls: Sequence[Call], look: Look, ready: Callable[[], object] | None = None) -> bool:
        """Run some of `calls` node by node until `look` says True, and return whether it did.

        `ready` is called before the first node of every call, once the device has its inputs.
        """
        return any(self.steps[name].inspect(inputs, look, ready) for name, inputs in calls)

    def calls(self, batch: Batch, rates: Rates, step: int) -> list[Call]:
        """Return built steps with their inputs, in order.

        The update of a guarded step is left out: it hangs on the others.

        Raises ShapeError for rows that are no whole micro-batches.
        """
        return self._calls(*self.prepare(batch), rates, step)

    def update(self, rates: Rates, norms: Mapping[str, float], step: int) -> Call:
        """Return the update of a guarded step, which takes in the norms that were looked at."""
        given = {name: value for name, value in norms.items() if name in self.steps["update"].inputs}
        return "update", self._whole("update", {**rates, **given}, step)

    def _calls(self, fields: Batch, counts: Mapping[str, int], rates: Rates, step: int) -> list[Call]:
        weights, slices = loss_weights(counts, self._scale), self.world.ranks.slices
        last: Inputs = {} if self.guarded else rates
        split = not self.world.ranks.single or "accumulate_first" in self.steps
        parts = micro_batches(fields, self.rows, slices) if split else [fields]
        each, calls = len(parts) // slices, []
        further = {of: self._coupled(parts[of * each : (of + 1) * each], step, of) for of in self.world.ranks.own}
        for name, slice_, number in in_order(self.world.ranks, each, "train" in self.steps, self.guarded):
            given: Inputs = last if name in ("train", "update") else {}
            if name in ("train", "accumulate_first", "accumulate_next"):
                given = {**parts[slice_ * each + number], **further[slice_], **weights, **given}
            calls.append((name, self._whole(name, given, step, number, slice_)))
        return calls

    def _coupled(self, parts: Sequence[Batch], step: int, slice_: int) -> Inputs:
        """Return what couples the micro-batches of a slice: inputs for each of them."""
        if PROBE not in self.steps:
            return {}
        given = (self._whole(PROBE, part, step, number, slice_) for number, part in enumerate(parts))
        return self.coupled(joined(map(self.steps[PROBE], given)))

    @property
    def _scale(self) -> float:
        if not self.scaled:
            return 1.0
        self.scale.loss_scale = self.scale.loss_scale or FIRST_SCALE
        return self.scale.loss_scale

    def _result(self, outputs: Sequence[Outputs], counts: Mapping[str, int]) -> tuple[StepResult, dict[str, float]]:
        """Return the numbers of a step, from the outputs of its calls without a guarded update, and its norms.

        `counts` are those of `Prepare`.
        """
        scale = self._scale
        norms = {name: float(value) / scale for name, value in outputs[-1].items() if name in NORMS}
        parts = [each for each in outputs if "loss" in each]
        count = len(parts) // len(self.world.ranks.own)
        own = [float(each["activation_norm"]) for each in parts if "activation_norm" in each]
        beside = {**self.asks(), **({"activation_norm": largest(own)} if own else {})}
        slices = [summed(parts[at : at + count]) for at in range(0, len(parts), count)]
        sums, asked = self.world.sum_slices(slices, beside)
        activation = asked.pop("activation_norm", None)
        metrics = means({name: value / scale for name, value in sums.items()}, counts)
        loss = metrics.pop("loss")
        metrics |= {name: value for name, value in norms.items() if name != GRAD_NORM}
        first = float(outputs[0].get(NOISE_NORM, 0)) / scale
        if self.noise is not None and first:  # a first micro-batch without targets tells nothing of the noise
            noise = self.noise.add(first, norms[GRAD_NORM], count * self.world.ranks.slices)
            metrics |= {} if noise is None else {"noise_scale": noise}
        tokens = counts.get(TOKENS, counts[LOSS_WEIGHT])
        given = loss, norms[GRAD_NORM], tokens, True, activation, metrics
        found = StepResult(*given, loss_scale=self.scale.loss_scale, asked=asked)
        return replace(found, applied=found.finite) if self.guarded else found, norms

    def _whole(self, name: str, inputs: Inputs, step: int, micro_batch: int = 0, slice_: int = 0) -> Inputs:
        """Add the seed and the step's number where the built step has such an input."""
        declared, read = self.steps[name].inputs, self.steps[name].uploads
        whole = dict(inputs)
        if "seed" in declared:  # also of models that draw nothing, as without dropout
            whole["seed"] = step_seed(self.seed, step, micro_batch, slice_) if "seed" in read else 0
        if "rounding_seed" in declared:  # the same on all ranks, whose parameters stay equal
            whole["rounding_seed"] = step_seed(self.seed, step, ROUNDING)
        if LOSS_SCALE in declared:
            whole[LOSS_SCALE] = self._scale
        if "step" in declared:
            whole["step"] = step
        return whole


@dataclass(frozen=True)
class Stepper:
    """Runs steps by their number: `result = stepper(step)`."""

    train_step: TrainStep
    reader: Callable[[int], Batch]
    rates: Callable[[int], Rates]

    def __call__(self, step: int) -> StepResult:
        """Run a step, counted from 1."""
        return self.train_step(*self.inputs(step), step)

    def inputs(self, step: int) -> tuple[Batch, Rates]:
        """Return the batch and the learning rates of a step."""
        return self.reader(step), self.rates(step)


def reads_ahead(reader: Callable[[int], Batch], rates: Callable[[int], Rates], last: int) -> Ahead:
    """Return what reads batch and learning rates of a step, up to step `last`."""
    return lambda step: (reader(step), rates(step)) if step <= last else None


def summed(parts: Sequence[Outputs]) -> dict[str, float]:
    """Return loss and metrics of a slice, over its micro-batches."""
    sums = {"loss": 0.0}
    for each in parts:
        for name, value in each.items():
            if name not in _NO_METRICS:
                sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def joined(outputs: Iterable[Outputs]) -> dict[str, Array]:
    """Return the outputs of a slice's micro-batches by name, each [rows of a micro-batch, ...], one after another."""
    each = list(outputs)
    return {name: np.concatenate([one[name] for one in each]) for name in each[0]}


def in_order(ranks: Ranks, micro_batches: int, joined: bool, guarded: bool) -> Iterator[tuple[str, int, int]]:
    """Yield name, slice and micro-batch of each built step, for slices of `micro_batches` micro-batches.

    The update of a guarded step is not among them, because it hangs on what they return.
    """
    for place, slice_ in enumerate(ranks.own):
        for number in range(micro_batches):
            if joined and (slice_, number) == (ranks.own[-1], micro_batches - 1):
                yield "train", slice_, number  # does what comes last of all
                return
            yield "accumulate_next" if number else "accumulate_first", slice_, number
        level = 0
        while place >> level & 1:
            yield f"merge{level}", slice_, 0
            level += 1
        if place + 1 < len(ranks.own):
            yield f"keep{level}", slice_, 0
    yield "norm" if guarded else "update", 0, 0


def micro_batches(batch: Batch, rows: int, slices: int) -> list[dict[str, Array]]:
    """Cut the batch into parts of `rows` rows, equally many per slice. Raises ShapeError if it does not divide."""
    given = len(next(iter(batch.values())))
    if given == 0 or given % (rows * slices):
        shared = f" in {slices} slices" if slices > 1 else ""
        raise ShapeError(
            f"The batch has {given} rows, expected a multiple of {rows * slices}: micro-batches of {rows}{shared}."
        )
    return [{name: array[at : at + rows] for name, array in batch.items()} for at in range(0, given, rows)]


ROUNDING = -1  # in place of a micro-batch: what an update's rounding draws from


def step_seed(seed: int, step: int, micro_batch: int = 0, slice_: int = 0) -> int:
    """Seed of one micro-batch's random numbers: 63 bits, so that it is a positive int64.

    The slice is that of the whole batch, whichever rank computes it.
    """
    packed = struct.pack("<4q", seed, step, micro_batch, slice_)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1
