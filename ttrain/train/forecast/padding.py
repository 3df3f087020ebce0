"""The cost of whole tiles: bytes that a device without arenas holds beyond the elements themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ttrain.core.tables import Table
from ttrain.core.units import format_bytes
from ttrain.device.base import Device
from ttrain.engine.base import Step
from ttrain.engine.state import State


def padding_values(state: State, steps: Mapping[str, Step], device: Device) -> dict[str, Any]:
    """Bytes with and without padding, of the persistent tensors and of every planned buffer."""
    specs = [state.tensor(name).spec for name in state.names() if not state.on_host(name)]
    kept = sum(spec.nbytes for spec in specs), sum(device.layout_bytes(device.layout(spec)) for spec in specs)
    needed = held = 0
    worst: list[tuple[int, str]] = []
    for name, step in steps.items():
        for owner, block in step.plan.owned.items() if step.plan is not None else ():
            if block.on_host:
                continue
            needed, held = needed + owner.spec.nbytes, held + block.nbytes
            worst.append((block.nbytes - owner.spec.nbytes, f"{name}: {owner.spec}"))
    return {
        "state_bytes": kept[0], "state_padded_bytes": kept[1], "buffer_bytes": needed, "buffer_padded_bytes": held,
        "worst": [{"bytes": size, "what": what} for size, what in sorted(worst, reverse=True)[:3] if size > 0],
    }  # fmt: skip


def padding_table(values: dict[str, Any]) -> Table:
    """Return a table for people."""
    rows = [_row("persistent tensors", values["state_bytes"], values["state_padded_bytes"])]
    rows.append(_row("buffers of all steps", values["buffer_bytes"], values["buffer_padded_bytes"]))
    notes = dict.fromkeys(f"{one['what']} wastes {format_bytes(one['bytes'])}." for one in values["worst"])
    return Table("Padding to tiles of 32 x 32", ("", "elements", "held", "waste"), rows, tuple(notes))


def _row(what: str, needed: int, held: int) -> tuple[str, str, str, str]:
    return what, format_bytes(needed), format_bytes(held), f"{1 - needed / held:.1%}" if held else "-"
