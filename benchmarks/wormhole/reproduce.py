"""Compare the cost model with the published measurements: each number, and each winner."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from benchmarks.wormhole.published import TABLES, Row, Table, spread
from ttrain.device.ttnn.cost.wormhole import (
    CONSTANTS,
    TILE,
    Constants,
    Product,
    Program,
    Scatter,
    Stream,
    Wormhole,
    tiles,
)

TIE = 0.03  # two times within 3 % of each other make no difference
NOT_MODELLED = {("mlp_engines", "pytorch_cpu"): "runs on the host's CPU"}


def tile_count(shape: Sequence[int]) -> int:
    """Tiles of a tensor; a vector lies in one row of them."""
    matrix = (*(1,) * (2 - len(shape)), *shape)
    return math.prod(matrix[:-2]) * tiles(matrix[-2]) * tiles(matrix[-1])


def stream(*shapes: Sequence[int], bytes_per_element: float = 2.0) -> Stream:
    """The program that reads or writes tensors of these shapes once each."""
    counts = [tile_count(shape) for shape in shapes]
    return Stream(bytes_per_element * TILE * TILE * sum(counts), max(counts))


def scatter(*shapes: Sequence[int], bytes_per_element: float = 2.0) -> Scatter:
    """Return the traffic of such tensors that are read out of order."""
    ordered = stream(*shapes, bytes_per_element=bytes_per_element)
    return Scatter(ordered.nbytes, ordered.tiles)


@cache
def mlp_step(rows: int, width: int, dynamic: bool) -> tuple[Program, ...]:
    """The programs of one step of a perceptron with two biased layers on mean squared error, SGD.

    The source counts 24 and does not list them; these are 24. Its dynamic engine is taken to fill each of six gradients
    with zeros and add to it, which makes 36.
    """
    act, weight, bias = (rows, width), (width, width), (1, width)
    forward, inner = Product(rows, width, width), Product(width, rows, width)
    one, two, three = stream(act, act), stream(act, act, bias), stream(act, act, act)
    programs: list[Program] = [forward, two, one, forward, two]  # linear, bias, relu, linear, bias
    programs += [three, one, stream(act), one]  # difference, square, mean, its gradient
    programs += [inner, stream(act, bias), forward, one, three, inner, stream(act, bias)]  # relu: sign, product
    for shape in (weight, bias, weight, bias):
        programs += [stream(shape, shape), stream(shape, shape, shape)]  # learning rate, subtraction
        if dynamic:
            programs += [stream(shape), stream(shape, shape, shape)]
    if dynamic:
        programs += [stream(act), three, stream(act), three]
    return tuple(programs)


@cache
def gpt_step(
    rows: int = 32, time: int = 256, width: int = 384, heads: int = 6, layers: int = 6, vocabulary: int = 256
) -> tuple[Program, ...]:
    """The programs of one GPT step with AdamW, with ttnn's fused kernels for norms and softmax."""
    n, head = rows * time, width // heads
    x, wide, qkv = (n, width), (n, 4 * width), (n, 3 * width)
    scores, per_head = (rows * heads, time, time), (rows * heads, time, head)
    attend = Product(time, head, time, rows * heads), Product(time, time, head, rows * heads)

    def linear(inputs: int, outputs: int) -> list[Program]:
        return [Product(n, inputs, outputs), stream((n, outputs), (n, outputs))]

    def linear_grad(inputs: int, outputs: int) -> list[Program]:
        return [Product(inputs, n, outputs), Product(n, outputs, inputs), stream((n, outputs))]

    layer: list[Program] = [
        scatter(x, x),
        *linear(width, 3 * width),
        scatter(qkv, qkv),
        attend[0],
        stream(scores, scores),
    ]
    layer += [scatter(scores, scores), attend[1], scatter(x, x), *linear(width, width), stream(x, x, x), scatter(x, x)]
    layer += [*linear(width, 4 * width), stream(wide, wide), *linear(4 * width, width), stream(x, x, x)]
    back: list[Program] = [*linear_grad(4 * width, width), stream(wide, wide, wide), *linear_grad(width, 4 * width)]
    back += [scatter(x, x, x), scatter(x, x), stream(x, x, x), *linear_grad(width, width), scatter(x, x)]
    back += [attend[0], attend[1], scatter(scores, scores, scores), stream(scores, scores), attend[1], attend[1]]
    back += [
        scatter(per_head, per_head, per_head, qkv),
        *linear_grad(width, 3 * width),
        scatter(x, x, x),
        scatter(x, x),
    ]
    back += [stream(x, x, x)]
    logits = (n, vocabulary)
    ends: list[Program] = [scatter(x), scatter(x), stream(x, x, x), scatter(x, x), *linear(width, vocabulary)]
    ends += [scatter(logits, logits), scatter(logits, logits), scatter(logits, logits), *linear_grad(width, vocabulary)]
    ends += [scatter(x, x, x), scatter(x, x), scatter(x), scatter((vocabulary, width))]
    matrices = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)] * layers
    small = [(1, width)] * (9 * layers)
    update: list[Program] = [
        stream(*([shape] * 7)) for shape in [*matrices, *small, (vocabulary, width), (time, width)]
    ]
    return tuple((layer + back) * layers + ends + update)


