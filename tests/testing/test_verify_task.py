"""task=verify through the command line: what passes, and a broken gradient that is caught and named."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.ttnn.runs import mlp
from ttrain.cli import main
from ttrain.device.torch.device import TorchDevice
from ttrain.graph import Node, Value, op
from ttrain.ops import scale
from ttrain.testing import check_model, check_ops

SMALL = ["model.layers=1", "model.width=32", "model.heads=2", "model.context=16", "model.vocabulary=29"]
WORDS = ["task=verify", "device=cpu", *SMALL]
MUST_COVER = ["embedding", "linear", "matmul", "softmax", "gelu", "layer_norm", "attention"]


def verified(capsys: pytest.CaptureFixture[str], *overrides: str, code: int = 0) -> str:
    assert main([*WORDS, *overrides]) == code
    out, err = capsys.readouterr()
    return out + err


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_op_and_the_model_pass_on_the_cpu(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, precision: str
) -> None:
    """In bf16 only the required ops are compared: tests/ops holds all of them to the same bounds."""
    chosen = f"verify.ops=[{','.join(MUST_COVER) if precision == 'bf16' else ''}]"
    text = verified(capsys, f"precision={precision}", chosen, f"verify.json={tmp_path}/found.json")
    assert "comparisons passed" in text and "FAIL" not in text
    found = json.loads((tmp_path / "found.json").read_text("utf-8"))
    assert found["passed"] and found["device"] == "cpu" and found["precision"] == precision
    quantities: dict[str, set[str]] = {}
    for one in found["comparisons"]:
        quantities.setdefault(one["subject"], set()).add(one["quantity"])
        assert {"largest", "mean", "ulp", "cosine", "passed", "case", "engine"} <= one.keys()
    assert set(MUST_COVER) <= quantities.keys()
    assert {"y", "dx", "dweight", "dbias"} <= quantities["linear"] and {"y", "dx"} <= quantities["gelu"]
    assert {"loss", "dembedding.weight"} <= quantities["nano-gpt"]


def test_what_plugins_call_passes() -> None:
    check_ops("gelu", "transpose")
    check_model(mlp(width=8, inputs=5, outputs=3))


@pytest.mark.slow
def test_engines_agree_with_one_another(capsys: pytest.CaptureFixture[str]) -> None:
    text = verified(capsys, "verify.engines=all", "verify.ops=[gelu,linear]")
    assert "static against dynamic" in text and "traced against dynamic" in text and "FAIL" not in text


@pytest.mark.parametrize(("name", "wrong"), [("embedding", "embedding dweight"), ("linear", "linear dx")])
def test_a_gradient_with_the_wrong_sign_is_caught_and_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, wrong: str
) -> None:
    right = op(name).vjp

    def flipped(node: Node, *gradients: Value | None) -> Sequence[Value | None]:
        first, *rest = right(node, *gradients)
        if name == "embedding":  # ids get none
            return [first, *(g if g is None else scale(g, -1.0) for g in rest)]
        return [None if first is None else scale(first, -1.0), *rest]

    monkeypatch.setattr(op(name), "vjp", flipped)
    text = verified(capsys, f"verify.ops=[{name},relu]", code=1)
    failures = text[text.index("verify: ") :]
    assert f"  {wrong} (" in failures and "points the other way" in failures
    assert "  relu" not in failures and "  nano-gpt d" in failures


def failing(*_: Any) -> Any:
    raise RuntimeError("no such instruction")


def doubled(ins: Sequence[Any], outs: Sequence[Any], *_: Any) -> Any:
    return lambda: outs[0].copy_(2 * ins[0])


@pytest.mark.parametrize(
    ("bind", "told"),
    [(failing, "tanh - (tanh-0) by engine static: RuntimeError: no such instruction"), (doubled, "  tanh y (tanh-")],
)
def test_a_kernel_that_fails_or_is_wrong_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, bind: Any, told: str
) -> None:
    table = dict(TorchDevice("cpu", threads=1).kernels)
    table["tanh"] = dataclasses.replace(table["tanh"], bind=bind, overwrites=())
    monkeypatch.setattr(TorchDevice, "kernels", table)
    assert told in verified(capsys, "verify.ops=[tanh,relu]", "verify.model=false", code=1)


def test_an_op_without_cases_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin's, such as the rule of an optimizer."""
    monkeypatch.setattr(op("tanh"), "cases", ())
    text = verified(capsys, f"verify.ops=[{op('tanh').family}]", "verify.model=false")
    assert "Without cases to run, so not verified: tanh." in text and "comparisons passed" in text
    text = verified(capsys, "verify.ops=[tanh]", "verify.model=false", code=2)
    assert "verify.ops=tanh: the op has no cases to run" in text and "Traceback" not in text


def test_an_mlp_and_recomputed_blocks_with_dropout_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert "passed" in verified(capsys, "verify.ops=none", "model.dropout=0.2", "model.recompute=block")
    assert main(["task=verify", "device=cpu", "model=mlp", "verify.ops=none", "model.activation=gelu"]) == 0


def test_a_tenstorrent_device_is_verified_by_reference_functions(capsys: pytest.CaptureFixture[str]) -> None:
    """By a plugin that registers it; the precision says how it holds matrices."""
    pytest.importorskip("ttnn", reason="the package ttnn is not installed")
    shown = verified(
        capsys, "plugins=[tests.ttnn.doubles.golden_device]", "device=golden", "precision=bf16", "model.context=32",
        "verify.ops=[matmul,norm,attention,embedding]",
    )  # fmt: skip
    assert "FAIL" not in shown


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["verify.ops=[gellu]"], "Did you mean 'gelu'?"),
        (["verify.ops=[none,gelu]"], "verify.ops=[none,gelu]: none takes no op."),
        (["device=null"], "computes no values"),
        (["verify.engines=some"], "verify.engines=some"),
        (["verify.tolerance=0"], "verify.tolerance=0"),
        (["verify.ops=[relu]", "verify.model=false", "verify.json=/nowhere/found.json"], "can't be written"),
    ],
    ids=lambda given: given if isinstance(given, str) else " ".join(given),
)
def test_bad_requests_are_one_line(capsys: pytest.CaptureFixture[str], overrides: list[str], message: str) -> None:
    assert message in verified(capsys, *overrides, code=2)
