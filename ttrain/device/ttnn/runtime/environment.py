"""Environment variables that ttnn reads at its first import, per mode, and how the import fails.

Kernels of a mocked board or a simulator must never be loaded by a card: each mode has a runtime root and a kernel cache
of its own, and a process whose ttnn was imported for one mode refuses another.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import importlib.util
import os
import re
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ttrain.core.errors import DeviceUnavailable
from ttrain.core.folders import at_home, cache_folder
from ttrain.device.ttnn.runtime.identity import checked_simulator
from ttrain.device.ttnn.runtime.profile import profiler_variables
from ttrain.device.ttnn.settings import TenstorrentConfig

DEVICE_NODES = Path("/dev/tenstorrent")


def holders(nodes: Path = DEVICE_NODES, processes: Path = Path("/proc")) -> str:
    """Name every other process that has a card open, as far as this user may see."""
    found = []
    for entry in processes.glob("[0-9]*"):
        with suppress(OSError):
            links = [os.readlink(link) for link in (entry / "fd").iterdir()]
            if any(link.startswith(f"{nodes}/") for link in links) and entry.name != str(os.getpid()):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
                found.append(f"process {entry.name} ({command[:80]})")
    return ", ".join(found)


MOCK_VARIABLE, SIMULATOR_VARIABLE = "TT_METAL_MOCK_CLUSTER_DESC_PATH", "TT_METAL_SIMULATOR"
MODE_VARIABLE = "TTRAIN_TTNN_MODE"  # what this process imported ttnn for
MOCK_FOLDER = Path(__file__).parent.parent / "mock"
_OTHER_MODES = {
    MOCK_VARIABLE: "device.mode=mock",
    SIMULATOR_VARIABLE: f"device.mode=simulator device.simulator=${SIMULATOR_VARIABLE}",
}


QUIET = {"TT_METAL_LOGGER_LEVEL": "off", "LOGURU_LEVEL": "ERROR", "TT_METAL_DISABLE_BACKTRACE": "1"}


def ttnn_folder() -> Path:
    """Return the folder of stub roots and kernel caches of mocked boards and simulators."""
    return cache_folder() / "ttnn"


def variables(config: TenstorrentConfig) -> dict[str, str]:
    """Return the variables that ttnn needs before its import. Raises DeviceUnavailable or ConfigError."""
    wheel = installed_ttnn()
    common = {"OMPI_MCA_btl": "^sm"} | ({} if config.verbose else QUIET)  # Open MPI leaves no file in shared memory
    if config.profile is not None:
        common |= profiler_variables(at_home(config.profile).resolve())
    if config.mode != "silicon":
        base = ttnn_folder() / f"{config.mode}-{wheel_version()}"
        places = {"TT_METAL_CACHE": str(base / "kernels"), "TT_METAL_LOGS_PATH": str(base / "logs")}
        return common | (_simulator(config, places) if config.mode == "simulator" else _mock(config, wheel, places))
    for key, instead in _OTHER_MODES.items():
        if os.environ.get(key):
            told = f"{key} is set, but device.mode=silicon runs on a card"
            raise DeviceUnavailable(f"{told}. Unset it or give {instead}.")
    if not has_card():
        raise DeviceUnavailable(
            f"device={config.name}: this machine has no Tenstorrent card (nothing in {DEVICE_NODES}). Use device=cpu, "
            f"or device.mode=mock to check a run on a mocked board. task=doctor tells more."
        )
    return common


def has_card() -> bool:
    """True if the driver shows a Tenstorrent card on this machine. Opens none."""
    return any(DEVICE_NODES.glob("*"))


def present(config: TenstorrentConfig) -> bool:
    """True if there is a card, or a simulator that plays one."""
    return has_card() if config.mode == "silicon" else config.mode != "mock"


def _mock(config: TenstorrentConfig, wheel: Path, places: dict[str, str]) -> dict[str, str]:
    """`tt` plays an N150."""
    board = MOCK_FOLDER / "boards" / f"{'n150' if config.name == 'tt' else config.name}.yaml"
    root = runtime_root(Path(places["TT_METAL_CACHE"]).with_name("root"), wheel)
    return places | {MOCK_VARIABLE: str(board), "TT_METAL_RUNTIME_ROOT": str(root)}


def _simulator(config: TenstorrentConfig, places: dict[str, str]) -> dict[str, str]:
    """The user's library; its root, cache and dispatch settings may come from the environment."""
    usual = places | {"TT_METAL_DISABLE_SFPLOADMACRO": "1"}
    if os.environ.get("TT_METAL_SLOW_DISPATCH_MODE") != "1":
        # Captured steps and a second queue need the dispatch that cards use, with its queue in simulated DRAM.
        usual["TT_METAL_DRAM_BACKED_CQ"] = "1"
    found = {key: os.environ.get(key, value) for key, value in usual.items()}
    return {SIMULATOR_VARIABLE: str(checked_simulator(config)), **found}


def wheel_version() -> str:
    """Return the version of ttnn; `local` for a build that is no installed package."""
    with suppress(PackageNotFoundError):
        return version("ttnn")
    return "local"


