"""Rules of ops on lists of tensors: the optimizers, whose C++ follows from their programs, and the global norm.

One launch treats all tensors of a list, cut into blocks; the addresses lie in a table that the launch reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ttrain.core.spec import DType, TensorSpec, flat_offsets
from ttrain.device.base import Launch, split_update
from ttrain.device.torch.loops import expressions, spelled
from ttrain.device.torch.native.codegen import Request, c_float, c_type, call, template
from ttrain.device.torch.native.elementwise import EXPRESSIONS, UNSUITED
from ttrain.device.torch.native.native import Native, Rule, Sizing, address, fp32, launch

Tensors = Sequence[Any]
EACH = 4  # chunks of a thread, as in kernels/parallel.h


def _table(
    slots: Sequence[Tensors], block: int, threads: int, numbers: Sequence[int] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Rows (address per slot, elements) of all blocks, and where each chunk begins: near equal numbers of elements.

    With the `numbers` of the tensors' first elements, one more slot holds that of the block's in place of an address.
    """
    columns: list[tuple[Sequence[int], int]] = [([*map(address, slot)], slot[0].element_size()) for slot in slots]
    columns += [] if numbers is None else [(numbers, 1)]
    rows = [
        [*(first[place] + start * size for first, size in columns), min(block, tensor.numel() - start)]
        for place, tensor in enumerate(slots[0])
        for start in range(0, tensor.numel(), block)
    ]
    table = np.array(rows, dtype=np.int64).reshape(len(rows), -1)
    ends = np.cumsum(table[:, -1])
    chunks = 1 if threads == 1 else EACH * threads
    begins = np.searchsorted(ends, np.arange(chunks) * ends[-1] / chunks, side="right")
    return table, np.array([*begins, len(table)], dtype=np.int64)


def _one_dtype(specs: Sequence[TensorSpec | None]) -> DType | None:
    """The dtype that all tensors share, if it is one that kernels read."""
    found = {spec.dtype for spec in specs if spec is not None}
    return found.pop() if len(found) == 1 and found <= {DType.FP32, DType.BF16, DType.INT16} else None


_SCALAR, _EXACT = expressions("double"), expressions("exact", "cpp", "both")


def _arithmetic(rule: Any, exact: bool) -> tuple[list[str], list[str], list[str]] | None:
    """C++ of a rule on the values v0 (parameter), v1 (gradient) and on (slots).

    Returns lines for scalars, which are formed once in double, lines for a vector of elements, and the names of the
    results. None if a step has no C++.

    `exact` keeps products from being joined with sums.
    """
    vectors = 2 + len(rule.slots)
    (steps, results), scalar = rule.program, rule.alone
    lines: tuple[list[str], list[str]] = ([], [])
    for number, step in enumerate(steps, start=vectors + 2):
        (name, operands, _), alone = step, scalar[number]
        table = _SCALAR if alone else _EXACT if exact else EXPRESSIONS
        if name not in table or (not alone and name in UNSUITED):
            return None
        values = [f"v{item}" if alone or not scalar[item] else f"splat(float(v{item}))" for item in operands]
        kind, spell = ("double", float.hex) if alone else ("vf", c_float)
        lines[not alone].append(f"const {kind} v{number} = {spelled(step, table, spell, values)};")
    return *lines, [f"v{vectors + 2 + result}" for result in results]


