"""Rules of ops on lists of tensors: the optimizers, refreshed copies, the global norm.

One launch treats all tensors of a list, cut into blocks; the addresses lie in a table that the launch reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ttrain.core.spec import DType, TensorSpec, run_offsets
from ttrain.device.base import Launch
from ttrain.device.torch.native.codegen import call
from ttrain.device.torch.native.launch import launch
from ttrain.device.torch.native.native import Native, Rule, Sizing, address, fp32
from ttrain.device.torch.native.request import Request, c_double, c_float, c_type, template

Tensors = Sequence[Any]


def _table(slots: Sequence[Tensors], block: int, threads: int, numbered: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Rows (address per slot, elements) of all blocks, and where each thread begins: near equal numbers of elements.

    If `numbered`, one more slot holds the number of the block's first element, by run_offsets, in place of an address.
    """
    rows: list[tuple[int, ...]] = []
    numbers, _ = run_offsets([tensor.numel() for tensor in slots[0]])
    for number, tensors in zip(numbers, zip(*slots, strict=True), strict=True):
        bases, sizes = [address(tensor) for tensor in tensors], [tensor.element_size() for tensor in tensors]
        count = tensors[0].numel()
        if numbered:
            bases, sizes = [*bases, number], [*sizes, 1]
        for start in range(0, count, block):
            places = (base + start * size for base, size in zip(bases, sizes, strict=True))
            rows.append((*places, min(block, count - start)))
    table = np.array(rows, dtype=np.int64).reshape(-1, len(slots) + numbered + 1)
    ends = np.cumsum(table[:, -1])
    marks = np.arange(threads + 1) * (ends[-1] if len(ends) else 0) / threads
    begins = np.searchsorted(ends, marks[:-1], side="right")
    return table, np.array([*begins, len(table)], dtype=np.int64)


def _bound(
    function: int, slots: Sequence[Tensors], block: int, threads: int, others: Sequence[Any], numbered: bool = False
) -> Launch:
    """A launch on (table, begins, others...)."""
    table, begins = _table(slots, block, threads, numbered)
    arguments = [table.ctypes.data, begins.ctypes.data, *(address(item) for item in others)]
    return launch(function, arguments, (table, begins, list(slots), list(others)))


def _one_dtype(specs: Sequence[TensorSpec | None]) -> DType | None:
    """The dtype that all tensors share, if it is one that kernels read."""
    found = {spec.dtype for spec in specs if spec is not None}
    return found.pop() if len(found) == 1 and found <= {DType.FP32, DType.BF16} else None


def _slots(items: Sequence[Any], count: int, slots: int) -> tuple[list[list[Any]], list[Any]]:
    """Items of `slots` lists of `count` tensors, and what follows them."""
    end = count * slots
    return [list(items[start : start + count]) for start in range(0, end, count)], list(items[end:])


def _size(specs: Sequence[TensorSpec]) -> int:
    return sum(spec.size for spec in specs)


def _adamw(request: Request, sizing: Sizing) -> Native | None:
    """With five slots the last holds the parameters rounded to the compute dtype."""
    settings, copy = request.settings, request.op == "adamw_refresh"
    count = settings["count"]
    slots, scalars = _slots(request.inputs, count, 5 if copy else 4)
    dtypes = [_one_dtype(slot) for slot in slots]
    if None in dtypes or any(dtypes[position] is not DType.FP32 for position in (0, 2, 3)) or not _size(slots[0]):
        return None
    team = sizing.threads_for(10 * _size(slots[0]))
    name = template("adamw", c_type(slots[1][0]), c_type(slots[-1][0]), copy, team)
    factor = "in<float>(a, 4)" if scalars[2] is not None else "nullptr"
    numbers = (c_float(settings[key]) for key in ("beta1", "beta2", "eps", "weight_decay"))
    body = call(
        name, "a[0]", "in<i64>(a, 1)", "in<float>(a, 2)", "in<float>(a, 3)", factor, f"AdamW{{{', '.join(numbers)}}}",
        c_double(settings["beta1"]), c_double(settings["beta2"]),
    )  # fmt: skip

    def bind(functions: Sequence[int], ins: Tensors, outs: Tensors, work: Tensors) -> Launch:
        given, others = _slots(ins, count, len(slots))
        return _bound(functions[0], given, sizing.block, team, others)

    return Native((body,), (), bind)


