"""Shape rules: what each op refuses, and that the message says what was given and what was expected."""

from __future__ import annotations

import re
from typing import Any

import pytest

import ttrain.ops  # noqa: F401 - fills the registry
from tests.ops.harness import cases_of, input_specs
from tests.ttnn.runs import adamw, sgd
from ttrain.core.attention_mask import AttentionMask
from ttrain.core.errors import GraphError, ShapeError
from ttrain.core.shapes import Shapes
from ttrain.core.spec import DType, TensorSpec
from ttrain.graph import REGISTRY, Case
from ttrain.optim.base import EXAMPLE
from ttrain.testing.cases import _drawn


def fp32(*shape: int) -> TensorSpec:
    return TensorSpec(shape, DType.FP32)


def bf16(*shape: int) -> TensorSpec:
    return TensorSpec(shape, DType.BF16)


def int64(*shape: int) -> TensorSpec:
    return TensorSpec(shape, DType.INT64)


HEADS: dict[str, Any] = {"heads": 2, "scale": 0.5, "mask": AttentionMask()}
NONE = [None] * 5  # k, v, bias, seed and positions of a packed projection
ADAMW: dict[str, Any] = {"count": 1, "rule": adamw().rule(EXAMPLE, True)}
SGD: dict[str, Any] = {"count": 1, "rule": sgd().rule(EXAMPLE, True)}
RATES = [fp32(), fp32(), None]  # lr, step, and no clip factor
TWO_RELUS = (("relu", (0,), ()), ("relu", (1,), ()))
HEAD = {"smoothing": 0.1, "live": 6, "gradients": True}
ROUNDED: dict[str, Any] = {"stochastic": (0,), "stream": 0}
BINARY = ("add", "subtract", "multiply", "divide", "maximum", "greater")
UNARY = ("exp", "expm1", "log", "sqrt", "sin", "cos", "sigmoid", "erf", "sign", "relu", "tanh", "silu", "log_sigmoid")
# (op, inputs, attributes, what the message has to name)
REFUSED: list[tuple[str, list[Any], dict[str, Any], str]] = [
    *((name, [fp32(4, 8), fp32(4, 7)], {}, "broadcast") for name in BINARY),
    ("add", [fp32(4), int64(4)], {}, "floating-point"),
    *((name, [int64(4)], {}, "floating-point") for name in UNARY),
    ("scale", [int64(4)], {"factor": 2.0}, "floating-point"),
    ("gelu", [int64(4)], {"approximate": "none"}, "floating-point"),
    ("cast", [fp32(4)], {"dtype": DType.INT64}, "floating-point"),
    ("reshape", [fp32(4, 3)], {"shape": (5, 2)}, "12 elements"),
    ("copy_reshape", [fp32(4, 3)], {"shape": (5, 2)}, "12 elements"),
    ("expand", [fp32(2, 3)], {"shape": (4, 3)}, "growing only axes of size one"),
    ("expand", [fp32(1, 3)], {"shape": (3,)}, "same rank"),
    ("transpose", [fp32(4)], {}, "x fp32[..., M, N]"),
    ("split_heads", [fp32(2, 4, 7)], {"parts": 3, "heads": 2}, "multiple of 3 parts x 2 heads"),
    ("reduce_sum", [fp32(2, 3)], {"axes": (2,)}, "axes from 0 to 1"),
    ("reduce_sum", [fp32(2, 3)], {"axes": (0, 0)}, "different axes"),
    ("reduce_max", [fp32(2, 3)], {"axes": (2,)}, "axes from 0 to 1"),
    ("global_norm", [], {}, "at least one"),
    ("block_norms", [fp32(4, 8)], {"places": (0, 1), "total": 4, "block": 32}, "1 places"),
    ("matmul", [fp32(2, 3), fp32(2, 3)], {"transpose_a": False, "transpose_b": False}, "inner sizes, not 3 and 2"),
    ("rotary", [fp32(2, 5, 8), fp32(5, 3), fp32(5, 3)], {"heads": 2}, "at most one pair for two features"),
    ("softmax", [fp32(4, 5)], {"scale": 1.0, "mask": AttentionMask()}, "[..., T, T]"),
    ("softmax", [fp32(4, 4)], {"scale": 1.0, "mask": AttentionMask("pairs", "future")}, "[..., heads, T, T]"),
    ("log_sum_exp", [fp32(2, 4, 5)], {"scale": 1.0, "mask": AttentionMask()}, "[..., T, T]"),
    ("attention", [fp32(2, 5, 25), *NONE], HEADS, "multiple of 3 parts x 2 heads"),
    ("attention", [fp32(2, 5, 24), *NONE], {**HEADS, "p": 0.1}, "a seed"),
    ("attention", [fp32(2, 5, 24), *NONE], {**HEADS, "kv_heads": 1}, "Give q, k and v apart"),
    ("attention", [fp32(2, 5, 8), fp32(2, 5, 8), *NONE[1:]], HEADS, "both, or none"),
    ("attention", [fp32(2, 5, 8), fp32(2, 5, 8), fp32(2, 5, 9), *NONE[2:]], HEADS, "multiple of 1 parts x 2 heads"),
    ("attention", [*[fp32(2, 5, 8)] * 3, *NONE[2:]], {**HEADS, "kv_heads": 3}, "a multiple of kv_heads"),
    ("attention", [*[fp32(2, 5, 8)] * 3, *NONE[2:]], {**HEADS, "kv_heads": 1}, "1 heads as wide as q's"),
    ("attention", [*[fp32(2, 5, 8)] * 3, fp32(2, 3, 5, 5), *NONE[3:]], HEADS, "[1 or 2, 1 or 2, 5, 5]"),
    ("valid", [fp32(4)], {}, "ids int64[...]"),
    ("top_k", [fp32(4, 3)], {"count": 4}, "1 to 3"),
    ("scatter", [fp32(4, 2), int64(4, 3)], {"count": 5}, "int64[4, 2]"),
    ("gather", [fp32(4, 5), int64(3, 2)], {}, "int64[4, K]"),
    ("sort_by_expert", [int64(4)], {"count": 3}, "int64[N, K]"),
    ("dispatch", [fp32(4, 8), int64(8), int64(3, 2), None], {}, "int64[4, K]"),
    ("combine", [fp32(8, 3), int64(7), int64(4, 2), None], {}, "int64[8]"),
    ("row_products", [fp32(4, 8), fp32(8, 7), int64(4, 2)], {}, "rows fp32[M, 8]"),
    ("grouped_matmul", [fp32(6, 8), fp32(3, 5, 8), int64(3)], {"transpose": True}, "4 offsets"),
    ("grouped_matmul", [fp32(6, 8), fp32(3, 5, 8), int64(4)], {"transpose": False}, "rows of 5"),
    ("grouped_outer", [fp32(6, 8), fp32(5, 4), int64(3)], {}, "b fp32[6, Q]"),
    ("head_matmul", [fp32(2, 5, 8), fp32(4, 3)], {"heads": 3, "transpose": False}, "3 heads of 4"),
    ("head_product", [fp32(2, 5, 8), fp32(2, 5, 9)], {"heads": 2}, "multiples of 2 heads"),
    ("index_select", [fp32(2, 5, 8)], {"indices": (1, 5)}, "different ones from 0 to 4"),
    ("index_select", [fp32(2, 5, 8)], {"indices": (1, 1)}, "different ones"),
    ("index_put", [fp32(2, 3, 8)], {"indices": (0, 1), "size": 5}, "2 rows, as there are indices"),
    ("dropout", [fp32(4), fp32()], {"p": 0.1, "stream": 0}, "int64[]"),
    ("dropout", [fp32(4), int64()], {"p": 1.0, "stream": 0}, "below 1"),
    ("token_windows", [int64(4), fp32(9)], {"length": 3}, "integers"),
    ("token_windows", [int64(4), int64(9)], {"length": 9}, "at least one more"),
    ("head_cross_entropy", [fp32(4, 3), fp32(5, 3), int64(4), fp32(4), None], HEAD, "1 to 5 ids"),
    ("head_cross_entropy", [fp32(4, 3), fp32(7, 3), int64(4), fp32(), None], {**HEAD, "smoothing": 1.0}, "below 1"),
    ("update", [fp32(4), fp32(4), fp32(4), fp32(5), *RATES, None], ADAMW, "one shape per parameter"),
    ("update", [fp32(4), fp32(4), fp32(4), *RATES, None], ADAMW, "4 lists of 1 and 4 scalars"),
    ("update", [fp32(4), fp32(5), *RATES, None], SGD, "one shape per parameter"),
    ("update", [*[fp32(4)] * 4, bf16(5), *RATES, None], ADAMW | {"copies": True}, "one shape per parameter"),
    ("update", [*[bf16(4)] * 4, *RATES, None], ADAMW | ROUNDED, "int64[] where a list is named"),
    ("update", [*[bf16(4)] * 4, *RATES, int64()], ADAMW, "int64[] where a list is named"),
    ("update", [bf16(4), bf16(4), *RATES, int64()], SGD | {"stochastic": (1,)}, "numbers below 1"),
    ("fused", [fp32(4), fp32(2, 4)], {"program": TWO_RELUS, "results": (0, 1)}, "one shape"),
    ("all_reduce", [int64(4)], {}, "floating-point"),
]
OVER_RANKS = {
    "all_gather",
    "reduce_scatter",
    "exchange_done",
    "all_reduce_state",
    "all_reduce_start",
    "reduce_scatter_start",
    "collectives_done",
    "all_gather_state",
}
ANYTHING_GOES = {"full", *OVER_RANKS}


