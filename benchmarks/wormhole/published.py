"""Measurements of one Wormhole chip that others published, in bf16.

Source: 'return to the trenches', mewtwo.bearblog.dev. All numbers as printed there, with their last digit. Milliseconds
unless a column says otherwise. "worker" leaves 8 columns x 7 rows of cores to compute, "eth" 8 x 8.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal

SOURCE = "'return to the trenches', mewtwo.bearblog.dev"


@dataclass(frozen=True)
class Row:
    """One row of a table: what was measured, and its columns as printed."""

    what: str
    values: dict[str, str]
    contradicted: dict[str, str] = field(default_factory=dict)  # column -> why the source's own numbers disagree


@dataclass(frozen=True)
class Table:
    """`compared` are pairs of columns whose order is a finding of the source; `unit` is ms, us or TFLOP/s."""

    name: str
    title: str
    unit: str
    rows: tuple[Row, ...]
    compared: tuple[tuple[str, str], ...] = ()
    between_rows: tuple[tuple[str, str], ...] = ()  # pairs of rows whose order is a finding, in every column
    disputed: dict[str, str] = field(default_factory=dict)  # row -> why its `compared` columns decide nothing

    def half(self, test: bool) -> list[Row]:
        """Alternate rows: the first, third and so on are fitted, the others held out."""
        return list(self.rows[1::2] if test else self.rows[::2])


def spread(printed: str) -> tuple[float, float]:
    """The numbers that round to what was printed."""
    number = Decimal(printed)
    half = Decimal(1).scaleb(int(number.as_tuple().exponent)) / 2
    return float(number - half), float(number + half)


def _rows(
    columns: tuple[str, ...], *rows: tuple[str, ...], contradicted: dict[tuple[str, str], str] | None = None
) -> tuple[Row, ...]:
    """Rows of a table; `contradicted` maps (row, column) to why the source's own numbers disagree."""
    return tuple(
        Row(
            what,
            dict(zip(columns, values, strict=True)),
            {column: reason for (row, column), reason in (contradicted or {}).items() if row == what},
        )
        for what, *values in rows
    )


_SPLIT = (
    "mlp_dispatch, static worker against eth: the source has 0.673 ms and 0.864 ms for the same step with worker "
    "dispatch; by the first worker wins by 16 %, by the second eth by 7 %"
)
_4096 = (
    "matmul_dispatch, 4096 on worker: 10.4 ms are 13.2 TFLOP/s on the cores that reach 48.7 TFLOP/s at 4032 in "
    "matmul_rate"
)
_512_RATE = (
    "matmul_rate, 512: 1.49 TFLOP/s are 180 us, where matmul_dispatch has 97 us on the same cores and subdevices 59 us"
)
_512 = (
    "subdevices, 512: 0.059 ms on 56 cores, where matmul_dispatch has 0.097 ms and matmul_rate 0.180 ms; no "
    "call takes less than 0.081 ms in the former"
)
_256 = (
    "subdevices, 256: takes longer than 512, eight times the work, on the same cores and queue "
    "(0.095 ms against 0.059, 0.123 against 0.058)"
)


_GRID = ("worker", "eth")
MLP_ENGINES = Table(
    "mlp_engines",
    "MLP 1024 x 512-512-512, 24 ops a step, worker dispatch",
    "ms",
    _rows(("time",), ("python", "9.506"), ("dynamic", "0.984"), ("static", "0.673"), ("traced", "0.563"),
          ("pytorch_cpu", "6.237")),
    between_rows=(("python", "pytorch_cpu"), ("dynamic", "pytorch_cpu"), ("python", "dynamic"), ("dynamic", "static"),
                  ("static", "traced")),
)  # fmt: skip
MLP_DISPATCH = Table(
    "mlp_dispatch",
    "the same MLP, dispatch worker and eth",
    "ms",
    _rows(_GRID, ("dynamic", "1.196", "1.161"), ("static", "0.864", "0.802"), ("traced", "0.561", "0.597")),
    compared=(_GRID,),
    between_rows=(("dynamic", "static"), ("static", "traced")),
    disputed={"static": _SPLIT},
)
SHAPES = Table(
    "shapes",
    "MLP of two layers, batch x width",
    "ms",
    _rows(("dynamic", "traced"), ("256x256", "1.36", "0.17"), ("256x2048", "1.79", "1.37"),
          ("2048x2048", "4.12", "3.31"), ("4096x2048", "7.68", "6.43")),
    compared=(("dynamic", "traced"),),
)  # fmt: skip
GPT = Table(
    "gpt",
    "GPT: vocabulary 256, batch 32, 256 tokens, 384 wide, 6 heads, 6 layers",
    "ms",
    _rows(("static", "traced"), ("worker", "323.05", "323.09"), ("eth", "325.62", "325.69")),
    compared=(("static", "traced"),),
    between_rows=(("worker", "eth"),),
)
MATMUL_RATE = Table(
    "matmul_rate",
    "square matrix product on 8 x 7 cores",
    "TFLOP/s",
    _rows(("rate",), ("4032", "48.73"), ("1024", "10.61"), ("512", "1.49"), contradicted={("512", "rate"): _512_RATE}),
    between_rows=(("4032", "1024"), ("1024", "512")),
)
MATMUL_DISPATCH = Table(
    "matmul_dispatch",
    "square matrix product, dispatch worker and eth",
    "us",
    _rows(_GRID, ("128", "88.82", "81.08"), ("256", "87.90", "104.15"), ("512", "96.67", "104.72"),
          ("1024", "156.76", "159.82"), ("2048", "411.08", "375.66"), ("4096", "10443.58", "1974.64"),
          contradicted={("4096", "worker"): _4096}),
    compared=(_GRID,),
)  # fmt: skip
CORE_GRID = Table(
    "core_grid",
    "a dynamic step of the MLP on one queue: all cores, or two halves",
    "ms",
    _rows(("time",), ("full", "1.226"), ("partitioned", "1.814")),
    between_rows=(("full", "partitioned"),),
)
GAPS = Table(
    "gaps",
    "764 dispatches: time between programs",
    "ms or %",
    _rows(("value",), ("gaps", "229.16"), ("overhead", "83.4")),
)
SUBDEVICES = Table(
    "subdevices",
    "square matrix product: 56 cores and 1 queue, 28 cores and 1 queue, 28 cores a queue on 2 queues",
    "ms",
    _rows(("full", "half", "half_2q"), ("256", "0.095", "0.123", "0.056"), ("512", "0.059", "0.058", "0.060"),
          ("1024", "0.170", "0.200", "0.199"), ("2048", "0.762", "1.246", "1.246"),
          contradicted={(size, column): reason for size, reason in (("256", _256), ("512", _512))
                        for column in ("full", "half", "half_2q")}),
    compared=(("full", "half"), ("half", "half_2q")),
)  # fmt: skip

TABLES = (MLP_ENGINES, MLP_DISPATCH, SHAPES, GPT, MATMUL_RATE, MATMUL_DISPATCH, CORE_GRID, GAPS, SUBDEVICES)
