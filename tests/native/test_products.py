"""fp32 products of odd shapes in the vectors of every kind of processor that this one can stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.native.test_amx import SHAPES, TURNS, Form, Problem
from ttrain.core import processor
from ttrain.core.errors import UserError
from ttrain.device.torch.native.codegen import library_sources
from ttrain.device.torch.native.threads import join_pool
from ttrain.device.torch.native.toolchain import Toolchain

FORMS = [
    *(Form(*turns, kind="float", read="float") for turns in TURNS),
    Form(True, False, adding=True, kind="float", read="float"),
    Form(False, True, bias=True, after="gelu", kind="float", read="float"),
]


@pytest.mark.parametrize("kind", ["native", "x86-64-v3"])
def test_products_of_any_shape_are_those_of_fp64(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(processor.VARIABLE, kind)
    try:
        processor.march()
    except UserError as error:
        pytest.skip(str(error))
    library = Toolchain(folder).load(library_sources([form.body for form in FORMS], 2))
    join_pool(library, 3)
    for form in FORMS:
        for m, n, even in SHAPES:
            for k in (even, even - 1):
                problem = Problem.draw(m, n, k, form.dtype)
                first = problem.run(library, form, 1, False, 0)
                error = (first.double() - problem.expected(form)).abs()
                assert bool((error <= problem.limit(form)).all()), (form, m, n, k, float(error.max()))
                for threads, at_end, gap in ((1, True, 2), (2, True, 0), (3, False, 5)):
                    found = problem.run(library, form, threads, at_end, gap)
                    assert torch.equal(first, found), (form, m, n, k, threads)
