"""The contract of a device: memory, transfer, a table of kernels, capture and replay. No mathematics."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from ttrain.core.errors import CaptureError, DeviceHang
from ttrain.core.spec import DType, TensorSpec

Buffer = Any  # a device's own handle of one placed tensor
Arena = Any  # a device's own handle of a range of bytes
Layout = Hashable  # how a device holds a tensor: its shape with padding, dtype and order of elements
Launch = Callable[[], Any]
Specs = Sequence[TensorSpec]
GivenSpecs = Sequence[TensorSpec | None]  # of inputs; None where one is absent
Attributes = Mapping[str, Any]

ALIGNMENT = 64  # bytes; a cache line, and what vector loads of 512 bits want
NOTHING_AROUND = nullcontext()  # a step enters one each time, and to make one costs more


class Delivery(Enum):
    """Ways in which a kernel returns its results."""

    OUT = "out"  # writes into the output buffers that it was bound to
    INPLACE = "inplace"  # overwrites inputs; outputs share their buffers
    RETURNS = "returns"  # allocates and returns its outputs; the engine copies them into their slots


class Chain(tuple[Launch, ...]):
    """Several launches as one, none of them a chain."""

    def __call__(self) -> None:
        for launch in self:
            launch()


def flat_launches(launches: Iterable[Launch]) -> Iterator[Launch]:
    """The launches with every chain spliced in: one Python call less for each."""
    for launch in launches:
        yield from launch if isinstance(launch, Chain) else (launch,)


def chain(*launches: Launch) -> Launch:
    """One launch that runs all of them in order."""
    made = Chain(flat_launches(launches))
    return made[0] if len(made) == 1 else made


@dataclass(frozen=True)
class Kernel:
    """One row of a device's table.

    `bind(inputs, outputs, attributes, workspace)` returns a call without arguments that runs the kernel on these
    buffers. All preparation is done in `bind`. The call of a RETURNS kernel returns the list of its outputs.

    Functions of (inputs, outputs, attributes): `workspace` lists specs of scratch buffers that the plan provides during
    the launch. `layouts` gives the layouts (see `Device.layout`) of outputs whose layout is not the usual one, and None
    for the others. `outside` tells how many bytes a library allocates by itself during the launch, if that is known;
    they count as memory in use, but no plan places them. `way` names the way that a launch takes if there are several,
    for the text of a plan.

    `supports(inputs, attributes)` tells if the kernel serves a node; any other node runs as its decomposition. None
    serves all. `overwrites` lists inputs by number. The first output may take over the buffer of such an input if
    nothing reads it afterwards; the kernel then gets one buffer as input and output. `host_scalars` names inputs that
    the kernel turns into numbers of the host; a captured step refuses such a kernel.
    """

    bind: Callable[[Sequence[Buffer | None], Sequence[Buffer], Attributes, Sequence[Buffer]], Launch]
    delivery: Delivery = Delivery.OUT
    workspace: Callable[[GivenSpecs, Specs, Attributes], list[TensorSpec]] = lambda *_: []
    overwrites: tuple[int, ...] = ()
    layouts: Callable[[GivenSpecs, Specs, Attributes], list[Layout | None]] | None = None
    outside: Callable[[GivenSpecs, Specs, Attributes], int] = lambda *_: 0
    supports: Callable[[GivenSpecs, Attributes], bool] | None = None
    way: Callable[[GivenSpecs, Specs, Attributes], str] | None = None
    host_scalars: tuple[str, ...] = ()


def split_update(inputs: Sequence[Any], count: int) -> list[Sequence[Any]]:
    """Return the lists of op update (parameters, gradients, slots, copies if any), and at last its four scalars."""
    return [*(inputs[start : start + count] for start in range(0, len(inputs) - 4, count)), inputs[-4:]]


class Table(dict[str, Kernel]):
    """Rows by the name of an op. `host` holds those of the host beside the device; None where there is none."""

    def __init__(self, rows: Mapping[str, Kernel], host: Mapping[str, Kernel] | None = None) -> None:
        super().__init__(rows)
        self.host = host


Rows = TypeVar("Rows", bound=Container[str])


def of_side(rows: Rows, on_host: bool) -> Rows | Mapping[str, Kernel]:
    """Return one side of a device's rows: its own, or those of the host beside it where it has one."""
    return rows.host if on_host and isinstance(rows, Table) and rows.host is not None else rows


