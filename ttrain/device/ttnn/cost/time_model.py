"""Times of benchmarks by the cost model, where there is no card: beside what others published for one chip."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ttrain.device.family import Published, Variant
from ttrain.device.timing import Work
from ttrain.device.ttnn.cost.programs import BYTES, Product
from ttrain.device.ttnn.cost.published import SOURCE, TABLES, Table
from ttrain.device.ttnn.cost.reproduce import findings, predict
from ttrain.device.ttnn.cost.step_time import chip_setting, host_input, programs_of, wormhole_time
from ttrain.device.ttnn.cost.wormhole import Wormhole
from ttrain.device.ttnn.settings import TenstorrentConfig

Place = tuple[str, str]  # row and column of a published table


class WormholeModel:
    """Of a board as a config uses it; a variant may use it otherwise. See `TimeModel`."""

    def __init__(self, config: TenstorrentConfig) -> None:
        self.config = config

    def describe(self) -> dict[str, object]:
        return {
            "name": self.config.name,
            "mode": "cost model",
            "model": "the cost model of a Wormhole chip",
            "source": "ttrain/device/ttnn/cost, docs/planning.md",
            "published": f"measured by others on one chip of an n300, {SOURCE}",
        }

    def product(self, size: int, dtype: str, variant: Variant) -> tuple[float, str]:
        estimate = self._chip(variant).blocking([Product(size, size, size, 1, BYTES[dtype])])
        bound = "call" if estimate.total > 2 * (estimate.compute + estimate.bandwidth) else estimate.bottleneck
        return estimate.total / 1e3, bound

    def step(self, work: Work, variant: Variant) -> tuple[float, str]:
        if variant.part == "half":
            estimate = self._chip(variant).stalling([program for _, listed in programs_of(work) for program in listed])
            return estimate.total / 1e3 + 1e3 * host_input(work), estimate.bottleneck
        time = wormhole_time(work, self._config(variant), variant.engine)
        return 1e3 * time.total, time.bottleneck.replace("_", " ")

    def peak_flops(self, variant: Variant) -> float:
        return self._chip(variant).peak_flops()

    def published(self, tables: Sequence[str], work: Any, variant: Variant) -> Published | None:
        dispatch = self._config(variant).dispatch
        dispatch = "worker" if dispatch == "auto" else dispatch
        for table in TABLES:
            place = _PLACES[table.name](work, variant, dispatch) if table.name in tables else None
            printed = next((row for row in table.rows if place is not None and row.what == place[0]), None)
            if place is not None and printed is not None and place[1] in printed.values:
                again, scale = predict(table, printed, place[1]), _to_ms(table, work)
                return Published(
                    scale(float(printed.values[place[1]])),
                    None if again is None else scale(again),
                    printed.contradicted.get(place[1]),
                )
        return None

    def told(self, tables: Sequence[str]) -> str | None:
        found = [finding for finding in findings() if finding.table in tables]
        if not found:
            return None
        judged = [finding for finding in found if finding.contradicted is None]
        right = sum(finding.right for finding in judged)
        text = (
            f"Of the comparisons published for this (which is faster, or none by 3 %), {right} of {len(judged)} come "
            "out the same in the model"
        )
        contradicted = len(found) - len(judged)
        more = f"; {contradicted} more are left out, since the source contradicts itself there" if contradicted else ""
        return f"{text}{more}."

    def _config(self, variant: Variant) -> TenstorrentConfig:
        return replace(self.config, dispatch=variant.dispatch or self.config.dispatch)

    def _chip(self, variant: Variant) -> Wormhole:
        """The published products ran at ttnn's default fidelity, HiFi2."""
        setting = chip_setting(self._config(variant), variant.engine)
        if variant.part != "full":
            rows, columns = setting.cores
            setting = replace(setting, grid=(rows, columns // 2))
        return Wormhole(setting)


def variant_config(config: TenstorrentConfig, variant: Variant) -> TenstorrentConfig | None:
    """The device that a variant opens; None for what can't be run."""
    if variant.part == "both":
        return None
    config = replace(config, dispatch=variant.dispatch or config.dispatch)
    if variant.part == "half":
        rows, columns = chip_setting(config, variant.engine).cores
        config = replace(config, core_grid=[rows, columns // 2])
    return config


def _mlp(work: Any, layers: int, width: int, rows: int) -> bool:
    return work.kind == "mlp" and (work.layers, work.width, work.rows) == (layers, width, rows)


def _gpt(work: Any) -> bool:
    names = ("layers", "heads", "width", "context", "rows", "vocabulary", "bias")
    return work.kind == "gpt" and tuple(getattr(work, name) for name in names) == (6, 6, 384, 256, 32, 256, True)


def _shape(work: Any, variant: Variant, dispatch: str) -> Place | None:
    fits = work.kind == "mlp" and work.layers == 2 and dispatch == "worker"
    return (f"{work.rows}x{work.width}", variant.engine) if fits else None


def _size(work: Any, column: str) -> Place | None:
    return (str(work.size), column) if work.kind == "product" else None


_PARTS = {"full": "full", "half": "half", "both": "half_2q"}
_PLACES: dict[str, Callable[[Any, Variant, str], Place | None]] = {
    "mlp_engines": lambda w, v, d: (v.engine, "time") if _mlp(w, 2, 512, 1024) and d == "worker" else None,
    "mlp_dispatch": lambda w, v, d: (v.engine, d) if _mlp(w, 2, 512, 1024) else None,
    "shapes": _shape,
    "gpt": lambda w, v, d: (d, v.engine) if _gpt(w) else None,
    "matmul_rate": lambda w, v, d: _size(w, "rate") if d == "worker" and v.engine == "static" else None,
    "matmul_dispatch": lambda w, v, d: _size(w, d),
    "core_grid": lambda w, v, d: (
        ("full" if v.part == "full" else "partitioned", "time") if v.engine == "dynamic" else None
    ),
    "subdevices": lambda w, v, d: _size(w, _PARTS[v.part]),
}


def _to_ms(table: Table, work: Any) -> Callable[[float], float]:
    """From a table's unit to milliseconds."""
    if table.unit == "us":
        return lambda value: value / 1e3
    if table.unit == "TFLOP/s":
        flops = work.flops
        return lambda value: flops / value / 1e9
    return lambda value: value
