"""Settings of the whole suite, made before anything imports torch; and its tiers.

    python -m pytest -m fast         in 40 s on two cores: the contracts of the core, in the folders of FAST
    python -m pytest -m "not slow"   what takes at most ten seconds each
    python -m pytest                 everything that this machine can run, under ten minutes

A test is fast by where it lies; nothing is marked by hand. Left out is what is slow, compiles kernels of a traced step,
or runs a kernel another way.
"""

from __future__ import annotations

import atexit
import os
import shlex
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.composing import FOLDER
from tests.hurry import hurry, leave_imported

if TYPE_CHECKING:
    from ttrain.config.schema import Config

# Folders of tests lie in memory where there is room: runs wait for the disk at every save.
MEMORY = Path("/dev/shm")
if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 2 << 30 and not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
# The first process of a session makes the folder, and ends last.
if FOLDER not in os.environ:
    os.environ[FOLDER] = tempfile.mkdtemp(dir=os.environ.get("PYTEST_DEBUG_TEMPROOT"))
    atexit.register(shutil.rmtree, os.environ[FOLDER], ignore_errors=True)
# Most processes of tests have an empty cache folder, in which matplotlib would list the fonts of the machine again.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
os.environ.setdefault("MPLCONFIGDIR", str(CACHE / "matplotlib"))
# Several test processes share the cores: threads that wait for one another cost more than they give.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# pytest's form of the tests is kept, as Python keeps its own of modules: to make it takes seconds of every run.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

TESTS = Path(__file__).parent
# Few tests that take long: first, so that at the end no worker is left with one of these files. Those that start many
# processes lie apart, so that two workers don't run two of them.
LONGEST = (
    "native/test_rows.py", "parallel/test_restarts.py", "ttnn/test_mock.py", "ttnn/test_watch.py",
    "faults/test_supervision.py", "parallel/test_faults.py", "test_docs.py",
    "parallel/test_bits.py", "bench/test_check.py", "train/steps/test_phases.py",
)  # fmt: skip
FAST = ("engine", "graph", "ops", "plan", "test_architecture.py", "test_budget.py", "test_import_rank.py")


@cache
def is_fast(path: Path) -> bool:
    """True if a file lies in the fast tier."""
    return path.relative_to(TESTS).parts[0] in FAST


@pytest.hookimpl(wrapper=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> Generator[None, int, int]:
    """One more than there are cores, as many tests wait: for a fault to be noticed, or for a process to end."""
    return (yield) + (config.option.markexpr != "fast")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m fast` the other files aren't even imported."""
    left_out = config.option.markexpr == "fast" and collection_path != TESTS and TESTS in collection_path.parents
    return True if left_out and not is_fast(collection_path) else None


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        compiles = "traced" in item.name or item.path.name == "test_footguns.py"
        left_out = compiles or any(item.get_closest_marker(name) for name in ("slow", "another_way"))
        if is_fast(item.path) and not left_out:
            item.add_marker("fast")
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: rank(item.path, tests[item.path]))


@cache
def rank(path: Path, tests: int) -> tuple[int, int, str]:
    """Return the place of a file in the order of --dist loadfile: the longest, then those with the most tests."""
    name = path.relative_to(TESTS).as_posix()
    return LONGEST.index(name) if name in LONGEST else len(LONGEST), -tests, name


def cache_home(folder: Path) -> str:
    """For XDG_CACHE_HOME: a cache of its own in `folder`, but for compiled kernels, which all tests share."""
    from ttrain.core.folders import cache_folder

    kernels, link = cache_folder() / "native", folder / "cache" / "ttrain" / "native"
    kernels.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not link.exists():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(kernels)
    return str(folder / "cache")


@pytest.fixture(autouse=True, scope="session")
def in_a_hurry() -> None:
    hurry()


def pytest_runtest_logfinish() -> None:
    leave_imported()


def composed(command: str) -> Config:
    """The checked config of a command as it is printed, such as `python -m ttrain --config-name mine model=gpt2`."""
    from ttrain.cli import parse_arguments
    from ttrain.config.compose import Composer

    python, dash, program, *arguments = shlex.split(command)
    assert (python, dash, program) == ("python", "-m", "ttrain")
    flags, overrides = parse_arguments(arguments)
    with Composer(flags.config_name, flags.config_dir, flags.config_path) as composer:
        return composer.typed(overrides)


Told = Callable[..., str]


@pytest.fixture
def told(request: pytest.FixtureRequest) -> Told:
    """Run a command in this process: `told("task=plan", code=2)` -> its words on stderr, never a traceback."""

    def run(*overrides: str, code: int = 0) -> str:
        from ttrain.cli import main

        capsys = request.getfixturevalue("capsys")  # now, lest a test can't have another
        capsys.readouterr()
        found = main([*overrides])
        errors: str = capsys.readouterr().err
        assert found == code and "Traceback" not in errors, errors
        return errors

    return run


@pytest.fixture
def refused(told: Told) -> Told:
    """Run a command that exits with 2 and leaves no file: `refused("the words", "task=plan", ...)` -> all it says."""

    def run(words: str, *overrides: str) -> str:
        before = sorted(Path().iterdir())
        errors = told(*overrides, code=2)
        assert words in errors, errors
        assert sorted(Path().iterdir()) == before
        return errors

    return run


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", cache_home(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A current folder that all tests of a module share, with a cache of its own."""
    folder = tmp_path_factory.mktemp("shared")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", cache_home(folder))
        patch.chdir(folder)
        yield folder


@pytest.fixture
def plugins_taken_back(tmp_path: Path) -> Iterator[None]:
    """Undo after a test what its plugins registered: options, ops, and the modules below tmp_path."""
    from hydra.core.config_store import ConfigStore

    from ttrain.config import registry
    from ttrain.graph import REGISTRY

    rows, plugins = set(registry._ROWS), set(registry._LOADED_PLUGINS)
    yield
    for plugin in registry._LOADED_PLUGINS - plugins:
        registry._LOADED_PLUGINS.discard(plugin)
        sys.modules.pop(plugin, None)
    ours = {
        name for name, module in sys.modules.items() if str(getattr(module, "__file__", "")).startswith(str(tmp_path))
    }
    made = {op.name: getattr(op, "function", type(op)).__module__ for op in REGISTRY.values()}
    for name, module in made.items():
        if not module.startswith("ttrain."):  # also of a plugin whose import failed, which left no module
            del REGISTRY[name]
    for group, name in registry._ROWS.keys() - rows:
        del registry._ROWS[group, name]
        ConfigStore.instance().repo.get(group, {}).pop(f"{name}.yaml", None)
    for name in ours:
        del sys.modules[name]