def _sgd(request: Request, sizing: Sizing) -> Native | None:
    settings = request.settings
    count = settings["count"]
    lists = (len(request.inputs) - 2) // count
    slots, scalars = _slots(request.inputs, count, lists)
    dtypes = [_one_dtype(slot) for slot in slots]
    fp32_slots = [dtype for position, dtype in enumerate(dtypes) if position != 1]
    if None in dtypes or any(dtype is not DType.FP32 for dtype in fp32_slots) or not _size(slots[0]):
        return None
    team = sizing.threads_for(4 * _size(slots[0]))
    name = template("sgd", c_type(slots[1][0]), lists == 3, bool(settings["nesterov"]), team)
    factor = "in<float>(a, 3)" if scalars[1] is not None else "nullptr"
    numbers = (c_float(settings[key]) for key in ("momentum", "weight_decay"))
    body = call(name, "a[0]", "in<i64>(a, 1)", "in<float>(a, 2)", factor, *numbers)

    def bind(functions: Sequence[int], ins: Tensors, outs: Tensors, work: Tensors) -> Launch:
        given, others = _slots(ins, count, lists)
        return _bound(functions[0], given, sizing.block, team, others)

    return Native((body,), (), bind)


def _adamw_rounded(request: Request, sizing: Sizing) -> Native | None:
    """With five slots the last holds the parameters rounded to the compute dtype."""
    settings, copy = request.settings, request.op == "adamw_rounded_refresh"
    count = settings["count"]
    slots, scalars = _slots(request.inputs, count, 5 if copy else 4)
    dtypes = [_one_dtype(slot) for slot in slots]
    if None in dtypes or dtypes[2] is not dtypes[3] or not _size(slots[0]):
        return None
    team = sizing.threads_for(30 * _size(slots[0]))
    types = [c_type(slots[position][0]) for position in (0, 1, 2, -1)]
    rounding = [name in settings["stochastic"] for name in ("parameters", "first_moments", "second_moments")]
    name = template("adamw_rounded", *types, *rounding, copy, team)
    factor = "in<float>(a, 4)" if scalars[2] is not None else "nullptr"
    seed = "in<i64>(a, 5)" if scalars[3] is not None else "nullptr"
    numbers = (c_float(settings[key]) for key in ("beta1", "beta2", "eps", "weight_decay"))
    doubles = (c_double(settings[key]) for key in ("beta1", "beta2", "weight_decay"))
    body = call(
        name, "a[0]", "in<i64>(a, 1)", "in<float>(a, 2)", "in<float>(a, 3)", factor, seed, f"{settings['stream']}u",
        f"AdamW{{{', '.join(numbers)}}}", *doubles,
    )  # fmt: skip

    def bind(functions: Sequence[int], ins: Tensors, outs: Tensors, work: Tensors) -> Launch:
        given, others = _slots(ins, count, len(slots))
        return _bound(functions[0], given, sizing.block, team, others, numbered=True)

    return Native((body,), (), bind)


