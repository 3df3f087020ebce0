"""What families of devices answer by their config, and that nothing outside a family's folder knows it by name."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.test_import_rank import PACKAGE, imported_modules, modules, name_of
from ttrain.config import components, registry
from ttrain.core.errors import ConfigError, UserError
from ttrain.device.family import Failed, Family, family_of
from ttrain.device.settings import DeviceConfig
from ttrain.device.ttnn.settings import NAMES, TenstorrentConfig

FOLDER = PACKAGE / "device" / "ttnn"
WORDS = re.compile(rf"(?i)\b({'|'.join(NAMES)})\b|ttnn|tenstorrent|wormhole|blackhole|tt[-_]metal|tt[-_]smi|bfloat8_b")
# The table of families, and that of recipes that went.
NAMED_HERE = {"ttrain.config.components": 1, "ttrain.config.renamed": 6}


def outside() -> list[Path]:
    return [path for path in modules() if FOLDER not in path.parents]


def test_nothing_outside_its_folder_imports_the_family() -> None:
    found = {
        name_of(path): name
        for path in outside()
        for name in imported_modules(path.read_text("utf-8"), name_of(path))
        if name.startswith("ttrain.device.ttnn")
    }
    assert len(outside()) > 200 and not found


def test_nothing_outside_its_folder_asks_for_its_name() -> None:
    found = {name_of(path): len(WORDS.findall(path.read_text("utf-8"))) for path in outside()}
    assert {name: count for name, count in found.items() if count} == NAMED_HERE
    assert all(name.startswith("ttrain.device.") and ":" in name for name in components.FAMILIES)


@pytest.mark.parametrize("text", ["device=n300", "if name == 'tt':", "Tenstorrent", "import ttnn", "a Wormhole chip"])
def test_every_name_is_seen(text: str) -> None:
    assert WORDS.search(text)


def test_registered_devices_have_a_family_and_each_family_is_told_once() -> None:
    found = registry.families()
    assert len(found) == len({type(family) for family in found}) == 2
    assert [registry.component("device", name).config for name in NAMES] == [TenstorrentConfig] * len(NAMES)
    assert {family.title for family in found if family.profiles} == {"Tenstorrent"}
    assert registry.family_that(lambda family: "bf8" in family.precisions).example in NAMES
    assert type(registry.family_that(lambda family: family.row_multiple > 1000)) is Family


def test_a_device_that_says_nothing_of_its_own_is_taken_as_it_is() -> None:
    config = DeviceConfig(name="cpu")
    family = family_of(config)
    assert type(family) is Family and family is family_of(DeviceConfig(name="another"))
    assert not list(family.problems(config, 3)) and not family.parameter_problems(config, ["head.weight"], False)
    assert family.present(config) and family.replicas(config) == 1 and family.replica(config) is config
    assert family.held(config, "bf8") is config and not family.exclusive(config)
    assert family.memory(config) is None and not family.smaller_keys(config, True)
    assert family.diagnose(config, RuntimeError("DRAM buffer"), Failed("bf16", "static", 8, ["a", "b"], True)) is None
    for ask in (family.time_model, lambda given: family.calibrate(given, lambda *_: None)):
        with pytest.raises((UserError, ConfigError), match="device=cpu"):
            ask(config)


def test_a_family_answers_by_the_config_that_it_is_given() -> None:
    card = TenstorrentConfig(name="n150", mesh=[1, 2], core_grid=[9, 9], command_queues=2, subdevices=2)
    family = family_of(card)
    said = list(family.problems(card, rows=3))
    assert [text.partition(":")[0] for text in said] == [
        "device.core_grid=[9, 9]", "device.mesh=[1, 2]", "device.mesh=[1, 2]", "device.subdevices=2",
        "device.subdevices=2",
    ]  # fmt: skip
    assert (family.mode(card), family.replicas(card), family.row_multiple) == ("silicon", 2, 32)
    replica = family.replica(card)
    assert family.replicas(replica) == 1 and not list(family.problems(TenstorrentConfig(name="n300", mesh=[1, 2]), 4))
    mocked = replace(card, mode="mock")
    assert family.mode(mocked) == "mock" and not family.present(mocked)
    assert family.exclusive(card) and not family.exclusive(mocked)
    assert family.named(mocked) == "device=n150 device.mode=mock"
    assert family.memory(TenstorrentConfig(name="p150")) == (8 * 4277141376, "the board's DRAM")