def predict(table: Table, row: Row, column: str, constants: Constants = CONSTANTS) -> float | None:
    """The model's number for one printed number, in the table's unit; None where it is not of the chip."""
    if (table.name, row.what) in NOT_MODELLED:
        return None
    return _PREDICTORS[table.name](row.what, column, constants)


def _mlp_time(rows: int, width: int, engine: str, dispatch: str, c: Constants) -> float:
    issuer = {"python": "python", "traced": "replay"}.get(engine, "native")
    chip = Wormhole(dispatch, issuer=issuer, constants=c)
    return chip.step(mlp_step(rows, width, engine in ("python", "dynamic"))).total / 1e3


def _shapes(what: str, engine: str, c: Constants) -> float:
    rows, width = map(int, what.split("x"))
    return _mlp_time(rows, width, engine, "worker", c)


def _gpt_time(dispatch: str, engine: str, c: Constants) -> float:
    issuer = "replay" if engine == "traced" else "native"
    return Wormhole(dispatch, issuer=issuer, constants=c).step(gpt_step()).total / 1e3


def _waited_for(product: Product, chip: Wormhole) -> float:
    """Return the microseconds of a product whose end the host waits for."""
    time = chip.program(product)
    return chip.call + time.dispatch + time.busy


def _matmul_rate(size: str, column: str, c: Constants) -> float:
    product = Product(int(size), int(size), int(size))
    return 2 * product.m * product.k * product.n / _waited_for(product, Wormhole(constants=c)) / 1e6


def _matmul_time(size: str, dispatch: str, c: Constants) -> float:
    """ttnn's default fidelity for bf16 inputs."""
    product = Product(int(size), int(size), int(size))
    return _waited_for(product, Wormhole(dispatch, "HiFi2", constants=c))


def _core_grid(what: str, column: str, c: Constants) -> float:
    programs = mlp_step(1024, 512, dynamic=True)
    if what == "full":
        return Wormhole(issuer="native", constants=c).step(programs).total / 1e3
    # The programs alternate between sub-devices on one queue: each is issued when its predecessor is done.
    times = map(Wormhole(grid=(7, 4), issuer="native", constants=c).program, programs)
    return sum(time.host + time.dispatch + time.busy for time in times) / 1e3


def _gaps(what: str, column: str, c: Constants) -> float:
    """Issued from Python one by one: the cores wait for the host between programs."""
    step = Wormhole(issuer="python", constants=c).step(mlp_step(1024, 512, dynamic=True))
    gaps = step.total - step.compute - step.bandwidth
    return gaps * 764 / step.programs / 1e3 if what == "gaps" else 100 * gaps / step.total