DECLARED = [op for op in REGISTRY.values() if getattr(op, "shapes", None) and op.shapes.text]  # type: ignore[attr-defined]


def test_every_op_with_a_rule_is_listed() -> None:
    rules = {op.name for op in REGISTRY.values() if op.family == "rule"}
    assert {name for name, *_ in REFUSED} | {op.name for op in DECLARED} | ANYTHING_GOES | rules >= set(REGISTRY)


@pytest.mark.parametrize("op", DECLARED, ids=lambda op: op.name)
def test_an_op_takes_the_shapes_that_it_declares_alone(op: Any) -> None:
    """No input may have an axis more, but for one with any axes that no other has, nor other numbers than integers."""
    axes = {name: found.strip("[]").split(", ") for name, found in re.findall(r"(\w+) \w* ?(\[.*?\])", op.shapes.text)}
    for case in cases_of(op):
        given = input_specs(op, case, DType.FP32)
        for name in axes.keys() & given.keys():
            spec, others = given[name], {axis for other in axes for axis in axes[other] if other != name}
            wrong = [spec.with_dtype(DType.FP32)] if spec is not None and name in op.shapes.integers else []
            if spec is not None and ("..." not in axes[name] or others.intersection(axes[name])):
                wrong.append(spec.with_shape(*spec.shape, 3))
            for changed in wrong:
                with pytest.raises(ShapeError, match=rf"^{op.name}: got .*, expected \w+ .*It takes"):
                    op.infer_outputs([*{**given, name: changed}.values()], case.attributes)


