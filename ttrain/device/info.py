"""Questions about a device that its config answers: before a run, in place of one, and after a failure.

`DeviceInfo` is what is taken of a device that says nothing of its own. The config of a device names its family; only
`info_of` looks that name up, so nothing else in ttrain has to know which families there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Protocol

from ttrain.core.errors import UserError

if TYPE_CHECKING:
    from ttrain.core.tables import Table
    from ttrain.device.settings import DeviceConfig
    from ttrain.device.timing import Estimate, Work

SILICON, SIMULATOR, MOCK = "silicon", "simulator", "mock"  # how a device runs; a mocked one computes nothing
NodeOf = Callable[..., Any]  # (name of an op, TensorSpec of each input) -> a recorded node of it


@dataclass(frozen=True)
class Finding:
    """One line on what this machine has: `state` is ok, missing or broken; `fix` says what to do where it is not ok."""

    subject: str
    state: str
    text: str
    fix: str = ""


@dataclass(frozen=True)
class Failed:
    """Describes a step that ended with an error, for the choice of keys that help."""

    precision: str
    engine: str
    rows: int  # sequences of a micro-batch
    smaller: Sequence[str]  # keys that make a step smaller on any device; the last one changes most
    vocabulary: bool  # whether the model has tables with a row per token id
    state: int = 0  # bytes of the persistent tensors on the device, where they are known
    memory: int = 0  # of the device, where it is known


class OutOfResources(UserError):
    """A step that a device does not take. `cause` names what it is short of, `keys` what would fix it."""

    def __init__(self, message: str, cause: str, keys: list[str]) -> None:
        super().__init__(message)
        self.cause, self.keys = cause, keys


class Profile(Protocol):
    """The work of a device during some steps: plain values for JSON, and tables for people."""

    def to_dict(self) -> dict[str, Any]: ...

    def tables(self) -> list[Table]: ...


class DeviceInfo:
    """Devices of which nothing more is known than `Device` tells once they are open."""

    title = ""  # what people call them
    example = ""  # the device that a message offers
    package = ""  # whose version `Device.describe` tells under its name
    precisions: frozenset[str] = frozenset()  # that other families do not have
    row_multiple = 1  # rows that a vocabulary is padded to
    quantizes = True  # whether there are products with weights in fewer bits, see device/quantized.py
    profiles = False  # whether there is a profiler of the device, and reports of it to read
    divides = False  # whether independent runs may share a device

    def named(self, config: DeviceConfig) -> str:
        """The overrides that choose the device."""
        return f"device={config.name}"

    def mode(self, config: DeviceConfig) -> str:
        """silicon, simulator or mock."""
        return SILICON

    def present(self, config: DeviceConfig) -> bool:
        """True if its hardware, or what plays it, is here."""
        return True

    def require(self, config: DeviceConfig) -> None:
        """Raise DeviceUnavailable for a device that is known not to be here, before anything is read for it."""

    def exclusive(self, config: DeviceConfig) -> bool:
        """Return True if no two processes can have it open at a time."""
        return False

    def problems(self, config: DeviceConfig, rows: int) -> Iterator[str]:
        """Yield a sentence for each problem of a config that trains micro-batches of `rows` sequences."""
        return iter(())

    def best_engine(self, config: DeviceConfig) -> tuple[str, str]:
        """Return (name, reason) of the engine that engine=auto stands for."""
        return "static", "the device neither compiles nor captures a step"

    def best_precision(self, config: DeviceConfig) -> tuple[str, str]:
        """Return (name, reason) of the precision that precision=auto stands for; no reason where nothing is known."""
        return "fp32", ""

    def lacks_invariance(self, config: DeviceConfig) -> str | None:
        """Return what device.batch_invariant needs and is not here; None where the device has such kernels."""
        return f"device=cpu, not {self.named(config)}"

    def computes_in(self, config: DeviceConfig, precision: str) -> bool:
        """Return whether the device has a precision of `precisions`."""
        return precision in self.precisions

    def parameter_problems(self, config: DeviceConfig, paths: Sequence[str], tied: bool) -> list[str]:
        """Return the config's problems with a model of these parameters, whose head may be its embedding."""
        return []

    def replicas(self, config: DeviceConfig) -> int:
        """Independent runs that share the device."""
        return 1

    def replica(self, config: DeviceConfig) -> DeviceConfig:
        """Return the config that one of them would be given as a plain run."""
        return config

    def held(self, config: DeviceConfig, precision: str) -> DeviceConfig:
        """The config with what a precision says of how tensors are held."""
        return config

    def memory(self, config: DeviceConfig) -> tuple[int, str] | None:
        """(bytes, where the number is from) without opening it; None if it can't be told."""
        return None

    def smaller_keys(self, config: DeviceConfig, vocabulary: bool) -> list[str]:
        """Keys of the device itself that make a run take less of its memory."""
        return []

    def diagnose(self, config: DeviceConfig, error: BaseException, failed: Failed) -> OutOfResources | None:
        """Return the resource that a step does not fit into, where the error tells of that."""
        return None

    def estimate(self, config: DeviceConfig, work: Work, engine: str) -> Estimate | str | None:
        """Return the expected time of an optimizer step by a model of the hardware, or why there is none.

        None where kernels are timed on this machine instead. The hardware need not be here.
        """
        return None

    def calibrate(self, config: DeviceConfig, node_of: NodeOf) -> str:
        """Opens the device, measures the constants of its model, keeps them, and says so. Raises UserError."""
        raise UserError(f"plan.calibrate=true: {self.named(config)} has no cost model whose constants to measure.")

    def profiler(self, config: DeviceConfig, folder: Path) -> Any:
        """The device's own profiler, writing below `folder`; only where `profiles`.

        Its `config` opens the device with it on. `warm(device)` leaves out the programs that ran until then, and
        `profile(device, steps)` returns the Profile of the steps run since.
        """

    def read_profile(self, report: Path, steps: int) -> Profile:
        """Read a report that a profiler wrote. Only where `profiles`."""
        raise UserError(f"profile.csv={report}: {self.title} devices have no profiler whose report can be read.")

    def findings(self) -> Iterator[Finding]:
        """Yield findings on what is installed. Devices are opened too, each in its own process."""
        return iter(())


def info_of(config: DeviceConfig | type[DeviceConfig]) -> DeviceInfo:
    """The family that the config of a device, or its class, names."""
    return _loaded(config.info)


@cache
def _loaded(name: str) -> DeviceInfo:
    return resolve_name(name)()
