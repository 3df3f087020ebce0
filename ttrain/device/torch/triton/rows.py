"""Rows of a GPU that Triton's kernels serve. What a kernel does not take runs by the row of aten."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ttrain.device.base import Kernel
from ttrain.device.torch.kernels.common import NARROW, ROWS, Bind, Call, Context, Tensor, kernel, spec_of
from ttrain.device.torch.kernels.experts import grouped_by_torch
from ttrain.device.torch.kernels.loss import HeadProducts
from ttrain.device.torch.loops import program_of
from ttrain.device.torch.triton.elementwise import BLOCK, EXPRESSIONS, TritonNest
from ttrain.device.torch.triton.launch import emit
from ttrain.device.torch.triton.updates import emit_update

_STORED = (torch.float32, *NARROW)
_WIDEST = 2**13  # elements of a row that the registers of a block of threads hold
# Elements of a tile of shorter rows. Several for each thread: one that loads again what another has loaded might find
# what that one has stored, where an output has the buffer of an input.
_TILE = 2**11
PARTS = 512  # sums of the gradients of a norm's parameters, at most: a few for each processor of a GPU
_TENSOR_CORES = (8, 0)  # compute capability from which Triton multiplies bf16 and fp16 on them
_SINGLE = ("dropout", "dropout_mask", "clip_factor", "squared_error_grad")  # which aten makes in several launches
Rule = Callable[[Call], bool]  # emits a node's launches; False, with nothing taken, where its kernel does not take it


def _takes(*tensors: Tensor | None) -> bool:
    """True if all tensors that are present have elements in fp32, bf16 or fp16, as many as int32 can count rows of."""
    return all(x is None or (x.dtype in _STORED and 0 < x.numel() < 2**31 * x.shape[-1]) for x in tensors)


def _sizes(x: Tensor) -> tuple[int, int, dict[str, int]]:
    """Return rows and width of x [..., width], and the constants of kernels that work on its tiles."""
    width = x.shape[-1]
    count, columns = x.numel() // width, min(max(_power(width), 32), _WIDEST)
    rows = max(1, _TILE // columns)
    sizes = {"COUNT": count, "WIDTH": width, "ROWS": rows, "COLUMNS": columns, "warps": rows * columns // 512}
    return count, width, sizes


def _power(size: int) -> int:
    """Return the least power of two that is not below a size."""
    return 1 << (size - 1).bit_length()


def _norm(call: Call, added: bool, centred: bool) -> bool:
    """Normalise by layer, or by RMS where not `centred`, after a residual sum where `added`."""
    (x, *ins), outs = call.ins, list(call.outs)
    branch, total = (ins.pop(0), outs.pop(0)) if added else (None, None)
    weight, bias, (y, *statistics) = ins[0], ins[1] if centred else None, outs
    if not _takes(x, branch, weight, bias) or x.shape[-1] > _WIDEST:
        return False
    count, _, sizes = _sizes(x)
    read = {"x": x, "branch": branch, "weight": weight, "bias": bias}
    written = {"total": total, "y": y, "mean": statistics[0] if centred else None, "rstd": statistics[-1]}
    emit(call, "norm", read, written, [_parts(count, sizes["ROWS"])], EPS=call.attributes["eps"], **sizes)
    return True


def _norm_grad(call: Call, centred: bool) -> bool:
    """dx, and sums over parts of the rows; then the sums of those."""
    dy, x, *statistics, weight, residual = call.ins
    dx, dweight, dbias = (*call.outs, None)[:3]
    if not _takes(dy, x, weight, residual) or x.shape[-1] > _WIDEST:
        return False
    (count, width, sizes), sums_of = _sizes(x), 1 if dbias is None else 2
    part = _parts(_parts(count, PARTS), sizes["ROWS"]) * sizes["ROWS"]
    parts = _parts(count, part)
    sums = call.scratch((sums_of, parts, width), torch.float32)
    read = {"dy": dy, "x": x, "mean": statistics[0] if centred else None, "rstd": statistics[-1]}
    read |= {"weight": weight, "residual": residual}
    emit(call, "norm_grad", read, {"dx": dx, "sums": sums}, [parts], PART=part, BIASED=sums_of == 2, **sizes)
    written, grid = {"dweight": dweight, "dbias": dbias}, [_parts(width, 32), sums_of]
    emit(call, "add_parts", {"sums": sums}, written, grid, PARTS=parts, WIDTH=width, ROWS=64, COLUMNS=32)
    return True


def _rotary(call: Call) -> bool:
    """Turn the features of all heads."""
    x, cos, sin = call.ins
    heads, pairs = call.attributes["heads"], cos.shape[-1]
    width, count = x.shape[2] // heads, x.shape[0] * x.shape[1] * heads
    if not _takes(x, cos, sin) or cos.dtype is not torch.float32 or width > _WIDEST or count >= 2**31:
        return False
    columns = _power(pairs)
    rows, rest = max(1, _TILE // 2 // columns), width - 2 * pairs
    sizes = {"COUNT": count, "HEADS": heads, "WIDTH": width, "PLACES": cos.numel() // pairs, "PAIRS": pairs}
    sizes |= {"SIGN": -1 if call.attributes["inverse"] else 1, "ROWS": rows, "COLUMNS": columns}
    sizes |= {"REST": _power(rest) if rest else 0}
    emit(call, "rotary", {"x": x, "cos": cos, "sin": sin}, {"y": call.outs[0]}, [_parts(count, rows)], **sizes)
    return True


def _losses(call: Call, x: Tensor, targets: Tensor, weight: Tensor, smoothing: float = 0, **others: Tensor) -> None:
    """Losses of rows of logits x, their gradients, or both: what `others` name of the kernel's tensors."""
    (count, _, sizes), each = _sizes(x), int(weight.numel() > 1)
    read = {"logits": x, "targets": targets, "weight": weight}
    written = {name: others.get(name) for name in ("log_sum_exp", "loss", "plain", "dlogits")}
    emit(call, "cross_entropy", read, written, [_parts(count, sizes["ROWS"])], EACH=each, SMOOTHING=smoothing, **sizes)