@pytest.mark.parametrize(("name", "specs", "attributes", "expected"), REFUSED)
def test_bad_shapes_are_refused_with_what_was_expected(
    name: str, specs: list[Any], attributes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ShapeError) as refused:
        REGISTRY[name].infer_outputs(specs, attributes)
    message = str(refused.value)
    assert message.startswith(f"{name}: got ")
    assert "expected" in message
    assert expected in message


MASKS: dict[str, dict[str, Any]] = {
    "mask=none, expected one of causal, pairs, full": {"name": "none"},
    "position_bias=near, expected one of none, future, distance": {"position_bias": "near"},
    "window=0, expected at least 1": {"window": 0},
}


@pytest.mark.parametrize("said", MASKS)
def test_an_unknown_attention_mask_is_refused(said: str) -> None:
    with pytest.raises(ShapeError, match=said):
        AttentionMask(**MASKS[said])


@pytest.mark.parametrize("text", ["x[..., C]", "y [C]", "x int7 [C]", "x [C],"])
def test_shapes_that_can_not_be_read_or_are_of_other_inputs_are_refused(text: str) -> None:
    with pytest.raises(ShapeError, match=rf"got '{re.escape(text)}', expected as in .* of the inputs x, z\."):
        Shapes(text, ("x", "z"))


def test_a_letter_stands_for_one_size() -> None:
    square = Shapes("x [..., T, T], y [...] or [T]", ("x", "y"))
    square.check("op", {"x": [fp32(2, 3, 3)], "y": [fp32(2)]})
    square.check("op", {"x": [fp32(4, 4)], "y": [fp32()]})
    for x, y in ((fp32(2, 3, 4), fp32(2)), (fp32(2, 3, 3), fp32(4)), (fp32(3), fp32())):
        with pytest.raises(ShapeError):
            square.check("op", {"x": [x], "y": [y]})


def test_a_case_without_shapes_is_of_an_op_that_declares_them() -> None:
    with pytest.raises(GraphError, match="global_norm: it declares no shapes"):
        list(_drawn(REGISTRY["global_norm"], Case()))
