"""How far `config` walks, from the command line to each component.

A *stay* is a function of ttrain at which a reader stops who follows the config through a debugger. Counted are, each
function once for a component:

- whatever is on the call stack when the component's constructor is entered, from `main` to that constructor;
- before that, whatever was entered with the whole tree, be it composed, plain or typed, as an argument or as a field of
  one, whether or not it hands anything on;
- before that, whatever was entered with the component's own section and returned a form of it.

Looks at one section that hand nothing on, such as the checks of `ttrain/config/checks/`, are stepped over.

A *climb* is a call, from one function of ttrain to a stay, into a higher row of the layers than the caller's own. What
lies between the two, as Hydra does, is looked through.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from omegaconf import DictConfig

import ttrain.tasks.train
import ttrain.tasks.training.attempt  # noqa: F401 - so that no import is profiled
from tests.test_import_rank import PACKAGE, RANK
from ttrain.__main__ import main
from ttrain.config.schema import Config
from ttrain.device.torch.device import TorchDevice
from ttrain.engine.static import StaticEngine
from ttrain.models.gpt import GPT
from ttrain.optim.adamw import AdamW

COMPONENTS = {"model": (GPT, "gpt"), "optimizer": (AdamW, "adamw"), "engine": (StaticEngine, "static"),
              "device": (TorchDevice, "cpu")}  # fmt: skip
MOST = 25
SIZES = ("model.preset=null", *(f"model.{key}" for key in ("layers=1", "width=8", "heads=1", "context=8")))
COMMAND = ("model=gpt2", *SIZES, "engine=static", "device=cpu", "train.steps=1", "train.batch_size=1")


def is_tree(value: Any) -> bool:
    """The whole config, in any form."""
    if not isinstance(value, dict | DictConfig):
        return isinstance(value, Config)
    return {"task", *COMPONENTS} <= set(value) and isinstance(value["task"], dict | DictConfig)


def holds_tree(value: Any) -> bool:
    """Whether it is the tree, or a sequence or an object of ttrain's with the tree in it."""
    if isinstance(value, tuple | list):
        return any(map(is_tree, value))
    ours = not isinstance(value, type) and type(value).__module__.startswith("ttrain.")
    return is_tree(value) or (ours and any(map(is_tree, getattr(value, "__dict__", {}).values())))


def is_section(value: Any, name: str) -> bool:
    """The part of it that a component of this name is built from, in any form."""
    if isinstance(value, dict | DictConfig):
        return "name" in value and value["name"] == name
    return is_dataclass(value) and getattr(value, "name", None) == name


def arguments(frame: FrameType) -> list[Any]:
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
    return [frame.f_locals.get(name) for name in code.co_varnames[:count]]


def is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(f"{PACKAGE}/") and frame.f_code.co_name != "<module>"


def frames_of(frame: FrameType | None) -> Iterator[FrameType]:
    """The functions of ttrain that are under way, the innermost first."""
    while frame is not None:
        if is_ours(frame):
            yield frame
        frame = frame.f_back


def place(frame: FrameType) -> tuple[int, str]:
    """Row and name of a function."""
    code = frame.f_code
    path = Path(code.co_filename).relative_to(PACKAGE)
    return RANK[path.with_suffix("").parts[0]], f"{path}:{code.co_firstlineno} {code.co_name}"


class Walk:
    """The stays and climbs to each component of one run; a profiler of `sys.setprofile`."""

    def __init__(self) -> None:
        self.stays: dict[str, list[str]] = {name: [] for name in COMPONENTS}
        self.climbs: dict[str, list[str]] = {name: [] for name in COMPONENTS}
        self._left = dict(COMPONENTS)
        self._with_section: dict[FrameType, set[str]] = {}

    def __call__(self, frame: FrameType, event: str, value: Any) -> None:
        if not is_ours(frame):
            return
        if event == "return":
            for component in self._with_section.pop(frame, set()) & self._left.keys():
                if is_section(value, COMPONENTS[component][1]):
                    self._stay(component, frame)
        elif event == "call":
            given = arguments(frame)
            tree = any(map(holds_tree, given))
            for component, (made, name) in list(self._left.items()):
                if frame.f_code is made.__init__.__code__:
                    self._arrive(component, frame)
                elif tree:
                    self._stay(component, frame)
                elif any(is_section(each, name) for each in given):
                    self._with_section.setdefault(frame, set()).add(component)

    def _arrive(self, component: str, frame: FrameType) -> None:
        del self._left[component]
        if not self._left:
            sys.setprofile(None)
        for under_way in list(frames_of(frame))[::-1]:
            self._stay(component, under_way)

    def _stay(self, component: str, frame: FrameType) -> None:
        (row, name), *callers = map(place, frames_of(frame))
        if name not in self.stays[component]:
            self.stays[component].append(name)
        if callers and callers[0][0] < row:
            self.climbs[component].append(f"{callers[0][1]} -> {name}")


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    folder = tmp_path_factory.mktemp("walk")
    (folder / "text.txt").write_text("all work and no play " * 40)
    found = Walk()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            sys, "argv", ["ttrain", *COMMAND, f"data.path={folder / 'text.txt'}", f"run.dir={folder / 'run'}"]
        )
        before = sys.getprofile()
        sys.setprofile(found)
        try:
            assert main() == 0
        finally:
            sys.setprofile(before)
    assert not found._left
    return found


@pytest.mark.parametrize("component", COMPONENTS)
def test_the_config_reaches_each_component_in_few_stays_and_without_a_climb(walk: Walk, component: str) -> None:
    stays = walk.stays[component]
    assert len(stays) <= MOST, "\n".join(stays)
    assert not walk.climbs[component]
    # What nobody who follows it can miss.
    assert {"main", "check", "typed_config", "run_task", "set_up", "__init__"} <= {each.split()[1] for each in stays}