def _cross_entropy(call: Call) -> None:
    losses = call.scratch(call.ins[1].shape, torch.float32)
    _losses(call, *call.ins, loss=losses, log_sum_exp=call.outs[1])
    call.emit(torch.sum, losses, (0,), out=call.outs[0])


def _cross_entropy_grad(call: Call) -> None:
    logits, targets, log_sum_exp, weight = call.ins
    _losses(call, logits, targets, weight, log_sum_exp=log_sum_exp, dlogits=call.outs[0])


def _head_cross_entropy(call: Call) -> None:
    """Losses of a chunk of rows, and the gradients of its logits in their place, in one launch."""
    (_, _, targets, weight, _), smoothing = call.ins, call.attributes["smoothing"]
    losses = {name: call.scratch(targets.shape, torch.float32) for name in ("loss", "plain")[: 1 + bool(smoothing)]}
    head = HeadProducts(call, None)
    for chunk, logits in head.chunks():
        others = {name: each[chunk] for name, each in losses.items()} | ({"dlogits": logits} if head.made else {})
        own = weight[chunk] if weight.numel() > 1 else weight
        _losses(call, logits, targets[chunk], own, smoothing, **others)
    for total, each in zip(call.outs, losses.values(), strict=False):
        call.emit(torch.sum, each, (0,), out=total)


def _loss(call: Call, rule: Bind) -> bool:
    if taken := _takes(call.ins[0]):
        rule(call)
    return taken


def _grouped(call: Call, outer: bool) -> bool:
    """Multiply the panels of rows of all experts, unless torch has one kernel for them."""
    (a, b, offsets), y = call.ins, call.outs[0]
    narrow, cores = a.dtype in NARROW, call.context.capability >= _TENSOR_CORES
    if grouped_by_torch(call) or not _takes(a, b) or (narrow and not cores):
        return False
    call.way, experts, width = "triton", len(offsets) - 1, y.shape[-1]
    tile = {"ROWS": 64, "COLUMNS": 128 if narrow else 64, "DEPTH": 32}
    down = experts * _parts(a.shape[1], tile["ROWS"]) if outer else len(a) // tile["ROWS"] + experts
    sizes = {"OUTER": outer, "TRANSPOSED": call.attributes.get("transpose", False), "EXPERTS": experts}
    sizes |= {"SLOTS": _power(experts), "LENGTH": a.shape[1], "WIDTH": width, **tile}
    precision = "tf32" if torch.get_float32_matmul_precision() == "high" else "ieee"
    grid = [down * _parts(width, tile["COLUMNS"])]
    emit(call, "grouped_product", {"a": a, "b": b, "offsets": offsets}, {"y": y}, grid, PRECISION=precision, **sizes)
    return True


def _program(call: Call, op: str) -> bool:
    """Op fused, or one other op as a program of one step."""
    ins, specs = call.ins, [None if x is None else spec_of(x) for x in call.ins]
    found = program_of(op, specs, call.attributes, EXPRESSIONS)
    floats = [x for x in (*ins, *call.outs) if x is not None and x.dtype is not torch.int64]
    if found is None or not all(x.dtype in _STORED and x.numel() for x in floats):
        return False
    nest = TritonNest(specs, *found, [spec_of(y) for y in call.outs])
    written = {f"y{item}": y for item, y in enumerate(call.outs)}
    size = call.outs[0].numel()
    read = {f"x{item}": ins[item] for item in nest.read}
    emit(call, nest.source(), read, written, [_parts(size, BLOCK)], SIZE=size)
    return True


def _parts(count: int, size: int) -> int:
    return -(-count // size)


RULES: dict[str, Rule] = {
    "layer_norm": partial(_norm, added=False, centred=True),
    "add_layer_norm": partial(_norm, added=True, centred=True),
    "rms_norm": partial(_norm, added=False, centred=False),
    "add_rms_norm": partial(_norm, added=True, centred=False),
    "layer_norm_grad": partial(_norm_grad, centred=True),
    "rms_norm_grad": partial(_norm_grad, centred=False),
    "rotary": _rotary,
    "update": emit_update,
    "cross_entropy": partial(_loss, rule=_cross_entropy),
    "cross_entropy_grad": partial(_loss, rule=_cross_entropy_grad),
    "head_cross_entropy": partial(_loss, rule=_head_cross_entropy),
    "grouped_matmul": partial(_grouped, outer=False),
    "grouped_outer": partial(_grouped, outer=True),
    **{op: partial(_program, op=op) for op in ("fused", *_SINGLE)},
}


def _bound(rule: Rule, base: Bind | None, call: Call) -> None:
    if not rule(call):
        assert base is not None, f"no kernel takes {call.attributes}"
        base(call)


def triton_rows(context: Context) -> dict[str, Kernel]:
    """Return the rows of Triton's kernels, each with that of aten behind it."""
    rows = {}
    for op, rule in RULES.items():
        base, facts = (ROWS[op].args[0], ROWS[op].keywords) if op in ROWS else (None, dict[str, Any]())
        rows[op] = kernel(partial(_bound, rule, base), context, **facts)
    return rows
