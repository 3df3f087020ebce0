"""Findings of task=doctor: ttnn, its compiler and driver, the cards, mocked boards, a simulator."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ttrain.device.info import Finding
from ttrain.device.ttnn.mock.stub_compiler import installed_ttnn, missing_ttnn
from ttrain.device.ttnn.runtime.environment import DEVICE_NODES, SIMULATOR_VARIABLE, ttnn_folder
from ttrain.device.ttnn.runtime.holders import holders
from ttrain.device.ttnn.runtime.probe import probe

DRIVER = Path("/sys/module/tenstorrent/version")
CARDS = Path("/sys/class/tenstorrent")
SYSTEM_COMPILER = Path("/opt/tenstorrent/sfpi")
LOCKS = Path("/dev/shm")
OPEN_SECONDS = 60.0


def examine(opening: bool = True) -> Iterator[Finding]:
    """All findings in order. With `opening` devices are opened too, each in a process of its own."""
    ttnn = _ttnn()
    yield ttnn
    if ttnn.state == "ok":
        yield _compiler()
    yield _driver()
    cards = _cards()
    yield cards
    if cards.state == "ok":
        yield from _firmware()
        yield _holders()
        yield _locks()
    if opening and ttnn.state == "ok":
        if cards.state == "ok":
            yield from _open_cards()
        yield _opened("mocked boards", "mock", "n150", f"remove {ttnn_folder()} and try again")
    yield _simulator()


def _ttnn() -> Finding:
    try:
        installed_ttnn()
        return Finding("ttnn", "ok", version("ttnn"))
    except PackageNotFoundError:
        return Finding("ttnn", "ok", "a build of its own")
    except Exception:
        return Finding("ttnn", "missing", missing_ttnn(), "pip install 'ttrain[tt]' with Python 3.12 on Linux x86-64")


def _compiler() -> Finding:
    places = [installed_ttnn() / "runtime" / "sfpi", SYSTEM_COMPILER]
    found = next((place for place in places if (place / "compiler").exists()), None)
    if found is not None:
        return Finding("kernel compiler", "ok", str(found))
    return Finding(
        "kernel compiler", "missing", f"no SFPI in {places[0]} or {places[1]}",
        "a card needs it: install Tenstorrent's sfpi package; mocked boards bring a stub",
    )  # fmt: skip


def _driver() -> Finding:
    if DRIVER.exists():
        return Finding("driver", "ok", f"tenstorrent {DRIVER.read_text('ascii', 'replace').strip()}")
    return Finding("driver", "missing", "the kernel module tenstorrent is not loaded", "a card needs it: tt-kmd")


def _cards(nodes: Path = DEVICE_NODES) -> Finding:
    found = sorted(path.name for path in nodes.glob("[0-9]*"))
    if found:
        return Finding("cards", "ok", f"{len(found)} in {nodes}: {', '.join(found)}")
    return Finding("cards", "missing", f"nothing in {nodes}", "use device=cpu, or device.mode=mock for a dry run")


def _firmware(cards: Path = CARDS) -> Iterator[Finding]:
    for card in sorted(cards.glob("*")):
        facts = {name: _text(card / f"tt_{name}") or _text(card / "device" / f"tt_{name}") for name in _CARD_FACTS}
        known = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items() if value)
        yield Finding(f"card {card.name}", "ok", known or "its driver tells nothing")


_CARD_FACTS = ("card_type", "fw_bundle_ver", "serial")


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace").strip()
    except OSError:
        return ""


def _holders() -> Finding:
    found = holders()
    if not found:
        return Finding("held by", "ok", "nobody that this user may see")
    named = ", ".join(f"process {pid} ({command})" for pid, command in found.items())
    return Finding("held by", "broken", named, "wait for it or end it; a run on a held card ends with exit code 75")


def _locks(folder: Path = LOCKS) -> Finding:
    found = sorted(path.name for path in folder.glob("TT_UMD_LOCK*"))
    if not found or holders():
        return Finding("locks", "ok", f"{len(found)} of the driver")
    return Finding("locks", "ok", f"{len(found)} left by processes that ended; the driver takes them over")


def _open_cards() -> Iterator[Finding]:
    """A chip by itself, then all of them over the links between them."""
    result = probe("silicon", "tt", OPEN_SECONDS)
    yield _answer("opening a card", result, "reset it with tt-smi -r, then run task=doctor again")
    chips = result.get("opened", {}).get("chips", 1)
    if chips > 1:
        linked = probe("silicon", "tt", OPEN_SECONDS, chips)
        yield _answer("fabric links", linked, "check the cables and reset all cards with tt-smi -r; one chip is enough "
                      "for device.mesh=[1,1]")  # fmt: skip


def _opened(subject: str, mode: str, name: str, fix: str) -> Finding:
    return _answer(subject, probe(mode, name, OPEN_SECONDS), fix)


def _answer(subject: str, result: Mapping[str, Any], fix: str) -> Finding:
    if "error" in result:
        return Finding(subject, "broken", result["error"], fix)
    facts = result["opened"]
    rows, columns = facts["cores"]
    return Finding(subject, "ok", f"{facts['arch']}, {rows}x{columns} cores, {facts['chips']} chip(s)")


def _simulator() -> Finding:
    given = os.environ.get(SIMULATOR_VARIABLE)
    if given is None:
        return Finding("simulator", "missing", f"{SIMULATOR_VARIABLE} is not set", "only mode=simulator needs one")
    exists = Path(given).exists()
    fix = f"set {SIMULATOR_VARIABLE} to the path of the library, or unset it"
    return Finding("simulator", "ok" if exists else "broken", given if exists else f"no such file: {given}", fix)
