"""Answers of device families by their config. Nothing outside a family's folder knows it by name."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.test_import_rank import PACKAGE, modules, name_of
from ttrain.config import components, registry
from ttrain.core.errors import UserError
from ttrain.device.info import DeviceInfo, Failed, info_of
from ttrain.device.settings import DeviceConfig
from ttrain.device.ttnn.settings import NAMES, TenstorrentConfig

FOLDER = PACKAGE / "device" / "ttnn"
WORDS = re.compile(rf"(?i)\b({'|'.join(NAMES)})\b|ttnn|tenstorrent|wormhole|blackhole|tt[-_]metal|tt[-_]smi|bfloat8_b")
NAMED_HERE = {"ttrain.config.components": 1}  # the table of families


def outside() -> list[Path]:
    return [path for path in modules() if FOLDER not in path.parents]


def test_nothing_outside_its_folder_imports_it_or_asks_for_its_name() -> None:
    assert len(outside()) > 200
    found = {name_of(path): len(WORDS.findall(path.read_text("utf-8"))) for path in outside()}
    assert {name: count for name, count in found.items() if count} == NAMED_HERE
    assert all(name.startswith("ttrain.device.") and ":" in name for name in components.FAMILIES)


def test_registered_devices_have_a_family_and_each_family_is_told_once() -> None:
    found = registry.infos()
    assert len(found) == len({type(info) for info in found}) == 3
    assert [registry.component("device", name).config for name in NAMES] == [TenstorrentConfig] * len(NAMES)
    assert {info.title for info in found if info.profiles} == {"Tenstorrent"}
    assert registry.info_that(lambda info: "bf8" in info.precisions).example in NAMES
    assert type(registry.info_that(lambda info: info.row_multiple > 1000)) is DeviceInfo


def test_a_device_that_says_nothing_of_its_own_is_taken_as_it_is() -> None:
    config = DeviceConfig(name="cpu")
    info = info_of(config)
    assert type(info) is DeviceInfo and info is info_of(DeviceConfig(name="another"))
    assert not list(info.problems(config, 3)) and not info.parameter_problems(config, ["head.weight"], False)
    assert info.present(config) and info.replicas(config) == 1 and info.replica(config) is config
    assert info.held(config, "bf8") is config and not info.exclusive(config)
    assert info.memory(config) is None and not info.smaller_keys(config, True)
    assert info.diagnose(config, RuntimeError("DRAM buffer"), Failed("bf16", "static", 8, ["a", "b"], True)) is None
    with pytest.raises(UserError, match="device=cpu"):
        info.calibrate(config, lambda *_: None)


def test_a_family_answers_by_the_config_that_it_is_given() -> None:
    card = TenstorrentConfig(name="n150", mesh=[1, 2], core_grid=[9, 9], command_queues=2, subdevices=2)
    info = info_of(card)
    said = list(info.problems(card, rows=3))
    assert [text.partition(":")[0] for text in said] == [
        "device.core_grid=[9, 9]", "device.mesh=[1, 2]", "device.mesh=[1, 2]", "device.subdevices=2",
        "device.subdevices=2",
    ]  # fmt: skip
    assert (info.mode(card), info.replicas(card), info.row_multiple) == ("silicon", 2, 32)
    refused = info.parameter_problems(card, ["blocks.0.feed_forward.router.weight"], False)
    assert [text.partition(": ttnn")[0] for text in refused] == ["model.experts: device.subdevices=2"]
    replica = info.replica(card)
    assert not info.parameter_problems(replica, ["blocks.0.feed_forward.router.weight"], False)
    assert info.replicas(replica) == 1 and not list(info.problems(TenstorrentConfig(name="n300", mesh=[1, 2]), 4))
    mocked = replace(card, mode="mock")
    assert info.mode(mocked) == "mock" and not info.present(mocked)
    assert info.exclusive(card) and not info.exclusive(mocked)
    assert info.named(mocked) == "device=n150 device.mode=mock"
    for name, nbytes in (("n150", 12 * 1072693184), ("p150", 8 * 4277141376)):
        assert info.memory(TenstorrentConfig(name=name)) == (nbytes, "the board's DRAM")