def installed_ttnn() -> Path:
    """Folder of the installed ttnn, found without importing it. Raises DeviceUnavailable."""
    found = importlib.util.find_spec("ttnn")
    if found is None or not found.submodule_search_locations:
        raise DeviceUnavailable(missing_ttnn())
    return Path(next(iter(found.submodule_search_locations)))


def missing_ttnn() -> str:
    """Return in one line why there is no ttnn here."""
    python = ".".join(map(str, sys.version_info[:2]))
    if python in ("3.10", "3.12") and sys.platform.startswith("linux"):
        return "ttnn is not installed. Run pip install 'ttrain[tt]'."
    here = f"Python {python} on {sys.platform}"
    return f"ttnn is not installed, and has no wheel for {here}: use Python 3.12 on Linux x86-64."


def runtime_root(folder: Path, wheel: Path) -> Path:
    """Fill a folder with links to the installed ttnn and a stub compiler; may run twice, also at once.

    A mocked board runs no kernel, yet metal compiles one for every program. The stub writes a program of one
    instruction. It needs neither a C compiler nor root rights, and it refuses to work for a process that has not asked
    for a mocked board, so that such a kernel can never reach a card. Raises DeviceUnavailable where that ttnn lacks its
    runtime.
    """
    if not (wheel / "runtime").is_dir():
        told = f"ttnn in {wheel} is not whole: it has no runtime/, which a mocked board needs"
        raise DeviceUnavailable(f"{told}. Run pip install --force-reinstall 'ttrain[tt]'.")
    compiler = folder / "runtime" / "sfpi" / "compiler" / "bin" / "riscv-tt-elf-g++"
    compiler.parent.mkdir(parents=True, exist_ok=True)
    for inside in ("", "runtime"):
        for source in (wheel / inside).iterdir():
            if source.name not in ("runtime", "sfpi", "__pycache__") and source.suffix != ".py":
                _link(folder / inside / source.name, source)
    draft = compiler.with_name(f"{compiler.name}.{os.getpid()}")
    draft.write_bytes((MOCK_FOLDER / "compiler.sh").read_bytes())
    draft.chmod(0o755)
    draft.replace(compiler)
    return folder


def _link(link: Path, source: Path) -> None:
    """A symbolic link, made anew where it leads elsewhere."""
    if link.is_symlink() and Path(os.readlink(link)) == source:
        return
    draft = link.with_name(f"{link.name}.{os.getpid()}")
    draft.symlink_to(source)
    draft.replace(link)


def import_ttnn(config: TenstorrentConfig) -> Any:
    """The module ttnn, imported with the environment of the config's mode. Raises DeviceUnavailable."""
    wanted = variables(config)
    mode = f"{config.mode}:{wanted.get(MOCK_VARIABLE) or wanted.get(SIMULATOR_VARIABLE) or ''}"
    if "ttnn" in sys.modules:
        # Without a mode this is an import by somebody else, such as a test of reference functions.
        imported = os.environ.get(MODE_VARIABLE)
        if imported != mode and not (imported is None and config.mode == "silicon"):
            raise DeviceUnavailable(
                f"device.mode={config.mode}: ttnn was already imported in this process"
                f"{f' for {imported}' if imported else ''}; its mode can't change any more. Use a fresh process."
            )
    for key in _OTHER_MODES:  # ttnn would take the simulator before the mocked board, whatever the config says
        os.environ.pop(key, None)
    os.environ.update(wanted)
    os.environ[MODE_VARIABLE] = mode
    atexit.register(gc.unfreeze)  # else nanobind prints all that the command line froze at its end as leaks
    try:
        return importlib.import_module("ttnn")
    except ImportError as error:
        told = missing_ttnn() if error.name == "ttnn" else f"ttnn can not be imported: {error}"
        raise DeviceUnavailable(told) from error


# What ttnn says where a board does not open as asked for -> what to do.
OPENING_FIXES = (
    (r"Reserved size must be less than bank size", "Give device.l1_small_kb=0, or less than a core has."),
    (r"requires \d+ devices", "Give device.mesh=[1,1], or a board with as many chips."),
    (r"sfpi not found", "A card needs Tenstorrent's sfpi package; task=doctor tells more."),
    (r"Tracy-enabled build", "Build tt-metal with it, or read the report of such a build: profile.csv=<file>."),
)


def opening_failure(error: BaseException) -> str:
    """Return why a board did not open, and what to do about it where that is known."""
    said = reason(error)
    fixes = [fix for pattern, fix in OPENING_FIXES if re.search(pattern, said)]
    return ". ".join([said.splitlines()[0].strip().rstrip(".")[:300], *fixes])


def reason(error: BaseException) -> str:
    """Return the message of a ttnn error without its stack."""
    text = str(error)
    if "info:" in text:
        text = text.partition("info:")[2]
    return _STACK.split(text, maxsplit=1)[0].strip() or type(error).__name__


_STACK = re.compile(r"backtrace:|^Location: |^ *\d+\. \S+::", re.MULTILINE | re.IGNORECASE)  # as metal and UMD begin it