def serves(kernels: Container[str], name: str, inputs: GivenSpecs, attributes: Attributes) -> bool:
    """Return whether a table, or a set of names that stand for rows without conditions, has a kernel for a node."""
    if name not in kernels:
        return False
    row = kernels[name] if isinstance(kernels, Mapping) else None
    return row is None or row.supports is None or row.supports(inputs, attributes)


@dataclass
class DeviceCounters:
    """Counts of the memory that was asked for since a device was opened."""

    allocations: int = 0
    allocated_bytes: int = 0


class StepCompiler(Protocol):
    """Turns the nodes of a plan into machine code, for a device that traces a step by compiling it.

    `kernels` is the device's table with compiled rows in place of its own, and one for the op `fused`, which joins
    elementwise chains of a graph. `prepare(nodes)` compiles all kernels of these nodes, or loads them from the cache on
    disk; only then may their rows be bound. `tune(nodes, trial)` chooses how nodes of a plan run if there are several
    ways, and returns True if the step must be planned anew. `trial` plans and binds the step with the rows as they are,
    and returns a call that runs it without changing its state. `join(launches)` makes the calls of one run as few as
    possible. `compilations` counts runs of the compiler, `built` the kernels that it made, and `cached` those from the
    disk.
    """

    compilations: int
    built: int
    cached: int

    @property
    def kernels(self) -> Mapping[str, Kernel]: ...

    def tune(self, nodes: Sequence[Any], trial: Callable[[], Launch]) -> bool: ...

    def prepare(self, nodes: Sequence[Any]) -> None: ...

    def join(self, launches: Sequence[Launch]) -> list[Launch]: ...


class Group(Protocol):
    """The ranks (processes that compute one step together) as their devices see them. Launches move device memory."""

    rank: int
    count: int
    index: int  # of this rank's device among those that it sees

    def exchange(self, sends: Sequence[tuple[int, Buffer]], receives: Sequence[tuple[int, Buffer]]) -> Launch:
        """Sends flat buffers to other ranks and receives others from them; empty ones are left out. For `start`."""

    def start(self, launches: Sequence[Launch], key: str = "") -> Launch:
        """Run launches in order, after those started before, while the device continues with its next launches."""

    def finish(self, key: str | None = None) -> None:
        """Wait, or let the device wait, until what was started under a key is done; without one, all that was."""

    def sum(self, buffer: Buffer) -> Launch:
        """buffer <- its sum over all ranks, in any order: for numbers that are zero on all ranks but one."""

    def join(self, array: np.ndarray) -> None:
        """Fills in, in place, the elements of a host array (4 bytes each) that other ranks have and here are zero."""


class Buffers(dict[str, Buffer]):
    """The buffers of a step's inputs or outputs by name, equal in all runs.

    A device keeps in `transfer` its own means to move all of them together.
    """

    transfer: Any = None


