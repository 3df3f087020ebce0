"""Rules of mixtures of experts. Products know the heights of panels only when they run: one function serves all."""

from __future__ import annotations

from ttrain.core.spec import DType
from ttrain.device.torch.native.codegen import Request, c_type, call, template
from ttrain.device.torch.native.native import Native, Rule, Sizing, fp32, one_call
from ttrain.device.torch.native.products import scratch_size, threads_of

_LONGEST = 2**12  # of an inner axis: longer ones need no more scratch


def _choice(request: Request, sizing: Sizing) -> Native:
    """Treat each row of scores [N, E] by itself; the other operand is [N, K]."""
    given, made = request.input(0), request.outputs[0]
    scores, chosen = (made, given) if request.op == "scatter" else (given, made)
    sizes = *scores.shape, chosen.shape[1]
    return one_call(request, request.op, (c_type(scores), *sizes, sizing.threads_for(scores.size)))


def _sort_by_expert(request: Request, sizing: Sizing) -> Native:
    return one_call(request, request.op, (request.input(0).size, request.settings["count"]))


def _moved(request: Request, sizing: Sizing) -> Native:
    """Copy rows to pairs or add up those of a token; the pointer to the order or the places is the one that is read."""
    x, y, read = request.input(0), request.outputs[0], 1 if request.op == "dispatch" else 2
    kind, (rows, width), weighted = c_type(x), y.shape, request.has(3)
    given = [f"in<{kind}>(a, 0)", f"in<i64>(a, {read})", "in<float>(a, 3)", f"out<{kind}>(a, 4)"]
    threads = sizing.threads_for(max(x.size, y.size))
    arguments = (kind, weighted, rows, request.input(2).shape[1], width, threads)
    return one_call(request, request.op, arguments, pointers=given)


def _row_products(request: Request, sizing: Sizing) -> Native:
    dy, rows = request.input(0), request.input(1)
    arguments = (c_type(dy), *request.outputs[0].shape, dy.shape[1], sizing.threads_for(2 * rows.size))
    return one_call(request, request.op, arguments)


def _grouped(request: Request, sizing: Sizing) -> Native | None:
    """One product for each expert, by all threads."""
    a, kind, outer = request.input(0), c_type(request.input(0)), request.op == "grouped_outer"
    experts, turned = request.input(2).shape[0] - 1, request.settings.get("transpose", False)
    rows, inner = a.shape
    n = request.input(1).shape[1] if outer else request.outputs[0].shape[1]
    if not sizing.products or (a.dtype is DType.BF16 and inner % 2 and not outer):
        return None
    m, k, longest = (inner, 0, rows) if outer else (0, inner, inner)
    threads, own = threads_of(m or rows, n, longest, a.dtype, sizing), max(map(scratch_size, (longest, _LONGEST)))
    name = template(request.op, kind) if outer else template(request.op, turned, kind)
    sizes = f"Sizes{{{m}, {n}, {k}, {inner}, {k if turned else n}, {n}}}"
    given = [f"in<{kind}>(a, 0)", f"in<{kind}>(a, 1)", "in<i64>(a, 2)", f"out<{kind}>(a, 3)", "out<float>(a, 4)"]
    return Native(call(name, str(experts), sizes, *given, str(own), str(threads)), [fp32(threads, own)])


RULES: dict[str, Rule] = {
    **dict.fromkeys(("top_k", "gather", "scatter"), _choice),
    "sort_by_expert": _sort_by_expert,
    **dict.fromkeys(("dispatch", "combine"), _moved),
    "row_products": _row_products,
    **dict.fromkeys(("grouped_matmul", "grouped_outer"), _grouped),
}