def _update(request: Request, sizing: Sizing) -> Native | None:
    """A loop over blocks that loads every list, computes the rule and stores what it writes, rounded as asked."""
    settings = request.settings
    rule, count, stochastic = settings["rule"], settings["count"], settings.get("stochastic", ())
    vectors, copies = 2 + len(rule.slots), bool(settings.get("copies"))
    lists = vectors + copies
    *slots, (_, _, factor, _) = split_update(request.inputs, count)
    dtypes = [_one_dtype(slot) for slot in slots]
    narrow = any(dtype is DType.BF16 for position, dtype in enumerate(dtypes[:vectors]) if position != 1)
    arithmetic = _arithmetic(rule, narrow)
    if None in dtypes or arithmetic is None or not sum(spec.size for spec in slots[0]):
        return None
    scalars, steps, results = arithmetic
    types = [c_type(slot[0]) for slot in slots]
    low_bits = dtypes[0] is DType.INT16
    if low_bits:
        types[vectors] = types[0]
        results[0] = f"quieted({results[0]})"
    team = sizing.threads_for((10 + 2 * len(steps) + 6 * len(stochastic)) * sum(spec.size for spec in slots[0]))
    numbered = bool(stochastic)
    entries = lists + numbered
    written = [0, *range(2, vectors)]
    body = [
        f"const double v{vectors} = *in<float>(a, 2), v{vectors + 1} = *in<float>(a, 3);",
        f"(void)v{vectors}, (void)v{vectors + 1};",
        *(["const float clip = *in<float>(a, 4);"] if factor is not None else []),
        *scalars,
        *(
            f"const {template('Rounding', types[position], number in stochastic)} "
            f"round{position}({'in<i64>(a, 5)' if numbered else 'nullptr'}, {settings.get('stream', 0) + number}u);"
            for number, position in enumerate(written)
        ),
        f"over_blocks<{entries}, {team}>(a[0], in<i64>(a, 1), [&](i64, const Block<{entries}>& block) {{",
        *(f"{kind}* p{position} = block.template at<{kind}>({position});" for position, kind in enumerate(types)),
        f"const u32 start = {f'u32(reinterpret_cast<u64>(block.address[{lists}]))' if numbered else '0'};",
        "over_elements(block.count, [&](const auto& load, const auto& store, i64 j) {",
        "const u32 element = start + u32(j);",
        f"const vf v0 = {f'weight(load(p{vectors}), load(p0))' if low_bits else 'load(p0)'};",
        *(f"const vf v{position} = load(p{position});" for position in range(2, vectors)),
        f"const vf v1 = {'product(load(p1), clip)' if factor is not None else 'load(p1)'};",
        *steps,
        *(
            f"const vf new{position} = round{position}({result}, element);"
            for position, result in zip(written, results, strict=True)
        ),
        *(f"store(p{position}, new{position});" for position in written),
        *([f"store(p{vectors}, {'upper(new0)' if low_bits else 'new0'});"] if copies else []),
        "});",
        "});",
    ]

    def bind(function: int, ins: Tensors, outs: Tensors, work: Tensors) -> Launch:
        *given, others = split_update(ins, count)
        numbers = settings.get("numbers") or flat_offsets([tensor.numel() for tensor in given[0]])[0]
        table, begins = _table(given, sizing.block, team, numbers if numbered else None)
        arguments = [table.ctypes.data, begins.ctypes.data, *map(address, others)]
        return launch(function, arguments, (table, begins, given, others))

    return Native("\n".join(body), bind=bind)


def _global_norm(request: Request, sizing: Sizing) -> Native | None:
    """Blocks of one dtype after those of the other; every block's sum has its place in the workspace."""
    specs = [spec for spec in request.inputs if spec is not None]
    kinds = [dtype for dtype in (DType.FP32, DType.BF16) if any(spec.dtype is dtype for spec in specs)]
    if not specs:
        return None
    blocks = [sum(-(-spec.size // sizing.block) for spec in specs if spec.dtype is kind) for kind in kinds]
    team = sizing.threads_for(2 * sum(spec.size for spec in specs))
    lines, first = [], 0
    for position, (kind, count) in enumerate(zip(kinds, blocks, strict=True)):
        name = template("square_sums", c_type(TensorSpec((), kind)), team)
        table, begins = f"a[{2 * position}]", f"in<i64>(a, {2 * position + 1})"
        lines.append(call(name, table, begins, f"out<float>(a, {2 * len(kinds) + 1}) + {first}"))
        first += count
    partial, norm = f"in<float>(a, {2 * len(kinds) + 1})", f"out<float>(a, {2 * len(kinds)})"
    lines.append(call("root_of_sum", str(first), partial, norm))
    chosen = [[index for index, spec in enumerate(specs) if spec.dtype is kind] for kind in kinds]

    def bind(function: int, ins: Tensors, outs: Tensors, work: Tensors) -> Launch:
        tables = [_table([[ins[index] for index in group]], sizing.block, team) for group in chosen]
        arguments = [array.ctypes.data for pair in tables for array in pair]
        tensors = (outs[0], work[0])
        return launch(function, [*arguments, *map(address, tensors)], (tables, list(ins), tensors))

    return Native("\n".join(lines), [fp32(max(first, 1))], bind)


RULES: dict[str, Rule] = {"update": _update, "global_norm": _global_norm}