class Device(ABC):
    """Allocates, moves, launches. A device that has no kernel for an op gets the op's decomposition instead."""

    name: str
    computes = True  # False where values are not computed (null, mock): such a run must never look like training
    supports_capture = False
    chips = 1  # that share every batch
    arenas = True  # False where memory comes in whole tensors: values of equal layout then take turns in one tensor
    compiles = False  # True where a traced step is compiled
    groups = False  # True where its table has a row for op `fused`, which joins elementwise chains of a graph
    rematerializes = True  # False where a launch costs more than the memory that computing again would save
    overlaps = False  # True where a step's inputs are written, or steps of others launched, while a step computes
    uniform_compute = False  # True where norms want their weights in the compute dtype as well
    narrow_lookups = False  # True where rows of a table are looked up in bf16 only
    host: Device | None = None  # that runs the nodes of parameters which are offloaded to host memory
    group: Group | None = None  # the ranks that it belongs to
    caution: str | None = None  # what everybody who sees its numbers has to know, such as that it is simulated

    def __init__(self) -> None:
        # Called between a launch and the read that blocks: another run on the same chip launches meanwhile.
        self.turn: Callable[[], None] = lambda: None
        self.counters = DeviceCounters()
        self.last_words: list[Callable[[DeviceHang], None]] = []  # told before a process ends whose device hangs
        self._frozen_by: str | None = None

    @property
    @abstractmethod
    def kernels(self) -> Mapping[str, Kernel]:
        """Kernel per op name."""

    @abstractmethod
    def _allocate(self, nbytes: int) -> Arena: ...

    @abstractmethod
    def place(self, arena: Arena, offset: int, spec: TensorSpec) -> Buffer:
        """Return the tensor that lies `offset` bytes into an arena. Allocates nothing."""

    @abstractmethod
    def upload(self, buffer: Buffer, array: np.ndarray) -> None:
        """Host values into a buffer of the same shape; rounds to the buffer's dtype."""

    @abstractmethod
    def download(self, buffer: Buffer) -> np.ndarray:
        """A copy of a buffer's values on the host, bf16 as fp32. Waits for pending work."""

    def sample(self, buffer: Buffer, first: int, stride: int) -> np.ndarray:
        """Return every `stride`-th value of a buffer from number `first` on, as a flat host array; bf16 as fp32."""
        return np.ascontiguousarray(self.download(buffer).reshape(-1)[first::stride])

    def upload_inputs(self, buffers: Mapping[str, Buffer], arrays: Mapping[str, np.ndarray]) -> None:
        """Upload the inputs of one step, by name."""
        for name, array in arrays.items():
            self.upload(buffers[name], array)

    def download_outputs(self, buffers: Mapping[str, Buffer]) -> dict[str, np.ndarray]:
        """Return copies of the outputs of one step, by name; see download."""
        return {name: self.download(buffer) for name, buffer in buffers.items()}

    def prefetch(self, buffers: Buffers, arrays: Mapping[str, np.ndarray]) -> Launch | None:
        """Upload the inputs of the next run while the current run reads its own.

        The returned call, before the next launch, copies them into the buffers. Returns None if the device can't.
        """
        return None

    def deliver(self, launch: Launch, outputs: Sequence[Buffer]) -> None:
        """Run the launch of a RETURNS kernel, and copy its results into the output buffers."""
        for result, output in zip(launch(), outputs, strict=True):
            self.copy(result, output)

    def bind(
        self,
        kernel: Kernel,
        inputs: Sequence[Buffer | None],
        outputs: Sequence[Buffer],
        attributes: Mapping[str, Any],
        workspace: Sequence[Buffer],
    ) -> Launch:
        """Return the launch of a kernel on these buffers. After it the outputs lie in theirs."""
        launch = kernel.bind(inputs, outputs, attributes, workspace)
        return launch if kernel.delivery is not Delivery.RETURNS else partial(self.deliver, launch, outputs)

    def offloaded(self, name: str) -> bool:
        """Return whether a persistent tensor stays in host memory, beside a device that has its own."""
        return False

    def side(self, on_host: bool) -> Device:
        """The side where a value lies and its node runs: here, or on the host beside this device."""
        return self.host if on_host and self.host is not None else self

    def layout(self, spec: TensorSpec) -> Layout:
        """Return the layout in which a tensor is held, where `arenas` is False."""
        return spec

    def layout_bytes(self, layout: Layout) -> int:
        """Bytes of device memory that a tensor of this layout takes."""
        assert isinstance(layout, TensorSpec)
        return layout.nbytes

    def shares(self, spec: TensorSpec, other: TensorSpec) -> bool:
        """Return whether a tensor can be seen under another shape without a copy."""
        return True

    @abstractmethod
    def copy(self, source: Buffer, destination: Buffer) -> None:
        """Device to device, shapes equal; rounds to the destination's dtype."""

    def launching(self, what: str) -> AbstractContextManager[None]:
        """Entered around launches, for what a device does about them.

        One that can hang ends the process, with a message, where a launch never returns; a CPU looks whether other
        programs want the cores of its threads.
        """
        return NOTHING_AROUND

    def release_threads(self) -> None:
        """Undoes what `launching` changed about the threads of this process, before others measure on this machine."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything launched so far is done."""

    def seconds(self, launch: Callable[[], object]) -> float:
        """Run something, wait until the device is done with it, and return the seconds that this took."""
        start = time.perf_counter()
        launch()
        self.synchronize()
        return time.perf_counter() - start

    def stamp(self) -> Callable[[], float]:
        """Return a function that tells when all launched so far is done, in seconds; call it after `synchronize`."""
        self.synchronize()
        return partial(float, time.perf_counter())

    @abstractmethod
    def memory(self) -> dict[str, int]:
        """Bytes: `in_use`, `peak` and `total`, as far as the device can tell."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Facts for the run record: name, hardware, versions, threads."""

    def count_allocation(self, nbytes: int, purpose: str = "a tensor") -> None:
        """Count memory that is asked for. Raises CaptureError once the allocator is frozen, naming the `purpose`."""
        if self._frozen_by is not None:
            raise CaptureError(
                f"{purpose}: {nbytes} bytes asked for after {self._frozen_by} was captured. All device memory is "
                "allocated before a capture; build every step before the first one runs."
            )
        self.counters.allocations += 1
        self.counters.allocated_bytes += nbytes

    def allocate_arena(self, nbytes: int, purpose: str, copies: bool = False) -> Arena:
        """`nbytes` zeroed bytes. Raises CaptureError once the allocator is frozen, naming the `purpose`.

        With `copies` for parameters as layers read them, whose masters lie elsewhere: a device may round them further.
        """
        self.count_allocation(nbytes, purpose)
        return self._allocate(max(nbytes, 1))

    def allocate(self, spec: TensorSpec, purpose: str = "a tensor") -> Buffer:
        """A zeroed tensor of its own."""
        return self.place(self.allocate_arena(spec.nbytes, purpose), 0, spec)

    def freeze(self, owner: str | None) -> None:
        """Refuse allocations from now on, naming `owner`; None allows them again."""
        self._frozen_by = owner

    def replicas(self) -> list[Device]:
        """Devices that share this one's hardware, each with cores and a queue of its own; itself where it is whole."""
        return [self]

    def capture(self, launches: Sequence[Launch], name: str) -> Launch:
        """Record the launches once; the returned call replays them. Only where `supports_capture`."""
        raise CaptureError(f"device {self.name} can't capture a step. Use engine=static or engine=dynamic.")

    def expect_capture(self) -> None:
        """Expect that steps will be captured; called once, before anything is bound."""

    def step_facts(self) -> dict[str, int]:
        """Counts of what steps have cost so far, such as device ops and programs; empty where nobody counts."""
        return {}

    def step_peaks(self, launches: Sequence[Launch]) -> dict[str, int]:
        """Largest memory of one run of a step's launches, which must not run again afterwards; empty if not known."""
        return {}

    def compiler(self) -> StepCompiler | None:
        """Return the compiler of plans for `engine=traced`; None where the device records launches instead."""
        return None

    def close(self) -> None:
        """Release captures, then memory. Using the device afterwards is an error."""


def align(nbytes: int) -> int:
    """Bytes rounded up to the alignment of arena slots."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


# The host computes in fp32, which holds every bf16 and fp16 value exactly; numpy has no bf16.
NUMPY_DTYPES = {x: np.dtype("float32" if x.is_floating and x.itemsize < 4 else x.in_torch) for x in DType}


def filled(spec: TensorSpec, numbers: float | Sequence[float]) -> np.ndarray:
    """Return an array for a tensor, of numbers that broadcast to its shape."""
    return np.full(spec.shape, numbers, NUMPY_DTYPES[spec.dtype])
