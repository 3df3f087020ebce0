"""Findings of task=doctor: ttnn, its compiler and driver, the cards, mocked boards, a simulator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ttrain.core.errors import TtrainError
from ttrain.core.files import text_of
from ttrain.device.info import Finding
from ttrain.device.ttnn.runtime import environment
from ttrain.device.ttnn.runtime.environment import DEVICE_NODES, SIMULATOR_VARIABLE, installed_ttnn
from ttrain.device.ttnn.settings import TenstorrentConfig

DRIVER = Path("/sys/module/tenstorrent/version")
CARDS = Path("/sys/class/tenstorrent")
SYSTEM_COMPILER = Path("/opt/tenstorrent/sfpi")
LOCKS = Path("/dev/shm")
OPEN_SECONDS = 60.0
_CARD_FACTS = ("card_type", "fw_bundle_ver", "serial")


def examine() -> Iterator[Finding]:
    """Yield all findings in order. Devices are opened too, each in a process of its own."""
    ttnn = _ttnn()
    yield ttnn
    if ttnn.state == "ok":
        yield _compiler()
    driver = text_of(DRIVER).strip()
    fix = "a card needs it: tt-kmd"
    yield _found("driver", driver and f"tenstorrent {driver}", "the kernel module tenstorrent is not loaded", fix)
    cards = sorted(path.name for path in DEVICE_NODES.glob("[0-9]*"))
    said = cards and f"{len(cards)} in {DEVICE_NODES}: {', '.join(cards)}"
    fix = "use device=cpu, or device.mode=mock for a dry run"
    yield _found("cards", said, f"nothing in {DEVICE_NODES}", fix)
    if cards:
        yield from _state_of_cards()
    if ttnn.state == "ok":
        if cards:
            yield from _open_cards()
        yield _opened("mocked boards", "mock", "n150", f"remove {environment.ttnn_folder()} and try again")[0]
    yield _simulator()


def _found(subject: str, said: Any, otherwise: str, fix: str, state: str = "missing") -> Finding:
    return Finding(subject, "ok", str(said)) if said else Finding(subject, state, otherwise, fix)


def _ttnn() -> Finding:
    try:
        installed_ttnn()
        return Finding("ttnn", "ok", environment.wheel_version())
    except Exception:
        fix = "only a card or a mocked board needs it: pip install 'ttrain[tt]' with Python 3.12 on Linux x86-64"
        return Finding("ttnn", "missing", "it is not installed", fix)


def _compiler() -> Finding:
    places = [installed_ttnn() / "runtime" / "sfpi", SYSTEM_COMPILER]
    found = next((place for place in places if (place / "compiler").exists()), None)
    fix = "a card needs it: install Tenstorrent's sfpi package; mocked boards bring a stub"
    return _found("kernel compiler", found, f"no SFPI in {places[0]} or {places[1]}", fix)


def _state_of_cards() -> Iterator[Finding]:
    """Yield the firmware of every card, who holds them, and the driver's locks."""
    for card in sorted(CARDS.glob("*")):
        facts = {name: text_of(card / f"tt_{name}") or text_of(card / "device" / f"tt_{name}") for name in _CARD_FACTS}
        known = ", ".join(f"{name.replace('_', ' ')} {value.strip()}" for name, value in facts.items() if value.strip())
        yield Finding(f"card {card.name}", "ok", known or "its driver tells nothing")
    held = environment.holders()
    fix = "wait for it or end it; a run on a held card ends with exit code 75"
    yield _found("held by", not held and "nobody that this user may see", held, fix, "broken")
    locks = len([*LOCKS.glob("TT_UMD_LOCK*")])
    left = " left by processes that ended; the driver takes them over" if locks and not held else " of the driver"
    yield Finding("locks", "ok", f"{locks}{left}")


def _open_cards() -> Iterator[Finding]:
    """Open a chip by itself, then all of them over the links between them."""
    card, chips = _opened("opening a card", "silicon", "tt", "reset it with tt-smi -r, then run task=doctor again")
    yield card
    if chips > 1:
        fix = "check the cables and reset all cards with tt-smi -r; one chip is enough for device.mesh=[1,1]"
        yield _opened("fabric links", "silicon", "tt", fix, chips)[0]


def _opened(subject: str, mode: str, name: str, fix: str, together: int = 1) -> tuple[Finding, int]:
    """Open a device; return the finding, and how many chips there are."""
    result = probe(mode, name, OPEN_SECONDS, together)
    if "error" in result:
        return Finding(subject, "broken", result["error"], fix), 1
    facts = result["opened"]
    rows, columns = facts["cores"]
    return Finding(subject, "ok", f"{facts['arch']}, {rows}x{columns} cores, {facts['chips']} chip(s)"), facts["chips"]


def _simulator() -> Finding:
    given = os.environ.get(SIMULATOR_VARIABLE)
    if given is None:
        return Finding("simulator", "missing", f"{SIMULATOR_VARIABLE} is not set", "only mode=simulator needs one")
    fix = f"set {SIMULATOR_VARIABLE} to the path of the library, or unset it"
    return _found("simulator", Path(given).exists() and given, f"no such file: {given}", fix, "broken")


def probe(mode: str, name: str, seconds: float, chips: int = 1) -> dict[str, Any]:
    """Open a device in a process of its own, which hangs in place of this one; several chips with their fabric.

    Return `opened` with the facts of the device, or `error` with the reason, within `seconds`.
    """
    command = [sys.executable, "-m", "ttrain.device.ttnn.runtime.examine", mode, name, str(chips)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired as error:
        opened = b'"opened"' in (error.stdout or b"")
        return {"error": f"did not {'close' if opened else 'open'} within {seconds:g} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if lines:
        return json.loads(lines[-1])
    last = (done.stderr.strip().splitlines() or [f"ended with exit code {done.returncode}"])[-1]
    return {"error": last[:300]}


def main(mode: str, name: str, together: str = "1") -> None:
    """Print what was found as one line of JSON."""
    from ttrain.device.ttnn.runtime.mesh import Mesh

    try:
        mesh = Mesh.open(TenstorrentConfig(name=name, mode=mode, mesh=[1, int(together)]))
        chips = mesh.chips if mode == "mock" else int(mesh.tt.get_num_devices())
        result: dict[str, Any] = {"opened": {**mesh.describe(), "chips": chips}}
        mesh.close()
    except TtrainError as error:
        result = {"error": str(error)}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:4])