def _sgd_rounded(request: Request, sizing: Sizing) -> Native | None:
    settings = request.settings
    count = settings["count"]
    lists = (len(request.inputs) - 3) // count
    slots, scalars = _slots(request.inputs, count, lists)
    dtypes = [_one_dtype(slot) for slot in slots]
    if None in dtypes or not _size(slots[0]):
        return None
    team = sizing.threads_for(20 * _size(slots[0]))
    types = [c_type(slots[position][0]) for position in (0, 1, -1)]
    rounding = [name in settings["stochastic"] for name in ("parameters", "velocities")]
    terms = (lists == 3, bool(settings["nesterov"]), bool(settings["weight_decay"]))
    name = template("sgd_rounded", *types, *rounding, *terms, team)
    factor = "in<float>(a, 3)" if scalars[1] is not None else "nullptr"
    seed = "in<i64>(a, 4)" if scalars[2] is not None else "nullptr"
    numbers = (c_float(settings[key]) for key in ("momentum", "weight_decay"))
    body = call(
        name, "a[0]", "in<i64>(a, 1)", "in<float>(a, 2)", factor, seed, f"{settings['stream']}u", *numbers
    )  # fmt: skip

    def bind(functions: Sequence[int], ins: Tensors, outs: Tensors, work: Tensors) -> Launch:
        given, others = _slots(ins, count, lists)
        return _bound(functions[0], given, sizing.block, team, others, numbered=True)

    return Native((body,), (), bind)


def _refresh(request: Request, sizing: Sizing) -> Native | None:
    count = request.settings["count"]
    copies, parameters = request.inputs[:count], request.inputs[count:]
    to, source = _one_dtype(copies), _one_dtype(parameters)
    if to is None or source is None or not _size(copies):  # type: ignore[arg-type]
        return None
    team = sizing.threads_for(2 * _size(copies))  # type: ignore[arg-type]
    name = template("refresh", c_type(request.input(0)), c_type(request.input(count)), team)

    def bind(functions: Sequence[int], ins: Tensors, outs: Tensors, work: Tensors) -> Launch:
        return _bound(functions[0], [ins[:count], ins[count:]], sizing.block, team, ())

    return Native((call(name, "a[0]", "in<i64>(a, 1)"),), (), bind)


def _global_norm(request: Request, sizing: Sizing) -> Native | None:
    """Blocks of one dtype after those of the other; every block's sum has its place in the workspace."""
    specs = [spec for spec in request.inputs if spec is not None]
    kinds = [dtype for dtype in (DType.FP32, DType.BF16) if any(spec.dtype is dtype for spec in specs)]
    if not specs or any(spec.dtype not in kinds for spec in specs):
        return None
    blocks = [sum(-(-spec.size // sizing.block) for spec in specs if spec.dtype is kind) for kind in kinds]
    team = sizing.threads_for(2 * _size(specs))
    lines, first = [], 0
    for position, (kind, count) in enumerate(zip(kinds, blocks, strict=True)):
        name = template("square_sums", c_type(TensorSpec((), kind)), team)
        table, begins = f"a[{2 * position}]", f"in<i64>(a, {2 * position + 1})"
        lines.append(call(name, table, begins, f"out<float>(a, {2 * len(kinds) + 1}) + {first}"))
        first += count
    partial, norm = f"in<float>(a, {2 * len(kinds) + 1})", f"out<float>(a, {2 * len(kinds)})"
    lines.append(call("root_of_sum", str(first), partial, norm))
    chosen = [[index for index, spec in enumerate(specs) if spec.dtype is kind] for kind in kinds]

    def bind(functions: Sequence[int], ins: Tensors, outs: Tensors, work: Tensors) -> Launch:
        tables = [_table([[ins[index] for index in group]], sizing.block, team) for group in chosen]
        arguments = [array.ctypes.data for pair in tables for array in pair]
        tensors = (outs[0], work[0])
        return launch(functions[0], [*arguments, *map(address, tensors)], (tables, list(ins), tensors))

    return Native(("\n".join(lines),), (fp32(max(first, 1)),), bind)


RULES: dict[str, Rule] = {
    "adamw_update": _adamw,
    "adamw_refresh": _adamw,
    "adamw_rounded": _adamw_rounded,
    "adamw_rounded_refresh": _adamw_rounded,
    "sgd_update": _sgd,
    "sgd_rounded": _sgd_rounded,
    "refresh": _refresh,
    "global_norm": _global_norm,
}