def _subdevices(size: str, column: str, c: Constants) -> float:
    """With two queues each half runs a product of its own, beside the other: the time is that of one."""
    grid = (7, 8) if column == "full" else (7, 4)
    product = Product(int(size), int(size), int(size))
    return _waited_for(product, Wormhole(grid=grid, constants=c)) / 1e3


_PREDICTORS = {
    "mlp_engines": lambda what, column, c: _mlp_time(1024, 512, what, "worker", c),
    "mlp_dispatch": lambda what, column, c: _mlp_time(1024, 512, what, column, c),
    "shapes": _shapes,
    "gpt": _gpt_time,
    "matmul_rate": _matmul_rate,
    "matmul_dispatch": _matmul_time,
    "core_grid": _core_grid,
    "gaps": _gaps,
    "subdevices": _subdevices,
}


@dataclass(frozen=True)
class Number:
    """A printed number beside the model's, in the table's unit."""

    table: str
    row: str
    column: str
    held_out: bool
    published: float
    predicted: float
    contradicted: str | None

    @property
    def error(self) -> float:
        """Relative to what was published."""
        return self.predicted / self.published - 1


def numbers(constants: Constants = CONSTANTS, tables: tuple[Table, ...] = TABLES) -> list[Number]:
    """Every printed number that the model speaks of."""
    found = []
    for table in tables:
        for index, row in enumerate(table.rows):
            for column, printed in row.values.items():
                value = predict(table, row, column, constants)
                if value is not None:
                    reason = row.contradicted.get(column)
                    found.append(Number(table.name, row.what, column, bool(index % 2), float(printed), value, reason))
    return found


@dataclass(frozen=True)
class Finding:
    """Two published numbers, which of them is better, and what the model says: "first", "second" or "tie"."""

    table: str
    first: str
    second: str
    published: tuple[str, ...]  # what the printed digits allow
    predicted: str
    ratio: float  # published, second over first
    predicted_ratio: float
    contradicted: str | None
    held_out: bool  # not both numbers lie in the fitted half

    @property
    def right(self) -> bool:
        return self.predicted in self.published


def findings(constants: Constants = CONSTANTS, tables: tuple[Table, ...] = TABLES) -> list[Finding]:
    """Every comparison that the source makes."""
    found = []
    for table in tables:
        rows = {row.what: row for row in table.rows}
        pairs = [((row, a), (row, b)) for row in table.rows for a, b in table.compared]
        for a, b in table.between_rows:
            pairs += [((rows[a], column), (rows[b], column)) for column in rows[a].values]
        found += [_finding(table, first, second, constants) for first, second in pairs]
    return found


def _finding(table: Table, first: tuple[Row, str], second: tuple[Row, str], constants: Constants) -> Finding:
    printed = [row.values[column] for row, column in (first, second)]
    values = []
    for (row, column), text in zip((first, second), printed, strict=True):
        value = predict(table, row, column, constants)
        values.append(float(text) if value is None else value)
    more_is_better = table.unit == "TFLOP/s"
    (low1, high1), (low2, high2) = map(spread, printed)
    allowed = {
        _verdict(ratio, more_is_better) for ratio in (low2 / high1, high2 / low1, (low2 + high2) / (low1 + high1))
    }
    reasons = [row.contradicted[column] for row, column in (first, second) if column in row.contradicted]
    if first[0] is second[0] and first[0].what in table.disputed:
        reasons.append(table.disputed[first[0].what])
    return Finding(
        table.name,
        f"{first[0].what} {first[1]}",
        f"{second[0].what} {second[1]}",
        tuple(sorted(allowed)),
        _verdict(values[1] / values[0], more_is_better),
        float(printed[1]) / float(printed[0]),
        values[1] / values[0],
        reasons[0] if reasons else None,
        any(table.rows.index(row) % 2 for row, _ in (first, second)),
    )


def _verdict(ratio: float, more_is_better: bool) -> str:
    if 1 / (1 + TIE) <= ratio <= 1 + TIE:
        return "tie"
    return "second" if (ratio > 1) == more_is_better else "first"
